//! The crate's one error type.

use std::fmt;
use std::io;
use std::path::Path;

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The user's mistake: a missing folder, an invalid setting.
    Usage,
    /// A file is truncated, damaged, of another format, or of another model.
    Data,
    /// The disk, the quota or the size limit of files is exceeded.
    DiskFull,
    /// The operating system could not read, write or start a thread.
    Io,
    /// A bug of this crate, or a data set that panicked.
    Internal,
}

/// An error: one sentence that names the cause; further lines say what to do.
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of this kind, also for data sets outside this crate.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// Kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Usage, message)
    }

    pub(crate) fn data(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Data, message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// An error for a file that cannot be opened; `what` names it, for example
    /// `checkpoint`.
    pub(crate) fn not_opened(what: &str, path: &Path, source: io::Error) -> Self {
        let shown = path.display();
        let message = match source.kind() {
            io::ErrorKind::NotFound => format!("no {what} {shown}"),
            // An error of `open_regular`.
            io::ErrorKind::InvalidInput => format!("cannot read {shown}: {source}"),
            _ => return Self::io("cannot read", path, source),
        };
        Self::usage(message).with_source(source)
    }

    /// An error of a system call on `path`; `action` is for example "cannot write".
    pub(crate) fn io(action: &str, path: &Path, source: io::Error) -> Self {
        let full = match source.kind() {
            io::ErrorKind::StorageFull => Some("the disk is full"),
            io::ErrorKind::QuotaExceeded => Some("the disk quota is used up"),
            io::ErrorKind::FileTooLarge => Some("the file would exceed the size limit"),
            _ => None,
        };
        let path = path.display();
        match full {
            Some(why) => Self::new(
                ErrorKind::DiskFull,
                format!("{action} {path}: {why}\n  free some space or choose another folder"),
            ),
            None => Self::new(ErrorKind::Io, format!("{action} {path}: {source}")),
        }
        .with_source(source)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::new(ErrorKind::Io, error.to_string()).with_source(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
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
        match &self.source {
            Some(source) => Some(source.as_ref()),
            None => None,
        }
    }
}
