//! `/run/gpufence/node.json`: what this agent can do, for the create path. It is kept true for as long as we run.

use std::{
    fs,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context, Result};
use gpufence_grant::agent::AgentState;

/// The file and what stands in it.
#[derive(Debug)]
pub struct Published {
    file: PathBuf,
    state: Mutex<(AgentState, Stage)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Before,
    Written,
    Withdrawn,
}

impl Published {
    /// Not written yet.
    pub fn new(file: PathBuf, state: AgentState) -> Self {
        Self { file, state: Mutex::new((state, Stage::Before)) }
    }

    /// What stands in it.
    pub fn state(&self) -> AgentState {
        self.lock().0.clone()
    }

    /// Writes it for the first time: all that it tells of is there.
    pub fn write(&self) -> Result<()> {
        let mut state = self.lock();
        state.1 = Stage::Written;
        self.put(&state.0)
    }

    /// Changes what it says.
    pub fn change(&self, change: impl FnOnce(&mut AgentState)) -> Result<()> {
        let mut state = self.lock();
        change(&mut state.0);
        if state.1 == Stage::Written { self.put(&state.0) } else { Ok(()) }
    }

    /// Takes it away for good.
    pub fn withdraw(&self) {
        self.lock().1 = Stage::Withdrawn;
        let _ = fs::remove_file(&self.file);
    }

    fn lock(&self) -> MutexGuard<'_, (AgentState, Stage)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// By rename: nobody reads half of it.
    fn put(&self, state: &AgentState) -> Result<()> {
        let temporary = self.file.with_extension("json.new");
        let write = || {
            fs::write(&temporary, serde_json::to_vec_pretty(state)?)?;
            fs::rename(&temporary, &self.file)
        };
        write().with_context(|| format!("write {}", self.file.display()))
    }
}
