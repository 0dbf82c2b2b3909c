//! What is left behind: nothing, after many cycles, after a shim was killed, after containerd was.

use std::{fs, process::Command, thread};

use gpufence_cli::engine::shims_of;
use gpufence_tests::{
    host::{GPUFENCE, Host, Plan, unique, until},
    leaks::{settle, traces},
    programs::Engine,
};

const SHARE: [&str; 2] = ["--annotation", "gpufence.dev/gpu=0=1GiB"];

/// Two hundred containers with a share, created, started and deleted, some at the same time.
#[test]
fn two_hundred_cycles() {
    let host = Host::start(&Plan { engine: Engine::Containerd16, ..Plan::default() }).unwrap();
    let ids = unique("cycle");
    let before = traces(&host, &ids);
    thread::scope(|scope| {
        for worker in 0..4 {
            let (host, ids) = (&host, &ids);
            scope.spawn(move || {
                for number in 0..50 {
                    let id = format!("{ids}-{worker}-{number}");
                    let flags = [&["--rm"][..], &SHARE].concat();
                    let output = host.run(GPUFENCE, &id, &flags, &["/bin/echo", &id]).output().unwrap();
                    assert!(output.status.success(), "{output:?}");
                    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), id);
                }
            });
        }
    });
    assert_eq!(settle(&host, &ids, &before), before);
}

/// A shim that lives long, with many processes added and refused, holds no more descriptors than at first.
#[test]
fn a_long_lived_shim_keeps_no_descriptors() {
    let host = Host::start(&Plan::default()).unwrap();
    let id = unique("long");
    let flags = [&["--detach"][..], &SHARE].concat();
    assert!(host.run(GPUFENCE, &id, &flags, &["/bin/sleep", "1000"]).output().unwrap().status.success());
    let shim = shims_of(&host.containerd.socket())[0];
    let descriptors = || fs::read_dir(format!("/proc/{shim}/fd")).unwrap().count();
    let threads = || fs::read_dir(format!("/proc/{shim}/task")).unwrap().count();
    let exec = |number: usize, command: &str| {
        let exec_id = format!("e{number}");
        host.containerd.ctr(["tasks", "exec", "--exec-id", &exec_id, &id, command]).output().unwrap()
    };
    assert!(exec(0, "/bin/true").status.success());
    let before = descriptors();
    for number in 1..40 {
        let command = if number % 4 == 0 { "/nothing" } else { "/bin/true" };
        assert_eq!(exec(number, command).status.success(), number % 4 != 0);
    }
    assert!(until(|| descriptors() <= before), "{} descriptors, {before} at first", descriptors());
    assert!(until(|| threads() <= 2), "{} threads", threads());
}

/// A container that was refused leaves nothing, not even a shim.
#[test]
fn refused_containers() {
    let host = Host::start(&Plan::default()).unwrap();
    let ids = unique("refused");
    let before = traces(&host, &ids);
    for number in 0..5 {
        let id = format!("{ids}-{number}");
        let flags = ["--annotation", "gpufence.dev/gpu=9=1GiB"];
        let output = host.run(GPUFENCE, &id, &flags, &["/bin/true"]).output().unwrap();
        assert!(!output.status.success());
        // ctr keeps the container's entry, as it would of one that runc refused.
        let _ = host.containerd.run_ctr(["containers", "rm", &id]);
        let flags = ["--annotation", "gpufence.dev/gpu=0=1GiB"];
        let id = format!("{ids}-program-{number}");
        let output = host.run(GPUFENCE, &id, &flags, &["/no/such/program"]).output().unwrap();
        assert!(!output.status.success());
        let _ = host.containerd.run_ctr(["containers", "rm", &id]);
    }
    assert_eq!(settle(&host, &ids, &before), before);
}

/// After kill -9 of its shim a container can be removed, and nothing of it stays.
fn shim_killed(engine: Engine) {
    let host = Host::start(&Plan { engine, ..Plan::default() }).unwrap();
    let ids = unique("killed");
    let before = traces(&host, &ids);
    let flags = [&["--detach"][..], &SHARE].concat();
    assert!(host.run(GPUFENCE, &ids, &flags, &["/bin/sleep", "1000"]).output().unwrap().status.success());
    assert_eq!(fs::read_dir(host.container_folders().join("default")).unwrap().count(), 1);
    let shim = shims_of(&host.containerd.socket())[0];
    assert!(Command::new("kill").args(["-9", &shim.to_string()]).status().unwrap().success());
    // containerd runs our `delete` by itself.
    assert!(until(|| !host.container_folders().join("default").exists()), "the container's folder is still there");
    let _ = host.containerd.run_ctr(["tasks", "rm", "-f", &ids]);
    host.containerd.run_ctr(["containers", "rm", &ids]).unwrap();
    assert_eq!(settle(&host, &ids, &before), before);
    // The same id can be had again.
    let flags = [&["--rm"][..], &SHARE].concat();
    assert!(host.run(GPUFENCE, &ids, &flags, &["/bin/true"]).output().unwrap().status.success());
}

#[test]
fn shim_killed_containerd_1_6() {
    shim_killed(Engine::Containerd16);
}

#[test]
fn shim_killed_containerd_1_7() {
    shim_killed(Engine::Containerd17);
}

#[test]
fn shim_killed_containerd_2() {
    shim_killed(Engine::Containerd2);
}

/// Containers outlive containerd: they are there after its restart, answer, and are removed without a trace. One whose
/// shim was killed meanwhile is cleaned up.
fn containerd_restarted(engine: Engine) {
    let mut host = Host::start(&Plan { engine, ..Plan::default() }).unwrap();
    let ids = unique("restart");
    let before = traces(&host, &ids);
    let kept: Vec<String> = (0..3).map(|number| format!("{ids}-{number}")).collect();
    let flags = [&["--detach"][..], &SHARE].concat();
    for id in &kept {
        assert!(host.run(GPUFENCE, id, &flags, &["/bin/sleep", "1000"]).output().unwrap().status.success());
    }
    host.containerd.kill();
    let socket = host.containerd.socket();
    let shims = shims_of(&socket);
    assert_eq!(shims.len(), 3);
    // The victim is the last one's; which shim is whose stands in its command line.
    let of_last =
        |shim: &&u32| fs::read_to_string(format!("/proc/{shim}/cmdline")).is_ok_and(|line| line.contains(&kept[2]));
    let victim = *shims.iter().find(of_last).unwrap();
    assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
    host.containerd.run().unwrap();

    for id in &kept[..2] {
        let output =
            host.containerd.ctr(["tasks", "exec", "--exec-id", "e", id, "/bin/echo", "alive"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "alive", "{output:?}");
    }
    let list = host.containerd.run_ctr(["tasks", "ls", "-q"]).unwrap();
    assert!(kept[..2].iter().all(|id| list.contains(id)), "{list}");
    for id in &kept {
        let _ = host.containerd.run_ctr(["tasks", "rm", "-f", id]);
        host.containerd.run_ctr(["containers", "rm", id]).unwrap();
    }
    let mut after = settle(&host, &ids, &before);
    // It is another process, with its own count of descriptors.
    after.descriptors = before.descriptors;
    assert_eq!(after, before);
}

#[test]
fn containerd_1_6_restarted() {
    containerd_restarted(Engine::Containerd16);
}

#[test]
fn containerd_1_7_restarted() {
    containerd_restarted(Engine::Containerd17);
}

#[test]
fn containerd_2_restarted() {
    containerd_restarted(Engine::Containerd2);
}
