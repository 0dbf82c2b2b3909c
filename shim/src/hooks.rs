//! Hooks of other GPU runtimes, which would add GPUs behind the grant's back.

use serde_json::Value;

use crate::EnforceError;

/// What the programs of NVIDIA's toolkit are called.
const FOREIGN: [&str; 4] =
    ["nvidia-container-runtime-hook", "nvidia-container-toolkit", "nvidia-ctk", "nvidia-cdi-hook"];

/// Removes them; an engine adds one for `--gpus` or for a CDI device.
pub fn remove_foreign(spec: &mut Value) -> Result<(), EnforceError> {
    let Some(hooks) = spec.get_mut("hooks").filter(|hooks| !hooks.is_null()) else { return Ok(()) };
    let hooks = hooks.as_object_mut().ok_or_else(|| EnforceError::Shape("hooks is not an object".into()))?;
    for list in hooks.values_mut().filter_map(Value::as_array_mut) {
        list.retain(|hook| {
            let path = hook.get("path").and_then(Value::as_str).unwrap_or_default();
            let name = path.rsplit('/').next().unwrap_or_default();
            !FOREIGN.contains(&name)
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_foreign_gpu_hooks_go() {
        let mut spec = json!({"hooks": {
            "prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}, {"path": "/usr/bin/other"}],
            "createContainer": [{"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache"]}],
        }});
        remove_foreign(&mut spec).unwrap();
        assert_eq!(spec, json!({"hooks": {"prestart": [{"path": "/usr/bin/other"}], "createContainer": []}}));
        remove_foreign(&mut json!({"hooks": null})).unwrap();
        assert!(remove_foreign(&mut json!({"hooks": 1})).is_err());
    }
}
