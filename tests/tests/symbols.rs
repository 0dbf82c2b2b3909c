//! What NVIDIA's own libraries of drivers 535 and 550 export: each entry point is seen by the limiter, or has been reviewed
//! and stands in `limiter/reviewed.txt` with its reason; and each is found through the limiter's libraries.

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use elf::{ElfBytes, endian::AnyEndian};
use gpufence_tests::programs;

const REVIEWED: &str = include_str!("../../limiter/reviewed.txt");
const DRIVERS: [&str; 2] = ["nvidia-535", "nvidia-550"];
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// The functions and data that a library exports.
fn exports(path: &Path) -> BTreeSet<String> {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}; run tests/setup.sh tests", path.display()));
    let file = ElfBytes::<AnyEndian>::minimal_parse(&bytes).unwrap();
    let (symbols, names) = file.dynamic_symbol_table().unwrap().unwrap();
    let named = symbols.iter().filter(|symbol| !symbol.is_undefined() && symbol.st_symtype() != elf::abi::STT_SECTION);
    let names: BTreeSet<_> = named.map(|symbol| names.get(symbol.st_name as usize).unwrap().to_owned()).collect();
    names.into_iter().filter(|name| name.starts_with("cu") || name.starts_with("nvml")).collect()
}

fn real(driver: &str, library: &str) -> PathBuf {
    programs::engines().unwrap().join(driver).join("usr/lib/x86_64-linux-gnu/nvidia/current").join(library)
}

fn shadow(library: &str) -> PathBuf {
    programs::built().unwrap().parent().unwrap().join("lib/gpufence").join(library)
}

/// The names and beginnings of names under one library's reasons.
fn reviewed(library: &str) -> BTreeSet<&'static str> {
    let mut ours = false;
    let mut names = BTreeSet::new();
    for line in REVIEWED.lines().filter(|line| !line.starts_with('#')) {
        if let Some(reason) = line.strip_prefix("= ") {
            let (name, reason) = reason.split_once(": ").unwrap_or_else(|| panic!("no library and reason: {line}"));
            assert!(LIBRARIES.contains(&name) && reason.len() > 20, "no library and reason: {line}");
            ours = name == library;
        } else if ours {
            for name in line.split_whitespace() {
                assert!(names.insert(name), "{name} stands twice");
            }
        }
    }
    names
}

fn covers(line: &str, name: &str) -> bool {
    line.strip_suffix('*').map_or(line == name, |beginning| name.starts_with(beginning))
}

/// What is neither seen nor reviewed, and what was reviewed for nothing.
fn gaps(exported: &BTreeSet<String>, seen: &BTreeSet<String>, reviewed: &BTreeSet<&str>) -> (Vec<String>, Vec<String>) {
    let open = |name: &&String| !seen.contains(*name) && !reviewed.iter().any(|line| covers(line, name));
    let idle = |line: &&&str| !exported.iter().any(|name| covers(line, name) && !seen.contains(name));
    (
        exported.iter().filter(open).cloned().collect(),
        reviewed.iter().filter(idle).map(|line| (*line).to_owned()).collect(),
    )
}

#[test]
fn every_entry_point_is_seen_or_reviewed() {
    for library in LIBRARIES {
        let exported: BTreeSet<_> = DRIVERS.iter().flat_map(|driver| exports(&real(driver, library))).collect();
        let (open, idle) = gaps(&exported, &exports(&shadow(library)), &reviewed(library));
        assert!(open.is_empty(), "{library}: neither seen nor in limiter/reviewed.txt: {open:#?}");
        assert!(idle.is_empty(), "{library}: in limiter/reviewed.txt, but no driver has it unseen: {idle:#?}");
    }
}

/// Names that take device memory are never reviewed away by a beginning that is too short.
#[test]
fn new_ways_to_allocate_are_gaps() {
    let names = [
        "cuMemAllocFuture",
        "cuMemCreate_v2",
        "cuMemAllocAsync_v2",
        "cuArrayCreate_v3",
        "cuMipmappedArrayCreate_v2",
        "cuMemPoolCreate_v2",
        "cuCtxCreate_v5",
        "cuDevicePrimaryCtxRetain_v2",
        "cuMemGetInfo_v3",
        "cuDeviceTotalMem_v3",
        "cuGetProcAddress_v3",
        "cuGraphAddNode_v3",
        "cuGraphAddMemAllocNode_v2",
        "cuMemAllocHost_v3",
        "cuMulticastCreate_v2",
    ];
    let exported: BTreeSet<_> = names.map(str::to_owned).into();
    let (open, _) = gaps(&exported, &exports(&shadow("libcuda.so.1")), &reviewed("libcuda.so.1"));
    assert_eq!(open.len(), names.len(), "{open:?}");
    let names =
        ["nvmlDeviceGetMemoryInfo_v3", "nvmlDeviceGetComputeRunningProcesses_v4", "nvmlDeviceGetHandleByFuture"];
    let exported: BTreeSet<_> = names.map(str::to_owned).into();
    let (open, _) = gaps(&exported, &exports(&shadow("libnvidia-ml.so.1")), &reviewed("libnvidia-ml.so.1"));
    assert_eq!(open.len(), names.len(), "{open:?}");
}

#[test]
fn every_entry_point_is_found_through_the_limiter() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(path("symbols.c"), include_str!("../programs/symbols.c")).unwrap();
    let built = Command::new("cc").arg("-o").args([path("symbols"), path("symbols.c")]).status();
    assert!(built.expect("run cc; install gcc").success());
    for driver in DRIVERS {
        for library in LIBRARIES {
            let names = exports(&real(driver, library));
            assert!(names.len() > 300, "{driver} {library}: {}", names.len());
            let libraries = path(&format!("{driver}-{library}"));
            fs::create_dir(&libraries).unwrap();
            for other in LIBRARIES {
                let stem = other.strip_suffix(".so.1").unwrap();
                fs::copy(shadow(other), libraries.join(other)).unwrap();
                fs::copy(real(driver, other), libraries.join(format!("{stem}-driver.so.1"))).unwrap();
            }
            // As nobody, since NVIDIA's library makes device nodes where it may.
            let mut child = Command::new(path("symbols"))
                .arg(libraries.join(library))
                .env("LD_LIBRARY_PATH", &libraries)
                .current_dir("/")
                .uid(65534)
                .gid(65534)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let text: String = names.iter().map(|name| format!("{name}\n")).collect();
            child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
            let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
            assert_eq!(said, format!("found {}\n", names.len()), "{driver} {library}");
        }
    }
}
