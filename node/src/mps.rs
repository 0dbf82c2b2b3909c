//! NVIDIA's Multi-Process Service: a control daemon for each of policy's sets of GPUs, started, watched, and started again
//! when it has ended.
//!
//! A daemon outlives us, since its clients' work would end with it: one that runs already, with the same GPUs, is taken over.
//! Its folder, `<state folder>/mps/<number>`:
//!
//! ```text
//! gpus     the UUIDs of its GPUs
//! pipe/    its pipes and sockets, and its PID
//! log/     its logs
//! shm/     a tmpfs that it has as /dev/shm, and so have its clients
//! ```

use std::{
    fs,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use gpufence_cdi::inventory::Inventory;
use gpufence_grant::agent::MpsDaemon;
use gpufence_shim::{mps, policy::Policy};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
};

use crate::{nvml::Driver, processes, published::Published};

const PROGRAM: &str = "nvidia-cuda-mps-control";
/// What a daemon's pipe is called, to which clients come first.
const CONTROL: &str = "control";
const PID: &str = "nvidia-cuda-mps-control.pid";
/// How long a daemon has to make its pipe.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest time from one that ended to the next.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A set and its daemon, as it was last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The UUIDs of its GPUs, joined by commas.
    pub gpus: String,
    /// Whether clients can come.
    pub runs: bool,
    /// How often it was started by us.
    pub starts: u64,
}

/// What was last seen, for metrics.
pub type Shared = Arc<Mutex<Vec<Seen>>>;

/// What all sets have in common.
struct Node {
    driver: Arc<Driver>,
    published: Arc<Published>,
    seen: Shared,
    driver_root: PathBuf,
    exclusive: bool,
}

/// One set.
struct Set {
    number: usize,
    daemon: MpsDaemon,
}

/// A daemon that runs: ours, or one that ran before us.
enum Running {
    Own(Child),
    TakenOver(OwnedFd),
}

/// Takes over or starts the daemons, on threads of their own, and ends those that policy doesn't speak of any more.
pub fn start(
    policy: &Policy,
    inventory: &Inventory,
    driver: &Arc<Driver>,
    published: &Arc<Published>,
    seen: &Shared,
) -> Result<()> {
    let folder = mps::folder(policy);
    let sets = mps::sets(policy, inventory);
    for (names, gpus) in policy.mps.sets.iter().zip(&sets) {
        if names.len() != gpus.len() {
            tracing::warn!(set = names.join(", "), "this node hasn't all GPUs of a set in mps.sets");
        }
    }
    end_others(&folder, &sets, driver);
    let gpus = |set: &Vec<String>| Seen { gpus: set.join(","), runs: false, starts: 0 };
    *seen.lock().unwrap_or_else(PoisonError::into_inner) = sets.iter().map(gpus).collect();
    for (number, gpus) in sets.into_iter().enumerate().filter(|(_, gpus)| !gpus.is_empty()) {
        let node = Node {
            driver: driver.clone(),
            published: published.clone(),
            seen: seen.clone(),
            driver_root: policy.driver_root.clone(),
            exclusive: policy.mps.exclusive,
        };
        let set = Set { number, daemon: MpsDaemon { gpus, folder: folder.join(number.to_string()) } };
        std::thread::Builder::new().name(format!("mps-{number}")).spawn(move || node.keep(&set))?;
    }
    Ok(())
}

