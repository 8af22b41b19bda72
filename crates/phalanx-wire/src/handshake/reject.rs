//! Why a member that has the token is refused.

use std::fmt;

/// Why the acceptor refuses a member. Only the code is sent; the member prints the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
#[non_exhaustive]
pub enum RejectReason {
    /// Another protocol version.
    WrongVersion = 1,
    /// Another job, although the token is the same.
    WrongJob = 2,
    /// Another generation of the group.
    WrongGeneration = 3,
    /// Another group of the same job.
    WrongGroup = 4,
    /// The two sides disagree on the number of ranks.
    WrongWorld = 5,
    /// A rank that does not exist in the group, or not the expected one.
    WrongRank = 6,
    /// This rank is already connected.
    DuplicateRank = 7,
    /// This address serves another role.
    WrongRole = 8,
    /// No such stream: neither data nor control.
    WrongStream = 9,
    /// The acceptor has reached its limit of connections; a later attempt may succeed.
    Full = 10,
    /// The acceptor is shutting down.
    ShuttingDown = 11,
    /// The store does not serve this member yet; a later attempt may succeed.
    NotOpen = 12,
}

crate::codes! {
    RejectReason as u16: WrongVersion, WrongJob, WrongGeneration, WrongGroup, WrongWorld, WrongRank,
    DuplicateRank, WrongRole, WrongStream, Full, ShuttingDown, NotOpen
}

impl RejectReason {
    /// The code that is sent.
    pub const fn code(self) -> u16 {
        self as u16
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RejectReason::WrongVersion => {
                "wrong protocol version: run the same phalanx version everywhere"
            }
            RejectReason::WrongJob => "wrong job: the address belongs to another job",
            RejectReason::WrongGeneration => {
                "wrong generation: the group has been formed again since"
            }
            RejectReason::WrongGroup => "wrong group of the job",
            RejectReason::WrongWorld => {
                "world size differs: start all ranks with the same number of ranks"
            }
            RejectReason::WrongRank => "no such rank here",
            RejectReason::DuplicateRank => {
                "duplicate rank: another process already runs with this rank"
            }
            RejectReason::WrongRole => "this address serves another role",
            RejectReason::WrongStream => "no such stream",
            RejectReason::Full => "too many connections",
            RejectReason::ShuttingDown => "the other side is shutting down",
            RejectReason::NotOpen => "the store is not open yet",
        })
    }
}
