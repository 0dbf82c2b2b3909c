//! What can go wrong on the way from a driver root to a CDI spec.

use std::{io, path::PathBuf};

use thiserror::Error;

/// An error of discovery, of the stage or of a spec.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CdiError {
    /// A system call on a path failed.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was being done, such as "open".
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file says something that isn't understood.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// No NVIDIA kernel driver is loaded.
    #[error("no NVIDIA driver is loaded: {} is missing; load the nvidia module, or name another driver root", path.display())]
    NoDriver {
        /// The file looked for.
        path: PathBuf,
    },
    /// The kernel driver is there, but its user-mode libraries are not.
    #[error(
        "driver {version} is loaded, but libcuda.so.{version} and libnvidia-ml.so.{version} are in none of the library folders under {}; install the user-mode driver of that version, or name the right driver root",
        root.display()
    )]
    NoLibraries {
        /// The running driver's version.
        version: String,
        /// The driver root.
        root: PathBuf,
    },
    /// A GPU of the grant is not on this node.
    #[error("GPU {gpu} is not on this node, which has {present}; see `gpufence inventory`")]
    NoSuchGpu {
        /// As granted.
        gpu: String,
        /// What there is, for the reader.
        present: String,
    },
    /// A GPU of the grant is excluded by the driver.
    #[error("GPU {gpu} is excluded by the driver's NVreg_ExcludedGpus and can't be used; grant another")]
    Excluded {
        /// As granted.
        gpu: String,
    },
    /// A device that a driver capability needs has no driver behind it.
    #[error("the kernel module {module} is not loaded, which {why} needs; run `modprobe {module}`")]
    NoModule {
        /// The module.
        module: &'static str,
        /// What needs it.
        why: String,
    },
    /// A CDI spec that can't be written as JSON, or read from it.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// serde_json's answer, with line and column.
        source: serde_json::Error,
    },
    /// NVML was asked for and failed.
    #[error("NVML: {0}")]
    Nvml(String),
}

/// Adds an action and a path to an error of the kernel.
pub(crate) fn io_error<E: Into<io::Error>>(
    action: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(E) -> CdiError {
    let path = path.into();
    move |source| CdiError::Io { action, path, source: source.into() }
}
