//! `gpufence-runtime`: an OCI runtime that enforces grants and then becomes runc or crun, for engines that don't speak
//! containerd's shim protocol: Docker, Podman, CRI-O.
//!
//! * [`arguments`]: runc's and crun's command line, as far as it has to be understood;
//! * [`log`]: the engine's log, where it looks for what went wrong.
//!
//! On `create` and `run` it enforces the grant on the bundle; everything else passes through untouched. It then replaces
//! itself by execve, so no process stays.

mod arguments;
mod log;

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use arguments::{Call, Verb};
use gpufence_shim::{
    bundle::{Bundle, enforce_bundle},
    exec,
    policy::Policy,
    runtime_path,
};
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

/// Where runc and crun keep their state as root, if not told.
const DEFAULT_ROOTS: [&str; 2] = ["/run/runc", "/run/crun"];

const HELP: &str = "\
An OCI runtime that holds containers to their GPU grants, and hands over to runc or crun.

usage: gpufence-runtime [--grant GRANT] [--policy FILE] RUNTIME-ARGUMENTS…

  --grant GRANT     a fixed grant in the short form, GPU=MEMORY[@PERCENT%][,…], for runtimes that an administrator
                    configures
  --policy FILE     another policy file; Podman passes no environment on, but runtime flags
  --gpufence-help   this text

Everything else is the low-level runtime's own; its --help says more.

Examples, in Docker's daemon.json:
  {\"runtimes\": {\"gpufence\": {\"path\": \"/usr/local/bin/gpufence-runtime\"},
                \"gpu0-8g\": {\"path\": \"/usr/local/bin/gpufence-runtime\", \"runtimeArgs\": [\"--grant\", \"0=8GiB\"]}}}

  docker run --runtime gpu0-8g IMAGE nvidia-smi
  docker run --runtime gpufence --annotation gpufence.dev/gpu=0=8GiB IMAGE nvidia-smi
  podman --runtime /usr/local/bin/gpufence-runtime run --annotation gpufence.dev/gpu=0=8GiB IMAGE nvidia-smi

Files:
  /etc/gpufence/config.toml   the node's policy, gpufence-config(5)";

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if words.iter().any(|word| word == "--gpufence-help") {
        println!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let call = match arguments::parse(words) {
        Ok(call) => call,
        Err(error) => return fail(&Call::default(), &error.into()),
    };
    match run(&call) {
        Ok(code) => code,
        Err(error) => fail(&call, &error),
    }
}

fn fail(call: &Call, error: &Failure) -> ExitCode {
    let message = format!("gpufence: {error}");
    log::error(call, &message);
    eprintln!("{message}");
    ExitCode::FAILURE
}

fn run(call: &Call) -> Result<ExitCode, Failure> {
    let policy = call.policy.as_ref().map_or_else(Policy::load, |path| Policy::read(path))?;
    let runtime = runtime_path::of_policy(&policy)?;
    match &call.verb {
        Verb::Create { bundle, id } => enforce(&policy, call, bundle, id)?,
        Verb::Exec { id, process, added_capabilities } => {
            hold(&policy, call, id, process.as_deref(), added_capabilities)?;
        }
        Verb::Delete(id) => clean_up_after_failure(&policy, call, id)?,
        Verb::Features => return features(&runtime, call),
        Verb::Other => {}
    }
    // Only returns where it failed.
    let error = Command::new(&runtime).args(&call.passed_on).exec();
    Err(format!("run {}: {error}", runtime.display()).into())
}

fn enforce(policy: &Policy, call: &Call, bundle: &Path, id: &str) -> Result<(), Failure> {
    let folder = std::env::current_dir()?.join(bundle);
    let bundle = Bundle {
        folder: &folder,
        rootfs: None,
        namespace: &call.namespace(),
        id,
        fixed_grant: call.grant.as_deref(),
        restored: false,
        clean_up_by_hook: true,
    };
    Ok(enforce_bundle(policy, &bundle).map(drop)?)
}

/// Holds a process that is added to what its container is held to.
fn hold(policy: &Policy, call: &Call, id: &str, process: Option<&Path>, added: &[String]) -> Result<(), Failure> {
    let held = exec::held(policy, &call.namespace(), id)?;
    if let Some(name) = added.iter().find(|name| held.dropped_capabilities.contains(name)) {
        return Err(
            format!("exec --cap {name}: this node's policy takes {name} from the container; leave it out").into()
        );
    }
    match process {
        Some(file) => Ok(exec::enforce_file(&held, &std::env::current_dir()?.join(file))?),
        None => Ok(()),
    }
}

/// A container whose create failed in the low-level runtime, after us, has no poststop; its engine deletes it all the
/// same. One that the low-level runtime knows is cleaned up by the hook.
fn clean_up_after_failure(policy: &Policy, call: &Call, id: &str) -> Result<(), Failure> {
    let roots = call.root.as_ref().map_or_else(|| DEFAULT_ROOTS.map(PathBuf::from).to_vec(), |root| vec![root.clone()]);
    if !id.contains('/') && roots.iter().all(|root| !root.join(id).exists()) {
        gpufence_shim::state::clean_up(policy, &call.namespace(), id)?;
    }
    Ok(())
}

/// The low-level runtime's own features with ours among the annotations, as the OCI specification's features.md has them.
fn features(runtime: &Path, call: &Call) -> Result<ExitCode, Failure> {
    let output = Command::new(runtime).args(&call.passed_on).stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    let Ok(mut features) = serde_json::from_slice::<Value>(&output.stdout) else {
        print!("{}", String::from_utf8_lossy(&output.stdout));
        return Ok(ExitCode::from(u8::try_from(output.status.code().unwrap_or(1)).unwrap_or(1)));
    };
    if !features["annotations"].is_object() {
        features["annotations"] = json!({});
    }
    features["annotations"]["dev.gpufence.version"] = json!(env!("CARGO_PKG_VERSION"));
    println!("{}", serde_json::to_string_pretty(&features)?);
    Ok(ExitCode::SUCCESS)
}
