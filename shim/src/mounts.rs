//! `mounts`: the stage, the container's own folder, the limiter and the new `ld.so.cache`, and no older ones of ours.

use std::path::Path;

use gpufence_cdi::spec::SpecMount;
use serde_json::{Value, json};

use crate::{EnforceError, json, limiter::USAGE_SOURCE};

/// Replaces our mounts. They stand last, so that nothing the Pod mounts lies over them.
///
/// `ours` are the host's folders that only we mount from: what an earlier run added comes from there.
pub fn replace(spec: &mut Value, mounts: &[SpecMount], ours: &[&Path]) -> Result<(), EnforceError> {
    if let Some(list) = json::list_if_there(spec, &["mounts"])? {
        list.retain(|mount| {
            let source = mount.get("source").and_then(Value::as_str).unwrap_or_default();
            source != USAGE_SOURCE && !ours.iter().any(|folder| Path::new(source).starts_with(folder))
        });
    }
    if !mounts.is_empty() {
        json::list(spec, &["mounts"])?.extend(mounts.iter().map(|mount| {
            let kind = mount.kind.as_deref().unwrap_or("bind");
            json!({"destination": mount.container_path, "type": kind, "source": mount.host_path, "options": mount.options})
        }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_replaced_and_stand_last() {
        let mount = |source: &str| json!({"destination": "/x", "source": source});
        let mut spec =
            json!({"mounts": [mount("/var/lib/gpufence/stage/1/compute"), mount("/home"), mount("gpufence-usage")]});
        let new = SpecMount {
            host_path: "/var/lib/gpufence/stage/2/compute".into(),
            container_path: "/y".into(),
            kind: None,
            options: vec!["ro".into()],
        };
        replace(&mut spec, &[new], &[Path::new("/var/lib/gpufence/stage")]).unwrap();
        let sources: Vec<_> =
            spec["mounts"].as_array().unwrap().iter().map(|mount| mount["source"].as_str().unwrap()).collect();
        assert_eq!(sources, ["/home", "/var/lib/gpufence/stage/2/compute"]);
    }
}
