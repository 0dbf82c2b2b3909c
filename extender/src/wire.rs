//! What kube-scheduler and an extender say to each other: `k8s.io/kube-scheduler/extender/v1`.
//!
//! Go writes these names with capitals and reads any; so do we, as far as names in small letters go.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// `ExtenderArgs`: which of these nodes a Pod could go on.
#[derive(Debug, Deserialize)]
pub struct Arguments {
    /// The Pod.
    #[serde(rename = "Pod", alias = "pod")]
    pub pod: Pod,
    /// The nodes as objects, to an extender with no cache of its own.
    #[serde(rename = "Nodes", alias = "nodes", default)]
    pub nodes: Option<NodeList>,
    /// The nodes by name, to one with a cache (`nodeCacheCapable`).
    #[serde(rename = "NodeNames", alias = "nodeNames", alias = "nodenames", default)]
    pub node_names: Option<Vec<String>>,
}

/// A `NodeList`, passed back as it came.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct NodeList {
    /// Its metadata.
    #[serde(default)]
    pub metadata: Value,
    /// The nodes.
    #[serde(default)]
    pub items: Vec<Value>,
}

/// The name of a node that is passed as an object.
pub fn node_name(node: &Value) -> Option<&str> {
    node.pointer("/metadata/name")?.as_str()
}

/// `ExtenderFilterResult`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct FilterResult {
    /// Those that it could go on, if they came as objects.
    pub nodes: Option<NodeList>,
    /// The same, if they came by name.
    pub node_names: Option<Vec<String>>,
    /// Why not on the others.
    pub failed_nodes: BTreeMap<String, String>,
    /// Why not on those where it wouldn't go whoever left.
    pub failed_and_unresolvable_nodes: BTreeMap<String, String>,
    /// Why there is no answer.
    pub error: String,
}

/// `HostPriority`: how good a node is, 0 to 10.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority {
    /// The node.
    pub host: String,
    /// 0 to 10.
    pub score: i64,
}

/// `ExtenderBindingArgs`.
#[derive(Debug, Clone, Deserialize)]
pub struct BindingArguments {
    /// The Pod's name.
    #[serde(rename = "PodName", alias = "podName", alias = "podname")]
    pub pod_name: String,
    /// Its namespace.
    #[serde(rename = "PodNamespace", alias = "podNamespace", alias = "podnamespace")]
    pub pod_namespace: String,
    /// Its UID.
    #[serde(rename = "PodUID", alias = "podUID", alias = "podUid", alias = "poduid")]
    pub pod_uid: String,
    /// The node.
    #[serde(rename = "Node", alias = "node")]
    pub node: String,
}

/// `ExtenderBindingResult`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindingResult {
    /// Why it isn't bound; empty: it is.
    pub error: String,
}

/// `ExtenderPreemptionArgs`: which Pods could go to make room.
#[derive(Debug, Deserialize)]
pub struct PreemptionArguments {
    /// The Pod that needs room.
    #[serde(rename = "Pod", alias = "pod")]
    pub pod: Pod,
    /// By node, with whole Pods.
    #[serde(rename = "NodeNameToVictims", alias = "nodeNameToVictims", alias = "nodenametovictims", default)]
    pub victims: Option<BTreeMap<String, Victims>>,
    /// By node, with UIDs.
    #[serde(
        rename = "NodeNameToMetaVictims",
        alias = "nodeNameToMetaVictims",
        alias = "nodenametometavictims",
        default
    )]
    pub meta_victims: Option<BTreeMap<String, MetaVictims>>,
}

/// `Victims`.
#[derive(Debug, Deserialize)]
pub struct Victims {
    /// The Pods.
    #[serde(rename = "Pods", alias = "pods", default)]
    pub pods: Option<Vec<Pod>>,
    /// How many PodDisruptionBudgets they would break.
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations", alias = "numpdbviolations", default)]
    pub violations: i64,
}

/// `MetaVictims`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaVictims {
    /// The Pods.
    #[serde(rename = "Pods", alias = "pods", default)]
    pub pods: Option<Vec<MetaPod>>,
    /// How many PodDisruptionBudgets they would break.
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations", alias = "numpdbviolations", default)]
    pub violations: i64,
}

/// `MetaPod`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaPod {
    /// Its UID.
    #[serde(rename = "UID", alias = "uid")]
    pub uid: String,
}

/// `ExtenderPreemptionResult`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct PreemptionResult {
    /// Which Pods would have to go, by node.
    pub node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_capitals_and_small() {
        for text in [
            r#"{"Pod":{"metadata":{"name":"p"}},"Nodes":null,"NodeNames":["n"]}"#,
            r#"{"pod":{"metadata":{"name":"p"}},"nodenames":["n"],"later":1}"#,
        ] {
            let arguments: Arguments = serde_json::from_str(text).unwrap();
            assert_eq!(arguments.node_names.as_deref(), Some(&["n".to_owned()][..]), "{text}");
        }
        for text in [
            r#"{"PodName":"p","PodNamespace":"s","PodUID":"u","Node":"n"}"#,
            r#"{"podName":"p","podNamespace":"s","podUID":"u","node":"n"}"#,
        ] {
            assert_eq!(serde_json::from_str::<BindingArguments>(text).unwrap().pod_uid, "u", "{text}");
        }
        let result = FilterResult { node_names: Some(vec!["n".into()]), ..FilterResult::default() };
        assert_eq!(
            serde_json::to_string(&result).unwrap(),
            r#"{"Nodes":null,"NodeNames":["n"],"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":""}"#
        );
    }
}
