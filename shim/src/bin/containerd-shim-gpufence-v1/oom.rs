//! Tells when the kernel ends a process of a container for want of memory: an eventfd under cgroup v1, inotify on
//! `memory.events` under v2. Both only wake; what happened is in the count of [`Cgroup::oom_kills`].

use std::{
    fs,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::{
    eventfd::{EfdFlags, EventFd},
    inotify::{AddWatchFlags, InitFlags, Inotify},
};
use tokio::io::unix::AsyncFd;

use crate::{Failure, cgroup::Cgroup};

/// Wakes after each change that may be a kill.
pub struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    pub fn new(cgroup: &Cgroup) -> Result<Self, Failure> {
        let folder = cgroup.controller("memory").ok_or("no memory controller")?;
        let descriptor = match cgroup {
            Cgroup::V1(_) => {
                let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
                let control = fs::File::open(folder.join("memory.oom_control"))?;
                let line = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
                fs::write(folder.join("cgroup.event_control"), line)?;
                OwnedFd::from(event)
            }
            Cgroup::V2(_) => {
                let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
                inotify.add_watch(&folder.join("memory.events"), AddWatchFlags::IN_MODIFY)?;
                OwnedFd::from(inotify)
            }
        };
        Ok(Self(register(descriptor)?))
    }

    /// Waits for the next change.
    pub async fn changed(&self) -> Result<(), Failure> {
        let mut ready = self.0.readable().await?;
        // Larger than any inotify event of a watched file (it has no name), and than an eventfd's counter.
        let _ = nix::unistd::read(self.0.get_ref(), &mut [0; 1024]);
        ready.clear_ready();
        Ok(())
    }
}

#[allow(unsafe_code, reason = "one-line wrapper")]
fn register(descriptor: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the AsyncFd owns the descriptor, which stays open and the same for as long as it is registered.
    Ok(unsafe { AsyncFd::register(descriptor) }?)
}
