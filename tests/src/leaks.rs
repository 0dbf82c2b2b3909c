//! What a host has at a moment, to be compared with later.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use gpufence_cli::engine::{mounts_below, shims_of};

use crate::host::Host;

/// Everything that a container could leave behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traces {
    /// Shims of this host's containerd.
    pub shims: Vec<u32>,
    /// Mounts below the host's folder.
    pub mounts: Vec<PathBuf>,
    /// Bundles, containers' folders, runc's states, console folders and shims' sockets.
    pub folders: BTreeSet<PathBuf>,
    /// Cgroups with one of the names.
    pub cgroups: BTreeSet<PathBuf>,
    /// Open descriptors of containerd.
    pub descriptors: usize,
}

/// What is there now of containers whose id starts with `ids`.
pub fn traces(host: &Host, ids: &str) -> Traces {
    let list = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let state = host.folder().join("containerd/state/io.containerd.runtime.v2.task/default");
    let folders = list(&state)
        .chain(list(&host.container_folders().join("default")))
        .chain(list(Path::new("/run/containerd/runc/default")).filter(|path| named(path, ids)))
        .chain(list(Path::new("/run")).filter(|path| named(path, "gpufence-console-")))
        .collect();
    let mut cgroups = BTreeSet::new();
    find_named(Path::new("/sys/fs/cgroup"), ids, 4, &mut cgroups);
    let pid = host.containerd.pid().unwrap_or_default();
    Traces {
        shims: shims_of(&host.containerd.socket()),
        mounts: mounts_below(host.folder()),
        folders,
        cgroups,
        descriptors: list(Path::new(&format!("/proc/{pid}/fd"))).count(),
    }
}

/// Waits until nothing is left beyond `before`; containerd lets go of some things a moment later. Gives what is there
/// in the end.
pub fn settle(host: &Host, ids: &str, before: &Traces) -> Traces {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let mut now = traces(host, ids);
        // A handful of pooled connections come and go.
        if now.descriptors <= before.descriptors + 8 {
            now.descriptors = before.descriptors;
        }
        if now == *before || Instant::now() > deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn named(path: &Path, start: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
}

fn find_named(folder: &Path, start: &str, depth: u32, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if named(&path, start) {
                found.insert(path.clone());
            }
            if depth > 0 {
                find_named(&path, start, depth - 1, found);
            }
        }
    }
}
