//! The crate's one error type.

use std::fmt;

use phalanx_base::ErrorKind;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of candle, of the ranks, or of a file. It converts from and to [`phalanx_base::Error`] (`phalanx::Error`), so that
/// `?` works for both in a program, and the exit code is right.
pub struct Error(phalanx_base::Error);

impl Error {
    /// An error of the program's own; `message` is in lower case.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error(phalanx_base::Error::new(kind, message))
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Error(phalanx_base::Error::usage(message))
    }

    pub(crate) fn data(message: impl Into<String>) -> Self {
        Error(phalanx_base::Error::data(message))
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Error(phalanx_base::Error::internal(message))
    }

    /// The kind of this error: [`Failed`](ErrorKind::Failed) for those of candle.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.chain())
    }
}

impl fmt::Debug for Error {
    /// The message, as `fn main() -> Result<(), Error>` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.0)
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        // With the environment variable RUST_BACKTRACE, candle puts the whole stack into the text.
        Error(phalanx_base::Error::new(
            ErrorKind::Failed,
            error.to_string(),
        ))
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Error::new(ErrorKind::System, error.to_string())
    }
}

impl From<phalanx_ddp::Error> for Error {
    fn from(error: phalanx_ddp::Error) -> Self {
        Error(error.into())
    }
}

impl From<phalanx_comm::Error> for Error {
    fn from(error: phalanx_comm::Error) -> Self {
        Error(error.into())
    }
}

impl From<phalanx_base::Error> for Error {
    fn from(error: phalanx_base::Error) -> Self {
        Error(error)
    }
}

impl From<Error> for phalanx_base::Error {
    fn from(error: Error) -> Self {
        error.0
    }
}
