//! What the NVIDIA kernel driver says of itself under `/proc`.

use std::collections::BTreeMap;

use crate::{
    error::CdiError,
    root::{Root, found},
};

/// Which major numbers the NVIDIA modules were given, by the name in `/proc/devices`: `nvidia`, `nvidia-uvm`,
/// `nvidia-caps`, `nvidia-modeset` and so on. Drivers before 550.40 call the first one `nvidia-frontend`; it stands
/// here as `nvidia`.
pub type Majors = BTreeMap<String, u32>;

/// One GPU, from `/proc/driver/nvidia/gpus/<PCI address>/information`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInformation {
    /// The PCI address, as the folder is called.
    pub pci_address: String,
    /// The UUID. `None` while the driver says `GPU-????????-…`, before the device is first opened.
    pub uuid: Option<String>,
    /// The model's name.
    pub model: String,
    /// The minor of its `/dev/nvidia<minor>`, which is not its index.
    pub minor: u32,
    /// Whether `NVreg_ExcludedGpus` keeps it from use.
    pub excluded: bool,
}

/// Reads `/proc/devices`: the character devices of the NVIDIA modules, gdrdrv among them.
pub fn majors(root: &Root) -> Result<Majors, CdiError> {
    let text = root.read_text("/proc/devices")?;
    let characters = text.split("Block devices:").next().unwrap_or_default();
    Ok(characters
        .lines()
        .filter_map(|line| {
            let (major, name) = line.trim().split_once(' ')?;
            let name = name.trim();
            let ours = name == "nvidia" || name.starts_with("nvidia-") || name == "gdrdrv";
            let name = if name == "nvidia-frontend" { "nvidia" } else { name };
            ours.then(|| Some((name.to_owned(), major.parse().ok()?))).flatten()
        })
        .collect())
}

/// The running driver's version, from the first line of `/proc/driver/nvidia/version`; `None` with no driver loaded.
pub fn driver_version(root: &Root) -> Result<Option<String>, CdiError> {
    const PATH: &str = "/proc/driver/nvidia/version";
    let Some(text) = found(root.read_text(PATH))? else { return Ok(None) };
    // NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025
    // NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (dvs-builder@…)
    let line = text.lines().next().unwrap_or_default();
    let version = line.split_whitespace().find(|word| is_version(word));
    version.map(|version| Some(version.to_owned())).ok_or_else(|| CdiError::Malformed {
        path: root.host_path(PATH),
        what: format!("no driver version in \"{line}\""),
    })
}

/// Two or three groups of digits, as in 550.163.01 or 535.54.
fn is_version(word: &str) -> bool {
    let groups: Vec<&str> = word.split('.').collect();
    (2..=3).contains(&groups.len())
        && groups.iter().all(|group| !group.is_empty() && group.len() <= 6 && group.bytes().all(|b| b.is_ascii_digit()))
        && groups[0].len() >= 2
}

/// All GPUs that the driver has, in order of PCI address.
pub fn gpus(root: &Root) -> Result<Vec<GpuInformation>, CdiError> {
    const FOLDER: &str = "/proc/driver/nvidia/gpus";
    root.list(FOLDER)?
        .iter()
        .map(|name| {
            let pci_address = name.to_string_lossy().into_owned();
            let path = format!("{FOLDER}/{pci_address}/information");
            let text = root.read_text(&path)?;
            parse_information(&pci_address, &text)
                .map_err(|what| CdiError::Malformed { path: root.host_path(&path), what })
        })
        .collect()
}

fn parse_information(pci_address: &str, text: &str) -> Result<GpuInformation, String> {
    let field = |wanted: &str| {
        text.lines()
            .find_map(|line| line.split_once(':').filter(|(key, _)| key.trim() == wanted))
            .map(|(_, value)| value.trim())
    };
    let minor = field("Device Minor").ok_or("no \"Device Minor\"")?;
    let minor = minor.parse().map_err(|_| format!("\"Device Minor\" is \"{minor}\", not a number"))?;
    Ok(GpuInformation {
        pci_address: pci_address.to_owned(),
        uuid: field("GPU UUID").filter(|uuid| !uuid.contains('?')).map(str::to_owned),
        model: field("Model").unwrap_or("unknown").to_owned(),
        minor,
        excluded: field("GPU Excluded").is_some_and(|excluded| excluded.eq_ignore_ascii_case("yes")),
    })
}

