//! A folder opened once, below which every path is resolved by the kernel with `openat2(RESOLVE_IN_ROOT)`.
//!
//! A driver root, a simulated one, a container's root and `/` are all the same kind of thing: an absolute link, or one
//! with too many `..`, ends inside the folder, as it would after a chroot into it, and magic links are refused.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
    sys::stat::Mode,
};

use crate::error::{CdiError, io_error};

/// A folder which stands for `/`.
#[derive(Debug)]
pub struct Root {
    handle: OwnedFd,
    path: PathBuf,
}

/// What a path inside a root leads to, after all links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The path inside the root, absolute, with no link left in it.
    pub path: PathBuf,
    /// Device and inode, which tell two paths of one file.
    pub identity: (u64, u64),
}

impl Root {
    /// Makes an empty file that everybody can read, and the folder right below the root that it lies in, where they aren't
    /// there. A link is followed as everywhere here: inside the root.
    pub fn create_file(&self, inside: impl AsRef<Path>) -> Result<(), CdiError> {
        let inside = inside.as_ref();
        if let Some(folder) = inside.parent().filter(|folder| *folder != Path::new("/"))
            && self.open_path(folder)?.is_none()
        {
            let relative = folder.strip_prefix("/").unwrap_or(folder);
            nix::sys::stat::mkdirat(self.handle.as_fd(), relative, Mode::from_bits_truncate(0o755))
                .map_err(io_error("create folder", self.host_path(folder)))?;
        }
        let flags = OFlag::O_CREAT | OFlag::O_WRONLY | OFlag::O_NOCTTY;
        self.open_with(inside, flags, Mode::from_bits_truncate(0o644))
            .map(drop)
            .map_err(io_error("create", self.host_path(inside)))
    }

