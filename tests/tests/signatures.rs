//! Signed grants, with `require_signature`: who copies, edits or writes one by himself gets no container.

use gpufence_grant::signing::PrivateKey;
use gpufence_tests::{
    cri::{Cri, RuntimeEntry, pod_uid},
    host::{GPUFENCE, Host, Plan, unique},
    programs::{self, Engine},
    seen::{PROBE, Seen},
};
use serde_json::json;

const GRANT: &str = "gpufence.dev/grant";
const SIGNATURE: &str = "gpufence.dev/grant-signature";
const POLICY: &str = "node = \"here\"\nrequire_signature = true\ngrant_max_age_seconds = 3600";

fn grant(host: &Host, uid: &str, node: &str, issued_at: &str) -> String {
    let shares = json!([{"gpu": host.description.uuid(1), "memoryMiB": 4096}]);
    json!({"version": 1, "podUID": uid, "node": node, "issuedAt": issued_at, "containers": {"trainer": shares}})
        .to_string()
}

/// So many seconds from now.
fn time(seconds: i64) -> String {
    let now = time::OffsetDateTime::now_utc() + time::Duration::seconds(seconds);
    now.format(&time::format_description::well_known::Rfc3339).unwrap()
}

fn pods(engine: Engine) {
    let entry = RuntimeEntry {
        name: "gpufence",
        runtime_type: GPUFENCE.into(),
        pod_annotations: &["gpufence.dev/*"],
        ..RuntimeEntry::default()
    };
    let plan = Plan { engine, cri: true, cri_runtimes: vec![entry], policy: POLICY, ..Plan::default() };
    let host = Host::start(&plan).unwrap();
    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    let [old, new, strange] = [(); 3].map(|()| PrivateKey::generate().unwrap());
    host.accept_keys(&[old.public(), new.public()]).unwrap();

    // While keys are rotated both hold, for the container that the grant names and for no other of the Pod.
    let good = grant(&host, &pod_uid(), "here", &time(-10));
    for key in [&old, &new] {
        let annotations = [(GRANT, good.as_str()), (SIGNATURE, &key.sign(&good))];
        let pod = cri.run_pod(&unique("signed"), "gpufence", &annotations, false).unwrap();
        let trainer = cri.run_container(&pod, "trainer", &[], false).unwrap();
        let other = cri.run_container(&pod, "other", &[("NVIDIA_VISIBLE_DEVICES", "all")], false).unwrap();
        let seen = Seen::from_text(&cri.exec(&trainer, &PROBE).unwrap()).unwrap();
        assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia1 ENXIO", "nvidiactl ENXIO"]);
        let seen = Seen::from_text(&cri.exec(&other, &PROBE).unwrap()).unwrap();
        assert_eq!((seen.nodes(), seen.limits()), (vec![], vec![]));
        cri.remove_pod(&pod).unwrap();
    }
    host.accept_keys(&[new.public()]).unwrap();

    let signed = |text: &str| vec![(GRANT, text.to_owned()), (SIGNATURE, new.sign(text))];
    let elsewhere = grant(&host, &pod_uid(), "there", &time(0));
    let replayed = grant(&host, "another-pod", "here", &time(0));
    let edited = good.replace("4096", "4097");
    for (name, annotations, expected) in [
        ("unsigned", vec![(GRANT, good.clone())], "isn't signed"),
        ("short form", vec![("gpufence.dev/gpu", "0=1GiB".into())], "isn't signed"),
        ("edited", vec![(GRANT, edited), (SIGNATURE, new.sign(&good))], "changed after it was signed"),
        ("retired key", vec![(GRANT, good.clone()), (SIGNATURE, old.sign(&good))], "a retired key"),
        ("own key", vec![(GRANT, good.clone()), (SIGNATURE, strange.sign(&good))], "which is not accepted here"),
        ("another Pod's", signed(&replayed), "the grant is for Pod another-pod"),
        ("another node's", signed(&elsewhere), "the grant is for node there, but this is here"),
        ("too old", signed(&grant(&host, &pod_uid(), "here", &time(-4000))), "(grant_max_age_seconds)"),
        ("of a time to come", signed(&grant(&host, &pod_uid(), "here", &time(400))), "ahead of this node's clock"),
    ] {
        let borrowed: Vec<(&str, &str)> = annotations.iter().map(|(key, value)| (*key, value.as_str())).collect();
        // The sandbox has the Pod's annotations too.
        let error = match cri.run_pod(&unique("bad"), "gpufence", &borrowed, false) {
            Err(error) => error.to_string(),
            Ok(pod) => {
                cri.remove_pod(&pod).unwrap();
                panic!("{name}: let through");
            }
        };
        assert!(error.contains(expected), "{name}: {error}");
    }
    // With no grant nothing is asked.
    let pod = cri.run_pod(&unique("plain"), "gpufence", &[], true).unwrap();
    let plain = cri.run_container(&pod, "trainer", &[("NVIDIA_VISIBLE_DEVICES", "all")], true).unwrap();
    let seen = Seen::from_text(&cri.exec(&plain, &PROBE).unwrap()).unwrap();
    assert_eq!((seen.nodes(), seen.limits()), (vec![], vec![]));
    cri.remove_pod(&pod).unwrap();
    assert!(!host.container_folders().join("k8s.io").exists());
}

