//! Exits of our children: runc's, and the containers' processes, whose subreaper we are.
//!
//! One `waitpid(-1)` loop sees them all, so nobody else may wait. An exit may come before anybody asks for it: a
//! container's process is known only from its pid file. While a [`Birth`] is open, exits of unknown pids are kept.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::{
    errno::Errno,
    sys::wait::{WaitPidFlag, WaitStatus, waitpid},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use crate::Failure;

#[derive(Clone, Default)]
pub struct Reaper(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    waiting: HashMap<i32, oneshot::Sender<i32>>,
    births: usize,
    early: HashMap<i32, i32>,
}

/// Keeps exits of pids that nobody has asked for yet, until dropped.
pub struct Birth(Reaper);

impl Reaper {
    /// Starts to reap.
    pub fn start() -> Result<Self, Failure> {
        let reaper = Self::default();
        let mut signals = signal(SignalKind::child())?;
        let reaping = reaper.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                reaping.reap();
            }
        });
        Ok(reaper)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reap(&self) {
        loop {
            let (pid, status) = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, status)) => (pid.as_raw(), status),
                Ok(WaitStatus::Signaled(pid, signal, _)) => (pid.as_raw(), 128 + signal as i32),
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return,
                Ok(_) | Err(Errno::EINTR) => continue,
                // EINVAL: ended by a real-time signal, for which nix has no name; the child is reaped all the same.
                Err(error) => {
                    log::warn!("waitpid: {error}");
                    continue;
                }
            };
            let mut state = self.state();
            if let Some(waiting) = state.waiting.remove(&pid) {
                let _ = waiting.send(status);
            } else if state.births > 0 {
                state.early.insert(pid, status);
            }
        }
    }

    /// Keeps early exits until what is returned is dropped.
    pub fn birth(&self) -> Birth {
        self.state().births += 1;
        Birth(self.clone())
    }

    /// The exit status of a child, once it has one: its code, or 128 and the signal.
    pub fn exit_of(&self, pid: i32) -> oneshot::Receiver<i32> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state();
        if let Some(status) = state.early.remove(&pid) {
            let _ = sender.send(status);
        } else {
            state.waiting.insert(pid, sender);
        }
        receiver
    }
}

impl Drop for Birth {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.births -= 1;
        if state.births == 0 {
            state.early.clear();
        }
    }
}
