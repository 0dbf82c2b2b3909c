//! The node agent beside real containers, with an NVML that says what it is told: the watchdog, metrics, and the driver's
//! memory caps.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command},
};

use gpufence_cli::engine::Cgroups;
use gpufence_grant::agent::{self, Cap, Request};
use gpufence_tests::{
    cri::{Cri, RuntimeEntry, pod_uid},
    docker::{Docker, Release},
    host::{GPUFENCE, Host, Plan, RUNC, unique, until},
    leaks::{settle, traces},
    limited::{self, PROGRAM},
    node::{Node, Told},
    programs::Engine,
};
use serde_json::Value;

const SHARE: [&str; 2] = ["--annotation", "gpufence.dev/gpu=0=1GiB"];
const REAL: &str = "/usr/lib/gpufence/compute/libcuda.so.550.163.01";
const SLEEP: [&str; 2] = ["/bin/sleep", "1000"];

fn host(cgroups: Cgroups, policy: &'static str) -> Host {
    let host = Host::start(&Plan { cgroups, policy, ..Plan::default() }).unwrap();
    limited::install(&host).unwrap();
    host
}

/// Starts a container and gives its first process's PID.
fn start(host: &Host, runtime: &str, id: &str, flags: &[&str], command: &[&str]) -> u32 {
    let output = host.run(runtime, id, &[&["--detach"], flags].concat(), command).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    task(host, id).unwrap().0
}

