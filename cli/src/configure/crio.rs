//! A drop-in for CRI-O: `[crio.runtime.runtimes.gpufence]`.

use anyhow::Result;
use toml_edit::{Item, value};

use super::{Wanted, toml};

const NAME: &str = "gpufence";

/// With our runtime. A Pod's annotations come to the container's by CRI-O itself.
pub fn add(text: &str, wanted: &Wanted) -> Result<String> {
    let mut document = toml::parse(text)?;
    let runtime = toml::table(&mut document, &["crio", "runtime", "runtimes", NAME])?;
    for (key, wanted) in
        [("runtime_path", wanted.runtime_path.to_string_lossy().into_owned()), ("runtime_type", "oci".into())]
    {
        if runtime.get(key).and_then(Item::as_str) != Some(&wanted) {
            runtime[key] = value(wanted);
        }
    }
    if wanted.default_runtime {
        let section = toml::table(&mut document, &["crio", "runtime"])?;
        section.set_implicit(false);
        section["default_runtime"] = value(NAME);
    }
    Ok(document.to_string())
}

/// Without it.
pub fn remove(text: &str) -> Result<Option<String>> {
    let mut document = toml::parse(text)?;
    let path = ["crio", "runtime", "runtimes"];
    if let Some(runtimes) = toml::find(&mut document, &path) {
        runtimes.remove(NAME);
    }
    if let Some(section) = toml::find(&mut document, &path[..2])
        && section.get("default_runtime").and_then(Item::as_str) == Some(NAME)
    {
        section.remove("default_runtime");
        let only_on_the_way = section.iter().all(|(_, item)| item.is_table());
        section.set_implicit(only_on_the_way);
    }
    toml::prune(&mut document, &path);
    Ok(toml::text(&document))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_twice_as_once_and_takes_it_back() {
        let busy = "[crio.runtime]\nlog_level = \"info\" # quiet\n[crio.runtime.runtimes.crun]\nruntime_path = \"/usr/bin/crun\"\n";
        for before in ["", busy] {
            for default_runtime in [false, true] {
                let wanted =
                    Wanted { runtime_path: "/usr/bin/gpufence-runtime".into(), default_runtime, options_file: None };
                let once = add(before, &wanted).unwrap();
                assert_eq!(add(&once, &wanted).unwrap(), once);
                assert_eq!(remove(&once).unwrap().unwrap_or_default(), before);
            }
        }
    }
}
