//! Saving in the background.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::folder::{Folder, SavedCheckpoint};
use super::pace::Pace;
use super::snapshot::Snapshot;
use phalanx_base::{Error, Result};

/// Saves one snapshot at a time on a thread with idle priority, so that training steps are
/// not delayed. On a busy machine that may take long; [`wait`](Background::wait) and
/// [`hurry`](Background::hurry) give it normal priority.
///
/// Dropping it waits for a save in progress.
pub struct Background {
    folder: Folder,
    running: Option<Running>,
    /// The last snapshot, whose memory is reused.
    spare: Option<Snapshot>,
    /// How long the last save took.
    took: Duration,
}

struct Running {
    job: JoinHandle<(Result<SavedCheckpoint>, Snapshot, Duration)>,
    pace: Arc<Pace>,
}

impl Background {
    /// Saves into `folder`.
    pub fn new(folder: Folder) -> Background {
        Background {
            folder,
            running: None,
            spare: None,
            took: Duration::ZERO,
        }
    }

    /// Duration of the last finished save; zero before the first.
    pub fn took(&self) -> Duration {
        self.took
    }

    /// The last snapshot, whose memory the next one may [reuse](Snapshot::take_into).
    pub fn spare(&mut self) -> Option<Snapshot> {
        self.spare.take()
    }

    /// Sets the snapshot whose memory the next one may reuse.
    pub fn set_spare(&mut self, spare: Snapshot) {
        self.spare = Some(spare);
    }

    /// Whether a save is in progress.
    pub fn is_busy(&self) -> bool {
        let running = self.running.as_ref();
        running.is_some_and(|running| !running.job.is_finished())
    }

    /// Gives a save in progress normal priority.
    pub fn hurry(&self) {
        if let Some(running) = &self.running {
            running.pace.hurry(running.job.thread());
        }
    }

    /// Starts to save and returns at once; waits first if another save is in progress.
    /// Returns the result of the previous save.
    ///
    /// # Errors
    ///
    /// Errors of the previous save ([`Folder::save`]); the new one is started in any case.
    /// `System` when a thread cannot be started.
    pub fn begin(&mut self, snapshot: Snapshot) -> Result<Option<SavedCheckpoint>> {
        let before = self.wait();
        let (folder, pace) = (self.folder.clone(), Arc::new(Pace::default()));
        let its = pace.clone();
        let job = Builder::new()
            .name("checkpoint".into())
            .spawn(move || {
                let (pacer, began) = (its.start(), Instant::now());
                let outcome = folder.save_at(&snapshot, Some(&pacer));
                (outcome, snapshot, began.elapsed())
            })
            .map_err(|source| {
                Error::io("cannot start a thread to save", self.folder.path(), source)
            })?;
        self.running = Some(Running { job, pace });
        before
    }

