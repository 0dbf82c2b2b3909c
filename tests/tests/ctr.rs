//! What containers see of GPUs when `ctr` runs them, on every containerd and under both kinds of cgroup.

use gpufence_cli::engine::Cgroups;
use gpufence_tests::{
    host::{GPUFENCE, Host, Plan, unique},
    programs::{self, Engine},
    seen::{PROBE, Seen},
};

/// A container sees its GPU, and no other however it tries.
fn a_share_is_what_is_seen(engine: Engine, cgroups: Cgroups) {
    let host = Host::start(&Plan { engine, cgroups, ..Plan::default() }).unwrap();
    let seen =
        host.probe(&["--annotation", "gpufence.dev/gpu=1=8GiB@50%", "--env", "NVIDIA_VISIBLE_DEVICES=all"]).unwrap();
    assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia1 ENXIO", "nvidiactl ENXIO"]);
    assert_eq!(seen.image_nodes(), ["EPERM", "ENXIO"]);
    assert_eq!(seen.made_nodes(), ["EPERM", "EPERM"]);
    let uuid = host.description.uuid(1);
    assert_eq!(seen.limits(), [format!("{uuid} 8192 50")]);
    assert_eq!(seen.variable("NVIDIA_VISIBLE_DEVICES"), Some(uuid.as_str()));
    assert!(seen.finds("libcuda.so.1") && seen.finds("libcuda.so") && seen.finds("libnvidia-ml.so.1"));
    assert!(!seen.finds("libnvcuvid.so.1"), "video was not asked for");
    for capability in ["MKNOD", "SYS_ADMIN", "BPF"] {
        assert!(!seen.has_capability(capability), "{capability}");
    }

    // The driver's own program runs, and finds the C library of the image.
    let flags = ["--annotation", "gpufence.dev/gpu=0=1GiB"];
    let smi = host.output(GPUFENCE, &flags, &["/usr/bin/nvidia-smi"]).unwrap();
    assert!(String::from_utf8_lossy(&smi.stdout).starts_with("NVIDIA-SMI 550.163.01"), "{smi:?}");

    // With no grant an image's wishes give nothing, and a node that it makes can't be opened.
    let seen = host.probe(&["--env", "NVIDIA_VISIBLE_DEVICES=all"]).unwrap();
    assert_eq!(seen.nodes(), Vec::<String>::new());
    assert_eq!((seen.image_nodes(), seen.made_nodes()), (vec!["EPERM", "EPERM"], vec!["EPERM", "EPERM"]));
    assert_eq!(seen.variable("NVIDIA_VISIBLE_DEVICES"), Some("void"));
    assert!(seen.has_capability("MKNOD"), "an ordinary container stays as it is");
    assert!(!seen.finds("libcuda.so.1"));

    // A privileged one is fenced, with a grant and without.
    let seen = host.probe(&["--privileged"]).unwrap();
    assert_eq!((seen.nodes(), seen.image_nodes()), (vec![], vec!["EPERM", "EPERM"]));
    assert!(!seen.has_capability("SYS_ADMIN"));
    let seen = host.probe(&["--privileged", "--annotation", "gpufence.dev/gpu=0=1GiB"]).unwrap();
    assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia0 ENXIO", "nvidiactl ENXIO"]);
    assert_eq!(seen.image_nodes(), ["ENXIO", "EPERM"]);

    // A process that exec adds is held to the same, even one that asks for more.
    let id = unique("exec");
    let start =
        host.run(GPUFENCE, &id, &["--detach", "--annotation", "gpufence.dev/gpu=0=1GiB"], &["/bin/sleep", "100"]);
    let started = { start }.output().unwrap();
    assert!(started.status.success(), "{started:?}");
    let mut exec = host.containerd.ctr(["tasks", "exec", "--exec-id", "e1", id.as_str()]);
    let seen = Seen::from_output(&exec.args(PROBE).output().unwrap()).unwrap();
    assert_eq!(seen.image_nodes(), ["ENXIO", "EPERM"]);
    assert!(!seen.has_capability("MKNOD"));
    assert_eq!(seen.variable("NVIDIA_VISIBLE_DEVICES"), Some(host.description.uuid(0).as_str()));
}

