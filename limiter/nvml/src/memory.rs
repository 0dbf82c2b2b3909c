//! The share, not the card.

use crate::{
    devices::granted,
    real::{Answer, Device, MISSING, NO_PERMISSION, NOT_SUPPORTED, NVML, SUCCESS},
};

/// nvmlMemory_t, in bytes.
#[repr(C)]
#[derive(Debug)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// nvmlMemory_v2_t, in bytes.
#[repr(C)]
#[derive(Debug)]
pub struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

gpufence_limiter::entry_points! { NVML, MISSING;
    /// Total, free and used memory.
    fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut Memory) |real| {
        let answer = real(device, memory);
        shown(device, answer, |limit, used| {
            let memory = &mut *memory;
            memory.total = memory.total.min(limit);
            (memory.used, memory.free) = (used, memory.total.saturating_sub(used));
        })
    }

    /// The same, with what the driver has kept for itself: nothing of a share.
    fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut MemoryV2) |real| {
        let answer = real(device, memory);
        shown(device, answer, |limit, used| {
            let memory = &mut *memory;
            memory.total = memory.total.min(limit);
            memory.reserved = 0;
            (memory.used, memory.free) = (used, memory.total.saturating_sub(used));
        })
    }

    /// The whole card's, by whether it is encrypted.
    fn nvmlDeviceGetConfComputeMemSizeInfo(device: Device, sizes: *mut [u64; 2]) |real| {
        if granted().is_some() { NOT_SUPPORTED } else { real(device, sizes) }
    }

    /// The whole card's, as far as it is encrypted.
    fn nvmlDeviceGetConfComputeProtectedMemoryUsage(device: Device, memory: *mut Memory) |real| {
        if granted().is_some() { NOT_SUPPORTED } else { real(device, memory) }
    }
}

/// Corrects what the real one has written, with the limit and what is used of it. A GPU of which the container has but an
/// instance has nothing to show.
fn shown(device: Device, answer: Answer, correct: impl FnOnce(u64, u64)) -> Answer {
    let Some(granted) = granted().filter(|_| answer == SUCCESS) else { return answer };
    if let Some(number) = granted.limit_of(device) {
        correct(granted.share.limits.gpus()[number].memory, granted.share.used(number));
        return SUCCESS;
    }
    if granted.is_parent_only(device) { NO_PERMISSION } else { answer }
}
