//! Images of every kind: in each the driver's libraries are found by the image's own loader, and nothing of it is
//! executed on the way. With containerd, where the shim makes them findable, and with Podman's own CDI, where the hook does.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use gpufence_tests::{
    docker::Podman,
    host::{GPUFENCE, Host, Plan, unique},
    programs,
    seen::{PROBE, Seen},
};

const SHARE: [&str; 2] = ["--annotation", "gpufence.dev/gpu=0=1GiB"];

/// A root made from the test image's by `change`.
fn root(host: &Host, change: impl FnOnce(&Path)) -> PathBuf {
    let root = host.folder().join(unique("root"));
    programs::test_image().unwrap().unpack(&root).unwrap();
    change(&root);
    root
}

fn finds_ours(seen: &Seen, what: &str) {
    for library in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"] {
        assert!(seen.finds(library), "{what}: {library}: {:?}", seen.0.libraries);
    }
}

/// Images by what is odd about them.
fn odd_images(host: &Host) -> Vec<(&'static str, PathBuf)> {
    let cache = |root: &Path| root.join("etc/ld.so.cache");
    vec![
        ("no cache", root(host, |_| {})),
        ("no /etc", root(host, |root| fs::remove_dir_all(root.join("etc")).unwrap())),
        ("a cache that is none", root(host, |root| fs::write(cache(root), "nonsense").unwrap())),
        (
            "a cache by a link",
            root(host, |root| {
                fs::write(root.join("tmp/cache"), "").unwrap();
                symlink("../tmp/cache", cache(root)).unwrap();
            }),
        ),
        (
            "a cache by a link that points out of the root",
            root(host, |root| {
                symlink("../../../../../../etc/gpufence-test-outside", cache(root)).unwrap();
                fs::write(root.join("etc/gpufence-test-outside"), "").unwrap();
            }),
        ),
        (
            "its own libcuda",
            root(host, |root| {
                let own = host.driver_root().join("usr/lib/x86_64-linux-gnu");
                fs::copy(own.join("libcuda.so.550.163.01"), root.join("usr/lib/libcuda.so.1")).unwrap();
                fs::copy(own.join("libnvidia-ml.so.550.163.01"), root.join("usr/lib/libnvidia-ml.so.1")).unwrap();
            }),
        ),
    ]
}

#[test]
fn by_the_shim() {
    let host = Host::start(&Plan::default()).unwrap();
    for (what, root) in odd_images(&host) {
        for more in [&[][..], &["--read-only"]] {
            // The probe makes nodes, which a read-only root forbids; so does what was dropped.
            let flags = [&["--rm"], &SHARE[..], more].concat();
            let output = host.run_on(&root, GPUFENCE, &unique("image"), &flags, &PROBE).output().unwrap();
            let seen = Seen::from_output(&output).unwrap_or_else(|error| panic!("{what}: {error}"));
            finds_ours(&seen, what);
        }
    }
    assert!(!Path::new("/etc/gpufence-test-outside").exists(), "written outside of the container's root");
}

