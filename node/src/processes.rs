//! Processes, told apart for as long as we know them.
//!
//! A PID names whoever has it now. So each process that NVML tells of is held by a pidfd: while that says it lives, its PID
//! can't be another's, and a signal through it reaches it or nobody. NVML's list is a little old when we read it; a process
//! that started after NVML was asked isn't the one that it told of.

use std::{
    collections::{HashMap, HashSet},
    fs,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use gpufence_cdi::process::start_time;
use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    time::{ClockId, clock_gettime},
    unistd::{SysconfVar, sysconf},
};

use crate::cgroup;

/// All that NVML told of.
#[derive(Debug, Default)]
pub struct Processes {
    known: HashMap<u32, Process>,
    last: u64,
    unified: bool,
}

/// One that lives, or did when it was last looked at.
#[derive(Debug)]
pub struct Process {
    /// A number of its own.
    pub number: u64,
    /// Its cgroup's path.
    pub cgroup: String,
    handle: OwnedFd,
}

/// A time as `/proc/PID/stat` has it: clock ticks since the machine started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticks(u64);

impl Ticks {
    /// Now.
    pub fn now() -> nix::Result<Self> {
        let time = clock_gettime(ClockId::CLOCK_BOOTTIME)?;
        let in_second = sysconf(SysconfVar::CLK_TCK)?.and_then(|ticks| u64::try_from(ticks).ok()).unwrap_or(100);
        let (seconds, nanoseconds) = (time.tv_sec().cast_unsigned(), time.tv_nsec().cast_unsigned());
        Ok(Self(seconds * in_second + nanoseconds * in_second / 1_000_000_000))
    }
}

impl Processes {
    /// None yet, on a machine of such cgroups.
    pub fn new(unified: bool) -> Self {
        Self { unified, ..Self::default() }
    }

    /// Forgets those that have ended, and those that NVML doesn't tell of any more.
    pub fn forget(&mut self, told: &HashSet<u32>) -> nix::Result<()> {
        self.known.retain(|pid, _| told.contains(pid));
        let pids: Vec<u32> = self.known.keys().copied().collect();
        let mut handles: Vec<PollFd<'_>> =
            pids.iter().map(|pid| PollFd::new(self.known[pid].handle.as_fd(), PollFlags::POLLIN)).collect();
        poll(&mut handles, PollTimeout::ZERO)?;
        // Readable: it has ended (pidfd_open(2)).
        let ended: Vec<u32> =
            pids.iter().zip(&handles).filter(|(_, handle)| handle.any() != Some(false)).map(|(pid, _)| *pid).collect();
        for pid in ended {
            self.known.remove(&pid);
        }
        Ok(())
    }

    /// The process of a PID that NVML told of when it was asked at `asked`. `None`: it has ended, or that one has.
    pub fn of(&mut self, pid: u32, asked: Ticks) -> nix::Result<Option<&Process>> {
        if !self.known.contains_key(&pid) {
            let Some(handle) = open(pid)? else { return Ok(None) };
            let Some((started, cgroup)) = describe(pid, self.unified) else { return Ok(None) };
            // What was read was this one's, since it lives still.
            if started >= asked || has_ended(&handle)? {
                return Ok(None);
            }
            self.last += 1;
            self.known.insert(pid, Process { number: self.last, cgroup, handle });
        }
        Ok(self.known.get(&pid))
    }

    /// Ends the process of a number. `false`: it has ended by itself.
    pub fn end(&self, number: u64) -> nix::Result<bool> {
        let Some(process) = self.known.values().find(|process| process.number == number) else { return Ok(false) };
        end(&process.handle)
    }

    /// The PID of a process, for the log.
    pub fn pid(&self, number: u64) -> Option<u32> {
        self.known.iter().find(|(_, process)| process.number == number).map(|(pid, _)| *pid)
    }
}

/// Ends a process. `false`: it has ended by itself.
pub fn end(handle: &OwnedFd) -> nix::Result<bool> {
    match kill(handle) {
        Ok(()) => Ok(true),
        Err(Errno::ESRCH) => Ok(false),
        Err(error) => Err(error),
    }
}

