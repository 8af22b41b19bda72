//! Which member is closed when memory runs out.
//!
//! What is buffered for members (requests that are not complete,
//! answers that are not taken, keys that are waited for) is bounded over all
//! of them, so that a member gone mad cannot grow the server without limit.
//! Whoever takes most goes first, so that it cannot starve the others either.

use std::collections::HashMap;

use super::conn::{Conn, State};
use super::waiters::ConnId;

/// Bytes that the server holds for its members.
pub(super) fn buffered_bytes(conns: &HashMap<ConnId, Conn>) -> u64 {
    conns.values().map(Conn::buffered_bytes).sum()
}

/// Bytes of keys that members wait for.
pub(super) fn waited_bytes(conns: &HashMap<ConnId, Conn>) -> u64 {
    conns
        .values()
        .map(|conn| match &conn.state {
            State::Waiting(wait) => wait.key_bytes,
            _ => 0,
        })
        .sum()
}

/// Of the members that keep us waiting, for the rest of a request or with an
/// answer that they do not take, the one that costs most: small messages of
/// others are never the ones to go.
pub(super) fn largest_stalled(conns: &HashMap<ConnId, Conn>) -> Option<ConnId> {
    conns
        .iter()
        .filter_map(|(id, conn)| Some((*id, conn.buffered_bytes(), conn.stalled?)))
        .min_by_key(|(_, bytes, since)| (std::cmp::Reverse(*bytes), *since))
        .map(|(id, ..)| id)
}

/// The longest list of keys that a member waits for, if it is longer than
/// `key_bytes`.
pub(super) fn longest_wait(conns: &HashMap<ConnId, Conn>, key_bytes: u64) -> Option<(ConnId, u64)> {
    conns
        .iter()
        .filter_map(|(id, conn)| match &conn.state {
            State::Waiting(wait) => Some((*id, wait.key_bytes)),
            _ => None,
        })
        .max_by_key(|(_, bytes)| *bytes)
        .filter(|(_, bytes)| *bytes > key_bytes)
}
