//! TCP between two ranks: two connections per pair.
//!
//! *Data* (stream 0) carries the bytes of a link and nothing else. *Control* (stream 1)
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
