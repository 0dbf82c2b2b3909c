//! The extender against a stand-in of the API server: what it writes, what it survives, and that nothing is granted twice.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::Duration,
};

use gpufence_extender::{leader::Election, policy::Choosing};
use gpufence_grant::signing::PrivateKey;
use gpufence_tests::{
    api_server::{ApiServer, Fault},
    cluster::{NAMESPACE, Running, held, node, pod, pod_of, uuid},
    cri::{Cri, RuntimeEntry},
    host::{GPUFENCE, Host, Plan, unique},
    programs::Engine,
    seen::{PROBE, Seen},
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn key() -> PrivateKey {
    PrivateKey::generate().unwrap()
}

/// What is counted of each GPU, as `/inspect` tells.
async fn counted(running: &Running) -> BTreeMap<String, u64> {
    let cluster: Value = serde_json::from_str(&running.call("/inspect", "").await.unwrap().1).unwrap();
    let devices = cluster["nodes"].as_array().unwrap().iter().flat_map(|node| node["devices"].as_array().unwrap());
    devices
        .map(|device| (device["uuid"].as_str().unwrap().to_owned(), device["grantedMiB"].as_u64().unwrap()))
        .filter(|(_, granted)| *granted > 0)
        .collect()
}

/// Waits until what is counted is what the Pods' annotations say.
async fn agree(api: &ApiServer, running: &Running, key: &PrivateKey) {
    let expected = held(api, key).unwrap();
    let mut last = BTreeMap::new();
    for _ in 0..1500 {
        last = counted(running).await;
        if last == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("counted {last:?}, held {expected:?}");
}

#[tokio::test]
async fn filter_prioritize_bind_inspect() {
    let (api, key) = (ApiServer::start().await.unwrap(), key());
    for (number, memories) in [(1, &[8192, 8192][..]), (2, &[16384])] {
        api.put("nodes", node(number, memories));
    }
    let mut plain = node(3, &[]);
    plain["metadata"]["annotations"] = Value::Null;
    api.put("nodes", plain);
    let running = Running::start(&api, &key).await.unwrap();

    let first = pod_of("first", 4096);
    api.put("pods", first.clone());
    assert_eq!(running.bind(&first, "node-1").await.unwrap(), "");
    let bound = api.get("pods", NAMESPACE, "first").unwrap();
    assert_eq!(bound["spec"]["nodeName"], "node-1");
    let grant: Value =
        serde_json::from_str(bound["metadata"]["annotations"]["gpufence.dev/grant"].as_str().unwrap()).unwrap();
    assert_eq!(grant["containers"], json!({"trainer": [{"gpu": uuid(1, 0), "memoryMiB": 4096}]}));
    assert_eq!(held(&api, &key).unwrap(), [(uuid(1, 0), 4096)].into());
    assert_eq!(api.bindings(), 1, "one call");

    let large = pod_of("large", 8192 + 1);
    let filtered = running.filter(&large, &["node-1", "node-2", "node-3", "node-9", "node-2"]).await.unwrap();
    assert_eq!(filtered["NodeNames"], json!(["node-2"]));
    assert_eq!(filtered["FailedNodes"], json!({}));
    assert_eq!(
        filtered["FailedAndUnresolvableNodes"],
        json!({
            "node-1": "node-1: wants 8193 MiB on one GPU; GPU 0 has only 8192 in all, GPU 1 has only 8192 in all",
            "node-3": "node-3: it has no inventory; does gpufence-node run there?",
            "node-9": "node-9: the extender knows no such node yet",
        })
    );
    let second = pod_of("second", 8192);
    api.put("pods", second.clone());
    assert_eq!(running.bind(&second, "node-1").await.unwrap(), "");
    let third = pod_of("third", 8192);
    let filtered = running.filter(&third, &["node-1"]).await.unwrap();
    assert_eq!(
        filtered["FailedNodes"]["node-1"],
        "node-1: wants 8192 MiB on one GPU; GPU 0 has 4096 free, GPU 1 has 0 free"
    );
    // With whole Node objects the answer has them too.
    let arguments =
        json!({"Pod": third, "Nodes": {"items": [node(1, &[1]), node(2, &[1]), node(2, &[1])]}, "NodeNames": null});
    let filtered = running.ask("/gpushare-scheduler/filter", &arguments).await.unwrap();
    assert_eq!(filtered["Nodes"]["items"].as_array().unwrap().len(), 1);
    assert_eq!(
        (&filtered["Nodes"]["items"][0]["metadata"]["name"], &filtered["NodeNames"]),
        (&json!("node-2"), &Value::Null)
    );
    let small = pod_of("small", 4096);
    let arguments = json!({"Pod": small, "NodeNames": ["node-1", "node-2", "node-9"]});
    let scores = running.ask("/gpufence/prioritize", &arguments).await.unwrap();
    assert_eq!(
        scores,
        json!([{"Host": "node-1", "Score": 10}, {"Host": "node-2", "Score": 2}, {"Host": "node-9", "Score": 0}])
    );
    // A Pod that asks for nothing of ours goes anywhere.
    let filtered = running.filter(&pod("cpu", "u", &json!({"cpu": "1"})), &["node-3"]).await.unwrap();
    assert_eq!(filtered["NodeNames"], json!(["node-3"]));

    let inspected: Value = serde_json::from_str(&running.call("/inspect/node-1", "").await.unwrap().1).unwrap();
    assert_eq!(inspected["nodes"][0]["address"], "192.0.2.1");
    assert_eq!(inspected["nodes"][0]["devices"][1]["pods"][0]["name"], "second");
    assert_eq!(running.call("/inspect/node-7", "").await.unwrap().0, 404);
    let metrics = running.call("/metrics", "").await.unwrap().1;
    for line in [
        "gpufence_extender_calls_total{verb=\"bind\",result=\"done\"} 2",
        "gpufence_extender_pods_granted 2",
        "gpufence_extender_nodes_unusable 1",
    ] {
        assert!(metrics.contains(line), "no {line} in {metrics}");
    }
    assert_eq!(
        (running.call("/readyz", "").await.unwrap().0, running.call("/healthz", "").await.unwrap().0),
        (200, 200)
    );
}

#[tokio::test]
async fn preemption() {
    let (api, key) = (ApiServer::start().await.unwrap(), key());
    api.put("nodes", node(1, &[8192]));
    let running = Running::start(&api, &key).await.unwrap();
    for (name, priority) in [("low", 1), ("high", 7)] {
        let mut pod = pod_of(name, 4096);
        pod["spec"]["priority"] = json!(priority);
        api.put("pods", pod.clone());
        assert_eq!(running.bind(&pod, "node-1").await.unwrap(), "");
    }
    agree(&api, &running, &key).await;
    let mut wants = pod_of("wants", 4096);
    wants["spec"]["priority"] = json!(5);
    let ask = |wants: &Value| json!({"Pod": wants, "NodeNameToMetaVictims": {"node-1": {"Pods": [], "NumPDBViolations": 0}, "node-9": {"Pods": []}}});
    let answer = running.ask("/gpufence/preempt", &ask(&wants)).await.unwrap();
    assert_eq!(
        answer["NodeNameToMetaVictims"],
        json!({"node-1": {"Pods": [{"UID": "uid-of-low"}], "NumPDBViolations": 0}})
    );
    wants["spec"]["containers"][0]["resources"]["limits"] = json!({"gpufence.dev/gpu-memory": "8192"});
    let answer = running.ask("/gpufence/preempt", &ask(&wants)).await.unwrap();
    assert_eq!(answer["NodeNameToMetaVictims"], json!({}), "one of a higher priority is in the way");
}

#[tokio::test]
async fn bad_input() {
    let (api, key) = (ApiServer::start().await.unwrap(), key());
    api.put("nodes", node(1, &[8192]));
    let running = Running::start(&api, &key).await.unwrap();
    for body in ["", "{", "[]", "null", "{\"Pod\":1}", "{\"NodeNames\":[]}"] {
        for verb in ["filter", "bind"] {
            let (status, text) = running.call(&format!("/gpufence/{verb}"), &format!("{body} ")).await.unwrap();
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert!(
                status == 200 && answer["Error"].as_str().unwrap().contains("can't be read"),
                "{verb} {body}: {text}"
            );
        }
        for verb in ["prioritize", "preempt"] {
            assert_eq!(
                running.call(&format!("/gpufence/{verb}"), &format!("{body} ")).await.unwrap().0,
                400,
                "{verb} {body}"
            );
        }
    }
    let error = |answer: Value| answer["Error"].as_str().unwrap().to_owned();
    let filtered = running.ask("/gpufence/filter", &json!({"Pod": pod_of("a", 1)})).await.unwrap();
    assert!(error(filtered).contains("neither Nodes nor NodeNames"));
    for (quantity, expected) in [("-5", "is negative"), ("1.5", "is not a whole number"), ("1e30", "is not a quantity")]
    {
        let pod = pod("a", "u", &json!({"gpufence.dev/gpu-memory": quantity}));
        assert!(error(running.filter(&pod, &["node-1"]).await.unwrap()).contains(expected), "{quantity}");
        api.put("pods", pod.clone());
        assert!(running.bind(&pod, "node-1").await.unwrap().contains(expected), "{quantity}");
    }
    let many: Vec<String> = (0..100_000).map(|number| format!("no-node-{number}")).collect();
    let answer = running.ask("/gpufence/filter", &json!({"Pod": pod_of("a", 1), "NodeNames": many})).await.unwrap();
    assert_eq!(answer["NodeNames"], json!([]));
    // Nobody of that name, or another; a node that isn't there.
    let gone = pod_of("gone", 1);
    assert!(running.bind(&gone, "node-1").await.unwrap().contains("is gone"));
    api.put("pods", pod("gone", "another", &json!({"gpufence.dev/gpu-memory": "1"})));
    assert!(running.bind(&gone, "node-1").await.unwrap().contains("is gone"));
    let there = pod_of("there", 1);
    api.put("pods", there.clone());
    assert!(running.bind(&there, "node-9").await.unwrap().contains("no such node"));
    assert_eq!(counted(&running).await, BTreeMap::new());
}

/// Whatever becomes of a bind, it is counted as the Pods have it in the end, and no share is given twice meanwhile.
#[tokio::test]
async fn binds_that_go_wrong() {
    let (api, key) = (ApiServer::start().await.unwrap(), key());
    api.put("nodes", node(1, &[8192]));
    let running = Running::start(&api, &key).await.unwrap();
    for (name, faults, bound) in [
        ("lost-once", &[Fault::Lost][..], true),
        ("answer-lost", &[Fault::AnswerLost], true),
        ("conflict", &[Fault::Conflict, Fault::Conflict], true),
        ("never", &[Fault::Lost; 100], false),
        ("in-conflict", &[Fault::Conflict; 100], false),
    ] {
        let pod = pod_of(name, 1024);
        api.put("pods", pod.clone());
        api.fail(faults);
        let error = running.bind(&pod, "node-1").await.unwrap();
        assert_eq!(error.is_empty(), bound, "{name}: {error}");
        api.fail(&[]);
        agree(&api, &running, &key).await;
    }
    // The Pod goes between filter and bind; is being deleted; has a node already.
    let mut pods = Vec::new();
    for name in ["goes", "ends", "elsewhere"] {
        pods.push(pod_of(name, 1024));
        api.put("pods", pods[pods.len() - 1].clone());
    }
    let sees_all = || running.extender.ledger.counts().1 >= 5;
    assert!(running.until(sees_all).await, "{:?}", running.extender.ledger.counts());
    api.delete("pods", NAMESPACE, "goes");
    let mut ends = pods[1].clone();
    ends["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    api.put("pods", ends);
    let mut elsewhere = pods[2].clone();
    elsewhere["spec"]["nodeName"] = json!("node-7");
    elsewhere["status"]["phase"] = json!("Failed");
    api.put("pods", elsewhere);
    for (pod, expected) in pods.iter().zip(["is gone", "is being deleted", "on node node-7 already"]) {
        let error = running.bind(pod, "node-1").await.unwrap();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    agree(&api, &running, &key).await;
    // Those that end, one way or another, hold nothing.
    for (name, phase) in [("lost-once", "Succeeded"), ("answer-lost", "Failed")] {
        let mut pod = api.get("pods", NAMESPACE, name).unwrap();
        pod["status"]["phase"] = json!(phase);
        api.put("pods", pod);
    }
    api.delete("pods", NAMESPACE, "conflict");
    agree(&api, &running, &key).await;
    assert_eq!(counted(&running).await, BTreeMap::new());
}

/// What a Pod's author writes himself takes nothing from others.
#[tokio::test]
async fn forged_grants_count_nothing() {
    let (api, key, other) = (ApiServer::start().await.unwrap(), key(), key());
    api.put("nodes", node(1, &[8192]));
    for (name, signer) in [("unsigned", None), ("strange", Some(&other))] {
        let mut pod = pod_of(name, 8192);
        let grant = json!({"version": 1, "podUID": pod["metadata"]["uid"], "node": "node-1",
            "containers": {"trainer": [{"gpu": uuid(1, 0), "memoryMiB": 8192}]}})
        .to_string();
        pod["metadata"]["annotations"]["gpufence.dev/grant"] = json!(grant);
        if let Some(signer) = signer {
            pod["metadata"]["annotations"]["gpufence.dev/grant-signature"] = json!(signer.sign(&grant));
        }
        pod["spec"]["nodeName"] = json!("node-1");
        api.put("pods", pod);
    }
    let running = Running::start(&api, &key).await.unwrap();
    assert_eq!(counted(&running).await, BTreeMap::new());
    let honest = pod_of("honest", 8192);
    api.put("pods", honest.clone());
    assert_eq!(running.bind(&honest, "node-1").await.unwrap(), "");
}

/// The API server away for a while, watches that can't be taken up, a node that goes and comes back.
#[tokio::test]
async fn what_is_missed_is_read_again() {
    let (api, key) = (ApiServer::start().await.unwrap(), key());
    api.put("nodes", node(1, &[8192]));
    let running = Running::start(&api, &key).await.unwrap();
    let (stays, goes) = (pod_of("stays", 1024), pod_of("goes", 2048));
    for pod in [&stays, &goes] {
        api.put("pods", pod.clone());
        assert_eq!(running.bind(pod, "node-1").await.unwrap(), "");
    }
    api.set_down(true);
    let waits = pod_of("waits", 4096);
    api.put("pods", waits.clone());
    assert!(!running.bind(&waits, "node-1").await.unwrap().is_empty());
    api.delete("pods", NAMESPACE, "goes");
    api.expire_watches();
    api.set_down(false);
    agree(&api, &running, &key).await;
    assert_eq!(running.bind(&waits, "node-1").await.unwrap(), "");
    api.expire_watches();
    api.delete("pods", NAMESPACE, "stays");
    agree(&api, &running, &key).await;

    api.delete("nodes", "", "node-1");
    assert!(
        running.until(|| running.extender.ledger.node("node-1").is_none_or(|node| node.lock().devices.is_err())).await
    );
    let late = pod_of("late", 1);
    api.put("pods", late.clone());
    assert!(running.bind(&late, "node-1").await.unwrap().contains("no such node"));
    api.put("nodes", node(1, &[8192]));
    agree(&api, &running, &key).await;
    let filtered = running.filter(&pod_of("too-much", 4097), &["node-1"]).await.unwrap();
    assert!(filtered["FailedNodes"]["node-1"].as_str().unwrap().contains("GPU 0 has 4096 free"), "{filtered}");
}

/// Two extenders: one binds; when it is gone the other does, and knows all that was granted.
#[tokio::test]
async fn one_of_two_leads() {
    let (api, key) = (ApiServer::start().await.unwrap(), key());
    api.put("nodes", node(1, &[8192]));
    let election = |identity: &str| Election {
        namespace: "gpufence".into(),
        name: "gpufence-extender".into(),
        identity: identity.into(),
        own_pod: None,
        duration: Duration::from_secs(10),
    };
    let start = |identity: &'static str| {
        let (api, key, election) = (api.clone(), &key, election(identity));
        async move {
            Running::start_with(&api, key, Choosing::default(), Some(election), Duration::from_millis(200))
                .await
                .unwrap()
        }
    };
    let first = start("first").await;
    assert!(first.until(|| first.extender.leadership.remaining().is_some() && first.extender.synced.since(1)).await);
    let second = start("second").await;
    assert!(second.until(|| second.extender.leadership.holder() == "first").await);
    let [a, b] = ["a", "b"].map(|name| pod_of(name, 8192));
    for pod in [&a, &b] {
        api.put("pods", pod.clone());
    }
    assert!(second.bind(&a, "node-1").await.unwrap().contains("doesn't lead, first does"));
    assert_eq!(first.bind(&a, "node-1").await.unwrap(), "");
    drop(first);
    assert!(second.until(|| second.extender.leadership.remaining().is_some() && second.extender.synced.since(1)).await);
    assert!(second.bind(&b, "node-1").await.unwrap().contains("GPU 0 has 0 free"));
    assert_eq!(second.bind(&a, "node-1").await.unwrap(), "the Pod is on node node-1 already");
}

/// Killed while a bind's answer is awaited: whoever starts next counts what was granted.
#[tokio::test]
async fn killed_in_a_bind() {
    for fault in [Fault::Hangs, Fault::Lost] {
        let (api, key) = (ApiServer::start().await.unwrap(), key());
        api.put("nodes", node(1, &[8192]));
        let [a, b] = ["a", "b"].map(|name| pod_of(name, 8192));
        for pod in [&a, &b] {
            api.put("pods", pod.clone());
        }
        api.fail(&[fault; 100]);
        // On a runtime of its own, with which all that it does ends.
        let process = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (server, signer) = (api.clone(), PrivateKey::from_pem(&key.to_pem().unwrap()).unwrap());
        let (first, second) = (a.clone(), b.clone());
        let told = process.spawn(async move {
            let running = Running::start(&server, &signer).await.unwrap();
            let _ = tokio::time::timeout(Duration::from_millis(300), running.bind(&first, "node-1")).await;
            running.bind(&second, "node-1").await.unwrap()
        });
        // Still counted by the one that doesn't know.
        let error = told.await.unwrap();
        assert!(error.contains("GPU 0 has 0 free"), "{fault:?}: {error}");
        process.shutdown_timeout(Duration::ZERO);
        api.fail(&[]);
        let next = Running::start(&api, &key).await.unwrap();
        agree(&api, &next, &key).await;
        let error = next.bind(&b, "node-1").await.unwrap();
        assert_eq!(error.is_empty(), fault == Fault::Lost, "{fault:?}: {error}");
        assert!(held(&api, &key).unwrap().values().all(|held| *held <= 8192));
    }
}

/// From a Pod's resources to a container that has its share: the extender's own annotations through CRI of a real containerd,
/// on a node that believes nobody else.
#[test]
fn down_to_the_container() {
    let entry = RuntimeEntry {
        name: "gpufence",
        runtime_type: GPUFENCE.into(),
        pod_annotations: &["gpufence.dev/*"],
        ..RuntimeEntry::default()
    };
    let policy = "node = \"node-1\"\nrequire_signature = true";
    let plan = Plan { engine: Engine::Containerd17, cri: true, cri_runtimes: vec![entry], policy, ..Plan::default() };
    let host = Host::start(&plan).unwrap();
    let key = key();
    host.accept_keys(&[key.public()]).unwrap();
    let gpus = [0, 1]
        .map(|index| json!({"uuid": host.description.uuid(index), "index": index, "model": "m", "memoryMiB": 16384}));
    let inventory = json!({"version": 1, "driverVersion": "550.163.01", "gpus": gpus}).to_string();
    let mut machine = node(1, &[]);
    machine["metadata"]["annotations"]["gpufence.dev/inventory"] = json!(inventory);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let bound: Vec<Value> = runtime.block_on(async {
        let api = ApiServer::start().await.unwrap();
        api.put("nodes", machine);
        let running = Running::start(&api, &key).await.unwrap();
        let mut bound = Vec::new();
        for (name, limits) in [
            ("full", json!({"aliyun.com/gpu-mem": "16"})),
            ("mine", json!({"gpufence.dev/gpu-memory": "4096", "gpufence.dev/gpu-compute": "30"})),
        ] {
            let pod = pod(name, &format!("5eed0000-0000-4000-8000-{name:0>12}"), &limits);
            api.put("pods", pod.clone());
            assert_eq!(running.bind(&pod, "node-1").await.unwrap(), "");
            bound.push(api.get("pods", NAMESPACE, name).unwrap());
        }
        bound
    });

    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    let annotations: Vec<(&str, &str)> = bound[1]["metadata"]["annotations"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str().unwrap()))
        .collect();
    let uid = |pod: &Value| pod["metadata"]["uid"].as_str().unwrap().to_owned();
    let sandbox = cri.run_pod_as(&uid(&bound[1]), &unique("mine"), "gpufence", &annotations, false).unwrap();
    let trainer = cri.run_container(&sandbox, "trainer", &[("NVIDIA_VISIBLE_DEVICES", "all")], false).unwrap();
    let seen = Seen::from_text(&cri.exec(&trainer, &PROBE).unwrap()).unwrap();
    assert_eq!(seen.nodes(), ["nvidia-uvm ENXIO", "nvidia1 ENXIO", "nvidiactl ENXIO"]);
    assert_eq!(seen.limits(), [format!("{} 4096 30", host.description.uuid(1))]);
    cri.remove_pod(&sandbox).unwrap();
    // The same annotations on the other Pod.
    let error = cri.run_pod_as(&uid(&bound[0]), &unique("full"), "gpufence", &annotations, false).unwrap_err();
    assert!(error.to_string().contains("the grant is for Pod"), "{error}");
}

/// The program itself: HTTPS for who has a certificate and for nobody else, the Lease, and the end by a signal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_program() {
    let (api, key) = (ApiServer::start().await.unwrap(), key());
    api.put("nodes", node(1, &[8192]));
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    std::fs::write(path("signing.key"), key.to_pem().unwrap()).unwrap();
    std::fs::write(path("kubeconfig"), api.kubeconfig()).unwrap();
    let openssl = |line: &str| {
        let words = line.split_whitespace().map(|word| word.strip_prefix('@').map_or_else(|| word.to_owned(), path));
        let output = Command::new("openssl").args(words).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
    };
    for (name, subject) in [("ca", "/CN=authority"), ("other", "/CN=another")] {
        openssl(&format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj {subject} -keyout @{name}.key -out @{name}.crt"
        ));
    }
    std::fs::write(path("names"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    for (name, authority) in [("server", "ca"), ("scheduler", "ca"), ("stranger", "other")] {
        openssl(&format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} -keyout @{name}.key -out @{name}.csr"
        ));
        openssl(&format!(
            "x509 -req -in @{name}.csr -CA @{authority}.crt -CAkey @{authority}.key -CAcreateserial -days 2 -extfile @names -out @{name}.crt"
        ));
    }
    let mut process = Command::new(gpufence_tests::programs::built().unwrap().join("gpufence-extender"))
        .args(["--listen", "127.0.0.1:0", "--signing-key", &path("signing.key"), "--namespace", "gpufence"])
        .args(["--tls-certificate", &path("server.crt"), "--tls-key", &path("server.key")])
        .args(["--tls-client-authority", &path("ca.crt")])
        .env("KUBECONFIG", path("kubeconfig"))
        .env("NO_COLOR", "1")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let address = lines.find_map(|line| Some(line.unwrap().split_once("serving at ")?.1.to_owned())).unwrap();
    std::thread::spawn(move || lines.for_each(drop));
    let curl = |who: Option<&str>, verb: &str, body: &Value| {
        let mut call = Command::new("curl");
        call.args([
            "--silent",
            "--show-error",
            "--max-time",
            "15",
            "--cacert",
            &path("ca.crt"),
            "--data",
            &body.to_string(),
        ]);
        if let Some(who) = who {
            call.args(["--cert", &path(&format!("{who}.crt")), "--key", &path(&format!("{who}.key"))]);
        }
        let output = call.arg(format!("{address}/gpufence/{verb}")).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    };
    let pod = pod_of("a", 1024);
    api.put("pods", pod.clone());
    let arguments = json!({"PodName": "a", "PodNamespace": NAMESPACE, "PodUID": "uid-of-a", "Node": "node-1"});
    // It takes the Lease, reads the cluster, and then binds.
    let mut answer = None;
    for _ in 0..100 {
        answer = curl(Some("scheduler"), "bind", &arguments);
        if answer.as_deref() == Some("{\"Error\":\"\"}") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(answer.as_deref(), Some("{\"Error\":\"\"}"));
    assert_eq!(held(&api, &key).unwrap(), [(uuid(1, 0), 1024)].into());
    for who in [None, Some("stranger")] {
        assert_eq!(curl(who, "bind", &arguments), None, "{who:?}");
    }
    let lease = || {
        api.get("leases", "gpufence", "gpufence-extender").unwrap()["spec"]["holderIdentity"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert!(lease().starts_with("gpufence-extender_"));
    assert!(Command::new("kill").arg(process.id().to_string()).status().unwrap().success());
    assert!(process.wait().unwrap().success());
    assert_eq!(lease(), "", "given up for the next");
}

/// One step of a random history.
#[derive(Debug, Clone)]
enum Step {
    /// A new Pod that wants so much, bound to a node.
    Bind(usize, u64, Vec<Fault>),
    /// A Pod ends or is deleted.
    End(usize, bool),
    /// The extender is killed, and another starts.
    Crash,
    /// All watches expire.
    Expire,
}

fn any_step() -> impl Strategy<Value = Step> {
    let fault = prop_oneof![
        3 => Just(Fault::None), 1 => Just(Fault::Lost), 1 => Just(Fault::AnswerLost), 1 => Just(Fault::Conflict)
    ];
    let faults = proptest::collection::vec(fault, 0..5);
    prop_oneof![
        6 => (0..2_usize, 200..1500_u64, faults).prop_map(|(node, memory, faults)| Step::Bind(node, memory, faults)),
        3 => (0..100_usize, any::<bool>()).prop_map(|(pod, deleted)| Step::End(pod, deleted)),
        1 => Just(Step::Crash),
        1 => Just(Step::Expire),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// After each step of a random history, what the Pods hold is within what the GPUs have; and in the end it is counted
    /// exactly.
    #[test]
    fn nothing_is_granted_twice(
        memories in proptest::collection::vec(proptest::collection::vec(500..2000_u64, 1..3), 2),
        steps in proptest::collection::vec(any_step(), 1..25),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (api, key) = (ApiServer::start().await.unwrap(), key());
            let mut capacity = BTreeMap::new();
            for (number, memories) in memories.iter().enumerate() {
                api.put("nodes", node(number, memories));
                capacity.extend(memories.iter().enumerate().map(|(index, memory)| (uuid(number, index), *memory)));
            }
            let mut running = Running::start(&api, &key).await.unwrap();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Bind(node, memory, faults) => {
                        let pod = pod_of(&format!("pod-{number}"), memory);
                        api.put("pods", pod.clone());
                        api.fail(&faults);
                        let _ = running.bind(&pod, &format!("node-{node}")).await.unwrap();
                        api.fail(&[]);
                    }
                    Step::End(pod, deleted) => {
                        let pods = api.list("pods");
                        if !pods.is_empty() {
                            let mut pod = pods[pod % pods.len()].clone();
                            if deleted {
                                api.delete("pods", NAMESPACE, pod["metadata"]["name"].as_str().unwrap());
                            } else {
                                pod["status"]["phase"] = json!("Succeeded");
                                api.put("pods", pod);
                            }
                        }
                    }
                    Step::Crash => running = Running::start(&api, &key).await.unwrap(),
                    Step::Expire => api.expire_watches(),
                }
                for (gpu, held) in held(&api, &key).unwrap() {
                    assert!(held <= capacity[&gpu], "{gpu}: {held} of {}", capacity[&gpu]);
                }
            }
            agree(&api, &running, &key).await;
        });
    }
}
