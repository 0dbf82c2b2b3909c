//! cuMemAlloc and its kin.

use crate::{
    account::{self, Meets, current, free},
    book::Kind,
    result::SUCCESS,
};

/// Rows are padded to at most this: CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT and the like are no larger.
const LARGEST_PITCH: u64 = 512;

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// The interface of CUDA 3.1 and before, with 32-bit sizes and pointers.
    fn cuMemAlloc(pointer: *mut u32, size: u32) |real| {
        account::allocate(current(), Kind::Pointer, size.into(), || real(pointer, size), || (*pointer).into())
    }

    /// Linear memory.
    fn cuMemAlloc_v2(pointer: *mut u64, size: usize) |real| {
        account::allocate(current(), Kind::Pointer, size as u64, || real(pointer, size), || *pointer)
    }

    /// Rows, padded by the driver.
    fn cuMemAllocPitch(pointer: *mut u32, pitch: *mut u32, width: u32, height: u32, element: u32) |real| {
        let size = pitched(width.into(), height.into());
        let answer = account::allocate(
            current(), Kind::Pointer, size, || real(pointer, pitch, width, height, element), || (*pointer).into(),
        );
        if answer == SUCCESS {
            correct((*pointer).into(), u64::from(*pitch) * u64::from(height));
        }
        answer
    }

    /// Rows, padded by the driver.
    fn cuMemAllocPitch_v2(pointer: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) |real| {
        let size = pitched(width as u64, height as u64);
        let answer = account::allocate(
            current(), Kind::Pointer, size, || real(pointer, pitch, width, height, element), || *pointer,
        );
        if answer == SUCCESS {
            correct(*pointer, (*pitch as u64).saturating_mul(height as u64));
        }
        answer
    }

    /// Managed memory: all of it counts, wherever it happens to be.
    fn cuMemAllocManaged(pointer: *mut u64, size: usize, flags: u32) |real| {
        account::allocate(current(), Kind::Pointer, size as u64, || real(pointer, size, flags), || *pointer)
    }

    /// Frees linear and managed memory, and a pool's.
    fn cuMemFree(pointer: u32) |real| {
        free(&[Kind::Pointer, Kind::PoolPointer], pointer.into(), || real(pointer))
    }

    /// Frees linear and managed memory, and a pool's.
    fn cuMemFree_v2(pointer: u64) |real| {
        free(&[Kind::Pointer, Kind::PoolPointer], pointer, || real(pointer))
    }

    /// Frees a pool's memory, or linear memory, when the stream comes to it.
    fn cuMemFreeAsync(pointer: u64, stream: usize) |real| {
        free(&[Kind::PoolPointer, Kind::Pointer], pointer, || real(pointer, stream))
    }

    /// The same, on the thread's own default stream.
    fn cuMemFreeAsync_ptsz(pointer: u64, stream: usize) |real| {
        free(&[Kind::PoolPointer, Kind::Pointer], pointer, || real(pointer, stream))
    }
}

/// At most what rows of this width take.
fn pitched(width: u64, height: u64) -> u64 {
    width.checked_next_multiple_of(LARGEST_PITCH).and_then(|pitch| pitch.checked_mul(height)).unwrap_or(u64::MAX)
}

/// The driver has said how wide the rows are: what was reserved too much goes back.
fn correct(pointer: u64, size: u64) {
    let Meets::Limit(gpu) = current() else { return };
    let over = gpu.book(|book| book.lower(Kind::Pointer, pointer, |counted| counted.saturating_sub(size)));
    gpu.give_back(over.flatten().unwrap_or(0));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows() {
        assert_eq!(pitched(1, 3), 1536);
        assert_eq!(pitched(512, 3), 1536);
        assert_eq!(pitched(u64::MAX, 1), u64::MAX);
        assert_eq!(pitched(1 << 40, 1 << 40), u64::MAX);
    }
}
