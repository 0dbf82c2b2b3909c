//! A cluster of made-up nodes behind [`ApiServer`], and extenders on it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use axum::{
    Router,
    body::{Body, to_bytes},
    http::Request,
};
use gpufence_extender::{
    Extender,
    leader::{Election, Leadership},
    policy::Choosing,
    server,
};
use gpufence_grant::{
    Recipients,
    annotation::{GRANT, GRANT_SIGNATURE},
    json,
    signature::Keyring,
    signing::PrivateKey,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tower::ServiceExt;

use crate::api_server::ApiServer;

/// The namespace of the Pods.
pub const NAMESPACE: &str = "team";

/// An extender that runs. Dropped, it is as if killed.
pub struct Running {
    /// Itself.
    pub extender: Arc<Extender>,
    router: Router,
    _tasks: JoinSet<()>,
}

/// A node with GPUs of so many MiB, whose UUIDs begin with its number.
pub fn node(number: usize, memories: &[u64]) -> Value {
    let gpus: Vec<Value> = memories
        .iter()
        .enumerate()
        .map(|(index, memory)| json!({"uuid": uuid(number, index), "index": index, "model": "NVIDIA H200", "memoryMiB": memory}))
        .collect();
    let inventory = json!({"version": 1, "driverVersion": "550.163.01", "gpus": gpus}).to_string();
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": format!("node-{number}"), "annotations": {"gpufence.dev/inventory": inventory}},
        "status": {"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{number}")}]},
    })
}

/// A GPU of such a node.
pub fn uuid(node: usize, index: usize) -> String {
    format!("GPU-{node:08}-0000-4000-8000-{index:012}")
}

/// A Pod whose only container asks for that.
pub fn pod(name: &str, uid: &str, limits: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid},
        "spec": {"containers": [{"name": "trainer", "image": "i", "resources": {"limits": limits}}]},
        "status": {"phase": "Pending"},
    })
}

/// A Pod that asks for so many MiB.
pub fn pod_of(name: &str, memory_mib: u64) -> Value {
    pod(name, &format!("uid-of-{name}"), &json!({"gpufence.dev/gpu-memory": memory_mib.to_string()}))
}

impl Running {
    /// Starts one that leads, and waits until it has read all.
    pub async fn start(api: &ApiServer, key: &PrivateKey) -> Result<Self> {
        Self::start_with(api, key, Choosing::default(), None, Duration::from_millis(200)).await
    }

    /// Starts one of several, where an election is given.
    pub async fn start_with(
        api: &ApiServer,
        key: &PrivateKey,
        choosing: Choosing,
        election: Option<Election>,
        certain: Duration,
    ) -> Result<Self> {
        let key = PrivateKey::from_pem(&key.to_pem()?)?;
        let leadership = if election.is_some() { Leadership::contested() } else { Leadership::alone() };
        let extender = Arc::new(Extender::new(api.client()?, key, Keyring::default(), choosing, leadership));
        let tasks = extender.start(election, certain);
        let running = Self { router: server::router(extender.clone()), extender, _tasks: tasks };
        if !running.until(|| running.extender.synced.once()).await {
            bail!("the extender doesn't read the cluster");
        }
        Ok(running)
    }

    /// Whether something comes true within some seconds.
    pub async fn until(&self, mut what: impl FnMut() -> bool) -> bool {
        for _ in 0..1500 {
            if what() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        false
    }

    /// A request as kube-scheduler makes it: the status and the answer.
    pub async fn call(&self, path: &str, body: &str) -> Result<(u16, String)> {
        let request = if body.is_empty() { Request::get(path) } else { Request::post(path) };
        let answer = self.router.clone().oneshot(request.body(Body::from(body.to_owned()))?).await?;
        let status = answer.status().as_u16();
        let bytes = to_bytes(answer.into_body(), 64 << 20).await?;
        Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// A request with a JSON answer.
    pub async fn ask(&self, path: &str, body: &Value) -> Result<Value> {
        let (status, text) = self.call(path, &body.to_string()).await?;
        serde_json::from_str(&text).with_context(|| format!("{path}: {status} {text}"))
    }

    /// Asks which nodes would do.
    pub async fn filter(&self, pod: &Value, nodes: &[&str]) -> Result<Value> {
        self.ask("/gpufence/filter", &json!({"Pod": pod, "Nodes": null, "NodeNames": nodes})).await
    }

    /// Binds; the error that kube-scheduler is told.
    pub async fn bind(&self, pod: &Value, node: &str) -> Result<String> {
        let metadata = &pod["metadata"];
        let arguments = json!({
            "PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"], "Node": node,
        });
        let answer = self.ask("/gpufence/bind", &arguments).await?;
        Ok(answer["Error"].as_str().unwrap_or_default().to_owned())
    }
}

/// What the Pods of the API server hold of each GPU, in MiB: read from their annotations as a node would, with nothing of
/// the extender's. A grant that isn't as it should be is an error.
pub fn held(api: &ApiServer, key: &PrivateKey) -> Result<BTreeMap<String, u64>> {
    let keys = Keyring::new([key.public().clone()]);
    let mut held = BTreeMap::new();
    for pod in api.list("pods") {
        let ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let Some(node) = pod["spec"]["nodeName"].as_str().filter(|_| !ended) else { continue };
        let annotation = |name: &str| pod["metadata"]["annotations"][name].as_str().unwrap_or_default();
        keys.verify(annotation(GRANT), annotation(GRANT_SIGNATURE))?;
        let grant = json::parse(annotation(GRANT))?;
        anyhow::ensure!(grant.pod_uid.as_deref() == pod["metadata"]["uid"].as_str(), "another Pod's: {grant:?}");
        anyhow::ensure!(grant.node.as_deref() == Some(node), "another node's: {grant:?}");
        let Recipients::Named(containers) = grant.recipients else { bail!("of the short form") };
        for share in containers.into_values().flatten() {
            *held.entry(share.gpu.to_string()).or_default() += share.memory_mib;
        }
    }
    Ok(held)
}
