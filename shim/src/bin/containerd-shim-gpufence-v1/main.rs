//! `containerd-shim-gpufence-v1`: a containerd shim which enforces grants and wraps runc.
//!
//! containerd runs it with an action (`start`, `delete`) and talks to the server that `start` leaves behind. One server
//! serves all containers of a Pod. The rooms:
//!
//! * [`start`], [`delete`], [`info`]: the short-lived actions;
//! * [`serve`]: the server's life; [`service`]: the Task service; [`container`] and [`process`]: what it keeps;
//! * [`runtime`]: calls of runc; [`reaper`]: its and the containers' exits;
//! * [`stdio`] and [`console`]: fifos, files, loggers and terminals;
//! * [`cgroup`], [`stats`] and [`oom`]: what the kernel says of a container;
//! * [`events`]: what containerd is told; [`options`]: what it told us.
//!
//! Enforcement itself is the library's, [`gpufence_shim`].

mod cgroup;
mod console;
mod container;
mod delete;
mod events;
mod info;
mod oom;
mod options;
mod process;
mod reaper;
mod runtime;
mod serve;
mod service;
mod start;
mod stats;
mod stdio;

use std::process::ExitCode;

use containerd_shim::Flags;

/// The name that containerd knows this runtime by.
const RUNTIME_NAME: &str = "io.containerd.gpufence.v1";

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let flags = match containerd_shim::parse(&arguments) {
        Ok(flags) => flags,
        Err(error) => {
            return fail(&format!("{error}; containerd runs this program, see `man containerd-shim-gpufence-v1`"));
        }
    };
    if flags.version {
        println!("containerd-shim-gpufence-v1:\n  Version: {}\n  Runtime: {RUNTIME_NAME}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    match run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

fn run(flags: &Flags) -> Result<(), Failure> {
    if flags.info {
        return info::print();
    }
    if flags.namespace.is_empty() {
        return Err("no -namespace was given; containerd runs this program, people configure it as a runtime".into());
    }
    match flags.action.as_str() {
        "start" => start::run(flags),
        "delete" => delete::run(flags),
        "" => serve::run(flags),
        other => Err(format!("unknown action \"{other}\": start and delete are known").into()),
    }
}

/// containerd shows what is printed here in the error of the container's creation.
fn fail(message: &str) -> ExitCode {
    eprintln!("containerd-shim-gpufence-v1: {message}");
    ExitCode::FAILURE
}
