//! Manual pages and shell completions, from the command line's own description.

use std::{fs, io::Write, path::Path};

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::arguments::Arguments;

/// Prints completions for a shell.
pub fn completions(shell: clap_complete::Shell) -> Result<()> {
    // Into memory first: the generator panics where its writer fails, as a closed pipe does.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "gpufence", &mut text);
    Ok(std::io::stdout().write_all(&text)?)
}

/// Writes a page for the command and for each of its subcommands.
pub fn pages(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    clap_mangen::generate_to(Arguments::command(), folder)
        .with_context(|| format!("write manual pages into {}", folder.display()))
}
