//! The driver's user-mode files by driver capability, found by soname pattern in the host's library folders.
//!
//! Only files of the running version are taken where two versions lie side by side. shared/FIELD.md of the project has
//! the patterns and where they come from.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{
    capability::DriverCapability,
    elf::{self, LinkerFlags},
    error::CdiError,
    ldcache,
    root::Root,
};

/// A driver library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriverLibrary {
    /// What it is for.
    pub capability: DriverCapability,
    /// Where it lies in the driver root, with no link left.
    pub path: String,
    /// Where it lies in the stage's folder of its capability: the file name, below `vdpau/` for some.
    pub staged: String,
    /// Links to it in the stage: its soname, and those that programs expect.
    pub links: Vec<String>,
    /// For the loader's cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flags: Option<LinkerFlags>,
}

/// What kind of file it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// A program, such as nvidia-smi.
    Binary,
    /// A Vulkan, EGL, OpenCL or X11 configuration file.
    Configuration,
}

/// A driver file that is no library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriverFile {
    /// What it is for.
    pub capability: DriverCapability,
    /// Program or configuration.
    pub kind: FileKind,
    /// Where it lies in the driver root, with no link left.
    pub path: String,
    /// Where containers expect it.
    pub container_path: String,
}

/// All files of the running driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriverFiles {
    /// Libraries, by capability and name.
    pub libraries: Vec<DriverLibrary>,
    /// Programs and configuration.
    pub files: Vec<DriverFile>,
    /// GSP firmware, in the driver root.
    pub firmware: Vec<String>,
    /// Sockets of the driver's daemons, in the driver root.
    pub sockets: Vec<String>,
}

const LIBRARY_FOLDERS: [&str; 16] = [
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib64/nvidia",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/run/opengl-driver/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/i386-linux-gnu/nvidia/current",
    "/usr/lib/i386-linux-gnu",
    "/usr/lib32",
    "/usr/local/nvidia/lib",
    "/usr/lib",
];
const SUBFOLDERS: [&str; 4] = ["", "vdpau", "xorg/modules/drivers", "xorg/modules/extensions"];
const BINARY_FOLDERS: [&str; 6] =
    ["/usr/bin", "/usr/sbin", "/usr/lib/nvidia/current", "/usr/local/nvidia/bin", "/bin", "/run/opengl-driver/bin"];
const BINARIES: [(&str, DriverCapability); 5] = [
    ("nvidia-smi", DriverCapability::Utility),
    ("nvidia-debugdump", DriverCapability::Utility),
    ("nvidia-persistenced", DriverCapability::Utility),
    ("nvidia-cuda-mps-control", DriverCapability::Compute),
    ("nvidia-cuda-mps-server", DriverCapability::Compute),
];
/// Libraries with a version number of their own, by what stands before `.so.`.
const OWN_VERSION: [&str; 7] = [
    "libnvidia-nvvm70",
    "libnvidia-egl-gbm",
    "libnvidia-egl-wayland",
    "libnvidia-egl-wayland2",
    "libnvidia-egl-xcb",
    "libnvidia-egl-xlib",
    "libnvidia-api",
];
const CONFIGURATION_FOLDERS: [&str; 3] = ["/etc", "/usr/share", "/usr/local/share"];
const CONFIGURATION: [(&str, DriverCapability); 13] = [
    ("glvnd/egl_vendor.d/10_nvidia.json", DriverCapability::Graphics),
    ("egl/egl_external_platform.d/15_nvidia_gbm.json", DriverCapability::Graphics),
    ("egl/egl_external_platform.d/10_nvidia_wayland.json", DriverCapability::Graphics),
    ("egl/egl_external_platform.d/09_nvidia_wayland2.json", DriverCapability::Graphics),
    ("egl/egl_external_platform.d/20_nvidia_xcb.json", DriverCapability::Graphics),
    ("egl/egl_external_platform.d/20_nvidia_xlib.json", DriverCapability::Graphics),
    ("vulkan/icd.d/nvidia_icd.json", DriverCapability::Graphics),
    ("vulkan/icd.d/nvidia_icd.x86_64.json", DriverCapability::Graphics),
    ("vulkan/icd.d/nvidia_icd.aarch64.json", DriverCapability::Graphics),
    ("vulkan/implicit_layer.d/nvidia_layers.json", DriverCapability::Graphics),
    ("nvidia/nvoptix.bin", DriverCapability::Graphics),
    ("OpenCL/vendors/nvidia.icd", DriverCapability::Compute),
    ("X11/xorg.conf.d/10-nvidia.conf", DriverCapability::Display),
];
const SOCKETS: [&str; 4] = [
    "/run/nvidia-persistenced/socket",
    "/var/run/nvidia-persistenced/socket",
    "/run/nvidia-fabricmanager/socket",
    "/var/run/nvidia-fabricmanager/socket",
];

