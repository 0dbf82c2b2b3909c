//! filter, prioritize and preempt: what kube-scheduler asks, answered from the ledger alone.

use std::collections::BTreeMap;

use crate::{
    Extender, place,
    preempt::victims,
    reason::Refusal,
    request,
    wire::{
        Arguments, FilterResult, HostPriority, MetaPod, MetaVictims, NodeList, PreemptionArguments, PreemptionResult,
        node_name,
    },
};

impl Extender {
    /// Which of the nodes the Pod could go on, and why not on the others.
    ///
    /// # Errors
    /// In words, where there is no answer for any node.
    pub fn filter(&self, arguments: Arguments) -> Result<FilterResult, String> {
        let request = request::read(&arguments.pod).map_err(|error| error.to_string())?;
        let mut result = FilterResult::default();
        let Some(request) = request else {
            // Not ours: every node will do.
            return Ok(FilterResult { nodes: arguments.nodes, node_names: arguments.node_names, ..result });
        };
        let names: Vec<String> = match (&arguments.node_names, &arguments.nodes) {
            (Some(names), _) => names.clone(),
            (None, Some(list)) => list.items.iter().filter_map(node_name).map(str::to_owned).collect(),
            (None, None) => return Err("neither Nodes nor NodeNames is given".into()),
        };
        let mut fitting = Vec::new();
        self.ledger.for_each(names, |name, node| {
            let refusal = match node {
                Some(node) => place::place(node, &request).err(),
                None => Some(Refusal::never(&name, "the extender knows no such node yet")),
            };
            match refusal {
                None => fitting.push(name),
                Some(Refusal { why, could_fit: true }) => drop(result.failed_nodes.insert(name, why)),
                Some(Refusal { why, .. }) => drop(result.failed_and_unresolvable_nodes.insert(name, why)),
            }
        });
        // A node that is named twice is one node.
        let mut seen = std::collections::HashSet::new();
        fitting.retain(|name| seen.insert(name.clone()));
        match arguments.nodes {
            Some(list) if arguments.node_names.is_none() => {
                let fits = |node: &serde_json::Value| node_name(node).is_some_and(|name| seen.remove(name));
                let mut fits = fits;
                let items = list.items.into_iter().filter(|node| fits(node)).collect();
                result.nodes = Some(NodeList { metadata: list.metadata, items });
            }
            _ => result.node_names = Some(fitting),
        }
        Ok(result)
    }

    /// How good each of the nodes is for the Pod.
    ///
    /// # Errors
    /// In words, where there is no answer for any node.
    pub fn prioritize(&self, arguments: &Arguments) -> Result<Vec<HostPriority>, String> {
        let request = request::read(&arguments.pod).map_err(|error| error.to_string())?;
        let objects = arguments.nodes.iter().flat_map(|list| list.items.iter().filter_map(node_name));
        let names = arguments.node_names.iter().flatten().map(String::as_str).chain(objects);
        let mut priorities = Vec::new();
        self.ledger.for_each(names, |name, node| {
            let placed = node.zip(request.as_ref()).map(|(node, request)| {
                place::place(node, request).map_or(0, |placement| place::score(node, request, &placement))
            });
            priorities.push(HostPriority { host: name.to_owned(), score: placed.unwrap_or(0) });
        });
        Ok(priorities)
    }

    /// Which Pods would have to go, on each of the nodes where that makes room.
    ///
    /// # Errors
    /// In words, where there is no answer for any node.
    pub fn preempt(&self, arguments: PreemptionArguments) -> Result<PreemptionResult, String> {
        let request = request::read(&arguments.pod).map_err(|error| error.to_string())?;
        let priority = arguments.pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
        let proposed: BTreeMap<String, MetaVictims> = match (arguments.meta_victims, arguments.victims) {
            (Some(meta), _) if !meta.is_empty() => meta,
            (_, whole) => whole
                .unwrap_or_default()
                .into_iter()
                .map(|(node, victims)| {
                    let pods = victims.pods.into_iter().flatten().filter_map(|pod| pod.metadata.uid);
                    let pods = pods.map(|uid| MetaPod { uid }).collect();
                    (node, MetaVictims { pods: Some(pods), violations: victims.violations })
                })
                .collect(),
        };
        let Some(request) = request else { return Ok(PreemptionResult { node_name_to_meta_victims: proposed }) };
        let mut result = PreemptionResult::default();
        for (name, proposed) in proposed {
            let Some(lock) = self.ledger.node(&name) else { continue };
            let uids: Vec<_> = lock.lock().pods().keys().cloned().collect();
            let names = self.ledger.names(uids);
            let violations = proposed.violations;
            let proposed: Vec<String> = proposed.pods.into_iter().flatten().map(|pod| pod.uid).collect();
            if let Some(uids) = victims(&lock.lock(), &names, &request, priority, &proposed) {
                let pods = uids.into_iter().map(|uid| MetaPod { uid }).collect();
                result.node_name_to_meta_victims.insert(name, MetaVictims { pods: Some(pods), violations });
            }
        }
        Ok(result)
    }
}