#[test]
fn by_the_hook() {
    let host = Host::start(&Plan::default()).unwrap();
    host.generate_cdi().unwrap();
    let podman = Podman::with_runtime(&host, "/usr/sbin/runc").unwrap();
    for (what, root) in odd_images(&host) {
        for more in [&[][..], &["--read-only", "--read-only-tmpfs=false"]] {
            let flags = [&["--device", "gpufence.dev/gpu=0", "--rootfs"], more].concat();
            let output = podman.run(&flags, root.to_str().unwrap(), &PROBE).unwrap();
            let seen = Seen::from_output(&output).unwrap_or_else(|error| panic!("{what}: {error}"));
            finds_ours(&seen, what);
        }
    }
    let left: Vec<_> = fs::read_dir("/run")
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(".gpufence-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!Path::new("/etc/gpufence-test-outside").exists(), "written outside of the container's root");
}

/// A small Debian with NVIDIA's real libraries staged: its own loader and its own ldconfig find them, and nvidia-smi starts.
fn debian_with(driver: &str) {
    let real = programs::engines().unwrap().join(driver);
    let libraries = fs::read_dir(real.join("usr/lib/x86_64-linux-gnu/nvidia/current")).unwrap().flatten();
    let mut names = libraries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let version = names
        .find_map(|name| Some(name.strip_prefix("libcuda.so.")?.to_owned()).filter(|text| text.len() > 1))
        .unwrap();
    let policy = "allowed_driver_capabilities = [\"compute\", \"utility\", \"compat32\"]\ndefault_driver_capabilities = [\"compute\", \"utility\", \"compat32\"]";
    let machine = format!("gpus=1 driver={version} real={}", real.display());
    let host = Host::start(&Plan { machine, policy, ..Plan::default() }).unwrap();
    let debian = host.folder().join("debian");
    let engine = programs::engines().unwrap().join("debian");
    assert!(Command::new("cp").arg("-a").arg(&engine).arg(&debian).status().unwrap().success());
    for folder in ["proc", "sys", "dev", "tmp"] {
        fs::create_dir_all(debian.join(folder)).unwrap();
    }
    fs::copy(programs::built().unwrap().join("gpufence-stripped"), debian.join("usr/bin/gpufence")).unwrap_or_else(
        |_| fs::copy(programs::built().unwrap().join("gpufence"), debian.join("usr/bin/gpufence")).unwrap(),
    );
    assert!(Command::new("/sbin/ldconfig").arg("-r").arg(&debian).status().unwrap().success());
    let before = ldconfig_list(&Command::new("/sbin/ldconfig").arg("-r").arg(&debian).arg("-p").output().unwrap());
    assert!(before.len() > 10, "{before:?}");

    let run = |command: &[&str]| {
        let flags = [&["--rm"], &SHARE[..]].concat();
        host.run_on(&debian, GPUFENCE, &unique("debian"), &flags, command).output().unwrap()
    };
    let seen = Seen::from_output(&run(&[
        "/usr/bin/gpufence",
        "probe",
        "--output",
        "json",
        "--load",
        "libnvidia-ptxjitcompiler.so.1",
    ]))
    .unwrap();
    finds_ours(&seen, "debian");
    assert!(seen.finds("libnvidia-ptxjitcompiler.so.1"));
    assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia0 ENXIO", "nvidiactl ENXIO"], "libcuda makes none by itself");

    // glibc's own reader of the cache, in the container: ours, then the image's, every one and in its order.
    let after = ldconfig_list(&run(&["/sbin/ldconfig", "-p"]));
    let (ours, image_s): (Vec<String>, Vec<String>) =
        after.into_iter().partition(|line| line.contains("/usr/lib/gpufence/"));
    assert_eq!(image_s, before);
    for library in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"] {
        assert!(ours.iter().any(|line| line.starts_with(&format!("{library} "))), "{library}: {ours:?}");
    }
    // The limiter has no 32-bit shadows, so no 32-bit program finds a driver that nothing counts.
    assert!(!ours.iter().any(|line| line.contains("/compat32/")), "{ours:?}");
    // The loader's own account of where it looked.
    let output = run(&["/bin/sh", "-c", "LD_DEBUG=libs /usr/bin/gpufence probe 2>&1"]);
    let account = String::from_utf8_lossy(&output.stdout).into_owned();
    for file in ["limiter/libcuda.so.1", "driver/libcuda-driver.so.1"] {
        assert!(account.contains(&format!("trying file=/usr/lib/gpufence/{file}")), "{file}: {account}");
    }

    let smi = run(&["/usr/bin/nvidia-smi"]);
    let said = format!("{}{}", String::from_utf8_lossy(&smi.stdout), String::from_utf8_lossy(&smi.stderr));
    assert!(said.contains("NVIDIA-SMI has failed") || said.contains("Driver"), "{said}");
    assert!(!said.contains("not found") && !said.contains("cannot open shared object"), "{said}");
}

#[test]
fn debian_with_nvidia_s_own_550() {
    debian_with("nvidia-550");
}

#[test]
fn debian_with_nvidia_s_own_535() {
    debian_with("nvidia-535");
}

fn ldconfig_list(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter(|line| line.contains(" => ")).map(|line| line.trim().to_owned()).collect()
}

/// A cuda-compat package of a newer branch than the driver wins, one of an older branch loses.
#[test]
fn cuda_compat() {
    let host = Host::start(&Plan::default()).unwrap();
    let library = host.driver_root().join("usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01");
    for (version, wins) in [("580.65.06", true), ("535.247.01", false)] {
        let root = root(&host, |root| {
            let compat = root.join("usr/local/cuda-x/compat");
            fs::create_dir_all(&compat).unwrap();
            symlink("/usr/local/cuda-x", root.join("usr/local/cuda")).unwrap();
            fs::copy(&library, compat.join(format!("libcuda.so.{version}"))).unwrap();
            symlink(format!("libcuda.so.{version}"), compat.join("libcuda.so.1")).unwrap();
        });
        let flags = [&["--rm"], &SHARE[..]].concat();
        let command = [&PROBE[..], &["--load", "libcuda-driver.so.1"]].concat();
        let output = host.run_on(&root, GPUFENCE, &unique("compat"), &flags, &command).output().unwrap();
        let seen = Seen::from_output(&output).unwrap();
        // The limiter stands before either.
        assert_eq!(seen.0.libraries["libcuda.so.1"].as_deref(), Some("/usr/lib/gpufence/limiter/libcuda.so.1"));
        let found = seen.0.libraries["libcuda-driver.so.1"].clone().unwrap();
        assert_eq!(found.starts_with("/usr/local/cuda-x/compat/"), wins, "{version}: {found}");
        assert!(seen.finds("libnvidia-ml.so.1"));
    }
}

