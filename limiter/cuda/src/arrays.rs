//! CUDA arrays and mipmapped arrays.

use crate::{
    account::{self, Meets, current, free},
    book::Kind,
    result::CuResult,
};

/// CUDA_ARRAY_DESCRIPTOR. Its numbers have 32 bits up to CUDA 3.1 and a pointer's since.
#[repr(C)]
#[derive(Debug)]
pub struct Descriptor<Number> {
    width: Number,
    height: Number,
    format: i32,
    channels: u32,
}

/// CUDA_ARRAY3D_DESCRIPTOR.
#[repr(C)]
#[derive(Debug)]
pub struct Descriptor3d<Number> {
    width: Number,
    height: Number,
    depth: Number,
    format: i32,
    channels: u32,
    flags: u32,
}

/// CUDA_ARRAY3D_SPARSE and CUDA_ARRAY3D_DEFERRED_MAPPING: the memory comes later, from cuMemCreate.
const WITHOUT_MEMORY: u32 = 0x40 | 0x80;

/// How large an array is.
#[derive(Debug, Clone, Copy)]
struct Extent {
    width: u64,
    height: u64,
    depth: u64,
    element: u64,
}

impl Extent {
    fn of<Number: TryInto<u64>>(width: Number, height: Number, depth: Number, format: i32, channels: u32) -> Self {
        let wide = |number: Number| number.try_into().unwrap_or(u64::MAX);
        Self {
            width: wide(width),
            height: wide(height),
            depth: wide(depth),
            element: format_bytes(format) * u64::from(channels.max(1)),
        }
    }

    fn bytes(self) -> u64 {
        let factors = [self.width, self.height.max(1), self.depth.max(1), self.element];
        factors.into_iter().try_fold(1, u64::checked_mul).unwrap_or(u64::MAX)
    }

    fn bytes_of_levels(self, levels: u32) -> u64 {
        let half = |size: u64, level: u32| if size == 0 { 0 } else { (size >> level.min(63)).max(1) };
        let level = |level| Self {
            width: half(self.width, level),
            height: half(self.height, level),
            depth: self.depth,
            ..self
        };
        (0..levels.clamp(1, 64)).fold(0_u64, |sum, number| sum.saturating_add(level(number).bytes()))
    }
}

/// Bytes of one channel of an element, by CUarray_format. Packed and planar formats, and those that came later, count as
/// their largest.
fn format_bytes(format: i32) -> u64 {
    match format {
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        // The latter are block-compressed: at most one byte for each element.
        0x01 | 0x08 | 0x91..=0x9e => 1,
        _ => 8,
    }
}

/// What an array's descriptor says.
trait Describes {
    /// How large it is.
    fn extent(&self) -> Extent;

    /// What it meets: nothing where its memory comes later.
    fn meets(&self) -> Meets;
}

impl<Number: Copy + TryInto<u64> + From<u8>> Describes for Descriptor<Number> {
    fn extent(&self) -> Extent {
        Extent::of(self.width, self.height, Number::from(1), self.format, self.channels)
    }

    fn meets(&self) -> Meets {
        current()
    }
}

impl<Number: Copy + TryInto<u64>> Describes for Descriptor3d<Number> {
    fn extent(&self) -> Extent {
        Extent::of(self.width, self.height, self.depth, self.format, self.channels)
    }

    fn meets(&self) -> Meets {
        if self.flags & WITHOUT_MEMORY == 0 { current() } else { Meets::Nothing }
    }
}

/// Makes an array of so many levels. With no descriptor the real one fails, and says why.
///
/// # Safety
/// `array` is where `make` writes its handle.
unsafe fn create(
    array: *mut u64,
    descriptor: Option<&impl Describes>,
    levels: u32,
    make: impl FnOnce() -> CuResult,
) -> CuResult {
    let Some(descriptor) = descriptor else { return make() };
    let size = descriptor.extent().bytes_of_levels(levels);
    // SAFETY: the key is read after `make` has succeeded.
    account::allocate(descriptor.meets(), Kind::Array, size, make, || unsafe { *array })
}

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// An array of one or two dimensions, of CUDA 3.1 and before.
    fn cuArrayCreate(array: *mut u64, descriptor: *const Descriptor<u32>) |real| {
        create(array, descriptor.as_ref(), 1, || real(array, descriptor))
    }

    /// An array of one or two dimensions.
    fn cuArrayCreate_v2(array: *mut u64, descriptor: *const Descriptor<usize>) |real| {
        create(array, descriptor.as_ref(), 1, || real(array, descriptor))
    }

    /// An array of up to three dimensions, or layered, of CUDA 3.1 and before.
    fn cuArray3DCreate(array: *mut u64, descriptor: *const Descriptor3d<u32>) |real| {
        create(array, descriptor.as_ref(), 1, || real(array, descriptor))
    }

    /// An array of up to three dimensions, or layered.
    fn cuArray3DCreate_v2(array: *mut u64, descriptor: *const Descriptor3d<usize>) |real| {
        create(array, descriptor.as_ref(), 1, || real(array, descriptor))
    }

    /// An array with its levels.
    fn cuMipmappedArrayCreate(array: *mut u64, descriptor: *const Descriptor3d<usize>, levels: u32) |real| {
        create(array, descriptor.as_ref(), levels, || real(array, descriptor, levels))
    }

    /// Frees an array.
    fn cuArrayDestroy(array: u64) |real| {
        free(&[Kind::Array], array, || real(array))
    }

    /// Frees an array and its levels.
    fn cuMipmappedArrayDestroy(array: u64) |real| {
        free(&[Kind::Array], array, || real(array))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(Extent::of(100, 0, 0, 0x20, 4).bytes(), 1600, "one dimension of float4");
        assert_eq!(Extent::of(64, 64, 6, 0x01, 1).bytes(), 24576, "a cube of bytes");
        assert_eq!(Extent::of(64, 32, 0, 0x01, 1).bytes_of_levels(3), 64 * 32 + 32 * 16 + 16 * 8);
        assert_eq!(Extent::of(1, 1, 0, 0x01, 1).bytes_of_levels(u32::MAX), 64);
        assert_eq!(Extent::of(usize::MAX, 2, 0, 0x01, 1).bytes(), u64::MAX);
    }
}
