//! Which Pods of a node would have to go so that another, of higher priority, finds room: as few as will do, and of
//! those the ones of lowest priority.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
};

use crate::{
    device::{NodeState, Uid, Use},
    place,
    pod::PodName,
    request::PodRequest,
};

/// What Pods are called.
pub type Names = HashMap<Uid, PodName>;

/// How many sets of victims are tried before any that will do is taken.
const MAX_TRIES: usize = 3000;

/// The Pods that would have to go, `proposed` among them: kube-scheduler has its own reasons for those. `None` where no
/// number of Pods of lower priority makes room.
pub fn victims(
    node: &NodeState,
    names: &Names,
    request: &PodRequest,
    priority: i32,
    proposed: &[String],
) -> Option<Vec<String>> {
    let Ok(devices) = &node.devices else { return None };
    let fits_without = |gone: &[&str]| {
        let mut empty = devices.clone();
        for device in &mut empty {
            device.used = Use::default();
        }
        let mut without = NodeState::new(node.name.clone());
        without.choosing = node.choosing;
        without.devices = Ok(empty);
        for (uid, uses) in node.pods() {
            if !gone.contains(&&**uid) && !proposed.iter().any(|other| **other == **uid) {
                without.grant(uid.clone(), uses.clone());
            }
        }
        place::place(&without, request).is_ok()
    };
    let told =
        |more: &[&str]| proposed.iter().cloned().chain(more.iter().map(|&uid| uid.to_owned())).collect::<Vec<String>>();
    if fits_without(&[]) {
        return Some(told(&[]));
    }
    let proposed_set: HashSet<&str> = proposed.iter().map(String::as_str).collect();
    let lower = |uid: &Uid| names.get(uid).filter(|name| name.priority < priority).map(|name| name.priority);
    let mut candidates: Vec<(i32, &str)> = node
        .pods()
        .keys()
        .filter(|uid| !proposed_set.contains(&***uid))
        .filter_map(|uid| Some((lower(uid)?, &**uid)))
        .collect();
    candidates.sort_unstable();
    let all: Vec<&str> = candidates.iter().map(|(_, uid)| *uid).collect();
    if !fits_without(&all) {
        return None;
    }
    // The fewest: one, then two, then three; of each number those whose highest priority is lowest come first.
    let mut tries = 0;
    for size in 1..=3.min(all.len()) {
        let mut sets = combinations(all.len(), size);
        sets.sort_by_key(|set| set.iter().rev().map(|&number| candidates[number].0).collect::<Vec<_>>());
        for set in sets {
            tries += 1;
            if tries > MAX_TRIES {
                break;
            }
            let gone: Vec<&str> = set.iter().map(|&number| all[number]).collect();
            if fits_without(&gone) {
                return Some(told(&gone));
            }
        }
    }
    // All of them, and then each that can stay does, the highest first.
    let mut gone = candidates;
    gone.sort_by_key(|(priority, _)| Reverse(*priority));
    let mut kept = 0;
    while kept < gone.len() {
        let without: Vec<&str> =
            gone.iter().enumerate().filter(|(number, _)| *number != kept).map(|(_, (_, uid))| *uid).collect();
        if fits_without(&without) {
            gone.remove(kept);
        } else {
            kept += 1;
        }
    }
    Some(told(&gone.iter().map(|(_, uid)| *uid).collect::<Vec<_>>()))
}

/// The ways to take `size` of `count`, each ascending; no more than are tried.
fn combinations(count: usize, size: usize) -> Vec<Vec<usize>> {
    let mut sets: Vec<Vec<usize>> = vec![Vec::new()];
    for _ in 0..size {
        let mut longer = Vec::new();
        for set in &sets {
            for next in set.last().map_or(0, |last| last + 1)..count {
                if longer.len() >= MAX_TRIES {
                    break;
                }
                longer.push([set.as_slice(), &[next]].concat());
            }
        }
        sets = longer;
    }
    sets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::tests::{app, node, share};

    #[test]
    fn fewest_and_lowest() {
        let mut node = node(&[1000, 1000]);
        // On GPU 0: a 500, b 500; on GPU 1: c 300, d 300, e 400.
        let mut names = Names::new();
        for (uid, memory, priority) in [("a", 500, 5), ("b", 500, 9), ("c", 300, 1), ("d", 300, 1), ("e", 400, 2)] {
            let placement = place::place(&node, &app(share(memory, None))).unwrap();
            node.grant(uid.into(), placement.uses);
            names.insert(Uid::from(uid), PodName { namespace: "s".into(), name: uid.into(), priority });
        }
        let asked = |memory: u64, priority: i32, proposed: &[&str]| {
            let proposed: Vec<String> = proposed.iter().map(|&uid| uid.into()).collect();
            victims(&node, &names, &app(share(memory, None)), priority, &proposed).map(|mut list| {
                list.sort();
                list.concat()
            })
        };
        for (memory, priority, proposed, expected) in [
            // One of the lowest will do.
            (300, 10, &[][..], Some("c")),
            (400, 10, &[], Some("e")),
            // One of a higher priority is fewer than two of lower ones.
            (500, 10, &[], Some("a")),
            (600, 10, &[], Some("cd")),
            (1000, 10, &[], Some("ab")),
            // Those of no lower priority stay.
            (500, 5, &[], Some("cd")),
            (1000, 5, &[], Some("cde")),
            (300, 1, &[], None),
            // What kube-scheduler proposes goes in any case, and may be enough.
            (300, 10, &["b"], Some("b")),
            (1000, 10, &["c"], Some("cde")),
            (1001, 10, &[], None),
        ] {
            assert_eq!(asked(memory, priority, proposed).as_deref(), expected, "{memory} {priority} {proposed:?}");
        }
    }
}
