//! The memory limit, in real containers, with a CUDA stand-in that keeps its own books: what the limiter lets through is
//! held against what the stand-in saw.

use std::fs;

use gpufence_tests::{
    host::{GPUFENCE, Host, Plan, unique, until},
    limited::{self, PROGRAM, Said},
};

const SHARE: [&str; 2] = ["--annotation", "gpufence.dev/gpu=0=1GiB"];
/// What the stand-in takes for a context.
const CONTEXT: u64 = 64 << 20;
const LIMIT: u64 = 1 << 30;

fn host() -> Host {
    host_with("")
}

fn host_with(policy: &'static str) -> Host {
    let host = Host::start(&Plan { policy, ..Plan::default() }).unwrap();
    limited::install(&host).unwrap();
    host
}

fn run(host: &Host, words: &str) -> Said {
    limited::run(host, &SHARE, words).unwrap()
}

#[test]
fn every_way_to_allocate_meets_the_limit_to_the_byte() {
    let host = host();
    // 1 GiB less the context's 64 MiB.
    for kind in [
        "linear",
        "pitch",
        "managed",
        "physical",
        "array",
        "array3d",
        "mipmap",
        "async",
        "async-ptsz",
        "pool",
        "pool-ptsz",
        "graph",
        "graph-node",
        "captured",
    ] {
        let said = run(&host, &format!("init context 0 {kind} 960M linear 1 linear 512 {kind} 64K used 0"));
        assert_eq!(said.after(kind), "0", "{kind}: {said:?}");
        let denied = if kind == "linear" { &["0", "2", "2", "2"][..] } else { &["2", "2"] };
        assert_eq!(said.all_after("linear"), denied, "{kind}: {said:?}");
        assert_eq!(said.all_after(kind).last(), Some(&"2"), "{kind}: {said:?}");
        // What a graph has asked for is taken when it runs.
        let taken = if kind.starts_with("graph") || kind == "captured" { CONTEXT } else { LIMIT };
        assert_eq!(said.after("used"), taken.to_string(), "{kind}");
        let said = run(&host, &format!("init context 0 {kind} 961M"));
        assert_eq!(said.after(kind), "2", "{kind}: {said:?}");
    }
    // What is freed can be had again, in whatever way.
    for kind in [
        "linear",
        "pitch",
        "managed",
        "physical",
        "array",
        "array3d",
        "mipmap",
        "async",
        "async-ptsz",
        "pool",
        "pool-ptsz",
    ] {
        let said = run(
            &host,
            &format!("init context 0 {kind} 960M free {kind} 960M free linear 960M free managed 960M free info"),
        );
        assert_eq!(said.all_after(kind)[..2], ["0", "0"], "{kind}: {said:?}");
        assert_eq!(said.after("linear"), "0", "{kind}: {said:?}");
        assert_eq!(said.all_after("managed").last(), Some(&"0"), "{kind}: {said:?}");
        assert_eq!(said.after("info"), format!("0 free {} total {LIMIT}", LIMIT - CONTEXT), "{kind}");
    }
}

#[test]
fn pools_count_what_they_keep() {
    let host = host();
    let said = run(&host, "init context 0 async 1M info free info trim info");
    let free = |taken: u64| format!("0 free {} total {LIMIT}", LIMIT - CONTEXT - taken);
    assert_eq!(
        said.all_after("info"),
        [free(32 << 20), free(32 << 20), free(0)],
        "a piece of 32 MiB until it is trimmed"
    );
    let said = run(&host, "init context 0 pool 40M free pool 30M free destroy-pool info used 0");
    assert_eq!(said.after("info"), free(0));
    assert_eq!(said.after("used"), CONTEXT.to_string());
    // What is in use outlives its pool.
    let said = run(&host, "init context 0 pool 32M destroy-pool info free info");
    assert_eq!(said.all_after("info")[0], free(32 << 20));
    // A piece that is larger than what is left of the limit is given back again.
    let said = run(&host, "init context 0 linear 950M async 1M used 0");
    assert_eq!((said.after("async"), said.after("used")), ("2", ((950 << 20) + CONTEXT).to_string().as_str()));
}

#[test]
fn virtual_memory_is_kept_by_handles_and_mappings() {
    let host = host();
    let said = run(&host, "init context 0 physical 600M map free-below info retain free info free info");
    let free = |taken: u64| format!("0 free {} total {LIMIT}", LIMIT - CONTEXT - (taken << 20));
    // Its handle is released, then one is taken by its mapping, given up, and at last the mapping ends.
    assert_eq!(said.all_after("info"), [free(600), free(600), free(0)], "{said:?}");
}

