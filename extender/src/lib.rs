//! The scheduler extender: chooses GPUs for Pods, signs grants and binds.
//!
//! What decides, as pure functions:
//! * [`quantity`], [`request`]: what a Pod asks for; [`policy`]: how is chosen;
//! * [`device`]: the GPUs of a node and what of them is granted; [`place`]: where on a node a Pod goes; [`reason`]: why it
//!   doesn't; [`preempt`]: who would have to go.
//!
//! What is known:
//! * [`pod`]: what of the API's Pods counts; [`ledger`]: who has what; [`inspect`]: the same for people.
//!
//! The edges:
//! * [`watch`]: nodes and Pods of the API server; [`bind`]: a choice made true; [`leader`]: which of several binds;
//! * [`wire`], [`verbs`], [`server`], [`tls`]: kube-scheduler's questions; [`metrics`].

pub mod bind;
pub mod device;
pub mod inspect;
pub mod leader;
pub mod ledger;
pub mod metrics;
pub mod place;
pub mod pod;
pub mod policy;
pub mod preempt;
pub mod quantity;
pub mod reason;
pub mod request;
pub mod server;
pub mod tls;
pub mod verbs;
pub mod watch;
pub mod wire;

use std::{sync::Arc, time::Duration};

use gpufence_grant::{signature::Keyring, signing::PrivateKey};
use kube::Client;
use tokio::task::JoinSet;

use crate::{
    leader::{Election, Leadership},
    ledger::Ledger,
    metrics::{Metrics, Now},
    policy::Choosing,
    watch::Synced,
};

/// One extender.
pub struct Extender {
    /// Who has what.
    pub ledger: Arc<Ledger>,
    /// Whether it binds.
    pub leadership: Arc<Leadership>,
    /// What it has read.
    pub synced: Arc<Synced>,
    /// What it has counted.
    pub metrics: Arc<Metrics>,
    client: Client,
    key: PrivateKey,
    keys: Arc<Keyring>,
}

impl Extender {
    /// One that has read nothing yet. It signs with `key`, and counts grants by `accepted` keys besides.
    pub fn new(
        client: Client,
        key: PrivateKey,
        mut accepted: Keyring,
        choosing: Choosing,
        leadership: Leadership,
    ) -> Self {
        accepted.add(key.public().clone());
        Self {
            ledger: Arc::new(Ledger::new(choosing)),
            leadership: Arc::new(leadership),
            synced: Arc::default(),
            metrics: Arc::new(Metrics::default()),
            client,
            key,
            keys: Arc::new(accepted),
        }
    }

    /// Starts all that runs besides serving: watches, the election if there is one, and finding out what became of binds
    /// without an answer. It ends when what is returned is dropped.
    pub fn start(self: &Arc<Self>, election: Option<Election>, certain: Duration) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        let (client, ledger, metrics) = (self.client.clone(), self.ledger.clone(), self.metrics.clone());
        tasks.spawn(watch::nodes(client, ledger, metrics, self.leadership.terms(), self.synced.clone()));
        let (client, ledger, metrics) = (self.client.clone(), self.ledger.clone(), self.metrics.clone());
        tasks.spawn(watch::pods(
            client,
            ledger,
            self.keys.clone(),
            metrics,
            self.leadership.terms(),
            self.synced.clone(),
        ));
        if let Some(election) = election {
            let (client, leadership) = (self.client.clone(), self.leadership.clone());
            tasks.spawn(async move { leader::run(client, election, &leadership).await });
        }
        let extender = self.clone();
        tasks.spawn(async move { extender.resolve(certain).await });
        tasks
    }

    /// What the metrics say now.
    fn now(&self) -> Now {
        let mut now = Now {
            leads: self.leadership.remaining().is_some(),
            synced: self.synced.once(),
            pods: self.ledger.counts(),
            ..Now::default()
        };
        for lock in self.ledger.nodes() {
            let node = lock.lock();
            match &node.devices {
                Ok(devices) => {
                    now.nodes.0 += 1;
                    for device in devices {
                        now.memory.0 += node.choosing.overcommit.of(device.memory);
                        now.memory.1 += device.used.memory;
                    }
                }
                Err(_) => now.nodes.1 += 1,
            }
        }
        now
    }
}
