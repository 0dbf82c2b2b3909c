//! Which container of which Pod a bundle is for, from annotations that CRI sets after those of the Pod.

use serde_json::{Map, Value};

/// What a container is to its Pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerKind {
    /// The Pod's sandbox (the pause container).
    Sandbox,
    /// An ordinary container, in a Pod or not.
    Container,
}

/// Who a container is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The name that a grant knows it by: its name in the Pod, or its id where there is no Pod.
    pub name: String,
    /// Sandbox or container.
    pub kind: ContainerKind,
    /// The Pod's UID.
    pub pod_uid: Option<String>,
    /// Whether it belongs to a Pod at all.
    pub in_pod: bool,
}

impl Identity {
    /// Reads the annotations of containerd's CRI and of CRI-O.
    pub fn of(container_id: &str, annotations: &Map<String, Value>) -> Self {
        let get = |keys: &[&str]| keys.iter().find_map(|key| annotations.get(*key)?.as_str()).map(str::to_owned);
        let kind = get(&["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"]);
        let sandbox_id = get(&["io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"]);
        Self {
            name: get(&["io.kubernetes.cri.container-name", "io.kubernetes.container.name"])
                .unwrap_or_else(|| container_id.to_owned()),
            kind: if kind.as_deref() == Some("sandbox") { ContainerKind::Sandbox } else { ContainerKind::Container },
            pod_uid: get(&["io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"]),
            in_pod: sandbox_id.is_some() || kind.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn containers_and_sandboxes() {
        let identity = |annotations: Value| Identity::of("id", annotations.as_object().unwrap());
        assert_eq!(
            identity(
                json!({"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.container-name": "trainer", "io.kubernetes.cri.sandbox-uid": "u"})
            ),
            Identity {
                name: "trainer".into(),
                kind: ContainerKind::Container,
                pod_uid: Some("u".into()),
                in_pod: true
            }
        );
        assert_eq!(identity(json!({"io.kubernetes.cri.container-type": "sandbox"})).kind, ContainerKind::Sandbox);
        assert_eq!(
            identity(json!({})),
            Identity { name: "id".into(), kind: ContainerKind::Container, pod_uid: None, in_pod: false }
        );
    }
}
