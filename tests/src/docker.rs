//! A Docker of our own, and Podman, beside a host's containerd: on the same simulated machine and with the same policy.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{host::Host, programs};

/// A Docker under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Debian 12's own, 20.10.
    Docker20,
    /// Debian 13's, 26.1.
    Docker26,
    /// Debian's newest, 28.5 or later.
    Docker28,
}

impl Release {
    fn name(self) -> Option<&'static str> {
        match self {
            Self::Docker20 => None,
            Self::Docker26 => Some("docker-26"),
            Self::Docker28 => Some("docker-28"),
        }
    }

    /// Whether its `run` takes `--annotation`, API 1.43; from then on it reads CDI specs as well.
    pub fn has_annotations(self) -> bool {
        self != Self::Docker20
    }
}

/// A dockerd that runs. It ends, with all that it started, when this is dropped.
pub struct Docker {
    folder: PathBuf,
    path: std::ffi::OsString,
    process: Child,
}

/// What Docker is told of runtimes: `gpufence`, and `gpu0` and `gpu1` with fixed grants.
fn configuration(host: &Host, release: Release, default_runtime: &str) -> Result<String> {
    let runtime = programs::built()?.join("gpufence-runtime");
    let fixed = |grant: &str| serde_json::json!({"path": runtime, "runtimeArgs": ["--grant", grant]});
    let mut configuration = serde_json::json!({
        "runtimes": {
            "gpufence": {"path": runtime},
            "gpu0": fixed("0=8GiB@50%"),
            "gpu1": fixed("1=16GiB"),
        },
        "default-runtime": default_runtime,
    });
    if release.has_annotations() {
        configuration["cdi-spec-dirs"] = serde_json::json!([host.cdi_folder()]);
        configuration["features"] = serde_json::json!({"cdi": true});
    }
    Ok(configuration.to_string())
}

