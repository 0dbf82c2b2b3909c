//! NVML: GPUs, who uses how much of them, Xid errors, and the driver's caps for cgroups.

use std::{
    collections::HashMap,
    ffi::{CString, c_char, c_void},
    os::unix::ffi::OsStrExt,
    path::Path,
};

use nvml_wrapper::{
    Device, EventSet, Nvml,
    bitmasks::event::EventTypes,
    enum_wrappers::device::ComputeMode,
    enums::{device::UsedGpuMemory, event::XidError},
    error::NvmlError,
    struct_wrappers::device::ProcessInfo,
};
use thiserror::Error;

/// What NVML refused.
#[derive(Debug, Error)]
pub enum DriverError {
    /// The library can't be loaded or doesn't start.
    #[error("{library}: {source}")]
    Start {
        /// The library.
        library: String,
        /// NVML's word.
        source: NvmlError,
    },
    /// A call failed.
    #[error("{call}: {source}")]
    Call {
        /// NVML's name of it.
        call: &'static str,
        /// NVML's word.
        source: NvmlError,
    },
    /// A cap couldn't be set, or isn't so when read back.
    #[error("{0}")]
    Cap(String),
}

/// A GPU, or a MIG instance, that shares can name.
#[derive(Debug)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// NVML's index of the GPU that it is, or is part of.
    pub index: u32,
    /// Whether it is a MIG instance.
    pub instance: bool,
    device: Device<'static>,
}

/// A process that has a context on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its PID on the host.
    pub pid: u32,
    /// Bytes of the GPU's memory.
    pub used: u64,
}

/// `nvmlMemoryLimits_v1_t` of nvml.h: what a cgroup may use of a GPU. `soft` is a reservation, of which we make none.
#[repr(C)]
struct SetLimits {
    cgroup: *const c_char,
    soft: u64,
    hard: u64,
}

/// The same as it is read back, with what is used.
#[repr(C)]
struct GetLimits {
    cgroup: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

type Set = unsafe extern "C" fn(*mut c_void, *const SetLimits) -> u32;
type Get = unsafe extern "C" fn(*mut c_void, *mut GetLimits) -> u32;

/// The driver, as long as we run.
pub struct Driver {
    nvml: &'static Nvml,
    caps: Option<(Set, Get)>,
    /// Its version, such as `615.20`.
    pub version: String,
}

impl Driver {
    /// Loads NVML. It stays loaded.
    pub fn open(library: &Path) -> Result<Self, DriverError> {
        let start = |source| DriverError::Start { library: library.display().to_string(), source };
        let nvml: &'static Nvml =
            Box::leak(Box::new(Nvml::builder().lib_path(library.as_os_str()).init().map_err(start)?));
        let version = nvml.sys_driver_version().map_err(call("nvmlSystemGetDriverVersion"))?;
        Ok(Self { nvml, caps: cap_calls(library), version })
    }

    /// Keeps a GPU to the programs of one MPS server, or opens it to all again.
    pub fn set_exclusive(&self, uuid: &str, exclusive: bool) -> Result<(), DriverError> {
        let mut device = self.nvml.device_by_uuid(uuid).map_err(call("nvmlDeviceGetHandleByUUID"))?;
        let mode = if exclusive { ComputeMode::ExclusiveProcess } else { ComputeMode::Default };
        device.set_compute_mode(mode).map_err(call("nvmlDeviceSetComputeMode"))
    }

    /// Whether NVML has the calls for caps.
    pub fn has_cap_calls(&self) -> bool {
        self.caps.is_some()
    }

