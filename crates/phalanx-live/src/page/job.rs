//! What the page says of a job, and what the launcher has told of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

use crate::{End, Rank, Tail};

/// What the page says of the whole job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Job {
    pub(super) program: String,
    /// This machine.
    pub(super) host: String,
    /// Seconds since 1970.
    pub(super) started: f64,
    pub(super) ended: Option<f64>,
    /// `running`, `finished`, `stopped`, `failed`.
    pub(super) state: &'static str,
    /// Why it has failed, or who has stopped it.
    pub(super) message: Option<String>,
    /// Why the run's folder cannot be read.
    pub(super) trouble: Option<String>,
}

/// What the launcher has told.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    pub(super) ranks: Vec<Rank>,
    pub(super) ranks_are_new: bool,
    pub(super) tails: BTreeMap<usize, Arc<Tail>>,
    pub(super) notes: Vec<String>,
    /// The file in which rank 0 names the run's folder.
    pub(super) pointer: Option<PathBuf>,
    pub(super) outcome: Option<End>,
}

/// The inbox, and a bell for its last message.
#[derive(Debug, Default)]
pub(crate) struct JobState {
    inbox: Mutex<Inbox>,
    pub(super) ended: Condvar,
}

impl JobState {
    pub fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
