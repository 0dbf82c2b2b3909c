//! A process that is added to a container: held to what its container is held to, from the container's record.

use std::{
    fs::{self, OpenOptions},
    io::{Read, Seek, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use nix::libc;
use serde_json::Value;

use crate::{
    EnforceError, capabilities, environment,
    environment::Granted,
    error::io_error,
    policy::{Policy, Privileged},
    state::{ContainerFolder, RECORD, Record},
};

/// No engine writes a longer process.
const MAX_BYTES: u64 = 16 << 20;

/// What every process of a container is held to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Held {
    /// What its environment is to say.
    pub granted: Granted,
    /// Capabilities that it must not have.
    pub dropped_capabilities: Vec<String>,
}

impl Held {
    /// Holds a process, as the OCI specification writes one.
    pub fn hold(&self, process: &mut Value) -> Result<(), EnforceError> {
        environment::rewrite(process, &self.granted)?;
        capabilities::drop(process, &self.dropped_capabilities)
    }
}

/// What a container's record holds its later processes to. A container that has none has no grant; whether it is
/// privileged isn't known any more, so where policy leaves those alone, its processes are left alone too.
pub fn held(policy: &Policy, namespace: &str, id: &str) -> Result<Held, EnforceError> {
    let file = ContainerFolder::of(policy, namespace, id)?.path().join(RECORD);
    let text = match fs::read(&file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let list = match policy.privileged {
                Privileged::Allow => &[][..],
                _ => &policy.drop_capabilities_ungranted,
            };
            return Ok(Held { granted: Granted::default(), dropped_capabilities: list.to_vec() });
        }
        other => other.map_err(io_error("read", &file))?,
    };
    let record: Record = serde_json::from_slice(&text)
        .map_err(|error| EnforceError::Spec { path: file.clone(), what: error.to_string() })?;
    Ok(Held {
        granted: Granted {
            memory_mib: record.shares.iter().map(|share| share.memory_mib).collect(),
            visible: record.shares.into_iter().map(|share| share.gpu).collect(),
            capabilities: record.driver_capabilities,
            mps_percent: record.mps_percent,
        },
        dropped_capabilities: record.dropped_capabilities,
    })
}

/// Holds the process in a file that an engine wrote for `exec --process`.
pub fn enforce_file(held: &Held, file: &Path) -> Result<(), EnforceError> {
    let mut open = OpenOptions::new();
    let mut input = open
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(file)
        .map_err(io_error("open", file))?;
    let mut bytes = Vec::new();
    (&input).take(MAX_BYTES).read_to_end(&mut bytes).map_err(io_error("read", file))?;
    let wrong = |what: String| EnforceError::Spec { path: file.to_owned(), what };
    let before: Value = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    if !before.is_object() {
        return Err(wrong("not a JSON object".into()));
    }
    let mut process = before.clone();
    held.hold(&mut process)?;
    if process != before {
        let mut write = || {
            input.set_len(0)?;
            input.rewind()?;
            input.write_all(process.to_string().as_bytes())
        };
        write().map_err(io_error("write", file))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::state::View;

    #[test]
    fn a_file_is_held_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("process");
        let held = Held { granted: Granted::default(), dropped_capabilities: vec!["CAP_SYS_ADMIN".into()] };
        let process = json!({"env": ["A=b"], "capabilities": {"bounding": ["CAP_SYS_ADMIN", "CAP_CHOWN"]}, "new": 1});
        fs::write(&file, serde_json::to_string_pretty(&process).unwrap()).unwrap();
        enforce_file(&held, &file).unwrap();
        let after: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(after, json!({"env": ["A=b"], "capabilities": {"bounding": ["CAP_CHOWN"]}, "new": 1}));
        std::os::unix::fs::symlink(&file, folder.path().join("link")).unwrap();
        assert!(enforce_file(&held, &folder.path().join("link")).is_err(), "links aren't followed");
        fs::write(&file, "[]").unwrap();
        assert!(enforce_file(&held, &file).is_err());
    }

    #[test]
    fn containers_with_and_without_a_record() {
        let folder = tempfile::tempdir().unwrap();
        let policy = Policy { state_dir: folder.path().into(), ..Policy::default() };
        assert_eq!(held(&policy, "moby", "a").unwrap().dropped_capabilities, policy.drop_capabilities_ungranted);
        let allow = Policy { privileged: Privileged::Allow, ..policy.clone() };
        assert_eq!(held(&allow, "moby", "a").unwrap().dropped_capabilities, Vec::<String>::new());
        assert!(held(&policy, "moby", "../a").is_err());
        let own = ContainerFolder::of(&policy, "moby", "a").unwrap();
        own.create(&View::default()).unwrap();
        own.write("record.json", b"{}").unwrap();
        assert!(held(&policy, "moby", "a").is_err(), "a record that can't be read is no reason to let go");
    }
}
