//! The driver's memory caps: the node agent sets them on the container's cgroup, and on its Pod's, before the container starts.

use std::{fs, path::Path, time::Duration};

use gpufence_grant::agent::{self, ContainerCaps, Request};

use crate::{
    cgroup,
    error::{HookError, io_error},
    state::State,
};

/// How long the agent has for one cgroup. The runtime gives us 30 seconds for all that we do.
const PATIENCE: Duration = Duration::from_secs(5);

/// Has them set, where the container's folder asks for them.
pub fn set(state: &State, folder: &Path) -> Result<(), HookError> {
    let file = folder.join(ContainerCaps::FILE);
    let text = match fs::read(&file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(io_error("read", &file))?,
    };
    let caps: ContainerCaps = serde_json::from_slice(&text).map_err(|source| HookError::Json { path: file, source })?;
    let own = cgroup::device_cgroup(state.pid)?;
    let pod = caps.pod.and_then(|pod| Some((pod_cgroup(&own, &pod.uid)?.to_owned(), pod.caps)));
    for (cgroup, wanted) in [(own, caps.container)].into_iter().chain(pod) {
        agent::ask(&caps.socket, &Request { cgroup, caps: wanted }, PATIENCE)?;
    }
    Ok(())
}

/// The cgroup right above the container's, if it is its Pod's, as the UID in its name says; systemd's names have no hyphens
/// within.
fn pod_cgroup<'a>(own: &'a Path, uid: &str) -> Option<&'a Path> {
    let above = own.parent()?;
    let name = above.file_name()?.to_str()?;
    [uid.to_owned(), uid.replace('-', "_")].iter().any(|uid| name.contains(uid)).then_some(above)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pod_s_cgroup() {
        let uid = "5f4d0c7e-4b2a-4c7e-9c1e-0d6c2c6f0001";
        for (path, expected) in [
            (format!("/sys/fs/cgroup/kubepods/burstable/pod{uid}/c"), true),
            (
                format!(
                    "/sys/fs/cgroup/kubepods.slice/kubepods-pod{}.slice/cri-containerd-c.scope",
                    uid.replace('-', "_")
                ),
                true,
            ),
            ("/sys/fs/cgroup/k8s.io/c".into(), false),
        ] {
            assert_eq!(pod_cgroup(Path::new(&path), uid).is_some(), expected, "{path}");
        }
    }
}
