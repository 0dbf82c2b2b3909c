//! `/inspect`: who has what, for people and for `gpufence inspect`.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::{
    device::{NodeState, Uid},
    ledger::Ledger,
    pod::PodName,
};

/// All nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cluster {
    /// By name.
    pub nodes: Vec<NodeView>,
}

/// One node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// Its name.
    pub name: String,
    /// Its internal address.
    pub address: String,
    /// Why it isn't used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unusable: Option<String>,
    /// Its GPUs and MIG instances.
    pub devices: Vec<DeviceView>,
}

/// A GPU or MIG instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceView {
    /// Its UUID.
    pub uuid: String,
    /// The GPU's index.
    pub index: u32,
    /// The profile of a MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The model.
    pub model: String,
    /// Whether it can be used.
    pub healthy: bool,
    /// MiB that may be granted.
    #[serde(rename = "totalMiB")]
    pub total_mib: u64,
    /// MiB that are granted.
    #[serde(rename = "grantedMiB")]
    pub granted_mib: u64,
    /// Percent of compute that is granted.
    pub granted_compute: u64,
    /// Who has it.
    pub pods: Vec<PodShare>,
}

/// What a Pod has of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodShare {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// MiB, at the most at once.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Percent of compute.
    pub compute: u64,
    /// Whether it has all of it.
    pub whole: bool,
}

/// The whole cluster, or one node of it.
pub fn cluster(ledger: &Ledger, only: Option<&str>) -> Cluster {
    let nodes = ledger.nodes();
    let views = nodes.iter().filter_map(|lock| {
        // Names are looked up between the locks, not under the node's: locks are taken in one order.
        let uids: Vec<Uid> = {
            let node = lock.lock();
            if only.is_some_and(|only| *node.name != *only) {
                return None;
            }
            node.pods().keys().cloned().collect()
        };
        let names = ledger.names(uids);
        Some(view(&lock.lock(), &names))
    });
    Cluster { nodes: views.collect() }
}

fn view(node: &NodeState, names: &HashMap<Uid, PodName>) -> NodeView {
    let devices = node.devices.as_ref().map(Vec::as_slice).unwrap_or_default();
    let device = |device: &crate::device::Device| {
        let of_pod = |(uid, uses): (&Uid, &crate::device::Uses)| {
            let (_, used) = uses.iter().find(|(uuid, _)| *uuid == device.uuid)?;
            let name = names.get(uid)?;
            Some(PodShare {
                namespace: name.namespace.clone(),
                name: name.name.clone(),
                uid: uid.to_string(),
                memory_mib: used.memory,
                compute: used.compute,
                whole: used.whole > 0,
            })
        };
        let mut pods: Vec<PodShare> = node.pods().iter().filter_map(of_pod).collect();
        pods.sort_by(|left, right| (&left.namespace, &left.name).cmp(&(&right.namespace, &right.name)));
        DeviceView {
            uuid: device.uuid.to_string(),
            index: device.index,
            profile: device.profile.clone(),
            model: device.model.clone(),
            healthy: device.healthy,
            total_mib: node.choosing.overcommit.of(device.memory),
            granted_mib: device.used.memory,
            granted_compute: device.used.compute,
            pods,
        }
    };
    NodeView {
        name: node.name.to_string(),
        address: node.address.clone(),
        unusable: node.devices.as_ref().err().cloned(),
        devices: devices.iter().map(device).collect(),
    }
}
