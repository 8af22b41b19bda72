//! Errors of the engine: those of all crates, `phalanx_base::Error`.

pub(crate) use phalanx_base::refuse;
pub use phalanx_base::{Error, ErrorKind, Result};

/// An error of what the engine called: `message` has the text of `cause`, whose kind it takes.
pub(crate) fn outside(message: String, cause: Error) -> Error {
    Error::new(cause.kind(), message).with_source(cause)
}

/// A value or gradient is NaN or infinite.
pub(crate) fn anomaly(message: String) -> Error {
    Error::new(ErrorKind::Failed, message)
}
