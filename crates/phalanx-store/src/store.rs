//! The operations of a store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_wire::store_msg::{MAX_WAIT_KEYS, Request, Response, check_key};

use crate::{Error, ErrorKind, Result, Will};

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
    /// Name of the store in messages.
    fn location(&self) -> String;

    /// Executes one request; the other methods call this. The limits of the request were checked. A wait that times out
    /// is answered with [`Response::Missing`], that for an element of a queue with [`Response::NotFound`].
    ///
    /// # Errors
    /// When there is no response. [`ErrorKind::Usage`] for a request that this kind of store does not support.
    fn execute(&self, request: &Request<'_>) -> Result<Response>;

    /// Stores a value, replacing an existing one.
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        ask(self, &Request::Set { key, value }).map(drop)
    }

    /// Waits up to `timeout` for a key and returns its value.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) names the key.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let timeout_ms = millis(timeout);
        match ask(self, &Request::Get { key, timeout_ms })? {
            Response::Value(value) => Ok(value),
            Response::Missing(missing) => {
                Err(Error::missing(&self.location(), 1, timeout, missing))
            }
            other => wrong(self, &other),
        }
    }

    /// Waits up to `timeout` for a key that ends with a decimal number. Returns its value and those of the keys with the
    /// next numbers, as far as they exist, and whether there may be more: at most 1024 values, of 1 MiB together. No value:
    /// the first key does not exist.
    fn get_numbered(&self, key: &str, timeout: Duration) -> Result<(Vec<Vec<u8>>, bool)> {
        let timeout_ms = millis(timeout);
        match ask(self, &Request::GetNumbered { key, timeout_ms })? {
            Response::Values { values, more } => Ok((values, more)),
            Response::Missing(_) => Ok((Vec::new(), false)),
            other => wrong(self, &other),
        }
    }

    /// Returns the current value, if any, without waiting.
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match ask(self, &Request::TryGet { key })? {
            Response::Value(value) => Ok(Some(value)),
            Response::NotFound => Ok(None),
            other => wrong(self, &other),
        }
    }

    /// Waits up to `timeout` until all keys exist at the same time. Returns at once
    /// if `keys` is empty.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), and
    /// [`Error::missing_keys`](crate::Error::missing_keys) has exactly the keys
    /// that were missing at the end.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        for key in keys {
            check_key(key).map_err(|e| Error::bad_request(key, e))?;
        }
        let start = Instant::now();
        let left = || timeout.saturating_sub(start.elapsed());
        loop {
            let is_last = left().is_zero();
            let mut missing = Vec::new();
            // More keys than one request allows: one part after the other...
            for some in keys.chunks(MAX_WAIT_KEYS) {
                missing.extend(wait_some(self, some, left())?);
            }
            // ...then all of them again, since a key may have been deleted while the
            // others were waited for, and the error names all missing keys.
            if keys.len() > MAX_WAIT_KEYS && !is_last {
                missing.clear();
                for some in keys.chunks(MAX_WAIT_KEYS) {
                    missing.extend(wait_some(self, some, Duration::ZERO)?);
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            if is_last || keys.len() <= MAX_WAIT_KEYS {
                let location = self.location();
                return Err(Error::missing(&location, keys.len(), timeout, missing));
            }
        }
    }

    /// Adds to a number, stored as decimal text and 0 at first, and returns the sum.
    /// The addition is atomic.
    ///
    /// # Errors
    /// [`ErrorKind::NotANumber`](crate::ErrorKind::NotANumber), with the value
    /// unchanged.
    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        number(self, &Request::Add { key, delta })
    }

    /// Appends to a value, empty at first, and returns the new length in bytes. The append
    /// is atomic. *Cost:* the store writes the whole value again, also to its followers or
    /// its file.
    ///
    /// # Errors
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded), with the value
    /// unchanged.
    fn append(&self, key: &str, value: &[u8]) -> Result<u64> {
        let length = number(self, &Request::Append { key, value })?;
        Ok(length.cast_unsigned())
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
    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        let request = Request::CompareSet {
            key,
            expected,
            desired,
        };
        match ask(self, &request)? {
            Response::Value(value) => Ok(value),
            Response::NotFound => Ok(Vec::new()),
            other => wrong(self, &other),
        }
    }

    /// Removes a key. Returns whether it existed.
    fn delete(&self, key: &str) -> Result<bool> {
        match ask(self, &Request::Delete { key })? {
            Response::Existed(existed) => Ok(existed),
            other => wrong(self, &other),
        }
    }

    /// Removes all keys with this prefix. Returns their number.
    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        match ask(self, &Request::DeletePrefix { prefix })? {
            Response::Removed(count) => Ok(count),
            other => wrong(self, &other),
        }
    }

    /// Adds an element at the end of a queue.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    fn queue_push(&self, queue: &str, value: &[u8]) -> Result<()> {
        ask(self, &Request::QueuePush { queue, value }).map(drop)
    }

    /// Waits up to `timeout` for an element, removes the first one and returns it. Each
    /// element is given to one caller, in the order of the pushes. It is lost if that
    /// caller ends before it has received it.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) names the queue.
    fn queue_pop(&self, queue: &str, timeout: Duration) -> Result<Vec<u8>> {
        let timeout_ms = millis(timeout);
        match ask(self, &Request::QueuePop { queue, timeout_ms })? {
            Response::Value(value) => Ok(value),
            Response::NotFound => Err(Error::empty(&self.location(), queue, timeout)),
            other => wrong(self, &other),
        }
    }

    /// Returns the number of elements of a queue. *Cost:* linear in it.
    fn queue_len(&self, queue: &str) -> Result<u64> {
        let length = number(self, &Request::QueueLen { queue })?;
        Ok(length.cast_unsigned())
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

/// Executes a request that is within the limits.
fn ask<S: Store + ?Sized>(store: &S, request: &Request<'_>) -> Result<Response> {
    let key = request.key();
    request.check().map_err(|e| Error::bad_request(key, e))?;
    match store.execute(request)? {
        Response::Failed(failure) => Err(Error::failed(&store.location(), key, failure)),
        response => Ok(response),
    }
}

/// A request for a sum or a length.
fn number<S: Store + ?Sized>(store: &S, request: &Request<'_>) -> Result<i64> {
    match ask(store, request)? {
        Response::Number(number) => Ok(number),
        other => wrong(store, &other),
    }
}

/// Waits for up to [`MAX_WAIT_KEYS`] keys; returns the missing ones.
fn wait_some<S: Store + ?Sized>(
    store: &S,
    keys: &[&str],
    timeout: Duration,
) -> Result<Vec<String>> {
    let request = Request::Wait {
        keys: keys.to_vec(),
        timeout_ms: millis(timeout),
    };
    match ask(store, &request)? {
        Response::Done => Ok(Vec::new()),
        Response::Missing(missing) => Ok(missing),
        other => wrong(store, &other),
    }
}

fn wrong<S: Store + ?Sized, T>(store: &S, response: &Response) -> Result<T> {
    let what = format!("{} sent a wrong response: {response:?}", store.location());
    Err(Error::new(ErrorKind::Protocol, what))
}

/// Milliseconds, rounded up so that a wait never ends early; at most 49 days.
pub(crate) fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(u32::MAX)
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn location(&self) -> String {
        (**self).location()
    }

    fn execute(&self, request: &Request<'_>) -> Result<Response> {
        (**self).execute(request)
    }

    fn leave_will(&self, key: &str, value: &[u8]) -> Result<Option<Will>> {
        (**self).leave_will(key, value)
    }
}
