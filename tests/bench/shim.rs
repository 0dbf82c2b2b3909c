//! Our shim beside containerd's own, in one run: how long a container's create, start and delete take, and how much
//! memory a shim holds while its container runs. Reported as ratios; nothing fails here but what can't run.
//!
//! `make bench`, or `cargo bench -p gpufence-tests -- --rounds 100`.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use gpufence_cli::{engine::shims_of, table};
use gpufence_tests::{
    figures::median_milliseconds,
    host::{GPUFENCE, Host, Plan, RUNC, unique},
    programs::Engine,
};

/// Measures our shim beside containerd's own
#[derive(Parser)]
struct Arguments {
    /// How many containers of each kind are timed
    #[arg(long, default_value_t = 60)]
    rounds: usize,
    /// How many run at once when memory is measured
    #[arg(long, default_value_t = 3)]
    running: usize,
    /// `cargo bench` says so
    #[arg(long, hide = true)]
    bench: bool,
}

/// One way of running a container.
struct Subject {
    name: &'static str,
    runtime: &'static str,
    flags: &'static [&'static str],
}

const SUBJECTS: [Subject; 3] = [
    Subject { name: "runc.v2, no GPU", runtime: RUNC, flags: &[] },
    Subject { name: "gpufence, no grant", runtime: GPUFENCE, flags: &[] },
    Subject { name: "gpufence, a share", runtime: GPUFENCE, flags: &["--annotation", "gpufence.dev/gpu=0=8GiB@50%"] },
];

/// A shim's memory in KiB, as `smaps_rollup` tells it.
#[derive(Clone, Copy, Default)]
struct Memory {
    resident: u64,
    proportional: u64,
    private: u64,
    threads: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    for engine in [Engine::Containerd16, Engine::Containerd17, Engine::Containerd2] {
        let host = Host::start(&Plan { engine, ..Plan::default() })?;
        let version = host.containerd.run_ctr(["version"])?;
        let version = version.lines().rev().find_map(|line| line.trim().strip_prefix("Version:")).unwrap_or("unknown");
        println!("\ncontainerd {}, {} containers of each kind", version.trim(), arguments.rounds);
        let times = time_all(&host, arguments.rounds)?;
        let memories: Vec<Memory> =
            SUBJECTS.iter().map(|subject| memory(&host, subject, arguments.running)).collect::<Result<_>>()?;
        print!("{}", report(&times, &memories));
    }
    Ok(())
}

/// The subjects in turn, round by round, so that whatever else the machine does meets all alike.
fn time_all(host: &Host, rounds: usize) -> Result<Vec<Vec<Duration>>> {
    let mut times = vec![Vec::new(); SUBJECTS.len()];
    for round in 0..rounds + 3 {
        for (subject, times) in SUBJECTS.iter().zip(&mut times) {
            let start = Instant::now();
            let output = host.output(subject.runtime, subject.flags, &["/bin/true"])?;
            let took = start.elapsed();
            if !output.status.success() {
                bail!("{}: {}", subject.name, String::from_utf8_lossy(&output.stderr));
            }
            // The first rounds fill caches, and build the inventory and the stage.
            if round >= 3 {
                times.push(took);
            }
        }
    }
    Ok(times)
}

fn memory(host: &Host, subject: &Subject, running: usize) -> Result<Memory> {
    let ids: Vec<String> = (0..running).map(|_| unique("memory")).collect();
    for id in &ids {
        let flags = [&["--detach"], subject.flags].concat();
        let output = host.run(subject.runtime, id, &flags, &["/bin/sleep", "1000"]).output()?;
        if !output.status.success() {
            bail!("{}: {}", subject.name, String::from_utf8_lossy(&output.stderr));
        }
    }
    std::thread::sleep(Duration::from_secs(2));
    let shims = shims_of(&host.containerd.socket());
    let all: Vec<Memory> = shims.iter().map(|pid| read_memory(*pid)).collect::<Result<_>>()?;
    for id in &ids {
        host.containerd.run_ctr(["tasks", "rm", "-f", id])?;
        host.containerd.run_ctr(["containers", "rm", id])?;
    }
    let mean = |pick: fn(&Memory) -> u64| all.iter().map(pick).sum::<u64>() / all.len().max(1) as u64;
    Ok(Memory {
        resident: mean(|memory| memory.resident),
        proportional: mean(|memory| memory.proportional),
        private: mean(|memory| memory.private),
        threads: mean(|memory| memory.threads),
    })
}

fn read_memory(pid: u32) -> Result<Memory> {
    let folder = Path::new("/proc").join(pid.to_string());
    let text = fs::read_to_string(folder.join("smaps_rollup")).context("read smaps_rollup")?;
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
            .with_context(|| format!("smaps_rollup has no {name}"))
    };
    Ok(Memory {
        resident: field("Rss:")?,
        proportional: field("Pss:")?,
        private: field("Private_Clean:")? + field("Private_Dirty:")?,
        threads: fs::read_dir(folder.join("task"))?.count() as u64,
    })
}

fn report(times: &[Vec<Duration>], memories: &[Memory]) -> String {
    let ratio = |value: f64, base: f64| format!("{:.2}", value / base);
    let (base_time, base) = (median_milliseconds(&times[0]), memories[0]);
    let rows: Vec<Vec<String>> = SUBJECTS
        .iter()
        .zip(times.iter().zip(memories))
        .map(|(subject, (times, memory))| {
            let time = median_milliseconds(times);
            let mib = |kib: u64| format!("{:.1} MiB", kib as f64 / 1024.0);
            vec![
                subject.name.into(),
                format!("{time:.1} ms"),
                ratio(time, base_time),
                mib(memory.resident),
                ratio(memory.resident as f64, base.resident as f64),
                mib(memory.proportional),
                ratio(memory.proportional as f64, base.proportional as f64),
                mib(memory.private),
                memory.threads.to_string(),
            ]
        })
        .collect();
    let header = ["SUBJECT", "CREATE+START+DELETE", "RATIO", "RSS", "RATIO", "PSS", "RATIO", "PRIVATE", "THREADS"];
    table::format(&header, &rows)
}
