//! One group as its watcher sees it: the operation in progress, what the other ranks
//! are doing, and the report when one is late.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::Recorder;
use super::clock::{self, Scale};
use super::dump::{Entry, State};
use super::facts::{self, Fact, Record};
use phalanx_base::host_name;

use crate::notice::{late_variable, ranks, say};
use crate::plan::Collective;
use crate::status::StatusCell;
use crate::sync::lock;
use crate::transport::GroupKeys;

/// Time after which a waiting rank first reports the ranks it waits for; see [`LATE_VARIABLE`].
const LATE_AFTER: Duration = Duration::from_secs(10);
/// The topic of its keys in the store.
const TOPIC: &str = "flight";
/// After this time idle or in one phase, a rank publishes that in the store.
const QUIET: Duration = Duration::from_secs(5);
/// How often a rank in a declared phase publishes it in the store, and a waiting rank reads it, in a group of up
/// to [`BEAT_RANKS`] ranks; in larger ones less often, up to [`BEAT_MAX`].
const BEAT: Duration = Duration::from_millis(400);
const BEAT_RANKS: usize = 64;
const BEAT_MAX: Duration = Duration::from_secs(5);

/// One rank's view of one group.
pub(crate) struct Watched {
    pub(super) recorder: Arc<Recorder>,
    generation: u32,
    group: u32,
    rank: usize,
    /// Of the ranks on this host, ours included.
    cells: Vec<Option<Arc<StatusCell>>>,
    /// Present when some rank can only be reached through the store.
    keys: Option<Arc<GroupKeys>>,
    /// The running operation's ticket, plus 1; 0: none.
    pub(super) current: AtomicU64,
    /// The running operation's limit in nanoseconds.
    pub(super) limit_ns: AtomicU64,
    /// When something last moved in a long operation, in ticks.
    pub(super) moved: AtomicU64,
    reported: Mutex<Reported>,
    /// The records read from the store of ranks without a cell.
    heard: Mutex<Vec<Fact>>,
    beats: Mutex<Heartbeats>,
    /// When a rank without a cell was last known to be in a declared phase, on the monotonic clock; 0: never.
    heard_busy_ns: AtomicU64,
}

/// The store's record of declared phases: a number that grows while any rank of the group is in one.
#[derive(Default)]
struct Heartbeats {
    told_ns: u64,
    asked_ns: u64,
    /// The last value read; none before the first read.
    count: Option<Vec<u8>>,
}

/// What was reported, so that it is reported once.
#[derive(Default)]
struct Reported {
    /// The ticket reported, and how often.
    late: (u64, u32),
    published_ns: Option<u64>,
}

impl Watched {
    pub(crate) fn new(
        recorder: Arc<Recorder>,
        (generation, group): (u32, u32),
        rank: usize,
        cells: Vec<Option<StatusCell>>,
        keys: Option<Arc<GroupKeys>>,
    ) -> Watched {
        let cells: Vec<Option<Arc<StatusCell>>> =
            cells.into_iter().map(|cell| cell.map(Arc::new)).collect();
        Watched {
            recorder,
            generation,
            group,
            rank,
            keys: keys.filter(|_| cells.iter().any(Option::is_none)),
            cells,
            current: AtomicU64::new(0),
            limit_ns: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            reported: Mutex::default(),
            heard: Mutex::default(),
            beats: Mutex::default(),
            heard_busy_ns: AtomicU64::new(0),
        }
    }

    pub(super) fn own_cell(&self) -> Option<&Arc<StatusCell>> {
        self.cells.get(self.rank)?.as_ref()
    }

    pub(super) fn has_peers(&self) -> bool {
        self.cells.len() > 1
    }

    pub(super) fn ids(&self) -> (u32, u32) {
        (self.generation, self.group)
    }

    /// Whether the other is another group of the same rank.
    pub(super) fn is_same_rank_as(&self, other: &Watched) -> bool {
        Arc::ptr_eq(&self.recorder, &other.recorder) && self.ids() != other.ids()
    }

    /// Whether an operation of this group is in progress.
    pub(super) fn is_in_operation(&self) -> bool {
        self.current.load(Relaxed) > 0
    }

    /// Publishes to the ranks of this host that the rank is in a declared phase, if it is.
    pub(super) fn beat(&self) {
        let until = self.recorder.busy_until().load(Relaxed);
        if let Some(cell) = self.own_cell().filter(|_| until > 0) {
            cell.set_busy(clock::monotonic_ns().min(until));
        }
    }

