//! What the limiter costs a program: the same calls through it and on the driver's stand-in, in one process, in a container.
//!
//! `make bench`, or `cargo bench -p gpufence-tests --bench limiter`.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use clap::Parser;
use gpufence_cli::table;
use gpufence_tests::{
    figures::median,
    host::{GPUFENCE, Host, Plan},
    limited,
};

const PROGRAM: &str = "/usr/bin/measured";
const REAL: &str = "/usr/lib/gpufence/compute/libcuda.so.550.163.01";

/// Measures calls through the limiter beside the driver's own
#[derive(Parser)]
struct Arguments {
    /// How many samples are taken of each call
    #[arg(long, default_value_t = 2000)]
    rounds: usize,
    /// `cargo bench` says so
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let rounds = Arguments::parse().rounds;
    let host = Host::start(&Plan::default())?;
    limited::compile_program(include_str!("../programs/measured.c"), &host.rootfs().join(&PROGRAM[1..]), &[])?;
    let mut rows = Vec::new();
    for (what, sample, words) in [
        ("cuMemAlloc, one thread", "allocate", format!("allocate {rounds}")),
        ("cuMemAlloc, 8 processes", "contend", format!("contend {rounds} 8")),
        ("cuLaunchKernel, no compute limit", "launch", format!("launch {rounds}")),
        ("dlopen(\"libcuda.so.1\")", "load", format!("load {}", rounds / 20)),
        ("dlopen and cuInit", "init", format!("load {}", rounds / 20)),
    ] {
        let samples = samples(&host, &words)?;
        let of = |way: &str| samples.get(&format!("{sample} {way}")).map_or(&[][..], Vec::as_slice);
        let (direct, shadow) = (median(of("direct")), median(of("shadow")));
        rows.push(vec![
            what.into(),
            format!("{direct:.0} ns"),
            format!("{shadow:.0} ns"),
            format!("{:.2}", shadow / direct),
            format!("{:+.0} ns", shadow - direct),
        ]);
    }
    println!("\nthrough the limiter and on the driver's stand-in, medians of {rounds} samples");
    print!("{}", table::format(&["CALL", "DIRECT", "LIMITER", "RATIO", "MORE"], &rows));
    Ok(())
}

/// Samples in nanoseconds, by what was measured.
fn samples(host: &Host, words: &str) -> Result<BTreeMap<String, Vec<f64>>> {
    let command: Vec<&str> = [PROGRAM, REAL].into_iter().chain(words.split(' ')).collect();
    let output = host.output(GPUFENCE, &["--annotation", "gpufence.dev/gpu=0=8GiB"], &command)?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("{words}: {text} {}", String::from_utf8_lossy(&output.stderr));
    }
    let mut samples: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for line in text.lines() {
        let Some((what, value)) = line.rsplit_once(' ') else { bail!("\"{line}\" is no sample") };
        samples.entry(what.to_owned()).or_default().push(value.parse()?);
    }
    Ok(samples)
}
