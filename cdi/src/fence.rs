//! What a container was given and what it must not reach, as `gpufence-hook` reads it from the container's folder.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    devices::{DeviceNode, Devices},
    spec::SpecNode,
};

/// `fence.json`: written at create, checked before start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fence {
    /// Majors on which every device is a GPU's.
    pub majors: Vec<u32>,
    /// The devices that it has.
    pub granted: Vec<(u32, u32)>,
    /// Nodes on the host that it must not be able to open.
    pub denied: Vec<Denied>,
}

/// A node on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denied {
    /// Its path on the host.
    pub path: PathBuf,
    /// Its major.
    pub major: u32,
    /// Its minor.
    pub minor: u32,
}

impl Fence {
    /// What follows from a grant's device nodes. `host` is the root that has the host's own nodes.
    pub fn of(devices: &Devices, granted: &[SpecNode], host: &Path) -> Self {
        let granted: Vec<(u32, u32)> = granted.iter().map(|node| (node.major, node.minor)).collect();
        let access = devices.gpus.iter().flat_map(|gpu| gpu.mig.iter().flat_map(|instance| &instance.access));
        let all =
            devices.gpus.iter().map(|gpu| &gpu.node).chain(&devices.shared).chain(devices.drm_nodes()).chain(access);
        let on_host = |node: &DeviceNode| Denied {
            path: host.join(node.path.trim_start_matches('/')),
            major: node.major,
            minor: node.minor,
        };
        let denied = all.filter(|node| !granted.contains(&(node.major, node.minor))).map(on_host).collect();
        Self { majors: devices.fenced_majors(), granted, denied }
    }
}