#[test]
fn containerd_1_6_cgroup_v1() {
    a_share_is_what_is_seen(Engine::Containerd16, Cgroups::Host);
}

#[test]
fn containerd_1_6_cgroup_v2() {
    a_share_is_what_is_seen(Engine::Containerd16, Cgroups::V2);
}

#[test]
fn containerd_1_7_cgroup_v1() {
    a_share_is_what_is_seen(Engine::Containerd17, Cgroups::Host);
}

#[test]
fn containerd_1_7_cgroup_v2() {
    a_share_is_what_is_seen(Engine::Containerd17, Cgroups::V2);
}

#[test]
fn containerd_2_cgroup_v1() {
    a_share_is_what_is_seen(Engine::Containerd2, Cgroups::Host);
}

#[test]
fn containerd_2_cgroup_v2() {
    a_share_is_what_is_seen(Engine::Containerd2, Cgroups::V2);
}

/// The driver capabilities that an image asks for are given as far as policy allows, with the nodes that they need.
#[test]
fn driver_capabilities_choose_within_policy() {
    let policy = "allowed_driver_capabilities = [\"compute\", \"utility\", \"video\", \"graphics\"]";
    let host = Host::start(&Plan { policy, ..Plan::default() }).unwrap();
    let probe = |wanted: &str| {
        let environment = format!("NVIDIA_DRIVER_CAPABILITIES={wanted}");
        host.probe(&["--annotation", "gpufence.dev/gpu=0=1GiB", "--env", &environment]).unwrap()
    };
    let seen = probe("video,graphics,display");
    assert_eq!(seen.nodes(), ["dri/card0 ENXIO", "dri/renderD128 ENXIO", "nvidia0 ENXIO", "nvidiactl ENXIO"]);
    assert!(seen.finds("libnvcuvid.so.1") && !seen.finds("libcuda.so.1"));
    assert_eq!(seen.variable("NVIDIA_DRIVER_CAPABILITIES"), Some("video,graphics"));
    assert_eq!(probe("all").variable("NVIDIA_DRIVER_CAPABILITIES"), Some("compute,utility,video,graphics"));
}

/// A MIG instance comes with its access nodes and its parent's node; several shares with all of theirs.
#[test]
fn mig_instances_and_several_shares() {
    let host = Host::start(&Plan { machine: "gpus=3 mig=0:2 excluded=1".into(), ..Plan::default() }).unwrap();
    let parent = host.description.uuid(0);
    let grant = |gpu: &str| {
        format!(
            "gpufence.dev/grant={{\"version\":1,\"issuedAt\":\"2026-01-01T00:00:00Z\",\"containers\":{{\"NAME\":[{{\"gpu\":\"{gpu}\",\"memoryMiB\":1024}}]}}}}"
        )
    };
    let id = unique("mig");
    let annotation = grant(&format!("MIG-{parent}/2/0")).replace("NAME", &id);
    let output = host.run(GPUFENCE, &id, &["--rm", "--annotation", &annotation], &PROBE).output().unwrap();
    let seen = Seen::from_output(&output).unwrap();
    let nodes = [
        "nvidia-caps/nvidia-cap21 ENXIO",
        "nvidia-caps/nvidia-cap22 ENXIO",
        "nvidia-uvm ENXIO",
        "nvidia0 ENXIO",
        "nvidiactl ENXIO",
    ];
    assert_eq!(seen.nodes(), nodes);

    let seen = host.probe(&["--annotation", "gpufence.dev/gpu=0=1GiB,1=2GiB"]).unwrap();
    assert_eq!(
        seen.nodes(),
        ["nvidia-uvm ENXIO", "nvidia0 ENXIO", "nvidia2 ENXIO", "nvidiactl ENXIO"],
        "index 1 skips the excluded GPU"
    );
    assert_eq!(seen.limits().len(), 2);
}

