//! Frame, handshake and store codecs with hard limits; no I/O, no unsafe.
//!
//! Everything that Phalanx puts on a socket is encoded and decoded here. The
//! crate performs no I/O (except for random bytes from the operating system, for
//! nonces and tokens), so every decoder can be tested with malformed input in a
//! plain unit test.
//!
//! * [`frame`]: the fixed 64-byte header in front of every payload between ranks.
//! * [`handshake`]: mutual authentication by the job token, as state machines.
//! * [`store_msg`]: requests to and responses from the rendezvous store.
//! * [`Token`]: the secret of one job, which is never sent.
//!
//! # Rules of every decoder
//!
//! * All integers are little endian and are read field by field.
//! * A length from the wire is compared with a limit of this crate before it is
//!   used, and no allocation is larger than the bytes received.
//! * Each kind of malformed input has its own [`ErrorKind`] and its own test.
//! * Decoding accepts exactly what encoding produces: reserved bytes are zero
//!   and nothing follows the last field.
//!
//! # Example
//!
//! ```
//! use phalanx_wire::frame::{Header, Kind};
//!
//! let mut header = Header::new(Kind::Data);
//! header.seq = 7;
//! header.length = 1024;
//! let bytes = header.encode();
//! assert_eq!(Header::decode(&bytes)?, header);
//! # Ok::<(), phalanx_wire::Error>(())
//! ```
#![forbid(unsafe_code)]

/// The variants of an enumeration and their codes in messages.
macro_rules! codes {
    ($kind:ident as $code:ty: $($variant:ident),*) => {
        impl $kind {
            /// All of them, in the order of their codes.
            pub const ALL: [$kind; [$($kind::$variant),*].len()] = [$($kind::$variant),*];

            /// The one with this code.
            ///
            /// # Errors
            /// [`ErrorKind::UnknownCode`](crate::ErrorKind::UnknownCode).
            pub fn from_code(code: $code) -> $crate::Result<Self> {
                let found = Self::ALL.into_iter().find(|known| *known as $code == code);
                let unknown = $crate::ErrorKind::UnknownCode;
                found.ok_or($crate::Error::with(unknown, code, 0u8))
            }
        }
    };
}
use codes;

mod bytes;
mod error;
pub mod frame;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod handshake;
pub mod store_msg;
mod token;

pub use error::{Error, ErrorKind, Result};
pub use token::Token;
