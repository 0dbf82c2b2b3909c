//! The watchdog's hands: reads NVML and the records, has [`crate::watch`] judge, and does what it says.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use gpufence_shim::policy::{Policy, WatchdogPolicy};

use crate::{
    cgroup::{self, Place},
    nvml::{Driver, Gpu, GpuProcess, Xids},
    processes::{Processes, Ticks},
    records::{Container, Records},
    watch::{Grants, Name, Rules, Seen, State, Trouble, Verdict},
};

/// What was last seen, for metrics. Totals count from our start.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// When; none yet.
    pub at: Option<Instant>,
    /// The GPUs.
    pub gpus: Vec<GpuNow>,
    /// The containers with a grant.
    pub containers: Vec<Arc<Container>>,
    /// Bytes that NVML says a container's processes hold of a GPU.
    pub used: HashMap<(Name, String), u64>,
    /// Processes on a GPU that are in no container with a share of it, and their bytes. `true`: in a container.
    pub strangers: BTreeMap<(String, bool), (u64, u64)>,
    /// Xid errors, by NVML's index and Xid.
    pub xids: BTreeMap<(u32, u64), u64>,
    /// Processes that were ended, by GPU and reason.
    pub ended: BTreeMap<(String, &'static str), u64>,
    /// Troubles that were told, by GPU and reason.
    pub warned: BTreeMap<(String, &'static str), u64>,
    /// Readings, and those that failed.
    pub readings: (u64, u64),
    /// Seconds that readings took, together.
    pub seconds: f64,
}

/// One GPU or MIG instance.
#[derive(Debug, Clone)]
pub struct GpuNow {
    /// Its UUID.
    pub uuid: String,
    /// NVML's index of the GPU that it is, or is part of.
    pub index: u32,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// What of it is in use, by whomever.
    pub used_bytes: u64,
}

/// Snapshots for the other threads.
pub type Shared = Arc<Mutex<Snapshot>>;

/// What it works with.
pub struct Watchdog {
    driver: Arc<Driver>,
    gpus: Vec<Gpu>,
    xids: Option<Xids>,
    rules: Rules,
    period: Duration,
    own_cgroup: String,
    records: Records,
    grants: Grants,
    /// Containers by id; engines' namespaces may have the same one.
    by_id: HashMap<String, Vec<Name>>,
    processes: Processes,
    state: State,
    shared: Shared,
}

/// MIG instances come and go: GPUs are listed anew so often, in readings.
const LIST_EVERY: u64 = 60;
/// After so many failed readings one after the other, a new start is better than more of them.
const GIVE_UP_AFTER: u32 = 10;

impl Watchdog {
    /// With nothing read yet.
    pub fn new(driver: Arc<Driver>, gpus: Vec<Gpu>, policy: &Policy, shared: Shared) -> Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").context("read /proc/self/cgroup")?;
        let unified = cgroup::is_unified();
        let WatchdogPolicy { period_milliseconds, over_limit, foreign, grace_seconds, tolerance_mib } = policy.watchdog;
        let xids = driver.xids().inspect_err(|error| tracing::warn!(%error, "Xid errors are not counted")).ok();
        Ok(Self {
            driver,
            gpus,
            xids,
            rules: Rules {
                over_limit,
                foreign,
                grace: Duration::from_secs(grace_seconds),
                tolerance: tolerance_mib << 20,
            },
            period: Duration::from_millis(period_milliseconds),
            own_cgroup: cgroup::path(&own, unified).unwrap_or_default().to_owned(),
            records: Records::below(&policy.state_dir),
            grants: Grants::new(),
            by_id: HashMap::new(),
            processes: Processes::new(unified),
            state: State::default(),
            shared,
        })
    }

    /// Reads at each period. Gives up where NVML has failed for long: the driver may have been replaced below us.
    pub fn run(mut self) -> anyhow::Error {
        let mut failed = 0;
        let mut next = Instant::now();
        loop {
            match self.reading() {
                Ok(()) => failed = 0,
                Err(error) => {
                    failed += 1;
                    tracing::error!(error = format!("{error:#}"), "a reading failed");
                    self.snapshot(|snapshot| snapshot.readings.1 += 1);
                    if failed >= GIVE_UP_AFTER {
                        return error.context(format!("{failed} readings failed one after the other"));
                    }
                }
            }
            // Readings that took too long are left out, not made up for.
            let now = Instant::now();
            next = (next + self.period).max(now);
            // An offender isn't let live until the period is over when its grace is.
            if let Some(due) = self.state.due(&self.rules) {
                next = next.min(due.max(now + self.period / 4));
            }
            std::thread::sleep(next.duration_since(now));
        }
    }

    fn snapshot(&self, change: impl FnOnce(&mut Snapshot)) {
        change(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn reading(&mut self) -> Result<()> {
        let start = Instant::now();
        let number = self.shared.lock().unwrap_or_else(PoisonError::into_inner).readings.0;
        if number.is_multiple_of(LIST_EVERY) {
            self.gpus = self.driver.gpus()?;
        }
        let containers = self.containers();
        let asked = Ticks::now()?;
        let mut lists: Vec<(String, Vec<GpuProcess>)> = Vec::with_capacity(self.gpus.len());
        let mut gpus = Vec::with_capacity(self.gpus.len());
        for gpu in &self.gpus {
            lists.push((gpu.uuid.clone(), gpu.processes()?));
            let Gpu { uuid, index, memory_bytes, .. } = gpu;
            // Where NVML has no figure (unified memory), the processes' are all there is.
            let sum = || lists.last().map_or(0, |(_, list)| list.iter().map(|process| process.used).sum());
            let used_bytes = gpu.used_bytes().unwrap_or_else(|_| sum());
            gpus.push(GpuNow { uuid: uuid.clone(), index: *index, memory_bytes: *memory_bytes, used_bytes });
        }
        let seen = self.place(&lists, asked)?;
        let verdicts = self.state.judge(&seen, &self.grants, &self.rules, Instant::now());
        let (mut warned, mut ended) = (Vec::new(), Vec::new());
        for verdict in verdicts {
            let reason = self.act(&verdict);
            match verdict {
                Verdict::Tell { trouble, .. } => warned.push((gpu_of(&trouble).to_owned(), reason)),
                Verdict::End { trouble, .. } if reason.is_empty() => drop(trouble),
                Verdict::End { trouble, .. } => ended.push((gpu_of(&trouble).to_owned(), reason)),
            }
        }
        let xids = self.xids.as_ref().map(Xids::next).unwrap_or_default();
        for (gpu, xid) in &xids {
            tracing::warn!(gpu, xid, "Xid error");
        }
        let (used, strangers) = sums(&seen, &self.grants);
        self.snapshot(|snapshot| {
            snapshot.at = Some(Instant::now());
            snapshot.gpus = gpus;
            if let Some(containers) = containers {
                snapshot.containers = containers;
            }
            snapshot.used = used;
            snapshot.strangers = strangers;
            for xid in xids {
                *snapshot.xids.entry(xid).or_default() += 1;
            }
            for key in warned {
                *snapshot.warned.entry(key).or_default() += 1;
            }
            for key in ended {
                *snapshot.ended.entry(key).or_default() += 1;
            }
            snapshot.readings.0 += 1;
            snapshot.seconds += start.elapsed().as_secs_f64();
        });
        Ok(())
    }

    /// The containers, where they are others than before.
    fn containers(&mut self) -> Option<Vec<Arc<Container>>> {
        let (containers, changed) = self.records.current();
        if !changed {
            return None;
        }
        self.grants = containers.iter().map(|container| (name(container), limits(container))).collect();
        self.by_id.clear();
        for container in containers {
            self.by_id.entry(container.record.id.clone()).or_default().push(name(container));
        }
        Some(containers.to_vec())
    }

    /// Who of those that NVML told of is whose.
    fn place(&mut self, lists: &[(String, Vec<GpuProcess>)], asked: Ticks) -> Result<Vec<Seen>> {
        let told: HashSet<u32> = lists.iter().flat_map(|(_, list)| list).map(|process| process.pid).collect();
        self.processes.forget(&told)?;
        let mut seen = Vec::with_capacity(told.len());
        for (gpu, list) in lists {
            for GpuProcess { pid, used } in list {
                let Some(process) = self.processes.of(*pid, asked)? else { continue };
                let container = |id: &str, path: &str| {
                    let names = self.by_id.get(id)?;
                    let in_path = |name: &&Name| path.split('/').any(|segment| segment == name.0);
                    names.iter().find(in_path).or_else(|| names.first()).cloned()
                };
                let place = cgroup::place(&process.cgroup, &self.own_cgroup, container);
                seen.push(Seen { process: process.number, gpu: gpu.clone(), used: *used, place });
            }
        }
        Ok(seen)
    }

    /// Does what was judged. Gives the reason, as metrics have it; empty: nothing was done.
    fn act(&mut self, verdict: &Verdict) -> &'static str {
        let (Verdict::Tell { trouble, used, limit } | Verdict::End { trouble, used, limit, .. }) = verdict;
        let (used_mib, limit_mib, gpu) = (used >> 20, limit >> 20, gpu_of(trouble));
        let (reason, what, container) = match trouble {
            Trouble::Over { container, .. } => (
                "over_limit",
                "a container holds more GPU memory than it was granted",
                format!("{}/{}", container.0, container.1),
            ),
            Trouble::Foreign { process, .. } => {
                let pid = self.processes.pid(*process).unwrap_or_default();
                (
                    "foreign",
                    "a container's process is on a shared GPU that its grant doesn't name",
                    format!("PID {pid}"),
                )
            }
        };
        match verdict {
            Verdict::Tell { .. } => tracing::warn!(event = reason, container, gpu, used_mib, limit_mib, "{what}"),
            Verdict::End { process, .. } => {
                let pid = self.processes.pid(*process).unwrap_or_default();
                match self.processes.end(*process) {
                    Ok(true) => {
                        tracing::warn!(
                            event = "ended",
                            reason,
                            container,
                            gpu,
                            pid,
                            used_mib,
                            limit_mib,
                            "{what}; ended"
                        );
                    }
                    Ok(false) => return "",
                    Err(error) => {
                        tracing::error!(reason, container, gpu, pid, %error, "{what}, and can't be ended");
                        self.state.not_ended(*process);
                        return "";
                    }
                }
            }
        }
        reason
    }
}

fn gpu_of(trouble: &Trouble) -> &str {
    let (Trouble::Over { gpu, .. } | Trouble::Foreign { gpu, .. }) = trouble;
    gpu
}

/// A container's namespace and id.
pub fn name(container: &Container) -> Name {
    (container.record.namespace.clone(), container.record.id.clone())
}

/// A container may have two shares of one GPU's MIG instances, but one of each.
fn limits(container: &Container) -> HashMap<String, u64> {
    container.record.shares.iter().map(|share| (share.gpu.clone(), share.memory_mib << 20)).collect()
}

type Used = HashMap<(Name, String), u64>;
type Strangers = BTreeMap<(String, bool), (u64, u64)>;

/// What containers hold of GPUs that they were granted, and what others hold.
fn sums(seen: &[Seen], grants: &Grants) -> (Used, Strangers) {
    let (mut used, mut strangers) = (Used::new(), Strangers::new());
    for process in seen {
        match &process.place {
            Place::Granted(name) if grants.get(name).is_some_and(|grant| grant.contains_key(&process.gpu)) => {
                *used.entry((name.clone(), process.gpu.clone())).or_default() += process.used;
            }
            place => {
                let (count, bytes) = strangers.entry((process.gpu.clone(), *place != Place::Host)).or_default();
                *count += 1;
                *bytes += process.used;
            }
        }
    }
    (used, strangers)
}
