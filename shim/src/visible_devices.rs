//! `NVIDIA_VISIBLE_DEVICES` as a wish for whole GPUs, for standalone hosts whose policy grants such wishes.

use gpufence_cdi::devices::{Devices, Gpu};
use gpufence_grant::{GpuReference, Grant, Recipients, Share, annotation::AnnotatedGrant, size::MAX_MEMORY_MIB};
use serde_json::Value;

use crate::EnforceError;

/// Where such a grant came from, in words.
const ORIGIN: &str = "NVIDIA_VISIBLE_DEVICES";

/// What the environment wishes for. The last of equal names is what most programs find.
pub fn wish(process: &Value) -> Option<&str> {
    let variables = process.get("env")?.as_array()?;
    variables.iter().rev().find_map(|variable| variable.as_str()?.strip_prefix("NVIDIA_VISIBLE_DEVICES="))
}

/// Whether it is a wish for no GPU.
pub fn is_nothing(wish: &str) -> bool {
    matches!(wish.trim(), "" | "none" | "void")
}

/// The grant that a wish comes to: `all`, or indices, UUIDs and MIG positions (`0:1`).
pub fn grant(wish: &str, devices: &Devices) -> Result<AnnotatedGrant, EnforceError> {
    let usable: Vec<&Gpu> = devices.gpus.iter().filter(|gpu| gpu.index.is_some()).collect();
    let shares = if wish.trim() == "all" {
        usable.iter().map(|gpu| whole(gpu)).collect()
    } else {
        let mut shares: Vec<Share> = Vec::new();
        for word in wish.split(',').map(str::trim) {
            let share = one(word, &usable)
                .ok_or_else(|| EnforceError::Visible(format!("\"{word:.80}\" is not a GPU of this node")))?;
            if !shares.iter().any(|earlier| earlier.gpu == share.gpu) {
                shares.push(share);
            }
        }
        shares
    };
    if shares.is_empty() {
        return Err(EnforceError::Visible("this node has no usable GPU".into()));
    }
    Ok(AnnotatedGrant {
        grant: Grant { pod_uid: None, node: None, issued_at: None, mode: None, recipients: Recipients::Bearer(shares) },
        origin: ORIGIN,
        text: wish.to_owned(),
        signature: None,
    })
}

fn whole(gpu: &Gpu) -> Share {
    share(GpuReference::Index(gpu.index.unwrap_or_default()), gpu.memory_mib)
}

/// A whole GPU or MIG instance: as much memory as it has, and no limit where that isn't known.
fn share(gpu: GpuReference, memory_mib: Option<u64>) -> Share {
    Share { gpu, memory_mib: memory_mib.unwrap_or(MAX_MEMORY_MIB), compute_percent: None }
}

fn one(word: &str, usable: &[&Gpu]) -> Option<Share> {
    if let Some((index, position)) = word.split_once(':') {
        let (index, position): (u32, usize) = (index.parse().ok()?, position.parse().ok()?);
        let gpu = usable.iter().find(|gpu| gpu.index == Some(index))?;
        let instance = gpu.mig.get(position)?;
        let old_name = format!(
            "MIG-{}/{}/{}",
            gpu.uuid.as_deref().unwrap_or_default(),
            instance.gpu_instance,
            instance.compute_instance
        );
        return Some(share(GpuReference::Uuid(instance.uuid.clone().unwrap_or(old_name)), instance.memory_mib));
    }
    if let Ok(index) = word.parse::<u32>() {
        return usable.iter().find(|gpu| gpu.index == Some(index)).map(|gpu| whole(gpu));
    }
    if let Some(gpu) = usable.iter().find(|gpu| gpu.uuid.as_deref() == Some(word)) {
        return Some(whole(gpu));
    }
    let mut instances = usable.iter().flat_map(|gpu| &gpu.mig);
    let instance = instances.find(|instance| instance.uuid.as_deref() == Some(word))?;
    Some(share(GpuReference::Uuid(word.to_owned()), instance.memory_mib))
}

#[cfg(test)]
mod tests {
    use gpufence_cdi::devices::{DeviceNode, MigInstance};
    use serde_json::json;

    use super::*;

    fn devices() -> Devices {
        let node =
            |minor: u32| DeviceNode { path: format!("/dev/nvidia{minor}"), major: 195, minor, mode: None, gid: None };
        let gpu = |minor: u32, index: Option<u32>| Gpu {
            index,
            uuid: Some(format!("GPU-0000000{minor}")),
            pci_address: format!("0000:0{minor}:00.0"),
            model: String::new(),
            memory_mib: (minor == 0).then_some(1024),
            node: node(minor),
            drm: Vec::new(),
            mig: Vec::new(),
        };
        let mut first = gpu(0, Some(0));
        first.mig.push(MigInstance {
            gpu_instance: 1,
            compute_instance: 0,
            uuid: None,
            memory_mib: None,
            access: vec![],
        });
        Devices { gpus: vec![first, gpu(1, None), gpu(2, Some(1))], ..Devices::default() }
    }

    #[test]
    fn wishes() {
        for (text, expected) in [
            ("all", Some("0 1")),
            ("1", Some("1")),
            ("0,1,0", Some("0 1")),
            ("GPU-00000002", Some("1")),
            ("0:0", Some("MIG-GPU-00000000/1/0")),
            ("2", None),
            ("GPU-00000001", None),
            ("0:1", None),
            ("0,", None),
            ("../..", None),
        ] {
            let names = grant(text, &devices()).ok().map(|granted| {
                let shares = granted.grant.shares_of("any").iter().map(|share| share.gpu.to_string());
                shares.collect::<Vec<_>>().join(" ")
            });
            assert_eq!(names.as_deref(), expected, "{text}");
        }
        assert!(is_nothing("") && is_nothing("void") && is_nothing("none") && !is_nothing("all"));
        assert_eq!(wish(&json!({"env": ["NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_VISIBLE_DEVICES=void"]})), Some("void"));
    }

    #[test]
    fn whole_gpus_have_the_memory_that_is_known() {
        let memory = |text| grant(text, &devices()).unwrap().grant.shares_of("any")[0].memory_mib;
        assert_eq!((memory("0"), memory("1")), (1024, MAX_MEMORY_MIB));
    }
}
