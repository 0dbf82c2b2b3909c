//! What a node has: its GPUs, the driver and the driver's files, kept as `/run/gpufence/inventory.json`.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    devices::{Devices, Gpu, MigInstance},
    driver::DriverFiles,
    error::{CdiError, io_error},
    proc,
    root::Root,
};

/// The version of the file's shape. One of another version is made anew.
const FORMAT: u32 = 1;

/// The folders under which everything is found.
#[derive(Debug)]
pub struct Roots {
    /// Where the driver's files are.
    pub driver: Root,
    /// Whose proc, sys and dev describe the devices: the driver root if it has a `/proc/devices`, as `/` and a
    /// simulated one do, else `/`.
    pub host: Root,
}

impl Roots {
    /// Opens the driver root and finds the host's.
    pub fn open(driver_root: &Path) -> Result<Self, CdiError> {
        let driver = Root::open(driver_root)?;
        let own = driver.open_path("/proc/devices")?.is_some();
        let host = Root::open(if own { driver_root } else { Path::new("/") })?;
        Ok(Self { driver, host })
    }
}

/// What a node has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Inventory {
    /// The version of this shape.
    pub format: u32,
    /// The running driver's version, such as `550.163.01`.
    pub driver_version: String,
    /// The driver root.
    pub driver_root: PathBuf,
    /// The GPUs and their nodes.
    pub devices: Devices,
    /// The driver's files.
    pub driver: DriverFiles,
}

/// A GPU or MIG instance that a share names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found<'a> {
    /// A whole GPU.
    Gpu(&'a Gpu),
    /// A MIG instance of a GPU.
    Mig(&'a Gpu, &'a MigInstance),
}

impl Inventory {
    /// Looks at everything.
    pub fn discover(roots: &Roots) -> Result<Self, CdiError> {
        let driver_version = running_version(roots)?;
        let devices = Devices::discover(&roots.host)?;
        Self::with_devices(roots, driver_version, devices)
    }

    fn with_devices(roots: &Roots, driver_version: String, devices: Devices) -> Result<Self, CdiError> {
        let kernel = nix::sys::utsname::uname().map_err(io_error("uname", "/"))?;
        let driver = DriverFiles::discover(&roots.driver, &driver_version, &kernel.release().to_string_lossy())?;
        Ok(Self { format: FORMAT, driver_version, driver_root: roots.driver.path().to_owned(), devices, driver })
    }

    /// The inventory for one create: devices are read afresh, the driver's files come from `file` while it is of the
    /// running driver, and are found anew and written there when it is not.
    pub fn current(roots: &Roots, file: &Path) -> Result<Self, CdiError> {
        let driver_version = running_version(roots)?;
        let mut devices = Devices::discover(&roots.host)?;
        let kept = Self::read(file).ok().filter(|kept| {
            kept.format == FORMAT && kept.driver_version == driver_version && kept.driver_root == roots.driver.path()
        });
        let Some(mut kept) = kept else {
            let found = Self::with_devices(roots, driver_version, devices)?;
            found.write(file)?;
            return Ok(found);
        };
        devices.adopt_nvml(&kept.devices);
        kept.devices = devices;
        Ok(kept)
    }

    /// Reads an inventory file.
    pub fn read(file: &Path) -> Result<Self, CdiError> {
        let bytes = fs::read(file).map_err(io_error::<std::io::Error>("read", file))?;
        serde_json::from_slice(&bytes).map_err(|source| CdiError::Json { path: file.to_owned(), source })
    }

    /// Writes it, by temporary file and rename.
    pub fn write(&self, file: &Path) -> Result<(), CdiError> {
        write_json(file, self)
    }

    /// NVML's library: the driver root's own, else whichever the loader finds.
    pub fn nvml_library(&self, roots: &Roots) -> PathBuf {
        let name = "libnvidia-ml.so.1";
        let own = self.driver.libraries.iter().find(|library| library.links.iter().any(|link| link == name));
        own.map_or_else(|| name.into(), |library| roots.driver.host_path(&library.path))
    }

    /// The GPU at `index`, or with `uuid`: `GPU-…`, `MIG-…`, or NVML's older `MIG-GPU-<uuid>/<GPU instance>/<compute
    /// instance>`, which needs no NVML.
    pub fn find(&self, index: Option<u32>, name: &str) -> Result<Found<'_>, CdiError> {
        let gpus = &self.devices.gpus;
        let found = gpus.iter().find_map(|gpu| {
            let itself = match index {
                Some(index) => gpu.index == Some(index),
                None => gpu.uuid.as_deref() == Some(name),
            };
            if itself {
                return Some(Found::Gpu(gpu));
            }
            let old_name = |instance: &MigInstance| {
                format!(
                    "MIG-{}/{}/{}",
                    gpu.uuid.as_deref().unwrap_or_default(),
                    instance.gpu_instance,
                    instance.compute_instance
                )
            };
            gpu.mig
                .iter()
                .find(|instance| {
                    index.is_none() && (instance.uuid.as_deref() == Some(name) || old_name(instance) == name)
                })
                .map(|instance| Found::Mig(gpu, instance))
        });
        match found {
            Some(Found::Gpu(gpu) | Found::Mig(gpu, _)) if gpu.index.is_none() => {
                Err(CdiError::Excluded { gpu: name.to_owned() })
            }
            Some(found) => Ok(found),
            None => Err(CdiError::NoSuchGpu { gpu: name.to_owned(), present: self.present() }),
        }
    }

    /// The GPUs in words, for an error.
    fn present(&self) -> String {
        let describe = |gpu: &Gpu| {
            let uuid = gpu.uuid.as_deref().unwrap_or("no UUID yet");
            gpu.index.map_or_else(|| format!("{uuid} (excluded)"), |index| format!("{index}: {uuid}"))
        };
        let words: Vec<String> = self.devices.gpus.iter().map(describe).collect();
        if words.is_empty() { "none".into() } else { words.join(", ") }
    }
}

fn running_version(roots: &Roots) -> Result<String, CdiError> {
    proc::driver_version(&roots.host)?
        .ok_or_else(|| CdiError::NoDriver { path: roots.host.host_path("/proc/driver/nvidia/version") })
}

/// Writes JSON by temporary file and rename, so that a reader never sees half of it.
pub(crate) fn write_json(file: &Path, value: &impl Serialize) -> Result<(), CdiError> {
    let mut bytes =
        serde_json::to_vec_pretty(value).map_err(|source| CdiError::Json { path: file.to_owned(), source })?;
    bytes.push(b'\n');
    let folder = file.parent().unwrap_or_else(|| Path::new("/"));
    fs::create_dir_all(folder).map_err(io_error::<std::io::Error>("create folder", folder))?;
    let temporary =
        folder.join(format!(".{}.{}", file.file_name().unwrap_or_default().to_string_lossy(), std::process::id()));
    let write = || {
        let mut output = fs::File::create(&temporary)?;
        output.write_all(&bytes)?;
        fs::rename(&temporary, file)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        CdiError::Io { action: "write", path: file.to_owned(), source }
    })
}
