//! `gpufence configure`: edits an engine's own configuration.
//!
//! What is to stand in the file is decided by pure functions from its text, one module for each engine: [`containerd`],
//! [`docker`], [`podman`], [`crio`]. [`toml`] has what those of TOML share; [`file`] reads, shows and writes.

mod containerd;
mod crio;
mod docker;
mod file;
mod podman;
mod toml;

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::json;

use crate::arguments::{ConfigureArguments, EngineName, Output};

/// What is to be in an engine's configuration.
struct Wanted {
    /// `gpufence-runtime`, for engines that call OCI runtimes.
    runtime_path: PathBuf,
    /// Whether ours is the runtime of every container that names none.
    default_runtime: bool,
    /// The file of options, where containerd passes them on only by its path: 1.6.
    options_file: Option<PathBuf>,
}

/// How an engine's file is edited.
struct Engine {
    /// Where it usually is.
    file: &'static str,
    /// What makes the engine read it.
    restart: &'static str,
    /// The text with our parts in it.
    add: fn(&str, &Wanted) -> Result<String>,
    /// The text without them; `None` where they were all that there was.
    remove: fn(&str) -> Result<Option<String>>,
    /// Whether two texts say the same.
    same: fn(&str, &str) -> bool,
}

impl EngineName {
    fn engine(self) -> Engine {
        match self {
            Self::Containerd => Engine {
                file: "/etc/containerd/config.toml",
                restart: "systemctl restart containerd",
                add: containerd::add,
                remove: containerd::remove,
                same: toml::same,
            },
            Self::Docker => Engine {
                file: "/etc/docker/daemon.json",
                restart: "systemctl restart docker",
                add: docker::add,
                remove: docker::remove,
                same: docker::same,
            },
            Self::Podman => Engine {
                file: "/etc/containers/containers.conf",
                restart: "",
                add: podman::add,
                remove: podman::remove,
                same: toml::same,
            },
            Self::Crio => Engine {
                file: "/etc/crio/crio.conf.d/99-gpufence.conf",
                restart: "systemctl restart crio",
                add: crio::add,
                remove: crio::remove,
                same: toml::same,
            },
        }
    }
}

/// Edits, or shows what it would do.
pub fn run(arguments: &ConfigureArguments) -> Result<()> {
    let engine = arguments.engine.engine();
    let given = arguments.config.clone().unwrap_or_else(|| engine.file.into());
    let path = match arguments.engine {
        EngineName::Containerd => containerd::file_with_cri(&given)?,
        _ => given,
    };
    let before = file::read(&path)?;
    let text = before.as_deref().unwrap_or_default();
    let broken = || format!("{} is as it was", path.display());
    let after = if !arguments.remove {
        Some((engine.add)(text, &wanted(arguments, &path)?).with_context(broken)?)
    } else if file::mentions_us(text) {
        file::as_it_was(&path, (engine.remove)(text).with_context(broken)?, engine.same)?
    } else {
        before.clone()
    };
    let changed = before != after;
    if !arguments.dry_run && arguments.engine == EngineName::Containerd {
        containerd::keep_options_file(&path, after.as_deref().filter(|_| !arguments.remove))?;
    }
    if changed && !arguments.dry_run {
        file::write(&path, before.as_deref(), after.as_deref(), arguments.remove)?;
    }
    let restart = Some(engine.restart).filter(|command| changed && !command.is_empty());
    let text = match arguments.output {
        Output::Json => {
            let report = json!({
                "file": path,
                "changed": changed,
                "dryRun": arguments.dry_run,
                "diff": file::diff(&path, before.as_deref(), after.as_deref()),
                "restart": restart,
            });
            serde_json::to_string_pretty(&report)? + "\n"
        }
        Output::Table => describe(arguments, &path, changed, before.as_deref(), after.as_deref(), restart),
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

fn describe(
    arguments: &ConfigureArguments,
    path: &Path,
    changed: bool,
    before: Option<&str>,
    after: Option<&str>,
    restart: Option<&str>,
) -> String {
    if !changed {
        return format!("{} needs no change\n", path.display());
    }
    let mut text = String::new();
    if arguments.dry_run {
        text.push_str(&file::diff(path, before, after));
        return text;
    }
    text.push_str(&format!("Changed {}\n", path.display()));
    if let Some(command) = restart {
        text.push_str(&format!("It holds after: {command}\n"));
    }
    if arguments.engine == EngineName::Containerd && !arguments.remove {
        text.push_str(
            "For Kubernetes, once: apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: gpufence}, handler: gpufence\n",
        );
    }
    text
}

fn wanted(arguments: &ConfigureArguments, path: &Path) -> Result<Wanted> {
    let runtime_path = match (&arguments.runtime_path, arguments.engine) {
        (Some(path), _) => path.canonicalize().with_context(|| format!("--runtime-path {}", path.display()))?,
        (None, EngineName::Containerd) => PathBuf::new(),
        (None, _) => find_runtime()?,
    };
    Ok(Wanted {
        runtime_path,
        default_runtime: arguments.default_runtime,
        options_file: (arguments.engine == EngineName::Containerd && options_by_path(arguments))
            .then(|| containerd::options_file(path)),
    })
}

fn find_runtime() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let beside = own.parent().map(|folder| folder.join("gpufence-runtime")).filter(|path| path.is_file());
    beside
        .or_else(|| gpufence_shim::runtime_path::look_up("gpufence-runtime"))
        .context("gpufence-runtime is neither beside this program nor on PATH; name it with --runtime-path")
}

/// containerd 1.6 and older. Where no containerd tells its version, a later one is to come.
fn options_by_path(arguments: &ConfigureArguments) -> bool {
    let asked = || Command::new("containerd").arg("--version").output().ok();
    let version = arguments.engine_version.clone().or_else(|| {
        let output = asked()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit())).map(str::to_owned)
    });
    let mut numbers = version.as_deref().unwrap_or("2").split('.').map_while(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(2), numbers.next().unwrap_or(0)) < (1, 7)
}
