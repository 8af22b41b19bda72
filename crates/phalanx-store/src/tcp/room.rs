//! Chooses the member to close when the buffer limit is reached.
//!
//! The memory for all members together is limited: incomplete requests, responses
//! not yet received, and keys of waits. The member that uses the most is closed
//! first, so that a faulty member can neither exhaust the server's memory nor
//! starve the others.

use std::collections::HashMap;

use super::conn::Conn;
use super::waiters::ConnId;

/// Memory used for all members, in bytes.
pub(super) fn buffered_bytes(conns: &HashMap<ConnId, Conn>) -> u64 {
    conns.values().map(Conn::buffered_bytes).sum()
}

/// Total length of the keys that members wait for.
pub(super) fn waited_bytes(conns: &HashMap<ConnId, Conn>) -> u64 {
    conns.values().map(Conn::waited_bytes).sum()
}

/// The member that uses the most memory, among those with an incomplete request or
/// a response not yet received.
pub(super) fn largest_stalled(conns: &HashMap<ConnId, Conn>) -> Option<ConnId> {
    conns
        .iter()
        .filter_map(|(id, conn)| Some((*id, conn.buffered_bytes(), conn.stalled?)))
        .min_by_key(|(_, bytes, since)| (std::cmp::Reverse(*bytes), *since))
        .map(|(id, ..)| id)
}

/// The member whose wait has the most bytes of keys, if more than `key_bytes`.
pub(super) fn longest_wait(conns: &HashMap<ConnId, Conn>, key_bytes: u64) -> Option<(ConnId, u64)> {
    conns
        .iter()
        .map(|(id, conn)| (*id, conn.waited_bytes()))
        .max_by_key(|(_, bytes)| *bytes)
        .filter(|(_, bytes)| *bytes > key_bytes)
}
