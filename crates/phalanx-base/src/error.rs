//! Errors, as they are printed at a terminal.
//!
//! One `error: ...` line, then indented lines with a label of at most eight
//! columns (`so`, `perhaps`, `fix`, ...).

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

use crate::format;
use crate::text::visible;

/// A result with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of an error, which decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The job itself failed (a rank ended with an error of its own).
    Failed,
    /// The command line, the environment or a file named by them is wrong.
    Usage,
    /// A rank or a node died or became unreachable.
    PeerLost,
    /// A deadline passed.
    Timeout,
    /// A signal asked the program to stop (Ctrl-C, SIGTERM, SIGHUP, SIGQUIT).
    Interrupted,
    /// The operating system refused something that should have worked.
    System,
    /// The disk, the quota or the size limit of files is exceeded.
    DiskFull,
    /// A file is truncated, damaged, of another format, or of another model.
    Data,
    /// A bug of Phalanx, or a data set that panicked.
    Internal,
    /// The job stopped early because it was asked to, and everything is saved: a success.
    Stopped,
}

impl ErrorKind {
    /// The exit code of the stable contract, as `phalanx --help` shows it.
    pub fn exit_code(self) -> u8 {
        match self {
            ErrorKind::Stopped => 0,
            ErrorKind::Failed
            | ErrorKind::System
            | ErrorKind::DiskFull
            | ErrorKind::Data
            | ErrorKind::Internal => 1,
            ErrorKind::Usage => 2,
            ErrorKind::PeerLost => 3,
            ErrorKind::Timeout => 4,
            ErrorKind::Interrupted => 130,
        }
    }

    /// The kind that ends with `code`; everything outside the contract is a
    /// failed job.
    pub fn from_exit_code(code: u8) -> Self {
        match code {
            2 => ErrorKind::Usage,
            3 => ErrorKind::PeerLost,
            4 => ErrorKind::Timeout,
            130 => ErrorKind::Interrupted,
            _ => ErrorKind::Failed,
        }
    }
}

/// Returns an error of kind [`Usage`](ErrorKind::Usage) from the function, with a message as of [`format!`].
#[macro_export]
macro_rules! refuse {
    ($($message:tt)*) => {
        return Err($crate::Error::usage(::std::format!($($message)*)))
    };
}
pub use crate::refuse;

/// An error: a message, a cause, and notes (consequence, likely reason, fix).
pub struct Error {
    inner: Box<Inner>,
}

struct Inner {
    kind: ErrorKind,
    message: String,
    notes: Vec<(String, String)>,
    /// It has been printed.
    printed: bool,
    source: Option<Box<dyn StdError + Send + Sync>>,
    /// The message and the notes say what the source says.
    says_source: bool,
}

