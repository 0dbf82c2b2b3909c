//! OCI images made on the spot: an archive that `ctr images import` and `docker load` take, with one layer.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};

/// What is to be in an image.
#[derive(Debug, Clone, Default)]
pub struct Image {
    /// Its full name, such as `docker.io/gpufence/demo:latest`.
    pub name: String,
    /// Files: the host's, and where they are in the image.
    pub files: Vec<(PathBuf, String)>,
    /// Files with text.
    pub texts: Vec<(String, String)>,
    /// Symbolic links: path and target.
    pub links: Vec<(String, String)>,
    /// Device nodes: path, major, minor.
    pub nodes: Vec<(String, u32, u32)>,
    /// Empty folders.
    pub folders: Vec<String>,
    /// `NAME=value`.
    pub environment: Vec<String>,
    /// What runs by default.
    pub command: Vec<String>,
}

impl Image {
    /// Adds this very program at `path`, with the shared libraries that it runs on. They lie where every loader looks.
    pub fn with_this_program(mut self, path: &str) -> Result<Self> {
        let own = std::env::current_exe().context("find this program's own file")?;
        self.add_program(own, path)?;
        Ok(self)
    }

    /// Adds a program of this same machine, with the shared libraries that the running program has mapped: those of
    /// every Rust program.
    pub fn add_program(&mut self, program: PathBuf, path: &str) -> Result<()> {
        self.files.push((program, path.to_owned()));
        let maps = fs::read_to_string("/proc/self/maps").context("read /proc/self/maps")?;
        let mut libraries: Vec<&str> = maps
            .lines()
            .filter_map(|line| line.find('/').map(|start| &line[start..]))
            .filter(|path| path.contains(".so"))
            .collect();
        libraries.sort_unstable();
        libraries.dedup();
        for library in libraries {
            let name = library.rsplit('/').next().unwrap_or(library);
            // The interpreter's path stands in the program: /lib64 on x86-64, /lib on the others.
            let folder = match (name.starts_with("ld-linux"), cfg!(target_arch = "x86_64")) {
                (true, true) => "lib64",
                (true, false) => "lib",
                (false, _) => "usr/lib",
            };
            self.files.push((library.into(), format!("{folder}/{name}")));
        }
        Ok(())
    }

    /// Writes the image as an archive in the layout of the OCI image specification.
    pub fn write(&self, archive: &Path) -> Result<()> {
        let layer = self.layer()?;
        let layer_digest = digest(&layer);
        let config = json!({
            "architecture": if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" },
            "os": "linux",
            "config": {"Env": self.environment, "Cmd": self.command},
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
        });
        let config = serde_json::to_vec(&config)?;
        let describe = |media_type: &str, bytes: &[u8]| json!({"mediaType": media_type, "digest": digest(bytes), "size": bytes.len()});
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": describe("application/vnd.oci.image.config.v1+json", &config),
            "layers": [describe("application/vnd.oci.image.layer.v1.tar", &layer)],
        }))?;
        let mut entry = describe("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["annotations"] = json!({"io.containerd.image.name": self.name});
        let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [entry]}))?;
        let blob = |bytes: &[u8]| format!("blobs/sha256/{}", &digest(bytes)["sha256:".len()..]);
        let layout = serde_json::to_vec(&json!({"imageLayoutVersion": "1.0.0"}))?;

        let file = fs::File::create(archive).with_context(|| format!("create {}", archive.display()))?;
        let mut output = tar::Builder::new(file);
        for (path, bytes) in [
            ("oci-layout".to_owned(), &layout),
            ("index.json".to_owned(), &index),
            (blob(&manifest), &manifest),
            (blob(&config), &config),
            (blob(&layer), &layer),
        ] {
            append(&mut output, &path, 0o644, bytes)?;
        }
        output.into_inner()?.flush()?;
        Ok(())
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut output = tar::Builder::new(Vec::new());
        for folder in &self.folders {
            let mut header = header(tar::EntryType::Directory, 0o755, 0);
            output.append_data(&mut header, format!("{folder}/"), std::io::empty())?;
        }
        for (from, path) in &self.files {
            let bytes = fs::read(from).with_context(|| format!("read {}", from.display()))?;
            append(&mut output, path, 0o755, &bytes)?;
        }
        for (path, text) in &self.texts {
            append(&mut output, path, 0o644, text.as_bytes())?;
        }
        for (path, target) in &self.links {
            output.append_link(&mut header(tar::EntryType::Symlink, 0o777, 0), path, target)?;
        }
        for (path, major, minor) in &self.nodes {
            let mut header = header(tar::EntryType::Char, 0o666, 0);
            header.set_device_major(*major)?;
            header.set_device_minor(*minor)?;
            output.append_data(&mut header, path, std::io::empty())?;
        }
        Ok(output.into_inner()?)
    }

    /// The layer as a folder: a container's root without an image.
    pub fn unpack(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder)?;
        let layer = self.layer()?;
        tar::Archive::new(layer.as_slice())
            .unpack(folder)
            .with_context(|| format!("unpack into {}", folder.display()))?;
        // The archive's reader makes files, folders and links; nodes it skips.
        for (path, major, minor) in &self.nodes {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().unwrap_or(folder))?;
            let _ = fs::remove_file(&path);
            let mode = nix::sys::stat::Mode::from_bits_truncate(0o666);
            let device = nix::sys::stat::makedev((*major).into(), (*minor).into());
            nix::sys::stat::mknod(&path, nix::sys::stat::SFlag::S_IFCHR, mode, device)
                .with_context(|| format!("mknod {}", path.display()))?;
        }
        Ok(())
    }
}

fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

fn append<W: Write>(output: &mut tar::Builder<W>, path: &str, mode: u32, bytes: &[u8]) -> Result<()> {
    let mut header = header(tar::EntryType::Regular, mode, bytes.len() as u64);
    Ok(output.append_data(&mut header, path, bytes)?)
}

fn digest(bytes: &[u8]) -> String {
    let hash = Sha256::digest(bytes);
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// The config's JSON of an archive's only image, for tests of what was written.
    fn read_back(archive: &Path) -> Value {
        let mut files = std::collections::HashMap::new();
        let mut input = tar::Archive::new(fs::File::open(archive).unwrap());
        for entry in input.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().to_string_lossy().into_owned();
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
            files.insert(path, bytes);
        }
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        let blob = |wanted: &Value| {
            let hex = wanted.as_str().unwrap().strip_prefix("sha256:").unwrap();
            let bytes = &files[&format!("blobs/sha256/{hex}")];
            assert_eq!(digest(bytes), wanted.as_str().unwrap());
            serde_json::from_slice::<Value>(bytes).unwrap()
        };
        let manifest = blob(&index["manifests"][0]["digest"]);
        blob(&manifest["config"]["digest"])
    }

    #[test]
    fn an_archive_holds_what_its_digests_say() {
        let folder = tempfile::tempdir().unwrap();
        let image = Image {
            name: "docker.io/gpufence/test:1".into(),
            texts: vec![("etc/hostname".into(), "x".into())],
            environment: vec!["A=b".into()],
            folders: vec!["proc".into()],
            ..Image::default()
        };
        let archive = folder.path().join("image.tar");
        image.write(&archive).unwrap();
        assert_eq!(read_back(&archive)["config"]["Env"], json!(["A=b"]));
        image.unpack(&folder.path().join("root")).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("root/etc/hostname")).unwrap(), "x");
    }
}
