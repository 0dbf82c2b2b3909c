//! What a container gets for its GPUs, as CDI's container edits. Pure functions of inventory and stage.

use std::path::Path;

use crate::{
    capability::{DriverCapabilities, DriverCapability},
    devices::{DeviceNode, Devices, Gpu},
    driver::FileKind,
    error::CdiError,
    inventory::Found,
    spec::{ContainerEdits, SpecHook, SpecMount, SpecNode},
    stage::Stage,
};

/// The folder in containers under which the stage's folders are mounted.
pub const CONTAINER_FOLDER: &str = "/usr/lib/gpufence";

/// Which parts of the driver a container gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EditOptions {
    /// The driver capabilities.
    pub capabilities: DriverCapabilities,
    /// The driver's programs to mount, such as `nvidia-smi`.
    pub binaries: Vec<String>,
    /// Whether GSP firmware is mounted.
    pub firmware: bool,
}

/// The device nodes of these GPUs and those that all GPUs share, and nothing else.
///
/// Fails where a kernel module is missing that a capability needs: a container with half its nodes would start and
/// then fail in the driver with an error that says nothing.
pub fn devices(devices: &Devices, found: &[Found<'_>], options: &EditOptions) -> Result<ContainerEdits, CdiError> {
    let mut nodes: Vec<&DeviceNode> = Vec::new();
    if !found.is_empty() {
        nodes.extend(devices.shared("/dev/nvidiactl"));
        if options.capabilities.contains(&DriverCapability::Compute) {
            let uvm = devices.shared("/dev/nvidia-uvm");
            nodes.push(uvm.ok_or_else(|| CdiError::NoModule {
                module: "nvidia-uvm",
                why: "the driver capability compute".into(),
            })?);
        }
        let draws = [DriverCapability::Graphics, DriverCapability::Display];
        if draws.iter().any(|capability| options.capabilities.contains(capability)) {
            nodes.extend(
                devices.shared("/dev/nvidia-modeset").filter(|_| devices.majors.contains_key("nvidia-modeset")),
            );
            nodes.extend(found.iter().flat_map(|found| &gpu_of(found).drm));
        }
    }
    for found in found {
        nodes.push(&gpu_of(found).node);
        if let Found::Mig(_, instance) = found {
            nodes.extend(&instance.access);
        }
    }
    nodes.sort_by(|a, b| a.path.cmp(&b.path));
    nodes.dedup();
    let mut additional_gids: Vec<u32> = nodes
        .iter()
        .filter(|node| node.mode.is_some_and(|mode| mode & 0o006 != 0o006 && mode & 0o060 == 0o060))
        .filter_map(|node| node.gid.filter(|gid| *gid != 0))
        .collect();
    additional_gids.sort_unstable();
    additional_gids.dedup();
    Ok(ContainerEdits {
        device_nodes: nodes.into_iter().map(spec_node).collect(),
        additional_gids,
        ..ContainerEdits::default()
    })
}

fn gpu_of<'a>(found: &Found<'a>) -> &'a Gpu {
    match found {
        Found::Gpu(gpu) | Found::Mig(gpu, _) => gpu,
    }
}

fn spec_node(node: &DeviceNode) -> SpecNode {
    SpecNode {
        path: node.path.clone(),
        kind: "c".into(),
        major: node.major,
        minor: node.minor,
        file_mode: Some(node.mode.unwrap_or(0o666)),
        gid: node.gid.filter(|gid| *gid != 0),
        permissions: "rw".into(),
    }
}

/// The mounts of the driver's libraries, programs and configuration.
pub fn driver(stage: &Stage, options: &EditOptions) -> ContainerEdits {
    let mut mounts = Vec::new();
    let staged = stage.capabilities.iter().filter(|(capability, _)| options.capabilities.contains(capability));
    for (capability, content) in staged {
        if !content.names.is_empty() {
            mounts.push(read_only(
                format!("{}/{capability}", stage.folder.display()),
                format!("{CONTAINER_FOLDER}/{capability}"),
            ));
        }
        for file in &content.files {
            let name = file.container_path.rsplit('/').next().unwrap_or_default();
            if file.kind == FileKind::Configuration || options.binaries.iter().any(|wanted| wanted == name) {
                mounts.push(read_only(
                    format!("{}/{}", stage.folder.display(), file.staged),
                    file.container_path.clone(),
                ));
            }
        }
    }
    if stage.firmware && options.firmware && options.capabilities.contains(&DriverCapability::Compute) {
        mounts.push(read_only(
            format!("{}/firmware", stage.folder.display()),
            format!("/lib/firmware/nvidia/{}", stage.driver_version),
        ));
    }
    ContainerEdits { mounts, ..ContainerEdits::default() }
}

/// The hook that makes the libraries of [`driver`] findable, for engines that apply a CDI spec by themselves.
pub fn cache_hook(stage: &Stage, options: &EditOptions, hook: &Path) -> SpecHook {
    let capabilities = options.capabilities.iter().filter(|capability| stage.capabilities.contains_key(capability));
    let capabilities = capabilities.flat_map(|capability| ["--capability".to_owned(), capability.to_string()]);
    let arguments = ["gpufence-hook".to_owned(), "update-cache".into(), "--stage".into()];
    SpecHook {
        hook_name: "createContainer".into(),
        path: hook.to_string_lossy().into_owned(),
        args: arguments.into_iter().chain([stage.folder.display().to_string()]).chain(capabilities).collect(),
    }
}

/// A bind mount that a container can't write through.
pub fn read_only(host_path: String, container_path: String) -> SpecMount {
    let options = ["ro", "nosuid", "nodev", "rbind", "rprivate"].map(str::to_owned).to_vec();
    SpecMount { host_path, container_path, kind: None, options }
}