#[test]
fn graphs_run_within_what_they_asked_for() {
    let host = host();
    let said = run(&host, "init context 0 graph 300M captured 100M run-graph used 0 info trim-graphs used 0 info");
    assert_eq!(said.after("run-graph"), "0");
    let used: Vec<String> = [300 << 20, 0].iter().map(|taken| (CONTEXT + taken).to_string()).collect();
    assert_eq!(said.all_after("used"), used);
    let free = |taken: u64| format!("0 free {} total {LIMIT}", LIMIT - CONTEXT - (taken << 20));
    assert_eq!(said.all_after("info"), [free(400), free(0)], "{said:?}");
}

#[test]
fn contexts_count_what_the_driver_takes() {
    let host = host();
    let said = run(
        &host,
        "init context 0 context 0 info used 0 destroy info primary 0 info release 0 primary 0 linear 100M reset 0 context 0 info",
    );
    let free = |contexts: u64| format!("0 free {} total {LIMIT}", LIMIT - contexts * CONTEXT);
    assert_eq!(said.after("info"), free(2), "{said:?}");
    assert_eq!(said.after("used"), (2 * CONTEXT).to_string());
    let infos = said.all_after("info");
    // With no context that is current there is nothing to tell: CUDA_ERROR_INVALID_CONTEXT.
    assert_eq!(infos[1], "201 free 0 total 0");
    assert_eq!(infos[2], free(2), "{said:?}");
    assert_eq!(infos[3], free(2), "what was in a primary context went with it: {said:?}");
    // A context that doesn't fit, and says why.
    let said = limited::run(&host, &["--annotation", "gpufence.dev/gpu=0=32MiB"], "init context 0 used 0").unwrap();
    assert_eq!((said.after("context"), said.after("used")), ("2", "0"));
    assert!(said.errors.contains("the driver takes 64 MiB for a context"), "{said:?}");
    // The heap of the device's own malloc.
    let said = run(&host, "init context 0 heap 1000M heap 108M info heap 8M info");
    assert_eq!(said.all_after("heap"), ["2", "0", "0"]);
    assert_eq!(said.after("info"), format!("0 free {} total {LIMIT}", LIMIT - CONTEXT - (100 << 20)));
    assert_eq!(said.all_after("info")[1], free(1));
}

#[test]
fn what_the_driver_refuses_is_not_counted() {
    let host = host();
    let kinds = ["linear", "pitch", "managed", "physical", "array", "array3d", "mipmap", "async", "pool"];
    for kind in kinds {
        let said = run(&host, &format!("init context 0 fail 999 {kind} 512M info fail 2 {kind} 512M info {kind} 960M"));
        assert_eq!(said.all_after(kind), ["999", "2", "0"], "{kind}: {said:?}");
        let all = format!("0 free {} total {LIMIT}", LIMIT - CONTEXT);
        assert_eq!(said.all_after("info"), [all.as_str(), all.as_str()], "{kind}: {said:?}");
    }
    let said = run(&host, "init fail 999 context 0 context 0 info");
    assert_eq!(said.all_after("context"), ["999", "0"]);
    assert_eq!(said.after("info"), format!("0 free {} total {LIMIT}", LIMIT - CONTEXT));
}

/// Order and number of GPUs as granted, the share's memory, and nothing of the others.
#[test]
fn programs_see_their_share() {
    let host = host();
    let flags = ["--annotation", "gpufence.dev/gpu=1=2GiB,0=1GiB", "--env", "GPU_MEM_GB=80"];
    let said = limited::run(&host, &flags, "init devices total 0 total 1 context 0 linear 10M nvml").unwrap();
    assert_eq!(said.all_after("device"), ["0 01", "1 00"], "in the grant's order");
    assert_eq!(said.all_after("total"), [format!("0 {}", 2_u64 << 30), format!("0 {}", 1 << 30)]);
    let used = CONTEXT + (10 << 20);
    let (first, second) = (host.description.uuid(1), host.description.uuid(0));
    let expected = [
        "count 2".to_owned(),
        format!(
            "{first} total {total} used {used} free {free} v2 {total} {used}",
            total = 2_u64 << 30,
            free = (2 << 30) - used
        ),
        format!("process 1 used {used}"),
        format!("{second} total {LIMIT} used 0 free {LIMIT} v2 {LIMIT} 0"),
    ];
    assert_eq!(said.all_after("nvml"), expected);
    // The card's other GPU isn't there, by whatever name.
    let other = format!("OTHER_GPU={}", host.description.uuid(1));
    let said = limited::run(&host, &[&SHARE[..], &["--env", &other]].concat(), "nvml").unwrap();
    assert_eq!((said.after("nvml"), said.after("nvml other")), ("count 1", "6"));
    let seen = host.probe(&flags).unwrap();
    let variables =
        ["GPUFENCE_MEMORY_MIB", "GPU_MEM_GB", "CUDA_VISIBLE_DEVICES"].map(|name| seen.variable(name).unwrap());
    assert_eq!(variables, ["2048,1024", "2,1", format!("{first},{second}").as_str()]);
    // MIG instances by their own UUIDs.
    let host = Host::start(&Plan { machine: "gpus=1 mig=0:2".into(), ..Plan::default() }).unwrap();
    limited::install(&host).unwrap();
    let share = format!("gpufence.dev/gpu={}=1GiB", host.description.mig_uuid(0, 1));
    host.take_inventory_with_nvml().unwrap();
    let said =
        limited::run(&host, &["--annotation", &share], "init devices total 0 context 0 linear 960M linear 1 nvml")
            .unwrap();
    assert_eq!((said.all_after("device"), said.after("total")), (vec!["0 01"], format!("0 {LIMIT}").as_str()));
    assert_eq!(said.all_after("linear"), ["0", "2"]);
}

