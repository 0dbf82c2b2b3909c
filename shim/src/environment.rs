//! `process.env`: what the image or the Pod says of GPUs is rewritten to say what was granted. It gives nothing.

use gpufence_cdi::capability::{self, DriverCapabilities};
use serde_json::{Value, json};

use crate::{EnforceError, json};

/// What other runtimes take for a request.
const REQUESTS: [&str; 6] = [
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_GDRCOPY",
];

/// What a container's environment is to say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Granted {
    /// The UUIDs of its GPUs, in order; empty with no grant.
    pub visible: Vec<String>,
    /// Its driver capabilities.
    pub capabilities: DriverCapabilities,
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
    if let Some(variables) = json::list_if_there(process, &["env"])? {
        variables.retain(|variable| {
            let name = variable.as_str().and_then(|text| text.split_once('=')).map(|(name, _)| name);
            let request = name.is_some_and(|name| REQUESTS.contains(&name));
            spoke |= request;
            !request
        });
    }
    if granted.visible.is_empty() {
        if spoke {
            // NVIDIA's word for "nothing at all", also for a runtime nested in this container.
            json::list(process, &["env"])?.push(json!("NVIDIA_VISIBLE_DEVICES=void"));
        }
        return Ok(());
    }
    let names: Vec<&str> = granted.capabilities.iter().map(|capability| capability.name()).collect();
    json::list(process, &["env"])?.extend([
        json!(format!("NVIDIA_VISIBLE_DEVICES={}", granted.visible.join(","))),
        json!(format!("NVIDIA_DRIVER_CAPABILITIES={}", names.join(","))),
    ]);
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
        let granted = Granted { visible: vec!["GPU-a".into()], capabilities: [Compute, Utility].into() };
        rewrite(&mut process, &granted).unwrap();
        let expected = json!({"env": ["PATH=/bin", "noequals", "NVIDIA_VISIBLE_DEVICES=GPU-a", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]});
        assert_eq!(process, expected);
        rewrite(&mut process, &granted).unwrap();
        assert_eq!(process, expected);
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
