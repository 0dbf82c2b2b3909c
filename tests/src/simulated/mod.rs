//! A simulated driver root: a folder that looks like a machine with NVIDIA GPUs, for machines that have none.
//!
//! * [`description`]: which machine, in a few words;
//! * [`libraries`]: the driver's files, which are real shared libraries with the true names and sonames;
//! * [`nodes`]: proc, sys and dev look-alikes, with device nodes of the true majors.
//!
//! Everything but the kernel driver is real: opening a denied node gives EPERM from the device cgroup, and an allowed
//! one ENXIO, since no driver stands behind it.

pub mod description;
pub mod libraries;
pub mod nodes;

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};

pub use description::Description;

/// Builds the machine of `description` in `folder`, which must be empty or not there.
pub fn build(description: &Description, folder: &Path) -> Result<()> {
    refuse_beside_real_gpus(Path::new("/"))?;
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
        bail!("{} is not empty; name a new folder", folder.display());
    }
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    libraries::install(description, folder)?;
    nodes::install(description, folder)
}

/// The nodes have the true majors: where a driver stands behind them, a test's mistake would reach real GPUs.
fn refuse_beside_real_gpus(host: &Path) -> Result<()> {
    for sign in ["proc/driver/nvidia/version", "dev/nvidiactl", "dev/nvidia0"] {
        let path = host.join(sign);
        if path.exists() {
            bail!(
                "{} exists: this machine has real NVIDIA nodes, and a simulated root would have the same; use the real driver root instead",
                path.display()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_where_gpus_are_real() {
        let folder = tempfile::tempdir().unwrap();
        refuse_beside_real_gpus(folder.path()).unwrap();
        fs::create_dir(folder.path().join("dev")).unwrap();
        fs::write(folder.path().join("dev/nvidiactl"), "").unwrap();
        let error = refuse_beside_real_gpus(folder.path()).unwrap_err().to_string();
        assert!(error.contains("real NVIDIA nodes"), "{error}");
    }
}
