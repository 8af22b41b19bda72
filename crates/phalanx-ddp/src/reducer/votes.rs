//! The ranks' vote on a step, in the last lanes of its last bucket.

use phalanx_comm::{Call, ReduceOp};

use super::Reducer;
use crate::error::{Error, Result};
use crate::typed::{AnyMemory, Memory};
use crate::vote::{self, Ballot, Commit};

/// What one rank leaves in the last lanes.
pub(super) struct Vote<'a> {
    pub(super) ballot: Ballot,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) used: &'a [bool],
}

impl Vote<'_> {
    /// This rank's vote, and which parameters it has used.
    pub(super) fn cast(&self, lanes: &mut [f32]) {
        let (votes, used) = lanes.split_at_mut(self.world);
        self.ballot.cast(votes, self.rank);
        for (lane, &used) in used.iter_mut().zip(self.used) {
            *lane = f32::from(u8::from(used));
        }
    }
}

impl Reducer {
    /// Votes against the step that runs, or between steps against the next one, for a reason of
    /// the caller's own: no rank will apply it. Counts if it comes before this rank's last gradient
    /// is [`ready`](Self::ready).
    pub fn veto(&mut self) {
        if self.in_backward {
            self.ballot.veto(self.params.len());
        } else {
            self.veto_next = true;
        }
    }

    /// Names parameters that are not reduced, but whose gradients count in the vote
    /// ([`own_not_finite`](Self::own_not_finite)).
    pub(crate) fn set_own(&mut self, names: Vec<String>) {
        self.own = names;
    }

    /// Votes against the step that runs because of number `index` of this rank's own gradients.
    pub(crate) fn own_not_finite(&mut self, index: usize) {
        self.begin();
        if !self.options.unchecked {
            self.ballot.own_not_finite(self.params.len(), index);
        }
    }

    pub(super) fn count_votes(&mut self) -> Commit {
        let lanes = match (&self.votes, self.memory.last()) {
            (Some(Memory::Reduced(votes)), Some(_)) => &votes[..],
            (None, Some(AnyMemory::F32(Memory::Reduced(last)))) => {
                &last[self.plan.bucket_elems(self.memory.len() - 1)..]
            }
            _ => return Commit::Yes, // there are no parameters
        };
        let (votes, used) = lanes.split_at(self.group.world_size());
        for (untouched, lane) in self.untouched.iter_mut().zip(used) {
            *untouched = *lane == 0.0;
        }
        vote::count(votes, self.group.world_size(), |param| {
            vote::name_of(param, &self.params, &self.own)
        })
    }

    pub(super) fn collect_votes(&mut self) -> Result<()> {
        if let Some(votes) = self.votes.take() {
            let votes = match votes {
                // Not launched: nothing runs beside a late step.
                Memory::Filling(mut votes) if self.is_late() => {
                    let call = Call {
                        label: Some("votes on the step".into()),
                        ..Call::default()
                    };
                    let voted = self
                        .group
                        .all_reduce_bucket(&mut votes, ReduceOp::Mean, &call);
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
