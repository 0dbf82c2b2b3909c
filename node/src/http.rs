//! `/metrics` for Prometheus, and `/healthz`.

use std::{
    net::SocketAddr,
    sync::{Arc, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::net::TcpListener;

use crate::{metrics, mps, published::Published, usage, watchdog::Shared};

/// OpenMetrics, as prometheus-client writes it.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long a scrape may take, whatever the containers have done to their usage tables.
const SCRAPE: Duration = Duration::from_secs(8);

/// What is served from.
#[derive(Clone)]
pub struct Served {
    /// What the watchdog last saw.
    pub shared: Shared,
    /// What this agent can do.
    pub published: Arc<Published>,
    /// The MPS daemons.
    pub mps: mps::Shared,
    /// The watchdog's period.
    pub period: Duration,
}

/// Takes the address.
pub async fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("listen at {address} for metrics; --listen names another address"))
}

/// Serves until the future given ends.
pub async fn serve(
    listener: TcpListener,
    served: Served,
    until: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let router = Router::new().route("/metrics", get(metrics)).route("/healthz", get(healthz)).with_state(served);
    Ok(axum::serve(listener, router).with_graceful_shutdown(until).await?)
}

async fn metrics(State(served): State<Served>) -> Response {
    let text = tokio::task::spawn_blocking(move || {
        let snapshot = served.shared.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let daemons = served.mps.lock().unwrap_or_else(PoisonError::into_inner).clone();
        metrics::text(&served.published.state(), &snapshot, &daemons, usage::read)
    });
    match tokio::time::timeout(SCRAPE, text).await {
        Ok(Ok(Ok(text))) => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Ok(_) => (StatusCode::INTERNAL_SERVER_ERROR, "the metrics can't be written\n").into_response(),
        Err(_) => (StatusCode::GATEWAY_TIMEOUT, "a container's usage table can't be read\n").into_response(),
    }
}

/// Well while readings come: the last not older than three periods and a little.
async fn healthz(State(served): State<Served>) -> Response {
    let at = served.shared.lock().unwrap_or_else(PoisonError::into_inner).at;
    match at.map(|at| at.elapsed()) {
        Some(age) if age < served.period * 3 + Duration::from_secs(5) => "ok\n".into_response(),
        Some(age) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("the last reading is {} s old\n", age.as_secs())).into_response()
        }
        None => (StatusCode::SERVICE_UNAVAILABLE, "no reading yet\n").into_response(),
    }
}
