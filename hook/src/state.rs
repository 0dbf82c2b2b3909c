//! The container's state, from the OCI runtime specification's `runtime.md`.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;

use crate::error::{HookError, io_error};

const MAX_BYTES: u64 = 1 << 20;
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// What the runtime writes to a hook's standard input. Fields that we don't need are left.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    pub oci_version: String,
    pub id: String,
    pub status: String,
    #[serde(default)]
    pub pid: i32,
    pub bundle: PathBuf,
}

/// Reads it from standard input.
pub fn read() -> Result<State, HookError> {
    let mut text = String::new();
    std::io::stdin().take(MAX_BYTES).read_to_string(&mut text).map_err(|error| HookError::State(error.to_string()))?;
    parse(&text)
}

fn parse(text: &str) -> Result<State, HookError> {
    if text.trim().is_empty() {
        return Err(HookError::State("it is empty".into()));
    }
    let state: State = serde_json::from_str(text).map_err(|error| HookError::State(error.to_string()))?;
    let wrong = |what: &str| Err(HookError::State(what.to_owned()));
    if state.id.is_empty() || state.id.contains('/') || state.id.starts_with('.') {
        return wrong("its id is not a container's");
    }
    if !state.bundle.is_absolute() {
        return wrong("its bundle is not an absolute path");
    }
    if state.oci_version.is_empty() {
        return wrong("it has no ociVersion");
    }
    Ok(state)
}

impl State {
    /// That the folder in our arguments is this container's: it ends in the id, below a namespace.
    pub fn check_folder(&self, folder: &Path) -> Result<(), HookError> {
        let plain = folder.is_absolute() && folder.components().all(|part| part.as_os_str() != "..");
        if !plain || folder.file_name() != Some(self.id.as_ref()) || folder.components().count() < 4 {
            return Err(HookError::Folder { folder: folder.to_owned(), id: self.id.clone() });
        }
        Ok(())
    }

    /// The container's root, as its first process sees it: that has the container's mount namespace.
    pub fn rootfs(&self) -> Result<PathBuf, HookError> {
        if self.pid <= 0 {
            return Err(HookError::State(format!("a container that is {} has no process", self.status)));
        }
        let file = self.bundle.join("config.json");
        let mut text = Vec::new();
        let input = fs::File::open(&file).map_err(io_error("open", &file))?;
        input.take(MAX_CONFIG_BYTES).read_to_end(&mut text).map_err(io_error("read", &file))?;
        let spec: Value =
            serde_json::from_slice(&text).map_err(|source| HookError::Json { path: file.clone(), source })?;
        let root = spec.pointer("/root/path").and_then(Value::as_str).unwrap_or("rootfs");
        let root = self.bundle.join(root);
        Ok(Path::new("/proc").join(self.pid.to_string()).join("root").join(root.strip_prefix("/").unwrap_or(&root)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"ociVersion":"1.0.2","id":"a","status":"created","pid":7,"bundle":"/b","annotations":{}}"#;

    #[test]
    fn states() {
        assert_eq!(parse(GOOD).unwrap().pid, 7);
        for (text, expected) in [
            ("", "it is empty"),
            ("{", "EOF"),
            ("{}", "missing field"),
            (&GOOD.replace("\"a\"", "\"../a\""), "id is not a container's"),
            (&GOOD.replace("\"/b\"", "\"b\""), "not an absolute path"),
            (&GOOD.replace('7', "\"7\""), "invalid type"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn only_the_container_s_own_folder() {
        let state = parse(GOOD).unwrap();
        assert!(state.check_folder(Path::new("/run/gpufence/containers/moby/a")).is_ok());
        for folder in ["/run/gpufence/containers/moby/b", "a", "/a", "/run/../etc/x/a", "/"] {
            assert!(state.check_folder(Path::new(folder)).is_err(), "{folder}");
        }
    }
}
