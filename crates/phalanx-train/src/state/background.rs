//! Saving beside the training.

use std::path::PathBuf;
use std::thread::JoinHandle;

use super::folder::Folder;
use super::snapshot::Snapshot;
use crate::{Error, Result};

/// Saves one snapshot at a time on a thread of its own.
///
/// A save that was begun is finished, or has failed, when this is dropped.
#[derive(Debug)]
pub struct Background {
    folder: Folder,
    running: Option<JoinHandle<Result<PathBuf>>>,
}

impl Background {
    /// Saves into `folder`.
    pub fn new(folder: Folder) -> Background {
        Background {
            folder,
            running: None,
        }
    }

    /// Whether the disk is still busy with the last one.
    pub fn is_busy(&self) -> bool {
        self.running.as_ref().is_some_and(|job| !job.is_finished())
    }

    /// Begins to save and returns at once, unless a save is still going on: then
    /// that is waited for first. Gives the outcome of the save before.
    ///
    /// # Errors
    ///
    /// Those of the save before ([`Folder::save`]); this one is begun all the
    /// same. `Io` when the system refuses a thread.
    pub fn begin(&mut self, snapshot: Snapshot) -> Result<Option<PathBuf>> {
        let before = self.wait();
        let folder = self.folder.clone();
        let job = std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn(move || folder.save(&snapshot))
            .map_err(|source| {
                Error::io("cannot start a thread to save", self.folder.path(), source)
            })?;
        self.running = Some(job);
        before
    }

    /// The outcome of the save that was going on, once it has ended; never
    /// blocks.
    ///
    /// # Errors
    ///
    /// Those of the save.
    pub fn poll(&mut self) -> Result<Option<PathBuf>> {
        if self.is_busy() {
            return Ok(None);
        }
        self.wait()
    }

    /// Waits for the save that is going on and gives its outcome.
    ///
    /// # Errors
    ///
    /// Those of the save.
    pub fn wait(&mut self) -> Result<Option<PathBuf>> {
        let Some(job) = self.running.take() else {
            return Ok(None);
        };
        match job.join() {
            Ok(outcome) => outcome.map(Some),
            Err(_) => Err(Error::internal("saving a checkpoint panicked")),
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}