/// A MIG instance as its access nodes show it: GPU instance and compute instance, with the minors of nvidia-caps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigAccess {
    /// The GPU instance's id.
    pub gpu_instance: u32,
    /// The compute instance's id in it.
    pub compute_instance: u32,
    /// The minor of `/dev/nvidia-caps/nvidia-cap<minor>` that opens the GPU instance.
    pub gpu_instance_minor: u32,
    /// The same for the compute instance.
    pub compute_instance_minor: u32,
}

/// The MIG instances of the GPU with device minor `minor`, from
/// `/proc/driver/nvidia/capabilities/gpu<minor>/mig/gi<G>/ci<C>/access`.
pub fn mig_instances(root: &Root, minor: u32) -> Result<Vec<MigAccess>, CdiError> {
    let folder = format!("/proc/driver/nvidia/capabilities/gpu{minor}/mig");
    let mut instances = Vec::new();
    for gpu_instance in numbered(root, &folder, "gi")? {
        let instance_folder = format!("{folder}/gi{gpu_instance}");
        let gpu_instance_minor = access_minor(root, &instance_folder)?;
        for compute_instance in numbered(root, &instance_folder, "ci")? {
            instances.push(MigAccess {
                gpu_instance,
                compute_instance,
                gpu_instance_minor,
                compute_instance_minor: access_minor(root, &format!("{instance_folder}/ci{compute_instance}"))?,
            });
        }
    }
    Ok(instances)
}

/// The numbers after `prefix` among a folder's names, ascending.
fn numbered(root: &Root, folder: &str, prefix: &str) -> Result<Vec<u32>, CdiError> {
    let names = root.list(folder)?;
    let mut numbers: Vec<u32> =
        names.iter().filter_map(|name| name.to_str()?.strip_prefix(prefix)?.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

fn access_minor(root: &Root, folder: &str) -> Result<u32, CdiError> {
    let path = format!("{folder}/access");
    let text = root.read_text(&path)?;
    text.lines()
        .find_map(|line| line.strip_prefix("DeviceFileMinor:")?.trim().parse().ok())
        .ok_or_else(|| CdiError::Malformed { path: root.host_path(&path), what: "no DeviceFileMinor".into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        for (word, expected) in [
            ("550.163.01", true),
            ("535.54", true),
            ("x86_64", false),
            ("8", false),
            ("550.", false),
            ("1.2.3.4", false),
        ] {
            assert_eq!(is_version(word), expected, "{word}");
        }
    }

    #[test]
    fn information() {
        let text = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 64\nGPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 3\nGPU Excluded:\t No\n";
        let gpu = parse_information("0000:01:00.0", text).unwrap();
        assert_eq!((gpu.uuid, gpu.minor, gpu.model.as_str(), gpu.excluded), (None, 3, "NVIDIA H200", false));
        assert!(parse_information("0000:01:00.0", "Device Minor: x").unwrap_err().contains("not a number"));
        assert!(parse_information("0000:01:00.0", "").unwrap_err().contains("no \"Device Minor\""));
    }

    #[test]
    fn device_majors() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let text = "Character devices:\n  1 mem\n195 nvidia-frontend\n195 nvidiactl\n511 nvidia-uvm\n507 nvidia-caps\n\nBlock devices:\n  8 nvidia\n";
        std::fs::write(folder.path().join("proc/devices"), text).unwrap();
        let majors = majors(&Root::open(folder.path()).unwrap()).unwrap();
        let expected = [("nvidia", 195), ("nvidia-caps", 507), ("nvidia-uvm", 511)];
        assert_eq!(majors, expected.map(|(name, major)| (name.to_owned(), major)).into());
    }
}
