//! The operations of a store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Error, Result, Will};

/// A small key/value store that several ranks share.
///
/// Keys are UTF-8 text of 1 to 1024 bytes, values have up to 1 MiB; a store holds up
/// to 128 Ki keys and 256 MiB. All methods may be called from several threads at
/// once; a thread that waits does not block the others.
///
/// Operations are linearizable: each takes effect at one moment between call and
/// return, in the same order for all members. Only [`multi_get`](Self::multi_get) and
/// [`multi_set`](Self::multi_set) are several operations each.
///
/// The elements of a queue are the keys `QUEUE/` and 16 hexadecimal digits: they count
/// for the limits, and `delete_prefix("QUEUE/")` removes them. The name of a queue has 1 to
/// 1007 bytes. Where it is the start of another queue's name (`q` of `q/1`), an operation on it looks at the elements of
/// both.
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

    /// Appends to a value, empty at first, and returns the new length in bytes. The append
    /// is atomic. *Cost:* the store writes the whole value again, also to its followers or
    /// its file.
    ///
    /// # Errors
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded), with the value
    /// unchanged. The default, for stores outside this crate:
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage).
    fn append(&self, _key: &str, _value: &[u8]) -> Result<u64> {
        Err(Error::unsupported("append"))
    }

    /// Waits up to `timeout` until all keys exist, and returns their values. Each value is
    /// read on its own, so they need not have existed at the same time. *Cost:* a
    /// [`wait`](Self::wait), and a [`get`](Self::get) of each key.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        self.wait(keys, timeout)?;
        let left = || timeout.saturating_sub(start.elapsed());
        keys.iter().map(|key| self.get(key, left())).collect()
    }

    /// Stores values one after the other, as [`set`](Self::set): others may see the first
    /// ones without the rest.
    ///
    /// # Errors
    /// As [`set`](Self::set), for the first pair that fails; those before it are stored.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs
            .iter()
            .try_for_each(|(key, value)| self.set(key, value))
    }

    /// Stores `desired` if the value is `expected` (`None`: if the key does not
    /// exist), and returns the value afterwards: `desired`, or the value that
    /// differs from `expected`. It is empty if a value was expected and the key does
    /// not exist.
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>>;

    /// Removes a key. Returns whether it existed.
    fn delete(&self, key: &str) -> Result<bool>;

    /// Removes all keys with this prefix. Returns their number.
    fn delete_prefix(&self, prefix: &str) -> Result<u64>;

    /// Adds an element at the end of a queue.
    ///
    /// # Errors
    /// As [`set`](Self::set). The default, for stores outside this crate:
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage).
    fn queue_push(&self, _queue: &str, _value: &[u8]) -> Result<()> {
        Err(Error::unsupported("queues"))
    }

    /// Waits up to `timeout` for an element, removes the first one and returns it. Each
    /// element is given to one caller, in the order of the pushes. It is lost if that
    /// caller ends before it has received it.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) names the queue. The default, as
    /// for [`queue_push`](Self::queue_push).
    fn queue_pop(&self, _queue: &str, _timeout: Duration) -> Result<Vec<u8>> {
        Err(Error::unsupported("queues"))
    }

    /// Returns the number of elements of a queue. *Cost:* linear in it.
    ///
    /// # Errors
    /// The default, as for [`queue_push`](Self::queue_push).
    fn queue_len(&self, _queue: &str) -> Result<u64> {
        Err(Error::unsupported("queues"))
    }

    /// Leaves a will: if this process ends, in any way, before it drops the returned
    /// [`Will`], the store sets `key` to `value` (at most 4 KiB) unless the key
    /// exists. Where `key` ends with `/`, it sets the first of the keys `key0`, `key1`, … that
    /// does not exist. The same happens, some time later, if this host cannot be reached any
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

    fn append(&self, key: &str, value: &[u8]) -> Result<u64> {
        (**self).append(key, value)
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

    fn queue_push(&self, queue: &str, value: &[u8]) -> Result<()> {
        (**self).queue_push(queue, value)
    }

    fn queue_pop(&self, queue: &str, timeout: Duration) -> Result<Vec<u8>> {
        (**self).queue_pop(queue, timeout)
    }

    fn queue_len(&self, queue: &str) -> Result<u64> {
        (**self).queue_len(queue)
    }

    fn leave_will(&self, key: &str, value: &[u8]) -> Result<Option<Will>> {
        (**self).leave_will(key, value)
    }
}