impl Error {
    /// `message` is lower case and names the culprit; its further lines become a note.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let mut inner = Inner {
            kind,
            message: message.into(),
            notes: Vec::new(),
            printed: false,
            source: None,
            says_source: false,
        };
        if let Some((first, more)) = inner.message.split_once('\n') {
            let more: Vec<&str> = more.lines().map(str::trim).collect();
            inner.notes.push((String::new(), more.join("\n")));
            inner.message = first.to_owned();
        }
        Error {
            inner: Box::new(inner),
        }
    }

    /// An error of kind [`Usage`](ErrorKind::Usage).
    pub fn usage(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Usage, message)
    }

    /// An error of kind [`Data`](ErrorKind::Data).
    pub fn data(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Data, message)
    }

    /// An error of kind [`Internal`](ErrorKind::Internal).
    pub fn internal(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Internal, message)
    }

    /// An error for a file that cannot be opened; `what` names it, for example `checkpoint`.
    pub fn not_opened(what: &str, path: &Path, source: io::Error) -> Self {
        let shown = path.display();
        let message = match source.kind() {
            io::ErrorKind::NotFound => format!("no {what} {shown}"),
            // An error of `files::open_regular`.
            io::ErrorKind::InvalidInput => format!("cannot read {shown}: {source}"),
            _ => return Self::io("cannot read", path, source),
        };
        Self::usage(message).with_source(source)
    }

    /// An error of a system call on `path`; `action` is for example "cannot write".
    pub fn io(action: &str, path: &Path, source: io::Error) -> Self {
        let full = match source.kind() {
            io::ErrorKind::StorageFull => Some("the disk is full"),
            io::ErrorKind::QuotaExceeded => Some("the disk quota is used up"),
            io::ErrorKind::FileTooLarge => Some("the file would exceed the size limit"),
            _ => None,
        };
        let path = path.display();
        match full {
            Some(why) => Self::new(ErrorKind::DiskFull, format!("{action} {path}: {why}"))
                .with_source(source)
                .note("", "free some space or choose another folder"),
            None => Self::new(ErrorKind::System, format!("{action} {path}: {source}"))
                .with_source(source),
        }
    }

    /// The error of a library, with its text and causes: further lines of its message become notes. Its kind is that of the
    /// first [`Error`] among the causes, else `kind`. `error` is the [`source`](StdError::source).
    ///
    /// A lost peer may lie two errors deep: the engine says that a gradient was refused, the reducer that a bucket could not be
    /// averaged, and the process group that rank 3 is gone.
    pub fn from_library(kind: ErrorKind, error: impl StdError + Send + Sync + 'static) -> Self {
        let text = error.to_string();
        let mut ours = Error::new(kind_within(&error).unwrap_or(kind), &*text);
        // After the causes.
        let more = std::mem::take(&mut ours.inner.notes);
        ours.add_causes(text, error.source());
        ours.inner.notes.extend(more);
        ours.inner.says_source = true;
        ours.inner.source = Some(Box::new(error));
        ours
    }

    /// Adds the cause; what the message does not say of it becomes a note.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.add_causes(self.inner.message.clone(), Some(&source));
        self.inner.says_source = true;
        self.inner.source = Some(Box::new(source));
        self
    }

    /// Adds a note for each cause from `next` on whose text is not in `said` already. The last part of a cause often is the
    /// text of its own cause.
    fn add_causes(&mut self, mut said: String, mut next: Option<&(dyn StdError + 'static)>) {
        while let Some(cause) = next {
            let text = cause.to_string();
            let end = text.rsplit(": ").next().unwrap_or_default();
            if !said.contains(end) {
                self.inner.notes.push(("since".to_owned(), text.clone()));
            }
            said.push_str(&text);
            next = cause.source();
        }
    }

    /// Ends a program early with success, without further output: it was asked to stop.
    pub fn stopped() -> Self {
        Error::new(ErrorKind::Stopped, "stopped as asked").printed()
    }

    /// Adds an indented line; `text` may have several lines, and an empty
    /// `label` leaves it without a column of its own.
    pub fn note(mut self, label: &str, text: impl Into<String>) -> Self {
        self.inner.notes.push((label.to_owned(), text.into()));
        self.inner.printed = false;
        self
    }

    /// The text of the first note with this label.
    pub fn note_of(&self, label: &str) -> Option<&str> {
        let note = self.inner.notes.iter().find(|(known, _)| known == label);
        note.map(|(_, text)| &**text)
    }

    /// Marks it as printed: it is not printed again, unless a note is added. It still ends
    /// the program with its exit code.
    pub fn printed(mut self) -> Self {
        self.inner.printed = true;
        self
    }

    /// Whether it has been printed.
    pub fn is_printed(&self) -> bool {
        self.inner.printed
    }

    /// Chains the cause; it is printed on the same line.
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.inner.says_source = false;
        self.inner.source = Some(source.into());
        self
    }

    /// The same error with kind [`Usage`](ErrorKind::Usage).
    pub fn into_usage(mut self) -> Self {
        self.inner.kind = ErrorKind::Usage;
        self
    }

    /// The error's kind.
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// The code the process should end with.
    pub fn exit_code(&self) -> u8 {
        self.inner.kind.exit_code()
    }

    /// The whole chain on one line, without the `error: `.
    pub fn chain(&self) -> String {
        let mut line = self.inner.message.clone();
        let mut next = self.source().filter(|_| !self.inner.says_source);
        while let Some(cause) = next {
            let text = cause.to_string();
            // Some sources repeat their own source in their text.
            if !line.contains(&text) {
                line.push_str(": ");
                line.push_str(&text);
            }
            next = cause.source();
        }
        line
    }

    /// The text as it is printed, with a final newline.
    pub fn render(&self) -> String {
        let mut text = format!("error: {}\n", self.chain());
        for (label, body) in &self.inner.notes {
            for (index, line) in body.lines().enumerate() {
                let own = if index == 0 { label.as_str() } else { "" };
                let line = if label.is_empty() {
                    format!("  {line}")
                } else {
                    format!("  {own:<7} {line}")
                };
                text.push_str(line.trim_end());
                text.push('\n');
            }
        }
        if let Some(way_out) = self.limit() {
            text.push_str(&format!("  try     {way_out}\n"));
        }
        text
    }

    /// The fix, where a limit of the system was reached.
    fn limit(&self) -> Option<String> {
        let mut line = self.chain();
        for (_, text) in &self.inner.notes {
            if text.contains("ulimit") {
                return None;
            }
            line.push_str(text);
        }
        let has = |words: &str| line.contains(words);
        // As the system names ENOMEM, and what the standard library does without memory.
        if ["(os error 12)", "memory allocation of ", "by SIGABRT"]
            .iter()
            .any(|words| has(words))
        {
            return address_space();
        }
        // As it names EMFILE, and EAGAIN where there is to be one more process or thread.
        let flag = match has("Too many open files (os error 24)") {
            true => "-n",
            false if has("Resource temporarily unavailable (os error 11)") && has("start") => {
                // Also what a thread gets whose stack does not fit.
                if let Some(way_out) = address_space() {
                    return Some(way_out);
                }
                "-u"
            }
            false => return None,
        };
        Some(format!(
            "a higher limit: `ulimit {flag}` shows it; `ulimit {flag} N` in this shell, or LimitNOFILE= and TasksMax= of its service"
        ))
    }

    /// Prints it to standard error, unless it has been printed; a closed standard error is ignored.
    pub fn print(&self) {
        if self.inner.printed {
            return;
        }
        let _ = std::io::stderr().write_all(visible(&self.render()).as_bytes());
    }
}

