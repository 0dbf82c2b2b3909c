//! What Prometheus is told. Names begin with `gpufence_extender_`.

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

/// A verb and what it came to: `done`, `refused` or `failed`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Call {
    /// `filter`, `prioritize`, `bind` or `preempt`.
    pub verb: &'static str,
    /// What it came to.
    pub result: &'static str,
}

/// A verb.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Verb {
    /// `filter`, `prioritize`, `bind` or `preempt`.
    pub verb: &'static str,
}

/// What is counted as it happens.
#[derive(Debug)]
pub struct Metrics {
    /// Calls by kube-scheduler.
    pub calls: Family<Call, Counter>,
    /// How long they took, in seconds.
    pub seconds: Family<Verb, Histogram, fn() -> Histogram>,
    /// Watches that failed and were tried again.
    pub watch_errors: Counter,
    /// Times that a bound Pod was seen with a grant that doesn't count.
    pub uncounted: Counter,
}

/// What is counted when asked.
#[derive(Debug, Clone, Copy, Default)]
pub struct Now {
    /// Whether we lead.
    pub leads: bool,
    /// Whether all has been read.
    pub synced: bool,
    /// Pods with a grant, that wait, and of which it isn't known whether they are bound.
    pub pods: (usize, usize, usize),
    /// Nodes with and without a usable inventory.
    pub nodes: (usize, usize),
    /// MiB of GPU memory that may be granted, and that is.
    pub memory: (u64, u64),
}

impl Default for Metrics {
    fn default() -> Self {
        let buckets = || Histogram::new(exponential_buckets(0.0001, 2.0, 16));
        Self {
            calls: Family::default(),
            seconds: Family::new_with_constructor(buckets),
            watch_errors: Counter::default(),
            uncounted: Counter::default(),
        }
    }
}

impl Metrics {
    /// The text of all.
    pub fn text(&self, now: &Now) -> Result<String, std::fmt::Error> {
        let mut registry = Registry::with_prefix("gpufence_extender");
        registry.register("calls", "Calls by kube-scheduler", self.calls.clone());
        registry.register("call_seconds", "How long they took", self.seconds.clone());
        registry.register("watch_errors", "Watches that failed and were tried again", self.watch_errors.clone());
        registry.register(
            "uncounted_grants",
            "Times that a bound Pod was seen with a grant that doesn't count",
            self.uncounted.clone(),
        );
        let number = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        let bytes = |mib: u64| i64::try_from(mib << 20).unwrap_or(i64::MAX);
        for (name, help, value) in [
            ("leader", "1 if this one binds", i64::from(now.leads)),
            ("synced", "1 if all nodes and Pods have been read", i64::from(now.synced)),
            ("pods_granted", "Pods with a grant", number(now.pods.0)),
            ("pods_waiting", "Pods that ask for GPUs and have no node", number(now.pods.1)),
            ("pods_in_doubt", "Pods of which it isn't known whether they are bound", number(now.pods.2)),
            ("nodes_usable", "Nodes with an inventory", number(now.nodes.0)),
            ("nodes_unusable", "Nodes without one", number(now.nodes.1)),
            ("memory_grantable_bytes", "GPU memory that may be granted", bytes(now.memory.0)),
            ("memory_granted_bytes", "GPU memory that is granted", bytes(now.memory.1)),
        ] {
            let gauge = Gauge::<i64>::default();
            gauge.set(value);
            registry.register(name, help, gauge);
        }
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}
