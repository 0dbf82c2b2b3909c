//! `gpufence probe`: what a container sees, told from inside it. It trusts nothing and changes nothing, save that
//! `--make` makes a device node in the temporary folder and removes it.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_char, c_void},
    fs,
    io::Write,
    os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use gpufence_grant::limits;
use nix::{
    errno::Errno,
    libc,
    sys::stat::{Mode, SFlag, major, makedev, minor, mknod},
};
use serde::{Deserialize, Serialize};

use crate::{
    arguments::{Output, ProbeArguments},
    table,
};

/// Where a container's limits file is.
const LIMITS: &str = "/usr/lib/gpufence/limits";
/// What CUDA programs and nvidia-smi open by name.
const LIBRARIES: [&str; 5] =
    ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvcuvid.so.1"];
/// Capabilities in the order of their bits, from linux/capability.h.
const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// What was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// GPU nodes under `/dev`, and what `open` says: `opens`, or the error's name.
    pub nodes: Vec<Node>,
    /// Other nodes that were asked for.
    pub others: Vec<Node>,
    /// Nodes that were to be made: what `mknod` says, or `open` where that worked.
    pub made: Vec<Made>,
    /// Driver libraries by name, with the file that the loader found.
    pub libraries: BTreeMap<String, Option<String>>,
    /// The limits file's lines.
    pub limits: Vec<LimitSeen>,
    /// Capability sets by name: inheritable, permitted, effective, bounding, ambient.
    pub capabilities: BTreeMap<String, Vec<String>>,
    /// `NVIDIA_*`, `CUDA_*`, `GPUFENCE_*` and `GPU_*`.
    pub environment: BTreeMap<String, String>,
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its path.
    pub path: String,
    /// `MAJOR:MINOR`; empty where there is none.
    pub device: String,
    /// What `open` says.
    pub open: String,
}

/// A device node that was to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// `MAJOR:MINOR`.
    pub device: String,
    /// What `mknod` says: `made`, or the error's name.
    pub mknod: String,
    /// What `open` says of it.
    pub open: Option<String>,
}

/// One limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitSeen {
    /// The GPU.
    pub uuid: String,
    /// Its memory.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Its compute.
    pub compute_percent: u8,
}

/// Looks and prints.
pub fn run(arguments: &ProbeArguments) -> Result<()> {
    let report = look(arguments)?;
    let text = match arguments.output {
        Output::Json => serde_json::to_string(&report)? + "\n",
        Output::Table => describe(&report),
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

fn look(arguments: &ProbeArguments) -> Result<Report> {
    let mut paths = gpu_nodes();
    paths.sort();
    let names = LIBRARIES.iter().map(|&name| name.to_owned()).chain(arguments.load.iter().cloned());
    let environment = std::env::vars_os().filter_map(|(key, value)| {
        let key = key.to_string_lossy().into_owned();
        let ours = ["NVIDIA_", "CUDA_", "GPUFENCE_", "GPU_"].iter().any(|start| key.starts_with(start));
        ours.then(|| (key, value.to_string_lossy().into_owned()))
    });
    Ok(Report {
        nodes: paths.iter().map(|path| node(path)).collect(),
        others: arguments.open.iter().map(|path| node(path)).collect(),
        made: arguments.make.iter().map(|device| make(device)).collect::<Result<_>>()?,
        libraries: names.map(|name| Ok((name.clone(), load(&name)?))).collect::<Result<_>>()?,
        limits: read_limits()?,
        capabilities: read_capabilities()?,
        environment: environment.collect(),
    })
}

/// Nodes under `/dev` that a GPU driver makes.
fn gpu_nodes() -> Vec<PathBuf> {
    let list = |folder: &str| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    list("/dev")
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("nvidia")))
        .chain(list("/dev/nvidia-caps"))
        .chain(list("/dev/dri"))
        .filter(|path| fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_char_device()))
        .collect()
}

fn node(path: &Path) -> Node {
    let device = fs::metadata(path).ok().filter(|metadata| metadata.file_type().is_char_device());
    let device = device.map(|metadata| format!("{}:{}", major(metadata.rdev()), minor(metadata.rdev())));
    Node { path: path.display().to_string(), device: device.unwrap_or_default(), open: open(path) }
}

fn open(path: &Path) -> String {
    let result =
        fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    result.map_or_else(|error| error_name(&error), |_| "opens".into())
}

fn error_name(error: &std::io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), |number| format!("{:?}", Errno::from_raw(number)))
}

fn make(device: &str) -> Result<Made> {
    let numbers = device.split_once(':').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let (major, minor) = numbers.with_context(|| format!("--make {device}: write MAJOR:MINOR, such as 195:0"))?;
    // Beside the image's own files, on the container's root: a tmpfs may be mounted nodev, which would deny all alike.
    let path = Path::new("/").join(format!(".gpufence-probe-{}", std::process::id()));
    let made = mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o600), makedev(major, minor));
    let (mknod, open) = match made {
        Ok(()) => ("made".to_owned(), Some(open(&path))),
        Err(error) => (format!("{error:?}"), None),
    };
    let _ = fs::remove_file(&path);
    Ok(Made { device: device.to_owned(), mknod, open })
}

