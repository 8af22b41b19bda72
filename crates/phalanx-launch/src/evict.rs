//! Which ranks the others wait for in vain (`--evict-after`).
//!
//! A rank is late while another one of this host waits for it: in a collective that it has not reached, or to form a new
//! group. A rank that waits itself, or is in a declared phase, is late only if its process is stopped.
//!
//! Time in which a rank works in a declared phase, and time in which this launcher did not run (it was stopped, its host
//! suspended, or the processors busy), does not count.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use phalanx_comm::recorder::{Dump, Entry, State};

use crate::flight::STOPPED;
use crate::inspect::analysis;
use crate::ranks::Rank;
use phalanx_member::FORMING;

/// Bounds of the interval between two looks.
const LOOKS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];

/// A running rank of this launcher.
pub(super) struct Seen {
    pub(super) local: usize,
    /// Among all processes of the job.
    pub(super) number: usize,
    pub(super) is_stopped: bool,
    /// None before it has joined its first group.
    pub(super) dump: Option<Dump>,
}

/// How long the others have waited for each rank.
pub(super) struct Evictions {
    after: Duration,
    every: Duration,
    checked: Option<Instant>,
    /// By the rank's number.
    waits: BTreeMap<usize, Wait>,
}

struct Wait {
    /// Operations that the rank has begun.
    recorded: u64,
    lasted: Duration,
}

impl Evictions {
    /// Of ranks that may be late for `after`.
    pub(super) fn new(after: Duration) -> Evictions {
        Evictions {
            after,
            every: (after / 5).clamp(LOOKS[0], LOOKS[1]),
            checked: None,
            waits: BTreeMap::new(),
        }
    }

    /// When to check next.
    pub(super) fn next_check(&self, now: Instant) -> Instant {
        self.checked.map_or(now, |at| at + self.every)
    }

    /// Checks the running ranks. Returns those that were late for too long, with what they are late for.
    pub(super) fn check(&mut self, ranks: &[Seen], now: Instant) -> Vec<(usize, String)> {
        let since = self.checked.replace(now).map(|at| now - at);
        let counted = match since.unwrap_or_default() {
            long if long > 2 * self.every => self.every,
            since => since,
        };
        let is_paused = ranks.iter().any(Seen::is_busy);
        let late = late(ranks);
        self.waits.retain(|number, wait| {
            let same = |seen: &Seen| seen.number == *number && seen.recorded() == wait.recorded;
            match is_paused {
                true => ranks.iter().any(same),
                false => late.iter().any(|(seen, _)| same(seen)),
            }
        });
        if is_paused {
            return Vec::new();
        }
        let mut found = Vec::new();
        for (seen, what) in late {
            let recorded = seen.recorded();
            let lasted = match self.waits.get_mut(&seen.number) {
                Some(wait) => {
                    wait.lasted += counted;
                    wait.lasted
                }
                None => {
                    let lasted = Duration::ZERO;
                    self.waits.insert(seen.number, Wait { recorded, lasted });
                    lasted
                }
            };
            if lasted >= self.after {
                let what = seen.fault(&what);
                found.push((
                    seen.local,
                    format!("{what} for {} s", self.after.as_secs_f64()),
                ));
            }
        }
        found
    }
}

/// The ranks that others wait for, and where these wait.
fn late(ranks: &[Seen]) -> Vec<(&Seen, String)> {
    let waits = |seen: &&Seen| seen.is_in_operation() || seen.is_forming();
    let waiting: Vec<&Seen> = ranks
        .iter()
        .filter(|seen| !seen.is_stopped)
        .filter(waits)
        .collect();
    let may_be = |seen: &&Seen| seen.is_stopped || seen.dump.is_some() && !waits(seen);
    let mut late: Vec<(&Seen, String)> = ranks
        .iter()
        .filter(may_be)
        .filter_map(|seen| {
            let place = waiting.iter().find_map(|other| other.waits_for(seen))?;
            Some((seen, place))
        })
        .collect();
    // If more compute than wait, these are early.
    let computing = late.iter().filter(|(seen, _)| !seen.is_stopped).count();
    if computing > waiting.len() {
        late.retain(|(seen, _)| seen.is_stopped);
    }
    late
}

impl Seen {
    /// The local rank `local`, as it is now.
    pub(super) fn of(local: usize, rank: &Rank) -> Seen {
        Seen {
            local,
            number: rank.number,
            is_stopped: rank.is_stopped(),
            dump: rank.flight(),
        }
    }

