//! The limits file: what a container may use, for the limiter inside it.
//!
//! Text, one line for each GPU, so that the limiter needs no JSON parser:
//!
//! ```text
//! gpufence-limits 1
//! gpu GPU-5f4d0c7e-4b2a-4c7e-9c1e-0d6c2c6f0001 memory-bytes 8589934592 compute-percent 50
//! gpu MIG-0a1b2c3d-4e5f-6a7b-8c9d-0e1f2a3b4c5d memory-bytes 4294967296 compute-percent 100
//! ```
//!
//! GPUs stand in the order in which the container sees them. The file is mounted read-only; nothing is taken from the
//! environment.

use std::fmt::Write as _;

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
pub fn write(limits: &[Limit]) -> String {
    let mut text = format!("{HEADER}\n");
    for Limit { uuid, memory_bytes, compute_percent } in limits {
        let _ = writeln!(text, "gpu {uuid} memory-bytes {memory_bytes} compute-percent {compute_percent}");
    }
    text
}

/// Reads the file's text.
pub fn read(text: &str) -> Result<Vec<Limit>, LimitsError> {
    let mut lines = text.lines().enumerate();
    if lines.next().map(|(_, line)| line) != Some(HEADER) {
        return Err(LimitsError { line: 1, what: "not a limits file of version 1" });
    }
    lines
        .map(|(number, line)| {
            let error = |what| LimitsError { line: number + 1, what };
            let words: Vec<&str> = line.split(' ').collect();
            let ["gpu", uuid, "memory-bytes", memory, "compute-percent", percent] = words[..] else {
                return Err(error("not \"gpu UUID memory-bytes N compute-percent N\""));
            };
            Ok(Limit {
                uuid: uuid.to_owned(),
                memory_bytes: memory.parse().map_err(|_| error("memory-bytes is not a number"))?,
                compute_percent: percent.parse().map_err(|_| error("compute-percent is not a number"))?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        let limits = [
            Limit { uuid: "GPU-a".into(), memory_bytes: 8 << 30, compute_percent: 50 },
            Limit { uuid: "MIG-b".into(), memory_bytes: 1, compute_percent: 100 },
        ];
        assert_eq!(read(&write(&limits)).unwrap(), limits);
        assert_eq!(read(&write(&[])).unwrap(), []);
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
