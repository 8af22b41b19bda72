//! Finds ranks in different operations that wait for each other.
//!
//! A frame names its sender's operation, so the first frame reveals most mistakes. But
//! when two ranks both wait to receive (each expects another root of a broadcast), no
//! frame is ever sent. So a rank that has waited for [`AFTER`] without progress writes
//! a [`StallReport`] to the store, with its operation and the ranks it waits for, and repeats
//! that while nothing moves. It also reads the posts of the ranks it waits for. Two
//! different operations with the same number are certainly a desync, however late
//! either rank is. Ranks that wait for each other in a cycle are found by following the
//! posts ([`circle`]): receives that face each other, a message against a collective. A
//! rank that computes posts nothing, and so is in no cycle.
//!
//! An awaited rank that was [reported lost](crate::report_lost) ends the wait too: nothing says that its host is
//! down, or stopped with its launcher, before the deadline. It must be lost for two looks at the same wait, as the last
//! that a rank sends may come after the report that it has ended.
//!
//! A separate thread, started at the first stall, uses the store: a store whose host is
//! gone must not delay an operation's deadline.

mod circle;
mod counts;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod post;

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub(crate) use self::counts::{Begun, Counts, Users, this_thread};
pub(crate) use self::post::Awaited;

use self::circle::Suspect;
use self::post::StallReport;
use crate::lost::LostRanks;
use crate::operation::{PeerOperation, Signature, desync};
use crate::transport::{AbortHandle, GroupKeys, Poison};
use crate::{Error, ErrorKind};

/// Waiting time without progress before the store is asked. Slow networks and late
/// ranks also cause such waits; then it only costs a request.
pub(crate) const AFTER: Duration = Duration::from_millis(150);
/// Interval between two requests.
const AGAIN: Duration = Duration::from_millis(250);
/// Ranks of the longest cycle that is found: each costs every other a request.
const CIRCLE_MAX: usize = 32;

/// Publishes what this rank waits in, for the other ranks of a group.
pub(crate) struct StallReports {
    /// Until its thread starts.
    reporter: Option<StallReporter>,
    reports: Option<SyncSender<StallReport>>,
    last: Option<Instant>,
    /// Since when nothing has moved, and the number of this stall.
    stall: (Option<Instant>, u64),
    /// Number of reports passed to the asking thread, not counting those it had no time
    /// for: at most two of them may be newer than the post in the store.
    checks: u64,
    found: Arc<OnceLock<(Found, Poison)>>,
}

/// Why a wait never ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Ranks are in different operations.
    Desync,
    /// This rank, which others wait for, was reported lost.
    Lost(usize),
}

/// The state of the asking thread.
struct StallReporter {
    keys: Arc<GroupKeys>,
    rank: usize,
    abort: AbortHandle,
    found: Arc<OnceLock<(Found, Poison)>>,
    lost: LostRanks,
    /// The stall in which a rank was found lost.
    lost_in: Option<u64>,
}

/// Whether `cause` is a cycle of ranks that includes this one: then it is an error of
/// this rank's program too.
fn is_circle_with(cause: &str, rank: usize) -> bool {
    let named = format!(" rank {rank} waits in ");
    cause.starts_with(circle::PREFIX) && cause.contains(&named)
}

/// Ends the group over an error of `rank`, with `cause` for the others; returns the error to report: the first cause, if
/// another rank failed earlier.
pub(crate) fn end_group(
    abort: &AbortHandle,
    rank: usize,
    found: Option<&(Found, Poison)>,
    error: Error,
    cause: String,
) -> Error {
    // Poison first, then check: of several ranks that fail at the same time one is
    // the first, and all others report its failure.
    let cause = match error.kind() {
        // Names both operations already, and both must fit.
        ErrorKind::Desync => error.message().to_owned(),
        _ => cause,
    };
    let is_first = abort.poison(&Poison::new(rank, cause));
    let Some(p) = abort.poisoned() else {
        return error;
    };
    match found.filter(|(_, own)| *own == p).map(|(found, _)| found) {
        Some(Found::Lost(peer)) => Error::peer_lost(*peer, p.cause).with_source(error),
        Some(Found::Desync) => Error::new(ErrorKind::Desync, p.cause).with_source(error),
        None if is_circle_with(&p.cause, rank) => {
            Error::new(ErrorKind::Desync, p.cause).with_source(error)
        }
        // Or this rank has found it twice.
        None if is_first || p.origin_rank == rank => error,
        None => Error::aborted(p.origin_rank, p.cause).with_source(error),
    }
}

impl StallReports {
    /// For `rank` of a group whose ranks are the processes `numbers`.
    pub(crate) fn new(
        keys: Arc<GroupKeys>,
        (rank, numbers): (usize, &[usize]),
        abort: AbortHandle,
    ) -> StallReports {
        let found = Arc::new(OnceLock::new());
        StallReports {
            reporter: Some(StallReporter {
                keys,
                rank,
                abort,
                found: Arc::clone(&found),
                lost: LostRanks::of(numbers),
                lost_in: None,
            }),
            reports: None,
            last: None,
            stall: (None, 0),
            checks: 0,
            found,
        }
    }

