//! The `gpufence` command on simulated machines, and its CDI specs held against CDI's published schema.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    time::Duration,
};

use container_device_interface::{schema, spec::read_spec};
use gpufence_tests::{
    programs,
    simulated::{Description, build},
};
use serde_json::Value;
use tempfile::TempDir;

/// A simulated machine with a policy of its own.
struct Machine(TempDir);

impl Machine {
    fn new(words: &str) -> Self {
        let folder = tempfile::tempdir_in("/run").unwrap();
        let path = |name: &str| folder.path().join(name);
        build(&Description::parse(&[words]).unwrap(), &path("root")).unwrap();
        let policy = format!(
            "driver_root = {:?}\nstate_dir = {:?}\nstage_dir = {:?}\n",
            path("root"),
            path("state"),
            path("stage")
        );
        fs::write(path("policy.toml"), policy).unwrap();
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(programs::built().unwrap().join("gpufence"));
        command.args(arguments).env("GPUFENCE_CONFIG", self.path().join("policy.toml"));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn says(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn fails(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

#[test]
fn the_inventory_of_a_machine() {
    let machine = Machine::new("gpus=3 mig=0:2 excluded=1 old-driver=535.247.01 memory=40960");
    let inventory: Value = serde_json::from_str(&machine.says(&["inventory", "--output", "json"])).unwrap();
    assert_eq!(inventory["driverVersion"], "550.163.01");
    let gpus = inventory["devices"]["gpus"].as_array().unwrap();
    let indices: Vec<&Value> = gpus.iter().map(|gpu| &gpu["index"]).collect();
    assert_eq!(indices, [&Value::from(0), &Value::Null, &Value::from(1)], "an excluded GPU has no index");
    assert_eq!(gpus[0]["node"]["major"], 195);
    assert_eq!(gpus[0]["mig"].as_array().unwrap().len(), 2);
    assert_eq!(gpus[0]["memoryMiB"], Value::Null, "memory sizes take NVML");
    let paths: Vec<&str> = inventory["driver"]["libraries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|library| library["path"].as_str().unwrap())
        .collect();
    assert!(paths.iter().any(|path| path.ends_with("/libcuda.so.550.163.01")));
    assert!(!paths.iter().any(|path| path.contains("535")), "files of the old driver: {paths:?}");
    assert_eq!(machine.says(&["inventory", "--output", "json"]), machine.says(&["inventory", "--output", "json"]));

    let asked: Value = serde_json::from_str(&machine.says(&["inventory", "--nvml", "--output", "json"])).unwrap();
    let gpus = asked["devices"]["gpus"].as_array().unwrap();
    assert_eq!(gpus[0]["memoryMiB"], 40960);
    assert_eq!(gpus[0]["mig"][1]["uuid"], "MIG-5eed0000-0000-4000-8000-000000000001");
    let table = machine.says(&["inventory"]);
    assert!(table.contains("excluded") && table.contains("0:1"), "{table}");
}

#[test]
fn errors_say_what_to_do() {
    let machine = Machine::new("gpus=1");
    fs::remove_file(machine.path().join("root/proc/driver/nvidia/version")).unwrap();
    let said = machine.fails(&["inventory"]);
    assert!(said.contains("no NVIDIA driver is loaded") && said.contains("name another driver root"), "{said}");
    let said = machine.fails(&["inventory", "--driver-root", "/nowhere"]);
    assert_eq!(said.matches("No such file").count(), 1, "said twice: {said}");
    let said = machine.fails(&["cdi", "list", "--file", "/nowhere/cdi.json"]);
    assert!(said.contains("`gpufence cdi generate` writes one"), "{said}");
    assert_eq!(machine.run(&["inventory", "--form", "json"]).status.code(), Some(2), "wrong usage");
    for arguments in [
        &["--help"][..],
        &["inventory", "--help"],
        &["cdi", "generate", "--help"],
        &["demo", "--help"],
        &["probe", "--help"],
    ] {
        assert!(machine.says(arguments).contains("Examples:"), "{arguments:?}");
    }
}

#[test]
fn cdi_specs_are_as_published() {
    for words in ["gpus=2", "gpus=4 mig=1:3 excluded=0"] {
        let machine = Machine::new(words);
        machine.says(&["inventory", "--nvml"]);
        let file = machine.path().join("gpufence.json");
        let file = file.to_str().unwrap();
        machine.says(&["cdi", "generate", "--nvml", "--file", file, "--capabilities", "compute,utility,graphics"]);
        schema::validate_builtin(&fs::read(file).unwrap()).unwrap_or_else(|error| panic!("{words}: {error}"));
        let spec = read_spec(&file.into(), 0).unwrap().unwrap_devices();
        assert!(spec.contains(&"all".to_owned()), "{spec:?}");
        let list: Vec<String> =
            serde_json::from_str(&machine.says(&["cdi", "list", "--file", file, "--output", "json"])).unwrap();
        assert_eq!(list.len(), spec.len());
        let all: Value = serde_json::from_str(&machine.says(&[
            "cdi",
            "show",
            "gpufence.dev/gpu=all",
            "--file",
            file,
            "--output",
            "json",
        ]))
        .unwrap();
        for mount in all["mounts"].as_array().unwrap() {
            let path = mount["hostPath"].as_str().unwrap();
            assert!(Path::new(path).exists(), "{path} is to be mounted and isn't there");
        }
        let said = machine.fails(&["cdi", "show", "99", "--file", file]);
        assert!(said.contains("has no device \"99\"; it has "), "{said}");
    }
}

/// The names of a spec's devices, from the crate's own reading of it.
trait Devices {
    fn unwrap_devices(self) -> Vec<String>;
}

impl Devices for container_device_interface::spec::Spec {
    fn unwrap_devices(mut self) -> Vec<String> {
        self.validate().unwrap().into_keys().collect()
    }
}

/// `--watch` writes the spec again when another driver runs, and `validate` tells when it is another node's.
#[test]
fn cdi_specs_follow_the_driver() {
    let machine = Machine::new("gpus=1 old-driver=535.247.01");
    let file = machine.path().join("gpufence.json");
    let path = file.to_str().unwrap();
    let mut watch =
        machine.command(&["cdi", "generate", "--watch", "1", "--file", path]).stdout(Stdio::null()).spawn().unwrap();
    let contains = |text: &str| {
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while std::time::Instant::now() < deadline {
            if fs::read_to_string(&file).is_ok_and(|spec| spec.contains(text)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        false
    };
    let first = contains("/550.163.01/");
    assert!(machine.says(&["cdi", "validate", "--file", path]).contains("is this node's, for driver 550.163.01"));
    let version = machine.path().join("root/proc/driver/nvidia/version");
    let text = fs::read_to_string(&version).unwrap().replace("550.163.01", "535.247.01");
    fs::copy(&file, machine.path().join("old.json")).unwrap();
    fs::write(&version, text).unwrap();
    let second = contains("/535.247.01/");
    watch.kill().unwrap();
    watch.wait().unwrap();
    assert!(first && second);
    let old = machine.path().join("old.json");
    let said = machine.fails(&["cdi", "validate", "--file", old.to_str().unwrap()]);
    assert!(said.contains("is not this node's; run `gpufence cdi generate`"), "{said}");
    assert!(said.contains("is not of the running driver 535.247.01"), "{said}");
}

#[test]
fn completions_and_manual_pages() {
    let machine = Machine::new("gpus=1");
    for shell in ["bash", "zsh", "fish"] {
        assert!(machine.says(&["completions", shell]).contains("inventory"));
    }
    let folder = machine.path().join("man");
    machine.says(&["man", folder.to_str().unwrap()]);
    let page = fs::read_to_string(folder.join("gpufence-cdi-generate.1")).unwrap();
    assert!(page.starts_with(".ie") && page.contains("gpufence cdi generate"), "{page}");
    let rendered =
        Command::new("man").args(["--local-file", "--warnings"]).arg(folder.join("gpufence.1")).output().unwrap();
    assert!(
        rendered.status.success() && String::from_utf8_lossy(&rendered.stdout).contains("EXAMPLES"),
        "{rendered:?}"
    );
}

#[test]
fn the_demo_shows_five_and_cleans_up() {
    let machine = Machine::new("gpus=2");
    let root = machine.path().join("root");
    let root = root.to_str().unwrap();
    let all: Value = serde_json::from_str(&machine.says(&["demo", "--driver-root", root, "--output", "json"])).unwrap();
    let all = all.as_array().unwrap();
    let nodes = |number: usize| -> Vec<&str> {
        all[number]["sees"]["nodes"].as_array().unwrap().iter().map(|node| node["path"].as_str().unwrap()).collect()
    };
    assert_eq!(nodes(0), ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"]);
    assert_eq!(nodes(1), nodes(0));
    assert_eq!(nodes(2), ["/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidiactl"]);
    assert_eq!((nodes(3), nodes(4)), (vec![], vec![]));
    let opens = |number: usize| -> Vec<&str> {
        all[number]["sees"]["others"].as_array().unwrap().iter().map(|node| node["open"].as_str().unwrap()).collect()
    };
    assert_eq!(
        (opens(0), opens(2), opens(3), opens(4)),
        (vec!["ENXIO", "EPERM"], vec!["EPERM", "ENXIO"], vec!["EPERM", "EPERM"], vec!["EPERM", "EPERM"])
    );

    // Interrupted half way, as by Ctrl-C.
    let mut child = machine
        .command(&["demo", "--driver-root", root])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let id = child.id();
    let output = child.wait().map(|status| (status, child.wait_with_output())).unwrap();
    assert!(!output.0.success());
    let said = String::from_utf8(output.1.unwrap().stderr).unwrap();
    assert!(said.contains("interrupted; everything was cleaned up"), "{said}");
    let left: Vec<_> = fs::read_dir("/run")
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("gpufence-demo-"))
        .collect();
    assert!(left.is_empty(), "{left:?} of demo {id}");
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains("gpufence-demo-"));
}
