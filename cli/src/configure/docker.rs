//! Docker's `daemon.json`.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use super::Wanted;

const NAME: &str = "gpufence";
const DEFAULT: &str = "default-runtime";

fn parse(text: &str) -> Result<Map<String, Value>> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_str(text).context("not readable as JSON")? {
        Value::Object(map) => Ok(map),
        _ => bail!("not a JSON object"),
    }
}

fn text(map: &Map<String, Value>) -> Result<String> {
    Ok(serde_json::to_string_pretty(map)? + "\n")
}

/// With our runtime.
pub fn add(before: &str, wanted: &Wanted) -> Result<String> {
    let mut map = parse(before)?;
    let runtimes = map.entry("runtimes").or_insert_with(|| json!({}));
    let runtimes = runtimes.as_object_mut().context("\"runtimes\" is not an object")?;
    let entry = runtimes.entry(NAME).or_insert_with(|| json!({}));
    let entry = entry.as_object_mut().context("\"runtimes.gpufence\" is not an object")?;
    entry.insert("path".into(), json!(wanted.runtime_path));
    if wanted.default_runtime {
        map.insert(DEFAULT.into(), json!(NAME));
    }
    // One that says it all already stays as it is written.
    if parse(before)? == map { Ok(before.to_owned()) } else { text(&map) }
}

/// Without it. A default runtime that stood there before ours is known only from the backup.
pub fn remove(before: &str) -> Result<Option<String>> {
    let mut map = parse(before)?;
    if let Some(runtimes) = map.get_mut("runtimes").and_then(Value::as_object_mut) {
        runtimes.remove(NAME);
        if runtimes.is_empty() {
            map.remove("runtimes");
        }
    }
    if map.get(DEFAULT).and_then(Value::as_str) == Some(NAME) {
        map.remove(DEFAULT);
    }
    match map.is_empty() {
        true => Ok(None),
        false if parse(before)? == map => Ok(Some(before.to_owned())),
        false => Ok(Some(text(&map)?)),
    }
}

/// Whether two texts say the same, but for a default runtime that only one of them has: what ours took the place of.
pub fn same(backup: &str, removed: &str) -> bool {
    let (Ok(mut backup), Ok(removed)) = (parse(backup), parse(removed)) else { return false };
    if backup.get("runtimes").is_some_and(|runtimes| runtimes.as_object().is_some_and(Map::is_empty)) {
        backup.remove("runtimes");
    }
    if !removed.contains_key(DEFAULT) {
        backup.remove(DEFAULT);
    }
    backup == removed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(default_runtime: bool) -> Wanted {
        Wanted { runtime_path: "/usr/local/bin/gpufence-runtime".into(), default_runtime, options_file: None }
    }

    #[test]
    fn adds_twice_as_once_and_takes_it_back() {
        let busy = "{\"log-driver\":\"journald\", \"default-runtime\": \"runc\",\n \"runtimes\": {\"crun\": {\"path\": \"crun\"}}}";
        for before in ["", "{}", busy] {
            for default_runtime in [false, true] {
                let once = add(before, &wanted(default_runtime)).unwrap();
                assert_eq!(add(&once, &wanted(default_runtime)).unwrap(), once);
                let value: Value = serde_json::from_str(&once).unwrap();
                assert_eq!(value["runtimes"]["gpufence"]["path"], "/usr/local/bin/gpufence-runtime");
                assert_eq!(value["default-runtime"] == "gpufence", default_runtime);
                let back = remove(&once).unwrap().unwrap_or_default();
                assert!(same(before, &back), "{before}: {back}");
            }
        }
        // Order stays, and so does what an administrator has added to our entry.
        let once = add(busy, &wanted(false)).unwrap();
        assert!(once.find("log-driver") < once.find("default-runtime"));
        let with_arguments =
            "{\"runtimes\": {\"gpufence\": {\"path\": \"/old\", \"runtimeArgs\": [\"--policy\", \"/p\"]}}}";
        assert!(add(with_arguments, &wanted(false)).unwrap().contains("runtimeArgs"));
    }

    #[test]
    fn files_that_are_refused() {
        for (text, expected) in
            [("{", "not readable as JSON"), ("[]", "not a JSON object"), ("{\"runtimes\": 1}", "not an object")]
        {
            let error = format!("{:#}", add(text, &wanted(false)).unwrap_err());
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
