//! The executor's side: records one operation while it runs.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::{Duration, Instant};

use super::layout::{NO_TICKET, entry, state};
use super::{Failure, Recorder, Watched, monitor, root};
use crate::Error;
use crate::operation::{Operation, Signature};
use crate::status::StatusCell;
use crate::status::words::{MASK_WORDS, Mask, ranks_of, set_rank};
use crate::transport::Interest;

/// An operation of fewer bytes takes microseconds: its parts are not timed, and if it
/// waited, all of its time counts as waiting.
const BRIEF_BYTES: usize = 32 << 10;

/// No rank is awaited.
const NOBODY: Mask = [0; MASK_WORDS];

/// Records the operations of one group, one after another.
///
/// Every operation calls [`begin`](Flight::begin), then [`waiting`](Flight::waiting) each time before it sleeps
/// and [`progress`](Flight::progress) when it continues, and [`end`](Flight::end).
pub(crate) struct Flight {
    shared: MessageFlight,
    /// The ticket under which the next operation was queued.
    adopted: Option<u64>,
    ticket: u64,
    brief: bool,
    started: u64,
    waiting: bool,
    ever_waited: bool,
    /// Whether ranks from 128 up were recorded as awaited.
    noted_wide: bool,
    since: u64,
    waited: u64,
    progressed: u64,
    folded: u64,
    awaited: Mask,
    /// The rank waited for longest, plus 1, and how long.
    slowest: (u64, u64),
}

impl Flight {
    /// `transport` is 1 for threads, 2 shared memory, 4 TCP, or a sum of them;
    /// `roster` the first ranks of the members.
    pub(crate) fn new(watched: Watched, transport: u8, roster: &Arc<[usize]>) -> Flight {
        let watched = Arc::new(watched);
        let recorder = Arc::clone(&watched.recorder);
        let (generation, group) = watched.ids();
        let cell = watched.own_cell().cloned();
        recorder.join(generation, roster, cell.as_ref());
        if watched.has_peers() {
            monitor::watch(Arc::downgrade(&watched));
        }
        let is_other = |(rank, first): (usize, &usize)| rank != *first;
        let shared = MessageFlight {
            recorder,
            watched,
            generation,
            group,
            transport,
            cell,
            roster: (roster.iter().enumerate().any(is_other)).then(|| Arc::clone(roster)),
            mask_words: roster.len().div_ceil(64).clamp(1, MASK_WORDS),
        };
        Flight {
            shared,
            adopted: None,
            ticket: 0,
            brief: true,
            started: 0,
            waiting: false,
            ever_waited: false,
            noted_wide: false,
            since: 0,
            waited: 0,
            progressed: 0,
            folded: 0,
            awaited: NOBODY,
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
            self.shared.recorder.abandon(ticket);
        }
    }

    /// The operation starts to run.
    #[inline]
    pub(crate) fn begin(&mut self, operation: &Operation, signature: &Signature) {
        let recorder = &*self.shared.recorder;
        let now = recorder.clock.ticks();
        let queued = self.adopted.take();
        self.ticket = queued.unwrap_or_else(|| recorder.claim());
        let words = recorder.memory.entry(self.ticket);
        let set = |at: usize, value: u64| words[at].store(value, Relaxed);
        if queued.is_none() {
            set(
                entry::GROUP,
                u64::from(self.shared.generation) << 32 | u64::from(self.shared.group),
            );
            set(entry::COUNT, operation.count as u64);
            set(entry::ROOT, root(operation));
            set(entry::QUEUED, now);
            for at in entry::PROGRESS..entry::STATE {
                set(at, 0);
            }
        }
        set(entry::WHAT, recorder.what(operation, self.shared.transport));
        set(entry::SEQ, signature.seq);
        set(entry::STARTED, now);
        set(entry::STATE, state::RUNNING);
        words[entry::STAMP].store(self.ticket.wrapping_add(1), Release);

        let elem_bytes = operation.dtype.map_or(1, crate::DType::size_bytes);
        self.brief = operation.count.saturating_mul(elem_bytes) < BRIEF_BYTES;
        self.started = now;
        self.since = now;
        self.waiting = false;
        self.ever_waited = false;
        self.waited = 0;
        self.progressed = 0;
        self.folded = 0;
        self.noted_wide = false;
        self.awaited = NOBODY;
        self.slowest = (0, 0);
        self.shared.watched.moved.store(0, Relaxed);
        self.shared
            .watched
            .current
            .store(self.ticket.wrapping_add(1), Release);
        if let Some(cell) = &self.shared.cell {
            // A failed operation left the ranks that it had waited for.
            cell.await_ranks(&self.awaited[..self.shared.mask_words]);
            cell.enter(signature.seq);
        }
    }

