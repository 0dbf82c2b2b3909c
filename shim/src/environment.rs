//! `process.env`: what the image or the Pod says of GPUs is rewritten to say what was granted. It gives nothing.

use gpufence_cdi::capability::{self, DriverCapabilities};
use serde_json::{Value, json};

use crate::{EnforceError, json, mps};

/// What other runtimes take for a request.
const REQUESTS: [&str; 6] = [
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_GDRCOPY",
];

/// Variables of ours that tell programs of their memory, in MiB and in GiB. Nothing is enforced by them.
const MEMORY: [&str; 2] = ["GPUFENCE_MEMORY_MIB", "GPU_MEM_GB"];
/// Makes CUDA number the GPUs in the grant's order. A container that has one of its own keeps it.
const ORDER: &str = "CUDA_VISIBLE_DEVICES";

/// What a container's environment is to say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Granted {
    /// The UUIDs of its GPUs, in order; empty with no grant.
    pub visible: Vec<String>,
    /// The memory limit of each, in MiB.
    pub memory_mib: Vec<u64>,
    /// Its driver capabilities.
    pub capabilities: DriverCapabilities,
    /// Where it is a client of MPS: the most threads of a GPU that it may use, in percent.
    pub mps_percent: Option<u8>,
}

/// Which driver capabilities the environment chooses, within what policy allows.
pub fn chosen_capabilities(process: &Value, allowed: &DriverCapabilities) -> Option<DriverCapabilities> {
    let variables = process.get("env")?.as_array()?;
    // The last of equal names is what a program's getenv finds in most engines' lists.
    let text =
        variables.iter().rev().find_map(|variable| variable.as_str()?.strip_prefix("NVIDIA_DRIVER_CAPABILITIES="))?;
    capability::requested(text, allowed)
}

/// Rewrites a process's environment. `process` is `process` of a spec, or the process of an exec.
///
/// With no grant, nothing is added to an environment that doesn't speak of GPUs.
pub fn rewrite(process: &mut Value, granted: &Granted) -> Result<(), EnforceError> {
    let mut spoke = false;
    let has_grant = !granted.visible.is_empty();
    if let Some(variables) = json::list_if_there(process, &["env"])? {
        variables.retain(|variable| {
            let name = variable.as_str().and_then(|text| text.split_once('=')).map(|(name, _)| name);
            let request = name.is_some_and(|name| REQUESTS.contains(&name));
            spoke |= request;
            let ours = |name: &str| {
                has_grant && MEMORY.contains(&name) || granted.mps_percent.is_some() && name.starts_with("CUDA_MPS_")
            };
            !request && !name.is_some_and(ours)
        });
    }
    if !has_grant {
        if spoke {
            // NVIDIA's word for "nothing at all", also for a runtime nested in this container.
            json::list(process, &["env"])?.push(json!("NVIDIA_VISIBLE_DEVICES=void"));
        }
        return Ok(());
    }
    let names: Vec<&str> = granted.capabilities.iter().map(|capability| capability.name()).collect();
    let each = |number: fn(u64) -> u64| {
        let numbers = granted.memory_mib.iter().map(|mib| number(*mib).to_string());
        numbers.collect::<Vec<_>>().join(",")
    };
    let variables = json::list(process, &["env"])?;
    let is_order = |variable: &Value| {
        variable.as_str().and_then(|text| text.strip_prefix(ORDER)).is_some_and(|rest| rest.starts_with('='))
    };
    // CUDA knows its devices by UUID; a GPU that is named otherwise is the container's only one.
    let by_uuid = |name: &String| name.starts_with("GPU-") || name.starts_with("MIG-");
    if granted.visible.iter().all(by_uuid) && !variables.iter().any(is_order) {
        variables.push(json!(format!("{ORDER}={}", granted.visible.join(","))));
    }
    variables.extend([
        json!(format!("NVIDIA_VISIBLE_DEVICES={}", granted.visible.join(","))),
        json!(format!("NVIDIA_DRIVER_CAPABILITIES={}", names.join(","))),
        json!(format!("{}={}", MEMORY[0], each(|mib| mib))),
        json!(format!("{}={}", MEMORY[1], each(|mib| mib >> 10))),
    ]);
    if let Some(percent) = granted.mps_percent {
        variables.extend(mps::variables(&granted.memory_mib, percent).into_iter().map(Value::String));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use gpufence_cdi::capability::DriverCapability::{Compute, Graphics, Utility};

    use super::*;

    #[test]
    fn says_what_was_granted() {
        let mut process =
            json!({"env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all", "noequals", "NVIDIA_DRIVER_CAPABILITIES=all"]});
        let granted = Granted {
            visible: vec!["GPU-a".into(), "GPU-b".into()],
            memory_mib: vec![8192, 1536],
            capabilities: [Compute, Utility].into(),
            mps_percent: None,
        };
        rewrite(&mut process, &granted).unwrap();
        let expected = json!({"env": [
            "PATH=/bin", "noequals", "CUDA_VISIBLE_DEVICES=GPU-a,GPU-b",
            "NVIDIA_VISIBLE_DEVICES=GPU-a,GPU-b", "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            "GPUFENCE_MEMORY_MIB=8192,1536", "GPU_MEM_GB=8,1",
        ]});
        assert_eq!(process, expected);
        rewrite(&mut process, &granted).unwrap();
        assert_eq!(process, expected, "twice is as once");
        let mut process = json!({"env": ["CUDA_VISIBLE_DEVICES=1", "GPU_MEM_GB=80"]});
        rewrite(&mut process, &granted).unwrap();
        let variables = process["env"].as_array().unwrap();
        assert!(variables.contains(&json!("CUDA_VISIBLE_DEVICES=1")), "its own choice among what it was granted");
        assert!(!variables.contains(&json!("GPU_MEM_GB=80")) && variables.contains(&json!("GPU_MEM_GB=8,1")));
    }

    #[test]
    fn clients_of_mps() {
        let mut process = json!({"env": ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=80G", "CUDA_MPS_CLIENT_PRIORITY=0"]});
        let granted = Granted {
            visible: vec!["GPU-a".into()],
            memory_mib: vec![8192],
            mps_percent: Some(25),
            ..Granted::default()
        };
        rewrite(&mut process, &granted).unwrap();
        let text = process.to_string();
        assert!(text.contains("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M") && text.contains("PERCENTAGE=25"), "{text}");
        assert!(!text.contains("80G") && !text.contains("PRIORITY"), "{text}");
    }

    #[test]
    fn with_no_grant_only_a_request_is_answered() {
        let mut process = json!({"env": ["NVIDIA_VISIBLE_DEVICES=all"]});
        rewrite(&mut process, &Granted::default()).unwrap();
        assert_eq!(process, json!({"env": ["NVIDIA_VISIBLE_DEVICES=void"]}));
        let mut process = json!({"args": ["sh"]});
        rewrite(&mut process, &Granted::default()).unwrap();
        assert_eq!(process, json!({"args": ["sh"]}));
    }

    #[test]
    fn capabilities_are_chosen_within_what_is_allowed() {
        let process = json!({"env": ["NVIDIA_DRIVER_CAPABILITIES=utility,graphics"]});
        assert_eq!(chosen_capabilities(&process, &[Compute, Utility].into()), Some([Utility].into()));
        assert_eq!(chosen_capabilities(&process, &[Utility, Graphics].into()), Some([Utility, Graphics].into()));
        assert_eq!(chosen_capabilities(&json!({}), &[Utility].into()), None);
    }
}
