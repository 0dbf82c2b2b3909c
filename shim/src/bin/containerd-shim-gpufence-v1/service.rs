//! The Task service, as containerd's own shim gives it.
//!
//! No lock is held across a call of the runtime. A task's exit is never told before its start, and init's is told after
//! those of the processes that exec added.

use std::{
    collections::{HashMap, HashSet},
    fs,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::SystemTime,
};

use async_trait::async_trait;
use containerd_shim::{
    ExitSignal, Task, TtrpcContext, TtrpcResult,
    api::{
        CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest, CreateTaskResponse,
        DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, PauseRequest, PidsRequest, PidsResponse,
        ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest, StartResponse, StateRequest, StateResponse,
        StatsRequest, StatsResponse, UpdateTaskRequest, WaitRequest, WaitResponse,
    },
    protos::{
        api::ProcessInfo,
        events::task::{
            TaskCheckpointed, TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskIO, TaskOOM,
            TaskPaused, TaskResumed, TaskStart,
        },
        protobuf::{EnumOrUnknown, Message, MessageField, well_known_types::any::Any},
        shim::oci::{CheckpointOptions, ProcessDetails},
        ttrpc::{self, Code, error::get_rpc_status},
    },
};
use gpufence_shim::policy::Policy;
use serde_json::Value;

use crate::{
    Failure,
    container::{Container, Surroundings},
    events::{Publisher, timestamp},
    oom::Watch,
    process::{Exit, Process},
    reaper::Reaper,
    stats,
    stdio::Addresses,
};

pub struct Service {
    surroundings: Surroundings,
    publisher: Publisher,
    exit: Arc<ExitSignal>,
    tasks: Mutex<Tasks>,
}

#[derive(Default)]
struct Tasks {
    containers: HashMap<String, Arc<Container>>,
    /// Ids whose create is on its way.
    creating: HashSet<String>,
}

fn status(code: Code, message: impl ToString) -> ttrpc::Error {
    get_rpc_status(code, message)
}

fn unknown(error: impl ToString) -> ttrpc::Error {
    status(Code::UNKNOWN, error)
}

fn count(pid: i32) -> u32 {
    u32::try_from(pid).unwrap_or(0)
}

