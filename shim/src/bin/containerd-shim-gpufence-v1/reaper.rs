//! Exits of our children: runc's, and the containers' processes, whose subreaper we are.
//!
//! One `waitpid(-1)` loop sees them all, so nobody else may wait. An exit may come before anybody asks for it: a
//! container's process is known only from its pid file. While a [`Birth`] is open, exits of unknown pids are kept.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::{errno::Errno, libc};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use crate::Failure;

#[derive(Clone, Default)]
pub struct Reaper(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    waiting: HashMap<i32, oneshot::Sender<i32>>,
    births: usize,
    early: HashMap<i32, i32>,
}

/// Keeps exits of pids that nobody has asked for yet, until dropped.
pub struct Birth(Reaper);

impl Reaper {
    /// Starts to reap.
    pub fn start() -> Result<Self, Failure> {
        let reaper = Self::default();
        let mut signals = signal(SignalKind::child())?;
        let reaping = reaper.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                reaping.reap();
            }
        });
        Ok(reaper)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reap(&self) {
        loop {
            let (pid, status) = match wait_for_any() {
                Ok((0, _)) | Err(Errno::ECHILD) => return,
                Ok(exit) => exit,
                Err(Errno::EINTR) => continue,
                Err(error) => return log::error!("waitpid: {error}"),
            };
            let mut state = self.state();
            if let Some(waiting) = state.waiting.remove(&pid) {
                let _ = waiting.send(status);
            } else if state.births > 0 {
                state.early.insert(pid, status);
            }
        }
    }

    /// Keeps early exits until what is returned is dropped.
    pub fn birth(&self) -> Birth {
        self.state().births += 1;
        Birth(self.clone())
    }

    /// The exit status of a child, once it has one: its code, or 128 and the signal.
    pub fn exit_of(&self, pid: i32) -> oneshot::Receiver<i32> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state();
        if let Some(status) = state.early.remove(&pid) {
            let _ = sender.send(status);
        } else {
            state.waiting.insert(pid, sender);
        }
        receiver
    }
}

impl Drop for Birth {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.births -= 1;
        if state.births == 0 {
            state.early.clear();
        }
    }
}

/// A child that has ended and its exit status; pid 0 where none has. nix's own `waitpid` has no name for a real-time
/// signal, and gives an error in place of a child which it has reaped.
#[allow(unsafe_code, reason = "one-line wrapper")]
fn wait_for_any() -> Result<(i32, i32), Errno> {
    let mut status = 0;
    // SAFETY: the kernel writes one integer, which outlives the call.
    let pid = Errno::result(unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) })?;
    Ok((pid, exit_status(status)))
}

/// A wait status as shells and containerd write it: the exit code, or 128 and the signal.
fn exit_status(status: i32) -> i32 {
    if libc::WIFSIGNALED(status) { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_signals() {
        assert_eq!(exit_status(7 << 8), 7);
        assert_eq!(exit_status(libc::SIGKILL), 137);
        assert_eq!(exit_status(libc::SIGRTMIN() + 3), 128 + libc::SIGRTMIN() + 3);
    }
}
