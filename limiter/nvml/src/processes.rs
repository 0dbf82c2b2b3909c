//! The container's processes, from its usage table, by the PIDs that it knows them by. NVML would say PIDs of the host.

use core::ffi::c_void;

use gpufence_limiter::table::{Word, parts};

use crate::{
    devices::{Granted, granted},
    real::{Answer, Device, INSUFFICIENT_SIZE, INVALID_ARGUMENT, MISSING, NOT_FOUND, NOT_SUPPORTED, NVML, SUCCESS},
};

/// nvmlProcessInfo_v1_t.
#[repr(C)]
#[derive(Debug)]
pub struct ProcessV1 {
    pid: u32,
    used: u64,
}

/// nvmlProcessInfo_v2_t, and nvmlProcessInfo_t of today.
#[repr(C)]
#[derive(Debug)]
pub struct ProcessV2 {
    pid: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// In [`ProcessV2`]: on no MIG instance that is to be told.
const NO_INSTANCE: u32 = u32::MAX;

/// One process and the bytes that it holds.
trait Process {
    fn new(pid: u32, used: u64) -> Self;
}

impl Process for ProcessV1 {
    fn new(pid: u32, used: u64) -> Self {
        Self { pid, used }
    }
}

impl Process for ProcessV2 {
    fn new(pid: u32, used: u64) -> Self {
        Self { pid, used, gpu_instance: NO_INSTANCE, compute_instance: NO_INSTANCE }
    }
}

/// The list, as NVML gives lists: how many there are, and they themselves where there is room for all.
///
/// # Safety
/// `count` is null or a number's place; `list` has room for as many as that number says.
unsafe fn list<P: Process>(granted: &Granted, device: Device, count: *mut u32, list: *mut P) -> Answer {
    // SAFETY: by the contract.
    let Some(count) = (unsafe { count.as_mut() }) else { return INVALID_ARGUMENT };
    let Some(number) = granted.limit_of(device) else {
        *count = 0;
        return SUCCESS;
    };
    let holds = || {
        // Slots of the dead are empty afterwards.
        granted.share.used(number);
        granted.share.table.used_slots().iter().filter_map(move |slot| {
            let (pid, _) = parts(slot.owner.get());
            let held = slot.held[number].get();
            (pid != 0 && held != 0).then_some((pid, held))
        })
    };
    let room = if list.is_null() { 0 } else { *count as usize };
    let all = u32::try_from(holds().count()).unwrap_or(u32::MAX);
    *count = all;
    if all as usize > room {
        return INSUFFICIENT_SIZE;
    }
    let mut written = 0;
    for (pid, used) in holds().take(room) {
        // SAFETY: by the contract there is room for that many.
        unsafe { list.add(written).write(P::new(pid, used)) };
        written += 1;
    }
    // One may have ended meanwhile.
    *count = u32::try_from(written).unwrap_or(all);
    SUCCESS
}

/// No process.
///
/// # Safety
/// `count` is null or a number's place.
unsafe fn none(count: *mut u32) -> Answer {
    // SAFETY: by the contract.
    match unsafe { count.as_mut() } {
        Some(count) => {
            *count = 0;
            SUCCESS
        }
        None => INVALID_ARGUMENT,
    }
}

gpufence_limiter::entry_points! { NVML, MISSING;
    /// Processes that compute, of NVML 10 and before.
    fn nvmlDeviceGetComputeRunningProcesses(device: Device, count: *mut u32, infos: *mut ProcessV1) |real| {
        match granted() {
            Some(granted) => list(&granted, device, count, infos),
            None => real(device, count, infos),
        }
    }

    /// Processes that compute.
    fn nvmlDeviceGetComputeRunningProcesses_v2(device: Device, count: *mut u32, infos: *mut ProcessV2) |real| {
        match granted() {
            Some(granted) => list(&granted, device, count, infos),
            None => real(device, count, infos),
        }
    }

    /// Processes that compute.
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: Device, count: *mut u32, infos: *mut ProcessV2) |real| {
        match granted() {
            Some(granted) => list(&granted, device, count, infos),
            None => real(device, count, infos),
        }
    }

    /// Processes that draw: the limiter doesn't see them.
    fn nvmlDeviceGetGraphicsRunningProcesses(device: Device, count: *mut u32, infos: *mut ProcessV1) |real| {
        if granted().is_some() { none(count) } else { real(device, count, infos) }
    }

    /// Processes that draw.
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: Device, count: *mut u32, infos: *mut ProcessV2) |real| {
        if granted().is_some() { none(count) } else { real(device, count, infos) }
    }

    /// Processes that draw.
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: Device, count: *mut u32, infos: *mut ProcessV2) |real| {
        if granted().is_some() { none(count) } else { real(device, count, infos) }
    }

    /// Clients of the MPS server, other containers' too.
    fn nvmlDeviceGetMPSComputeRunningProcesses(device: Device, count: *mut u32, infos: *mut ProcessV1) |real| {
        if granted().is_some() { none(count) } else { real(device, count, infos) }
    }

    /// Clients of the MPS server.
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Device, count: *mut u32, infos: *mut ProcessV2) |real| {
        if granted().is_some() { none(count) } else { real(device, count, infos) }
    }

    /// Clients of the MPS server.
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Device, count: *mut u32, infos: *mut ProcessV2) |real| {
        if granted().is_some() { none(count) } else { real(device, count, infos) }
    }

    /// How busy each process keeps the card, by PIDs of the host.
    fn nvmlDeviceGetProcessUtilization(device: Device, samples: *mut c_void, count: *mut u32, since: u64) |real| {
        if granted().is_some() { NOT_FOUND } else { real(device, samples, count, since) }
    }

    /// The same, with more.
    fn nvmlDeviceGetProcessesUtilizationInfo(device: Device, processes: *mut c_void) |real| {
        if granted().is_some() { NOT_SUPPORTED } else { real(device, processes) }
    }

    /// All processes of the card with what they hold.
    fn nvmlDeviceGetRunningProcessDetailList(device: Device, processes: *mut c_void) |real| {
        if granted().is_some() { NOT_SUPPORTED } else { real(device, processes) }
    }

    /// Processes of the card that have ended, too.
    fn nvmlDeviceGetAccountingPids(device: Device, count: *mut u32, pids: *mut u32) |real| {
        if granted().is_some() { NOT_SUPPORTED } else { real(device, count, pids) }
    }

    /// What one of them has used.
    fn nvmlDeviceGetAccountingStats(device: Device, pid: u32, statistics: *mut c_void) |real| {
        if granted().is_some() { NOT_SUPPORTED } else { real(device, pid, statistics) }
    }
}
