//! What a container saw, as `gpufence probe` tells it from inside.

use std::process::Output;

use anyhow::{Context, Result, bail};
use gpufence_cli::probe::Report;

/// The probe's command line: it also opens the image's own nodes and tries to make new ones.
pub const PROBE: [&str; 12] = [
    "/usr/bin/gpufence",
    "probe",
    "--output",
    "json",
    "--open",
    "/opt/nvidia0",
    "--open",
    "/opt/nvidia1",
    "--make",
    "195:0",
    "--make",
    "195:1",
];

/// A report with questions that tests ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen(pub Report);

impl Seen {
    /// From the probe's output.
    pub fn from_output(output: &Output) -> Result<Self> {
        if !output.status.success() {
            bail!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        Self::from_text(&String::from_utf8_lossy(&output.stdout))
    }

    /// From the probe's text.
    pub fn from_text(text: &str) -> Result<Self> {
        Ok(Self(serde_json::from_str(text).with_context(|| format!("the probe said: {text}"))?))
    }

    /// The nodes below `/dev` and what `open` says, such as `nvidia0 ENXIO`.
    pub fn nodes(&self) -> Vec<String> {
        let say = |node: &gpufence_cli::probe::Node| format!("{} {}", node.path.trim_start_matches("/dev/"), node.open);
        let mut nodes: Vec<String> = self.0.nodes.iter().map(say).collect();
        nodes.sort();
        nodes
    }

    /// What `open` says of the image's own nodes of GPUs 0 and 1.
    pub fn image_nodes(&self) -> Vec<&str> {
        self.0.others.iter().map(|node| node.open.as_str()).collect()
    }

    /// What comes of making nodes of GPUs 0 and 1: mknod's error, or open's.
    pub fn made_nodes(&self) -> Vec<&str> {
        self.0.made.iter().map(|made| made.open.as_deref().unwrap_or(&made.mknod)).collect()
    }

    /// Whether the loader finds a library in our folder.
    pub fn finds(&self, library: &str) -> bool {
        let found = self.0.libraries.get(library).and_then(Option::as_deref);
        found.is_some_and(|file| file.starts_with("/usr/lib/gpufence/"))
    }

    /// The limits as `UUID MiB percent`.
    pub fn limits(&self) -> Vec<String> {
        let say = |limit: &gpufence_cli::probe::LimitSeen| {
            format!("{} {} {}", limit.uuid, limit.memory_mib, limit.compute_percent)
        };
        self.0.limits.iter().map(say).collect()
    }

    /// Whether any of the five sets has a capability.
    pub fn has_capability(&self, name: &str) -> bool {
        self.0.capabilities.values().flatten().any(|has| has == name)
    }

    /// A variable of the environment.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.0.environment.get(name).map(String::as_str)
    }
}
