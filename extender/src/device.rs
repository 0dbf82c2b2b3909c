//! The GPUs and MIG instances of one node, and what of them is granted.

use std::{collections::HashMap, sync::Arc};

use gpufence_grant::inventory::NodeInventory;

use crate::{policy::Choosing, request::normal_model};

/// A Pod's UID.
pub type Uid = Arc<str>;

/// A GPU without MIG, or a MIG instance.
#[derive(Debug, Clone)]
pub struct Device {
    /// Its UUID.
    pub uuid: Arc<str>,
    /// The index of the GPU that it is, or is part of.
    pub index: u32,
    /// The MIG profile of an instance.
    pub profile: Option<String>,
    /// The model as [`normal_model`] writes it.
    pub model: String,
    /// Memory in MiB.
    pub memory: u64,
    /// Whether it can be used.
    pub healthy: bool,
    /// NVLinks to the node's other devices, by their position; empty: none.
    pub links: Vec<u32>,
    /// What is granted of it.
    pub used: Use,
}

/// What is granted of a device, or what a Pod needs of it at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Use {
    /// MiB.
    pub memory: u64,
    /// Percent.
    pub compute: u64,
    /// How many have it whole: at most one.
    pub whole: u64,
}

impl Use {
    /// Both at once.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            memory: self.memory.saturating_add(other.memory),
            compute: self.compute.saturating_add(other.compute),
            whole: self.whole + other.whole,
        }
    }

    /// One after the other.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            memory: self.memory.max(other.memory),
            compute: self.compute.max(other.compute),
            whole: self.whole.max(other.whole),
        }
    }

    /// Whether it is nothing at all.
    pub fn is_none(self) -> bool {
        self == Self::default()
    }
}

/// What a Pod needs of each device at once, by UUID.
pub type Uses = Vec<(Arc<str>, Use)>;

/// One node.
#[derive(Debug)]
pub struct NodeState {
    /// Its name.
    pub name: Arc<str>,
    /// Its address, for people.
    pub address: String,
    /// How shares of it are chosen.
    pub choosing: Choosing,
    /// Its devices; or why it isn't used.
    pub devices: Result<Vec<Device>, String>,
    pods: HashMap<Uid, Uses>,
}

impl NodeState {
    /// A node of which nothing is known yet.
    pub fn new(name: Arc<str>) -> Self {
        Self {
            name,
            address: String::new(),
            choosing: Choosing::default(),
            devices: Err("the cluster has no such node".into()),
            pods: HashMap::new(),
        }
    }

    /// Takes what the node says of itself. Grants stay: a GPU that is gone and comes back has them again.
    pub fn set_inventory(&mut self, inventory: Result<NodeInventory, String>) {
        self.devices = inventory.map(|inventory| devices(&inventory));
        let pods = std::mem::take(&mut self.pods);
        for (uid, uses) in pods {
            self.grant(uid, uses);
        }
    }

    /// Counts what a Pod was given, in place of what was counted for it before.
    pub fn grant(&mut self, uid: Uid, uses: Uses) {
        self.release(&uid);
        if let Ok(devices) = &mut self.devices {
            for (uuid, used) in &uses {
                if let Some(device) = devices.iter_mut().find(|device| device.uuid == *uuid) {
                    device.used = device.used.plus(*used);
                }
            }
        }
        self.pods.insert(uid, uses);
    }

    /// Takes back what a Pod was given.
    pub fn release(&mut self, uid: &str) -> bool {
        let Some(uses) = self.pods.remove(uid) else { return false };
        let pods = &self.pods;
        if let Ok(devices) = &mut self.devices {
            for (uuid, _) in &uses {
                if let Some(device) = devices.iter_mut().find(|device| device.uuid == *uuid) {
                    // Summed up anew: no counter can wrap, whatever came before.
                    let of_others = pods.values().flatten().filter(|(other, _)| other == uuid);
                    device.used = of_others.fold(Use::default(), |sum, (_, used)| sum.plus(*used));
                }
            }
        }
        true
    }

    /// What each Pod was given.
    pub const fn pods(&self) -> &HashMap<Uid, Uses> {
        &self.pods
    }
}

fn devices(inventory: &NodeInventory) -> Vec<Device> {
    let mut devices = Vec::new();
    for gpu in &inventory.gpus {
        let device = |uuid: &str, profile: Option<String>, memory: u64| Device {
            uuid: uuid.into(),
            index: gpu.index,
            profile,
            model: normal_model(&gpu.model),
            memory,
            healthy: gpu.healthy,
            links: Vec::new(),
            used: Use::default(),
        };
        if gpu.mig.is_empty() {
            devices.push(device(&gpu.uuid, None, gpu.memory_mib));
        }
        for instance in &gpu.mig {
            devices.push(device(&instance.uuid, Some(instance.profile.clone()), instance.memory_mib));
        }
    }
    let positions: HashMap<u32, usize> = devices
        .iter()
        .enumerate()
        .filter(|(_, device)| device.profile.is_none())
        .map(|(position, device)| (device.index, position))
        .collect();
    for gpu in inventory.gpus.iter().filter(|gpu| !gpu.links.is_empty()) {
        let Some(&own) = positions.get(&gpu.index) else { continue };
        let mut links = vec![0; devices.len()];
        for (other, count) in &gpu.links {
            if let Some(&position) = positions.get(other) {
                links[position] = *count;
            }
        }
        devices[own].links = links;
    }
    devices
}

#[cfg(test)]
mod tests {
    use gpufence_grant::inventory::NodeGpu;

    use super::*;

    fn inventory(healthy: bool) -> NodeInventory {
        let gpu = |index: u32| NodeGpu {
            uuid: format!("GPU-{index:08}"),
            index,
            model: "NVIDIA H200".into(),
            memory_mib: 1000,
            healthy,
            links: [(1 - index, 4)].into(),
            mig: Vec::new(),
        };
        NodeInventory { version: 1, driver_version: "1.0".into(), gpus: vec![gpu(0), gpu(1)] }
    }

    fn used(node: &NodeState) -> Vec<u64> {
        node.devices.as_ref().unwrap().iter().map(|device| device.used.memory).collect()
    }

    #[test]
    fn grants_outlive_inventories() {
        let mut node = NodeState::new("n".into());
        let of = |uuid: &str, memory| (Arc::from(uuid), Use { memory, ..Use::default() });
        node.grant("a".into(), vec![of("GPU-00000000", 100)]);
        node.set_inventory(Ok(inventory(true)));
        assert_eq!(used(&node), [100, 0]);
        node.grant("b".into(), vec![of("GPU-00000000", 10), of("GPU-00000001", 20), of("GPU-00000009", 5)]);
        node.grant("a".into(), vec![of("GPU-00000000", 200)]);
        assert_eq!(used(&node), [210, 20]);
        node.set_inventory(Err("gone".into()));
        assert!(node.release("a") && !node.release("a"));
        node.set_inventory(Ok(inventory(false)));
        assert_eq!(used(&node), [10, 20]);
        let devices = node.devices.as_ref().unwrap();
        assert_eq!((devices[0].links.as_slice(), devices[0].healthy), (&[0, 4][..], false));
    }
}
