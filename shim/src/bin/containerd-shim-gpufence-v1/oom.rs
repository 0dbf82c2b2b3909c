//! Tells when the kernel ends a process of a container for want of memory: an eventfd under cgroup v1, inotify on
//! `memory.events` under v2. Both only wake; what happened is in the count of [`Cgroup::oom_kills`].

use std::{fs, os::fd::AsRawFd};

use nix::sys::{
    eventfd::{EfdFlags, EventFd},
    inotify::{AddWatchFlags, InitFlags, Inotify},
};
use tokio::io::unix::AsyncFd;

use crate::{Failure, cgroup::Cgroup};

/// Wakes after each change that may be a kill.
pub enum Watch {
    V1(AsyncFd<EventFd>),
    V2(AsyncFd<Inotify>),
}

impl Watch {
    pub fn new(cgroup: &Cgroup) -> Result<Self, Failure> {
        let folder = cgroup.controller("memory").ok_or("no memory controller")?;
        match cgroup {
            Cgroup::V1(_) => {
                let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
                let control = fs::File::open(folder.join("memory.oom_control"))?;
                let line = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
                fs::write(folder.join("cgroup.event_control"), line)?;
                Ok(Self::V1(AsyncFd::new(event)?))
            }
            Cgroup::V2(_) => {
                let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
                inotify.add_watch(&folder.join("memory.events"), AddWatchFlags::IN_MODIFY)?;
                Ok(Self::V2(AsyncFd::new(inotify)?))
            }
        }
    }

    /// Waits for the next change.
    pub async fn changed(&self) -> Result<(), Failure> {
        match self {
            Self::V1(event) => {
                let mut ready = event.readable().await?;
                let _ = event.get_ref().read();
                ready.clear_ready();
            }
            Self::V2(inotify) => {
                let mut ready = inotify.readable().await?;
                let _ = inotify.get_ref().read_events();
                ready.clear_ready();
            }
        }
        Ok(())
    }
}
