//! The limits file: what a container may use, for the limiter inside it.
//!
//! Text, one line for each GPU, so that the limiter needs no JSON parser:
//!
//! ```text
//! gpufence-limits 1
//! on-failure deny
//! gpu GPU-5f4d0c7e-4b2a-4c7e-9c1e-0d6c2c6f0001 memory-bytes 8589934592 compute-percent 50
//! gpu MIG-0a1b2c3d-4e5f-6a7b-8c9d-0e1f2a3b4c5d memory-bytes 4294967296 compute-percent 100
//! ```
//!
//! GPUs stand in the order in which the container sees them. The file is mounted read-only; nothing is taken from the
//! environment.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The first line.
const HEADER: &str = "gpufence-limits 1";

/// The limit on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// The UUID of the GPU or MIG instance.
    pub uuid: String,
    /// The memory limit in bytes.
    pub memory_bytes: u64,
    /// The share of compute in percent; 100 is no limit.
    pub compute_percent: u8,
}

/// What becomes of an allocation when the limiter itself fails, such as for want of its usage file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// It is denied.
    #[default]
    Deny,
    /// It goes through.
    Allow,
}

impl OnFailure {
    fn word(self) -> &'static str {
        match self {
            Self::Deny => "deny",
            Self::Allow => "allow",
        }
    }
}

/// The file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Limits {
    /// In the order in which the container sees its GPUs.
    pub gpus: Vec<Limit>,
    /// When the limiter fails.
    pub on_failure: OnFailure,
}

/// A limits file that can't be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("limits file, line {line}: {what}")]
pub struct LimitsError {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub what: &'static str,
}

/// Writes the file's text.
pub fn write(limits: &Limits) -> String {
    let mut text = format!("{HEADER}\non-failure {}\n", limits.on_failure.word());
    for Limit { uuid, memory_bytes, compute_percent } in &limits.gpus {
        let _ = writeln!(text, "gpu {uuid} memory-bytes {memory_bytes} compute-percent {compute_percent}");
    }
    text
}

/// Reads the file's text.
pub fn read(text: &str) -> Result<Limits, LimitsError> {
    let mut lines = text.lines().enumerate();
    if lines.next().map(|(_, line)| line) != Some(HEADER) {
        return Err(LimitsError { line: 1, what: "not a limits file of version 1" });
    }
    let mut limits = Limits::default();
    for (number, line) in lines {
        let error = |what| LimitsError { line: number + 1, what };
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["on-failure", "deny"] => limits.on_failure = OnFailure::Deny,
            ["on-failure", "allow"] => limits.on_failure = OnFailure::Allow,
            ["gpu", uuid, "memory-bytes", memory, "compute-percent", percent] => limits.gpus.push(Limit {
                uuid: uuid.to_owned(),
                memory_bytes: memory.parse().map_err(|_| error("memory-bytes is not a number"))?,
                compute_percent: percent.parse().map_err(|_| error("compute-percent is not a number"))?,
            }),
            _ => {
                let what = "neither \"on-failure deny|allow\" nor \"gpu UUID memory-bytes N compute-percent N\"";
                return Err(error(what));
            }
        }
    }
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        let gpus = vec![
            Limit { uuid: "GPU-a".into(), memory_bytes: 8 << 30, compute_percent: 50 },
            Limit { uuid: "MIG-b".into(), memory_bytes: 1, compute_percent: 100 },
        ];
        for on_failure in [OnFailure::Deny, OnFailure::Allow] {
            let limits = Limits { gpus: gpus.clone(), on_failure };
            assert_eq!(read(&write(&limits)).unwrap(), limits);
        }
        assert_eq!(read(&write(&Limits::default())).unwrap(), Limits::default());
    }

    #[test]
    fn refuses_other_files() {
        for (text, line) in [
            ("", 1),
            ("gpufence-limits 2\n", 1),
            ("gpufence-limits 1\ngpu a\n", 2),
            ("gpufence-limits 1\ngpu a memory-bytes x compute-percent 1", 2),
        ] {
            assert_eq!(read(text).unwrap_err().line, line, "{text}");
        }
    }
}
