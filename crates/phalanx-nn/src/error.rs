//! The crate's one error type.

use std::fmt;

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A shape, label or name that does not fit: the caller's mistake.
    Usage,
    /// The [`GradSink`](crate::GradSink) refused a gradient; its own error is
    /// the [`source`](std::error::Error::source).
    Sink,
    /// A user's operation failed; its own error is the
    /// [`source`](std::error::Error::source).
    Custom,
    /// A value or gradient is NaN or infinite ([`Tape::set_anomaly`](crate::Tape::set_anomaly)).
    Anomaly,
    /// The system refused memory or threads.
    Resource,
    /// A bug of this crate.
    Internal,
}

/// An error of this crate, with a message of one sentence that names the cause.
#[derive(thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<phalanx_base::Error>,
}

impl Error {
    /// A mistake of the caller, for crates built on the engine. `message` is a sentence
    /// that names the wrong argument.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::with(ErrorKind::Usage, message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::with(ErrorKind::Internal, message)
    }

    pub(crate) fn anomaly(message: impl Into<String>) -> Self {
        Self::with(ErrorKind::Anomaly, message)
    }

    pub(crate) fn sink(message: impl Into<String>, source: phalanx_base::Error) -> Self {
        Error {
            source: Some(source),
            ..Self::with(ErrorKind::Sink, message)
        }
    }

    /// The failure of an operation outside the engine, of kind [`Custom`](ErrorKind::Custom),
    /// for crates built on the engine. `source` is the failure itself.
    pub fn custom(message: impl Into<String>, source: phalanx_base::Error) -> Self {
        Error {
            source: Some(source),
            ..Self::with(ErrorKind::Custom, message)
        }
    }

    fn with(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error {
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Debug for Error {
    /// The message, as `fn main() -> Result<(), Error>` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        phalanx_base::error::debug(self, f)
    }
}

impl From<Error> for phalanx_base::Error {
    fn from(error: Error) -> Self {
        Self::from_library(phalanx_base::ErrorKind::Failed, error)
    }
}
