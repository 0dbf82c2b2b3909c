//! What the command line can say. The help texts are the manual pages' texts too.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// GPU sharing enforced by the container runtime
#[derive(Debug, Parser)]
#[command(
    name = "gpufence",
    disable_help_subcommand = true,
    version,
    after_help = "Examples:
  gpufence inventory                         What GPUs and driver this node has
  gpufence cdi generate                      Write the node's CDI spec
  gpufence cdi show gpufence.dev/gpu=0       What a container gets for GPU 0
  gpufence configure containerd --dry-run    Set up an engine
  gpufence demo                              Five containers, and what each sees

Files:
  /etc/gpufence/config.toml     the node's policy; GPUFENCE_CONFIG names another
  /run/gpufence/                the inventory, and a folder for each container with a grant
  /var/lib/gpufence/stage/      the driver's libraries as containers mount them

Exit status: 0 done, 1 failed, 2 wrong usage."
)]
pub struct Arguments {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the node's GPUs, driver and driver files
    Inventory(InventoryArguments),
    /// Make and read CDI specs
    Cdi(CdiArguments),
    /// Set up an engine to use Gpufence
    Configure(ConfigureArguments),
    /// Make a key pair that signs grants
    Keygen(KeygenArguments),
    /// Run five containers on a containerd of its own and show what each sees
    Demo(DemoArguments),
    /// Tell what this container sees: device nodes, driver libraries, limits, capabilities
    Probe(ProbeArguments),
    /// Print shell completions
    #[command(after_help = "Example:
  gpufence completions bash > /usr/share/bash-completion/completions/gpufence")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into a folder
    #[command(after_help = "Example:
  gpufence man /usr/local/share/man/man1")]
    Man {
        /// The folder
        folder: PathBuf,
    },
}

/// In which form something is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Columns for people
    Table,
    /// JSON for programs; fields are only ever added
    Json,
}

/// Where the driver is.
#[derive(Debug, Args)]
pub struct DriverRoot {
    /// The folder under which the driver's files are found [default: the policy's, which is / unless set]
    #[arg(long, value_name = "FOLDER")]
    pub driver_root: Option<PathBuf>,
    /// Ask NVML for memory sizes and MIG instances, which takes longer and opens the GPUs
    #[arg(long)]
    pub nvml: bool,
}

/// `gpufence inventory`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  gpufence inventory
  gpufence inventory --nvml --output json
  gpufence inventory --driver-root /run/nvidia/driver")]
pub struct InventoryArguments {
    /// Where the driver is
    #[command(flatten)]
    pub driver: DriverRoot,
    /// The form of the output
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// `gpufence cdi`.
#[derive(Debug, Args)]
pub struct CdiArguments {
    /// What to do
    #[command(subcommand)]
    pub command: CdiCommand,
}

/// The subcommands of `gpufence cdi`.
#[derive(Debug, Subcommand)]
pub enum CdiCommand {
    /// Stage the driver's libraries and write the node's CDI spec
    #[command(after_help = "Examples:
  gpufence cdi generate
  gpufence cdi generate --file - | less
  gpufence cdi generate --watch 10     Again whenever driver or GPUs change, until stopped
  docker run --device gpufence.dev/gpu=0 IMAGE nvidia-smi")]
    Generate {
        /// Where the driver is
        #[command(flatten)]
        driver: DriverRoot,
        /// The file to write; - is standard output
        #[arg(long, value_name = "FILE", default_value = DEFAULT_SPEC)]
        file: PathBuf,
        /// Where the libraries are staged [default: the policy's, which is /var/lib/gpufence/stage unless set]
        #[arg(long, value_name = "FOLDER")]
        stage_folder: Option<PathBuf>,
        /// The driver capabilities that containers get, comma-separated [default: the policy's]
        #[arg(long, value_name = "LIST", value_delimiter = ',')]
        capabilities: Vec<gpufence_cdi::capability::DriverCapability>,
        /// Where gpufence-hook is, which makes the libraries findable in containers [default: the policy's, else beside
        /// this program, else on PATH]
        #[arg(long, value_name = "FILE")]
        hook: Option<PathBuf>,
        /// Look every so many seconds and write again what has changed
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
        watch: Option<u64>,
    },
    /// Check that a CDI spec is this node's as it is now
    #[command(
        after_help = "Fails where the spec can't be read, a file that it mounts is gone, a device node has other numbers, or the
running driver is another one.

Examples:
  gpufence cdi validate
  gpufence cdi validate --file /etc/cdi/gpufence.json"
    )]
    Validate {
        /// Where the driver is
        #[command(flatten)]
        driver: DriverRoot,
        /// The spec
        #[arg(long, value_name = "FILE", default_value = DEFAULT_SPEC)]
        file: PathBuf,
    },
    /// List the devices of a CDI spec
    List {
        /// The spec
        #[arg(long, value_name = "FILE", default_value = DEFAULT_SPEC)]
        file: PathBuf,
        /// The form of the output
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
    /// Show what a container gets for a device
    #[command(after_help = "Examples:
  gpufence cdi show gpufence.dev/gpu=0
  gpufence cdi show all --output json
  gpufence cdi show --file /run/gpufence/containers/default/trainer/cdi.json trainer")]
    Show {
        /// The device, with or without its kind before a =
        device: String,
        /// The spec
        #[arg(long, value_name = "FILE", default_value = DEFAULT_SPEC)]
        file: PathBuf,
        /// The form of the output
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
}

/// `gpufence configure`.
#[derive(Debug, Args)]
#[command(
    after_help = "The file is edited in place: comments, order and everything else stay. The file as it was is kept beside it, with
.before-gpufence at its end. Doing it again changes nothing. --remove takes it all back.

Examples:
  gpufence configure containerd --dry-run
  gpufence configure containerd && systemctl restart containerd
  gpufence configure docker --default-runtime
  gpufence configure docker --remove"
)]
pub struct ConfigureArguments {
    /// The engine
    #[arg(value_enum)]
    pub engine: EngineName,
    /// The engine's configuration file [default: the usual one]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Also make ours the runtime of every container that names none
    #[arg(long)]
    pub default_runtime: bool,
    /// Where gpufence-runtime is, for docker, podman and crio [default: beside this program, else on PATH]
    #[arg(long, value_name = "FILE")]
    pub runtime_path: Option<PathBuf>,
    /// containerd's version, such as 1.6 [default: what `containerd --version` says]
    #[arg(long, value_name = "VERSION")]
    pub engine_version: Option<String>,
    /// Take everything back
    #[arg(long)]
    pub remove: bool,
    /// Show what would change, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// The form of the output
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// The engines that can be configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// containerd, for Kubernetes and ctr
    Containerd,
    /// Docker
    Docker,
    /// Podman
    Podman,
    /// CRI-O
    Crio,
}

