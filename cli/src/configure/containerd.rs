//! containerd's `config.toml`, versions 2 and 3.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use toml_edit::{Array, DocumentMut, Item, Table, value};

use super::{Wanted, file, toml};

const RUNTIME_TYPE: &str = "io.containerd.gpufence.v1";
const NAME: &str = "gpufence";

/// The plugin that runs Pods, by the file's version.
fn plugin(document: &DocumentMut) -> Result<&'static str> {
    match document.get("version").and_then(Item::as_integer) {
        Some(2) => Ok("io.containerd.grpc.v1.cri"),
        Some(3) => Ok("io.containerd.cri.v1.runtime"),
        None if document.is_empty() => Ok("io.containerd.grpc.v1.cri"),
        Some(other) => bail!("version {other} of containerd's configuration is not known; 2 and 3 are"),
        None => {
            bail!("the file has no version, so it is of version 1; `containerd config migrate` brings it up to date")
        }
    }
}

/// With our runtime.
pub fn add(text: &str, wanted: &Wanted) -> Result<String> {
    let mut document = toml::parse(text)?;
    let plugin = plugin(&document)?;
    if document.is_empty() {
        document["version"] = value(2);
    }
    let systemd = systemd_cgroup(&document, plugin);
    let path = ["plugins", plugin, "containerd", "runtimes", NAME];
    let runtime = toml::table(&mut document, &path)?;
    set(runtime, "runtime_type", RUNTIME_TYPE.into());
    let mut annotations: Array = runtime.get("pod_annotations").and_then(Item::as_array).cloned().unwrap_or_default();
    if !annotations.iter().any(|pattern| matches!(pattern.as_str(), Some("gpufence.dev/*" | "*"))) {
        annotations.push("gpufence.dev/*");
    }
    set(runtime, "pod_annotations", annotations.into());
    let path = ["plugins", plugin, "containerd", "runtimes", NAME, "options"];
    let options = toml::table(&mut document, &path)?;
    if let Some(file) = &wanted.options_file {
        // containerd 1.6 passes nothing else on to a runtime type that it doesn't know.
        set(options, "TypeUrl", "runtimeoptions.v1.Options".into());
        set(options, "ConfigPath", file.to_string_lossy().into_owned().into());
    } else if let Some(systemd) = systemd {
        set(options, "SystemdCgroup", systemd.into());
    }
    if wanted.default_runtime {
        let path = ["plugins", plugin, "containerd"];
        let containerd = toml::table(&mut document, &path)?;
        toml::set_default(containerd, "default_runtime_name", NAME);
    }
    Ok(document.to_string())
}

/// Where containerd 1.6 is pointed to for options: beside its own file.
pub fn options_file(config: &Path) -> PathBuf {
    config.with_file_name("gpufence-runtime.toml")
}

/// Writes the file of options, with the node's cgroup driver, where the configuration points to it and it isn't there;
/// removes it where nothing points to it any more.
pub fn keep_options_file(config: &Path, text: Option<&str>) -> Result<()> {
    let file = options_file(config);
    let pointed_to = text.filter(|text| text.contains(&*file.to_string_lossy()));
    match pointed_to {
        Some(text) if !file.exists() => {
            let document = toml::parse(text)?;
            let systemd = systemd_cgroup(&document, plugin(&document)?).unwrap_or(false);
            let text = format!("# Options of the runtime gpufence, named as runc's own.\nSystemdCgroup = {systemd}\n");
            std::fs::create_dir_all(file.parent().unwrap_or_else(|| Path::new("/")))?;
            std::fs::write(&file, text).with_context(|| format!("write {}", file.display()))
        }
        None if file.exists() => std::fs::remove_file(&file).with_context(|| format!("remove {}", file.display())),
        _ => Ok(()),
    }
}

/// Sets a value unless it is that already, so that how it was written stays.
fn set(table: &mut Table, key: &str, new: toml_edit::Value) {
    let plain = |value: &toml_edit::Value| {
        let mut value = value.clone();
        value.decor_mut().clear();
        value.to_string()
    };
    let there = table.get(key).and_then(Item::as_value).map(&plain);
    if there != Some(plain(&new)) {
        table[key] = Item::Value(new);
    }
}

/// What runc's own entry says of the cgroup driver, which has to be the kubelet's for every runtime of a node.
fn systemd_cgroup(document: &DocumentMut, plugin: &str) -> Option<bool> {
    let runtimes = document.get("plugins")?.get(plugin)?.get("containerd")?.get("runtimes")?;
    runtimes.get("runc")?.get("options")?.get("SystemdCgroup")?.as_bool()
}

/// Without it.
pub fn remove(text: &str) -> Result<Option<String>> {
    let mut document = toml::parse(text)?;
    if document.is_empty() {
        return Ok(None);
    }
    let plugin = plugin(&document)?;
    let path = ["plugins", plugin, "containerd", "runtimes"];
    if let Some(runtimes) = toml::find(&mut document, &path) {
        runtimes.remove(NAME);
    }
    if let Some(containerd) = toml::find(&mut document, &path[..3]) {
        toml::restore_default(containerd, "default_runtime_name");
    }
    toml::prune(&mut document, &path);
    let nothing_else = document.iter().all(|(key, _)| key == "version");
    Ok(if nothing_else { None } else { toml::text(&document) })
}

