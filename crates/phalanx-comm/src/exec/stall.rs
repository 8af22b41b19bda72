//! Finds ranks in different operations that all only wait.
//!
//! A frame tells its receiver what the sender is doing, so most mistakes are
//! found by the first one. But when two ranks both wait to receive (each took
//! another for the root of a broadcast), no frame is ever sent. So a rank
//! that has waited without a byte moving for [`AFTER`] leaves in the store
//! which operation it is in, and looks what those say for whom it waits. The
//! same number of an operation with another content is a desync for certain,
//! however late either of them is. So is a collective that waits for data of a
//! rank which has not begun it and waits itself, for a message that its peer in
//! the collective has not sent, or not received: neither can leave before the
//! other, however old their words are. And so are two ranks that each receive
//! what the other has not begun to send. Anything else may just be slow: two
//! that send to each other may still find room, and who waits for whom in a
//! circle of three is not followed; these wait until the deadline.
//!
//! Asking is the business of a thread of its own, started at the first stall:
//! a store whose host is gone must not hold up an operation's deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use phalanx_store::Store;
use phalanx_wire::frame::Header;

use super::signature::{Signature, Theirs};
use crate::plan::Collective;
use crate::transport::{AbortHandle, Poison};

/// Waiting without progress before anybody is asked. Slow networks and late
/// ranks cause more than this; it only costs a question then.
const AFTER: Duration = Duration::from_millis(150);
/// Distance between two questions.
const AGAIN: Duration = Duration::from_millis(250);
/// Ranks asked about at once. Those in another operation wait for each other,
/// so one of a few is enough.
const ASKED: usize = 8;

/// Where the ranks of a group say what they wait in.
pub(crate) struct Board {
    desk: Option<Desk>,
    tell: Option<SyncSender<Report>>,
    told: Option<Instant>,
    found: Arc<AtomicBool>,
}

/// What the asking thread needs.
struct Desk {
    store: Arc<dyn Store>,
    prefix: String,
    rank: usize,
    abort: AbortHandle,
    found: Arc<AtomicBool>,
}

struct Report {
    signature: Signature,
    post: Post,
}

/// One rank for which another waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Awaited {
    pub(super) peer: usize,
    /// Whether for data of it, rather than for room.
    pub(super) data: bool,
    /// Messages to and from it that were begun so far.
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// What a stalled rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Post {
    header: Header,
    /// Collectives begun so far.
    begun: u64,
    awaits: Vec<Awaited>,
}

/// Bytes of an [`Awaited`] in a post.
const AWAITED_BYTES: usize = 21;

impl Post {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.header.encode().to_vec();
        bytes.extend(self.begun.to_le_bytes());
        for awaited in &self.awaits {
            // Ranks are below 2³²: a group of more is refused when it forms.
            bytes.extend((awaited.peer as u32).to_le_bytes());
            bytes.push(u8::from(awaited.data));
            bytes.extend(awaited.sent.to_le_bytes());
            bytes.extend(awaited.received.to_le_bytes());
        }
        bytes
    }

    /// Nothing in it is trusted; more than [`ASKED`] ranks are not read.
    fn decode(bytes: &[u8]) -> Option<Post> {
        let (header, rest) = bytes.split_first_chunk()?;
        let (begun, rest) = rest.split_first_chunk()?;
        let awaits = rest.chunks_exact(AWAITED_BYTES).take(ASKED).map(|bytes| {
            let (peer, rest) = bytes.split_first_chunk()?;
            let (data, rest) = rest.split_first()?;
            let (sent, rest) = rest.split_first_chunk()?;
            Some(Awaited {
                peer: u32::from_le_bytes(*peer) as usize,
                data: *data != 0,
                sent: u64::from_le_bytes(*sent),
                received: u64::from_le_bytes(*rest.first_chunk()?),
            })
        });
        Some(Post {
            header: Header::decode(header).ok()?,
            begun: u64::from_le_bytes(*begun),
            awaits: awaits.collect::<Option<_>>()?,
        })
    }

    fn is_message(&self) -> bool {
        self.header.collective == Collective::SendRecv.wire()
    }

    fn awaited(&self, peer: usize) -> Option<&Awaited> {
        self.awaits.iter().find(|awaited| awaited.peer == peer)
    }
}

