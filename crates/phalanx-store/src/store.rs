//! What every kind of store can do.

use std::sync::Arc;
use std::time::Duration;

use crate::{Result, Will};

/// A small key/value store that several ranks share.
///
/// Keys are UTF-8 text of 1 to 1024 bytes, values up to 1 MiB; a store takes
/// 128 Ki keys and 256 MiB in total. All methods may be called from several
/// threads at once; a thread that waits does not hold up another.
///
/// *Order:* each operation happens at one instant between its call and its
/// return, alike for all members.
pub trait Store: Send + Sync + 'static {
    /// Where the store is, as messages name it; empty for one in memory.
    fn place(&self) -> &str {
        ""
    }

    /// Stores the value, whatever was there.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until the key is there, at most `timeout`, and returns its value.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) names the key.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// The value now, if any. Never waits for the key.
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>>;

    /// Waits until all keys are there at once, at most `timeout`. No keys:
    /// returns at once.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), and
    /// [`Error::missing_keys`](crate::Error::missing_keys) has exactly the keys
    /// that were missing when the deadline passed.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Adds to a number kept as decimal text, which starts at 0, and returns
    /// the sum. No addition is lost, however many add at once.
    ///
    /// # Errors
    /// [`ErrorKind::NotANumber`](crate::ErrorKind::NotANumber), with the value
    /// unchanged.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Stores `desired` if the value is `expected` (`None`: if there is no
    /// value), and returns what is stored afterwards: `desired` means that it
    /// is there, anything else is the value that was in the way. Where nothing
    /// is stored afterwards (a value was expected, but none was there), the
    /// answer is empty.
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>>;

    /// Removes a key; says whether it was there.
    fn delete(&self, key: &str) -> Result<bool>;

    /// Removes all keys that begin with `prefix`; says how many there were.
    fn delete_prefix(&self, prefix: &str) -> Result<u64>;

    /// Has `value` (at most 4 KiB) stored under `key`, unless there is one by
    /// then, when this process ends before it has dropped what it gets here,
    /// however it ends. Also when its host cannot be reached any more, some
    /// time later. `None`: this kind of store does not notice.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    fn leave_will(&self, _key: &str, _value: &[u8]) -> Result<Option<Will>> {
        Ok(None)
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn place(&self) -> &str {
        (**self).place()
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
