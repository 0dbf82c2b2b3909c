//! A containerd of our own, in a folder of its own and with nothing of the system's: for the demo, the end-to-end tests
//! and the benchmarks.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// How a containerd is set up.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Its folder: configuration, state, socket, log.
    pub folder: PathBuf,
    /// The folder of `containerd` and `ctr`; empty for those on PATH.
    pub programs: PathBuf,
    /// The folder of `containerd-shim-gpufence-v1`.
    pub shims: PathBuf,
    /// Our policy file, for GPUFENCE_CONFIG.
    pub policy: PathBuf,
    /// What else stands in its configuration, in TOML; nothing means no CRI.
    pub configuration: Option<String>,
    /// The cgroup tree that it finds.
    pub cgroups: Cgroups,
}

/// Which cgroup tree an engine finds at `/sys/fs/cgroup`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cgroups {
    /// The machine's own.
    #[default]
    Host,
    /// v1 alone, where the machine has v2 mounted beside it.
    V1,
    /// v2 alone.
    V2,
}

impl Cgroups {
    /// What makes it so in a mount namespace of one's own, as shell commands.
    fn script(self) -> Option<&'static str> {
        match self {
            Self::Host => None,
            Self::V1 => Some("{ ! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified; }"),
            Self::V2 => Some("umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup"),
        }
    }
}

/// A containerd that runs. It ends, with all that it started, when this is dropped.
#[derive(Debug)]
pub struct Containerd {
    settings: Settings,
    process: Option<Child>,
}

impl Settings {
    /// The usual ones, in `folder`.
    pub fn new(folder: &Path, shims: &Path, policy: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            programs: PathBuf::new(),
            shims: shims.to_owned(),
            policy: policy.to_owned(),
            configuration: None,
            cgroups: Cgroups::Host,
        }
    }
}

impl Containerd {
    /// Starts one and waits until it answers.
    pub fn start(settings: Settings) -> Result<Self> {
        let folder = &settings.folder;
        let plugins = settings
            .configuration
            .clone()
            .unwrap_or_else(|| "version = 2\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n".into());
        // Top-level keys stand before the first table.
        let configuration = format!(
            "root = \"{0}/root\"\nstate = \"{0}/state\"\n{plugins}\n[grpc]\naddress = \"{0}/containerd.sock\"\n[ttrpc]\naddress = \"{0}/containerd.sock.ttrpc\"\n",
            folder.display()
        );
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        fs::write(folder.join("config.toml"), configuration)?;
        let mut containerd = Self { settings, process: None };
        containerd.run()?;
        Ok(containerd)
    }

    /// Starts it again after [`Self::kill`].
    pub fn run(&mut self) -> Result<()> {
        let Settings { folder, programs, shims, policy, cgroups, .. } = &self.settings;
        let program = if programs.as_os_str().is_empty() { "containerd".into() } else { programs.join("containerd") };
        let mut command = if let Some(script) = cgroups.script() {
            let script = format!("mount --make-rprivate / && {script} && exec \"$@\"");
            let mut command = Command::new("unshare");
            command.args(["--mount", "sh", "-c", &script, "sh"]).arg(&program);
            command
        } else {
            Command::new(&program)
        };
        let log = fs::OpenOptions::new().create(true).append(true).open(folder.join("containerd.log"))?;
        let system = std::env::var_os("PATH").unwrap_or_default();
        let path: Vec<PathBuf> =
            [programs.clone(), shims.clone()].into_iter().filter(|folder| !folder.as_os_str().is_empty()).collect();
        let path = std::env::join_paths(path.into_iter().chain(std::env::split_paths(&system)))?;
        command
            .arg("--config")
            .arg(folder.join("config.toml"))
            .env("PATH", path)
            .env("GPUFENCE_CONFIG", policy)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // A Ctrl-C is for us, who then clean up.
            .process_group(0);
        let started = command.spawn().context("start containerd; apt-get install containerd runc")?;
        self.process = Some(started);
        self.wait_until_it_answers()
    }

    fn wait_until_it_answers(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let ended = self.process.as_mut().and_then(|process| process.try_wait().ok().flatten());
            if UnixStream::connect(self.socket()).is_ok()
                && self.ctr(["version"]).output().is_ok_and(|output| output.status.success())
            {
                return Ok(());
            }
            if ended.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(self.settings.folder.join("containerd.log")).unwrap_or_default();
                let last: Vec<&str> = log.lines().rev().take(5).collect();
                bail!("containerd does not answer: {}", last.into_iter().rev().collect::<Vec<_>>().join("\n"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.settings.folder.join("containerd.sock")
    }

    /// Its process id.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Child::id)
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// A call of its own client.
    pub fn ctr<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let programs = &self.settings.programs;
        let program = if programs.as_os_str().is_empty() { "ctr".into() } else { programs.join("ctr") };
        let mut command = Command::new(program);
        command.arg("--address").arg(self.socket()).args(arguments).stdin(Stdio::null()).process_group(0);
        command
    }

    /// Calls its own client and gives what it printed.
    pub fn run_ctr<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<String> {
        let mut command = self.ctr(arguments);
        let output = command.output().with_context(|| format!("run {command:?}"))?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Ends it at once, as a crash would: its containers and their shims live on.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Ends every container and then containerd.
    fn tear_down(&mut self) {
        for namespace in self.run_ctr(["namespaces", "ls", "-q"]).unwrap_or_default().lines() {
            for task in self.run_ctr(["-n", namespace, "tasks", "ls", "-q"]).unwrap_or_default().lines() {
                let _ = self.run_ctr(["-n", namespace, "tasks", "rm", "-f", task]);
            }
        }
        if let Some(mut process) = self.process.take() {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(process.id().cast_signed()),
                nix::sys::signal::Signal::SIGTERM,
            );
            let deadline = Instant::now() + Duration::from_secs(10);
            while process.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = process.kill();
            let _ = process.wait();
        }
        end_shims(&self.socket());
        for mount in mounts_below(&self.settings.folder).iter().rev() {
            let _ = nix::mount::umount2(mount, nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        self.tear_down();
    }
}

/// Shims that were started for this containerd, as their command lines say.
pub fn shims_of(socket: &Path) -> Vec<u32> {
    let socket = socket.as_os_str().as_encoded_bytes();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
            let shim = words.first().is_some_and(|program| program.windows(16).any(|part| part == b"containerd-shim-"));
            shim && words.contains(&socket)
        })
        .collect()
}

fn end_shims(socket: &Path) {
    for pid in shims_of(socket) {
        let _ =
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::Signal::SIGKILL);
    }
}

/// Mount points below a folder, each before those inside it.
pub fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(folder) && point != folder).collect()
}
