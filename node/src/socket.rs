//! `/run/gpufence/node.sock`: where the create path asks for memory caps. Root's alone.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail};
use gpufence_grant::agent::{Answer, MAX_LINE_BYTES, Request};
use nix::sys::{
    socket::{getsockopt, sockopt::PeerCredentials},
    stat::{Mode, umask},
};

use crate::{caps, nvml::Driver};

/// How long a client has to ask.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many are served at a time; NVML may keep each waiting.
const AT_ONCE: usize = 64;

/// Makes the socket. To be called while the program has one thread.
pub fn bind(path: &Path) -> Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        bail!("{}: another gpufence-node listens there; stop it first", path.display());
    }
    let _ = fs::remove_file(path);
    let before = umask(Mode::from_bits_truncate(0o177));
    let listener = UnixListener::bind(path).with_context(|| format!("listen at {}", path.display()));
    umask(before);
    listener
}

/// Serves it for ever, on threads of its own.
pub fn serve(listener: UnixListener, driver: &Arc<Driver>) -> Result<()> {
    let driver = driver.clone();
    let served = Arc::new(AtomicUsize::new(0));
    let run = move || {
        for stream in listener.incoming().flatten() {
            if served.fetch_add(1, Ordering::SeqCst) >= AT_ONCE {
                // Its client sees the connection end, and fails.
                served.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let (driver, served) = (driver.clone(), served.clone());
            std::thread::spawn(move || {
                if let Err(error) = exchange(stream, &driver) {
                    tracing::warn!(%error, "a request for memory caps was not answered");
                }
                served.fetch_sub(1, Ordering::SeqCst);
            });
        }
    };
    std::thread::Builder::new().name("socket".into()).spawn(run)?;
    Ok(())
}

fn exchange(mut stream: UnixStream, driver: &Driver) -> Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // The socket's mode says so too; somebody may have changed it.
    let user = getsockopt(&stream, PeerCredentials)?.uid();
    let mut line = String::new();
    BufReader::new((&stream).take(MAX_LINE_BYTES)).read_line(&mut line)?;
    let answer = match serde_json::from_str::<Request>(&line) {
        _ if user != 0 => Answer::Error(format!("user {user} may not set memory caps")),
        Ok(request) => {
            let answer = caps::set(driver, &request);
            match &answer {
                Answer::Set(caps) => tracing::info!(cgroup = %request.cgroup.display(), ?caps, "memory capped"),
                Answer::Error(error) => tracing::warn!(cgroup = %request.cgroup.display(), error, "memory not capped"),
            }
            answer
        }
        Err(error) => Answer::Error(format!("not a request: {error}")),
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    Ok(stream.write_all(&text)?)
}
