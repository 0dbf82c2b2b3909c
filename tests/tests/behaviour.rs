//! What a user of `ctr` meets, with our shim and with containerd's own side by side in one test: both must be the same.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::fs::PermissionsExt,
    process::{Command, Output, Stdio},
    sync::mpsc,
    time::Duration,
};

use gpufence_cli::engine::Cgroups;
use gpufence_tests::{
    host::{GPUFENCE, Host, Plan, RUNC, unique, until},
    programs::Engine,
};

/// What was met, by what was done.
type Met = BTreeMap<String, String>;

/// Runs the scenes under both runtimes and compares what was met.
fn same_as_runc(engine: Engine, cgroups: Cgroups, scenes: &[fn(&Stage<'_>, &mut Met)]) {
    let host = Host::start(&Plan { engine, cgroups, ..Plan::default() }).unwrap();
    let meet = |runtime: &'static str| {
        let mut met = Met::new();
        for scene in scenes {
            scene(&Stage { host: &host, runtime }, &mut met);
        }
        met
    };
    let ours = meet(GPUFENCE);
    // Under load containerd's own shim may lose the end of an output, an event or a kill for want of memory: what it does
    // in one of three tries is what it is held to do.
    let mut theirs = meet(RUNC);
    for _ in 0..2 {
        if ours != theirs {
            theirs = meet(RUNC);
        }
    }
    for (what, expected) in &theirs {
        assert_eq!(ours.get(what), Some(expected), "{what}");
    }
    assert_eq!(ours, theirs);
}

/// Where a scene plays.
struct Stage<'a> {
    host: &'a Host,
    runtime: &'static str,
}

impl Stage<'_> {
    fn run(&self, flags: &[&str], command: &[&str]) -> Output {
        self.host.output(self.runtime, flags, command).unwrap()
    }

    /// A container that goes on in the background.
    fn detached(&self, flags: &[&str], command: &[&str]) -> String {
        let id = unique("behaviour");
        let flags = [&["--detach"], flags].concat();
        let output = self.host.run(self.runtime, &id, &flags, command).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        id
    }

    fn ctr(&self, arguments: &[&str]) -> Output {
        self.host.containerd.ctr(arguments).output().unwrap()
    }

    /// A client with a terminal of its own, which `ctr` insists on.
    fn with_terminal(mut client: Command, input: &str, ready: impl FnMut() -> bool) -> String {
        let words =
            std::iter::once(client.get_program()).chain(client.get_args()).map(|word| quoted(&word.to_string_lossy()));
        let line = words.collect::<Vec<_>>().join(" ");
        client = Command::new("script");
        client.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        let mut child = client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // What is typed too early may be lost when the client makes the terminal raw.
        until(ready);
        std::thread::sleep(Duration::from_millis(500));
        stdin.write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        drop(stdin);
        format!("{:?} {}", output.status.code(), String::from_utf8_lossy(&output.stdout))
    }

    /// The state of a task as `ctr` lists it.
    fn state(&self, id: &str) -> String {
        let list = String::from_utf8(self.ctr(&["tasks", "ls"]).stdout).unwrap();
        let line = list.lines().find(|line| line.starts_with(id)).unwrap_or_default();
        line.split_whitespace().nth(2).unwrap_or("none").to_owned()
    }

    fn wait_for_state(&self, id: &str, state: &str) -> bool {
        until(|| self.state(id) == state)
    }

    /// Ends a task's container, whatever its state. Gives the exit status that its deletion tells.
    fn remove(&self, id: &str) -> Option<i32> {
        let output = self.ctr(&["tasks", "rm", "-f", id]);
        self.ctr(&["containers", "rm", id]);
        output.status.code()
    }
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// What a client said, without the times in its log lines.
fn describe(output: &Output) -> String {
    let timeless = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let words = text.split(' ').filter(|word| !word.starts_with("time=\""));
        words.collect::<Vec<_>>().join(" ")
    };
    format!("{:?} {:?} {:?}", output.status.code(), timeless(&output.stdout), timeless(&output.stderr))
}

fn exits(stage: &Stage<'_>, met: &mut Met) {
    for (what, command) in [
        ("exits at once", "true"),
        ("exits with 7", "exit 7"),
        ("writes to both", "echo out; echo err >&2; exit 3"),
        ("is killed by a signal", "kill -TERM $$; sleep 0.2"),
        ("aborts", "kill -ABRT $$; sleep 0.2"),
        ("leaves a child behind", "sleep 100 & exit 4"),
    ] {
        met.insert(what.into(), describe(&stage.run(&[], &["/bin/sh", "-c", command])));
    }
    let missing = stage.run(&[], &["/nothing"]);
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    met.insert(
        "no such program".into(),
        format!("{:?} {}", missing.status.code(), said.replace(&format!("-{}-", std::process::id()), "-")),
    );
    let user = stage.run(&["--user", "1000"], &["/bin/sh", "-c", "id -u; echo hi > /dev/stdout"]);
    met.insert("as another user".into(), describe(&user));
}

