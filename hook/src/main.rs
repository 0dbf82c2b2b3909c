//! `gpufence-hook`: what the low-level runtime runs for a container with a grant.
//!
//! * [`check`] (createRuntime): what the container really has, against its grant, and [`caps`], the driver's memory caps;
//! * `clean-up` (poststop): the container's folder goes;
//! * [`cache`] (createContainer): the driver's libraries are made findable, for engines that apply our CDI spec by themselves;
//! * [`state`]: the container's state, as the OCI specification has it on standard input.
//!
//! It runs as root beside a hostile container: it reads nothing of its environment, executes nothing, and resolves every path
//! inside a container's root with openat2(RESOLVE_IN_ROOT).

mod cache;
mod caps;
mod cgroup;
mod check;
mod error;
mod state;

use std::{ffi::OsString, path::Path, process::ExitCode};

use error::HookError;
use gpufence_cdi::capability::DriverCapabilities;

const USAGE: &str = "usage: gpufence-hook check --folder FOLDER
       gpufence-hook clean-up --folder FOLDER
       gpufence-hook update-cache --stage FOLDER --capability NAME…
       gpufence-hook --version

A low-level runtime (runc, crun) runs it, with the container's state on standard input.";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words: Vec<&str> = arguments.iter().filter_map(|word| word.to_str()).collect();
    let result = match words.as_slice() {
        ["--version" | "-v"] => {
            println!("gpufence-hook {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        ["--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        ["check", "--folder", folder] => state::read().and_then(|state| check::run(&state, Path::new(folder))),
        ["clean-up", "--folder", folder] => state::read().and_then(|state| clean_up(&state, Path::new(folder))),
        ["update-cache", "--stage", stage, rest @ ..] if words.len() == arguments.len() => {
            state::read().and_then(|state| cache::run(&state, Path::new(stage), &capabilities(rest)?))
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpufence-hook: {error}");
            ExitCode::FAILURE
        }
    }
}

fn capabilities(words: &[&str]) -> Result<DriverCapabilities, HookError> {
    words
        .chunks(2)
        .map(|pair| match pair {
            ["--capability", name] => name.parse().map_err(HookError::Argument),
            _ => {
                Err(HookError::Argument(format!("\"{}\" is not an argument of this hook; see --help", pair.join(" "))))
            }
        })
        .collect()
}

/// Removes the container's folder, which must be its own.
fn clean_up(state: &state::State, folder: &Path) -> Result<(), HookError> {
    state.check_folder(folder)?;
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        other => other.map_err(error::io_error("remove", folder))?,
    }
    // The namespace's folder goes with its last container; that it isn't empty is no fault.
    if let Some(namespace) = folder.parent() {
        let _ = std::fs::remove_dir(namespace);
    }
    Ok(())
}
