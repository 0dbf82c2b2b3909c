//! The ladder of memory limits: which rung holds for a container, and whether policy accepts it.

use std::fmt;

use gpufence_grant::agent::{AgentState, MemoryCaps};
use serde::{Deserialize, Serialize};

use crate::{EnforceError, limiter::Limiter, policy::Policy};

/// What keeps a container to its memory limit. A later one is stronger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// Nothing but the watchdog, where one runs.
    None,
    /// The limiter, inside its processes: exact and immediate, but one that means to can get round it.
    #[default]
    Limiter,
    /// The MPS server.
    Mps,
    /// The driver, for the container's cgroup.
    Driver,
}

impl Rung {
    /// Its name in the policy and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Limiter => "limiter",
            Self::Mps => "mps",
            Self::Driver => "driver",
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The node's limiter, where it has one; an error where policy wants it and it isn't there.
pub fn limiter(policy: &Policy) -> Result<Option<Limiter>, EnforceError> {
    match Limiter::of(policy) {
        None => Ok(None),
        Some(Ok(limiter)) => Ok(Some(limiter)),
        Some(Err(_)) if policy.memory.require == Rung::None => Ok(None),
        Some(Err(folder)) => Err(EnforceError::NoLimiter(folder)),
    }
}

/// Why the driver's own cap doesn't hold a container, in words for an error; `Ok` where it does. `agent` is what the node
/// agent says of itself, `shares` the container's UUIDs with whether each is a MIG instance's.
pub fn driver_caps(
    agent: Option<&AgentState>,
    driver_version: &str,
    shares: &[(String, bool)],
    restored: bool,
) -> Result<(), String> {
    let Some(agent) = agent else {
        return Err("gpufence-node, which sets the driver's cap, doesn't run here".into());
    };
    if agent.driver_version != driver_version {
        let known = &agent.driver_version;
        return Err(format!("gpufence-node knows driver {known}, and {driver_version} runs; restart gpufence-node"));
    }
    if let MemoryCaps::Unsupported(why) = &agent.memory_caps {
        return Err(format!("the driver sets no cap here: {why}"));
    }
    if restored {
        return Err("a container that is restored from a checkpoint gets no cap".into());
    }
    match shares.iter().find(|(uuid, instance)| *instance || !uuid.starts_with("GPU-")) {
        Some((uuid, true)) => Err(format!("the driver has no cap for MIG instances, such as {uuid}")),
        Some((name, false)) => Err(format!("the UUID of GPU {name} isn't known; run `gpufence inventory --nvml`")),
        None => Ok(()),
    }
}

/// What the node agent says of itself. `None`: none runs, or what it wrote can't be read.
pub fn agent(policy: &Policy) -> Option<AgentState> {
    serde_json::from_slice(&std::fs::read(policy.agent_file()).ok()?).ok()
}

/// Whether policy accepts what holds. `why` says why nothing stronger does.
pub fn accept(policy: &Policy, rung: Rung, why: &str) -> Result<(), EnforceError> {
    let require = policy.memory.require;
    if rung < require { Err(EnforceError::BelowRung { require, rung, why: why.to_owned() }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_the_driver_caps() {
        let agent = |memory_caps| AgentState { driver_version: "615.20".into(), memory_caps, mps: Vec::new() };
        let gpu = [("GPU-a".to_owned(), false)];
        for by in [MemoryCaps::Dmem, MemoryCaps::Own] {
            driver_caps(Some(&agent(by)), "615.20", &gpu, false).unwrap();
        }
        let dmem = agent(MemoryCaps::Dmem);
        for (result, expected) in [
            (driver_caps(None, "615.20", &gpu, false), "doesn't run here"),
            (driver_caps(Some(&dmem), "615.30", &gpu, false), "restart gpufence-node"),
            (
                driver_caps(Some(&agent(MemoryCaps::Unsupported("cgroup v1".into()))), "615.20", &gpu, false),
                "cgroup v1",
            ),
            (driver_caps(Some(&dmem), "615.20", &gpu, true), "checkpoint"),
            (driver_caps(Some(&dmem), "615.20", &[("MIG-a".into(), true)], false), "MIG"),
            (driver_caps(Some(&dmem), "615.20", &[("0".into(), false)], false), "isn't known"),
        ] {
            let error = result.unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
