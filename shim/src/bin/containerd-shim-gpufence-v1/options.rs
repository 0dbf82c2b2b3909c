//! What containerd was configured to tell us: runc's options, whichever way they are written.
//!
//! The type's name decides: `containerd.runc.v1.Options` is runc's own message; anything that ends in
//! `runtimeoptions.v1.Options` is containerd's generic one, which CRI sends to every runtime type that it doesn't know,
//! with the options table as TOML in its body or in a file.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use containerd_shim::protos::{
    protobuf::{CodedInputStream, Message, UnknownValueRef, well_known_types::any::Any},
    shim::oci,
};
use gpufence_shim::{policy::Policy, runtime_path};
use serde::{Deserialize, Serialize};

use crate::Failure;

/// Where a bundle keeps its options, for the `delete` action after a dead shim.
const FILE: &str = "gpufence-options.json";
const RUNC_OPTIONS: &str = "containerd.runc.v1.Options";
const GENERIC_OPTIONS: &str = "runtimeoptions.v1.Options";

/// runc's options, named as in containerd's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Options {
    pub no_pivot_root: bool,
    pub no_new_keyring: bool,
    pub shim_cgroup: String,
    pub io_uid: u32,
    pub io_gid: u32,
    pub binary_name: String,
    pub root: String,
    pub criu_path: String,
    pub systemd_cgroup: bool,
    pub criu_image_path: String,
    pub criu_work_path: String,
}

impl Options {
    /// Decodes what came with a create or a start. A type that we don't know is an error: options must not be lost.
    pub fn decode(any: Option<&Any>) -> Result<Self, Failure> {
        let Some(any) = any.filter(|any| !any.type_url.is_empty() || !any.value.is_empty()) else {
            return Ok(Self::default());
        };
        let name = any.type_url.rsplit('/').next().unwrap_or_default();
        if name == RUNC_OPTIONS {
            Ok(Self::from_runc(&oci::Options::parse_from_bytes(&any.value)?))
        } else if name.ends_with(GENERIC_OPTIONS) {
            Self::from_generic(&any.value)
        } else {
            Err(format!("runtime options of type \"{name}\" are not known; write runc's own ({RUNC_OPTIONS}) or a table of options").into())
        }
    }

    fn from_runc(options: &oci::Options) -> Self {
        // containerd 2.0 took CriuPath, field 8, out of the message; 1.x still sends it.
        let criu_path = match options.special_fields.unknown_fields().get(8) {
            Some(UnknownValueRef::LengthDelimited(path)) => String::from_utf8_lossy(path).into_owned(),
            _ => String::new(),
        };
        Self {
            no_pivot_root: options.no_pivot_root,
            no_new_keyring: options.no_new_keyring,
            shim_cgroup: options.shim_cgroup.clone(),
            io_uid: options.io_uid,
            io_gid: options.io_gid,
            binary_name: options.binary_name.clone(),
            root: options.root.clone(),
            criu_path,
            systemd_cgroup: options.systemd_cgroup,
            criu_image_path: options.criu_image_path.clone(),
            criu_work_path: options.criu_work_path.clone(),
        }
    }

    /// `runtimeoptions.v1.Options`: type_url = 1, config_path = 2, config_body = 3. No published crate has the message.
    fn from_generic(bytes: &[u8]) -> Result<Self, Failure> {
        let (mut path, mut body) = (String::new(), Vec::new());
        let mut input = CodedInputStream::from_bytes(bytes);
        while let Some(tag) = input.read_raw_tag_or_eof()? {
            match tag {
                0x0a => drop(input.read_string()?),
                0x12 => path = input.read_string()?,
                0x1a => body = input.read_bytes()?,
                other => return Err(format!("runtime options have an unknown field (tag {other})").into()),
            }
        }
        let text = if body.is_empty() && !path.is_empty() {
            fs::read_to_string(&path).map_err(|error| format!("runtime options: ConfigPath {path}: {error}"))?
        } else {
            String::from_utf8(body)?
        };
        toml::from_str(&text)
            .map_err(|error| format!("runtime options are not the TOML of runc's options: {error}").into())
    }

