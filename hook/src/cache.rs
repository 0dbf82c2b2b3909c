//! The driver's libraries are made findable in a container whose engine applied our CDI spec by itself.
//!
//! Runs as a createContainer hook: in the container's mount namespace, before its root is changed to. The new
//! `ld.so.cache` is a file in memory, bound over the image's.

use std::{
    borrow::Cow,
    fs,
    io::Write,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
};

use gpufence_cdi::{elf, ldcache, root::Root};
use nix::mount::{MsFlags, mount};

use crate::{
    error::{HookError, io_error},
    state::State,
};

const CACHE: &str = "/etc/ld.so.cache";
const MAX_CACHE_BYTES: u64 = 16 << 20;

pub fn run(state: &State, folders: &[PathBuf]) -> Result<(), HookError> {
    let root = Root::open(own_root(state)?)?;
    let mut entries = Vec::new();
    for folder in folders {
        entries.extend(libraries(&root, folder)?);
    }
    let bytes = root.read_if_there(CACHE, MAX_CACHE_BYTES).ok().flatten().unwrap_or_default();
    let mut cache = ldcache::parse(&bytes).unwrap_or_default();
    cache.prepend(entries);
    bind(&root, &cache.write(), &state.id)
}

/// The root's path here: this hook is in the container's mount namespace already.
fn own_root(state: &State) -> Result<PathBuf, HookError> {
    let of_first_process = state.rootfs()?;
    let prefix = format!("/proc/{}/root", state.pid);
    let inside = of_first_process.strip_prefix(prefix).unwrap_or(&of_first_process);
    Ok(Path::new("/").join(inside))
}

/// The names that the loader is to find in a folder of the container.
fn libraries(root: &Root, folder: &Path) -> Result<Vec<ldcache::Entry<'static>>, HookError> {
    let mut entries = Vec::new();
    for name in root.list(folder)? {
        let path = folder.join(&name);
        let name = name.to_string_lossy().into_owned();
        if !name.contains(".so") || root.resolve(&path)?.is_none() {
            continue;
        }
        let Ok(file) = root.open_file(&path) else { continue };
        let Some(flags) = elf::read(file, &path)?.flags else { continue };
        entries.push(ldcache::Entry {
            flags: flags.0,
            name: Cow::Owned(name.into_bytes()),
            path: Cow::Owned(path.to_string_lossy().into_owned().into_bytes()),
            os_version: 0,
            hwcap: 0,
        });
    }
    if entries.is_empty() {
        return Err(HookError::NoLibraries(folder.to_owned()));
    }
    Ok(entries)
}

fn bind(root: &Root, bytes: &[u8], id: &str) -> Result<(), HookError> {
    // A file of its own on /run, unlinked once it is bound: what is bound stays for as long as the mount does.
    let source = PathBuf::from(format!("/run/.gpufence-cache-{id}"));
    let write = || {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&source)?;
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
        file.write_all(bytes)
    };
    let _ = fs::remove_file(&source);
    write().map_err(io_error("write", &source))?;
    let bound = target(root).and_then(|target| {
        let path = format!("/proc/self/fd/{}", target.as_fd().as_raw_fd());
        let none = None::<&str>;
        mount(Some(&source), path.as_str(), none, MsFlags::MS_BIND, none).map_err(io_error("bind over", CACHE))?;
        let read_only =
            MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        // The descriptor is of what lies beneath; the mount on top is reached by resolving anew.
        let on_top = root.open_path(CACHE)?.ok_or_else(|| HookError::NoLibraries(CACHE.into()))?;
        let path = format!("/proc/self/fd/{}", on_top.as_raw_fd());
        mount(none, path.as_str(), none, read_only, none).map_err(io_error("make read-only", CACHE))
    });
    let _ = fs::remove_file(&source);
    bound
}

/// What the new cache is bound over: the image's, or an empty file made for it.
fn target(root: &Root) -> Result<fs::File, HookError> {
    if let Some(target) = root.open_path(CACHE)? {
        return Ok(target);
    }
    root.create_file(CACHE)?;
    root.open_path(CACHE)?.ok_or_else(|| HookError::NoLibraries(CACHE.into()))
}
