//! What a program is told of its memory: the share, not the card.

use crate::{
    account::{Meets, current, on_device},
    pools,
    result::SUCCESS,
};

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// Free and total memory, of CUDA 3.1 and before.
    fn cuMemGetInfo(free: *mut u32, total: *mut u32) |real| {
        let answer = real(free, total);
        if answer == SUCCESS && let Meets::Limit(gpu) = current() {
            let (limit, left) = share_of(gpu);
            *total = (*total).min(u32::try_from(limit).unwrap_or(u32::MAX));
            *free = (*free).min(u32::try_from(left).unwrap_or(u32::MAX));
        }
        answer
    }

    /// Free and total memory.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |real| {
        let answer = real(free, total);
        if answer == SUCCESS && let Meets::Limit(gpu) = current() {
            let (limit, left) = share_of(gpu);
            *total = (*total).min(usize::try_from(limit).unwrap_or(usize::MAX));
            *free = (*free).min(usize::try_from(left).unwrap_or(usize::MAX));
        }
        answer
    }

    /// Total memory, of CUDA 3.1 and before.
    fn cuDeviceTotalMem(total: *mut u32, device: i32) |real| {
        let answer = real(total, device);
        if answer == SUCCESS && let Meets::Limit(gpu) = on_device(device) {
            *total = (*total).min(u32::try_from(gpu.share.limits.gpus()[gpu.number].memory).unwrap_or(u32::MAX));
        }
        answer
    }

    /// Total memory.
    fn cuDeviceTotalMem_v2(total: *mut usize, device: i32) |real| {
        let answer = real(total, device);
        if answer == SUCCESS && let Meets::Limit(gpu) = on_device(device) {
            *total = (*total).min(usize::try_from(gpu.share.limits.gpus()[gpu.number].memory).unwrap_or(usize::MAX));
        }
        answer
    }
}

/// The limit, and what is left of it.
fn share_of(gpu: crate::account::Gpu) -> (u64, u64) {
    pools::settle_all(gpu);
    let limit = gpu.share.limits.gpus()[gpu.number].memory;
    (limit, limit.saturating_sub(gpu.share.used(gpu.number)))
}
