//! The `start` action: finds the Pod's server or leaves a new one behind, and answers with its address.
//!
//! containerd 1.6 to 2.2 get a bare address, which all of them take for Task version 2; 2.3 and later send a bootstrap
//! message and get one back, with version 3. The server serves both. Nothing else may be printed.

use std::{
    fs,
    io::{ErrorKind, Write},
    os::{
        fd::AsRawFd,
        unix::{
            fs::{DirBuilderExt, PermissionsExt},
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::Path,
    process::{Command, Stdio},
};

use containerd_shim::{
    Flags,
    bootstrap::{BootstrapParams, BootstrapResult},
    protos::protobuf::{Message, well_known_types::any::Any},
};

use gpufence_shim::policy::Policy;

use crate::{
    Failure,
    options::{Options, read_stdin},
    serve::LISTENER_VARIABLE,
};

/// Where shims' sockets are, as containerd's own are.
const SOCKETS: &str = "/run/containerd/s";

struct Request {
    bootstrap: bool,
    options: Option<Any>,
    events_address: String,
    socket_folder: String,
}

pub fn run(flags: &Flags) -> Result<(), Failure> {
    let request = read_request(flags)?;
    let options = Options::decode(request.options.as_ref())?;
    // The server reads it again; here its faults reach whoever asked for the container.
    Policy::load()?;
    let socket = Path::new(&request.socket_folder).join(socket_name(flags, &group(flags)?));
    let address = format!("unix://{}", socket.display());
    if let Some(listener) = listen(&socket)? {
        let spawned = spawn(flags, &request, &options, &listener, &address);
        if spawned.is_err() {
            let _ = fs::remove_file(&socket);
        }
        spawned?;
    }
    // containerd reads this file of each bundle when it restarts; so does the `delete` action.
    fs::write("address", &address)?;
    let answer = if request.bootstrap {
        BootstrapResult { version: 3, address, protocol: "ttrpc".into(), ..Default::default() }.write_to_bytes()?
    } else {
        address.into_bytes()
    };
    let mut output = std::io::stdout();
    output.write_all(&answer)?;
    Ok(output.flush()?)
}

fn read_request(flags: &Flags) -> Result<Request, Failure> {
    let input = read_stdin()?;
    let variable = |name| std::env::var(name).unwrap_or_default();
    // The two messages decode as each other; only a bootstrap message names this very container.
    if let Ok(parameters) = BootstrapParams::parse_from_bytes(&input)
        && parameters.instance_id == flags.id
        && parameters.namespace == flags.namespace
    {
        let mut extensions = parameters.extensions.iter().filter_map(|extension| extension.value.as_ref());
        let options = extensions.find(|any| any.type_url.ends_with("Options")).cloned();
        let socket_folder = parameters.socket_dir.clone().filter(|folder| folder.starts_with('/'));
        return Ok(Request {
            bootstrap: true,
            options,
            events_address: parameters.containerd_ttrpc_address,
            socket_folder: socket_folder.unwrap_or_else(|| SOCKETS.into()),
        });
    }
    let options = if input.is_empty() { None } else { Some(Any::parse_from_bytes(&input)?) };
    let events_address = variable("TTRPC_ADDRESS");
    Ok(Request { bootstrap: false, options, events_address, socket_folder: SOCKETS.into() })
}

/// What the server is shared by: the Pod, which all its containers name in their annotations, else this container.
fn group(flags: &Flags) -> Result<String, Failure> {
    let config: serde_json::Value = serde_json::from_slice(&fs::read("config.json")?)?;
    let annotation = |key: &str| config.get("annotations")?.get(key)?.as_str().map(str::to_owned);
    let group = annotation("io.containerd.runc.v2.group").or_else(|| annotation("io.kubernetes.cri.sandbox-id"));
    Ok(group.unwrap_or_else(|| flags.id.clone()))
}

/// A name that no other containerd on this machine makes for its own container of the same id.
fn socket_name(flags: &Flags, group: &str) -> String {
    let address = containerd_shim::StartOpts {
        address: flags.address.clone(),
        namespace: flags.namespace.clone(),
        ..Default::default()
    }
    .socket_address(group);
    address.rsplit('/').next().unwrap_or_default().to_owned()
}

/// Binds the socket; `None` where the Pod's server is already there.
fn listen(socket: &Path) -> Result<Option<UnixListener>, Failure> {
    if let Some(folder) = socket.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o711).create(folder)?;
    }
    for _ in 0..2 {
        match UnixListener::bind(socket) {
            Ok(listener) => {
                fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
                return Ok(Some(listener));
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                if UnixStream::connect(socket).is_ok() {
                    return Ok(None);
                }
                // Its server is dead.
                fs::remove_file(socket)?;
            }
            Err(error) => return Err(format!("bind {}: {error}", socket.display()).into()),
        }
    }
    Err(format!("bind {}: another start got in between twice", socket.display()).into())
}

/// Starts the server. It inherits the listener, so containerd may connect before it is up.
fn spawn(
    flags: &Flags,
    request: &Request,
    options: &Options,
    listener: &UnixListener,
    address: &str,
) -> Result<(), Failure> {
    let inherited = nix::unistd::dup(listener)?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["-namespace", &flags.namespace, "-id", &flags.id, "-address", &flags.address, "-socket", address])
        .env("TTRPC_ADDRESS", &request.events_address)
        .env(LISTENER_VARIABLE, inherited.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    if flags.debug {
        command.arg("-debug");
    }
    let mut server = command.spawn()?;
    if let Err(error) = containerd_shim::cgroup::set_cgroup_and_oom_score(server.id(), &options.shim_cgroup) {
        // Raising one's own score needs no right; lowering it may be refused in a container. Only the cgroup is asked for.
        if !options.shim_cgroup.is_empty() {
            let _ = server.kill();
            return Err(format!("put the shim into cgroup {}: {error}", options.shim_cgroup).into());
        }
    }
    Ok(())
}
