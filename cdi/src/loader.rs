//! What makes the staged libraries findable in a container: files to be mounted over the image's own, for glibc's loader
//! and for musl's. Nothing of the image is executed, and what it says is data from a stranger: what can't be read counts
//! as not there, as it does for the loaders.
//!
//! Which libcuda wins, where an image brings one:
//!
//! * one in the image's library folders (a stub, or one of its own driver): ours;
//! * a cuda-compat package (`/usr/local/cuda/compat`) whose driver branch, the first number of its version, is newer
//!   than the running driver's: the package's, as NVIDIA's forward compatibility has it;
//! * one that is as new or older: ours.

use std::borrow::Cow;

use crate::{
    capability::{DriverCapabilities, DriverCapability},
    edits::CONTAINER_FOLDER,
    elf::LinkerFlags,
    error::CdiError,
    ldcache::{self, Entry},
    limiter::{self, CUDA},
    root::Root,
    stage::Stage,
};

/// Where glibc's cache is.
pub const CACHE: &str = "/etc/ld.so.cache";
/// Where cuda-compat packages lie.
const COMPAT: &str = "/usr/local/cuda/compat";
/// A cache of 100,000 libraries has some 10 MiB.
const MAX_BYTES: u64 = 16 << 20;
/// musl's name for the machine, and where it looks if nobody tells it (musl's ldso/dynlink.c).
const MUSL_MACHINE: &str = if cfg!(target_arch = "aarch64") { "aarch64" } else { "x86_64" };
const NATIVE: LinkerFlags = if cfg!(target_arch = "aarch64") { LinkerFlags::AARCH64 } else { LinkerFlags::X86_64 };
const MUSL_FOLDERS: &str = "/lib:/usr/local/lib:/usr/lib";

/// A file to be mounted, read-only, over the image's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoaderFile {
    /// Its path in the container.
    pub container_path: String,
    /// A name for it in the container's folder on the host.
    pub name: &'static str,
    /// What is in it.
    pub content: Vec<u8>,
}

/// What the loaders are to find.
#[derive(Debug, Clone, Copy)]
pub struct Choice<'a> {
    /// The parts of the driver.
    pub capabilities: &'a DriverCapabilities,
    /// Whether an image's newer cuda-compat package goes before the driver's libraries.
    pub cuda_compat: bool,
    /// Whether the limiter's shadow libraries stand before both ([`limiter`]).
    pub limiter: bool,
}

/// The files for an image whose root this is: glibc's cache always, and musl's path where the image has musl.
pub fn files(root: &Root, stage: &Stage, choice: Choice<'_>) -> Result<Vec<LoaderFile>, CdiError> {
    let bytes = root.read_if_there(CACHE, MAX_BYTES).ok().flatten().unwrap_or_default();
    let mut cache = ldcache::parse(&bytes).unwrap_or_default();
    cache.prepend(entries(stage, choice));
    if choice.cuda_compat && choice.capabilities.contains(&DriverCapability::Compute) {
        cache.prepend(newer_compat(root, &stage.driver_version, choice.limiter));
    }
    let mut files = vec![LoaderFile { container_path: CACHE.into(), name: "ld.so.cache", content: cache.write() }];
    if root.open_path(format!("/lib/ld-musl-{MUSL_MACHINE}.so.1")).ok().flatten().is_some() {
        let container_path = format!("/etc/ld-musl-{MUSL_MACHINE}.path");
        let before = root.read_if_there(&container_path, MAX_BYTES).ok().flatten();
        let before = before.map_or_else(|| MUSL_FOLDERS.into(), |bytes| String::from_utf8_lossy(&bytes).into_owned());
        let ours = folders(stage, choice);
        let content = format!("{}\n{before}\n", ours.join("\n")).into_bytes();
        files.push(LoaderFile { container_path, name: "ld-musl.path", content });
    }
    Ok(files)
}

