//! One error type; its kind tells whose fault it is.

use std::fmt;
use std::time::Duration;

use phalanx_wire::handshake::RejectReason;
use phalanx_wire::store_msg::Failure;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Longest list of keys that a message spells out; [`Error::missing_keys`]
/// has them all.
const KEYS_SHOWN: usize = 16;

/// Why a store, or a handshake, did not do what was asked.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    missing: Vec<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// What kind of failure it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// *The caller's mistake*: an empty or too long key, a too long value, an
    /// address that is none.
    Usage,
    /// *The caller's mistake*: the value to add to is not a decimal number, or
    /// the sum does not fit 64 bits.
    NotANumber,
    /// *The caller's mistake*: the store holds as many keys or bytes as it may.
    LimitExceeded,
    /// *The user's mistake*: another program listens on the address.
    AddressInUse,
    /// *The user's mistake*, or a stranger's address: the other side does not
    /// hold this job's token.
    TokenMismatch,
    /// The deadline passed: keys are missing (which [`Error::missing_keys`]
    /// names), nobody listened, or a handshake took too long.
    Timeout,
    /// *A peer's failure*: the store was asked and did not answer in time. It says
    /// nothing about its keys, and may answer later: its process is stopped, its
    /// host out of reach, or another process holds its file's lock.
    NoAnswer,
    /// *A peer's failure*: the store server, or the other side of a handshake,
    /// closed the connection.
    PeerLost,
    /// The other side of a handshake holds the token but refused, or was refused.
    Rejected(RejectReason),
    /// *A peer's failure*: what is at the other end does not speak our protocol.
    Stranger,
    /// *A peer's failure*: a member broke the protocol after the handshake.
    Protocol,
    /// A store file is truncated, garbled, or belongs to something else.
    Corrupt,
    /// The operating system refused something.
    Io,
    /// *Our bug.*
    Internal,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error(Box::new(Inner {
            kind,
            message: message.into(),
            missing: Vec::new(),
            source: None,
        }))
    }

    pub(crate) fn caused_by(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.0.source = Some(source.into());
        self
    }

    pub(crate) fn io(what: impl fmt::Display, source: std::io::Error) -> Self {
        Error::new(ErrorKind::Io, format!("{what}: {source}")).caused_by(source)
    }

    /// A wait that ended without all its keys. `place` names the store.
    pub(crate) fn missing(
        place: &str,
        asked: usize,
        waited: Duration,
        missing: Vec<String>,
    ) -> Self {
        let mut error = Error::new(
            ErrorKind::Timeout,
            format!(
                "timed out after {waited:.1?}: {} of {asked} key{} never appeared in {place}",
                missing.len(),
                if asked == 1 { "" } else { "s" },
            ),
        );
        error.0.missing = missing;
        error
    }

    /// A request that breaks a limit, found before it was sent.
    pub(crate) fn bad_request(key: &str, source: phalanx_wire::Error) -> Self {
        let shown: String = key.chars().take(64).collect();
        Error::new(ErrorKind::Usage, format!("key {shown:?}: {source}")).caused_by(source)
    }

    /// What a [`Table`](crate::table::Table) refused.
    pub(crate) fn failed(place: &str, key: &str, failure: Failure) -> Self {
        let (kind, what) = match failure {
            Failure::TooManyKeys => (
                ErrorKind::LimitExceeded,
                "the store has reached its limit of keys; delete what is no longer needed",
            ),
            Failure::StoreFull => (
                ErrorKind::LimitExceeded,
                "the store has reached its limit of bytes; delete what is no longer needed",
            ),
            Failure::NotANumber => (
                ErrorKind::NotANumber,
                "its value is not a decimal number, so nothing can be added",
            ),
            Failure::AddOverflow => (ErrorKind::NotANumber, "the sum does not fit 64 bits"),
            Failure::BadRequest => (
                ErrorKind::Internal,
                "the server did not understand the request; this is a bug",
            ),
            _ => (ErrorKind::Internal, "unknown failure"),
        };
        Error::new(kind, format!("key {key:?} in {place}: {what}"))
    }

    /// Puts the name of the other side in front.
    pub(crate) fn context(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    pub(crate) fn map_missing(mut self, map: impl Fn(String) -> String) -> Self {
        self.0.missing = self.0.missing.into_iter().map(map).collect();
        self
    }

    /// What kind of failure it was.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The keys that a wait missed, in the order in which they were asked for;
    /// empty for every other error.
    pub fn missing_keys(&self) -> &[String] {
        &self.0.missing
    }
}

/// What went wrong in a handshake.
impl From<phalanx_wire::Error> for Error {
    fn from(source: phalanx_wire::Error) -> Self {
        use phalanx_wire::ErrorKind as Wire;
        let kind = match source.kind() {
            Wire::TokenMismatch | Wire::BadProof => ErrorKind::TokenMismatch,
            Wire::WrongVersion => ErrorKind::Rejected(RejectReason::WrongVersion),
            Wire::Random => ErrorKind::Io,
            _ => ErrorKind::Stranger,
        };
        Error::new(kind, source.to_string()).caused_by(source)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        let missing = &self.0.missing;
        for (i, key) in missing.iter().take(KEYS_SHOWN).enumerate() {
            f.write_str(if i == 0 { "; missing: " } else { ", " })?;
            f.write_str(key)?;
        }
        match missing.len().checked_sub(KEYS_SHOWN) {
            None | Some(0) => Ok(()),
            Some(more) => write!(f, " and {more} more"),
        }
    }
}

impl fmt::Debug for Error {
    /// The message, as `fn main() -> Result<(), Error>` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = self.to_string();
        f.write_str(&message)?;
        match std::error::Error::source(self).map(ToString::to_string) {
            Some(cause) if !message.contains(&cause) => write!(f, ": {cause}"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.source {
            Some(source) => Some(&**source),
            None => None,
        }
    }
}
