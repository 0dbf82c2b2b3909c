//! The containers with a grant, from their folders. Read again only where something changed: 500 containers a second cost
//! a look at one folder.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use gpufence_shim::state::{RECORD, Record};

/// A container with a grant.
#[derive(Debug)]
pub struct Container {
    /// What it was granted.
    pub record: Record,
    /// Its folder.
    pub folder: PathBuf,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Records {
    root: PathBuf,
    namespaces: HashMap<PathBuf, Namespace>,
    all: Vec<Arc<Container>>,
}

#[derive(Debug)]
struct Namespace {
    changed: SystemTime,
    /// Nothing can have changed since it was read without `changed` telling.
    settled: bool,
    containers: HashMap<PathBuf, (Version, Arc<Container>)>,
}

/// Tells a file from the one that replaced it.
type Version = (u64, i64, i64);

/// Folders' times are as fine as a tick, and a record is written a little after its folder is made.
const UNSETTLED: Duration = Duration::from_secs(2);

impl Records {
    /// Those below `<state folder>/containers`.
    pub fn below(state_dir: &Path) -> Self {
        Self { root: state_dir.join("containers"), ..Self::default() }
    }

    /// Looks for changes. Gives all containers, and whether they are others than before.
    pub fn current(&mut self) -> (&[Arc<Container>], bool) {
        let paths = folders(&self.root);
        let before = self.namespaces.len();
        self.namespaces.retain(|path, _| paths.contains(path));
        let mut changed = self.namespaces.len() != before;
        for path in paths {
            let Ok(time) = fs::metadata(&path).and_then(|metadata| metadata.modified()) else { continue };
            let known = self.namespaces.get(&path);
            if known.is_some_and(|known| known.settled && known.changed == time) {
                continue;
            }
            let old = known.map(|known| &known.containers);
            let (read, complete) = read(&path, old);
            let same = old.is_some_and(|old| {
                old.len() == read.len()
                    && read.iter().all(|(path, (version, _))| old.get(path).is_some_and(|old| old.0 == *version))
            });
            changed |= !same;
            let settled = complete && time.elapsed().is_ok_and(|age| age > UNSETTLED);
            self.namespaces.insert(path, Namespace { changed: time, settled, containers: read });
        }
        if changed {
            let containers = self.namespaces.values().flat_map(|namespace| namespace.containers.values());
            self.all = containers.map(|(_, container)| container.clone()).collect();
        }
        (&self.all, changed)
    }
}

/// The containers of a namespace, and whether each folder has its record.
fn read(
    namespace: &Path,
    old: Option<&HashMap<PathBuf, (Version, Arc<Container>)>>,
) -> (HashMap<PathBuf, (Version, Arc<Container>)>, bool) {
    let (mut containers, mut complete) = (HashMap::new(), true);
    for folder in folders(namespace) {
        let file = folder.join(RECORD);
        let Ok(metadata) = fs::metadata(&file) else {
            complete = false;
            continue;
        };
        let version = (metadata.ino(), metadata.mtime(), metadata.mtime_nsec());
        if let Some((known, container)) = old.and_then(|old| old.get(&folder))
            && *known == version
        {
            containers.insert(folder, (version, container.clone()));
            continue;
        }
        match fs::read(&file).map_err(anyhow::Error::from).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
            Ok(record) => {
                containers.insert(folder.clone(), (version, Arc::new(Container { record, folder })));
            }
            // Half written, most likely: the next look tells.
            Err(error) => {
                tracing::debug!(file = %file.display(), %error, "record not read");
                complete = false;
            }
        }
    }
    (containers, complete)
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: &str, memory: u64) -> String {
        format!(
            r#"{{"namespace": "k8s.io", "id": "{id}", "name": "trainer", "origin": "test", "driverVersion": "550",
                "shares": [{{"gpu": "GPU-0", "memoryMiB": {memory}}}], "driverCapabilities": ["compute"], "droppedCapabilities": []}}"#
        )
    }

    #[test]
    fn comes_and_goes() {
        let folder = tempfile::tempdir().unwrap();
        let put = |id: &str, memory: u64| {
            let folder = folder.path().join("containers/k8s.io").join(id);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(RECORD), record(id, memory)).unwrap();
        };
        let mut records = Records::below(folder.path());
        assert_eq!(records.current().0.len(), 0);
        put("a", 1);
        let (all, changed) = records.current();
        assert_eq!((all.len(), changed), (1, true));
        assert!(!records.current().1, "as before");
        // In the same tick as the last look, perhaps.
        put("b", 2);
        assert_eq!(records.current().0.len(), 2);
        // Made anew under the same name.
        fs::remove_dir_all(folder.path().join("containers/k8s.io/a")).unwrap();
        put("a", 3);
        let (all, changed) = records.current();
        let memory: u64 = all.iter().map(|container| container.record.shares[0].memory_mib).sum();
        assert_eq!((memory, changed), (5, true));
        // A folder whose record is still to come.
        fs::create_dir_all(folder.path().join("containers/moby/c")).unwrap();
        assert_eq!(records.current().0.len(), 2);
        fs::write(folder.path().join("containers/moby/c").join(RECORD), record("c", 4)).unwrap();
        assert_eq!(records.current().0.len(), 3);
        fs::remove_dir_all(folder.path().join("containers/k8s.io")).unwrap();
        let (all, changed) = records.current();
        assert_eq!((all.len(), changed), (1, true));
    }
}
