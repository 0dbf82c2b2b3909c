//! Docker and Podman through `gpufence-runtime`: what their containers see is what containerd's see.

use std::process::Output;

use anyhow::Result;
use gpufence_cli::engine::Cgroups;
use gpufence_tests::{
    docker::{Docker, Podman, Release},
    host::{Host, Plan},
    seen::{PROBE, Seen},
};

/// The demo's five, as flags of each engine: two shares of GPU 0, one of GPU 1, an image that asks for all, and a
/// privileged one of the same image.
const FIVE: [(Option<&str>, bool, bool); 5] = [
    (Some("0=8GiB@50%"), false, false),
    (Some("0=4GiB@25%"), false, false),
    (Some("1=16GiB"), false, false),
    (None, true, false),
    (None, true, true),
];

/// What the five see under containerd.
fn under_containerd(host: &Host) -> Vec<Seen> {
    let see = |(grant, greedy, privileged): &(Option<&str>, bool, bool)| {
        let annotation = grant.map(|grant| format!("gpufence.dev/gpu={grant}"));
        let mut flags = Vec::new();
        if let Some(annotation) = &annotation {
            flags.extend(["--annotation", annotation]);
        }
        if *greedy {
            flags.extend(["--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=all"]);
        }
        if *privileged {
            flags.push("--privileged");
        }
        host.probe(&flags).unwrap()
    };
    FIVE.iter().map(see).collect()
}

/// What the five see under another engine, whose `run` is given.
fn under(run: impl Fn(&[&str], &str, &[&str]) -> Result<Output>) -> Vec<Seen> {
    let see = |(grant, greedy, privileged): &(Option<&str>, bool, bool)| {
        let annotation = grant.map(|grant| format!("gpufence.dev/gpu={grant}"));
        let mut flags = Vec::new();
        if let Some(annotation) = &annotation {
            flags.extend(["--annotation", annotation]);
        }
        if *privileged {
            flags.push("--privileged");
        }
        let image = if *greedy { "greedy" } else { "plain" };
        Seen::from_output(&run(&flags, image, &PROBE).unwrap()).unwrap()
    };
    FIVE.iter().map(see).collect()
}

/// The same, but for the capabilities that engines give by themselves: of those only what we take is compared.
fn assert_same(theirs: &[Seen], ours: &[Seen]) {
    assert_eq!(theirs.len(), ours.len());
    for (number, (theirs, ours)) in theirs.iter().zip(ours).enumerate() {
        assert_eq!(ours.nodes(), theirs.nodes(), "container {number}");
        assert_eq!(ours.image_nodes(), theirs.image_nodes(), "container {number}");
        assert_eq!(ours.made_nodes(), theirs.made_nodes(), "container {number}");
        assert_eq!(ours.limits(), theirs.limits(), "container {number}");
        assert_eq!(ours.0.libraries, theirs.0.libraries, "container {number}");
        assert_eq!(ours.0.environment, theirs.0.environment, "container {number}");
        for capability in ["SYS_ADMIN", "SYS_RAWIO", "SYS_MODULE", "BPF", "DAC_READ_SEARCH"] {
            assert!(!ours.has_capability(capability), "container {number}: {capability}");
        }
    }
}

