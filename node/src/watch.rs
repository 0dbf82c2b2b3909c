//! The watchdog's mind: who holds what wasn't granted, since when, and what is to be done. A pure function of readings.
//!
//! A container's processes are summed up for each GPU. Over the limit and the tolerance is trouble; so is a process on a GPU
//! that its container's grant doesn't name, while some other grant does. Trouble is told once. Where policy says so, a
//! process is ended when it has been in trouble in two readings at least and for the grace period: of a container that is
//! over, the one that holds most. What was ended isn't counted any more while it goes.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use gpufence_shim::policy::Action;

use crate::cgroup::Place;

/// A container with a grant, by namespace and id.
pub type Name = (String, String);

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// A number of its own, which no other process ever has; a PID isn't one.
    pub process: u64,
    /// The GPU's or MIG instance's UUID.
    pub gpu: String,
    /// Bytes.
    pub used: u64,
    /// Where it is.
    pub place: Place<Name>,
}

/// What is granted: the limit in bytes of each container on each GPU.
pub type Grants = HashMap<Name, HashMap<String, u64>>;

/// What policy says.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Where a container is over its limit.
    pub over_limit: Action,
    /// Where a container's process is on a GPU that it wasn't granted.
    pub foreign: Action,
    /// How long it must have been so.
    pub grace: Duration,
    /// Bytes above a limit that are let pass.
    pub tolerance: u64,
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Trouble {
    /// A container's processes hold more of a GPU than it was granted.
    Over {
        /// Whose.
        container: Name,
        /// Of which GPU.
        gpu: String,
    },
    /// A process is on a GPU that others were granted and its container wasn't.
    Foreign {
        /// Which process.
        process: u64,
        /// On which GPU.
        gpu: String,
    },
}

/// What is to be done now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Somebody is to be told.
    Tell {
        /// What is wrong.
        trouble: Trouble,
        /// Bytes held.
        used: u64,
        /// Bytes granted.
        limit: u64,
    },
    /// A process is to be ended.
    End {
        /// Which.
        process: u64,
        /// Why.
        trouble: Trouble,
        /// Bytes held.
        used: u64,
        /// Bytes granted.
        limit: u64,
    },
}

/// What is remembered from reading to reading.
#[derive(Debug, Default)]
pub struct State {
    troubles: HashMap<Trouble, Since>,
    ended: HashSet<u64>,
}

fn action(trouble: &Trouble, rules: &Rules) -> Action {
    match trouble {
        Trouble::Over { .. } => rules.over_limit,
        Trouble::Foreign { .. } => rules.foreign,
    }
}

#[derive(Debug, Clone, Copy)]
struct Since {
    first: Instant,
    readings: u32,
}

impl State {
    /// Judges one reading.
    pub fn judge(&mut self, seen: &[Seen], grants: &Grants, rules: &Rules, now: Instant) -> Vec<Verdict> {
        let here: HashSet<u64> = seen.iter().map(|seen| seen.process).collect();
        self.ended.retain(|process| here.contains(process));
        let alive = || seen.iter().filter(|seen| !self.ended.contains(&seen.process));

        let shared: HashSet<&str> = grants.values().flat_map(HashMap::keys).map(String::as_str).collect();
        // What is held, what was granted, and who would have to go.
        let mut found: HashMap<Trouble, (u64, u64, u64)> = HashMap::new();
        let mut sums: HashMap<(&Name, &str), (u64, u64, &Seen)> = HashMap::new();
        for process in alive() {
            let granted = match &process.place {
                Place::Granted(name) => {
                    grants.get(name).and_then(|grant| grant.get(&process.gpu)).map(|limit| (name, *limit))
                }
                Place::Ungranted(_) => None,
                // The machine's own: an X server, MPS, a monitor.
                Place::Host => continue,
            };
            match granted {
                Some((name, limit)) => {
                    let sum = sums.entry((name, &process.gpu)).or_insert((limit, 0, process));
                    sum.1 = sum.1.saturating_add(process.used);
                    // Of two that hold the same, always the same one.
                    if (process.used, process.process) > (sum.2.used, sum.2.process) {
                        sum.2 = process;
                    }
                }
                None if shared.contains(process.gpu.as_str()) => {
                    let trouble = Trouble::Foreign { process: process.process, gpu: process.gpu.clone() };
                    found.insert(trouble, (process.used, 0, process.process));
                }
                None => {}
            }
        }
        for ((name, gpu), (limit, used, largest)) in sums {
            if used > limit.saturating_add(rules.tolerance) {
                let trouble = Trouble::Over { container: name.clone(), gpu: gpu.to_owned() };
                found.insert(trouble, (used, limit, largest.process));
            }
        }

        self.troubles.retain(|trouble, _| found.contains_key(trouble));
        let mut verdicts = Vec::new();
        for (trouble, (used, limit, process)) in found {
            let action = action(&trouble, rules);
            let is_new = !self.troubles.contains_key(&trouble);
            let since = self.troubles.entry(trouble.clone()).or_insert(Since { first: now, readings: 0 });
            since.readings += 1;
            if is_new && action != Action::Record {
                verdicts.push(Verdict::Tell { trouble: trouble.clone(), used, limit });
            }
            if action == Action::End && since.readings >= 2 && now.duration_since(since.first) >= rules.grace {
                // Should another have to follow, it has its own grace.
                *since = Since { first: now, readings: 0 };
                self.ended.insert(process);
                verdicts.push(Verdict::End { process, trouble, used, limit });
            }
        }
        verdicts
    }

