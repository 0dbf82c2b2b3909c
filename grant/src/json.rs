//! The grant as the extender writes it:
//! `{"version":1,"podUID":"…","node":"…","issuedAt":"…","containers":{"trainer":[{"gpu":"GPU-…","memoryMiB":8192}]}}`.

use std::{collections::BTreeMap, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::Value;

use crate::{GpuReference, Grant, GrantError, MAX_GRANT_BYTES, Mode, Recipients, Share, check_shares};

/// How deep a grant nests: the object, its containers, a list of shares, a share.
const MAX_DEPTH: usize = 4;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct WireGrant {
    version: u64,
    #[serde(default, rename = "podUID")]
    pod_uid: Option<String>,
    #[serde(default)]
    node: Option<String>,
    #[serde(default)]
    issued_at: Option<String>,
    #[serde(default)]
    mode: Option<Mode>,
    #[serde(deserialize_with = "unique_containers")]
    containers: BTreeMap<String, Vec<Object<WireShare>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct WireShare {
    gpu: String,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
    #[serde(default)]
    compute_percent: Option<u64>,
}

/// Takes a struct from an object alone, where serde's own derive takes an array of its fields too.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(access)).map(Object)
            }
        }
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// A map that refuses a container named twice, where serde's own keeps the last.
fn unique_containers<'de, D>(deserializer: D) -> Result<BTreeMap<String, Vec<Object<WireShare>>>, D::Error>
where
    D: Deserializer<'de>,
{
    struct Containers;
    impl<'de> Visitor<'de> for Containers {
        type Value = BTreeMap<String, Vec<Object<WireShare>>>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an object from container name to a list of shares")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
            let mut containers = BTreeMap::new();
            while let Some((name, shares)) = access.next_entry::<String, Vec<Object<WireShare>>>()? {
                if containers.contains_key(&name) {
                    return Err(serde::de::Error::custom(format!("container \"{name}\" is named twice")));
                }
                containers.insert(name, shares);
            }
            Ok(containers)
        }
    }
    deserializer.deserialize_map(Containers)
}

/// Reads a grant in JSON, strictly: no unknown field, no name twice, no GPU twice, no share of nothing.
pub fn parse(text: &str) -> Result<Grant, GrantError> {
    if text.len() > MAX_GRANT_BYTES {
        return Err(GrantError::TooLong { bytes: text.len() });
    }
    if text.trim().is_empty() {
        return Err(GrantError::Empty);
    }
    check_depth(text)?;
    let Object::<WireGrant>(wire) = serde_json::from_str(text).map_err(|error| GrantError::Json(error.to_string()))?;
    if wire.version != 1 {
        return Err(GrantError::Version(wire.version));
    }
    if wire.containers.is_empty() {
        return Err(GrantError::NoContainers);
    }
    let mut containers = BTreeMap::new();
    for (name, shares) in wire.containers {
        if !is_container_name(&name) {
            return Err(GrantError::ContainerName(name.chars().take(80).collect()));
        }
        let shares = shares.into_iter().map(share).collect::<Result<Vec<_>, _>>()?;
        check_shares(&name, &shares)?;
        containers.insert(name, shares);
    }
    Ok(Grant {
        pod_uid: wire.pod_uid,
        node: wire.node,
        issued_at: wire.issued_at,
        mode: wire.mode,
        recipients: Recipients::Named(containers),
    })
}

fn share(Object(wire): Object<WireShare>) -> Result<Share, GrantError> {
    let gpu = GpuReference::parse(&wire.gpu)?;
    if let GpuReference::Index(index) = gpu {
        return Err(GrantError::IndexInJson(index.to_string()));
    }
    let compute_percent = wire
        .compute_percent
        .map(|percent| u8::try_from(percent).map_err(|_| GrantError::Percent { gpu: gpu.to_string(), percent }))
        .transpose()?;
    Ok(Share { gpu, memory_mib: wire.memory_mib, compute_percent })
}

/// Writes a grant to containers by name, as [`parse`] reads it. Short: it is kept with the Pod.
///
/// # Errors
/// What [`parse`] would refuse isn't written.
pub fn write(grant: &Grant) -> Result<String, GrantError> {
    let Recipients::Named(containers) = &grant.recipients else { return Err(GrantError::NoContainers) };
    let share = |share: &Share| {
        let mut object = serde_json::Map::new();
        object.insert("gpu".into(), share.gpu.to_string().into());
        object.insert("memoryMiB".into(), share.memory_mib.into());
        if let Some(percent) = share.compute_percent {
            object.insert("computePercent".into(), percent.into());
        }
        Value::Object(object)
    };
    let mut object = serde_json::Map::new();
    object.insert("version".into(), 1.into());
    for (key, value) in [("podUID", &grant.pod_uid), ("node", &grant.node), ("issuedAt", &grant.issued_at)] {
        if let Some(value) = value {
            object.insert(key.into(), value.as_str().into());
        }
    }
    if let Some(Mode::Mps) = grant.mode {
        object.insert("mode".into(), "mps".into());
    }
    let containers = containers.iter().map(|(name, shares)| (name.clone(), shares.iter().map(share).collect()));
    object.insert("containers".into(), Value::Object(containers.collect()));
    let text = Value::Object(object).to_string();
    parse(&text)?;
    Ok(text)
}

/// Refuses deep nesting before the parser recurses into it.
fn check_depth(text: &str) -> Result<(), GrantError> {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(GrantError::Json(format!("nested more than {MAX_DEPTH} deep")));
        }
    }
    Ok(())
}

