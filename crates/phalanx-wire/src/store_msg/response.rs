//! Responses of a store.

use super::{
    check_key, check_value, check_wait, message, put_key, put_keys, put_optional, put_value,
    take_flag, take_key, take_keys, take_optional, take_value,
};
use crate::bytes::Reader;
use crate::{Error, ErrorKind, Result};

/// A response of a store. Borrows from the bytes it was decoded from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Response<'a> {
    /// Done.
    Done,
    /// The value of the key, or the element.
    Value(&'a [u8]),
    /// The key does not exist, or the queue stayed empty.
    NotFound,
    /// The sum after an addition, the length after an append, or that of a queue.
    Number(i64),
    /// Whether the key existed.
    Existed(bool),
    /// Number of removed keys.
    Removed(u64),
    /// The wait timed out; these keys are missing.
    Missing(Vec<&'a str>),
    /// The request failed.
    Failed(Failure),
    /// For a follower: the key has this value now, or does not exist.
    Change {
        /// Number of the newest change.
        seq: u64,
        /// The key.
        key: &'a str,
        /// The value; `None` if the key was removed.
        value: Option<&'a [u8]>,
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
    /// The server goes on without this follower; it closes the connection.
    Dropped = 6,
    /// The value would be longer than [`MAX_VALUE_BYTES`](super::MAX_VALUE_BYTES).
    ValueTooLong = 7,
}

impl Failure {
    /// All failures, in the order of their codes.
    pub const ALL: [Failure; 7] = [
        Failure::TooManyKeys,
        Failure::StoreFull,
        Failure::NotANumber,
        Failure::AddOverflow,
        Failure::BadRequest,
        Failure::Dropped,
        Failure::ValueTooLong,
    ];
}

const DONE: u8 = 0x81;
const VALUE: u8 = 0x82;
const NOT_FOUND: u8 = 0x83;
const NUMBER: u8 = 0x84;
const EXISTED: u8 = 0x85;
const REMOVED: u8 = 0x86;
const MISSING: u8 = 0x87;
const FAILED: u8 = 0x88;
const CHANGE: u8 = 0x89;
const COPIED: u8 = 0x8a;

impl<'a> Response<'a> {
    /// Appends length and body to `out`.
    ///
    /// # Errors
    /// [`ErrorKind::ValueTooLong`], [`ErrorKind::WaitKeys`] and those of a key;
    /// `out` is unchanged then.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<()> {
        match self {
            Response::Value(value) => check_value(value)?,
            Response::Missing(keys) => {
                check_wait(keys.len())?;
                keys.iter().try_for_each(|key| check_key(key))?;
            }
            Response::Change { key, value, .. } => {
                check_key(key)?;
                value.map_or(Ok(()), check_value)?;
            }
            _ => {}
        }
        message(out, |out| match self {
            Response::Done => out.push(DONE),
            Response::Value(value) => {
                out.push(VALUE);
                put_value(out, value);
            }
            Response::NotFound => out.push(NOT_FOUND),
            Response::Number(number) => {
                out.push(NUMBER);
                out.extend_from_slice(&number.to_le_bytes());
            }
            Response::Existed(existed) => out.extend_from_slice(&[EXISTED, u8::from(*existed)]),
            Response::Removed(count) => {
                out.push(REMOVED);
                out.extend_from_slice(&count.to_le_bytes());
            }
            Response::Missing(keys) => {
                out.push(MISSING);
                put_keys(out, keys);
            }
            Response::Failed(failure) => out.extend_from_slice(&[FAILED, *failure as u8]),
            Response::Change { seq, key, value } => {
                out.push(CHANGE);
                out.extend_from_slice(&seq.to_le_bytes());
                put_key(out, key);
                put_optional(out, *value);
            }
            Response::Copied { seq } => {
                out.push(COPIED);
                out.extend_from_slice(&seq.to_le_bytes());
            }
        });
        Ok(())
    }

    /// Decodes a body (without its length).
    ///
    /// # Errors
    /// [`ErrorKind::UnknownCode`], [`Truncated`](ErrorKind::Truncated),
    /// [`TrailingBytes`](ErrorKind::TrailingBytes),
    /// [`ValueTooLong`](ErrorKind::ValueTooLong), [`BadFlag`](ErrorKind::BadFlag),
    /// [`WaitKeys`](ErrorKind::WaitKeys) and those of a key.
    pub fn decode(body: &'a [u8]) -> Result<Self> {
        let mut r = Reader::new(body);
        let response = match r.u8()? {
            DONE => Response::Done,
            VALUE => Response::Value(take_value(&mut r)?),
            NOT_FOUND => Response::NotFound,
            NUMBER => Response::Number(i64::from_le_bytes(r.array()?)),
            EXISTED => Response::Existed(take_flag(&mut r)?),
            REMOVED => Response::Removed(r.u64()?),
            MISSING => Response::Missing(take_keys(&mut r)?),
            FAILED => {
                let code = r.u8()?;
                let failure = Failure::ALL.into_iter().find(|f| *f as u8 == code);
                Response::Failed(failure.ok_or(Error::with(
                    ErrorKind::UnknownCode,
                    u64::from(code),
                    0,
                ))?)
            }
            CHANGE => Response::Change {
                seq: r.u64()?,
                key: take_key(&mut r)?,
                value: take_optional(&mut r)?,
            },
            COPIED => Response::Copied { seq: r.u64()? },
            other => return Err(Error::with(ErrorKind::UnknownCode, u64::from(other), 0)),
        };
        r.end()?;
        Ok(response)
    }
}
