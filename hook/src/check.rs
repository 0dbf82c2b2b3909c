//! The final check: what the container really has, against its grant.
//!
//! The nodes in its `/dev` are compared by number. The device cgroup is asked as the kernel would: a process of ours joins
//! the container's cgroup and tries to open every GPU node of the host that the grant doesn't name. That tells the same of
//! cgroup v1's controller and of v2's eBPF program, whoever loaded it.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

use gpufence_cdi::{
    fence::Fence,
    process::{self, FirstProcess},
    root::Root,
};
use nix::sys::stat::{major, minor};

use crate::{
    caps, cgroup,
    error::{HookError, io_error},
    state::State,
};

/// Folders of `/dev` that GPU nodes lie in.
const FOLDERS: [&str; 3] = ["/dev", "/dev/nvidia-caps", "/dev/dri"];

pub fn run(state: &State, folder: &Path) -> Result<(), HookError> {
    state.check_folder(folder)?;
    let file = folder.join("fence.json");
    let text = fs::read(&file).map_err(io_error("read", &file))?;
    let fence: Fence = serde_json::from_slice(&text).map_err(|source| HookError::Json { path: file, source })?;
    check_nodes(&fence, &Root::open(state.rootfs()?)?)?;
    cgroup::check(&fence, state.pid)?;
    caps::set(state, folder)?;
    note_process(state, folder)
}

/// Notes the container's first process, by which the node agent finds its usage table.
fn note_process(state: &State, folder: &Path) -> Result<(), HookError> {
    let process = u32::try_from(state.pid).ok().and_then(FirstProcess::of);
    let process = process.ok_or_else(|| HookError::State(format!("process {} is gone", state.pid)))?;
    let file = folder.join(process::FILE);
    let text = serde_json::to_vec(&process).map_err(|source| HookError::Json { path: file.clone(), source })?;
    fs::write(&file, text).map_err(io_error("write", &file))
}

fn check_nodes(fence: &Fence, root: &Root) -> Result<(), HookError> {
    let mut missing = fence.granted.clone();
    for folder in FOLDERS {
        for name in root.list(folder)? {
            let path = format!("{folder}/{}", name.to_string_lossy());
            let Some(node) = root.open_path(&path)? else { continue };
            let metadata = node.metadata().map_err(io_error("stat", &path))?;
            if !metadata.file_type().is_char_device() {
                continue;
            }
            let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
            let device = (number(major(metadata.rdev())), number(minor(metadata.rdev())));
            missing.retain(|granted| *granted != device);
            let gpu_s = fence.majors.contains(&device.0)
                || fence.denied.iter().any(|denied| (denied.major, denied.minor) == device);
            if gpu_s && !fence.granted.contains(&device) {
                return Err(HookError::ForeignNode { path, device: format!("{}:{}", device.0, device.1) });
            }
        }
    }
    match missing.first() {
        None => Ok(()),
        Some((major, minor)) => Err(HookError::MissingNode { device: format!("{major}:{minor}") }),
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};

    use super::*;

    #[test]
    fn nodes_are_compared_by_number() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("dev/dri")).unwrap();
        let make = |path: &str, major: u64, minor: u64| {
            mknod(&folder.path().join(path), SFlag::S_IFCHR, Mode::S_IRWXU, makedev(major, minor)).unwrap();
        };
        make("dev/null", 1, 3);
        make("dev/nvidia0", 195, 0);
        let root = Root::open(folder.path()).unwrap();
        let fence = Fence { majors: vec![195], granted: vec![(195, 0)], denied: Vec::new() };
        check_nodes(&fence, &root).unwrap();
        let more = Fence { granted: vec![(195, 0), (195, 255)], ..fence.clone() };
        assert!(matches!(check_nodes(&more, &root), Err(HookError::MissingNode { device }) if device == "195:255"));
        // Under another name, and in a folder of its own.
        make("dev/dri/innocent", 195, 7);
        let error = check_nodes(&fence, &root).unwrap_err();
        assert!(matches!(error, HookError::ForeignNode { path, .. } if path == "/dev/dri/innocent"));
    }
}
