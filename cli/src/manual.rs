//! Manual pages and shell completions, from the command line's own description.

use std::{fs, io::Write, path::Path};

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_mangen::Man;

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
    let mut command = Arguments::command();
    command.build();
    pages_of(&command, folder)
}

fn pages_of(command: &Command, folder: &Path) -> Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let path = folder.join(format!("{name}.1"));
    fs::write(&path, page(command)?).with_context(|| format!("write {}", path.display()))?;
    command.get_subcommands().try_for_each(|command| pages_of(command, folder))
}

/// One page. The help's last part becomes sections of their own, where clap's would run its lines together.
fn page(command: &Command) -> Result<Vec<u8>> {
    let last_part = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let man = Man::new(command.clone());
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().next().is_some() {
        man.render_options_section(&mut page)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut verbatim = false;
    for line in last_part.lines() {
        let title = line.split_once(':').filter(|(title, _)| !line.starts_with(' ') && title.split(' ').count() <= 2);
        if let Some((title, rest)) = title {
            if verbatim {
                writeln!(page, ".fi")?;
            }
            verbatim = rest.trim().is_empty();
            writeln!(page, ".SH {}\n{}", title.to_uppercase(), if verbatim { ".nf" } else { rest.trim() })?;
        } else if !verbatim && line.trim().is_empty() {
            writeln!(page, ".PP")?;
        } else {
            writeln!(page, "{}", line.trim().replace('\\', "\\\\").replace('-', "\\-"))?;
        }
    }
    if verbatim {
        writeln!(page, ".fi")?;
    }
    Ok(page)
}
