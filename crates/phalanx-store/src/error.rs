//! The crate's error type.

use std::fmt;
use std::time::Duration;

use phalanx_wire::handshake::RejectReason;
use phalanx_wire::store_msg::{Failure, Request};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Maximum number of missing keys in a message; [`Error::missing_keys`] has all.
const KEYS_SHOWN: usize = 16;

/// Why an operation of a store, or a handshake, failed.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    missing: Vec<String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// *The caller's mistake*: an empty key, a key or value that is too long, or an
    /// invalid address.
    Usage,
    /// *The caller's mistake*: the value of the key is not a decimal number, or the
    /// sum does not fit 64 bits.
    NotANumber,
    /// *The caller's mistake*: the store has reached its limit of keys or bytes, or an
    /// append would exceed that of a value.
    LimitExceeded,
    /// *The user's mistake*: another program listens on the address.
    AddressInUse,
    /// *The user's mistake*: the other side does not have this job's token. It may
    /// belong to another job, or be another program.
    TokenMismatch,
    /// The timeout has passed: keys are missing ([`Error::missing_keys`]), a queue stayed
    /// empty, nothing listened at the address, or a handshake took too long.
    Timeout,
    /// *A peer's failure*: the store did not answer in time. Its process may be
    /// stopped or its host out of reach. This says nothing about its keys.
    NoAnswer,
    /// *A peer's failure*: the store server, or the other side of a handshake,
    /// closed the connection.
    PeerLost,
    /// The other side of a handshake has the token, but refused this side or was
    /// refused.
    Rejected(RejectReason),
    /// *A peer's failure*: the other side speaks another protocol.
    WrongProtocol,
    /// *A peer's failure*: a member broke the protocol after the handshake.
    Protocol,
    /// The server continues without this [`Follower`](crate::Follower).
    Dropped,
    /// An error of the operating system.
    Io,
    /// *Our bug.*
    Internal,
}

impl Error {
    /// An error of kind `kind`, for stores outside this crate; the message names the store.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
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

    /// A wait of `waited` for `asked` keys that timed out. `location` names the store, `missing` the keys that were
    /// missing at the end.
    pub fn missing(location: &str, asked: usize, waited: Duration, missing: Vec<String>) -> Self {
        let mut error = Error::new(
            ErrorKind::Timeout,
            format!(
                "timed out after {waited:.1?}: {} of {asked} key{} never appeared in {location}",
                missing.len(),
                if asked == 1 { "" } else { "s" },
            ),
        );
        error.0.missing = missing;
        error
    }

    /// A pop that timed out after `waited`.
    pub(crate) fn empty(location: &str, queue: &str, waited: Duration) -> Self {
        let what =
            format!("timed out after {waited:.1?}: the queue {queue:?} in {location} stayed empty");
        Error::new(ErrorKind::Timeout, what)
    }

    /// Checks the limits of a request about `key`.
    pub(crate) fn check(key: &str, request: &Request<'_>) -> Result<()> {
        request.check().map_err(|e| Error::bad_request(key, e))
    }

    /// A request beyond a limit, found before it was sent.
    pub(crate) fn bad_request(key: &str, source: phalanx_wire::Error) -> Self {
        let shown: String = key.chars().take(64).collect();
        Error::new(ErrorKind::Usage, format!("key {shown:?}: {source}")).caused_by(source)
    }

    /// A change that a [`Table`](crate::table::Table) refused.
    pub(crate) fn failed(location: &str, key: &str, failure: Failure) -> Self {
        let (kind, what) = match failure {
            Failure::TooManyKeys => (
                ErrorKind::LimitExceeded,
                "the store has reached its limit of keys; delete keys that are no longer needed",
            ),
            Failure::StoreFull => (
                ErrorKind::LimitExceeded,
                "the store has reached its limit of bytes; delete keys that are no longer needed",
            ),
            Failure::ValueTooLong => (
                ErrorKind::LimitExceeded,
                "its value would exceed the limit of 1 MiB",
            ),
            Failure::NotANumber => (ErrorKind::NotANumber, "its value is not a decimal number"),
            Failure::AddOverflow => (ErrorKind::NotANumber, "the sum does not fit 64 bits"),
            Failure::BadRequest => (
                ErrorKind::Internal,
                "the server did not understand the request; this is a bug",
            ),
            _ => (ErrorKind::Internal, "unknown failure"),
        };
        Error::new(kind, format!("key {key:?} in {location}: {what}"))
    }

    /// Puts the name of the other side in front of the message.
    pub(crate) fn context(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// Whether the connection was refused: nothing listens at the address.
    pub fn is_refused(&self) -> bool {
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            if let Some(error) = error.downcast_ref::<std::io::Error>() {
                return error.kind() == std::io::ErrorKind::ConnectionRefused;
            }
            source = error.source();
        }
        false
    }

    /// Kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The keys that were missing when a wait timed out, in the order of the request.
    /// Empty for all other errors.
    pub fn missing_keys(&self) -> &[String] {
        &self.0.missing
    }
}

impl From<phalanx_wire::Error> for Error {
    fn from(source: phalanx_wire::Error) -> Self {
        use phalanx_wire::ErrorKind as Wire;
        let kind = match source.kind() {
            Wire::TokenMismatch | Wire::BadProof => ErrorKind::TokenMismatch,
            Wire::WrongVersion => ErrorKind::Rejected(RejectReason::WrongVersion),
            Wire::Random => ErrorKind::Io,
            _ => ErrorKind::WrongProtocol,
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
        self.0.source.as_deref().map(|source| source as _)
    }
}
