//! `linux.resources.devices`: the device cgroup's rules, which end with what denies every GPU that isn't granted and
//! allows exactly those that are.
//!
//! runc refuses to "punch a hole" into a wildcard rule, under cgroup v1 and v2 alike, so the two kinds of list get
//! different ends. A list that denies by default (any ordinary container's) gets `deny 195:*` and then its allows. One
//! that allows by default (a privileged container's) gets a denial for each minor that isn't granted.

use std::collections::BTreeSet;

use gpufence_cdi::{devices::Devices, spec::SpecNode};
use serde_json::{Value, json};

use crate::{EnforceError, json};

/// The highest minor that NVIDIA's own major is fenced up to: 255 is /dev/nvidiactl.
const LAST_MINOR: u32 = 255;

/// Whether the rules allow what no rule names: a privileged container's do.
pub fn allows_by_default(spec: &Value) -> bool {
    let rules = spec.pointer("/linux/resources/devices").and_then(Value::as_array);
    rules
        .into_iter()
        .flatten()
        .map(Rule::read)
        .fold(false, |allows, rule| if rule.is_global() { rule.allow } else { allows })
}

/// Puts the fence at the end of the rules.
pub fn fence(spec: &mut Value, granted: &[SpecNode], devices: &Devices) -> Result<(), EnforceError> {
    let by_default = allows_by_default(spec);
    let fenced = devices.fenced_majors();
    let rules = json::list(spec, &["linux", "resources", "devices"])?;
    let before = std::mem::take(rules);
    let mut denied_access = "rwm";
    for value in before {
        let rule = Rule::read(&value);
        if !rule.is_character() || rule.is_global() {
            rules.push(value);
        } else if rule.major.is_some_and(|major| fenced.contains(&major)) || rule.is_drm_of(devices) {
            // Whatever it said about a GPU, ours says it now.
        } else if by_default || !rule.allow {
            rules.push(value);
        } else if rule.major.is_none() {
            if rule.access.contains(['r', 'w']) {
                return Err(EnforceError::Unfenceable { rule: value.to_string() });
            }
            // "c *:* m", which Docker gives to all: making nodes is allowed, opening them isn't.
            denied_access = "rw";
            rules.push(value);
        } else if rule.minor.is_none() && devices.drm_nodes().any(|node| Some(node.major) == rule.major) {
            rules.extend(without_drm_nodes(&value, devices));
        } else {
            rules.push(value);
        }
    }
    if by_default {
        rules.extend(denials_by_minor(granted, devices, &fenced));
    } else {
        rules.extend(
            fenced.iter().map(|major| json!({"allow": false, "type": "c", "major": major, "access": denied_access})),
        );
        rules.extend(granted.iter().map(|node| {
            json!({"allow": true, "type": "c", "major": node.major, "minor": node.minor, "access": node.permissions})
        }));
    }
    Ok(())
}

fn denials_by_minor(granted: &[SpecNode], devices: &Devices, fenced: &[u32]) -> Vec<Value> {
    let deny =
        |major: u32, minor: u32| json!({"allow": false, "type": "c", "major": major, "minor": minor, "access": "rwm"});
    let mut denials = Vec::new();
    for major in fenced {
        let allowed: BTreeSet<u32> =
            granted.iter().filter(|node| node.major == *major).map(|node| node.minor).collect();
        if allowed.is_empty() {
            denials.push(json!({"allow": false, "type": "c", "major": major, "access": "rwm"}));
            continue;
        }
        let nvidia = devices.majors.get("nvidia").is_none_or(|nvidia| nvidia == major);
        let last = devices.highest_minor(*major).max(if nvidia { LAST_MINOR } else { 1 });
        denials.extend((0..=last).filter(|minor| !allowed.contains(minor)).map(|minor| deny(*major, minor)));
    }
    let ungranted = devices
        .drm_nodes()
        .filter(|drm| !granted.iter().any(|node| (node.major, node.minor) == (drm.major, drm.minor)));
    denials.extend(ungranted.map(|node| deny(node.major, node.minor)));
    denials
}

/// A rule for all minors of the DRM major, as one for each minor that isn't a GPU's of ours.
fn without_drm_nodes(value: &Value, devices: &Devices) -> Vec<Value> {
    let major = Rule::read(value).major;
    (0..=LAST_MINOR)
        .filter(|minor| !devices.drm_nodes().any(|node| (Some(node.major), node.minor) == (major, *minor)))
        .map(|minor| {
            let mut rule = value.clone();
            rule["minor"] = json!(minor);
            rule
        })
        .collect()
}

/// A rule as the OCI runtime specification reads it: an absent number, or -1, is a wildcard.
struct Rule<'a> {
    allow: bool,
    kind: &'a str,
    major: Option<u32>,
    minor: Option<u32>,
    access: &'a str,
}

impl<'a> Rule<'a> {
    fn read(value: &'a Value) -> Self {
        let text =
            |key, missing| value.get(key).and_then(Value::as_str).filter(|text| !text.is_empty()).unwrap_or(missing);
        let number = |key| value.get(key).and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok());
        Self {
            allow: value.get("allow").and_then(Value::as_bool).unwrap_or(false),
            kind: text("type", "a"),
            major: number("major"),
            minor: number("minor"),
            access: text("access", "rwm"),
        }
    }

    /// Whether it is about all devices of every kind, and so sets the default.
    fn is_global(&self) -> bool {
        self.kind == "a" && self.major.is_none() && self.minor.is_none()
    }

    fn is_character(&self) -> bool {
        matches!(self.kind, "a" | "c" | "u")
    }

    fn is_drm_of(&self, devices: &Devices) -> bool {
        devices.drm_nodes().any(|node| (Some(node.major), Some(node.minor)) == (self.major, self.minor))
    }
}