/// An image with nothing but a static program starts, with its nodes and our folder.
#[test]
fn scratch() {
    let host = Host::start(&Plan::default()).unwrap();
    let root = host.folder().join("scratch");
    fs::create_dir_all(&root).unwrap();
    fs::copy(host.rootfs().join("bin/busybox"), root.join("busybox")).unwrap();
    let flags = [&["--rm"], &SHARE[..]].concat();
    let output = host
        .run_on(&root, GPUFENCE, &unique("scratch"), &flags, &["/busybox", "ls", "/dev", "/usr/lib/gpufence"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("nvidia0") && said.contains("limits"), "{output:?}");
}

/// Nothing of the container's and nothing of the host's but the low-level runtime and the hook is executed to make one;
/// whatever its environment says.
#[test]
fn nothing_is_executed() {
    let host = Host::start(&Plan::default()).unwrap();
    let bundle = host.folder().join("bundle");
    fs::create_dir_all(&bundle).unwrap();
    assert!(Command::new("runc").arg("spec").current_dir(&bundle).status().unwrap().success());
    let file = bundle.join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    spec["root"]["path"] = host.rootfs().to_str().unwrap().into();
    spec["process"]["terminal"] = false.into();
    spec["process"]["args"] = serde_json::json!(["/bin/sleep", "1000"]);
    spec["process"]["rlimits"] = serde_json::json!([]);
    spec["process"]["env"] =
        serde_json::json!(["LD_PRELOAD=/evil.so", "PATH=/evil", "LD_LIBRARY_PATH=/evil", "NVIDIA_VISIBLE_DEVICES=all"]);
    fs::write(&file, spec.to_string()).unwrap();
    let id = unique("traced");
    let programs = programs::built().unwrap();
    let state = host.folder().join("runc");
    let traced = |trace: &Path, words: &[&str]| {
        let mut command = Command::new("strace");
        command.args(["-f", "-e", "trace=execve", "-o"]).arg(trace).arg(programs.join("gpufence-runtime"));
        command.arg("--policy").arg(host.policy()).args(["--grant", "0=1GiB", "--root"]).arg(&state).args(words);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    // strace follows the container's process too, so it ends when that does.
    let traces = ["create", "delete"].map(|name| host.folder().join(name));
    // Written last of all.
    let pid_file = host.folder().join("pid");
    let words = ["create", "--bundle", bundle.to_str().unwrap(), "--pid-file", pid_file.to_str().unwrap(), &id];
    let mut create = traced(&traces[0], &words);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !pid_file.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    let deleted = traced(&traces[1], &["delete", "--force", &id]).wait().unwrap();
    if !deleted.success() {
        let _ = create.kill();
    }
    create.wait().unwrap();
    assert!(deleted.success());
    // A call may be cut in two where several processes run; the first half has the name.
    let executed = |trace: &Path| -> Vec<String> {
        let text = fs::read_to_string(trace).unwrap();
        let started = text.lines().filter(|line| line.contains("execve(\"") && !line.contains("= -1"));
        started
            .map(|line| line.split('"').nth(1).unwrap_or_default().rsplit('/').next().unwrap_or_default().to_owned())
            .collect()
    };
    let created = executed(&traces[0]);
    // runc runs itself again, by /proc/self/exe or by a descriptor of it.
    let allowed = |name: &String| {
        ["gpufence-runtime", "runc", "exe", "gpufence-hook"].contains(&name.as_str()) || name.parse::<u32>().is_ok()
    };
    assert!(created.iter().all(allowed), "{created:?}");
    assert!(created.contains(&"gpufence-hook".to_owned()), "{created:?}");
    let deleted = executed(&traces[1]);
    assert!(deleted.iter().all(allowed) && deleted.contains(&"gpufence-hook".to_owned()), "{deleted:?}");
}
