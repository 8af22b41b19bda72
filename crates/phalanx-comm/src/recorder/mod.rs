//! The flight recorder: records this rank's last 4096 operations, always on.
//!
//! | part | does |
//! |---|---|
//! | `flight` | the executor's hooks: begin, wait, progress, fold, end |
//! | `memory`, `layout` | a fixed piece of memory, private or shared with the launcher |
//! | `clock` | a clock that costs a few nanoseconds |
//! | `dump`, `file` | the memory as a value, as JSON, and back |
//! | `monitor`, `watch`, `facts` | a thread that reports which ranks are late, for which operation, and what they are doing instead |
//!
//! *Cost:* an operation makes some twenty relaxed stores into its own entry and reads
//! the processor's counter twice; it allocates nothing, and takes no lock unless it has
//! a label.
//!
//! *Dumps.* A rank writes its own when it fails
//! ([`ProcessGroup::set_flight_dir`](crate::ProcessGroup::set_flight_dir),
//! `PHALANX_FLIGHT_DIR`). Under `phalanx launch` and `phalanx train` the memory is
//! shared with the launcher (`PHALANX_FLIGHT_FILE`), which writes them instead: also
//! for ranks that were killed or stopped, and on SIGUSR2 to the *launcher*. No signal
//! handler is installed in a rank: SIGUSR2 to a rank ends it, like any process without
//! a handler. A program that was not started by the launcher can call
//! [`ProcessGroup::flight`](crate::ProcessGroup::flight) from a thread.

pub(crate) mod clock;
mod dump;
mod facts;
mod file;
mod flight;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod layout;
mod memory;
mod monitor;
mod watch;

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

pub use dump::{Dump, Entry, Failure, Phase, Position, State};
pub use file::{DumpError, MAX_DUMP_BYTES};
pub use memory::create_memory;

pub(crate) use flight::{Flight, MessageFlight};
pub(crate) use watch::Watched;

use crate::operation::Operation;
use crate::status::StatusCell;
use crate::status::words::{cut, write_text};
use crate::sync::lock;
use clock::{Anchor, Clock, Scale};
use layout::{
    BUSY, ENTRIES, LABEL_BYTES, LABEL_LOST, LABELS, NO_TICKET, entry, head, label_at, state,
};
use memory::Memory;

/// Environment variable with the memory file of a rank's recorder; set by the launcher.
pub const FILE_VARIABLE: &str = "PHALANX_FLIGHT_FILE";
/// Environment variable with the directory into which a failing rank writes its recorder.
pub const DIR_VARIABLE: &str = "PHALANX_FLIGHT_DIR";

/// One rank's recorder, shared by its groups.
pub(crate) struct Recorder {
    memory: Memory,
    clock: Clock,
    anchor: Anchor,
    late_after: Duration,
    /// The launcher shares the memory, so it writes the dumps.
    is_shared: bool,
    labels: Mutex<Vec<Arc<str>>>,
    /// This rank's status cells, which others read; one per group.
    cells: Mutex<Vec<Weak<StatusCell>>>,
    dir: Mutex<Option<PathBuf>>,
    /// Whether the recorded failure was written into a file.
    dumped: Mutex<bool>,
}

/// The text of a phase, as stored in memory.
type PhaseName = [u64; head::PHASE_WORDS];

/// What a rank was doing before a declared phase.
pub(crate) struct Earlier {
    name: PhaseName,
    busy_until_ns: u64,
}

/// Where a recorder's memory comes from.
pub(crate) enum Place {
    Private,
    /// The launcher's memory file, if there is one.
    Launcher,
    /// Private, and not written to a file: that of another group of this process is.
    Beside,
}

