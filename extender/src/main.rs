//! Runs `gpufence-extender`. Exit status: 0 stopped by a signal, 1 failed, 2 wrong usage.

mod arguments;

use std::{fs, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use arguments::{Arguments, LogFormat};
use clap::Parser;
use gpufence_extender::{
    Extender,
    bind::CERTAIN,
    leader::{self, Election, Leadership},
    policy::Choosing,
    server,
    tls::{self, Files, TlsListener},
};
use gpufence_grant::{signature::Keyring, signing::PrivateKey};
use kube::Client;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let log = tracing_subscriber::fmt().with_max_level(arguments.log_level).with_writer(std::io::stderr);
    match arguments.log_format {
        LogFormat::Text => log.with_target(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!("no threads: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &Arguments) -> Result<()> {
    let file = &arguments.signing_key;
    let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let key =
        PrivateKey::from_pem(&text).with_context(|| format!("read {}; `gpufence keygen` makes one", file.display()))?;
    let mut accepted = Keyring::default();
    if let Some(folder) = &arguments.accepted_keys {
        accepted.add_folder(folder)?;
    }
    tls::use_ring();
    let client = Client::try_default().await.context("find the cluster: set KUBECONFIG, or run in a Pod")?;
    let choosing = Choosing {
        nodes: arguments.node_policy,
        gpus: arguments.gpu_policy,
        overcommit: arguments.memory_overcommit,
        unit: arguments.gpu_mem_unit,
    };
    let election = (!arguments.no_leader_election).then(|| Election {
        namespace: arguments.namespace.clone(),
        name: arguments.lease.clone(),
        identity: format!("{}_{}", arguments.pod_name.as_deref().unwrap_or("gpufence-extender"), identity()),
        own_pod: arguments.pod_name.clone(),
        duration: Duration::from_secs(arguments.lease_seconds),
    });
    let leadership = if election.is_some() { Leadership::contested() } else { Leadership::alone() };
    tracing::info!(key = key.public().id(), "signing");
    let extender = Arc::new(Extender::new(client.clone(), key, accepted, choosing, leadership));

    let listener = TcpListener::bind(arguments.listen)
        .await
        .with_context(|| format!("listen at {}; --listen names another address", arguments.listen))?;
    let address = listener.local_addr()?;
    let tasks = extender.start(election.clone(), CERTAIN);
    let router = server::router(extender.clone());
    let [mut terminate, mut interrupt] = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    let stopped = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let tls = arguments.tls_certificate.clone().zip(arguments.tls_key.clone());
    if let Some((certificate, key)) = tls {
        let files = Files { certificate, key, client_authority: arguments.tls_client_authority.clone() };
        let listener = TlsListener::new(listener, files)?;
        tracing::info!("serving at https://{address}");
        axum::serve(listener, router).with_graceful_shutdown(stopped).await?;
    } else {
        if !address.ip().is_loopback() {
            tracing::warn!("whoever reaches {address} can bind Pods; see --tls-client-authority");
        }
        tracing::info!("serving at http://{address}");
        axum::serve(listener, router).with_graceful_shutdown(stopped).await?;
    }
    // No bind is under way any more.
    drop(tasks);
    if let Some(election) = &election {
        let resigned = leader::resign(&client, election, &extender.leadership);
        let _ = tokio::time::timeout(Duration::from_secs(5), resigned).await;
    }
    Ok(())
}

/// Unlike that of any other run.
fn identity() -> String {
    let random = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    format!("{}{}", random.trim(), std::process::id())
}
