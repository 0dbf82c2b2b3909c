//! The command line. Its texts are the manual page's too.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Parser, ValueEnum};

/// The node agent: watches GPU memory, sets the driver's memory caps, serves metrics
///
/// It runs as root in the host's PID and cgroup namespaces, and holds NVML open. What it watches for and what it does about
/// it stands in the node's policy, under watchdog.
#[derive(Debug, Parser)]
#[command(
    name = "gpufence-node",
    version,
    after_help = "Examples:
  gpufence-node
  gpufence-node --listen 0.0.0.0:9467 --log-format json
  curl http://127.0.0.1:9467/metrics

Files:
  /etc/gpufence/config.toml     the node's policy; GPUFENCE_CONFIG names another
  /run/gpufence/node.sock       where the create path asks for memory caps; root's alone
  /run/gpufence/node.json       whether this node has them

Exit status: 0 stopped by a signal, 1 failed, 2 wrong usage."
)]
pub struct Arguments {
    /// Another policy file [default: /etc/gpufence/config.toml]
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Where metrics are served
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9467")]
    pub listen: SocketAddr,
    /// NVML's library [default: the driver root's]
    #[arg(long, value_name = "FILE")]
    pub nvml: Option<PathBuf>,
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