impl Service {
    pub fn new(namespace: String, policy: Policy, reaper: Reaper, publisher: Publisher, exit: Arc<ExitSignal>) -> Self {
        let surroundings = Surroundings { namespace, policy: Arc::new(policy), reaper };
        Self { surroundings, publisher, exit, tasks: Mutex::default() }
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn container(&self, id: &str) -> TtrpcResult<Arc<Container>> {
        self.tasks()
            .containers
            .get(id)
            .cloned()
            .ok_or_else(|| status(Code::NOT_FOUND, format!("container {id} not found")))
    }

    fn process(&self, id: &str, exec_id: &str) -> TtrpcResult<(Arc<Container>, Arc<Process>)> {
        let container = self.container(id)?;
        let process =
            if exec_id.is_empty() { Some(container.init.clone()) } else { container.execs().get(exec_id).cloned() };
        let process =
            process.ok_or_else(|| status(Code::NOT_FOUND, format!("process {exec_id} of container {id} not found")))?;
        Ok((container, process))
    }

    /// Follows a process that the runtime has made until it ends.
    fn follow(&self, container: &Arc<Container>, process: &Arc<Process>) {
        let exit = self.surroundings.reaper.exit_of(process.pid());
        let (container, process, publisher) = (container.clone(), process.clone(), self.publisher.clone());
        tokio::spawn(async move {
            let status = exit.await.unwrap_or(255);
            let exit = Exit { status: status.cast_unsigned(), at: SystemTime::now() };
            if !process.hold(exit) {
                end(&publisher, &container, &process, exit).await;
            }
        });
    }

    /// Tells of every kill for want of memory, while the container is there.
    fn watch_memory(&self, container: &Arc<Container>) {
        let Some(cgroup) = container.cgroup() else { return };
        let watch = match Watch::new(&cgroup) {
            Ok(watch) => watch,
            // A machine without the memory controller has no such kills to tell of.
            Err(error) => return log::info!("no watch for want of memory of {}: {error}", container.id),
        };
        let (container, publisher) = (Arc::downgrade(container), self.publisher.clone());
        tokio::spawn(async move {
            while watch.changed().await.is_ok() {
                let Some(container) = Weak::upgrade(&container) else { return };
                tell_of_oom(&publisher, &container);
                // Both kinds wake once more when the cgroup goes, and then for ever.
                if container.init.exit().is_some() {
                    return;
                }
            }
        });
    }

    async fn start_process(&self, container: &Arc<Container>, process: &Arc<Process>) -> TtrpcResult<()> {
        if !process.begin_start() {
            return Err(status(Code::FAILED_PRECONDITION, "cannot start a process that was started already"));
        }
        let is_init = process.exec_id.is_empty();
        let known_before = process.pid() != 0;
        let birth = self.surroundings.reaper.birth();
        let started = if is_init { container.start_init().await } else { container.start_exec(process).await };
        if started.is_ok() && !known_before {
            self.follow(container, process);
            if is_init {
                self.watch_memory(container);
            }
        }
        drop(birth);
        if started.is_ok() {
            self.tell_of_start(container, process);
        }
        if let Some(exit) = process.end_start(started.is_ok()) {
            end(&self.publisher, container, process, exit).await;
        }
        let what = if is_init { "start" } else { "exec" };
        started.map_err(|error| unknown(format!("OCI runtime {what} failed: {error}")))
    }

    fn tell_of_start(&self, container: &Container, process: &Process) {
        let (container_id, pid) = (container.id.clone(), count(process.pid()));
        if process.exec_id.is_empty() {
            self.publisher
                .publish("containerd.events.TaskStart", &TaskStart { container_id, pid, ..TaskStart::default() });
        } else {
            let event =
                TaskExecStarted { container_id, exec_id: process.exec_id.clone(), pid, ..TaskExecStarted::default() };
            self.publisher.publish("containerd.events.TaskExecStarted", &event);
        }
    }
}

fn tell_of_oom(publisher: &Publisher, container: &Container) {
    if container.new_oom_kill() {
        let event = TaskOOM { container_id: container.id.clone(), ..TaskOOM::default() };
        publisher.publish("containerd.events.TaskOOM", &event);
    }
}

/// A process has ended and its start, if there was one, has been told.
async fn end(publisher: &Publisher, container: &Arc<Container>, process: &Process, exit: Exit) {
    if process.exec_id.is_empty() {
        tell_of_oom(publisher, container);
        if container.outcome.shares_pids
            && let Err(error) = container.call(&["kill", "--all", &container.id, "KILL"]).await
        {
            log::debug!("kill what is left of {}: {error}", container.id);
        }
        if container.has_running_execs() {
            container.keep_init_exit(exit);
            return;
        }
        tell_of_exit(publisher, container, process, exit);
        return;
    }
    tell_of_exit(publisher, container, process, exit);
    if !container.has_running_execs()
        && let Some(exit) = container.take_init_exit()
    {
        tell_of_exit(publisher, container, &container.init, exit);
    }
}

fn tell_of_exit(publisher: &Publisher, container: &Container, process: &Process, exit: Exit) {
    process.set_exit(exit);
    let event = TaskExit {
        container_id: container.id.clone(),
        id: if process.exec_id.is_empty() { container.id.clone() } else { process.exec_id.clone() },
        pid: count(process.pid()),
        exit_status: exit.status,
        exited_at: MessageField::some(timestamp(exit.at)),
        ..TaskExit::default()
    };
    publisher.publish("containerd.events.TaskExit", &event);
}

/// Whether the runtime says that what was to be killed is gone.
fn is_gone(message: &str) -> bool {
    ["process already finished", "container not running", "no such process", "does not exist", "not running"]
        .iter()
        .any(|words| message.to_lowercase().contains(words))
}

#[allow(unsafe_code, reason = "one-line wrapper: nix's kill has no real-time signals")]
fn send_signal(pid: i32, signal: i32) -> Result<(), nix::errno::Errno> {
    // SAFETY: kill(2) takes two integers; pid is a child that has not been reaped.
    nix::errno::Errno::result(unsafe { nix::libc::kill(pid, signal) }).map(drop)
}

fn checkpoint_arguments(options: &CheckpointOptions, image: &str, id: &str) -> Vec<String> {
    let mut arguments = vec!["checkpoint".to_owned(), "--image-path".into(), image.into()];
    if !options.work_path.is_empty() {
        arguments.extend(["--work-path".into(), options.work_path.clone()]);
    }
    let flags = [
        (!options.exit, "--leave-running"),
        (options.open_tcp, "--tcp-established"),
        (options.external_unix_sockets, "--ext-unix-sk"),
        (options.terminal, "--shell-job"),
        (options.file_locks, "--file-locks"),
    ];
    arguments.extend(flags.iter().filter(|(wanted, _)| *wanted).map(|(_, flag)| (*flag).to_owned()));
    if !options.cgroups_mode.is_empty() {
        arguments.extend(["--manage-cgroups-mode".into(), options.cgroups_mode.clone()]);
    }
    arguments.extend(options.empty_namespaces.iter().flat_map(|namespace| ["--empty-ns".into(), namespace.clone()]));
    arguments.push(id.to_owned());
    arguments
}

#[async_trait]
impl Task for Service {
    async fn create(&self, _: &TtrpcContext, request: CreateTaskRequest) -> TtrpcResult<CreateTaskResponse> {
        {
            let mut tasks = self.tasks();
            if tasks.containers.contains_key(&request.id) || !tasks.creating.insert(request.id.clone()) {
                return Err(status(Code::ALREADY_EXISTS, format!("container {} already exists", request.id)));
            }
        }
        let birth = self.surroundings.reaper.birth();
        let created = Container::create(&request, &self.surroundings).await;
        let container = {
            let mut tasks = self.tasks();
            tasks.creating.remove(&request.id);
            let container = Arc::new(created.map_err(|error: Failure| {
                let message = error.to_string();
                let code = if message.starts_with("gpufence:") { Code::INVALID_ARGUMENT } else { Code::UNKNOWN };
                status(code, message)
            })?);
            tasks.containers.insert(request.id.clone(), container.clone());
            container
        };
        let pid = container.init.pid();
        // The birth ends after this: an exit that was quicker than we are is waiting in it.
        if pid != 0 {
            self.follow(&container, &container.init);
            self.watch_memory(&container);
        }
        drop(birth);
        let io = TaskIO {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
            ..TaskIO::default()
        };
        let event = TaskCreate {
            container_id: request.id,
            bundle: request.bundle,
            rootfs: request.rootfs,
            io: MessageField::some(io),
            checkpoint: request.checkpoint,
            pid: count(pid),
            ..TaskCreate::default()
        };
        self.publisher.publish("containerd.events.TaskCreate", &event);
        Ok(CreateTaskResponse { pid: count(pid), ..CreateTaskResponse::default() })
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> TtrpcResult<StartResponse> {
        let (container, process) = self.process(&request.id, &request.exec_id)?;
        self.start_process(&container, &process).await?;
        Ok(StartResponse { pid: count(process.pid()), ..StartResponse::default() })
    }

    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> TtrpcResult<StateResponse> {
        let (container, process) = self.process(&request.id, &request.exec_id)?;
        let exit = process.exit();
        Ok(StateResponse {
            id: request.id,
            exec_id: request.exec_id,
            bundle: container.bundle.to_string_lossy().into_owned(),
            pid: count(process.pid()),
            status: EnumOrUnknown::new(process.status()),
            stdin: process.addresses.stdin.clone(),
            stdout: process.addresses.stdout.clone(),
            stderr: process.addresses.stderr.clone(),
            terminal: process.addresses.terminal,
            exit_status: exit.map_or(0, |exit| exit.status),
            exited_at: exit.map(|exit| timestamp(exit.at)).into(),
            ..StateResponse::default()
        })
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> TtrpcResult<WaitResponse> {
        let (_, process) = self.process(&request.id, &request.exec_id)?;
        let exit = process.wait().await;
        Ok(WaitResponse {
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..WaitResponse::default()
        })
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> TtrpcResult<Empty> {
        let container = self.container(&request.id)?;
        let invalid = |what: String| status(Code::INVALID_ARGUMENT, what);
        if request.exec_id.is_empty() || request.exec_id.contains('/') || request.exec_id.starts_with('.') {
            return Err(invalid(format!("\"{}\" is not an exec id", request.exec_id)));
        }
        let spec = request.spec.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
        let mut spec: Value = serde_json::from_slice(spec)
            .map_err(|error| invalid(format!("the process of exec is not JSON: {error}")))?;
        container.outcome.held.hold(&mut spec).map_err(|error| invalid(format!("gpufence: {error}")))?;
        let addresses = Addresses {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        {
            let mut execs = container.execs();
            if execs.contains_key(&request.exec_id) {
                return Err(status(Code::ALREADY_EXISTS, format!("exec {} already exists", request.exec_id)));
            }
            execs.insert(request.exec_id.clone(), Process::new(request.exec_id.clone(), addresses, Some(spec)));
        }
        let event = TaskExecAdded { container_id: request.id, exec_id: request.exec_id, ..TaskExecAdded::default() };
        self.publisher.publish("containerd.events.TaskExecAdded", &event);
        Ok(Empty::new())
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> TtrpcResult<Empty> {
        let (container, process) = self.process(&request.id, &request.exec_id)?;
        let finished = || status(Code::NOT_FOUND, "process already finished");
        if process.exit().is_some() {
            return Err(finished());
        }
        // Also an init whose restore has failed: a client that was told "not found" would wait for its exit.
        if process.pid() == 0 {
            return Err(status(Code::FAILED_PRECONDITION, "process not created"));
        }
        if !process.exec_id.is_empty() {
            return match send_signal(process.pid(), request.signal.cast_signed()) {
                Ok(()) => Ok(Empty::new()),
                Err(nix::errno::Errno::ESRCH) => Err(finished()),
                Err(error) => Err(status(Code::INVALID_ARGUMENT, format!("signal {}: {error}", request.signal))),
            };
        }
        let signal = request.signal.to_string();
        let mut arguments = vec!["kill"];
        if request.all {
            arguments.push("--all");
        }
        arguments.extend([container.id.as_str(), &signal]);
        match container.call(&arguments).await {
            Ok(()) => Ok(Empty::new()),
            Err(error) if is_gone(&error.to_string()) => Err(finished()),
            Err(error) => Err(unknown(error)),
        }
    }

    async fn delete(&self, _: &TtrpcContext, request: DeleteRequest) -> TtrpcResult<DeleteResponse> {
        let (container, process) = self.process(&request.id, &request.exec_id)?;
        if process.is_alive() {
            return Err(status(Code::FAILED_PRECONDITION, "cannot delete a running process"));
        }
        if process.exec_id.is_empty() {
            container.remove().await.map_err(unknown)?;
            self.tasks().containers.remove(&request.id);
        } else {
            process.shut_down_io().await;
            container.execs().remove(&request.exec_id);
        }
        let exit = process.exit();
        let exited_at: MessageField<_> = exit.map(|exit| timestamp(exit.at)).into();
        let (pid, exit_status) = (count(process.pid()), exit.map_or(0, |exit| exit.status));
        if process.exec_id.is_empty() {
            let event = TaskDelete {
                container_id: request.id,
                pid,
                exit_status,
                exited_at: exited_at.clone(),
                ..TaskDelete::default()
            };
            self.publisher.publish("containerd.events.TaskDelete", &event);
        }
        Ok(DeleteResponse { pid, exit_status, exited_at, ..DeleteResponse::default() })
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> TtrpcResult<PidsResponse> {
        let container = self.container(&request.id)?;
        let output = container
            .runtime
            .output(&container.bundle, &["ps", "--format", "json", &container.id])
            .await
            .map_err(unknown)?;
        let pids: Option<Vec<i32>> = serde_json::from_slice(&output).map_err(unknown)?;
        let execs: HashMap<i32, String> =
            container.execs().values().map(|process| (process.pid(), process.exec_id.clone())).collect();
        let details = |pid: &i32| {
            let exec_id = execs.get(pid).filter(|_| *pid != 0)?.clone();
            let value = ProcessDetails { exec_id, ..ProcessDetails::default() }.write_to_bytes().ok()?;
            Some(Any { type_url: "containerd.runc.v1.ProcessDetails".into(), value, ..Any::default() })
        };
        let processes = pids.unwrap_or_default();
        let processes = processes.iter().map(|pid| ProcessInfo {
            pid: count(*pid),
            info: details(pid).into(),
            ..ProcessInfo::default()
        });
        Ok(PidsResponse { processes: processes.collect(), ..PidsResponse::default() })
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> TtrpcResult<Empty> {
        let container = self.container(&request.id)?;
        container.call(&["pause", &container.id]).await.map_err(unknown)?;
        container.init.set_paused(true);
        self.publisher
            .publish("containerd.events.TaskPaused", &TaskPaused { container_id: request.id, ..TaskPaused::default() });
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> TtrpcResult<Empty> {
        let container = self.container(&request.id)?;
        container.call(&["resume", &container.id]).await.map_err(unknown)?;
        container.init.set_paused(false);
        self.publisher.publish(
            "containerd.events.TaskResumed",
            &TaskResumed { container_id: request.id, ..TaskResumed::default() },
        );
        Ok(Empty::new())
    }

    async fn checkpoint(&self, _: &TtrpcContext, request: CheckpointTaskRequest) -> TtrpcResult<Empty> {
        let container = self.container(&request.id)?;
        let options = request.options.as_ref().filter(|any| any.type_url.ends_with("CheckpointOptions"));
        let options =
            options.map_or_else(|| Ok(CheckpointOptions::new()), |any| CheckpointOptions::parse_from_bytes(&any.value));
        let options =
            options.map_err(|error| status(Code::INVALID_ARGUMENT, format!("checkpoint options: {error}")))?;
        let image = if request.path.is_empty() { options.image_path.clone() } else { request.path };
        let arguments = checkpoint_arguments(&options, &image, &container.id);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        container.call(&arguments).await.map_err(|error| unknown(format!("OCI runtime checkpoint failed: {error}")))?;
        let event = TaskCheckpointed { container_id: request.id, checkpoint: image, ..TaskCheckpointed::default() };
        self.publisher.publish("containerd.events.TaskCheckpointed", &event);
        Ok(Empty::new())
    }

    async fn resize_pty(&self, _: &TtrpcContext, request: ResizePtyRequest) -> TtrpcResult<Empty> {
        let (_, process) = self.process(&request.id, &request.exec_id)?;
        // A resize may come before the terminal is there, or for a process that has none; neither is a fault.
        if let Some(terminal) = process.terminal() {
            crate::console::resize(&terminal, request.width, request.height).map_err(unknown)?;
        }
        Ok(Empty::new())
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> TtrpcResult<Empty> {
        let (_, process) = self.process(&request.id, &request.exec_id)?;
        if request.stdin {
            process.close_input();
        }
        Ok(Empty::new())
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> TtrpcResult<Empty> {
        let container = self.container(&request.id)?;
        let resources = request.resources.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
        let invalid = |error: serde_json::Error| {
            status(Code::INVALID_ARGUMENT, format!("the resources to update are not JSON: {error}"))
        };
        let mut resources: Value = serde_json::from_slice(resources).map_err(invalid)?;
        // The fence stands: device rules come from the grant alone.
        if let Some(resources) = resources.as_object_mut() {
            resources.remove("devices");
        }
        let file = container.bundle.join("update.json");
        fs::write(&file, resources.to_string()).map_err(unknown)?;
        let updated = container.call(&["update", "--resources", &file.to_string_lossy(), &container.id]).await;
        let _ = fs::remove_file(&file);
        updated.map(|()| Empty::new()).map_err(unknown)
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> TtrpcResult<StatsResponse> {
        let container = self.container(&request.id)?;
        let cgroup = container.cgroup().ok_or_else(|| status(Code::NOT_FOUND, "cgroup does not exist"))?;
        let figures = stats::collect(&cgroup).map_err(unknown)?;
        Ok(StatsResponse { stats: MessageField::some(figures), ..StatsResponse::default() })
    }

    async fn connect(&self, _: &TtrpcContext, request: ConnectRequest) -> TtrpcResult<ConnectResponse> {
        let task_pid = self.container(&request.id).map_or(0, |container| container.init.pid());
        Ok(ConnectResponse {
            shim_pid: std::process::id(),
            task_pid: count(task_pid),
            version: env!("CARGO_PKG_VERSION").into(),
            ..ConnectResponse::default()
        })
    }

    async fn shutdown(&self, _: &TtrpcContext, _: ShutdownRequest) -> TtrpcResult<Empty> {
        let tasks = self.tasks();
        // Others of the Pod live on.
        if tasks.containers.is_empty() && tasks.creating.is_empty() {
            self.exit.signal();
        }
        Ok(Empty::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_keep_running_unless_told() {
        let options = CheckpointOptions {
            open_tcp: true,
            work_path: "/work".into(),
            empty_namespaces: vec!["network".into()],
            ..Default::default()
        };
        assert_eq!(
            checkpoint_arguments(&options, "/image", "id"),
            [
                "checkpoint",
                "--image-path",
                "/image",
                "--work-path",
                "/work",
                "--leave-running",
                "--tcp-established",
                "--empty-ns",
                "network",
                "id"
            ]
        );
        let exit = CheckpointOptions { exit: true, ..Default::default() };
        assert_eq!(checkpoint_arguments(&exit, "/image", "id"), ["checkpoint", "--image-path", "/image", "id"]);
    }

    #[test]
    fn the_runtimes_words_for_gone() {
        for words in [
            "os: process already finished",
            "container not running",
            "container does not exist",
            "kill container: No such process",
        ] {
            assert!(is_gone(words), "{words}");
        }
        assert!(!is_gone("permission denied"));
    }
}
