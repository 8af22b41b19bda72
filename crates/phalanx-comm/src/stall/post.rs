//! The post of a stalled rank, and its encoding in the store.

use phalanx_wire::frame::Header;

use super::counts::Begun;
use crate::operation::PeerOperation;
use crate::plan::Collective;

/// Awaited ranks in a post, for messages. In a larger batch a cycle may be seen only
/// when the first are done.
pub(super) const AWAITED_MAX: usize = 64;
/// The same in a collective. Ranks in another operation wait for each other, so a few
/// are enough.
const AWAITED_MAX_INSIDE: usize = 8;
/// Ranks in a post with which messages were exchanged.
const COUNTED_MAX: usize = 1024;

/// One rank that another waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Awaited {
    pub(crate) peer: usize,
    /// Whether it waits for data, rather than only for room.
    pub(crate) data: bool,
    /// The number of messages of it that have come without the one expected; none in a collective, or where nothing is
    /// expected from it.
    pub(crate) takes: Option<u64>,
}

/// Messages to and from a rank that were begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) peer: usize,
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// The post of a stalled rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StallReport {
    pub(super) header: Header,
    /// Collectives begun so far.
    pub(super) begun: u64,
    /// The number of this stall; another one if a byte moved since.
    pub(super) stall: u64,
    /// Grows whenever the rank posts this again after another check without progress.
    pub(super) turn: u64,
    pub(super) awaits: Vec<Awaited>,
    /// Only peers with messages.
    counts: Vec<Counted>,
    /// Whether there was room for all counts.
    is_complete: bool,
    /// The rank does nothing else in this group while it waits.
    pub(super) is_blocked: bool,
}

/// Bytes of an [`Awaited`] in a post.
const AWAITED_BYTES: usize = 13;
/// Bytes of a [`Counted`] in a post.
const COUNTED_BYTES: usize = 20;

impl StallReport {
    pub(super) fn new(
        header: Header,
        begun: &Begun<'_>,
        (stall, turn): (u64, u64),
        awaits: impl Iterator<Item = Awaited>,
    ) -> StallReport {
        let some = |(peer, (sent, received))| Counted {
            peer,
            sent,
            received,
        };
        let mut counts = begun
            .messages()
            .enumerate()
            .map(some)
            .filter(|count| count.sent + count.received > 0);
        let kept = counts.by_ref().take(COUNTED_MAX).collect();
        let most = match Collective::from_wire(header.collective) {
            Some(Collective::SendRecv) => AWAITED_MAX,
            _ => AWAITED_MAX_INSIDE,
        };
        StallReport {
            header,
            begun: begun.collectives(),
            stall,
            turn,
            awaits: awaits.take(most).collect(),
            counts: kept,
            is_complete: counts.next().is_none(),
            is_blocked: (begun.is_blocked)(),
        }
    }

    /// The operation in which the rank waits.
    pub(super) fn operation(&self) -> PeerOperation {
        PeerOperation::of_frame(&self.header)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.header.encode().to_vec();
        for number in [self.begun, self.stall, self.turn] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.push(u8::from(self.is_complete) | u8::from(self.is_blocked) << 1);
        bytes.push(self.awaits.len() as u8);
        for awaited in &self.awaits {
            // Ranks are below 2³²: a group of more is refused when it forms.
            bytes.extend((awaited.peer as u32).to_le_bytes());
            let takes = u8::from(awaited.takes.is_some());
            bytes.push(u8::from(awaited.data) | takes << 1);
            bytes.extend(awaited.takes.unwrap_or(0).to_le_bytes());
        }
        for counted in &self.counts {
            bytes.extend((counted.peer as u32).to_le_bytes());
            bytes.extend(counted.sent.to_le_bytes());
            bytes.extend(counted.received.to_le_bytes());
        }
        bytes
    }

