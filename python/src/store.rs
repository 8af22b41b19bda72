//! PyTorch's store, in which the ranks of a group find each other.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_base::process::ProcessName;
use phalanx_comm as comm;
use phalanx_store::{Error, ErrorKind, Result, Store};
use phalanx_wire::Token;
use phalanx_wire::store_msg::{Request, Response};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::raised;

/// For how long a wait sleeps between two looks, at first and at most. PyTorch's own waits would keep the connection of
/// the store, which other threads use too.
const LOOK: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(20)];

/// How often a wait while a group forms looks whether one of its ranks has died.
const WATCH: Duration = Duration::from_millis(100);

/// For how long the end of a group waits for questions that have no answer yet.
const END: Duration = Duration::from_secs(5);

/// A `torch.distributed.Store`, until it is closed: then no thread needs Python any more, which may end.
///
/// One store may see many groups, of any sizes and ranks, also of processes that have ended. So rank 0 gives each group a
/// random name: every other rank writes a random word to `come/SIZE/RANK`, and waits for the name in `group/WORD`. `come/SIZE`
/// counts them. What an earlier process has left there is answered too, and the answer is not read.
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
    /// While a group forms.
    forming: Option<Forming>,
}

struct Forming {
    /// By rank, as far as they are known.
    processes: Arc<[Option<ProcessName>]>,
    rank: usize,
    looked: Instant,
    /// Why it does not form.
    stopped: Option<PyErr>,
}

fn come_key(world: usize, rank: usize) -> String {
    format!("come/{world}/{rank}")
}

fn count_key(world: usize) -> String {
    format!("come/{world}")
}

fn answer_key(word: &str) -> String {
    format!("group/{word}")
}

impl TorchStore {
    /// `store` with a connection of its own, where it has one.
    /// Until [`formed`](Self::formed) a wait of `rank` ends when the program is interrupted, or one of `processes` has died.
    pub(crate) fn new(
        store: &Bound<'_, PyAny>,
        rank: usize,
        processes: Arc<[Option<ProcessName>]>,
    ) -> TorchStore {
        let own = store.call_method0("clone");
        let store = own.unwrap_or_else(|_| store.clone());
        let state = State {
            store: Some(Arc::new(store.unbind())),
            asking: 0,
            forming: Some(Forming {
                processes,
                rank,
                looked: Instant::now(),
                stopped: None,
            }),
        };
        TorchStore {
            shared: Arc::new((Mutex::new(state), Condvar::new())),
            prefix: "phalanx/".to_owned(),
        }
    }

    /// The group has formed, or will not: for this reason if there is one.
    pub(crate) fn formed(&self) -> Option<PyErr> {
        self.lock().forming.take()?.stopped
    }

    /// An error if nobody should wait for the group any more.
    fn watch(&self) -> Result<()> {
        let (processes, rank) = match &mut self.lock().forming {
            Some(forming) if forming.looked.elapsed() >= WATCH => {
                forming.looked = Instant::now();
                (Arc::clone(&forming.processes), forming.rank)
            }
            _ => return Ok(()),
        };
        Python::attach(|py| py.check_signals())
            .and_then(|()| {
                let has_died = |(dead, process): (usize, &Option<ProcessName>)| {
                    let process = process.as_ref()?;
                    (process.is_running() == Some(false)).then_some((dead, process.pid))
                };
                let dead = processes.iter().enumerate().find_map(has_died);
                dead.map_or(Ok(()), |(dead, process)| {
                    let how = format!("rank {dead} (process {process}) died");
                    let error = comm::Error::peer_lost(dead, how).with_rank(rank);
                    Err(raised(&error.with_operation("forming the group")))
                })
            })
            .map_err(|error| {
                let why = Error::new(ErrorKind::PeerLost, error.to_string());
                if let Some(forming) = &mut self.lock().forming {
                    forming.stopped.get_or_insert(error);
                }
                why
            })
    }

    /// Why rank 0 did not answer: PyTorch's store lets it wait until all have connected.
    fn unanswered(&self, rank: usize, world: usize, timeout: Duration) -> comm::Error {
        let has_come = |rank: &usize| self.check(&[&come_key(world, *rank)]).unwrap_or(false);
        let (arrived, missing): (Vec<usize>, Vec<usize>) = (1..world).partition(has_come);
        let mut text = format!(
            "rank {rank} waited {:.1} s for rank 0. It did not start, or it still waits in PyTorch's store until all ranks \
             have connected",
            timeout.as_secs_f64()
        );
        if !missing.is_empty() {
            text.push_str(&format!(
                "; {} did not arrive",
                comm::format_ranks(&missing)
            ));
        }
        comm::Error::timeout(format!("{text}; arrived: {}", comm::format_ranks(&arrived)))
    }

    /// The store of a new group, for its keys only. *Blocks* until rank 0 has come, at most `timeout`.
    pub(crate) fn of_group(
        &self,
        (rank, world): (usize, usize),
        timeout: Duration,
    ) -> comm::Result<TorchStore> {
        let word = Token::generate().map_err(Error::from)?.to_hex();
        let mut name = word.clone();
        if rank > 0 {
            let come = come_key(world, rank);
            self.set(&come, word.as_bytes())?;
            self.add(&count_key(world), 1)?;
            let answer = answer_key(&word);
            let sent = self
                .get(&answer, timeout)
                .map_err(|error| match error.kind() {
                    ErrorKind::Timeout => self.unanswered(rank, world, timeout),
                    _ => error.into(),
                })?;
            name = String::from_utf8_lossy(&sent).into_owned();
            // Some stores cannot.
            let _ = (self.delete(&answer), self.delete(&come));
        }
        Ok(TorchStore {
            prefix: format!("phalanx/{name}/"),
            ..self.clone()
        })
    }

