//! Why a container is not created.

use std::{io, path::PathBuf};

use gpufence_cdi::CdiError;
use gpufence_grant::{annotation::AnnotationError, signature::SignatureError};
use thiserror::Error;

use crate::memory::Rung;

/// A grant that can't be read, verified or met, or a bundle that can't be edited.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EnforceError {
    /// A system call on a path failed.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// `config.json` is not what an OCI bundle has.
    #[error("{}: {what}", path.display())]
    Spec {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A part of the spec has another shape than the OCI runtime specification says.
    #[error("config.json: {0}")]
    Shape(String),
    /// The policy file can't be read.
    #[error("policy {}: {what}", path.display())]
    Policy {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, with line and column.
        what: String,
    },
    /// The annotations carry no usable grant.
    #[error(transparent)]
    Annotation(#[from] AnnotationError),
    /// The grant was written for somebody else.
    #[error("{origin}: the grant is for {what} {granted}, but this is {actual}; let the scheduler grant anew")]
    NotForUs {
        /// Where the grant came from.
        origin: &'static str,
        /// "Pod" or "node".
        what: &'static str,
        /// Whom it names.
        granted: String,
        /// Who this is.
        actual: String,
    },
    /// A grant that counts nothing here, since nobody signed it.
    #[error(
        "{origin}: the grant isn't signed, and this node's policy counts only what the scheduler has signed (require_signature); ask for GPUs by resources such as gpufence.dev/gpu-memory instead of by annotation"
    )]
    Unsigned {
        /// Where the grant came from.
        origin: &'static str,
    },
    /// A signature that doesn't hold.
    #[error("annotation {}: {source}; let the scheduler grant anew", gpufence_grant::annotation::GRANT_SIGNATURE)]
    Signature {
        /// What is wrong with it.
        source: SignatureError,
    },
    /// A signed grant that doesn't say what it has to.
    #[error("{origin}: a signed grant has to say {what}; use an extender of the same release as this node")]
    Incomplete {
        /// Where the grant came from.
        origin: &'static str,
        /// What is missing, or what its time is.
        what: String,
    },
    /// A signed grant of too long ago, or of a time to come.
    #[error("{origin}: the grant was signed {what}")]
    Time {
        /// Where the grant came from.
        origin: &'static str,
        /// When, the bound, and what to do.
        what: String,
    },
    /// The grant can't be met on this node.
    #[error("{origin}: {source}")]
    Unmet {
        /// Where the grant came from.
        origin: &'static str,
        /// What this node lacks.
        source: CdiError,
    },
    /// A share of more memory than the GPU has.
    #[error("{origin}: the share of GPU {gpu} has {granted} MiB, but the GPU has {present} MiB; grant less")]
    TooMuch {
        /// Where the grant came from.
        origin: &'static str,
        /// The GPU as granted.
        gpu: String,
        /// MiB granted.
        granted: u64,
        /// MiB present.
        present: u64,
    },
    /// A fixed grant and one in an annotation.
    #[error(
        "the runtime has a fixed grant (--grant) and the container an annotation with another; keep only one of them"
    )]
    TwoGrants,
    /// `NVIDIA_VISIBLE_DEVICES` asks for what can't be given.
    #[error("NVIDIA_VISIBLE_DEVICES: {0}; write all, none, or indices and UUIDs from `gpufence inventory`")]
    Visible(String),
    /// Policy refuses privileged containers.
    #[error(
        "the container is privileged, which this node's policy denies (privileged = \"deny\"); drop `privileged`, or have the administrator set \"fence\""
    )]
    Privileged,
    /// A device rule that no fence fits into.
    #[error(
        "config.json: the device rule {rule} allows devices of every major, and a cgroup can't keep GPUs out of it; name the major, or make the container privileged, which is fenced"
    )]
    Unfenceable {
        /// The rule as it stands in linux.resources.devices.
        rule: String,
    },
    /// The limiter isn't installed.
    #[error(
        "{} has not all of the limiter's libraries, so no memory limit would hold; install them there, or name their folder as memory.limiter in the policy, or accept no limit with memory.require = \"none\"", .0.display()
    )]
    NoLimiter(PathBuf),
    /// What keeps the container to its memory limit is weaker than policy accepts.
    #[error(
        "the memory limit would be held by \"{rung}\", and this node's policy accepts nothing below \"{require}\" (memory.require): {why}"
    )]
    BelowRung {
        /// What policy says.
        require: Rung,
        /// What holds.
        rung: Rung,
        /// Why nothing stronger does.
        why: String,
    },
    /// The GPUs are shared by MPS, or are to be, and the container can't be a client.
    #[error("{origin}: {what}")]
    Mps {
        /// Where the grant came from.
        origin: &'static str,
        /// What is in the way.
        what: String,
    },
    /// No low-level runtime to wrap.
    #[error("none of the policy's runtimes ({names}) is on the engine's PATH or in a usual folder; install runc")]
    NoRuntime {
        /// Those looked for.
        names: String,
    },
    /// `gpufence-hook` is missing.
    #[error("gpufence-hook is neither beside this program nor on PATH; install it, or name it as hook in the policy")]
    NoHook,
    /// Something about the driver, the inventory or the stage, not about this grant.
    #[error(transparent)]
    Cdi(#[from] CdiError),
}

/// Adds an action and a path to an error of the kernel.
pub(crate) fn io_error(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> EnforceError {
    let path = path.into();
    move |source| EnforceError::Io { action, path, source }
}
