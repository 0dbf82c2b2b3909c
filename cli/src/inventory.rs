//! `gpufence inventory`.

use std::io::Write;

use anyhow::{Context, Result};
use gpufence_cdi::{
    devices::Gpu,
    inventory::{Inventory, Roots},
};
use gpufence_shim::policy::Policy;

use crate::{
    arguments::{DriverRoot, InventoryArguments, Output},
    table,
};

/// Prints the inventory.
pub fn run(arguments: &InventoryArguments) -> Result<()> {
    let inventory = discover(&arguments.driver)?.1;
    let text = match arguments.output {
        Output::Json => serde_json::to_string_pretty(&inventory)? + "\n",
        Output::Table => describe(&inventory),
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// What the node has now. It is also written to where creates read it, as far as it is the policy's own driver root, so
/// that what NVML said is known there.
pub fn discover(arguments: &DriverRoot) -> Result<(Roots, Inventory)> {
    let policy = Policy::load()?;
    let root = arguments.driver_root.as_ref().unwrap_or(&policy.driver_root);
    let roots = Roots::open(root)?;
    let mut inventory = Inventory::discover(&roots)?;
    if arguments.nvml {
        gpufence_cdi::nvml::enrich(&mut inventory, &roots, None)?;
        if *root == policy.driver_root {
            inventory.write(&policy.inventory_file()).context("remember what NVML said")?;
        }
    }
    Ok((roots, inventory))
}

fn describe(inventory: &Inventory) -> String {
    let unknown = || "-".to_owned();
    let memory = |mib: Option<u64>| mib.map_or_else(unknown, |mib| format!("{mib} MiB"));
    let mut rows = Vec::new();
    for gpu in &inventory.devices.gpus {
        rows.push(vec![
            gpu.index.map_or_else(|| "excluded".into(), |index| index.to_string()),
            gpu.uuid.clone().unwrap_or_else(unknown),
            gpu.model.clone(),
            gpu.pci_address.clone(),
            nodes(gpu),
            memory(gpu.memory_mib),
        ]);
        for (position, instance) in gpu.mig.iter().enumerate() {
            rows.push(vec![
                gpu.index.map_or_else(unknown, |index| format!("{index}:{position}")),
                instance.uuid.clone().unwrap_or_else(unknown),
                format!("MIG {}/{}", instance.gpu_instance, instance.compute_instance),
                String::new(),
                instance.access.iter().map(|node| node.path.as_str()).collect::<Vec<_>>().join(" "),
                memory(instance.memory_mib),
            ]);
        }
    }
    let libraries = inventory.driver.libraries.len();
    let mut text = format!(
        "Driver {} under {}: {libraries} libraries, {} other files, {} firmware files\n",
        inventory.driver_version,
        inventory.driver_root.display(),
        inventory.driver.files.len(),
        inventory.driver.firmware.len(),
    );
    if rows.is_empty() {
        text.push_str("No GPU\n");
    } else {
        text.push_str(&table::format(&["GPU", "UUID", "MODEL", "PCI ADDRESS", "NODES", "MEMORY"], &rows));
    }
    text
}

fn nodes(gpu: &Gpu) -> String {
    std::iter::once(&gpu.node).chain(&gpu.drm).map(|node| node.path.as_str()).collect::<Vec<_>>().join(" ")
}
