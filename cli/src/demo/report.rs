//! The demo's table.

use anyhow::Result;
use gpufence_cdi::inventory::Inventory;
use serde_json::json;

use super::{NODE_IN_IMAGE, Seen};
use crate::{probe::Report, table};

/// The five as a table, with what its words mean.
pub fn table(inventory: &Inventory, seen: &[Seen]) -> String {
    let header = [
        "CONTAINER",
        "NODES IN /dev: open()",
        "NODES IN THE IMAGE",
        "NODES BY mknod",
        "LIBRARIES",
        "LIMIT",
        "CAPABILITIES LOST",
    ];
    let rows: Vec<Vec<String>> = seen
        .iter()
        .map(|Seen { name, about, report }| {
            vec![
                format!("{name}\n{about}"),
                lines(report.nodes.iter().map(|node| (node.path.trim_start_matches("/dev/"), node.open.as_str()))),
                lines(report.others.iter().map(|node| (node.path.trim_start_matches("/opt/"), node.open.as_str()))),
                made(report),
                libraries(report),
                limits(inventory, report),
                lost(report),
            ]
        })
        .collect();
    format!(
        "\nDriver {} under {}, {} GPUs. Nodes in the image lie at {NODE_IN_IMAGE}<minor>.\n\n{}\n{}",
        inventory.driver_version,
        inventory.driver_root.display(),
        inventory.devices.gpus.len(),
        table::format(&header, &rows),
        "opens: granted. ENXIO: granted, with no driver behind the node (a simulated machine).\nEPERM: the device cgroup, or a capability that was taken, denies it. -: none.\n",
    )
}

/// What each saw, whole.
pub fn json(seen: &[Seen]) -> Result<String> {
    let all: Vec<_> =
        seen.iter().map(|seen| json!({"container": seen.name, "about": seen.about, "sees": seen.report})).collect();
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

fn lines<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let lines: Vec<String> = pairs.map(|(name, says)| format!("{name}: {says}")).collect();
    if lines.is_empty() { "-".into() } else { lines.join("\n") }
}

fn made(report: &Report) -> String {
    let says = |made: &crate::probe::Made| match &made.open {
        Some(open) => format!("{}: made, {open}", made.device),
        None => format!("{}: {}", made.device, made.mknod),
    };
    report.made.iter().map(says).collect::<Vec<_>>().join("\n")
}

fn libraries(report: &Report) -> String {
    let found: Vec<&str> =
        report.libraries.iter().filter(|(_, file)| file.is_some()).map(|(name, _)| name.as_str()).collect();
    if found.is_empty() { "-".into() } else { found.join("\n") }
}

fn limits(inventory: &Inventory, report: &Report) -> String {
    let name = |uuid: &str| {
        let gpu = inventory.devices.gpus.iter().find(|gpu| gpu.uuid.as_deref() == Some(uuid));
        gpu.and_then(|gpu| gpu.index).map_or_else(|| uuid.to_owned(), |index| format!("GPU {index}"))
    };
    let line = |limit: &crate::probe::LimitSeen| {
        format!("{}: {} MiB, {}%", name(&limit.uuid), limit.memory_mib, limit.compute_percent)
    };
    let lines: Vec<String> = report.limits.iter().map(line).collect();
    if lines.is_empty() { "-".into() } else { lines.join("\n") }
}

/// Which of the capabilities that matter here the bounding set lacks.
fn lost(report: &Report) -> String {
    let bounding = report.capabilities.get("bounding").map(Vec::as_slice).unwrap_or_default();
    let watched = ["MKNOD", "SYS_ADMIN", "SYS_RAWIO", "SYS_MODULE", "BPF"];
    let lost: Vec<&str> = watched.into_iter().filter(|name| !bounding.iter().any(|has| has == name)).collect();
    if lost.is_empty() { "-".into() } else { lost.join("\n") }
}
