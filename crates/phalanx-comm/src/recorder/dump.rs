//! A recorder's contents as a value.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::clock::{Anchor, Clock, Scale};
use super::layout::{ENTRIES, LABEL_LOST, LABELS, WORDS, entry, entry_at, head, label_at, state};
use super::memory;
use crate::plan::{Collective, Method};
use crate::status::words::{Mask, printable, ranks_of, read_text};
use crate::{DType, ErrorKind, ReduceOp};
use phalanx_base::host_name;

/// The state of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Issued; earlier operations are not over.
    Queued,
    /// In progress, or waiting.
    Running,
    /// Complete.
    Done,
    /// Failed, on this rank or another.
    Aborted,
}

/// What a rank is doing outside of operations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// `backward`, `loading data`, ...
    pub name: String,
    /// For how long, when the dump was taken.
    pub for_ms: u64,
}

/// A rank's position in the training; both are counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Pass over the data.
    pub epoch: u64,
    /// Optimizer step within it.
    pub step: u64,
}

/// One operation. Moments are on the host's monotonic clock, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Grows from operation to operation of this rank.
    pub n: u64,
    /// Number among the group's collectives (point to point: among the pair's
    /// messages); not known while it is queued.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<u64>,
    /// The process group's generation: 0, and one more after each restart, or in each group that the ranks form later.
    #[serde(rename = "epoch")]
    pub generation: u32,
    /// 0 is the world; other numbers are subgroups.
    pub group: u32,
    /// `all_reduce`, ...
    pub op: String,
    /// `f32`, ...; operations without data have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// `sum`, ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduce: Option<String>,
    /// Elements.
    pub count: u64,
    /// The plan that all ranks chose.
    pub method: String,
    /// The root, or the sender of a message.
    pub root: u32,
    /// The receiver of a message.
    pub target: u32,
    /// `shm`, `tcp`, `shm+tcp`, `thread`.
    pub transport: String,
    /// Index into [`Dump::labels`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<u16>,
    /// How far it came.
    pub state: State,
    /// When it was issued.
    pub queued_ns: u64,
    /// When it started to run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_ns: Option<u64>,
    /// When data first moved after a wait. Operations below 32 KiB are not timed this
    /// finely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress_ns: Option<u64>,
    /// When it was over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done_ns: Option<u64>,
    /// Time without progress.
    pub waiting_ns: u64,
    /// Time in folds.
    pub folding_ns: u64,
    /// The rest: moving bytes.
    pub moving_ns: u64,
    /// Ranks waited for when the dump was taken or the operation failed;
    /// only ranks below 1024 are noted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub awaited: Vec<u32>,
    /// The rank waited for longest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slowest: Option<u32>,
}

/// The kind of failure of a rank, as a reader of dumps distinguishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Failure {
    /// A peer died or left, or the connection to it broke.
    PeerLost,
    /// A deadline passed.
    Timeout,
    /// Ranks were in different operations.
    Desync,
    /// The group was aborted, by this rank or another.
    Aborted,
    /// Its thread panicked.
    Panicked,
    /// Any other failure, also kinds of newer versions.
    #[serde(other)]
    Other,
}

impl Failure {
    const ALL: [Failure; 6] = [
        Failure::PeerLost,
        Failure::Timeout,
        Failure::Desync,
        Failure::Aborted,
        Failure::Panicked,
        Failure::Other,
    ];

    /// For the recorder's memory; 0 is none.
    pub(super) fn code(self) -> u64 {
        self as u64 + 1
    }

    fn from_code(code: u64) -> Option<Failure> {
        let at = usize::try_from(code.checked_sub(1)?).ok()?;
        Some(Self::ALL.get(at).copied().unwrap_or(Failure::Other))
    }

    /// The failure of an error's kind.
    pub(crate) fn of(kind: ErrorKind) -> Failure {
        match kind {
            ErrorKind::PeerLost => Failure::PeerLost,
            ErrorKind::Timeout => Failure::Timeout,
            ErrorKind::Desync => Failure::Desync,
            ErrorKind::Aborted => Failure::Aborted,
            _ => Failure::Other,
        }
    }
}