/// Only files of the running driver are staged where an old one lies beside it; another driver later gets its own stage.
#[test]
fn the_running_driver_s_files_and_a_new_driver_s() {
    let host = Host::start(&Plan { machine: "gpus=1 old-driver=535.247.01".into(), ..Plan::default() }).unwrap();
    let annotation = ["--annotation", "gpufence.dev/gpu=0=1GiB"];
    let list = || {
        let output = host.output(GPUFENCE, &annotation, &["/bin/ls", "/usr/lib/gpufence/compute"]).unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let before = list();
    assert!(before.contains("libcuda.so.550.163.01") && !before.contains("535"), "{before}");
    let version = host.driver_root().join("proc/driver/nvidia/version");
    let text = std::fs::read_to_string(&version).unwrap().replace("550.163.01", "535.247.01");
    std::fs::write(&version, text).unwrap();
    let after = list();
    assert!(after.contains("libcuda.so.535.247.01") && !after.contains("550"), "{after}");
    let stages: Vec<_> =
        std::fs::read_dir(host.folder().join("stage")).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(!stages.contains(&"550.163.01".into()), "the stage that nothing uses is gone: {stages:?}");
}

/// With whatever low-level runtime the host has. Gives a container that goes on, with a share of GPU 0.
fn the_fence_holds(host: &Host) -> String {
    let seen = host.probe(&["--annotation", "gpufence.dev/gpu=1=8GiB"]).unwrap();
    assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia1 ENXIO", "nvidiactl ENXIO"]);
    assert_eq!((seen.image_nodes(), seen.made_nodes()), (vec!["EPERM", "ENXIO"], vec!["EPERM", "EPERM"]));
    assert!(seen.finds("libcuda.so.1") && !seen.has_capability("MKNOD"));
    for flags in [&[][..], &["--privileged"]] {
        let seen = host.probe(flags).unwrap();
        assert_eq!((seen.nodes(), seen.image_nodes()), (vec![], vec!["EPERM", "EPERM"]), "{flags:?}");
    }
    let id = unique("held");
    let flags = ["--detach", "--annotation", "gpufence.dev/gpu=0=1GiB"];
    assert!(host.run(GPUFENCE, &id, &flags, &["/bin/sleep", "100"]).output().unwrap().status.success());
    let mut exec = host.containerd.ctr(["tasks", "exec", "--exec-id", "e1", id.as_str()]);
    let seen = Seen::from_output(&exec.args(PROBE).output().unwrap()).unwrap();
    assert_eq!(seen.image_nodes(), ["ENXIO", "EPERM"]);
    id
}

/// crun in place of runc, by policy. It takes v1 alone: not v1 with v2 beside it, as many machines have it.
#[test]
fn crun_by_policy() {
    let policy = "runtimes = [\"crun\"]";
    let host = Host::start(&Plan { policy, cgroups: Cgroups::V1, ..Plan::default() }).unwrap();
    let id = the_fence_holds(&host);
    // It is crun that ran: its state is where crun keeps it.
    assert!(std::path::Path::new("/run/containerd/runc/default").join(&id).join("status").exists());
    for action in ["pause", "resume"] {
        host.containerd.run_ctr(["tasks", action, &id]).unwrap();
    }
    let list = host.containerd.run_ctr(["tasks", "ps", &id]).unwrap();
    assert_eq!(list.lines().count(), 2, "{list}");
}

/// runc 1.3 in place of Debian 12's 1.1, by policy and with its own checks of paths and rules.
fn newest_runc(cgroups: Cgroups) {
    let runc = programs::engines().unwrap().join("runc-new/runc");
    let policy = format!("runtimes = [{runc:?}]").leak();
    let host = Host::start(&Plan { policy, cgroups, engine: Engine::Containerd2, ..Plan::default() }).unwrap();
    the_fence_holds(&host);
}

#[test]
fn newest_runc_cgroup_v1() {
    newest_runc(Cgroups::Host);
}

#[test]
fn newest_runc_cgroup_v2() {
    newest_runc(Cgroups::V2);
}

/// A low-level runtime that isn't there is an error which says so.
#[test]
fn a_missing_runtime() {
    let host = Host::start(&Plan { policy: "runtimes = [\"norunc\"]", ..Plan::default() }).unwrap();
    let output = host.output(GPUFENCE, &[], &["/bin/true"]).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("none of the policy's runtimes (norunc)"), "{said}");
}
