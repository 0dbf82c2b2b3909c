//! Binding: choose, sign, and tell the API server all in one call.
//!
//! The annotations of a Binding become the Pod's in the same transaction that gives it its node, if it still has the UID
//! that the Binding names. So there is no moment at which a Pod is bound and has no grant, or the other way round, and
//! whoever starts anew finds in the Pods all that was ever granted.
//!
//! Where the answer doesn't come, what was chosen stays counted until it is known what became of it: `resolve`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpufence_grant::{
    Grant, Recipients,
    annotation::{GRANT, GRANT_SIGNATURE},
    json,
};
use k8s_openapi::{
    api::core::v1::{Binding, ObjectReference, Pod},
    jiff::Timestamp,
};
use kube::{
    Api,
    api::{ObjectMeta, PostParams},
};
use serde_json::Value;
use thiserror::Error;

use crate::{
    Extender,
    device::Uid,
    ledger::{Chosen, NoReservation},
    place::Placement,
    pod::{self, PodName},
    request::{self, PodRequest},
    wire::BindingArguments,
};

/// How long the API server has for one answer.
pub const API_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer than that we must lead to begin a bind.
const MARGIN: Duration = Duration::from_secs(1);
/// How often a bind is tried.
const TRIES: usize = 4;
/// After how long a Pod that has no node says for certain that a bind came to nothing: longer than the API server works on
/// a request (60 s by default).
pub const CERTAIN: Duration = Duration::from_secs(75);

/// A Pod that isn't bound.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// We don't lead.
    #[error("this extender doesn't lead, {0}; kube-scheduler will try again")]
    NotLeader(String),
    /// Not all Pods have been read since we lead.
    #[error("the cluster's Pods are still being read; kube-scheduler will try again")]
    NotSynced,
    /// It is gone, or another has its name.
    #[error("the Pod is gone, or another has its name")]
    Gone,
    /// It is being deleted.
    #[error("the Pod is being deleted")]
    Deleted,
    /// It has a node.
    #[error("the Pod is on node {0} already")]
    Bound(String),
    /// It asks for nothing of ours, or for what can't be meant.
    #[error("{0}")]
    Request(String),
    /// It doesn't go there.
    #[error("{0}")]
    Refused(String),
    /// The API server says no.
    #[error("the API server doesn't bind it: {0}")]
    Api(String),
    /// It isn't known whether it is bound.
    #[error(
        "the API server gives no answer, and it isn't known whether the Pod is bound: {0}; its share stays taken until it is"
    )]
    Doubt(String),
}

/// What a call of the API server came to.
enum Answer<T> {
    /// Done.
    Yes(T),
    /// Not done, and the state that we know is old.
    Conflict(String),
    /// Not done.
    No(String),
    /// Perhaps done.
    Unknown(String),
}

async fn answer<T>(call: impl Future<Output = kube::Result<T>>) -> Answer<T> {
    match tokio::time::timeout(API_TIMEOUT, call).await {
        Ok(Ok(value)) => Answer::Yes(value),
        Ok(Err(kube::Error::Api(status))) => match status.code {
            404 | 409 => Answer::Conflict(status.message),
            // 429: not begun.
            400..=499 => Answer::No(status.message),
            _ => Answer::Unknown(status.message),
        },
        Ok(Err(error)) => Answer::Unknown(error.to_string()),
        Err(_) => Answer::Unknown(format!("not within {} s", API_TIMEOUT.as_secs())),
    }
}