fn nothing_is_left(host: &Host) {
    let folder = host.container_folders();
    let left: Vec<_> = std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Docker 20.10 gives a privileged container capabilities that the machine itself may lack, as a sandboxed one does, and
/// runc then fails. They are taken like the others.
const POLICY: &str = "drop_capabilities = [\"CAP_MKNOD\", \"CAP_SYS_ADMIN\", \"CAP_SYS_RAWIO\", \"CAP_SYS_MODULE\", \"CAP_BPF\", \"CAP_DAC_READ_SEARCH\", \"CAP_SYS_RESOURCE\"]";

fn docker(release: Release) {
    let host = Host::start(&Plan { policy: POLICY, ..Plan::default() }).unwrap();
    let theirs = under_containerd(&host);
    let docker = Docker::start(&host, release, "gpufence").unwrap();
    if release.has_annotations() {
        assert_same(&theirs, &under(|flags, image, command| docker.run(flags, image, command)));
        let output = docker.run(&["--annotation", "gpufence.dev/gpu=9=1GiB"], "plain", &["/bin/true"]).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("GPU 9 is not on this node"), "{said}");
        let both = ["--runtime", "gpu0", "--annotation", "gpufence.dev/gpu=1=1GiB"];
        let said = docker.run(&both, "plain", &["/bin/true"]).unwrap();
        assert!(String::from_utf8_lossy(&said.stderr).contains("keep only one of them"), "{said:?}");
    }
    // Fixed grants, which every release can have.
    let probe = |flags: &[&str], image: &str| Seen::from_output(&docker.run(flags, image, &PROBE).unwrap()).unwrap();
    let fixed = [probe(&["--runtime", "gpu0"], "plain"), probe(&["--runtime", "gpu1"], "greedy")];
    assert_same(&[theirs[0].clone(), theirs[2].clone()], &fixed);
    assert_same(&theirs[3..], &[probe(&[], "greedy"), probe(&["--privileged"], "greedy")]);

    // exec is held to the same by the container's own cgroup; the container stops, starts and goes.
    let start =
        docker.run(&["--runtime", "gpu0", "--detach", "--name", "long"], "plain", &["/bin/sleep", "1000"]).unwrap();
    assert!(start.status.success(), "{start:?}");
    let exec = |user: &[&str]| {
        let words = [&["exec"], user, &["long"], &PROBE[..]].concat();
        Seen::from_output(&docker.command(words).unwrap().output().unwrap()).unwrap()
    };
    for flags in [&[][..], &["--privileged"], &["--env", "NVIDIA_VISIBLE_DEVICES=all"]] {
        let seen = exec(flags);
        assert_eq!(seen.image_nodes(), ["ENXIO", "EPERM"], "{flags:?}");
        assert_eq!(seen.variable("NVIDIA_VISIBLE_DEVICES"), Some(host.description.uuid(0).as_str()), "{flags:?}");
        assert!(!seen.has_capability("SYS_ADMIN") && !seen.has_capability("MKNOD"), "{flags:?}");
    }
    for action in [
        &["restart", "--time", "0", "long"][..],
        &["update", "--memory", "64m", "--memory-swap", "64m", "long"],
        &["pause", "long"],
        &["unpause", "long"],
    ] {
        let output = docker.command(action).unwrap().output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    assert_eq!(exec(&[]).image_nodes(), ["ENXIO", "EPERM"], "after a restart and an update");
    assert!(docker.command(["rm", "--force", "long"]).unwrap().output().unwrap().status.success());

    // What fails in runc after us leaves nothing either.
    let output = docker.run(&["--runtime", "gpu0"], "plain", &["/no/such/program"]).unwrap();
    assert_eq!(output.status.code(), Some(127), "{output:?}");
    nothing_is_left(&host);
}

#[test]
fn docker_20() {
    docker(Release::Docker20);
}

#[test]
fn docker_26() {
    docker(Release::Docker26);
}

#[test]
fn docker_28() {
    docker(Release::Docker28);
}

fn podman(policy: &'static str, cgroups: Cgroups) {
    let host = Host::start(&Plan { policy, cgroups, ..Plan::default() }).unwrap();
    let theirs = under_containerd(&host);
    let podman = Podman::new(&host, cgroups == Cgroups::V1).unwrap();
    assert_same(&theirs, &under(|flags, image, command| podman.run(flags, image, command)));
    let output = podman.run(&["--annotation", "gpufence.dev/gpu=9=1GiB"], "plain", &["/bin/true"]).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("annotation gpufence.dev/gpu: GPU 9 is not on this node"), "{said}");
    let output = podman.run(&["--annotation", "gpufence.dev/gpu=0=1GiB"], "plain", &["/no/such/program"]).unwrap();
    assert!(!output.status.success());
    nothing_is_left(&host);
}

#[test]
fn podman_with_runc() {
    podman("runtimes = [\"runc\"]", Cgroups::Host);
}

#[test]
fn podman_with_crun() {
    podman("runtimes = [\"crun\"]", Cgroups::V1);
}

