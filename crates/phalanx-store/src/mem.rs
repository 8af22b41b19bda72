//! A store for the threads of one process.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_wire::store_msg::{check_key, check_prefix, check_value};

use crate::table::{Limits, Table};
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

    /// An empty store with these limits.
    pub fn with_limits(limits: Limits) -> Self {
        MemStore(Arc::new(Shared {
            table: Mutex::new(Table::new(limits)),
            changed: Condvar::new(),
        }))
    }

    /// The locked table. It is usable after a panic of another thread, since each
    /// change is complete before anything can panic.
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all keys exist. Returns with the lock held, so that they still
    /// exist for the caller.
    fn wait_locked(&self, keys: &[&str], timeout: Duration) -> Result<MutexGuard<'_, Table>> {
        let start = Instant::now();
        let mut table = self.table();
        loop {
            let missing = table.missing(keys.iter().copied());
            if missing.is_empty() {
                return Ok(table);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let missing = missing.into_iter().map(str::to_owned).collect();
                return Err(Error::missing(LOCATION, keys.len(), timeout, missing));
            }
            table = self
                .0
                .changed
                .wait_timeout(table, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

fn checked(key: &str) -> Result<()> {
    check_key(key).map_err(|e| Error::bad_request(key, e))
}

impl Store for MemStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        checked(key)?;
        check_value(value).map_err(|e| Error::bad_request(key, e))?;
        let result = self.table().set(key, value);
        self.0.changed.notify_all();
        result.map_err(|failure| Error::failed(LOCATION, key, failure))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        checked(key)?;
        let table = self.wait_locked(&[key], timeout)?;
        Ok(table.get(key).unwrap_or_default().to_vec())
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        checked(key)?;
        Ok(self.table().get(key).map(<[u8]>::to_vec))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        keys.iter().try_for_each(|key| checked(key))?;
        self.wait_locked(keys, timeout).map(drop)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        checked(key)?;
        let result = self.table().add(key, delta);
        self.0.changed.notify_all();
        result.map_err(|failure| Error::failed(LOCATION, key, failure))
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        checked(key)?;
        check_value(desired).map_err(|e| Error::bad_request(key, e))?;
        expected
            .map_or(Ok(()), check_value)
            .map_err(|e| Error::bad_request(key, e))?;
        let mut table = self.table();
        table
            .compare_set(key, expected, desired)
            .map_err(|failure| Error::failed(LOCATION, key, failure))?;
        let now = table.get(key).unwrap_or_default().to_vec();
        drop(table);
        self.0.changed.notify_all();
        Ok(now)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        checked(key)?;
        Ok(self.table().delete(key))
    }

    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        check_prefix(prefix).map_err(|e| Error::bad_request(prefix, e))?;
        Ok(self.table().delete_prefix(prefix))
    }
}
