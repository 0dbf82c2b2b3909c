//! The edge: reading, showing and writing a configuration file.

use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use similar::TextDiff;

/// A file's text; `None` where there is no file.
pub fn read(path: &Path) -> Result<Option<String>> {
    match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        Ok(bytes) => {
            let text = String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8", path.display()))?;
            Ok(Some(text))
        }
    }
}

/// Whether a file has anything of ours at all, in whichever format.
pub fn mentions_us(text: &str) -> bool {
    text.contains("gpufence")
}

/// Where the file as it was is kept.
fn backup(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".before-gpufence");
    name.into()
}

/// What `--remove` leaves: the very bytes of the backup where they say the same, which they do unless the file was edited
/// meanwhile.
pub fn as_it_was(path: &Path, removed: Option<String>, same: fn(&str, &str) -> bool) -> Result<Option<String>> {
    let Some(kept) = read(&backup(path))? else { return Ok(removed) };
    match removed {
        Some(removed) if !same(&kept, &removed) => Ok(Some(removed)),
        _ => Ok(Some(kept)),
    }
}

/// Writes by temporary file and rename, with owner and mode of the file that was there; keeps that one, once.
pub fn write(path: &Path, before: Option<&str>, after: Option<&str>, removing: bool) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let backup = backup(path);
    if let (Some(before), false, false) = (before, removing, backup.exists()) {
        fs::write(&backup, before).with_context(|| format!("write {}", backup.display()))?;
    }
    let Some(after) = after else {
        fs::remove_file(path).with_context(|| format!("remove {}", path.display()))?;
        return Ok(());
    };
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let mut temporary =
        tempfile::NamedTempFile::new_in(folder).with_context(|| format!("write in {}", folder.display()))?;
    std::io::Write::write_all(&mut temporary, after.as_bytes())?;
    let (mode, owner) = match fs::symlink_metadata(path) {
        Ok(there) if there.file_type().is_symlink() => {
            bail!("{} is a link; name what it points to with --config", path.display())
        }
        Ok(there) => (there.mode() & 0o7777, Some((there.uid(), there.gid()))),
        Err(_) => (0o644, None),
    };
    fs::set_permissions(temporary.path(), fs::Permissions::from_mode(mode))?;
    if let Some((user, group)) = owner {
        std::os::unix::fs::chown(temporary.path(), Some(user), Some(group))?;
    }
    temporary.persist(path).with_context(|| format!("write {}", path.display()))?;
    if removing {
        let _ = fs::remove_file(backup);
    }
    Ok(())
}

/// The change as `diff -u` shows it.
pub fn diff(path: &Path, before: Option<&str>, after: Option<&str>) -> String {
    let name = path.display().to_string();
    let (old, new) = (before.map_or("/dev/null", |_| name.as_str()), after.map_or("/dev/null", |_| name.as_str()));
    TextDiff::from_lines(before.unwrap_or_default(), after.unwrap_or_default())
        .unified_diff()
        .header(old, new)
        .to_string()
}
