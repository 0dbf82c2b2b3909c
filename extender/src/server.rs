//! HTTP: kube-scheduler's verbs, `/inspect`, health and metrics.

use std::{sync::Arc, time::Instant};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Extender, inspect,
    metrics::{Call, Verb},
    wire::{Arguments, BindingArguments, BindingResult, FilterResult, PreemptionArguments},
};

/// OpenMetrics, as prometheus-client writes it.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The largest request that is read, in bytes: whole Node objects of a large cluster.
pub const MAX_BODY_BYTES: usize = 128 << 20;
/// Where kube-scheduler's verbs are, and where gpushare's extender has them.
pub const PREFIXES: [&str; 2] = ["/gpufence", "/gpushare-scheduler"];

type Shared = State<Arc<Extender>>;

/// All that is served.
pub fn router(extender: Arc<Extender>) -> Router {
    let verbs = || {
        Router::new()
            .route("/filter", post(filter))
            .route("/prioritize", post(prioritize))
            .route("/bind", post(bind))
            .route("/preempt", post(preempt))
            .route("/inspect", get(inspect_all))
            .route("/inspect/{node}", get(inspect_one))
    };
    let mut router = Router::new()
        .route("/inspect", get(inspect_all))
        .route("/inspect/{node}", get(inspect_one))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics));
    for prefix in PREFIXES {
        router = router.nest(prefix, verbs());
    }
    router.layer(DefaultBodyLimit::max(MAX_BODY_BYTES)).with_state(extender)
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|error| format!("the request can't be read: {error}"))
}

impl Extender {
    fn count(&self, verb: &'static str, result: &'static str, since: Instant) {
        self.metrics.calls.get_or_create(&Call { verb, result }).inc();
        self.metrics.seconds.get_or_create(&Verb { verb }).observe(since.elapsed().as_secs_f64());
    }

    /// Answers a verb that the ledger alone can answer.
    fn answer<A: DeserializeOwned, R>(
        &self,
        verb: &'static str,
        body: &[u8],
        answer: impl FnOnce(A) -> Result<R, String>,
    ) -> Result<R, String> {
        let since = Instant::now();
        let synced =
            || if self.synced.once() { Ok(()) } else { Err("the cluster's Pods are still being read".to_owned()) };
        let result = synced().and_then(|()| read(body)).and_then(answer);
        self.count(verb, if result.is_ok() { "done" } else { "failed" }, since);
        result
    }
}

async fn filter(State(extender): Shared, body: Bytes) -> Json<FilterResult> {
    let result = extender.answer("filter", &body, |arguments: Arguments| extender.filter(arguments));
    Json(result.unwrap_or_else(|error| FilterResult { error, ..FilterResult::default() }))
}

async fn prioritize(State(extender): Shared, body: Bytes) -> Response {
    shown(extender.answer("prioritize", &body, |arguments: Arguments| extender.prioritize(&arguments)))
}

async fn preempt(State(extender): Shared, body: Bytes) -> Response {
    shown(extender.answer("preempt", &body, |arguments: PreemptionArguments| extender.preempt(arguments)))
}

/// These answers have no place for an error.
fn shown(result: Result<impl Serialize, String>) -> Response {
    match result {
        Ok(answer) => Json(answer).into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, error + "\n").into_response(),
    }
}

async fn bind(State(extender): Shared, body: Bytes) -> Json<BindingResult> {
    let since = Instant::now();
    let arguments: BindingArguments = match read(&body) {
        Ok(arguments) => arguments,
        Err(error) => {
            extender.count("bind", "failed", since);
            return Json(BindingResult { error });
        }
    };
    // In a task of its own: who asked may go away, and the bind is seen through nevertheless.
    let task = {
        let (extender, arguments) = (extender.clone(), arguments.clone());
        tokio::spawn(async move { extender.bind(&arguments).await.map_err(|error| error.to_string()) })
    };
    let result = task.await.unwrap_or_else(|error| Err(format!("the bind failed: {error}")));
    let BindingArguments { pod_name, pod_namespace, node, .. } = &arguments;
    match &result {
        Ok(()) => tracing::info!(namespace = pod_namespace, pod = pod_name, node, "bound"),
        Err(error) => tracing::warn!(namespace = pod_namespace, pod = pod_name, node, "not bound: {error}"),
    }
    extender.count("bind", if result.is_ok() { "done" } else { "refused" }, since);
    Json(BindingResult { error: result.err().unwrap_or_default() })
}

async fn inspect_all(State(extender): Shared) -> Json<inspect::Cluster> {
    Json(inspect::cluster(&extender.ledger, None))
}

async fn inspect_one(State(extender): Shared, Path(node): Path<String>) -> Response {
    let cluster = inspect::cluster(&extender.ledger, Some(&node));
    if cluster.nodes.is_empty() {
        return (StatusCode::NOT_FOUND, format!("no node {node:.80}\n")).into_response();
    }
    Json(cluster).into_response()
}

/// Ready once all has been read, unless requests come here that belong to another.
async fn readyz(State(extender): Shared) -> Response {
    if !extender.synced.once() {
        return (StatusCode::SERVICE_UNAVAILABLE, "the cluster's nodes and Pods are still being read\n")
            .into_response();
    }
    if extender.leadership.is_mislabelled() {
        let text = format!("another leads: {}\n", extender.leadership.holder());
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    }
    "ok\n".into_response()
}

async fn metrics(State(extender): Shared) -> Response {
    match extender.metrics.text(&extender.now()) {
        Ok(text) => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "the metrics can't be written\n").into_response(),
    }
}
