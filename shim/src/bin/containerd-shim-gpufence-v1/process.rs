//! A process of a container: its init, or one that exec added.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use containerd_shim::{api::Status, io::Pty};
use serde_json::Value;
use tokio::sync::watch;

use crate::stdio::{Addresses, Io};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    pub status: u32,
    pub at: SystemTime,
}

/// A process. All methods are short: no lock is held across an await.
pub struct Process {
    /// Empty for init.
    pub exec_id: String,
    pub addresses: Addresses,
    /// What exec runs; none for init.
    pub spec: Option<Value>,
    state: Mutex<State>,
    exited: watch::Sender<Option<Exit>>,
}

#[derive(Default)]
struct State {
    pid: i32,
    running: bool,
    paused: bool,
    /// A start is on its way: an exit that comes now waits until the start has been told.
    starting: bool,
    held: Option<Exit>,
    terminal: Option<Pty>,
    io: Option<Io>,
}

impl Process {
    pub fn new(exec_id: String, addresses: Addresses, spec: Option<Value>) -> Arc<Self> {
        Arc::new(Self { exec_id, addresses, spec, state: Mutex::default(), exited: watch::Sender::new(None) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn pid(&self) -> i32 {
        self.state().pid
    }

    /// Takes note of a process that the runtime has made.
    pub fn made(&self, pid: i32, terminal: Option<Pty>, io: Io) {
        let mut state = self.state();
        (state.pid, state.terminal, state.io) = (pid, terminal, Some(io));
    }

    /// Holds exits back. False where a start is on its way already, or was.
    pub fn begin_start(&self) -> bool {
        let mut state = self.state();
        let first = !state.starting && !state.running && self.exit().is_none();
        state.starting |= first;
        first
    }

    /// The start has been told, or has failed. Gives the exit that came meanwhile.
    pub fn end_start(&self, running: bool) -> Option<Exit> {
        let mut state = self.state();
        (state.starting, state.running) = (false, running);
        state.held.take()
    }

    /// Whether an exit is held back; else it is to be told now.
    pub fn hold(&self, exit: Exit) -> bool {
        let mut state = self.state();
        if state.starting {
            state.held = Some(exit);
        }
        state.starting
    }

    pub fn set_paused(&self, paused: bool) {
        self.state().paused = paused;
    }

    /// Whoever waits is told.
    pub fn set_exit(&self, exit: Exit) {
        self.exited.send_replace(Some(exit));
    }

    pub fn exit(&self) -> Option<Exit> {
        *self.exited.borrow()
    }

    /// Waits for the exit.
    pub async fn wait(&self) -> Exit {
        let mut exited = self.exited.subscribe();
        let exit = exited.wait_for(Option::is_some).await;
        exit.ok().and_then(|exit| *exit).unwrap_or_else(|| Exit { status: 255, at: SystemTime::now() })
    }

    /// Whether it runs, or is about to.
    pub fn is_alive(&self) -> bool {
        let state = self.state();
        (state.running || state.starting) && state.pid != 0 && self.exit().is_none()
    }

    pub fn status(&self) -> Status {
        let state = self.state();
        if self.exit().is_some() {
            Status::STOPPED
        } else if state.paused {
            Status::PAUSED
        } else if state.running {
            Status::RUNNING
        } else {
            Status::CREATED
        }
    }

    pub fn terminal(&self) -> Option<Pty> {
        self.state().terminal.clone()
    }

    pub fn close_input(&self) {
        if let Some(io) = &self.state().io {
            io.close_input();
        }
    }

    /// Delivers what is still buffered, and lets go of fifos and terminal.
    pub async fn shut_down_io(&self) {
        let io = {
            let mut state = self.state();
            state.terminal = None;
            state.io.take()
        };
        if let Some(mut io) = io {
            io.shut_down().await;
        }
    }
}
