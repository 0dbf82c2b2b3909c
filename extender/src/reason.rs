//! Why a Pod doesn't go on a node, in words that a person can act on.

use std::fmt::Write;

use crate::{
    device::{Device, NodeState, Use},
    place::{Need, fits},
    request::PodRequest,
};

/// How many GPUs are told of, of a node that has many.
const MAX_TOLD: usize = 16;

/// Why a Pod doesn't go on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason, with the node's name.
    pub why: String,
    /// Whether it would go there if other Pods left.
    pub could_fit: bool,
}

impl Refusal {
    /// Whoever leaves the node, it won't do.
    pub fn never(node: &str, why: &str) -> Self {
        Self { why: format!("{node}: {why}"), could_fit: false }
    }
}

/// The reason for the first claim that finds no place by itself, or else that they find none together.
pub(crate) fn of(node: &NodeState, request: &PodRequest) -> Refusal {
    let Ok(devices) = &node.devices else { return Refusal::never(&node.name, "its inventory can't be read") };
    let needs: Vec<Need<'_>> = request
        .containers
        .iter()
        .flat_map(|container| container.claims.iter().map(|claim| Need::of(claim, node.choosing.unit)))
        .collect();
    for need in &needs {
        let more = |device: &Device| {
            if need.whole {
                Use { memory: device.memory, compute: 0, whole: 1 }
            } else {
                Use { memory: need.memory, compute: need.compute.unwrap_or(0), whole: 0 }
            }
        };
        let kind: Vec<&Device> = devices.iter().filter(|device| need.is_kind(device, &request.models)).collect();
        let healthy: Vec<&Device> = kind.iter().copied().filter(|device| device.healthy).collect();
        let large = healthy.iter().filter(|device| need.fits_empty(device)).count();
        let free = healthy
            .iter()
            .filter(|device| need.fits_empty(device) && fits(device, &node.choosing, device.used, more(device)))
            .count();
        if free >= need.count {
            continue;
        }
        let mut why = format!("{}: wants {}", node.name, wants(need, request));
        if kind.is_empty() {
            why.push_str(&has(devices));
            return Refusal { why, could_fit: false };
        }
        why.push(';');
        for (number, device) in kind.iter().take(MAX_TOLD).enumerate() {
            why.push_str(if number == 0 { " " } else { ", " });
            describe(&mut why, node, device, need);
        }
        if kind.len() > MAX_TOLD {
            let _ = write!(why, ", and {} more", kind.len() - MAX_TOLD);
        }
        return Refusal { why, could_fit: large >= need.count };
    }
    let mut why = format!("{}: its containers together want ", node.name);
    for (number, need) in needs.iter().enumerate() {
        why.push_str(if number == 0 { "" } else { ", and " });
        why.push_str(&wants(need, request));
    }
    why.push(';');
    for (number, device) in devices.iter().take(MAX_TOLD).enumerate() {
        why.push_str(if number == 0 { " " } else { ", " });
        describe(&mut why, node, device, &needs[0]);
    }
    Refusal { why, could_fit: true }
}

/// "8192 MiB on one GPU", "2 whole GPUs", "one MIG instance 1g.10gb".
fn wants(need: &Need<'_>, request: &PodRequest) -> String {
    let number = if need.count == 1 { "one".to_owned() } else { need.count.to_string() };
    let plural = if need.count == 1 { "" } else { "s" };
    let mut text = match need.profile {
        Some(profile) => format!("{number} MIG instance{plural} {profile}"),
        None if need.whole => format!("{number} whole GPU{plural}"),
        None => {
            let compute = need.compute.map_or_else(String::new, |percent| format!(" and {percent} % of compute"));
            let on = if need.count == 1 { "on" } else { "on each of" };
            format!("{} MiB{compute} {on} {number} GPU{plural}", need.memory)
        }
    };
    if !request.models.is_empty() {
        let _ = write!(text, " of model {}", request.models.join(" or "));
    }
    text
}

/// "; it has 2 of nvidia-h200".
fn has(devices: &[Device]) -> String {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for device in devices {
        let kind = match &device.profile {
            Some(profile) => format!("MIG {profile} of {}", device.model),
            None => device.model.clone(),
        };
        match kinds.iter_mut().find(|(other, _)| *other == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let list: Vec<String> =
        kinds.into_iter().take(MAX_TOLD).map(|(kind, count)| format!("{count} of {kind}")).collect();
    if list.is_empty() { "; it has no GPU".into() } else { format!("; it has {}", list.join(", ")) }
}

fn describe(why: &mut String, node: &NodeState, device: &Device, need: &Need<'_>) {
    let _ = match &device.profile {
        Some(profile) => write!(why, "GPU {} {profile}", device.index),
        None => write!(why, "GPU {}", device.index),
    };
    let capacity = node.choosing.overcommit.of(device.memory);
    let _ = if !device.healthy {
        write!(why, " is unhealthy")
    } else if device.used.whole > 0 {
        write!(why, " is given whole")
    } else if !need.fits_empty(device) {
        write!(why, " has only {} in all", device.memory)
    } else if need.whole {
        match device.used.memory {
            0 => write!(why, " is free"),
            used => write!(why, " has {used} MiB granted"),
        }
    } else {
        let free = capacity.saturating_sub(device.used.memory);
        match need.compute {
            Some(_) => write!(why, " has {free} and {} % free", 100_u64.saturating_sub(device.used.compute)),
            None => write!(why, " has {free} free"),
        }
    };
}
