//! Where a container's cgroup is, under cgroup v1 and v2.

use std::{
    fs,
    path::{Path, PathBuf},
};

const MOUNT: &str = "/sys/fs/cgroup";

/// A container's cgroup, found from its first process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cgroup {
    /// One path below each controller.
    V1(Vec<(String, PathBuf)>),
    /// One folder.
    V2(PathBuf),
}

impl Cgroup {
    /// The cgroup of a process that runs.
    pub fn of(pid: i32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        Self::parse(&text, Path::new(MOUNT).join("cgroup.controllers").exists())
    }

    fn parse(text: &str, unified: bool) -> Option<Self> {
        let lines = text.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            Some((parts.next()?, parts.next()?.trim_start_matches('/')))
        });
        if unified {
            let (_, path) = lines.into_iter().find(|(controllers, _)| controllers.is_empty())?;
            return Some(Self::V2(Path::new(MOUNT).join(path)));
        }
        let mut paths = Vec::new();
        for (controllers, path) in lines.filter(|(controllers, _)| !controllers.is_empty()) {
            let mounted = controllers.strip_prefix("name=").unwrap_or(controllers);
            for controller in controllers.split(',') {
                // Controllers mounted together have a folder of the joint name, and mostly links of the single ones.
                let together = Path::new(MOUNT).join(mounted);
                let mount = if together.exists() { together } else { Path::new(MOUNT).join(controller) };
                paths.push((controller.to_owned(), mount.join(path)));
            }
        }
        (!paths.is_empty()).then_some(Self::V1(paths))
    }

    /// The folder of a controller.
    pub fn controller(&self, name: &str) -> Option<&Path> {
        match self {
            Self::V1(paths) => paths.iter().find(|(controller, _)| controller == name).map(|(_, path)| path.as_path()),
            Self::V2(path) => Some(path),
        }
    }

    /// How many processes the kernel has ended here for want of memory.
    pub fn oom_kills(&self) -> u64 {
        let file = match self {
            Self::V1(_) => "memory.oom_control",
            Self::V2(_) => "memory.events",
        };
        let Some(folder) = self.controller("memory") else { return 0 };
        let text = fs::read_to_string(folder.join(file)).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions() {
        assert_eq!(Cgroup::parse("0::/a/b\n", true), Some(Cgroup::V2("/sys/fs/cgroup/a/b".into())));
        let cgroup = Cgroup::parse("5:memory:/a\n1:name=systemd:/a\n0::/\n", false).unwrap();
        assert_eq!(cgroup.controller("memory"), Some(Path::new("/sys/fs/cgroup/memory/a")));
        assert_eq!(cgroup.controller("devices"), None);
        assert_eq!(Cgroup::parse("", false), None);
    }
}
