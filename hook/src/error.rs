//! Why a hook fails, and with it the container's start.

use std::{io, path::PathBuf};

use gpufence_cdi::CdiError;
use gpufence_grant::agent::AgentError;
use thiserror::Error;

/// What went wrong.
#[derive(Debug, Error)]
pub enum HookError {
    #[error("{action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{0}")]
    Argument(String),
    #[error("the container's state on standard input is not what the OCI specification has: {0}")]
    State(String),
    #[error("{} is not the folder of container {id}", folder.display())]
    Folder { folder: PathBuf, id: String },
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("the container has the GPU node {path} ({device}), which its grant doesn't name; it was not started")]
    ForeignNode { path: String, device: String },
    #[error("the container lacks the node {device} of its grant; it was not started")]
    MissingNode { device: String },
    #[error("a process of the container's cgroup {what} {} ({device}), which its grant doesn't name; it was not started", path.display())]
    Reaches { path: PathBuf, device: String, what: String },
    #[error("process {pid} has no cgroup that has a device fence; it was not started")]
    NoCgroup { pid: i32 },
    #[error("the libraries' folder {} is not mounted in the container, or is empty", .0.display())]
    NoLibraries(PathBuf),
    #[error("{0}; the container was not started")]
    Agent(#[from] AgentError),
    #[error(transparent)]
    Cdi(#[from] CdiError),
}

pub fn io_error<E: Into<io::Error>>(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(E) -> HookError {
    let path = path.into();
    move |source| HookError::Io { action, path, source: source.into() }
}
