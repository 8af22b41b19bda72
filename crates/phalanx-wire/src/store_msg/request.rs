//! Requests of a store's clients.

use super::{
    check_key, check_prefix, check_queue, check_value, check_wait, check_will, message, put_key,
    put_keys, put_optional, put_value, take_key, take_keys, take_optional, take_prefix, take_queue,
    take_value,
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
    /// A follower ends its connection to go on without the server. There is no response.
    Leave,
    /// A follower ends, and goes on nowhere. There is no response.
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

const SET: u8 = 1;
const GET: u8 = 2;
const TRY_GET: u8 = 3;
const WAIT: u8 = 4;
const ADD: u8 = 5;
const COMPARE_SET: u8 = 6;
const DELETE: u8 = 7;
const DELETE_PREFIX: u8 = 8;
const WILL: u8 = 9;
const FOLLOW: u8 = 10;
const ACK: u8 = 11;
const LEAVE: u8 = 12;
const RETIRE: u8 = 13;
const APPEND: u8 = 14;
const QUEUE_PUSH: u8 = 15;
const QUEUE_POP: u8 = 16;
const QUEUE_LEN: u8 = 17;

/// Begins a body: its code and its key.
fn start<'o>(out: &'o mut Vec<u8>, code: u8, key: &str) -> &'o mut Vec<u8> {
    out.push(code);
    put_key(out, key);
    out
}

impl<'a> Request<'a> {
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
            Request::Get { key, .. }
            | Request::TryGet { key }
            | Request::Add { key, .. }
            | Request::Retire { key }
            | Request::Delete { key } => check_key(key),
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
        }
    }

    /// Appends length and body to `out`.
    ///
    /// # Errors
    /// As [`check`](Self::check); `out` is unchanged then.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<()> {
        self.check()?;
        message(out, |out| match self {
            Request::Set { key, value } => put_value(start(out, SET, key), value),
            Request::Get { key, timeout_ms } => {
                start(out, GET, key).extend_from_slice(&timeout_ms.to_le_bytes());
            }
            Request::TryGet { key } => _ = start(out, TRY_GET, key),
            Request::Wait { keys, timeout_ms } => {
                out.push(WAIT);
                out.extend_from_slice(&timeout_ms.to_le_bytes());
                put_keys(out, keys);
            }
            Request::Add { key, delta } => {
                start(out, ADD, key).extend_from_slice(&delta.to_le_bytes());
            }
            Request::CompareSet {
                key,
                expected,
                desired,
            } => {
                put_optional(start(out, COMPARE_SET, key), *expected);
                put_value(out, desired);
            }
            Request::Delete { key } => _ = start(out, DELETE, key),
            Request::DeletePrefix { prefix } => _ = start(out, DELETE_PREFIX, prefix),
            Request::Will { key, value } => put_optional(start(out, WILL, key), *value),
            Request::Follow { id } => {
                out.push(FOLLOW);
                out.extend_from_slice(&id.to_le_bytes());
            }
            Request::Ack { seq } => {
                out.push(ACK);
                out.extend_from_slice(&seq.to_le_bytes());
            }
            Request::Leave => out.push(LEAVE),
            Request::Retire { key } => _ = start(out, RETIRE, key),
            Request::Append { key, value } => put_value(start(out, APPEND, key), value),
            Request::QueuePush { queue, value } => {
                put_value(start(out, QUEUE_PUSH, queue), value);
            }
            Request::QueuePop { queue, timeout_ms } => {
                start(out, QUEUE_POP, queue).extend_from_slice(&timeout_ms.to_le_bytes());
            }
            Request::QueueLen { queue } => _ = start(out, QUEUE_LEN, queue),
        });
        Ok(())
    }

    /// Decodes a body (without its length).
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`ErrorKind::UnknownCode`],
    /// [`Truncated`](ErrorKind::Truncated), [`TrailingBytes`](ErrorKind::TrailingBytes),
    /// [`KeyNotUtf8`](ErrorKind::KeyNotUtf8), [`BadFlag`](ErrorKind::BadFlag).
    pub fn decode(body: &'a [u8]) -> Result<Self> {
        let mut r = Reader::new(body);
        let request = match r.u8()? {
            SET => Request::Set {
                key: take_key(&mut r)?,
                value: take_value(&mut r)?,
            },
            GET => Request::Get {
                key: take_key(&mut r)?,
                timeout_ms: r.u32()?,
            },
            TRY_GET => Request::TryGet {
                key: take_key(&mut r)?,
            },
            WAIT => {
                let timeout_ms = r.u32()?;
                let keys = take_keys(&mut r)?;
                Request::Wait { keys, timeout_ms }
            }
            ADD => Request::Add {
                key: take_key(&mut r)?,
                delta: i64::from_le_bytes(r.array()?),
            },
            COMPARE_SET => {
                let key = take_key(&mut r)?;
                let expected = take_optional(&mut r)?;
                Request::CompareSet {
                    key,
                    expected,
                    desired: take_value(&mut r)?,
                }
            }
            DELETE => Request::Delete {
                key: take_key(&mut r)?,
            },
            DELETE_PREFIX => Request::DeletePrefix {
                prefix: take_prefix(&mut r)?,
            },
            WILL => {
                let key = take_key(&mut r)?;
                let value = take_optional(&mut r)?;
                value.map_or(Ok(()), check_will)?;
                Request::Will { key, value }
            }
            FOLLOW => Request::Follow { id: r.u64()? },
            ACK => Request::Ack { seq: r.u64()? },
            LEAVE => Request::Leave,
            RETIRE => Request::Retire {
                key: take_key(&mut r)?,
            },
            APPEND => Request::Append {
                key: take_key(&mut r)?,
                value: take_value(&mut r)?,
            },
            QUEUE_PUSH => Request::QueuePush {
                queue: take_queue(&mut r)?,
                value: take_value(&mut r)?,
            },
            QUEUE_POP => Request::QueuePop {
                queue: take_queue(&mut r)?,
                timeout_ms: r.u32()?,
            },
            QUEUE_LEN => Request::QueueLen {
                queue: take_queue(&mut r)?,
            },
            other => return Err(Error::with(ErrorKind::UnknownCode, u64::from(other), 0)),
        };
        r.end()?;
        Ok(request)
    }
}