    /// Opens `path`, which is a path of the host and trusted.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, CdiError> {
        let path = path.into();
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let handle = nix::fcntl::open(&path, flags, Mode::empty()).map_err(io_error("open", &path))?;
        Ok(Self { handle, path })
    }

    /// The folder's path on the host.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The host's path of something inside, for messages and for mounts of trusted roots. Not resolved.
    pub fn host_path(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        self.path.join(inside.strip_prefix("/").unwrap_or(inside))
    }

    fn open_with(&self, inside: &Path, flags: OFlag, mode: Mode) -> nix::Result<OwnedFd> {
        let how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .mode(mode)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        // EAGAIN: a rename raced with a ".." (openat2(2)). It can't be told apart from an attack, so tries are few.
        let mut last = Errno::EAGAIN;
        for _ in 0..8 {
            match openat2(self.handle.as_fd(), inside, how) {
                Err(Errno::EAGAIN) => last = Errno::EAGAIN,
                other => return other,
            }
        }
        Err(last)
    }

    /// Opens a regular file for reading. A fifo, device or folder is refused, without blocking on it.
    pub fn open_file(&self, inside: impl AsRef<Path>) -> Result<File, CdiError> {
        let inside = inside.as_ref();
        let handle = self
            .open_with(inside, OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY, Mode::empty())
            .map_err(io_error("open", self.host_path(inside)))?;
        let file = File::from(handle);
        let kind = file.metadata().map_err(io_error::<io::Error>("stat", self.host_path(inside)))?.file_type();
        if !kind.is_file() {
            return Err(CdiError::Malformed { path: self.host_path(inside), what: "not a regular file".into() });
        }
        Ok(file)
    }

    /// Reads a regular file of at most `limit` bytes.
    pub fn read(&self, inside: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>, CdiError> {
        let inside = inside.as_ref();
        let mut bytes = Vec::new();
        self.open_file(inside)?
            .take(limit + 1)
            .read_to_end(&mut bytes)
            .map_err(io_error::<io::Error>("read", self.host_path(inside)))?;
        if bytes.len() as u64 > limit {
            return Err(CdiError::Malformed {
                path: self.host_path(inside),
                what: format!("longer than {limit} bytes"),
            });
        }
        Ok(bytes)
    }

    /// Reads a file of text of at most a MiB, as those in proc are.
    pub fn read_text(&self, inside: impl AsRef<Path>) -> Result<String, CdiError> {
        let bytes = self.read(inside, 1 << 20)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// As [`Root::read`], with `None` where there is no such file.
    pub fn read_if_there(&self, inside: impl AsRef<Path>, limit: u64) -> Result<Option<Vec<u8>>, CdiError> {
        found(self.read(inside, limit))
    }

    /// The names in a folder, sorted; none where there is no such folder.
    pub fn list(&self, inside: impl AsRef<Path>) -> Result<Vec<OsString>, CdiError> {
        let inside = inside.as_ref();
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let handle = match self.open_with(inside, flags, Mode::empty()) {
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(Vec::new()),
            other => other.map_err(io_error("open", self.host_path(inside)))?,
        };
        let mut folder = Dir::from_fd(handle).map_err(io_error("list", self.host_path(inside)))?;
        let mut names = Vec::new();
        for entry in folder.iter() {
            let entry = entry.map_err(io_error("list", self.host_path(inside)))?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(std::os::unix::ffi::OsStringExt::from_vec(name.to_vec()));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Where a path leads, or `None` where it leads nowhere.
    pub fn resolve(&self, inside: impl AsRef<Path>) -> Result<Option<Resolved>, CdiError> {
        let inside = inside.as_ref();
        let Some(handle) = self.open_path(inside)? else { return Ok(None) };
        let link = format!("/proc/self/fd/{}", handle.as_raw_fd());
        let target = std::fs::read_link(&link).map_err(io_error::<io::Error>("read link", &link))?;
        let metadata = handle.metadata().map_err(io_error::<io::Error>("stat", self.host_path(inside)))?;
        let own =
            std::fs::read_link(format!("/proc/self/fd/{}", self.handle.as_raw_fd()))
                .map_err(io_error::<io::Error>("read link of", &self.path))?;
        let path = target.strip_prefix(&own).map_or_else(|_| inside.to_owned(), |rest| Path::new("/").join(rest));
        Ok(Some(Resolved { path, identity: (metadata.dev(), metadata.ino()) }))
    }

    /// Opens a path as a handle to stat or link, not to read, or `None` where it leads nowhere.
    pub fn open_path(&self, inside: impl AsRef<Path>) -> Result<Option<File>, CdiError> {
        let inside = inside.as_ref();
        match self.open_with(inside, OFlag::O_PATH, Mode::empty()) {
            Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
            other => other.map(|handle| Some(File::from(handle))).map_err(io_error("open", self.host_path(inside))),
        }
    }
}

/// Turns "not there" into `None`.
pub(crate) fn found<T>(result: Result<T, CdiError>) -> Result<Option<T>, CdiError> {
    match result {
        Err(CdiError::Io { source, .. })
            if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Ok(None)
        }
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_end_inside_the_root() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("etc")).unwrap();
        std::fs::write(folder.path().join("etc/hostname"), "inside").unwrap();
        symlink("/etc/hostname", folder.path().join("absolute")).unwrap();
        symlink("../../../../etc/hostname", folder.path().join("etc/climbing")).unwrap();
        symlink("/proc/self/root/etc/hostname", folder.path().join("magic")).unwrap();
        let root = Root::open(folder.path()).unwrap();
        assert_eq!(root.read_text("/absolute").unwrap(), "inside");
        assert_eq!(root.read_text("/etc/climbing").unwrap(), "inside");
        assert_eq!(root.resolve("/etc/climbing").unwrap().unwrap().path, Path::new("/etc/hostname"));
        assert!(root.read_text("/magic").is_err());
        assert_eq!(root.resolve("/nothing").unwrap(), None);
    }

    #[test]
    fn only_regular_files_of_bounded_length_are_read() {
        let folder = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&folder.path().join("fifo"), Mode::S_IRWXU).unwrap();
        std::fs::write(folder.path().join("long"), "12345").unwrap();
        let root = Root::open(folder.path()).unwrap();
        assert!(root.read("/fifo", 10).unwrap_err().to_string().contains("not a regular file"));
        assert!(root.read("/long", 4).unwrap_err().to_string().contains("longer than 4 bytes"));
        assert_eq!(root.read("/long", 5).unwrap(), b"12345");
        assert_eq!(root.read_if_there("/none", 5).unwrap(), None);
        assert_eq!(root.list("/none").unwrap(), Vec::<OsString>::new());
        assert_eq!(root.list("/").unwrap(), ["fifo", "long"]);
    }
}
