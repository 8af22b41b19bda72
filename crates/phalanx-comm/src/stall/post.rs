//! The post of a stalled rank in the store.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::counts::Begun;
use crate::operation::PeerOperation;
use crate::plan::Collective;

/// Awaited ranks in a post, for messages. In a larger batch a cycle may be seen only
/// when the first are done.
pub(super) const AWAITED_MAX: usize = 64;
/// The same in a collective. Ranks in another operation wait for each other, so a few
/// are enough.
const AWAITED_MAX_INSIDE: usize = 8;
/// Ranks in a post to which messages were sent.
const SENT_MAX: usize = 1024;
/// Largest post that is read; ours have at most about 40 KiB.
const MAX_BYTES: usize = 64 << 10;

/// One rank that another waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Awaited {
    pub(crate) peer: usize,
    /// Whether it waits for data, rather than only for room.
    pub(crate) data: bool,
    /// The number of messages of it that have come without the one expected; none in a collective, or where nothing is
    /// expected from it.
    pub(crate) takes: Option<u64>,
}

/// The post of a stalled rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StallReport {
    /// The operation in which the rank waits.
    pub(super) operation: PeerOperation,
    /// Collectives begun so far.
    pub(super) begun: u64,
    /// The number of this stall; another one if a byte moved since.
    pub(super) stall: u64,
    /// Grows whenever the rank posts this again after another check without progress.
    pub(super) check: u64,
    pub(super) awaits: Vec<Awaited>,
    /// Messages begun to be sent, by rank.
    sent: BTreeMap<usize, u64>,
    /// Whether there was room for all of `sent`.
    is_complete: bool,
    /// The rank does nothing else in this group while it waits.
    pub(super) is_blocked: bool,
}

impl StallReport {
    pub(super) fn new(
        operation: PeerOperation,
        begun: &Begun<'_>,
        (stall, check): (u64, u64),
        awaits: impl Iterator<Item = Awaited>,
    ) -> StallReport {
        let mut sent = begun.sent().enumerate().filter(|(_, sent)| *sent > 0);
        let kept = sent.by_ref().take(SENT_MAX).collect();
        let most = match operation.collective() {
            Some(Collective::SendRecv) => AWAITED_MAX,
            _ => AWAITED_MAX_INSIDE,
        };
        StallReport {
            operation,
            begun: begun.collectives(),
            stall,
            check,
            awaits: awaits.take(most).collect(),
            sent: kept,
            is_complete: sent.next().is_none(),
            is_blocked: (begun.is_blocked)(),
        }
    }

    /// Nothing in a post is trusted.
    pub(super) fn decode(bytes: &[u8]) -> Option<StallReport> {
        let bytes = bytes.get(..bytes.len().min(MAX_BYTES))?;
        let post: StallReport = serde_json::from_slice(bytes).ok()?;
        (post.awaits.len() <= AWAITED_MAX && post.sent.len() <= SENT_MAX).then_some(post)
    }

    pub(super) fn is_message(&self) -> bool {
        self.operation.collective() == Some(Collective::SendRecv)
    }

    pub(super) fn awaited(&self, peer: usize) -> Option<&Awaited> {
        self.awaits.iter().find(|awaited| awaited.peer == peer)
    }

    /// Messages begun to be sent to `peer`, if the post has them.
    pub(super) fn sent(&self, peer: usize) -> Option<u64> {
        let sent = self.sent.get(&peer).copied();
        sent.or(self.is_complete.then_some(0))
    }
}

#[cfg(test)]
mod tests {
    use super::super::counts::Counts;
    use super::*;

    const BARRIER: PeerOperation = PeerOperation([0; 3]);

    #[test]
    fn posts_round_trip_and_garbage_is_none() {
        let awaited = |peer, takes| Awaited {
            peer,
            data: peer == 3,
            takes,
        };
        let awaits = [
            awaited(3, Some(1 << 40)),
            awaited(9, None),
            awaited(1 << 20, None),
        ];
        let counts: Vec<(u64, u64)> = (0..70).map(|peer| (peer % 3, peer % 2)).collect();
        let counts = Counts::of(6, &counts);
        let post = StallReport::new(BARRIER, &counts.begun(&|| true), (7, 8), awaits.into_iter());
        let bytes = serde_json::to_vec(&post).unwrap();
        assert_eq!(StallReport::decode(&bytes), Some(post.clone()));
        for end in 0..bytes.len() {
            assert_eq!(StallReport::decode(&bytes[..end]), None, "{end}");
        }
        let mut long = post.clone();
        long.awaits = vec![awaited(1, None); AWAITED_MAX + 1];
        assert_eq!(
            StallReport::decode(&serde_json::to_vec(&long).unwrap()),
            None
        );
        assert_eq!(
            [2, 3, 1000].map(|peer| post.sent(peer)),
            [2, 0, 0].map(Some)
        );
    }

    #[test]
    fn what_did_not_fit_is_not_taken_for_none() {
        let post = |n: u64| {
            let counts: Vec<(u64, u64)> = (0..n).map(|peer| (u64::MAX - peer, 0)).collect();
            let counts = Counts::of(0, &counts);
            StallReport::new(
                BARRIER,
                &counts.begun(&|| false),
                (0, 0),
                std::iter::empty(),
            )
        };
        let full = post(SENT_MAX as u64);
        assert_eq!(full.sent(SENT_MAX), Some(0));
        let more = post(SENT_MAX as u64 + 1);
        assert_eq!(more.sent(7), Some(u64::MAX - 7));
        assert_eq!(more.sent(SENT_MAX), None);
        let bytes = serde_json::to_vec(&more).unwrap();
        assert_eq!(StallReport::decode(&bytes), Some(more));
    }
}
