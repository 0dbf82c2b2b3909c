//! What a Pod asks for: read from its containers' resources, whichever names they use.

use std::collections::BTreeMap;

use gpufence_grant::{
    Mode,
    resources::{
        GPU_COMPUTE, GPU_COUNT, GPU_MEMORY, GPUSHARE_COMPUTE, GPUSHARE_COUNT, GPUSHARE_MEMORY, MIG_PREFIX,
        WANTED_GPU_POLICY, WANTED_MODE, WANTED_MODEL, WANTED_NODE_POLICY,
    },
    size::MAX_MEMORY_MIB,
};
use k8s_openapi::api::core::v1::{Container, Pod};
use thiserror::Error;

use crate::{policy::Packing, quantity};

/// The most GPUs that one container may ask for.
const MAX_COUNT: u64 = 64;
/// The most containers with GPUs that a Pod may have.
const MAX_CONTAINERS: usize = 64;

/// A Pod that asks for what can't be meant. Says where, what is wrong and what to do.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("{place}: {what}")]
pub struct RequestError {
    /// A container or an annotation of the Pod.
    pub place: String,
    /// The fault and the remedy.
    pub what: String,
}

/// When a container runs, which says what it can share GPU memory with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Together with all other such containers.
    App,
    /// From its turn among the init containers on, until the Pod ends.
    Sidecar,
    /// Alone but for the sidecars before it.
    Init,
}

/// An amount of memory, of all GPUs of a container together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// MiB.
    Mib(u64),
    /// gpushare's units, GiB or MiB as the node says.
    Gpushare(u64),
}

/// What a container wants of each of some GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A share.
    Share {
        /// Memory.
        memory: Memory,
        /// Percent of one GPU's compute, of all GPUs together.
        compute: Option<u64>,
    },
    /// All of it.
    Whole,
    /// A MIG instance of a profile.
    Instance(String),
}

/// So many GPUs (or MIG instances) for one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// How many, at least 1.
    pub count: usize,
    /// What of each.
    pub what: What,
}

/// What one container asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest {
    /// Its name.
    pub name: String,
    /// When it runs.
    pub role: Role,
    /// What it asks for; empty for a container without GPUs.
    pub claims: Vec<Claim>,
}

/// What a Pod asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRequest {
    /// Its containers that ask for GPUs, in the order in which they start.
    pub containers: Vec<ContainerRequest>,
    /// The models it takes, in small letters with `-` for spaces; empty: any.
    pub models: Vec<String>,
    /// How it chooses among GPUs, if it says so.
    pub gpu_policy: Option<Packing>,
    /// How it chooses among nodes, if it says so.
    pub node_policy: Option<Packing>,
    /// How its GPUs are to be shared, if it says so.
    pub mode: Option<Mode>,
}

/// Reads what a Pod asks for. `None` where it asks for no GPU.
pub fn read(pod: &Pod) -> Result<Option<PodRequest>, RequestError> {
    let Some(spec) = &pod.spec else { return Ok(None) };
    let init = spec.init_containers.iter().flatten().map(|container| {
        let sidecar = container.restart_policy.as_deref() == Some("Always");
        (container, if sidecar { Role::Sidecar } else { Role::Init })
    });
    let mut containers = Vec::new();
    for (container, role) in init.chain(spec.containers.iter().map(|container| (container, Role::App))) {
        let claims = claims(container)?;
        if !claims.is_empty() {
            containers.push(ContainerRequest { name: container.name.clone(), role, claims });
        }
    }
    if containers.is_empty() {
        return Ok(None);
    }
    if containers.len() > MAX_CONTAINERS {
        let what = format!("{} containers ask for GPUs, more than the {MAX_CONTAINERS} allowed", containers.len());
        return Err(RequestError { place: "the Pod".into(), what });
    }
    let annotation = |key: &str| pod.metadata.annotations.as_ref()?.get(key).map(String::as_str);
    let packing = |key: &str| {
        let Some(text) = annotation(key) else { return Ok(None) };
        text.parse().map(Some).map_err(|what| RequestError { place: format!("annotation {key}"), what })
    };
    let models = annotation(WANTED_MODEL).unwrap_or_default();
    let mode = match annotation(WANTED_MODE) {
        None => None,
        Some("mps") => Some(Mode::Mps),
        Some(other) => {
            let what = format!("\"{other:.40}\" is not a way of sharing; write mps or leave it out");
            return Err(RequestError { place: format!("annotation {WANTED_MODE}"), what });
        }
    };
    Ok(Some(PodRequest {
        containers,
        models: models.split(',').map(normal_model).filter(|model| !model.is_empty()).collect(),
        gpu_policy: packing(WANTED_GPU_POLICY)?,
        node_policy: packing(WANTED_NODE_POLICY)?,
        mode,
    }))
}

