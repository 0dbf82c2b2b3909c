//! The driver's libraries are made findable in a container whose engine applied our CDI spec by itself.
//!
//! Runs as a createContainer hook: in the container's mount namespace, before its root is changed to. The new
//! `ld.so.cache` is a file in memory, bound over the image's.

use std::{
    fs,
    io::Write,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
};

use gpufence_cdi::{
    capability::DriverCapabilities,
    edits::CONTAINER_FOLDER,
    loader::{self, Choice, LoaderFile},
    root::Root,
    stage::Stage,
};
use nix::mount::{MsFlags, mount};

use crate::{
    error::{HookError, io_error},
    state::State,
};

pub fn run(state: &State, stage: &Path, capabilities: &DriverCapabilities) -> Result<(), HookError> {
    let root = Root::open(own_root(state)?)?;
    let stage = Stage::open(stage)?;
    // The engine mounts the stage by the same CDI spec; a cache that names what isn't there would help nobody.
    for capability in capabilities {
        let folder = format!("{CONTAINER_FOLDER}/{capability}");
        if root.list(&folder)?.is_empty() {
            return Err(HookError::NoLibraries(folder.into()));
        }
    }
    let choice = Choice { capabilities, cuda_compat: true, limiter: false };
    for file in loader::files(&root, &stage, choice)? {
        bind(&root, &file, &state.id)?;
    }
    Ok(())
}

/// The root's path here: this hook is in the container's mount namespace already.
fn own_root(state: &State) -> Result<PathBuf, HookError> {
    let of_first_process = state.rootfs()?;
    let prefix = format!("/proc/{}/root", state.pid);
    let inside = of_first_process.strip_prefix(prefix).unwrap_or(&of_first_process);
    Ok(Path::new("/").join(inside))
}

fn bind(root: &Root, file: &LoaderFile, id: &str) -> Result<(), HookError> {
    let over = file.container_path.as_str();
    // A file of its own on /run, unlinked once it is bound: what is bound stays for as long as the mount does.
    let source = PathBuf::from(format!("/run/.gpufence-{}-{id}", file.name));
    let write = || {
        let mut output = fs::OpenOptions::new().write(true).create_new(true).open(&source)?;
        output.set_permissions(fs::Permissions::from_mode(0o644))?;
        output.write_all(&file.content)
    };
    let _ = fs::remove_file(&source);
    write().map_err(io_error("write", &source))?;
    let bound = target(root, over).and_then(|target| {
        let path = format!("/proc/self/fd/{}", target.as_fd().as_raw_fd());
        let none = None::<&str>;
        mount(Some(&source), path.as_str(), none, MsFlags::MS_BIND, none).map_err(io_error("bind over", over))?;
        let read_only =
            MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        // The descriptor is of what lies beneath; the mount on top is reached by resolving anew.
        let on_top = root.open_path(over)?.ok_or_else(|| HookError::NoLibraries(over.into()))?;
        let path = format!("/proc/self/fd/{}", on_top.as_raw_fd());
        mount(none, path.as_str(), none, read_only, none).map_err(io_error("make read-only", over))
    });
    let _ = fs::remove_file(&source);
    bound
}

/// What a file is bound over: the image's, or an empty one made for it.
fn target(root: &Root, over: &str) -> Result<fs::File, HookError> {
    if let Some(target) = root.open_path(over)? {
        return Ok(target);
    }
    root.create_file(over)?;
    root.open_path(over)?.ok_or_else(|| HookError::NoLibraries(over.into()))
}
