//! The one error type of this crate.
//!
//! The rank that causes a failed collective is rarely the one that prints the message.
//! So an error names, where known, the kind of failure, the rank that saw it, the peer
//! to blame, and the operation.

use std::fmt;
use std::sync::Arc;

use crate::limits;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whose fault a failure is, and hence what the caller may do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Occurs when the caller asked for something that cannot be done: wrong
    /// length, unknown rank, mean of integers, missing setting. The group
    /// stays usable.
    Usage,
    /// Occurs when a deadline passed; the message names the ranks waited for.
    Timeout,
    /// Occurs when a peer's connection ended or its process died.
    PeerLost,
    /// Occurs when another rank failed first, or called `abort`. [`Error::origin_rank`]
    /// returns that rank.
    Aborted,
    /// Occurs when the other ranks formed a new group without this rank, because it
    /// came too late. It cannot join any more; the message says what they waited for.
    Excluded,
    /// Occurs when two ranks are in different operations (one took another branch of
    /// the program), or ranks wait for each other in a cycle (each receives and no rank
    /// sends). The message names both sides, or the cycle.
    Desync,
    /// Occurs when a peer sent bytes that do not follow the protocol.
    Protocol,
    /// Occurs when the operating system refused something on this host.
    Io,
    /// Occurs when an invariant of this crate broke: a bug of ours, please
    /// report it.
    Internal,
}

/// An error of the communication layer.
///
/// Cloning is cheap; a group keeps its first error and hands out copies.
#[derive(Clone)]
pub struct Error {
    inner: Box<Inner>,
}

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    rank: Option<usize>,
    peer: Option<usize>,
    origin: Option<usize>,
    operation: Option<String>,
    message: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync + 'static>>,
}

impl Error {
    /// A new error; `message` is lower case, names the culprit and, if there is one,
    /// the remedy.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error {
            inner: Box::new(Inner {
                kind,
                rank: None,
                peer: None,
                origin: None,
                operation: None,
                message: message.into(),
                source: None,
            }),
        }
    }

    /// A mistake of the caller.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Usage, message)
    }

    /// A deadline passed.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Timeout, message)
    }

    /// A broken invariant of this crate.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Rank `peer` is gone.
    pub fn peer_lost(peer: usize, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::PeerLost, message).with_peer(peer)
    }

    /// Rank `peer` sent bytes that do not follow the protocol.
    pub fn protocol(peer: usize, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Protocol, message).with_peer(peer)
    }

    /// The group was poisoned by `origin_rank`, whose `cause` is the first one.
    pub fn aborted(origin_rank: usize, cause: impl fmt::Display) -> Self {
        let mut e = Self::new(
            ErrorKind::Aborted,
            format!("the group was aborted by rank {origin_rank}: {cause}"),
        );
        e.inner.origin = Some(origin_rank);
        e
    }

    /// The operating system refused `what`.
    pub fn io(what: impl fmt::Display, source: std::io::Error) -> Self {
        let message = format!("{what}: {}", limits::explain(&source));
        Self::new(ErrorKind::Io, message).with_source(source)
    }

    /// Says on which rank the error was seen.
    #[must_use]
    pub fn with_rank(mut self, rank: usize) -> Self {
        self.inner.rank = Some(rank);
        self
    }

    /// Says which peer is to blame.
    #[must_use]
    pub fn with_peer(mut self, peer: usize) -> Self {
        self.inner.peer = Some(peer);
        self
    }

    /// Says during which operation the error was seen. The first answer wins.
    #[must_use]
    pub fn with_operation(mut self, operation: impl Into<String>) -> Self {
        self.inner.operation.get_or_insert_with(|| operation.into());
        self
    }

    /// Chains the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.inner.source = Some(Arc::new(source));
        self
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// The rank that saw the failure, if it belongs to a group.
    pub fn rank(&self) -> Option<usize> {
        self.inner.rank
    }

    /// The peer to blame, if one is.
    pub fn peer(&self) -> Option<usize> {
        self.inner.peer
    }

    /// For [`ErrorKind::Aborted`]: the rank whose failure came first.
    pub fn origin_rank(&self) -> Option<usize> {
        self.inner.origin
    }

    /// The rank whose loss is the failure: this rank has noticed it, or another one that ended the group over it.
    pub fn lost_rank(&self) -> Option<usize> {
        match self.inner.kind {
            ErrorKind::PeerLost => self.inner.peer,
            ErrorKind::Aborted => lost_in(&self.inner.message),
            _ => None,
        }
    }

    /// The operation during which the failure was seen.
    pub fn operation(&self) -> Option<&str> {
        self.inner.operation.as_deref()
    }

    /// The message without rank and operation.
    pub fn message(&self) -> &str {
        &self.inner.message
    }
}

