//! A stand-in of the Kubernetes API server, as far as the extender and the node agent use it: nodes, Pods, their bindings,
//! and Leases, with resourceVersions, conflicts, watches and the faults that a test asks for.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Result;
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Query, State},
    http::{Method, StatusCode, Uri},
    response::{IntoResponse, Response},
};
use kube::Client;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};

/// What goes wrong with the next bindings, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// All goes well.
    None,
    /// Nothing happens, and the answer says that it isn't known.
    Lost,
    /// It is done, and the answer says that it isn't known.
    AnswerLost,
    /// Nothing happens; the state has changed meanwhile, says the answer.
    Conflict,
    /// It is done, and the answer doesn't come.
    Hangs,
}

/// An object's place: `nodes//n`, `pods/namespace/name`, `leases/namespace/name`.
type Key = (String, String, String);

#[derive(Debug, Default)]
struct Store {
    objects: BTreeMap<Key, Value>,
    version: u64,
    /// What happened, for watches: the version, the kind, and the event.
    history: Vec<(u64, String, Value)>,
    /// Versions before this one are forgotten.
    oldest: u64,
    faults: VecDeque<Fault>,
    down: bool,
    /// Watches of an earlier count end.
    watches: u64,
    bindings: usize,
}

struct Shared {
    store: Mutex<Store>,
    changed: watch::Sender<u64>,
}

/// The server. It ends with its runtime.
#[derive(Clone)]
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl ApiServer {
    /// Starts one on loopback.
    pub async fn start() -> Result<Self> {
        let shared = Arc::new(Shared { store: Mutex::default(), changed: watch::Sender::new(0) });
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let router = Router::new().fallback(serve).with_state(shared.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { shared, address })
    }

    /// A client of it.
    pub fn client(&self) -> Result<Client> {
        gpufence_extender::tls::use_ring();
        Ok(Client::try_from(kube::Config::new(format!("http://{}", self.address).parse()?))?)
    }

    /// A kubeconfig of it.
    pub fn kubeconfig(&self) -> String {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "it", "user": {}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        })
        .to_string()
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.shared.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let result = change(&mut self.store());
        self.shared.changed.send_modify(|count| *count += 1);
        result
    }

    /// What goes wrong with the next bindings.
    pub fn fail(&self, faults: &[Fault]) {
        self.store().faults = faults.iter().copied().collect();
    }

    /// Answers nothing any more, or again.
    pub fn set_down(&self, down: bool) {
        self.change(|store| {
            store.down = down;
            store.watches += 1;
        });
    }

    /// Ends all watches and forgets what happened, so that they can't be taken up where they were (410).
    pub fn expire_watches(&self) {
        self.change(|store| {
            store.version += 1;
            store.oldest = store.version;
            store.history.clear();
            store.watches += 1;
        });
    }

    /// Makes an object, or takes its place.
    pub fn put(&self, kind: &str, object: Value) {
        self.change(|store| store.put(kind, object));
    }

    /// Removes one.
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) {
        self.change(|store| store.delete(&(kind.into(), namespace.into(), name.into())));
    }

    /// All of a kind.
    pub fn list(&self, kind: &str) -> Vec<Value> {
        self.store().of_kind(kind, "").cloned().collect()
    }

    /// One.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Option<Value> {
        self.store().objects.get(&(kind.into(), namespace.into(), name.into())).cloned()
    }

    /// How many bindings were asked for.
    pub fn bindings(&self) -> usize {
        self.store().bindings
    }
}

impl Store {
    fn of_kind<'a>(&'a self, kind: &'a str, namespace: &'a str) -> impl Iterator<Item = &'a Value> {
        let of = move |(key, _): &(&Key, &Value)| key.0 == kind && (namespace.is_empty() || key.1 == namespace);
        self.objects.iter().filter(of).map(|(_, object)| object)
    }

    fn put(&mut self, kind: &str, mut object: Value) -> Value {
        self.version += 1;
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        let key = (kind.to_owned(), text("namespace"), text("name"));
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let event = if self.objects.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        self.history.push((self.version, kind.to_owned(), json!({"type": event, "object": object})));
        self.objects.insert(key, object.clone());
        object
    }

    fn delete(&mut self, key: &Key) -> bool {
        let Some(mut object) = self.objects.remove(key) else { return false };
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.history.push((self.version, key.0.clone(), json!({"type": "DELETED", "object": object})));
        true
    }

    /// What BindingREST does: all in one step, or nothing.
    fn bind(&mut self, key: &Key, binding: &Value) -> Result<(), (u16, String)> {
        let name = &key.2;
        let node = binding["target"]["name"].as_str().unwrap_or_default();
        let Some(pod) = self.objects.get(key) else { return Err((404, format!("pods \"{name}\" not found"))) };
        let uid = &pod["metadata"]["uid"];
        if !binding["metadata"]["uid"].is_null() && binding["metadata"]["uid"] != *uid {
            return Err((
                409,
                format!(
                    "Precondition failed: UID in precondition: {}, UID in object meta: {uid}",
                    binding["metadata"]["uid"]
                ),
            ));
        }
        if !pod["metadata"]["deletionTimestamp"].is_null() {
            return Err((409, format!("pod {name} is being deleted, cannot be assigned to a host")));
        }
        if let Some(bound) = pod["spec"]["nodeName"].as_str() {
            return Err((409, format!("pod {name} is already assigned to node \"{bound}\"")));
        }
        let mut pod = pod.clone();
        pod["spec"]["nodeName"] = json!(node);
        for (annotation, value) in binding["metadata"]["annotations"].as_object().into_iter().flatten() {
            pod["metadata"]["annotations"][annotation] = value.clone();
        }
        self.put("pods", pod);
        Ok(())
    }
}

