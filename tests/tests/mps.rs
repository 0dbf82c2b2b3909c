//! GPUs that are shared by MPS, with a stand-in for its control daemon: what clients get, and that daemons are kept running.

use std::fs;

use gpufence_tests::{
    docker::{Docker, Release},
    host::{GPUFENCE, Host, Plan, unique, until},
    limited,
    node::Node,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

const TWO_SETS: &str = "memory.require = \"mps\"\n[mps]\nsets = [[\"0\"], [\"1\"]]";
const SHARE: [&str; 2] = ["--annotation", "gpufence.dev/gpu=0=1GiB@50%"];

fn host(policy: &'static str) -> Host {
    Host::start(&Plan { policy, ..Plan::default() }).unwrap()
}

/// Whether the daemon of each set takes clients, as metrics say.
fn up(node: &Node, host: &Host, gpus: &[u32]) -> bool {
    let names: Vec<String> = gpus.iter().map(|gpu| host.description.uuid(*gpu)).collect();
    node.metric("gpufence_mps_daemon_up", &[&format!("gpus=\"{}\"", names.join(","))]).unwrap() == Some(1.0)
}

fn start(host: &Host) -> Node {
    let node = Node::start(host, "unsupported").unwrap();
    assert!(until(|| up(&node, host, &[0]) && up(&node, host, &[1])), "{}", node.log());
    node
}

fn log(host: &Host, set: usize) -> String {
    fs::read_to_string(host.folder().join(format!("state/mps/{set}/log/control.log"))).unwrap_or_default()
}

/// What a container is refused with.
fn refused(host: &Host, flags: &[&str]) -> String {
    let output = host.output(GPUFENCE, flags, &["/bin/true"]).unwrap();
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const LOOK: &str = "env | grep CUDA_MPS_ | sort; cat /dev/shm/cuda.shm; echo hello >$CUDA_MPS_PIPE_DIRECTORY/control; \
                    echo x >$CUDA_MPS_LOG_DIRECTORY/x || echo read-only; grep devices $CUDA_MPS_LOG_DIRECTORY/control.log";

#[test]
fn clients() {
    let host = host(TWO_SETS);
    limited::install(&host).unwrap();
    let node = start(&host);
    let daemons = node.mps_daemons();
    let mut modes = node.compute_modes();
    modes.sort();
    assert_eq!(modes, ["0 3", "1 3"], "nothing but MPS's server reaches the GPUs");
    let id = unique("client");
    let flags = [&["--detach", "--env", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=80G"], &SHARE[..]].concat();
    assert!(host.run(GPUFENCE, &id, &flags, &["/bin/sleep", "1000"]).output().unwrap().status.success());
    let exec = ["tasks", "exec", "--exec-id", "e", &id, "/bin/sh", "-c", LOOK];
    let in_exec = host.containerd.ctr(exec).output().unwrap();
    let own = host.output(GPUFENCE, &SHARE, &["/bin/sh", "-c", LOOK]).unwrap();
    for output in [own, in_exec] {
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        let expected = [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50".to_owned(),
            "CUDA_MPS_LOG_DIRECTORY=/usr/lib/gpufence/mps-log".into(),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M".into(),
            "CUDA_MPS_PIPE_DIRECTORY=/usr/lib/gpufence/mps-pipe".into(),
            format!("of {}", daemons[0]),
            "read-only".into(),
            format!("devices {}", host.description.uuid(0)),
        ];
        assert_eq!(lines.lines().collect::<Vec<_>>(), expected, "{output:?}");
    }
    assert!(until(|| log(&host, 0).matches("client hello").count() == 2), "{}", log(&host, 0));
    let record = host.container_folders().join("default").join(&id).join("record.json");
    let record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    assert_eq!((&record["memoryHeldBy"], &record["mpsPercent"]), (&"mps".into(), &50.into()));
    // The limiter counts memory as ever, and leaves launches to MPS.
    let said = limited::run(&host, &SHARE, "init context 0 linear 961M lookup cuLaunchKernel").unwrap();
    assert_eq!(said.after("linear"), "2");
    assert!(!said.lines.concat().contains("/limiter/libcuda.so.1"), "{said:?}");
    // The other GPU's daemon is another, and a container is a client of one.
    let other = ["--annotation", "gpufence.dev/gpu=1=1GiB"];
    let output = host.output(GPUFENCE, &other, &["/bin/cat", "/dev/shm/cuda.shm"]).unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), format!("of {}", daemons[1]));
    let errors = refused(&host, &["--annotation", "gpufence.dev/gpu=0=1GiB,1=1GiB"]);
    assert!(errors.contains("aren't all in one set"), "{errors}");
    // Without a grant there is nothing of it.
    let output = host.output(GPUFENCE, &[], &["/bin/sh", "-c", "env; ls /dev/shm"]).unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!text.contains("CUDA_MPS") && !text.contains("cuda.shm"), "{text}");
}

#[test]
fn under_docker() {
    let host = host(TWO_SETS);
    let node = start(&host);
    let docker = Docker::start(&host, Release::Docker26, "gpufence").unwrap();
    let output = docker.run(&["--runtime", "gpu0"], "greedy", &["/bin/sh", "-c", LOOK]).unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M\n"), "{output:?}");
    assert!(text.contains(&format!("of {}\n", node.mps_daemons()[0])), "{output:?}");
}

#[test]
fn daemons_are_kept_running() {
    let host = host(TWO_SETS);
    let node = start(&host);
    let signal = |pid: i32, signal: Signal| kill(Pid::from_raw(pid), signal).unwrap();
    // One that is killed is started again. While it can't be, no container is created that would need it.
    let before = node.mps_daemons();
    let broken = host.folder().join("state/mps/0/log/broken");
    fs::write(&broken, "").unwrap();
    signal(before[0], Signal::SIGKILL);
    assert!(until(|| !up(&node, &host, &[0])));
    let errors = refused(&host, &SHARE);
    assert!(errors.contains("the MPS daemon for") && errors.contains("doesn't run"), "{errors}");
    assert!(until(|| node.log().contains("it ended at once")), "{}", node.log());
    fs::remove_file(&broken).unwrap();
    assert!(until(|| up(&node, &host, &[0])), "{}", node.log());
    let after = node.mps_daemons();
    assert!(after[0] != before[0] && after[1] == before[1], "{before:?} {after:?}");
    assert!(host.output(GPUFENCE, &SHARE, &["/bin/true"]).unwrap().status.success());
    // They outlive the agent, and the next one takes them over, without a word to their clients.
    let gone = std::mem::ManuallyDrop::new(node);
    signal(gone.process.id().cast_signed(), Signal::SIGKILL);
    let node = start(&host);
    assert_eq!(node.mps_daemons(), after);
    assert_eq!(node.log().matches("was taken over").count(), 2, "{}", node.log());
    signal(after[0], Signal::SIGTERM);
    assert!(until(|| node.mps_daemons().first() != Some(&after[0]) && up(&node, &host, &[0])), "{}", node.log());
    // Sets that policy has no more end.
    let before = node.mps_daemons();
    let gone = std::mem::ManuallyDrop::new(node);
    signal(gone.process.id().cast_signed(), Signal::SIGKILL);
    let policy = fs::read_to_string(host.policy()).unwrap();
    fs::write(host.policy(), policy.replace("[[\"0\"], [\"1\"]]", "[[\"1\", \"0\"]]")).unwrap();
    let node = Node::start(&host, "unsupported").unwrap();
    assert!(until(|| up(&node, &host, &[1, 0])), "{}", node.log());
    for pid in before {
        assert!(until(|| kill(Pid::from_raw(pid), None).is_err()), "{pid} lives");
    }
    let modes = node.compute_modes();
    assert_eq!(modes.iter().filter(|mode| mode.ends_with(" 0")).count(), 2, "{modes:?}");
    assert!(modes[modes.len() - 2..].iter().all(|mode| mode.ends_with(" 3")), "{modes:?}");
    let both = ["--annotation", "gpufence.dev/gpu=0=1GiB,1=2GiB@30%"];
    let output = host.output(GPUFENCE, &both, &["/bin/sh", "-c", LOOK]).unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("=0=1024M,1=2048M\n") && text.contains("PERCENTAGE=30\n"), "{output:?}");
}

/// A grant may ask for MPS, and gets nothing where there is none.
#[test]
fn a_grant_that_asks_for_it() {
    let host = host("");
    let id = unique("asks");
    let grant = format!(
        r#"gpufence.dev/grant={{"version":1,"mode":"mps","containers":{{"{id}":[{{"gpu":"{}","memoryMiB":1024}}]}}}}"#,
        host.description.uuid(0)
    );
    let run = || host.run(GPUFENCE, &id, &["--rm", "--annotation", &grant], &["/bin/true"]).output().unwrap();
    let errors = String::from_utf8_lossy(&run().stderr).into_owned();
    assert!(errors.contains("mps.sets"), "{errors}");
    let _ = host.containerd.run_ctr(["containers", "rm", &id]);
    let policy = fs::read_to_string(host.policy()).unwrap();
    fs::write(host.policy(), format!("{policy}\n[mps]\nsets = [[\"0\"]]\nexclusive = false\n")).unwrap();
    let node = Node::start(&host, "unsupported").unwrap();
    assert!(until(|| up(&node, &host, &[0])), "{}", node.log());
    assert_eq!(node.compute_modes(), Vec::<String>::new());
    let output = run();
    assert!(output.status.success(), "{output:?}");
}
