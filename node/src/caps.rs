//! The driver's memory caps for cgroups: whether this node has them, and setting them when the create path asks.

use std::{
    fs,
    path::{Component, Path},
};

use gpufence_grant::agent::{Answer, MemoryCaps, Request};

use crate::nvml::{Driver, Gpu};

/// Where cgroup v2 is.
const MOUNT: &str = "/sys/fs/cgroup";

/// What this node can do: tried on a cgroup of our own, since a getter's "not supported" proves nothing.
pub fn detect(driver: &Driver, gpus: &[Gpu]) -> MemoryCaps {
    let unsupported = |why: &str| MemoryCaps::Unsupported(why.to_owned());
    if !driver.has_cap_calls() {
        let version = &driver.version;
        return unsupported(&format!("driver {version} has no nvmlDeviceSetMemoryLimits_v1; it came with R615"));
    }
    let Ok(controllers) = fs::read_to_string(Path::new(MOUNT).join("cgroup.controllers")) else {
        return unsupported("the machine's cgroups are v1");
    };
    let Some(gpu) = gpus.iter().find(|gpu| !gpu.instance) else {
        return unsupported("the driver has no caps for MIG instances, and there are no other GPUs");
    };
    if let Err(why) = try_on_own_cgroup(driver, gpu) {
        return unsupported(&why);
    }
    let regions = fs::read_to_string(Path::new(MOUNT).join("dmem.capacity")).unwrap_or_default();
    if controllers.split_whitespace().any(|name| name == "dmem") && !regions.trim().is_empty() {
        MemoryCaps::Dmem
    } else {
        MemoryCaps::Own
    }
}

fn try_on_own_cgroup(driver: &Driver, gpu: &Gpu) -> Result<(), String> {
    let folder = Path::new(MOUNT).join(format!("gpufence-node-{}", std::process::id()));
    fs::create_dir(&folder).map_err(|error| format!("create {}: {error}", folder.display()))?;
    let answer = driver.cap(&folder, &gpu.uuid, gpu.memory_bytes).map_err(|error| error.to_string());
    // With it goes the cap.
    fs::remove_dir(&folder).map_err(|error| format!("remove {}: {error}", folder.display()))?;
    answer
}

/// Sets what is asked for, and says whether it is so.
pub fn set(driver: &Driver, request: &Request) -> Answer {
    if let Err(what) = check(request) {
        return Answer::Error(what);
    }
    for cap in &request.caps {
        if let Err(error) = driver.cap(&request.cgroup, &cap.gpu, cap.memory_bytes) {
            return Answer::Error(error.to_string());
        }
    }
    Answer::Set(request.caps.clone())
}

/// A cgroup that is there, below the root one, and caps that are any.
fn check(request: &Request) -> Result<(), String> {
    let path = &request.cgroup;
    let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let below = path.strip_prefix(MOUNT).is_ok_and(|rest| rest.components().next().is_some());
    if !plain || !below {
        return Err(format!("{} is not the path of a cgroup below {MOUNT}", path.display()));
    }
    if !path.join("cgroup.procs").exists() {
        return Err(format!("{} is no cgroup, or is one no more", path.display()));
    }
    if request.caps.is_empty() || request.caps.iter().any(|cap| cap.memory_bytes == 0) {
        return Err("a request has one cap at least, and none of 0 bytes".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use gpufence_grant::agent::Cap;

    use super::*;

    #[test]
    fn only_cgroups_that_are_there() {
        let request = |path: &str, bytes: u64| Request {
            cgroup: path.into(),
            caps: vec![Cap { gpu: "GPU-a".into(), memory_bytes: bytes }],
        };
        for (request, expected) in [
            (request("/sys/fs/cgroup", 1), "not the path"),
            (request("/sys/fs/cgroup/../../etc", 1), "not the path"),
            (request("sys/fs/cgroup/a", 1), "not the path"),
            (request("/etc", 1), "not the path"),
            (request("/sys/fs/cgroup/gpufence-is-not-there", 1), "no cgroup"),
        ] {
            let error = check(&request).unwrap_err();
            assert!(error.contains(expected), "{request:?}: {error}");
        }
    }
}