/// What a container that an engine gave `gpufence.dev/gpu=1` by itself sees, under runc: its nodes and libraries.
fn check_cdi_device(host: &Host, run: impl Fn(&[&str], &str, &[&str]) -> Result<Output>, runc: &[&str], ours: &[&str]) {
    let uuid = format!("gpufence.dev/gpu={}", host.description.uuid(1));
    for device in ["gpufence.dev/gpu=1", &uuid] {
        let flags = [runc, &["--device", device]].concat();
        let seen = Seen::from_output(&run(&flags, "plain", &PROBE).unwrap()).unwrap();
        assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia1 ENXIO", "nvidiactl ENXIO"], "{device}");
        assert_eq!(seen.image_nodes(), ["EPERM", "ENXIO"], "{device}");
        assert!(seen.finds("libcuda.so.1") && seen.finds("libnvidia-ml.so.1"), "{device}: {:?}", seen.0.libraries);
    }
    let flags = [runc, &["--device", "gpufence.dev/gpu=all", "--read-only"]].concat();
    let output = run(&flags, "plain", &["/usr/bin/nvidia-smi"]).unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("NVIDIA-SMI"), "{output:?}");
    // Under our runtime only a grant counts.
    let flags = [ours, &["--device", "gpufence.dev/gpu=1"]].concat();
    let seen = Seen::from_output(&run(&flags, "plain", &PROBE).unwrap()).unwrap();
    assert_eq!((seen.nodes(), seen.image_nodes()), (vec![], vec!["EPERM", "EPERM"]));
}

fn docker_s_own_cdi(release: Release) {
    let host = Host::start(&Plan::default()).unwrap();
    host.generate_cdi().unwrap();
    let docker = Docker::start(&host, release, "runc").unwrap();
    check_cdi_device(&host, |flags, image, command| docker.run(flags, image, command), &[], &["--runtime", "gpufence"]);
}

#[test]
fn docker_26_s_own_cdi() {
    docker_s_own_cdi(Release::Docker26);
}

#[test]
fn docker_28_s_own_cdi() {
    docker_s_own_cdi(Release::Docker28);
}

#[test]
fn podman_s_own_cdi() {
    let host = Host::start(&Plan::default()).unwrap();
    host.generate_cdi().unwrap();
    let podman = Podman::new(&host, false).unwrap();
    let plain = Podman::with_runtime(&host, "/usr/sbin/runc").unwrap();
    let run = |flags: &[&str], image: &str, command: &[&str]| match flags.split_first() {
        Some((&"runc", flags)) => plain.run(flags, image, command),
        _ => podman.run(flags, image, command),
    };
    check_cdi_device(&host, run, &["runc"], &[]);
}

/// On a host whose policy takes them, wishes count; anything that is no GPU of the host is refused.
#[test]
fn wishes_as_grants() {
    let policy = "accept_visible_devices = true";
    let host = Host::start(&Plan { policy, machine: "gpus=2 mig=1:1".into(), ..Plan::default() }).unwrap();
    let docker = Docker::start(&host, Release::Docker20, "gpufence").unwrap();
    let nodes = |flags: &[&str], image: &str| {
        let seen = Seen::from_output(&docker.run(flags, image, &PROBE).unwrap()).unwrap();
        seen.nodes().iter().map(|node| node.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(nodes(&[], "greedy"), "nvidia-uvm nvidia0 nvidia1 nvidiactl");
    assert_eq!(nodes(&[], "plain"), "");
    for (wish, expected) in [
        ("1", "nvidia-uvm nvidia1 nvidiactl"),
        ("1:0", "nvidia-caps/nvidia-cap147 nvidia-caps/nvidia-cap148 nvidia-uvm nvidia1 nvidiactl"),
        (&host.description.uuid(0), "nvidia-uvm nvidia0 nvidiactl"),
        ("void", ""),
        ("none", ""),
    ] {
        assert_eq!(nodes(&["--env", &format!("NVIDIA_VISIBLE_DEVICES={wish}")], "plain"), expected, "{wish}");
    }
    let output = docker.run(&["--env", "NVIDIA_VISIBLE_DEVICES=7"], "plain", &["/bin/true"]).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("\"7\" is not a GPU of this node") && said.contains("gpufence inventory"), "{said}");
}
