//! Asks a container's device cgroup by joining it.

use std::{
    fs,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use gpufence_cdi::fence::Fence;
use nix::{
    libc,
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork},
};

use crate::error::{HookError, io_error};

const MOUNT: &str = "/sys/fs/cgroup";
/// The child's exit status where it couldn't join.
const COULD_NOT_JOIN: i32 = 255;
/// A child tries so many nodes at once that its exit status can tell which one.
const AT_ONCE: usize = 100;

/// Fails where a process of the container could open a node that the fence denies.
pub fn check(fence: &Fence, pid: i32) -> Result<(), HookError> {
    let processes = device_cgroup(pid)?.join("cgroup.procs");
    // A node that isn't on the host has nothing to be opened through here, and its number is denied with its major.
    let present: Vec<_> = fence.denied.iter().filter(|denied| denied.path.exists()).collect();
    for denied in present.chunks(AT_ONCE) {
        let paths: Vec<&Path> = denied.iter().map(|denied| denied.path.as_path()).collect();
        if let Some((number, what)) = try_all(&processes, &paths)? {
            let denied = denied[number];
            return Err(HookError::Reaches {
                path: denied.path.clone(),
                device: format!("{}:{}", denied.major, denied.minor),
                what,
            });
        }
    }
    Ok(())
}

/// The folder of the cgroup whose rules hold for device nodes: v1's `devices` controller, else v2's only tree.
pub fn device_cgroup(pid: i32) -> Result<PathBuf, HookError> {
    let file = PathBuf::from(format!("/proc/{pid}/cgroup"));
    let text = fs::read_to_string(&file).map_err(io_error("read", &file))?;
    parse(&text, Path::new(MOUNT)).ok_or(HookError::NoCgroup { pid })
}

fn parse(text: &str, mount: &Path) -> Option<PathBuf> {
    let mut unified = None;
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        if controllers.split(',').any(|controller| controller == "devices") && mount.join("devices").exists() {
            return Some(mount.join("devices").join(path));
        }
        if controllers.is_empty() {
            unified = Some(mount.join(path));
        }
    }
    unified.filter(|_| mount.join("cgroup.controllers").exists())
}

/// Tries to open each from inside the cgroup. Gives the first that isn't denied, and what open said.
#[allow(unsafe_code, reason = "one-line wrapper")]
fn try_all(processes: &Path, paths: &[&Path]) -> Result<Option<(usize, String)>, HookError> {
    // SAFETY: this program has one thread, so the child may do all that it does.
    match unsafe { fork() }.map_err(io_error("fork for", processes))? {
        ForkResult::Child => std::process::exit(child(processes, paths)),
        ForkResult::Parent { child } => match waitpid(child, None).map_err(io_error("wait for", processes))? {
            WaitStatus::Exited(_, 0) => Ok(None),
            WaitStatus::Exited(_, COULD_NOT_JOIN) => Err(HookError::Io {
                action: "join",
                path: processes.to_owned(),
                source: std::io::Error::other("the cgroup takes no process"),
            }),
            WaitStatus::Exited(_, status) => {
                let status = usize::try_from(status).unwrap_or_default();
                let what = if status > AT_ONCE { "is not kept from" } else { "can open" };
                Ok(Some(((status - 1) % AT_ONCE, what.to_owned())))
            }
            other => Err(HookError::Io {
                action: "ask",
                path: processes.to_owned(),
                source: std::io::Error::other(format!("{other:?}")),
            }),
        },
    }
}

/// 0, or one more than the number of the first node that opens, or that fails for another reason than the cgroup's
/// (then 100 more).
fn child(processes: &Path, paths: &[&Path]) -> i32 {
    let join = || fs::OpenOptions::new().write(true).open(processes)?.write_all(b"0");
    if join().is_err() {
        return COULD_NOT_JOIN;
    }
    for (number, path) in (1..).zip(paths) {
        let open = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
        match open.map_err(|error| error.raw_os_error()) {
            Err(Some(libc::EPERM)) => {}
            Ok(_) => return number,
            Err(_) => return number + 100,
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_cgroup_asks() {
        let folder = tempfile::tempdir().unwrap();
        let mount = folder.path();
        assert_eq!(parse("0::/a\n", mount), None);
        fs::write(mount.join("cgroup.controllers"), "").unwrap();
        assert_eq!(parse("0::/a\n", mount), Some(mount.join("a")));
        fs::create_dir(mount.join("devices")).unwrap();
        assert_eq!(parse("3:devices:/b\n0::/a\n", mount), Some(mount.join("devices/b")));
    }
}
