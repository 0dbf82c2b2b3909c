//! A container, and how one is made: mounts, enforcement, runc.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use containerd_shim::{api::CreateTaskRequest, protos::types::mount::Mount};
use gpufence_shim::{
    bundle::{Bundle, Outcome},
    policy::Policy,
};
use serde_json::Value;

use crate::{
    Failure,
    cgroup::Cgroup,
    console::ConsoleSocket,
    delete::unmount,
    options::Options,
    process::{Exit, Process},
    reaper::Reaper,
    runtime::{Descriptors, Runtime, RuntimeError},
    stdio::{Addresses, Owner},
};

/// Whose container it is and what holds for all of them.
#[derive(Clone)]
pub struct Surroundings {
    pub namespace: String,
    pub policy: Arc<Policy>,
    pub reaper: Reaper,
}

/// A container that the runtime has made.
pub struct Container {
    pub id: String,
    pub bundle: PathBuf,
    pub runtime: Runtime,
    pub options: Options,
    /// What its processes are held to.
    pub outcome: Outcome,
    pub init: Arc<Process>,
    execs: Mutex<HashMap<String, Arc<Process>>>,
    cgroup: Mutex<Option<Cgroup>>,
    oom_told: AtomicU64,
    init_exit: Mutex<Option<Exit>>,
    restore_from: Option<String>,
    surroundings: Surroundings,
}

impl Container {
    /// Makes a container up to runc's `create`. On an error nothing of it is left.
    pub async fn create(request: &CreateTaskRequest, surroundings: &Surroundings) -> Result<Self, Failure> {
        let options = Options::decode(request.options.as_ref())?;
        let bundle = PathBuf::from(&request.bundle);
        let policy = &surroundings.policy;
        let runtime = Runtime {
            binary: options.runtime(policy)?,
            root: options.runtime_root(&surroundings.namespace),
            systemd_cgroup: options.systemd_cgroup,
            timeout: Duration::from_secs(policy.runtime_timeout_seconds),
            reaper: surroundings.reaper.clone(),
        };
        options.save(&bundle)?;
        let rootfs = bundle.join("rootfs");
        let made = Self::make(request, surroundings, options, bundle, runtime, &rootfs).await;
        if made.is_err() {
            if !request.rootfs.is_empty() {
                unmount(&rootfs);
            }
            if let Err(error) = gpufence_shim::state::clean_up(policy, &surroundings.namespace, &request.id) {
                log::warn!("clean up {}: {error}", request.id);
            }
        }
        made
    }

    async fn make(
        request: &CreateTaskRequest,
        surroundings: &Surroundings,
        options: Options,
        bundle: PathBuf,
        runtime: Runtime,
        rootfs: &Path,
    ) -> Result<Self, Failure> {
        if !request.rootfs.is_empty() {
            mount_all(request.rootfs.clone(), rootfs.to_owned()).await?;
        }
        let outcome = enforce(request, surroundings, rootfs).await?;
        let addresses = Addresses {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        let container = Self {
            id: request.id.clone(),
            bundle,
            runtime,
            options,
            outcome,
            init: Process::new(String::new(), addresses, None),
            execs: Mutex::default(),
            cgroup: Mutex::default(),
            oom_told: AtomicU64::new(0),
            init_exit: Mutex::default(),
            restore_from: Some(request.checkpoint.clone()).filter(|path| !path.is_empty()),
            surroundings: surroundings.clone(),
        };
        // A checkpoint is restored when the task is started; there is nothing to create.
        if container.restore_from.is_none() {
            container.run_init("create").await.map_err(|error| format!("OCI runtime create failed: {error}"))?;
        }
        Ok(container)
    }

    fn owner(&self) -> Owner<'_> {
        Owner {
            namespace: &self.surroundings.namespace,
            id: &self.id,
            uid: self.options.io_uid,
            gid: self.options.io_gid,
        }
    }

    /// Runs runc's `create` or `restore`, and finds the process that it made.
    async fn run_init(&self, verb: &str) -> Result<(), Failure> {
        let pid_file = self.bundle.join("init.pid");
        let mut arguments: Vec<OsString> = vec![verb.into(), "--bundle".into(), self.bundle.clone().into()];
        if let Some(image) = &self.restore_from {
            let work = if self.options.criu_work_path.is_empty() {
                self.bundle.join("work")
            } else {
                self.options.criu_work_path.clone().into()
            };
            fs::create_dir_all(&work)?;
            arguments.extend([
                "--image-path".into(),
                image.into(),
                "--work-path".into(),
                work.into(),
                "--detach".into(),
            ]);
        }
        if self.options.no_pivot_root {
            arguments.push("--no-pivot".into());
        }
        if self.options.no_new_keyring && self.restore_from.is_none() {
            arguments.push("--no-new-keyring".into());
        }
        self.run_process(&self.init, arguments, pid_file).await?;
        *lock(&self.cgroup) = Cgroup::of(self.init.pid());
        Ok(())
    }