    /// Nothing has moved `since` then: all links were just checked. Never blocks. True if a report was due.
    pub(crate) fn stalled(
        &mut self,
        signature: &Signature,
        begun: &Begun<'_>,
        awaits: impl Iterator<Item = Awaited>,
        (since, now): (Instant, Instant),
    ) -> bool {
        let is_early = |last: Instant| now.duration_since(last) < AGAIN;
        if now.duration_since(since) < AFTER || self.last.is_some_and(is_early) {
            return false;
        }
        self.last = Some(now);
        if self.stall.0 != Some(since) {
            self.stall = (Some(since), self.stall.1 + 1);
        }
        if let Some(mut reporter) = self.reporter.take() {
            let (reports, received) = sync_channel(1);
            let started = std::thread::Builder::new()
                .name("phalanx-stall".to_owned())
                .stack_size(128 << 10)
                .spawn(move || reporter.serve(&received));
            match started {
                Ok(_) => self.reports = Some(reports),
                Err(e) => tracing::debug!("cannot start a thread to look for a desync: {e}"),
            }
        }
        let Some(reports) = &self.reports else {
            return true;
        };
        let which = (self.stall.1, self.checks + 1);
        let operation = PeerOperation(signature.words());
        match reports.try_send(StallReport::new(operation, begun, which, awaits)) {
            Ok(()) => self.checks += 1,
            // The store is slow, and the previous request is still open.
            Err(TrySendError::Full(_)) => {}
            Err(TrySendError::Disconnected(_)) => self.reports = None,
        }
        true
    }

    /// What this rank has found, for which it has ended the group.
    pub(crate) fn found(&self) -> Option<&(Found, Poison)> {
        self.found.get()
    }
}

impl StallReporter {
    /// Runs until the group ends.
    fn serve(&mut self, reports: &Receiver<StallReport>) {
        let mut suspect = Suspect::default();
        while let Ok(report) = reports.recv() {
            match self.check(&report, &mut suspect) {
                Ok(None) => {}
                Ok(Some((found, cause))) => {
                    let poison = Poison::new(self.rank, cause);
                    let _ = self.found.set((found, poison.clone()));
                    self.abort.poison(&poison);
                }
                Err(e) => tracing::debug!("cannot look for a desync: {e}"),
            }
        }
    }

    /// Publishes the report; the reason why this wait never ends, if it does not.
    fn check(
        &mut self,
        report: &StallReport,
        suspect: &mut Suspect,
    ) -> phalanx_store::Result<Option<(Found, String)>> {
        let post = serde_json::to_vec(report).unwrap_or_default();
        self.keys.set(&self.key(self.rank), &post)?;
        if let Some(lost) = self.lost_rank(report)? {
            return Ok(Some(lost));
        }
        let cause = self.desync(report, suspect)?;
        Ok(cause.map(|cause| (Found::Desync, cause)))
    }

    /// A rank that was reported lost, and why.
    fn lost_rank(
        &mut self,
        report: &StallReport,
    ) -> phalanx_store::Result<Option<(Found, String)>> {
        // Those that wait for another one end the group for all.
        let mut lost = self.lost.read(self.keys.store())?.iter();
        let Some(lost) = lost.find(|lost| report.awaited(lost.rank).is_some()) else {
            return Ok(None);
        };
        let is_same = self.lost_in.replace(report.stall) == Some(report.stall);
        let (rank, why) = (lost.rank, &lost.why);
        let cause = format!("rank {rank} was reported lost: {why}");
        Ok(is_same.then_some((Found::Lost(rank), cause)))
    }

    fn key(&self, rank: usize) -> String {
        self.keys.key("stall", rank)
    }

    /// The last post of `rank`, if there is one.
    fn ask(&self, rank: usize) -> phalanx_store::Result<Option<StallReport>> {
        let bytes = self.keys.store().try_get(&self.key(rank))?;
        Ok(bytes.and_then(|bytes| StallReport::decode(&bytes)))
    }

    /// The operations of ranks that wait for each other.
    fn desync(
        &self,
        mine: &StallReport,
        suspect: &mut Suspect,
    ) -> phalanx_store::Result<Option<String>> {
        let me = self.rank;
        // From a rank in a collective only direct peers are followed: the other ranks
        // of a longer cycle find it, and a collective has many ranks.
        let most = if mine.is_message() { CIRCLE_MAX } else { 2 };
        let mut asked: Vec<(usize, StallReport)> = Vec::new();
        let found = circle::find((me, mine), most, |rank| -> phalanx_store::Result<_> {
            let post = self.ask(rank)?;
            asked.extend(post.iter().map(|post| (rank, post.clone())));
            Ok(post)
        })?;
        let is_other = |theirs: &StallReport| {
            !mine.is_message()
                && !theirs.is_message()
                && theirs.operation.seq() == mine.operation.seq()
                && theirs.operation != mine.operation
        };
        let desync = |rank: usize, post: &StallReport| {
            desync((me, &mine.operation), (rank, &post.operation))
        };
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
        // For two ranks of which one is in a collective, naming the calls says more.
        let other = |(rank, post): &&(usize, StallReport)| {
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
    use crate::plan::Collective;

    /// A reader that compares checks must know how many reports may be missing in the
    /// store.
    #[test]
    fn a_report_that_was_not_passed_on_is_no_check_and_a_move_begins_another_stall() {
        let (reports, received) = sync_channel(1);
        let mut stalls = StallReports {
            reporter: None,
            reports: Some(reports),
            last: None,
            stall: (None, 0),
            checks: 0,
            found: Arc::default(),
        };
        let signature = Signature {
            collective: Collective::SendRecv,
            method: None,
            dtype: None,
            op: None,
            root: 0,
            count: 1,
            lengths: 0,
            seq: 0,
        };
        let counts = Counts::new(0);
        let begun = counts.begun(&|| true);
        let start = Instant::now();
        let mut stalled = |since: Duration, now: Duration| {
            let times = (start + since, start + now);
            stalls.stalled(&signature, &begun, std::iter::empty(), times);
        };
        let seen = || {
            let report = received.try_recv().ok();
            report.map(|report: StallReport| (report.stall, report.check))
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
