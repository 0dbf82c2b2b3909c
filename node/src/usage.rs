//! A container's usage table, which its limiter keeps on a tmpfs inside it. It is the container's to write: what stands there
//! is for people to look at, and nothing is decided by it.

use std::{fs, mem::offset_of, os::unix::fs::FileExt, path::Path, sync::atomic::AtomicU64};

use gpufence_cdi::{
    process::{self, FirstProcess},
    root::Root,
};
use gpufence_limiter::{limits::MAX_GPUS, table};

use crate::records::Container;

/// Where it is in a container.
const FILE: &str = "/usr/lib/gpufence/usage/table";

/// What the limiter has counted of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes that processes hold.
    pub held: u64,
    /// Allocations that were denied.
    pub denied: u64,
    /// Nanoseconds for which launches were held back.
    pub throttled: u64,
}

/// A container's table, for each GPU in its grant's order. `None`: no process of it has used CUDA yet, or none runs.
pub fn read(container: &Container) -> Option<Vec<Usage>> {
    let text = fs::read(container.folder.join(process::FILE)).ok()?;
    let first: FirstProcess = serde_json::from_slice(&text).ok()?;
    let root = Root::open(Path::new("/proc").join(first.pid.to_string()).join("root")).ok()?;
    // The folder that was opened is of the process that lives now; it must be the container's own.
    if process::start_time(first.pid)? != first.start {
        return None;
    }
    let file = root.open_file(FILE).ok()?;
    let mut bytes = vec![0; size_of::<table::UsageTable>()];
    let slots_at = offset_of!(table::UsageTable, slots);
    file.read_exact_at(&mut bytes[..slots_at], 0).ok()?;
    // Only the slots that were ever used.
    let top = usize::try_from(word(&bytes, 1)).unwrap_or(table::SLOTS).min(table::SLOTS);
    let end = slots_at + top * SLOT;
    file.read_exact_at(&mut bytes[slots_at..end], slots_at as u64).ok()?;
    parse(&bytes[..end], container.record.shares.len())
}

const SLOT: usize = size_of::<table::Slot<AtomicU64, MAX_GPUS>>();
type Gpu = table::Gpu<AtomicU64>;
const WORD: usize = size_of::<u64>();

/// Reads a table, up to the last slot that was used.
fn parse(bytes: &[u8], gpus: usize) -> Option<Vec<Usage>> {
    let slots_at = offset_of!(table::UsageTable, slots);
    if bytes.len() < slots_at || word(bytes, 0) != table::MAGIC {
        return None;
    }
    let of_gpu = |gpu: usize, field: usize| {
        word(bytes, (offset_of!(table::UsageTable, gpus) + gpu * size_of::<Gpu>() + field) / WORD)
    };
    let mut usage: Vec<Usage> = (0..gpus.min(MAX_GPUS))
        .map(|gpu| Usage {
            held: 0,
            denied: of_gpu(gpu, offset_of!(Gpu, denied)),
            throttled: of_gpu(gpu, offset_of!(Gpu, throttled)),
        })
        .collect();
    for slot in bytes[slots_at..].chunks_exact(SLOT).filter(|slot| word(slot, 0) != 0) {
        for (gpu, usage) in usage.iter_mut().enumerate() {
            usage.held = usage.held.saturating_add(word(slot, 2 + gpu));
        }
    }
    Some(usage)
}

/// The file's words are the machine's.
fn word(bytes: &[u8], number: usize) -> u64 {
    let mut word = [0; WORD];
    word.copy_from_slice(&bytes[number * WORD..][..WORD]);
    u64::from_ne_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables() {
        let slots_at = offset_of!(table::UsageTable, slots);
        let mut bytes = vec![0_u8; slots_at + 2 * SLOT];
        let mut put = |number: usize, value: u64| bytes[number * 8..][..8].copy_from_slice(&value.to_ne_bytes());
        put(0, table::MAGIC);
        put(2 + 5, 7);
        put(2 + 6, 9);
        // Two slots with 10 and 20 bytes of the second GPU; another that was given up.
        let slot = slots_at / 8;
        put(slot, 1);
        put(slot + 3, 10);
        put(slot + SLOT / 8 + 3, 20);
        assert_eq!(parse(&bytes, 2).unwrap(), [Usage::default(), Usage { held: 10, denied: 7, throttled: 9 }]);
        assert_eq!(parse(&bytes[..8], 2), None);
        bytes[0] ^= 1;
        assert_eq!(parse(&bytes, 2), None);
    }
}