/// Kubernetes takes an RFC 1123 label of up to 63 bytes; standalone engines take upper case, `_` and `.` in an id too.
fn is_container_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=128).contains(&name.len()) && name.chars().all(plain) && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GPU: &str = "GPU-5f4d0c7e-4b2a-4c7e-9c1e-0d6c2c6f0001";

    fn containers(inner: &str) -> String {
        format!(r#"{{"version":1,"containers":{{{inner}}}}}"#)
    }

    fn message(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn reads_the_design_s_example() {
        let text = format!(
            r#"{{"version":1,"podUID":"u","node":"n","issuedAt":"2026-01-01T00:00:00Z","containers":{{"trainer":[{{"gpu":"{GPU}","memoryMiB":8192,"computePercent":50}}]}}}}"#
        );
        let grant = parse(&text).unwrap();
        assert_eq!(grant.pod_uid.as_deref(), Some("u"));
        assert_eq!(grant.node.as_deref(), Some("n"));
        assert_eq!(
            grant.shares_of("trainer"),
            [Share { gpu: GpuReference::Uuid(GPU.into()), memory_mib: 8192, compute_percent: Some(50) }]
        );
        assert!(grant.shares_of("debugger").is_empty());
        assert_eq!(grant.mode, None);
        let text = text.replacen('{', r#"{"mode":"mps","#, 1);
        assert_eq!(parse(&text).unwrap().mode, Some(Mode::Mps));
    }

    #[test]
    fn refuses_with_exact_words() {
        let share = |extra: &str| containers(&format!(r#""a":[{{"gpu":"{GPU}","memoryMiB":1{extra}}}]"#));
        for (text, expected) in [
            (String::new(), "the text is empty"),
            ("{".into(), "EOF while parsing"),
            ("[]".into(), "invalid type: sequence, expected an object"),
            (containers(&format!(r#""a":[["{GPU}",1,null]]"#)), "invalid type: sequence, expected an object"),
            (r#"{"version":2,"containers":{}}"#.into(), "grant version 2 is not known"),
            (containers(""), "the grant names no container"),
            (r#"{"containers":{}}"#.into(), "missing field `version`"),
            (r#"{"version":1}"#.into(), "missing field `containers`"),
            (r#"{"version":1,"mode":"time","containers":{}}"#.into(), "unknown variant `time`, expected `mps`"),
            (share(r#","memory":1"#), "unknown field `memory`"),
            (share(r#","computePercent":101"#), "has 101 percent of compute"),
            (share(r#","computePercent":1000"#), "has 1000 percent of compute"),
            (share(r#","computePercent":0"#), "has 0 percent of compute"),
            (share(r#","computePercent":-1"#), "invalid value: integer `-1`"),
            (share(r#","memoryMiB":2"#), "duplicate field `memoryMiB`"),
            (containers(&format!(r#""a":[{{"gpu":"{GPU}","memoryMiB":0}}]"#)), "has no memory"),
            (containers(&format!(r#""a":[{{"gpu":"{GPU}","memoryMiB":"8GiB"}}]"#)), "invalid type: string"),
            (containers(&format!(r#""a":[{{"gpu":"{GPU}"}}]"#)), "missing field `memoryMiB`"),
            (containers(r#""a":[{"gpu":"0","memoryMiB":1}]"#), "GPU 0 is named by index"),
            (containers(r#""a":[{"gpu":"all","memoryMiB":1}]"#), "\"all\" names no GPU"),
            (containers(r#""a":[]"#), "container \"a\" is named with no share"),
            (containers(r#""../a":[]"#), "\"../a\" is not a container name"),
            (
                containers(&format!(r#""a":[{{"gpu":"{GPU}","memoryMiB":1}},{{"gpu":"{GPU}","memoryMiB":2}}]"#)),
                "container \"a\" is given GPU",
            ),
            (
                containers(&format!(r#""a":[{{"gpu":"{GPU}","memoryMiB":1}}],"a":[{{"gpu":"{GPU}","memoryMiB":2}}]"#)),
                "container \"a\" is named twice",
            ),
            (format!("{}{}", "[".repeat(1000), "]".repeat(1000)), "nested more than 4 deep"),
            (containers("") + "x", "trailing characters"),
        ] {
            let message = message(&text);
            assert!(message.contains(expected), "{text}: {message}");
        }
        assert_eq!(parse(&" ".repeat(MAX_GRANT_BYTES + 1)), Err(GrantError::TooLong { bytes: MAX_GRANT_BYTES + 1 }));
    }

    #[test]
    fn what_is_written_is_read() {
        let text = format!(
            r#"{{"version":1,"podUID":"u","node":"n","issuedAt":"2026-01-01T00:00:00Z","mode":"mps","containers":{{"a":[{{"gpu":"{GPU}","memoryMiB":8192,"computePercent":50}}],"b":[{{"gpu":"{GPU}","memoryMiB":1}}]}}}}"#
        );
        let mut grant = parse(&text).unwrap();
        assert_eq!(write(&grant).unwrap(), text);
        grant.recipients = Recipients::Named(BTreeMap::new());
        assert_eq!(write(&grant), Err(GrantError::NoContainers));
        grant.recipients = Recipients::Bearer(Vec::new());
        assert_eq!(write(&grant), Err(GrantError::NoContainers));
    }

    proptest! {
        #[test]
        fn never_panics(text in r#"[\{\}\[\]",:a-zA-Z0-9\\-]{0,300}"#) {
            let _ = parse(&text);
        }
    }
}