impl Extender {
    /// Binds a Pod with a signed grant.
    pub async fn bind(&self, arguments: &BindingArguments) -> Result<(), BindError> {
        let uid: Uid = arguments.pod_uid.as_str().into();
        self.check_leading()?;
        let (name, request) = self.wanted(&uid, arguments).await?;
        let mut last = String::new();
        for _ in 0..TRIES {
            self.check_leading()?;
            let write = |placement: &Placement| self.sign(&uid, &arguments.node, &request, placement);
            let chosen = match self.ledger.reserve(&uid, &name, &arguments.node, &request, write) {
                Ok(chosen) => chosen,
                Err(NoReservation::Bound(node)) => return Err(BindError::Bound(node.to_string())),
                Err(NoReservation::Refused(refusal)) => return Err(BindError::Refused(refusal.why)),
                Err(NoReservation::Unwritten(what)) => return Err(BindError::Request(what)),
            };
            // Dropped half way, as by a client that goes away: it isn't known then what became of it.
            let mut guard = InDoubt { extender: self, uid: &uid, node: &arguments.node, armed: true };
            let answer = answer(self.post_binding(arguments, &chosen)).await;
            let unknown = matches!(answer, Answer::Unknown(_));
            match answer {
                Answer::Yes(_) => {
                    guard.armed = false;
                    self.ledger.confirm(&uid, &arguments.node);
                    return Ok(());
                }
                Answer::No(what) => {
                    guard.armed = false;
                    self.ledger.give_back(&uid, &arguments.node);
                    return Err(BindError::Api(what));
                }
                Answer::Conflict(what) | Answer::Unknown(what) => last = what,
            }
            match self.look(arguments).await {
                Ok(found) => {
                    guard.armed = false;
                    if self.after(&uid, arguments, &chosen, found, unknown)? {
                        return Ok(());
                    }
                }
                // The guard leaves it in doubt.
                Err(what) => return Err(BindError::Doubt(what)),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(BindError::Api(format!("{last} (tried {TRIES} times)")))
    }

    fn check_leading(&self) -> Result<(), BindError> {
        match self.leadership.remaining() {
            Some(remaining) if remaining > API_TIMEOUT + MARGIN => {}
            _ => {
                let holder = self.leadership.holder();
                let who = if holder.is_empty() { "and nobody is known to".into() } else { format!("{holder} does") };
                return Err(BindError::NotLeader(who));
            }
        }
        if self.synced.since(*self.leadership.terms().borrow()) { Ok(()) } else { Err(BindError::NotSynced) }
    }

    /// What the Pod asks for: as the watch has told, else as the API server says now.
    async fn wanted(&self, uid: &Uid, arguments: &BindingArguments) -> Result<(PodName, Arc<PodRequest>), BindError> {
        if let Some((name, request)) = self.ledger.request_of(uid) {
            if name.name != arguments.pod_name || name.namespace != arguments.pod_namespace {
                return Err(BindError::Gone);
            }
            return Ok((name, request));
        }
        let pod = self.look(arguments).await.map_err(BindError::Api)?.ok_or(BindError::Gone)?;
        if let Some(node) = node_of(&pod) {
            return Err(BindError::Bound(node.to_owned()));
        }
        let request = request::read(&pod).map_err(|error| BindError::Request(error.to_string()))?;
        let request = request.ok_or_else(|| BindError::Request("the Pod asks for no GPU of ours".into()))?;
        let name = PodName {
            namespace: arguments.pod_namespace.clone(),
            name: arguments.pod_name.clone(),
            priority: pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0),
        };
        Ok((name, Arc::new(request)))
    }

    /// The Pod of that UID as the API server has it now; `None`: there is none.
    async fn look(&self, arguments: &BindingArguments) -> Result<Option<Pod>, String> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &arguments.pod_namespace);
        match answer(pods.get_opt(&arguments.pod_name)).await {
            Answer::Yes(pod) => Ok(pod.filter(|pod| pod.metadata.uid.as_deref() == Some(&arguments.pod_uid))),
            Answer::Conflict(what) | Answer::No(what) | Answer::Unknown(what) => Err(what),
        }
    }

    fn sign(&self, uid: &Uid, node: &str, request: &PodRequest, placement: &Placement) -> Result<Chosen, String> {
        let grant = Grant {
            pod_uid: Some(uid.to_string()),
            node: Some(node.to_owned()),
            issued_at: Some(Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()),
            mode: request.mode,
            recipients: Recipients::Named(placement.containers.clone()),
        };
        let grant = json::write(&grant).map_err(|error| error.to_string())?;
        let signature = self.key.sign(&grant);
        Ok(Chosen { grant, signature })
    }

    async fn post_binding(&self, arguments: &BindingArguments, chosen: &Chosen) -> kube::Result<Value> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &arguments.pod_namespace);
        let annotations: BTreeMap<String, String> = [(GRANT, &chosen.grant), (GRANT_SIGNATURE, &chosen.signature)]
            .map(|(key, text)| (key.into(), text.clone()))
            .into();
        let binding = Binding {
            metadata: ObjectMeta {
                name: Some(arguments.pod_name.clone()),
                namespace: Some(arguments.pod_namespace.clone()),
                uid: Some(arguments.pod_uid.clone()),
                annotations: Some(annotations),
                ..ObjectMeta::default()
            },
            target: ObjectReference {
                kind: Some("Node".into()),
                name: Some(arguments.node.clone()),
                ..ObjectReference::default()
            },
        };
        pods.create_subresource("binding", &arguments.pod_name, &PostParams::default(), &binding).await
    }

    /// What to make of the Pod after a bind that didn't plainly go well. Whether it is bound as was chosen;
    /// if not, it may be tried again.
    fn after(
        &self,
        uid: &Uid,
        arguments: &BindingArguments,
        chosen: &Chosen,
        found: Option<Pod>,
        unknown: bool,
    ) -> Result<bool, BindError> {
        let node = &arguments.node;
        let Some(pod) = found else {
            self.ledger.remove_pod(uid);
            return Err(BindError::Gone);
        };
        if let Some(bound) = node_of(&pod) {
            let annotations = pod.metadata.annotations.as_ref();
            let ours = annotations.and_then(|annotations| annotations.get(GRANT)) == Some(&chosen.grant);
            if ours && bound == node {
                self.ledger.confirm(uid, node);
                return Ok(true);
            }
            let bound = bound.to_owned();
            self.ledger.give_back(uid, node);
            if let Some(view) = pod::view(&pod, &self.keys) {
                self.ledger.set_pod(view);
            }
            return Err(BindError::Bound(bound));
        }
        if unknown {
            // It may still come to something: the same choice is tried again.
            self.ledger.leave_in_doubt(uid, node);
            return Ok(false);
        }
        self.ledger.give_back(uid, node);
        if pod.metadata.deletion_timestamp.is_some() { Err(BindError::Deleted) } else { Ok(false) }
    }

    /// Finds out what became of binds that gave no answer, for good.
    pub async fn resolve(&self, certain: Duration) {
        loop {
            tokio::time::sleep(certain / 5).await;
            for (uid, name, node) in self.ledger.in_doubt(certain) {
                let arguments = BindingArguments {
                    pod_name: name.name.clone(),
                    pod_namespace: name.namespace.clone(),
                    pod_uid: uid.to_string(),
                    node: node.to_string(),
                };
                match self.look(&arguments).await {
                    Ok(None) => self.ledger.remove_pod(&uid),
                    Ok(Some(pod)) if node_of(&pod).is_some() => {
                        if let Some(view) = pod::view(&pod, &self.keys) {
                            self.ledger.set_pod(view);
                        }
                    }
                    Ok(Some(_)) => {
                        tracing::info!(namespace = name.namespace, pod = name.name, %node, "a bind came to nothing");
                        self.ledger.drop_doubt(&uid, &node);
                    }
                    Err(error) => {
                        tracing::warn!("whether {}/{} is bound isn't known yet: {error}", name.namespace, name.name);
                    }
                }
            }
        }
    }
}

/// Leaves a choice in doubt when a bind ends before it knows.
struct InDoubt<'a> {
    extender: &'a Extender,
    uid: &'a str,
    node: &'a str,
    armed: bool,
}

impl Drop for InDoubt<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.extender.ledger.leave_in_doubt(self.uid, self.node);
        }
    }
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty())
}