    /// The same through the store; also checks whether another rank is in one, if an operation has waited here for
    /// `waited`.
    fn beat_through_store(&self, is_busy: bool, waited: Duration, now_ns: u64) {
        let Some(keys) = &self.keys else { return };
        let ranks = u32::try_from(self.cells.len().div_ceil(BEAT_RANKS)).unwrap_or(u32::MAX);
        let every = BEAT.saturating_mul(ranks).min(BEAT_MAX);
        let is_due = |last: u64| Duration::from_nanos(now_ns.saturating_sub(last)) >= every;
        let key = keys.key(TOPIC, "busy");
        let mut beats = lock(&self.beats);
        let failed = |e| tracing::debug!("the store does not say who is in a phase: {e}");
        if is_busy && is_due(beats.told_ns) {
            beats.told_ns = now_ns;
            if let Err(e) = keys.count_up(&key) {
                failed(e);
            }
        }
        if waited < every || !is_due(beats.asked_ns) {
            return;
        }
        // A change since an earlier wait may be old.
        if Duration::from_nanos(now_ns.saturating_sub(beats.asked_ns)) > every * 4 {
            beats.count = None;
        }
        beats.asked_ns = now_ns;
        match keys.store().try_get(&key) {
            Ok(count) => {
                let count = count.unwrap_or_default();
                // A rank that leaves the group removes it.
                let is_there = !count.is_empty();
                if is_there && beats.count.as_ref().is_some_and(|before| *before != count) {
                    self.heard_busy_ns.store(clock::monotonic_ns(), Relaxed);
                }
                beats.count = Some(count);
            }
            Err(e) => failed(e),
        }
    }

    /// When another rank of the group was last known to be in a declared phase, on the monotonic clock; 0: never.
    pub(super) fn others_busy_ns(&self) -> u64 {
        let others = self.cells.iter().enumerate();
        let others = others.filter(|(rank, _)| *rank != self.rank);
        let of_cells = others.filter_map(|(_, cell)| Some(cell.as_ref()?.busy_ns()));
        let heard = self.heard_busy_ns.load(Relaxed);
        // A time in the future would postpone deadlines forever.
        of_cells.fold(heard, u64::max).min(clock::monotonic_ns())
    }

    /// When another rank of the group was last known to be in a declared phase.
    pub(super) fn others_busy(&self) -> Option<Instant> {
        let busy = self.others_busy_ns();
        let ago = Duration::from_nanos(clock::monotonic_ns().saturating_sub(busy));
        Instant::now().checked_sub(ago).filter(|_| busy > 0)
    }

    /// The operation in progress.
    fn running(&self, scale: &Scale) -> Option<Entry> {
        let ticket = self.current.load(Relaxed).checked_sub(1)?;
        let words = self.recorder.memory.read_entry(ticket)?;
        let word = |at| self.recorder.memory.word(at).load(Relaxed);
        Entry::decode(&words, ticket, scale, word).filter(|e| e.state == State::Running)
    }