    /// The GPUs that shares can name: those without MIG, and the instances of the others.
    pub fn gpus(&self) -> Result<Vec<Gpu>, DriverError> {
        let mut gpus = Vec::new();
        for index in 0..self.nvml.device_count().map_err(call("nvmlDeviceGetCount_v2"))? {
            let device = self.nvml.device_by_index(index).map_err(call("nvmlDeviceGetHandleByIndex_v2"))?;
            let instances: Vec<Device<'static>> = (0..device.mig_device_count().unwrap_or(0))
                // Positions with no instance answer "not found".
                .filter_map(|position| device.mig_device_by_index(position).ok())
                .collect();
            let instance = !instances.is_empty();
            for device in if instance { instances } else { vec![device] } {
                gpus.push(Gpu {
                    uuid: device.uuid().map_err(call("nvmlDeviceGetUUID"))?,
                    memory_bytes: device.memory_info().map_or(0, |memory| memory.total),
                    index,
                    instance,
                    device,
                });
            }
        }
        Ok(gpus)
    }

    /// An event set that tells of Xid errors of all GPUs that have them.
    pub fn xids(&self) -> Result<Xids, DriverError> {
        let mut set = self.nvml.create_event_set().map_err(call("nvmlEventSetCreate"))?;
        for index in 0..self.nvml.device_count().map_err(call("nvmlDeviceGetCount_v2"))? {
            let device = self.nvml.device_by_index(index).map_err(call("nvmlDeviceGetHandleByIndex_v2"))?;
            if device.supported_event_types().is_ok_and(|kinds| kinds.contains(EventTypes::CRITICAL_XID_ERROR)) {
                set = device
                    .register_events(EventTypes::CRITICAL_XID_ERROR, set)
                    .map_err(|error| DriverError::Call { call: "nvmlDeviceRegisterEvents", source: error.error })?;
            }
        }
        Ok(Xids(set))
    }

    /// Caps what a cgroup may use of a GPU, and reads it back.
    pub fn cap(&self, cgroup: &Path, uuid: &str, bytes: u64) -> Result<(), DriverError> {
        let Some((set, get)) = self.caps else {
            return Err(DriverError::Cap(format!(
                "driver {}'s NVML has no nvmlDeviceSetMemoryLimits_v1; it came with R615",
                self.version
            )));
        };
        let device = self.nvml.device_by_uuid(uuid).map_err(call("nvmlDeviceGetHandleByUUID"))?;
        let name = CString::new(cgroup.as_os_str().as_bytes())
            .map_err(|_| DriverError::Cap("a path with a zero byte".into()))?;
        let refused = |what: &str, code: u32| {
            DriverError::Cap(format!("{uuid}: {what} {}: {}", cgroup.display(), words_for(code)))
        };
        let limits = SetLimits { cgroup: name.as_ptr(), soft: 0, hard: bytes };
        let mut is = GetLimits { cgroup: name.as_ptr(), soft: u64::MAX, hard: 0, used: 0 };
        match set_limits(set, &device, &limits) {
            0 => {}
            code => return Err(refused("nvmlDeviceSetMemoryLimits_v1 for", code)),
        }
        match get_limits(get, &device, &mut is) {
            0 if (is.soft, is.hard) == (0, bytes) => Ok(()),
            0 => Err(DriverError::Cap(format!(
                "{uuid}: the cap on {} was set to {bytes} bytes and reads back as {} with {} reserved",
                cgroup.display(),
                is.hard,
                is.soft
            ))),
            code => Err(refused("nvmlDeviceGetMemoryLimits_v1 for", code)),
        }
    }
}

impl Gpu {
    /// Bytes of its memory that are in use, by whomever.
    pub fn used_bytes(&self) -> Result<u64, DriverError> {
        Ok(self.device.memory_info().map_err(call("nvmlDeviceGetMemoryInfo"))?.used)
    }

