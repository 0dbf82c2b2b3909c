//! runc's and crun's command line, as far as it has to be understood: which command it is, its bundle and its id.
//!
//! What isn't understood for certain, and might hide a `create`, is refused: a command that passed through unseen would be
//! a container without its fence.

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
};

/// Our own global flags, which all take a value.
const OWN_VALUES: [&str; 2] = ["grant", "policy"];
/// Global flags of runc 1.0 to 1.4 and crun that take a value.
const GLOBAL_VALUES: [&str; 8] =
    ["log", "log-format", "log-level", "root", "criu", "rootless", "cgroup-manager", "systemd-cgroup-manager"];
/// Global flags without one.
const GLOBAL_SWITCHES: [&str; 7] = ["debug", "systemd-cgroup", "version", "v", "help", "h", "usage"];
/// Flags of `create` and `run` that take a value.
const CREATE_VALUES: [&str; 5] = ["bundle", "b", "console-socket", "pid-file", "preserve-fds"];
/// Flags of theirs without one.
const CREATE_SWITCHES: [&str; 9] =
    ["detach", "d", "keep", "no-pivot", "no-new-keyring", "no-subreaper", "no-subreaper=true", "help", "h"];

/// Flags of `exec` that take a value.
const EXEC_VALUES: [&str; 18] = [
    "console-socket",
    "cwd",
    "env",
    "e",
    "user",
    "u",
    "additional-gids",
    "g",
    "process",
    "p",
    "pid-file",
    "process-label",
    "apparmor",
    "cap",
    "c",
    "preserve-fds",
    "cgroup",
    "umask",
];
/// Flags of its own without one.
const EXEC_SWITCHES: [&str; 7] = ["tty", "t", "detach", "d", "no-new-privs", "no-subreaper", "ignore-paused"];

/// A command line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Call {
    /// What it asks for.
    pub verb: Verb,
    /// `--grant`, which is ours.
    pub grant: Option<String>,
    /// `--policy`, which is ours too.
    pub policy: Option<PathBuf>,
    /// `--root`.
    pub root: Option<PathBuf>,
    /// `--log`.
    pub log: Option<PathBuf>,
    /// Whether `--log-format` is json.
    pub log_json: bool,
    /// Everything but what is ours, for the low-level runtime.
    pub passed_on: Vec<OsString>,
}

/// What a command line asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Verb {
    /// `create` or `run`.
    Create {
        /// The bundle as written; the working folder where none was.
        bundle: PathBuf,
        /// The container's id.
        id: String,
    },
    /// `exec`.
    Exec {
        /// The container's id.
        id: String,
        /// The file with the process; without one it is made from the container's own, which is held already.
        process: Option<PathBuf>,
        /// Capabilities that are to be added to those.
        added_capabilities: Vec<String>,
    },
    /// `delete`, with the container's id.
    Delete(String),
    /// `features`.
    Features,
    /// Anything else.
    #[default]
    Other,
}

impl Call {
    /// Engines give each of theirs a root folder of its own, which ends in what containerd calls a namespace.
    pub fn namespace(&self) -> String {
        let name = self.root.as_ref().and_then(|root| root.file_name()).map(|name| name.to_string_lossy().into_owned());
        name.filter(|name| !name.starts_with('.')).unwrap_or_else(|| "default".into())
    }
}

/// A flag with its name and the value that is written into the same word.
fn flag(word: &OsStr) -> Option<(String, Option<OsString>)> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = word.as_bytes();
    let rest = bytes.strip_prefix(b"--").or_else(|| bytes.strip_prefix(b"-")).filter(|rest| !rest.is_empty())?;
    let (name, value) = match rest.iter().position(|byte| *byte == b'=') {
        Some(at) => (&rest[..at], Some(OsStr::from_bytes(&rest[at + 1..]).to_owned())),
        None => (rest, None),
    };
    Some((String::from_utf8_lossy(name).into_owned(), value))
}

/// The value of a flag that has none in its own word.
fn next_word(name: &str, words: &mut impl Iterator<Item = OsString>) -> Result<OsString, String> {
    words.next().ok_or_else(|| format!("--{name} has no value"))
}