/// A model's name as it is compared: `NVIDIA A100-SXM4-80GB` becomes `nvidia-a100-sxm4-80gb`.
pub fn normal_model(name: &str) -> String {
    name.trim().to_ascii_lowercase().replace([' ', '_'], "-")
}

fn claims(container: &Container) -> Result<Vec<Claim>, RequestError> {
    let place = || format!("container {}", container.name);
    let error = |what: String| RequestError { place: place(), what };
    let Some(resources) = &container.resources else { return Ok(Vec::new()) };
    // The API server holds requests of extended resources to their limits; who asks without it may have only one.
    let mut amounts: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, quantity) in resources.requests.iter().chain(resources.limits.iter()).flatten() {
        if !is_ours(name) {
            continue;
        }
        let amount = quantity::whole(&quantity.0)
            .map_err(|fault| error(format!("{name}: \"{:.40}\" {fault}; give a whole number", quantity.0)))?;
        match amounts.insert(name.as_str(), amount) {
            Some(request) if request != amount => {
                return Err(error(format!("{name}: the request is {request} and the limit {amount}; make them equal")));
            }
            _ => {}
        }
    }
    amounts.retain(|_, amount| *amount > 0);
    let amount = |ours: &str, gpushare: &str| match (amounts.get(ours), amounts.get(gpushare)) {
        (Some(_), Some(_)) => Err(error(format!("asks for both {ours} and {gpushare}; keep one of them"))),
        (ours, gpushare) => Ok((ours.copied(), gpushare.copied())),
    };
    let memory = match amount(GPU_MEMORY, GPUSHARE_MEMORY)? {
        (Some(mib), _) => Some(Memory::Mib(mib)),
        (None, units) => units.map(Memory::Gpushare),
    };
    let (ours, gpushare) = amount(GPU_COMPUTE, GPUSHARE_COMPUTE)?;
    let compute = ours.or(gpushare);
    let (ours, gpushare) = amount(GPU_COUNT, GPUSHARE_COUNT)?;
    let count = ours.or(gpushare);
    if let Some(Memory::Mib(amount) | Memory::Gpushare(amount)) = memory
        && amount > MAX_MEMORY_MIB
    {
        return Err(error(format!("asks for {amount} of GPU memory, more than any node has")));
    }
    let mut claims = Vec::new();
    let mut claim = |count: u64, what: What| {
        if count > MAX_COUNT {
            return Err(error(format!("asks for {count} GPUs, more than the {MAX_COUNT} allowed")));
        }
        claims.push(Claim { count: usize::try_from(count).unwrap_or(1), what });
        Ok(())
    };
    match (memory, count) {
        (Some(memory), count) => {
            let count = count.unwrap_or(1);
            if let Some(compute) = compute
                && compute.div_ceil(count) > 100
            {
                return Err(error(format!(
                    "asks for {compute} percent of compute on {count} GPU; give at most 100 for each GPU"
                )));
            }
            claim(count, What::Share { memory, compute })?;
        }
        (None, Some(_)) if compute.is_some() => {
            return Err(error(format!(
                "asks for GPUs and compute without memory; add {GPU_MEMORY}, or leave out compute for whole GPUs"
            )));
        }
        (None, Some(count)) => claim(count, What::Whole)?,
        (None, None) if compute.is_some() => {
            return Err(error(format!("asks for compute without memory; add {GPU_MEMORY}")));
        }
        (None, None) => {}
    }
    for (name, count) in &amounts {
        if let Some(profile) = name.strip_prefix(MIG_PREFIX) {
            claim(*count, What::Instance(profile.to_owned()))?;
        }
    }
    Ok(claims)
}

