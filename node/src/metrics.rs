//! Prometheus metrics, made anew at each scrape from the last snapshot and the containers' usage tables.

use std::{collections::HashMap, fmt, sync::atomic::AtomicU64};

use gpufence_grant::agent::{AgentState, MemoryCaps};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use crate::{
    mps,
    records::Container,
    usage::Usage,
    watchdog::{Snapshot, name},
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ShareLabels {
    namespace: String,
    container_id: String,
    container: String,
    pod_uid: String,
    gpu: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HeldLabels {
    namespace: String,
    container_id: String,
    container: String,
    pod_uid: String,
    memory_held_by: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    gpu: String,
    index: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct XidLabels {
    index: u32,
    xid: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    gpu: String,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StrangerLabels {
    gpu: String,
    place: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DriverLabels {
    version: String,
    memory_caps: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SetLabels {
    gpus: String,
}

type Bytes<L> = Family<L, Gauge>;

/// The exposition text. `usage` gives a container's usage table.
pub fn text(
    agent: &AgentState,
    snapshot: &Snapshot,
    daemons: &[mps::Seen],
    usage: impl Fn(&Container) -> Option<Vec<Usage>>,
) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("gpufence");
    node(&mut registry, agent, snapshot);
    mps_daemons(&mut registry, daemons);
    containers(&mut registry, snapshot, usage);
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

fn gauge(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn node(registry: &mut Registry, agent: &AgentState, snapshot: &Snapshot) {
    let driver: Bytes<DriverLabels> = Family::default();
    let memory_caps = match agent.memory_caps {
        MemoryCaps::Dmem => "dmem",
        MemoryCaps::Own => "driver",
        MemoryCaps::Unsupported(_) => "unsupported",
    };
    driver.get_or_create(&DriverLabels { version: agent.driver_version.clone(), memory_caps }).set(1);
    registry.register("driver_info", "The driver, and by what it caps a cgroup's memory", driver);

    let mut granted: HashMap<&str, u64> = HashMap::new();
    for share in snapshot.containers.iter().flat_map(|container| &container.record.shares) {
        *granted.entry(&share.gpu).or_default() += share.memory_mib << 20;
    }
    let [capacity, grants, free, used]: [Bytes<GpuLabels>; 4] = std::array::from_fn(|_| Family::default());
    for gpu in &snapshot.gpus {
        let labels = GpuLabels { gpu: gpu.uuid.clone(), index: gpu.index };
        let given = granted.get(gpu.uuid.as_str()).copied().unwrap_or(0);
        capacity.get_or_create(&labels).set(gauge(gpu.memory_bytes));
        grants.get_or_create(&labels).set(gauge(given));
        free.get_or_create(&labels).set(gauge(gpu.memory_bytes.saturating_sub(given)));
        used.get_or_create(&labels).set(gauge(gpu.used_bytes));
    }
    registry.register("gpu_memory_capacity_bytes", "Memory of a GPU or MIG instance", capacity);
    registry.register("gpu_memory_granted_bytes", "What of it is granted to containers", grants);
    registry.register("gpu_memory_free_bytes", "What of it is not granted", free);
    registry.register("gpu_memory_used_bytes", "What of it is in use by NVML's count, by whomever", used);

    let [strangers, stranger_bytes]: [Bytes<StrangerLabels>; 2] = std::array::from_fn(|_| Family::default());
    for ((gpu, in_container), (count, bytes)) in &snapshot.strangers {
        let place = if *in_container { "container" } else { "host" };
        let labels = StrangerLabels { gpu: gpu.clone(), place };
        strangers.get_or_create(&labels).set(gauge(*count));
        stranger_bytes.get_or_create(&labels).set(gauge(*bytes));
    }
    registry.register("gpu_ungranted_processes", "Processes on a GPU with no share of it", strangers);
    registry.register("gpu_ungranted_memory_bytes", "What they use of it", stranger_bytes);

    let xids: Family<XidLabels, Counter> = Family::default();
    for ((index, xid), count) in &snapshot.xids {
        xids.get_or_create(&XidLabels { index: *index, xid: *xid }).inc_by(*count);
    }
    registry.register("gpu_xid_errors", "Xid errors since the agent started", xids);
    for (what, help, counts) in [
        ("watchdog_ended_processes", "Processes ended for GPU memory that they weren't granted", &snapshot.ended),
        (
            "watchdog_warnings",
            "Containers and processes found with GPU memory that they weren't granted",
            &snapshot.warned,
        ),
    ] {
        let family: Family<ReasonLabels, Counter> = Family::default();
        for ((gpu, reason), count) in counts {
            family.get_or_create(&ReasonLabels { gpu: gpu.clone(), reason }).inc_by(*count);
        }
        registry.register(what, help, family);
    }
    let [readings, failed]: [Counter; 2] = std::array::from_fn(|_| Counter::default());
    readings.inc_by(snapshot.readings.0);
    failed.inc_by(snapshot.readings.1);
    registry.register("watchdog_readings", "Readings of all GPUs", readings);
    registry.register("watchdog_failed_readings", "Readings that failed", failed);
    let seconds: Counter<f64, AtomicU64> = Counter::default();
    seconds.inc_by(snapshot.seconds);
    registry.register("watchdog_reading_seconds", "What readings took, together", seconds);
}

fn mps_daemons(registry: &mut Registry, daemons: &[mps::Seen]) {
    let (runs, starts): (Family<SetLabels, Gauge>, Family<SetLabels, Counter>) = Default::default();
    for daemon in daemons {
        let labels = SetLabels { gpus: daemon.gpus.clone() };
        runs.get_or_create(&labels).set(i64::from(daemon.runs));
        starts.get_or_create(&labels).inc_by(daemon.starts);
    }
    registry.register("mps_daemon_up", "Whether the MPS daemon of a set of GPUs takes clients", runs);
    registry.register("mps_daemon_starts", "How often it was started", starts);
}

fn containers(registry: &mut Registry, snapshot: &Snapshot, usage: impl Fn(&Container) -> Option<Vec<Usage>>) {
    let held_by: Bytes<HeldLabels> = Family::default();
    let [granted, counted, used]: [Bytes<ShareLabels>; 3] = std::array::from_fn(|_| Family::default());
    let compute: Family<ShareLabels, Gauge<f64, AtomicU64>> = Family::default();
    let denied: Family<ShareLabels, Counter> = Family::default();
    let throttled: Family<ShareLabels, Counter<f64, AtomicU64>> = Family::default();
    for container in &snapshot.containers {
        let record = &container.record;
        let pod_uid = record.pod_uid.clone().unwrap_or_default();
        let held = HeldLabels {
            namespace: record.namespace.clone(),
            container_id: record.id.clone(),
            container: record.name.clone(),
            pod_uid: pod_uid.clone(),
            memory_held_by: record.memory_held_by.to_string(),
        };
        held_by.get_or_create(&held).set(1);
        let tables = usage(container).unwrap_or_default();
        for (number, share) in record.shares.iter().enumerate() {
            let labels = ShareLabels {
                namespace: record.namespace.clone(),
                container_id: record.id.clone(),
                container: record.name.clone(),
                pod_uid: pod_uid.clone(),
                gpu: share.gpu.clone(),
            };
            let usage = tables.get(number).copied().unwrap_or_default();
            let by_nvml = snapshot.used.get(&(name(container), share.gpu.clone())).copied().unwrap_or(0);
            granted.get_or_create(&labels).set(gauge(share.memory_mib << 20));
            counted.get_or_create(&labels).set(gauge(usage.held));
            used.get_or_create(&labels).set(gauge(by_nvml));
            compute.get_or_create(&labels).set(f64::from(share.compute_percent.unwrap_or(100)) / 100.0);
            denied.get_or_create(&labels).inc_by(usage.denied);
            throttled.get_or_create(&labels).inc_by(usage.throttled as f64 / 1e9);
        }
    }
    registry.register("container_info", "A container with a grant, and what keeps it to its memory limit", held_by);
    registry.register("container_memory_granted_bytes", "A container's memory limit on a GPU", granted);
    registry.register("container_memory_counted_bytes", "What its limiter has counted, which it can change", counted);
    registry.register("container_memory_used_bytes", "What NVML says that its processes use", used);
    registry.register("container_compute_granted_ratio", "Its share of the GPU's compute", compute);
    registry.register("container_allocations_denied", "Allocations that its limiter denied", denied);
    registry.register("container_launches_throttled_seconds", "For how long its limiter held launches back", throttled);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::watchdog::GpuNow;

    #[test]
    fn what_is_exposed() {
        let record = serde_json::from_str(
            r#"{"namespace": "k8s.io", "id": "c1", "name": "trainer", "podUid": "p1", "origin": "test", "driverVersion": "615.20",
                "shares": [{"gpu": "GPU-0", "memoryMiB": 1024, "computePercent": 50}], "driverCapabilities": ["compute"],
                "droppedCapabilities": [], "memoryHeldBy": "driver"}"#,
        );
        let container = Arc::new(Container { record: record.unwrap(), folder: "/nothing".into() });
        let gpu = GpuNow { uuid: "GPU-0".into(), index: 0, memory_bytes: 8 << 30, used_bytes: 5 };
        let snapshot = Snapshot {
            gpus: vec![gpu],
            used: [((name(&container), "GPU-0".to_owned()), 7)].into(),
            containers: vec![container],
            strangers: [(("GPU-0".to_owned(), true), (2, 9))].into(),
            xids: [((0, 79), 3)].into(),
            ended: [(("GPU-0".to_owned(), "over_limit"), 1)].into(),
            ..Snapshot::default()
        };
        let agent = AgentState { driver_version: "615.20".into(), memory_caps: MemoryCaps::Dmem, mps: Vec::new() };
        let usage = Usage { held: 6, denied: 4, throttled: 1_500_000_000 };
        let daemon = mps::Seen { gpus: "GPU-0,GPU-1".into(), runs: true, starts: 2 };
        let text = text(&agent, &snapshot, &[daemon], |_| Some(vec![usage])).unwrap();
        let share = r#"{namespace="k8s.io",container_id="c1",container="trainer",pod_uid="p1",gpu="GPU-0"}"#;
        for line in [
            "gpufence_driver_info{version=\"615.20\",memory_caps=\"dmem\"} 1".to_owned(),
            "gpufence_gpu_memory_free_bytes{gpu=\"GPU-0\",index=\"0\"} 7516192768".into(),
            "gpufence_mps_daemon_up{gpus=\"GPU-0,GPU-1\"} 1".into(),
            "gpufence_mps_daemon_starts_total{gpus=\"GPU-0,GPU-1\"} 2".into(),
            "gpufence_gpu_xid_errors_total{index=\"0\",xid=\"79\"} 3".into(),
            "gpufence_gpu_ungranted_processes{gpu=\"GPU-0\",place=\"container\"} 2".into(),
            "gpufence_watchdog_ended_processes_total{gpu=\"GPU-0\",reason=\"over_limit\"} 1".into(),
            format!("gpufence_container_memory_granted_bytes{share} 1073741824"),
            format!("gpufence_container_memory_counted_bytes{share} 6"),
            format!("gpufence_container_memory_used_bytes{share} 7"),
            format!("gpufence_container_compute_granted_ratio{share} 0.5"),
            format!("gpufence_container_allocations_denied_total{share} 4"),
            format!("gpufence_container_launches_throttled_seconds_total{share} 1.5"),
            "gpufence_container_info{namespace=\"k8s.io\",container_id=\"c1\",container=\"trainer\",pod_uid=\"p1\",memory_held_by=\"driver\"} 1".into(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
