//! The stage: the folder on the host, one for each driver version, which holds the driver's libraries with their links
//! and which containers mount read-only.
//!
//! ```text
//! <stage folder>/550.163.01/manifest.json
//!                          /compute/libcuda.so.550.163.01, libcuda.so.1, libcuda.so
//!                          /compute/bin/nvidia-cuda-mps-server
//!                          /utility/libnvidia-ml.so.550.163.01, libnvidia-ml.so.1
//!                          /utility/bin/nvidia-smi
//!                          /firmware/gsp_ga10x.bin
//! ```
//!
//! Files are hard links where the filesystem allows, else copies (reflinks where it can). A package upgrade replaces
//! files by rename, so what is staged stays as it was.

use std::{
    collections::BTreeMap,
    fs,
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
};

use nix::fcntl::{AtFlags, Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::{
    capability::DriverCapability,
    driver::{DriverFile, FileKind},
    elf::LinkerFlags,
    error::{CdiError, io_error},
    inventory::{Inventory, write_json},
    root::Root,
};

/// A library name that the loader is to find in the stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheName {
    /// The name that programs ask for, which is also the file's name in the capability's folder.
    pub name: String,
    /// For the loader's cache.
    pub flags: LinkerFlags,
}

/// A staged file that is mounted by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StagedFile {
    /// Where it lies below the version's folder.
    pub staged: String,
    /// Where containers expect it.
    pub container_path: String,
    /// Program or configuration.
    pub kind: FileKind,
}

/// What one capability's folder holds.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StagedCapability {
    /// Names for the loader's cache.
    pub names: Vec<CacheName>,
    /// Files mounted by themselves.
    pub files: Vec<StagedFile>,
}

/// A stage that is complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stage {
    /// The version's folder on the host.
    pub folder: PathBuf,
    /// The driver's version.
    pub driver_version: String,
    /// What tells that the driver's files are still those staged.
    source: Source,
    /// What each capability has. One with nothing has no folder either.
    pub capabilities: BTreeMap<DriverCapability, StagedCapability>,
    /// Whether there is a `firmware` folder.
    pub firmware: bool,
}

/// The driver's first library as it was when staged: another inode, size or time means another build of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Source {
    driver_root: PathBuf,
    path: String,
    device: u64,
    inode: u64,
    size: u64,
    modified: i64,
}

impl Source {
    fn of(inventory: &Inventory, driver: &Root) -> Result<Self, CdiError> {
        let library = inventory.driver.libraries.first().map_or("/", |library| &library.path);
        let metadata = driver
            .open_path(library)?
            .ok_or_else(|| CdiError::NoLibraries {
                version: inventory.driver_version.clone(),
                root: driver.path().to_owned(),
            })?
            .metadata()
            .map_err(io_error::<std::io::Error>("stat", driver.host_path(library)))?;
        Ok(Self {
            driver_root: driver.path().to_owned(),
            path: library.to_owned(),
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: metadata.mtime(),
        })
    }
}

impl Stage {
    /// The stage of the inventory's driver below `folder`, built if it isn't there or is of another build.
    pub fn ensure(folder: &Path, inventory: &Inventory, driver: &Root) -> Result<Self, CdiError> {
        let source = Source::of(inventory, driver)?;
        if let Some(stage) = Self::read(folder, &inventory.driver_version, &source) {
            return Ok(stage);
        }
        fs::create_dir_all(folder).map_err(io_error::<std::io::Error>("create folder", folder))?;
        let _lock = lock(folder)?;
        // Another create may have built it while this one waited.
        if let Some(stage) = Self::read(folder, &inventory.driver_version, &source) {
            return Ok(stage);
        }
        build(folder, inventory, driver, source)
    }

    /// Reads the stage in a version's folder as it was built, current or not.
    pub fn open(folder: &Path) -> Result<Self, CdiError> {
        let path = folder.join("manifest.json");
        let bytes = fs::read(&path).map_err(io_error::<std::io::Error>("read", &path))?;
        serde_json::from_slice(&bytes).map_err(|source| CdiError::Json { path, source })
    }

    /// One that was never built.
    #[cfg(test)]
    pub(crate) fn for_tests(version: &str, capabilities: BTreeMap<DriverCapability, StagedCapability>) -> Self {
        let source = Source { driver_root: "/".into(), path: "/".into(), device: 0, inode: 0, size: 0, modified: 0 };
        Self { folder: "/stage".into(), driver_version: version.into(), source, capabilities, firmware: false }
    }

    fn read(folder: &Path, version: &str, source: &Source) -> Option<Self> {
        let bytes = fs::read(folder.join(version).join("manifest.json")).ok()?;
        let stage: Self = serde_json::from_slice(&bytes).ok()?;
        (stage.source == *source && stage.folder == folder.join(version)).then_some(stage)
    }
}

fn lock(folder: &Path) -> Result<Flock<fs::File>, CdiError> {
    let path = folder.join(".lock");
    let file = fs::File::create(&path).map_err(io_error::<std::io::Error>("create", &path))?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| io_error("lock", &path)(errno))
}

