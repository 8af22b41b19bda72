//! What the store answers.

use super::{check_value, message, put_keys, put_value, take_flag, take_keys, take_value};
use crate::bytes::Reader;
use crate::{Error, ErrorKind, Result};

/// One response. Borrows from the bytes it was decoded from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Response<'a> {
    /// Done; nothing to tell.
    Done,
    /// A value.
    Value(&'a [u8]),
    /// No value under this key.
    Nothing,
    /// The number after an addition.
    Number(i64),
    /// Whether the key existed.
    Existed(bool),
    /// How many keys were removed.
    Removed(u64),
    /// The deadline passed; these keys are still missing.
    Missing(Vec<&'a str>),
    /// Not done.
    Failed(Failure),
}

/// Why a store did not do what a well-formed request asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Failure {
    /// The store has [`MAX_KEYS`](super::MAX_KEYS) keys.
    TooManyKeys = 1,
    /// The store holds [`MAX_TOTAL_BYTES`](super::MAX_TOTAL_BYTES).
    StoreFull = 2,
    /// The value to add to is not a decimal number.
    NotANumber = 3,
    /// The sum does not fit 64 bits.
    AddOverflow = 4,
    /// The request itself was not understood; the server closes afterwards.
    BadRequest = 5,
}

impl Failure {
    /// All failures, in the order of their codes.
    pub const ALL: [Failure; 5] = [
        Failure::TooManyKeys,
        Failure::StoreFull,
        Failure::NotANumber,
        Failure::AddOverflow,
        Failure::BadRequest,
    ];
}

const DONE: u8 = 0x81;
const VALUE: u8 = 0x82;
const NOTHING: u8 = 0x83;
const NUMBER: u8 = 0x84;
const EXISTED: u8 = 0x85;
const REMOVED: u8 = 0x86;
const MISSING: u8 = 0x87;
const FAILED: u8 = 0x88;

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
                super::check_wait(keys.len())?;
                keys.iter().try_for_each(|key| super::check_key(key))?;
            }
            _ => {}
        }
        message(out, |out| match self {
            Response::Done => out.push(DONE),
            Response::Value(value) => {
                out.push(VALUE);
                put_value(out, value);
            }
            Response::Nothing => out.push(NOTHING),
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
        });
        Ok(())
    }

    /// Reads a body (without its length).
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
            NOTHING => Response::Nothing,
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
            other => return Err(Error::with(ErrorKind::UnknownCode, u64::from(other), 0)),
        };
        r.end()?;
        Ok(response)
    }
}