/// Reads a command line.
pub fn parse(words: Vec<OsString>) -> Result<Call, String> {
    let mut call = Call::default();
    let mut words = words.into_iter().peekable();
    let command = loop {
        let Some(word) = words.next() else { return Ok(call) };
        let Some((name, written)) = flag(&word) else { break word };
        let ours = OWN_VALUES.contains(&name.as_str());
        let takes_value = ours || GLOBAL_VALUES.contains(&name.as_str());
        if !takes_value && !GLOBAL_SWITCHES.contains(&name.as_str()) && written.is_none() {
            // Its value, if it takes one, can't be told from a command.
            call.passed_on.push(word);
            let rest: Vec<OsString> = words.collect();
            if rest.iter().any(|word| word == "create" || word == "run") {
                return Err(format!(
                    "the global flag --{name} is not known, so what follows can't be read; leave it out"
                ));
            }
            call.passed_on.extend(rest);
            return Ok(call);
        }
        let value = match (takes_value, written) {
            (true, None) => {
                let next = next_word(&name, &mut words)?;
                if !ours {
                    call.passed_on.extend([word, next.clone()]);
                }
                Some(next)
            }
            (_, written) => {
                if !ours {
                    call.passed_on.push(word);
                }
                written
            }
        };
        let Some(value) = value else { continue };
        match name.as_str() {
            "grant" => call.grant = Some(value.into_string().map_err(|_| "--grant is not UTF-8")?),
            "policy" => call.policy = Some(value.into()),
            "root" => call.root = Some(value.into()),
            "log" => call.log = Some(value.into()),
            "log-format" => call.log_json = value == "json",
            _ => {}
        }
    };
    let name = command.to_string_lossy().into_owned();
    call.passed_on.push(command);
    let rest: Vec<OsString> = words.collect();
    call.passed_on.extend(rest.iter().cloned());
    call.verb = match name.as_str() {
        "create" | "run" => create(&name, rest)?,
        "exec" => exec(rest)?,
        "delete" => delete(&rest),
        "features" => Verb::Features,
        _ => Verb::Other,
    };
    Ok(call)
}

/// Flags come before the id; what follows it is the command's.
fn exec(words: Vec<OsString>) -> Result<Verb, String> {
    let (mut process, mut added_capabilities) = (None, Vec::new());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let Some((name, written)) = flag(&word) else {
            let id = word.into_string().map_err(|_| "the container's id is not UTF-8")?;
            return Ok(Verb::Exec { id, process, added_capabilities });
        };
        if name == "help" || name == "h" {
            return Ok(Verb::Other);
        }
        let takes_value = EXEC_VALUES.contains(&name.as_str());
        if !takes_value && !EXEC_SWITCHES.contains(&name.as_str()) {
            return Err(format!("the flag --{name} of exec is not known; leave it out"));
        }
        if takes_value {
            let value = written.map_or_else(|| next_word(&name, &mut words), Ok)?;
            match name.as_str() {
                "process" | "p" => process = Some(value.into()),
                "cap" | "c" => added_capabilities.push(value.to_string_lossy().into_owned()),
                _ => {}
            }
        }
    }
    Ok(Verb::Other)
}

/// `delete` takes switches and one id.
fn delete(words: &[OsString]) -> Verb {
    let id = words.iter().find(|word| flag(word).is_none());
    id.and_then(|id| id.to_str()).map_or(Verb::Other, |id| Verb::Delete(id.to_owned()))
}

