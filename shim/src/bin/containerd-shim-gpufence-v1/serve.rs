//! The server's life: one thread, one ttrpc socket, until containerd says that it may go.

use std::{
    collections::HashMap,
    os::{fd::FromRawFd, unix::net::UnixListener},
    sync::Arc,
    time::Duration,
};

use containerd_shim::{
    ExitSignal, Flags, Task,
    protos::{
        shim_async::create_task,
        ttrpc::r#async::{Server, Service as TtrpcService, transport::Listener},
    },
};
use gpufence_shim::policy::Policy;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use tokio::signal::unix::{SignalKind, signal};

use crate::{Failure, events::Publisher, reaper::Reaper, service::Service};

/// Tells the server which descriptor its listener is.
pub const LISTENER_VARIABLE: &str = "GPUFENCE_SHIM_LISTENER";

pub fn run(flags: &Flags) -> Result<(), Failure> {
    let descriptor: i32 = std::env::var(LISTENER_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or("no action was given: containerd runs this program with `start` or `delete`")?;
    let listener = inherited_listener(descriptor)?;
    use_one_arena();
    // containerd opened the log's other end before it ran `start`.
    containerd_shim::logger::init(flags.debug, "info", &flags.namespace, &flags.id)?;
    std::panic::set_hook(Box::new(|panic| log::error!("panic: {panic}")));
    nix::sys::prctl::set_child_subreaper(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(4)
        .thread_keep_alive(Duration::from_millis(100))
        .build()?;
    runtime.block_on(serve(flags, listener))
}

async fn serve(flags: &Flags, listener: UnixListener) -> Result<(), Failure> {
    let exit = Arc::new(ExitSignal::default());
    let reaper = Reaper::start()?;
    ignore_termination()?;
    let publisher = Publisher::start(std::env::var("TTRPC_ADDRESS").unwrap_or_default(), flags.namespace.clone());
    let policy = Policy::load()?;
    let service = Arc::new(Service::new(flags.namespace.clone(), policy, reaper, publisher.clone(), exit.clone()));
    listener.set_nonblocking(true)?;
    let mut server = Server::new().add_listener(Listener::try_from(listener)?);
    for services in both_versions(&service) {
        server = server.register_service(services);
    }
    server.start().await?;
    exit.wait().await;
    // The answer to Shutdown is on its way; events that are still queued get a moment.
    publisher.drain(Duration::from_secs(2)).await;
    let _ = tokio::time::timeout(Duration::from_secs(1), server.shutdown()).await;
    if let Some(path) = flags.socket.strip_prefix("unix://") {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// The Task service under its names of versions 2 and 3, which have the same messages.
fn both_versions(service: &Arc<Service>) -> [HashMap<String, TtrpcService>; 2] {
    let named = |version: &str| {
        let task: Arc<dyn Task + Send + Sync> = service.clone();
        create_task(task).into_values().map(|service| (format!("containerd.task.{version}.Task"), service)).collect()
    };
    [named("v2"), named("v3")]
}

/// Containers outlive a SIGTERM to their shim: only containerd ends it.
fn ignore_termination() -> Result<(), Failure> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut signals = signal(kind)?;
        tokio::spawn(async move { while signals.recv().await.is_some() {} });
    }
    Ok(())
}

#[allow(unsafe_code, reason = "one-line wrapper")]
fn inherited_listener(descriptor: i32) -> Result<UnixListener, Failure> {
    // SAFETY: `start` made this descriptor for us, named it in our environment alone, and nothing else here uses it.
    let listener = unsafe { UnixListener::from_raw_fd(descriptor) };
    fcntl(&listener, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    listener.local_addr()?;
    Ok(listener)
}

/// The helper threads come and go; with an arena each, glibc's malloc would keep what they freed.
#[allow(unsafe_code, reason = "one-line wrapper")]
fn use_one_arena() {
    // SAFETY: mallopt(3) takes two integers; no other thread runs yet.
    unsafe { nix::libc::mallopt(nix::libc::M_ARENA_MAX, 1) };
}