/// The contents of one rank's recorder at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dump {
    /// [`Dump::FORMAT`].
    pub format: String,
    /// The number of the process, as of all ranks in a dump: its rank in the first generation, or what it was started with
    /// in place of a lost one.
    pub rank: usize,
    /// Ranks in the first generation that it was in.
    pub world: usize,
    /// Generation of its newest group.
    #[serde(rename = "epoch")]
    pub generation: u32,
    /// When that was formed, in nanoseconds since 1970; 0: not known.
    #[serde(default)]
    pub formed_unix_ns: u64,
    /// Generation of its first group.
    #[serde(default)]
    pub joined: u32,
    /// When it was in that, in nanoseconds since 1970.
    #[serde(default)]
    pub joined_unix_ns: u64,
    /// A number that all ranks have from their start to their end, and that those of another attempt do not have; 0: not known.
    #[serde(default)]
    pub job: u64,
    /// The lost rank in whose place the process was started, if the launcher knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instead_of: Option<usize>,
    /// Whether the job has gone on without it, as the launcher knows.
    #[serde(default)]
    pub is_lost: bool,
    /// The ranks in the newest generation, if the group was re-formed; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<usize>,
    /// Host name.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Why it was taken, if something failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What kind of failure that was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
    /// How the process ended, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// When it was taken (when it failed, if it did), on the host's monotonic
    /// clock...
    pub taken_ns: u64,
    /// ...and in nanoseconds since 1970: with both, dumps of several hosts can be
    /// compared.
    pub taken_unix_ns: u64,
    /// The directory for the rank's dumps; not part of a file.
    #[serde(skip)]
    pub folder: Option<PathBuf>,
    /// The time that the rank requested between SIGTERM and SIGKILL
    /// ([`ProcessGroup::set_stop_grace`](crate::ProcessGroup::set_stop_grace)); not part of a file.
    #[serde(skip)]
    pub stop_grace: Option<Duration>,
    /// Whether the rank was in a declared phase ([`ProcessGroup::phase`](crate::ProcessGroup::phase)) that could still last;
    /// not part of a file.
    #[serde(skip)]
    pub is_busy: bool,
    /// What the rank was doing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The rank's position in the training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<Position>,
    /// Operations ever recorded.
    pub recorded: u64,
    /// Texts that operations refer to.
    pub labels: Vec<String>,
    /// The newest first, so that a truncated file still has the last operations.
    pub entries: Vec<Entry>,
}

impl Dump {
    /// Name and version of the format.
    pub const FORMAT: &'static str = "phalanx flight 1";

    /// Reads the recorder of the rank that uses this memory, even if the rank is dead.
    ///
    /// # Errors
    ///
    /// The reason why there is nothing to read, as text.
    pub fn from_memory(file: &OwnedFd) -> Result<Dump, String> {
        let words = memory::read_words(file)?;
        let clock = Clock::from_code(words[head::CLOCK]).unwrap_or(Clock::Monotonic);
        Ok(Dump::decode(&words, clock.anchor()))
    }

