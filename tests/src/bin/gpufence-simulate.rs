//! Builds a simulated driver root.

use std::path::PathBuf;

use clap::Parser;
use gpufence_tests::simulated::{Description, build};

/// Builds a folder that looks like a machine with NVIDIA GPUs, for machines that have none
#[derive(Parser)]
#[command(after_help = "Examples:
  gpufence-simulate /tmp/two gpus=2
  gpufence-simulate /tmp/mig gpus=2 mig=0:2
  gpufence-simulate /tmp/both gpus=1 driver=550.163.01 old-driver=535.247.01
  gpufence-simulate /tmp/odd gpus=4 excluded=1 no-uvm
  gpufence inventory --driver-root /tmp/two")]
struct Arguments {
    /// The folder to make
    folder: PathBuf,
    /// The machine: gpus=N mig=GPU:COUNT excluded=GPU driver=VERSION old-driver=VERSION memory=MIB real=FOLDER no-uvm
    words: Vec<String>,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    build(&Description::parse(&arguments.words)?, &arguments.folder)
}