fn stdio(stage: &Stage<'_>, met: &mut Met) {
    // A megabyte in and out, and the end of input.
    let id = unique("behaviour");
    let mut call = stage.host.run(stage.runtime, &id, &["--rm"], &["/bin/sh", "-c", "cat | wc -c; cat"]);
    let mut child = call.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&vec![b'x'; 1 << 20]).unwrap();
    met.insert("input".into(), describe(&child.wait_with_output().unwrap()));
    let much = stage.run(&[], &["/bin/sh", "-c", "head -c 3000000 /dev/zero"]);
    met.insert("output".into(), format!("{:?} {}", much.status.code(), much.stdout.len()));

    let log = stage.host.folder().join(unique("log"));
    let logger = stage.host.folder().join("logger.sh");
    let script = "#!/bin/sh\nexec 5>&-\n{ echo \"$CONTAINER_NAMESPACE\"; cat <&3; } > \"$1\"\n";
    fs::write(&logger, script).unwrap();
    fs::set_permissions(&logger, fs::Permissions::from_mode(0o755)).unwrap();
    for (what, uri) in [
        ("file", format!("file://{}", log.display())),
        ("binary", format!("binary://{}?{}", logger.display(), log.display())),
    ] {
        let _ = fs::remove_file(&log);
        let id = stage.detached(&["--log-uri", &uri], &["/bin/sh", "-c", "echo to the log; sleep 0.1"]);
        assert!(stage.wait_for_state(&id, "STOPPED"));
        stage.remove(&id);
        let complete = until(|| fs::read_to_string(&log).is_ok_and(|text| text.contains("log")));
        met.insert(format!("logs to {what}"), format!("{complete} {}", fs::read_to_string(&log).unwrap_or_default()));
    }
}

fn terminals(stage: &Stage<'_>, met: &mut Met) {
    let id = unique("behaviour");
    let call = stage.host.run(stage.runtime, &id, &["--rm", "--tty"], &["/bin/sh"]);
    let said = Stage::with_terminal(call, "stty size; echo $((6*7))\nexit 5\n", || stage.state(&id) == "RUNNING");
    met.insert("a terminal".into(), format!("{} {}", said.starts_with("Some(5)"), said.contains("42")));

    let id = unique("behaviour");
    let start = stage.host.run(stage.runtime, &id, &["--detach", "--tty"], &["/bin/sh"]);
    Stage::with_terminal(start, "", || stage.state(&id) == "RUNNING");
    let attach = stage.host.containerd.ctr(["tasks", "attach", id.as_str()]);
    let said = Stage::with_terminal(attach, "echo $((7*8))\nexit 6\n", || true);
    met.insert("attach".into(), format!("{} {}", said.starts_with("Some(6)"), said.contains("56")));
    stage.remove(&id);

    let id = stage.detached(&[], &["/bin/sleep", "100"]);
    let exec = stage.host.containerd.ctr(["tasks", "exec", "--tty", "--exec-id", "e", &id, "/bin/sh"]);
    let said = Stage::with_terminal(exec, "test -t 0 && echo $((8*9))\nexit 7\n", || {
        // A header, init and what exec has added.
        String::from_utf8_lossy(&stage.ctr(&["tasks", "ps", &id]).stdout).lines().count() == 3
    });
    met.insert("exec with a terminal".into(), format!("{} {}", said.starts_with("Some(7)"), said.contains("72")));
    stage.remove(&id);
}

fn execs(stage: &Stage<'_>, met: &mut Met) {
    let id = stage.detached(&[], &["/bin/sleep", "100"]);
    let exec = |exec_id: &str, command: &[&str]| {
        let arguments = [&["tasks", "exec", "--exec-id", exec_id, &id], command].concat();
        describe(&stage.ctr(&arguments)).replace(&id, "ID")
    };
    met.insert("exec".into(), exec("a", &["/bin/sh", "-c", "echo hello; exit 9"]));
    met.insert("exec again by the same id".into(), exec("a", &["/bin/true"]));
    met.insert("exec of nothing".into(), exec("b", &["/nothing"]));
    met.insert("exec with a child left".into(), exec("c", &["/bin/sh", "-c", "sleep 50 & exit 2"]));
    let list = String::from_utf8(stage.ctr(&["tasks", "ps", &id]).stdout).unwrap();
    met.insert("processes".into(), list.lines().count().to_string());
    // Init ends while an exec runs.
    let mut longer = stage.host.containerd.ctr(["tasks", "exec", "--exec-id", "d", &id, "/bin/sleep", "30"]);
    let mut longer = longer.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let running = until(|| {
        String::from_utf8_lossy(&stage.ctr(&["tasks", "ps", &id]).stdout).lines().count() == list.lines().count() + 1
    });
    stage.ctr(&["tasks", "kill", "--signal", "KILL", &id]);
    met.insert("exec when init ends".into(), format!("{running} {:?}", longer.wait().unwrap().code()));
    met.insert("init after its exec".into(), stage.wait_for_state(&id, "STOPPED").to_string());
    met.insert("removed".into(), format!("{:?}", stage.remove(&id)));
}