    /// When the first of those in trouble may be ended, as far as its grace goes. `None`: nobody is to be.
    pub fn due(&self, rules: &Rules) -> Option<Instant> {
        let is_to_end = |trouble: &Trouble| action(trouble, rules) == Action::End;
        self.troubles.iter().filter(|(trouble, _)| is_to_end(trouble)).map(|(_, since)| since.first + rules.grace).min()
    }

    /// Forgets that a process was ended: it couldn't be.
    pub fn not_ended(&mut self, process: u64) {
        self.ended.remove(&process);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn name(id: &str) -> Name {
        ("k8s.io".into(), id.into())
    }

    fn grants() -> Grants {
        [(name("a"), [("GPU-0".to_owned(), 8 * GIB)].into()), (name("b"), [("GPU-1".to_owned(), 4 * GIB)].into())]
            .into()
    }

    fn rules(over_limit: Action, foreign: Action, grace: u64) -> Rules {
        Rules { over_limit, foreign, grace: Duration::from_secs(grace), tolerance: GIB }
    }

    fn seen(process: u64, gpu: &str, used: u64, place: Place<Name>) -> Seen {
        Seen { process, gpu: gpu.into(), used, place }
    }

    fn in_a(process: u64, used: u64) -> Seen {
        seen(process, "GPU-0", used, Place::Granted(name("a")))
    }

    fn ended(verdicts: &[Verdict]) -> Vec<u64> {
        let mut all: Vec<u64> = verdicts
            .iter()
            .filter_map(|verdict| match verdict {
                Verdict::End { process, .. } => Some(*process),
                Verdict::Tell { .. } => None,
            })
            .collect();
        all.sort_unstable();
        all
    }

    /// Readings a second apart. Gives the verdicts of each.
    fn run(readings: &[Vec<Seen>], rules: &Rules) -> Vec<Vec<Verdict>> {
        let (mut state, start) = (State::default(), Instant::now());
        let seconds = 0..;
        let judge = |(reading, second): (&Vec<Seen>, u64)| {
            state.judge(reading, &grants(), rules, start + Duration::from_secs(second))
        };
        readings.iter().zip(seconds).map(judge).collect()
    }

    #[test]
    fn within_limit_and_tolerance_nothing_happens() {
        let quiet = vec![in_a(1, 4 * GIB), in_a(2, 5 * GIB), seen(3, "GPU-1", 80 * GIB, Place::Host)];
        let verdicts = run(&[quiet.clone(), quiet.clone(), quiet], &rules(Action::End, Action::End, 0));
        assert!(verdicts.iter().all(Vec::is_empty), "{verdicts:?}");
    }

    #[test]
    fn the_largest_process_of_a_container_that_is_over_ends_in_the_second_reading() {
        let over = vec![in_a(1, 3 * GIB), in_a(2, 7 * GIB)];
        let verdicts = run(&[over.clone(), over.clone(), over], &rules(Action::End, Action::Warn, 0));
        let trouble = Trouble::Over { container: name("a"), gpu: "GPU-0".into() };
        let (used, limit) = (10 * GIB, 8 * GIB);
        assert_eq!(verdicts[0], [Verdict::Tell { trouble: trouble.clone(), used, limit }]);
        assert_eq!(verdicts[1], [Verdict::End { process: 2, trouble, used, limit }]);
        assert_eq!(verdicts[2], [], "while it goes it isn't counted, and nobody else is to blame");
    }

    #[test]
    fn one_after_the_other_while_there_is_too_much() {
        let over = vec![in_a(1, 10 * GIB), in_a(2, 11 * GIB)];
        let without = vec![in_a(1, 10 * GIB)];
        let readings = [over.clone(), over, without.clone(), without];
        let verdicts = run(&readings, &rules(Action::End, Action::Warn, 0));
        assert_eq!(
            verdicts.iter().map(|verdicts| ended(verdicts)).collect::<Vec<_>>(),
            [vec![], vec![2], vec![], vec![1]]
        );
    }

    #[test]
    fn grace_is_waited_for_and_starts_anew() {
        let (over, within) = (vec![in_a(1, 10 * GIB)], vec![in_a(1, 8 * GIB)]);
        let readings = [over.clone(), over.clone(), within, over.clone(), over.clone(), over.clone(), over];
        let verdicts = run(&readings, &rules(Action::End, Action::Warn, 3));
        let ends: Vec<usize> = (0..7).filter(|reading| !ended(&verdicts[*reading]).is_empty()).collect();
        assert_eq!(ends, [6]);
    }

    #[test]
    fn when_the_next_one_may_end() {
        let (mut state, start) = (State::default(), Instant::now());
        let (end, warn) = (rules(Action::End, Action::Warn, 3), rules(Action::Warn, Action::Warn, 3));
        state.judge(&[in_a(1, 8 * GIB)], &grants(), &end, start);
        assert_eq!(state.due(&end), None);
        state.judge(&[in_a(1, 10 * GIB)], &grants(), &end, start);
        assert_eq!((state.due(&end), state.due(&warn)), (Some(start + Duration::from_secs(3)), None));
        state.judge(&[in_a(1, 8 * GIB)], &grants(), &end, start + Duration::from_secs(1));
        assert_eq!(state.due(&end), None);
    }

    #[test]
    fn foreign_processes() {
        let reading = vec![
            // A's process on B's GPU, one of a container without a grant, and one on a GPU that nobody was granted.
            seen(1, "GPU-1", 1, Place::Granted(name("a"))),
            seen(2, "GPU-0", 1, Place::Ungranted("c".into())),
            seen(3, "GPU-2", 1, Place::Ungranted("c".into())),
            seen(4, "GPU-0", 1, Place::Host),
        ];
        let readings = [reading.clone(), reading];
        let verdicts = run(&readings, &rules(Action::Record, Action::End, 0));
        assert_eq!(verdicts[0].len(), 2, "{verdicts:?}");
        assert_eq!(ended(&verdicts[1]), [1, 2]);
        let verdicts = run(&readings, &rules(Action::End, Action::Warn, 0));
        assert_eq!((verdicts[0].len(), verdicts[1].len()), (2, 0), "told once: {verdicts:?}");
        let verdicts = run(&readings, &rules(Action::End, Action::Record, 0));
        assert!(verdicts.iter().all(Vec::is_empty), "{verdicts:?}");
    }

    #[test]
    fn one_that_could_not_be_ended_is_tried_again() {
        let (mut state, start, over) = (State::default(), Instant::now(), [in_a(1, 10 * GIB)]);
        let rules = rules(Action::End, Action::Warn, 0);
        for (second, expected) in [vec![], vec![1], vec![], vec![1]].into_iter().enumerate() {
            let verdicts = state.judge(&over, &grants(), &rules, start + Duration::from_secs(second as u64));
            assert_eq!(ended(&verdicts), expected, "{second}");
            state.not_ended(1);
        }
    }
}
