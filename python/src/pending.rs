//! Operations in flight.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_comm::{Error, Work};
use pyo3::prelude::*;

use crate::{raise, raised};

type Outcome = Result<(), Error>;

/// A [`Work`] of any type.
trait Running: Send {
    fn wait_for(self: Box<Self>, limit: Option<Duration>) -> Result<Outcome, Box<dyn Running>>;
    fn is_done(&self) -> bool;
}

impl<B: Send + 'static> Running for Work<B> {
    fn wait_for(self: Box<Self>, limit: Option<Duration>) -> Result<Outcome, Box<dyn Running>> {
        let result = match limit {
            None => self.wait(),
            Some(limit) => Work::wait_for(*self, limit).map_err(|work| Box::new(work) as _)?,
        };
        Ok(result.map(drop))
    }

    fn is_done(&self) -> bool {
        Work::is_done(self)
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
        Pending {
            state: Mutex::new(State::Running(Box::new(work))),
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
            Some(outcome) => outcome.map_err(|error| raised(&error)),
            None => Err(raise(format!(
                "the operation is not over after the {} s that wait was given; it goes on",
                limit.unwrap_or_default()
            ))),
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