    /// Whether to record a wait after this number of attempts without progress: the
    /// first, short one of a brief operation is not recorded.
    #[inline]
    pub(crate) fn notes_wait(&self, spins: u32) -> bool {
        !self.brief || spins > 0
    }

    /// Nothing moves: these ranks are awaited. To be called before a sleep if
    /// [`notes_wait`](Flight::notes_wait) is true; repeated for the same ranks it costs
    /// nothing.
    #[inline]
    pub(crate) fn waiting(&mut self, want: &[Interest]) {
        let mut mask = NOBODY;
        for (rank, _) in want.iter().enumerate().filter(|(_, want)| want.any()) {
            set_rank(&mut mask, rank);
        }
        self.wait(mask);
    }

    #[inline]
    fn wait(&mut self, mask: Mask) {
        if self.waiting && mask == self.awaited {
            return;
        }
        let now = self.ticks();
        if self.waiting {
            // A rank has come; the time is attributed to the ranks that have not.
            let still: Mask = std::array::from_fn(|i| self.awaited[i] & mask[i]);
            if still != NOBODY {
                self.awaited = still;
            }
            self.account(now);
        }
        self.waiting = true;
        self.ever_waited = true;
        self.since = now;
        self.awaited = mask;
        let words = self.shared.recorder.memory.entry(self.ticket);
        let noted = self.shared.first_ranks(mask);
        let (low, wide) = noted.split_at(entry::AWAITED_WORDS);
        for (at, word) in (entry::AWAITED..).zip(low) {
            words[at].store(*word, Relaxed);
        }
        self.note_wide(wide);
        if let Some(cell) = &self.shared.cell {
            cell.await_ranks(&mask[..self.shared.mask_words]);
        }
    }

    /// Records which ranks from 128 up this operation waits for.
    fn note_wide(&mut self, wide: &[u64]) {
        if !self.noted_wide && wide.iter().all(|word| *word == 0) {
            return;
        }
        self.noted_wide = true;
        self.shared.recorder.note_wide(self.ticket, wide);
    }

    /// Of the ranks waited for, this one came last.
    #[inline]
    pub(crate) fn last_to_come(&mut self, peer: usize) {
        if self.waiting && peer < 64 * MASK_WORDS {
            self.awaited = NOBODY;
            set_rank(&mut self.awaited, peer);
        }
    }

    /// Something moved after a wait.
    #[inline]
    pub(crate) fn progress(&mut self) {
        if !self.waiting {
            return;
        }
        let now = self.ticks();
        self.account(now);
        self.waiting = false;
        self.since = now;
        if let Some(cell) = &self.shared.cell {
            cell.await_ranks(&NOBODY[..self.shared.mask_words]);
        }
        if !self.brief {
            // Also lets watchers distinguish a long transfer from a stuck one.
            let words = self.shared.recorder.memory.entry(self.ticket);
            if self.progressed == 0 {
                words[entry::PROGRESS].store(now, Relaxed);
            }
            self.progressed = now;
            self.shared.watched.moved.store(now, Relaxed);
        }
    }

    fn account(&mut self, now: u64) {
        let took = now.saturating_sub(self.since);
        self.waited += took;
        if let Some(peer) = lowest(&self.awaited[..self.shared.mask_words])
            && (took >= self.slowest.1)
        {
            self.slowest = (peer + 1, took);
        }
    }

    /// The clock, for [`Flight::folded`] and the like; 0 where nothing is timed.
    #[inline]
    pub(crate) fn ticks(&self) -> u64 {
        if self.brief {
            0
        } else {
            self.shared.recorder.clock.ticks()
        }
    }

