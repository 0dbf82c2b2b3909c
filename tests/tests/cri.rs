//! Pods, as the kubelet runs them over CRI: on every containerd, under both kinds of cgroup, and with our shim as a
//! runtime type of its own and as `runtime_path` of containerd's.

use std::path::Path;

use gpufence_cli::engine::Cgroups;
use gpufence_tests::{
    cri::{Cri, RuntimeEntry},
    host::{GPUFENCE, Host, Plan, RUNC, unique},
    programs::{self, Engine},
    seen::{PROBE, Seen},
};

const ANNOTATIONS: &[&str] = &["gpufence.dev/*"];

fn plan(engine: Engine, cgroups: Cgroups) -> Plan {
    // Options that mustn't be lost: the state's folder is looked for below.
    let binary = if cgroups == Cgroups::V2 {
        concat!(env!("CARGO_MANIFEST_DIR"), "/standins/runc-without-cpu.sh")
    } else {
        "/usr/sbin/runc"
    };
    let options = format!("BinaryName = \"{binary}\"\nRoot = \"/run/gpufence-test-runc\"\n");
    // containerd 1.6 passes options on to runtime types that it doesn't know only as the path of a file.
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("options-{cgroups:?}.toml"));
    std::fs::write(&file, &options).unwrap();
    let own_options = match engine {
        Engine::Containerd16 => format!("TypeUrl = \"runtimeoptions.v1.Options\"\nConfigPath = {file:?}\n"),
        _ => options.clone(),
    };
    let entry = RuntimeEntry {
        name: "gpufence",
        runtime_type: GPUFENCE.into(),
        options: own_options,
        pod_annotations: ANNOTATIONS,
        ..RuntimeEntry::default()
    };
    let shim = programs::built().unwrap().join("containerd-shim-gpufence-v1");
    let by_path = RuntimeEntry {
        name: "bypath",
        runtime_type: RUNC.into(),
        runtime_path: Some(shim.to_string_lossy().into_owned()),
        options,
        ..entry.clone()
    };
    let systemd = RuntimeEntry {
        name: "systemd",
        options: format!("{}SystemdCgroup = true\n", by_path.options),
        ..by_path.clone()
    };
    Plan { engine, cgroups, cri: true, cri_runtimes: vec![entry, by_path, systemd], ..Plan::default() }
}

fn pods(engine: Engine, cgroups: Cgroups) {
    let host = Host::start(&plan(engine, cgroups)).unwrap();
    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    // CRI of Debian 12's containerd, 1.6.20, reads `runtime_path` and doesn't use it.
    let handlers = if engine == Engine::Containerd16 { &["gpufence"][..] } else { &["gpufence", "bypath"] };
    for handler in handlers {
        let (first, second) = (host.description.uuid(0), host.description.uuid(1));
        let uid = gpufence_tests::cri::pod_uid();
        let grant = format!(
            r#"{{"version":1,"podUID":"{uid}","issuedAt":"2026-01-01T00:00:00Z","containers":{{"trainer":[{{"gpu":"{first}","memoryMiB":8192,"computePercent":50}}],"server":[{{"gpu":"{second}","memoryMiB":4096}}]}}}}"#
        );
        let pod = cri.run_pod(&unique("pod"), handler, &[("gpufence.dev/grant", &grant)], true).unwrap();
        assert_eq!(pod.uid, uid);
        let environment = [("NVIDIA_VISIBLE_DEVICES", "all")];
        let trainer = cri.run_container(&pod, "trainer", &environment, false).unwrap();
        let server = cri.run_container(&pod, "server", &[], false).unwrap();
        let debugger = cri.run_container(&pod, "debugger", &environment, false).unwrap();
        let privileged = cri.run_container(&pod, "privileged", &environment, true).unwrap();
        let mut look = |id: &str| Seen::from_text(&cri.exec(id, &PROBE).unwrap()).unwrap();

        let seen = look(&trainer);
        assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia0 ENXIO", "nvidiactl ENXIO"], "{handler}");
        assert_eq!(seen.limits(), [format!("{first} 8192 50")]);
        assert_eq!((seen.image_nodes(), seen.made_nodes()), (vec!["ENXIO", "EPERM"], vec!["EPERM", "EPERM"]));
        assert!(seen.finds("libcuda.so.1"));
        let seen = look(&server);
        assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia1 ENXIO", "nvidiactl ENXIO"]);
        assert_eq!(seen.limits(), [format!("{second} 4096 100")]);
        for id in [&debugger, &privileged] {
            let seen = look(id);
            assert_eq!((seen.nodes(), seen.limits()), (vec![], vec![]));
            assert_eq!((seen.image_nodes(), seen.made_nodes()), (vec!["EPERM", "EPERM"], vec!["EPERM", "EPERM"]));
        }

        // An update of its resources reaches the cgroup, and leaves the fence as it is.
        if cgroups != Cgroups::V2 {
            cri.set_memory(&trainer, 64 << 20).unwrap();
            let limit = cri.exec(&trainer, &["/bin/cat", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]).unwrap();
            assert_eq!(limit.trim(), (64 << 20).to_string());
            let seen = Seen::from_text(&cri.exec(&trainer, &PROBE).unwrap()).unwrap();
            assert_eq!(seen.image_nodes(), ["ENXIO", "EPERM"], "after an update");
        }

        // One shim for all of the Pod; runc's state is where the options say, for every container of it.
        assert_eq!(gpufence_cli::engine::shims_of(&host.containerd.socket()).len(), 1);
        for id in [&pod.id, &trainer, &debugger] {
            assert!(Path::new("/run/gpufence-test-runc/k8s.io").join(id).exists(), "{handler}: Root was lost");
        }
        let folders = host.container_folders().join("k8s.io");
        let mut folders: Vec<_> =
            std::fs::read_dir(folders).unwrap().flatten().map(|entry| entry.file_name()).collect();
        let mut expected = [trainer, server].map(std::ffi::OsString::from);
        folders.sort();
        expected.sort();
        assert_eq!(folders, expected, "only those with a grant have a folder");
        cri.remove_pod(&pod).unwrap();
        assert!(!host.container_folders().join("k8s.io").exists());
        assert_eq!(gpufence_cli::engine::shims_of(&host.containerd.socket()), Vec::<u32>::new());
    }
    // runc leaves its root; another test may still be in it.
    let _ = std::fs::remove_dir("/run/gpufence-test-runc/k8s.io");
    let _ = std::fs::remove_dir("/run/gpufence-test-runc");
}

