//! The design's rules of enforcement, in order. A pure function.

use std::path::Path;

use gpufence_cdi::{devices::Devices, spec::ContainerEdits};
use serde_json::{Value, json};

use crate::{
    EnforceError, capabilities, device_rules, devices,
    environment::{self, Granted},
    hooks, json, mounts,
    policy::{Policy, Privileged},
};

/// What one container is given, and what the node has.
#[derive(Debug)]
pub struct Given<'a> {
    /// The container edits of its grant; empty with no grant.
    pub edits: &'a ContainerEdits,
    /// What its environment is to say.
    pub granted: &'a Granted,
    /// All GPU devices of the node.
    pub devices: &'a Devices,
    /// Capabilities that no process of it may have, as [`dropped_capabilities`] says.
    pub dropped_capabilities: &'a [String],
    /// The node's policy.
    pub policy: &'a Policy,
    /// The host's folders that only we mount from.
    pub mount_sources: &'a [&'a Path],
}

/// Which capabilities a process of this container must not have; the same for those that exec adds.
pub fn dropped_capabilities(spec: &Value, granted: &Granted, host_pids: bool, policy: &Policy) -> Vec<String> {
    let privileged = device_rules::allows_by_default(spec);
    if privileged && policy.privileged == Privileged::Allow {
        return Vec::new();
    }
    let list = if privileged || !granted.visible.is_empty() {
        &policy.drop_capabilities
    } else {
        &policy.drop_capabilities_ungranted
    };
    let besides: &[String] = if host_pids { &policy.drop_capabilities_host_pid } else { &[] };
    list.iter().chain(besides).cloned().collect()
}

/// Applies a grant to a spec. Twice is as once.
pub fn enforce(mut spec: Value, given: &Given<'_>) -> Result<Value, EnforceError> {
    let Given { edits, granted, devices, dropped_capabilities, policy, mount_sources } = given;
    let has_grant = !granted.visible.is_empty();
    let privileged = device_rules::allows_by_default(&spec);
    if privileged && policy.privileged == Privileged::Deny {
        return Err(EnforceError::Privileged);
    }
    let trusted = privileged && policy.privileged == Privileged::Allow;

    hooks::remove(&mut spec)?;
    if !trusted {
        devices::replace(&mut spec, &edits.device_nodes, devices)?;
        device_rules::fence(&mut spec, &edits.device_nodes, devices)?;
    } else if has_grant {
        devices::replace(&mut spec, &edits.device_nodes, devices)?;
    }
    mounts::replace(&mut spec, &edits.mounts, mount_sources)?;
    if has_grant {
        add_groups(&mut spec, &edits.additional_gids)?;
    }
    let Some(process) = spec.get_mut("process").filter(|process| !process.is_null()) else { return Ok(spec) };
    environment::rewrite(process, granted)?;
    capabilities::drop(process, dropped_capabilities)?;
    if has_grant && policy.no_new_privileges {
        capabilities::forbid_new_privileges(process);
    }
    Ok(spec)
}

