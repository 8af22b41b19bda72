//! Frame, handshake and store codecs with hard limits; no I/O, no unsafe.
//!
//! Everything that Phalanx puts on a socket is encoded and decoded here, and
//! nothing else happens here: the crate never opens, reads or writes anything
//! (the operating system's random source, for nonces and tokens, is the one
//! exception). That is what makes it possible to throw garbage at every decoder
//! in a plain unit test.
//!
//! * [`frame`]: the fixed 64-byte header in front of every payload between ranks.
//! * [`handshake`]: who are you, and can you prove it? State machines for both sides.
//! * [`store_msg`]: requests to and responses from the rendezvous store.
//! * [`Token`]: the secret of one job, which never travels.
//!
//! # Rules that every decoder keeps
//!
//! * All integers are little endian and are read field by field.
//! * No length from the wire is used before it was compared with a constant of
//!   this crate, and no allocation is larger than what really arrived.
//! * Each kind of lie has its own [`ErrorKind`], and one test named after it.
//! * Decoding accepts exactly what encoding produces: reserved bytes must be
//!   zero and nothing may follow the last field.
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