impl Node {
    /// Keeps a set's daemon running, for ever.
    fn keep(&self, set: &Set) {
        let gpus = set.daemon.gpus.join(",");
        let mut pause = Duration::from_secs(1);
        loop {
            let began = Instant::now();
            match self.run(set) {
                Ok(how) => tracing::error!(gpus, "the MPS daemon ended: {how}; its clients' work ends with it"),
                Err(error) => tracing::error!(gpus, "the MPS daemon doesn't run: {error:#}"),
            }
            self.tell(set, false);
            // One that ran well for a while may try at once.
            pause = if began.elapsed() > LONGEST_PAUSE { Duration::from_secs(1) } else { pause };
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Takes over or starts a daemon and waits for its end. Gives how it ended.
    fn run(&self, set: &Set) -> Result<String> {
        let gpus = set.daemon.gpus.join(",");
        let mut running = match running(&set.daemon.folder)? {
            Some((pid, handle)) => {
                tracing::info!(gpus, pid, "an MPS daemon was taken over");
                Running::TakenOver(handle)
            }
            None => Running::Own(self.start(set)?),
        };
        let deadline = Instant::now() + PATIENCE;
        while !set.daemon.folder.join("pipe").join(CONTROL).exists() {
            if let Running::Own(child) = &mut running
                && let Some(status) = child.try_wait()?
            {
                bail!("it ended at once, {status}; see {}", set.daemon.folder.join("log").display());
            }
            if Instant::now() > deadline {
                if let Running::Own(child) = &mut running {
                    let _ = child.kill();
                    let _ = child.wait();
                }
                bail!("it made no pipe within {PATIENCE:?}; see {}", set.daemon.folder.join("log").display());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.tell(set, true);
        Ok(match running {
            Running::Own(mut child) => child.wait()?.to_string(),
            Running::TakenOver(handle) => {
                poll(&mut [PollFd::new(handle.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
                "it was not our child, so how isn't known".into()
            }
        })
    }

    fn start(&self, set: &Set) -> Result<Child> {
        let program = program(&self.driver_root)?;
        let MpsDaemon { gpus, folder } = &set.daemon;
        if self.exclusive {
            for gpu in gpus.iter().filter(|gpu| gpu.starts_with("GPU-")) {
                self.driver.set_exclusive(gpu, true)?;
            }
        }
        prepare(folder, &gpus.join(","))?;
        let mut command = Command::new(&program);
        command
            .arg("-f")
            .env_clear()
            .env("PATH", path(&program))
            .env("CUDA_VISIBLE_DEVICES", gpus.join(","))
            .env("CUDA_MPS_PIPE_DIRECTORY", folder.join("pipe"))
            .env("CUDA_MPS_LOG_DIRECTORY", folder.join("log"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if self.driver_root != Path::new("/") {
            command.env("LD_LIBRARY_PATH", libraries(&self.driver_root));
        }
        let child = with_shared_memory(&mut command, &folder.join("shm"))
            .with_context(|| format!("start {}", program.display()))?;
        tracing::info!(gpus = gpus.join(","), pid = child.id(), "an MPS daemon was started");
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen[set.number].starts += 1;
        Ok(child)
    }

    /// Has everybody know whether clients can come.
    fn tell(&self, set: &Set, runs: bool) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)[set.number].runs = runs;
        let told = self.published.change(|state| {
            state.mps.retain(|daemon| daemon.folder != set.daemon.folder);
            state.mps.extend(runs.then(|| set.daemon.clone()));
        });
        if let Err(error) = told {
            tracing::error!("{error:#}");
        }
    }
}

/// Ends daemons of sets that policy doesn't have, or has with other GPUs.
fn end_others(folder: &Path, sets: &[Vec<String>], driver: &Driver) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let folder = entry.path();
        let was = fs::read_to_string(folder.join("gpus")).unwrap_or_default();
        let number = entry.file_name().to_str().and_then(|name| name.parse::<usize>().ok());
        if number.and_then(|number| sets.get(number)).is_some_and(|gpus| gpus.join(",") == was) {
            continue;
        }
        if let Err(error) = end(&folder, &was, driver) {
            tracing::error!(folder = %folder.display(), "an MPS daemon that policy has no more can't be ended: {error:#}");
        }
    }
}

fn end(folder: &Path, gpus: &str, driver: &Driver) -> Result<()> {
    if let Some((pid, handle)) = running(folder)? {
        tracing::warn!(gpus, pid, "ending an MPS daemon that policy has no more, and its clients' work");
        processes::end(&handle)?;
        poll(&mut [PollFd::new(handle.as_fd(), PollFlags::POLLIN)], PollTimeout::from(10_000_u16))?;
    }
    for gpu in gpus.split(',').filter(|gpu| gpu.starts_with("GPU-")) {
        if let Err(error) = driver.set_exclusive(gpu, false) {
            tracing::warn!(gpu, "its compute mode stays: {error}");
        }
    }
    let _ = umount2(&folder.join("shm"), MntFlags::MNT_DETACH);
    fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))
}

/// The daemon of a folder, if it runs. Its PID may be another's by now, so that one has to say the same folder.
fn running(folder: &Path) -> Result<Option<(u32, OwnedFd)>> {
    let pipe = folder.join("pipe");
    let Ok(text) = fs::read_to_string(pipe.join(PID)) else { return Ok(None) };
    let Ok(pid) = text.trim().parse::<u32>() else { return Ok(None) };
    let Some(handle) = processes::open(pid)? else { return Ok(None) };
    let wanted = format!("CUDA_MPS_PIPE_DIRECTORY={}", pipe.display());
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let is_ours = environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes());
    Ok((is_ours && !processes::has_ended(&handle)?).then_some((pid, handle)))
}

/// Makes the folder anew, but for shared memory that is mounted already.
fn prepare(folder: &Path, gpus: &str) -> Result<()> {
    let make = |name: &str, mode: u32| -> Result<PathBuf> {
        let path = folder.join(name);
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        Ok(path)
    };
    // What an ended daemon left would be taken for the new one's.
    let _ = fs::remove_dir_all(folder.join("pipe"));
    // Clients of every user write into them.
    make("pipe", 0o1777)?;
    make("log", 0o755)?;
    let shm = make("shm", 0o1777)?;
    if fs::metadata(&shm)?.dev() == fs::metadata(folder)?.dev() {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("gpufence-mps"), &shm, Some("tmpfs"), flags, Some("mode=1777"))
            .with_context(|| format!("mount a tmpfs at {}", shm.display()))?;
    }
    fs::write(folder.join("gpus"), gpus).with_context(|| format!("write {}", folder.join("gpus").display()))
}

/// Starts a command whose /dev/shm is another folder.
fn with_shared_memory(command: &mut Command, shm: &Path) -> Result<Child> {
    // A process begins in the mount namespace of the thread that starts it.
    let start = || -> Result<Child> {
        unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace")?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none).context("make / a slave")?;
        mount(Some(shm), "/dev/shm", none, MsFlags::MS_BIND, none).context("mount /dev/shm")?;
        Ok(command.spawn()?)
    };
    std::thread::scope(|scope| scope.spawn(start).join())
        .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread that starts it panicked")))
}

/// Where the driver root has it.
fn program(driver_root: &Path) -> Result<PathBuf> {
    let folders = ["usr/bin", "bin", "usr/local/bin", "usr/local/nvidia/bin"];
    let mut candidates = folders.iter().map(|folder| driver_root.join(folder).join(PROGRAM));
    candidates
        .find(|path| path.is_file())
        .with_context(|| format!("{} has no {PROGRAM}; install the driver's compute utilities", driver_root.display()))
}

/// A PATH with the program's folder first, where it finds nvidia-cuda-mps-server.
fn path(program: &Path) -> String {
    let own = program.parent().map(|folder| folder.display().to_string()).unwrap_or_default();
    format!("{own}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
}

/// The driver's library folders of a root that isn't the host's.
fn libraries(driver_root: &Path) -> String {
    let folders = ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib"];
    folders.map(|folder| driver_root.join(folder).display().to_string()).join(":")
}