    /// The processes that have a context on it. One that computes and draws is there once, with the larger figure.
    pub fn processes(&self) -> Result<Vec<GpuProcess>, DriverError> {
        let mut all: HashMap<u32, u64> = HashMap::new();
        let lists: [(&'static str, ProcessList); 3] = [
            ("nvmlDeviceGetComputeRunningProcesses_v3", |device| device.running_compute_processes()),
            ("nvmlDeviceGetGraphicsRunningProcesses_v3", |device| device.running_graphics_processes()),
            ("nvmlDeviceGetMPSComputeRunningProcesses_v3", |device| device.mps_running_compute_processes()),
        ];
        for (name, list) in lists {
            for process in several_tries(|| list(&self.device)).map_err(call(name))? {
                let used = match process.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => bytes,
                    UsedGpuMemory::Unavailable => 0,
                };
                let known = all.entry(process.pid).or_default();
                *known = used.max(*known);
            }
        }
        Ok(all.into_iter().map(|(pid, used)| GpuProcess { pid, used }).collect())
    }
}

/// A list that grew while it was asked for is asked for again; what this GPU or driver doesn't have is empty.
fn several_tries<T>(list: impl Fn() -> Result<Vec<T>, NvmlError>) -> Result<Vec<T>, NvmlError> {
    for _ in 0..4 {
        match list() {
            Err(NvmlError::InsufficientSize(_)) => {}
            Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => return Ok(Vec::new()),
            other => return other,
        }
    }
    list()
}

/// One of NVML's calls that list processes.
type ProcessList = fn(&Device<'static>) -> Result<Vec<ProcessInfo>, NvmlError>;

/// Events of Xid errors.
pub struct Xids(EventSet<'static>);

impl Xids {
    /// Those since this was last asked: the GPU's index and the Xid.
    pub fn next(&self) -> Vec<(u32, u64)> {
        let mut found = Vec::new();
        // No more at a time than a broken GPU can flood us with.
        while found.len() < 256
            && let Ok(event) = self.0.wait(0)
        {
            if let (Some(xid), Ok(index)) = (event.event_data, event.device.index()) {
                found.push((index, xid_number(&xid)));
            }
        }
        found
    }
}

fn xid_number(xid: &XidError) -> u64 {
    match xid {
        XidError::Value(value) => *value,
        // What nvml.h gives for an Xid that isn't known.
        XidError::Unknown => 999,
    }
}

fn call(call: &'static str) -> impl FnOnce(NvmlError) -> DriverError {
    move |source| DriverError::Call { call, source }
}

/// nvmlReturn_t in words, for those that these calls give.
fn words_for(code: u32) -> String {
    let words = match code {
        2 => "invalid argument",
        3 => "not supported here (driver, GPU or kernel)",
        4 => "no permission; run gpufence-node as root",
        6 => "no such cgroup",
        7 => "no room for one more",
        13 => "NVML has no such function",
        15 => "the GPU is lost",
        _ => return format!("NVML error {code}"),
    };
    format!("{words} (NVML error {code})")
}

/// The calls' addresses in the library that NVML's wrapper has loaded, which doesn't know them yet.
#[allow(unsafe_code, reason = "one-line wrappers")]
fn cap_calls(library: &Path) -> Option<(Set, Get)> {
    // SAFETY: the library is loaded already, so nothing of it runs.
    let library = unsafe { libloading::Library::new(library) }.ok()?;
    // SAFETY: the types are nvml.h's.
    let (set, get) = unsafe {
        (library.get::<Set>(b"nvmlDeviceSetMemoryLimits_v1"), library.get::<Get>(b"nvmlDeviceGetMemoryLimits_v1"))
    };
    let calls = (*set.ok()?, *get.ok()?);
    // What it holds must not go while the addresses are in use.
    std::mem::forget(library);
    Some(calls)
}

#[allow(unsafe_code, reason = "one-line wrapper")]
fn set_limits(set: Set, device: &Device<'_>, limits: &SetLimits) -> u32 {
    // SAFETY: the handle is NVML's own, and the structure and its name live until the call has returned.
    unsafe { set(device.handle().cast(), limits) }
}

#[allow(unsafe_code, reason = "one-line wrapper")]
fn get_limits(get: Get, device: &Device<'_>, limits: &mut GetLimits) -> u32 {
    // SAFETY: as above; it writes the structure alone.
    unsafe { get(device.handle().cast(), limits) }
}