/// Whether rank `at`, in the collective of `inside`, and rank `other`, in the
/// message of `outside`, wait for each other for ever.
fn is_deadlock((at, inside): (usize, &Post), (other, outside): (usize, &Post)) -> bool {
    let (Some(of_other), Some(_)) = (inside.awaited(other), outside.awaited(at)) else {
        return false;
    };
    let is_sender = outside.header.root == other as u32;
    let begun = if is_sender {
        of_other.received
    } else {
        of_other.sent
    };
    of_other.data && outside.begun <= inside.header.seq && begun <= outside.header.seq
}

/// Whether two ranks each receive a message that the other has not begun to
/// send. Who is in a receive begins nothing else, so neither ever will.
fn is_face_to_face((a, mine): (usize, &Post), (b, theirs): (usize, &Post)) -> bool {
    let (Some(of_b), Some(of_a)) = (mine.awaited(b), theirs.awaited(a)) else {
        return false;
    };
    let receives = |post: &Post, from: usize| post.header.root == from as u32;
    receives(mine, b)
        && receives(theirs, a)
        && (of_b.data && of_a.data)
        && of_a.sent <= mine.header.seq
        && of_b.sent <= theirs.header.seq
}

impl Board {
    /// `job` tells this job from others that used the same store.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        (epoch, group, job): (u32, u32, u64),
        rank: usize,
        abort: AbortHandle,
    ) -> Board {
        let found = Arc::new(AtomicBool::new(false));
        Board {
            desk: Some(Desk {
                store,
                prefix: format!("stall/{epoch}/{group}/{job:016x}"),
                rank,
                abort,
                found: Arc::clone(&found),
            }),
            tell: None,
            told: None,
            found,
        }
    }

    /// Nothing has moved `since` then. Never blocks.
    pub(super) fn stalled(
        &mut self,
        signature: &Signature,
        header: impl FnOnce() -> Header,
        begun: u64,
        awaits: impl Iterator<Item = Awaited>,
        (since, now): (Instant, Instant),
    ) {
        if now.duration_since(since) < AFTER
            || self
                .told
                .is_some_and(|told| now.duration_since(told) < AGAIN)
        {
            return;
        }
        self.told = Some(now);
        if let Some(desk) = self.desk.take() {
            let (tell, told) = sync_channel(1);
            let started = std::thread::Builder::new()
                .name("phalanx-stall".to_owned())
                .stack_size(128 << 10)
                .spawn(move || desk.serve(&told));
            match started {
                Ok(_) => self.tell = Some(tell),
                Err(e) => tracing::debug!("cannot start a thread to look for a desync: {e}"),
            }
        }
        let Some(tell) = &self.tell else { return };
        let report = Report {
            signature: *signature,
            post: Post {
                header: header(),
                begun,
                awaits: awaits.take(ASKED).collect(),
            },
        };
        match tell.try_send(report) {
            // Full: the store is slow, and the question before this one open.
            Ok(()) | Err(TrySendError::Full(_)) => {}
            Err(TrySendError::Disconnected(_)) => self.tell = None,
        }
    }

    /// Whether it was us who found the ranks in different operations.
    pub(super) fn found(&self) -> bool {
        self.found.load(Ordering::Acquire)
    }
}

impl Desk {
    /// Until the group ends.
    fn serve(&self, reports: &Receiver<Report>) {
        let mine = format!("{}/{}", self.prefix, self.rank);
        while let Ok(report) = reports.recv() {
            if let Err(e) = self.compare(&mine, &report) {
                tracing::debug!("cannot look for a desync: {e}");
            }
        }
        let _ = self.store.delete(&mine);
    }