impl DriverFiles {
    /// Finds the files of driver `version` in the driver root; `kernel` is `uname -r`, for firmware folders.
    pub fn discover(driver: &Root, version: &str, kernel: &str) -> Result<Self, CdiError> {
        let libraries = libraries(driver, version)?;
        let has = |name: &str| {
            let wanted = format!("{name}.so.{version}");
            libraries.iter().any(|library| library.capability != DriverCapability::Compat32 && library.staged == wanted)
        };
        if !has("libcuda") && !has("libnvidia-ml") {
            return Err(CdiError::NoLibraries { version: version.to_owned(), root: driver.path().to_owned() });
        }
        Ok(Self {
            libraries,
            files: files(driver)?,
            firmware: firmware(driver, version, kernel)?,
            sockets: unique(driver, SOCKETS)?,
        })
    }
}

/// The folders that the loader's cache names for driver libraries, then the usual ones.
fn library_folders(driver: &Root) -> Result<Vec<String>, CdiError> {
    let mut folders: Vec<String> = Vec::new();
    if let Some(bytes) = driver.read_if_there("/etc/ld.so.cache", 16 << 20)? {
        // A cache that can't be read is the host's own matter; the usual folders remain.
        if let Ok(cache) = ldcache::parse(&bytes) {
            for entry in &cache.entries {
                let driver_s = [&b"libcuda.so"[..], b"libnvidia-", b"libGLX_nvidia", b"libEGL_nvidia", b"libnvcuvid"];
                if driver_s.iter().any(|start| entry.name.starts_with(start))
                    && let Ok(path) = str::from_utf8(&entry.path)
                    && let Some((folder, _)) = path.rsplit_once('/')
                {
                    folders.push(folder.to_owned());
                }
            }
        }
    }
    folders.extend(LIBRARY_FOLDERS.map(str::to_owned));
    let mut seen = BTreeSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    Ok(folders)
}

fn libraries(driver: &Root, version: &str) -> Result<Vec<DriverLibrary>, CdiError> {
    let mut found: Vec<DriverLibrary> = Vec::new();
    let mut seen = BTreeSet::new();
    for folder in library_folders(driver)? {
        for subfolder in SUBFOLDERS {
            let folder = if subfolder.is_empty() { folder.clone() } else { format!("{folder}/{subfolder}") };
            for name in driver.list(&folder)? {
                let Some(name) = name.to_str() else { continue };
                let Some(stem) = driver_library_stem(name, version) else { continue };
                let Some(resolved) = driver.resolve(format!("{folder}/{name}"))? else { continue };
                // A link's own name is not the library's; the file is met under its own in its own folder.
                if resolved.path.file_name().and_then(|own| own.to_str()) != Some(name)
                    || !seen.insert(resolved.identity)
                {
                    continue;
                }
                let library = elf::read(driver.open_file(&resolved.path)?, &driver.host_path(&resolved.path))?;
                let capability =
                    if library.is_32_bit { DriverCapability::Compat32 } else { DriverCapability::of_library(stem) };
                let staged = if subfolder.is_empty() { name.to_owned() } else { format!("{subfolder}/{name}") };
                // The same name again from a later folder: the first folder won, as with the loader.
                if found.iter().any(|other| (other.capability, &other.staged) == (capability, &staged)) {
                    continue;
                }
                found.push(DriverLibrary {
                    capability,
                    path: resolved.path.to_string_lossy().into_owned(),
                    links: links(stem, name, library.soname.as_deref()),
                    staged,
                    flags: library.flags,
                });
            }
        }
    }
    found.sort_by(|a, b| (a.capability, &a.staged).cmp(&(b.capability, &b.staged)));
    Ok(found)
}

/// What stands before `.so` if `name` is a library of driver `version`, or one with a version of its own.
fn driver_library_stem<'a>(name: &'a str, version: &str) -> Option<&'a str> {
    if name == "nvidia_drv.so" {
        return Some("nvidia_drv");
    }
    let (stem, suffix) = name.split_once(".so")?;
    let suffix = suffix.strip_prefix('.').unwrap_or(suffix);
    let own = OWN_VERSION.contains(&stem) && suffix.split('.').all(|part| part.bytes().all(|b| b.is_ascii_digit()));
    (stem.starts_with("lib") && (suffix == version || own)).then_some(stem)
}

