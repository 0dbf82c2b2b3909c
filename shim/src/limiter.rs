//! The limiter in a container: the shadow libraries, mounted one by one from where they are installed, so that an upgrade,
//! which replaces them by rename, leaves running containers with theirs.

use std::path::{Path, PathBuf};

use gpufence_cdi::{
    capability::{DriverCapabilities, DriverCapability},
    edits::{self, CONTAINER_FOLDER},
    limiter::{CUDA, DRIVER, LIMITER, NVML, Shadowed, USAGE},
    spec::SpecMount,
    stage::Stage,
};

use crate::{policy::Policy, state::View};

/// The source of the usage table's tmpfs, by which a mount of ours is known.
pub const USAGE_SOURCE: &str = "gpufence-usage";
/// The table has some 530 KiB.
const USAGE_OPTIONS: [&str; 6] = ["nosuid", "nodev", "noexec", "size=1m", "nr_inodes=16", "mode=1777"];

/// The node's limiter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limiter {
    folder: PathBuf,
}

impl Limiter {
    /// Where it is to be: where policy says, else where it is installed with the running program. `None`: policy wants
    /// none.
    pub fn folder(policy: &Policy) -> Option<PathBuf> {
        policy.memory.limiter.clone().or_else(beside).filter(|folder| !folder.as_os_str().is_empty())
    }

    /// The node's limiter. The error is the folder that lacks it; `None`: policy wants none.
    pub fn of(policy: &Policy) -> Option<Result<Self, PathBuf>> {
        let folder = Self::folder(policy)?;
        let libraries = [CUDA.soname, NVML.soname, "compute/libcuda.so.1"];
        let complete = libraries.iter().all(|library| folder.join(library).is_file());
        Some(if complete { Ok(Self { folder }) } else { Err(folder) })
    }

    /// What a container of these driver capabilities gets: mounts, and what they need in its view. `compute_limited`:
    /// whether any of its shares has less than all of its GPU's compute.
    pub fn brings(
        &self,
        stage: &Stage,
        capabilities: &DriverCapabilities,
        compute_limited: bool,
    ) -> (Vec<SpecMount>, View) {
        let mut mounts = Vec::new();
        let mut view = View { folders: [LIMITER, DRIVER, USAGE].map(str::to_owned).to_vec(), ..View::default() };
        let has = |capability| capabilities.contains(&capability);
        if has(DriverCapability::Compute) {
            let variant = if compute_limited { "compute/libcuda.so.1" } else { CUDA.soname };
            shadow(&self.folder.join(variant), CUDA, &mut mounts, &mut view);
            link(DriverCapability::Compute, CUDA, &mut view);
        }
        if has(DriverCapability::Utility) {
            shadow(&self.folder.join(NVML.soname), NVML, &mut mounts, &mut view);
            link(DriverCapability::Utility, NVML, &mut view);
        } else if has(DriverCapability::Compute) && stage.capabilities.contains_key(&DriverCapability::Utility) {
            // The CUDA shadow measures contexts with it, and loads its shadow first; glibc's cache has neither.
            shadow(&self.folder.join(NVML.soname), NVML, &mut mounts, &mut view);
            let inside = format!("{DRIVER}/{}", NVML.driver);
            let real = stage.folder.join(DriverCapability::Utility.name()).join(NVML.soname);
            mount(&real, inside, &mut mounts, &mut view);
        }
        mounts.push(SpecMount {
            host_path: USAGE_SOURCE.into(),
            container_path: format!("{CONTAINER_FOLDER}/{USAGE}"),
            kind: Some("tmpfs".into()),
            options: USAGE_OPTIONS.map(str::to_owned).to_vec(),
        });
        (mounts, view)
    }
}

/// `../lib/gpufence` from the running program's folder, as it is installed.
fn beside() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    Some(own.parent()?.parent()?.join("lib/gpufence"))
}

fn shadow(host: &Path, library: Shadowed, mounts: &mut Vec<SpecMount>, view: &mut View) {
    mount(host, format!("{LIMITER}/{}", library.soname), mounts, view);
    view.links.push((format!("{LIMITER}/{}", library.plain), library.soname.to_owned()));
}

/// The real library under the name that the shadow needs.
fn link(capability: DriverCapability, library: Shadowed, view: &mut View) {
    let target = format!("../{capability}/{}", library.soname);
    view.links.push((format!("{DRIVER}/{}", library.driver), target));
}

fn mount(host: &Path, inside: String, mounts: &mut Vec<SpecMount>, view: &mut View) {
    mounts.push(edits::read_only(host.to_string_lossy().into_owned(), format!("{CONTAINER_FOLDER}/{inside}")));
    view.files.push(inside);
}
