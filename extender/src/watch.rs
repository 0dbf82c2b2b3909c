//! Watches of nodes and Pods, which keep the ledger true.

use std::{collections::HashSet, fmt::Debug, pin::pin, sync::Arc, time::Duration};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, Resource,
    runtime::watcher::{self, Event, watcher},
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::{ledger::Ledger, metrics::Metrics, pod};
use gpufence_grant::signature::Keyring;

/// The longest pause before a watch that failed is tried again.
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// How many objects are read at a time.
const PAGE: u32 = 500;

/// Up to which term's beginning all nodes and all Pods have been read.
#[derive(Debug)]
pub struct Synced {
    nodes: watch::Sender<Option<u64>>,
    pods: watch::Sender<Option<u64>>,
}

impl Default for Synced {
    fn default() -> Self {
        Self { nodes: watch::Sender::new(None), pods: watch::Sender::new(None) }
    }
}

impl Synced {
    /// Whether all has been read at least once.
    pub fn once(&self) -> bool {
        self.nodes.borrow().is_some() && self.pods.borrow().is_some()
    }

    /// Whether all has been read since that term began.
    pub fn since(&self, term: u64) -> bool {
        let since = |synced: &watch::Sender<Option<u64>>| synced.borrow().is_some_and(|at| at >= term);
        since(&self.nodes) && since(&self.pods)
    }
}

/// What is done with one kind of object.
trait Keep<K> {
    fn begin(&mut self);
    fn put(&mut self, object: &K);
    fn remove(&mut self, object: &K);
    fn end(&mut self);
}

struct Nodes {
    ledger: Arc<Ledger>,
    seen: HashSet<String>,
}

impl Keep<Node> for Nodes {
    fn begin(&mut self) {
        self.seen.clear();
    }

    fn put(&mut self, node: &Node) {
        self.seen.extend(node.metadata.name.clone());
        self.ledger.set_node(node);
    }

    fn remove(&mut self, node: &Node) {
        self.ledger.remove_node(node.metadata.name.as_deref().unwrap_or_default());
    }

    fn end(&mut self) {
        self.ledger.keep_nodes(&std::mem::take(&mut self.seen));
    }
}

struct Pods {
    ledger: Arc<Ledger>,
    keys: Arc<Keyring>,
    metrics: Arc<Metrics>,
}

impl Keep<Pod> for Pods {
    fn begin(&mut self) {
        self.ledger.begin_pods();
    }

    fn put(&mut self, pod: &Pod) {
        if let Some(view) = pod::view(pod, &self.keys) {
            if let pod::Standing::Bound { fault: Some(_), .. } = &view.standing {
                self.metrics.uncounted.inc();
            }
            self.ledger.set_pod(view);
        }
    }

    fn remove(&mut self, pod: &Pod) {
        self.ledger.remove_pod(pod.metadata.uid.as_deref().unwrap_or_default());
    }

    fn end(&mut self) {
        self.ledger.end_pods();
    }
}

/// Keeps the nodes of the ledger true, for good.
pub async fn nodes(
    client: Client,
    ledger: Arc<Ledger>,
    metrics: Arc<Metrics>,
    terms: watch::Receiver<u64>,
    synced: Arc<Synced>,
) {
    let keep = Nodes { ledger, seen: HashSet::new() };
    follow(Api::<Node>::all(client), "nodes", keep, &metrics, terms, &synced.nodes).await;
}

/// Keeps its Pods true.
pub async fn pods(
    client: Client,
    ledger: Arc<Ledger>,
    keys: Arc<Keyring>,
    metrics: Arc<Metrics>,
    terms: watch::Receiver<u64>,
    synced: Arc<Synced>,
) {
    let keep = Pods { ledger, keys, metrics: metrics.clone() };
    follow(Api::<Pod>::all(client), "pods", keep, &metrics, terms, &synced.pods).await;
}

/// Reads all objects, then follows their changes; anew with each term, and where the API server has forgotten where we were.
async fn follow<K>(
    api: Api<K>,
    what: &'static str,
    mut keep: impl Keep<K>,
    metrics: &Metrics,
    mut terms: watch::Receiver<u64>,
    synced: &watch::Sender<Option<u64>>,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    loop {
        let term = *terms.borrow_and_update();
        let mut stream = pin!(watcher(api.clone(), watcher::Config::default().page_size(PAGE)));
        let mut pause = Duration::from_millis(100);
        loop {
            let event = tokio::select! {
                event = stream.next() => event,
                changed = terms.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    break;
                }
            };
            match event {
                Some(Ok(event)) => {
                    pause = Duration::from_millis(100);
                    match event {
                        Event::Init => keep.begin(),
                        Event::InitApply(object) | Event::Apply(object) => keep.put(&object),
                        Event::Delete(object) => keep.remove(&object),
                        Event::InitDone => {
                            keep.end();
                            synced.send_replace(Some(term));
                        }
                    }
                }
                Some(Err(error)) => {
                    metrics.watch_errors.inc();
                    tracing::warn!("the watch of {what} failed, and is tried again: {error}");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(MAX_PAUSE);
                }
                None => break,
            }
        }
    }
}
