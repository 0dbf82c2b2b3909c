//! The GPUs of a node and their device nodes, read afresh at each create: it takes a few small files of proc.

use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

use crate::{
    error::CdiError,
    proc::{self, Majors},
    root::Root,
    sysfs,
};

/// NVIDIA's own major, registered with the kernel: the same on every machine.
pub const NVIDIA_MAJOR: u32 = 195;
/// The minor of `/dev/nvidiactl`.
pub const CONTROL_MINOR: u32 = 255;
/// The minor of `/dev/nvidia-modeset`.
pub const MODESET_MINOR: u32 = 254;

/// A character device node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// The path in a container, and on the host.
    pub path: String,
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
    /// Permission bits of the host's node; `None` where the host has none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// The owning group of the host's node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A MIG instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigInstance {
    /// The GPU instance's id.
    pub gpu_instance: u32,
    /// The compute instance's id in it.
    pub compute_instance: u32,
    /// `MIG-…`, known only from NVML.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Memory in MiB, known only from NVML.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "memoryMiB")]
    pub memory_mib: Option<u64>,
    /// The two nodes of nvidia-caps that open it.
    pub access: Vec<DeviceNode>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// The position among usable GPUs in order of PCI address; none for an excluded one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// `GPU-…`; none until the device was first opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The PCI address, such as `0000:01:00.0`.
    pub pci_address: String,
    /// The model's name.
    pub model: String,
    /// Memory in MiB, known only from NVML.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "memoryMiB")]
    pub memory_mib: Option<u64>,
    /// `/dev/nvidia<minor>`.
    pub node: DeviceNode,
    /// `/dev/dri/card*` and `/dev/dri/renderD*`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drm: Vec<DeviceNode>,
    /// Its MIG instances.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig: Vec<MigInstance>,
}

/// All GPU devices of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Devices {
    /// The majors of the NVIDIA modules, by their name in `/proc/devices`.
    pub majors: Majors,
    /// The GPUs in order of PCI address, excluded ones too.
    pub gpus: Vec<Gpu>,
    /// Group and permissions that the host gives `/dev/nvidiactl`, `/dev/nvidia-uvm` and the like.
    pub shared: Vec<DeviceNode>,
}

impl Devices {
    /// Reads proc, sys and dev below `host`. With no driver loaded there are no GPUs, which is no error.
    pub fn discover(host: &Root) -> Result<Self, CdiError> {
        let majors = proc::majors(host)?;
        let nvidia = majors.get("nvidia").copied().unwrap_or(NVIDIA_MAJOR);
        let caps = majors.get("nvidia-caps").copied();
        let mut next_index = 0..;
        let mut gpus = Vec::new();
        for information in proc::gpus(host)? {
            let drm = sysfs::drm_nodes(host, &information.pci_address)?
                .into_iter()
                .map(|(name, major, minor)| node(host, format!("/dev/dri/{name}"), major, minor))
                .collect::<Result<_, _>>()?;
            let mig = proc::mig_instances(host, information.minor)?
                .into_iter()
                .map(|instance| mig_instance(host, caps, &instance))
                .collect::<Result<_, _>>()?;
            gpus.push(Gpu {
                index: if information.excluded { None } else { next_index.next() },
                uuid: information.uuid,
                pci_address: information.pci_address,
                model: information.model,
                memory_mib: None,
                node: node(host, format!("/dev/nvidia{}", information.minor), nvidia, information.minor)?,
                drm,
                mig,
            });
        }
        let mut shared = vec![
            node(host, "/dev/nvidiactl".into(), nvidia, CONTROL_MINOR)?,
            node(host, "/dev/nvidia-modeset".into(), nvidia, MODESET_MINOR)?,
        ];
        if let Some(uvm) = majors.get("nvidia-uvm") {
            shared.push(node(host, "/dev/nvidia-uvm".into(), *uvm, 0)?);
            shared.push(node(host, "/dev/nvidia-uvm-tools".into(), *uvm, 1)?);
        }
        Ok(Self { majors, gpus, shared })
    }