    /// Folding ended.
    #[inline]
    pub(crate) fn folded(&mut self, began: u64) {
        if !self.brief {
            self.folded += self.shared.recorder.clock.ticks().saturating_sub(began);
        }
    }

    /// The operation is over, successfully or not.
    #[inline]
    pub(crate) fn end(&mut self, signature: &Signature, is_ok: bool) {
        let now = self.shared.recorder.clock.ticks();
        if self.waiting {
            self.account(if self.brief { 0 } else { now });
        }
        if self.brief && self.ever_waited {
            self.waited = now.saturating_sub(self.started);
        }
        let words = self.shared.recorder.memory.entry(self.ticket);
        let set = |at: usize, value: u64| words[at].store(value, Relaxed);
        set(entry::DONE, now);
        set(entry::WAITED, self.waited);
        set(entry::FOLDED, self.folded);
        let slowest = match (&self.shared.roster, self.slowest.0) {
            (Some(roster), rank @ 1..) => roster
                .get(rank as usize - 1)
                .map_or(0, |first| *first as u64 + 1),
            (_, rank) => rank,
        };
        set(entry::SLOWEST, slowest);
        if is_ok && self.ever_waited {
            (entry::AWAITED..)
                .take(entry::AWAITED_WORDS)
                .for_each(|at| set(at, 0));
            if self.noted_wide {
                self.shared.recorder.forget_wide(self.ticket);
            }
        }
        let state = if is_ok { state::DONE } else { state::ABORTED };
        words[entry::STATE].store(state, Release);
        self.shared.watched.current.store(0, Relaxed);
        self.shared
            .recorder
            .memory
            .prefetch(self.ticket.wrapping_add(1));
        if let Some(cell) = self.shared.cell.as_ref().filter(|_| is_ok) {
            if self.waiting {
                cell.await_ranks(&NOBODY[..self.shared.mask_words]);
            }
            cell.done(signature.seq);
        }
    }

    /// The running operation's deadline.
    #[inline]
    pub(crate) fn set_limit(&self, limit: Duration) {
        let ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.shared.watched.limit_ns.store(ns, Relaxed);
    }

    /// When another rank of the group was last known to be in a declared phase.
    #[cold]
    pub(crate) fn others_busy(&self) -> Option<Instant> {
        self.shared.watched.others_busy()
    }

    /// The same for the messages of the group.
    pub(crate) fn messages(&self) -> MessageFlight {
        self.shared.clone()
    }

    /// The ranks to blame among the `missing` ones and those they wait for, as far as
    /// known, and what they are doing instead. Never empty unless `missing` is.
    #[cold]
    pub(crate) fn blame(
        &self,
        missing: &[usize],
        signature: &Signature,
    ) -> (Vec<usize>, Option<String>) {
        self.shared.watched.blame(missing, Some(signature.seq))
    }

    /// Records the reason and writes the dump.
    #[cold]
    pub(crate) fn failed(&self, error: &Error) {
        self.shared.failed(error);
    }
}

/// Records the messages of one group, of which several may be in flight.
#[derive(Clone)]
pub(crate) struct MessageFlight {
    recorder: Arc<Recorder>,
    watched: Arc<Watched>,
    generation: u32,
    group: u32,
    cell: Option<Arc<StatusCell>>,
    /// The first ranks of the members, by rank, where they differ.
    roster: Option<Arc<[usize]>>,
    /// Words of a mask that this group's ranks need.
    mask_words: usize,
    transport: u8,
}

impl MessageFlight {
    /// A message was issued and is in flight; returns its entry.
    pub(crate) fn begin(&self, operation: &Operation, signature: &Signature) -> u64 {
        let recorder = &*self.recorder;
        let entry = recorder.queued(self.generation, self.group, operation);
        let words = recorder.memory.entry(entry);
        let set = |at: usize, value: u64| words[at].store(value, Relaxed);
        set(entry::WHAT, recorder.what(operation, self.transport));
        set(entry::SEQ, signature.seq);
        set(entry::STARTED, recorder.clock.ticks());
        words[entry::STATE].store(state::RUNNING, Release);
        entry
    }

