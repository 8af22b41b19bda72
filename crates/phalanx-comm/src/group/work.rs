//! Handles of asynchronous operations.

use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::queue::Issued;
use crate::messages::InFlight;
use crate::sync::lock;
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
/// In asynchronous code it is a [`Future`] of the same result, under any executor: the thread that has carried out the
/// operation wakes the task. PyTorch: `Work.get_future`.
///
/// ```
/// # use std::future::Future;
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     use std::task::{Context, Poll, Wake, Waker};
/// #     struct Unpark(std::thread::Thread);
/// #     impl Wake for Unpark {
/// #         fn wake(self: std::sync::Arc<Self>) { self.0.unpark() }
/// #     }
/// #     let waker = Waker::from(std::sync::Arc::new(Unpark(std::thread::current())));
/// #     let mut future = std::pin::pin!(future);
/// #     loop {
/// #         match future.as_mut().poll(&mut Context::from_waker(&waker)) {
/// #             Poll::Ready(output) => return output,
/// #             Poll::Pending => std::thread::park(),
/// #         }
/// #     }
/// # }
/// use phalanx_comm::{Bucket, Call, GroupOptions, ProcessGroup, ReduceOp, Result};
///
/// async fn sum(group: &ProcessGroup, own: &[f32]) -> Result<Bucket<f32>> {
///     group.all_reduce_async(Bucket::from_slice(own), ReduceOp::Sum, Call::default()).await
/// }
///
/// let groups = ProcessGroup::threads(2, GroupOptions::default());
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || {
///             let sums = block_on(sum(&group, &[1.0, group.rank() as f32])).unwrap();
///             assert_eq!(sums[..], [2.0, 1.0]);
///         });
///     }
/// });
/// ```
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
    shared: Arc<WorkState<B>>,
    callers: Callers,
    /// Its place in the queue, if it has one.
    issued: Option<Issued>,
    /// Of a message.
    in_flight: Option<InFlight>,
}

struct WorkState<B> {
    state: Mutex<State<B>>,
    changed: Condvar,
}

struct State<B> {
    issued: Instant,
    started: Option<Instant>,
    finished: Option<Instant>,
    result: Option<Result<B>>,
    /// Of the task that awaits it.
    waker: Option<Waker>,
}

impl<B> WorkState<B> {
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        // Every change of the state is a single assignment: a panic elsewhere
        // leaves nothing half done.
        lock(&self.state)
    }
}

impl<B> Work<B> {
    /// A handle and its completer. Threads that wait for it are counted in `callers`.
    pub(super) fn new(callers: Callers) -> (Work<B>, Completer<B>) {
        let shared = Arc::new(WorkState {
            state: Mutex::new(State {
                issued: Instant::now(),
                started: None,
                finished: None,
                result: None,
                waker: None,
            }),
            changed: Condvar::new(),
        });
        let completer = Completer {
            shared: Arc::clone(&shared),
        };
        let work = Work {
            shared,
            callers,
            issued: None,
            in_flight: None,
        };
        (work, completer)
    }

    /// A thread that waits may run it, in its place in the queue.
    pub(super) fn issued(self, issued: Option<Issued>) -> Work<B> {
        Work { issued, ..self }
    }

    /// A thread that waits may move the message.
    pub(super) fn in_flight(self, in_flight: Option<InFlight>) -> Work<B> {
        Work { in_flight, ..self }
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
    /// has its own deadline. Those that have not started run in this thread; it also moves messages.
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
        // A thread that waits with a limit does something else soon.
        if let (Some(issued), None) = (&self.issued, until) {
            issued.help();
        }
        if let (Some(in_flight), None) = (&self.in_flight, until) {
            in_flight.help();
        }
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
            if state.finished.is_some() {
                return Ok(Err(taken()));
            }
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
        self.shared.lock().finished.is_some()
    }
}

fn taken() -> Error {
    Error::usage("the result of this operation was already given to the task that awaited it")
}

impl<B> Future for Work<B> {
    type Output = Result<B>;

    /// [`Work::wait`] without blocking.
    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<B>> {
        let mut state = self.shared.lock();
        if let Some(result) = state.result.take() {
            return Poll::Ready(result);
        }
        if state.finished.is_some() {
            return Poll::Ready(Err(taken()));
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(task.waker()),
            none => *none = Some(task.waker().clone()),
        }
        Poll::Pending
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
    shared: Arc<WorkState<B>>,
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
            let waker = state.waker.take();
            drop(state);
            self.shared.changed.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

impl<B> Drop for Completer<B> {
    fn drop(&mut self) {
        self.set(Err(Error::internal(
            "the thread that ran the operation ended before the operation did",
        )));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

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
        assert!(!work.callers.some(), "no task waits any more");
        std::thread::spawn(move || completer.finish(Ok(7)));
        let answer = work.wait_for(Duration::from_secs(20)).unwrap();
        assert_eq!(answer.unwrap(), 7);
        let failed = Work::<u8>::failed(Error::usage("no"));
        let answer = failed.wait_for(Duration::ZERO).unwrap();
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Usage);
    }

    #[test]
    fn the_last_task_that_polled_is_woken_once() {
        struct Count(AtomicUsize);
        impl Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let tasks = [(); 2].map(|()| Arc::new(Count(AtomicUsize::new(0))));
        let woken = || tasks.each_ref().map(|task| task.0.load(Ordering::SeqCst));
        let (mut work, completer) = Work::new(Callers::default());
        let poll = |work: &mut Work<u8>, task: usize| {
            let waker = Waker::from(Arc::clone(&tasks[task]));
            Pin::new(work).poll(&mut Context::from_waker(&waker))
        };
        for task in [0, 0, 1] {
            assert!(poll(&mut work, task).is_pending());
        }
        assert_eq!(woken(), [0, 0]);
        completer.finish(Ok(7));
        assert_eq!(woken(), [0, 1]);
        assert!(matches!(poll(&mut work, 0), Poll::Ready(Ok(7))));
        let Poll::Ready(Err(error)) = poll(&mut work, 0) else {
            panic!("there is no second result")
        };
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(work.is_done());
        assert_eq!(work.wait().unwrap_err().kind(), ErrorKind::Usage);
        // A Work that was dropped keeps its task no longer than the operation runs.
        let (mut work, completer) = Work::new(Callers::default());
        assert!(poll(&mut work, 0).is_pending());
        drop(work);
        completer.finish(Ok(7));
        assert_eq!(woken(), [1, 1]);
        assert_eq!(Arc::strong_count(&tasks[0]), 1);
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