impl Place {
    /// Of a group that was formed by hand, by the variables of the job.
    pub(crate) fn of_group(
        rank: usize,
        world: usize,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Place {
        static FORMED: AtomicBool = AtomicBool::new(false);
        static TAKEN: AtomicBool = AtomicBool::new(false);
        let (Some(own), Some(all)) = (variable("RANK"), variable("WORLD_SIZE")) else {
            return Place::Private;
        };
        let is_job = own == rank.to_string() && all == world.to_string();
        let is_first = !FORMED.swap(true, Relaxed);
        match is_job && !TAKEN.swap(true, Relaxed) {
            true => Place::Launcher,
            false if is_first => Place::Private,
            false => Place::Beside,
        }
    }
}

impl Recorder {
    pub(crate) fn new(rank: usize, world: usize, place: &Place) -> std::io::Result<Recorder> {
        let variable = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
        let offered = match place {
            Place::Launcher => variable(FILE_VARIABLE),
            _ => None,
        };
        let dir = match place {
            Place::Beside => None,
            _ => variable(DIR_VARIABLE),
        };
        let shared = offered.and_then(|path| match Memory::shared(&path) {
            Ok(memory) => Some(memory),
            Err(e) => {
                tracing::debug!("the launcher cannot see the flight recorder: {e}");
                None
            }
        });
        let is_shared = shared.is_some();
        let memory = match shared {
            Some(memory) => memory,
            None => Memory::private()?,
        };
        let clock = Clock::best();
        let anchor = clock.anchor();
        let set = |at: usize, value: u64| memory.word(at).store(value, Relaxed);
        set(head::OWNER, u64::from(std::process::id()));
        set(head::RANK, (world as u64) << 32 | rank as u64);
        set(head::CLOCK, clock.code());
        set(head::ANCHOR_TICKS, anchor.ticks);
        set(head::ANCHOR_MONOTONIC, anchor.monotonic_ns);
        set(head::ANCHOR_WALL, anchor.wall_ns);
        set(head::VERSION, layout::VERSION);
        memory.word(head::MAGIC).store(layout::MAGIC, Release);
        Ok(Recorder {
            memory,
            clock,
            anchor,
            late_after: watch::late_after(),
            is_shared,
            labels: Mutex::new(Vec::with_capacity(LABELS)),
            cells: Mutex::default(),
            dir: Mutex::new(dir.map(PathBuf::from)),
            dumped: Mutex::new(false),
        })
    }

    /// A group of this generation is formed of the ranks with the numbers in `roster`
    /// in the first one; its other ranks read `cell`. The first group of a generation
    /// has all remaining ranks: earlier failures are cleared.
    pub(crate) fn join(&self, generation: u32, roster: &[usize], cell: Option<&Arc<StatusCell>>) {
        let mut dumped = lock(&self.dumped);
        let (generation, word) = (u64::from(generation), |at| self.memory.word(at));
        let is_first = word(head::FORMED).load(Relaxed) == 0;
        if is_first {
            word(head::JOINED).store(generation, Relaxed);
        }
        let is_newest = word(head::GENERATION).fetch_max(generation, Relaxed) < generation;
        if is_first || is_newest {
            word(head::FORMED).store(self.clock.ticks().max(1), Relaxed);
        }
        if is_newest {
            word(head::FAILED_AT).store(0, Relaxed);
            *dumped = false;
            for index in 0..head::MEMBERS_WORDS {
                let ranks = 64 * index..64 * (index + 1);
                let of_word = roster.iter().filter(|rank| ranks.contains(rank));
                let mask = of_word.fold(0, |mask, rank| mask | 1_u64 << (rank % 64));
                word(head::MEMBERS + index).store(mask, Relaxed);
            }
        }
        drop(dumped);
        if let Some(cell) = cell {
            let mut cells = lock(&self.cells);
            cell.sit();
            cell.set_position(word(head::POSITION).load(Relaxed));
            let since = word(head::PHASE_SINCE).load(Relaxed);
            if since > 0 {
                let scale = Scale::new(self.anchor, self.clock.anchor());
                cell.set_phase(&self.phase_name(), scale.moment(since));
            }
            cells.retain(|cell| cell.strong_count() > 0);
            cells.push(Arc::downgrade(cell));
        }
    }

    /// The number that all ranks of the job have.
    pub(crate) fn set_job(&self, job: u64) {
        self.memory.word(head::JOB).store(job, Relaxed);
    }

    /// What the rank is doing from now on.
    pub(crate) fn set_phase(&self, name: &str) {
        let mut words = PhaseName::default();
        write_text(name, words.len(), |i, word| words[i] = word);
        self.show_phase(words);
    }

    /// An empty name: what the rank is doing is unknown.
    fn show_phase(&self, name: PhaseName) {
        let memory = &self.memory;
        let is_said = name[0] != 0;
        let since = if is_said { self.clock.ticks() } else { 0 };
        memory.word(head::PHASE_SINCE).store(since, Relaxed);
        for (i, word) in name.into_iter().enumerate() {
            memory.word(head::PHASE + i).store(word, Relaxed);
        }
        let cells = lock(&self.cells);
        if !cells.is_empty() {
            let since = if is_said { clock::monotonic_ns() } else { 0 };
            for cell in cells.iter().filter_map(Weak::upgrade) {
                cell.set_phase(&name, since);
            }
        }
    }

    fn phase_name(&self) -> PhaseName {
        std::array::from_fn(|i| self.memory.word(head::PHASE + i).load(Relaxed))
    }

