//! Finds the low-level runtime: by absolute path, or by name on the engine's PATH and in the usual folders, never in a
//! container; and our own hook.

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{EnforceError, hooks, policy::Policy};

/// Where programs are, for engines that start runtimes without a PATH, as Podman does.
const USUAL_FOLDERS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// A program by absolute path, or by name in the absolute folders of PATH, then in the usual ones.
pub fn look_up(name: &str) -> Option<PathBuf> {
    if name.starts_with('/') {
        return Some(name.into()).filter(|path: &PathBuf| path.is_file());
    }
    if name.contains('/') {
        return None;
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .filter(|folder| folder.is_absolute())
        .chain(USUAL_FOLDERS.map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|path| path.is_file() && !is_this_program(path))
}

/// The first of the policy's runtimes that is there.
pub fn of_policy(policy: &Policy) -> Result<PathBuf, EnforceError> {
    policy
        .runtimes
        .iter()
        .find_map(|name| look_up(name))
        .ok_or_else(|| EnforceError::NoRuntime { names: policy.runtimes.join(", ") })
}

/// `gpufence-hook`, which does for a container what no process of ours is left to do: where policy says, else beside the
/// running program, else on PATH.
pub fn hook(policy: &Policy) -> Result<PathBuf, EnforceError> {
    if let Some(path) = &policy.hook {
        return Ok(path.clone());
    }
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|own| Some(own.parent()?.join(hooks::OWN))).filter(|path| path.is_file());
    beside.or_else(|| look_up(hooks::OWN)).ok_or(EnforceError::NoHook)
}

/// A host may have put our wrapper in runc's place; it must not wrap itself.
fn is_this_program(path: &Path) -> bool {
    let identity = |path: &Path| std::fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
    identity(path).is_some_and(|found| identity(Path::new("/proc/self/exe")) == Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_path_and_by_name() {
        assert_eq!(look_up("/bin/sh"), Some("/bin/sh".into()));
        assert_eq!(look_up("/nothing"), None);
        assert!(look_up("sh").is_some_and(|path| path.is_absolute()));
        assert_eq!(look_up("bin/sh"), None);
        let policy = Policy { runtimes: vec!["norunc".into(), "nocrun".into()], ..Policy::default() };
        let error = of_policy(&policy).unwrap_err().to_string();
        assert!(error.contains("none of the policy's runtimes (norunc, nocrun)"), "{error}");
    }
}
