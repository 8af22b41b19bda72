//! The status record of a rank, which the ranks of its host read: spare words of its seat.
//!
//! One rank writes, all others read, and only when they have waited for
//! seconds. The words that change with every operation are on another cache line than
//! the seat's state, which waiting peers poll.

pub(crate) mod words;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::words::{Mask, ranks_of, read_text, set_rank};
use crate::notice::ranks;
use crate::plan::Collective;
use crate::region::Region;

/// Words, from the seat's state on.
/// The process id, and its namespace in the upper half.
const PID: usize = 1;
/// When the rank was last in a declared phase; 0: never.
const BUSY: usize = 2;
const PHASE_SINCE: usize = 3;
const PHASE: usize = 4;
pub(crate) const PHASE_WORDS: usize = 4;
/// The second line.
const ENTERED: usize = 8;
const DONE: usize = 9;
/// Of ranks 0 to 127; see [`mask_word`].
const AWAITED: usize = 10;
/// For [`Elsewhere`]: group and collective; the sequence number plus 1, or 0; the awaited ranks.
const ELSEWHERE: usize = 12;
const ELSEWHERE_SEQ: usize = 13;
const ELSEWHERE_AWAITED: usize = 14;
/// Of higher ranks; small groups do not touch these lines.
const AWAITED_WIDE: usize = 16;
const ELSEWHERE_AWAITED_WIDE: usize = 32;
const POSITION: usize = 46;
/// Bytes from the seat's state on.
pub(crate) const SEAT_BYTES: usize = 8 * 48;

/// The place of word `index` of a mask whose first two are at `first`, the others at `wide`.
fn mask_word(index: usize, first: usize, wide: usize) -> usize {
    match index {
        0 | 1 => first + index,
        _ => wide + index - 2,
    }
}

/// The operation of another group that a rank is in, which keeps it from joining one of this group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Elsewhere {
    pub(crate) op: String,
    pub(crate) group: u32,
    pub(crate) seq: u64,
    /// The ranks it waits for there, by their first ranks.
    pub(crate) awaited: Vec<u32>,
}

impl Elsewhere {
    /// `all_reduce seq 4 of group 0x2f, where it waits for rank 1`.
    pub(crate) fn text(&self) -> String {
        let group = match self.group {
            0 => "the group of all ranks".to_owned(),
            group => format!("group {group:#x}"),
        };
        let awaited: Vec<usize> = self.awaited.iter().map(|rank| *rank as usize).collect();
        let waits = match &awaited[..] {
            [] => String::new(),
            some => format!(", where it waits for {}", ranks(some)),
        };
        format!("{} seq {} of {group}{waits}", self.op, self.seq)
    }
}

/// One rank's words in memory that others read.
pub(crate) struct StatusCell {
    region: Arc<Region>,
    /// Of the seat's state.
    offset: usize,
}

/// The status of a rank, read from its cell or from the store; nothing in it is trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Status {
    pub(crate) pid: u32,
    /// Process ids mean the same only in one pid namespace.
    pub(crate) pid_space: u32,
    /// The phase and how long the rank has been in it.
    pub(crate) phase: Option<(String, Duration)>,
    /// `epoch << 40 | step`, plus 1, or 0.
    pub(crate) position: u64,
    /// The last collective entered, and the last completed.
    pub(crate) entered: Option<u64>,
    pub(crate) done: Option<u64>,
    /// The ranks it waits for. Only from a cell: a record in the store is seconds old.
    #[serde(skip)]
    pub(crate) awaited: Vec<u32>,
    pub(crate) elsewhere: Option<Elsewhere>,
}

impl StatusCell {
    pub(crate) fn new(region: Arc<Region>, offset: usize) -> StatusCell {
        StatusCell { region, offset }
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        self.region.u64_at(self.offset + 8 * index)
    }

    /// Marks the cell as this process's.
    pub(crate) fn sit(&self) {
        let space = u64::from(pid_space()) << 32;
        let word = space | u64::from(std::process::id());
        self.word(PID).store(word, Relaxed);
    }

    /// The rank is in a declared phase at `now_ns`, on the monotonic clock.
    pub(crate) fn set_busy(&self, now_ns: u64) {
        self.word(BUSY).store(now_ns, Relaxed);
    }

