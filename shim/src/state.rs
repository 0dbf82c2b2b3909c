//! A container's folder on the host, `/run/gpufence/containers/<namespace>/<id>/`:
//!
//! ```text
//! record.json    what was granted, for people and for the node agent
//! cdi.json       the CDI spec of exactly this container
//! process.json   its first process, which gpufence-hook notes before it starts
//! caps.json      the driver's memory caps for its cgroup, where the node has them, for gpufence-hook
//! fence.json     which device nodes it has and which it must not reach, for gpufence-hook
//! ld.so.cache    mounted over the image's
//! view/          mounted at /usr/lib/gpufence, with a folder for each of the stage's and what the limiter needs
//! view/limits    the limits file
//! ```

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use gpufence_cdi::capability::DriverCapabilities;
use serde::{Deserialize, Serialize};

use crate::{EnforceError, error::io_error, memory::Rung, policy::Policy};

/// The record's name in the container's folder.
pub const RECORD: &str = "record.json";

/// What is known of a container with a grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The engine's namespace, such as `k8s.io`.
    pub namespace: String,
    /// The container's id.
    pub id: String,
    /// The name that the grant knows it by.
    pub name: String,
    /// The Pod's UID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// Where the grant came from, in words.
    pub origin: String,
    /// The driver whose stage it mounts.
    pub driver_version: String,
    /// Its shares.
    pub shares: Vec<RecordedShare>,
    /// The parts of the driver that it has.
    pub driver_capabilities: DriverCapabilities,
    /// Linux capabilities that none of its processes has.
    pub dropped_capabilities: Vec<String>,
    /// What keeps it to its memory limit.
    #[serde(default)]
    pub memory_held_by: Rung,
    /// Where it is a client of MPS: the most threads of a GPU that it may use, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_percent: Option<u8>,
}

/// One share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedShare {
    /// The GPU's or MIG instance's UUID, or index where it has no UUID.
    pub gpu: String,
    /// The memory limit.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// The compute limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_percent: Option<u8>,
}

/// What a view has beside the limits file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// Folders, for mounts; right below the view.
    pub folders: Vec<String>,
    /// Empty files, for mounts.
    pub files: Vec<String>,
    /// Links, and what they point to.
    pub links: Vec<(String, String)>,
}

/// A container's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerFolder(PathBuf);

impl ContainerFolder {
    /// The folder of a container. Its name comes from the engine, which lets no slash in; neither do we.
    pub fn of(policy: &Policy, namespace: &str, id: &str) -> Result<Self, EnforceError> {
        for name in [namespace, id] {
            if name.is_empty() || name.starts_with('.') || name.contains('/') || name.len() > 255 {
                return Err(EnforceError::Shape(format!("\"{name}\" is not a namespace or container id")));
            }
        }
        Ok(Self(policy.state_dir.join("containers").join(namespace).join(id)))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes it anew.
    pub fn create(&self, content: &View) -> Result<(), EnforceError> {
        self.remove()?;
        let view = self.0.join("view");
        fs::create_dir_all(&view).map_err(io_error("create folder", &view))?;
        // Read by the container's user through its mount, whatever umask the engine has.
        let readable =
            |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(io_error("chmod", path));
        readable(&view)?;
        for name in &content.folders {
            let folder = view.join(name);
            fs::create_dir(&folder).map_err(io_error("create folder", &folder))?;
            readable(&folder)?;
        }
        for name in &content.files {
            let file = view.join(name);
            fs::File::create(&file).map_err(io_error("create", &file))?;
        }
        for (name, target) in &content.links {
            let link = view.join(name);
            symlink(target, &link).map_err(io_error("link", &link))?;
        }
        Ok(())
    }

    /// Writes a file in it that the container can read.
    pub fn write(&self, name: &str, content: &[u8]) -> Result<PathBuf, EnforceError> {
        let path = self.0.join(name);
        fs::write(&path, content).map_err(io_error("write", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).map_err(io_error("chmod", &path))?;
        Ok(path)
    }

    /// Removes it; one that isn't there is no error.
    pub fn remove(&self) -> Result<(), EnforceError> {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(io_error("remove", &self.0)),
        }
    }
}

/// The records of all containers with a grant.
pub fn records(policy: &Policy) -> Vec<Record> {
    let folders =
        |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>();
    folders(&policy.state_dir.join("containers"))
        .iter()
        .flat_map(|namespace| folders(namespace))
        .filter_map(|folder| serde_json::from_slice(&fs::read(folder.join(RECORD)).ok()?).ok())
        .collect()
}

/// What is left to do when a container is deleted: its folder goes, and stages of other drivers that nothing uses any
/// more.
pub fn clean_up(policy: &Policy, namespace: &str, id: &str) -> Result<(), EnforceError> {
    let folder = ContainerFolder::of(policy, namespace, id)?;
    if !folder.path().exists() {
        return Ok(());
    }
    folder.remove()?;
    // The namespace's folder goes with its last container; that it isn't empty is no fault.
    if let Some(namespace) = folder.path().parent() {
        let _ = fs::remove_dir(namespace);
    }
    remove_old_stages(policy);
    Ok(())
}

/// Removes the stages of other drivers than the running one that no container uses any more. That one can't be removed
/// is no reason to refuse a container.
pub fn remove_old_stages(policy: &Policy) {
    let versions = fs::read_dir(&policy.stage_dir).into_iter().flatten().flatten();
    let several = versions.filter(|entry| entry.file_name() != ".lock").count() > 1;
    if several && let Ok(inventory) = gpufence_cdi::inventory::Inventory::read(&policy.inventory_file()) {
        let in_use: Vec<String> = records(policy).into_iter().map(|record| record.driver_version).collect();
        if let Err(error) = gpufence_cdi::stage::remove_unused(&policy.stage_dir, &inventory.driver_version, &in_use) {
            log::warn!("remove old stages: {error}");
        }
    }
}
