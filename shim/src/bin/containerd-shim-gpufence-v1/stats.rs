//! A container's figures, in the messages of containerd's cgroups: `io.containerd.cgroups.v1.Metrics` and `v2`.

use std::{collections::HashMap, fs, path::Path};

use containerd_shim::protos::{
    cgroups::metrics as v1,
    cgroups_v2::metrics as v2,
    protobuf::{Message, MessageField, well_known_types::any::Any},
};

use crate::{Failure, cgroup::Cgroup};

/// Nanoseconds in a tick of `cpuacct.stat` (USER_HZ is 100 on every architecture that we run on).
const TICK: u64 = 10_000_000;

/// The figures of a cgroup, ready for the answer.
pub fn collect(cgroup: &Cgroup) -> Result<Any, Failure> {
    let (type_url, value) = match cgroup {
        Cgroup::V1(_) => ("io.containerd.cgroups.v1.Metrics", collect_v1(cgroup).write_to_bytes()?),
        Cgroup::V2(folder) => ("io.containerd.cgroups.v2.Metrics", collect_v2(folder).write_to_bytes()?),
    };
    Ok(Any { type_url: type_url.into(), value, ..Any::default() })
}

/// A file with one number; `max` and what isn't there are given as `otherwise`.
fn number(folder: &Path, file: &str, otherwise: u64) -> u64 {
    fs::read_to_string(folder.join(file)).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(otherwise)
}

/// A file of lines of a key and a number.
fn table(folder: &Path, file: &str) -> HashMap<String, u64> {
    let text = fs::read_to_string(folder.join(file)).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            line.split_once(' ').and_then(|(key, value)| Some((key.to_owned(), value.trim().parse().ok()?)))
        })
        .collect()
}

/// Sets fields of a message from a table: `field` from the key of that name, `field = "key"` from another.
macro_rules! fill {
    ($message:expr, $table:expr, $($field:ident $(= $key:literal)?),* $(,)?) => {
        $( $message.$field = $table.get(fill!(@key $field $($key)?)).copied().unwrap_or(0); )*
    };
    (@key $field:ident) => { stringify!($field) };
    (@key $field:ident $key:literal) => { $key };
}

fn collect_v1(cgroup: &Cgroup) -> v1::Metrics {
    let mut metrics = v1::Metrics::new();
    if let Some(folder) = cgroup.controller("pids") {
        metrics.pids = MessageField::some(v1::PidsStat {
            current: number(folder, "pids.current", 0),
            limit: number(folder, "pids.max", 0),
            ..Default::default()
        });
    }
    if let Some(folder) = cgroup.controller("cpuacct") {
        let ticks = table(folder, "cpuacct.stat");
        let ticks = |key: &str| ticks.get(key).copied().unwrap_or(0) * TICK;
        let per_cpu = fs::read_to_string(folder.join("cpuacct.usage_percpu")).unwrap_or_default();
        let usage = v1::CPUUsage {
            total: number(folder, "cpuacct.usage", 0),
            kernel: ticks("system"),
            user: ticks("user"),
            per_cpu: per_cpu.split_whitespace().filter_map(|word| word.parse().ok()).collect(),
            ..Default::default()
        };
        let mut throttling = v1::Throttle::new();
        if let Some(folder) = cgroup.controller("cpu") {
            fill!(
                throttling,
                table(folder, "cpu.stat"),
                periods = "nr_periods",
                throttled_periods = "nr_throttled",
                throttled_time
            );
        }
        metrics.cpu = MessageField::some(v1::CPUStat {
            usage: MessageField::some(usage),
            throttling: MessageField::some(throttling),
            ..Default::default()
        });
    }
    if let Some(folder) = cgroup.controller("memory") {
        let stat = table(folder, "memory.stat");
        let mut memory = v1::MemoryStat::new();
        fill!(
            memory,
            stat,
            cache,
            rss,
            rss_huge,
            mapped_file,
            dirty,
            writeback,
            pg_pg_in = "pgpgin",
            pg_pg_out = "pgpgout",
            pg_fault = "pgfault",
            pg_maj_fault = "pgmajfault",
            inactive_anon,
            active_anon,
            inactive_file,
            active_file,
            unevictable,
            hierarchical_memory_limit,
            hierarchical_swap_limit = "hierarchical_memsw_limit",
            total_cache,
            total_rss,
            total_rss_huge,
            total_mapped_file,
            total_dirty,
            total_writeback,
            total_pg_pg_in = "total_pgpgin",
            total_pg_pg_out = "total_pgpgout",
            total_pg_fault = "total_pgfault",
            total_pg_maj_fault = "total_pgmajfault",
            total_inactive_anon,
            total_active_anon,
            total_inactive_file,
            total_active_file,
            total_unevictable,
        );
        let entry = |prefix: &str| {
            let file = |name: &str| number(folder, &format!("{prefix}.{name}"), 0);
            MessageField::some(v1::MemoryEntry {
                limit: file("limit_in_bytes"),
                usage: file("usage_in_bytes"),
                max: file("max_usage_in_bytes"),
                failcnt: file("failcnt"),
                ..Default::default()
            })
        };
        memory.usage = entry("memory");
        memory.swap = entry("memory.memsw");
        memory.kernel = entry("memory.kmem");
        memory.kernel_tcp = entry("memory.kmem.tcp");
        metrics.memory = MessageField::some(memory);
        let mut control = v1::MemoryOomControl::new();
        fill!(control, table(folder, "memory.oom_control"), oom_kill_disable, under_oom, oom_kill);
        metrics.memory_oom_control = MessageField::some(control);
    }
    if let Some(folder) = cgroup.controller("blkio") {
        let mut blkio = v1::BlkIOStat::new();
        blkio.io_service_bytes_recursive = blkio_entries(folder, "blkio.throttle.io_service_bytes_recursive");
        blkio.io_serviced_recursive = blkio_entries(folder, "blkio.throttle.io_serviced_recursive");
        metrics.blkio = MessageField::some(blkio);
    }
    metrics
}