/// The links to a library that programs and the loader expect beside it.
fn links(stem: &str, name: &str, soname: Option<&str>) -> Vec<String> {
    let mut links: Vec<String> = soname.filter(|soname| *soname != name).map(str::to_owned).into_iter().collect();
    match stem {
        "libcuda" => links.push("libcuda.so".into()),
        "libnvidia-opticalflow" => links.push("libnvidia-opticalflow.so".into()),
        "libGLX_nvidia" => links.push("libGLX_indirect.so.0".into()),
        "libnvidia-allocator" => links.push("gbm/nvidia-drm_gbm.so".into()),
        _ => {}
    }
    links
}

fn files(driver: &Root) -> Result<Vec<DriverFile>, CdiError> {
    let mut found = Vec::new();
    for (name, capability) in BINARIES {
        for folder in BINARY_FOLDERS {
            if let Some(resolved) = driver.resolve(format!("{folder}/{name}"))? {
                found.push(DriverFile {
                    capability,
                    kind: FileKind::Binary,
                    path: resolved.path.to_string_lossy().into_owned(),
                    container_path: format!("/usr/bin/{name}"),
                });
                break;
            }
        }
    }
    for (name, capability) in CONFIGURATION {
        for folder in CONFIGURATION_FOLDERS {
            let container_path = format!("{folder}/{name}");
            if let Some(resolved) = driver.resolve(&container_path)? {
                let path = resolved.path.to_string_lossy().into_owned();
                found.push(DriverFile { capability, kind: FileKind::Configuration, path, container_path });
            }
        }
    }
    Ok(found)
}

/// `gsp*.bin` in the first firmware folder that has them, in the kernel's order of search.
fn firmware(driver: &Root, version: &str, kernel: &str) -> Result<Vec<String>, CdiError> {
    let mut folders = Vec::new();
    if let Some(own) = driver.read_if_there("/sys/module/firmware_class/parameters/path", 4096)? {
        folders.push(String::from_utf8_lossy(&own).trim().to_owned());
    }
    folders.extend(
        ["/lib/firmware/updates/", "/lib/firmware/"]
            .iter()
            .flat_map(|folder| [format!("{folder}{kernel}"), folder.trim_end_matches('/').to_owned()]),
    );
    for folder in folders.iter().filter(|folder| folder.starts_with('/')) {
        let folder = format!("{folder}/nvidia/{version}");
        let names = driver.list(&folder)?;
        let names = names.iter().filter_map(|name| name.to_str());
        let files: Vec<String> = names
            .filter(|name| name.starts_with("gsp") && name.ends_with(".bin"))
            .map(|name| format!("{folder}/{name}"))
            .collect();
        if !files.is_empty() {
            return Ok(files);
        }
    }
    Ok(Vec::new())
}

/// Those of `paths` that are there, each file once.
fn unique<'a>(driver: &Root, paths: impl IntoIterator<Item = &'a str>) -> Result<Vec<String>, CdiError> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for path in paths {
        if let Some(resolved) = driver.resolve(path)?
            && seen.insert(resolved.identity)
        {
            found.push(path.to_owned());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_names_are_driver_libraries() {
        for (name, expected) in [
            ("libcuda.so.550.163.01", Some("libcuda")),
            ("libcuda.so.535.247.01", None),
            ("libcuda.so.1", None),
            ("libcuda.so", None),
            ("nvidia_drv.so", Some("nvidia_drv")),
            ("libnvidia-nvvm70.so.4", Some("libnvidia-nvvm70")),
            ("libnvidia-egl-gbm.so.1.1.2", Some("libnvidia-egl-gbm")),
            ("libnvidia-api.so", Some("libnvidia-api")),
            ("libcrypto.so.3", None),
        ] {
            assert_eq!(driver_library_stem(name, "550.163.01"), expected, "{name}");
        }
    }

    #[test]
    fn links_that_programs_expect() {
        assert_eq!(links("libcuda", "libcuda.so.550", Some("libcuda.so.1")), ["libcuda.so.1", "libcuda.so"]);
        assert_eq!(links("libnvidia-tls", "libnvidia-tls.so.550", Some("libnvidia-tls.so.550")), Vec::<String>::new());
    }
}
