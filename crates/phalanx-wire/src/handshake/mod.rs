//! Mutual authentication of the two sides of a connection.
//!
//! Before anything else is sent, both sides prove that they have the job's
//! [`Token`](crate::Token), without sending it. The state machines do no I/O: the
//! caller moves the bytes. `docs/design/security.md` has the threat model.
//!
//! | step | from | message | body bytes | proves |
//! |---|---|---|---|---|
//! | 1 | initiator | hello: role, job, generation, group, rank, nonce, tag | 68 | nothing yet |
//! | 2 | acceptor | challenge: nonce, MAC | 64 | the acceptor has the token |
//! | 3 | initiator | proof: MAC | 32 | the initiator has the token |
//! | 4 | acceptor | welcome: its own hello, MAC | 100 | both hellos arrived unchanged |
//! | 4' | acceptor | reject: reason, MAC | 34 | the reason is the acceptor's |
//!
//! Every MAC is HMAC-SHA-256 over a direction label, the initiator's hello
//! (with its nonce) and the acceptor's nonce; the one of step 4 also covers the
//! acceptor's hello, the one of step 4' the reason. Nonces are fresh, so a
//! recorded proof cannot be replayed; labels differ, so a proof cannot be
//! reflected to its sender.
//!
//! *The acceptor proves first*, so that the initiator reports a wrong token as
//! [`ErrorKind::TokenMismatch`] and not as a closed connection. *The acceptor
//! decides last*, after the initiator's proof, so only members reach the tables of
//! ranks and learn why they are refused. The one exception is a wrong version; see
//! [`version_notice`].
//!
//! The *tag* at the end of the hello is the beginning of a MAC over the rest of
//! it. It is no proof, because a hello can be replayed, but a peer without the
//! token cannot make a valid one. An acceptor without free slots closes
//! connections without a valid tag first ([`Acceptor::tag`]), so that they cannot
//! keep members out.
//!
//! A message is a prefix of 8 bytes (magic `PHHS`, version, type, body length)
//! and a body whose length follows from its type. The prefix has the same layout
//! in all versions. No message is longer than [`MAX_MESSAGE_BYTES`].
//!
//! # Example
//!
//! ```
//! use phalanx_wire::handshake::{Acceptor, Hello, Initiator, Outcome, Role};
//! use phalanx_wire::Token;
//!
//! let token = Token::generate()?;
//! let mine = Hello::new(Role::Peer, token.job_id()).rank(1).world(2);
//! let (initiator, hello) = Initiator::start(mine, &token)?;
//! let (acceptor, challenge) = Acceptor::start(&hello, &token)?;
//! let (initiator, proof) = initiator.answer(&challenge)?;
//! let proven = acceptor.verify(&proof)?;
//! assert_eq!(proven.peer().rank, 1);
//! let theirs = Hello::new(Role::Peer, token.job_id()).rank(0).world(2);
//! let welcome = proven.welcome(theirs);
//! let Outcome::Welcome(peer) = initiator.finish(&welcome)? else { panic!() };
//! assert_eq!(peer.rank, 0);
//! # Ok::<(), phalanx_wire::Error>(())
//! ```
//!
//! *Not provided:* encryption, and authentication of the data that follows.

mod acceptor;
mod hello;
mod initiator;
mod reject;

pub use acceptor::{Acceptor, Proven, version_notice};
pub use hello::{Hello, NO_RANK, Role, TAG_BYTES};
pub use initiator::{Initiator, Outcome, Proving};
pub use reject::RejectReason;

use crate::bytes::Reader;
use crate::{Error, ErrorKind, Result};

/// Maximum length of a handshake message, prefix included.
pub const MAX_MESSAGE_BYTES: usize = 512;

/// Length of the prefix of every message.
pub const PREFIX_BYTES: usize = 8;

/// Version of the protocol: the handshake and everything after it.
pub const VERSION: u8 = 1;

/// First four bytes of every handshake message.
pub const MAGIC: [u8; 4] = *b"PHHS";

/// Length of a nonce and of a MAC.
const SECRET_BYTES: usize = 32;

