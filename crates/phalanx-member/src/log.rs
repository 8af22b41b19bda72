//! The log of a job: the events of its processes, which all of them read.
//!
//! | key         | value                | written by                                |
//! |-------------|----------------------|-------------------------------------------|
//! | `job/log/K` | an [`Event`] as JSON | any process of the job, by compare-and-set |
//!
//! Events are numbered from 0. A process writes event K only after it has read all K events before, so it knows the state
//! that the event changes. When the store moves to another host, the log moves with it.
//!
//! Launchers have a log of their own, of the same kind, with other events (`phalanx-launch/src/nodes/membership.rs`).

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use phalanx_comm::report_lost;
use phalanx_store::{Error, ErrorKind, Result, Store};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::state::{Event, State};

/// A state that follows from the events of a log.
pub trait Replay: Clone + Default {
    /// One entry of the log.
    type Event: Clone + Debug + Serialize + DeserializeOwned;

    /// The prefix of the events' keys; it ends with `/`.
    const PREFIX: &'static str;

    /// Changes the state by the next event. An event that does not fit the state changes nothing.
    fn apply(&mut self, event: Self::Event);
}

impl Replay for State {
    type Event = Event;

    const PREFIX: &'static str = "job/log/";

    fn apply(&mut self, event: Event) {
        State::apply(self, event);
    }
}

/// The state after the first events of a log.
#[derive(Clone, Debug, Default)]
pub struct Replayed<S> {
    next: u64,
    state: S,
}

impl<S: Replay> Replayed<S> {
    /// The state after the events that were read.
    pub fn state(&self) -> &S {
        &self.state
    }

    /// The key of the next event.
    pub fn next_key(&self) -> String {
        format!("{}{}", S::PREFIX, self.next)
    }

    /// Applies the next events, as far as `get` has them.
    ///
    /// # Errors
    ///
    /// `Protocol` for an event that is not one.
    pub fn read<'a>(&mut self, get: impl Fn(&str) -> Option<&'a [u8]>) -> Result<()> {
        while let Some(bytes) = get(&self.next_key()) {
            self.apply(bytes)?;
        }
        Ok(())
    }

    /// The key and value of `event` as the next one.
    ///
    /// # Errors
    ///
    /// `Internal` for an event that JSON cannot express.
    pub fn entry(&self, event: &S::Event) -> Result<(String, Vec<u8>)> {
        let text = serde_json::to_vec(event).map_err(|error| {
            let what = format!("{event:?} is not JSON: {error}");
            Error::new(ErrorKind::Internal, what)
        })?;
        Ok((self.next_key(), text))
    }

    /// Applies the next event, from its value.
    ///
    /// # Errors
    ///
    /// `Protocol` for an event that is not one.
    pub fn apply(&mut self, bytes: &[u8]) -> Result<()> {
        let event = serde_json::from_slice(bytes).map_err(|error| {
            let (log, next) = (S::PREFIX.trim_end_matches('/'), self.next);
            let what = format!("event {next} of {log} is garbled: {error}");
            Error::new(ErrorKind::Protocol, what)
        })?;
        self.state.apply(event);
        self.next += 1;
        Ok(())
    }
}

/// Calls `ask` again when the store has not answered, while `again` returns true.
///
/// # Errors
///
/// Those of `ask`.
pub fn insist<T>(mut again: impl FnMut() -> bool, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match ask() {
            Err(error) if error.kind() == ErrorKind::NoAnswer && again() => {}
            answer => return answer,
        }
    }
}

/// A reader and writer of a log. A clone continues at the same event.
#[derive(Clone)]
pub struct EventLog<S> {
    store: Arc<dyn Store>,
    replayed: Replayed<S>,
}

/// The log of a job's processes.
pub type Log = EventLog<State>;

impl<S: Replay> EventLog<S> {
    /// The log in `store`; no event was read yet.
    pub fn new(store: Arc<dyn Store>) -> EventLog<S> {
        EventLog {
            store,
            replayed: Replayed::default(),
        }
    }

    /// The store of the job.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The state after the events that were read.
    pub fn state(&self) -> &S {
        &self.replayed.state
    }

    /// The state after all events. *Costs* one request for each MiB or 1024 events that were not read yet.
    ///
    /// # Errors
    ///
    /// Those of the store; `Protocol` for an event that is not one.
    pub fn read(&mut self) -> Result<&S> {
        self.wait(Duration::ZERO)
    }

    /// As [`read`](Self::read), after *blocking until* there is an event that was not read yet, at most `limit`.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn wait(&mut self, limit: Duration) -> Result<&S> {
        let (events, more) = self.store.get_numbered(&self.replayed.next_key(), limit)?;
        for event in &events {
            self.replayed.apply(event)?;
        }
        match more {
            true => self.read(),
            false => Ok(self.state()),
        }
    }

    /// Writes the event that `event` returns for the state after all events, if any. After an error it may have been written;
    /// the caller can call this again.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn append(&mut self, event: impl Fn(&S) -> Option<S::Event>) -> Result<()> {
        loop {
            let Some(event) = event(self.read()?) else {
                return Ok(());
            };
            let (key, text) = self.replayed.entry(&event)?;
            let written = self.store.compare_set(&key, None, &text)?;
            self.replayed.apply(&written)?;
            if written == text {
                return Ok(());
            }
        }
    }
}

impl Log {
    /// Reports that the process `number` has ended or is out of reach, and `why`. Ranks of other hosts that wait for it in an
    /// operation get `PeerLost` within half a second, and ranks that form the next group do not wait for it.
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

    /// Ends the job, for the reason `why`: processes that form the next group, or ask to join, stop waiting.
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

    /// Makes the ranks wait between two steps, for the reason `why`; `None`: lets them continue.
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

    /// Numbers `ranks` processes that `launcher` starts to join the `first` ones. Returns the number of the first new one.
    ///
    /// # Errors
    ///
    /// Those of the store. The numbers are then used up.
    pub fn start(&mut self, launcher: usize, first: usize, ranks: usize) -> Result<usize> {
        self.append(|_| Some(Event::Started { launcher, ranks }))?;
        Ok(self.state().numbers(first).end - ranks)
    }
}
