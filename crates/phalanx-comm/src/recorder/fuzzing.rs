//! Fuzzes what ranks publish about themselves for each other and for the launcher.

use std::time::Duration;

use super::clock::Clock;
use super::dump::Dump;
use super::facts::{Fact, Record};
use super::layout::{ENTRIES, LABELS, MAGIC, VERSION, WORDS, entry, entry_at, head, state};
use crate::status::{Elsewhere, Status};

/// The record of a rank of another host, from the store: the printed text has no
/// control characters.
pub(crate) fn record(data: &[u8]) {
    let Some(record) = Record::decode(data) else {
        return;
    };
    for (kernel, now_ms) in [("ours", record.unix_ms), (&record.kernel.clone(), u64::MAX)] {
        let fact = Fact::of_record(1, record.clone(), kernel, now_ms);
        let said = [fact.name(), fact.doing(Some(3)), fact.doing(None)];
        assert!(!said.concat().contains(char::is_control), "{said:?}");
    }
}

pub(crate) fn record_seeds() -> Vec<Vec<u8>> {
    let record = |phase: Option<&str>, seq| Record {
        host: "node-b".into(),
        kernel: "boot".into(),
        status: Status {
            pid: u32::MAX,
            pid_space: 4_026_531_836,
            phase: phase.map(|name| (name.to_owned(), Duration::from_secs(2))),
            position: 1 << 40 | 7,
            entered: Some(seq),
            done: (seq > 0).then(|| seq - 1),
            awaited: Vec::new(),
            elsewhere: (seq == 9).then(|| Elsewhere {
                op: "all_reduce".into(),
                group: 0x2f,
                seq: 4,
                awaited: vec![0, 1],
            }),
        },
        unix_ms: 1_700_000_000_000,
    };
    [
        record(Some("backward"), 3),
        record(None, 0),
        record(Some("\u{1b}[2J"), 9),
    ]
    .iter()
    .filter_map(|record| serde_json::to_vec(record).ok())
    .collect()
}

/// A rank's memory as the launcher reads it: an empty one with words written to it,
/// each as two bytes of index and eight of value.
pub(crate) fn memory(data: &[u8]) {
    let mut words = vec![0_u64; WORDS];
    (words[head::MAGIC], words[head::VERSION]) = (MAGIC, VERSION);
    for chunk in data.as_chunks::<10>().0 {
        let [low, high, value @ ..] = *chunk;
        let at = usize::from(u16::from_le_bytes([low, high]));
        words[at % WORDS] = u64::from_le_bytes(value);
    }
    let clock = Clock::from_code(words[head::CLOCK]).unwrap_or(Clock::Monotonic);
    let dump = Dump::decode(&words, clock.anchor());
    assert!(dump.entries.len() <= ENTRIES && dump.labels.len() <= LABELS);
    assert!(dump.entries.is_sorted_by(|a, b| a.n > b.n), "newest first");
    for entry in &dump.entries {
        assert!(!entry.describe().contains(char::is_control));
        let _ = dump.label_of(entry);
    }
}

pub(crate) fn memory_seeds() -> Vec<Vec<u8>> {
    let word =
        |at: usize, value: u64| [&(at as u16).to_le_bytes()[..], &value.to_le_bytes()].concat();
    let operation = |ticket: u64, how: u64| {
        let at = entry_at(ticket);
        [
            word(at + entry::STAMP, ticket + 1),
            word(at + entry::GROUP, 1 << 32),
            word(at + entry::COUNT, 100),
            word(at + entry::WHAT, 0x0001_0201_0101),
            word(at + entry::STARTED, 5),
            word(at + entry::AWAITED, 6),
            word(at + entry::STATE, how),
        ]
        .concat()
    };
    let failed = [
        word(head::RANK, 4 << 32 | 1),
        word(head::TICKETS, 2),
        word(head::FAILED_AT, 3),
        word(head::FAILED_GROUP, 9),
        word(head::FAILURE, 2),
        word(head::REASON, u64::from_le_bytes(*b"why not\0")),
        word(head::MEMBERS, 0b1101),
        word(head::LABELS_USED, 1),
        word(head::AWAITED_WIDE_OF, 2),
        word(head::AWAITED_WIDE + 1, 3),
        operation(0, state::DONE),
        operation(1, state::RUNNING),
    ]
    .concat();
    vec![
        failed,
        word(head::PHASE_SINCE, 1),
        operation(4, state::QUEUED),
    ]
}
