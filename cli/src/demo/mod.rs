//! `gpufence demo`: five containers on a containerd of its own, and what each sees from inside.
//!
//! Two share a GPU, one has another, one has no grant but an image that asks for all, and one is privileged.

mod report;

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result, bail};
use gpufence_cdi::{
    devices::NVIDIA_MAJOR,
    inventory::{Inventory, Roots},
};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::{
    arguments::{DemoArguments, Output},
    engine::{Containerd, Settings},
    image::Image,
    probe::Report,
};

const RUNTIME: &str = "io.containerd.gpufence.v1";
const SHIM: &str = "containerd-shim-gpufence-v1";
/// A GPU's node that lies in the image itself.
const NODE_IN_IMAGE: &str = "/opt/nvidia";

/// One of the five.
struct Container {
    name: &'static str,
    about: String,
    grant: Option<String>,
    greedy_image: bool,
    privileged: bool,
}

/// What one of them saw.
pub(crate) struct Seen {
    pub name: &'static str,
    pub about: String,
    pub report: Report,
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Runs the demo.
pub fn run(arguments: &DemoArguments) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the demo starts a containerd, which needs root: sudo gpufence demo");
    }
    watch_for_interrupts()?;
    let inventory = Inventory::discover(&Roots::open(&arguments.driver_root)?).with_context(|| {
        format!("no GPUs under {}; `make demo` simulates a machine with two", arguments.driver_root.display())
    })?;
    let indices: Vec<u32> = inventory.devices.gpus.iter().filter_map(|gpu| gpu.index).collect();
    let (Some(first), Some(last)) = (indices.first(), indices.last()) else {
        bail!("the driver under {} has no usable GPU", arguments.driver_root.display());
    };
    let minors: Vec<u32> = inventory.devices.gpus.iter().map(|gpu| gpu.node.minor).collect();
    let folder =
        tempfile::Builder::new().prefix("gpufence-demo-").tempdir_in("/run").context("make a folder in /run")?;
    // Dropped before the folder, and so ended before it goes.
    let containerd = prepare(arguments, folder.path(), &minors)?;
    let mut seen = Vec::new();
    for container in five(*first, *last) {
        check_interrupted()?;
        progress(arguments, &format!("Running {} ...", container.name));
        let report = run_one(&containerd, &container, &minors)
            .with_context(|| format!("container {} ({})", container.name, container.about))?;
        seen.push(Seen { name: container.name, about: container.about, report });
    }
    let text = match arguments.output {
        Output::Table => report::table(&inventory, &seen),
        Output::Json => report::json(&seen)?,
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

fn five(first: u32, last: u32) -> [Container; 5] {
    let granted = |name, gpu: u32, share: &str| Container {
        name,
        about: format!("GPU {gpu}, {share}"),
        grant: Some(format!("{gpu}={share}")),
        greedy_image: false,
        privileged: false,
    };
    let ungranted = |name, about: &str, privileged| Container {
        name,
        about: about.into(),
        grant: None,
        greedy_image: true,
        privileged,
    };
    [
        granted("trainer", first, "8GiB@50%"),
        granted("notebook", first, "4GiB@25%"),
        granted("renderer", last, "16GiB"),
        ungranted("greedy", "no grant; image asks for all", false),
        ungranted("privileged", "no grant; privileged", true),
    ]
}

/// A containerd with our runtime and the two images.
fn prepare(arguments: &DemoArguments, folder: &Path, minors: &[u32]) -> Result<Containerd> {
    let policy = folder.join("policy.toml");
    let text = format!(
        "driver_root = {:?}\nstate_dir = {:?}\nstage_dir = {:?}\n",
        arguments.driver_root.canonicalize()?,
        folder.join("state-of-gpufence"),
        folder.join("stage")
    );
    std::fs::write(&policy, text)?;
    progress(arguments, "Starting a containerd of our own ...");
    let containerd = Containerd::start(Settings::new(&folder.join("containerd"), &shim_folder(arguments)?, &policy))?;
    progress(arguments, "Making two images ...");
    let nodes = minors.iter().map(|minor| (format!("{}{minor}", &NODE_IN_IMAGE[1..]), NVIDIA_MAJOR, *minor)).collect();
    let folders = ["proc", "sys", "dev", "tmp", "etc"].map(str::to_owned).to_vec();
    let plain = Image { name: "docker.io/gpufence/plain:latest".into(), nodes, folders, ..Image::default() }
        .with_this_program("usr/bin/gpufence")?;
    let greedy = Image {
        name: "docker.io/gpufence/greedy:latest".into(),
        environment: ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all"].map(str::to_owned).to_vec(),
        ..plain.clone()
    };
    for image in [&plain, &greedy] {
        check_interrupted()?;
        let archive = folder.join("image.tar");
        image.write(&archive)?;
        containerd.run_ctr([Path::new("images"), Path::new("import"), &archive])?;
        std::fs::remove_file(&archive)?;
    }
    Ok(containerd)
}

fn run_one(containerd: &Containerd, container: &Container, minors: &[u32]) -> Result<Report> {
    let mut arguments: Vec<String> = ["run", "--rm", "--runtime", RUNTIME].map(str::to_owned).to_vec();
    if let Some(grant) = &container.grant {
        arguments.extend(["--annotation".into(), format!("gpufence.dev/gpu={grant}")]);
    }
    if container.privileged {
        arguments.push("--privileged".into());
    }
    let image = if container.greedy_image { "greedy" } else { "plain" };
    arguments.extend([format!("docker.io/gpufence/{image}:latest"), container.name.into()]);
    arguments.extend(["/usr/bin/gpufence", "probe", "--output", "json"].map(str::to_owned));
    for minor in minors {
        arguments.extend(["--open".into(), format!("{NODE_IN_IMAGE}{minor}")]);
        arguments.extend(["--make".into(), format!("{NVIDIA_MAJOR}:{minor}")]);
    }
    Ok(serde_json::from_str(&containerd.run_ctr(&arguments)?)?)
}

fn shim_folder(arguments: &DemoArguments) -> Result<PathBuf> {
    let beside = std::env::current_exe()?.parent().map(Path::to_owned);
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    let folders = arguments.shim_folder.clone().into_iter().chain(beside).chain(std::env::split_paths(&on_path));
    folders.into_iter().find(|folder| folder.join(SHIM).is_file()).with_context(|| {
        format!("{SHIM} is neither beside this program nor on PATH; name its folder with --shim-folder")
    })
}

fn progress(arguments: &DemoArguments, text: &str) {
    if arguments.output == Output::Table {
        eprintln!("{text}");
    }
}

/// On Ctrl-C the demo ends after the step that it is in, and cleans up. What it started has process groups of its own,
/// so the terminal's signal is for us alone.
#[allow(unsafe_code, reason = "one-line wrapper")]
fn watch_for_interrupts() -> Result<()> {
    let action = SigAction::new(SigHandler::Handler(interrupted), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler only stores an atomic, which is async-signal-safe.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

extern "C" fn interrupted(_: nix::libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

fn check_interrupted() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted; everything was cleaned up");
    }
    Ok(())
}
