//! The administrator's word: `/etc/gpufence/config.toml`.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

use gpufence_cdi::capability::{DriverCapabilities, DriverCapability};
use gpufence_grant::{
    GpuReference,
    limits::OnFailure,
    signature::{Keyring, PublicKey, SignatureError},
};
use serde::{Deserialize, Serialize};

use crate::{EnforceError, memory::Rung};

/// Where the policy is, unless [`POLICY_VARIABLE`] says otherwise.
pub const POLICY_FILE: &str = "/etc/gpufence/config.toml";
/// Names another policy file. It is read from the environment of the engine, never from a container's.
pub const POLICY_VARIABLE: &str = "GPUFENCE_CONFIG";

/// What is done with privileged containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Privileged {
    /// They are not created.
    Deny,
    /// They are created, fenced from GPUs that they weren't granted and without the dropped capabilities.
    Fence,
    /// They are left as they are, for infrastructure that is trusted with the whole machine.
    Allow,
}

/// How memory limits are held: the table `memory`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryPolicy {
    /// The weakest thing that may keep a container to its limit; below it the container is not created.
    pub require: Rung,
    /// The folder of the limiter's libraries. By default `../lib/gpufence` from our own program; empty: no limiter.
    pub limiter: Option<PathBuf>,
    /// What becomes of allocations when the limiter itself fails.
    pub on_limiter_failure: OnFailure,
}

/// What is done about a process that holds GPU memory which it wasn't granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It is counted in the metrics.
    Record,
    /// It is told in the log, besides.
    Warn,
    /// It is ended after the grace period, besides.
    End,
}

/// What `gpufence-node` watches: the table `watchdog`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WatchdogPolicy {
    /// Milliseconds from one reading to the next.
    pub period_milliseconds: u64,
    /// What is done where a container's processes hold more of a GPU than granted.
    pub over_limit: Action,
    /// What is done about a container's process on a shared GPU that its grant doesn't name.
    pub foreign: Action,
    /// Seconds for which it must have been so before a process is ended.
    pub grace_seconds: u64,
    /// MiB above the limit that are let pass: what the driver takes for modules and the like, which no limiter sees.
    pub tolerance_mib: u64,
}

impl Default for WatchdogPolicy {
    fn default() -> Self {
        Self {
            period_milliseconds: 1000,
            over_limit: Action::End,
            foreign: Action::Warn,
            grace_seconds: 5,
            tolerance_mib: 512,
        }
    }
}

/// Which GPUs are shared by NVIDIA's Multi-Process Service: the table `mps`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MpsPolicy {
    /// Sets of GPUs and MIG instances, by index or UUID. Each has a daemon of its own, whose clients can fail together; a
    /// container's GPUs are all of one set.
    pub sets: Vec<Vec<String>>,
    /// Whether those GPUs take no other programs (compute mode EXCLUSIVE_PROCESS), so that none gets past the daemon.
    pub exclusive: bool,
}

impl Default for MpsPolicy {
    fn default() -> Self {
        Self { sets: Vec::new(), exclusive: true }
    }
}

/// The policy of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// The folder under which the driver's files are found.
    pub driver_root: PathBuf,
    /// Where the inventory and the containers' folders are.
    pub state_dir: PathBuf,
    /// Where the stage is.
    pub stage_dir: PathBuf,
    /// This node's name, against which a grant's is held. Empty: not checked.
    pub node: String,
    /// Whether only signed grants count, each for the Pod and the node that it was signed for.
    pub require_signature: bool,
    /// The public keys that signatures are held against, besides those of `keys_dir`.
    pub keys: Vec<String>,
    /// A folder whose `*.pub` files have more public keys.
    pub keys_dir: PathBuf,
    /// Seconds after which a signed grant is too old. 0: never, since a Pod's containers restart with the grant they have.
    pub grant_max_age_seconds: u64,
    /// Seconds by which the clock of who signs may be ahead of this node's.
    pub grant_clock_skew_seconds: u64,
    /// What is done with privileged containers.
    pub privileged: Privileged,
    /// The driver capabilities that a container may have.
    pub allowed_driver_capabilities: DriverCapabilities,
    /// Those it has if it doesn't choose.
    pub default_driver_capabilities: DriverCapabilities,
    /// The driver's programs that are mounted.
    pub binaries: Vec<String>,
    /// Whether GSP firmware is mounted.
    pub firmware: bool,
    /// Whether an image's cuda-compat package is preferred where it is of a newer branch than the driver.
    pub cuda_compat: bool,
    /// Linux capabilities taken from containers that have a grant or are privileged.
    pub drop_capabilities: Vec<String>,
    /// Linux capabilities taken from all others. A container with the ordinary ones of an engine stays as it is.
    pub drop_capabilities_ungranted: Vec<String>,
    /// Linux capabilities taken, besides, from those in the host's PID namespace, whose processes they would reach.
    pub drop_capabilities_host_pid: Vec<String>,
    /// Whether `no_new_privs` is forced on containers with a grant.
    pub no_new_privileges: bool,
    /// Whether `NVIDIA_VISIBLE_DEVICES` counts as a grant of whole GPUs to containers outside of Pods that have no other.
    /// For a host whose images are all trusted: an image can set it.
    pub accept_visible_devices: bool,
    /// Which low-level runtimes are wrapped, by name (looked up on the engine's PATH) or absolute path; the first that
    /// is there.
    pub runtimes: Vec<String>,
    /// Where `gpufence-hook` is. By default beside our own program, or on the engine's PATH.
    pub hook: Option<PathBuf>,
    /// Seconds that one call of the low-level runtime may take.
    pub runtime_timeout_seconds: u64,
    /// How memory limits are held.
    pub memory: MemoryPolicy,
    /// What the node agent does about memory that wasn't granted.
    pub watchdog: WatchdogPolicy,
    /// Which GPUs are shared by MPS.
    pub mps: MpsPolicy,
}

