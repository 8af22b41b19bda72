//! The deadline of one operation, and the error when it has passed.

use std::cell::{Cell, OnceCell};
use std::time::{Duration, Instant};

use crate::Error;
use crate::wait::deadline_in;

/// One limit for one whole operation, on the monotonic clock. It counts from when the operation first waited, or from the
/// last moment at which another rank of the group was in a declared phase. An operation that never waits does not read
/// the clock, which would take a twentieth of its time.
pub(crate) struct Deadline {
    started: OnceCell<Instant>,
    limit: Duration,
    /// In the first round.
    at: Cell<Option<Instant>>,
    /// How much later it is in later rounds; see [`Deadline::in_`].
    grace: Duration,
    /// Whether a phase has moved it.
    is_put_off: Cell<bool>,
}

/// Ranks in a phase report it once or twice a second. A shorter limit could expire between two reports.
const SILENCE: Duration = Duration::from_secs(3);

impl Deadline {
    /// In the first round every rank sends without waiting, so a missing peer is the
    /// culprit. In later rounds a missing peer may itself be waiting. So later rounds
    /// get a little more time: a rank that knows the culprit reports it first.
    pub(crate) fn in_(limit: Duration) -> Self {
        Deadline {
            started: OnceCell::new(),
            limit,
            at: Cell::new(None),
            grace: (limit / 16).min(Duration::from_secs(1)),
            is_put_off: Cell::new(false),
        }
    }

    fn started(&self) -> Instant {
        *self.started.get_or_init(Instant::now)
    }

    /// In the first round.
    fn first(&self) -> Instant {
        self.at.get().unwrap_or_else(|| {
            let at = self.started().checked_add(self.limit);
            let at = at.unwrap_or_else(|| deadline_in(self.limit));
            self.at.set(Some(at));
            at
        })
    }

    pub(crate) fn at(&self, round: usize) -> Instant {
        let at = self.first();
        if round == 0 {
            at
        } else {
            at.checked_add(self.grace).unwrap_or(at)
        }
    }

    /// Whether it has passed in a round. It is postponed while another rank is in a declared phase.
    /// `others_busy` returns when another rank was last known to be in one.
    pub(crate) fn has_passed(
        &self,
        now: Instant,
        round: usize,
        others_busy: impl FnOnce() -> Option<Instant>,
    ) -> bool {
        if now < self.at(round) {
            return false;
        }
        let later = others_busy().and_then(|busy| busy.checked_add(self.limit.max(SILENCE)));
        if let Some(at) = later.filter(|at| *at > self.first()) {
            self.at.set(Some(at));
            // Not worth a word where the phase ended as the operation began.
            let by = at.duration_since(self.started()).saturating_sub(self.limit);
            self.is_put_off.set(by > Duration::from_secs(1));
        }
        now >= self.at(round)
    }

    /// The message that it has passed, which names the `culprits` and what is awaited
    /// from the `missing` ranks; and the culprit, if there is only one.
    pub(crate) fn late(
        &self,
        missing: &[(usize, &'static str)],
        echo: &str,
        (culprits, excuse): (Vec<usize>, Option<String>),
    ) -> (String, Option<usize>) {
        let what = |rank: usize| {
            let found = missing.iter().find(|(peer, _)| *peer == rank);
            found.map_or("to send data", |(_, what)| *what)
        };
        let names: Vec<String> = culprits
            .iter()
            .map(|rank| format!("rank {rank} {}", what(*rank)))
            .collect();
        let others: Vec<String> = missing
            .iter()
            .filter(|(peer, _)| !culprits.contains(peer))
            .map(|(peer, _)| peer.to_string())
            .collect();
        let others = match &others[..] {
            [] => String::new(),
            [one] => format!("; rank {one} seems to wait as well"),
            many => format!("; ranks {} seem to wait as well", many.join(", ")),
        };
        // The culprit and the reason come first.
        let excuse = excuse.map_or(String::new(), |excuse| format!("{excuse}; "));
        let late = format!(
            "{excuse}timed out after {:.2} s (limit {:.2} s{}) waiting for {}{echo}{others}",
            self.started().elapsed().as_secs_f64(),
            self.limit.as_secs_f64(),
            match self.is_put_off.get() {
                true => " since a rank was last in a phase of its own",
                false => "",
            },
            names.join(", "),
        );
        let only = match culprits[..] {
            [one] => Some(one),
            _ => None,
        };
        (late, only)
    }

    /// The error when it has passed in a round: `missing` ranks have not sent
    /// what is due; `blame` says who is to blame.
    pub(crate) fn missed(
        &self,
        missing: impl Iterator<Item = usize>,
        round: usize,
        blame: impl FnOnce(&[usize]) -> (Vec<usize>, Option<String>),
    ) -> Error {
        let missing: Vec<(usize, &str)> = missing.map(|rank| (rank, "to send data")).collect();
        let ranks: Vec<usize> = missing.iter().map(|(rank, _)| *rank).collect();
        let (late, only) = self.late(&missing, echo(round), blame(&ranks));
        missed(late, only, round)
    }
}

/// In a later round, the awaited rank may itself be waiting for another.
pub(crate) fn echo(round: usize) -> &'static str {
    match round {
        0 => "",
        _ => " (or for whom they wait)",
    }
}

/// Blames a rank only in the first round.
pub(crate) fn missed(late: String, only: Option<usize>, round: usize) -> Error {
    match only {
        Some(peer) if round == 0 => Error::timeout(late).with_peer(peer),
        _ => Error::timeout(late),
    }
}
