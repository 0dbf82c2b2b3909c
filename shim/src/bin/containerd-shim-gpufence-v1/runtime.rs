//! Calls of the low-level runtime, runc or crun, each with a time-out.
//!
//! Our own and not the `runc` crate's (docs/decisions/0003): that one has no time-outs, no checkpoint or restore, and
//! writes an exec's process through typed structs which drop what they don't know.

use std::{
    ffi::OsStr,
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use serde_json::Value;
use thiserror::Error;
use tokio::{io::AsyncReadExt, net::unix::pipe};

use crate::reaper::Reaper;

/// A call that failed.
#[derive(Debug, Error)]
pub enum RuntimeError {
    #[error("run {}: {source}", binary.display())]
    Spawn { binary: PathBuf, source: std::io::Error },
    /// The runtime's own words, which mostly say what failed.
    #[error("{message}")]
    Failed { message: String },
    #[error("{name} {command} took longer than {seconds} s and was killed")]
    TimedOut { name: String, command: String, seconds: u64 },
}

/// The three descriptors of a call.
#[derive(Default)]
pub struct Descriptors {
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
}

/// Tells the logs of calls apart that run at the same time.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// A low-level runtime with its global flags.
#[derive(Clone)]
pub struct Runtime {
    pub binary: PathBuf,
    pub root: PathBuf,
    pub systemd_cgroup: bool,
    pub timeout: Duration,
    pub reaper: Reaper,
}

impl Runtime {
    fn name(&self) -> String {
        self.binary.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn command(&self, log: &Path, arguments: &[&OsStr]) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("--root").arg(&self.root).arg("--log").arg(log).args(["--log-format", "json"]);
        if self.systemd_cgroup {
            command.arg("--systemd-cgroup");
        }
        // runc would report a container's readiness to whoever started containerd.
        command.args(arguments).env_remove("NOTIFY_SOCKET").env_remove(crate::serve::LISTENER_VARIABLE);
        command
    }

    /// Runs a command whose container or process inherits `descriptors`. The runtime logs its errors into the bundle.
    pub async fn run<S: AsRef<OsStr>>(
        &self,
        bundle: &Path,
        arguments: &[S],
        descriptors: Descriptors,
    ) -> Result<(), RuntimeError> {
        let arguments: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
        let log = log_file(bundle);
        let stdio = |descriptor: Option<OwnedFd>| descriptor.map_or_else(Stdio::null, Stdio::from);
        let mut command = self.command(&log, &arguments);
        command.stdin(stdio(descriptors.stdin)).stdout(stdio(descriptors.stdout)).stderr(stdio(descriptors.stderr));
        self.finish(command, &log, arguments[0], None).await.map(drop)
    }

    /// Runs a command and gives what it printed.
    pub async fn output<S: AsRef<OsStr>>(&self, bundle: &Path, arguments: &[S]) -> Result<Vec<u8>, RuntimeError> {
        let arguments: Vec<&OsStr> = arguments.iter().map(AsRef::as_ref).collect();
        let log = log_file(bundle);
        let mut command = self.command(&log, &arguments);
        let spawn_error = |source| RuntimeError::Spawn { binary: self.binary.clone(), source };
        let (reader, writer) =
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(|errno| spawn_error(errno.into()))?;
        let reader = pipe::Receiver::from_owned_fd(reader).map_err(spawn_error)?;
        let copy = writer.try_clone().map_err(spawn_error)?;
        command.stdin(Stdio::null()).stdout(writer).stderr(copy);
        self.finish(command, &log, arguments[0], Some(reader)).await
    }

    async fn finish(
        &self,
        mut command: Command,
        log: &Path,
        verb: &OsStr,
        output: Option<pipe::Receiver>,
    ) -> Result<Vec<u8>, RuntimeError> {
        let (name, verb) = (self.name(), verb.to_string_lossy().into_owned());
        let mut child =
            command.spawn().map_err(|source| RuntimeError::Spawn { binary: self.binary.clone(), source })?;
        // No await since the spawn: the reaper can't have run.
        let exit = self.reaper.exit_of(child.id().cast_signed());
        drop(command);
        let mut printed = Vec::new();
        let whole = async {
            if let Some(mut output) = output {
                let _ = output.read_to_end(&mut printed).await;
            }
            exit.await.unwrap_or(255)
        };
        let finished = tokio::time::timeout(self.timeout, whole).await;
        let said = last_error(log);
        let _ = fs::remove_file(log);
        let Ok(status) = finished else {
            let _ = child.kill();
            return Err(RuntimeError::TimedOut { name, command: verb, seconds: self.timeout.as_secs() });
        };
        if status == 0 {
            return Ok(printed);
        }
        let said = said.unwrap_or_else(|| String::from_utf8_lossy(&printed).trim().to_owned());
        let message = if said.is_empty() { format!("{name} {verb} failed with exit status {status}") } else { said };
        Err(RuntimeError::Failed { message })
    }
}

fn log_file(bundle: &Path) -> PathBuf {
    bundle.join(format!("runtime-log.{}.json", CALLS.fetch_add(1, Ordering::Relaxed)))
}

/// The last error in the runtime's JSON log.
fn last_error(log: &Path) -> Option<String> {
    let text = fs::read_to_string(log).ok()?;
    let errors = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let errors = errors.filter(|entry| matches!(entry["level"].as_str(), Some("error" | "fatal")));
    errors.filter_map(|entry| entry["msg"].as_str().map(|message| message.trim().to_owned())).next_back()
}