    fn compare(&self, mine: &str, report: &Report) -> phalanx_store::Result<()> {
        self.store.set(mine, &report.post.encode())?;
        for Awaited { peer, .. } in &report.post.awaits {
            let Some(bytes) = self.store.try_get(&format!("{}/{peer}", self.prefix))? else {
                continue;
            };
            let Some(theirs) = Post::decode(&bytes) else {
                continue;
            };
            let (mine, me) = (&report.post, self.rank);
            let mut why = "";
            let is_desync = match (mine.is_message(), theirs.is_message()) {
                (false, false) => {
                    theirs.header.seq == report.signature.seq
                        && !report.signature.matches(&theirs.header)
                }
                (false, true) => is_deadlock((me, mine), (*peer, &theirs)),
                (true, false) => is_deadlock((*peer, &theirs), (me, mine)),
                (true, true) => {
                    why = "; each waits for the other to send";
                    is_face_to_face((me, mine), (*peer, &theirs))
                }
            };
            if is_desync {
                let theirs = Theirs(&theirs.header);
                let cause = super::signature::desync(self.rank, &report.signature, *peer, &theirs);
                let cause = cause + why;
                self.found.store(true, Ordering::Release);
                self.abort.poison(&Poison::new(self.rank, cause));
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_wire::frame::Kind;

    fn post(
        collective: Collective,
        (root, seq): (u32, u64),
        begun: u64,
        awaits: &[Awaited],
    ) -> Post {
        let mut header = Header::new(Kind::Data);
        header.collective = collective.wire();
        (header.root, header.seq) = (root, seq);
        Post {
            header,
            begun,
            awaits: awaits.to_vec(),
        }
    }

    fn awaited(peer: usize, data: bool, sent: u64, received: u64) -> Awaited {
        Awaited {
            peer,
            data,
            sent,
            received,
        }
    }

    #[test]
    fn posts_round_trip_and_garbage_is_none() {
        let awaits = [awaited(3, true, 7, 1 << 40), awaited(9, false, 0, 0)];
        let post = post(Collective::AllReduce, (0, 5), 6, &awaits);
        let bytes = post.encode();
        assert_eq!(Post::decode(&bytes), Some(post));
        for end in 0..72 {
            assert_eq!(Post::decode(&bytes[..end]), None);
        }
        let long = [&bytes[..], &[0; AWAITED_BYTES * 100]].concat();
        assert_eq!(Post::decode(&long).unwrap().awaits.len(), ASKED);
    }

    /// Rank 0 is in collective 5, rank 1 in message 2 between them.
    #[test]
    fn only_what_cannot_end_is_a_deadlock() {
        let inside = |sent, received, data| {
            post(
                Collective::Barrier,
                (0, 5),
                6,
                &[awaited(1, data, sent, received)],
            )
        };
        let outside = |root, begun| {
            post(
                Collective::SendRecv,
                (root, 2),
                begun,
                &[awaited(0, true, 0, 0)],
            )
        };
        let met = |inside: &Post, outside: &Post| is_deadlock((0, inside), (1, outside));
        // Rank 1 receives message 2, of which rank 0 has begun two or three.
        assert!(met(&inside(2, 9, true), &outside(0, 5)));
        assert!(
            !met(&inside(3, 0, true), &outside(0, 5)),
            "it is on its way"
        );
        // Rank 1 sends it.
        assert!(met(&inside(9, 2, true), &outside(1, 5)));
        assert!(!met(&inside(0, 3, true), &outside(1, 5)), "it was taken");
        // Rank 1 was in the collective before; its part is on its way.
        assert!(!met(&inside(2, 9, true), &outside(0, 6)));
        // Rank 0 only waits for room, or for somebody else.
        assert!(!met(&inside(2, 9, false), &outside(0, 5)));
        let other = post(Collective::Barrier, (0, 5), 6, &[awaited(2, true, 0, 0)]);
        assert!(!met(&other, &outside(0, 5)));
        let elsewhere = post(Collective::SendRecv, (2, 2), 5, &[awaited(2, true, 0, 0)]);
        assert!(!met(&inside(2, 9, true), &elsewhere));
    }

    /// Rank 0 receives message 4 of rank 1, which receives message 7 of rank 0.
    #[test]
    fn only_who_has_not_begun_to_send_is_face_to_face() {
        let receiver = |from: u32, seq, sent, data| {
            post(
                Collective::SendRecv,
                (from, seq),
                0,
                &[awaited(from as usize, data, sent, 0)],
            )
        };
        let met = |zero: &Post, one: &Post| {
            let there = is_face_to_face((0, zero), (1, one));
            assert_eq!(there, is_face_to_face((1, one), (0, zero)));
            there
        };
        let one = receiver(0, 7, 4, true);
        assert!(met(&receiver(1, 4, 7, true), &one));
        assert!(!met(&receiver(1, 4, 8, true), &one), "it is on its way");
        assert!(!met(&receiver(1, 3, 7, true), &one), "it was sent before");
        assert!(!met(&receiver(1, 4, 7, false), &one), "waits for room");
        // Rank 0 sends, or receives from somebody else.
        let sender = post(Collective::SendRecv, (0, 7), 0, &[awaited(1, true, 7, 0)]);
        assert!(!met(&sender, &one));
        assert!(!met(&receiver(2, 4, 7, true), &one));
    }
}