#[test]
fn containerd_1_6_cgroup_v1() {
    pods(Engine::Containerd16, Cgroups::Host);
}

#[test]
fn containerd_1_6_cgroup_v2() {
    pods(Engine::Containerd16, Cgroups::V2);
}

#[test]
fn containerd_1_7_cgroup_v1() {
    pods(Engine::Containerd17, Cgroups::Host);
}

#[test]
fn containerd_1_7_cgroup_v2() {
    pods(Engine::Containerd17, Cgroups::V2);
}

#[test]
fn containerd_2_cgroup_v1() {
    pods(Engine::Containerd2, Cgroups::Host);
}

#[test]
fn containerd_2_cgroup_v2() {
    pods(Engine::Containerd2, Cgroups::V2);
}

/// SystemdCgroup comes through: on machines without systemd, such as those that this runs on, runc says what it misses.
#[test]
fn the_systemd_cgroup_option_is_not_lost() {
    let host = Host::start(&plan(Engine::Containerd17, Cgroups::Host)).unwrap();
    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    let error = match cri.run_pod(&unique("pod"), "systemd", &[], false) {
        // There is one: then the sandbox's cgroup is a scope of it.
        Ok(pod) => {
            let found = std::process::Command::new("systemctl").args(["list-units", "--type=scope"]).output().unwrap();
            assert!(String::from_utf8_lossy(&found.stdout).contains(&pod.id), "no scope for the sandbox");
            cri.remove_pod(&pod).unwrap();
            return;
        }
        Err(error) => error.to_string(),
    };
    assert!(error.contains("systemd"), "{error}");
}

/// A grant that was copied from another Pod gives nothing but an error that the kubelet sees.
#[test]
fn a_copied_grant_is_refused() {
    let host = Host::start(&plan(Engine::Containerd16, Cgroups::Host)).unwrap();
    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    let uuid = host.description.uuid(0);
    let grant = format!(
        r#"{{"version":1,"podUID":"another","issuedAt":"2026-01-01T00:00:00Z","containers":{{"trainer":[{{"gpu":"{uuid}","memoryMiB":8192}}]}}}}"#
    );
    let error =
        cri.run_pod(&unique("pod"), "gpufence", &[("gpufence.dev/grant", &grant)], false).unwrap_err().to_string();
    assert!(error.contains("annotation gpufence.dev/grant: the grant is for Pod another"), "{error}");
}

/// containerd's own CDI, as a device plugin asks it to: under runc with our hook, and under our runtime only a grant counts.
fn containerd_s_own_cdi(engine: Engine) {
    let runc = RuntimeEntry { name: "runc", runtime_type: RUNC.into(), ..RuntimeEntry::default() };
    let ours = RuntimeEntry {
        name: "gpufence",
        runtime_type: GPUFENCE.into(),
        pod_annotations: ANNOTATIONS,
        ..RuntimeEntry::default()
    };
    let plan = Plan { engine, cri: true, cri_runtimes: vec![runc, ours], ..Plan::default() };
    let mut host = Host::start(&plan).unwrap();
    host.generate_cdi().unwrap();
    host.containerd.kill();
    host.containerd.run().unwrap();
    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    for (handler, nodes) in [("runc", &["nvidia-uvm ENXIO", "nvidia1 ENXIO", "nvidiactl ENXIO"][..]), ("gpufence", &[])]
    {
        let pod = cri.run_pod(&unique("pod"), handler, &[], false).unwrap();
        let container = cri.run_with_devices(&pod, "trainer", &[], false, &["gpufence.dev/gpu=1"]).unwrap();
        let seen = Seen::from_text(&cri.exec(&container, &PROBE).unwrap()).unwrap();
        assert_eq!(seen.nodes(), nodes, "{handler}");
        assert_eq!(seen.finds("libcuda.so.1"), handler == "runc");
        cri.remove_pod(&pod).unwrap();
    }
}

#[test]
fn containerd_1_7_s_own_cdi() {
    containerd_s_own_cdi(Engine::Containerd17);
}

#[test]
fn containerd_2_s_own_cdi() {
    containerd_s_own_cdi(Engine::Containerd2);
}