    /// The rank is in phase `name` until [`end_phase`](Self::end_phase), for at most `limit`, and others wait for it
    /// meanwhile.
    pub(crate) fn begin_phase(&self, name: &str, limit: Duration) -> Earlier {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let until = clock::monotonic_ns().saturating_add(limit);
        let earlier = Earlier {
            name: self.phase_name(),
            busy_until_ns: self.busy_until().swap(until, Relaxed),
        };
        self.set_phase(name);
        self.beat();
        earlier
    }

    /// The phase has ended; the rank is again doing what it did `earlier`.
    pub(crate) fn end_phase(&self, earlier: &Earlier) {
        self.beat();
        self.busy_until().store(earlier.busy_until_ns, Relaxed);
        self.show_phase(earlier.name);
    }

    /// When the declared phase must be over, on the monotonic clock; 0: there is none.
    fn busy_until(&self) -> &AtomicU64 {
        self.memory.word(head::BUSY_UNTIL)
    }

    /// Whether the rank is in a declared phase that may still last.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy_until().load(Relaxed) > clock::monotonic_ns()
    }

    /// Publishes to the ranks of this host that this one is in a declared phase, if it is.
    fn beat(&self) {
        let until = self.busy_until().load(Relaxed);
        if until > 0 {
            let now = clock::monotonic_ns().min(until);
            let cells = lock(&self.cells);
            for cell in cells.iter().filter_map(Weak::upgrade) {
                cell.set_busy(now);
            }
        }
    }

    /// Requests the time between SIGTERM and SIGKILL from the launcher.
    pub(crate) fn set_stop_grace(&self, grace: Duration) {
        let ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.memory.word(head::STOP_GRACE_MS).store(ms, Relaxed);
    }

    /// Sets the rank's position in the training; both are counted from 1.
    pub(crate) fn set_position(&self, epoch: u64, step: u64) {
        let packed = (epoch << 40 | step & ((1 << 40) - 1)) + 1;
        self.memory.word(head::POSITION).store(packed, Relaxed);
        for cell in lock(&self.cells).iter().filter_map(Weak::upgrade) {
            cell.set_position(packed);
        }
    }

    /// An operation was issued and will run later.
    pub(crate) fn queued(&self, generation: u32, group: u32, operation: &Operation) -> u64 {
        let ticket = self.claim();
        let words = self.memory.entry(ticket);
        let set = |at: usize, value: u64| words[at].store(value, Relaxed);
        set(entry::SEQ, u64::MAX);
        set(entry::GROUP, u64::from(generation) << 32 | u64::from(group));
        set(entry::COUNT, operation.count as u64);
        set(entry::WHAT, self.what(operation, 0));
        set(entry::ROOT, root(operation));
        set(entry::QUEUED, self.clock.ticks());
        for at in entry::STARTED..entry::STATE {
            set(at, 0);
        }
        set(entry::STATE, state::QUEUED);
        words[entry::STAMP].store(ticket.wrapping_add(1), Release);
        ticket
    }

    /// The operation of `ticket` waits for these ranks from 128 up.
    fn note_wide(&self, ticket: u64, wide: &[u64]) {
        let word = |at: usize| self.memory.word(at);
        // Readers see no ranks of another operation.
        word(head::AWAITED_WIDE_OF).store(0, Release);
        for (at, ranks) in (head::AWAITED_WIDE..).zip(wide) {
            word(at).store(*ranks, Release);
        }
        word(head::AWAITED_WIDE_OF).store(ticket.wrapping_add(1), Release);
    }

    /// It waits for none any more.
    fn forget_wide(&self, ticket: u64) {
        let of = self.memory.word(head::AWAITED_WIDE_OF);
        let _ = of.compare_exchange(ticket.wrapping_add(1), 0, Release, Relaxed);
    }

    /// An issued operation will never run.
    pub(crate) fn abandon(&self, ticket: u64) {
        let words = self.memory.entry(ticket);
        words[entry::DONE].store(self.clock.ticks(), Relaxed);
        words[entry::STATE].store(state::ABORTED, Release);
    }

    /// A ticket whose entry belongs to the caller: no other thread writes it until the
    /// caller stores the stamp, and none changes it until the caller ends the
    /// operation.
    ///
    /// Entries of operations that are not over are kept, however many were issued
    /// since: they show where a rank hangs. [`NO_TICKET`] when all are of this kind.
    #[inline]
    fn claim(&self) -> u64 {
        for _ in 0..ENTRIES {
            let ticket = self.memory.word(head::TICKETS).fetch_add(1, Relaxed);
            let words = self.memory.entry(ticket);
            let stamp = words[entry::STAMP].load(Acquire);
            let is_live = stamp != 0
                && matches!(
                    words[entry::STATE].load(Acquire),
                    state::QUEUED | state::RUNNING
                );
            // Busy stamps are larger than any ticket.
            let is_taken = stamp > ticket || is_live;
            if !is_taken
                && words[entry::STAMP]
                    .compare_exchange(stamp, BUSY | ticket, Acquire, Relaxed)
                    .is_ok()
            {
                std::sync::atomic::fence(Release);
                return ticket;
            }
        }
        NO_TICKET
    }

