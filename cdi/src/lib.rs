//! Finds the NVIDIA driver on this host, stages its libraries and writes CDI specs.
//!
//! The rooms. Sources, each of which reads one thing below a [`root::Root`]:
//!
//! * [`proc`]: GPUs, device majors, the driver's version and MIG access nodes;
//! * [`sysfs`]: a GPU's DRM nodes;
//! * [`ldcache`]: glibc's `ld.so.cache`, read and written;
//! * [`elf`]: a library's soname and machine;
//! * `nvml` (feature): memory sizes and MIG UUIDs, only where asked for.
//!
//! Products, in the order in which each is made from the one before:
//!
//! * [`devices`]: the GPUs and device nodes, read afresh at each create;
//! * [`driver`]: the driver's files by [`capability`], read once for each driver version;
//! * [`inventory`]: both together, as `/run/gpufence/inventory.json`;
//! * [`stage`]: the folder on the host that containers mount;
//! * [`edits`] and [`spec`]: what a container gets, and CDI's form of it;
//! * [`loader`]: what makes the libraries findable in an image, and [`limiter`], which libraries stand before them;
//! * [`fence`]: what it must not reach, for the check before it starts, and [`process`], which process is its first.
//!
//! No NVML, no ldconfig, no process: everything here but `nvml` may stand on the create path. This crate knows nothing
//! of containerd or Kubernetes.

pub mod capability;
pub mod devices;
pub mod driver;
pub mod edits;
pub mod elf;
mod error;
pub mod fence;
pub mod inventory;
pub mod ldcache;
pub mod limiter;
pub mod loader;
#[cfg(feature = "nvml")]
pub mod nvml;
pub mod proc;
pub mod process;
pub mod root;
pub mod spec;
pub mod stage;
pub mod sysfs;

pub use error::CdiError;
