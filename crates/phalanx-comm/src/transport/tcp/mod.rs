//! TCP between two ranks: two connections per pair, or up to five.
//!
//! *Data* (stream 0, and 2 to 4 where the ranks want several) carries the
//! bytes of a link and nothing else. *Control* (stream 1) carries at most one frame per direction: why the
//! sender ends. It is a connection of its own because an abort may come from
//! another thread in the middle of a half-written frame on the data stream.

mod control;
mod dial;
mod link;
mod liveness;
pub(super) mod options;

pub(super) use control::{Control, Fate};
pub(super) use dial::dial;
pub(super) use link::TcpLink;
pub(super) use liveness::{HostProbe, keep_open, probe};

/// Most data connections of a pair.
pub(super) const MAX_STREAMS: usize = 4;

/// Stream number of data connection `index` of a pair.
pub(super) const fn data(index: usize) -> u16 {
    match index {
        0 => 0,
        // The number between is taken.
        index => index as u16 + 1,
    }
}
/// Stream number of the control connection.
pub(super) const CONTROL: u16 = 1;
