//! Operations in flight.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_comm::{Error, Work};
use pyo3::prelude::*;

use crate::{raise, raised};

/// Of a receive with the sender's rank.
type Outcome = Result<Option<usize>, Error>;

/// An operation of any type.
trait Running: Send {
    fn wait_for(self: Box<Self>, limit: Option<Duration>) -> Result<Outcome, Box<dyn Running>>;
    fn is_done(&self) -> bool;
}

struct Operation<B> {
    work: Work<B>,
    sender: fn(&B) -> Option<usize>,
}

impl<B: Send + 'static> Running for Operation<B> {
    fn wait_for(self: Box<Self>, limit: Option<Duration>) -> Result<Outcome, Box<dyn Running>> {
        let Operation { work, sender } = *self;
        let result = match limit {
            None => work.wait(),
            Some(limit) => match work.wait_for(limit) {
                Ok(result) => result,
                Err(work) => return Err(Box::new(Operation { work, sender })),
            },
        };
        Ok(result.map(|buffers| sender(&buffers)))
    }

    fn is_done(&self) -> bool {
        self.work.is_done()
    }
}

enum State {
    Running(Box<dyn Running>),
    /// A thread waits for it.
    Awaited,
    Done(Outcome),
}

/// An operation in flight, or one that is over. Any thread may wait for it, and several.
#[pyclass(frozen)]
pub(crate) struct Pending {
    state: Mutex<State>,
    changed: Condvar,
}

impl Pending {
    pub(crate) fn new<B: Send + 'static>(work: Work<B>) -> Pending {
        Pending::of(work, |_| None)
    }

    /// A receive.
    pub(crate) fn receive<B: Send + 'static>(work: Work<(B, usize)>) -> Pending {
        Pending::of(work, |(_, sender)| Some(*sender))
    }

    /// A receive that is over.
    pub(crate) fn received(sender: usize) -> Pending {
        Pending {
            state: Mutex::new(State::Done(Ok(Some(sender)))),
            changed: Condvar::new(),
        }
    }

    fn of<B: Send + 'static>(work: Work<B>, sender: fn(&B) -> Option<usize>) -> Pending {
        Pending {
            state: Mutex::new(State::Running(Box::new(Operation { work, sender }))),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome, or nothing after `limit`.
    fn outcome(&self, limit: Option<Duration>) -> Option<Outcome> {
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let left = || until.map(|until| until.saturating_duration_since(Instant::now()));
        let mut state = self.lock();
        loop {
            match std::mem::replace(&mut *state, State::Awaited) {
                State::Done(outcome) => {
                    *state = State::Done(outcome.clone());
                    return Some(outcome);
                }
                State::Running(work) => {
                    drop(state);
                    let (now, outcome) = match work.wait_for(left()) {
                        Ok(outcome) => (State::Done(outcome.clone()), Some(outcome)),
                        Err(work) => (State::Running(work), None),
                    };
                    *self.lock() = now;
                    self.changed.notify_all();
                    return outcome;
                }
                State::Awaited => {
                    state = match left() {
                        None => self
                            .changed
                            .wait(state)
                            .unwrap_or_else(PoisonError::into_inner),
                        Some(Duration::ZERO) => return None,
                        Some(left) => {
                            let woken = self.changed.wait_timeout(state, left);
                            woken.unwrap_or_else(PoisonError::into_inner).0
                        }
                    };
                }
            }
        }
    }
}

#[pymethods]
impl Pending {
    /// Waits for the end of the operation, at most `limit` seconds.
    #[pyo3(signature = (limit=None))]
    fn wait(&self, py: Python<'_>, limit: Option<f64>) -> PyResult<()> {
        let span = limit.map(|limit| Duration::try_from_secs_f64(limit).unwrap_or(Duration::MAX));
        match py.detach(|| self.outcome(span)) {
            Some(outcome) => outcome.map(drop).map_err(|error| raised(&error)),
            None => Err(raise(format!(
                "the operation is not over after the {} s that wait was given; it continues",
                limit.unwrap_or_default()
            ))),
        }
    }

    /// The rank whose message was received, when `wait` has returned; nothing of other operations.
    fn sender(&self) -> Option<usize> {
        match &*self.lock() {
            State::Done(outcome) => outcome.clone().ok().flatten(),
            _ => None,
        }
    }

    /// Whether `wait` would return at once.
    fn is_done(&self) -> bool {
        match &*self.lock() {
            State::Running(work) => work.is_done(),
            State::Awaited => false,
            State::Done(_) => true,
        }
    }
}
