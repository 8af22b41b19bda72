//! Counts refused connections by source and reason, to explain why a member is missing.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Maximum number of pairs of source and reason.
const MAX_KEPT: usize = 1024;

/// Why a server refused connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RefusalReason {
    /// Another job token, or none.
    WrongToken,
    /// Another version of the protocol.
    WrongVersion,
    /// Another protocol.
    WrongProtocol,
    /// The peer did not finish the handshake.
    Unfinished,
}

/// Refused connections of one source and reason.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefusedConnections {
    /// Address of the peer.
    pub source: IpAddr,
    /// Why they were refused.
    pub reason: RefusalReason,
    /// Number of connections.
    pub count: u64,
}

impl fmt::Display for RefusedConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RefusedConnections { source, count, .. } = self;
        let (were, has, speaks) = match count {
            1 => ("connection", "it has", "it speaks"),
            _ => ("connections", "they have", "they speak"),
        };
        let verb = if *count == 1 { "was" } else { "were" };
        write!(f, "{count} {were} from {source} {verb} refused: ")?;
        match self.reason {
            RefusalReason::WrongToken => write!(f, "{has} another job token"),
            RefusalReason::WrongVersion => {
                write!(f, "{speaks} another version of the protocol")
            }
            RefusalReason::WrongProtocol => write!(f, "{speaks} another protocol"),
            RefusalReason::Unfinished => f.write_str("the handshake was not finished"),
        }
    }
}

/// Counts by source and reason, and their sum, with refused members.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<BTreeMap<(IpAddr, RefusalReason), u64>>, AtomicU64);

impl Refusals {
    /// Counts one of which only the number is known.
    pub(crate) fn count(&self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn total(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }

    pub(crate) fn note(&self, source: IpAddr, reason: RefusalReason) {
        self.count();
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (source.to_canonical(), reason);
        if counts.len() < MAX_KEPT || counts.contains_key(&key) {
            *counts.entry(key).or_default() += 1;
        }
    }

    /// All counts, the largest first.
    pub(crate) fn list(&self) -> Vec<RefusedConnections> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut list: Vec<RefusedConnections> = counts
            .iter()
            .map(|(&(source, reason), &count)| RefusedConnections {
                source,
                reason,
                count,
            })
            .collect();
        list.sort_by_key(|refused| std::cmp::Reverse(refused.count));
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_names_source_and_reason() {
        let refusals = Refusals::default();
        let source = |last| IpAddr::from([10, 0, 0, last]);
        for _ in 0..3 {
            refusals.note(source(1), RefusalReason::WrongToken);
        }
        refusals.note(source(2), RefusalReason::WrongProtocol);
        let list: Vec<String> = refusals
            .list()
            .iter()
            .map(RefusedConnections::to_string)
            .collect();
        assert_eq!(
            list,
            [
                "3 connections from 10.0.0.1 were refused: they have another job token",
                "1 connection from 10.0.0.2 was refused: it speaks another protocol",
            ]
        );
    }

    #[test]
    fn many_sources_take_bounded_memory() {
        let refusals = Refusals::default();
        for n in 0..5000_u32 {
            refusals.note(IpAddr::from(n.to_be_bytes()), RefusalReason::Unfinished);
        }
        assert_eq!(refusals.list().len(), MAX_KEPT);
    }
}
