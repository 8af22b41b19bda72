//! TCP between two ranks: three connections per pair.
//!
//! *Data* (stream 0) carries the bytes of collectives and nothing else, *messages* (stream 2) those of sends and
//! receives. *Control* (stream 1)
//! carries at most one frame per direction: why the sender ends. It is a separate connection
//! because an abort may come from another thread in the middle of a half-written frame on the
//! data stream.

mod control;
mod dial;
mod link;
mod liveness;
pub(super) mod options;

pub(super) use control::{Control, Fate};
pub(super) use dial::dial;
pub(super) use link::TcpLink;
pub(super) use liveness::{HostProbe, keep_open, probe};

/// Stream number of the data connection.
pub(super) const DATA: u16 = 0;
/// Stream number of the control connection.
pub(super) const CONTROL: u16 = 1;
/// Stream number of the connection for sends and receives.
pub(super) const MESSAGES: u16 = 2;