/// Whether a resource is one that the extender manages.
fn is_ours(name: &str) -> bool {
    [GPU_MEMORY, GPU_COMPUTE, GPU_COUNT, GPUSHARE_MEMORY, GPUSHARE_COMPUTE, GPUSHARE_COUNT].contains(&name)
        || name.starts_with(MIG_PREFIX)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(limits: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "spec": {"containers": [{"name": "a", "resources": {"limits": limits}}]},
        }))
        .unwrap()
    }

    fn share(count: usize, memory: Memory, compute: Option<u64>) -> Vec<Claim> {
        vec![Claim { count, what: What::Share { memory, compute } }]
    }

    #[test]
    fn resources() {
        for (limits, expected) in [
            (json!({"cpu": "1"}), vec![]),
            (json!({"gpufence.dev/gpu-memory": "0"}), vec![]),
            (json!({"gpufence.dev/gpu-memory": "8192"}), share(1, Memory::Mib(8192), None)),
            (json!({"gpufence.dev/gpu-memory": "8k"}), share(1, Memory::Mib(8000), None)),
            (json!({"aliyun.com/gpu-mem": "8"}), share(1, Memory::Gpushare(8), None)),
            (
                json!({"gpufence.dev/gpu-memory": "8192", "gpufence.dev/gpu-compute": "50"}),
                share(1, Memory::Mib(8192), Some(50)),
            ),
            (
                json!({"aliyun.com/gpu-mem": "8", "aliyun.com/gpu-core.percentage": "150", "aliyun.com/gpu-count": "2"}),
                share(2, Memory::Gpushare(8), Some(150)),
            ),
            (json!({"gpufence.dev/gpu-count": "2"}), vec![Claim { count: 2, what: What::Whole }]),
            (
                json!({"gpufence.dev/mig-1g.10gb": "2"}),
                vec![Claim { count: 2, what: What::Instance("1g.10gb".into()) }],
            ),
        ] {
            let request = read(&pod(&limits)).unwrap();
            let claims = request.map(|request| request.containers[0].claims.clone()).unwrap_or_default();
            assert_eq!(claims, expected, "{limits}");
        }
    }

    #[test]
    fn what_can_t_be_meant() {
        for (limits, expected) in [
            (json!({"gpufence.dev/gpu-memory": "-1"}), "\"-1\" is negative"),
            (json!({"gpufence.dev/gpu-memory": "1.5"}), "\"1.5\" is not a whole number"),
            (json!({"gpufence.dev/gpu-memory": "8GB"}), "\"8GB\" is not a quantity"),
            (json!({"gpufence.dev/gpu-memory": "9E"}), "more than any node has"),
            (json!({"gpufence.dev/gpu-memory": "1", "aliyun.com/gpu-mem": "1"}), "asks for both"),
            (json!({"gpufence.dev/gpu-compute": "50"}), "compute without memory"),
            (json!({"gpufence.dev/gpu-count": "1", "gpufence.dev/gpu-compute": "50"}), "compute without memory"),
            (json!({"gpufence.dev/gpu-memory": "1", "gpufence.dev/gpu-compute": "101"}), "101 percent"),
            (json!({"gpufence.dev/gpu-count": "65"}), "65 GPUs, more than the 64"),
        ] {
            let error = read(&pod(&limits)).unwrap_err().to_string();
            assert!(error.starts_with("container a: ") && error.contains(expected), "{limits}: {error}");
        }
        let mut unequal = pod(&json!({"gpufence.dev/gpu-memory": "2"}));
        let resources = unequal.spec.as_mut().unwrap().containers[0].resources.as_mut().unwrap();
        resources.requests = serde_json::from_value(json!({"gpufence.dev/gpu-memory": "1"})).unwrap();
        assert!(read(&unequal).unwrap_err().to_string().contains("the request is 1 and the limit 2"));
    }

    #[test]
    fn roles_and_wishes() {
        let limits = json!({"limits": {"gpufence.dev/gpu-memory": "1"}});
        let mut value = json!({
            "metadata": {"name": "p", "annotations": {
                "scheduling.gpufence.dev/gpu-model": "A100-SXM4-80GB, NVIDIA H200",
                "scheduling.gpufence.dev/gpu-policy": "spread",
                "scheduling.gpufence.dev/mode": "mps",
            }},
            "spec": {
                "initContainers": [
                    {"name": "load", "resources": limits},
                    {"name": "proxy", "restartPolicy": "Always", "resources": limits},
                ],
                "containers": [{"name": "a", "resources": limits}, {"name": "b"}],
            },
        });
        let read = |value: &Value| read(&serde_json::from_value(value.clone()).unwrap());
        let request = read(&value).unwrap().unwrap();
        let roles: Vec<_> = request.containers.iter().map(|it| (it.name.as_str(), it.role)).collect();
        assert_eq!(roles, [("load", Role::Init), ("proxy", Role::Sidecar), ("a", Role::App)]);
        assert_eq!(request.models, ["a100-sxm4-80gb", "nvidia-h200"]);
        assert_eq!(
            (request.gpu_policy, request.node_policy, request.mode),
            (Some(Packing::Spread), None, Some(Mode::Mps))
        );
        for (key, expected) in [
            ("scheduling.gpufence.dev/gpu-policy", "write binpack, spread or balanced"),
            ("scheduling.gpufence.dev/mode", "write mps or leave it out"),
        ] {
            value["metadata"]["annotations"][key] = json!("fast");
            assert!(read(&value).unwrap_err().to_string().contains(expected));
            value["metadata"]["annotations"].as_object_mut().unwrap().remove(key);
        }
    }
}