impl Docker {
    /// Starts one on the machine of `host`, and imports the test image as `plain` and, asking for all GPUs, as `greedy`.
    pub fn start(host: &Host, release: Release, default_runtime: &str) -> Result<Self> {
        let folder = host.folder().join("docker");
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("daemon.json"), configuration(host, release, default_runtime)?)?;
        let engines = programs::engines()?;
        let own: Vec<PathBuf> = release.name().map_or_else(Vec::new, |name| {
            ["usr/sbin", "usr/bin", "usr/libexec/docker"].map(|part| engines.join(name).join(part)).to_vec()
        });
        // Debian's own before whatever else the machine has under /usr/local.
        let system = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
        let path = std::env::join_paths(own.into_iter().chain(system))?;
        let log = fs::File::create(folder.join("dockerd.log"))?;
        let process = Command::new(which("dockerd", &path)?)
            .args(["--bridge=none", "--iptables=false", "--data-root"])
            .arg(folder.join("data"))
            .arg("--exec-root")
            .arg(folder.join("exec"))
            .arg("--pidfile")
            .arg(folder.join("pid"))
            .arg("--host")
            .arg(format!("unix://{}", folder.join("docker.sock").display()))
            .arg("--config-file")
            .arg(folder.join("daemon.json"))
            .env("PATH", &path)
            .env("GPUFENCE_CONFIG", host.policy())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .context("start dockerd; run tests/setup.sh tests")?;
        let mut docker = Self { folder, path, process };
        docker.wait_until_it_answers()?;
        docker.import(host, "plain", None)?;
        docker.import(host, "greedy", Some("ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=all"))?;
        Ok(docker)
    }

    fn wait_until_it_answers(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(40);
        while !self.command(["version"])?.output()?.status.success() {
            if self.process.try_wait()?.is_some() || Instant::now() > deadline {
                bail!("dockerd does not answer: {}", fs::read_to_string(self.folder.join("dockerd.log"))?);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn import(&self, host: &Host, name: &str, change: Option<&str>) -> Result<()> {
        let mut command = self.command(["import"])?;
        if let Some(change) = change {
            command.args(["--change", change]);
        }
        import_root(command.arg("-").arg(name), &host.rootfs())
    }

    /// A call of its own client.
    pub fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<Command> {
        let mut command = Command::new(which("docker", &self.path)?);
        command
            .arg("--host")
            .arg(format!("unix://{}", self.folder.join("docker.sock").display()))
            .args(arguments)
            .env("HOME", &self.folder)
            .env_remove("DOCKER_HOST")
            .stdin(Stdio::null());
        Ok(command)
    }

    /// `docker run --rm` on the host's network.
    pub fn run(&self, flags: &[&str], image: &str, command: &[&str]) -> Result<Output> {
        let mut call = self.command(["run", "--rm", "--network", "host"])?;
        Ok(call.args(flags).arg(image).args(command).output()?)
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        if let Ok(list) = self.command(["ps", "--all", "--quiet"]).and_then(|mut command| Ok(command.output()?)) {
            for id in String::from_utf8_lossy(&list.stdout).lines() {
                let _ = self.command(["rm", "--force", id]).map(|mut command| command.output());
            }
        }
        let pid = nix::unistd::Pid::from_raw(self.process.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let deadline = Instant::now() + Duration::from_secs(15);
        while self.process.try_wait().is_ok_and(|status| status.is_none()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
        // Its network namespaces stay mounted.
        for mount in gpufence_cli::engine::mounts_below(&self.folder).iter().rev() {
            let _ = nix::mount::umount2(mount, nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

/// Podman with our runtime, its storage in the host's folder.
pub struct Podman {
    folder: PathBuf,
    runtime: PathBuf,
    cdi_folder: PathBuf,
    configuration: Option<PathBuf>,
    /// In a mount namespace with cgroup v1 alone, which crun needs.
    v1_alone: bool,
}

impl Podman {
    /// Sets one up on the machine of `host`, and imports the images as Docker's are.
    pub fn new(host: &Host, v1_alone: bool) -> Result<Self> {
        let folder = host.folder().join("podman");
        fs::create_dir_all(&folder)?;
        // Podman starts runtimes with no environment, and its clean-up drops the flags that `run` was given.
        let runtime = folder.join("gpufence-runtime");
        let own = programs::built()?.join("gpufence-runtime");
        fs::write(
            &runtime,
            format!("#!/bin/sh\nexec {} --policy {} \"$@\"\n", own.display(), host.policy().display()),
        )?;
        fs::set_permissions(&runtime, fs::Permissions::from_mode(0o755))?;
        let cdi_folder = host.cdi_folder();
        fs::create_dir_all(&cdi_folder)?;
        let podman = Self { folder, runtime, cdi_folder, configuration: None, v1_alone };
        import_root(podman.command(["import"]).args(["-", "plain"]), &host.rootfs())?;
        let change = ["--change", "ENV NVIDIA_VISIBLE_DEVICES=all", "--change", "ENV NVIDIA_DRIVER_CAPABILITIES=all"];
        import_root(podman.command(["import"]).args(change).args(["-", "greedy"]), &host.rootfs())?;
        Ok(podman)
    }

    /// Another one on the same storage, with another runtime.
    pub fn with_runtime(host: &Host, runtime: &str) -> Result<Self> {
        Ok(Self { runtime: runtime.into(), ..Self::new(host, false)? })
    }

    /// With this file as its containers.conf.
    #[must_use]
    pub fn configured_by(self, file: &Path) -> Self {
        Self { configuration: Some(file.to_owned()), ..self }
    }

    /// Its runtime.
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        // CDI specs are read from a fixed folder, which is ours in a mount namespace of our own.
        let cdi = format!("mkdir -p /run/cdi && mount --bind {} /run/cdi", self.cdi_folder.display());
        let cgroups = "{ ! mountpoint -q /sys/fs/cgroup/unified || umount /sys/fs/cgroup/unified; }";
        let cgroups = if self.v1_alone { cgroups } else { "true" };
        let mut command = Command::new("unshare");
        let script = format!("mount --make-rprivate / && {cdi} && {cgroups} && exec \"$@\"");
        command.args(["--mount", "sh", "-c", &script, "sh", "podman"]);
        if let Some(file) = &self.configuration {
            command.env("CONTAINERS_CONF", file);
        }
        let root = ["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "none"];
        command.arg("--runtime").arg(&self.runtime).arg("--root").arg(self.folder.join("root"));
        command.arg("--runroot").arg(self.folder.join("run")).arg("--tmpdir").arg(self.folder.join("tmp")).args(root);
        command.args(arguments).stdin(Stdio::null());
        command
    }

    /// `podman run --rm` on the host's network. The limits that Podman would raise need a right that a test may lack.
    pub fn run(&self, flags: &[&str], image: &str, command: &[&str]) -> Result<Output> {
        let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"];
        let mut call = self.command(["run", "--rm", "--network", "host"]);
        Ok(call.args(limits).args(flags).arg(image).args(command).output()?)
    }
}

/// Imports a folder as an image's only layer.
fn import_root(command: &mut Command, rootfs: &Path) -> Result<()> {
    let mut tar = Command::new("tar").arg("-C").arg(rootfs).args(["-c", "."]).stdout(Stdio::piped()).spawn()?;
    let archive = tar.stdout.take().context("tar has an output")?;
    let output = command.stdin(archive).output()?;
    tar.wait()?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

fn which(name: &str, path: &OsStr) -> Result<PathBuf> {
    let found = std::env::split_paths(path).map(|folder| folder.join(name)).find(|path| path.is_file());
    found.with_context(|| format!("no {name}; run tests/setup.sh tests"))
}
