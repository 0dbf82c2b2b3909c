//! MPS: which of the node's daemons a container is a client of, and what it gets for that.
//!
//! Policy says which GPUs are shared by MPS, in sets, each of which has a daemon of the node agent's. Containers on those GPUs
//! are clients, whether their grant says `"mode": "mps"` or not: no others could use them.

use std::path::Path;

use gpufence_cdi::{
    edits::{self, CONTAINER_FOLDER},
    inventory::{Found, Inventory},
    spec::SpecMount,
};
use gpufence_grant::{
    GpuReference, Mode,
    agent::{AgentState, MpsDaemon},
};

use crate::policy::Policy;

/// The folder of all daemons, which only we mount from.
pub fn folder(policy: &Policy) -> std::path::PathBuf {
    policy.state_dir.join("mps")
}

/// Where a client finds its daemon's pipes and logs, right below our folder in the container.
pub const FOLDERS: [&str; 2] = ["mps-pipe", "mps-log"];

/// The sets of GPUs that policy shares by MPS, by UUID. A GPU that this node doesn't have is in none.
pub fn sets(policy: &Policy, inventory: &Inventory) -> Vec<Vec<String>> {
    let uuid = |name: &String| {
        let found = match GpuReference::parse(name).ok()? {
            GpuReference::Index(index) => inventory.find(Some(index), name),
            GpuReference::Uuid(uuid) => inventory.find(None, &uuid),
        };
        match found.ok()? {
            Found::Gpu(gpu) => gpu.uuid.clone(),
            Found::Mig(_, instance) => instance.uuid.clone(),
        }
    };
    policy.mps.sets.iter().map(|set| set.iter().filter_map(uuid).collect()).collect()
}

/// The daemon that a container with these GPUs is a client of. `None`: its GPUs aren't shared by MPS. The error says why it
/// can't be one and has to be.
pub fn daemon<'a>(
    sets: &[Vec<String>],
    agent: Option<&'a AgentState>,
    gpus: &[String],
    mode: Option<Mode>,
) -> Result<Option<&'a MpsDaemon>, String> {
    let set_of = |gpu: &String| sets.iter().find(|set| set.contains(gpu));
    let mut own: Vec<Option<&Vec<String>>> = gpus.iter().map(set_of).collect();
    own.dedup();
    let set = match own[..] {
        [None] if mode.is_none() => return Ok(None),
        [Some(set)] => set,
        [None] => {
            let gpus = gpus.join(", ");
            return Err(format!(
                "the grant asks for MPS, and this node doesn't share {gpus} by it; name them in mps.sets in the policy"
            ));
        }
        _ => {
            let gpus = gpus.join(", ");
            return Err(format!(
                "a container is a client of one MPS daemon, and {gpus} aren't all in one set; put them into one in mps.sets in the policy"
            ));
        }
    };
    let running = agent.and_then(|agent| agent.mps.iter().find(|daemon| daemon.gpus == *set));
    running
        .map(Some)
        .ok_or_else(|| format!("the MPS daemon for {} doesn't run; gpufence-node's log says why", set.join(", ")))
}

/// A client's mounts: the daemon's pipes, its logs, and the shared memory in which they meet.
pub fn mounts(daemon: &MpsDaemon) -> Vec<SpecMount> {
    let source = |name: &str| daemon.folder.join(name).to_string_lossy().into_owned();
    let shared = |name: &str, container_path: String| SpecMount {
        host_path: source(name),
        container_path,
        kind: None,
        options: ["bind", "rw", "nosuid", "nodev", "noexec"].map(str::to_owned).to_vec(),
    };
    let [pipe, log] = FOLDERS.map(|name| format!("{CONTAINER_FOLDER}/{name}"));
    vec![shared("pipe", pipe), edits::read_only(source("log"), log), shared("shm", "/dev/shm".into())]
}

/// A client's environment. `memory_mib` is in the order in which it sees its GPUs. It limits each process of a container that
/// leaves it as it is: the server takes a client's word for it.
pub fn variables(memory_mib: &[u64], active_thread_percentage: u8) -> Vec<String> {
    let [pipe, log] = FOLDERS.map(|name| Path::new(CONTAINER_FOLDER).join(name).display().to_string());
    let limits = memory_mib.iter().enumerate().map(|(number, mib)| format!("{number}={mib}M"));
    vec![
        format!("CUDA_MPS_PIPE_DIRECTORY={pipe}"),
        format!("CUDA_MPS_LOG_DIRECTORY={log}"),
        format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={}", limits.collect::<Vec<_>>().join(",")),
        format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={active_thread_percentage}"),
    ]
}

#[cfg(test)]
mod tests {
    use gpufence_grant::agent::MemoryCaps;

    use super::*;

    fn gpus(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn which_daemon() {
        let sets = [gpus(&["GPU-a"]), gpus(&["GPU-b", "GPU-c"])];
        let running = |names: &[&str]| AgentState {
            driver_version: "550".into(),
            memory_caps: MemoryCaps::Dmem,
            mps: vec![MpsDaemon { gpus: gpus(names), folder: "/run/gpufence/mps/1".into() }],
        };
        let agent = running(&["GPU-b", "GPU-c"]);
        for (names, mode, runs) in
            [(&["GPU-b"][..], None, true), (&["GPU-c", "GPU-b"], Some(Mode::Mps), true), (&["GPU-d"], None, false)]
        {
            let found = daemon(&sets, Some(&agent), &gpus(names), mode).unwrap();
            assert_eq!(found.is_some(), runs, "{names:?}");
        }
        for (names, mode, expected) in [
            (&["GPU-d"][..], Some(Mode::Mps), "doesn't share GPU-d by it"),
            (&["GPU-a"], None, "the MPS daemon for GPU-a doesn't run"),
            (&["GPU-a", "GPU-b"], None, "aren't all in one set"),
            (&["GPU-b", "GPU-d"], None, "aren't all in one set"),
            (&["GPU-d", "GPU-b", "GPU-d"], None, "aren't all in one set"),
        ] {
            let error = daemon(&sets, Some(&agent), &gpus(names), mode).unwrap_err();
            assert!(error.contains(expected), "{names:?}: {error}");
        }
        // One that was started with other GPUs isn't the one that policy speaks of.
        assert!(daemon(&sets, Some(&running(&["GPU-b"])), &gpus(&["GPU-b"]), None).is_err());
        assert!(daemon(&sets, None, &gpus(&["GPU-b"]), None).is_err());
    }

    #[test]
    fn what_a_client_is_told() {
        let variables = variables(&[8192, 100], 25);
        assert_eq!(
            variables[2..],
            ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M,1=100M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"]
        );
    }
}
