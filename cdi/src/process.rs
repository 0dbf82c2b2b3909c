//! A container's first process, as `gpufence-hook` notes it in the container's folder for the node agent.

use std::fs;

use serde::{Deserialize, Serialize};

/// `process.json`.
pub const FILE: &str = "process.json";

/// A process of the host, told apart from a later one of the same PID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstProcess {
    /// Its PID on the host.
    pub pid: u32,
    /// When it started, in clock ticks since the machine did.
    pub start: u64,
}

impl FirstProcess {
    /// The process that has a PID now.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, start: start_time(pid)? })
    }
}

/// Field 22 of `/proc/PID/stat` (proc(5)); the second field is a name in brackets that may hold anything.
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.iter().rposition(|byte| *byte == b')')? + 2;
    std::str::from_utf8(stat.get(after_name..)?).ok()?.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process() {
        let own = FirstProcess::of(std::process::id()).unwrap();
        assert!(own.start > 0);
        assert_eq!(Some(own), FirstProcess::of(std::process::id()));
        assert_eq!(start_time(0), None);
    }
}
