//! What the kernel driver would show: `/proc/driver/nvidia`, `/proc/devices`, a GPU's DRM folder, and device nodes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::Description;

/// NVIDIA's registered major, and DRM's.
const NVIDIA: u32 = 195;
const DRM: u32 = 226;

/// Writes proc, sys and dev look-alikes below `root`.
pub fn install(description: &Description, root: &Path) -> Result<()> {
    let [uvm, caps] = free_majors(&fs::read_to_string("/proc/devices").context("read /proc/devices")?);
    let write = |path: PathBuf, text: String| -> Result<()> {
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        Ok(fs::write(path, text)?)
    };
    let mut devices = format!("Character devices:\n  1 mem\n{NVIDIA} nvidia\n{NVIDIA} nvidiactl\n{caps} nvidia-caps\n");
    if description.uvm {
        devices.push_str(&format!("{uvm} nvidia-uvm\n"));
    }
    write(root.join("proc/devices"), devices + "\nBlock devices:\n  8 sd\n")?;
    let driver = root.join("proc/driver/nvidia");
    write(
        driver.join("version"),
        format!(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Apr  8 12:41:17 UTC 2025\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
            description.driver
        ),
    )?;
    let dev = root.join("dev");
    node(&dev.join("nvidiactl"), NVIDIA, 255)?;
    if description.uvm {
        node(&dev.join("nvidia-uvm"), uvm, 0)?;
        node(&dev.join("nvidia-uvm-tools"), uvm, 1)?;
    }
    for gpu in 0..description.gpus {
        let address = description.pci_address(gpu);
        let excluded = description.excluded.contains(&gpu);
        write(
            driver.join("gpus").join(&address).join("information"),
            format!(
                "Model: \t\t NVIDIA Simulated\nIRQ:   \t\t 64\nGPU UUID: \t {}\nBus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {gpu}\nGPU Excluded:\t {}\n",
                description.uuid(gpu),
                if excluded { "Yes" } else { "No" },
            ),
        )?;
        node(&dev.join(format!("nvidia{gpu}")), NVIDIA, gpu)?;
        let drm = root.join("sys/bus/pci/devices").join(&address).join("drm");
        for (name, minor) in [(format!("card{gpu}"), gpu), (format!("renderD{}", 128 + gpu), 128 + gpu)] {
            write(drm.join(&name).join("dev"), format!("{DRM}:{minor}\n"))?;
            node(&dev.join("dri").join(&name), DRM, minor)?;
        }
        // Minors of access nodes as the driver numbers them: for each GPU, for each GPU instance, itself and its compute instances.
        for instance in 0..description.instances(gpu) {
            let folder = driver.join(format!("capabilities/gpu{gpu}/mig/gi{}", instance + 1));
            let minor = 3 + gpu * 135 + (instance + 1) * 9;
            for (folder, minor) in [(folder.clone(), minor), (folder.join("ci0"), minor + 1)] {
                let text = format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
                write(folder.join("access"), text)?;
                node(&dev.join(format!("nvidia-caps/nvidia-cap{minor}")), caps, minor)?;
            }
        }
    }
    Ok(())
}

/// Majors for modules that take any, from the kernel's dynamic range and with no driver of this machine behind them.
fn free_majors(devices: &str) -> [u32; 2] {
    let taken = |major: &u32| devices.lines().any(|line| line.trim().starts_with(&format!("{major} ")));
    let mut free = (384..512).rev().filter(|major| !taken(major));
    [free.next().unwrap_or(511), free.next().unwrap_or(510)]
}

fn node(path: &Path, major: u32, minor: u32) -> Result<()> {
    fs::create_dir_all(path.parent().unwrap_or_else(|| Path::new("/")))?;
    let mode = Mode::from_bits_truncate(0o666);
    mknod(path, SFlag::S_IFCHR, mode, makedev(major.into(), minor.into()))
        .with_context(|| format!("mknod {}; run as root", path.display()))?;
    // mknod's mode goes through the umask.
    Ok(fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o666))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn majors_of_this_machine_are_left_alone() {
        assert_eq!(free_majors("Character devices:\n511 hidraw\n509 bsg\n"), [510, 508]);
    }
}
