//! A store for the threads of one process.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_wire::store_msg::{Failure, Request, check_key};

use crate::table::Table;
use crate::{Error, Result, Store};

const LOCATION: &str = "the in-memory store";

/// A store for the threads of one process. Clones share their keys.
#[derive(Clone, Debug, Default)]
pub struct MemStore(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    /// Notified when a key may have appeared.
    changed: Condvar,
}

impl MemStore {
    /// An empty store with the default limits.
    pub fn new() -> Self {
        Self::default()
    }

    /// The locked table. It is usable after a panic of another thread, since each
    /// change is complete before anything can panic.
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `take` returns a value; returns the table if it does not.
    fn wait_until<T>(
        &self,
        timeout: Duration,
        take: impl Fn(&mut Table) -> Option<T>,
    ) -> Result<T, MutexGuard<'_, Table>> {
        let start = Instant::now();
        let mut table = self.table();
        loop {
            if let Some(value) = take(&mut table) {
                return Ok(value);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(table);
            }
            table = self
                .0
                .changed
                .wait_timeout(table, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Checks a request about `key`, makes its change and wakes those that wait.
    fn change<T>(
        &self,
        key: &str,
        request: &Request<'_>,
        make: impl FnOnce(&mut Table) -> Result<T, Failure>,
    ) -> Result<T> {
        Error::check(key, request)?;
        let result = make(&mut self.table());
        self.0.changed.notify_all();
        result.map_err(|failure| Error::failed(LOCATION, key, failure))
    }
}

impl Store for MemStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(key, &Request::Set { key, value }, |t| t.set(key, value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        Error::check(key, &Request::TryGet { key })?;
        self.wait_until(timeout, |table| table.get(key).map(<[u8]>::to_vec))
            .map_err(|_| Error::missing(LOCATION, 1, timeout, vec![key.to_owned()]))
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Error::check(key, &Request::TryGet { key })?;
        Ok(self.table().get(key).map(<[u8]>::to_vec))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        for key in keys {
            check_key(key).map_err(|e| Error::bad_request(key, e))?;
        }
        let missing = |table: &Table| table.missing(keys.iter().copied());
        self.wait_until(timeout, |table| missing(table).is_empty().then_some(()))
            .map_err(|table| {
                let missing = missing(&table).into_iter().map(str::to_owned).collect();
                Error::missing(LOCATION, keys.len(), timeout, missing)
            })
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.change(key, &Request::Add { key, delta }, |t| t.add(key, delta))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<u64> {
        self.change(key, &Request::Append { key, value }, |t| {
            t.append(key, value)
        })
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        let request = Request::CompareSet {
            key,
            expected,
            desired,
        };
        self.change(key, &request, |table| {
            table.compare_set(key, expected, desired)?;
            Ok(table.get(key).unwrap_or_default().to_vec())
        })
    }

    fn delete(&self, key: &str) -> Result<bool> {
        Error::check(key, &Request::Delete { key })?;
        Ok(self.table().delete(key))
    }

    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        Error::check(prefix, &Request::DeletePrefix { prefix })?;
        Ok(self.table().delete_prefix(prefix))
    }

    fn queue_push(&self, queue: &str, value: &[u8]) -> Result<()> {
        let request = Request::QueuePush { queue, value };
        self.change(queue, &request, |table| table.push(queue, value).map(drop))
    }

    fn queue_pop(&self, queue: &str, timeout: Duration) -> Result<Vec<u8>> {
        Error::check(queue, &Request::QueueLen { queue })?;
        let popped = self.wait_until(timeout, |table| table.pop(queue));
        let (_, value) = popped.map_err(|_| Error::empty(LOCATION, queue, timeout))?;
        Ok(value)
    }

    fn queue_len(&self, queue: &str) -> Result<u64> {
        Error::check(queue, &Request::QueueLen { queue })?;
        Ok(self.table().queue_len(queue))
    }
}