/// Labels at the start of each MAC's input; they differ by direction and step.
const LABEL_HELLO: &[u8] = b"phalanx 1 initiator hello";
const LABEL_CHALLENGE: &[u8] = b"phalanx 1 acceptor challenge";
const LABEL_PROOF: &[u8] = b"phalanx 1 initiator proof";
const LABEL_WELCOME: &[u8] = b"phalanx 1 acceptor welcome";
const LABEL_REJECT: &[u8] = b"phalanx 1 acceptor reject";

/// Type of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Type {
    Hello = 1,
    Challenge = 2,
    Proof = 3,
    Welcome = 4,
    Reject = 5,
}

crate::codes! { Type as u8: Hello, Challenge, Proof, Welcome, Reject }

impl Type {
    const fn body_bytes(self) -> usize {
        match self {
            Type::Hello => Hello::BYTES,
            Type::Challenge => 2 * SECRET_BYTES,
            Type::Proof => SECRET_BYTES,
            Type::Welcome => Hello::BYTES + SECRET_BYTES,
            Type::Reject => 2 + SECRET_BYTES,
        }
    }
}

/// Which message the reading side waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaiting {
    /// The acceptor waits for step 1.
    Hello,
    /// The initiator waits for step 2.
    Challenge,
    /// The acceptor waits for step 3.
    Proof,
    /// The initiator waits for step 4.
    Verdict,
}

impl Awaiting {
    fn allows(self, kind: Type) -> bool {
        matches!(
            (self, kind),
            (Awaiting::Hello, Type::Hello)
                | (Awaiting::Challenge, Type::Challenge)
                | (Awaiting::Proof, Type::Proof)
                | (Awaiting::Verdict, Type::Welcome | Type::Reject)
        )
    }

    fn expected(self) -> Type {
        match self {
            Awaiting::Hello => Type::Hello,
            Awaiting::Challenge => Type::Challenge,
            Awaiting::Proof => Type::Proof,
            Awaiting::Verdict => Type::Welcome,
        }
    }
}

/// Decodes a prefix and returns the length of the body.
///
/// Checking the first eight bytes before reading on refuses an HTTP or TLS client
/// at once. The length is a constant of the message's type, not one that the peer
/// chose.
///
/// # Errors
/// [`ErrorKind::BadMagic`], [`WrongVersion`](ErrorKind::WrongVersion),
/// [`UnknownCode`](ErrorKind::UnknownCode),
/// [`UnexpectedMessage`](ErrorKind::UnexpectedMessage),
/// [`WrongLength`](ErrorKind::WrongLength).
pub fn body_bytes(prefix: &[u8; PREFIX_BYTES], awaiting: Awaiting) -> Result<usize> {
    let mut r = Reader::new(prefix);
    r.start(MAGIC, VERSION)?;
    let code = r.u8()?;
    let announced = r.u16()?;
    let kind = Type::from_code(code)?;
    if !awaiting.allows(kind) {
        let expected = awaiting.expected() as u8;
        return Err(Error::with(ErrorKind::UnexpectedMessage, code, expected));
    }
    if usize::from(announced) != kind.body_bytes() {
        let expected = kind.body_bytes() as u64;
        return Err(Error::with(ErrorKind::WrongLength, announced, expected));
    }
    Ok(kind.body_bytes())
}

/// Splits a message into its type and a reader over its body.
fn open(message: &[u8], awaiting: Awaiting) -> Result<(Type, Reader<'_>)> {
    let mut r = Reader::new(message);
    let prefix: [u8; PREFIX_BYTES] = r.array()?;
    body_bytes(&prefix, awaiting)?;
    let kind = if prefix[5] == Type::Reject as u8 {
        Type::Reject
    } else {
        awaiting.expected()
    };
    Ok((kind, r))
}

/// One message: prefix, then body.
fn message(kind: Type, parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    debug_assert_eq!(body.len(), kind.body_bytes());
    let length = (body.len() as u16).to_le_bytes();
    [&MAGIC[..], &[VERSION, kind as u8], &length, &body].concat()
}