fn failure(code: u16, message: &str) -> Response {
    let reason = match code {
        404 => "NotFound",
        409 => "Conflict",
        410 => "Expired",
        _ => "InternalError",
    };
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message,
    });
    (StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), Json(status)).into_response()
}

/// Kind, namespace, name and subresource of `/api/v1/…` or `/apis/<group>/<version>/…`.
fn place(path: &str) -> Option<(Key, String)> {
    let mut words = path.trim_matches('/').split('/');
    match words.next()? {
        "api" => drop(words.next()),
        "apis" => drop((words.next(), words.next())),
        _ => return None,
    }
    let words: Vec<&str> = words.collect();
    let (namespace, rest) = match words.as_slice() {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
        rest => ("", rest),
    };
    let word = |position: usize| rest.get(position).copied().unwrap_or_default().to_owned();
    Some(((word(0), namespace.to_owned(), word(1)), word(2)))
}

async fn serve(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    Query(query): Query<HashMap<String, String>>,
    body: Bytes,
) -> Response {
    let Some((key, subresource)) = place(uri.path()) else { return failure(404, "no such path") };
    let store = || shared.store.lock().unwrap_or_else(PoisonError::into_inner);
    if store().down {
        return failure(503, "the server is down");
    }
    if query.get("watch").is_some_and(|watch| watch == "true" || watch == "1") {
        let from = query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
        return watch_from(shared.clone(), key.0, from);
    }
    let object: Value = serde_json::from_slice(&body).unwrap_or_default();
    if subresource == "binding" {
        let fault = {
            let mut store = store();
            store.bindings += 1;
            store.faults.pop_front().unwrap_or(Fault::None)
        };
        if fault == Fault::Lost {
            return failure(504, "timed out");
        }
        if fault == Fault::Conflict {
            return failure(409, "the object has been modified");
        }
        let result = store().bind(&key, &object);
        shared.changed.send_modify(|count| *count += 1);
        return match (result, fault) {
            (_, Fault::AnswerLost) => failure(504, "timed out"),
            (_, Fault::Hangs) => std::future::pending().await,
            (Ok(()), _) => {
                (StatusCode::CREATED, Json(json!({"kind": "Status", "apiVersion": "v1", "status": "Success"})))
                    .into_response()
            }
            (Err((code, message)), _) => failure(code, &message),
        };
    }
    let answer = {
        let mut store = store();
        match method {
            Method::GET if key.2.is_empty() => {
                let items: Vec<Value> = store.of_kind(&key.0, &key.1).cloned().collect();
                Ok(
                    json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": store.version.to_string()}, "items": items}),
                )
            }
            Method::GET => store.objects.get(&key).cloned().ok_or((404, "not found")),
            Method::POST => {
                let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                let key = (key.0.clone(), key.1.clone(), name);
                if store.objects.contains_key(&key) {
                    Err((409, "it exists"))
                } else {
                    Ok(store.put(&key.0, with_namespace(object, &key.1)))
                }
            }
            Method::PUT => match store.objects.get(&key) {
                None => Err((404, "not found")),
                Some(old) => {
                    let version = &object["metadata"]["resourceVersion"];
                    if !version.is_null() && *version != old["metadata"]["resourceVersion"] {
                        Err((409, "the object has been modified"))
                    } else {
                        Ok(store.put(&key.0, with_namespace(object, &key.1)))
                    }
                }
            },
            Method::DELETE => {
                if store.delete(&key) {
                    Ok(json!({"kind": "Status", "status": "Success"}))
                } else {
                    Err((404, "not found"))
                }
            }
            _ => Err((405, "no such method")),
        }
    };
    shared.changed.send_modify(|count| *count += 1);
    match answer {
        Ok(object) => Json(object).into_response(),
        Err((code, message)) => failure(code, message),
    }
}

fn with_namespace(mut object: Value, namespace: &str) -> Value {
    if !namespace.is_empty() {
        object["metadata"]["namespace"] = json!(namespace);
    }
    object
}

/// A watch: lines of JSON, until it is ended.
fn watch_from(shared: Arc<Shared>, kind: String, from: u64) -> Response {
    let began = {
        let store = shared.store.lock().unwrap_or_else(PoisonError::into_inner);
        if from < store.oldest {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old resource version"});
            return Json(json!({"type": "ERROR", "object": status})).into_response();
        }
        store.watches
    };
    let changed = shared.changed.subscribe();
    let lines = futures_util::stream::unfold(
        (shared, kind, from, changed),
        move |(shared, kind, mut at, mut changed)| async move {
            loop {
                changed.borrow_and_update();
                let lines = {
                    let store = shared.store.lock().unwrap_or_else(PoisonError::into_inner);
                    if store.watches != began {
                        return None;
                    }
                    let new = store.history.iter().filter(|(version, of, _)| *version > at && *of == kind);
                    let lines: String = new.map(|(_, _, event)| format!("{event}\n")).collect();
                    at = store.version.max(at);
                    lines
                };
                if !lines.is_empty() {
                    return Some((Ok::<_, Infallible>(lines), (shared, kind, at, changed)));
                }
                if changed.changed().await.is_err() {
                    return None;
                }
            }
        },
    );
    Body::from_stream(lines).into_response()
}
