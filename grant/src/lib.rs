//! The contract between scheduler and node: what one Pod was given.
//!
//! The rooms, from the outside in:
//!
//! * [`annotation`]: which annotation carries a grant, and how one is read from a container's annotations;
//! * [`json`]: the grant as the extender writes it (`gpufence.dev/grant`);
//! * [`signature`]: keys, and signatures of a grant's exact bytes; `signing`: the private half;
//! * [`short`]: the short form for standalone hosts (`gpufence.dev/gpu`);
//! * [`size`]: amounts of memory with their units;
//! * [`gpu`]: how a grant names a GPU;
//! * [`resources`]: the names by which Pods ask for GPUs; [`inventory`]: what a node has, as the scheduler is told;
//! * [`limits`]: the limits file that a container's limiter reads;
//! * [`agent`]: what the node agent says of itself, and what it is asked over its socket.
//!
//! This crate knows nothing of containerd, of Kubernetes beyond names, or NVIDIA's driver, and depends on no other crate of the project.

pub mod agent;
pub mod annotation;
mod error;
pub mod gpu;
pub mod inventory;
pub mod json;
pub mod limits;
pub mod resources;
pub mod short;
pub mod signature;
#[cfg(feature = "signing")]
pub mod signing;
pub mod size;

use std::collections::BTreeMap;

use serde::Deserialize;

pub use error::GrantError;
pub use gpu::GpuReference;

/// The longest text of a grant, in bytes. Kubernetes takes up to 256 KiB for all annotations of an object together.
pub const MAX_GRANT_BYTES: usize = 64 * 1024;

/// One GPU (or MIG instance) in a grant, with what the container may use of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The GPU or MIG instance.
    pub gpu: GpuReference,
    /// The memory limit in MiB, at least 1.
    pub memory_mib: u64,
    /// The share of compute in percent, 1 to 100. `None`: not limited.
    pub compute_percent: Option<u8>,
}

/// What one Pod was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The Pod that this grant was written for. Absent in the short form.
    pub pod_uid: Option<String>,
    /// The node that this grant was written for. Absent in the short form.
    pub node: Option<String>,
    /// When it was written, RFC 3339. Absent in the short form.
    pub issued_at: Option<String>,
    /// How its GPUs are to be shared. `None`: as the node does.
    pub mode: Option<Mode>,
    /// Who gets which shares.
    pub recipients: Recipients,
}

/// How GPUs are shared among containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// By NVIDIA's Multi-Process Service: their kernels run side by side.
    Mps,
}

/// Which containers a grant gives shares to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recipients {
    /// Shares by container name, as the JSON form says.
    Named(BTreeMap<String, Vec<Share>>),
    /// The container that carries the annotation, as the short form says.
    Bearer(Vec<Share>),
}

impl Grant {
    /// The shares of the container called `name`; empty where the grant doesn't name it.
    pub fn shares_of(&self, name: &str) -> &[Share] {
        match &self.recipients {
            Recipients::Named(containers) => containers.get(name).map_or(&[], Vec::as_slice),
            Recipients::Bearer(shares) => shares,
        }
    }
}

/// Refuses what no share may say, whichever form it was written in.
pub(crate) fn check_shares(container: &str, shares: &[Share]) -> Result<(), GrantError> {
    if shares.is_empty() {
        return Err(GrantError::NoShares { container: container.to_owned() });
    }
    for (position, share) in shares.iter().enumerate() {
        if share.memory_mib == 0 {
            return Err(GrantError::ZeroMemory { gpu: share.gpu.to_string() });
        }
        if share.memory_mib > size::MAX_MEMORY_MIB {
            return Err(GrantError::TooMuchMemory { gpu: share.gpu.to_string(), mib: share.memory_mib });
        }
        if let Some(percent) = share.compute_percent
            && !(1..=100).contains(&percent)
        {
            return Err(GrantError::Percent { gpu: share.gpu.to_string(), percent: u64::from(percent) });
        }
        if shares[..position].iter().any(|earlier| earlier.gpu == share.gpu) {
            return Err(GrantError::DuplicateGpu { container: container.to_owned(), gpu: share.gpu.to_string() });
        }
    }
    Ok(())
}
