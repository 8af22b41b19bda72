//! The crate's error type: one kind for each way in which a message can be malformed.

use std::fmt;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A malformed message, or a wrong proof in a handshake.
///
/// Small and without heap memory, so that refusing many connections is cheap.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    found: u64,
    limit: u64,
}

/// What was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The first bytes are not those of a Phalanx message: another protocol
    /// (HTTP, TLS, ssh, a port scanner) is at the other end.
    BadMagic,
    /// Our protocol, but another version of it.
    WrongVersion,
    /// A code (frame kind, message type, role, request, response) that no
    /// version of this protocol defines.
    UnknownCode,
    /// Reserved bytes are not zero.
    ReservedNotZero,
    /// The header's checksum does not fit its bytes.
    BadCrc,
    /// A frame announces more payload than
    /// [`MAX_FRAME_BYTES`](crate::frame::MAX_FRAME_BYTES).
    FrameTooLong,
    /// `offset + length` of a frame does not fit 64 bits.
    OffsetOverflow,
    /// A known handshake message, but not the one that comes next.
    UnexpectedMessage,
    /// A message has another length than its type.
    WrongLength,
    /// The message ends before its last field.
    Truncated,
    /// Bytes follow the last field of a message.
    TrailingBytes,
    /// The other side's final hello has another nonce than its challenge.
    NonceMismatch,
    /// The initiator's proof is wrong: it does not hold the job's token.
    BadProof,
    /// The acceptor's proof is wrong: it has another job token, or another program
    /// listens there.
    TokenMismatch,
    /// A store message is longer than the limit.
    MessageTooLong,
    /// A store key is empty.
    KeyEmpty,
    /// A store key is longer than [`MAX_KEY_BYTES`](crate::store_msg::MAX_KEY_BYTES).
    KeyTooLong,
    /// A store key is not valid UTF-8.
    KeyNotUtf8,
    /// A store value is longer than [`MAX_VALUE_BYTES`](crate::store_msg::MAX_VALUE_BYTES).
    ValueTooLong,
    /// One wait names no key, or more than
    /// [`MAX_WAIT_KEYS`](crate::store_msg::MAX_WAIT_KEYS) keys.
    WaitKeys,
    /// A boolean is neither 0 nor 1.
    BadFlag,
    /// The text of a token is not 64 hexadecimal digits.
    BadTokenText,
    /// The operating system gave no random bytes.
    Random,
}

impl Error {
    pub(crate) const fn new(kind: ErrorKind) -> Self {
        Self {
            kind,
            found: 0,
            limit: 0,
        }
    }

    /// An error with the value found and the limit, or the value expected; their
    /// meaning depends on the kind.
    pub(crate) fn with(kind: ErrorKind, found: impl Into<u64>, limit: impl Into<u64>) -> Self {
        let (found, limit) = (found.into(), limit.into());
        Self { kind, found, limit }
    }

    /// Kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Debug for Error {
    /// The message, as `fn main() -> Result<(), Error>` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ErrorKind as K;
        let (found, limit) = (self.found, self.limit);
        let text = match self.kind {
            K::BadMagic => format!(
                "not a phalanx message (first bytes {found:08x}{}, expected {limit:08x}): another protocol is at the other end; check address and port",
                shown(found)
            ),
            K::WrongVersion => format!(
                "the peer speaks protocol version {found}, this build speaks {limit}: run the same phalanx version everywhere"
            ),
            K::UnknownCode => format!("unknown code {found} in a message"),
            K::ReservedNotZero => format!("reserved bytes are {found:#x} instead of zero"),
            K::BadCrc => format!("header checksum is {found:08x}, computed {limit:08x}"),
            K::FrameTooLong => format!("frame announces {found} payload bytes, the limit is {limit}"),
            K::OffsetOverflow => format!("frame offset {found} plus length {limit} does not fit 64 bits"),
            K::UnexpectedMessage => format!("unexpected handshake message of type {found}, expected type {limit}"),
            K::WrongLength => format!("message of {found} bytes, but its type has {limit}"),
            K::Truncated => format!("message ends after {found} bytes, but {limit} are needed"),
            K::TrailingBytes => format!("{found} bytes follow the last field of a message"),
            K::NonceMismatch => "the peer changed its nonce during the handshake".to_owned(),
            K::BadProof => "the peer does not hold this job's token: it belongs to another job, or is another program".to_owned(),
            K::TokenMismatch => "the job token differs, or another program listens there: give every rank of the job the same token".to_owned(),
            K::MessageTooLong => format!("store message announces {found} bytes, the limit is {limit}"),
            K::KeyEmpty => "store key is empty".to_owned(),
            K::KeyTooLong => format!("store key has {found} bytes, the limit is {limit}"),
            K::KeyNotUtf8 => "store key is not valid utf-8".to_owned(),
            K::ValueTooLong => format!("store value has {found} bytes, the limit is {limit}"),
            K::WaitKeys => format!("a wait for {found} keys, but 1 to {limit} are allowed"),
            K::BadFlag => format!("flag byte is {found}, neither 0 nor 1"),
            K::BadTokenText => "job token is not 64 hexadecimal digits (the text itself is not shown)".to_owned(),
            K::Random => format!("the operating system gave no random bytes (code {found})"),
        };
        f.write_str(&text)
    }
}

/// Four bytes as text, if they are printable.
fn shown(bytes: u64) -> String {
    let bytes = (bytes as u32).to_be_bytes();
    match std::str::from_utf8(&bytes) {
        Ok(text) if bytes.iter().all(|b| b.is_ascii_graphic() || *b == b' ') => {
            format!(" {text:?}")
        }
        _ => String::new(),
    }
}

impl std::error::Error for Error {}