/// The file that has the section on Pods: the one given, or one that it imports. An import with a section of its own
/// takes the place of the whole section in containerd 1.x, so ours must stand in the same file.
pub fn file_with_cri(given: &Path) -> Result<PathBuf> {
    let Some(text) = file::read(given)? else { return Ok(given.to_owned()) };
    let document = toml::parse(&text).with_context(|| format!("{} is as it was", given.display()))?;
    let has_section = |document: &DocumentMut| {
        plugin(document)
            .is_ok_and(|plugin| document.get("plugins").is_some_and(|plugins| plugins.get(plugin).is_some()))
    };
    let imports = document.get("imports").and_then(Item::as_array);
    // The last one wins, as containerd merges them in order.
    let imports: Vec<&str> = imports.into_iter().flatten().filter_map(|import| import.as_str()).collect();
    for import in imports.into_iter().rev() {
        for path in matching(given, import).into_iter().rev() {
            let Ok(Some(text)) = file::read(&path) else { continue };
            let imported =
                toml::parse(&text).with_context(|| format!("{}, which {} imports", path.display(), given.display()))?;
            if has_section(&imported) {
                return Ok(path);
            }
        }
    }
    Ok(given.to_owned())
}

/// The files that an import names: one, or those of a folder that a pattern `*` in the last part matches.
fn matching(given: &Path, import: &str) -> Vec<PathBuf> {
    let path = given.parent().unwrap_or_else(|| Path::new("/")).join(import);
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Some((start, end)) = name.split_once('*') else { return vec![path] };
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            name.starts_with(start) && name.ends_with(end)
        })
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEBIAN: &str = "version = 2\n\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    [plugins.\"io.containerd.grpc.v1.cri\".cni]\n      bin_dir = \"/usr/lib/cni\"\n  [plugins.\"io.containerd.internal.v1.opt\"]\n    path = \"/var/lib/containerd/opt\"\n";
    const BUSY: &str = "# ours\nversion = 3 # as of 2.0\nimports = []\n\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = \"runc\"\n\n# the usual\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\n  SystemdCgroup = true\n\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.kata]\nruntime_type = 'io.containerd.kata.v2'\n";

    fn wanted(default_runtime: bool) -> Wanted {
        Wanted { runtime_path: PathBuf::new(), default_runtime, options_file: None }
    }

    #[test]
    fn adds_twice_as_once_and_takes_it_back() {
        for text in ["", DEBIAN, BUSY] {
            for default_runtime in [false, true] {
                let once = add(text, &wanted(default_runtime)).unwrap();
                assert_eq!(add(&once, &wanted(default_runtime)).unwrap(), once);
                let document = toml::parse(&once).unwrap();
                let plugin = plugin(&document).unwrap();
                let ours = &document["plugins"][plugin]["containerd"]["runtimes"][NAME];
                assert_eq!(ours["runtime_type"].as_str(), Some(RUNTIME_TYPE));
                assert_eq!(ours["pod_annotations"][0].as_str(), Some("gpufence.dev/*"));
                let back = remove(&once).unwrap().unwrap_or_default();
                assert!(toml::same(&back, text), "{text}\n--\n{once}\n--\n{back}");
            }
        }
    }

    #[test]
    fn comments_stay_and_the_cgroup_driver_is_the_node_s() {
        let text = add(BUSY, &wanted(true)).unwrap();
        assert!(text.contains("# as of 2.0") && text.contains("# the usual"), "{text}");
        let document = toml::parse(&text).unwrap();
        let containerd = &document["plugins"]["io.containerd.cri.v1.runtime"]["containerd"];
        assert_eq!(containerd["runtimes"][NAME]["options"]["SystemdCgroup"].as_bool(), Some(true));
        assert_eq!(containerd["default_runtime_name"].as_str(), Some(NAME));
        let old = Wanted { options_file: Some("/etc/containerd/o.toml".into()), ..wanted(false) };
        assert!(add(DEBIAN, &old).unwrap().contains("ConfigPath = \"/etc/containerd/o.toml\""));
    }

    #[test]
    fn files_that_are_refused() {
        for (text, expected) in [
            ("version = 2\n[", "not readable as TOML"),
            ("[plugins]\n", "it is of version 1"),
            ("version = 9\n", "version 9"),
            ("version = 2\nplugins = 1\n", "plugins is not a table"),
        ] {
            let error = format!("{:#}", add(text, &wanted(false)).unwrap_err());
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn the_file_that_has_the_section() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("conf.d")).unwrap();
        std::fs::write(path("config.toml"), "version = 2\nimports = [\"conf.d/*.toml\"]\n").unwrap();
        assert_eq!(file_with_cri(&path("config.toml")).unwrap(), path("config.toml"));
        std::fs::write(path("conf.d/a.toml"), "version = 2\n[debug]\nlevel = \"info\"\n").unwrap();
        std::fs::write(path("conf.d/b.toml"), DEBIAN).unwrap();
        assert_eq!(file_with_cri(&path("config.toml")).unwrap(), path("conf.d/b.toml"));
        assert_eq!(file_with_cri(&path("none.toml")).unwrap(), path("none.toml"));
    }
}
