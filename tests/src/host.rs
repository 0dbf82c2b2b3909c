//! A simulated machine with a containerd of its own, which is gone when it is dropped.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use gpufence_cli::engine::{Cgroups, Containerd, Settings};
use gpufence_grant::signature::PublicKey;
use tempfile::TempDir;

use crate::{
    programs::{self, Engine},
    seen::Seen,
    simulated::{self, Description},
};

/// Our runtime type.
pub const GPUFENCE: &str = "io.containerd.gpufence.v1";
/// containerd's own, to compare with.
pub const RUNC: &str = "io.containerd.runc.v2";

/// How a host is to be.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Its containerd.
    pub engine: Engine,
    /// Its cgroup tree.
    pub cgroups: Cgroups,
    /// Its GPUs, as [`Description::parse`] reads them.
    pub machine: String,
    /// What the policy says beside the folders.
    pub policy: &'static str,
    /// Whether containerd serves CRI.
    pub cri: bool,
    /// More of containerd's configuration for CRI: runtimes, as [`crate::cri::configuration`] writes them.
    pub cri_runtimes: Vec<crate::cri::RuntimeEntry>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            engine: Engine::Containerd16,
            cgroups: Cgroups::Host,
            machine: "gpus=2".into(),
            policy: "",
            cri: false,
            cri_runtimes: Vec::new(),
        }
    }
}

/// The machine.
pub struct Host {
    /// Dropped first: what runs on the machine ends before its folder goes.
    pub containerd: Containerd,
    /// How its GPUs are.
    pub description: Description,
    folder: TempDir,
}

impl Host {
    /// Builds and starts it.
    pub fn start(plan: &Plan) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("gpufence-test-").tempdir_in("/run")?;
        let description = Description::parse(&[&plan.machine])?;
        let root = folder.path().join("driver-root");
        simulated::build(&description, &root)?;
        let policy = folder.path().join("policy.toml");
        let text = format!(
            "driver_root = {root:?}\nstate_dir = {:?}\nstage_dir = {:?}\nkeys_dir = {:?}\n{}\n",
            folder.path().join("state"),
            folder.path().join("stage"),
            folder.path().join("keys.d"),
            plan.policy
        );
        fs::write(&policy, text)?;
        let image = programs::test_image()?;
        image.unpack(&folder.path().join("rootfs"))?;
        let mut settings = Settings::new(&folder.path().join("containerd"), &programs::built()?, &policy);
        settings.programs = plan.engine.folder()?;
        settings.cgroups = plan.cgroups;
        if plan.cri {
            settings.configuration =
                Some(crate::cri::configuration(plan.engine, &plan.cri_runtimes, &folder.path().join("cdi")));
        }
        let containerd = Containerd::start(settings)?;
        if plan.cri {
            let archive = folder.path().join("image.tar");
            image.write(&archive)?;
            containerd.run_ctr([
                Path::new("-n"),
                Path::new("k8s.io"),
                Path::new("images"),
                Path::new("import"),
                &archive,
            ])?;
        }
        Ok(Self { containerd, description, folder })
    }

    /// The machine's folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where our containers' folders are.
    pub fn container_folders(&self) -> PathBuf {
        self.folder().join("state/containers")
    }

    /// The driver root.
    pub fn driver_root(&self) -> PathBuf {
        self.folder().join("driver-root")
    }

    /// The root that containers run on.
    pub fn rootfs(&self) -> PathBuf {
        self.folder().join("rootfs")
    }

    /// Where CDI specs are, for engines that read them by themselves.
    pub fn cdi_folder(&self) -> PathBuf {
        self.folder().join("cdi")
    }

    /// Writes the machine's CDI spec there with our command.
    pub fn generate_cdi(&self) -> Result<()> {
        let output = Command::new(programs::built()?.join("gpufence"))
            .args(["cdi", "generate", "--file"])
            .arg(self.cdi_folder().join("gpufence.json"))
            .env("GPUFENCE_CONFIG", self.policy())
            .output()?;
        anyhow::ensure!(output.status.success(), "{output:?}");
        Ok(())
    }

    /// Has NVML tell what the create path doesn't ask it: MIG instances' UUIDs and how much memory there is.
    pub fn take_inventory_with_nvml(&self) -> Result<()> {
        let mut call = Command::new(programs::built()?.join("gpufence"));
        let output = call.args(["inventory", "--nvml"]).env("GPUFENCE_CONFIG", self.policy()).output()?;
        anyhow::ensure!(output.status.success(), "{output:?}");
        Ok(())
    }

    /// Has the node believe these keys, and no others.
    pub fn accept_keys(&self, keys: &[&PublicKey]) -> Result<()> {
        let folder = self.folder().join("keys.d");
        fs::create_dir_all(&folder)?;
        let text: String = keys.iter().map(|key| format!("{key}\n")).collect();
        Ok(fs::write(folder.join("keys.pub"), text)?)
    }

    /// The policy file.
    pub fn policy(&self) -> PathBuf {
        self.folder().join("policy.toml")
    }

    /// `ctr run` of a command on the shared root, ready for more.
    pub fn run(&self, runtime: &str, id: &str, flags: &[&str], command: &[&str]) -> Command {
        self.run_on(&self.rootfs(), runtime, id, flags, command)
    }

    /// The same on another root.
    pub fn run_on(&self, rootfs: &Path, runtime: &str, id: &str, flags: &[&str], command: &[&str]) -> Command {
        let mut call = self.containerd.ctr(["run", "--runtime", runtime]);
        // A pure v2 tree beside v1 has no cpu controller, and ctr sets a share by default.
        if self.containerd.settings().cgroups == Cgroups::V2 {
            call.args(["--cpu-shares", "0"]);
        }
        call.args(flags).arg("--rootfs").arg(rootfs).arg(id).args(command);
        call
    }

    /// Runs a container to its end and gives what `ctr` said.
    pub fn output(&self, runtime: &str, flags: &[&str], command: &[&str]) -> Result<Output> {
        let flags = [&["--rm"], flags].concat();
        self.run(runtime, &unique("c"), &flags, command).output().context("run ctr")
    }

    /// Runs our probe in a container and gives what it saw.
    pub fn probe(&self, flags: &[&str]) -> Result<Seen> {
        Seen::from_output(&self.output(GPUFENCE, flags, &crate::seen::PROBE)?)
    }
}

/// A name that no other test of this machine has.
pub fn unique(start: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{start}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Waits until something is so; `false` after twenty seconds.
pub fn until(mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        if condition() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    false
}