#[cfg(test)]
mod tests {
    use gpufence_cdi::devices::{DeviceNode, Gpu};

    use super::*;

    fn node_of(path: &str, major: u32, minor: u32) -> DeviceNode {
        DeviceNode { path: path.into(), major, minor, mode: None, gid: None }
    }

    fn devices() -> Devices {
        let gpu = Gpu {
            index: Some(0),
            uuid: None,
            pci_address: "0000:01:00.0".into(),
            model: "test".into(),
            memory_mib: None,
            node: node_of("/dev/nvidia0", 195, 0),
            drm: vec![node_of("/dev/dri/renderD128", 226, 128)],
            mig: vec![],
        };
        Devices {
            majors: [("nvidia".to_owned(), 195), ("nvidia-uvm".to_owned(), 511)].into(),
            gpus: vec![gpu],
            shared: vec![],
        }
    }

    fn granted(major: u32, minor: u32) -> SpecNode {
        SpecNode {
            path: String::new(),
            kind: "c".into(),
            major,
            minor,
            file_mode: None,
            gid: None,
            permissions: "rw".into(),
        }
    }

    fn fenced(rules: &Value, granted: &[SpecNode]) -> Result<Vec<Value>, EnforceError> {
        let mut spec = json!({"linux": {"resources": {"devices": rules}}});
        fence(&mut spec, granted, &devices())?;
        let once = spec.clone();
        fence(&mut spec, granted, &devices())?;
        assert_eq!(spec, once, "twice is as once");
        Ok(spec["linux"]["resources"]["devices"].as_array().unwrap().clone())
    }

    #[test]
    fn an_ordinary_list_ends_with_denials_then_allows() {
        let rules = json!([{"allow": false, "access": "rwm"}, {"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm"}, {"allow": true, "type": "c", "major": 195, "access": "rwm"}]);
        assert_eq!(
            fenced(&rules, &[granted(195, 0)]).unwrap(),
            *json!([
                {"allow": false, "access": "rwm"},
                {"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm"},
                {"allow": false, "type": "c", "major": 195, "access": "rwm"},
                {"allow": false, "type": "c", "major": 511, "access": "rwm"},
                {"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rw"},
            ])
            .as_array()
            .unwrap()
        );
    }

    #[test]
    fn a_privileged_list_gets_a_denial_for_each_minor() {
        let rules = fenced(&json!([{"allow": true, "access": "rwm"}]), &[granted(195, 0), granted(195, 255)]).unwrap();
        let denied: BTreeSet<u64> = rules
            .iter()
            .filter(|rule| rule["major"] == 195 && rule["allow"] == false)
            .map(|rule| rule["minor"].as_u64().unwrap())
            .collect();
        assert_eq!(denied, (1..=254).collect());
        assert!(rules.contains(&json!({"allow": false, "type": "c", "major": 511, "access": "rwm"})));
        assert!(rules.contains(&json!({"allow": false, "type": "c", "major": 226, "minor": 128, "access": "rwm"})));
    }

    #[test]
    fn docker_s_rule_for_making_nodes_stays() {
        let make = json!({"allow": true, "type": "c", "major": -1, "minor": -1, "access": "m"});
        let rules = fenced(&json!([{"allow": false, "access": "rwm"}, make]), &[]).unwrap();
        assert!(rules.contains(&make));
        assert!(rules.contains(&json!({"allow": false, "type": "c", "major": 195, "access": "rw"})));
    }

    #[test]
    fn a_rule_for_every_major_is_refused_unless_privileged() {
        let wide = json!({"allow": true, "type": "c", "access": "rwm"});
        assert!(matches!(fenced(&json!([{"allow": false}, wide]), &[]), Err(EnforceError::Unfenceable { .. })));
        assert!(fenced(&json!([{"allow": true, "access": "rwm"}, wide]), &[]).is_ok());
    }

    #[test]
    fn all_of_drm_is_all_but_the_gpu_s() {
        let rules =
            fenced(&json!([{"allow": false}, {"allow": true, "type": "c", "major": 226, "access": "rwm"}]), &[])
                .unwrap();
        let minors: BTreeSet<u64> =
            rules.iter().filter(|rule| rule["major"] == 226).map(|rule| rule["minor"].as_u64().unwrap()).collect();
        assert_eq!(minors, (0..=255).filter(|minor| *minor != 128).collect());
    }

    #[test]
    fn the_default_is_what_the_last_global_rule_says() {
        for (rules, expected) in [
            (json!([]), false),
            (json!([{"allow": false, "access": "rwm"}]), false),
            (json!([{"allow": true, "access": "rwm"}]), true),
            (json!([{"allow": true, "type": "a", "major": -1, "minor": -1}]), true),
            (json!([{"allow": true}, {"allow": false}]), false),
            (json!([{"allow": true, "type": "c"}]), false),
        ] {
            assert_eq!(allows_by_default(&json!({"linux": {"resources": {"devices": rules}}})), expected, "{rules}");
        }
    }
}
