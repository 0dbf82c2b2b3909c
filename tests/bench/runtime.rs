//! `gpufence-runtime` beside runc itself, in one run: create and start of the same bundle, as Docker and Podman call them.
//!
//! `make bench`, or `cargo bench -p gpufence-tests --bench runtime -- --rounds 200`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use gpufence_cli::table;
use gpufence_tests::{
    figures::median_milliseconds,
    host::unique,
    programs,
    simulated::{self, Description},
};
use serde_json::{Value, json};

/// Measures gpufence-runtime beside runc
#[derive(Parser)]
struct Arguments {
    /// How many containers of each kind are timed
    #[arg(long, default_value_t = 100)]
    rounds: usize,
    /// `cargo bench` says so
    #[arg(long, hide = true)]
    bench: bool,
}

/// One way of running a container.
struct Subject {
    name: &'static str,
    program: PathBuf,
    flags: Vec<String>,
    bundle: PathBuf,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let folder = tempfile::Builder::new().prefix("gpufence-bench-").tempdir_in("/run")?;
    let path = |name: &str| folder.path().join(name);
    // Containers' folders are on a tmpfs, as /run is on every machine but a sandboxed one.
    let memory = tempfile::Builder::new().prefix("gpufence-bench-").tempdir_in("/dev/shm")?;
    simulated::build(&Description::parse(&["gpus=2"])?, &path("driver-root"))?;
    let policy = path("policy.toml");
    let text = format!(
        "driver_root = {:?}\nstate_dir = {:?}\nstage_dir = {:?}\nruntimes = [\"runc\"]\n",
        path("driver-root"),
        memory.path().join("state"),
        path("stage")
    );
    fs::write(&policy, text)?;
    let small = bundle(&path("small"), 0)?;
    let large = bundle(&path("large"), 2000)?;
    let ours = |name, grant: Option<&str>, bundle: &Path| -> Result<Subject> {
        let mut flags = vec!["--policy".to_owned(), policy.display().to_string()];
        flags.extend(grant.map(|grant| format!("--grant={grant}")));
        Ok(Subject { name, program: programs::built()?.join("gpufence-runtime"), flags, bundle: bundle.to_owned() })
    };
    let subjects = [
        Subject { name: "runc", program: "runc".into(), flags: Vec::new(), bundle: small.clone() },
        ours("gpufence-runtime, no grant", None, &small)?,
        ours("gpufence-runtime, a share", Some("0=8GiB@50%"), &small)?,
        ours("gpufence-runtime, a share, 2,000 libraries", Some("0=8GiB@50%"), &large)?,
    ];
    let mut times = vec![Vec::new(); subjects.len()];
    for round in 0..arguments.rounds + 3 {
        for (subject, times) in subjects.iter().zip(&mut times) {
            let took = subject.run(&memory.path().join("runc"))?;
            // The first rounds fill caches, and build the inventory and the stage.
            if round >= 3 {
                times.push(took);
            }
        }
    }
    println!("\ncreate and start, {} containers of each kind", arguments.rounds);
    print!("{}", report(&subjects, &times));
    Ok(())
}

impl Subject {
    fn run(&self, root: &Path) -> Result<Duration> {
        let id = unique("bench");
        // An engine writes the bundle anew for each container.
        fs::copy(self.bundle.join("config.json.first"), self.bundle.join("config.json"))?;
        let call = |words: &[&str]| -> Result<()> {
            let mut command = Command::new(&self.program);
            command.args(&self.flags).arg("--root").arg(root).args(words).stdin(Stdio::null());
            let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status().context("run the runtime")?;
            if !status.success() {
                bail!("{}: {words:?} failed; {:?}", self.name, command);
            }
            Ok(())
        };
        let bundle = self.bundle.to_string_lossy().into_owned();
        let start = Instant::now();
        call(&["create", "--bundle", &bundle, &id])?;
        call(&["start", &id])?;
        let took = start.elapsed();
        call(&["delete", "--force", &id])?;
        Ok(took)
    }
}

/// A bundle whose image has a loader's cache with so many libraries.
fn bundle(folder: &Path, libraries: usize) -> Result<PathBuf> {
    programs::test_image()?.unpack(&folder.join("rootfs"))?;
    if libraries > 0 {
        let mut cache = gpufence_cdi::ldcache::Cache::default();
        cache.prepend((0..libraries).map(cache_entry));
        fs::create_dir_all(folder.join("rootfs/etc"))?;
        fs::write(folder.join("rootfs/etc/ld.so.cache"), cache.write())?;
    }
    let status = Command::new("runc").arg("spec").current_dir(folder).status().context("run runc spec")?;
    if !status.success() {
        bail!("runc spec failed");
    }
    let file = folder.join("config.json");
    let mut spec: Value = serde_json::from_slice(&fs::read(&file)?)?;
    spec["process"]["terminal"] = json!(false);
    spec["process"]["args"] = json!(["/bin/true"]);
    spec["process"]["rlimits"] = json!([]);
    fs::write(folder.join("config.json.first"), spec.to_string())?;
    Ok(folder.to_owned())
}

fn cache_entry(number: usize) -> gpufence_cdi::ldcache::Entry<'static> {
    gpufence_cdi::ldcache::Entry {
        flags: gpufence_cdi::elf::LinkerFlags::X86_64.0,
        name: format!("libnumber{number}.so.1").into_bytes().into(),
        path: format!("/usr/lib/x86_64-linux-gnu/libnumber{number}.so.1").into_bytes().into(),
        os_version: 0,
        hwcap: 0,
    }
}

fn report(subjects: &[Subject], times: &[Vec<Duration>]) -> String {
    let base = median_milliseconds(&times[0]);
    let rows: Vec<Vec<String>> = subjects
        .iter()
        .zip(times)
        .map(|(subject, times)| {
            let time = median_milliseconds(times);
            vec![
                subject.name.into(),
                format!("{time:.1} ms"),
                format!("{:.3}", time / base),
                format!("{:+.1} ms", time - base),
            ]
        })
        .collect();
    table::format(&["SUBJECT", "CREATE+START", "RATIO", "MORE"], &rows)
}
