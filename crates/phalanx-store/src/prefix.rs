//! One name space within another store.

use std::sync::Arc;
use std::time::Duration;

use crate::{Error, Result, Store, Will};

/// A view of another store in which every key `k` is the key `prefix/k` below.
///
/// Groups and epochs each get one, so that a key of the last epoch is never
/// taken for one of this. Errors name keys as the caller of the view does.
#[derive(Clone)]
pub struct PrefixStore {
    inner: Arc<dyn Store>,
    /// Ends in a slash.
    prefix: String,
}

impl PrefixStore {
    /// A view of `inner` under `prefix`. Views of views nest.
    pub fn new(inner: Arc<dyn Store>, prefix: impl Into<String>) -> Self {
        let mut prefix = prefix.into();
        prefix.push('/');
        Self { inner, prefix }
    }

    /// The prefix, slash included.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    fn full(&self, key: &str) -> Result<String> {
        // The store below would see a key that is never empty.
        phalanx_wire::store_msg::check_key(key).map_err(|e| Error::bad_request(key, e))?;
        Ok(format!("{}{key}", self.prefix))
    }

    fn strip(&self, key: String) -> String {
        match key.strip_prefix(&self.prefix) {
            Some(short) => short.to_owned(),
            None => key,
        }
    }
}

impl std::fmt::Debug for PrefixStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrefixStore({:?})", self.prefix)
    }
}

impl Store for PrefixStore {
    fn place(&self) -> &str {
        self.inner.place()
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.set(&self.full(key)?, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner
            .get(&self.full(key)?, timeout)
            .map_err(|e| e.map_missing(|key| self.strip(key)))
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.inner.try_get(&self.full(key)?)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let full = keys
            .iter()
            .map(|key| self.full(key))
            .collect::<Result<Vec<_>>>()?;
        let full: Vec<&str> = full.iter().map(String::as_str).collect();
        self.inner
            .wait(&full, timeout)
            .map_err(|e| e.map_missing(|key| self.strip(key)))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.inner.add(&self.full(key)?, delta)
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        self.inner.compare_set(&self.full(key)?, expected, desired)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.inner.delete(&self.full(key)?)
    }

    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        self.inner
            .delete_prefix(&format!("{}{prefix}", self.prefix))
    }

    fn leave_will(&self, key: &str, value: &[u8]) -> Result<Option<Will>> {
        self.inner.leave_will(&self.full(key)?, value)
    }
}