    /// Checks the group; called by the watching thread, twice a second. `others` are the other
    /// groups of the same rank, which `is_busy` in a declared phase and in no operation.
    pub(super) fn check<'a>(&self, others: impl Iterator<Item = &'a Watched>, is_busy: bool) {
        let recorder = &*self.recorder;
        let now = recorder.clock.anchor();
        let scale = Scale::new(recorder.anchor, now);
        let running = self.running(&scale);
        let mut others = others.filter_map(|other| other.running(&scale));
        let other = others.next().filter(|_| running.is_none());
        let elsewhere = other.as_ref().and_then(facts::elsewhere);
        if let Some(cell) = self.own_cell() {
            cell.set_elsewhere(elsewhere.as_ref());
        }
        let since = |entry: &Entry| {
            let moved = match self.moved.load(Relaxed) {
                0 => 0,
                ticks => scale.moment(ticks),
            };
            moved.max(entry.started_ns.unwrap_or(now.monotonic_ns))
        };
        let waited = running.as_ref().map_or(Duration::ZERO, |entry| {
            Duration::from_nanos(now.monotonic_ns.saturating_sub(since(entry)))
        });
        let of_other = other
            .and_then(|entry| entry.started_ns)
            .map_or(0, |began| now.monotonic_ns.saturating_sub(began));
        let quiet_for = waited.max(Duration::from_nanos(of_other));
        self.publish(quiet_for, now.monotonic_ns);
        self.beat_through_store(is_busy, waited, now.monotonic_ns);
        let Some(entry) = running else { return };
        let limit = Duration::from_nanos(self.limit_ns.load(Relaxed));
        // The deadline counts from the last sign of a phase.
        let silent = now.monotonic_ns.saturating_sub(self.others_busy_ns());
        let left = limit.saturating_sub(waited.min(Duration::from_nanos(silent)));
        // An error will soon need it.
        if left < Duration::from_secs(2) {
            self.ask();
        }
        let mut reported = lock(&self.reported);
        if reported.late.0 != entry.n + 1 {
            reported.late = (entry.n + 1, 0);
        }
        if waited < threshold(recorder.late_after, reported.late.1) {
            return;
        }
        reported.late.1 += 1;
        drop(reported);
        self.ask();
        if let Some(text) = self.report(&entry, waited, left) {
            say(&text);
        }
    }

    /// What is known about all other ranks.
    fn facts(&self) -> Vec<Fact> {
        let now = clock::monotonic_ns();
        let mut facts: Vec<Fact> = self
            .cells
            .iter()
            .enumerate()
            .filter(|(rank, _)| *rank != self.rank)
            .filter_map(|(rank, cell)| Some(Fact::of_cell(rank, cell.as_ref()?.read(now))))
            .collect();
        facts.extend(lock(&self.heard).iter().cloned());
        facts.sort_by_key(|fact| fact.rank);
        facts
    }

    /// For an error: the ranks to blame among the `missing` ones and those they wait
    /// for, and what they are doing instead of joining `seq`.
    pub(super) fn blame(
        &self,
        missing: &[usize],
        seq: Option<u64>,
    ) -> (Vec<usize>, Option<String>) {
        let facts = self.facts();
        let culprits = facts::culprits(&facts, self.rank, missing);
        let excuse = excuse(&facts, &culprits, seq);
        (culprits, excuse)
    }

    /// The report on an operation without progress; none if a lower rank of this host
    /// also waits in it and reports it.
    fn report(&self, entry: &Entry, waited: Duration, left: Duration) -> Option<String> {
        let facts = self.facts();
        let is_collective = entry.op != Collective::SendRecv.name();
        let seq = entry.seq.filter(|_| is_collective);
        let awaited: Vec<usize> = entry.awaited.iter().map(|rank| *rank as usize).collect();
        let (mut waiting, mut late) = (vec![self.rank], Vec::new());
        for fact in &facts {
            let is_in = seq.is_some_and(|seq| fact.is_in(seq));
            let is_past = seq.is_some_and(|seq| fact.status.done.is_some_and(|done| done >= seq));
            if is_in && !fact.is_halted() {
                waiting.push(fact.rank);
            } else if !is_past && (is_collective || awaited.contains(&fact.rank)) {
                late.push(fact.rank);
            }
        }
        waiting.sort_unstable();
        let lower_speaks = facts.iter().any(|fact| {
            let here = self.cells.get(fact.rank).is_some_and(Option::is_some) || fact.is_local;
            here && fact.rank < self.rank && waiting.contains(&fact.rank)
        });
        if lower_speaks {
            return None;
        }
        if late.is_empty() {
            late = awaited;
        }
        if late.is_empty() {
            return None;
        }
        let fact_of = |rank: usize| facts.iter().find(|fact| fact.rank == rank);
        let names = match &late[..] {
            [rank] => fact_of(*rank).map_or(format!("rank {rank}"), Fact::name),
            many => ranks(many),
        };
        let all_came = late
            .iter()
            .all(|rank| fact_of(*rank).is_some_and(|fact| seq.is_some_and(|seq| fact.is_in(seq))));
        let verb = match (all_came, late.len()) {
            (true, 1) => "does not continue in",
            (true, _) => "do not continue in",
            (false, 1) => "has not reached",
            (false, _) => "have not come to",
        };
        let number = entry.seq.map_or(String::new(), |seq| format!(" seq {seq}"));
        let label = self
            .recorder
            .label_text(entry)
            .map_or(String::new(), |label| format!(" ({label})"));
        let group = match self.group {
            0 => String::new(),
            group => format!(" of group {group:#x}"),
        };
        let mut text = format!(
            "waiting {} s: {names} {verb} {}{number}{group}{label}",
            waited.as_secs(),
            entry.op,
        );
        for rank in late.iter().take(4) {
            let line = fact_of(*rank).map_or_else(
                || format!("\n  rank {rank} has not said what it is doing"),
                |fact| format!("\n  rank {rank} {}", fact.doing(seq)),
            );
            text.push_str(&line);
        }
        let wait = if waiting.len() == 1 { "waits" } else { "wait" };
        text.push_str(&format!("\n  {} {wait}", ranks(&waiting)));
        // A rank now in a phase has published it recently and since this wait began.
        let fresh = match self.keys {
            Some(_) => BEAT_MAX,
            None => 3 * BEAT,
        };
        let silent = clock::monotonic_ns().saturating_sub(self.others_busy_ns());
        if Duration::from_nanos(silent) < fresh.min(waited) {
            text.push_str("; the deadline counts from the end of that phase");
        } else if !left.is_zero() {
            text.push_str(&format!("; deadline in {} s", left.as_secs()));
        }
        Some(text)
    }

    /// Publishes what we are doing to ranks that share no memory with us, when that has
    /// not changed for a while.
    fn publish(&self, waited: Duration, now_ns: u64) {
        let (Some(keys), Some(cell)) = (&self.keys, self.own_cell()) else {
            return;
        };
        let status = cell.read(now_ns);
        let phase_for = status
            .phase
            .as_ref()
            .map_or(Duration::ZERO, |phase| phase.1);
        let limit = Duration::from_nanos(self.limit_ns.load(Relaxed));
        let quiet = QUIET.min(if limit.is_zero() { QUIET } else { limit / 4 });
        let is_quiet = waited.max(phase_for) >= quiet;
        let due = match lock(&self.reported).published_ns {
            // Our identity, once: a rank that is stopped could not publish it later.
            None => true,
            Some(last) => is_quiet && Duration::from_nanos(now_ns.saturating_sub(last)) >= quiet,
        };
        if !due {
            return;
        }
        let record = Record {
            host: host_name(),
            kernel: facts::kernel(),
            status,
            unix_ms: phalanx_base::unix_ms(),
        };
        lock(&self.reported).published_ns = Some(now_ns);
        let published = serde_json::to_vec(&record)
            .map_err(|e| e.to_string())
            .and_then(|bytes| {
                keys.set(&keys.key(TOPIC, self.rank), &bytes)
                    .map_err(|e| e.to_string())
            });
        if let Err(e) = published {
            // The store may have ended with its rank: then nothing is published.
            tracing::debug!("the store does not take what rank {} does: {e}", self.rank);
        }
    }

    /// Asks the store about all ranks that have no cell.
    fn ask(&self) {
        let Some(keys) = &self.keys else { return };
        let kernel = facts::kernel();
        let mut heard = Vec::new();
        for (rank, _) in self
            .cells
            .iter()
            .enumerate()
            .filter(|(_, cell)| cell.is_none())
        {
            match keys.store().try_get(&keys.key(TOPIC, rank)) {
                Ok(Some(bytes)) => {
                    heard.extend(Record::decode(&bytes).map(|record| {
                        Fact::of_record(rank, record, &kernel, phalanx_base::unix_ms())
                    }))
                }
                Ok(None) => {}
                Err(_) => break,
            }
        }
        *lock(&self.heard) = heard;
    }
}

