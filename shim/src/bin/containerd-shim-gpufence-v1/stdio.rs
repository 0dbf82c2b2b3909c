//! A process's stdio: containerd's fifos, a file (`file://`) or a logger (`binary://`), each with or without a terminal.

use std::{
    fs::{self, OpenOptions},
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use containerd_shim::io::{IoTasks, Pty};
use nix::{
    fcntl::OFlag,
    unistd::{Gid, Uid},
};
use tokio::{io::AsyncReadExt, net::unix::pipe};

use crate::{Failure, reaper::Reaper, runtime::Descriptors};

/// How long a logger may take to say that it is ready, and to end once its input has.
const LOGGER_LIMIT: Duration = Duration::from_secs(10);

/// How long output may go on after its process has ended, as with containerd's own shim: a child that was left behind
/// may hold the pipe open for ever.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// Where containerd wants a process's stdio.
#[derive(Debug, Clone, Default)]
pub struct Addresses {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

/// For whom it is, which a logger is told, and who owns the pipes.
pub struct Owner<'a> {
    pub namespace: &'a str,
    pub id: &'a str,
    pub uid: u32,
    pub gid: u32,
}

/// The stdio of a process that runs.
#[derive(Default)]
pub struct Io {
    tasks: IoTasks,
    logger: Option<Logger>,
}

/// What a process is started with, and what is to be copied once it runs.
#[derive(Default)]
pub struct Prepared {
    pub descriptors: Descriptors,
    stdin: Option<pipe::Sender>,
    stdout: Option<Source>,
    stderr: Option<Source>,
    logger: Option<Logger>,
    /// With a terminal: a logger's or a file's end that the terminal's output is copied into.
    terminal_output: Option<OwnedFd>,
}

struct Source(pipe::Receiver);

/// A logger's process.
struct Logger {
    exit: tokio::sync::oneshot::Receiver<i32>,
}

enum Scheme<'a> {
    Fifo(&'a str),
    File(&'a str),
    Binary(&'a str),
}

fn scheme(address: &str) -> Result<Scheme<'_>, Failure> {
    match address.split_once("://") {
        None => Ok(Scheme::Fifo(address)),
        Some(("fifo", path)) => Ok(Scheme::Fifo(path)),
        Some(("file", path)) => Ok(Scheme::File(path)),
        Some(("binary", rest)) => Ok(Scheme::Binary(rest)),
        Some((other, _)) => {
            Err(format!("stdio {address}: the scheme {other}:// is not known; fifo, file and binary are").into())
        }
    }
}

impl Addresses {
    /// Opens what the process needs before it is started.
    pub async fn prepare(&self, owner: &Owner<'_>, reaper: &Reaper) -> Result<Prepared, Failure> {
        let mut prepared = Prepared::default();
        if !self.stdin.is_empty() && !self.terminal {
            let (reader, writer) = owned_pipe(owner)?;
            prepared.descriptors.stdin = Some(reader);
            prepared.stdin = Some(pipe::Sender::from_owned_fd(writer)?);
        }
        if self.stdout.is_empty() && self.stderr.is_empty() {
            return Ok(prepared);
        }
        let first = if self.stdout.is_empty() { &self.stderr } else { &self.stdout };
        match scheme(first)? {
            Scheme::Binary(rest) => {
                let (out_reader, out_writer) = owned_pipe(owner)?;
                let (error_reader, error_writer) = owned_pipe(owner)?;
                prepared.logger = Some(Logger::start(rest, owner, reaper, out_reader, error_reader).await?);
                if self.terminal {
                    prepared.terminal_output = Some(out_writer);
                } else {
                    prepared.descriptors.stdout = Some(out_writer);
                    prepared.descriptors.stderr = Some(error_writer);
                }
            }
            Scheme::File(path) => {
                let file = log_file(path)?;
                if self.terminal {
                    prepared.terminal_output = Some(file);
                } else {
                    prepared.descriptors.stderr = Some(match self.stderr.strip_prefix("file://") {
                        Some(other) if other != path => log_file(other)?,
                        _ => file.try_clone()?,
                    });
                    prepared.descriptors.stdout = Some(file);
                }
            }
            Scheme::Fifo(_) if self.terminal => {}
            Scheme::Fifo(_) => {
                let output = |address: &str| -> Result<Option<(OwnedFd, Source)>, Failure> {
                    if address.is_empty() {
                        return Ok(None);
                    }
                    let (reader, writer) = owned_pipe(owner)?;
                    Ok(Some((writer, Source(pipe::Receiver::from_owned_fd(reader)?))))
                };
                (prepared.descriptors.stdout, prepared.stdout) = output(&self.stdout)?.unzip();
                (prepared.descriptors.stderr, prepared.stderr) = output(&self.stderr)?.unzip();
            }
        }
        Ok(prepared)
    }

    /// Starts the copies of a process that runs. `terminal` is its terminal's master.
    pub fn copy(&self, prepared: Prepared, terminal: Option<&Pty>) -> Result<Io, Failure> {
        let io = Io { tasks: IoTasks::default(), logger: prepared.logger };
        let fifo = |address: &str| match scheme(address) {
            Ok(Scheme::Fifo(path)) if !path.is_empty() => Some(path.to_owned()),
            _ => None,
        };
        if let Some(terminal) = terminal {
            if let Some(path) = fifo(&self.stdin) {
                io.tasks.copy_from_fifo(&path, terminal.clone())?;
            }
            if let Some(output) = prepared.terminal_output {
                copy_terminal_to(terminal.clone(), output);
            } else if let Some(path) = fifo(&self.stdout) {
                io.tasks.copy_to_fifo(terminal.clone(), &path)?;
            }
            return Ok(io);
        }
        if let (Some(path), Some(writer)) = (fifo(&self.stdin), prepared.stdin) {
            io.tasks.copy_from_fifo(&path, writer)?;
        }
        for (address, source) in [(&self.stdout, prepared.stdout), (&self.stderr, prepared.stderr)] {
            if let (Some(path), Some(Source(reader))) = (fifo(address), source) {
                io.tasks.copy_to_fifo(reader, &path)?;
            }
        }
        Ok(io)
    }
}

/// Copies a terminal's output into a file or pipe until the terminal hangs up.
fn copy_terminal_to(mut terminal: Pty, output: OwnedFd) {
    tokio::spawn(async move {
        let mut file = fs::File::from(output);
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = terminal.read(&mut buffer).await {
            // Loggers read as fast as they can and files don't block; what can't be written is lost, as with containerd.
            if std::io::Write::write_all(&mut file, &buffer[..count]).is_err() {
                break;
            }
        }
    });
}

impl Io {
    /// Lets go of stdin, as CloseIO asks.
    pub fn close_input(&self) {
        self.tasks.close_input();
    }

    /// Delivers what is still buffered, and lets go of everything.
    pub async fn shut_down(&mut self) {
        if tokio::time::timeout(DRAIN_LIMIT, self.tasks.shutdown()).await.is_err() {
            self.tasks.abort().await;
        }
        if let Some(logger) = self.logger.take() {
            let _ = tokio::time::timeout(LOGGER_LIMIT, logger.exit).await;
        }
    }
}

/// A pipe whose ends the container's user may open again through /dev/stdout.
fn owned_pipe(owner: &Owner<'_>) -> Result<(OwnedFd, OwnedFd), Failure> {
    let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    if (owner.uid, owner.gid) != (0, 0) {
        let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
        nix::unistd::fchown(&reader, Some(uid), Some(gid))?;
    }
    Ok((reader, writer))
}

fn log_file(path: &str) -> Result<OwnedFd, Failure> {
    let path = Path::new(path);
    if !path.is_absolute() {
        return Err(format!("stdio file://{}: not an absolute path", path.display()).into());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let file = OpenOptions::new().create(true).append(true).open(path);
    Ok(file.map_err(|error| format!("stdio file://{}: {error}", path.display()))?.into())
}

impl Logger {
    /// Starts a logger: it finds the container's output on descriptors 3 and 4, and closes 5 when it is ready
    /// (containerd's core/runtime/v2/logging).
    async fn start(
        rest: &str,
        owner: &Owner<'_>,
        reaper: &Reaper,
        stdout: OwnedFd,
        stderr: OwnedFd,
    ) -> Result<Self, Failure> {
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (ready, signal) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let mut command = Command::new(percent_decode(path));
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            command.arg(percent_decode(key));
            if !value.is_empty() {
                command.arg(percent_decode(value));
            }
        }
        command
            .env_clear()
            .env("CONTAINER_ID", owner.id)
            .env("CONTAINER_NAMESPACE", owner.namespace)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        inherit_as(&mut command, [stdout.as_raw_fd(), stderr.as_raw_fd(), signal.as_raw_fd()]);
        let child = command.spawn().map_err(|error| format!("start logger {path}: {error}"))?;
        let exit = reaper.exit_of(child.id().cast_signed());
        drop((command, stdout, stderr, signal));
        let mut ready = pipe::Receiver::from_owned_fd(ready)?;
        let mut byte = [0; 1];
        tokio::time::timeout(LOGGER_LIMIT, ready.read(&mut byte))
            .await
            .map_err(|_| format!("logger {path} was not ready in {LOGGER_LIMIT:?}"))??;
        Ok(Self { exit })
    }
}

/// Gives the child these descriptors as 3, 4 and 5.
#[allow(unsafe_code, reason = "one-line wrapper")]
fn inherit_as(command: &mut Command, descriptors: [i32; 3]) {
    use std::os::unix::process::CommandExt;
    let place = move || {
        // Moved out of the way first, so that none overwrites another; these copies close on exec.
        let mut moved = [0; 3];
        for (target, source) in moved.iter_mut().zip(descriptors) {
            *target = raw_duplicate(source, 10)?;
        }
        for (target, source) in (3..).zip(moved) {
            raw_place(source, target)?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure calls only fcntl and dup2, which are async-signal-safe.
    unsafe { command.pre_exec(place) };
}

#[allow(unsafe_code, reason = "one-line wrapper")]
fn raw_duplicate(descriptor: i32, from: i32) -> std::io::Result<i32> {
    // SAFETY: fcntl with integers only.
    let copy = unsafe { nix::libc::fcntl(descriptor, nix::libc::F_DUPFD_CLOEXEC, from) };
    if copy < 0 { Err(std::io::Error::last_os_error()) } else { Ok(copy) }
}

#[allow(unsafe_code, reason = "one-line wrapper")]
fn raw_place(source: i32, target: i32) -> std::io::Result<()> {
    // SAFETY: dup2 with integers only.
    if unsafe { nix::libc::dup2(source, target) } < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// What a URI writes as `%2F` and the like.
fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let digits = (byte == b'%').then(|| tail.get(..2)).flatten();
        let value = digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(value.unwrap_or(byte));
        rest = if value.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes() {
        assert!(matches!(scheme("/run/fifo"), Ok(Scheme::Fifo("/run/fifo"))));
        assert!(matches!(scheme("fifo:///run/fifo"), Ok(Scheme::Fifo("/run/fifo"))));
        assert!(matches!(scheme("file:///var/log/x"), Ok(Scheme::File("/var/log/x"))));
        assert!(matches!(scheme("binary:///usr/bin/logger?a=b"), Ok(Scheme::Binary("/usr/bin/logger?a=b"))));
        assert!(scheme("npipe://x").is_err());
        assert_eq!(percent_decode("a%2Fb%zz%4"), "a/b%zz%4");
    }
}
