//! Which container a process is in, by the path of its cgroup.
//!
//! Engines name a container's cgroup by its id, bare or as a systemd scope: `docker-<id>.scope`, `cri-containerd-<id>.scope`,
//! `crio-<id>.scope`, `libpod-<id>.scope`. A container can make cgroups below its own and name them as it likes, so the
//! outermost name is the one that counts.

use std::path::Path;

/// Where a process is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Place<C> {
    /// In a container with a grant.
    Granted(C),
    /// In a container that we have given nothing: its id.
    Ungranted(String),
    /// In none.
    Host,
}

/// The path that `/proc/PID/cgroup` has for device access, which is where the fence is: v2's where the machine is of v2
/// alone (`unified`), else that of v1's `devices` controller or, without it, of any other.
pub fn path(text: &str, unified: bool) -> Option<&str> {
    let lines = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        Some((parts.next()?, parts.next()?))
    });
    let rank = |controllers: &str| match controllers {
        "" => 3 * u8::from(!unified),
        _ if unified => 3,
        list if list.split(',').any(|controller| controller == "devices") => 0,
        list if list.split(',').any(|controller| controller == "memory") => 1,
        _ => 2,
    };
    lines.min_by_key(|(controllers, _)| rank(controllers)).map(|(_, path)| path)
}

/// Whether the machine's cgroups are v2's alone.
pub fn is_unified() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

/// Which container a path lies in. `own` is our own cgroup's path: what it shares with that says nothing of containers, but of
/// the machine that we run in. `container` knows those with a grant, by id and path.
pub fn place<C>(path: &str, own: &str, container: impl Fn(&str, &str) -> Option<C>) -> Place<C> {
    let outside = segments(path).zip(segments(own)).take_while(|(a, b)| a == b).count();
    let mut ungranted = None;
    for segment in segments(path).skip(outside) {
        let names = names(segment);
        if let Some(found) = names.into_iter().find_map(|name| container(name, path)) {
            // One inside a container without a grant of ours is that container's affair.
            return ungranted.map_or(Place::Granted(found), Place::Ungranted);
        }
        if ungranted.is_none() {
            ungranted = names.into_iter().find(|name| is_long_id(name)).map(str::to_owned);
        }
    }
    ungranted.map_or(Place::Host, Place::Ungranted)
}

fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|segment| !segment.is_empty())
}

/// What a cgroup's name may say of a container's id: itself, without `.scope`, and without what an engine puts before it.
fn names(segment: &str) -> [&str; 3] {
    // containerd's name where kubelet writes systemd's paths and containerd doesn't: slice:cri-containerd:id.
    let last = segment.rsplit(':').next().unwrap_or(segment);
    let plain = last.strip_suffix(".scope").unwrap_or(last);
    let before = ["cri-containerd-", "docker-", "crio-", "libpod-payload-", "libpod-", "nerdctl-"];
    [last, plain, before.iter().find_map(|before| plain.strip_prefix(before)).unwrap_or(plain)]
}

/// 64 hexadecimal digits, as all engines but `ctr` name their containers.
fn is_long_id(id: &str) -> bool {
    id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    /// A and `job` have grants, B has none.
    fn find(path: &str) -> Place<&'static str> {
        place(path, "/system.slice/gpufence-node.service", |id, _| [A, "job"].into_iter().find(|known| *known == id))
    }

    #[test]
    fn every_engine_s_names() {
        for path in [
            format!("/docker/{A}"),
            format!("/system.slice/docker-{A}.scope"),
            format!("/kubepods/burstable/pod5f4d0c7e-4b2a-4c7e-9c1e-0d6c2c6f0001/{A}"),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod5f4d.slice/cri-containerd-{A}.scope"
            ),
            format!("/system.slice/containerd.service/kubepods-burstable-pod5f4d.slice:cri-containerd:{A}"),
            format!("/kubepods.slice/kubepods-pod5f4d.slice/crio-{A}.scope"),
            format!("/kubepods.slice/kubepods-pod5f4d.slice/crio-{A}.scope/container"),
            format!("/machine.slice/libpod-{A}.scope/container"),
            format!("/libpod_parent/libpod-{A}"),
            format!("/docker/{A}/init.scope"),
        ] {
            assert_eq!(find(&path), Place::Granted(A), "{path}");
        }
        for path in ["/default/job", "/system.slice/job.scope", "/system.slice/docker-job.scope"] {
            assert_eq!(find(path), Place::Granted("job"), "{path}");
        }
        assert_eq!(find(&format!("/docker/{B}")), Place::Ungranted(B.into()));
        for path in ["/", "", "/user.slice/user-0.slice/session-1.scope", "/system.slice/ssh.service"] {
            assert_eq!(find(path), Place::Host, "{path}");
        }
    }

    #[test]
    fn a_container_can_not_pass_for_another() {
        assert_eq!(find(&format!("/docker/{A}/{B}/docker-{B}.scope")), Place::Granted(A));
        assert_eq!(find(&format!("/docker/{B}/docker/{A}")), Place::Ungranted(B.into()), "an engine in a container");
        assert_eq!(find(&format!("/docker/{B}/job")), Place::Ungranted(B.into()));
    }

    #[test]
    fn a_machine_that_is_a_container_itself() {
        let own = format!("/docker/{B}/init");
        let find = |path: &str| place(path, &own, |id, _| (id == A).then_some(A));
        assert_eq!(find(&format!("/docker/{B}/docker/{A}")), Place::Granted(A));
        assert_eq!(find(&format!("/docker/{B}/user")), Place::Host);
    }

    #[test]
    fn which_line_counts() {
        let both = "5:memory:/m\n4:devices:/d\n1:name=systemd:/s\n0::/u\n";
        assert_eq!((path(both, false), path(both, true)), (Some("/d"), Some("/u")));
        assert_eq!(path("0::/a\n", true), Some("/a"));
        assert_eq!(path("1:name=systemd:/s\n0::/u\n", false), Some("/s"));
        assert_eq!(path("4:cpu,cpuacct:/x:y\n", false), Some("/x:y"));
        assert_eq!(path("", true), None);
    }
}