    /// Which low-level runtime is wrapped: the options' BinaryName, else the first of the policy's that is there.
    pub fn runtime(&self, policy: &Policy) -> Result<PathBuf, Failure> {
        if !self.binary_name.is_empty() {
            return runtime_path::look_up(&self.binary_name).ok_or_else(|| {
                format!("runtime \"{}\" (BinaryName in containerd's options) is not on the engine's PATH; install it, or correct the option", self.binary_name).into()
            });
        }
        Ok(runtime_path::of_policy(policy)?)
    }

    /// Where the runtime keeps its state; runc's shim has a folder for each namespace.
    pub fn runtime_root(&self, namespace: &str) -> PathBuf {
        let root = if self.root.is_empty() { "/run/containerd/runc" } else { &self.root };
        Path::new(root).join(namespace)
    }

    pub fn save(&self, bundle: &Path) -> Result<(), Failure> {
        Ok(fs::write(bundle.join(FILE), serde_json::to_vec(self)?)?)
    }

    pub fn load(bundle: &Path) -> Result<Self, Failure> {
        Ok(serde_json::from_slice(&fs::read(bundle.join(FILE))?)?)
    }
}

/// What was piped to an action, 10 MiB at most, as containerd's own shims read it.
pub fn read_stdin() -> Result<Vec<u8>, Failure> {
    let stdin = std::io::stdin();
    if std::io::IsTerminal::is_terminal(&stdin) {
        return Ok(Vec::new());
    }
    let mut input = Vec::new();
    stdin.lock().take(10 << 20).read_to_end(&mut input)?;
    Ok(input)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(type_url: &str, value: Vec<u8>) -> Any {
        Any { type_url: type_url.into(), value, ..Any::default() }
    }

    #[test]
    fn runc_s_own_options_with_the_field_that_containerd_2_dropped() {
        let mut bytes =
            oci::Options { binary_name: "crun".into(), systemd_cgroup: true, io_uid: 7, ..Default::default() }
                .write_to_bytes()
                .unwrap();
        bytes.extend([0x42, 5]);
        bytes.extend(b"/criu");
        let options = Options::decode(Some(&any("containerd.runc.v1.Options", bytes))).unwrap();
        let expected = Options {
            binary_name: "crun".into(),
            systemd_cgroup: true,
            io_uid: 7,
            criu_path: "/criu".into(),
            ..Options::default()
        };
        assert_eq!(options, expected);
    }

    #[test]
    fn generic_options_by_body_and_by_path() {
        let toml = b"SystemdCgroup = true\nBinaryName = \"/usr/bin/crun\"\n";
        let mut body = vec![0x0a, 1, b'x', 0x1a, u8::try_from(toml.len()).unwrap()];
        body.extend(toml);
        let expected = Options { binary_name: "/usr/bin/crun".into(), systemd_cgroup: true, ..Options::default() };
        for name in [
            "runtimeoptions.v1.Options",
            "cri.runtimeoptions.v1.Options",
            "type.googleapis.com/runtimeoptions.v1.Options",
        ] {
            assert_eq!(Options::decode(Some(&any(name, body.clone()))).unwrap(), expected);
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), toml).unwrap();
        let path = file.path().to_str().unwrap();
        let mut by_path = vec![0x12, u8::try_from(path.len()).unwrap()];
        by_path.extend(path.as_bytes());
        assert_eq!(Options::decode(Some(&any("runtimeoptions.v1.Options", by_path))).unwrap(), expected);
    }

    #[test]
    fn nothing_is_lost_in_silence() {
        assert_eq!(Options::decode(None).unwrap(), Options::default());
        assert!(Options::decode(Some(&any("some.other.Options", vec![]))).is_err());
        assert!(Options::decode(Some(&any("runtimeoptions.v1.Options", vec![0x22, 0]))).is_err());
        assert!(Options::decode(Some(&any("runtimeoptions.v1.Options", vec![0x1a, 1, b'=']))).is_err());
    }
}