/// A container's PID and status.
fn task(host: &Host, id: &str) -> Option<(u32, String)> {
    let output = host.containerd.ctr(["tasks", "ls"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(id))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    Some((words[1].parse().unwrap(), words[2].to_owned()))
}

fn runs(host: &Host, id: &str) -> bool {
    task(host, id).is_some_and(|(_, status)| status == "RUNNING")
}

fn record(host: &Host, id: &str) -> Value {
    let file = host.container_folders().join("default").join(id).join("record.json");
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

/// A process of the machine itself, which ends when this is dropped.
struct OfTheMachine(Child);

impl OfTheMachine {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }
}

impl Drop for OfTheMachine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One that loads the real driver past the limiter, a static program that uses no library, one that is on a GPU of others, and one of a container that was given
/// nothing end within two periods; those within their limits live, and so does what is no container.
fn offenders_end(cgroups: Cgroups) {
    let policy = "[watchdog]\ngrace_seconds = 0\nforeign = \"end\"\ntolerance_mib = 100";
    let host = host(cgroups, policy);
    let node = Node::start(&host, "unsupported").unwrap();
    let words = format!("{PROGRAM} direct {REAL} 2G sleep 1000000");
    let (over, within, elsewhere) = (unique("over"), unique("within"), unique("elsewhere"));
    // A static program, in which no library of ours is: it makes the driver's system calls itself.
    let no_library = unique("static");
    // Engines' own ids have 64 digits; this is how a container without a grant is known for one.
    let ungranted = format!("{:064x}", std::process::id() * 2 + u32::from(cgroups == Cgroups::V2));
    let over_pid = start(&host, GPUFENCE, &over, &SHARE, &words.split(' ').collect::<Vec<_>>());
    let static_pid = start(&host, GPUFENCE, &no_library, &SHARE, &SLEEP);
    let within_pid = start(&host, GPUFENCE, &within, &SHARE, &SLEEP);
    let elsewhere_pid = start(&host, GPUFENCE, &elsewhere, &["--annotation", "gpufence.dev/gpu=1=1GiB"], &SLEEP);
    let ungranted_pid = start(&host, RUNC, &ungranted, &[], &SLEEP);
    let machine = OfTheMachine::start();
    let told = |pid: u32, used_mib: u64| Told { pid, gpu: 0, used_mib };
    // The PID that NVML tells of is another's by now, or nobody's.
    let gone = 4_194_000;
    let all = [
        told(over_pid, 2048 + 64),
        told(static_pid, 4096),
        told(within_pid, 1024 + 100),
        told(elsewhere_pid, 10),
        told(ungranted_pid, 10),
        told(machine.0.id(), 40_000),
        told(gone, 40_000),
    ];
    let readings = || node.metric("gpufence_watchdog_readings_total", &[]).unwrap().unwrap();
    // All are at rest before: the agent doubts a process that is younger than its question.
    let before = readings();
    assert!(until(|| readings() > before));
    node.tell("unsupported", &all, &[(1, 79), (1, 79), (0, 13)]).unwrap();
    let before = readings();
    let gpu = format!("gpu=\"{}\"", host.description.uuid(0));
    let metric = |name: &str, labels: &[&str]| node.metric(&format!("gpufence_{name}"), labels).unwrap();
    let ended = |reason: &str| metric("watchdog_ended_processes_total", &[&gpu, &format!("reason=\"{reason}\"")]);
    // Readings are counted before what they did is looked for: a slow test counts none too many.
    let mut passed = 0.0;
    let all_ended = || {
        passed = readings() - before;
        (ended("over_limit"), ended("foreign")) == (Some(2.0), Some(2.0))
    };
    assert!(until(all_ended), "{}", node.log());
    assert!(passed <= 4.0, "{passed} readings, where the second after they were told of is to end them");
    let offenders = [&over, &no_library, &elsewhere, &ungranted];
    assert!(until(|| offenders.iter().all(|id| !runs(&host, id))), "{}", node.log());
    for id in offenders {
        assert_eq!(task(&host, id).unwrap().1, "STOPPED");
    }
    let after = readings();
    assert!(until(|| readings() > after + 2.0));
    assert!(runs(&host, &within), "{}", node.log());
    assert!(Path::new(&format!("/proc/{}/root", machine.0.id())).exists());
    let log = node.log();
    for line in [
        format!("event=\"over_limit\" container=\"default/{over}\""),
        format!("event=\"ended\" reason=\"over_limit\" container=\"default/{over}\""),
        format!("pid={over_pid} used_mib=2112 limit_mib=1024"),
        format!("container=\"PID {elsewhere_pid}\""),
        format!("container=\"PID {ungranted_pid}\""),
        "Xid error gpu=1 xid=79".into(),
    ] {
        assert!(log.contains(&line), "{line}\n{log}");
    }
    assert_eq!((ended("over_limit"), ended("foreign")), (Some(2.0), Some(2.0)), "{}", node.log());
    assert_eq!(metric("gpu_xid_errors_total", &["index=\"1\"", "xid=\"79\""]), Some(2.0));
    let id = format!("container_id=\"{within}\"");
    assert_eq!(metric("container_memory_used_bytes", &[&id, &gpu]), Some(f64::from(1124_u32 << 20)));
    assert_eq!(metric("container_memory_granted_bytes", &[&id, &gpu]), Some(f64::from(1024_u32 << 20)));
    assert_eq!(metric("container_info", &[&id, "memory_held_by=\"limiter\""]), Some(1.0));
    let machine_s = metric("gpu_ungranted_memory_bytes", &[&gpu, "place=\"host\""]);
    assert_eq!(machine_s, Some(40_000.0 * 1_048_576.0));
    assert!(node.page("/healthz").unwrap().starts_with("HTTP/1.1 200"));
}

#[test]
fn offenders_end_cgroup_v1() {
    offenders_end(Cgroups::Host);
}

#[test]
fn offenders_end_cgroup_v2() {
    offenders_end(Cgroups::V2);
}

/// Unless policy says otherwise, a container that is over has its grace, and a foreign process is only told of.
#[test]
fn policy_says_what_is_done() {
    let host = host(Cgroups::Host, "[watchdog]\nover_limit = \"warn\"");
    let node = Node::start(&host, "unsupported").unwrap();
    let (over, elsewhere) = (unique("over"), unique("elsewhere"));
    let over_pid = start(&host, GPUFENCE, &over, &SHARE, &SLEEP);
    let elsewhere_pid = start(&host, GPUFENCE, &elsewhere, &["--annotation", "gpufence.dev/gpu=1=1GiB"], &SLEEP);
    let told = |pid: u32| Told { pid, gpu: 0, used_mib: 4096 };
    node.tell("unsupported", &[told(over_pid), told(elsewhere_pid)], &[]).unwrap();
    let warned =
        |reason: &str| node.metric("gpufence_watchdog_warnings_total", &[&format!("reason=\"{reason}\"")]).unwrap();
    assert!(until(|| warned("over_limit").is_some() && warned("foreign").is_some()), "{}", node.log());
    let before = node.metric("gpufence_watchdog_readings_total", &[]).unwrap().unwrap();
    assert!(until(|| node.metric("gpufence_watchdog_readings_total", &[]).unwrap().unwrap() > before + 7.0));
    assert!(runs(&host, &over) && runs(&host, &elsewhere), "{}", node.log());
    assert_eq!((warned("over_limit"), warned("foreign")), (Some(1.0), Some(1.0)), "told once");
}

/// What the limiter has counted in a container is on the page.
#[test]
fn the_limiter_s_count_is_exposed() {
    let host = host(Cgroups::Host, "");
    let node = Node::start(&host, "unsupported").unwrap();
    let id = unique("counted");
    let flags = ["--annotation", "gpufence.dev/gpu=0=1GiB@50%"];
    let words = format!("{PROGRAM} init context 0 linear 100M linear 2G launch 20 5000 sleep 1000000");
    start(&host, GPUFENCE, &id, &flags, &words.split(' ').collect::<Vec<_>>());
    let labels = [format!("container_id=\"{id}\""), format!("gpu=\"{}\"", host.description.uuid(0))];
    let labels = [labels[0].as_str(), labels[1].as_str()];
    let metric = |name: &str| node.metric(&format!("gpufence_container_{name}"), &labels).unwrap();
    let throttled = || metric("launches_throttled_seconds_total").is_some_and(|seconds| seconds > 0.0);
    assert!(until(throttled), "{}", node.page("/metrics").unwrap());
    assert_eq!(metric("memory_counted_bytes"), Some(f64::from(164 << 20)));
    assert_eq!((metric("allocations_denied_total"), metric("compute_granted_ratio")), (Some(1.0), Some(0.5)));
    // When it is gone so are its series.
    host.containerd.run_ctr(["tasks", "kill", "--signal", "KILL", &id]).unwrap();
    let _ = host.containerd.run_ctr(["tasks", "rm", "--force", &id]);
    assert!(until(|| metric("memory_granted_bytes").is_none()));
}

/// Docker's containers and Pods are known by their cgroups too.
#[test]
fn docker_and_pods() {
    let entry = RuntimeEntry {
        name: "gpufence",
        runtime_type: GPUFENCE.into(),
        pod_annotations: &["gpufence.dev/*"],
        ..RuntimeEntry::default()
    };
    let plan = Plan { engine: Engine::Containerd2, cri: true, cri_runtimes: vec![entry], ..Plan::default() };
    let host = Host::start(&plan).unwrap();
    let node = Node::start(&host, "unsupported").unwrap();
    let docker = Docker::start(&host, Release::Docker26, "gpufence").unwrap();
    let mut run = docker.command(["run", "--detach", "--network", "host", "--runtime", "gpu0", "plain"]).unwrap();
    let output = run.args(SLEEP).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let in_docker = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    let inspect = docker.command(["inspect", "--format", "{{.State.Pid}}", &in_docker]).unwrap().output().unwrap();
    let docker_pid: u32 = String::from_utf8(inspect.stdout).unwrap().trim().parse().unwrap();

    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    let pod = cri.run_pod(&unique("pod"), "gpufence", &[("gpufence.dev/grant", &grant(&host))], false).unwrap();
    let trainer = cri.run_container(&pod, "trainer", &[], false).unwrap();
    // The first process in the container of its own PID namespace, found by its cgroup.
    let pod_pid = process_in(&trainer);
    let told = |pid: u32, used_mib: u64| Told { pid, gpu: 0, used_mib };
    node.tell("unsupported", &[told(docker_pid, 100), told(pod_pid, 200)], &[]).unwrap();
    let used =
        |id: &str| node.metric("gpufence_container_memory_used_bytes", &[&format!("container_id=\"{id}\"")]).unwrap();
    assert!(until(|| used(&in_docker) == Some(f64::from(100 << 20))), "{}", node.page("/metrics").unwrap());
    assert!(until(|| used(&trainer) == Some(f64::from(200 << 20))), "{}", node.page("/metrics").unwrap());
    let uid = format!("pod_uid=\"{}\"", pod.uid);
    assert!(node.metric("gpufence_container_info", &[&uid, "container=\"trainer\""]).unwrap().is_some());
    cri.remove_pod(&pod).unwrap();
}

/// 8 GiB of GPU 0 for `trainer`, 4 GiB of each GPU for `server`.
fn grant(host: &Host) -> String {
    let (first, second) = (host.description.uuid(0), host.description.uuid(1));
    format!(
        r#"{{"version":1,"podUID":"{}","issuedAt":"2026-01-01T00:00:00Z","containers":{{"trainer":[{{"gpu":"{first}","memoryMiB":8192}}],"server":[{{"gpu":"{first}","memoryMiB":4096}},{{"gpu":"{second}","memoryMiB":4096}}]}}}}"#,
        pod_uid()
    )
}

/// The process whose cgroup has that container's name.
fn process_in(container: &str) -> u32 {
    let in_it = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(container))
            && fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "sleep")
    };
    let mut pids =
        fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(in_it).unwrap()
}

