//! `gpufence cdi`.

use std::{io::Write, os::unix::fs::MetadataExt, path::Path, time::Duration};

use anyhow::{Context, Result, bail};
use gpufence_cdi::{
    capability::DriverCapability,
    inventory::{Inventory, Roots},
    spec::{self, ContainerEdits, Device, Spec},
    stage::Stage,
};
use gpufence_shim::{bundle::edit_options, policy::Policy, runtime_path};
use nix::sys::stat::{major, minor};

use crate::{
    arguments::{CdiArguments, CdiCommand, DriverRoot, Output},
    inventory, table,
};

/// Runs one of its subcommands.
pub fn run(arguments: &CdiArguments) -> Result<()> {
    let text = match &arguments.command {
        CdiCommand::Generate { driver, file, stage_folder, capabilities, hook, watch } => {
            let wanted = Wanted { driver, stage_folder: stage_folder.as_deref(), capabilities, hook: hook.as_deref() };
            if file == Path::new("-") {
                serde_json::to_string_pretty(&wanted.spec()?)? + "\n"
            } else {
                let spec = wanted.spec()?;
                write(&spec, file)?;
                if let Some(seconds) = watch {
                    return keep_current(&wanted, spec, file, *seconds);
                }
                String::new()
            }
        }
        CdiCommand::Validate { driver, file } => {
            let (roots, inventory) = inventory::discover(driver)?;
            validate(&read(file)?, &inventory, &roots)
                .with_context(|| format!("{} is not this node's; run `gpufence cdi generate`", file.display()))?;
            format!("{} is this node's, for driver {}\n", file.display(), inventory.driver_version)
        }
        CdiCommand::List { file, output } => list(&read(file)?, *output)?,
        CdiCommand::Show { device, file, output } => show(&read(file)?, device, file, *output)?,
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// What a node's spec is to be made of.
struct Wanted<'a> {
    driver: &'a DriverRoot,
    stage_folder: Option<&'a Path>,
    capabilities: &'a [DriverCapability],
    hook: Option<&'a Path>,
}

impl Wanted<'_> {
    fn spec(&self) -> Result<Spec> {
        let policy = Policy::load()?;
        let (roots, inventory) = inventory::discover(self.driver)?;
        let capabilities = if self.capabilities.is_empty() {
            policy.default_driver_capabilities.clone()
        } else {
            self.capabilities.iter().copied().collect()
        };
        let stage = Stage::ensure(self.stage_folder.unwrap_or(&policy.stage_dir), &inventory, &roots.driver)?;
        let hook = self.hook.map_or_else(|| runtime_path::hook(&policy), |hook| Ok(hook.to_owned()))?;
        Ok(spec::node_spec(&inventory, &stage, &edit_options(&policy, capabilities), &hook)?)
    }
}

fn write(spec: &Spec, file: &Path) -> Result<()> {
    spec.write(file)?;
    println!("Wrote {} with {} devices of kind {}", file.display(), spec.devices.len(), spec.kind);
    Ok(())
}

/// Writes the spec again whenever it would be another one. What can't be found out now, as while a driver is being
/// replaced, is told and tried again.
fn keep_current(wanted: &Wanted<'_>, mut written: Spec, file: &Path, seconds: u64) -> Result<()> {
    loop {
        std::thread::sleep(Duration::from_secs(seconds));
        match wanted.spec() {
            Ok(spec) if spec != written || !file.exists() => {
                write(&spec, file)?;
                written = spec;
            }
            Ok(_) => {}
            Err(error) => eprintln!("gpufence: {error:#}"),
        }
    }
}

/// Fails with what no longer holds.
fn validate(spec: &Spec, inventory: &Inventory, roots: &Roots) -> Result<()> {
    let all = spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]);
    for edits in all.clone() {
        for mount in &edits.mounts {
            if !Path::new(&mount.host_path).exists() {
                bail!("{} is to be mounted and isn't there", mount.host_path);
            }
        }
        for hook in &edits.hooks {
            if !Path::new(&hook.path).is_file() {
                bail!("the hook {} isn't there", hook.path);
            }
        }
        for node in &edits.device_nodes {
            let path = roots.host.host_path(&node.path);
            let there = std::fs::metadata(&path).with_context(|| format!("stat {}", path.display()))?;
            let there = (major(there.rdev()), minor(there.rdev()));
            if there != (node.major.into(), node.minor.into()) {
                bail!("{} is {}:{}, not {}:{}", path.display(), there.0, there.1, node.major, node.minor);
            }
        }
    }
    let version = format!("/{}/", inventory.driver_version);
    if let Some(mount) =
        spec.container_edits.mounts.iter().find(|mount| !format!("{}/", mount.host_path).contains(&version))
    {
        bail!("{} is not of the running driver {}", mount.host_path, inventory.driver_version);
    }
    Ok(())
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
    for hook in &whole.hooks {
        rows.push(vec!["hook".into(), hook.hook_name.clone(), hook.path.clone()]);
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
        hooks: [shared.hooks.clone(), own.hooks.clone()].concat(),
        additional_gids: [shared.additional_gids.clone(), own.additional_gids.clone()].concat(),
    }
}
