//! The ladder of memory limits: which rung holds for a container, and whether policy accepts it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{EnforceError, limiter::Limiter, policy::Policy};

/// What keeps a container to its memory limit. A later one is stronger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// Nothing but the watchdog, where one runs.
    None,
    /// The limiter, inside its processes: exact and immediate, but one that means to can get round it.
    #[default]
    Limiter,
    /// The MPS server.
    Mps,
    /// The driver, for the container's cgroup.
    Driver,
}

impl Rung {
    /// Its name in the policy and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Limiter => "limiter",
            Self::Mps => "mps",
            Self::Driver => "driver",
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The node's limiter, where it has one; an error where policy wants it and it isn't there.
pub fn limiter(policy: &Policy) -> Result<Option<Limiter>, EnforceError> {
    match Limiter::of(policy) {
        None => Ok(None),
        Some(Ok(limiter)) => Ok(Some(limiter)),
        Some(Err(_)) if policy.memory.require == Rung::None => Ok(None),
        Some(Err(folder)) => Err(EnforceError::NoLimiter(folder)),
    }
}

/// Whether policy accepts what holds.
pub fn accept(policy: &Policy, rung: Rung) -> Result<(), EnforceError> {
    let require = policy.memory.require;
    if rung < require { Err(EnforceError::BelowRung { require, rung }) } else { Ok(()) }
}
