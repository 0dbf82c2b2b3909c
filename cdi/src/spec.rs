//! CDI specs: the static one of a node, and one for a single container.
//!
//! The shapes are those of CDI's SPEC.md. They are our own and not the `container-device-interface` crate's, whose
//! fields can't be set from outside and which brings a JSON schema validator with an HTTP client into a program that
//! runs as root (docs/decisions/0002); the tests check every spec with that crate.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{
    edits::{self, EditOptions},
    error::CdiError,
    inventory::{Found, Inventory, write_json},
    stage::Stage,
};

/// The static spec's kind.
pub const GPU_KIND: &str = "gpufence.dev/gpu";
/// A container's spec's kind.
pub const CONTAINER_KIND: &str = "gpufence.dev/container";

/// A CDI spec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// The version of CDI that it needs.
    pub cdi_version: String,
    /// Vendor and class.
    pub kind: String,
    /// What can be asked for.
    pub devices: Vec<Device>,
    /// What every device brings.
    #[serde(default)]
    pub container_edits: ContainerEdits,
}

/// A device of a CDI spec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// What it brings.
    pub container_edits: ContainerEdits,
}

/// Changes to an OCI spec.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerEdits {
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<SpecNode>,
    /// Mounts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<SpecMount>,
    /// Hooks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<SpecHook>,
    /// Groups for the container's process, where a node is not for everyone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

/// A hook of a CDI spec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpecHook {
    /// When it runs, in OCI's words.
    pub hook_name: String,
    /// The program.
    pub path: String,
    /// Its arguments, its own name first.
    pub args: Vec<String>,
}

/// A device node of a CDI spec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpecNode {
    /// The path in the container.
    pub path: String,
    /// Always `c`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
    /// Permission bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// The owning group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// What the device cgroup lets through: `rw`, never `m`.
    pub permissions: String,
}

/// A mount of a CDI spec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpecMount {
    /// What is mounted.
    pub host_path: String,
    /// Where.
    pub container_path: String,
    /// The filesystem, where it isn't a bind mount.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Mount options.
    pub options: Vec<String>,
}

/// The static spec of a node: every usable GPU by index and UUID, every MIG instance by UUID and by
/// `<GPU index>:<position>`, and `all`. `hook` is `gpufence-hook`, which makes the libraries findable.
pub fn node_spec(inventory: &Inventory, stage: &Stage, options: &EditOptions, hook: &Path) -> Result<Spec, CdiError> {
    let mut devices = Vec::new();
    let mut push = |name: String, found: &[Found<'_>]| -> Result<(), CdiError> {
        let container_edits = edits::devices(&inventory.devices, found, options)?;
        devices.push(Device { name, container_edits });
        Ok(())
    };
    let mut whole = Vec::new();
    for gpu in inventory.devices.gpus.iter().filter(|gpu| gpu.index.is_some()) {
        let itself = [Found::Gpu(gpu)];
        push(gpu.index.unwrap_or_default().to_string(), &itself)?;
        if let Some(uuid) = &gpu.uuid {
            push(uuid.clone(), &itself)?;
        }
        for (position, instance) in gpu.mig.iter().enumerate() {
            let itself = [Found::Mig(gpu, instance)];
            push(format!("{}:{position}", gpu.index.unwrap_or_default()), &itself)?;
            if let Some(uuid) = &instance.uuid {
                push(uuid.clone(), &itself)?;
            }
        }
        whole.push(Found::Gpu(gpu));
    }
    if !whole.is_empty() {
        push("all".into(), &whole)?;
    }
    let mut shared = edits::driver(stage, options);
    shared.hooks.push(edits::cache_hook(stage, options, hook));
    Ok(assemble(GPU_KIND, devices, shared))
}

/// The spec of exactly what one container gets. `name` must be a CDI device name, such as [`device_name`] makes.
pub fn container_spec(name: String, container_edits: ContainerEdits) -> Spec {
    assemble(CONTAINER_KIND, vec![Device { name, container_edits }], ContainerEdits::default())
}

/// A container's id as a CDI device name, which has letters, digits, `_`, `-`, `.` and `:` and starts and ends with
/// a letter or digit.
pub fn device_name(container_id: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.') { c } else { '-' };
    let name: String = container_id.chars().map(plain).collect();
    let name = name.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    if name.is_empty() { "container".into() } else { name.to_owned() }
}

/// The lowest version of CDI that the spec needs: 0.7.0 brought additionalGids, 0.5.0 names of devices that begin with a digit.
fn assemble(kind: &str, devices: Vec<Device>, container_edits: ContainerEdits) -> Spec {
    let gids = !container_edits.additional_gids.is_empty()
        || devices.iter().any(|device| !device.container_edits.additional_gids.is_empty());
    let cdi_version = if gids { "0.7.0" } else { "0.5.0" }.to_owned();
    Spec { cdi_version, kind: kind.to_owned(), devices, container_edits }
}

impl Spec {
    /// Writes the spec as JSON, by temporary file and rename.
    pub fn write(&self, file: &Path) -> Result<(), CdiError> {
        write_json(file, self)
    }

    /// Reads a spec.
    pub fn read(file: &Path) -> Result<Self, CdiError> {
        let bytes = std::fs::read(file).map_err(crate::error::io_error::<std::io::Error>("read", file))?;
        serde_json::from_slice(&bytes).map_err(|source| CdiError::Json { path: file.to_owned(), source })
    }
}
