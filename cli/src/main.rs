//! Runs `gpufence`. Exit status: 0 done, 1 failed, 2 wrong usage.

use std::{io::IsTerminal, process::ExitCode};

use clap::Parser;
use gpufence_cli::{
    arguments::{Arguments, Command},
    cdi, configure, demo, inventory, keygen, manual, probe,
};

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Inventory(arguments) => inventory::run(&arguments),
        Command::Cdi(arguments) => cdi::run(&arguments),
        Command::Configure(arguments) => configure::run(&arguments),
        Command::Keygen(arguments) => keygen::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Probe(arguments) => probe::run(&arguments),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { folder } => manual::pages(&folder),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that has seen enough, such as `head`, is no failure of ours.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let (red, plain) = if std::io::stderr().is_terminal() { ("\x1b[31m", "\x1b[0m") } else { ("", "") };
            eprintln!("{red}gpufence:{plain} {}", whole(&error));
            ExitCode::FAILURE
        }
    }
}

/// The error and its causes in one line. Typed errors say their cause themselves, which isn't said again.
fn whole(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said.as_str() {
        "" => cause,
        _ if said.ends_with(&cause) => said,
        _ => format!("{said}: {cause}"),
    })
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::BrokenPipe)
}
