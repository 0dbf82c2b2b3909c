//! `gpufence-node`, the node agent.
//!
//! * [`nvml`]: the driver, as NVML tells of it;
//! * [`records`]: the containers with a grant; [`usage`]: what their limiters have counted;
//! * [`cgroup`]: which container a process is in; [`processes`]: processes that can't be mistaken for others;
//! * [`watch`]: the watchdog's mind, a pure function of readings; [`watchdog`]: its hands;
//! * [`caps`]: the driver's memory caps for cgroups; [`socket`]: where the create path asks for them;
//! * [`published`]: what this agent tells the create path that it can do; [`mps`]: the MPS daemons;
//! * [`metrics`] and [`http`]: Prometheus.

mod arguments;
mod caps;
mod cgroup;
mod http;
mod metrics;
mod mps;
mod nvml;
mod processes;
mod published;
mod records;
mod socket;
mod usage;
mod watch;
mod watchdog;

use std::{fs, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use arguments::{Arguments, LogFormat};
use clap::Parser;
use gpufence_cdi::inventory::{Inventory, Roots};
use gpufence_grant::agent::{AgentState, MemoryCaps};
use gpufence_shim::policy::Policy;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nvml::Driver;
use published::Published;
use tokio::signal::unix::{SignalKind, signal};
use watchdog::{Shared, Watchdog};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let log = tracing_subscriber::fmt().with_max_level(arguments.log_level).with_writer(std::io::stderr);
    match arguments.log_format {
        LogFormat::Text => log.with_target(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("run gpufence-node as root: it looks into containers and ends their processes");
    }
    let policy = match &arguments.policy {
        Some(file) => Policy::read(file)?,
        None => Policy::load()?,
    };
    let roots = Roots::open(&policy.driver_root)?;
    let inventory = Inventory::current(&roots, &policy.inventory_file())?;
    let library = arguments.nvml.clone().unwrap_or_else(|| inventory.nvml_library(&roots));
    let driver = Arc::new(Driver::open(&library)?);
    let gpus = driver.gpus()?;
    // A pidfd for each process on a GPU.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;

    fs::create_dir_all(&policy.state_dir).with_context(|| format!("create folder {}", policy.state_dir.display()))?;
    let agent = AgentState {
        driver_version: driver.version.clone(),
        memory_caps: caps::detect(&driver, &gpus),
        mps: Vec::new(),
    };
    match &agent.memory_caps {
        MemoryCaps::Unsupported(why) => tracing::info!("the driver caps no memory here: {why}"),
        by => tracing::info!(?by, "the driver caps memory"),
    }
    let published = Arc::new(Published::new(policy.agent_file(), agent));
    let socket = policy.agent_socket();
    let listener = socket::bind(&socket)?;
    socket::serve(listener, &driver)?;
    let shared = Shared::default();
    tracing::info!(driver = driver.version, gpus = gpus.len(), policy = ?policy.watchdog, "watching");
    let watchdog = Watchdog::new(driver.clone(), gpus, &policy, shared.clone())?;
    let (failed, failure) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("watchdog".into()).spawn(move || {
        let _ = failed.send(watchdog.run());
    })?;

    let served = http::Served {
        shared,
        published: published.clone(),
        mps: mps::Shared::default(),
        period: Duration::from_millis(policy.watchdog.period_milliseconds),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(4).build()?;
    let ended = runtime.block_on(async {
        let metrics = http::bind(arguments.listen).await?;
        tracing::info!("metrics at http://{}/metrics", metrics.local_addr()?);
        let [mut terminate, mut interrupt] = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
        // Who reads it may ask at once: all that it tells of is there.
        published.write()?;
        mps::start(&policy, &inventory, &driver, &published, &served.mps)?;
        let stopped = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        tokio::select! {
            ended = http::serve(metrics, served, stopped) => ended,
            error = failure => Err(error.unwrap_or_else(|_| anyhow::anyhow!("the watchdog's thread is gone"))),
        }
    });
    published.withdraw();
    let _ = fs::remove_file(&socket);
    // What a scrape waits for isn't waited for.
    runtime.shutdown_background();
    ended
}
