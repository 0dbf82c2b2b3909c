//! CUDA arrays and mipmapped arrays.

use crate::{
    account::{self, Meets, current, free},
    book::Kind,
};

/// CUDA_ARRAY_DESCRIPTOR of CUDA 3.1 and before.
#[repr(C)]
#[derive(Debug)]
pub struct Descriptor1 {
    width: u32,
    height: u32,
    format: i32,
    channels: u32,
}

/// CUDA_ARRAY_DESCRIPTOR.
#[repr(C)]
#[derive(Debug)]
pub struct Descriptor {
    width: usize,
    height: usize,
    format: i32,
    channels: u32,
}

/// CUDA_ARRAY3D_DESCRIPTOR of CUDA 3.1 and before.
#[repr(C)]
#[derive(Debug)]
pub struct Descriptor3d1 {
    width: u32,
    height: u32,
    depth: u32,
    format: i32,
    channels: u32,
    flags: u32,
}

/// CUDA_ARRAY3D_DESCRIPTOR.
#[repr(C)]
#[derive(Debug)]
pub struct Descriptor3d {
    width: usize,
    height: usize,
    depth: usize,
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
    fn of(width: usize, height: usize, depth: usize, format: i32, channels: u32) -> Self {
        Self {
            width: width as u64,
            height: height as u64,
            depth: depth as u64,
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

gpufence_limiter::entry_points! { crate::result::DRIVER, crate::result::NOT_FOUND;
    /// An array of one or two dimensions.
    fn cuArrayCreate(array: *mut u64, descriptor: *const Descriptor1) |real| {
        let size = descriptor.as_ref().map_or(0, |d| Extent::of(d.width as usize, d.height as usize, 1, d.format, d.channels).bytes());
        account::allocate(current(), Kind::Array, size, || real(array, descriptor), || *array)
    }

    /// An array of one or two dimensions.
    fn cuArrayCreate_v2(array: *mut u64, descriptor: *const Descriptor) |real| {
        let size = descriptor.as_ref().map_or(0, |d| Extent::of(d.width, d.height, 1, d.format, d.channels).bytes());
        account::allocate(current(), Kind::Array, size, || real(array, descriptor), || *array)
    }

    /// An array of up to three dimensions, or layered.
    fn cuArray3DCreate(array: *mut u64, descriptor: *const Descriptor3d1) |real| {
        let extent = |d: &Descriptor3d1| Extent::of(d.width as usize, d.height as usize, d.depth as usize, d.format, d.channels);
        let size = descriptor.as_ref().map_or(0, |d| extent(d).bytes());
        account::allocate(meets(descriptor.as_ref().map_or(0, |d| d.flags)), Kind::Array, size, || real(array, descriptor), || *array)
    }

    /// An array of up to three dimensions, or layered.
    fn cuArray3DCreate_v2(array: *mut u64, descriptor: *const Descriptor3d) |real| {
        let extent = |d: &Descriptor3d| Extent::of(d.width, d.height, d.depth, d.format, d.channels);
        let size = descriptor.as_ref().map_or(0, |d| extent(d).bytes());
        account::allocate(meets(descriptor.as_ref().map_or(0, |d| d.flags)), Kind::Array, size, || real(array, descriptor), || *array)
    }

    /// An array with its levels.
    fn cuMipmappedArrayCreate(array: *mut u64, descriptor: *const Descriptor3d, levels: u32) |real| {
        let extent = |d: &Descriptor3d| Extent::of(d.width, d.height, d.depth, d.format, d.channels);
        let size = descriptor.as_ref().map_or(0, |d| extent(d).bytes_of_levels(levels));
        account::allocate(
            meets(descriptor.as_ref().map_or(0, |d| d.flags)), Kind::Array, size, || real(array, descriptor, levels), || *array,
        )
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

fn meets(flags: u32) -> Meets {
    if flags & WITHOUT_MEMORY == 0 { current() } else { Meets::Nothing }
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
