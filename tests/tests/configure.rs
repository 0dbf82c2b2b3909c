//! `gpufence configure` on engines' own files, which the engines then run with.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use gpufence_tests::{
    cri::{Cri, RuntimeEntry},
    docker::Podman,
    host::{Host, Plan, RUNC, unique},
    programs::{self, Engine},
    seen::{PROBE, Seen},
};

fn configure(arguments: &[&str], file: &Path) -> Output {
    let mut command = Command::new(programs::built().unwrap().join("gpufence"));
    command.arg("configure").args(arguments).arg("--config").arg(file).output().unwrap()
}

fn done(arguments: &[&str], file: &Path) -> String {
    let output = configure(arguments, file);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Files as engines ship them and as administrators make them: twice as once, a dry run changes nothing, and `--remove`
/// gives back the same bytes.
#[test]
fn there_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let debian = fs::read_to_string("/etc/containerd/config.toml").unwrap();
    let podman_s = fs::read_to_string("/usr/share/containers/containers.conf").unwrap();
    let busy = "# site\nversion = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  default_runtime_name = \"runc\"   # ours\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\nruntime_type='io.containerd.runc.v2'\noptions = { SystemdCgroup = true }\n";
    let docker_s = "{\n\t\"log-driver\": \"json-file\",\n\t\"default-runtime\": \"runc\",\n\t\"runtimes\": {\"crun\": {\"path\": \"/usr/bin/crun\"}}\n}\n";
    for (engine, text) in [
        ("containerd", debian.as_str()),
        ("containerd", busy),
        ("docker", docker_s),
        ("docker", "{}"),
        ("podman", podman_s.as_str()),
        ("crio", "[crio.runtime]\nlog_level = \"info\"\n"),
    ] {
        for more in [&[][..], &["--default-runtime"], &["--engine-version", "1.6.20"]] {
            let file = folder.path().join(unique("config"));
            fs::write(&file, text).unwrap();
            let add = [&[engine], more].concat();
            let shown = done(&[&add[..], &["--dry-run"]].concat(), &file);
            assert!(shown.contains("+++") && shown.contains("gpufence"), "{shown}");
            assert_eq!(fs::read_to_string(&file).unwrap(), text, "a dry run changed it");
            let said = done(&add, &file);
            assert!(said.starts_with("Changed"), "{said}");
            let once = fs::read_to_string(&file).unwrap();
            assert!(done(&add, &file).contains("needs no change"));
            assert_eq!(fs::read_to_string(&file).unwrap(), once);
            done(&[engine, "--remove"], &file);
            assert_eq!(fs::read_to_string(&file).unwrap(), text, "{add:?}\n{once}");
            assert!(done(&[engine, "--remove"], &file).contains("needs no change"));
        }
    }
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(
        left.iter().all(|name| name.to_string_lossy().starts_with("config-") && !name.to_string_lossy().contains('.')),
        "{left:?}"
    );
}

#[test]
fn files_that_are_not_there_and_broken_ones() {
    let folder = tempfile::tempdir().unwrap();
    for engine in ["containerd", "docker", "podman", "crio"] {
        let file = folder.path().join(engine).join("config");
        done(&[engine], &file);
        assert!(fs::read_to_string(&file).unwrap().contains("gpufence"));
        done(&[engine, "--remove"], &file);
        assert!(!file.exists(), "{engine}: a file that we made is ours to remove");
        fs::write(&file, "[[[").unwrap();
        let output = configure(&[engine], &file);
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("is as it was") && said.contains("not readable as"), "{said}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "[[[");
    }
    // One that was edited in between loses only what is ours.
    let file = folder.path().join("edited.json");
    fs::write(&file, "{\"debug\": true}").unwrap();
    done(&["docker"], &file);
    let edited = fs::read_to_string(&file).unwrap().replace("\"debug\": true", "\"debug\": false");
    fs::write(&file, edited).unwrap();
    done(&["docker", "--remove"], &file);
    let value: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(value, serde_json::json!({"debug": false}));
}

/// containerd runs Pods with what was written into its file.
fn containerd(engine: Engine) {
    let entry = RuntimeEntry { name: "runc", runtime_type: RUNC.into(), ..RuntimeEntry::default() };
    let mut host = Host::start(&Plan { engine, cri: true, cri_runtimes: vec![entry], ..Plan::default() }).unwrap();
    host.containerd.kill();
    let file = host.folder().join("containerd/config.toml");
    let version = match engine {
        Engine::Containerd16 => "1.6",
        Engine::Containerd17 => "1.7",
        Engine::Containerd2 => "2.1",
    };
    done(&["containerd", "--engine-version", version, "--default-runtime"], &file);
    host.containerd.run().unwrap();
    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    for handler in ["gpufence", ""] {
        let pod = cri.run_pod(&unique("pod"), handler, &[("gpufence.dev/gpu", "1=1GiB")], false).unwrap();
        let container = cri.run_container(&pod, "trainer", &[], false).unwrap();
        let seen = Seen::from_text(&cri.exec(&container, &PROBE).unwrap()).unwrap();
        assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia1 ENXIO", "nvidiactl ENXIO"], "handler {handler:?}");
        cri.remove_pod(&pod).unwrap();
    }
}

#[test]
fn containerd_1_6() {
    containerd(Engine::Containerd16);
}

#[test]
fn containerd_1_7() {
    containerd(Engine::Containerd17);
}

#[test]
fn containerd_2() {
    containerd(Engine::Containerd2);
}

/// dockerd takes what was written; those of 23.0 and later can say so.
#[test]
fn docker_validates_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("daemon.json");
    fs::write(&file, "{\"log-driver\": \"json-file\"}").unwrap();
    done(&["docker", "--default-runtime"], &file);
    for name in ["docker-26", "docker-28"] {
        let dockerd = programs::engines().unwrap().join(name).join("usr/sbin/dockerd");
        let output = Command::new(dockerd).arg("--validate").arg("--config-file").arg(&file).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

/// Podman finds the runtime by its name.
#[test]
fn podman_by_name() {
    let host = Host::start(&Plan::default()).unwrap();
    let podman = Podman::new(&host, false).unwrap();
    let file = host.folder().join("containers.conf");
    let runtime = podman.runtime().to_string_lossy().into_owned();
    done(&["podman", "--runtime-path", &runtime], &file);
    let named = Podman::with_runtime(&host, "gpufence").unwrap().configured_by(&file);
    let output = named.run(&["--annotation", "gpufence.dev/gpu=1=1GiB"], "plain", &PROBE).unwrap();
    let seen = Seen::from_output(&output).unwrap();
    assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia1 ENXIO", "nvidiactl ENXIO"]);
}
