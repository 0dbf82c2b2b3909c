//! What a node has, as its agent tells the scheduler: the annotation `gpufence.dev/inventory` on the Node.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{GpuReference, size::MAX_MEMORY_MIB};

/// The annotation.
pub const INVENTORY: &str = "gpufence.dev/inventory";
/// The longest text of one, in bytes.
pub const MAX_INVENTORY_BYTES: usize = 128 << 10;
/// The most GPUs and MIG instances that a node may have, together.
pub const MAX_DEVICES: usize = 512;

/// What a node has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeInventory {
    /// The version of this shape: 1.
    pub version: u64,
    /// The driver's version, such as `550.163.01`.
    pub driver_version: String,
    /// Its GPUs, without those that the driver excludes.
    pub gpus: Vec<NodeGpu>,
}

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeGpu {
    /// `GPU-…`.
    pub uuid: String,
    /// The position in order of PCI address, from 0.
    pub index: u32,
    /// The model's name, such as `NVIDIA H200`.
    pub model: String,
    /// Memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Whether it can be used.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub healthy: bool,
    /// How many NVLinks go to other GPUs, by their index. GPUs at one switch are linked by as many as go to it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub links: BTreeMap<u32, u32>,
    /// Its MIG instances. A GPU that has some is given by instance only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig: Vec<NodeMig>,
}

/// A MIG instance of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeMig {
    /// `MIG-…`.
    pub uuid: String,
    /// The profile, such as `1g.10gb`.
    pub profile: String,
    /// Memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
}

const fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
const fn is_yes(value: &bool) -> bool {
    *value
}

/// An inventory that can't be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("annotation {INVENTORY}: {0}; use a node agent (gpufence-node) of the same release as the extender")]
pub struct InventoryError(String);

impl NodeInventory {
    /// Reads the annotation. Unknown fields are let pass, since a newer agent may say more.
    pub fn parse(text: &str) -> Result<Self, InventoryError> {
        let refuse = |what: String| Err(InventoryError(what));
        if text.len() > MAX_INVENTORY_BYTES {
            return refuse(format!("the text has {} bytes, more than the {MAX_INVENTORY_BYTES} allowed", text.len()));
        }
        let inventory: Self = serde_json::from_str(text).map_err(|error| InventoryError(error.to_string()))?;
        if inventory.version != 1 {
            return refuse(format!("version {} is not known, only 1 is", inventory.version));
        }
        let mut uuids = HashSet::new();
        for gpu in &inventory.gpus {
            let itself = std::iter::once((&gpu.uuid, gpu.memory_mib));
            for (uuid, memory) in itself.chain(gpu.mig.iter().map(|instance| (&instance.uuid, instance.memory_mib))) {
                if !matches!(GpuReference::parse(uuid), Ok(GpuReference::Uuid(_))) {
                    return refuse(format!("\"{}\" is no UUID", uuid.chars().take(80).collect::<String>()));
                }
                if !uuids.insert(uuid.as_str()) {
                    return refuse(format!("{uuid} is there twice"));
                }
                if !(1..=MAX_MEMORY_MIB).contains(&memory) {
                    return refuse(format!("{uuid} has {memory} MiB"));
                }
            }
        }
        if uuids.len() > MAX_DEVICES {
            return refuse(format!("{} GPUs and MIG instances, more than the {MAX_DEVICES} allowed", uuids.len()));
        }
        Ok(inventory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let text = r#"{"version":1,"driverVersion":"550.163.01","gpus":[{"uuid":"GPU-5f4d0c7e","index":0,"model":"NVIDIA H200","memoryMiB":143771,"links":{"1":18}},{"uuid":"GPU-5f4d0c7f","index":1,"model":"NVIDIA H200","memoryMiB":143771,"healthy":false,"mig":[{"uuid":"MIG-5f4d0c7f","profile":"1g.18gb","memoryMiB":16384}]}]}"#;
        let inventory = NodeInventory::parse(text).unwrap();
        assert_eq!((inventory.gpus[0].healthy, inventory.gpus[1].healthy), (true, false));
        assert_eq!(serde_json::to_string(&inventory).unwrap(), text);
    }

    #[test]
    fn refusals() {
        let gpus = |text: &str| format!(r#"{{"version":1,"driverVersion":"1","gpus":[{text}]}}"#);
        let gpu =
            |uuid: &str, memory: u64| format!(r#"{{"uuid":"{uuid}","index":0,"model":"m","memoryMiB":{memory}}}"#);
        for (text, expected) in [
            (String::new(), "EOF"),
            ("[]".into(), "expected struct NodeInventory"),
            (gpus("").replace("\"version\":1", "\"version\":2"), "version 2 is not known"),
            (gpus(&gpu("0", 1)), "\"0\" is no UUID"),
            (gpus(&gpu("GPU-5f4d0c7e", 0)), "has 0 MiB"),
            (gpus(&gpu("GPU-5f4d0c7e", u64::MAX)), "has 18446744073709551615 MiB"),
            (gpus(&[gpu("GPU-5f4d0c7e", 1), gpu("GPU-5f4d0c7e", 1)].join(",")), "is there twice"),
            (" ".repeat(MAX_INVENTORY_BYTES + 1), "more than"),
        ] {
            let error = NodeInventory::parse(&text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:.80}: {error}");
        }
    }
}