fn signals(stage: &Stage<'_>, met: &mut Met) {
    for signal in ["TERM", "USR1", "KILL", "36"] {
        let id = unique("behaviour");
        let script = "trap 'echo got usr1; exit 8' USR1; trap 'exit 9' TERM; while true; do sleep 0.05; done";
        let command: &[&str] = if signal == "36" { &["/bin/sleep", "100"] } else { &["/bin/sh", "-c", script] };
        let mut call = stage.host.run(stage.runtime, &id, &[], command);
        let child = call.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        assert!(stage.wait_for_state(&id, "RUNNING"));
        std::thread::sleep(Duration::from_millis(200));
        // A shell without a handler, as PID 1, isn't ended by a signal that has none; by a real-time one neither.
        let kill = stage.ctr(&["tasks", "kill", "--signal", signal, &id]);
        if signal == "36" {
            met.insert("real-time signal".into(), format!("{:?} {}", kill.status.code(), stage.state(&id)));
            stage.ctr(&["tasks", "kill", "--signal", "KILL", &id]);
        }
        met.insert(format!("signal {signal}"), describe(&child.wait_with_output().unwrap()));
        let again = stage.ctr(&["tasks", "kill", "--signal", "KILL", &id]);
        met.insert("kill when it has ended".into(), describe(&again).replace(&id, "ID"));
        stage.remove(&id);
    }
    let id = stage.detached(&[], &["/bin/sh", "-c", "sleep 200 & sleep 100"]);
    let all = stage.ctr(&["tasks", "kill", "--all", "--signal", "KILL", &id]);
    met.insert("kill all".into(), format!("{:?} {}", all.status.code(), stage.wait_for_state(&id, "STOPPED")));
    stage.remove(&id);
    // An exec ended by a real-time signal, whose number its status has.
    let id = stage.detached(&[], &["/bin/sleep", "100"]);
    let mut exec = stage.host.containerd.ctr(["tasks", "exec", "--exec-id", "e", &id, "/bin/sh", "-c", "kill -36 $$"]);
    met.insert("exec by a real-time signal".into(), describe(&exec.output().unwrap()));
    let running = describe(&stage.ctr(&["tasks", "rm", &id])).replace(&id, "ID");
    met.insert("removal while it runs".into(), running);
    stage.remove(&id);
}

fn pauses(stage: &Stage<'_>, met: &mut Met) {
    let id = stage.detached(&[], &["/bin/sleep", "100"]);
    for action in ["pause", "resume"] {
        let output = stage.ctr(&["tasks", action, &id]);
        met.insert(action.into(), format!("{} {}", describe(&output), stage.state(&id)));
    }
    stage.remove(&id);
    let output = stage.ctr(&["tasks", "pause", &id]);
    met.insert("pause of nothing".into(), describe(&output).replace(&id, "ID"));
}

fn metrics(stage: &Stage<'_>, met: &mut Met) {
    let id = stage.detached(
        &["--memory-limit", "67108864"],
        &["/bin/sh", "-c", "cat /dev/zero | head -c 100000000 >/dev/null; sleep 100"],
    );
    std::thread::sleep(Duration::from_millis(400));
    let text = String::from_utf8(stage.ctr(&["tasks", "metrics", "--format", "json", &id]).stdout).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    // Which figures there are, and which of them are zero: their values differ from one moment to the next.
    let mut figures = Vec::new();
    collect_figures("", &value, &mut figures);
    // What the kernel writes back or faults in differs from run to run.
    let steady = ["pids.current", "pids.limit", "usage.total", "limit", "user", "kernel", "usage", "per_cpu", "rss"];
    figures
        .retain(|figure| steady.iter().any(|name| figure.split(' ').next().is_some_and(|path| path.ends_with(name))));
    met.insert("metrics".into(), figures.join("\n"));
    stage.remove(&id);
}

fn collect_figures(path: &str, value: &serde_json::Value, figures: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                collect_figures(&path, value, figures);
            }
        }
        serde_json::Value::Array(list) => figures.push(format!("{path} {}", list.len())),
        other => figures.push(format!("{path} {}", if other.as_f64() == Some(0.0) { "0" } else { "some" })),
    }
}

