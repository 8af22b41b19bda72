//! Responses of a store.

use super::{
    Field, LENGTH_BYTES, MAX_VALUE_BYTES, check_key, check_length, check_value, check_wait, codec,
};
use crate::bytes::Reader;
use crate::{Error, ErrorKind, Result};

/// A response of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Response {
    /// Done.
    Done,
    /// The value of the key, or the element.
    Value(Vec<u8>),
    /// The values of keys with consecutive numbers, of at most [`MAX_VALUE_BYTES`](super::MAX_VALUE_BYTES) together.
    Values {
        /// At least one value.
        values: Vec<Vec<u8>>,
        /// The next key may exist.
        more: bool,
    },
    /// The key does not exist, or the queue stayed empty.
    NotFound,
    /// The sum after an addition, the length after an append, or that of a queue.
    Number(i64),
    /// Whether the key existed.
    Existed(bool),
    /// Number of removed keys.
    Removed(u64),
    /// The wait timed out; these keys are missing.
    Missing(Vec<String>),
    /// The request failed.
    Failed(Failure),
    /// For a follower: the key has this value now, or does not exist.
    Change {
        /// Number of the newest change.
        seq: u64,
        /// The key.
        key: String,
        /// The value; `None` if the key was removed.
        value: Option<Vec<u8>>,
    },
    /// For a follower: the copy is complete.
    Copied {
        /// Number of the newest change.
        seq: u64,
    },
}

/// Why a store could not do a well-formed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Failure {
    /// The store has reached its limit of keys ([`MAX_KEYS`](super::MAX_KEYS)).
    TooManyKeys = 1,
    /// The store has reached its limit of bytes ([`MAX_TOTAL_BYTES`](super::MAX_TOTAL_BYTES)).
    StoreFull = 2,
    /// The value is not a decimal number.
    NotANumber = 3,
    /// The sum does not fit 64 bits.
    AddOverflow = 4,
    /// The request is malformed; the server closes the connection.
    BadRequest = 5,
    /// The server continues without this follower; it closes the connection.
    Dropped = 6,
    /// The value would be longer than [`MAX_VALUE_BYTES`](super::MAX_VALUE_BYTES).
    ValueTooLong = 7,
}

crate::codes! {
    Failure as u8: TooManyKeys, StoreFull, NotANumber, AddOverflow, BadRequest, Dropped, ValueTooLong
}

impl Field<'_> for Failure {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self> {
        Failure::from_code(r.u8()?)
    }
}

codec! { Response:
    0x81 => Done {},
    0x82 => Value { 0: value },
    0x83 => NotFound {},
    0x84 => Number { 0: number },
    0x85 => Existed { 0: existed },
    0x86 => Removed { 0: count },
    0x87 => Missing { 0: keys },
    0x88 => Failed { 0: failure },
    0x89 => Change { seq: seq, key: key, value: value },
    0x8a => Copied { seq: seq },
    0x8b => Values { more: more, values: values },
}

impl Response {
    /// Checks the limits.
    ///
    /// # Errors
    /// [`ErrorKind::ValueTooLong`], [`ErrorKind::WaitKeys`] and those of a key.
    pub fn check(&self) -> Result<()> {
        match self {
            Response::Value(value) => check_value(value),
            Response::Values { values, .. } => {
                check_wait(values.len())?;
                let bytes = values.iter().map(Vec::len).sum();
                check_length(bytes, MAX_VALUE_BYTES, ErrorKind::ValueTooLong)
            }
            Response::Missing(keys) => {
                check_wait(keys.len())?;
                keys.iter().try_for_each(|key| check_key(key))
            }
            Response::Change { key, value, .. } => {
                check_key(key)?;
                value.as_deref().map_or(Ok(()), check_value)
            }
            _ => Ok(()),
        }
    }
}