/// All processes of a container have one budget: other processes' memory counts, and comes back however they end.
#[test]
fn processes_share_one_budget() {
    let host = host();
    let said = run(
        &host,
        "init context 0 linear 500M child init context 0 linear 396M linear 1 kill end info linear 460M used 0",
    );
    assert_eq!(said.all_after("linear"), ["0", "0", "2", "0"], "{said:?}");
    assert_eq!(said.after("child"), "9");
    assert_eq!(said.after("info"), format!("0 free {} total {LIMIT}", LIMIT - CONTEXT - (500 << 20)));
    assert_eq!(said.after("used"), LIMIT.to_string());
    // A child after fork has nothing of its parent's, and counts for itself.
    let said = run(&host, "init context 0 linear 300M fork init context 0 linear 100M info");
    let free = |taken: u64| format!("0 free {} total {LIMIT}", LIMIT - taken);
    let (parent, child) = (CONTEXT + (300 << 20), CONTEXT + (100 << 20));
    assert_eq!(said.all_after("info"), [free(parent + child), free(parent + child)], "{said:?}");
    // What a program held is free when it becomes another.
    let said = run(&host, "init context 0 linear 900M exec init context 0 info linear 960M");
    assert_eq!((said.after("info"), said.all_after("linear")), (free(CONTEXT).as_str(), vec!["0", "0"]), "{said:?}");
    // Processes that exec adds share it, and so do those of other users.
    let id = unique("together");
    let flags = [&["--detach"], &SHARE[..]].concat();
    let words = "init context 0 linear 700M sleep 100000";
    let command: Vec<&str> = [PROGRAM].into_iter().chain(words.split(' ')).collect();
    let started = host.run(GPUFENCE, &id, &flags, &command).output().unwrap();
    assert!(started.status.success(), "{started:?}");
    let exec = |user: &str, words: &str| {
        let mut call = host.containerd.ctr(["tasks", "exec", "--user", user, "--exec-id", &unique("e"), &id, PROGRAM]);
        String::from_utf8_lossy(&call.args(words.split(' ')).output().unwrap().stdout).into_owned()
    };
    assert!(until(|| exec("0", "init context 0 info").contains(&free(2 * CONTEXT + (700 << 20)))));
    let said = exec("1000", "init context 0 linear 197M linear 196M");
    assert!(said.ends_with("linear 2\nlinear 0\n"), "{said}");
}

/// 64 threads in 8 processes allocate and free as fast as they can: never a byte more than the limit, and all of it comes
/// back.
#[test]
fn never_more_than_the_limit_under_a_storm() {
    let host = host();
    let said = run(&host, "storm 8 8 1000 20M init context 0 peak 0 info used 0");
    assert_eq!(said.after("storm"), "0", "{said:?}");
    let peak: u64 = said.after("peak").parse().unwrap();
    assert!(peak <= LIMIT && peak > LIMIT * 9 / 10, "{peak} of {LIMIT}");
    assert_eq!(said.after("info"), format!("0 free {} total {LIMIT}", LIMIT - CONTEXT));
    assert_eq!(said.after("used"), CONTEXT.to_string());
}