    fn what(&self, operation: &Operation, transport: u8) -> u64 {
        let label = operation
            .label
            .as_ref()
            .map_or(0, |label| self.label(label));
        let bytes = [
            operation.collective.wire(),
            operation.method.map_or(0, |method| method.wire()),
            operation.dtype.map_or(0, crate::DType::wire),
            operation.op.map_or(0, crate::ReduceOp::wire),
            transport,
            label.to_le_bytes()[0],
            label.to_le_bytes()[1],
            0,
        ];
        u64::from_le_bytes(bytes)
    }

    /// The label's number, from 1. Labels are few and live long: a bucket's
    /// is found by its address.
    fn label(&self, label: &Arc<str>) -> u16 {
        let mut labels = lock(&self.labels);
        let known = labels
            .iter()
            .position(|known| Arc::ptr_eq(known, label))
            .or_else(|| labels.iter().position(|known| **known == **label));
        if let Some(index) = known {
            return index as u16 + 1;
        }
        let index = labels.len();
        if index >= LABELS {
            return LABEL_LOST;
        }
        let text = cut(label, LABEL_BYTES);
        let at = label_at(index);
        let word = |i: usize| self.memory.word(at + i);
        word(0).store(text.len() as u64, Relaxed);
        write_text(text, layout::LABEL_WORDS - 1, |i, value| {
            word(1 + i).store(value, Relaxed);
        });
        labels.push(Arc::clone(label));
        self.memory
            .word(head::LABELS_USED)
            .store(labels.len() as u64, Release);
        labels.len() as u16
    }

    /// The text of an operation's label.
    fn label_text(&self, entry: &Entry) -> Option<Arc<str>> {
        let labels = lock(&self.labels);
        labels.get(usize::from(entry.label?)).cloned()
    }

    pub(crate) fn set_dir(&self, dir: &Path) {
        let mut own = lock(&self.dir);
        let dir = own.get_or_insert_with(|| absolute(dir));
        // A launcher without its own directory uses this one. A truncated path would be
        // another one.
        if let Some(text) = dir.to_str().filter(|t| t.len() < 8 * head::DIR_WORDS) {
            write_text(text, head::DIR_WORDS, |i, word| {
                self.memory.word(head::DIR + i).store(word, Relaxed);
            });
        }
    }

    /// The rank failed in a group: records the first reason and writes the dump. After
    /// the rank has continued from a failure, the next one counts as the first.
    #[cold]
    pub(crate) fn failed(&self, (generation, group): (u32, u32), reason: &str, failure: Failure) {
        let memory = &self.memory;
        let mut dumped = lock(&self.dumped);
        if u64::from(generation) < memory.word(head::GENERATION).load(Relaxed) {
            return; // a handle to a group that was left behind
        }
        let word = |at: usize| memory.word(at).load(Relaxed);
        if word(head::FAILED_AT) == 0 || dump::is_outlived(word) {
            // Readers see no reason without its time.
            memory.word(head::FAILED_AT).store(0, Relaxed);
            std::sync::atomic::fence(Release);
            write_text(reason, head::REASON_WORDS, |i, word| {
                memory.word(head::REASON + i).store(word, Relaxed);
            });
            let failed_group = u64::from(generation) << 32 | u64::from(group);
            memory.word(head::FAILED_GROUP).store(failed_group, Relaxed);
            memory.word(head::FAILURE).store(failure.code(), Relaxed);
            let now = self.clock.ticks().max(1);
            memory.word(head::FAILED_AT).store(now, Release);
            *dumped = false;
        }
        if self.is_shared || std::mem::replace(&mut *dumped, true) {
            return;
        }
        drop(dumped);
        if let Some(Err(e)) = self.write() {
            tracing::warn!("the flight recorder could not be written: {e}");
        }
    }

    /// Writes the recorder into its directory; `None` when it has none.
    pub(crate) fn write(&self) -> Option<std::io::Result<PathBuf>> {
        let dir = lock(&self.dir).clone()?;
        Some(self.dump().write_into(&dir))
    }

    /// What is recorded now.
    pub(crate) fn dump(&self) -> Dump {
        Dump::decode(&self.memory.copy(), self.clock.anchor())
    }
}

/// `target << 32 | root`.
fn root(operation: &Operation) -> u64 {
    (operation.target as u64) << 32 | operation.root as u64
}

/// Ranks may change their working directory.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests;
