//! The node agent as the create path sees it: a file that says what it can do, and a socket that takes memory caps.
//!
//! The create path starts no NVML. Where the driver can cap a cgroup's memory, the agent, which holds NVML open, does it: one
//! line of JSON asks, one line answers, and then the connection ends.
//!
//! ```text
//! {"cgroup": "/sys/fs/cgroup/kubepods/…", "caps": [{"gpu": "GPU-…", "memoryBytes": 8589934592}]}
//! {"set": [{"gpu": "GPU-…", "memoryBytes": 8589934592}]}
//! {"error": "GPU-…: NVML doesn't support it for …"}
//! ```

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The longest line either way.
pub const MAX_LINE_BYTES: u64 = 64 << 10;

/// `/run/gpufence/node.json`: what the agent found when it started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentState {
    /// The driver that it talks to.
    pub driver_version: String,
    /// Whether the driver can cap a cgroup's memory, and by what.
    pub memory_caps: MemoryCaps,
    /// The MPS daemons that run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mps: Vec<MpsDaemon>,
}

/// An MPS control daemon that takes clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsDaemon {
    /// The UUIDs of its GPUs.
    pub gpus: Vec<String>,
    /// Its folder on the host, with `pipe`, `log` and `shm` in it.
    pub folder: PathBuf,
}

/// Whether the driver can cap a cgroup's memory (`nvmlDeviceSetMemoryLimits_v1`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MemoryCaps {
    /// It can, by the kernel's dmem controller.
    Dmem,
    /// It can, by a means of its own.
    Own,
    /// It can't, and why.
    Unsupported(String),
}

/// The most memory of one GPU that a cgroup may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cap {
    /// The GPU's UUID.
    pub gpu: String,
    /// Bytes.
    pub memory_bytes: u64,
}

/// `caps.json` in a container's folder: what `gpufence-hook` asks for before the container starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerCaps {
    /// The agent's socket.
    pub socket: PathBuf,
    /// For the container's own cgroup.
    pub container: Vec<Cap>,
    /// For its Pod's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodCaps>,
}

/// The caps for a Pod's cgroup: what its containers were granted together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodCaps {
    /// The Pod's UID, which its cgroup's name has.
    pub uid: String,
    /// The caps.
    pub caps: Vec<Cap>,
}

impl ContainerCaps {
    /// Its name in the container's folder.
    pub const FILE: &'static str = "caps.json";
}

/// What the agent is asked: to cap a cgroup, and to read back that it is so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The cgroup's folder below /sys/fs/cgroup.
    pub cgroup: PathBuf,
    /// The caps, one for each GPU.
    pub caps: Vec<Cap>,
}

/// What it answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// All were set, and are so when read back.
    Set(Vec<Cap>),
    /// Not all were.
    Error(String),
}

/// Caps that the agent didn't set.
#[derive(Debug, Error)]
pub enum AgentError {
    /// Nobody listens.
    #[error(
        "the node agent doesn't listen at {}: {source}; start gpufence-node, which sets the driver's memory caps", socket.display()
    )]
    Gone {
        /// Its socket.
        socket: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// It took too long, or the connection broke.
    #[error("the node agent at {} gave no answer within {timeout:?}: {source}", socket.display())]
    Silent {
        /// Its socket.
        socket: PathBuf,
        /// How long it had.
        timeout: Duration,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// It said what went wrong.
    #[error("the node agent set no memory cap on {}: {what}", cgroup.display())]
    Refused {
        /// The cgroup.
        cgroup: PathBuf,
        /// Its words.
        what: String,
    },
    /// What it said isn't an answer, or is one to another question.
    #[error("the node agent at {} answered \"{answer}\", not that all caps are set", socket.display())]
    Nonsense {
        /// Its socket.
        socket: PathBuf,
        /// What it said.
        answer: String,
    },
}

/// Asks for caps on a cgroup. They are set, and read back, when this is well.
pub fn ask(socket: &Path, request: &Request, timeout: Duration) -> Result<(), AgentError> {
    let gone = |source| AgentError::Gone { socket: socket.to_owned(), source };
    let mut stream = UnixStream::connect(socket).map_err(gone)?;
    let exchange = || {
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line)?;
        let mut answer = String::new();
        BufReader::new(stream.take(MAX_LINE_BYTES)).read_line(&mut answer)?;
        Ok(answer)
    };
    let silent = |source| AgentError::Silent { socket: socket.to_owned(), timeout, source };
    let answer: String = { exchange }().map_err(silent)?;
    match serde_json::from_str(&answer) {
        Ok(Answer::Set(caps)) if caps == request.caps => Ok(()),
        Ok(Answer::Error(what)) => Err(AgentError::Refused { cgroup: request.cgroup.clone(), what }),
        _ => Err(AgentError::Nonsense { socket: socket.to_owned(), answer: answer.trim_end().to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn request() -> Request {
        Request { cgroup: "/sys/fs/cgroup/a".into(), caps: vec![Cap { gpu: "GPU-a".into(), memory_bytes: 5 }] }
    }

    /// What a client makes of an answer; `None`: there is none.
    fn answered(answer: Option<&'static str>) -> Result<(), AgentError> {
        let socket = std::env::temp_dir().join(format!("gpufence-agent-{}", std::process::id()));
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(serde_json::from_str::<Request>(&line).unwrap(), request());
            match answer {
                Some(answer) => stream.write_all(answer.as_bytes()).unwrap(),
                None => std::thread::sleep(Duration::from_millis(300)),
            }
        });
        let result = ask(&socket, &request(), Duration::from_millis(100));
        server.join().unwrap();
        std::fs::remove_file(&socket).unwrap();
        result
    }

    #[test]
    fn only_the_same_caps_are_an_answer() {
        answered(Some("{\"set\":[{\"gpu\":\"GPU-a\",\"memoryBytes\":5}]}\n")).unwrap();
        for (answer, expected) in [
            (Some("{\"set\":[{\"gpu\":\"GPU-a\",\"memoryBytes\":6}]}\n"), "not that all caps are set"),
            (Some("{\"set\":[]}\n"), "not that all caps are set"),
            (Some("{\"error\":\"it is full\"}\n"), "set no memory cap on /sys/fs/cgroup/a: it is full"),
            (Some(""), "not that all caps are set"),
            (Some("hello"), "not that all caps are set"),
            (None, "gave no answer within 100ms"),
        ] {
            let error = answered(answer).unwrap_err().to_string();
            assert!(error.contains(expected), "{answer:?}: {error}");
        }
        let error = ask(Path::new("/nothing"), &request(), Duration::from_secs(1)).unwrap_err().to_string();
        assert!(error.contains("start gpufence-node"), "{error}");
    }
}