/// When a process started, and its cgroup's path.
fn describe(pid: u32, unified: bool) -> Option<(Ticks, String)> {
    let start = Ticks(start_time(pid)?);
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    Some((start, cgroup::path(&cgroup, unified)?.to_owned()))
}

/// Whether a process has ended.
pub fn has_ended(handle: &OwnedFd) -> nix::Result<bool> {
    let mut handles = [PollFd::new(handle.as_fd(), PollFlags::POLLIN)];
    poll(&mut handles, PollTimeout::ZERO)?;
    Ok(handles[0].any() != Some(false))
}

/// pidfd_open(2). `None`: there is no such process.
#[allow(unsafe_code, reason = "one-line wrapper")]
pub fn open(pid: u32) -> nix::Result<Option<OwnedFd>> {
    // SAFETY: it takes two numbers, and gives a descriptor that is ours alone.
    let answer = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    match Errno::result(answer) {
        // SAFETY: as above.
        Ok(handle) => Ok(i32::try_from(handle).ok().map(|handle| unsafe { OwnedFd::from_raw_fd(handle) })),
        // EINVAL: a thread that leads no process, or no PID at all.
        Err(Errno::ESRCH | Errno::EINVAL) => Ok(None),
        Err(error) => Err(error),
    }
}

/// pidfd_send_signal(2) with SIGKILL.
#[allow(unsafe_code, reason = "one-line wrapper")]
fn kill(handle: &OwnedFd) -> nix::Result<()> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is a pidfd, and no siginfo is allowed to be null.
    Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_send_signal, handle.as_raw_fd(), libc::SIGKILL, none, 0) })
        .map(drop)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn sleeper() -> Child {
        let child = Command::new("sleep").arg("100").spawn().unwrap();
        // Ticks are as fine as 10 ms.
        std::thread::sleep(std::time::Duration::from_millis(20));
        child
    }

    fn told(pids: &[u32]) -> HashSet<u32> {
        pids.iter().copied().collect()
    }

    #[test]
    fn one_that_lives_is_ended_and_then_forgotten() {
        let (mut child, mut processes) = (sleeper(), Processes::new(cgroup::is_unified()));
        let process = processes.of(child.id(), Ticks::now().unwrap()).unwrap().unwrap();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        assert_eq!(Some(process.cgroup.as_str()), cgroup::path(&own, cgroup::is_unified()));
        let number = process.number;
        assert!(processes.end(number).unwrap());
        child.wait().unwrap();
        assert!(!processes.end(number).unwrap(), "it has ended");
        processes.forget(&told(&[child.id()])).unwrap();
        assert!(processes.known.is_empty());
        assert_eq!(processes.of(child.id(), Ticks::now().unwrap()).unwrap().map(|process| process.number), None);
    }

    #[test]
    fn one_that_started_after_nvml_was_asked_is_another() {
        let asked = Ticks::now().unwrap();
        let (mut child, mut processes) = (sleeper(), Processes::new(cgroup::is_unified()));
        assert!(processes.of(child.id(), asked).unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// The PID of one that was known goes to another, which must not be taken for it.
    #[test]
    fn a_pid_that_is_used_again() {
        let mut processes = Processes::new(cgroup::is_unified());
        let mut first = sleeper();
        let pid = first.id();
        let number = processes.of(pid, Ticks::now().unwrap()).unwrap().unwrap().number;
        first.kill().unwrap();
        first.wait().unwrap();
        let mut second = with_pid(pid);
        assert_eq!(second.id(), pid);
        assert!(!processes.end(number).unwrap());
        assert_eq!(second.try_wait().unwrap(), None, "the other one lives");
        processes.forget(&told(&[pid])).unwrap();
        let process = processes.of(pid, Ticks::now().unwrap()).unwrap();
        assert!(process.is_none_or(|process| process.number != number));
        second.kill().unwrap();
        second.wait().unwrap();
    }

    /// A process with that PID, which is free.
    fn with_pid(pid: u32) -> Child {
        for _ in 0..10_000 {
            // The next process gets the next PID; others may come between.
            fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).unwrap();
            let mut child = Command::new("sleep").arg("100").spawn().unwrap();
            if child.id() == pid {
                return child;
            }
            child.kill().unwrap();
            child.wait().unwrap();
        }
        panic!("PID {pid} was not to be had");
    }
}
