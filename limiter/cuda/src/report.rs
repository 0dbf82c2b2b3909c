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
            lower(&mut *total, limit);
            lower(&mut *free, left);
        }
        answer
    }

    /// Free and total memory.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |real| {
        let answer = real(free, total);
        if answer == SUCCESS && let Meets::Limit(gpu) = current() {
            let (limit, left) = share_of(gpu);
            lower(&mut *total, limit);
            lower(&mut *free, left);
        }
        answer
    }

    /// Total memory, of CUDA 3.1 and before.
    fn cuDeviceTotalMem(total: *mut u32, device: i32) |real| {
        let answer = real(total, device);
        if answer == SUCCESS && let Meets::Limit(gpu) = on_device(device) {
            lower(&mut *total, gpu.limit().memory);
        }
        answer
    }

    /// Total memory.
    fn cuDeviceTotalMem_v2(total: *mut usize, device: i32) |real| {
        let answer = real(total, device);
        if answer == SUCCESS && let Meets::Limit(gpu) = on_device(device) {
            lower(&mut *total, gpu.limit().memory);
        }
        answer
    }
}

/// Makes a number at most `most`.
fn lower<Number: Copy + Ord + TryFrom<u64>>(number: &mut Number, most: u64) {
    // A limit that doesn't fit the number lowers nothing.
    *number = Number::try_from(most).map_or(*number, |most| most.min(*number));
}

/// The limit, and what is left of it.
fn share_of(gpu: crate::account::Gpu) -> (u64, u64) {
    pools::settle_all(gpu);
    let limit = gpu.limit().memory;
    (limit, limit.saturating_sub(gpu.share.used(gpu.number)))
}