fn staged<'a>(
    stage: &'a Stage,
    capabilities: &'a DriverCapabilities,
) -> impl Iterator<Item = (&'a DriverCapability, &'a crate::stage::StagedCapability)> {
    stage.capabilities.iter().filter(|(capability, _)| capabilities.contains(capability))
}

fn folders(stage: &Stage, choice: Choice<'_>) -> Vec<String> {
    let shadows = if choice.limiter { &[limiter::LIMITER, limiter::DRIVER][..] } else { &[] };
    let parts = staged(stage, choice.capabilities)
        .filter(|(_, content)| !content.names.is_empty())
        .map(|(capability, _)| capability.name());
    shadows.iter().copied().chain(parts).map(|folder| format!("{CONTAINER_FOLDER}/{folder}")).collect()
}

fn entries(stage: &Stage, choice: Choice<'_>) -> Vec<Entry<'static>> {
    let mut entries = Vec::new();
    for (capability, content) in staged(stage, choice.capabilities) {
        for library in &content.names {
            let shadow = limiter::shadowed(&library.name).filter(|_| choice.limiter);
            let Some(shadow) = shadow else {
                let path = format!("{CONTAINER_FOLDER}/{capability}/{}", library.name);
                entries.push(entry(library.flags, library.name.clone(), path));
                continue;
            };
            // There are no 32-bit shadows, so the real ones aren't found.
            if *capability != DriverCapability::Compat32 {
                entries.push(entry(library.flags, library.name.clone(), in_limiter(shadow.soname)));
            }
        }
    }
    if choice.limiter {
        let real = [CUDA, limiter::NVML].map(|library| {
            let path = format!("{CONTAINER_FOLDER}/{}/{}", limiter::DRIVER, library.driver);
            entry(NATIVE, library.driver.into(), path)
        });
        entries.extend(real);
    }
    entries
}

fn in_limiter(name: &str) -> String {
    format!("{CONTAINER_FOLDER}/{}/{name}", limiter::LIMITER)
}

fn entry(flags: LinkerFlags, name: String, path: String) -> Entry<'static> {
    Entry {
        flags: flags.0,
        name: Cow::Owned(name.into_bytes()),
        path: Cow::Owned(path.into_bytes()),
        os_version: 0,
        hwcap: 0,
    }
}