    /// Reads all `WORDS` words, which are not trusted. `now` is on the recorder's
    /// clock.
    pub(crate) fn decode(words: &[u64], now: Anchor) -> Dump {
        debug_assert_eq!(words.len(), WORDS);
        let first = Anchor {
            ticks: words[head::ANCHOR_TICKS],
            monotonic_ns: words[head::ANCHOR_MONOTONIC],
            wall_ns: words[head::ANCHOR_WALL],
        };
        let scale = Scale::new(first, now);
        let text = |at: usize, count: usize| read_text(words[at..at + count].iter().copied());
        let has_failed = words[head::FAILED_AT] > 0 && !is_outlived(|at| words[at]);
        let taken_ns = if has_failed {
            scale.moment(words[head::FAILED_AT]).min(now.monotonic_ns)
        } else {
            now.monotonic_ns
        };
        let unix_ns = |monotonic_ns: u64| {
            let ago = now.monotonic_ns.saturating_sub(monotonic_ns);
            now.wall_ns.saturating_sub(ago)
        };
        let phase = (words[head::PHASE_SINCE] > 0).then(|| Phase {
            name: text(head::PHASE, head::PHASE_WORDS),
            for_ms: taken_ns.saturating_sub(scale.moment(words[head::PHASE_SINCE])) / 1_000_000,
        });
        let used = usize::try_from(words[head::LABELS_USED]).unwrap_or(0);
        let labels = (0..used.min(LABELS))
            .map(|index| {
                let at = label_at(index);
                text(at + 1, super::layout::LABEL_WORDS - 1)
            })
            .collect();
        let next = words[head::TICKETS];
        let mut entries: Vec<Entry> = (0..ENTRIES as u64)
            .filter_map(|slot| {
                let at = entry_at(slot);
                let ticket = words[at].checked_sub(1).filter(|n| *n < next)?;
                if entry_at(ticket) != at {
                    return None;
                }
                let entry = words.get(at..at + entry::WORDS)?;
                Entry::decode(entry, ticket, &scale, |at| words[at])
            })
            .collect();
        entries.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.n));
        Dump {
            format: Self::FORMAT.to_owned(),
            rank: (words[head::RANK] & u64::from(u32::MAX)) as usize,
            world: (words[head::RANK] >> 32) as usize,
            generation: words[head::GENERATION] as u32,
            formed_unix_ns: match words[head::FORMED] {
                0 => 0,
                ticks => unix_ns(scale.moment(ticks).min(now.monotonic_ns)),
            },
            joined: words[head::JOINED] as u32,
            joined_unix_ns: first.wall_ns,
            job: words[head::JOB],
            instead_of: None,
            is_lost: false,
            host: host_name(),
            pid: words[head::OWNER] as u32,
            members: (0..64 * head::MEMBERS_WORDS)
                .filter(|rank| words[head::MEMBERS + rank / 64] >> (rank % 64) & 1 == 1)
                .collect(),
            reason: Some(text(head::REASON, head::REASON_WORDS))
                .filter(|text| has_failed && !text.is_empty()),
            failure: Failure::from_code(words[head::FAILURE]).filter(|_| has_failed),
            ended: None,
            taken_ns,
            taken_unix_ns: unix_ns(taken_ns),
            folder: Some(text(head::DIR, head::DIR_WORDS))
                .filter(|text| !text.is_empty())
                .map(PathBuf::from),
            stop_grace: Some(Duration::from_millis(words[head::STOP_GRACE_MS]))
                .filter(|grace| !grace.is_zero()),
            is_busy: words[head::BUSY_UNTIL] > now.monotonic_ns,
            phase,
            position: position(words[head::POSITION]),
            recorded: next,
            labels,
            entries,
        }
    }

    /// The text that an operation's label refers to.
    pub fn label_of(&self, entry: &Entry) -> Option<&str> {
        let label = entry.label?;
        if label == LABEL_LOST {
            return Some("a label that was not kept");
        }
        self.labels.get(usize::from(label)).map(String::as_str)
    }
}

/// Whether the rank has continued after its recorded failure: a subgroup failed, and an
/// operation of another group was begun afterwards and completed. After a failure of
/// the group of all ranks only a new generation continues, which clears the record.
pub(super) fn is_outlived(word: impl Fn(usize) -> u64) -> bool {
    let (failed_at, failed) = (word(head::FAILED_AT), word(head::FAILED_GROUP));
    let is_of_all = failed & u64::from(u32::MAX) == 0;
    !is_of_all
        && (0..ENTRIES as u64).any(|slot| {
            let at = entry_at(slot);
            word(at + entry::STATE) == state::DONE
                && word(at + entry::GROUP) != failed
                && word(at + entry::STARTED) > failed_at
        })
}

/// Unpacks `epoch << 40 | step`, plus 1.
pub(crate) fn position(packed: u64) -> Option<Position> {
    let packed = packed.checked_sub(1)?;
    Some(Position {
        epoch: packed >> 40,
        step: packed & ((1 << 40) - 1),
    })
}

/// The ranks that the operation with this ticket and entry waits for; `word` reads the recorder's words.
fn awaited(entry: &[u64], ticket: u64, word: impl Fn(usize) -> u64) -> Vec<u32> {
    let mut mask = Mask::default();
    let (low, wide) = mask.split_at_mut(entry::AWAITED_WORDS);
    low.copy_from_slice(&entry[entry::AWAITED..entry::AWAITED + entry::AWAITED_WORDS]);
    if word(head::AWAITED_WIDE_OF) == ticket.wrapping_add(1) {
        let words = (head::AWAITED_WIDE..).map(word);
        wide.iter_mut().zip(words).for_each(|(to, from)| *to = from);
    }
    ranks_of(&mask)
}