    /// A thread waits for the message of `entry`, and for these ranks.
    pub(crate) fn waiting(&self, entry: u64, ranks: impl Iterator<Item = usize>, limit: Duration) {
        let mine = entry.wrapping_add(1);
        let current = &self.watched.current;
        let before = current.compare_exchange(0, mine, Release, Relaxed);
        // A collective may be in progress.
        if entry == NO_TICKET || before.is_err_and(|other| other != mine) {
            return;
        }
        let ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.watched.limit_ns.store(ns, Relaxed);
        let mut mask = NOBODY;
        ranks.for_each(|rank| set_rank(&mut mask, rank));
        let first = self.first_ranks(mask);
        let words = self.recorder.memory.entry(entry);
        let (low, wide) = first.split_at(entry::AWAITED_WORDS);
        for (at, word) in (entry::AWAITED..).zip(low) {
            words[at].store(*word, Relaxed);
        }
        if wide.iter().any(|word| *word != 0) {
            self.recorder.note_wide(entry, wide);
        }
        if let Some(cell) = &self.cell {
            cell.await_ranks(&mask);
        }
    }

    /// The same ranks by their numbers in the first generation, as far as there is room.
    fn first_ranks(&self, mask: Mask) -> Mask {
        let Some(roster) = &self.roster else {
            return mask;
        };
        let mut noted = NOBODY;
        for rank in ranks_of(&mask[..self.mask_words]) {
            if let Some(first) = roster.get(rank as usize) {
                set_rank(&mut noted, *first);
            }
        }
        noted
    }

    /// No thread waits for the message of `entry` any more.
    pub(crate) fn stop_waiting(&self, entry: u64) -> bool {
        let mine = entry.wrapping_add(1);
        let current = &self.watched.current;
        let is_mine = current.compare_exchange(mine, 0, Release, Relaxed).is_ok();
        if let Some(cell) = self.cell.as_ref().filter(|_| is_mine) {
            cell.await_ranks(&NOBODY);
        }
        is_mine
    }

    /// A receive has found its message.
    pub(crate) fn matched(&self, entry: u64, signature: &Signature, target: usize) {
        let words = self.recorder.memory.entry(entry);
        words[entry::SEQ].store(signature.seq, Relaxed);
        let root = (target as u64) << 32 | signature.root as u64;
        words[entry::ROOT].store(root, Relaxed);
    }

    /// The message is over, successfully or not.
    pub(crate) fn end(&self, entry: u64, is_ok: bool) {
        let words = self.recorder.memory.entry(entry);
        let now = self.recorder.clock.ticks();
        words[entry::DONE].store(now, Relaxed);
        if is_ok {
            (entry::AWAITED..)
                .take(entry::AWAITED_WORDS)
                .for_each(|at| words[at].store(0, Relaxed));
            self.recorder.forget_wide(entry);
        }
        if entry != NO_TICKET && self.stop_waiting(entry) {
            let started = words[entry::STARTED].load(Relaxed);
            words[entry::WAITED].store(now.saturating_sub(started), Relaxed);
        }
        let state = if is_ok { state::DONE } else { state::ABORTED };
        words[entry::STATE].store(state, Release);
    }

    /// As [`Flight::others_busy`].
    pub(crate) fn others_busy(&self) -> Option<Instant> {
        self.watched.others_busy()
    }

    /// As [`Flight::blame`].
    pub(crate) fn blame(&self, missing: &[usize]) -> (Vec<usize>, Option<String>) {
        self.watched.blame(missing, None)
    }

    /// As [`Flight::failed`].
    pub(crate) fn failed(&self, error: &Error) {
        let failure = Failure::of(error.kind());
        self.recorder
            .failed(self.watched.ids(), &error.to_string(), failure);
    }
}

/// The lowest bit, over all words.
fn lowest(mask: &[u64]) -> Option<u64> {
    let index = mask.iter().position(|word| *word != 0)?;
    Some(64 * index as u64 + u64::from(mask[index].trailing_zeros()))
}