/// Lines such as `254:0 Read 4096`.
fn blkio_entries(folder: &Path, file: &str) -> Vec<v1::BlkIOEntry> {
    let text = fs::read_to_string(folder.join(file)).unwrap_or_default();
    let entry = |line: &str| {
        let mut words = line.split_whitespace();
        let (device, op, value) = (words.next()?, words.next()?, words.next()?);
        let (major, minor) = device.split_once(':')?;
        Some(v1::BlkIOEntry {
            op: op.into(),
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
            value: value.parse().ok()?,
            ..Default::default()
        })
    };
    text.lines().filter_map(entry).collect()
}

fn collect_v2(folder: &Path) -> v2::Metrics {
    let mut metrics = v2::Metrics::new();
    metrics.pids = MessageField::some(v2::PidsStat {
        current: number(folder, "pids.current", 0),
        limit: number(folder, "pids.max", 0),
        ..Default::default()
    });
    let mut cpu = v2::CPUStat::new();
    fill!(cpu, table(folder, "cpu.stat"), usage_usec, user_usec, system_usec, nr_periods, nr_throttled, throttled_usec);
    metrics.cpu = MessageField::some(cpu);
    let mut memory = v2::MemoryStat::new();
    fill!(
        memory,
        table(folder, "memory.stat"),
        anon,
        file,
        kernel_stack,
        slab,
        sock,
        shmem,
        file_mapped,
        file_dirty,
        file_writeback,
        anon_thp,
        inactive_anon,
        active_anon,
        inactive_file,
        active_file,
        unevictable,
        slab_reclaimable,
        slab_unreclaimable,
        pgfault,
        pgmajfault,
        workingset_refault = "workingset_refault_file",
        workingset_activate = "workingset_activate_file",
        workingset_nodereclaim,
        pgrefill,
        pgscan,
        pgsteal,
        pgactivate,
        pgdeactivate,
        pglazyfree,
        pglazyfreed,
        thp_fault_alloc,
        thp_collapse_alloc,
    );
    memory.usage = number(folder, "memory.current", 0);
    memory.usage_limit = number(folder, "memory.max", u64::MAX);
    memory.swap_usage = number(folder, "memory.swap.current", 0);
    memory.swap_limit = number(folder, "memory.swap.max", u64::MAX);
    metrics.memory = MessageField::some(memory);
    let mut events = v2::MemoryEvents::new();
    fill!(events, table(folder, "memory.events"), low, high, max, oom, oom_kill);
    metrics.memory_events = MessageField::some(events);
    let text = fs::read_to_string(folder.join("io.stat")).unwrap_or_default();
    metrics.io =
        MessageField::some(v2::IOStat { usage: text.lines().filter_map(io_entry).collect(), ..Default::default() });
    metrics
}

/// A line such as `254:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0`.
fn io_entry(line: &str) -> Option<v2::IOEntry> {
    let (device, rest) = line.split_once(' ')?;
    let (major, minor) = device.split_once(':')?;
    let values: HashMap<String, u64> = rest
        .split_whitespace()
        .filter_map(|pair| pair.split_once('=').and_then(|(key, value)| Some((key.to_owned(), value.parse().ok()?))))
        .collect();
    let mut entry = v2::IOEntry { major: major.parse().ok()?, minor: minor.parse().ok()?, ..Default::default() };
    fill!(entry, values, rbytes, wbytes, rios, wios);
    Some(entry)
}
