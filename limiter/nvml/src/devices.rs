//! The GPUs of the grant, in its order.

use core::{
    ffi::{c_char, c_void},
    ptr,
};

use gpufence_limiter::{
    limits::{Limit, MAX_GPUS},
    share::{Share, State, state},
    text::Text,
};

use crate::real::{
    Answer, Device, INVALID_ARGUMENT, MISSING, NOT_FOUND, NVML, SUCCESS, handle_by_index, handle_by_uuid, parent_of,
};

/// What the grant names, as the real NVML knows it by now.
#[derive(Debug)]
pub struct Granted {
    /// Limits and usage.
    pub share: &'static Share,
    /// The handle of each of the limits; null where NVML has none.
    handles: [Device; MAX_GPUS],
    /// The GPU of each: itself, or the one that a MIG instance is part of.
    gpus: [Device; MAX_GPUS],
}

/// What the grant names. `None`: everything is shown.
///
/// It is found anew each time: handles need not outlive nvmlShutdown.
pub fn granted() -> Option<Granted> {
    let State::Limited(share) = state() else { return None };
    let limits = share.limits.gpus();
    let mut granted = Granted { share, handles: [ptr::null_mut(); MAX_GPUS], gpus: [ptr::null_mut(); MAX_GPUS] };
    for (number, limit) in limits.iter().enumerate() {
        let Some(handle) = handle_of(limit, limits.len() == 1) else { continue };
        let mut parent = ptr::null_mut();
        // SAFETY: a handle, and a place for one.
        let instance = unsafe { parent_of(handle, &raw mut parent) } == SUCCESS;
        granted.handles[number] = handle;
        granted.gpus[number] = if instance { parent } else { handle };
    }
    Some(granted)
}

/// The handle of a limit's GPU. Where the grant names its only GPU by something else than a UUID, it is the only one.
fn handle_of(limit: &Limit, only: bool) -> Option<Device> {
    let mut name = Text::<72>::default();
    name.push(limit.name());
    name.push(b"\0");
    let mut handle = ptr::null_mut();
    // SAFETY: a C string, and a place for a handle.
    let answer = unsafe { handle_by_uuid(name.as_bytes().as_ptr().cast(), &raw mut handle) };
    if answer == SUCCESS {
        return Some(handle);
    }
    let names_a_uuid = limit.name().starts_with(b"GPU-") || limit.name().starts_with(b"MIG-");
    // SAFETY: a place for a handle.
    (only && !names_a_uuid && unsafe { handle_by_index(0, &raw mut handle) } == SUCCESS).then_some(handle)
}

impl Granted {
    /// The GPUs, each once.
    pub fn gpus(&self) -> impl Iterator<Item = Device> {
        let first =
            |(number, gpu): (usize, &Device)| (!gpu.is_null() && !self.gpus[..number].contains(gpu)).then_some(*gpu);
        self.gpus.iter().enumerate().filter_map(first)
    }

    /// The MIG instances of a GPU.
    fn instances(&self, gpu: Device) -> impl Iterator<Item = Device> {
        let pairs = self.handles.iter().zip(&self.gpus);
        pairs.filter(move |(handle, parent)| **parent == gpu && **handle != gpu).map(|(handle, _)| *handle)
    }

    /// Which of the limits is a handle's.
    pub fn limit_of(&self, device: Device) -> Option<usize> {
        self.handles.iter().position(|handle| !handle.is_null() && *handle == device)
    }

    /// Whether a GPU is here only for the sake of an instance of it.
    pub fn is_parent_only(&self, device: Device) -> bool {
        self.limit_of(device).is_none() && self.gpus().any(|gpu| gpu == device)
    }

    fn has(&self, device: Device) -> bool {
        self.limit_of(device).is_some() || self.is_parent_only(device)
    }
}

/// Leaves a handle that was found where the grant has it.
///
/// # Safety
/// `device` is null or where the handle was written.
unsafe fn only_granted(answer: Answer, device: *mut Device) -> Answer {
    // SAFETY: by the contract.
    let Some(place) = (unsafe { device.as_mut() }) else { return answer };
    match granted() {
        Some(granted) if answer == SUCCESS && !granted.has(*place) => {
            *place = ptr::null_mut();
            NOT_FOUND
        }
        _ => answer,
    }
}

/// Writes one thing where a caller wants it.
///
/// # Safety
/// `place` is null or where a `T` may be written.
unsafe fn give<T>(place: *mut T, value: Option<T>, none: Answer) -> Answer {
    let Some(value) = value else { return none };
    if place.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: by the contract.
    unsafe { place.write(value) };
    SUCCESS
}

fn number_of(mut devices: impl Iterator<Item = Device>, device: Device) -> Option<u32> {
    devices.position(|other| other == device).and_then(|number| u32::try_from(number).ok())
}

gpufence_limiter::entry_points! { NVML, MISSING;
    /// How many GPUs there are, of NVML 4 and before.
    fn nvmlDeviceGetCount(count: *mut u32) |real| {
        match granted() {
            Some(granted) => give(count, u32::try_from(granted.gpus().count()).ok(), NOT_FOUND),
            None => real(count),
        }
    }

    /// How many GPUs there are.
    fn nvmlDeviceGetCount_v2(count: *mut u32) |real| {
        match granted() {
            Some(granted) => give(count, u32::try_from(granted.gpus().count()).ok(), NOT_FOUND),
            None => real(count),
        }
    }

    /// The GPU of a number, of NVML 4 and before.
    fn nvmlDeviceGetHandleByIndex(index: u32, device: *mut Device) |real| {
        match granted() {
            Some(granted) => give(device, granted.gpus().nth(index as usize), INVALID_ARGUMENT),
            None => real(index, device),
        }
    }

    /// The GPU of a number.
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut Device) |real| {
        match granted() {
            Some(granted) => give(device, granted.gpus().nth(index as usize), INVALID_ARGUMENT),
            None => real(index, device),
        }
    }

    /// A GPU's number; a MIG instance's, on its GPU.
    fn nvmlDeviceGetIndex(device: Device, index: *mut u32) |real| {
        let Some(granted) = granted() else { return real(device, index) };
        let parent = granted.limit_of(device).map_or(device, |number| granted.gpus[number]);
        let number = if parent == device {
            number_of(granted.gpus(), device)
        } else {
            number_of(granted.instances(parent), device)
        };
        give(index, number, INVALID_ARGUMENT)
    }

    /// A MIG instance of a GPU by its number.
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Device, index: u32, instance: *mut Device) |real| {
        match granted() {
            Some(granted) => give(instance, granted.instances(device).nth(index as usize), NOT_FOUND),
            None => real(device, index, instance),
        }
    }

    /// A GPU or MIG instance by its UUID.
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut Device) |real| {
        only_granted(real(uuid, device), device)
    }

    /// The same, by a UUID in one of several forms.
    fn nvmlDeviceGetHandleByUUIDV(uuid: *const c_void, device: *mut Device) |real| {
        only_granted(real(uuid, device), device)
    }

    /// A GPU by its PCI address, of NVML 4 and before.
    fn nvmlDeviceGetHandleByPciBusId(address: *const c_char, device: *mut Device) |real| {
        only_granted(real(address, device), device)
    }

    /// A GPU by its PCI address.
    fn nvmlDeviceGetHandleByPciBusId_v2(address: *const c_char, device: *mut Device) |real| {
        only_granted(real(address, device), device)
    }

    /// A GPU by its board's serial number.
    fn nvmlDeviceGetHandleBySerial(serial: *const c_char, device: *mut Device) |real| {
        only_granted(real(serial, device), device)
    }
}