/// What `ranks` are doing instead of joining `seq`; of many ranks, the first two. The
/// store was read before.
fn excuse(facts: &[Fact], ranks: &[usize], seq: Option<u64>) -> Option<String> {
    // An awaited rank may itself wait for one that has not come.
    let absent = |fact: &&Fact| {
        seq.is_some_and(|seq| !fact.is_in(seq) && fact.status.done.is_none_or(|done| done < seq))
    };
    let is_halted = |fact: &Fact| ranks.contains(&fact.rank) && fact.is_halted();
    let is_absent = facts.iter().any(|fact| absent(&fact)) && !facts.iter().any(is_halted);
    let known: Vec<String> = facts
        .iter()
        .filter(|fact| {
            if is_absent {
                absent(fact)
            } else {
                ranks.contains(&fact.rank)
            }
        })
        .take(2)
        .map(|fact| format!("{} {}", fact.name(), fact.doing(seq)))
        .collect();
    let elsewhere = |fact: &Fact| fact.status.elsewhere.is_some() && absent(&fact);
    let advice = match facts.iter().any(elsewhere) {
        true => "; operations of several groups must come in one order on all ranks",
        false => "",
    };
    (!known.is_empty()).then(|| known.join("; ") + advice)
}

/// Times of the reports: 10 s, 30 s, 60 s and then every minute, if the first is 10 s.
fn threshold(first: Duration, said: u32) -> Duration {
    match said {
        0 => first,
        1 => first * 3,
        n => first * 6 * (n - 1),
    }
}

pub(super) fn late_after() -> Duration {
    late_variable().unwrap_or(LATE_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_after_10_30_60_120_seconds() {
        let first = Duration::from_secs(10);
        let said: Vec<u64> = (0..5).map(|n| threshold(first, n).as_secs()).collect();
        assert_eq!(said, [10, 30, 60, 120, 180]);
    }
}
