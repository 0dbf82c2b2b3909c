//! The real NVML, and the words it answers with.

use core::ffi::{c_char, c_void};

use gpufence_limiter::hook::Library;

/// The real NVML, by the name that the loader's cache has for it.
pub static NVML: Library = Library::new(c"libnvidia-ml-driver.so.1");

/// nvmlReturn_t.
pub type Answer = i32;
/// nvmlDevice_t: a GPU's handle, or a MIG instance's.
pub type Device = *mut c_void;

/// `NVML_SUCCESS`.
pub const SUCCESS: Answer = 0;
/// `NVML_ERROR_INVALID_ARGUMENT`.
pub const INVALID_ARGUMENT: Answer = 2;
/// `NVML_ERROR_NOT_SUPPORTED`.
pub const NOT_SUPPORTED: Answer = 3;
/// `NVML_ERROR_NO_PERMISSION`.
pub const NO_PERMISSION: Answer = 4;
/// `NVML_ERROR_NOT_FOUND`.
pub const NOT_FOUND: Answer = 6;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
pub const INSUFFICIENT_SIZE: Answer = 7;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`: what an entry point of ours says whose real one an older driver doesn't have.
pub const MISSING: Answer = 13;

gpufence_limiter::real_functions! { NVML, MISSING;
    fn handle_by_uuid as nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut Device);
    fn handle_by_index as nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut Device);
    fn parent_of as nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance: Device, parent: *mut Device);
}
