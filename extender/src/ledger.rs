//! Who has what: the nodes with what is granted of each, and the Pods. In memory alone; the API's objects are the record.
//!
//! Each node has a lock of its own, under which shares are chosen and counted in one step. What was chosen counts from
//! then on, before the API server has heard of it, and until it is known that it came to nothing.
//!
//! Locks are taken in one order: the table of Pods, the table of nodes, one node.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use gpufence_grant::inventory::{INVENTORY, NodeInventory};
use k8s_openapi::api::core::v1::Node;

use crate::{
    device::{NodeState, Uid},
    place::{self, Placement},
    pod::{PodName, PodView, Standing},
    policy::Choosing,
    reason::Refusal,
    request::PodRequest,
};

/// What was chosen for a Pod on a node, in the words that the API server is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// The grant.
    pub grant: String,
    /// Its signature.
    pub signature: String,
}

/// A choice that may or may not have reached the API server.
#[derive(Debug, Clone)]
struct Doubt {
    node: Arc<str>,
    chosen: Chosen,
    since: Instant,
    /// How many binds are at it right now.
    at_work: usize,
}

#[derive(Debug)]
struct Entry {
    name: PodName,
    /// The node that the API server has bound it to.
    bound: Option<Arc<str>>,
    /// Choices that aren't known to have come to something or nothing.
    doubts: Vec<Doubt>,
    /// What it asks for, while it waits.
    request: Option<Arc<PodRequest>>,
    /// The reading of all Pods by which it was last known to be there.
    epoch: u64,
}

#[derive(Debug, Default)]
struct Pods {
    entries: HashMap<Uid, Entry>,
    epoch: u64,
}

impl Pods {
    /// Forgets a Pod that has nothing and that no watch has told of.
    fn forget_if_nothing(&mut self, uid: &str) {
        let nothing = |entry: &Entry| entry.bound.is_none() && entry.doubts.is_empty() && entry.request.is_none();
        if self.entries.get(uid).is_some_and(nothing) {
            self.entries.remove(uid);
        }
    }
}

/// One node, with its lock.
#[derive(Debug)]
pub struct NodeLock(Mutex<NodeState>);

impl NodeLock {
    /// The node, for oneself.
    pub fn lock(&self) -> MutexGuard<'_, NodeState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why nothing was reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoReservation {
    /// The Pod has a node already.
    Bound(Arc<str>),
    /// It doesn't go there.
    Refused(Refusal),
    /// The choice couldn't be written down.
    Unwritten(String),
}

/// Who has what.
#[derive(Debug)]
pub struct Ledger {
    choosing: Choosing,
    pods: Mutex<Pods>,
    nodes: RwLock<HashMap<Arc<str>, Arc<NodeLock>>>,
}

impl Ledger {
    /// An empty one.
    pub fn new(choosing: Choosing) -> Self {
        Self { choosing, pods: Mutex::default(), nodes: RwLock::default() }
    }

    fn pods(&self) -> MutexGuard<'_, Pods> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node by name.
    pub fn node(&self, name: &str) -> Option<Arc<NodeLock>> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// All nodes, by name.
    pub fn nodes(&self) -> Vec<Arc<NodeLock>> {
        let nodes = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        let mut list: Vec<_> = nodes.iter().collect();
        list.sort_by(|left, right| left.0.cmp(right.0));
        list.into_iter().map(|(_, node)| node.clone()).collect()
    }

