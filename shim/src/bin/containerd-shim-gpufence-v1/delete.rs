//! The `delete` action, which containerd runs when a shim is gone: removes what its container left behind.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::SystemTime,
};

use containerd_shim::{
    Flags,
    api::DeleteResponse,
    protos::protobuf::{Message, MessageField},
};
use gpufence_shim::policy::Policy;

use crate::{Failure, events::timestamp, options::Options};

/// As if killed: 128 and SIGKILL.
const KILLED: u32 = 137;

pub fn run(flags: &Flags) -> Result<(), Failure> {
    let bundle = if flags.bundle.is_empty() { std::env::current_dir()? } else { PathBuf::from(&flags.bundle) };
    let options = Options::load(&bundle).unwrap_or_default();
    let policy = Policy::load()?;
    let pid = fs::read_to_string(bundle.join("init.pid")).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    remove(flags, &options, &policy, &bundle)?;
    let response = DeleteResponse {
        pid,
        exit_status: KILLED,
        exited_at: MessageField::some(timestamp(SystemTime::now())),
        ..DeleteResponse::default()
    };
    Ok(std::io::stdout().write_all(&response.write_to_bytes()?)?)
}

/// Every step is tried, whatever became of those before: a shim may have died between any two.
fn remove(flags: &Flags, options: &Options, policy: &Policy, bundle: &Path) -> Result<(), Failure> {
    let mut command = Command::new(options.runtime(policy)?);
    command.arg("--root").arg(options.runtime_root(&flags.namespace));
    if options.systemd_cgroup {
        command.arg("--systemd-cgroup");
    }
    // An unknown container is what is wanted; --force says so.
    command.args(["delete", "--force", &flags.id]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status()?;
    unmount(&bundle.join("rootfs"));
    gpufence_shim::state::clean_up(policy, &flags.namespace, &flags.id)?;
    remove_own_socket(flags, bundle);
    Ok(())
}

/// Takes a container's root out of the mount table.
pub fn unmount(rootfs: &Path) {
    if let Some(path) = rootfs.to_str()
        && let Err(error) = containerd_shim::mount::umount_recursive(Some(path), nix::libc::MNT_DETACH)
    {
        log::warn!("unmount {path}: {error}");
    }
}

/// The socket of a server that died, unless the Pod's server lives on without this container.
fn remove_own_socket(flags: &Flags, bundle: &Path) {
    let Ok(address) = fs::read_to_string(bundle.join("address")) else { return };
    let Some(path) = address.trim().strip_prefix("unix://") else { return };
    if std::os::unix::net::UnixStream::connect(path).is_err() {
        let _ = fs::remove_file(path);
    } else {
        log::debug!("{path} is still served, for others than {}", flags.id);
    }
}
