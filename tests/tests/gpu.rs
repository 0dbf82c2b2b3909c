//! `tests/gpu/check.py`, the script for machines with a GPU, on the stand-ins: as far as that goes it passes, and it fails where
//! there is no limiter.

use std::process::{Command, Output};

use gpufence_tests::{
    programs,
    simulated::{self, Description},
};

/// Runs it in a mount namespace of its own.
fn check(words: &[&str], limiter: &std::path::Path) -> Output {
    let folder = tempfile::Builder::new().prefix("gpufence-test-").tempdir_in("/run").unwrap();
    let root = folder.path().join("driver-root");
    simulated::build(&Description::parse(&["gpus=1"]).unwrap(), &root).unwrap();
    let programs = programs::built().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/gpu/check.py");
    // A /dev with the machine's nodes, as the stand-in looks for them, and a card of its own.
    let inner = r#"
        set -e
        dev=$1/dev-of-the-machine; mkdir "$dev"; mount -t tmpfs none "$dev"; mkdir "$dev/shm"
        cp -a /dev/null /dev/zero /dev/urandom /dev/random "$1"/driver-root/dev/nvidia* "$dev/"
        mount --move "$dev" /dev
        shift; exec python3 "$@""#;
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", inner, "check"])
        .arg(folder.path())
        .args([script, "--allow-missing"])
        .arg("--programs")
        .arg(&programs)
        .arg("--limiter")
        .arg(limiter)
        .arg("--driver-root")
        .arg(&root)
        .arg("--driver-libraries")
        .arg(root.join("usr/lib/x86_64-linux-gnu"))
        .args(words)
        .output()
        .unwrap()
}

#[test]
fn the_script_for_machines_with_a_gpu() {
    let limiter = programs::built().unwrap().join("../lib/gpufence");
    let output = check(&[], &limiter);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    for check in
        ["bytes_of_the_driver_api", "every_way_to_allocate", "nvidia_smi", "one_budget", "overhead", "watchdog"]
    {
        assert!(text.contains(&format!("passed   {check} ")), "{check}: {text}");
    }
    assert!(!std::path::Path::new("/usr/lib/gpufence").exists());
    // With the driver itself in the limiter's place nothing is limited, and the script says so.
    let folder = tempfile::tempdir().unwrap();
    simulated::build(&Description::parse(&["gpus=1"]).unwrap(), &folder.path().join("root")).unwrap();
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let library = folder.path().join("root/usr/lib/x86_64-linux-gnu").join(name);
        std::fs::copy(library, folder.path().join(name)).unwrap();
    }
    let output = check(&["bytes_of_the_driver_api", "one_budget"], folder.path());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!output.status.success() && text.contains("2 failed"), "{output:?}");
}
