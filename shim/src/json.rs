//! Ways into a `config.json` that neither panic nor invent: a missing part is made, one of another shape is an error.

use serde_json::{Map, Value};

use crate::EnforceError;

/// The object at `path`, made with all above it where it is missing or null.
pub fn object<'a>(spec: &'a mut Value, path: &[&str]) -> Result<&'a mut Map<String, Value>, EnforceError> {
    let mut here = spec;
    for (depth, key) in path.iter().enumerate() {
        let map = here.as_object_mut().ok_or_else(|| shape(&path[..depth], "an object"))?;
        here = map.entry(*key).or_insert_with(|| Value::Object(Map::new()));
        if here.is_null() {
            *here = Value::Object(Map::new());
        }
    }
    here.as_object_mut().ok_or_else(|| shape(path, "an object"))
}

/// The list at `path`, made where it is missing or null.
pub fn list<'a>(spec: &'a mut Value, path: &[&str]) -> Result<&'a mut Vec<Value>, EnforceError> {
    let (last, above) = path.split_last().expect("a list has a name");
    let here = object(spec, above)?.entry(*last).or_insert_with(|| Value::Array(Vec::new()));
    if here.is_null() {
        *here = Value::Array(Vec::new());
    }
    here.as_array_mut().ok_or_else(|| shape(path, "a list"))
}

/// The list at `path` if there is one.
pub fn list_if_there<'a>(spec: &'a mut Value, path: &[&str]) -> Result<Option<&'a mut Vec<Value>>, EnforceError> {
    let mut here = spec;
    for key in path {
        match here.get_mut(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(next) => here = next,
        }
    }
    here.as_array_mut().map(Some).ok_or_else(|| shape(path, "a list"))
}

fn shape(path: &[&str], wanted: &str) -> EnforceError {
    let place = if path.is_empty() { "the whole".into() } else { path.join(".") };
    EnforceError::Shape(format!("{place} is not {wanted}"))
}
