//! Exchange between the shards of all ranks inside forward and backward: each shard
//! runs on its own thread, contributes its part, and gets the parts of all shards in
//! shard order, which does not depend on the number of ranks.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_base::lock;
use phalanx_comm::ProcessGroup;
use phalanx_nn::layers::JoinStatistics;

use super::sync_norm::combine;
use crate::error::{Error, Result};

/// How often a waiting shard checks whether another rank has failed.
const LOOK: Duration = Duration::from_millis(100);
/// Longest wait for the other shards of this rank, which compute meanwhile.
const LIMIT: Duration = Duration::from_secs(1800);

/// One rank's shards in one step.
pub(crate) struct Meeting {
    group: ProcessGroup,
    /// Shards with samples of each rank.
    shards: Vec<usize>,
    /// Number of this rank's first shard.
    first: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Parts of the current meeting, by member.
    parts: Vec<Option<Vec<f64>>>,
    /// How many meetings are over, and the outcome of the last. No member misses one:
    /// the next needs all members.
    held: u64,
    outcome: Arc<Vec<f64>>,
    /// Members that have finished: no meeting can be completed without them.
    ended: Vec<bool>,
    failed: Option<Failed>,
}

/// The first failure among the shards of this rank.
#[derive(Clone)]
enum Failed {
    /// In one shard, which returns the error itself.
    In { member: usize, why: String },
    /// In no single shard.
    Apart(String),
}

impl Meeting {
    /// Shards with samples of each rank; `first` is the number of this rank's first.
    pub(crate) fn new(group: ProcessGroup, shards: Vec<usize>, first: usize) -> Arc<Meeting> {
        let members = shards[group.rank()].max(1);
        Arc::new(Meeting {
            group,
            shards,
            first,
            state: Mutex::new(State {
                parts: vec![None; members],
                ended: vec![false; members],
                ..State::default()
            }),
            changed: Condvar::new(),
        })
    }

    /// Notifies all others that `member` has failed.
    pub(crate) fn fail(&self, member: usize, why: &str) {
        let why = why.to_owned();
        self.end_with(&mut lock(&self.state), Failed::In { member, why });
    }

    /// `member` has finished, and takes part in no more meetings.
    pub(crate) fn end(&self, member: usize) {
        let mut state = lock(&self.state);
        state.ended[member] = true;
        if let Some(waits) = state.parts.iter().position(Option::is_some) {
            let failed = Failed::Apart(self.left_out(member, waits));
            self.end_with(&mut state, failed);
        }
    }

    /// The member that failed first, if the failure was in one.
    pub(crate) fn culprit(&self) -> Option<usize> {
        match lock(&self.state).failed {
            Some(Failed::In { member, .. }) => Some(member),
            _ => None,
        }
    }

    fn end_with(&self, state: &mut State, failed: Failed) {
        let (Failed::In { why, .. } | Failed::Apart(why)) = &failed;
        self.group.abort(why);
        state.failed.get_or_insert(failed);
        self.changed.notify_all();
    }

    fn left_out(&self, ended: usize, waits: usize) -> String {
        format!(
            "shard {} ended its step without a batch normalisation that shard {} came to; all shards must run the same \
             layers",
            self.first + ended,
            self.first + waits
        )
    }

    /// The first two parts of different lengths.
    fn different(&self, parts: &[Option<Vec<f64>>]) -> Option<String> {
        let lens: Vec<usize> = parts.iter().flatten().map(Vec::len).collect();
        let other = lens.windows(2).position(|pair| pair[0] != pair[1])?;
        Some(format!(
            "shards {} and {} are in different layers: they bring {} and {} numbers to a batch normalisation; all shards \
             must run the same layers",
            self.first + other,
            self.first + other + 1,
            lens[other],
            lens[other + 1]
        ))
    }

    /// The parts of all shards of all ranks, in shard order.
    fn gather(&self, member: usize, part: &[f64]) -> Result<Arc<Vec<f64>>> {
        let mut state = lock(&self.state);
        let all_here = |state: &State| state.parts.iter().all(Option::is_some);
        state.parts[member] = Some(part.to_vec());
        if state.failed.is_none() {
            let ended = state.ended.iter().position(|ended| *ended);
            let apart = match ended {
                Some(ended) => Some(self.left_out(ended, member)),
                None if all_here(&state) => self.different(&state.parts),
                None => None,
            };
            if let Some(why) = apart {
                self.end_with(&mut state, Failed::Apart(why));
            }
        }
        if state.failed.is_none() && all_here(&state) {
            let mine: Vec<f64> = state
                .parts
                .iter_mut()
                .filter_map(Option::take)
                .flatten()
                .collect();
            // No other thread needs the lock: all wait for this.
            match self.exchange(mine, part.len()) {
                Ok(all) => state.outcome = Arc::new(all),
                Err(error) => {
                    let why = with_causes(&error);
                    self.end_with(&mut state, Failed::In { member, why });
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
            match &state.failed {
                Some(Failed::Apart(why)) => return Err(Error::usage(why.as_str())),
                Some(Failed::In { why, .. }) => {
                    return Err(Error::usage(format!("another shard failed: {why}")));
                }
                None => {}
            }
            if Instant::now() > limit {
                return Err(Error::usage(
                    "another shard of this rank did not come to a batch normalisation; all shards must run the \
                     same layers",
                ));
            }
            let waited = self.changed.wait_timeout(state, LOOK);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            let works = self.group.check();
            state = lock(&self.state);
            if let Err(e) = works
                && state.held == now
                && state.failed.is_none()
            {
                let error = Error::comm_while("the shards of this rank wait for each other", e);
                let why = with_causes(&error);
                self.end_with(&mut state, Failed::In { member, why });
                return Err(error);
            }
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

/// An error's message with those of its causes, for receivers that only get text.
pub(crate) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let words = inner.to_string();
        // Some messages already contain that of their cause.
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = inner.source();
    }
    text
}

/// One shard's handle to the meeting.
pub(crate) struct Seat {
    pub(crate) meeting: Arc<Meeting>,
    pub(crate) member: usize,
}

impl JoinStatistics for Seat {
    fn join(&self, rows: f64, mean: &mut [f64], squares: &mut [f64]) -> phalanx_base::Result<f64> {
        let mut mine = vec![rows];
        mine.extend_from_slice(mean);
        mine.extend_from_slice(squares);
        let all = self.meeting.gather(self.member, &mine)?;
        Ok(combine(&all, mean, squares))
    }

    /// Adds left to right over the shards.
    fn sum(&self, sums: &mut [f64]) -> phalanx_base::Result<()> {
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
