//! Podman's `containers.conf`: `[engine.runtimes]`.

use anyhow::Result;
use toml_edit::{Array, Item, value};

use super::{Wanted, toml};

const NAME: &str = "gpufence";

/// With our runtime.
pub fn add(text: &str, wanted: &Wanted) -> Result<String> {
    let mut document = toml::parse(text)?;
    let path = wanted.runtime_path.to_string_lossy().into_owned();
    let runtimes = toml::table(&mut document, &["engine", "runtimes"])?;
    let there = runtimes.get(NAME).and_then(Item::as_array);
    if there.and_then(|there| there.get(0)).and_then(toml_edit::Value::as_str) != Some(&path) {
        runtimes[NAME] = value(Array::from_iter([path]));
    }
    if wanted.default_runtime {
        let engine = toml::table(&mut document, &["engine"])?;
        toml::set_default(engine, "runtime", NAME);
    }
    Ok(document.to_string())
}

/// Without it.
pub fn remove(text: &str) -> Result<Option<String>> {
    let mut document = toml::parse(text)?;
    let path = ["engine", "runtimes"];
    if let Some(runtimes) = toml::find(&mut document, &path) {
        runtimes.remove(NAME);
        if runtimes.is_empty() {
            runtimes.set_implicit(true);
        }
    }
    if let Some(engine) = toml::find(&mut document, &path[..1]) {
        toml::restore_default(engine, "runtime");
    }
    toml::prune(&mut document, &path);
    Ok(toml::text(&document))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_twice_as_once_and_takes_it_back() {
        let busy = "# site\n[containers]\nlog_size_max = -1\n\n[engine]\nruntime = \"crun\"\n\n[engine.runtimes]\n# mine\nkata = [\"/usr/bin/kata\"]\n";
        for before in ["", "[engine]\n", busy] {
            for default_runtime in [false, true] {
                let wanted =
                    Wanted { runtime_path: "/usr/bin/gpufence-runtime".into(), default_runtime, options_file: None };
                let once = add(before, &wanted).unwrap();
                assert_eq!(add(&once, &wanted).unwrap(), once);
                let document = toml::parse(&once).unwrap();
                assert_eq!(document["engine"]["runtimes"]["gpufence"][0].as_str(), Some("/usr/bin/gpufence-runtime"));
                let back = remove(&once).unwrap().unwrap_or_default();
                assert!(toml::same(&back, before), "{before}\n--\n{back}");
            }
        }
        assert!(
            add("engine = 1", &Wanted { runtime_path: "/r".into(), default_runtime: false, options_file: None })
                .is_err()
        );
    }
}