    fn recorded(&self) -> u64 {
        self.dump.as_ref().map_or(0, |dump| dump.recorded)
    }

    fn is_in_operation(&self) -> bool {
        self.dump
            .as_ref()
            .is_some_and(|dump| running(dump).next().is_some())
    }

    fn is_forming(&self) -> bool {
        let phase = self.dump.as_ref().and_then(|dump| dump.phase.as_ref());
        phase.is_some_and(|phase| phase.name == FORMING)
    }

    /// Whether it works in a declared phase, for which the others wait.
    fn is_busy(&self) -> bool {
        let declared = self.dump.as_ref().is_some_and(|dump| dump.is_busy);
        declared && !self.is_stopped && !self.is_in_operation() && !self.is_forming()
    }

    /// Where this rank waits for `other`, if it does.
    fn waits_for(&self, other: &Seen) -> Option<String> {
        let dump = self.dump.as_ref()?;
        let is_member = match &dump.members[..] {
            [] => other.number < dump.world,
            members => members.contains(&other.number),
        };
        let expects = |entry: &&Entry| {
            let is_named = entry
                .awaited
                .iter()
                .any(|rank| *rank as usize == other.number);
            entry.op != "send/recv"
                && (is_named || entry.group == 0 && is_member)
                && !other.is_past(entry)
        };
        if let Some(entry) = running(dump).find(expects) {
            return Some(analysis::named(dump, entry));
        }
        let is_older = |other: &Dump| other.generation <= dump.generation;
        let is_expected = is_member && other.dump.as_ref().is_some_and(is_older);
        // A newcomer has no recorder before it is in a group.
        (self.is_forming() && (is_expected || other.is_stopped)).then(|| "the new group".to_owned())
    }

    /// Whether the rank has done its part of the collective.
    fn is_past(&self, entry: &Entry) -> bool {
        let mut entries = self.dump.iter().flat_map(|dump| &dump.entries);
        entries.any(|own| {
            (own.generation, own.group) == (entry.generation, entry.group)
                && own.op != "send/recv"
                && (own.seq == entry.seq && own.state == State::Done
                    || own.seq > entry.seq && own.state != State::Queued)
        })
    }

    fn fault(&self, place: &str) -> String {
        if self.is_stopped {
            return format!("{STOPPED} and has kept others waiting in {place}");
        }
        let dump = self.dump.as_ref();
        let phase = dump.and_then(|dump| Some((dump, dump.phase.as_ref()?)));
        let doing = phase.map_or(String::new(), |(dump, phase)| {
            format!(
                "is {} and ",
                analysis::doing(dump, &phase.name, phase.for_ms)
            )
        });
        format!("{doing}has not reached {place}, where others are waiting,")
    }
}

/// The operations in which the rank is.
fn running(dump: &Dump) -> impl Iterator<Item = &Entry> {
    let running = |entry: &&Entry| entry.state == State::Running;
    let entries = dump.entries.iter().filter(running);
    entries.filter(|entry| entry.generation == dump.generation)
}

#[cfg(test)]
mod tests {
    use phalanx_comm::recorder::Phase;
    use serde_json::json;

    use super::*;

    const AFTER: Duration = Duration::from_secs(10);

    /// A rank of three that is in all-reduce `seq`, or has left it.
    fn rank(number: usize, seq: u64, state: &str) -> Seen {
        let entry = json!({
            "n": seq, "seq": seq, "epoch": 0, "group": 0, "op": "all_reduce", "count": 1, "method": "direct", "root": 0,
            "target": 0, "transport": "shm", "state": state, "queued_ns": 1, "waiting_ns": 0, "folding_ns": 0, "moving_ns": 0
        });
        let dump = json!({
            "format": Dump::FORMAT, "rank": number, "world": 3, "epoch": 0, "host": "a", "pid": 1, "taken_ns": 9,
            "taken_unix_ns": 9, "recorded": seq, "labels": [], "entries": [entry]
        });
        Seen {
            local: number,
            number,
            is_stopped: false,
            dump: Some(serde_json::from_value(dump).expect("a dump")),
        }
    }

    fn in_phase(name: &str, is_busy: bool, seen: Seen) -> Seen {
        let phase = Phase {
            name: name.to_owned(),
            for_ms: 1000,
        };
        let dump = seen.dump.map(|dump| Dump {
            phase: Some(phase),
            is_busy,
            ..dump
        });
        Seen { dump, ..seen }
    }

