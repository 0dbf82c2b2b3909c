//! Leader election: of several extenders the one that holds the Lease binds.
//!
//! The rule that matters: who binds has the Lease for longer than a bind can take. The holder counts from before it asked
//! for the Lease, everyone else from when they saw it change, each by its own monotonic clock; so clocks that differ don't matter.
//! Who becomes the leader reads all Pods anew before it binds, and so sees all that its predecessor has bound.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::{
        coordination::v1::{Lease, LeaseSpec},
        core::v1::Pod,
    },
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::sync::watch;

/// The label on the leader's own Pod, by which the Service finds it.
pub const LEADER_LABEL: &str = "gpufence.dev/leader";

/// Who takes part, for which Lease.
#[derive(Debug, Clone)]
pub struct Election {
    /// The Lease's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Ours, unlike every other's.
    pub identity: String,
    /// Our own Pod in that namespace, which bears [`LEADER_LABEL`] while we lead.
    pub own_pod: Option<String>,
    /// For how long the Lease holds, in whole seconds.
    pub duration: Duration,
}

/// Whether we lead.
#[derive(Debug)]
pub struct Leadership {
    /// Until when, as long as it lasts; `None` for one that nobody contests.
    until: Mutex<Option<Instant>>,
    contested: bool,
    holder: Mutex<String>,
    /// Our Pod may bear the label though we don't lead.
    mislabelled: AtomicBool,
    /// How often we have begun to lead: with each time all Pods are read anew.
    terms: watch::Sender<u64>,
}

impl Leadership {
    /// Of the only one there is.
    pub fn alone() -> Self {
        Self { contested: false, ..Self::contested() }
    }

    /// Of one among several, which leads once it has the Lease.
    pub fn contested() -> Self {
        Self {
            until: Mutex::default(),
            contested: true,
            holder: Mutex::default(),
            mislabelled: AtomicBool::new(false),
            terms: watch::Sender::new(0),
        }
    }

    /// For how much longer we lead at least; `None`: we don't.
    pub fn remaining(&self) -> Option<Duration> {
        if !self.contested {
            return Some(Duration::MAX);
        }
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        until?.checked_duration_since(Instant::now())
    }

    /// Who has the Lease, as far as is known.
    pub fn holder(&self) -> String {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How often we have begun to lead.
    pub fn terms(&self) -> watch::Receiver<u64> {
        self.terms.subscribe()
    }

    /// Whether requests may be sent our way though another leads.
    pub fn is_mislabelled(&self) -> bool {
        self.mislabelled.load(Ordering::Relaxed)
    }

    fn set(&self, until: Option<Instant>, holder: &str) {
        holder.clone_into(&mut self.holder.lock().unwrap_or_else(PoisonError::into_inner));
        let led = self.remaining().is_some();
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = until;
        if until.is_some() && !led {
            self.terms.send_modify(|terms| *terms += 1);
        }
    }
}

/// The Lease as somebody else held it, and since when we have seen it so.
#[derive(Debug, Default)]
pub struct Seen(Option<(String, Instant)>);

/// What a try came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tried {
    /// It is ours until then.
    Held(Instant),
    /// It is another's.
    Other(String),
}

