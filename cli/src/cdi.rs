//! `gpufence cdi`.

use std::{io::Write, path::Path};

use anyhow::{Context, Result, bail};
use gpufence_cdi::{
    spec::{self, ContainerEdits, Device, Spec},
    stage::Stage,
};
use gpufence_shim::{bundle::edit_options, policy::Policy};

use crate::{
    arguments::{CdiArguments, CdiCommand, Output},
    inventory, table,
};

/// Runs one of its subcommands.
pub fn run(arguments: &CdiArguments) -> Result<()> {
    let text = match &arguments.command {
        CdiCommand::Generate { driver, file, stage_folder, capabilities } => {
            let policy = Policy::load()?;
            let (roots, inventory) = inventory::discover(driver)?;
            let capabilities = if capabilities.is_empty() {
                policy.default_driver_capabilities.clone()
            } else {
                capabilities.iter().copied().collect()
            };
            let stage = Stage::ensure(stage_folder.as_ref().unwrap_or(&policy.stage_dir), &inventory, &roots.driver)?;
            let spec = spec::node_spec(&inventory, &stage, &edit_options(&policy, capabilities))?;
            if file == Path::new("-") {
                serde_json::to_string_pretty(&spec)? + "\n"
            } else {
                spec.write(file)?;
                format!("Wrote {} with {} devices of kind {}\n", file.display(), spec.devices.len(), spec.kind)
            }
        }
        CdiCommand::List { file, output } => list(&read(file)?, *output)?,
        CdiCommand::Show { device, file, output } => show(&read(file)?, device, file, *output)?,
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

fn read(file: &Path) -> Result<Spec> {
    Spec::read(file).context("no CDI spec to read; `gpufence cdi generate` writes one")
}

fn list(spec: &Spec, output: Output) -> Result<String> {
    let names: Vec<String> = spec.devices.iter().map(|device| format!("{}={}", spec.kind, device.name)).collect();
    if output == Output::Json {
        return Ok(serde_json::to_string_pretty(&names)? + "\n");
    }
    let nodes = |device: &Device| {
        let paths: Vec<&str> = device.container_edits.device_nodes.iter().map(|node| node.path.as_str()).collect();
        paths.join(" ")
    };
    let rows: Vec<Vec<String>> =
        names.into_iter().zip(&spec.devices).map(|(name, device)| vec![name, nodes(device)]).collect();
    Ok(table::format(&["DEVICE", "NODES"], &rows))
}

fn show(spec: &Spec, wanted: &str, file: &Path, output: Output) -> Result<String> {
    let name = wanted.strip_prefix(&spec.kind).and_then(|rest| rest.strip_prefix('=')).unwrap_or(wanted);
    let Some(device) = spec.devices.iter().find(|device| device.name == name) else {
        let names: Vec<&str> = spec.devices.iter().map(|device| device.name.as_str()).collect();
        bail!("{} has no device \"{wanted}\"; it has {}", file.display(), names.join(", "));
    };
    let whole = together(&spec.container_edits, &device.container_edits);
    if output == Output::Json {
        return Ok(serde_json::to_string_pretty(&whole)? + "\n");
    }
    let mut rows = Vec::new();
    for node in &whole.device_nodes {
        rows.push(vec![
            "node".into(),
            node.path.clone(),
            format!("c {}:{} {}", node.major, node.minor, node.permissions),
        ]);
    }
    for mount in &whole.mounts {
        rows.push(vec!["mount".into(), mount.container_path.clone(), format!("from {}", mount.host_path)]);
    }
    for variable in &whole.env {
        rows.push(vec!["env".into(), variable.clone(), String::new()]);
    }
    for group in &whole.additional_gids {
        rows.push(vec!["group".into(), group.to_string(), String::new()]);
    }
    Ok(table::format(&["EDIT", "IN THE CONTAINER", ""], &rows))
}

/// A container gets the spec's own edits and the device's.
fn together(shared: &ContainerEdits, own: &ContainerEdits) -> ContainerEdits {
    ContainerEdits {
        env: [shared.env.clone(), own.env.clone()].concat(),
        device_nodes: [shared.device_nodes.clone(), own.device_nodes.clone()].concat(),
        mounts: [shared.mounts.clone(), own.mounts.clone()].concat(),
        additional_gids: [shared.additional_gids.clone(), own.additional_gids.clone()].concat(),
    }
}
