//! `gpufence keygen`.

use std::{
    fs,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use gpufence_grant::{
    signature::{KEY_FILE_ENDING, PublicKey},
    signing::PrivateKey,
};
use serde_json::json;

use crate::arguments::{KeygenArguments, Output};

/// Makes a key pair, or shows the public half of one.
pub fn run(arguments: &KeygenArguments) -> Result<()> {
    let text = match (&arguments.public_of, &arguments.kubernetes) {
        (Some(file), _) => {
            let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
            let key = PrivateKey::from_pem(&text).with_context(|| format!("read {}", file.display()))?;
            shown(key.public(), None, arguments.output)?
        }
        (None, Some(namespace)) => manifests(&PrivateKey::generate()?, namespace)?,
        (None, None) => {
            let key = PrivateKey::generate()?;
            let files = write(&key, &arguments.folder)?;
            shown(key.public(), Some(&files), arguments.output)?
        }
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Writes both files. What is there stays: a key that was lost can't be made again.
fn write(key: &PrivateKey, folder: &Path) -> Result<[PathBuf; 2]> {
    fs::create_dir_all(folder).with_context(|| format!("create folder {}", folder.display()))?;
    let create = |ending: &str, mode: u32, content: String| {
        let path = folder.join(format!("{}.{ending}", key.public().id()));
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true).mode(mode);
        let file = options.open(&path);
        file.and_then(|mut file| file.write_all(content.as_bytes()))
            .with_context(|| format!("write {}", path.display()))?;
        Ok::<_, anyhow::Error>(path)
    };
    Ok([create("key", 0o600, key.to_pem()?)?, create(KEY_FILE_ENDING, 0o644, format!("{}\n", key.public()))?])
}

fn shown(key: &PublicKey, files: Option<&[PathBuf; 2]>, output: Output) -> Result<String> {
    let [private, public] = files.map_or([None, None], |[private, public]| [Some(private), Some(public)]);
    Ok(match output {
        Output::Json => {
            let value = json!({
                "id": key.id(), "publicKey": key.to_string(), "privateKeyFile": private, "publicKeyFile": public,
            });
            serde_json::to_string_pretty(&value)? + "\n"
        }
        Output::Table => match (private, public) {
            (Some(private), Some(public)) => {
                format!("Key {}\nprivate: {}\npublic:  {}\n{key}\n", key.id(), private.display(), public.display())
            }
            _ => format!("{key}\n"),
        },
    })
}

/// A Secret for the extender, a ConfigMap for the nodes.
fn manifests(key: &PrivateKey, namespace: &str) -> Result<String> {
    let indented: String = key.to_pem()?.lines().map(|line| format!("    {line}\n")).collect();
    let (id, public) = (key.public().id(), key.public());
    // Quoted as JSON is, which YAML takes.
    let namespace = serde_json::to_string(namespace)?;
    Ok(format!(
        "apiVersion: v1
kind: Secret
metadata:
  name: gpufence-signing-key
  namespace: {namespace}
type: Opaque
stringData:
  signing.key: |
{indented}  {id}.pub: \"{public}\"
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: gpufence-public-keys
  namespace: {namespace}
data:
  {id}.pub: \"{public}\"
"
    ))
}
