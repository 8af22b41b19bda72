//! Handles of asynchronous operations.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::wait::Callers;
use crate::{Error, Result};

/// When an operation ran; for traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpTimes {
    /// When the caller issued it.
    pub issued: Instant,
    /// When it was its turn.
    pub started: Instant,
    /// When it was complete.
    pub finished: Instant,
}

/// An operation in flight. It holds what was handed over; [`Work::wait`] gives
/// it back.
///
/// Operations of one group run, and complete, in the order in which they were
/// issued. Dropping a `Work` without waiting is safe: the operation still runs
/// (the other ranks count on it), its memory is freed when it is over, and a
/// failure shows in the next operation of the group. As that is rarely what
/// was meant, the compiler warns:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// use phalanx_comm::{Bucket, Call, ProcessGroup, ReduceOp};
/// fn step(group: &ProcessGroup, bucket: Bucket<f32>) {
///     group.all_reduce_async(bucket, ReduceOp::Mean, Call::default());
/// }
/// ```
#[must_use = "the operation's result and its memory come back from `wait`"]
pub struct Work<B> {
    shared: Arc<Shared<B>>,
    callers: Callers,
}

struct Shared<B> {
    state: Mutex<State<B>>,
    changed: Condvar,
}

struct State<B> {
    issued: Instant,
    started: Option<Instant>,
    finished: Option<Instant>,
    result: Option<Result<B>>,
}

impl<B> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        // Every change of the state is a single assignment: a panic elsewhere
        // leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B> Work<B> {
    /// A handle and the means to complete it. Who waits for it is counted
    /// among `callers`.
    pub(super) fn new(callers: Callers) -> (Work<B>, Completer<B>) {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                issued: Instant::now(),
                started: None,
                finished: None,
                result: None,
            }),
            changed: Condvar::new(),
        });
        let completer = Completer {
            shared: Arc::clone(&shared),
        };
        (Work { shared, callers }, completer)
    }

    /// A handle that has failed already.
    pub(super) fn failed(error: Error) -> Work<B> {
        let (work, completer) = Work::new(Callers::default());
        completer.finish(Err(error));
        work
    }

    /// Waits for the end of the operation and returns what was handed over.
    ///
    /// *Blocks until* this operation and all issued before it are over; each
    /// has its own deadline.
    ///
    /// # Errors
    ///
    /// What went wrong. The memory is gone then: its contents would be
    /// undefined.
    pub fn wait(self) -> Result<B> {
        self.wait_traced().map(|(value, _)| value)
    }

    /// Like [`Work::wait`], with the times of the operation.
    ///
    /// # Errors
    ///
    /// As [`Work::wait`].
    pub fn wait_traced(self) -> Result<(B, OpTimes)> {
        let mut state = self.shared.lock();
        let mut waiting = None;
        loop {
            if let Some(result) = state.result.take() {
                let finished = state.finished.unwrap_or(state.issued);
                let times = OpTimes {
                    issued: state.issued,
                    started: state.started.unwrap_or(finished),
                    finished,
                };
                return result.map(|value| (value, times));
            }
            waiting.get_or_insert_with(|| self.callers.wait());
            state = self
                .shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether [`Work::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.shared.lock().result.is_some()
    }

    /// When it became this operation's turn, if it did.
    pub fn started_at(&self) -> Option<Instant> {
        self.shared.lock().started
    }

    /// When the operation was over, if it is.
    pub fn finished_at(&self) -> Option<Instant> {
        self.shared.lock().finished
    }
}

impl<B> std::fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.shared.lock();
        let name = match (state.started, state.finished) {
            (_, Some(_)) => "done",
            (Some(_), None) => "running",
            (None, None) => "queued",
        };
        write!(f, "Work({name})")
    }
}

/// The executing side of a [`Work`]. Dropped without an answer it completes
/// the work with an error, so that nobody waits for ever.
pub(super) struct Completer<B> {
    shared: Arc<Shared<B>>,
}

impl<B> Completer<B> {
    pub(super) fn start(&self) {
        self.shared.lock().started = Some(Instant::now());
    }

    pub(super) fn finish(self, result: Result<B>) {
        self.set(result);
    }

    fn set(&self, result: Result<B>) {
        let mut state = self.shared.lock();
        if state.finished.is_none() {
            state.finished = Some(Instant::now());
            state.result = Some(result);
            drop(state);
            self.shared.changed.notify_all();
        }
    }
}

impl<B> Drop for Completer<B> {
    fn drop(&mut self) {
        self.set(Err(Error::internal(
            "the communication thread ended before the operation did",
        )));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn forgotten_completer_fails_the_work() {
        let (work, completer) = Work::<u8>::new(Callers::default());
        assert!(!work.is_done());
        drop(completer);
        assert!(work.is_done());
        assert_eq!(work.wait().unwrap_err().kind(), ErrorKind::Internal);
    }

    #[test]
    fn result_crosses_threads_with_its_times() {
        let (work, completer) = Work::new(Callers::default());
        std::thread::spawn(move || {
            completer.start();
            completer.finish(Ok(7));
        });
        let (value, times) = work.wait_traced().unwrap();
        assert_eq!(value, 7);
        assert!(times.issued <= times.started && times.started <= times.finished);
    }

    #[test]
    fn first_answer_counts() {
        let (work, completer) = Work::new(Callers::default());
        completer.set(Ok(1));
        completer.set(Ok(2));
        drop(completer);
        assert_eq!(work.wait().unwrap(), 1);
    }
}
