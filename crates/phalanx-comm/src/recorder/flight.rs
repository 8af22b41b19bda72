//! The executor's side: what is noted of one operation while it runs.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

use super::cell::Cell;
use super::layout::{entry, state};
use super::{Failure, Recorder, Watched, monitor, root};
use crate::Error;
use crate::exec::{Operation, Signature};
use crate::plan::Collective;
use crate::transport::Interest;

/// An operation of fewer bytes takes microseconds: its parts are not timed,
/// and if it ever waited, it did nothing else worth speaking of.
const BRIEF_BYTES: usize = 32 << 10;

/// Notes the operations of one group, one after another.
///
/// Whatever path an operation takes, it calls [`begin`](Flight::begin), then
/// [`waiting`](Flight::waiting) each time before it sleeps and [`progress`](Flight::progress) when it goes on, and
/// [`end`](Flight::end).
pub(crate) struct Flight {
    recorder: Arc<Recorder>,
    watched: Arc<Watched>,
    epoch: u32,
    group: u32,
    transport: u8,
    cell: Option<Arc<Cell>>,
    /// The first ranks of the members, by rank, where they differ.
    roster: Option<Arc<[usize]>>,
    /// The ticket under which the next operation was queued.
    adopted: Option<u64>,
    ticket: u64,
    brief: bool,
    is_collective: bool,
    started: u64,
    waiting: bool,
    ever_waited: bool,
    since: u64,
    waited: u64,
    progressed: u64,
    folded: u64,
    awaited: [u64; 2],
    /// The rank waited for longest, plus 1, and how long.
    slowest: (u64, u64),
}

impl Flight {
    /// `transport` is 1 for threads, 2 shared memory, 4 TCP, or a sum of them;
    /// `roster` the first ranks of the members.
    pub(crate) fn new(watched: Watched, transport: u8, roster: &Arc<[usize]>) -> Flight {
        let watched = Arc::new(watched);
        let recorder = Arc::clone(&watched.recorder);
        let (epoch, group) = watched.ids();
        let cell = watched.own_cell().cloned();
        recorder.join(epoch, roster, cell.as_ref());
        if watched.has_peers() {
            monitor::watch(Arc::downgrade(&watched));
        }
        Flight {
            recorder,
            watched,
            epoch,
            group,
            transport,
            cell,
            roster: roster
                .iter()
                .enumerate()
                .any(|(rank, first)| rank != *first)
                .then(|| Arc::clone(roster)),
            adopted: None,
            ticket: 0,
            brief: true,
            is_collective: false,
            started: 0,
            waiting: false,
            ever_waited: false,
            since: 0,
            waited: 0,
            progressed: 0,
            folded: 0,
            awaited: [0; 2],
            slowest: (0, 0),
        }
    }

    /// The next operation was queued under this ticket.
    pub(crate) fn adopt(&mut self, ticket: u64) {
        self.adopted = Some(ticket);
    }

    /// The next operation does not run: the group has failed.
    #[cold]
    pub(crate) fn refuse(&mut self) {
        if let Some(ticket) = self.adopted.take() {
            self.recorder.abandon(ticket);
        }
    }

