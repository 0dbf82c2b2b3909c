//! A node agent on a simulated machine, whose NVML says what a file says.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{host::Host, programs};

/// An agent that runs. It ends when it is dropped.
pub struct Node {
    /// Its process.
    pub process: Child,
    address: String,
    log: Arc<Mutex<String>>,
    told: PathBuf,
    state: PathBuf,
}

/// A process on a GPU, as NVML tells of it.
#[derive(Debug, Clone, Copy)]
pub struct Told {
    /// Its PID on the host.
    pub pid: u32,
    /// The GPU's index.
    pub gpu: u32,
    /// MiB.
    pub used_mib: u64,
}

impl Node {
    /// Starts one in the mount namespace of the machine's containerd, and waits until it serves. `memory_limits` is NVML's
    /// way with the driver's caps, as `tests/standins/nvml.c` has it.
    pub fn start(host: &Host, memory_limits: &str) -> Result<Self> {
        let told = host.folder().join("nvml.json");
        tell(&told, memory_limits, &[], &[])?;
        let containerd = host.containerd.pid().context("containerd runs")?;
        let mut process = Command::new("nsenter")
            .args(["--mount", "--target", &containerd.to_string(), "--"])
            .arg(programs::built()?.join("gpufence-node"))
            .args(["--listen", "127.0.0.1:0", "--policy"])
            .arg(host.policy())
            .env("GPUFENCE_STANDIN_NVML", &told)
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("run nsenter")?;
        let errors = process.stderr.take().context("a pipe")?;
        let log = Arc::new(Mutex::new(String::new()));
        let (sender, receiver) = mpsc::channel();
        let kept = log.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                if let Some((_, address)) = line.split_once("metrics at http://") {
                    let _ = sender.send(address.trim_end_matches("/metrics").to_owned());
                }
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.push_str(&line);
                kept.push('\n');
            }
        });
        let mut node = Self { process, address: String::new(), log, told, state: host.folder().join("state") };
        match receiver.recv_timeout(Duration::from_secs(20)) {
            Ok(address) => node.address = address,
            Err(_) => bail!("gpufence-node does not serve: {}", node.log()),
        }
        // It says what it can do after that.
        let file = host.folder().join("state/node.json");
        if !crate::host::until(|| file.exists()) {
            bail!("no node.json: {}", node.log());
        }
        Ok(node)
    }

    /// Has NVML tell of these processes and Xid errors from now on.
    pub fn tell(&self, memory_limits: &str, processes: &[Told], xids: &[(u32, u32)]) -> Result<()> {
        tell(&self.told, memory_limits, processes, xids)
    }

    /// The caps that NVML was given, each as `GPU soft hard cgroup`.
    pub fn caps(&self) -> Vec<String> {
        let text = fs::read_to_string(self.told.with_extension("json.limits")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The compute modes that NVML was told, each as `GPU mode`.
    pub fn compute_modes(&self) -> Vec<String> {
        let text = fs::read_to_string(self.told.with_extension("json.modes")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The PIDs of the MPS daemons, in the order of their sets; of one that has ended, its last.
    pub fn mps_daemons(&self) -> Vec<i32> {
        let folder = self.state.join("mps");
        let pid = |number: usize| {
            let file = folder.join(number.to_string()).join("pipe/nvidia-cuda-mps-control.pid");
            fs::read_to_string(file).ok()?.trim().parse().ok()
        };
        (0..16).map_while(pid).collect()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A page that it serves.
    pub fn page(&self, path: &str) -> Result<String> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// The value of a metric whose labels have all of these words.
    pub fn metric(&self, name: &str, labels: &[&str]) -> Result<Option<f64>> {
        let page = self.page("/metrics")?;
        let line = page.lines().find(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']))
                && labels.iter().all(|label| line.contains(label))
        });
        Ok(line.and_then(|line| line.rsplit(' ').next()?.parse().ok()))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        // MPS daemons outlive it.
        for pid in self.mps_daemons() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
    }
}

fn tell(file: &std::path::Path, memory_limits: &str, processes: &[Told], xids: &[(u32, u32)]) -> Result<()> {
    let processes: Vec<Value> = processes
        .iter()
        .map(|told| json!({"gpu": told.gpu, "pid": told.pid, "usedBytes": told.used_mib << 20}))
        .collect();
    let xids: Vec<Value> = xids.iter().map(|(gpu, xid)| json!({"gpu": gpu, "xid": xid})).collect();
    let text = json!({"memoryLimits": memory_limits, "processes": processes, "xids": xids}).to_string();
    let new = file.with_extension("json.new");
    fs::write(&new, text)?;
    Ok(fs::rename(new, file)?)
}