/// More processes than the table has places: those that find none are denied, and nobody is the worse for it.
#[test]
fn a_fork_bomb_over_the_table() {
    let host = host_with("");
    let flags = ["--annotation", "gpufence.dev/gpu=0=70GiB"];
    let said = limited::run(&host, &flags, "crowd 1100 1M init context 0 linear 60G info peak 0").unwrap();
    let words: Vec<u64> = said.after("crowd").split(' ').filter_map(|word| word.parse().ok()).collect();
    let [granted, denied] = words[..] else { panic!("{said:?}") };
    assert!(granted + denied == 1100 && granted <= 1024 && granted > 900, "{said:?}");
    assert!(said.errors.contains("no place in the usage table"), "{said:?}");
    assert_eq!(said.after("linear"), "0", "the dead leave their places: {said:?}");
    let peak: u64 = said.after("peak").parse().unwrap();
    assert!(peak <= 70 << 30, "{peak}");
}

/// What a program does to get round the limiter, and what stops it.
#[test]
fn escapes() {
    let host = host();
    let real = "/usr/lib/gpufence/compute/libcuda.so.550.163.01";
    // Its environment says nothing to the limiter: neither other limits nor other files.
    let variables =
        ["GPUFENCE_MEMORY_MIB=81920", "CUDA_VISIBLE_DEVICES=0", "LD_LIBRARY_PATH=/nothing", "GPU_MEM_GB=80"];
    let flags: Vec<&str> = variables.iter().flat_map(|variable| ["--env", *variable]).chain(SHARE).collect();
    let said = limited::run(&host, &flags, "init context 0 linear 961M linear 960M").unwrap();
    assert_eq!(said.all_after("linear"), ["2", "0"], "{said:?}");
    // A library that is loaded before stands before the shadow: with the real driver it is past the limiter, and only the
    // driver's own cap or the watchdog holds it. With another it is as without.
    let said = limited::run(
        &host,
        &[&SHARE[..], &["--env", "LD_PRELOAD=/usr/lib/libm.so.6"]].concat(),
        "init context 0 linear 961M",
    )
    .unwrap();
    assert_eq!(said.after("linear"), "2");
    for variable in [format!("LD_PRELOAD={real}"), "LD_LIBRARY_PATH=/usr/lib/gpufence/compute".into()] {
        let said =
            limited::run(&host, &[&SHARE[..], &["--env", &variable]].concat(), "init context 0 linear 2G").unwrap();
        assert_eq!(said.after("linear"), "0", "{variable}: docs/limits.md says that it gets past: {said:?}");
    }
    let said = run(&host, &format!("direct {real} 2G"));
    assert!(said.after("direct").ends_with(".so.1 0"), "docs/limits.md says that it gets past: {said:?}");
    // However a function is looked up, it is the shadow's.
    let shadow = "/usr/lib/gpufence/limiter/libcuda.so.1";
    for name in [
        "cuMemAlloc",
        "cuMemFree",
        "cuMemAllocAsync",
        "cuMemFreeAsync",
        "cuMemAllocManaged",
        "cuMemAllocPitch",
        "cuMemGetInfo",
        "cuDeviceTotalMem",
        "cuCtxCreate",
        "cuMemCreate",
        "cuGetProcAddress",
    ] {
        let said = run(&host, &format!("lookup {name}"));
        let both = format!("{shadow} {shadow}");
        let expected = [format!("0 {both}"), format!("1 {both}"), format!("2 {both}")];
        assert_eq!(said.all_after("lookup")[..3], expected, "{name}");
    }
    let said = run(&host, "lookup cuLaunchKernel");
    assert!(!said.lines.concat().contains(shadow), "with no compute limit a launch isn't intercepted: {said:?}");
    let said = run(&host, "init context 0 lookup-lookup 961M");
    assert_eq!(said.after("lookup-lookup"), format!("{shadow} 2"));
    // Noise over the usage table costs its own container only: denials, or a count that is wrong. It never crashes.
    let said = run(&host, "init context 0 linear 100M noise 0 linear 1M info child init context 0 linear 1M end free");
    assert_eq!((said.after("noise"), said.after("free"), said.after("child")), ("1", "linear 0", "0"), "{said:?}");
    let said = run(&host, "init context 0 linear 100M noise 8 linear 1M info free");
    assert_eq!((said.after("noise"), said.after("free")), ("1", "linear 0"), "{said:?}");
    // So does another container's own, which has a table of its own.
    let said = run(&host, "init context 0 linear 960M");
    assert_eq!(said.after("linear"), "0");
    // A table that is gone is made anew: the sum starts from nothing, which is what the watchdog is there for.
    let said = run(&host, "init context 0 linear 900M unlink child init context 0 linear 100M end");
    assert_eq!((said.after("unlink"), said.after("child")), ("0", "0"), "{said:?}");
    // A driver that the image brings: in its folders it isn't found, and as a newer cuda-compat package the limiter stands
    // before it as well.
    let own = host.driver_root().join("usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01");
    for folder in ["usr/lib", "usr/lib/x86_64-linux-gnu", "usr/local/cuda/compat"] {
        let folder = host.rootfs().join(folder);
        fs::create_dir_all(&folder).unwrap();
        fs::copy(&own, folder.join("libcuda.so.580.65.06")).unwrap();
        std::os::unix::fs::symlink("libcuda.so.580.65.06", folder.join("libcuda.so.1")).unwrap();
    }
    let said = run(&host, "init context 0 linear 961M linear 960M lookup cuLaunchKernel");
    assert_eq!(said.all_after("linear"), ["2", "0"], "{said:?}");
    assert!(said.after("lookup").contains("/usr/local/cuda/compat/libcuda.so"), "the package's is what runs: {said:?}");
    // The limits file and the shadows can't be written or covered.
    for path in ["/usr/lib/gpufence/limits", shadow, "/usr/lib/gpufence/driver/x", "/etc/ld.so.cache"] {
        let output = host.output(GPUFENCE, &SHARE, &["/bin/sh", "-c", &format!("echo x > {path}")]).unwrap();
        assert!(String::from_utf8_lossy(&output.stderr).contains("Read-only file system"), "{path}: {output:?}");
    }
}