/// The libraries of an image's cuda-compat package, if it is of a newer branch than the driver; its libcuda as what the
/// limiter's needs, where there is one. By their names alone: the files are the image's, and the container's own loader is
/// the one to read them.
fn newer_compat(root: &Root, driver_version: &str, limiter: bool) -> Vec<Entry<'static>> {
    let names = root.list(COMPAT).unwrap_or_default();
    let names: Vec<&str> = names.iter().filter_map(|name| name.to_str()).collect();
    let branch = |version: &str| version.split('.').next().and_then(|first| first.parse::<u32>().ok());
    let compat = names.iter().filter_map(|name| branch(name.strip_prefix("libcuda.so.")?)).filter(|branch| *branch > 1);
    if compat.max() <= branch(driver_version) {
        return Vec::new();
    }
    let library = |name: &&str| name.starts_with("lib") && name.contains(".so") && name.len() < 128;
    let found_as = |name: &str| match limiter::shadowed(name).filter(|_| limiter) {
        Some(shadow) if name == shadow.soname => Some(shadow.driver.to_owned()),
        Some(_) => None,
        None => Some(name.to_owned()),
    };
    let compat = names.into_iter().filter(library);
    compat.filter_map(|name| Some(entry(NATIVE, found_as(name)?, format!("{COMPAT}/{name}")))).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::stage::{CacheName, StagedCapability};

    fn stage() -> Stage {
        let names = vec![CacheName { name: "libcuda.so.1".into(), flags: LinkerFlags::X86_64 }];
        Stage::for_tests(
            "550.163.01",
            [(DriverCapability::Compute, StagedCapability { names, files: Vec::new() })].into(),
        )
    }

    fn first(files: &[LoaderFile], name: &str) -> String {
        let cache = ldcache::parse(&files[0].content).unwrap();
        let first = cache.entries.iter().find(|entry| entry.name.as_ref() == name.as_bytes()).unwrap();
        String::from_utf8_lossy(&first.path).into_owned()
    }

    fn first_libcuda(files: &[LoaderFile]) -> String {
        first(files, "libcuda.so.1")
    }

    #[test]
    fn images_of_every_kind() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let compute: DriverCapabilities = [DriverCapability::Compute].into();
        let choice = Choice { capabilities: &compute, cuda_compat: true, limiter: false };
        let look = || files(&root, &stage(), choice).unwrap();
        // With nothing in it.
        assert_eq!(first_libcuda(&look()), "/usr/lib/gpufence/compute/libcuda.so.1");
        assert_eq!(look().len(), 1);
        // With a cache that is no cache.
        fs::create_dir(folder.path().join("etc")).unwrap();
        fs::write(folder.path().join("etc/ld.so.cache"), "nonsense").unwrap();
        assert_eq!(first_libcuda(&look()), "/usr/lib/gpufence/compute/libcuda.so.1");
        // With musl, and with a path of its own.
        fs::create_dir(folder.path().join("lib")).unwrap();
        fs::write(folder.path().join(format!("lib/ld-musl-{MUSL_MACHINE}.so.1")), "").unwrap();
        let text = |files: &[LoaderFile]| String::from_utf8(files[1].content.clone()).unwrap();
        assert_eq!(text(&look()), "/usr/lib/gpufence/compute\n/lib:/usr/local/lib:/usr/lib\n");
        fs::write(folder.path().join(format!("etc/ld-musl-{MUSL_MACHINE}.path")), "/own").unwrap();
        assert_eq!(text(&look()), "/usr/lib/gpufence/compute\n/own\n");
        let limited = files(&root, &stage(), Choice { limiter: true, ..choice }).unwrap();
        let expected = "/usr/lib/gpufence/limiter\n/usr/lib/gpufence/driver\n/usr/lib/gpufence/compute\n/own\n";
        assert_eq!(text(&limited), expected);
    }

    #[test]
    fn the_newer_of_compat_and_driver() {
        for (compat, wanted, allowed) in [
            ("580.65.06", COMPAT, true),
            ("580.65.06", "/usr/lib/gpufence/compute", false),
            ("550.54.14", "/usr/lib/gpufence/compute", true),
            ("550.200.01", "/usr/lib/gpufence/compute", true),
            ("535.1", "/usr/lib/gpufence/compute", true),
            ("next", "/usr/lib/gpufence/compute", true),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let cuda = folder.path().join("usr/local/cuda-13/compat");
            fs::create_dir_all(&cuda).unwrap();
            // As images have it: a link, and an absolute one.
            std::os::unix::fs::symlink("/usr/local/cuda-13", folder.path().join("usr/local/cuda")).unwrap();
            for name in [format!("libcuda.so.{compat}"), "libcuda.so.1".into(), "README".into()] {
                fs::write(cuda.join(name), "").unwrap();
            }
            let root = Root::open(folder.path()).unwrap();
            let compute = [DriverCapability::Compute].into();
            let choice = Choice { capabilities: &compute, cuda_compat: allowed, limiter: false };
            let found = files(&root, &stage(), choice).unwrap();
            assert_eq!(first_libcuda(&found), format!("{wanted}/libcuda.so.1"), "{compat}");
            // The shadow stands before either, and needs the same one.
            let limited = files(&root, &stage(), Choice { limiter: true, ..choice }).unwrap();
            assert_eq!(first_libcuda(&limited), "/usr/lib/gpufence/limiter/libcuda.so.1", "{compat}");
            let real = match wanted {
                COMPAT => "/usr/local/cuda/compat/libcuda.so.1",
                _ => "/usr/lib/gpufence/driver/libcuda-driver.so.1",
            };
            assert_eq!(first(&limited, "libcuda-driver.so.1"), real, "{compat}");
        }
    }
}