    /// Does something with each of the named nodes, and with `None` for those that aren't known.
    pub fn for_each<T>(&self, names: impl IntoIterator<Item = T>, mut each: impl FnMut(T, Option<&NodeState>))
    where
        T: AsRef<str>,
    {
        let nodes = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            match nodes.get(name.as_ref()) {
                Some(node) => each(name, Some(&node.lock())),
                None => each(name, None),
            }
        }
    }

    fn node_or_new(&self, name: &Arc<str>) -> Arc<NodeLock> {
        if let Some(node) = self.node(name) {
            return node;
        }
        let mut nodes = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(NodeLock(Mutex::new(NodeState::new(name.clone()))));
        nodes.entry(name.clone()).or_insert_with(new).clone()
    }

    /// Takes what the API says of a node.
    pub fn set_node(&self, node: &Node) {
        let Some(name) = node.metadata.name.as_deref() else { return };
        let choosing = self.choosing.on(node);
        let annotations = node.metadata.annotations.as_ref();
        let inventory = match annotations.and_then(|annotations| annotations.get(INVENTORY)) {
            Some(text) => NodeInventory::parse(text).map_err(|error| error.to_string()),
            None => Err("it has no inventory; does gpufence-node run there?".into()),
        };
        let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref());
        let address = addresses.into_iter().flatten().find(|address| address.type_ == "InternalIP");
        let address = address.map(|address| address.address.clone()).unwrap_or_default();
        let lock = self.node_or_new(&name.into());
        let mut state = lock.lock();
        state.address = address;
        let (choosing, inventory) = match choosing {
            Ok(choosing) => (choosing, inventory),
            Err(fault) => (self.choosing, Err(fault)),
        };
        state.choosing = choosing;
        state.set_inventory(inventory);
    }

    /// A node is gone. What Pods had there stays counted until they are gone too, in case it comes back.
    pub fn remove_node(&self, name: &str) {
        let Some(lock) = self.node(name) else { return };
        lock.lock().set_inventory(Err("the cluster has no such node".into()));
        let mut nodes = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|_, lock| {
            let state = lock.lock();
            &*state.name != name || !state.pods().is_empty()
        });
    }

    /// Keeps only the nodes of a reading of all of them.
    pub fn keep_nodes(&self, seen: &HashSet<String>) {
        for lock in self.nodes() {
            let name = lock.lock().name.clone();
            if !seen.contains(&*name) {
                self.remove_node(&name);
            }
        }
    }

    /// A reading of all Pods begins.
    pub fn begin_pods(&self) {
        self.pods().epoch += 1;
    }

    /// A reading of all Pods is complete: those that it didn't show, and that weren't bound meanwhile, are gone.
    pub fn end_pods(&self) {
        let mut pods = self.pods();
        let epoch = pods.epoch;
        let gone: Vec<Uid> = pods
            .entries
            .iter()
            .filter(|(_, entry)| entry.epoch < epoch && entry.doubts.iter().all(|doubt| doubt.at_work == 0))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in gone {
            self.forget(&mut pods, &uid);
        }
    }

    /// Takes what the API says of a Pod.
    pub fn set_pod(&self, view: PodView) {
        let PodView { uid, name, standing } = view;
        let mut pods = self.pods();
        let epoch = pods.epoch;
        match standing {
            Standing::Ended => self.forget(&mut pods, &uid),
            Standing::Waiting(request) => {
                let new = || Entry { name: name.clone(), bound: None, doubts: Vec::new(), request: None, epoch };
                let entry = pods.entries.entry(uid).or_insert_with(new);
                entry.epoch = epoch;
                entry.name = name;
                // Older news than a bind that we know of.
                if entry.bound.is_none() {
                    entry.request = request.ok();
                }
            }
            Standing::Bound { node, uses, fault } => {
                if let Some(fault) = fault {
                    tracing::warn!(namespace = name.namespace, pod = name.name, %node, "a grant doesn't count: {fault}");
                }
                if let Some(entry) = pods.entries.get(&uid) {
                    for other in entry.nodes() {
                        if other != node || uses.is_none() {
                            self.release(&other, &uid);
                        }
                    }
                }
                match uses {
                    Some(uses) => {
                        self.node_or_new(&node).lock().grant(uid.clone(), uses);
                        pods.entries
                            .insert(uid, Entry { name, bound: Some(node), doubts: Vec::new(), request: None, epoch });
                    }
                    // Bound by somebody else, with nothing from us.
                    None => {
                        pods.entries.remove(&uid);
                    }
                }
            }
        }
    }

    /// A Pod is gone.
    pub fn remove_pod(&self, uid: &str) {
        self.forget(&mut self.pods(), uid);
    }

    fn forget(&self, pods: &mut Pods, uid: &str) {
        if let Some(entry) = pods.entries.remove(uid) {
            for node in entry.nodes() {
                self.release(&node, uid);
            }
        }
    }

    fn release(&self, node: &str, uid: &str) {
        if let Some(lock) = self.node(node) {
            lock.lock().release(uid);
        }
    }

    /// Chooses for a Pod on a node, and counts it. Where that was done before and it isn't known what became of it, the
    /// same choice is given again. `write` puts it into words.
    pub fn reserve(
        &self,
        uid: &Uid,
        name: &PodName,
        node: &str,
        request: &PodRequest,
        write: impl FnOnce(&Placement) -> Result<Chosen, String>,
    ) -> Result<Chosen, NoReservation> {
        let mut pods = self.pods();
        let epoch = pods.epoch;
        if let Some(entry) = pods.entries.get_mut(uid) {
            if let Some(bound) = &entry.bound {
                return Err(NoReservation::Bound(bound.clone()));
            }
            if let Some(doubt) = entry.doubts.iter_mut().find(|doubt| &*doubt.node == node) {
                doubt.at_work += 1;
                return Ok(doubt.chosen.clone());
            }
        }
        let unknown = || NoReservation::Refused(Refusal::never(node, "the cluster has no such node"));
        let lock = self.node(node).ok_or_else(unknown)?;
        let mut state = lock.lock();
        let placement = place::place(&state, request).map_err(NoReservation::Refused)?;
        let chosen = write(&placement).map_err(NoReservation::Unwritten)?;
        state.grant(uid.clone(), placement.uses);
        let doubt = Doubt { node: state.name.clone(), chosen: chosen.clone(), since: Instant::now(), at_work: 1 };
        drop(state);
        let new = || Entry { name: name.clone(), bound: None, doubts: Vec::new(), request: None, epoch };
        let entry = pods.entries.entry(uid.clone()).or_insert_with(new);
        entry.epoch = epoch;
        entry.doubts.push(doubt);
        Ok(chosen)
    }

    /// The API server has bound the Pod with that choice.
    pub fn confirm(&self, uid: &str, node: &str) {
        let mut pods = self.pods();
        // Gone already: it ended, or was deleted, between the bind and now.
        let Some(entry) = pods.entries.get_mut(uid) else { return };
        if entry.bound.is_some() {
            return;
        }
        let doubts = std::mem::take(&mut entry.doubts);
        entry.request = None;
        for doubt in doubts {
            if &*doubt.node == node {
                entry.bound = Some(doubt.node);
            } else {
                self.release(&doubt.node, uid);
            }
        }
    }

    /// The choice came to nothing, for certain.
    pub fn give_back(&self, uid: &str, node: &str) {
        let mut pods = self.pods();
        let Some(entry) = pods.entries.get_mut(uid) else { return };
        let Some(position) = entry.doubts.iter().position(|doubt| &*doubt.node == node) else { return };
        entry.doubts[position].at_work = entry.doubts[position].at_work.saturating_sub(1);
        // Another bind of the same choice may still have come to something.
        if entry.doubts[position].at_work == 0 {
            entry.doubts.remove(position);
            self.release(node, uid);
            pods.forget_if_nothing(uid);
        }
    }

    /// It isn't known what became of the choice. It stays counted.
    pub fn leave_in_doubt(&self, uid: &str, node: &str) {
        let mut pods = self.pods();
        let entry = pods.entries.get_mut(uid);
        if let Some(doubt) = entry.and_then(|entry| entry.doubts.iter_mut().find(|doubt| &*doubt.node == node)) {
            doubt.at_work = doubt.at_work.saturating_sub(1);
            doubt.since = Instant::now();
        }
    }

    /// Choices that nobody is at, of which it hasn't been known for so long what became of them: UID, name, node.
    pub fn in_doubt(&self, for_longer_than: Duration) -> Vec<(Uid, PodName, Arc<str>)> {
        let pods = self.pods();
        let old = |doubt: &&Doubt| doubt.at_work == 0 && doubt.since.elapsed() >= for_longer_than;
        let of = |(uid, entry): (&Uid, &Entry)| {
            let (uid, name) = (uid.clone(), entry.name.clone());
            entry
                .doubts
                .iter()
                .filter(old)
                .map(move |doubt| (uid.clone(), name.clone(), doubt.node.clone()))
                .collect::<Vec<_>>()
        };
        pods.entries.iter().flat_map(of).collect()
    }

    /// Takes back a choice that nobody is at.
    pub fn drop_doubt(&self, uid: &str, node: &str) {
        let mut pods = self.pods();
        let Some(entry) = pods.entries.get_mut(uid) else { return };
        let before = entry.doubts.len();
        entry.doubts.retain(|doubt| doubt.at_work > 0 || &*doubt.node != node);
        if entry.doubts.len() < before {
            self.release(node, uid);
            pods.forget_if_nothing(uid);
        }
    }

    /// What a waiting Pod asks for, if the API has told.
    pub fn request_of(&self, uid: &str) -> Option<(PodName, Arc<PodRequest>)> {
        let pods = self.pods();
        let entry = pods.entries.get(uid)?;
        Some((entry.name.clone(), entry.request.clone()?))
    }

    /// What Pods are called, of those that have something or wait.
    pub fn names(&self, uids: impl IntoIterator<Item = Uid>) -> HashMap<Uid, PodName> {
        let pods = self.pods();
        uids.into_iter().filter_map(|uid| Some((uid.clone(), pods.entries.get(&uid)?.name.clone()))).collect()
    }

    /// How many Pods have something, wait, and are in doubt.
    pub fn counts(&self) -> (usize, usize, usize) {
        let pods = self.pods();
        let bound = pods.entries.values().filter(|entry| entry.bound.is_some()).count();
        let doubts = pods.entries.values().filter(|entry| entry.bound.is_none() && !entry.doubts.is_empty()).count();
        (bound, pods.entries.len() - bound - doubts, doubts)
    }
}

impl Entry {
    /// Where it is counted.
    fn nodes(&self) -> Vec<Arc<str>> {
        self.bound.iter().chain(self.doubts.iter().map(|doubt| &doubt.node)).cloned().collect()
    }
}
