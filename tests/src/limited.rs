//! A CUDA program in containers with a memory limit: `tests/programs/limited.c`, which does what its words say.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};

use crate::host::{GPUFENCE, Host};

const SOURCE: &str = include_str!("../programs/limited.c");
/// Its path in containers.
pub const PROGRAM: &str = "/usr/bin/limited";

/// Compiles it against the machine's own `libcuda.so.1` and puts it into the root that containers run on.
pub fn install(host: &Host) -> Result<()> {
    compile(&host.driver_root(), &host.rootfs().join(PROGRAM.trim_start_matches('/')))
}

/// Compiles it to a file.
pub fn compile(driver_root: &Path, output: &Path) -> Result<()> {
    compile_program(SOURCE, output, &[&driver_root.join("usr/lib/x86_64-linux-gnu/libcuda.so.1")])
}

/// Compiles a program in C, with these libraries.
pub fn compile_program(text: &str, output: &Path, libraries: &[&Path]) -> Result<()> {
    let source = output.with_extension("c");
    std::fs::write(&source, text)?;
    let answer = Command::new("cc")
        .args(["-O1", "-o"])
        .args([output, &source])
        .args(libraries)
        .output()
        .context("run cc; install gcc (apt-get install gcc)")?;
    std::fs::remove_file(&source)?;
    ensure!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
    Ok(())
}

/// What it said, line by line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// Standard output.
    pub lines: Vec<String>,
    /// Standard error.
    pub errors: String,
}

impl Said {
    /// What stands after a word at a line's beginning, in the first such line.
    ///
    /// # Panics
    /// Where there is none.
    pub fn after(&self, word: &str) -> &str {
        self.all_after(word).first().copied().unwrap_or_else(|| panic!("no \"{word}\" in {self:?}"))
    }

    /// The same for every such line.
    pub fn all_after(&self, word: &str) -> Vec<&str> {
        self.lines.iter().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' ')).collect()
    }
}

/// Runs it in a container of its own, with `ctr`'s flags and the program's words.
pub fn run(host: &Host, flags: &[&str], words: &str) -> Result<Said> {
    let command: Vec<&str> = [PROGRAM].into_iter().chain(words.split_whitespace()).collect();
    let output = host.output(GPUFENCE, flags, &command)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = Said { lines: text(&output.stdout).lines().map(str::to_owned).collect(), errors: text(&output.stderr) };
    if !output.status.success() {
        bail!("{words}: {}: {said:?}", output.status);
    }
    Ok(said)
}
