//! Finds ranks in different operations that all only wait.
//!
//! A frame tells its receiver what the sender is doing, so most mistakes are
//! found by the first one. But when two ranks both wait to receive (each took
//! another for the root of a broadcast), no frame is ever sent. So a rank
//! that has waited without a byte moving for [`AFTER`] leaves in the store
//! which operation it is in and for whom it waits there ([`Post`]), again and again
//! as long as nothing moves, and looks what those say for whom it waits. The
//! same number of an operation with another content is a desync for certain,
//! however late either of them is. Ranks that wait for each other in a circle are
//! found by following what each says ([`circle`]): sends that face each other,
//! receives in a circle of three, a message against a collective. Who
//! computes says nothing, and so is in no circle.
//!
//! Asking is the business of a thread of its own, started at the first stall:
//! a store whose host is gone must not hold up an operation's deadline.

mod circle;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod post;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use phalanx_wire::frame::Header;

pub(crate) use self::post::Awaited;

use self::circle::Suspect;
use self::post::Post;
use crate::operation::Signature;
use crate::transport::{AbortHandle, GroupKeys, Poison};

/// Waiting without progress before anybody is asked. Slow networks and late
/// ranks cause more than this; it only costs a question then.
const AFTER: Duration = Duration::from_millis(150);
/// Distance between two questions.
const AGAIN: Duration = Duration::from_millis(250);
/// Ranks of the longest circle that is found: each costs every other a question.
const CIRCLE_MAX: usize = 32;

/// Where the ranks of a group say what they wait in.
pub(crate) struct Board {
    desk: Option<Desk>,
    tell: Option<SyncSender<Report>>,
    told: Option<Instant>,
    /// Since when nothing has moved, and which stall that is.
    stall: (Option<Instant>, u64),
    /// Reports that were handed on. Not those that the asking thread had no time
    /// for: of which turns it has told the store, at most two may be older.
    turn: u64,
    found: Arc<AtomicBool>,
}

/// What the asking thread needs.
struct Desk {
    keys: Arc<GroupKeys>,
    rank: usize,
    abort: AbortHandle,
    found: Arc<AtomicBool>,
}

struct Report {
    signature: Signature,
    post: Post,
}

/// What a rank has begun so far.
pub(crate) struct Begun<'a> {
    pub(crate) collectives: u64,
    /// Messages, by peer.
    pub(crate) sent: &'a [u64],
    /// See [`Begun::sent`].
    pub(crate) received: &'a [u64],
}

/// Whether `cause` is a circle of ranks of which this is one: then it is our
/// program's mistake as well.
pub(crate) fn is_circle_with(cause: &str, rank: usize) -> bool {
    let named = format!(" rank {rank} waits in ");
    cause.starts_with(circle::PREFIX) && cause.contains(&named)
}

impl Board {
    pub(crate) fn new(keys: Arc<GroupKeys>, rank: usize, abort: AbortHandle) -> Board {
        let found = Arc::new(AtomicBool::new(false));
        Board {
            desk: Some(Desk {
                keys,
                rank,
                abort,
                found: Arc::clone(&found),
            }),
            tell: None,
            told: None,
            stall: (None, 0),
            turn: 0,
            found,
        }
    }

    /// Nothing has moved `since` then, as a look at all links has just shown.
    /// Never blocks.
    pub(crate) fn stalled(
        &mut self,
        signature: &Signature,
        header: impl FnOnce() -> Header,
        begun: &Begun<'_>,
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
        if self.stall.0 != Some(since) {
            self.stall = (Some(since), self.stall.1 + 1);
        }
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
        let counts = begun
            .sent
            .iter()
            .copied()
            .zip(begun.received.iter().copied());
        let which = (self.stall.1, self.turn + 1);
        let report = Report {
            signature: *signature,
            post: Post::new(header(), begun.collectives, which, awaits, counts),
        };
        match tell.try_send(report) {
            Ok(()) => self.turn += 1,
            // The store is slow, and the question before this one open.
            Err(TrySendError::Full(_)) => {}
            Err(TrySendError::Disconnected(_)) => self.tell = None,
        }
    }

    /// Whether it was us who found the ranks in different operations.
    pub(crate) fn found(&self) -> bool {
        self.found.load(Ordering::Acquire)
    }
}

