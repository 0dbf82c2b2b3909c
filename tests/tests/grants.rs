//! Grants that can't be read or met: each fails the create with an error that names where it came from, what is wrong
//! and what to do, and that reaches whoever asked.

use gpufence_tests::{
    cri::{Cri, RuntimeEntry},
    host::{GPUFENCE, Host, Plan, unique},
    programs::Engine,
};

const GRANT: &str = "gpufence.dev/grant";
const GPU: &str = "gpufence.dev/gpu";
/// A GPU that every host of these tests has.
const UUID: &str = "GPU-5eed0000-0000-4000-8000-000000000000";

/// A bad annotation, the fault and the remedy that its error names.
struct Bad {
    annotations: Vec<(&'static str, String)>,
    names: &'static str,
    fault: &'static str,
    remedy: &'static str,
}

/// One in JSON with these containers.
fn json(containers: &str) -> String {
    format!(r#"{{"version":1,"containers":{containers}}}"#)
}

fn shares(share: &str) -> String {
    json(&format!(r#"{{"trainer":[{share}]}}"#))
}

fn bad_grants() -> Vec<Bad> {
    let short =
        |text: &str, fault, remedy| Bad { annotations: vec![(GPU, text.to_owned())], names: GPU, fault, remedy };
    let long = |text: String, fault, remedy| Bad { annotations: vec![(GRANT, text)], names: GRANT, fault, remedy };
    let share = |rest: &str| shares(&format!(r#"{{"gpu":"{UUID}",{rest}}}"#));
    let good = share(r#""memoryMiB":1024"#);
    let deep = format!("{}{}", "[".repeat(3000), "]".repeat(3000));
    vec![
        short("", "the text is empty", "remove the annotation"),
        short("0", "no \"=\" between GPU and memory", "write GPU=MEMORY"),
        short("0=", "is not an amount of memory", "such as 8GiB"),
        short("0=8GB", "is not an amount of memory", "such as 8GiB"),
        short("0=-1GiB", "is not an amount of memory", "such as 8GiB"),
        short("0=0", "has no memory", "such as 8GiB"),
        short("0=99999999999999GiB", "more than any GPU", "such as 8GiB"),
        short("0=1GiB@0%", "outside 1 to 100", "a percentage from 1 to 100"),
        short("0=1GiB@101%", "outside 1 to 100", "a percentage from 1 to 100"),
        short("0=1GiB@half", "is not a percentage", "a percentage from 1 to 100"),
        short("0=1GiB,0=2GiB", "twice", "name each GPU once"),
        short("0=1GiB,,1=1GiB", "is not a share", "write GPU=MEMORY"),
        short("first=1GiB", "names no GPU", "gpufence inventory"),
        short("7=1GiB", "GPU 7 is not on this node", "gpufence inventory"),
        short("GPU-00000000-0000-0000-0000-000000000000=1GiB", "is not on this node", "gpufence inventory"),
        long(String::new(), "the text is empty", "remove the annotation"),
        long("{".into(), "not a grant in JSON", "write {\"version\":1"),
        long("[]".into(), "not a grant in JSON", "write {\"version\":1"),
        long(deep, "not a grant in JSON", "write {\"version\":1"),
        long(format!("{good}{}", " ".repeat(65 << 10)), "more than the 65536 allowed", "shorten it"),
        long(good.replace("\"version\":1", "\"version\":2"), "version 2 is not known", "of the same release"),
        long(
            good.replace("\"version\":1", "\"version\":1,\"extra\":1"),
            "unknown field `extra`",
            "write {\"version\":1",
        ),
        long(json("{}"), "names no container", "name a share"),
        long(json(r#"{"trainer":[]}"#), "with no share", "leave the container out"),
        long(json(r#"{"a/b":[]}"#), "is not a container name", "write {\"version\":1"),
        long(
            format!(r#"{{"version":1,"containers":{{"a":[{{"gpu":"{UUID}","memoryMiB":1}}],"a":[]}}}}"#),
            "named twice",
            "write {\"version\":1",
        ),
        long(share(r#""memoryMiB":0"#), "has no memory", "such as 8GiB"),
        long(share(r#""memoryMiB":"8GiB""#), "invalid type", "write {\"version\":1"),
        long(share(r#""memoryMiB":1,"computePercent":300"#), "outside 1 to 100", "a percentage from 1 to 100"),
        long(shares(r#"{"gpu":"0","memoryMiB":1}"#), "is named by index", "take a UUID"),
        long(share(r#""memoryMiB":1,"mode":"exclusive""#), "unknown field `mode`", "write {\"version\":1"),
        Bad {
            annotations: vec![(GRANT, good.clone()), (GPU, "0=1GiB".into())],
            names: GRANT,
            fault: "are both set",
            remedy: "keep only one",
        },
        Bad {
            annotations: vec![("gpufence.dev/gpus", "0=1GiB".into())],
            names: "gpufence.dev/gpus",
            fault: "is not known",
            remedy: "the annotations are",
        },
        Bad {
            annotations: vec![("gpufence.dev/grant-signature", "ed25519:k:AAAA".into())],
            names: "gpufence.dev/grant-signature",
            fault: "is set without",
            remedy: "set both or neither",
        },
        long(
            good.replace("\"version\":1", "\"version\":1,\"node\":\"elsewhere\""),
            "the grant is for node elsewhere",
            "grant anew",
        ),
    ]
}

const POLICY: &str = "node = \"here\"";

fn check(bad: &Bad, error: &str) {
    let what = format!("{:.200?}: {error}", bad.annotations);
    for part in [bad.names, bad.fault, bad.remedy] {
        assert!(error.contains(part), "no \"{part}\" in the error of {what}");
    }
}

#[test]
fn ctr_shows_why() {
    let host = Host::start(&Plan { policy: POLICY, ..Plan::default() }).unwrap();
    assert!(bad_grants().len() >= 30);
    for bad in bad_grants() {
        let flags: Vec<String> =
            bad.annotations.iter().flat_map(|(key, value)| ["--annotation".into(), format!("{key}={value}")]).collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let output = host.run(GPUFENCE, &unique("bad"), &flags, &["/bin/true"]).output().unwrap();
        assert!(!output.status.success(), "{:.200?} was let through", bad.annotations);
        check(&bad, &String::from_utf8_lossy(&output.stderr));
    }
    assert!(!host.container_folders().join("default").exists());
}

fn cri_shows_why(engine: Engine) {
    let entry = RuntimeEntry {
        name: "gpufence",
        runtime_type: GPUFENCE.into(),
        pod_annotations: &["gpufence.dev/*"],
        ..RuntimeEntry::default()
    };
    let host =
        Host::start(&Plan { engine, cri: true, cri_runtimes: vec![entry], policy: POLICY, ..Plan::default() }).unwrap();
    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    for bad in bad_grants() {
        let annotations: Vec<(&str, &str)> =
            bad.annotations.iter().map(|(key, value)| (*key, value.as_str())).collect();
        // What the grant itself says fails the sandbox; what this node lacks, the container.
        let pod = cri.run_pod(&unique("bad"), "gpufence", &annotations, false);
        let error = match pod {
            Err(error) => error.to_string(),
            Ok(pod) => {
                let container = cri.run_container(&pod, "trainer", &[], false);
                cri.remove_pod(&pod).unwrap();
                container.expect_err(&format!("{:.200?} was let through", bad.annotations)).to_string()
            }
        };
        check(&bad, &error);
    }
}

#[test]
fn cri_of_containerd_1_6_shows_why() {
    cri_shows_why(Engine::Containerd16);
}

#[test]
fn cri_of_containerd_1_7_shows_why() {
    cri_shows_why(Engine::Containerd17);
}

#[test]
fn cri_of_containerd_2_shows_why() {
    cri_shows_why(Engine::Containerd2);
}

/// What a machine or a policy can't give.
#[test]
fn machines_and_policies_that_refuse() {
    let grant = ["--annotation", "gpufence.dev/gpu=0=8GiB"];
    let error = |host: &Host, flags: &[&str]| {
        let output = host.run(GPUFENCE, &unique("bad"), flags, &["/bin/true"]).output().unwrap();
        assert!(!output.status.success(), "{flags:?} was let through");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let host =
        Host::start(&Plan { machine: "gpus=2 no-uvm".into(), policy: "privileged = \"deny\"", ..Plan::default() })
            .unwrap();
    let said = error(&host, &grant);
    assert!(said.contains("annotation gpufence.dev/gpu: the kernel module nvidia-uvm is not loaded"), "{said}");
    assert!(said.contains("modprobe nvidia-uvm"), "{said}");
    let said = error(&host, &["--privileged"]);
    assert!(said.contains("the container is privileged, which this node's policy denies"), "{said}");

    let host = Host::start(&Plan { machine: "gpus=2 excluded=1 memory=4096".into(), ..Plan::default() }).unwrap();
    let said = error(&host, &["--annotation", &format!("gpufence.dev/gpu={}=1GiB", host.description.uuid(1))]);
    assert!(said.contains("is excluded by the driver"), "{said}");
    // Once NVML has been asked, how much there is is known.
    let inventory = std::process::Command::new(gpufence_tests::programs::built().unwrap().join("gpufence"))
        .args(["inventory", "--nvml"])
        .env("GPUFENCE_CONFIG", host.policy())
        .output()
        .unwrap();
    assert!(inventory.status.success(), "{inventory:?}");
    let said = error(&host, &grant);
    assert!(said.contains("has 8192 MiB, but the GPU has 4096 MiB; grant less"), "{said}");

    // No driver at all: an error that says so, while containers with no grant go on.
    let host = Host::start(&Plan::default()).unwrap();
    std::fs::remove_file(host.driver_root().join("proc/driver/nvidia/version")).unwrap();
    let said = error(&host, &grant);
    assert!(said.contains("no NVIDIA driver is loaded"), "{said}");
    assert!(host.output(GPUFENCE, &[], &["/bin/true"]).unwrap().status.success());

    // With no hook to check it, a container with a share isn't made; one with none is.
    let host = Host::start(&Plan { policy: "hook = \"/nowhere/gpufence-hook\"", ..Plan::default() }).unwrap();
    let said = error(&host, &grant);
    assert!(said.contains("/nowhere/gpufence-hook"), "{said}");
    assert!(host.output(GPUFENCE, &[], &["/bin/true"]).unwrap().status.success());

    // A policy that can't be read stops everything: fail closed.
    std::fs::write(host.policy(), "privilegd = \"deny\"").unwrap();
    let said = error(&host, &[]);
    assert!(said.contains("unknown field `privilegd`"), "{said}");
}