fn build(folder: &Path, inventory: &Inventory, driver: &Root, source: Source) -> Result<Stage, CdiError> {
    let version = &inventory.driver_version;
    let temporary = folder.join(format!(".{version}.building"));
    if temporary.exists() {
        fs::remove_dir_all(&temporary).map_err(io_error::<std::io::Error>("remove", &temporary))?;
    }
    let mut stage = Stage {
        folder: folder.join(version),
        driver_version: version.clone(),
        source,
        capabilities: BTreeMap::new(),
        firmware: !inventory.driver.firmware.is_empty(),
    };
    for library in &inventory.driver.libraries {
        let capability_folder = temporary.join(library.capability.name());
        let staged = capability_folder.join(&library.staged);
        place(driver, &library.path, &staged)?;
        let entry = stage.capabilities.entry(library.capability).or_default();
        for link in &library.links {
            let depth = link.matches('/').count();
            let target = format!("{}{}", "../".repeat(depth), library.staged);
            let path = capability_folder.join(link);
            make_parent(&path)?;
            // Two libraries may want the same optional link; the first in order has it.
            if !path.exists() {
                symlink(&target, &path).map_err(io_error::<std::io::Error>("link", &path))?;
            }
        }
        if let Some(flags) = library.flags {
            let own = (library.links.is_empty() && !library.staged.contains('/')).then_some(&library.staged);
            let names = library.links.iter().filter(|link| !link.contains('/')).chain(own);
            entry.names.extend(names.map(|name| CacheName { name: name.clone(), flags }));
        }
    }
    for file in &inventory.driver.files {
        let staged = staged_path(file);
        place(driver, &file.path, &temporary.join(&staged))?;
        stage.capabilities.entry(file.capability).or_default().files.push(StagedFile {
            staged,
            container_path: file.container_path.clone(),
            kind: file.kind,
        });
    }
    for path in &inventory.driver.firmware {
        let name = path.rsplit('/').next().unwrap_or(path);
        place(driver, path, &temporary.join("firmware").join(name))?;
    }
    write_json(&temporary.join("manifest.json"), &stage)?;
    if stage.folder.exists() {
        // Running containers hold the old folder through their mounts, under whatever name.
        let replaced = folder.join(format!(".{version}.replaced.{}", std::process::id()));
        fs::rename(&stage.folder, &replaced).map_err(io_error::<std::io::Error>("rename", &stage.folder))?;
    }
    fs::rename(&temporary, &stage.folder).map_err(io_error::<std::io::Error>("rename", &temporary))?;
    Ok(stage)
}

fn staged_path(file: &DriverFile) -> String {
    let name = file.path.rsplit('/').next().unwrap_or(&file.path);
    match file.kind {
        FileKind::Binary => format!("{}/bin/{name}", file.capability),
        FileKind::Configuration => {
            format!(
                "{}/configuration/{}",
                file.capability,
                file.container_path.trim_start_matches('/').replace('/', "_")
            )
        }
    }
}

fn make_parent(path: &Path) -> Result<(), CdiError> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(io_error::<std::io::Error>("create folder", parent))?;
    // Containers of any user read it, whatever umask the engine runs with.
    fs::set_permissions(parent, fs::Permissions::from_mode(0o755)).map_err(io_error::<std::io::Error>("chmod", parent))
}

/// Puts a driver file into the stage: a hard link, or a copy where that can't be.
fn place(driver: &Root, inside: &str, staged: &Path) -> Result<(), CdiError> {
    make_parent(staged)?;
    let handle = driver.open_file(inside)?;
    // The open handle is linked, so that no path is resolved a second time.
    let magic = format!("/proc/self/fd/{}", handle.as_raw_fd());
    let here = nix::fcntl::AT_FDCWD;
    if nix::unistd::linkat(here, magic.as_str(), here, staged, AtFlags::AT_SYMLINK_FOLLOW).is_ok() {
        return Ok(());
    }
    fs::copy(&magic, staged).map_err(io_error::<std::io::Error>("copy to", staged))?;
    Ok(())
}

/// Removes the stages below `folder` that are neither of the driver `current` nor of one in `in_use`, those that a
/// container may still mount. Gives the folders removed.
pub fn remove_unused(folder: &Path, current: &str, in_use: &[String]) -> Result<Vec<PathBuf>, CdiError> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let _lock = lock(folder)?;
    let mut removed = Vec::new();
    for entry in fs::read_dir(folder).map_err(io_error::<std::io::Error>("list", folder))? {
        let entry = entry.map_err(io_error::<std::io::Error>("list", folder))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == ".lock" {
            continue;
        }
        // ".550.163.01.replaced.77" and ".550.163.01.building" belong to their version.
        let replaced = name.starts_with('.');
        let version =
            name.trim_start_matches('.').split(".replaced").next().unwrap_or_default().trim_end_matches(".building");
        let wanted = in_use.iter().any(|used| used == version) || (version == current && !replaced);
        if !wanted {
            fs::remove_dir_all(entry.path()).map_err(io_error::<std::io::Error>("remove", entry.path()))?;
            removed.push(entry.path());
        }
    }
    Ok(removed)
}