/// The rank that a message of `PeerLost` names, which is all that the ranks get from the one that ended the group.
fn lost_in(message: &str) -> Option<usize> {
    const LOST: [&str; 4] = [
        "died",
        "is gone: ",
        "left the group while",
        "was reported lost",
    ];
    message.split("rank ").skip(1).find_map(|named| {
        let (rank, mut how) = named.split_once(' ')?;
        if how.starts_with('(') {
            // The process.
            how = how.split_once(") ")?.1;
        }
        let is_lost = LOST.iter().any(|lost| how.starts_with(lost));
        is_lost.then(|| rank.parse().ok())?
    })
}

impl ErrorKind {
    /// The kind for a failure of the store.
    pub(crate) fn of_store(e: &phalanx_store::Error) -> ErrorKind {
        use phalanx_store::ErrorKind as Store;
        match e.kind() {
            Store::Usage
            | Store::NotANumber
            | Store::LimitExceeded
            | Store::AddressInUse
            | Store::TokenMismatch
            | Store::Rejected(_) => ErrorKind::Usage,
            Store::Timeout | Store::NoAnswer => ErrorKind::Timeout,
            Store::PeerLost => ErrorKind::PeerLost,
            Store::WrongProtocol | Store::Protocol => ErrorKind::Protocol,
            Store::Io => ErrorKind::Io,
            _ => ErrorKind::Internal,
        }
    }
}

impl From<phalanx_store::Error> for Error {
    fn from(e: phalanx_store::Error) -> Self {
        let message = format!("store: {e}{}", limits::hint(&e));
        Error::new(ErrorKind::of_store(&e), message).with_source(e)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rank) = self.inner.rank {
            write!(f, "rank {rank}: ")?;
        }
        if let Some(operation) = &self.inner.operation {
            write!(f, "{operation}: ")?;
        }
        f.write_str(&self.inner.message)?;
        if self.inner.kind == ErrorKind::Internal {
            f.write_str(" (a bug in phalanx-comm, please report it)")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    /// The message, as `fn main() -> Result<(), Error>` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        phalanx_base::error::debug(self, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.inner.source.as_deref().map(|source| source as _)
    }
}

impl From<Error> for phalanx_base::Error {
    fn from(error: Error) -> Self {
        use phalanx_base::ErrorKind as Kind;
        let kind = match error.kind() {
            ErrorKind::Usage => Kind::Usage,
            ErrorKind::Timeout => Kind::Timeout,
            ErrorKind::PeerLost | ErrorKind::Aborted | ErrorKind::Excluded => Kind::PeerLost,
            ErrorKind::Io => Kind::System,
            _ => Kind::Failed,
        };
        Self::from_library(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    #[test]
    fn message_names_rank_operation_and_culprit() {
        let e = Error::peer_lost(3, "rank 3 closed its connection")
            .with_rank(1)
            .with_operation("all_reduce seq 7")
            .with_operation("ignored: the first answer wins");
        assert_eq!(
            e.to_string(),
            "rank 1: all_reduce seq 7: rank 3 closed its connection"
        );
        assert_eq!(e.peer(), Some(3));
        assert_eq!(e.kind(), ErrorKind::PeerLost);
    }

    #[test]
    fn a_lost_rank_is_named_on_all_ranks() {
        for (cause, lost) in [
            ("rank 12 (process 5) died in barrier (seq 3)", Some(12)),
            ("rank 4 is gone: its connection broke", Some(4)),
            ("rank 4 (process 7 on b) is gone: it ended", Some(4)),
            ("rank 0 left the group while data was expected", Some(0)),
            ("rank 7 was reported lost: its host is down", Some(7)),
            ("rank 1 did not arrive", None),
            ("a rank died; rank x died, rank 3", None),
        ] {
            assert_eq!(Error::aborted(2, cause).lost_rank(), lost, "{cause}");
            assert_eq!(Error::timeout(cause).lost_rank(), None);
            assert_eq!(Error::peer_lost(9, cause).lost_rank(), Some(9));
        }
    }

    #[test]
    fn source_is_chained() {
        let e = Error::io("open /x", std::io::Error::from_raw_os_error(2));
        assert!(e.source().is_some());
        assert!(e.to_string().starts_with("open /x: "));
    }

    #[test]
    fn aborted_carries_its_origin() {
        let e = Error::aborted(2, "out of memory");
        assert_eq!(e.origin_rank(), Some(2));
        assert!(e.to_string().contains("rank 2: out of memory"));
    }
}
