//! The crate's one error type.

use std::fmt;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, for callers that must decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Shapes, placements or SBPs that do not fit.
    Usage,
    /// The ranks disagree about a tensor.
    Mismatch,
    /// A collective failed; [`Error::comm`] has the details.
    Comm,
    /// An operation of the engine failed; its error is the source.
    Engine,
    /// A file could not be read or written, is damaged, or is of another model. On the rank where it
    /// happened the source is the error of phalanx-checkpoint.
    File,
}

/// A failure of a global tensor.
#[derive(thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Cause>,
}

type Cause = Box<dyn std::error::Error + Send + Sync>;

impl Error {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::with(ErrorKind::Usage, message, None)
    }

    pub(crate) fn mismatch(message: impl Into<String>) -> Self {
        Self::with(ErrorKind::Mismatch, message, None)
    }

    pub(crate) fn comm_while(what: impl Into<String>, cause: phalanx_comm::Error) -> Self {
        Self::with(ErrorKind::Comm, what, Some(cause.into()))
    }

    /// The same in other words.
    pub(crate) fn with_message(self, message: String) -> Self {
        Error { message, ..self }
    }

    /// An error of phalanx-checkpoint.
    pub(crate) fn file(error: phalanx_base::Error) -> Self {
        Error {
            kind: ErrorKind::File,
            ..Self::from(error)
        }
    }

    pub(crate) fn with(kind: ErrorKind, message: impl Into<String>, source: Option<Cause>) -> Self {
        Error {
            kind,
            message: message.into(),
            source,
        }
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The collective's own error, when one failed.
    pub fn comm(&self) -> Option<&phalanx_comm::Error> {
        self.source.as_ref()?.downcast_ref()
    }
}

/// An error of the engine.
impl From<phalanx_base::Error> for Error {
    fn from(error: phalanx_base::Error) -> Self {
        let message = error.to_string();
        Self::with(ErrorKind::Engine, message, Some(error.into()))
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
        let kind = match (error.comm(), error.kind) {
            (Some(comm), _) => Self::from(comm.clone()).kind(),
            (_, ErrorKind::Usage) => Kind::Usage,
            // Of a file that another rank could not read or write.
            (None, ErrorKind::File) if error.source.is_none() => Kind::PeerLost,
            _ => Kind::Failed,
        };
        Self::from_library(kind, error)
    }
}

/// The usage error of an operation on global tensors.
pub(crate) fn refuse<T>(what: impl Into<String>) -> phalanx_nn::Result<T> {
    Err(Error::usage(what).into())
}