/// Where the node's CDI spec is.
pub const DEFAULT_SPEC: &str = "/var/run/cdi/gpufence.json";

/// `gpufence demo`.
#[derive(Debug, Args)]
#[command(after_help = "Needs root, containerd, ctr and runc. Nothing outside a temporary folder is left behind.

Examples:
  gpufence demo                                On a machine with NVIDIA GPUs
  gpufence demo --driver-root /tmp/simulated   On one without; `make demo` makes such a folder")]
pub struct DemoArguments {
    /// The folder under which the driver's files are found
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    pub driver_root: PathBuf,
    /// The folder of containerd-shim-gpufence-v1 [default: this program's own, then PATH]
    #[arg(long, value_name = "FOLDER")]
    pub shim_folder: Option<PathBuf>,
    /// The form of the output
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// `gpufence keygen`.
#[derive(Debug, Args)]
#[command(
    after_help = "Writes FOLDER/<key id>.key, the private key in PEM, readable by its owner alone, and FOLDER/<key id>.pub, the public
key as nodes take it: in /etc/gpufence/keys.d, or as a line of keys in /etc/gpufence/config.toml. The id follows from the key.

To change keys: give the nodes the new public key beside the old one, then the extender the new private key, and take the old
public key from the nodes when no Pod has a grant of it any more.

Examples:
  gpufence keygen
  gpufence keygen --folder /root/keys --output json
  gpufence keygen --kubernetes gpufence | kubectl apply --filename -
  gpufence keygen --public-of 39f713d0a644253f.key"
)]
pub struct KeygenArguments {
    /// Where the two files go; it is made if it isn't there
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub folder: PathBuf,
    /// Write no files, but print a Secret with both keys and a ConfigMap with the public one, for this namespace
    #[arg(long, value_name = "NAMESPACE", conflicts_with_all = ["folder", "public_of"])]
    pub kubernetes: Option<String>,
    /// Make no key, but print the public half of this private one
    #[arg(long, value_name = "FILE", conflicts_with = "folder")]
    pub public_of: Option<PathBuf>,
    /// The form of the output
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// `gpufence probe`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  gpufence probe
  gpufence probe --open /opt/nvidia1 --make 195:0 --output json")]
pub struct ProbeArguments {
    /// Try to open this node as well
    #[arg(long, value_name = "PATH")]
    pub open: Vec<PathBuf>,
    /// Try to make a character device of these numbers and to open it
    #[arg(long, value_name = "MAJOR:MINOR")]
    pub make: Vec<String>,
    /// Try to load this library as well
    #[arg(long, value_name = "NAME")]
    pub load: Vec<String>,
    /// The form of the output
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Arguments::command().debug_assert();
    }
}
