//! Where the limiter's shadow libraries stand in a container, before the driver's own:
//!
//! ```text
//! /usr/lib/gpufence/limiter/libcuda.so.1, libcuda.so, libnvidia-ml.so.1     the shadow libraries
//!                  /driver/libcuda-driver.so.1, libnvidia-ml-driver.so.1    the real ones, by the names that the shadows need
//!                  /limits                                                  what they keep to
//!                  /usage/                                                  a small tmpfs: the usage table
//! ```

/// The shadow libraries' folder in a container.
pub const LIMITER: &str = "limiter";
/// The folder of the real libraries under the names that the shadows need.
pub const DRIVER: &str = "driver";
/// The usage table's folder.
pub const USAGE: &str = "usage";

/// A library that has a shadow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shadowed {
    /// The soname, the real one's and the shadow's.
    pub soname: &'static str,
    /// The name without a version, for linkers.
    pub plain: &'static str,
    /// What the shadow needs the real one as.
    pub driver: &'static str,
}

/// The CUDA driver.
pub const CUDA: Shadowed = Shadowed { soname: "libcuda.so.1", plain: "libcuda.so", driver: "libcuda-driver.so.1" };
/// NVML.
pub const NVML: Shadowed =
    Shadowed { soname: "libnvidia-ml.so.1", plain: "libnvidia-ml.so", driver: "libnvidia-ml-driver.so.1" };

/// The library whose shadow stands for one of this name.
pub fn shadowed(name: &str) -> Option<Shadowed> {
    [CUDA, NVML].into_iter().find(|library| library.soname == name || library.plain == name)
}