/// What lets a process get round a device cgroup or reach the host. MKNOD is not among the reasons to distrust a
/// container with no grant: engines give it to all, and the device cgroup holds against it.
const REACH_THE_HOST: [&str; 9] = [
    "CAP_SYS_ADMIN",
    "CAP_SYS_RAWIO",
    "CAP_SYS_MODULE",
    "CAP_SYS_BOOT",
    "CAP_BPF",
    "CAP_PERFMON",
    "CAP_DAC_READ_SEARCH",
    "CAP_MAC_ADMIN",
    "CAP_MAC_OVERRIDE",
];

impl Default for Policy {
    fn default() -> Self {
        let capabilities = DriverCapabilities::from([DriverCapability::Compute, DriverCapability::Utility]);
        Self {
            driver_root: "/".into(),
            state_dir: "/run/gpufence".into(),
            stage_dir: "/var/lib/gpufence/stage".into(),
            node: String::new(),
            require_signature: false,
            keys: Vec::new(),
            keys_dir: "/etc/gpufence/keys.d".into(),
            grant_max_age_seconds: 0,
            grant_clock_skew_seconds: 300,
            privileged: Privileged::Fence,
            allowed_driver_capabilities: capabilities.clone(),
            default_driver_capabilities: capabilities,
            binaries: vec!["nvidia-smi".into()],
            firmware: true,
            cuda_compat: true,
            drop_capabilities: ["CAP_MKNOD"].iter().chain(&REACH_THE_HOST).map(|&name| name.into()).collect(),
            drop_capabilities_ungranted: REACH_THE_HOST.map(Into::into).to_vec(),
            drop_capabilities_host_pid: vec!["CAP_SYS_PTRACE".into()],
            no_new_privileges: false,
            accept_visible_devices: false,
            runtimes: vec!["runc".into(), "crun".into()],
            hook: None,
            runtime_timeout_seconds: 120,
            memory: MemoryPolicy::default(),
            watchdog: WatchdogPolicy::default(),
            mps: MpsPolicy::default(),
        }
    }
}

impl Policy {
    /// The node's policy: the file that the engine's environment names, else the usual one, else the defaults.
    pub fn load() -> Result<Self, EnforceError> {
        match std::env::var_os(POLICY_VARIABLE) {
            Some(path) => Self::read(Path::new(&path)),
            None if Path::new(POLICY_FILE).exists() => Self::read(Path::new(POLICY_FILE)),
            None => Ok(Self::default()),
        }
    }