/// Where the driver can cap a cgroup, it does before the container starts: its own cgroup, and its Pod's.
#[test]
fn the_driver_s_caps() {
    let host = host(Cgroups::V2, "memory.require = \"driver\"");
    let node = Node::start(&host, "supported").unwrap();
    assert_eq!(fs::metadata(host.folder().join("state/node.sock")).unwrap().permissions().mode() & 0o777, 0o600);
    // The agent has tried it on a cgroup of its own.
    assert_eq!(node.caps().len(), 1);
    let id = unique("capped");
    start(&host, GPUFENCE, &id, &["--annotation", "gpufence.dev/gpu=1=2GiB,0=1GiB"], &SLEEP);
    let path = format!("/sys/fs/cgroup/default/{id}");
    assert_eq!(node.caps()[1..], [format!("1 0 {} {path}", 2_u64 << 30), format!("0 0 {} {path}", 1 << 30)]);
    assert_eq!(record(&host, &id)["memoryHeldBy"], "driver");
    let labels = [format!("container_id=\"{id}\""), "memory_held_by=\"driver\"".into()];
    let labels = [labels[0].as_str(), labels[1].as_str()];
    assert!(until(|| node.metric("gpufence_container_info", &labels).unwrap() == Some(1.0)));
    assert_eq!(node.metric("gpufence_driver_info", &["memory_caps=\"driver\""]).unwrap(), Some(1.0));
    // One without a grant is none of its affair.
    assert!(host.output(GPUFENCE, &[], &["/bin/true"]).unwrap().status.success());
    assert_eq!(node.caps().len(), 3);
}

