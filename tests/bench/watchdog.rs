//! What the watchdog costs: a node with many containers and GPUs, where each container has a process on its GPU.
//!
//! The containers are records, cgroups and processes that sleep; the agent can't tell them from others. `make bench`, or
//! `cargo bench -p gpufence-tests --bench watchdog -- --containers 1000`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use gpufence_cli::table;
use gpufence_tests::{
    figures::median,
    host::{Host, Plan},
    node::{Node, Told},
};
use serde_json::json;

const GPUS: u32 = 8;
const LIMIT_MIB: u64 = 1024;

/// Measures the watchdog on a busy node
#[derive(Parser)]
struct Arguments {
    /// How many containers there are
    #[arg(long, default_value_t = 500)]
    containers: u32,
    /// For how many seconds it is watched
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// How many offenders are timed
    #[arg(long, default_value_t = 10)]
    offenders: usize,
    /// `cargo bench` says so
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let plan = Plan { machine: format!("gpus={GPUS}"), policy: "[watchdog]\ngrace_seconds = 0\n", ..Plan::default() };
    let host = Host::start(&plan)?;
    let crowd = Crowd::start(&host, arguments.containers)?;
    let node = Node::start(&host, "unsupported")?;
    let told: Vec<Told> = crowd.told();
    node.tell("unsupported", &told, &[])?;
    // The first readings look at every process and record.
    std::thread::sleep(Duration::from_secs(4));
    let readings =
        || -> Result<f64> { node.metric("gpufence_watchdog_readings_total", &[])?.context("no count of readings") };
    let (began, before, first) = (Instant::now(), processor_time(node.process.id())?, readings()?);
    std::thread::sleep(Duration::from_secs(arguments.seconds));
    let took = processor_time(node.process.id())?.saturating_sub(before);
    let (elapsed, count) = (began.elapsed(), readings()? - first);
    let watching = took.as_secs_f64() / elapsed.as_secs_f64();
    let (began, before) = (Instant::now(), processor_time(node.process.id())?);
    for _ in 0..20 {
        node.page("/metrics")?;
    }
    let scraping = processor_time(node.process.id())?.saturating_sub(before).as_secs_f64() / 20.0;
    let scrape = began.elapsed().as_secs_f64() / 20.0;

    // One after the other goes over its limit.
    let mut times = Vec::new();
    for offender in 0..arguments.offenders.min(told.len()) {
        let mut told = told[offender..].to_vec();
        told[0].used_mib = LIMIT_MIB * 2;
        let began = Instant::now();
        node.tell("unsupported", &told, &[])?;
        while is_alive(told[0].pid) {
            if began.elapsed() > Duration::from_secs(20) {
                bail!("an offender lives: {}", node.log());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        times.push(began.elapsed().as_secs_f64());
    }
    let longest = times.iter().copied().fold(0.0, f64::max);
    println!("\nthe watchdog with {} containers on {GPUS} GPUs, a reading each second", arguments.containers);
    let memory = fs::read_to_string(format!("/proc/{}/status", node.process.id()))?;
    let memory = memory.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default().trim().to_owned();
    let rows = [
        ["of one core", &format!("{:.2} %", watching * 100.0)],
        ["for a reading", &format!("{:.2} ms", took.as_secs_f64() * 1000.0 / count)],
        ["for a scrape of the metrics", &format!("{:.1} ms, {:.1} ms of a core", scrape * 1000.0, scraping * 1000.0)],
        ["until an offender is gone, median", &format!("{:.2} s", median(&times))],
        ["until an offender is gone, longest", &format!("{longest:.2} s")],
        ["resident memory", &memory],
    ];
    print!("{}", table::format(&["WHAT", "FIGURE"], &rows.map(|row| row.map(str::to_owned).to_vec())));
    Ok(())
}

/// What a process and all its threads have used of the processors.
fn processor_time(pid: u32) -> Result<Duration> {
    let mut nanoseconds = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // proc(5): schedstat's first figure is the time spent on a processor. A thread may have ended meanwhile.
        let text = fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
        nanoseconds += text.split(' ').next().and_then(|text| text.parse::<u64>().ok()).unwrap_or_default();
    }
    Ok(Duration::from_nanos(nanoseconds))
}

fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// Processes in cgroups of containers that have records.
struct Crowd {
    host_uuids: Vec<String>,
    cgroups: Vec<PathBuf>,
    processes: Vec<Child>,
}

impl Crowd {
    fn start(host: &Host, containers: u32) -> Result<Self> {
        let host_uuids = (0..GPUS).map(|gpu| host.description.uuid(gpu)).collect();
        let mut crowd = Self { host_uuids, cgroups: Vec::new(), processes: Vec::new() };
        let tree = ["/sys/fs/cgroup/devices", "/sys/fs/cgroup"].map(Path::new);
        let tree = tree.into_iter().find(|tree| tree.join("cgroup.procs").exists()).context("no cgroups")?;
        let top = tree.join(format!("gpufence-bench-{}", std::process::id()));
        fs::create_dir(&top)?;
        crowd.cgroups.push(top.clone());
        for number in 0..containers {
            let id = format!("{number:064x}");
            let cgroup = top.join(&id);
            fs::create_dir(&cgroup)?;
            crowd.cgroups.push(cgroup.clone());
            let process = Command::new("sleep").arg("1000").spawn()?;
            fs::write(cgroup.join("cgroup.procs"), process.id().to_string())?;
            crowd.processes.push(process);
            let folder = host.container_folders().join("k8s.io").join(&id);
            fs::create_dir_all(&folder)?;
            fs::write(folder.join("record.json"), crowd.record(&id, number).to_string())?;
        }
        Ok(crowd)
    }

    fn record(&self, id: &str, number: u32) -> serde_json::Value {
        json!({
            "namespace": "k8s.io", "id": id, "name": "trainer", "podUid": format!("pod-{number}"), "origin": "a benchmark",
            "driverVersion": "550.163.01", "driverCapabilities": ["compute"], "droppedCapabilities": [],
            "memoryHeldBy": "limiter",
            "shares": [{"gpu": self.host_uuids[(number % GPUS) as usize], "memoryMiB": LIMIT_MIB}],
        })
    }

    fn told(&self) -> Vec<Told> {
        let one =
            |(number, process): (u32, &Child)| Told { pid: process.id(), gpu: number % GPUS, used_mib: LIMIT_MIB };
        (0..).zip(&self.processes).map(one).collect()
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        for cgroup in self.cgroups.iter().rev() {
            // The kernel takes a moment to notice that its process has ended.
            for _ in 0..100 {
                match fs::remove_dir(cgroup) {
                    Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    _ => break,
                }
            }
        }
    }
}