/// An error's `Debug` form, as `fn main() -> Result<(), Error>` prints it: the message, and its cause unless the message has it.
///
/// # Errors
///
/// Those of `f`.
pub fn debug(error: &dyn StdError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let message = error.to_string();
    f.write_str(&message)?;
    match error.source().map(ToString::to_string) {
        Some(cause) if !message.contains(&cause) => write!(f, ": {cause}"),
        _ => Ok(()),
    }
}

impl fmt::Debug for Error {
    /// As it is printed, notes included: what `fn main() -> Result<(), Error>` shows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.render();
        f.write_str(text.strip_prefix("error: ").unwrap_or(&text).trim_end())
    }
}

/// The fix, where the address space of a process is limited.
fn address_space() -> Option<String> {
    let bytes = getrlimit(Resource::As).current?;
    Some(format!(
        "a higher limit: `ulimit -v` allows each process {} of address space; `ulimit -v unlimited` in this shell, or LimitAS= of its service",
        format::bytes(usize::try_from(bytes).unwrap_or(usize::MAX))
    ))
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.inner.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.inner.source.as_deref().map(|source| source as _)
    }
}

/// The kind of the first [`Error`] in the chain.
fn kind_within(error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(ours) = error.downcast_ref::<Error>() {
            return Some(ours.kind());
        }
        next = error.source();
    }
    None
}

impl From<Box<dyn StdError + Send + Sync>> for Error {
    fn from(error: Box<dyn StdError + Send + Sync>) -> Self {
        let kind = kind_within(error.as_ref()).unwrap_or(ErrorKind::Failed);
        Error::new(kind, error.to_string())
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Error::new(ErrorKind::System, error.to_string()).with_source(error)
    }
}

/// Makes the error with `message` of what a call of the system or a library gave.
pub fn system<E>(message: impl Into<String>) -> impl FnOnce(E) -> Error
where
    E: Into<Box<dyn StdError + Send + Sync>>,
{
    let message = message.into();
    move |cause| Error::new(ErrorKind::System, message).caused_by(cause)
}

/// The error at `span` of the TOML text of `file`, with the line and a key that is there twice.
pub fn malformed(file: &str, text: &str, span: Option<Range<usize>>, message: &str) -> Error {
    let (span, message) = (span.unwrap_or_default(), message.trim());
    let line = text.get(..span.start).unwrap_or(text).matches('\n').count() + 1;
    let key = text.get(span).filter(|_| message == "duplicate key");
    let key = key.map(|key| format!(" {key}")).unwrap_or_default();
    Error::usage(format!("{file}:{line}: {message}{key}"))
}

/// Checks that `value` is in `1..=largest`.
///
/// # Errors
///
/// Usage, naming `flag`.
pub fn check_count(flag: &str, value: usize, largest: usize) -> Result<()> {
    if value == 0 {
        Err(Error::usage(format!("{flag} must be at least 1")))
    } else if value > largest {
        Err(Error::usage(format!(
            "{flag} can be at most {largest} here, not {value}"
        )))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_is_one_line_and_notes_are_indented() {
        let io = std::io::Error::other("disk full");
        let error = Error::new(ErrorKind::System, "cannot write run.log")
            .caused_by(io)
            .note("so", "nothing was saved")
            .note("stderr", "one\ntwo")
            .note("", "three\nfour");
        assert_eq!(
            error.render(),
            "error: cannot write run.log: disk full\n  so      nothing was saved\n  stderr  one\n          two\n  three\n  four\n"
        );
        assert_eq!(error.exit_code(), 1);
    }

    #[test]
    fn limits_of_the_system_are_told_with_their_flag() {
        let of = |code| std::io::Error::from_raw_os_error(code);
        let start = || Error::new(ErrorKind::System, "cannot start a thread");
        assert!(start().caused_by(of(24)).render().contains("`ulimit -n`"));
        assert!(start().caused_by(of(11)).render().contains("`ulimit -u`"));
        assert!(!start().caused_by(of(2)).render().contains("ulimit"));
        // Named only where there is one.
        let is_limited = getrlimit(Resource::As).current.is_some();
        for error in [
            start().caused_by(of(12)),
            Error::new(ErrorKind::PeerLost, "rank 0 was killed by SIGABRT"),
        ] {
            assert_eq!(error.render().contains("`ulimit -v`"), is_limited);
        }
        let other = Error::new(ErrorKind::System, "cannot read x").caused_by(of(11));
        assert!(!other.render().contains("ulimit"));
    }

    #[test]
    fn exit_codes_round_trip() {
        for code in [1, 2, 3, 4, 130] {
            assert_eq!(ErrorKind::from_exit_code(code).exit_code(), code);
        }
        assert_eq!(ErrorKind::from_exit_code(77).exit_code(), 1);
    }
}