    /// It is this operation's turn.
    #[inline]
    pub(crate) fn begin(&mut self, operation: &Operation, signature: &Signature) {
        let recorder = &*self.recorder;
        let now = recorder.clock.ticks();
        let queued = self.adopted.take();
        self.ticket = queued.unwrap_or_else(|| recorder.claim());
        let words = recorder.memory.entry(self.ticket);
        let set = |at: usize, value: u64| words[at].store(value, Relaxed);
        if queued.is_none() {
            set(
                entry::GROUP,
                u64::from(self.epoch) << 32 | u64::from(self.group),
            );
            set(entry::COUNT, operation.count as u64);
            set(entry::ROOT, root(operation));
            set(entry::QUEUED, now);
            for at in entry::PROGRESS..entry::STATE {
                set(at, 0);
            }
        }
        set(entry::WHAT, recorder.what(operation, self.transport));
        set(entry::SEQ, signature.seq);
        set(entry::STARTED, now);
        set(entry::STATE, state::RUNNING);
        words[entry::STAMP].store(self.ticket.wrapping_add(1), Release);

        let elem_bytes = operation.dtype.map_or(1, crate::DType::size_bytes);
        self.brief = operation.count.saturating_mul(elem_bytes) < BRIEF_BYTES;
        self.is_collective = operation.collective != Collective::SendRecv;
        self.started = now;
        self.since = now;
        self.waiting = false;
        self.ever_waited = false;
        self.waited = 0;
        self.progressed = 0;
        self.folded = 0;
        self.awaited = [0; 2];
        self.slowest = (0, 0);
        self.watched.moved.store(0, Relaxed);
        self.watched
            .current
            .store(self.ticket.wrapping_add(1), Release);
        if let Some(cell) = &self.cell {
            // An operation that failed left whom it had waited for.
            cell.await_ranks([0; 2]);
            if self.is_collective {
                cell.enter(signature.seq);
            }
        }
    }

    /// Whether a wait after so many fruitless attempts is worth a note: the
    /// first, short one of a brief operation is not.
    #[inline]
    pub(crate) fn notes_wait(&self, spins: u32) -> bool {
        !self.brief || spins > 0
    }

    /// Nothing moves: these ranks are waited for. To be called before every
    /// sleep that [`notes_wait`](Flight::notes_wait); repeated for the same
    /// ranks it costs nothing. `want` has one or more lanes of `world` ranks each.
    #[inline]
    pub(crate) fn waiting(&mut self, want: &[Interest], world: usize) {
        let mut mask = [0_u64; 2];
        for (lane, _) in want.iter().enumerate().filter(|(_, want)| want.any()) {
            let peer = lane % world.max(1);
            if let Some(word) = mask.get_mut(peer / 64) {
                *word |= 1 << (peer % 64);
            }
        }
        self.wait(mask);
    }

    #[inline]
    fn wait(&mut self, mask: [u64; 2]) {
        if self.waiting && mask == self.awaited {
            return;
        }
        let now = if self.brief {
            0
        } else {
            self.recorder.clock.ticks()
        };
        if self.waiting {
            // Somebody came; the time goes to those who did not.
            let still = [self.awaited[0] & mask[0], self.awaited[1] & mask[1]];
            if still != [0; 2] {
                self.awaited = still;
            }
            self.account(now);
        }
        self.waiting = true;
        self.ever_waited = true;
        self.since = now;
        self.awaited = mask;
        let words = self.recorder.memory.entry(self.ticket);
        let noted = self.first_ranks(mask);
        words[entry::AWAITED].store(noted[0], Relaxed);
        words[entry::AWAITED_HIGH].store(noted[1], Relaxed);
        if let Some(cell) = &self.cell {
            cell.await_ranks(mask);
        }
    }

    /// The same ranks by the numbers that people know, as far as there is room.
    fn first_ranks(&self, mask: [u64; 2]) -> [u64; 2] {
        let Some(roster) = &self.roster else {
            return mask;
        };
        let mut noted = [0; 2];
        let is_in = |rank: usize| {
            mask.get(rank / 64)
                .is_some_and(|w| w >> (rank % 64) & 1 == 1)
        };
        for (_, first) in roster.iter().enumerate().filter(|(rank, _)| is_in(*rank)) {
            if let Some(word) = noted.get_mut(first / 64) {
                *word |= 1 << (first % 64);
            }
        }
        noted
    }

    /// Of the ranks waited for, this one came last.
    #[inline]
    pub(crate) fn last_to_come(&mut self, peer: usize) {
        if self.waiting && peer < 128 {
            self.awaited = [0; 2];
            self.awaited[peer / 64] = 1 << (peer % 64);
        }
    }