/// Tries once to take the Lease, or to keep it.
pub async fn try_once(client: &Client, election: &Election, seen: &mut Seen) -> kube::Result<Tried> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), &election.namespace);
    let asked = Instant::now();
    let until = asked + election.duration;
    let now = MicroTime(Timestamp::now());
    let seconds = i32::try_from(election.duration.as_secs()).unwrap_or(i32::MAX);
    let Some(lease) = leases.get_opt(&election.name).await? else {
        let lease = Lease {
            metadata: ObjectMeta { name: Some(election.name.clone()), ..ObjectMeta::default() },
            spec: Some(LeaseSpec {
                holder_identity: Some(election.identity.clone()),
                lease_duration_seconds: Some(seconds),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
                lease_transitions: Some(0),
                ..LeaseSpec::default()
            }),
        };
        leases.create(&PostParams::default(), &lease).await?;
        return Ok(Tried::Held(until));
    };
    let mut lease = lease;
    let spec = lease.spec.get_or_insert_default();
    let holder = spec.holder_identity.clone().unwrap_or_default();
    let version = lease.metadata.resource_version.clone().unwrap_or_default();
    let ours = holder == election.identity;
    if !ours && !holder.is_empty() {
        // Its own duration holds, whatever ours is.
        let theirs = Duration::from_secs(spec.lease_duration_seconds.and_then(|it| it.try_into().ok()).unwrap_or(15));
        match &seen.0 {
            Some((known, since)) if *known == version && since.elapsed() > theirs => {}
            Some((known, _)) if *known == version => return Ok(Tried::Other(holder)),
            _ => {
                seen.0 = Some((version, Instant::now()));
                return Ok(Tried::Other(holder));
            }
        }
    }
    if !ours {
        spec.holder_identity = Some(election.identity.clone());
        spec.acquire_time = Some(now.clone());
        spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0).saturating_add(1));
    }
    spec.lease_duration_seconds = Some(seconds);
    spec.renew_time = Some(now);
    // With the version that we read: of two who try at once the API server takes one.
    leases.replace(&election.name, &PostParams::default(), &lease).await?;
    seen.0 = None;
    Ok(Tried::Held(until))
}

/// Takes part for good.
pub async fn run(client: Client, election: Election, leadership: &Leadership) {
    let mut seen = Seen::default();
    let pause = election.duration / 5;
    // What an earlier run of our Pod left.
    let mut labelled = election.own_pod.is_some();
    loop {
        let tried = tokio::time::timeout(pause * 2, try_once(&client, &election, &mut seen)).await;
        let led = leadership.remaining().is_some();
        match tried {
            Ok(Ok(Tried::Held(until))) => {
                leadership.set(Some(until), &election.identity);
                if !led {
                    tracing::info!(lease = election.name, "leading");
                }
            }
            Ok(Ok(Tried::Other(holder))) => {
                if led {
                    tracing::warn!(holder, "another leads now");
                } else if leadership.holder() != holder {
                    tracing::info!(holder, "another leads");
                }
                leadership.set(None, &holder);
            }
            Ok(Err(error)) => {
                tracing::warn!("the Lease {}/{} can't be renewed: {error}", election.namespace, election.name);
            }
            Err(_) => tracing::warn!("the Lease {}/{} isn't answered for", election.namespace, election.name),
        }
        let leads = leadership.remaining().is_some();
        if leads != labelled
            && let Some(pod) = &election.own_pod
        {
            match label(&client, &election.namespace, pod, leads).await {
                Ok(()) => labelled = leads,
                Err(error) => tracing::warn!("the label {LEADER_LABEL} of Pod {pod} can't be set: {error}"),
            }
        }
        leadership.mislabelled.store(labelled && !leads, Ordering::Relaxed);
        tokio::time::sleep(pause).await;
    }
}

async fn label(client: &Client, namespace: &str, pod: &str, leads: bool) -> kube::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let value = leads.then_some("true");
    let patch = json!({"metadata": {"labels": {(LEADER_LABEL): value}}});
    pods.patch_metadata(pod, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
}

/// Gives the Lease up, so that the next need not wait for its end. No bind may be under way.
pub async fn resign(client: &Client, election: &Election, leadership: &Leadership) {
    if leadership.remaining().is_none() {
        return;
    }
    leadership.set(None, "");
    let leases: Api<Lease> = Api::namespaced(client.clone(), &election.namespace);
    let Ok(mut lease) = leases.get(&election.name).await else { return };
    let spec = lease.spec.get_or_insert_default();
    if spec.holder_identity.as_deref() == Some(&election.identity) {
        spec.holder_identity = Some(String::new());
        if let Err(error) = leases.replace(&election.name, &PostParams::default(), &lease).await {
            tracing::warn!("the Lease {} can't be given up: {error}", election.name);
        }
    }
}
