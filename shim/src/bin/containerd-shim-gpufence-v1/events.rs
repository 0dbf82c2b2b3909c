//! What containerd is told, in order: an event that can't be delivered holds back those behind it until it is given up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use containerd_shim::{
    event::Event,
    protos::{
        api::ForwardRequest,
        protobuf::{
            Message, MessageField,
            well_known_types::{any::Any, timestamp::Timestamp},
        },
        shim::event::Envelope,
        shim_async::{Client, EventsClient},
        ttrpc::context,
    },
};
use tokio::sync::mpsc;

/// How often a delivery is tried, with as many seconds between as it has failed: containerd may be restarting.
const TRIES: u32 = 8;

/// The queue to containerd.
#[derive(Clone)]
pub struct Publisher {
    queue: mpsc::UnboundedSender<Envelope>,
    pending: Arc<AtomicUsize>,
    namespace: String,
}

impl Publisher {
    pub fn start(address: String, namespace: String) -> Self {
        let (queue, receiver) = mpsc::unbounded_channel();
        let pending = Arc::new(AtomicUsize::new(0));
        tokio::spawn(deliver(address, receiver, pending.clone()));
        Self { queue, pending, namespace }
    }

    /// Queues an event; `type_name` is its message's full name.
    pub fn publish<E: Event + Message>(&self, type_name: &str, event: &E) {
        let Ok(value) = event.write_to_bytes() else { return };
        let envelope = Envelope {
            timestamp: MessageField::some(timestamp(SystemTime::now())),
            namespace: self.namespace.clone(),
            topic: event.topic(),
            event: MessageField::some(Any { type_url: type_name.into(), value, ..Any::default() }),
            ..Envelope::default()
        };
        self.pending.fetch_add(1, Ordering::Relaxed);
        if self.queue.send(envelope).is_err() {
            self.pending.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Waits until the queue is empty, or for `limit`.
    pub async fn drain(&self, limit: Duration) {
        let empty = async {
            while self.pending.load(Ordering::Relaxed) > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let _ = tokio::time::timeout(limit, empty).await;
    }
}

async fn deliver(address: String, mut queue: mpsc::UnboundedReceiver<Envelope>, pending: Arc<AtomicUsize>) {
    let address = if address.contains("://") { address } else { format!("unix://{address}") };
    let mut client: Option<EventsClient> = None;
    while let Some(envelope) = queue.recv().await {
        let topic = envelope.topic.clone();
        let request = ForwardRequest { envelope: MessageField::some(envelope), ..ForwardRequest::default() };
        for failed in 0..TRIES {
            tokio::time::sleep(Duration::from_secs(u64::from(failed))).await;
            if client.is_none() {
                client = Client::connect(&address).await.ok().map(EventsClient::new);
            }
            let Some(connected) = &client else { continue };
            match connected.forward(context::with_duration(Duration::from_secs(5)), &request).await {
                Ok(_) => break,
                Err(error) => {
                    log::warn!("event {topic} was not delivered: {error}");
                    client = None;
                }
            }
        }
        pending.fetch_sub(1, Ordering::Relaxed);
    }
}

/// protobuf's form of a point in time.
pub fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or_default(),
        ..Timestamp::default()
    }
}
