//! What the ledger keeps of a Pod, read from the API's object.

use std::sync::Arc;

use gpufence_grant::{
    Recipients,
    annotation::{GRANT, GRANT_SIGNATURE},
    json,
    signature::Keyring,
};
use k8s_openapi::api::core::v1::Pod;

use crate::{
    device::{Uid, Uses},
    place,
    request::{self, PodRequest, RequestError},
};

/// What people know a Pod by, and how it stands among others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its priority.
    pub priority: i32,
}

/// How far a Pod is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// It has no node yet; what it asks for.
    Waiting(Result<Arc<PodRequest>, RequestError>),
    /// It has a node, and what it was given there.
    Bound {
        /// The node's name.
        node: Arc<str>,
        /// What it needs of each device at once; `None` where it has no grant, or none that counts.
        uses: Option<Uses>,
        /// Why its grant doesn't count.
        fault: Option<String>,
    },
    /// It has ended, and holds nothing.
    Ended,
}

/// A Pod that asks for GPUs or has a grant.
#[derive(Debug, Clone)]
pub struct PodView {
    /// Its UID.
    pub uid: Uid,
    /// Its name.
    pub name: PodName,
    /// How far it is.
    pub standing: Standing,
}

/// Reads a Pod. `None` for one that neither asks for GPUs nor has a grant.
///
/// A grant counts where our signature is on it and it names this Pod and its node: what anybody else wrote there takes
/// nothing from anyone, since no node will follow it either.
pub fn view(pod: &Pod, keys: &Keyring) -> Option<PodView> {
    let uid: Uid = pod.metadata.uid.as_deref()?.into();
    let spec = pod.spec.as_ref()?;
    let annotation = |key: &str| pod.metadata.annotations.as_ref()?.get(key).map(String::as_str);
    let grant = annotation(GRANT);
    let request = request::read(pod);
    if grant.is_none() && matches!(request, Ok(None)) {
        return None;
    }
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let standing = match (&spec.node_name, phase) {
        (_, Some("Succeeded" | "Failed")) => Standing::Ended,
        (Some(node), _) if !node.is_empty() => {
            let signature = annotation(GRANT_SIGNATURE);
            let counted = grant.map(|grant| granted(grant, signature, &uid, node, &request, keys)).transpose();
            let (uses, fault) = match counted {
                Ok(uses) => (uses, None),
                Err(fault) => (None, Some(fault)),
            };
            Standing::Bound { node: node.as_str().into(), uses, fault }
        }
        _ => match request {
            Ok(None) => return None,
            Ok(Some(request)) => Standing::Waiting(Ok(Arc::new(request))),
            Err(error) => Standing::Waiting(Err(error)),
        },
    };
    let name = PodName {
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        priority: spec.priority.unwrap_or(0),
    };
    Some(PodView { uid, name, standing })
}

fn granted(
    text: &str,
    signature: Option<&str>,
    uid: &str,
    node: &str,
    request: &Result<Option<PodRequest>, RequestError>,
    keys: &Keyring,
) -> Result<Uses, String> {
    let signature = signature.ok_or("its grant isn't signed")?;
    keys.verify(text, signature).map_err(|error| error.to_string())?;
    let grant = json::parse(text).map_err(|error| error.to_string())?;
    if grant.pod_uid.as_deref() != Some(uid) || grant.node.as_deref() != Some(node) {
        return Err("its grant is for another Pod or another node".into());
    }
    let Recipients::Named(shares) = &grant.recipients else { return Err("its grant names no containers".into()) };
    match request {
        Ok(Some(request)) => Ok(place::uses(request, shares)),
        // Resources of a running Pod don't change; should they be gone, what was granted counts as it stands.
        _ => Ok(place::uses(&as_granted(shares), shares)),
    }
}

/// A request of those containers that a grant names, all at once.
fn as_granted(shares: &std::collections::BTreeMap<String, Vec<gpufence_grant::Share>>) -> PodRequest {
    let container =
        |name: &String| request::ContainerRequest { name: name.clone(), role: request::Role::App, claims: Vec::new() };
    PodRequest {
        containers: shares.keys().map(container).collect(),
        models: Vec::new(),
        gpu_policy: None,
        node_policy: None,
        mode: None,
    }
}

#[cfg(test)]
mod tests {
    use gpufence_grant::signing::PrivateKey;
    use serde_json::{Value, json};

    use super::*;

    fn seen(value: &Value, keys: &Keyring) -> Option<Standing> {
        view(&serde_json::from_value(value.clone()).unwrap(), keys).map(|view| view.standing)
    }

    #[test]
    fn whose_grant_counts() {
        let (key, other) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
        let keys = Keyring::new([key.public().clone()]);
        let grant = json!({
            "version": 1, "podUID": "u", "node": "n",
            "containers": {"a": [{"gpu": "GPU-00000000", "memoryMiB": 10, "computePercent": 5}]},
        })
        .to_string();
        let pod = |node: &str, phase: &str, signature: &str| {
            json!({
                "metadata": {"name": "p", "namespace": "s", "uid": "u", "annotations": {(GRANT): grant, (GRANT_SIGNATURE): signature}},
                "spec": {"nodeName": node, "containers": [
                    {"name": "a", "resources": {"limits": {"gpufence.dev/gpu-memory": "10"}}},
                ]},
                "status": {"phase": phase},
            })
        };
        let good = key.sign(&grant);
        let Some(Standing::Bound { node, uses: Some(uses), fault: None }) = seen(&pod("n", "Running", &good), &keys)
        else {
            panic!("it counts");
        };
        assert_eq!((&*node, &*uses[0].0, uses[0].1.memory, uses[0].1.compute), ("n", "GPU-00000000", 10, 5));
        for (node, signature, expected) in [
            ("m", good.as_str(), "another Pod or another node"),
            ("n", &other.sign(&grant), "not accepted"),
            ("n", "x", "not of the form"),
        ] {
            let Some(Standing::Bound { uses: None, fault: Some(fault), .. }) =
                seen(&pod(node, "Running", signature), &keys)
            else {
                panic!("{expected}: it counts");
            };
            assert!(fault.contains(expected), "{fault}");
        }
        for phase in ["Succeeded", "Failed"] {
            assert_eq!(seen(&pod("n", phase, &good), &keys), Some(Standing::Ended));
        }
        assert!(matches!(seen(&pod("", "Pending", &good), &keys), Some(Standing::Waiting(Ok(_)))));
        let plain = json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": [{"name": "a"}]}});
        assert_eq!(seen(&plain, &keys), None);
    }
}
