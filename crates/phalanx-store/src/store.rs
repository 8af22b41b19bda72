//! The operations of a store.

use std::sync::Arc;
use std::time::Duration;

use crate::{Result, Will};

/// A small key/value store that several ranks share.
///
/// Keys are UTF-8 text of 1 to 1024 bytes, values have up to 1 MiB; a store holds up
/// to 128 Ki keys and 256 MiB. All methods may be called from several threads at
/// once; a thread that waits does not block the others.
///
/// Operations are linearizable: each takes effect at one moment between call and
/// return, in the same order for all members.
pub trait Store: Send + Sync + 'static {
    /// Name of the store in messages; empty for a store in memory.
    fn location(&self) -> &str {
        ""
    }

    /// Stores a value, replacing an existing one.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits up to `timeout` for a key and returns its value.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) names the key.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Returns the current value, if any, without waiting.
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>>;

    /// Waits up to `timeout` until all keys exist at the same time. Returns at once
    /// if `keys` is empty.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), and
    /// [`Error::missing_keys`](crate::Error::missing_keys) has exactly the keys
    /// that were missing at the end.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Adds to a number, stored as decimal text and 0 at first, and returns the sum.
    /// The addition is atomic.
    ///
    /// # Errors
    /// [`ErrorKind::NotANumber`](crate::ErrorKind::NotANumber), with the value
    /// unchanged.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Stores `desired` if the value is `expected` (`None`: if the key does not
    /// exist), and returns the value afterwards: `desired`, or the value that
    /// differs from `expected`. It is empty if a value was expected and the key does
    /// not exist.
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>>;

    /// Removes a key. Returns whether it existed.
    fn delete(&self, key: &str) -> Result<bool>;

    /// Removes all keys with this prefix. Returns their number.
    fn delete_prefix(&self, prefix: &str) -> Result<u64>;

    /// Leaves a will: if this process ends, in any way, before it drops the returned
    /// [`Will`], the store sets `key` to `value` (at most 4 KiB) unless the key
    /// exists. The same happens, some time later, if this host cannot be reached any
    /// more. Returns `None` if this kind of store does not support wills.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    fn leave_will(&self, _key: &str, _value: &[u8]) -> Result<Option<Will>> {
        Ok(None)
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn location(&self) -> &str {
        (**self).location()
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        (**self).set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        (**self).get(key, timeout)
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        (**self).try_get(key)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        (**self).wait(keys, timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        (**self).add(key, delta)
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        (**self).compare_set(key, expected, desired)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        (**self).delete(key)
    }

    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        (**self).delete_prefix(prefix)
    }

    fn leave_will(&self, key: &str, value: &[u8]) -> Result<Option<Will>> {
        (**self).leave_will(key, value)
    }
}
