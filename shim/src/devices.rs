//! `linux.devices`: the granted nodes, and no other GPU's.

use gpufence_cdi::{devices::Devices, spec::SpecNode};
use serde_json::{Value, json};

use crate::{EnforceError, json};

/// Removes every GPU node and adds the granted ones.
pub fn replace(spec: &mut Value, granted: &[SpecNode], devices: &Devices) -> Result<(), EnforceError> {
    if let Some(list) = json::list_if_there(spec, &["linux", "devices"])? {
        list.retain(|device| !is_gpu(device, devices));
    }
    if !granted.is_empty() {
        json::list(spec, &["linux", "devices"])?.extend(granted.iter().map(node));
    }
    Ok(())
}

fn node(granted: &SpecNode) -> Value {
    let SpecNode { path, kind, major, minor, file_mode, gid, .. } = granted;
    let mut node = json!({"path": path, "type": kind, "major": major, "minor": minor});
    if let Some(mode) = file_mode {
        node["fileMode"] = json!(mode);
    }
    node["uid"] = json!(0);
    node["gid"] = json!(gid.unwrap_or(0));
    node
}

/// Whether an entry is a GPU's: by its numbers, or by a path that only GPUs have.
fn is_gpu(device: &Value, devices: &Devices) -> bool {
    let number = |key| device.get(key).and_then(Value::as_u64);
    let path = device.get("path").and_then(Value::as_str).unwrap_or_default();
    let character = matches!(device.get("type").and_then(Value::as_str), Some("c" | "u") | None);
    let numbers = number("major").zip(number("minor")).is_some_and(|(major, minor)| {
        devices.fenced_majors().iter().any(|fenced| u64::from(*fenced) == major)
            || devices.drm_nodes().any(|node| (u64::from(node.major), u64::from(node.minor)) == (major, minor))
    });
    path.starts_with("/dev/nvidia") || (character && numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_number_and_by_path() {
        let devices = Devices {
            majors: [("nvidia".to_owned(), 195), ("nvidia-uvm".to_owned(), 511)].into(),
            ..Devices::default()
        };
        let mut spec = json!({"linux": {"devices": [
            {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229},
            {"path": "/dev/innocent", "type": "c", "major": 195, "minor": 1},
            {"path": "/dev/uvm", "type": "u", "major": 511, "minor": 0},
            {"path": "/dev/nvidia3", "type": "c", "major": 1, "minor": 3},
            {"path": "/dev/disk", "type": "b", "major": 195, "minor": 1},
        ]}});
        let granted = SpecNode {
            path: "/dev/nvidia0".into(),
            kind: "c".into(),
            major: 195,
            minor: 0,
            file_mode: Some(0o666),
            gid: None,
            permissions: "rw".into(),
        };
        replace(&mut spec, std::slice::from_ref(&granted), &devices).unwrap();
        let paths: Vec<_> = spec["linux"]["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| device["path"].as_str().unwrap())
            .collect();
        assert_eq!(paths, ["/dev/fuse", "/dev/disk", "/dev/nvidia0"]);
        let once = spec.clone();
        replace(&mut spec, &[granted], &devices).unwrap();
        assert_eq!(spec, once);
    }
}