    /// Sends the other ranks of `group` its name as they come, until `formed` is closed. For rank 0.
    pub(crate) fn welcome(&self, group: &TorchStore, world: usize, formed: &Receiver<()>) {
        let name = group.prefix.split('/').nth(1).unwrap_or_default();
        let mut answered = vec![Vec::new(); world];
        let mut seen = None;
        let mut look = || -> Result<()> {
            let come = self.try_get(&count_key(world))?;
            if come != seen {
                for (rank, answered) in answered.iter_mut().enumerate().skip(1) {
                    let word = self.look_up(&come_key(world, rank))?;
                    if !word.is_empty() && word != *answered {
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

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        self.ask::<bool>(|store| store.call_method1("check", (keys,))?.extract())
    }

    /// The value, once the key exists.
    fn value(&self, key: &str) -> Result<Response> {
        let value =
            self.ask::<Vec<u8>>(|store| store.call_method1("get", (self.key(key),))?.extract())?;
        Ok(Response::Value(value))
    }

    /// The value, or nothing, in one question: another rank may delete the key at any time, and `get` waits for one that does
    /// not exist.
    fn look_up(&self, key: &str) -> Result<Vec<u8>> {
        const NONE: &[u8] = b"-";
        let now: Vec<u8> = self.ask(|store| {
            let none = PyBytes::new(store.py(), NONE);
            let asked = store.call_method1("compare_set", (self.key(key), &none, &none));
            asked?.extract()
        })?;
        Ok(if now == NONE { Vec::new() } else { now })
    }

    /// Waits for keys; returns the missing ones.
    fn missing(&self, keys: &[&str], timeout: Duration) -> Result<Vec<String>> {
        let begun = Instant::now();
        let mut pause = LOOK[0];
        while !self.check(keys)? {
            self.watch()?;
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                let mut missing = Vec::new();
                for key in keys {
                    if !self.check(&[key])? {
                        missing.push((*key).to_owned());
                    }
                }
                return Ok(missing);
            }
            std::thread::sleep(pause.min(left));
            pause = (2 * pause).min(LOOK[1]);
        }
        Ok(Vec::new())
    }

    /// PyTorch's stores take an empty value for one that does not exist, and answer with `expected` where there is none.
    fn swap(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Response> {
        let now: Vec<u8> = self.ask(|store| {
            let expected = PyBytes::new(store.py(), expected.unwrap_or_default());
            let desired = PyBytes::new(store.py(), desired);
            store
                .call_method1("compare_set", (self.key(key), expected, desired))?
                .extract()
        })?;
        let is_as_before = expected == Some(&now[..]) && now != desired;
        match is_as_before && !self.check(&[key])? {
            true => Ok(Response::NotFound),
            false => Ok(Response::Value(now)),
        }
    }

    /// Nothing where the store cannot list its keys: then they stay until it ends.
    fn remove(&self, prefix: &str) -> Result<u64> {
        let prefix = self.key(prefix);
        self.ask(|store| {
            let Ok(keys) = store.call_method0("list_keys") else {
                return Ok(0);
            };
            let mut count = 0;
            for key in keys.extract::<Vec<String>>()? {
                // Behind the prefixes of PyTorch, if the store reports them.
                if let Some(at) = key.find(&prefix) {
                    let deleted = store.call_method1("delete_key", (&key[at..],))?;
                    count += u64::from(deleted.extract::<bool>()?);
                }
            }
            Ok(count)
        })
    }
}

impl Store for TorchStore {
    fn location(&self) -> String {
        "PyTorch's store".to_owned()
    }

    fn execute(&self, request: &Request<'_>) -> Result<Response> {
        let timeout = request.timeout();
        match *request {
            Request::Set { key, value } => self.ask(|store| {
                let value = PyBytes::new(store.py(), value);
                let done = store.call_method1("set", (self.key(key), value));
                done.map(|_| Response::Done)
            }),
            Request::Get { key, .. } => match self.missing(&[key], timeout)? {
                missing if missing.is_empty() => self.value(key),
                missing => Ok(Response::Missing(missing)),
            },
            Request::TryGet { key } if self.check(&[key])? => self.value(key),
            Request::TryGet { .. } => Ok(Response::NotFound),
            Request::Wait { ref keys, .. } => match self.missing(keys, timeout)? {
                missing if missing.is_empty() => Ok(Response::Done),
                missing => Ok(Response::Missing(missing)),
            },
            Request::Add { key, delta } => {
                let sum = self.ask::<i64>(|store| {
                    store.call_method1("add", (self.key(key), delta))?.extract()
                })?;
                Ok(Response::Number(sum))
            }
            Request::CompareSet {
                key,
                expected,
                desired,
            } => self.swap(key, expected, desired),
            Request::Delete { key } => {
                let existed = self.ask::<bool>(|store| {
                    store
                        .call_method1("delete_key", (self.key(key),))?
                        .extract()
                })?;
                Ok(Response::Existed(existed))
            }
            Request::DeletePrefix { prefix } => self.remove(prefix).map(Response::Removed),
            _ => {
                let what = format!("{} does not support this request", self.location());
                Err(Error::new(ErrorKind::Usage, what))
            }
        }
    }
}
