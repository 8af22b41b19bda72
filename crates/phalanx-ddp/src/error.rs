//! The crate's one error type.

use std::fmt;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Occurs when the caller used the reducer wrongly: a parameter without a
    /// gradient, a gradient reported twice, sizes that do not fit.
    Usage,
    /// Occurs when ranks disagree on model, options or weights.
    Mismatch,
    /// Occurs when a collective failed; [`Error::comm`] has the details.
    Comm,
    /// Occurs when a part of the optimizer state was lost with all ranks that had it.
    StateLost,
}

/// A failure of the reducer or the wrapper.
#[derive(thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
    #[source]
    comm: Option<phalanx_comm::Error>,
}

impl Error {
    /// A wrong use, for a [`GradientHook`](crate::GradientHook) of your own.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::with(ErrorKind::Usage, message, None)
    }

    pub(crate) fn mismatch(message: impl Into<String>) -> Self {
        Self::with(ErrorKind::Mismatch, message, None)
    }

    #[cfg(feature = "nn")]
    pub(crate) fn state_lost(message: impl Into<String>) -> Self {
        Self::with(ErrorKind::StateLost, message, None)
    }

    /// A collective that failed; `what` says what it was for. For a [`GradientHook`](crate::GradientHook) of your own.
    pub fn comm_while(what: impl Into<String>, cause: phalanx_comm::Error) -> Self {
        Self::with(ErrorKind::Comm, what, Some(cause))
    }

    fn with(
        kind: ErrorKind,
        message: impl Into<String>,
        comm: Option<phalanx_comm::Error>,
    ) -> Self {
        Error {
            kind,
            message: message.into(),
            comm,
        }
    }

    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The collective's own error, when one failed.
    pub fn comm(&self) -> Option<&phalanx_comm::Error> {
        self.comm.as_ref()
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
        use phalanx_base::ErrorKind as Kind;
        let kind = match (&error.comm, error.kind) {
            (Some(comm), _) => Self::from(comm.clone()).kind(),
            (None, ErrorKind::Usage) => Kind::Usage,
            (None, ErrorKind::StateLost) => Kind::PeerLost,
            (None, _) => Kind::Failed,
        };
        Self::from_library(kind, error)
    }
}