fn create(command: &str, words: Vec<OsString>) -> Result<Verb, String> {
    let mut bundle = PathBuf::from(".");
    let mut ids = Vec::new();
    let mut words = words.into_iter();
    let mut only_ids = false;
    while let Some(word) = words.next() {
        if word == "--" && !only_ids {
            only_ids = true;
            continue;
        }
        let Some((name, written)) = flag(&word).filter(|_| !only_ids) else {
            ids.push(word);
            continue;
        };
        if name == "help" || name == "h" {
            return Ok(Verb::Other);
        }
        let takes_value = CREATE_VALUES.contains(&name.as_str());
        if !takes_value && !CREATE_SWITCHES.contains(&name.as_str()) {
            // crun's --config names another file than the one that is held to the grant; and so might a flag to come.
            return Err(format!("the flag --{name} of {command} is not known; leave it out"));
        }
        if takes_value {
            let value = written.map_or_else(|| next_word(&name, &mut words), Ok)?;
            if name == "bundle" || name == "b" {
                bundle = value.into();
            }
        }
    }
    match <[OsString; 1]>::try_from(ids) {
        Ok([id]) => Ok(Verb::Create { bundle, id: id.into_string().map_err(|_| "the container's id is not UTF-8")? }),
        Err(ids) => Err(format!("{command} takes one container id; here are {}", ids.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Call, String> {
        parse(line.split_whitespace().map(OsString::from).collect())
    }

    fn created(line: &str) -> Option<(String, String)> {
        match read(line).unwrap_or_else(|error| panic!("{line}: {error}")).verb {
            Verb::Create { bundle, id } => Some((bundle.to_string_lossy().into_owned(), id)),
            _ => None,
        }
    }

    #[test]
    fn every_form_of_a_bundle() {
        for line in [
            "create --bundle /b id",
            "create --bundle=/b id",
            "create -b /b id",
            "create -b=/b id",
            "create -bundle /b id",
            "create -bundle=/b id",
            "create id --bundle /b",
            "create --bundle /other --bundle /b id",
            "create --bundle /b -- id",
            "run -d --bundle /b --pid-file p --console-socket=s --no-pivot --preserve-fds 3 id",
            "--root /r --log l --log-format json --systemd-cgroup create --bundle /b id",
            "--root=/r --debug --cgroup-manager systemd --rootless=auto create --bundle /b id",
            "-log l -log-format=json create --bundle /b id",
        ] {
            assert_eq!(created(line), Some(("/b".into(), "id".into())), "{line}");
        }
        assert_eq!(created("create id"), Some((".".into(), "id".into())));
    }

    #[test]
    fn what_passes_through() {
        for line in
            ["", "--version", "start id", "exec id create", "--root create delete id", "state create", "create --help"]
        {
            assert_eq!(created(line), None, "{line}");
        }
        let exec = |line: &str| match read(line).unwrap().verb {
            Verb::Exec { id, process, added_capabilities } => {
                format!("{id} {} {}", process.unwrap_or_default().display(), added_capabilities.join(","))
            }
            other => format!("{other:?}"),
        };
        assert_eq!(exec("--root /r exec --process /p --console-socket s --detach --pid-file f id"), "id /p ");
        assert_eq!(exec("exec -p=/p -t id sh -p /other"), "id /p ");
        assert_eq!(exec("exec --cap CAP_SYS_ADMIN -c=CAP_BPF id sh"), "id  CAP_SYS_ADMIN,CAP_BPF");
        assert!(read("exec --unknown x id").is_err());
        assert_eq!(read("features").unwrap().verb, Verb::Features);
        assert_eq!(read("--root /r delete --force id").unwrap().verb, Verb::Delete("id".into()));
        let call =
            read("--grant 0=8GiB --policy=/p --root /run/x/moby --log /l --log-format json create -b /b id").unwrap();
        assert_eq!((call.grant.as_deref(), call.namespace().as_str(), call.log_json), (Some("0=8GiB"), "moby", true));
        let passed: Vec<_> = call.passed_on.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(passed.join(" "), "--root /run/x/moby --log /l --log-format json create -b /b id");
        assert_eq!(read("--grant=0=8GiB list").unwrap().passed_on, ["list"]);
    }

    #[test]
    fn what_might_hide_a_create_is_refused() {
        for line in [
            "--unknown create -b /b id",
            "--unknown value create id",
            "create --config other.json id",
            "create -f other.json id",
            "create -b/b id",
            "create",
            "create a b",
            "create --bundle",
            "--root",
        ] {
            assert!(read(line).is_err(), "{line}");
        }
        // One that can't be read, with no create after it.
        assert_eq!(read("--unknown value list").unwrap().verb, Verb::Other);
    }
}