    /// Decodes untrusted bytes; reads no more than a post may have.
    pub(super) fn decode(bytes: &[u8]) -> Option<StallReport> {
        let (header, mut rest) = bytes.split_first_chunk()?;
        let mut number = || {
            let (number, others) = rest.split_first_chunk()?;
            rest = others;
            Some(u64::from_le_bytes(*number))
        };
        let (begun, stall, turn) = (number()?, number()?, number()?);
        let (&[flags, awaited], rest) = rest.split_first_chunk()?;
        let awaited = usize::from(awaited);
        if awaited > AWAITED_MAX {
            return None;
        }
        let (awaits, counts) = rest.split_at_checked(awaited * AWAITED_BYTES)?;
        let awaits = awaits.chunks_exact(AWAITED_BYTES).map(|bytes| {
            let (peer, rest) = bytes.split_first_chunk()?;
            let (flags, takes) = rest.split_first()?;
            let takes = u64::from_le_bytes(*takes.first_chunk()?);
            Some(Awaited {
                peer: u32::from_le_bytes(*peer) as usize,
                data: flags & 1 != 0,
                takes: (flags & 2 != 0).then_some(takes),
            })
        });
        let counts = counts.chunks_exact(COUNTED_BYTES).take(COUNTED_MAX);
        let counts = counts.map(|bytes| {
            let (peer, rest) = bytes.split_first_chunk()?;
            let (sent, received) = rest.split_first_chunk()?;
            Some(Counted {
                peer: u32::from_le_bytes(*peer) as usize,
                sent: u64::from_le_bytes(*sent),
                received: u64::from_le_bytes(*received.first_chunk()?),
            })
        });
        Some(StallReport {
            header: Header::decode(header).ok()?,
            begun,
            stall,
            turn,
            awaits: awaits.collect::<Option<_>>()?,
            counts: counts.collect::<Option<_>>()?,
            is_complete: flags & 1 != 0,
            is_blocked: flags & 2 != 0,
        })
    }

    pub(super) fn is_message(&self) -> bool {
        self.header.collective == Collective::SendRecv.wire()
    }

    pub(super) fn awaited(&self, peer: usize) -> Option<&Awaited> {
        self.awaits.iter().find(|awaited| awaited.peer == peer)
    }

    /// Messages begun to and from `peer`, if the post has them.
    pub(super) fn counted(&self, peer: usize) -> Option<Counted> {
        let found = self.counts.iter().find(|counted| counted.peer == peer);
        let none = self.is_complete.then_some(Counted {
            peer,
            sent: 0,
            received: 0,
        });
        found.copied().or(none)
    }
}

#[cfg(test)]
mod tests {
    use super::super::counts::Counts;
    use super::*;
    use phalanx_wire::frame::Kind;

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
        let header = Header::new(Kind::Data);
        let post = StallReport::new(header, &counts.begun(&|| true), (7, 8), awaits.into_iter());
        let bytes = post.encode();
        assert_eq!(StallReport::decode(&bytes), Some(post.clone()));
        for end in 0..64 + 26 + 3 * AWAITED_BYTES {
            assert_eq!(StallReport::decode(&bytes[..end]), None, "{end}");
        }
        let mut long = bytes.clone();
        long.extend([1; COUNTED_BYTES * (COUNTED_MAX + 9)]);
        assert_eq!(
            StallReport::decode(&long).unwrap().counts.len(),
            COUNTED_MAX
        );
        let mut lie = bytes;
        lie[64 + 25] = AWAITED_MAX as u8 + 1;
        assert_eq!(StallReport::decode(&lie), None);
        let sent = |peer| post.counted(peer).unwrap().sent;
        assert_eq!((sent(2), sent(3), sent(1000)), (2, 0, 0));
    }

    #[test]
    fn what_did_not_fit_is_not_taken_for_none() {
        let post = |n: u64| {
            let counts: Vec<(u64, u64)> = (0..n).map(|peer| (peer + 1, 0)).collect();
            let counts = Counts::of(0, &counts);
            let header = Header::new(Kind::Data);
            StallReport::new(header, &counts.begun(&|| false), (0, 0), std::iter::empty())
        };
        let full = post(COUNTED_MAX as u64);
        assert_eq!(full.counted(COUNTED_MAX).unwrap().sent, 0);
        let more = post(COUNTED_MAX as u64 + 1);
        assert_eq!(more.counted(7).unwrap().sent, 8);
        assert_eq!(more.counted(COUNTED_MAX), None);
        assert_eq!(StallReport::decode(&more.encode()), Some(more));
    }
}
