//! Handles of asynchronous operations.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::wait::{Callers, deadline_in};
use crate::{Error, Result};

/// When an operation ran; for traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpTimes {
    /// When the caller issued it.
    pub issued: Instant,
    /// When it started to run.
    pub started: Instant,
    /// When it was complete.
    pub finished: Instant,
}

/// An operation in flight. It owns the buffers given to it; [`Work::wait`] returns
/// them.
///
/// Operations of one group run, and complete, in the order in which they were issued, except sends and receives.
/// Dropping a `Work` without waiting is safe: the operation still runs (the other ranks
/// expect it), its memory is freed when it is over, and a failure is reported by the
/// next operation of the group. As that is rarely intended, the compiler warns. This
/// compiles:
///
/// ```
/// #![deny(unused_must_use)]
/// use phalanx_comm::{Bucket, Call, ProcessGroup, ReduceOp};
/// fn step(group: &ProcessGroup, bucket: Bucket<f32>) {
///     let _work = group.all_reduce_async(bucket, ReduceOp::Mean, Call::default());
/// }
/// ```
///
/// And this does not:
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
    /// A handle and its completer. Threads that wait for it are counted in `callers`.
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

    /// Waits for the end of the operation and returns its buffers.
    ///
    /// *Blocks until* this operation and all issued before it are over; each
    /// has its own deadline.
    ///
    /// # Errors
    ///
    /// The error of the operation. Its buffers are dropped then: their contents would
    /// be undefined.
    pub fn wait(self) -> Result<B> {
        self.wait_traced().map(|(value, _)| value)
    }

    /// Like [`Work::wait`], with the times of the operation.
    ///
    /// # Errors
    ///
    /// As [`Work::wait`].
    pub fn wait_traced(self) -> Result<(B, OpTimes)> {
        match self.wait_until(None) {
            Ok(result) => result,
            Err(_) => Err(Error::internal("a wait without a limit reached it")),
        }
    }

    /// [`Work::wait`] for at most `limit`: gives the handle back when the
    /// operation is not over by then. The operation is not disturbed. PyTorch:
    /// `Work.wait(timeout)`.
    ///
    /// (To end an operation that takes too long, give it a deadline by
    /// [`Call::timeout`](crate::Call::timeout).)
    ///
    /// ```
    /// use std::time::Duration;
    /// use phalanx_comm::{Call, GroupOptions, ProcessGroup};
    ///
    /// let group = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
    /// let mut work = group.barrier_async(Call::default());
    /// loop {
    ///     match work.wait_for(Duration::from_millis(100)) {
    ///         Ok(result) => break result.unwrap(),
    ///         Err(running) => work = running, // show that we are alive
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// The outer one is the handle; the inner one as [`Work::wait`].
    pub fn wait_for(self, limit: Duration) -> std::result::Result<Result<B>, Self> {
        let answer = self.wait_until(Some(deadline_in(limit)))?;
        Ok(answer.map(|(value, _)| value))
    }

    fn wait_until(self, until: Option<Instant>) -> std::result::Result<Result<(B, OpTimes)>, Self> {
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
                return Ok(result.map(|value| (value, times)));
            }
            // A thread that waits with a limit does something else soon.
            if until.is_none() {
                waiting.get_or_insert_with(|| self.callers.wait());
            }
            let changed = &self.shared.changed;
            state = match until.map(|until| until.saturating_duration_since(Instant::now())) {
                // Needs no deadline: this operation and all before it have one, and a
                // dropped completer completes too.
                None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    drop(state);
                    drop(waiting);
                    return Err(self);
                }
                Some(left) => {
                    let woken = changed.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Whether [`Work::wait`] would return at once. PyTorch:
    /// `Work.is_completed`.
    pub fn is_done(&self) -> bool {
        self.shared.lock().result.is_some()
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

/// The executing side of a [`Work`]. Dropped without a result it completes the work
/// with an error, so that no thread waits forever.
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
    fn a_limited_wait_gives_the_handle_back() {
        let (work, completer) = Work::new(Callers::default());
        let start = Instant::now();
        let work = work.wait_for(Duration::from_millis(20)).unwrap_err();
        assert!(start.elapsed() >= Duration::from_millis(20));
        assert!(!work.callers.some(), "nobody waits any more");
        std::thread::spawn(move || completer.finish(Ok(7)));
        let answer = work.wait_for(Duration::from_secs(20)).unwrap();
        assert_eq!(answer.unwrap(), 7);
        let failed = Work::<u8>::failed(Error::usage("no"));
        let answer = failed.wait_for(Duration::ZERO).unwrap();
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Usage);
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