impl Desk {
    /// Until the group ends.
    fn serve(&self, reports: &Receiver<Report>) {
        let mine = self.key(self.rank);
        let mut suspect = Suspect::default();
        while let Ok(report) = reports.recv() {
            let looked = self.keys.set(&mine, &report.post.encode());
            match looked.and_then(|()| self.look(&report, &mut suspect)) {
                Ok(None) => {}
                Ok(Some(cause)) => {
                    self.found.store(true, Ordering::Release);
                    self.abort.poison(&Poison::new(self.rank, cause));
                }
                Err(e) => tracing::debug!("cannot look for a desync: {e}"),
            }
        }
    }

    fn key(&self, rank: usize) -> String {
        self.keys.key("stall", rank)
    }

    /// What `rank` said last, if anything.
    fn ask(&self, rank: usize) -> phalanx_store::Result<Option<Post>> {
        let bytes = self.keys.store().try_get(&self.key(rank))?;
        Ok(bytes.and_then(|bytes| Post::decode(&bytes)))
    }

    /// Why this never ends, if that is so.
    fn look(
        &self,
        report: &Report,
        suspect: &mut Suspect,
    ) -> phalanx_store::Result<Option<String>> {
        let (mine, me) = (&report.post, self.rank);
        // From whoever is in a collective only ways to its peers are followed: the
        // others of a longer circle find it, and ranks in one collective are many.
        let most = if mine.is_message() { CIRCLE_MAX } else { 2 };
        let mut asked: Vec<(usize, Post)> = Vec::new();
        let found = circle::find((me, mine), most, |rank| -> phalanx_store::Result<_> {
            let post = self.ask(rank)?;
            asked.extend(post.iter().map(|post| (rank, post.clone())));
            Ok(post)
        })?;
        let is_other = |theirs: &Post| {
            !mine.is_message()
                && !theirs.is_message()
                && theirs.operation().seq() == report.signature.seq
                && !report.signature.matches(&theirs.operation())
        };
        let desync =
            |rank: usize, post: &Post| report.signature.desync(me, rank, &post.operation());
        if let Some((rank, post)) = asked.iter().find(|(_, post)| is_other(post)) {
            return Ok(Some(desync(*rank, post)));
        }
        let Some(circle) = found else {
            suspect.forget();
            return Ok(None);
        };
        if !suspect.is_for_ever(&circle) {
            return Ok(None);
        }
        // Of two ranks of which one is in a collective, the calls say more.
        let other = |(rank, post): &&(usize, Post)| {
            let is_in = circle.iter().any(|wait| wait.rank == *rank);
            is_in && post.is_message() != mine.is_message()
        };
        Ok(Some(match asked.iter().find(other) {
            Some((rank, post)) if circle.len() == 2 => desync(*rank, post),
            _ => circle::describe(&circle),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Collective, Method};
    use phalanx_wire::frame::Kind;

    /// Who compares turns must know how many of them may be older than what lies
    /// in the store.
    #[test]
    fn what_was_not_handed_on_is_no_turn_and_what_moved_is_another_stall() {
        let (tell, told) = sync_channel(1);
        let mut board = Board {
            desk: None,
            tell: Some(tell),
            told: None,
            stall: (None, 0),
            turn: 0,
            found: Arc::default(),
        };
        let signature = Signature {
            collective: Collective::SendRecv,
            method: Method::PointToPoint,
            dtype: None,
            op: None,
            root: 0,
            count: 1,
            lengths: 0,
            seq: 0,
            in_memory: false,
        };
        let begun = Begun {
            collectives: 0,
            sent: &[],
            received: &[],
        };
        let start = Instant::now();
        let mut stalled = |since: Duration, now: Duration| {
            let header = || Header::new(Kind::Data);
            let times = (start + since, start + now);
            board.stalled(&signature, header, &begun, std::iter::empty(), times);
        };
        let seen = || {
            let report: Option<Report> = told.try_recv().ok();
            report.map(|report| (report.post.stall, report.post.turn))
        };
        let none = Duration::ZERO;
        stalled(none, AFTER / 2);
        assert_eq!(seen(), None);
        for n in 1..10 {
            stalled(none, AFTER + n * AGAIN);
        }
        assert_eq!(seen(), Some((1, 1)));
        assert_eq!(seen(), None);
        stalled(none, AFTER + 10 * AGAIN);
        assert_eq!(seen(), Some((1, 2)));
        stalled(10 * AGAIN, AFTER + 11 * AGAIN);
        assert_eq!(seen(), Some((2, 3)));
    }
}
