//! Hooks: those of other GPU runtimes, which would add GPUs behind the grant's back, go; ours come.

use std::path::Path;

use serde_json::{Value, json};

use crate::{EnforceError, json};

/// What the programs of NVIDIA's toolkit are called, and our own.
const GPU_HOOKS: [&str; 5] =
    ["nvidia-container-runtime-hook", "nvidia-container-toolkit", "nvidia-ctk", "nvidia-cdi-hook", OWN];

/// Removes them; an engine adds one for `--gpus` or for a CDI device. Ours are there from a CDI device too, or from an
/// earlier run.
pub fn remove(spec: &mut Value) -> Result<(), EnforceError> {
    let Some(hooks) = spec.get_mut("hooks").filter(|hooks| !hooks.is_null()) else { return Ok(()) };
    let hooks = hooks.as_object_mut().ok_or_else(|| EnforceError::Shape("hooks is not an object".into()))?;
    for list in hooks.values_mut().filter_map(Value::as_array_mut) {
        list.retain(|hook| {
            let path = hook.get("path").and_then(Value::as_str).unwrap_or_default();
            let name = path.rsplit('/').next().unwrap_or_default();
            !GPU_HOOKS.contains(&name)
        });
    }
    Ok(())
}

/// What our own hook program is called.
pub const OWN: &str = "gpufence-hook";

/// Puts our hooks in for a container with a folder: the final check before its program starts and, if wanted, the
/// clean-up after it has ended.
pub fn add_own(spec: &mut Value, folder: &Path, hook: &Path, clean_up: bool) -> Result<(), EnforceError> {
    let clean_up = clean_up.then_some(("poststop", "clean-up"));
    for (when, action) in [("createRuntime", "check")].into_iter().chain(clean_up) {
        json::list(spec, &["hooks", when])?.push(json!({
            "path": hook.to_string_lossy(),
            "args": [OWN, action, "--folder", folder.to_string_lossy()],
            // Nothing of the container's or the engine's environment.
            "env": [],
            "timeout": 30,
        }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_there_once() {
        let other = json!({"path": "/usr/bin/other"});
        let mut spec = json!({"hooks": {"poststop": [other]}});
        for folder in ["/run/gpufence/containers/moby/a", "/run/gpufence/containers/moby/b"] {
            remove(&mut spec).unwrap();
            add_own(&mut spec, Path::new(folder), Path::new("/usr/bin/gpufence-hook"), true).unwrap();
            assert_eq!(spec["hooks"]["poststop"].as_array().unwrap().len(), 2);
            assert_eq!(spec["hooks"]["createRuntime"][0]["args"][3], json!(folder));
        }
        remove(&mut spec).unwrap();
        assert_eq!(spec, json!({"hooks": {"poststop": [other], "createRuntime": []}}));
    }

    #[test]
    fn only_gpu_hooks_go() {
        let mut spec = json!({"hooks": {
            "prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}, {"path": "/usr/bin/other"}],
            "createContainer": [{"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache"]}],
        }});
        remove(&mut spec).unwrap();
        assert_eq!(spec, json!({"hooks": {"prestart": [{"path": "/usr/bin/other"}], "createContainer": []}}));
        remove(&mut json!({"hooks": null})).unwrap();
        assert!(remove(&mut json!({"hooks": 1})).is_err());
    }
}