    fn stopped(seen: Seen) -> Seen {
        Seen {
            is_stopped: true,
            ..seen
        }
    }

    /// Those that are killed when nothing changes, and when.
    fn taken_out(ranks: &[Seen]) -> Option<(Duration, Vec<usize>)> {
        let (mut evictions, start) = (Evictions::new(AFTER), Instant::now());
        let mut now = start;
        while now < start + 3 * AFTER {
            let found = evictions.check(ranks, now);
            if !found.is_empty() {
                return Some((now - start, found.iter().map(|(local, _)| *local).collect()));
            }
            now = evictions.next_check(now);
        }
        None
    }

    #[test]
    fn a_rank_that_the_others_wait_for_is_late_after_the_time() {
        let waits = |number| rank(number, 7, "running");
        let hangs = || in_phase("forward", false, rank(2, 6, "done"));
        let only_2 = Some((AFTER, vec![2]));
        assert_eq!(taken_out(&[waits(0), waits(1), hangs()]), only_2);
        let new_group = |number| in_phase(FORMING, true, rank(number, 7, "aborted"));
        assert_eq!(taken_out(&[new_group(0), new_group(1), hangs()]), only_2);
        // Stopped: anywhere.
        for of in [
            hangs(),
            waits(2),
            in_phase("saving", true, rank(2, 6, "done")),
            new_group(2),
        ] {
            assert_eq!(taken_out(&[waits(0), waits(1), stopped(of)]), only_2);
        }
        let both = Some((AFTER, vec![1, 2]));
        assert_eq!(
            taken_out(&[waits(0), stopped(waits(1)), stopped(hangs())]),
            both
        );
        // A newcomer that the others form a group with.
        let newcomer = || Seen {
            dump: None,
            number: 3,
            ..hangs()
        };
        assert_eq!(
            taken_out(&[new_group(0), new_group(1), stopped(newcomer())]),
            only_2
        );
        assert_eq!(taken_out(&[waits(0), waits(1), newcomer()]), None);
        assert_eq!(taken_out(&[new_group(0), new_group(1), newcomer()]), None);
    }

    #[test]
    fn nobody_is_late_who_works_in_a_phase_or_whom_nobody_waits_for() {
        let waits = |number| rank(number, 7, "running");
        let computes = |number| rank(number, 6, "done");
        let saves = |number| in_phase("saving", true, computes(number));
        for ranks in [
            [waits(0), waits(1), saves(2)],
            [waits(0), stopped(computes(1)), saves(2)],
            [waits(0), waits(1), waits(2)],
            [waits(0), waits(1), rank(2, 7, "done")],
            [waits(0), waits(1), rank(2, 9, "done")],
            [waits(0), waits(1), stopped(rank(2, 7, "done"))],
            [computes(0), computes(1), stopped(computes(2))],
            [waits(0), waits(1), waits(2)].map(stopped),
            // Rather the one that waits is early.
            [waits(0), computes(1), computes(2)],
        ] {
            assert_eq!(taken_out(&ranks), None);
        }
    }

    #[test]
    fn what_the_rank_does_meanwhile_and_other_time_do_not_count() {
        let waits = |number| rank(number, 7, "running");
        let ranks = |hanging: Seen| [waits(0), waits(1), hanging];
        let late = ranks(rank(2, 6, "done"));
        let (mut evictions, mut now) = (Evictions::new(AFTER), Instant::now());
        let mut check = |ranks: &[Seen], pause: Duration| {
            now += pause;
            !evictions.check(ranks, now).is_empty()
        };
        let second = Duration::from_secs(1);
        for _ in 0..10 {
            assert!(!check(&late, second));
        }
        // The launcher was stopped for an hour, another rank saves.
        let saving = [
            waits(0),
            in_phase("saving", true, rank(1, 6, "done")),
            rank(2, 6, "done"),
        ];
        for _ in 0..20 {
            assert!(!check(&saving, second));
        }
        // It has begun something since.
        assert!(!check(&ranks(rank(2, 5, "done")), second));
        for _ in 0..9 {
            assert!(!check(&ranks(rank(2, 5, "done")), second));
        }
        assert!(!check(&late, second));
        for _ in 0..9 {
            assert!(!check(&late, 3600 * second));
        }
        assert!(check(&late, second));
    }
}