/// A Pod's cgroup has what its containers were granted together.
#[test]
fn the_driver_s_caps_on_a_pod() {
    let runc = concat!(env!("CARGO_MANIFEST_DIR"), "/standins/runc-without-cpu.sh");
    let entry = RuntimeEntry {
        name: "gpufence",
        runtime_type: GPUFENCE.into(),
        options: format!("BinaryName = \"{runc}\"\n"),
        pod_annotations: &["gpufence.dev/*"],
        ..RuntimeEntry::default()
    };
    let plan = Plan {
        engine: Engine::Containerd2,
        cgroups: Cgroups::V2,
        cri: true,
        cri_runtimes: vec![entry],
        ..Plan::default()
    };
    let host = Host::start(&plan).unwrap();
    let node = Node::start(&host, "supported").unwrap();
    let mut cri = Cri::connect(&host.containerd.socket()).unwrap();
    let parent = format!("/{}/pod{}", unique("gpufence-test"), pod_uid());
    cri.cgroup_parent.clone_from(&parent);
    let pod = cri.run_pod(&unique("pod"), "gpufence", &[("gpufence.dev/grant", &grant(&host))], false).unwrap();
    let trainer = cri.run_container(&pod, "trainer", &[], false).unwrap();
    cri.run_container(&pod, "debugger", &[], false).unwrap();
    let cgroup = format!("/sys/fs/cgroup{parent}");
    let expected = [
        format!("0 0 {} {cgroup}/{trainer}", 8_u64 << 30),
        // Twelve of the first GPU and four of the second, whichever of its containers comes first.
        format!("1 0 {} {cgroup}", 4_u64 << 30),
        format!("0 0 {} {cgroup}", 12_u64 << 30),
    ];
    let mut caps = node.caps()[1..].to_vec();
    caps[1..].sort_by(|one, other| other.cmp(one));
    assert_eq!(caps, expected);
    cri.remove_pod(&pod).unwrap();
    let tree = PathBuf::from(format!("/proc/{}/root/sys/fs/cgroup", host.containerd.pid().unwrap()));
    for folder in [tree.join(&parent[1..]), tree.join(&parent[1..]).parent().unwrap().to_owned()] {
        fs::remove_dir(folder).unwrap();
    }
}

