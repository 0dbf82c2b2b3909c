//! Manual pages and shell completions, from the command line's own description.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::arguments::Arguments;

/// Prints completions for a shell.
pub fn completions(shell: clap_complete::Shell) -> Result<()> {
    clap_complete::generate(shell, &mut Arguments::command(), "gpufence", &mut std::io::stdout());
    Ok(())
}

/// Writes a page for the command and for each of its subcommands.
pub fn pages(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    clap_mangen::generate_to(Arguments::command(), folder)
        .with_context(|| format!("write manual pages into {}", folder.display()))
}