impl Entry {
    /// `word` reads the recorder's words, `words` are those of the entry.
    pub(crate) fn decode(
        words: &[u64],
        ticket: u64,
        scale: &Scale,
        word: impl Fn(usize) -> u64,
    ) -> Option<Entry> {
        if words[entry::STAMP] != ticket.wrapping_add(1) {
            return None;
        }
        let state = match words[entry::STATE] {
            state::QUEUED => State::Queued,
            state::RUNNING => State::Running,
            state::DONE => State::Done,
            state::ABORTED => State::Aborted,
            _ => return None,
        };
        let what = words[entry::WHAT].to_le_bytes();
        let moment = |at: usize| (words[at] > 0).then(|| scale.moment(words[at]));
        let over = matches!(state, State::Done | State::Aborted);
        let started_ns = moment(entry::STARTED);
        let done_ns = moment(entry::DONE).filter(|_| over);
        let waiting_ns = scale.span(words[entry::WAITED]);
        let folding_ns = scale.span(words[entry::FOLDED]);
        let took = match (started_ns, done_ns) {
            (Some(from), Some(to)) => to.saturating_sub(from),
            _ => 0,
        };
        let label = u16::from_le_bytes([what[5], what[6]]);
        Some(Entry {
            n: ticket,
            seq: Some(words[entry::SEQ]).filter(|seq| *seq != u64::MAX),
            generation: (words[entry::GROUP] >> 32) as u32,
            group: words[entry::GROUP] as u32,
            op: Collective::from_wire(what[0])
                .map_or_else(|| format!("operation {}", what[0]), |c| c.name().to_owned()),
            method: match (what[1], Method::from_wire(what[1])) {
                (0, _) => "point to point".to_owned(),
                (_, Some(method)) => method.name().to_owned(),
                (code, None) => format!("method {code}"),
            },
            dtype: DType::from_wire(what[2]).map(|dtype| dtype.to_string()),
            reduce: ReduceOp::from_wire(what[3]).map(|op| op.to_string()),
            count: words[entry::COUNT],
            root: words[entry::ROOT] as u32,
            target: (words[entry::ROOT] >> 32) as u32,
            transport: transport_name(what[4]),
            label: match label {
                0 => None,
                LABEL_LOST => Some(LABEL_LOST),
                index => Some(index - 1),
            },
            state,
            queued_ns: scale.moment(words[entry::QUEUED]),
            started_ns,
            progress_ns: moment(entry::PROGRESS),
            done_ns,
            waiting_ns,
            folding_ns,
            moving_ns: took.saturating_sub(waiting_ns.saturating_add(folding_ns)),
            awaited: awaited(words, ticket, word),
            slowest: u32::try_from(words[entry::SLOWEST])
                .ok()
                .and_then(|rank| rank.checked_sub(1)),
        })
    }

    /// `all_reduce f32 sum of 100 elements`, as all ranks must agree on it.
    pub fn describe(&self) -> String {
        let mut text = printable(&self.op);
        if let Some(dtype) = &self.dtype {
            text.push_str(&format!(" {}", printable(dtype)));
            if let Some(reduce) = &self.reduce {
                text.push_str(&format!(" {}", printable(reduce)));
            }
            let plural = if self.count == 1 { "" } else { "s" };
            text.push_str(&format!(" of {} element{plural}", self.count));
        }
        if matches!(
            self.op.as_str(),
            "broadcast" | "reduce" | "gather" | "scatter"
        ) {
            text.push_str(&format!(" with root {}", self.root));
        }
        text
    }
}

/// The links an operation's group has: a sum of 1, 2 and 4.
fn transport_name(code: u8) -> String {
    let names: Vec<&str> = [(1, "thread"), (2, "shm"), (4, "tcp")]
        .into_iter()
        .filter_map(|(bit, name)| (code & bit != 0).then_some(name))
        .collect();
    names.join("+")
}