    /// Reads a policy file. A word that it doesn't know is an error: a misspelt rule must not be no rule.
    pub fn read(path: &Path) -> Result<Self, EnforceError> {
        let error = |what: String| EnforceError::Policy { path: path.to_owned(), what };
        let text = std::fs::read_to_string(path).map_err(|source| error(source.to_string()))?;
        let policy: Self = toml::from_str(&text).map_err(|source| error(source.to_string().trim_end().to_owned()))?;
        for (key, folder) in [
            ("driver_root", &policy.driver_root),
            ("state_dir", &policy.state_dir),
            ("stage_dir", &policy.stage_dir),
            ("keys_dir", &policy.keys_dir),
        ] {
            if !folder.is_absolute() {
                return Err(error(format!("{key} = \"{}\" is not an absolute path", folder.display())));
            }
        }
        if policy.require_signature && policy.node.is_empty() {
            return Err(error(
                "require_signature without node: a grant for another node couldn't be told; set node to this node's name in Kubernetes".into(),
            ));
        }
        if policy.require_signature && policy.accept_visible_devices {
            return Err(error("require_signature and accept_visible_devices exclude each other: nobody signs what an image's environment says".into()));
        }
        for text in &policy.keys {
            PublicKey::parse(text).map_err(|source| error(format!("keys: {source}")))?;
        }
        let lists =
            [&policy.drop_capabilities, &policy.drop_capabilities_ungranted, &policy.drop_capabilities_host_pid];
        for name in lists.into_iter().flatten() {
            let letters = name.strip_prefix("CAP_").unwrap_or_default();
            if letters.is_empty() || !letters.bytes().all(|b| b.is_ascii_uppercase() || b == b'_') {
                return Err(error(format!("\"{name}\" is not a capability's name, such as CAP_SYS_ADMIN")));
            }
        }
        if policy.runtimes.is_empty() {
            return Err(error("runtimes is empty; name at least one, such as \"runc\"".into()));
        }
        if let Some(name) = policy.runtimes.iter().find(|name| name.contains('/') && !name.starts_with('/')) {
            return Err(error(format!("runtime \"{name}\" is neither a name nor an absolute path")));
        }
        if let Some(hook) = policy.hook.as_ref().filter(|hook| !hook.is_absolute()) {
            return Err(error(format!("hook = \"{}\" is not an absolute path", hook.display())));
        }
        if let Some(folder) = &policy.memory.limiter
            && !folder.is_absolute()
            && !folder.as_os_str().is_empty()
        {
            return Err(error(format!("memory.limiter = \"{}\" is not an absolute path", folder.display())));
        }
        if policy.watchdog.period_milliseconds < 100 {
            return Err(error(
                "watchdog.period_milliseconds is below 100; a reading costs the driver more than that".into(),
            ));
        }
        let mut named = HashSet::new();
        for set in &policy.mps.sets {
            if set.is_empty() {
                return Err(error("mps.sets has an empty set; name at least one GPU in each".into()));
            }
            for name in set {
                GpuReference::parse(name).map_err(|source| error(format!("mps.sets: {source}")))?;
                if !named.insert(name) {
                    return Err(error(format!("mps.sets names GPU {name} twice; it has one daemon")));
                }
            }
        }
        if policy.runtime_timeout_seconds == 0 {
            return Err(error("runtime_timeout_seconds is 0; give at least 1".into()));
        }
        Ok(policy)
    }

    /// The public keys that signatures of grants are held against.
    pub fn keyring(&self) -> Result<Keyring, SignatureError> {
        let keys = self.keys.iter().map(|text| PublicKey::parse(text)).collect::<Result<Vec<_>, _>>()?;
        let mut ring = Keyring::new(keys);
        ring.add_folder(&self.keys_dir)?;
        Ok(ring)
    }

    /// Where the node agent listens for root.
    pub fn agent_socket(&self) -> PathBuf {
        self.state_dir.join("node.sock")
    }

    /// Where the node agent says what it can do.
    pub fn agent_file(&self) -> PathBuf {
        self.state_dir.join("node.json")
    }

    /// Where the inventory is kept.
    pub fn inventory_file(&self) -> PathBuf {
        self.state_dir.join("inventory.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Policy, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::write(&file, text).unwrap();
        Policy::read(&file).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_file_gives_the_defaults() {
        assert_eq!(read("").unwrap(), Policy::default());
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        for (text, expected) in [
            ("privilegd = \"deny\"", "unknown field `privilegd`"),
            ("privileged = \"maybe\"", "unknown variant `maybe`"),
            ("require_signature = true", "require_signature without node"),
            ("require_signature = true\nnode = \"a\"\naccept_visible_devices = true", "exclude each other"),
            ("keys = [\"ed25519:0:\"]", "keys: \"ed25519:0:\" is not a public key"),
            ("driver_root = \"relative\"", "not an absolute path"),
            ("drop_capabilities = [\"sys_admin\"]", "not a capability's name"),
            ("runtimes = []", "runtimes is empty"),
            ("runtimes = [\"./runc\"]", "neither a name nor an absolute path"),
            ("runtime_timeout_seconds = 0", "at least 1"),
            ("allowed_driver_capabilities = [\"cuda\"]", "unknown variant `cuda`"),
            ("[memory]\non_limiter_failure = \"maybe\"", "unknown variant `maybe`"),
            ("[memory]\nrequire = \"much\"", "unknown variant `much`"),
            ("[memory]\nlimiter = \"lib\"", "not an absolute path"),
            ("[memory]\non_failure = \"deny\"", "unknown field `on_failure`"),
            ("[watchdog]\nforeign = \"kill\"", "unknown variant `kill`"),
            ("[watchdog]\nperiod_milliseconds = 10", "below 100"),
            ("[mps]\nsets = [[\"0\", \"1\"], [\"1\"]]", "names GPU 1 twice"),
            ("[mps]\nsets = [[]]", "empty set"),
            ("[mps]\nsets = [[\"all\"]]", "\"all\" names no GPU"),
            ("=", "TOML parse error"),
        ] {
            let message = read(text).unwrap_err();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
