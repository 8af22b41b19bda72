//! Requests of a store's clients.

use std::time::Duration;

use super::{
    Field, LENGTH_BYTES, check_key, check_prefix, check_queue, check_value, check_wait, check_will,
    codec,
};
use crate::bytes::Reader;
use crate::{Error, ErrorKind, Result};

/// A request to a store. Borrows from the bytes it was decoded from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request<'a> {
    /// Store the value, replacing an existing one.
    Set {
        /// The key.
        key: &'a str,
        /// The value.
        value: &'a [u8],
    },
    /// Wait for a key and return its value.
    Get {
        /// The key.
        key: &'a str,
        /// Timeout of the wait, in milliseconds.
        timeout_ms: u32,
    },
    /// Wait for a key that ends with a decimal number, and return its value and those of the keys with the next numbers, as
    /// far as they exist.
    GetNumbered {
        /// The key of the first value.
        key: &'a str,
        /// Timeout of the wait for the first value, in milliseconds.
        timeout_ms: u32,
    },
    /// Return the current value, if any.
    TryGet {
        /// The key.
        key: &'a str,
    },
    /// Wait until all keys exist.
    Wait {
        /// The keys.
        keys: Vec<&'a str>,
        /// Timeout of the wait, in milliseconds.
        timeout_ms: u32,
    },
    /// Add to a decimal number.
    Add {
        /// The key.
        key: &'a str,
        /// The number to add.
        delta: i64,
    },
    /// Store `desired` if the value is `expected`.
    CompareSet {
        /// The key.
        key: &'a str,
        /// The expected value; `None` if the key must not exist.
        expected: Option<&'a [u8]>,
        /// The value to store.
        desired: &'a [u8],
    },
    /// Remove one key.
    Delete {
        /// The key.
        key: &'a str,
    },
    /// Remove all keys with a prefix.
    DeletePrefix {
        /// The prefix; an empty one matches all keys.
        prefix: &'a str,
    },
    /// Leave a will: when this connection closes, store the value unless the key
    /// exists. A new will replaces the connection's previous one.
    Will {
        /// The key.
        key: &'a str,
        /// The value, of at most [`MAX_WILL_BYTES`](super::MAX_WILL_BYTES);
        /// `None` removes the will.
        value: Option<&'a [u8]>,
    },
    /// Follow the store: be sent all its keys, then [`Response::Copied`], then every
    /// change.
    ///
    /// [`Response::Copied`]: super::Response::Copied
    Follow {
        /// Identifier of the follower; a new connection replaces the previous one.
        id: u64,
    },
    /// A follower has applied all changes up to this one. There is no response.
    Ack {
        /// Number of the change.
        seq: u64,
    },
    /// A follower ends its connection and continues without the server. There is no response.
    Leave,
    /// A follower ends, and does not continue elsewhere. There is no response.
    Retire {
        /// The server sets this key, without a value.
        key: &'a str,
    },
    /// Append to the value, which is empty at first.
    Append {
        /// The key.
        key: &'a str,
        /// The bytes to append.
        value: &'a [u8],
    },
    /// Store an element behind the others of a queue.
    QueuePush {
        /// The queue.
        queue: &'a str,
        /// The element.
        value: &'a [u8],
    },
    /// Wait for an element of a queue, remove the first one and return it.
    QueuePop {
        /// The queue.
        queue: &'a str,
        /// Timeout of the wait, in milliseconds.
        timeout_ms: u32,
    },
    /// Count the elements of a queue.
    QueueLen {
        /// The queue.
        queue: &'a str,
    },
}

codec! { Request<'a>:
    1 => Set { key: key, value: value },
    2 => Get { key: key, timeout_ms: timeout },
    3 => TryGet { key: key },
    4 => Wait { timeout_ms: timeout, keys: keys },
    5 => Add { key: key, delta: delta },
    6 => CompareSet { key: key, expected: expected, desired: desired },
    7 => Delete { key: key },
    8 => DeletePrefix { prefix: prefix },
    9 => Will { key: key, value: value },
    10 => Follow { id: id },
    11 => Ack { seq: seq },
    12 => Leave {},
    13 => Retire { key: key },
    14 => Append { key: key, value: value },
    15 => QueuePush { queue: queue, value: value },
    16 => QueuePop { queue: queue, timeout_ms: timeout },
    17 => QueueLen { queue: queue },
    18 => GetNumbered { key: key, timeout_ms: timeout },
}

impl<'a> Request<'a> {
    /// The key, queue or prefix; of a wait the first key.
    pub fn key(&self) -> &'a str {
        match self {
            Request::Set { key, .. }
            | Request::Get { key, .. }
            | Request::GetNumbered { key, .. }
            | Request::TryGet { key }
            | Request::Add { key, .. }
            | Request::Append { key, .. }
            | Request::CompareSet { key, .. }
            | Request::Delete { key }
            | Request::Retire { key }
            | Request::Will { key, .. }
            | Request::DeletePrefix { prefix: key }
            | Request::QueuePush { queue: key, .. }
            | Request::QueuePop { queue: key, .. }
            | Request::QueueLen { queue: key } => key,
            Request::Wait { keys, .. } => keys.first().copied().unwrap_or_default(),
            Request::Follow { .. } | Request::Ack { .. } | Request::Leave => "",
        }
    }

    /// How long to wait.
    pub fn timeout(&self) -> Duration {
        match self {
            Request::Get { timeout_ms, .. }
            | Request::GetNumbered { timeout_ms, .. }
            | Request::Wait { timeout_ms, .. }
            | Request::QueuePop { timeout_ms, .. } => Duration::from_millis((*timeout_ms).into()),
            _ => Duration::ZERO,
        }
    }

    /// Checks the limits.
    ///
    /// # Errors
    /// [`ErrorKind::KeyEmpty`], [`KeyTooLong`](ErrorKind::KeyTooLong),
    /// [`ValueTooLong`](ErrorKind::ValueTooLong), [`WaitKeys`](ErrorKind::WaitKeys).
    pub fn check(&self) -> Result<()> {
        match self {
            Request::Set { key, value } | Request::Append { key, value } => {
                check_key(key)?;
                check_value(value)
            }
            Request::QueuePush { queue, value } => {
                check_queue(queue)?;
                check_value(value)
            }
            Request::QueuePop { queue, .. } | Request::QueueLen { queue } => check_queue(queue),
            Request::Wait { keys, .. } => {
                check_wait(keys.len())?;
                keys.iter().try_for_each(|key| check_key(key))
            }
            Request::CompareSet {
                key,
                expected,
                desired,
            } => {
                check_key(key)?;
                expected.map_or(Ok(()), check_value)?;
                check_value(desired)
            }
            Request::DeletePrefix { prefix } => check_prefix(prefix),
            Request::Will { key, value } => {
                check_key(key)?;
                value.map_or(Ok(()), check_will)
            }
            Request::Follow { .. } | Request::Ack { .. } | Request::Leave => Ok(()),
            _ => check_key(self.key()),
        }
    }
}
