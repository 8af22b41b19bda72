//! Requests to and responses from the rendezvous store.
//!
//! A message is the length of its body as a little-endian `u32`, then the body: one
//! code byte and fields. A key is a `u16` length and UTF-8 bytes, a value a `u32`
//! length and bytes. A connection carries one request at a time; the next one
//! follows the response. After [`Request::Follow`] the server sends the changes of the
//! store, and the client acknowledges them.
//!
//! The limits below apply in both directions and to every kind of store.

mod request;
mod response;

pub use request::Request;
pub use response::{Failure, Response};

use crate::bytes::Reader;
use crate::{Error, ErrorKind, Result};

/// Maximum length of a key (1 KiB).
pub const MAX_KEY_BYTES: usize = 1 << 10;
/// Maximum length of a queue's name: an element's key is `QUEUE/` and 16 hexadecimal digits.
pub const MAX_QUEUE_BYTES: usize = MAX_KEY_BYTES - 17;
/// Maximum length of a value (1 MiB).
pub const MAX_VALUE_BYTES: usize = 1 << 20;
/// Maximum length of a will's value (4 KiB); the server keeps one will for each connection.
pub const MAX_WILL_BYTES: usize = 4 << 10;
/// Maximum number of keys in one wait.
pub const MAX_WAIT_KEYS: usize = 1024;
/// Maximum number of keys in a store (128 Ki).
pub const MAX_KEYS: usize = 128 << 10;
/// Maximum total size of a store's keys and values (256 MiB).
pub const MAX_TOTAL_BYTES: u64 = 256 << 20;
/// Maximum length of a request body: a compare-and-set with a key and two values,
/// or a wait for the maximum number of keys, whichever is longer, and its fields.
pub const MAX_REQUEST_BYTES: usize = max(
    2 * MAX_VALUE_BYTES + MAX_KEY_BYTES,
    MAX_WAIT_KEYS * (MAX_KEY_BYTES + 2),
) + 64;
/// Maximum length of a response body: a key and its value, several values, or the names of
/// all keys of a wait.
pub const MAX_RESPONSE_BYTES: usize = max(
    MAX_VALUE_BYTES + 4 * MAX_WAIT_KEYS,
    MAX_WAIT_KEYS * (MAX_KEY_BYTES + 2),
) + 64;

/// Length of the length field in front of a body.
pub const LENGTH_BYTES: usize = 4;

const fn max(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// Length of the request body that follows.
///
/// # Errors
/// [`ErrorKind::MessageTooLong`]; an empty body is [`ErrorKind::Truncated`].
pub fn request_bytes(length: [u8; LENGTH_BYTES]) -> Result<usize> {
    body_bytes(length, MAX_REQUEST_BYTES)
}

/// Length of the response body that follows.
///
/// # Errors
/// [`ErrorKind::MessageTooLong`]; an empty body is [`ErrorKind::Truncated`].
pub fn response_bytes(length: [u8; LENGTH_BYTES]) -> Result<usize> {
    body_bytes(length, MAX_RESPONSE_BYTES)
}

fn body_bytes(length: [u8; LENGTH_BYTES], limit: usize) -> Result<usize> {
    let announced = u32::from_le_bytes(length);
    if announced == 0 {
        return Err(Error::with(ErrorKind::Truncated, 0u8, 1u8));
    }
    check_length(announced as usize, limit, ErrorKind::MessageTooLong)?;
    Ok(announced as usize)
}

/// Checks a key against the limits: 1 to [`MAX_KEY_BYTES`] bytes.
///
/// # Errors
/// [`ErrorKind::KeyEmpty`], [`ErrorKind::KeyTooLong`].
pub fn check_key(key: &str) -> Result<()> {
    if key.is_empty() {
        return Err(Error::new(ErrorKind::KeyEmpty));
    }
    check_prefix(key)
}

/// Checks a key prefix. An empty one is allowed and matches all keys.
///
/// # Errors
/// [`ErrorKind::KeyTooLong`].
pub fn check_prefix(prefix: &str) -> Result<()> {
    check_length(prefix.len(), MAX_KEY_BYTES, ErrorKind::KeyTooLong)
}

/// Checks the name of a queue: 1 to [`MAX_QUEUE_BYTES`] bytes.
///
/// # Errors
/// [`ErrorKind::KeyEmpty`], [`ErrorKind::KeyTooLong`].
pub fn check_queue(queue: &str) -> Result<()> {
    check_key(queue)?;
    check_length(queue.len(), MAX_QUEUE_BYTES, ErrorKind::KeyTooLong)
}

fn check_length(length: usize, limit: usize, error: ErrorKind) -> Result<()> {
    match length <= limit {
        true => Ok(()),
        false => Err(Error::with(error, length as u64, limit as u64)),
    }
}

/// Checks the length of a value.
///
/// # Errors
/// [`ErrorKind::ValueTooLong`].
pub fn check_value(value: &[u8]) -> Result<()> {
    check_length(value.len(), MAX_VALUE_BYTES, ErrorKind::ValueTooLong)
}

/// Checks the length of a will's value.
///
/// # Errors
/// [`ErrorKind::ValueTooLong`].
pub fn check_will(value: &[u8]) -> Result<()> {
    check_length(value.len(), MAX_WILL_BYTES, ErrorKind::ValueTooLong)
}

/// Checks the number of keys in one wait: 1 to [`MAX_WAIT_KEYS`].
///
/// # Errors
/// [`ErrorKind::WaitKeys`].
pub fn check_wait(keys: usize) -> Result<()> {
    if keys == 0 {
        return Err(Error::with(ErrorKind::WaitKeys, 0u8, MAX_WAIT_KEYS as u64));
    }
    check_length(keys, MAX_WAIT_KEYS, ErrorKind::WaitKeys)
}

/// A field of a message.
trait Field<'a>: Sized {
    /// The value is within the limits.
    fn put(&self, out: &mut Vec<u8>);
    fn take(r: &mut Reader<'a>) -> Result<Self>;
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Field<'_> for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            fn take(r: &mut Reader<'_>) -> Result<Self> {
                Ok(<$number>::from_le_bytes(r.array()?))
            }
        }
    )*};
}
numbers!(u32, u64, i64);