    /// Saves on the caller's thread, after a save in progress: for the last checkpoint of a
    /// training.
    ///
    /// # Errors
    ///
    /// Errors of the previous save, after which the new one is still done; then its own.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<SavedCheckpoint> {
        let (before, began) = (self.wait(), Instant::now());
        let saved = self.folder.save(&snapshot);
        self.took = began.elapsed();
        self.spare = Some(snapshot);
        before.and(saved)
    }

    /// The result of a save that has ended, without blocking.
    ///
    /// # Errors
    ///
    /// Errors of the save.
    pub fn poll(&mut self) -> Result<Option<SavedCheckpoint>> {
        if self.is_busy() {
            return Ok(None);
        }
        self.wait()
    }

    /// Waits for a save in progress and returns its result.
    ///
    /// # Errors
    ///
    /// Those of the save.
    pub fn wait(&mut self) -> Result<Option<SavedCheckpoint>> {
        let Some(Running { job, pace }) = self.running.take() else {
            return Ok(None);
        };
        pace.hurry(job.thread());
        match job.join() {
            Ok((outcome, snapshot, took)) => {
                self.spare = Some(snapshot);
                self.took = took;
                outcome.map(Some)
            }
            Err(_) => Err(Error::internal("saving a checkpoint panicked")),
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::mpsc::channel;

    use phalanx_nn::optim::Adam;
    use phalanx_nn::{Grads, Init, Layout, Params, Scope, Seed};

    use super::*;
    use crate::state::Place;

    fn model() -> Params {
        let mut scope = Scope::new(Seed(1));
        scope.param("w", &[8, 3, 3, 3], Layout::Conv, Init::Constant(0.5));
        scope.buffer("running_mean", &[8], 0.0);
        scope.build().unwrap()
    }

    fn take(old: Option<Snapshot>, params: &Params, optimizer: &Adam) -> Snapshot {
        let (facts, nothing) = (BTreeMap::new(), serde_json::Value::Null);
        Snapshot::take_into(old, params, optimizer, Place::default(), facts, nothing)
    }

    /// What a step that saves waits for is a copy into memory that is there.
    #[test]
    fn checkpoint_after_checkpoint_is_copied_into_the_same_memory() {
        let dir = tempfile::tempdir().unwrap();
        let mut saver = Background::new(Folder::new(dir.path(), 1));
        let mut params = model();
        let mut adam = Adam::new(&params, 0.1);
        let grads = Grads::like(&params);
        adam.step(&mut params, &grads).unwrap();
        saver.set_spare(take(None, &params, &adam));
        let memory = |snapshot: &Snapshot| snapshot.memory();
        let first = memory(saver.spare.as_ref().unwrap());
        // All of the state, and nothing else: parameters, buffers, two lists of Adam's.
        let floats = 3 * params.flat().len() + params.buffers_flat().len();
        assert_eq!(first.iter().map(|m| m.1).sum::<usize>(), floats);
        for round in 0..3 {
            adam.step(&mut params, &grads).unwrap();
            params.flat_mut()[0] = round as f32;
            let old = saver.spare();
            let snapshot = take(old, &params, &adam);
            assert_eq!(memory(&snapshot), first);
            match round {
                1 => drop(saver.save(snapshot).unwrap()),
                _ => drop(saver.begin(snapshot).unwrap()),
            }
            saver.wait().unwrap();
            let state = saver.folder.newest().unwrap().0.unwrap();
            let mut read = model();
            state.restore_params(&mut read).unwrap();
            assert_eq!(read.flat(), params.flat());
        }
        // Of another model it is left alone.
        let mut scope = Scope::new(Seed(1));
        scope.param("w", &[2], Layout::Same, Init::Constant(0.5));
        let other = scope.build().unwrap();
        let snapshot = take(saver.spare(), &other, &Adam::new(&other, 0.1));
        assert_ne!(memory(&snapshot), first);
    }

    /// However long the disk takes, a caller that only asks does not wait.
    #[test]
    fn a_disk_that_is_busy_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let mut saver = Background::new(Folder::new(dir.path(), 1));
        let params = model();
        let snapshot = take(None, &params, &Adam::new(&params, 0.1));
        let (write, written) = channel();
        let at = |path: &str| SavedCheckpoint {
            path: path.into(),
            not_finite: None,
        };
        saver.running = Some(Running {
            job: std::thread::spawn(move || {
                written.recv().unwrap();
                (Ok(at("there")), snapshot, Duration::from_secs(7))
            }),
            pace: Arc::default(),
        });
        for _ in 0..1000 {
            assert!(saver.is_busy());
            assert_eq!(saver.poll().unwrap(), None);
            assert!(saver.spare().is_none());
        }
        write.send(()).unwrap();
        assert_eq!(saver.wait().unwrap(), Some(at("there")));
        assert!(!saver.is_busy());
        assert!(saver.spare().is_some());
        assert_eq!(saver.took(), Duration::from_secs(7));
    }
}
