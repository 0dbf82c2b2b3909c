//! Memory sizes and MIG UUIDs from NVML, only where asked for: loading it takes tens of milliseconds and opens GPUs.

use nvml_wrapper::{Device, Nvml, error::NvmlError};

use crate::{
    error::CdiError,
    inventory::{Inventory, Roots},
};

/// Fills in what only NVML knows. `library` names the one to load; by default the driver root's own.
pub fn enrich(inventory: &mut Inventory, roots: &Roots, library: Option<&str>) -> Result<(), CdiError> {
    let describe = |error: &NvmlError| CdiError::Nvml(error.to_string());
    let library = library.map_or_else(|| inventory.nvml_library(roots).to_string_lossy().into_owned(), str::to_owned);
    let nvml = Nvml::builder().lib_path(library.as_ref()).init().map_err(|error| describe(&error))?;
    for gpu in &mut inventory.devices.gpus {
        if gpu.index.is_none() {
            continue;
        }
        let device = nvml.device_by_pci_bus_id(gpu.pci_address.as_str()).map_err(|error| describe(&error))?;
        gpu.uuid = Some(device.uuid().map_err(|error| describe(&error))?);
        gpu.memory_mib = memory_mib(&device).map_err(|error| describe(&error))?;
        if gpu.mig.is_empty() {
            continue;
        }
        let count = device.mig_device_count().map_err(|error| describe(&error))?;
        for position in 0..count {
            // Positions with no instance answer "not found"; they are gaps, not faults.
            let Ok(instance) = device.mig_device_by_index(position) else { continue };
            let (gpu_instance, compute_instance) = instance_ids(&nvml, &instance)
                .ok_or_else(|| CdiError::Nvml(format!("MIG instance {position} of {} has no ids", gpu.pci_address)))?;
            let known = gpu
                .mig
                .iter_mut()
                .find(|known| (known.gpu_instance, known.compute_instance) == (gpu_instance, compute_instance));
            if let Some(known) = known {
                known.uuid = Some(instance.uuid().map_err(|error| describe(&error))?);
                known.memory_mib = memory_mib(&instance).map_err(|error| describe(&error))?;
            }
        }
    }
    Ok(())
}

/// The ids of a MIG instance's GPU instance and compute instance, which nvml-wrapper has no call for.
#[allow(unsafe_code, reason = "one-line wrappers of NVML calls")]
fn instance_ids(nvml: &Nvml, instance: &Device<'_>) -> Option<(u32, u32)> {
    let (mut gpu_instance, mut compute_instance) = (0, 0);
    // SAFETY: the handle is valid while `nvml` lives, and both calls write one unsigned int.
    let answers = unsafe {
        let handle = instance.handle();
        [
            nvml.lib().nvmlDeviceGetGpuInstanceId(handle, &raw mut gpu_instance),
            nvml.lib().nvmlDeviceGetComputeInstanceId(handle, &raw mut compute_instance),
        ]
    };
    (answers == [0, 0]).then_some((gpu_instance, compute_instance))
}

/// Memory in MiB; `None` where the GPU shares the machine's and NVML has no figure of its own.
fn memory_mib(device: &Device<'_>) -> Result<Option<u64>, NvmlError> {
    match device.memory_info() {
        Ok(memory) => Ok(Some(memory.total / (1 << 20))),
        Err(NvmlError::NotSupported) => Ok(None),
        Err(error) => Err(error),
    }
}
