//! The command line. Its texts are the manual page's too.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Parser, ValueEnum};
use gpufence_extender::policy::{Overcommit, Packing, Unit};

/// The scheduler extender: chooses GPUs for Pods, signs grants and binds
///
/// It reads nodes and Pods of the cluster that its Pod is in, or that KUBECONFIG names, and answers kube-scheduler. What it
/// knows is in memory alone; after a start it reads all that was granted from the Pods.
#[derive(Debug, Parser)]
#[command(
    name = "gpufence-extender",
    version,
    after_help = "Examples:
  gpufence-extender --signing-key /keys/signing.key --tls-certificate tls.crt --tls-key tls.key --tls-client-authority ca.crt
  gpufence-extender --signing-key 39f713d0a644253f.key --listen 127.0.0.1:32766 --no-leader-election
  curl http://127.0.0.1:32766/inspect

Paths: /gpufence/{filter,prioritize,bind,preempt}, the same below /gpushare-scheduler, /inspect[/NODE], /healthz, /readyz, /metrics

Exit status: 0 stopped by a signal, 1 failed, 2 wrong usage."
)]
pub struct Arguments {
    /// The private key that signs grants, as `gpufence keygen` writes it
    #[arg(long, value_name = "FILE")]
    pub signing_key: PathBuf,
    /// A folder whose *.pub files have more keys by which grants count, as while keys are changed
    #[arg(long, value_name = "FOLDER")]
    pub accepted_keys: Option<PathBuf>,
    /// Where kube-scheduler is served
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:32766")]
    pub listen: SocketAddr,
    /// The certificate for HTTPS, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// Its private key
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Who signs clients' certificates; who has none isn't served. Without it, whoever reaches the address can bind Pods
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_client_authority: Option<PathBuf>,
    /// Which node is taken: binpack, spread or balanced; a Pod may say otherwise
    #[arg(long, value_name = "WAY", default_value = "binpack")]
    pub node_policy: Packing,
    /// Which GPU of it: the same
    #[arg(long, value_name = "WAY", default_value = "binpack")]
    pub gpu_policy: Packing,
    /// How much more memory is granted than there is; a node's label may say otherwise
    #[arg(long, value_name = "FACTOR", default_value = "1.0")]
    pub memory_overcommit: Overcommit,
    /// What aliyun.com/gpu-mem counts: GiB or MiB; a node's label may say otherwise
    #[arg(long, value_name = "UNIT", default_value = "GiB")]
    pub gpu_mem_unit: Unit,
    /// Bind without asking whether another does: for one extender alone
    #[arg(long)]
    pub no_leader_election: bool,
    /// The Lease's namespace [default: POD_NAMESPACE, else gpufence]
    #[arg(long, value_name = "NAMESPACE", env = "POD_NAMESPACE", default_value = "gpufence", hide_env = true)]
    pub namespace: String,
    /// The Lease's name
    #[arg(long, value_name = "NAME", default_value = "gpufence-extender")]
    pub lease: String,
    /// For how many seconds the Lease holds
    #[arg(long, value_name = "SECONDS", default_value = "15", value_parser = clap::value_parser!(u64).range(10..=300))]
    pub lease_seconds: u64,
    /// Our own Pod, which is labelled gpufence.dev/leader=true while it leads
    #[arg(long, value_name = "NAME", env = "POD_NAME", hide_env = true)]
    pub pod_name: Option<String>,
    /// How the log is written to standard error
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// What is logged
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: tracing::Level,
}

/// A form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// An object for each line
    Json,
}