#[test]
fn containerd_1_6() {
    pods(Engine::Containerd16);
}

#[test]
fn containerd_1_7() {
    pods(Engine::Containerd17);
}

#[test]
fn containerd_2() {
    pods(Engine::Containerd2);
}

/// `gpufence-runtime` holds the same: outside a Pod, in a Pod whose UID the engine doesn't tell, and in the right one.
#[test]
fn the_wrapper() {
    let host = Host::start(&Plan { policy: POLICY, ..Plan::default() }).unwrap();
    let key = PrivateKey::generate().unwrap();
    host.accept_keys(&[key.public()]).unwrap();
    let good = grant(&host, "the-pod", "here", &time(0));
    let signature = key.sign(&good);
    let create = |annotations: serde_json::Value| {
        let bundle = host.folder().join(unique("bundle"));
        std::fs::create_dir_all(&bundle).unwrap();
        assert!(std::process::Command::new("runc").arg("spec").current_dir(&bundle).status().unwrap().success());
        let file = bundle.join("config.json");
        let mut spec: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        spec["root"]["path"] = json!(host.rootfs());
        spec["process"]["terminal"] = json!(false);
        spec["process"]["args"] = json!(["/bin/true"]);
        spec["process"]["rlimits"] = json!([]);
        spec["annotations"] = annotations;
        spec["annotations"][GRANT] = json!(good);
        std::fs::write(&file, spec.to_string()).unwrap();
        std::process::Command::new(programs::built().unwrap().join("gpufence-runtime"))
            .arg("--policy")
            .arg(host.policy())
            .arg("--root")
            .arg(host.folder().join("runc"))
            .args(["run", "--bundle"])
            .arg(&bundle)
            .arg(unique("c"))
            .output()
            .unwrap()
    };
    let kind = "io.kubernetes.cri.container-type";
    let uid = "io.kubernetes.cri.sandbox-uid";
    for (annotations, expected) in [
        (json!({}), "isn't signed"),
        (json!({(SIGNATURE): signature}), "the grant is for Pod the-pod, but this is no Pod"),
        (json!({(SIGNATURE): signature, (kind): "container"}), "containerd does so from 1.6.11"),
        (json!({(SIGNATURE): signature, (kind): "container", (uid): "other"}), "but this is other"),
    ] {
        let output = create(annotations.clone());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(expected), "{annotations}: {error}");
    }
    let output = create(json!({(SIGNATURE): signature, (kind): "container", (uid): "the-pod"}));
    assert!(output.status.success(), "{output:?}");
}
