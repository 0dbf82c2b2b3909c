//! What the limiter asks of the real driver, and of the real NVML, for itself.

use core::ffi::{c_char, c_void};

use gpufence_limiter::hook::Library;

use crate::result::{DRIVER, SUCCESS};

/// NVML's shadow. It is loaded before the real one, whose soname is the same: a program that loads `libnvidia-ml.so.1`
/// gets the first of the name that is there.
static NVML_SHADOW: Library = Library::new(c"/usr/lib/gpufence/limiter/libnvidia-ml.so.1");
/// The real NVML, which is there in every container that has the limiter.
static NVML: Library = Library::new(c"libnvidia-ml-driver.so.1");

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const POOL_RESERVED: i32 = 5;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`.
const POOL_USED: i32 = 7;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const GRAPH_RESERVED: i32 = 2;

gpufence_limiter::real_functions! { DRIVER, crate::result::NOT_FOUND;
    fn ctx_get_device as cuCtxGetDevice(device: *mut i32);
    fn ctx_get_current as cuCtxGetCurrent(context: *mut usize);
    fn device_get as cuDeviceGet(device: *mut i32, ordinal: i32);
    fn device_get_count as cuDeviceGetCount(count: *mut i32);
    fn device_get_uuid as cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32);
    fn device_get_uuid_v2 as cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
    fn device_default_pool as cuDeviceGetDefaultMemPool(pool: *mut usize, device: i32);
    fn device_pool as cuDeviceGetMemPool(pool: *mut usize, device: i32);
    fn device_graph_attribute as cuDeviceGetGraphMemAttribute(device: i32, attribute: i32, value: *mut u64);
    fn primary_state as cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32);
    fn primary_retain as cuDevicePrimaryCtxRetain(context: *mut usize, device: i32);
    fn primary_release as cuDevicePrimaryCtxRelease_v2(device: i32);
    fn ctx_destroy as cuCtxDestroy_v2(context: usize);
    fn ctx_get_limit as cuCtxGetLimit(value: *mut usize, limit: i32);
    fn mem_free_async as cuMemFreeAsync(pointer: u64, stream: usize);
    fn pool_attribute as cuMemPoolGetAttribute(pool: usize, attribute: i32, value: *mut u64);
    fn pool_trim as cuMemPoolTrimTo(pool: usize, keep: usize);
    fn stream_synchronize as cuStreamSynchronize(stream: usize);
    fn stream_is_capturing as cuStreamIsCapturing(stream: usize, status: *mut i32);
    fn event_create as cuEventCreate(event: *mut usize, flags: u32);
    fn event_record as cuEventRecord(event: usize, stream: usize);
    fn event_query as cuEventQuery(event: usize);
    fn event_synchronize as cuEventSynchronize(event: usize);
    fn event_elapsed as cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize);
}

gpufence_limiter::real_functions! { NVML, crate::result::NOT_FOUND;
    fn nvml_init as nvmlInit_v2();
    fn nvml_handle as nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut *mut c_void);
    fn nvml_memory as nvmlDeviceGetMemoryInfo(device: *mut c_void, memory: *mut [u64; 3]);
}

/// The current context's handle; 0: none.
pub fn current_context() -> usize {
    let mut context = 0;
    // SAFETY: it writes one handle.
    if unsafe { ctx_get_current(&raw mut context) } == SUCCESS { context } else { 0 }
}

/// The handle of a device's primary context; 0 where it isn't active.
pub fn primary_context(device: i32) -> usize {
    let mut context = 0;
    // SAFETY: it writes one handle. The hold that is taken to ask is given up again; where the context is active, it isn't
    // the only one.
    unsafe {
        if primary_is_active(device) == Some(true) && primary_retain(&raw mut context, device) == SUCCESS {
            primary_release(device);
        }
    }
    context
}

/// Whether a device's primary context is there. `None`: it can't be told.
pub fn primary_is_active(device: i32) -> Option<bool> {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: each writes one number.
    (unsafe { primary_state(device, &raw mut flags, &raw mut active) } == SUCCESS).then_some(active != 0)
}

/// Bytes that a pool has taken from the device, and those of them that are in use.
pub fn pool_memory(pool: usize) -> Option<(u64, u64)> {
    let read = |attribute| {
        let mut value = 0;
        // SAFETY: both attributes are 64 bits wide.
        (unsafe { pool_attribute(pool, attribute, &raw mut value) } == SUCCESS).then_some(value)
    };
    Some((read(POOL_RESERVED)?, read(POOL_USED)?))
}

/// Bytes that graphs have taken from a device.
pub fn graph_memory(device: i32) -> Option<u64> {
    let mut value = 0;
    // SAFETY: the attribute is 64 bits wide.
    (unsafe { device_graph_attribute(device, GRAPH_RESERVED, &raw mut value) } == SUCCESS).then_some(value)
}

/// What a `_ptsz` entry point takes for a stream: 0 is the thread's own default stream, `CU_STREAM_PER_THREAD`.
pub fn per_thread(stream: usize) -> usize {
    if stream == 0 { 2 } else { stream }
}

/// Whether a stream is being captured into a graph: what is done on it then happens later.
pub fn is_capturing(stream: usize) -> bool {
    capture(stream).is_some_and(|status| status != 0)
}

/// Whether an event may be recorded on a stream: it isn't being captured, nor is another that it would wait for.
pub fn is_ordinary(stream: usize) -> bool {
    capture(stream) == Some(0)
}

/// CUstreamCaptureStatus. `None`: it can't be told, as of a stream that waits for one that is being captured.
fn capture(stream: usize) -> Option<i32> {
    let mut status = 0;
    // SAFETY: it writes one enumeration.
    (unsafe { stream_is_capturing(stream, &raw mut status) } == SUCCESS).then_some(status)
}

/// Bytes in use on a device, by NVML: all processes' together. `name` is its UUID and a zero.
pub fn device_memory_used(name: &[u8]) -> Option<u64> {
    NVML_SHADOW.find(c"nvmlInit_v2")?;
    let mut device = core::ptr::null_mut();
    let mut memory = [0; 3];
    // SAFETY: a C string, a place for a handle, and nvmlMemory_t: total, free, used. Initialising counts up.
    let answers = unsafe {
        let ready = nvml_init() == SUCCESS && nvml_handle(name.as_ptr().cast(), &raw mut device) == SUCCESS;
        ready && nvml_memory(device, &raw mut memory) == SUCCESS
    };
    answers.then_some(memory[2])
}