    /// Something moved after a wait.
    #[inline]
    pub(crate) fn progress(&mut self) {
        if !self.waiting {
            return;
        }
        let now = if self.brief {
            0
        } else {
            self.recorder.clock.ticks()
        };
        self.account(now);
        self.waiting = false;
        self.since = now;
        if let Some(cell) = &self.cell {
            cell.await_ranks([0; 2]);
        }
        if !self.brief {
            // Also tells watchers that a long transfer is not a stuck one.
            let words = self.recorder.memory.entry(self.ticket);
            if self.progressed == 0 {
                words[entry::PROGRESS].store(now, Relaxed);
            }
            self.progressed = now;
            self.watched.moved.store(now, Relaxed);
        }
    }

    fn account(&mut self, now: u64) {
        let took = now.saturating_sub(self.since);
        self.waited += took;
        if let Some(peer) = lowest(self.awaited)
            && (took >= self.slowest.1)
        {
            self.slowest = (peer + 1, took);
        }
    }

    /// When folding of `bytes` begins; hand it to [`Flight::folded`].
    #[inline]
    pub(crate) fn fold_begins(&self) -> u64 {
        if self.brief {
            0
        } else {
            self.recorder.clock.ticks()
        }
    }

    /// Folding ended.
    #[inline]
    pub(crate) fn folded(&mut self, began: u64) {
        if !self.brief {
            self.folded += self.recorder.clock.ticks().saturating_sub(began);
        }
    }

    /// The operation is over, well or not.
    #[inline]
    pub(crate) fn end(&mut self, signature: &Signature, is_ok: bool) {
        let now = self.recorder.clock.ticks();
        if self.waiting {
            self.account(if self.brief { 0 } else { now });
        }
        if self.brief && self.ever_waited {
            self.waited = now.saturating_sub(self.started);
        }
        let words = self.recorder.memory.entry(self.ticket);
        let set = |at: usize, value: u64| words[at].store(value, Relaxed);
        set(entry::DONE, now);
        set(entry::WAITED, self.waited);
        set(entry::FOLDED, self.folded);
        let slowest = match (&self.roster, self.slowest.0) {
            (Some(roster), rank @ 1..) => roster
                .get(rank as usize - 1)
                .map_or(0, |first| *first as u64 + 1),
            (_, rank) => rank,
        };
        set(entry::SLOWEST, slowest);
        if is_ok && self.ever_waited {
            set(entry::AWAITED, 0);
            set(entry::AWAITED_HIGH, 0);
        }
        let state = if is_ok { state::DONE } else { state::ABORTED };
        words[entry::STATE].store(state, Release);
        self.watched.current.store(0, Relaxed);
        self.recorder.memory.prefetch(self.ticket.wrapping_add(1));
        if let Some(cell) = self.cell.as_ref().filter(|_| is_ok) {
            if self.waiting {
                cell.await_ranks([0; 2]);
            }
            if self.is_collective {
                cell.done(signature.seq);
            }
        }
    }

    /// The running operation's deadline.
    #[inline]
    pub(crate) fn set_limit(&self, limit: Duration) {
        let ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.watched.limit_ns.store(ns, Relaxed);
    }

    /// Of the `missing` ranks and those for whom they wait themselves, the ones
    /// that hold everybody up, as far as that is known, and what they are
    /// doing instead. Never empty unless `missing` is.
    #[cold]
    pub(crate) fn blame(
        &self,
        missing: &[usize],
        signature: &Signature,
    ) -> (Vec<usize>, Option<String>) {
        let seq = self.is_collective.then_some(signature.seq);
        self.watched.blame(missing, seq)
    }

    /// Writes the reason down, and the recorder out.
    #[cold]
    pub(crate) fn failed(&self, error: &Error) {
        let failure = Failure::of(error.kind());
        self.recorder
            .failed(self.watched.ids(), &error.to_string(), failure);
    }
}

/// The lowest bit, over both words.
fn lowest(mask: [u64; 2]) -> Option<u64> {
    match mask {
        [0, 0] => None,
        [0, high] => Some(64 + u64::from(high.trailing_zeros())),
        [low, _] => Some(u64::from(low.trailing_zeros())),
    }
}