    /// Runs a command of the runtime that makes a process with stdio. No exit of it is lost meanwhile: the caller
    /// holds a birth open.
    async fn run_process(
        &self,
        process: &Process,
        mut arguments: Vec<OsString>,
        pid_file: PathBuf,
    ) -> Result<(), Failure> {
        let addresses = &process.addresses;
        arguments.extend(["--pid-file".into(), pid_file.clone().into()]);
        let console = if addresses.terminal { Some(ConsoleSocket::new()?) } else { None };
        if let Some(console) = &console {
            arguments.extend(["--console-socket".into(), console.path().into()]);
        }
        arguments.push(self.id.clone().into());
        let mut prepared = addresses.prepare(&self.owner(), &self.surroundings.reaper).await?;
        let descriptors = std::mem::take(&mut prepared.descriptors);
        self.runtime.run(&self.bundle, &arguments, descriptors).await?;
        let connected = async {
            let terminal = match &console {
                Some(console) => Some(console.receive().await?),
                None => None,
            };
            let io = addresses.copy(prepared, terminal.as_ref())?;
            let pid = fs::read_to_string(&pid_file)?.trim().parse()?;
            process.made(pid, terminal, io);
            Ok::<_, Failure>(())
        };
        let connected = connected.await;
        if connected.is_err() && process.exec_id.is_empty() {
            self.delete_by_force().await;
        }
        connected
    }

    /// Starts init: runc's `start`, or the restore of a checkpoint.
    pub async fn start_init(&self) -> Result<(), Failure> {
        if self.restore_from.is_some() {
            return self.run_init("restore").await;
        }
        Ok(self.call(&["start", &self.id]).await?)
    }

    /// Starts a process that exec has added.
    pub async fn start_exec(&self, process: &Process) -> Result<(), Failure> {
        let file = |ending: &str| self.bundle.join(format!("exec-{}.{ending}", process.exec_id));
        let spec_file = file("json");
        fs::write(&spec_file, serde_json::to_vec(process.spec.as_ref().unwrap_or(&Value::Null))?)?;
        let arguments = vec!["exec".into(), "--process".into(), spec_file.clone().into(), "--detach".into()];
        let started = self.run_process(process, arguments, file("pid")).await;
        for leftover in [spec_file, file("pid")] {
            let _ = fs::remove_file(leftover);
        }
        started
    }

    /// A call of the runtime with no stdio.
    pub async fn call(&self, arguments: &[&str]) -> Result<(), RuntimeError> {
        self.runtime.run(&self.bundle, arguments, Descriptors::default()).await
    }

    async fn delete_by_force(&self) {
        if let Err(error) = self.call(&["delete", "--force", &self.id]).await {
            log::warn!("delete {}: {error}", self.id);
        }
    }

    /// Removes what runc, the mounts and we have of it.
    pub async fn remove(&self) -> Result<(), Failure> {
        if let Err(error) = self.call(&["delete", &self.id]).await {
            // One that runc doesn't know any more is deleted.
            log::debug!("delete {}: {error}", self.id);
            self.call(&["delete", "--force", &self.id]).await?;
        }
        self.init.shut_down_io().await;
        unmount(&self.bundle.join("rootfs"));
        gpufence_shim::state::clean_up(&self.surroundings.policy, &self.surroundings.namespace, &self.id)?;
        Ok(())
    }

    pub fn execs(&self) -> MutexGuard<'_, HashMap<String, Arc<Process>>> {
        lock(&self.execs)
    }

    pub fn has_running_execs(&self) -> bool {
        self.execs().values().any(|process| process.is_alive())
    }

    pub fn cgroup(&self) -> Option<Cgroup> {
        lock(&self.cgroup).clone()
    }

    /// Whether the kernel ended something here since this was last asked.
    pub fn new_oom_kill(&self) -> bool {
        let kills = self.cgroup().map_or(0, |cgroup| cgroup.oom_kills());
        self.oom_told.fetch_max(kills, Ordering::Relaxed) < kills
    }

    /// Keeps init's exit until its execs' have been told.
    pub fn keep_init_exit(&self, exit: Exit) {
        *lock(&self.init_exit) = Some(exit);
    }

    pub fn take_init_exit(&self) -> Option<Exit> {
        lock(&self.init_exit).take()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Enforces the grant on a thread of its own: a stage that has to be built takes its time, and others are served
/// meanwhile.
async fn enforce(request: &CreateTaskRequest, surroundings: &Surroundings, rootfs: &Path) -> Result<Outcome, Failure> {
    let (policy, namespace) = (surroundings.policy.clone(), surroundings.namespace.clone());
    let (bundle, id) = (PathBuf::from(&request.bundle), request.id.clone());
    let rootfs = (!request.rootfs.is_empty()).then(|| rootfs.to_owned());
    let restored = !request.checkpoint.is_empty();
    let enforce = move || {
        let bundle = Bundle {
            folder: &bundle,
            rootfs: rootfs.as_deref(),
            namespace: &namespace,
            id: &id,
            fixed_grant: None,
            restored,
            // We delete what we made ourselves.
            clean_up_by_hook: false,
        };
        gpufence_shim::bundle::enforce_bundle(&policy, &bundle)
    };
    tokio::task::spawn_blocking(enforce).await?.map_err(|error| format!("gpufence: {error}").into())
}

/// What protobuf writes as an empty text is not there.
fn filled(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

/// Mounts the container's root. The mount helper may change a thread's working folder for long overlay options, so
/// the thread is ours alone and ends with it.
async fn mount_all(mounts: Vec<Mount>, rootfs: PathBuf) -> Result<(), Failure> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("mount".into()).stack_size(128 << 10).spawn(move || {
        let mount_each = || {
            fs::create_dir_all(&rootfs).map_err(|error| format!("create {}: {error}", rootfs.display()))?;
            for mount in &mounts {
                let (kind, source) = (filled(&mount.type_), filled(&mount.source));
                containerd_shim::mount::mount_rootfs(kind, source, &mount.options, &rootfs)
                    .map_err(|error| format!("mount {} at {}: {error}", mount.source, rootfs.display()))?;
            }
            Ok::<_, String>(())
        };
        let _ = sender.send(mount_each());
    })?;
    Ok(receiver.await??)
}
