//! Terminals: runc makes one and sends its master over a socket.

use std::{
    fs::File,
    io::IoSliceMut,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use containerd_shim::io::Pty;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use crate::Failure;

/// How long runc may take to send the terminal once it was run; it does so before it exits.
const LIMIT: Duration = Duration::from_secs(10);

nix::ioctl_write_ptr_bad!(
    /// Sets a terminal's size, tty_ioctl(4).
    set_window_size,
    nix::libc::TIOCSWINSZ,
    nix::libc::winsize
);

/// A socket that runc sends a terminal over. Its file goes when it is dropped.
pub struct ConsoleSocket {
    listener: tokio::net::UnixListener,
    folder: PathBuf,
}

impl ConsoleSocket {
    /// Makes one in a folder of its own below /run: a socket's path has at most 107 bytes, which a bundle's may fill.
    pub fn new() -> Result<Self, Failure> {
        let template = Path::new("/run/gpufence-console-XXXXXX");
        let folder = nix::unistd::mkdtemp(template)?;
        let listener = UnixListener::bind(folder.join("socket"))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener: tokio::net::UnixListener::from_std(listener)?, folder })
    }

    pub fn path(&self) -> PathBuf {
        self.folder.join("socket")
    }

    /// The terminal's master.
    pub async fn receive(&self) -> Result<Pty, Failure> {
        let receive = async {
            let (stream, _) = self.listener.accept().await?;
            loop {
                stream.readable().await?;
                let received =
                    stream.try_io(tokio::io::Interest::READABLE, || Ok(receive_descriptor(stream.as_raw_fd())?));
                match received {
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Ok(Some(master)) => return Ok(Pty::new(File::from(master))?),
                    Ok(None) => return Err("the runtime closed the console socket without a terminal".into()),
                    Err(error) => return Err(Failure::from(error)),
                }
            }
        };
        tokio::time::timeout(LIMIT, receive).await.map_err(|_| "the runtime sent no terminal")?
    }
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[allow(unsafe_code, reason = "one-line wrapper")]
fn receive_descriptor(socket: i32) -> nix::Result<Option<OwnedFd>> {
    let mut name = [0; 4096];
    let mut slices = [IoSliceMut::new(&mut name)];
    let mut space = nix::cmsg_space!([i32; 1]);
    let message = recvmsg::<()>(socket, &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = control
            && let Some(&descriptor) = descriptors.first()
        {
            // SAFETY: the kernel has just made this descriptor for us, and nobody else knows of it.
            return Ok(Some(unsafe { OwnedFd::from_raw_fd(descriptor) }));
        }
    }
    Ok(None)
}

/// Sets the size of a terminal.
#[allow(unsafe_code, reason = "one-line wrapper")]
pub fn resize(terminal: &Pty, width: u32, height: u32) -> nix::Result<()> {
    let cut = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
    let size = nix::libc::winsize { ws_row: cut(height), ws_col: cut(width), ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the descriptor is open while `terminal` is borrowed, and the kernel reads one winsize.
    unsafe { set_window_size(terminal.as_fd().as_raw_fd(), &raw const size) }.map(drop)
}