/// The file that the loader finds for a name.
fn load(name: &str) -> Result<Option<String>> {
    let c_name = CString::new(name).context("a library's name has no NUL")?;
    let Some(path) = loaded_path(&c_name) else { return Ok(None) };
    let path = path.to_string_lossy().into_owned();
    // Where the path has links in it, the file behind them.
    Ok(Some(fs::canonicalize(&path).map_or(path, |path| path.to_string_lossy().into_owned())))
}

/// Loads a library, and gives the path that the loader has it by.
fn loaded_path(name: &CStr) -> Option<CString> {
    /// The beginning of `struct link_map` (link.h).
    #[repr(C)]
    struct LinkMap {
        address: usize,
        path: *const c_char,
    }
    let handle = dlopen(name)?;
    let mut map: *const LinkMap = std::ptr::null();
    #[allow(unsafe_code, reason = "one-line wrapper")]
    // SAFETY: the handle is a library's that stays loaded; RTLD_DI_LINKMAP writes a pointer to its link map.
    let found = unsafe { libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) == 0 && !map.is_null() };
    #[allow(unsafe_code, reason = "one-line wrapper")]
    // SAFETY: as above; the path is a C string of the loader's.
    found.then(|| unsafe { CStr::from_ptr((*map).path) }.to_owned())
}

#[allow(unsafe_code, reason = "one-line wrapper")]
fn dlopen(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string; the library's initialisers run, which is what is to be tried.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    (!handle.is_null()).then_some(handle)
}

fn read_limits() -> Result<Vec<LimitSeen>> {
    let Ok(text) = fs::read_to_string(LIMITS) else { return Ok(Vec::new()) };
    let seen = |limit: limits::Limit| LimitSeen {
        uuid: limit.uuid,
        memory_mib: limit.memory_bytes >> 20,
        compute_percent: limit.compute_percent,
    };
    Ok(limits::read(&text).with_context(|| format!("read {LIMITS}"))?.gpus.into_iter().map(seen).collect())
}

fn read_capabilities() -> Result<BTreeMap<String, Vec<String>>> {
    let status = fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    let sets = [
        ("CapInh:", "inheritable"),
        ("CapPrm:", "permitted"),
        ("CapEff:", "effective"),
        ("CapBnd:", "bounding"),
        ("CapAmb:", "ambient"),
    ];
    sets.iter()
        .map(|(field, name)| {
            let line = status.lines().find_map(|line| line.strip_prefix(field));
            let bits = line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
            let bits = bits.with_context(|| format!("/proc/self/status has no {field}"))?;
            Ok(((*name).to_owned(), capability_names(bits)))
        })
        .collect()
}

fn capability_names(bits: u64) -> Vec<String> {
    let name = |bit: u32| CAPABILITIES.get(bit as usize).map_or_else(|| bit.to_string(), |&name| name.to_owned());
    (0..64).filter(|bit| bits >> bit & 1 == 1).map(name).collect()
}

fn describe(report: &Report) -> String {
    let mut rows = Vec::new();
    let mut row = |what: &str, name: &str, says: String| rows.push(vec![what.to_owned(), name.to_owned(), says]);
    for node in report.nodes.iter().chain(&report.others) {
        row("node", &node.path, format!("{} {}", node.device, node.open).trim().to_owned());
    }
    for made in &report.made {
        row(
            "mknod",
            &made.device,
            made.open.as_ref().map_or_else(|| made.mknod.clone(), |open| format!("made, {open}")),
        );
    }
    for (name, file) in &report.libraries {
        row("library", name, file.clone().unwrap_or_else(|| "not found".into()));
    }
    for limit in &report.limits {
        row("limit", &limit.uuid, format!("{} MiB, {} percent", limit.memory_mib, limit.compute_percent));
    }
    for (name, value) in &report.environment {
        row("env", name, value.clone());
    }
    for (set, names) in &report.capabilities {
        row("capabilities", set, names.join(" "));
    }
    table::format(&["WHAT", "NAME", "SEEN"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_by_bit() {
        assert_eq!(capability_names(1 | 1 << 27 | 1 << 40 | 1 << 50), ["CHOWN", "MKNOD", "CHECKPOINT_RESTORE", "50"]);
    }

    #[test]
    fn libraries_that_are_there_and_not() {
        assert!(load("libc.so.6").unwrap().unwrap().contains("libc.so.6"));
        assert_eq!(load("libgpufence-nothing.so.1").unwrap(), None);
    }

    #[test]
    fn nodes_that_open_and_not() {
        assert_eq!(
            node(Path::new("/dev/null")),
            Node { path: "/dev/null".into(), device: "1:3".into(), open: "opens".into() }
        );
        assert_eq!(node(Path::new("/dev/nothing")).open, "ENOENT");
        assert!(make("195").is_err());
    }
}