fn events(stage: &Stage<'_>, met: &mut Met) {
    let mut listener = stage.host.containerd.ctr(["events"]).stdout(Stdio::piped()).spawn().unwrap();
    let (sender, lines) = mpsc::channel();
    let output = BufReader::new(listener.stdout.take().unwrap());
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    std::thread::sleep(Duration::from_millis(500));
    let id = stage.detached(&[], &["/bin/sh", "-c", "sleep 100"]);
    stage.ctr(&["tasks", "exec", "--exec-id", "e", &id, "/bin/sh", "-c", "exit 3"]);
    stage.ctr(&["tasks", "pause", &id]);
    stage.ctr(&["tasks", "resume", &id]);
    stage.ctr(&["tasks", "kill", "--signal", "KILL", &id]);
    assert!(stage.wait_for_state(&id, "STOPPED"));
    stage.remove(&id);
    let quick = stage.run(&[], &["/bin/true"]);
    assert!(quick.status.success());
    std::thread::sleep(Duration::from_millis(700));
    let _ = listener.kill();
    let _ = listener.wait();
    // Time, namespace, topic, then the event: ids, pids and times differ, the rest doesn't.
    let said: Vec<String> = lines
        .try_iter()
        .filter(|line| line.contains("/tasks/"))
        .map(|line| {
            let topic = line.split(' ').find(|word| word.starts_with("/tasks/")).unwrap_or_default().to_owned();
            let event: serde_json::Value =
                line.find('{').and_then(|start| serde_json::from_str(&line[start..]).ok()).unwrap_or_default();
            let fields: Vec<String> = event
                .as_object()
                .into_iter()
                .flatten()
                .map(|(key, value)| match key.as_str() {
                    "exit_status" | "exec_id" => format!("{key}={value}"),
                    _ => key.clone(),
                })
                .collect();
            format!("{topic} {}", fields.join(" "))
        })
        .collect();
    // runc's shim may lose its last event, that of the deletion, on its way out; ours may not.
    let (deletions, said): (Vec<String>, Vec<String>) =
        said.into_iter().partition(|line| line.starts_with("/tasks/delete"));
    assert!(stage.runtime == RUNC || deletions.len() == 2, "{deletions:?}");
    met.insert("events".into(), said.join("\n"));
}

fn out_of_memory(stage: &Stage<'_>, met: &mut Met) {
    let mut listener = stage.host.containerd.ctr(["events"]).stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let hog = "x=a; while true; do x=$x$x; done";
    let output = stage.run(&["--memory-limit", "33554432"], &["/bin/sh", "-c", hog]);
    std::thread::sleep(Duration::from_millis(700));
    let _ = listener.kill();
    let text = String::from_utf8(listener.wait_with_output().unwrap().stdout).unwrap();
    let told = text.lines().filter(|line| line.contains("/tasks/oom")).count();
    met.insert("out of memory".into(), format!("{:?} told {}", output.status.code(), told > 0));
    let child = "(x=a; while true; do x=$x$x; done); sleep 0.2; exit 6";
    let output = stage.run(&["--memory-limit", "33554432"], &["/bin/sh", "-c", child]);
    met.insert("a child out of memory".into(), format!("{:?}", output.status.code()));
}

fn checkpoints(stage: &Stage<'_>, met: &mut Met) {
    // There is no CRIU in Debian 12: runc says so, and both shims pass its words on.
    let id = stage.detached(&[], &["/bin/sleep", "100"]);
    let output = stage.ctr(&["tasks", "checkpoint", &id]);
    let said = String::from_utf8_lossy(&output.stderr).contains("criu");
    met.insert("checkpoint".into(), format!("{:?} {said}", output.status.code()));
    stage.remove(&id);
}

const SCENES: [fn(&Stage<'_>, &mut Met); 9] =
    [exits, stdio, terminals, execs, signals, pauses, metrics, events, checkpoints];

#[test]
fn containerd_1_6() {
    same_as_runc(Engine::Containerd16, Cgroups::Host, &SCENES);
}

#[test]
fn containerd_1_7() {
    same_as_runc(Engine::Containerd17, Cgroups::Host, &SCENES);
}

#[test]
fn containerd_2() {
    same_as_runc(Engine::Containerd2, Cgroups::Host, &SCENES);
}

/// The memory controller of the machines that this runs on is a v1 one.
#[test]
fn out_of_memory_on_every_containerd() {
    for engine in [Engine::Containerd16, Engine::Containerd17, Engine::Containerd2] {
        same_as_runc(engine, Cgroups::Host, &[out_of_memory]);
    }
}

#[test]
fn cgroup_v2() {
    same_as_runc(Engine::Containerd17, Cgroups::V2, &[exits, execs, pauses, signals, events]);
}