impl Field<'_> for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn take(r: &mut Reader<'_>) -> Result<Self> {
        match r.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Error::with(ErrorKind::BadFlag, other, 1u8)),
        }
    }
}

/// A key, or what is a part of one.
impl<'a> Field<'a> for &'a str {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.len() as u16).to_le_bytes());
        out.extend_from_slice(self.as_bytes());
    }

    fn take(r: &mut Reader<'a>) -> Result<Self> {
        let length = usize::from(r.u16()?);
        check_length(length, MAX_KEY_BYTES, ErrorKind::KeyTooLong)?;
        std::str::from_utf8(r.take(length)?).map_err(|_| Error::new(ErrorKind::KeyNotUtf8))
    }
}

impl<'a> Field<'a> for &'a [u8] {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self);
    }

    fn take(r: &mut Reader<'a>) -> Result<Self> {
        let length = r.u32()? as usize;
        check_length(length, MAX_VALUE_BYTES, ErrorKind::ValueTooLong)?;
        r.take(length)
    }
}

impl Field<'_> for String {
    fn put(&self, out: &mut Vec<u8>) {
        self.as_str().put(out);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self> {
        <&str>::take(r).map(str::to_owned)
    }
}

impl Field<'_> for Vec<u8> {
    fn put(&self, out: &mut Vec<u8>) {
        self.as_slice().put(out);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self> {
        <&[u8]>::take(r).map(<[u8]>::to_vec)
    }
}

impl<'a, T: Field<'a>> Field<'a> for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(r: &mut Reader<'a>) -> Result<Self> {
        bool::take(r)?.then(|| T::take(r)).transpose()
    }
}

impl<'a, T: Field<'a>> Field<'a> for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.len() as u16).to_le_bytes());
        self.iter().for_each(|key| key.put(out));
    }

    fn take(r: &mut Reader<'a>) -> Result<Self> {
        let count = usize::from(r.u16()?);
        check_wait(count)?;
        // A key takes at least two bytes, so this reserves no more than was received.
        let mut keys = Vec::with_capacity(count.min(r.left() / 2));
        for _ in 0..count {
            keys.push(T::take(r)?);
        }
        Ok(keys)
    }
}

/// Encodes and decodes messages, by their codes and fields.
macro_rules! codec {
    ($message:ty: $($code:literal => $variant:ident { $($field:tt: $value:ident),* },)*) => {
        impl<'a> $message {
            /// Appends length and body to `out`.
            ///
            /// # Errors
            /// As [`check`](Self::check); `out` is unchanged then.
            pub fn encode(&self, out: &mut Vec<u8>) -> Result<()> {
                self.check()?;
                let start = out.len();
                out.extend_from_slice(&[0; LENGTH_BYTES]);
                match self {
                    $(Self::$variant { $($field: $value),* } => {
                        out.push($code);
                        $($value.put(out);)*
                    })*
                }
                let bytes = out.len() - start - LENGTH_BYTES;
                // Every body is below the limits, far below 4 GiB.
                let length = (bytes as u32).to_le_bytes();
                out[start..start + LENGTH_BYTES].copy_from_slice(&length);
                Ok(())
            }

            /// Decodes a body (without its length).
            ///
            /// # Errors
            /// [`ErrorKind::UnknownCode`], [`Truncated`](ErrorKind::Truncated),
            /// [`TrailingBytes`](ErrorKind::TrailingBytes), [`BadFlag`](ErrorKind::BadFlag),
            /// [`KeyNotUtf8`](ErrorKind::KeyNotUtf8) and those of [`check`](Self::check).
            pub fn decode(body: &'a [u8]) -> Result<Self> {
                let mut r = Reader::new(body);
                let message = match r.u8()? {
                    $($code => Self::$variant { $($field: Field::take(&mut r)?),* },)*
                    other => return Err(Error::with(ErrorKind::UnknownCode, other, 0u8)),
                };
                r.end()?;
                message.check()?;
                Ok(message)
            }
        }
    };
}
use codec;
