//! PyTorch's store, in which the ranks of a group find each other.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_comm as comm;
use phalanx_store::{Error, ErrorKind, Result, Store};
use phalanx_wire::Token;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// For how long a wait sleeps between two looks, at first and at most. PyTorch's own waits would keep the connection of
/// the store, which other threads use too.
const LOOK: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(20)];

/// Counts the ranks that have come, in all groups that meet in the store.
const COME_KEY: &str = "come";
/// For how long the end of a group waits for questions that have no answer yet.
const END: Duration = Duration::from_secs(5);

/// A `torch.distributed.Store`, until it is closed: then no thread needs Python any more, which may end.
///
/// One store may see many groups, of any sizes and ranks, also of processes that have ended. So rank 0 gives each group a
/// random name: every other rank writes a random word to `come/RANK`, and waits for the name in `group/WORD`. What an earlier
/// process has left there is answered too, and nobody reads it.
#[derive(Clone)]
pub(crate) struct TorchStore {
    shared: Arc<(Mutex<State>, Condvar)>,
    /// Of all keys.
    prefix: String,
}

struct State {
    /// Nothing once it is closed.
    store: Option<Arc<Py<PyAny>>>,
    /// Threads that ask it.
    asking: usize,
}

fn come_key(rank: usize) -> String {
    format!("come/{rank}")
}

fn answer_key(word: &str) -> String {
    format!("group/{word}")
}

impl TorchStore {
    /// `store` with a connection of its own, where it has one.
    pub(crate) fn new(store: &Bound<'_, PyAny>) -> TorchStore {
        let own = store.call_method0("clone");
        let store = own.unwrap_or_else(|_| store.clone());
        let state = State {
            store: Some(Arc::new(store.unbind())),
            asking: 0,
        };
        TorchStore {
            shared: Arc::new((Mutex::new(state), Condvar::new())),
            prefix: "phalanx/".to_owned(),
        }
    }

    /// The store of a new group, for its keys only. *Blocks* until rank 0 has come, at most `timeout`.
    pub(crate) fn of_group(&self, rank: usize, timeout: Duration) -> comm::Result<TorchStore> {
        let word = Token::generate().map_err(Error::from)?.to_hex();
        let mut name = word.clone();
        if rank > 0 {
            self.set(&come_key(rank), word.as_bytes())?;
            self.add(COME_KEY, 1)?;
            let answer = answer_key(&word);
            let told = self
                .get(&answer, timeout)
                .map_err(|error| match error.kind() {
                    ErrorKind::Timeout => comm::Error::timeout(format!(
                        "rank {rank} waited {:.1} s for rank 0, which did not come",
                        timeout.as_secs_f64()
                    )),
                    _ => error.into(),
                })?;
            name = String::from_utf8_lossy(&told).into_owned();
            // Some stores cannot.
            let _ = self.delete(&answer);
        }
        Ok(TorchStore {
            prefix: format!("phalanx/{name}/"),
            ..self.clone()
        })
    }

    /// Tells the other ranks of `group` its name as they come, until `formed` is closed. For rank 0.
    pub(crate) fn welcome(&self, group: &TorchStore, world: usize, formed: &Receiver<()>) {
        let name = group.prefix.split('/').nth(1).unwrap_or_default();
        let mut answered = vec![Vec::new(); world];
        let mut seen = None;
        let mut look = || -> Result<()> {
            let come = self.try_get(COME_KEY)?;
            if come != seen {
                for (rank, answered) in answered.iter_mut().enumerate().skip(1) {
                    let word = self.try_get(&come_key(rank))?.unwrap_or_default();
                    if word != *answered {
                        let answer = answer_key(&String::from_utf8_lossy(&word));
                        self.set(&answer, name.as_bytes())?;
                        *answered = word;
                    }
                }
                seen = come;
            }
            Ok(())
        };
        let mut pause = LOOK[0];
        // An error is one of forming the group too, which says it.
        while look().is_ok() && formed.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            pause = (2 * pause).min(LOOK[1]);
        }
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on every question fails. The caller must not keep other threads from Python.
    pub(crate) fn close(&self) {
        let until = Instant::now() + END;
        let mut state = self.lock();
        state.store = None;
        while state.asking > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let woken = self.shared.1.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn ask<R>(&self, ask: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<R>) -> Result<R> {
        let lost =
            |what: String| Error::new(ErrorKind::PeerLost, format!("{}: {what}", self.location()));
        let store = {
            let mut state = self.lock();
            let store = state
                .store
                .clone()
                .ok_or_else(|| lost("the group was left".into()))?;
            state.asking += 1;
            store
        };
        let answer = Python::attach(|py| {
            let answer = ask(store.bind(py)).map_err(|error| lost(error.to_string()));
            // While this thread may.
            drop(store);
            answer
        });
        self.lock().asking -= 1;
        self.shared.1.notify_all();
        answer
    }

    fn has(&self, key: &str) -> Result<bool> {
        self.ask(|store| {
            store
                .call_method1("check", (vec![self.key(key)],))?
                .extract()
        })
    }

    fn value(&self, key: &str) -> Result<Vec<u8>> {
        self.ask(|store| store.call_method1("get", (self.key(key),))?.extract())
    }
}

impl Store for TorchStore {
    fn location(&self) -> &str {
        "PyTorch's store"
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(|store| {
            let value = PyBytes::new(store.py(), value);
            store.call_method1("set", (self.key(key), value)).map(drop)
        })
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.wait(&[key], timeout)?;
        self.value(key)
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.has(key)? {
            true => self.value(key).map(Some),
            false => Ok(None),
        }
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        let mut pause = LOOK[0];
        loop {
            let all: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
            if self.ask(|store| store.call_method1("check", (all,))?.extract::<bool>())? {
                return Ok(());
            }
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(pause.min(left));
            pause = (2 * pause).min(LOOK[1]);
        }
        let mut missing = Vec::new();
        for key in keys {
            if !self.has(key)? {
                missing.push((*key).to_owned());
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::missing(
            self.location(),
            keys.len(),
            timeout,
            missing,
        ))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.ask(|store| store.call_method1("add", (self.key(key), delta))?.extract())
    }

    /// PyTorch's stores take an empty value for one that does not exist, and answer with `expected` where there is none.
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        let now: Vec<u8> = self.ask(|store| {
            let expected = PyBytes::new(store.py(), expected.unwrap_or_default());
            let desired = PyBytes::new(store.py(), desired);
            store
                .call_method1("compare_set", (self.key(key), expected, desired))?
                .extract()
        })?;
        let is_as_before = expected == Some(&now[..]) && now != desired;
        match is_as_before && !self.has(key)? {
            true => Ok(Vec::new()),
            false => Ok(now),
        }
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.ask(|store| {
            store
                .call_method1("delete_key", (self.key(key),))?
                .extract()
        })
    }

    /// Nothing where the store cannot list its keys: then they stay until it ends.
    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        let prefix = self.key(prefix);
        self.ask(|store| {
            let Ok(keys) = store.call_method0("list_keys") else {
                return Ok(0);
            };
            let mut count = 0;
            for key in keys.extract::<Vec<String>>()? {
                // Behind the prefixes of PyTorch, if the store tells them.
                if let Some(at) = key.find(&prefix) {
                    let deleted = store.call_method1("delete_key", (&key[at..],))?;
                    count += u64::from(deleted.extract::<bool>()?);
                }
            }
            Ok(count)
        })
    }
}
