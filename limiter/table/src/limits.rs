//! The limits file, whose format `gpufence-grant` owns and documents. Here it is read with no allocation.

use crate::text;

/// How many GPUs one container can have: as many MIG instances as eight GPUs come to, and some.
pub const MAX_GPUS: usize = 64;
/// The longest name: `MIG-GPU-<uuid>/<GPU instance>/<compute instance>`.
const MAX_NAME: usize = 64;

/// The limit on one GPU.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    name: [u8; MAX_NAME],
    name_length: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Percent of compute; 100 is no limit.
    pub compute_percent: u8,
}

impl Limit {
    /// The UUID, as NVIDIA's tools write it.
    pub fn name(&self) -> &[u8] {
        &self.name[..self.name_length]
    }
}

/// What the file says.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    gpus: [Limit; MAX_GPUS],
    count: usize,
    /// Whether an allocation goes through when the limiter itself fails, such as for want of its usage file.
    pub allow_on_failure: bool,
}

impl Limits {
    /// Reads the file's text. `None`: it isn't one.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let nothing = Limit { name: [0; MAX_NAME], name_length: 0, memory: 0, compute_percent: 100 };
        let mut limits = Self { gpus: [nothing; MAX_GPUS], count: 0, allow_on_failure: false };
        let mut lines = bytes.strip_suffix(b"\n")?.split(|byte| *byte == b'\n');
        if lines.next()? != b"gpufence-limits 1" {
            return None;
        }
        for line in lines {
            let mut words = line.split(|byte| *byte == b' ');
            match words.next()? {
                b"on-failure" => limits.allow_on_failure = words.next()? == b"allow",
                b"gpu" => {
                    let name = words.next()?;
                    let limit = limits.gpus.get_mut(limits.count)?;
                    limit.name.get_mut(..name.len())?.copy_from_slice(name);
                    limit.name_length = name.len();
                    if words.next()? != b"memory-bytes" {
                        return None;
                    }
                    limit.memory = text::number(words.next()?)?;
                    if words.next()? != b"compute-percent" {
                        return None;
                    }
                    limit.compute_percent = u8::try_from(text::number(words.next()?)?).ok()?;
                    limits.count += 1;
                }
                _ => return None,
            }
            if words.next().is_some() {
                return None;
            }
        }
        Some(limits)
    }

    /// The limits, in the container's order of GPUs.
    pub fn gpus(&self) -> &[Limit] {
        &self.gpus[..self.count]
    }

    /// The GPU or MIG instance of a name.
    pub fn find(&self, name: &[u8]) -> Option<usize> {
        self.gpus().iter().position(|limit| limit.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use gpufence_grant::limits::{Limit as Written, Limits as File, OnFailure, write};

    use super::*;

    #[test]
    fn reads_what_the_grant_s_side_writes() {
        let gpu = |number: usize| Written {
            uuid: format!("GPU-5eed0000-0000-4000-8000-{number:012}"),
            memory_bytes: (number as u64 + 1) << 30,
            compute_percent: 100 - u8::try_from(number).unwrap(),
        };
        for on_failure in [OnFailure::Deny, OnFailure::Allow] {
            let file = File { gpus: (0..MAX_GPUS).map(gpu).collect(), on_failure };
            let limits = Limits::read(write(&file).as_bytes()).unwrap();
            assert_eq!(limits.allow_on_failure, on_failure == OnFailure::Allow);
            for (number, limit) in limits.gpus().iter().enumerate() {
                let written = gpu(number);
                assert_eq!(limit.name(), written.uuid.as_bytes());
                assert_eq!((limit.memory, limit.compute_percent), (written.memory_bytes, written.compute_percent));
                assert_eq!(limits.find(written.uuid.as_bytes()), Some(number));
            }
        }
    }

    #[test]
    fn refuses_everything_else() {
        let long = format!("gpufence-limits 1\ngpu {} memory-bytes 1 compute-percent 1\n", "x".repeat(65));
        let many = "gpufence-limits 1\n".to_owned() + &"gpu a memory-bytes 1 compute-percent 1\n".repeat(65);
        for text in [
            "",
            "gpufence-limits 1",
            "gpufence-limits 2\n",
            "gpufence-limits 1\n\n",
            "gpufence-limits 1\ngpu a\n",
            "gpufence-limits 1\ngpu a memory-bytes x compute-percent 1\n",
            "gpufence-limits 1\ngpu a memory-bytes 1 compute-percent 256\n",
            "gpufence-limits 1\ngpu a memory-bytes 1 compute-percent 1 more\n",
            &long,
            &many,
        ] {
            assert!(Limits::read(text.as_bytes()).is_none(), "{text}");
        }
    }
}
