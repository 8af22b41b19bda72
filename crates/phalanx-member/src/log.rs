//! The log of a job: what has happened to its processes, as all of them read it.
//!
//! | key         | value                | written by                                |
//! |-------------|----------------------|-------------------------------------------|
//! | `job/log/K` | an [`Event`] as JSON | any process of the job, by compare-and-set |
//!
//! Events are numbered from 0. An event is written as the Kth only by one who has read all K before it, so its writer knew
//! the state that it changes. Where the store moves to another host, its copy has the log.

use std::sync::Arc;
use std::time::Duration;

use phalanx_comm::report_lost;
use phalanx_store::{Error, ErrorKind, Result, Store};

use crate::state::{Event, State};

/// A reader and writer of a job's log. A clone reads on from the same event.
#[derive(Clone)]
pub struct Log {
    store: Arc<dyn Store>,
    next: u64,
    state: State,
}

fn key(index: u64) -> String {
    format!("job/log/{index}")
}

impl Log {
    /// The log in `store`, of which nothing was read yet.
    pub fn new(store: Arc<dyn Store>) -> Log {
        Log {
            store,
            next: 0,
            state: State::default(),
        }
    }

    /// The store of the job.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The state after the events that were read.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The state after all events. *Costs* one request, and one for each event that was not read yet.
    ///
    /// # Errors
    ///
    /// Those of the store; `Protocol` for an event that is not one.
    pub fn read(&mut self) -> Result<&State> {
        while let Some(bytes) = self.store.try_get(&key(self.next))? {
            self.apply(&bytes)?;
        }
        Ok(&self.state)
    }

    /// As [`read`](Self::read), after *blocking until* there is an event that was not read yet, at most `limit`.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn wait(&mut self, limit: Duration) -> Result<&State> {
        match self.store.get(&key(self.next), limit) {
            Ok(bytes) => self.apply(&bytes)?,
            Err(error) if error.kind() == ErrorKind::Timeout => return Ok(&self.state),
            Err(error) => return Err(error),
        }
        self.read()
    }

    fn apply(&mut self, bytes: &[u8]) -> Result<()> {
        let event = serde_json::from_slice(bytes).map_err(|error| {
            let what = format!("event {} of the job's log is garbled: {error}", self.next);
            Error::new(ErrorKind::Protocol, what)
        })?;
        self.state.apply(event);
        self.next += 1;
        Ok(())
    }

    /// Writes what `event` makes of the state after all events, if anything. After an error it may have been written; the
    /// caller can call this again.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn append(&mut self, event: impl Fn(&State) -> Option<Event>) -> Result<()> {
        loop {
            let Some(event) = event(self.read()?) else {
                return Ok(());
            };
            let text = serde_json::to_vec(&event).map_err(|error| {
                Error::new(
                    ErrorKind::Internal,
                    format!("{event:?} is not JSON: {error}"),
                )
            })?;
            let written = self.store.compare_set(&key(self.next), None, &text)?;
            self.apply(&written)?;
            if written == text {
                return Ok(());
            }
        }
    }

    /// The process `number` has ended, or is out of reach, and `why`. Ranks of other hosts that wait for it in an operation
    /// leave it with `PeerLost` within half a second, and those that form the next group do not wait for it.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn lose(&mut self, number: usize, why: &str) -> Result<()> {
        self.append(|state| {
            let why = why.to_owned();
            let is_new = state.why_lost(number).is_none();
            is_new.then_some(Event::Lost { number, why })
        })?;
        report_lost(&*self.store, number, why)
    }

    /// The job ends, and `why`: processes that form the next group, or ask to join, do not wait any longer.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn end(&mut self, why: &str) -> Result<()> {
        self.append(|state| {
            let why = why.to_owned();
            state.over().is_none().then_some(Event::Over { why })
        })
    }

    /// The ranks are to wait between two steps, and why; `None`: they continue.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn hold(&mut self, why: Option<&str>) -> Result<()> {
        self.append(|state| {
            let why = why.map(str::to_owned);
            (state.requested(&[]).hold != why).then_some(Event::Hold { why })
        })
    }

    /// Numbers `ranks` processes that `launcher` starts to join the `first` ones. Gives the number of the first of them.
    ///
    /// # Errors
    ///
    /// Those of the store. The numbers are used up then.
    pub fn start(&mut self, launcher: usize, first: usize, ranks: usize) -> Result<usize> {
        self.append(|_| Some(Event::Started { launcher, ranks }))?;
        Ok(self.state.numbers(first).end - ranks)
    }
}