/// Where the limiter fails itself it says so once, and policy says what becomes of allocations.
#[test]
fn its_own_failures() {
    for (policy, answer) in [("", "2"), ("memory.on_limiter_failure = \"allow\"", "0")] {
        let host = host_with(policy);
        // Something else where the table would be.
        let command =
            format!("echo no table > /usr/lib/gpufence/usage/table; exec {PROGRAM} init context 0 linear 1M linear 1M");
        let output = host.output(GPUFENCE, &SHARE, &["/bin/sh", "-c", &command]).unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains(&format!("context {answer}")), "{output:?}");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(errors.matches("/usr/lib/gpufence/usage can't be used").count(), 1, "{errors}");
    }
}

/// Which rung holds is in the record, and a node that wants a better one makes no container.
#[test]
fn rungs() {
    let host = host();
    let id = unique("record");
    let flags = [&["--detach"], &SHARE[..]].concat();
    assert!(host.run(GPUFENCE, &id, &flags, &["/bin/sleep", "1000"]).output().unwrap().status.success());
    let record = host.container_folders().join("default").join(&id).join("record.json");
    let record: serde_json::Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    assert_eq!(record["memoryHeldBy"], "limiter");
    // None at all, where policy says so: the driver's own libraries are found, the 32-bit ones too.
    let policy = "memory.limiter = \"\"\nmemory.require = \"none\"";
    let host = host_with(policy);
    let said = run(&host, "init context 0 linear 2G");
    assert_eq!(said.after("linear"), "0");
    let seen = host.probe(&SHARE).unwrap();
    assert_eq!(seen.0.libraries["libcuda.so.1"].as_deref(), Some("/usr/lib/gpufence/compute/libcuda.so.550.163.01"));
    for (policy, says) in [
        ("memory.limiter = \"\"", "memory.require"),
        ("memory.limiter = \"/nothing\"", "/nothing"),
        ("memory.require = \"driver\"", "driver"),
        ("memory.require = \"mps\"", "mps"),
    ] {
        let host = Host::start(&Plan { policy, ..Plan::default() }).unwrap();
        let output = host.output(GPUFENCE, &SHARE, &["/bin/true"]).unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(says), "{policy}: {errors}");
        assert!(!host.container_folders().exists() || fs::read_dir(host.container_folders()).unwrap().next().is_none());
        assert!(host.output(GPUFENCE, &[], &["/bin/true"]).unwrap().status.success(), "with no grant it is no matter");
    }
}

/// The compute limit keeps the time that the GPU is busy for a container to its share, over all its processes.
#[test]
fn launches_keep_to_their_share() {
    let host = host();
    // 100 kernels of 5 ms.
    let time = |share: &str, words: &str| -> f64 {
        let annotation = format!("gpufence.dev/gpu=0=1GiB{share}");
        let said = limited::run(&host, &["--annotation", &annotation], words).unwrap();
        said.after("launch").parse().unwrap()
    };
    let words = "init context 0 launch 100 5000";
    let (all, half, quarter) = (time("", words), time("@50%", words), time("@25%", words));
    assert!(all < 700.0, "{all}");
    // Within ten points of the share.
    let share = |milliseconds: f64| 500.0 / milliseconds * 100.0;
    assert!((40.0..=60.0).contains(&share(half)), "50%: {}", share(half));
    assert!((15.0..=35.0).contains(&share(quarter)), "25%: {}", share(quarter));
}