    /// One of the nodes that GPUs share, by path.
    pub fn shared(&self, path: &str) -> Option<&DeviceNode> {
        self.shared.iter().find(|node| node.path == path)
    }

    /// Majors on which every device is a GPU's: 195 always, and what the NVIDIA modules have now.
    pub fn fenced_majors(&self) -> Vec<u32> {
        let mut majors: Vec<u32> = self.majors.values().copied().chain([NVIDIA_MAJOR]).collect();
        majors.sort_unstable();
        majors.dedup();
        majors
    }

    /// Every node of a GPU that lies on a major shared with other drivers (DRM): fenced one by one.
    pub fn drm_nodes(&self) -> impl Iterator<Item = &DeviceNode> {
        self.gpus.iter().flat_map(|gpu| &gpu.drm)
    }

    /// The highest minor on `major` that any device here has, so that a list of denials reaches far enough.
    pub fn highest_minor(&self, major: u32) -> u32 {
        let access = self.gpus.iter().flat_map(|gpu| &gpu.mig).flat_map(|instance| &instance.access);
        access
            .chain(self.gpus.iter().map(|gpu| &gpu.node))
            .chain(&self.shared)
            .filter(|node| node.major == major)
            .map(|node| node.minor)
            .max()
            .unwrap_or(0)
    }

    /// Takes over what only NVML knows from an earlier look at the same devices.
    pub fn adopt_nvml(&mut self, earlier: &Devices) {
        for gpu in &mut self.gpus {
            let Some(known) =
                earlier.gpus.iter().find(|known| known.pci_address == gpu.pci_address && known.uuid == gpu.uuid)
            else {
                continue;
            };
            gpu.memory_mib = gpu.memory_mib.or(known.memory_mib);
            for instance in &mut gpu.mig {
                let same = |other: &&MigInstance| {
                    (other.gpu_instance, other.compute_instance, &other.access)
                        == (instance.gpu_instance, instance.compute_instance, &instance.access)
                };
                if let Some(known) = known.mig.iter().find(same) {
                    instance.uuid = instance.uuid.take().or_else(|| known.uuid.clone());
                    instance.memory_mib = instance.memory_mib.or(known.memory_mib);
                }
            }
        }
    }
}

/// A node by its numbers, with the host's permissions where the host has it.
fn node(host: &Root, path: String, major: u32, minor: u32) -> Result<DeviceNode, CdiError> {
    let mut node = DeviceNode { path, major, minor, mode: None, gid: None };
    if let Some(handle) = host.open_path(&node.path)? {
        let metadata =
            handle.metadata().map_err(crate::error::io_error::<std::io::Error>("stat", host.host_path(&node.path)))?;
        // A stale node, of a major that the module had before, gives no permissions.
        if nix::sys::stat::major(metadata.rdev()) == u64::from(major)
            && nix::sys::stat::minor(metadata.rdev()) == u64::from(minor)
        {
            node.mode = Some(metadata.mode() & 0o777);
            node.gid = Some(metadata.gid());
        }
    }
    Ok(node)
}

fn mig_instance(host: &Root, caps: Option<u32>, access: &proc::MigAccess) -> Result<MigInstance, CdiError> {
    let major = caps.ok_or_else(|| CdiError::Malformed {
        path: host.host_path("/proc/devices"),
        what: "there are MIG instances, but no major of nvidia-caps".into(),
    })?;
    let nodes = [access.gpu_instance_minor, access.compute_instance_minor]
        .map(|minor| node(host, format!("/dev/nvidia-caps/nvidia-cap{minor}"), major, minor));
    Ok(MigInstance {
        gpu_instance: access.gpu_instance,
        compute_instance: access.compute_instance,
        uuid: None,
        memory_mib: None,
        access: nodes.into_iter().collect::<Result<_, _>>()?,
    })
}
