//! Converts errors of the libraries to ours, with the right exit code.
//!
//! A lost peer may lie two errors deep (engine: the sink refused; reducer:
//! the bucket could not be averaged; group: rank 3 is gone), so the kind is
//! taken from the deepest error that knows.

use std::error::Error as StdError;

use crate::error::{Error, ErrorKind};

fn comm_kind(error: &phalanx_comm::Error) -> ErrorKind {
    use phalanx_comm::ErrorKind as Comm;
    match error.kind() {
        Comm::Usage => ErrorKind::Usage,
        Comm::Timeout => ErrorKind::Timeout,
        Comm::PeerLost | Comm::Aborted => ErrorKind::PeerLost,
        Comm::Io => ErrorKind::System,
        _ => ErrorKind::Failed,
    }
}

/// The kind of the first process group error in the chain, else `default`.
fn kind_within(error: &(dyn StdError + 'static), default: ErrorKind) -> ErrorKind {
    let mut next = Some(error);
    while let Some(current) = next {
        if let Some(comm) = current.downcast_ref::<phalanx_comm::Error>() {
            return comm_kind(comm);
        }
        next = current.source();
    }
    default
}

/// Our error with the library's text and causes: further lines of its message
/// become notes.
fn convert(error: impl StdError + Send + Sync + 'static, default: ErrorKind) -> Error {
    let kind = kind_within(&error, default);
    let text = error.to_string();
    let mut lines = text.lines();
    let mut ours = Error::new(kind, lines.next().unwrap_or_default());
    // Only what was not said already: the last part of a cause often is the
    // text of its own cause.
    let mut said = text.clone();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        let end = cause_text.rsplit(": ").next().unwrap_or_default();
        if !said.contains(end) {
            ours = ours.note("since", cause_text.clone());
        }
        said.push_str(&cause_text);
        source = cause.source();
    }
    let more: Vec<&str> = lines.map(str::trim).collect();
    if more.is_empty() {
        ours
    } else {
        ours.note("", more.join("\n"))
    }
}

impl From<phalanx_comm::Error> for Error {
    fn from(error: phalanx_comm::Error) -> Self {
        convert(error, ErrorKind::Failed)
    }
}

impl From<phalanx_ddp::Error> for Error {
    fn from(error: phalanx_ddp::Error) -> Self {
        let kind = match error.kind() {
            phalanx_ddp::ErrorKind::Usage => ErrorKind::Usage,
            _ => ErrorKind::Failed,
        };
        convert(error, kind)
    }
}

impl From<phalanx_global::Error> for Error {
    fn from(error: phalanx_global::Error) -> Self {
        let kind = match error.kind() {
            phalanx_global::ErrorKind::Usage => ErrorKind::Usage,
            _ => ErrorKind::Failed,
        };
        convert(error, kind)
    }
}

impl From<Box<dyn StdError + Send + Sync>> for Error {
    fn from(error: Box<dyn StdError + Send + Sync>) -> Self {
        let kind = kind_within(error.as_ref(), ErrorKind::Failed);
        Error::new(kind, error.to_string())
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Error::new(ErrorKind::System, error.to_string())
    }
}

/// As [`From`], for the comparison of ranks at the start: ranks that differ there were started
/// with different arguments, which is a usage error.
pub fn unlike(error: phalanx_ddp::Error) -> Error {
    match error.kind() {
        phalanx_ddp::ErrorKind::Mismatch => convert(error, ErrorKind::Usage),
        _ => error.into(),
    }
}

impl From<phalanx_nn::Error> for Error {
    fn from(error: phalanx_nn::Error) -> Self {
        convert(error, ErrorKind::Failed)
    }
}

impl From<phalanx_data::Error> for Error {
    fn from(error: phalanx_data::Error) -> Self {
        let kind = match error.kind() {
            phalanx_data::ErrorKind::Usage => ErrorKind::Usage,
            phalanx_data::ErrorKind::Io => ErrorKind::System,
            _ => ErrorKind::Failed,
        };
        convert(error, kind)
    }
}
