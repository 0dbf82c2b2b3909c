//! `gpufence-runtime` and `gpufence-hook` by themselves: bundles that are no bundles, a broken fence, and what passes
//! through.

use std::{
    fs,
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use gpufence_tests::{
    host::{Host, Plan, unique},
    programs,
};
use serde_json::{Value, json};

/// Calls of low-level runtimes on a host, with a state folder of their own.
struct Calls<'a>(&'a Host);

impl Calls<'_> {
    fn root(&self) -> PathBuf {
        self.0.folder().join("runc")
    }

    fn ours(&self, words: &[&str]) -> Output {
        let mut command = Command::new(programs::built().unwrap().join("gpufence-runtime"));
        command.arg("--policy").arg(self.0.policy());
        self.call(command, words)
    }

    fn runc(&self, words: &[&str]) -> Output {
        self.call(Command::new("runc"), words)
    }

    /// What a detached container has for output must not be a pipe that we wait for.
    fn call(&self, mut command: Command, words: &[&str]) -> Output {
        let errors = self.0.folder().join(unique("errors"));
        command.args(words.iter().take_while(|word| word.starts_with("--"))).arg("--root").arg(self.root());
        command.args(words.iter().skip_while(|word| word.starts_with("--")));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&errors).unwrap());
        let status = command.status().unwrap();
        Output { status, stdout: Vec::new(), stderr: fs::read(errors).unwrap() }
    }

    /// A sound bundle.
    fn bundle(&self, change: impl FnOnce(&mut Value)) -> PathBuf {
        let bundle = self.0.folder().join(unique("bundle"));
        fs::create_dir_all(&bundle).unwrap();
        assert!(Command::new("runc").arg("spec").current_dir(&bundle).status().unwrap().success());
        let file = bundle.join("config.json");
        let mut spec: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        spec["root"]["path"] = json!(self.0.rootfs());
        spec["process"]["terminal"] = json!(false);
        spec["process"]["args"] = json!(["/bin/sleep", "1000"]);
        spec["process"]["rlimits"] = json!([]);
        change(&mut spec);
        fs::write(&file, spec.to_string()).unwrap();
        bundle
    }

    fn states(&self) -> usize {
        fs::read_dir(self.root()).into_iter().flatten().count()
    }
}

/// Each fails cleanly, or does what it does under runc; nothing is left behind.
#[test]
fn bundles_that_are_none() {
    let host = Host::start(&Plan::default()).unwrap();
    let calls = Calls(&host);
    let with_text = |text: &str| {
        let bundle = calls.bundle(|_| {});
        fs::write(bundle.join("config.json"), text).unwrap();
        bundle
    };
    let mut long = calls.bundle(|_| {}).join("config.json");
    let text = fs::read_to_string(&long).unwrap();
    fs::write(&long, format!("{text}{}", " ".repeat(70 << 20))).unwrap();
    long.pop();
    let without_file = calls.bundle(|_| {});
    fs::remove_file(without_file.join("config.json")).unwrap();
    let linked = calls.bundle(|_| {});
    fs::rename(linked.join("config.json"), linked.join("other.json")).unwrap();
    symlink("other.json", linked.join("config.json")).unwrap();
    let annotated = |spec: &mut Value| spec["annotations"] = json!({"gpufence.dev/gpu": "0=1GiB"});
    for (what, bundle, works) in [
        ("no config.json", without_file, false),
        ("no such folder", host.folder().join("nowhere"), false),
        ("empty", with_text(""), false),
        ("not JSON", with_text("{\"ociVersion\":"), false),
        ("a list", with_text("[]"), false),
        ("70 MB", long, false),
        ("process is a number", calls.bundle(|spec| spec["process"] = json!(1)), false),
        ("no process", calls.bundle(|spec| drop(spec.as_object_mut().unwrap().remove("process"))), false),
        ("linux is a text", calls.bundle(|spec| spec["linux"] = json!("x")), false),
        ("devices is an object", calls.bundle(|spec| spec["linux"]["resources"]["devices"] = json!({})), false),
        ("env is a text", calls.bundle(|spec| spec["process"]["env"] = json!("A=b")), false),
        ("annotations is a list", calls.bundle(|spec| spec["annotations"] = json!([])), false),
        (
            "a grant, and a program that isn't there",
            calls.bundle(|spec| {
                annotated(spec);
                spec["process"]["args"] = json!(["/nothing"]);
            }),
            false,
        ),
        ("an unknown field", calls.bundle(|spec| spec["ofNextYear"] = json!({"a": [1]})), true),
        (
            "an unknown field and a grant",
            calls.bundle(|spec| {
                annotated(spec);
                spec["ofNextYear"] = json!(true);
            }),
            true,
        ),
        ("config.json is a link", linked, true),
    ] {
        let id = unique("malformed");
        let bundle = bundle.to_str().unwrap();
        let output = calls.ours(&["create", "--bundle", bundle, &id]);
        assert_eq!(output.status.success(), works, "{what}: {}", String::from_utf8_lossy(&output.stderr));
        if !works {
            assert!(!output.stderr.is_empty(), "{what}: nothing was said");
        }
        calls.ours(&["delete", "--force", &id]);
        assert_eq!(calls.states(), 0, "{what}: runc's state is left");
        let ours = host.container_folders();
        let left = fs::read_dir(&ours).into_iter().flatten().count();
        assert_eq!(left, 0, "{what}: our folder is left");
        let temporary = Path::new(bundle).join("config.json.gpufence");
        assert!(!temporary.exists(), "{what}: a temporary file is left");
    }
}