    /// When the rank last said that it is in a declared phase; 0: never. Not trusted.
    pub(crate) fn busy_ns(&self) -> u64 {
        self.word(BUSY).load(Relaxed)
    }

    /// A time of 0 means no phase.
    pub(crate) fn set_phase(&self, name: &[u64; PHASE_WORDS], since_ns: u64) {
        self.word(PHASE_SINCE).store(since_ns, Relaxed);
        for (i, word) in name.iter().enumerate() {
            self.word(PHASE + i).store(*word, Relaxed);
        }
    }

    pub(crate) fn set_position(&self, packed: u64) {
        self.word(POSITION).store(packed, Relaxed);
    }

    #[inline]
    pub(crate) fn enter(&self, seq: u64) {
        self.word(ENTERED).store(seq + 1, Relaxed);
    }

    #[inline]
    pub(crate) fn done(&self, seq: u64) {
        self.word(DONE).store(seq + 1, Relaxed);
    }

    #[inline]
    pub(crate) fn await_ranks(&self, mask: &[u64]) {
        self.set_mask(mask, AWAITED, AWAITED_WIDE);
    }

    #[inline]
    fn set_mask(&self, mask: &[u64], first: usize, wide: usize) {
        for (index, word) in mask.iter().enumerate() {
            self.word(mask_word(index, first, wide))
                .store(*word, Relaxed);
        }
    }

    fn mask(&self, first: usize, wide: usize) -> Mask {
        std::array::from_fn(|index| self.word(mask_word(index, first, wide)).load(Relaxed))
    }

    /// The rank is in an operation of another group, or in none.
    pub(crate) fn set_elsewhere(&self, elsewhere: Option<&Elsewhere>) {
        let code = |e: &Elsewhere| (0..=u8::MAX).find(|code| name_of(*code) == Some(&e.op));
        let Some((elsewhere, code)) = elsewhere.and_then(|e| Some((e, code(e)?))) else {
            return self.word(ELSEWHERE_SEQ).store(0, Relaxed);
        };
        let mut mask = Mask::default();
        for rank in &elsewhere.awaited {
            set_rank(&mut mask, *rank as usize);
        }
        let what = u64::from(elsewhere.group) << 8 | u64::from(code);
        self.word(ELSEWHERE).store(what, Relaxed);
        self.set_mask(&mask, ELSEWHERE_AWAITED, ELSEWHERE_AWAITED_WIDE);
        self.word(ELSEWHERE_SEQ).store(elsewhere.seq + 1, Relaxed);
    }

    fn elsewhere(&self) -> Option<Elsewhere> {
        let get = |index: usize| self.word(index).load(Relaxed);
        let (what, seq) = (get(ELSEWHERE), get(ELSEWHERE_SEQ).checked_sub(1)?);
        Some(Elsewhere {
            op: name_of(what as u8)?.to_owned(),
            group: (what >> 8) as u32,
            seq,
            awaited: ranks_of(&self.mask(ELSEWHERE_AWAITED, ELSEWHERE_AWAITED_WIDE)),
        })
    }

    /// The status at `now_ns`, on the monotonic clock.
    pub(crate) fn read(&self, now_ns: u64) -> Status {
        let get = |index: usize| self.word(index).load(Relaxed);
        let since = get(PHASE_SINCE);
        Status {
            pid: get(PID) as u32,
            pid_space: (get(PID) >> 32) as u32,
            phase: (since > 0).then(|| {
                let text = read_text((0..PHASE_WORDS).map(|i| get(PHASE + i)));
                (text, Duration::from_nanos(now_ns.saturating_sub(since)))
            }),
            position: get(POSITION),
            entered: get(ENTERED).checked_sub(1),
            done: get(DONE).checked_sub(1),
            awaited: ranks_of(&self.mask(AWAITED, AWAITED_WIDE)),
            elsewhere: self.elsewhere(),
        }
    }
}

fn name_of(code: u8) -> Option<&'static str> {
    Collective::from_wire(code).map(Collective::name)
}

/// The number of this process's pid namespace, an inode number of 32 bits; 0: unknown.
pub(crate) fn pid_space() -> u32 {
    std::fs::read_link("/proc/self/ns/pid")
        .ok()
        .and_then(|link| {
            let digits: String = link
                .to_string_lossy()
                .chars()
                .filter(char::is_ascii_digit)
                .collect();
            digits.parse().ok()
        })
        .unwrap_or(0)
}