/// Groups that own nodes which aren't for everyone.
fn add_groups(spec: &mut Value, groups: &[u32]) -> Result<(), EnforceError> {
    if groups.is_empty() {
        return Ok(());
    }
    let list = json::list(spec, &["process", "user", "additionalGids"])?;
    for group in groups.iter().map(|group| json!(group)) {
        if !list.contains(&group) {
            list.push(group);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use gpufence_cdi::capability::DriverCapability;

    use super::*;

    fn devices() -> Devices {
        Devices { majors: [("nvidia".to_owned(), 195)].into(), ..Devices::default() }
    }

    fn run(spec: Value, granted: &Granted, edits: &ContainerEdits, policy: &Policy) -> Result<Value, EnforceError> {
        let given = Given {
            edits,
            granted,
            devices: &devices(),
            dropped_capabilities: &dropped_capabilities(
                &spec,
                granted,
                !spec["linux"]["namespaces"].is_array(),
                policy,
            ),
            policy,
            mount_sources: &[Path::new("/var/lib/gpufence/stage")],
        };
        let once = enforce(spec, &given)?;
        assert_eq!(enforce(once.clone(), &given)?, once, "twice is as once");
        Ok(once)
    }

    fn ordinary() -> Value {
        json!({
            "ociVersion": "1.0.2", "ofNextYear": {"kept": true},
            "process": {"env": ["PATH=/bin"], "capabilities": {"bounding": ["CAP_MKNOD", "CAP_CHOWN", "CAP_SYS_ADMIN"]}},
            "linux": {
                "namespaces": [{"type": "pid"}],
                "resources": {"devices": [{"allow": false, "access": "rwm"}]},
            },
        })
    }

    fn privileged() -> Value {
        let mut spec = ordinary();
        spec["linux"]["resources"]["devices"] = json!([{"allow": true, "access": "rwm"}]);
        spec
    }

    #[test]
    fn no_grant_changes_only_the_fence() {
        let spec = run(ordinary(), &Granted::default(), &ContainerEdits::default(), &Policy::default()).unwrap();
        let mut expected = ordinary();
        expected["linux"]["resources"]["devices"]
            .as_array_mut()
            .unwrap()
            .push(json!({"allow": false, "type": "c", "major": 195, "access": "rwm"}));
        expected["process"]["capabilities"]["bounding"] = json!(["CAP_MKNOD", "CAP_CHOWN"]);
        assert_eq!(spec, expected);
    }

    #[test]
    fn a_grant_drops_capabilities_and_adds_groups() {
        let granted = Granted {
            visible: vec!["GPU-a".into()],
            memory_mib: vec![1024],
            capabilities: [DriverCapability::Compute].into(),
            mps_percent: None,
        };
        let edits = ContainerEdits { additional_gids: vec![44], ..ContainerEdits::default() };
        let spec = run(ordinary(), &granted, &edits, &Policy::default()).unwrap();
        assert_eq!(spec["process"]["capabilities"]["bounding"], json!(["CAP_CHOWN"]));
        assert_eq!(spec["process"]["user"]["additionalGids"], json!([44]));
        assert_eq!(spec["ofNextYear"], json!({"kept": true}));
    }

    #[test]
    fn ptrace_goes_where_the_host_s_processes_are_seen() {
        let mut spec = ordinary();
        spec["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_PTRACE"]);
        let none = (Granted::default(), ContainerEdits::default());
        let own = run(spec.clone(), &none.0, &none.1, &Policy::default()).unwrap();
        assert_eq!(own["process"]["capabilities"]["bounding"], json!(["CAP_SYS_PTRACE"]));
        spec["linux"]["namespaces"] = Value::Null;
        let host_s = run(spec, &none.0, &none.1, &Policy::default()).unwrap();
        assert_eq!(host_s["process"]["capabilities"]["bounding"], json!([]));
    }

    #[test]
    fn privileged_containers_by_policy() {
        let none = (Granted::default(), ContainerEdits::default());
        let with = |privileged| Policy { privileged, ..Policy::default() };
        let deny = run(privileged(), &none.0, &none.1, &with(Privileged::Deny));
        assert!(matches!(deny, Err(EnforceError::Privileged)));
        assert_eq!(run(privileged(), &none.0, &none.1, &with(Privileged::Allow)).unwrap(), privileged());
        let fenced = run(privileged(), &none.0, &none.1, &with(Privileged::Fence)).unwrap();
        assert_eq!(fenced["process"]["capabilities"]["bounding"], json!(["CAP_CHOWN"]));
        assert_eq!(fenced["linux"]["resources"]["devices"][1]["major"], json!(195));
    }

    #[test]
    fn wrong_shapes_are_errors() {
        for spec in [
            json!([]),
            json!({"linux": 1}),
            json!({"linux": {"resources": {"devices": {}}}}),
            json!({"process": {"env": {}}, "linux": {}}),
            json!({"mounts": {}}),
        ] {
            assert!(
                run(spec.clone(), &Granted::default(), &ContainerEdits::default(), &Policy::default()).is_err(),
                "{spec}"
            );
        }
    }
}