/// What isn't create, run, exec or delete comes through as it is, and errors go where the engine looks.
#[test]
fn what_passes_through_and_where_errors_go() {
    let host = Host::start(&Plan::default()).unwrap();
    let calls = Calls(&host);
    let ours = |words: &[&str]| {
        let mut command = Command::new(programs::built().unwrap().join("gpufence-runtime"));
        command.arg("--policy").arg(host.policy()).args(words).output().unwrap()
    };
    let theirs = |words: &[&str]| Command::new("runc").args(words).output().unwrap();
    for words in
        [&["--version"][..], &["--help"], &["list"], &["state", "nothing"], &["create", "--help"], &["nonsense"]]
    {
        let (ours, theirs) = (ours(words), theirs(words));
        assert_eq!(ours.status.code(), theirs.status.code(), "{words:?}");
        assert_eq!(String::from_utf8_lossy(&ours.stdout), String::from_utf8_lossy(&theirs.stdout), "{words:?}");
    }
    let features: Value = serde_json::from_slice(&ours(&["features"]).stdout).unwrap();
    assert_eq!(features["annotations"]["dev.gpufence.version"], env!("CARGO_PKG_VERSION"));
    assert!(features["hooks"].as_array().unwrap().contains(&json!("createRuntime")), "runc's own are there too");

    let log = host.folder().join("log.json");
    let bundle = calls.bundle(|spec| spec["annotations"] = json!({"gpufence.dev/gpu": "9=1GiB"}));
    let log_flag = format!("--log={}", log.display());
    let output = calls.ours(&[&log_flag, "--log-format=json", "create", "--bundle", bundle.to_str().unwrap(), "x"]);
    assert!(!output.status.success());
    let line: Value = serde_json::from_str(fs::read_to_string(&log).unwrap().lines().last().unwrap()).unwrap();
    assert_eq!(line["level"], "error");
    assert!(line["msg"].as_str().unwrap().contains("GPU 9 is not on this node"), "{line}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("GPU 9 is not on this node"));
}

/// The hook's check, on a container whose fence somebody has taken down.
#[test]
fn the_final_check_finds_what_is_wrong() {
    let host = Host::start(&Plan::default()).unwrap();
    let calls = Calls(&host);
    let grant = |spec: &mut Value| spec["annotations"] = json!({"gpufence.dev/gpu": "0=1GiB"});
    let id = unique("checked");
    let bundle = calls.bundle(grant);
    let output = calls.ours(&["create", "--bundle", bundle.to_str().unwrap(), &id]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let folder = host.container_folders().join("runc").join(&id);
    let fence = fs::read_to_string(folder.join("fence.json")).unwrap();
    assert!(calls.ours(&["delete", "--force", &id]).status.success());
    assert!(!folder.exists(), "the hook's clean-up");

    // The same fence, on containers that runc made of other bundles.
    let check = |what: &str, change: &dyn Fn(&mut Value), expected: &str| {
        let id = unique("broken");
        let folder = host.folder().join("folders").join(&id);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("fence.json"), &fence).unwrap();
        let hook = programs::built().unwrap().join("gpufence-hook");
        let bundle = calls.bundle(|spec| {
            let node = |minor: u32, path: &str| json!({"path": path, "type": "c", "major": 195, "minor": minor, "fileMode": 438, "uid": 0, "gid": 0});
            let uvm: Value = serde_json::from_str::<Value>(&fence).unwrap()["granted"][0].clone();
            let mut uvm_node = node(0, "/dev/nvidia-uvm");
            (uvm_node["major"], uvm_node["minor"]) = (uvm[0].clone(), uvm[1].clone());
            spec["linux"]["devices"] = json!([node(0, "/dev/nvidia0"), node(255, "/dev/nvidiactl"), uvm_node]);
            spec["linux"]["resources"]["devices"] = json!([{"allow": false, "access": "rwm"}]);
            spec["hooks"] = json!({"createRuntime": [{"path": hook, "args": ["gpufence-hook", "check", "--folder", folder]}]});
            change(spec);
        });
        let output = calls.runc(&["create", "--bundle", bundle.to_str().unwrap(), &id]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        calls.runc(&["delete", "--force", &id]);
        if expected.is_empty() {
            assert!(output.status.success(), "{what}: {said}");
        } else {
            assert!(!output.status.success() && said.contains(expected), "{what}: {said}");
        }
    };
    check("sound", &|_| {}, "");
    let allow =
        |spec: &mut Value, rule: Value| spec["linux"]["resources"]["devices"].as_array_mut().unwrap().push(rule);
    check(
        "everything is allowed",
        &|spec| allow(spec, json!({"allow": true, "access": "rwm"})),
        "which its grant doesn't name",
    );
    check(
        "one GPU too many is allowed",
        &|spec| allow(spec, json!({"allow": true, "type": "c", "major": 195, "minor": 1, "access": "rw"})),
        "nvidia1 (195:1), which its grant doesn't name",
    );
    check(
        "a node too many",
        &|spec| {
            let node = json!({"path": "/dev/innocent", "type": "c", "major": 195, "minor": 1, "fileMode": 438, "uid": 0, "gid": 0});
            spec["linux"]["devices"].as_array_mut().unwrap().push(node);
        },
        "has the GPU node /dev/innocent (195:1)",
    );
    check(
        "a node is missing",
        &|spec| drop(spec["linux"]["devices"].as_array_mut().unwrap().remove(0)),
        "lacks the node 195:0",
    );

    // With no state, or one that isn't the container's, the hook fails.
    let hook = programs::built().unwrap().join("gpufence-hook");
    for state in
        ["", "{}", "{\"ociVersion\":\"1.0.2\",\"id\":\"other\",\"status\":\"created\",\"pid\":1,\"bundle\":\"/b\"}"]
    {
        let mut child = Command::new(&hook)
            .args(["clean-up", "--folder", host.folder().join("folders/x").to_str().unwrap()])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(state.as_bytes()).unwrap();
        assert!(!child.wait_with_output().unwrap().status.success(), "{state}");
    }
}

/// An image with musl for its C library: its own loader finds the libraries.
#[test]
fn musl() {
    let host = Host::start(&Plan::default()).unwrap();
    let root = host.folder().join("musl");
    for folder in ["lib", "etc", "dev", "proc"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/standins/dlopen.c");
    let built = Command::new("musl-gcc").args(["-o", root.join("dlopen").to_str().unwrap(), source]).status().unwrap();
    assert!(built.success());
    // The loader is the C library itself.
    let machine = std::env::consts::ARCH;
    fs::copy(format!("/usr/lib/{machine}-linux-musl/libc.so"), root.join(format!("lib/ld-musl-{machine}.so.1")))
        .unwrap();
    let run = |flags: &[&str]| {
        let flags = [&["--rm"], flags].concat();
        let command = ["/dlopen", "libcuda.so.1", "libnvidia-ml.so.1", "libcuda.so"];
        let output =
            host.run_on(&root, gpufence_tests::host::GPUFENCE, &unique("musl"), &flags, &command).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let said = run(&["--annotation", "gpufence.dev/gpu=0=1GiB"]);
    assert_eq!(said.matches(" found").count(), 3, "{said}");
    assert_eq!(run(&[]).matches(" found").count(), 0);
}
