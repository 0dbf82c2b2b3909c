//! `docker run` through `gpufence-runtime` beside runc, in one run: with no grant, as under `default-runtime`, and with one.
//!
//! `make bench`, or `cargo bench -p gpufence-tests --bench docker -- --rounds 100`.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser;
use gpufence_cli::table;
use gpufence_tests::{
    docker::{Docker, Release},
    figures::median_milliseconds,
    host::{Host, Plan},
};

/// Measures docker run through gpufence-runtime beside runc
#[derive(Parser)]
struct Arguments {
    /// How many containers of each kind are timed
    #[arg(long, default_value_t = 60)]
    rounds: usize,
    /// `cargo bench` says so
    #[arg(long, hide = true)]
    bench: bool,
}

const SUBJECTS: [(&str, &str); 3] =
    [("runc", "runc"), ("gpufence-runtime, no grant", "gpufence"), ("gpufence-runtime, a share", "gpu0")];

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let host = Host::start(&Plan::default())?;
    let docker = Docker::start(&host, Release::Docker28, "runc")?;
    let mut times = vec![Vec::new(); SUBJECTS.len()];
    for round in 0..arguments.rounds + 3 {
        for ((name, runtime), times) in SUBJECTS.iter().zip(&mut times) {
            let start = Instant::now();
            let output = docker.run(&["--runtime", runtime], "plain", &["/bin/true"])?;
            let took = start.elapsed();
            if !output.status.success() {
                bail!("{name}: {}", String::from_utf8_lossy(&output.stderr));
            }
            if round >= 3 {
                times.push(took);
            }
        }
    }
    println!("\ndocker run --rm, {} containers of each kind", arguments.rounds);
    print!("{}", report(&times));
    Ok(())
}

fn report(times: &[Vec<Duration>]) -> String {
    let base = median_milliseconds(&times[0]);
    let row = |((name, _), times): (&(&str, &str), &Vec<Duration>)| {
        let time = median_milliseconds(times);
        vec![(*name).into(), format!("{time:.1} ms"), format!("{:.3}", time / base), format!("{:+.1} ms", time - base)]
    };
    let rows: Vec<Vec<String>> = SUBJECTS.iter().zip(times).map(row).collect();
    table::format(&["SUBJECT", "DOCKER RUN", "RATIO", "MORE"], &rows)
}