/// Each way in which a cap can fail: no container, why, and nothing left behind.
#[test]
fn caps_that_fail() {
    let host = host(Cgroups::V2, "");
    let ids = unique("uncapped");
    let before = traces(&host, &ids);
    let refused = |number: u32| {
        let id = format!("{ids}-{number}");
        let output = host.run(GPUFENCE, &id, &[&["--rm"], &SHARE[..]].concat(), &["/bin/true"]).output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        let _ = host.containerd.run_ctr(["containers", "rm", &id]);
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let mut node = Node::start(&host, "supported").unwrap();
    assert!(host.output(GPUFENCE, &SHARE, &["/bin/true"]).unwrap().status.success());
    for (number, way, says) in [
        (0, "unsupported", "not supported here"),
        (1, "ignored", "reads back as 18446744073709551615"),
        (2, "slow", "gave no answer within 5s"),
    ] {
        node.tell(way, &[], &[]).unwrap();
        let errors = refused(number);
        assert!(errors.contains(says) && errors.contains("the container was not started"), "{way}: {errors}");
    }
    // A cgroup that is gone, asked for as the hook does.
    node.tell("supported", &[], &[]).unwrap();
    let socket = host.folder().join("state/node.sock");
    let request = |cgroup: &str, gpu: &str| Request {
        cgroup: cgroup.into(),
        caps: vec![Cap { gpu: gpu.into(), memory_bytes: 1 << 30 }],
    };
    let patience = std::time::Duration::from_secs(5);
    let uuid = host.description.uuid(0);
    for (request, says) in [
        (request("/sys/fs/cgroup/default/gone", &uuid), "is no cgroup, or is one no more"),
        (request("/sys/fs/cgroup/default", "GPU-nothing"), "nvmlDeviceGetHandleByUUID"),
    ] {
        let error = agent::ask(&socket, &request, patience).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    // The agent is gone, and its word that it can is still there.
    node.process.kill().unwrap();
    node.process.wait().unwrap();
    assert!(host.folder().join("state/node.json").exists());
    let errors = refused(3);
    assert!(errors.contains("start gpufence-node"), "{errors}");
    assert_eq!(settle(&host, &ids, &before), before);
    // Another takes its place, although the socket is still there; one that ends in good order leaves neither.
    drop(node);
    let mut node = Node::start(&host, "supported").unwrap();
    assert!(host.output(GPUFENCE, &SHARE, &["/bin/true"]).unwrap().status.success());
    let pid = nix::unistd::Pid::from_raw(node.process.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(node.process.wait().unwrap().success());
    assert!(!socket.exists() && !host.folder().join("state/node.json").exists());
    // Without one it is the limiter's affair again.
    let id = unique("limiter");
    start(&host, GPUFENCE, &id, &SHARE, &SLEEP);
    assert_eq!(record(&host, &id)["memoryHeldBy"], "limiter");
}

/// What the driver can't cap falls to the next rung, or makes no container where policy wants the driver's.
#[test]
fn where_the_driver_caps_nothing() {
    for (cgroups, way, says) in [
        (Cgroups::Host, "supported", "the machine's cgroups are v1"),
        (Cgroups::V2, "unsupported", "not supported here"),
    ] {
        let host = host(cgroups, "memory.require = \"driver\"");
        let none = host.output(GPUFENCE, &SHARE, &["/bin/true"]).unwrap();
        let errors = String::from_utf8_lossy(&none.stderr).into_owned();
        assert!(errors.contains("gpufence-node") && !none.status.success(), "{errors}");
        let node = Node::start(&host, way).unwrap();
        let output = host.output(GPUFENCE, &SHARE, &["/bin/true"]).unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(says), "{errors}");
        assert_eq!(node.metric("gpufence_driver_info", &["memory_caps=\"unsupported\""]).unwrap(), Some(1.0));
    }
    // A MIG instance has no cap, though the machine's other GPU has.
    let plan = Plan { machine: "gpus=2 mig=0:2".into(), cgroups: Cgroups::V2, ..Plan::default() };
    let host = Host::start(&plan).unwrap();
    host.take_inventory_with_nvml().unwrap();
    let _node = Node::start(&host, "supported").unwrap();
    for (gpu, expected) in [(host.description.mig_uuid(0, 1), "limiter"), (host.description.uuid(1), "driver")] {
        let id = unique("rung");
        start(&host, GPUFENCE, &id, &["--annotation", &format!("gpufence.dev/gpu={gpu}=1GiB")], &SLEEP);
        assert_eq!(record(&host, &id)["memoryHeldBy"], expected);
    }
}
