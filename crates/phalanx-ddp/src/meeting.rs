//! Where the shards of one rank meet the shards of all others inside forward
//! and backward: each shard runs on a thread of its own, brings its part, and
//! gets the parts of all shards in shard order, which no number of ranks changes.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_comm::ProcessGroup;
use phalanx_nn::SinkError;
use phalanx_nn::layers::JoinStatistics;

use crate::error::{Error, Result};
use crate::sync_norm::combine;

/// How often a waiting shard looks whether another has failed.
const LOOK: Duration = Duration::from_millis(100);
/// Longest wait for the shards of this same rank, which compute meanwhile.
const LIMIT: Duration = Duration::from_secs(1800);

/// One rank's shards in one step.
pub(crate) struct Meeting {
    group: ProcessGroup,
    /// Shards with samples of each rank.
    shards: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Parts of the meeting that is being held, by member.
    parts: Vec<Option<Vec<f64>>>,
    /// How many meetings are over, and the outcome of the last. Nobody misses one: the
    /// next needs all members.
    held: u64,
    outcome: Arc<Vec<f64>>,
    failed: Option<String>,
}

impl Meeting {
    pub(crate) fn new(group: ProcessGroup, shards: Vec<usize>) -> Arc<Meeting> {
        let members = shards[group.rank()].max(1);
        Arc::new(Meeting {
            group,
            shards,
            state: Mutex::new(State {
                parts: vec![None; members],
                ..State::default()
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whoever panics says so through `fail`; the state is whole between statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets all others know that they need not wait.
    pub(crate) fn fail(&self, why: &str) {
        self.lock().failed.get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
        self.group.abort(why);
    }

    /// The parts of all shards of all ranks, in shard order.
    fn gather(&self, member: usize, part: &[f64]) -> Result<Arc<Vec<f64>>> {
        let mut state = self.lock();
        state.parts[member] = Some(part.to_vec());
        if state.parts.iter().all(Option::is_some) {
            let mine: Vec<f64> = state
                .parts
                .iter_mut()
                .filter_map(Option::take)
                .flatten()
                .collect();
            // Nobody needs the lock: all others wait for this.
            match self.exchange(mine, part.len()) {
                Ok(all) => state.outcome = Arc::new(all),
                Err(error) => {
                    state.failed.get_or_insert_with(|| with_causes(&error));
                    self.changed.notify_all();
                    return Err(error);
                }
            }
            state.held += 1;
            self.changed.notify_all();
            return Ok(state.outcome.clone());
        }
        let (now, limit) = (state.held, Instant::now() + LIMIT);
        loop {
            if state.held > now {
                return Ok(state.outcome.clone());
            }
            if let Some(why) = &state.failed {
                return Err(Error::usage(format!("another shard failed: {why}")));
            }
            if Instant::now() > limit {
                return Err(Error::usage(
                    "another shard of this rank did not come to a batch normalisation; all shards must run the \
                     same layers",
                ));
            }
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn exchange(&self, mine: Vec<f64>, each: usize) -> Result<Vec<f64>> {
        let lengths: Vec<usize> = self.shards.iter().map(|n| n * each).collect();
        let mine = &mine[..lengths[self.group.rank()]];
        if self.group.world_size() == 1 {
            return Ok(mine.to_vec());
        }
        let mut all = vec![0.0; lengths.iter().sum()];
        self.group
            .all_gather_v(mine, &lengths, &mut all)
            .map_err(|e| Error::comm_while("batch statistics of all shards are needed", e))?;
        Ok(all)
    }
}

/// An error's message with those of its causes, for others to whom only text gets.
pub(crate) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let words = inner.to_string();
        // Some messages carry their cause's already.
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = inner.source();
    }
    text
}

/// One shard's seat.
pub(crate) struct Seat {
    pub(crate) meeting: Arc<Meeting>,
    pub(crate) member: usize,
}

impl JoinStatistics for Seat {
    fn join(
        &self,
        rows: f64,
        mean: &mut [f64],
        squares: &mut [f64],
    ) -> std::result::Result<f64, SinkError> {
        let mut mine = vec![rows];
        mine.extend_from_slice(mean);
        mine.extend_from_slice(squares);
        let all = self.meeting.gather(self.member, &mine)?;
        Ok(combine(&all, mean, squares))
    }

    /// Left to right over the shards.
    fn sum(&self, sums: &mut [f64]) -> std::result::Result<(), SinkError> {
        let all = self.meeting.gather(self.member, sums)?;
        let mut shards = all.chunks_exact(sums.len().max(1));
        if let Some(first) = shards.next() {
            sums.copy_from_slice(first);
        }
        for shard in shards {
            sums.iter_mut().zip(shard).for_each(|(s, v)| *s += v);
        }
        Ok(())
    }
}
