//! The ranks' vote on a step, in the last elements (*lanes*) of its last bucket.

use std::ops::Range;

use phalanx_comm::{Call, ReduceOp};

use super::Reducer;
use super::memory::Memory;
use crate::error::{Error, Result};
use crate::vote::{self, Ballot, Commit, Veto};

/// What one rank writes to the last lanes.
pub(super) struct Vote<'a> {
    pub(super) ballot: Ballot,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) used: &'a [bool],
    /// What all ranks get of this one.
    pub(super) carried: f64,
}

impl Vote<'_> {
    /// This rank's vote, and which parameters it has used.
    pub(super) fn cast(&self, lanes: &mut [f32]) {
        let (votes, used) = lanes.split_at_mut(self.world);
        let (used, carried) = used.split_at_mut(self.used.len());
        self.ballot.cast(votes, self.rank);
        vote::carry(self.carried, carried, self.rank);
        for (lane, &used) in used.iter_mut().zip(self.used) {
            *lane = f32::from(u8::from(used));
        }
    }
}

impl Reducer {
    /// Votes against the running step, or between steps against the next one, for a reason of the
    /// caller: no rank will apply it. It counts if it comes before this rank's last gradient is
    /// [`ready`](Self::ready).
    pub fn veto(&mut self) {
        if self.in_backward {
            self.ballot.veto(self.params.len());
        } else {
            self.veto_next = true;
        }
    }

    /// Gives all ranks `value` with their votes on the running step, or between steps on the next one: the last one that comes
    /// before this rank's last gradient is [`ready`](Self::ready).
    pub fn carry(&mut self, value: f64) {
        self.carried = value;
    }

    /// The sum, in the order of the ranks, of what they gave by [`carry`](Self::carry) in the last finished step, 0 where one gave
    /// nothing; `None` where there are no parameters.
    pub fn carried(&self) -> Option<f64> {
        self.carried_by_all
    }

    /// The result of the vote, and the ranks with numbers so large that the means may not be finite.
    pub(super) fn count_votes(&mut self) -> (Commit, Vec<usize>) {
        let lanes = match (&self.votes, self.memory.last()) {
            (Some(Memory::Reduced(votes)), Some(_)) => &votes[..],
            (None, Some(Memory::Reduced(last))) => {
                &last[self.plan.bucket_elems(self.memory.len() - 1)..]
            }
            _ => return (Commit::Yes, Vec::new()), // there are no parameters
        };
        let (votes, used) = lanes.split_at(self.group.world_size());
        let (used, carried) = used.split_at(self.params.len());
        self.carried_by_all = Some(vote::carried(carried, self.group.world_size()));
        for (untouched, lane) in self.untouched.iter_mut().zip(used) {
            *untouched = *lane == 0.0;
        }
        let world = self.group.world_size();
        let name = |param| vote::name_of(param, &self.params, &self.own);
        (vote::count(votes, world, name), vote::large(votes, world))
    }

    /// Checks the means themselves, if the ranks `large` have large, finite numbers: no rank may apply a mean that is
    /// not finite. Rare, so it may cost a pass over the gradients, and a collective if each rank has only its part of
    /// them.
    pub(super) fn check_means(&mut self, large: &[usize]) -> Result<Commit> {
        self.exchange_late()?;
        let mut bad = self.first_mean_not_finite();
        if self.is_scattered() && self.group.world_size() > 1 {
            // A number beyond all parameters means none.
            let mut first = [bad.unwrap_or(self.params.len()) as i64];
            self.group
                .all_reduce(&mut first, ReduceOp::Min)
                .map_err(|e| {
                    self.failed = true;
                    Error::comm_while("the ranks could not vote on the step", e)
                })?;
            bad = usize::try_from(first[0]).ok();
        }
        let Some(spec) = bad.and_then(|param| self.params.get(param)) else {
            return Ok(Commit::Yes);
        };
        let veto = |&rank: &usize| Veto {
            rank,
            parameter: Some(spec.name.clone()),
        };
        Ok(Commit::No(large.iter().map(veto).collect()))
    }

    /// What this rank's memory has of these elements of `param`.
    pub(super) fn values(&self, param: usize, elems: Range<usize>) -> &[f32] {
        let (bucket, place) = self.plan.place(param);
        let run = place.start + elems.start..place.start + elems.end;
        match (&self.chunks[bucket], &self.memory[bucket]) {
            (Some(chunk), _) => {
                let first = self.group.rank() * chunk.len();
                let run = run.start.checked_sub(first).zip(run.end.checked_sub(first));
                run.and_then(|(from, to)| chunk.get(from..to))
                    .unwrap_or_default()
            }
            (None, Memory::Reduced(memory)) => memory.get(run).unwrap_or_default(),
            _ => &[],
        }
    }

    /// The first parameter whose mean is not finite in this rank's part.
    fn first_mean_not_finite(&self) -> Option<usize> {
        let of_bucket = |bucket: usize| {
            let run = match &self.chunks[bucket] {
                Some(chunk) => {
                    let first = self.group.rank() * chunk.len();
                    first..first + chunk.len()
                }
                None => 0..self.plan.bucket_elems(bucket),
            };
            let mut within = self.plan.within(bucket, run);
            within.find(|(param, elems)| {
                !phalanx_comm::all_finite(self.values(*param, elems.clone()))
            })
        };
        (0..self.memory.len())
            .find_map(of_bucket)
            .map(|(param, _)| param)
    }

    pub(super) fn collect_votes(&mut self) -> Result<()> {
        if let Some(votes) = self.votes.take() {
            let votes = match votes {
                // Not launched: a late step runs no collective during backward.
                Memory::Filling(mut votes) if self.is_late() => {
                    let group = self.group.with_call(Call {
                        label: Some("votes on the step".into()),
                        ..Call::default()
                    });
                    let voted = group.all_reduce(&mut votes, ReduceOp::Mean);
                    voted.map(|()| (Memory::Reduced(votes), None))
                }
                votes => votes.collected(),
            };
            let (votes, _) = votes.map_err(|e| {
                self.failed = true;
                Error::comm_while("the ranks could not vote on the step", e)
            })?;
            self.votes = Some(votes);
        }
        Ok(())
    }
}
