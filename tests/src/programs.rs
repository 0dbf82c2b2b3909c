//! Our own programs as they were built, and the engines that `tests/setup.sh` has put beside them.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result, bail};
use gpufence_cli::image::Image;

/// An engine under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Debian 12's own, 1.6.
    Containerd16,
    /// Debian 13's, 1.7.
    Containerd17,
    /// Debian's newest, 2.1 or later.
    Containerd2,
}

impl Engine {
    /// The folder of its programs; empty for those on PATH.
    pub fn folder(self) -> Result<PathBuf> {
        let name = match self {
            Self::Containerd16 => return Ok(PathBuf::new()),
            Self::Containerd17 => "containerd-1.7",
            Self::Containerd2 => "containerd-2",
        };
        let folder = engines()?.join(name).join("usr/bin");
        if !folder.join("containerd").exists() {
            bail!("{} has no containerd; run tests/setup.sh tests", folder.display());
        }
        Ok(folder)
    }
}

/// The folder of what was built: the one that GPUFENCE_PROGRAMS names, else beside the running test.
pub fn built() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("GPUFENCE_PROGRAMS") {
        return Ok(folder.into());
    }
    let own = std::env::current_exe()?;
    let folder = own.ancestors().skip(1).find(|folder| folder.join("containerd-shim-gpufence-v1").exists());
    folder.map(Path::to_owned).with_context(|| {
        format!("containerd-shim-gpufence-v1 is not beside {}; run `cargo build --workspace` first", own.display())
    })
}

/// The folder of the engines that `tests/setup.sh` unpacked, below Cargo's own.
pub fn engines() -> Result<PathBuf> {
    Ok(built()?.parent().context("target has folders")?.join("engines"))
}

/// The container's root that tests share: busybox, and `gpufence` for its probe, with glibc.
pub fn test_image() -> Result<Image> {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new).into_iter().find(|path| path.exists());
    let busybox = busybox.context("no busybox; run tests/setup.sh tests")?;
    let names =
        ["sh", "cat", "echo", "env", "head", "id", "kill", "ls", "mount", "sleep", "stty", "tail", "true", "wc"];
    let mut image = Image {
        name: "docker.io/gpufence/test:latest".into(),
        files: vec![(busybox.into(), "bin/busybox".into())],
        links: names.map(|name| (format!("bin/{name}"), "busybox".to_owned())).to_vec(),
        texts: vec![
            ("etc/passwd".into(), "root:x:0:0:root:/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n".into()),
            ("etc/group".into(), "root:x:0:\nuser:x:1000:\n".into()),
        ],
        folders: ["proc", "sys", "dev", "tmp", "opt"].map(str::to_owned).to_vec(),
        nodes: vec![("opt/nvidia0".into(), 195, 0), ("opt/nvidia1".into(), 195, 1)],
        environment: vec!["PATH=/bin:/usr/bin".into()],
        // A Pod's sandbox runs it.
        command: ["/bin/sleep", "100000"].map(str::to_owned).to_vec(),
    };
    image.add_program(stripped_probe()?, "usr/bin/gpufence")?;
    Ok(image)
}

/// `gpufence` without its debug information, which would make every image ten times as large.
fn stripped_probe() -> Result<PathBuf> {
    static PATH: Mutex<Option<PathBuf>> = Mutex::new(None);
    // Held while one test of this process makes it.
    let mut known = PATH.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = &*known {
        return Ok(path.clone());
    }
    let folder = built()?;
    let (from, to) = (folder.join("gpufence"), folder.join(format!("gpufence-stripped-{}", std::process::id())));
    let status = Command::new("strip").arg("-o").args([&to, &from]).status().context("run strip; install binutils")?;
    if !status.success() {
        bail!("strip {} failed", from.display());
    }
    // Renamed, so that the tests of another process see a whole file.
    let path = folder.join("gpufence-stripped");
    std::fs::rename(&to, &path)?;
    *known = Some(path.clone());
    Ok(path)
}
