//! The properties of one rank's plan that let the executor run it over raw memory.

use super::{Buf, Local, Part, RankPlan};

/// Why a plan is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct PlanError {
    what: String,
}

impl PlanError {
    pub(super) fn new(what: impl Into<String>) -> Self {
        PlanError { what: what.into() }
    }
}

type Result<T = ()> = std::result::Result<T, PlanError>;

impl RankPlan {
    /// Checks that every part lies within its buffer, that the caller's input
    /// is only read, that within a round nothing is received over memory that
    /// is being sent or received elsewhere, that there is at most one send and
    /// one receive per peer and round, and that local steps do not overlap
    /// their own sources other than exactly.
    ///
    /// The executor turns parts into raw memory accesses; its safety depends on these
    /// facts.
    ///
    /// # Errors
    ///
    /// [`PlanError`] naming the first fact that does not hold.
    pub fn check_local(&self) -> Result {
        for (index, round) in self.rounds.iter().enumerate() {
            let at =
                |what: String| PlanError::new(format!("rank {}, round {index}: {what}", self.rank));
            self.check_round(round).map_err(|e| at(e.what))?;
        }
        Ok(())
    }

    fn check_round(&self, round: &super::Round) -> Result {
        for list in [&round.sends, &round.recvs] {
            let mut seen = vec![false; self.world];
            for transfer in list {
                if transfer.peer >= self.world || transfer.peer == self.rank {
                    return Err(PlanError::new(format!("no such peer: {}", transfer.peer)));
                }
                if std::mem::replace(&mut seen[transfer.peer], true) {
                    return Err(PlanError::new(format!(
                        "two transfers with rank {} in one direction",
                        transfer.peer
                    )));
                }
                self.within(&transfer.part)?;
            }
        }
        // Sorted by place, a written part may not touch its neighbours. Reads
        // may overlap reads, so of the reads so far the furthest end counts.
        let mut parts: Vec<(Part, bool)> = round
            .recvs
            .iter()
            .map(|t| (t.part, true))
            .chain(round.sends.iter().map(|t| (t.part, false)))
            .filter(|(part, _)| part.len > 0)
            .collect();
        parts.sort_unstable_by_key(|(part, written)| (part.buf, part.start, *written));
        let mut furthest_read: Option<Part> = None;
        let mut furthest_write: Option<Part> = None;
        for (part, written) in parts {
            if written {
                writable(&part)?;
            }
            let clash = furthest_write
                .filter(|w| w.overlaps(&part))
                .or(furthest_read.filter(|r| written && r.overlaps(&part)));
            if let Some(other) = clash {
                return Err(PlanError::new(format!(
                    "{part:?} is in flight together with {other:?}"
                )));
            }
            let furthest = if written {
                &mut furthest_write
            } else {
                &mut furthest_read
            };
            match furthest {
                Some(f) if f.buf == part.buf && f.end() >= part.end() => {}
                _ => *furthest = Some(part),
            }
        }
        for step in &round.local {
            self.check_step(step)?;
        }
        Ok(())
    }

    fn check_step(&self, step: &Local) -> Result {
        match step {
            Local::Fold { into, sources, .. } => {
                self.within(into)?;
                writable(into)?;
                if sources.is_empty() {
                    return Err(PlanError::new("a fold of nothing"));
                }
                for source in sources {
                    self.within(source)?;
                    if source.len != into.len {
                        return Err(PlanError::new("a fold of unequal lengths"));
                    }
                    if source != into && source.overlaps(into) {
                        return Err(PlanError::new("a fold overlaps its own source"));
                    }
                }
            }
            Local::Copy { from, into } => {
                self.within(from)?;
                self.within(into)?;
                writable(into)?;
                if from.len != into.len || from.overlaps(into) {
                    return Err(PlanError::new("a copy onto itself or of unequal length"));
                }
            }
        }
        Ok(())
    }

    fn within(&self, part: &Part) -> Result {
        let size = match part.buf {
            Buf::Input => self.input_elems,
            Buf::Output => self.output_elems,
            Buf::Scratch => self.scratch_elems,
        };
        match part.start.checked_add(part.len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(PlanError::new(format!(
                "{part:?} lies outside its {size} elements"
            ))),
        }
    }
}

fn writable(part: &Part) -> Result {
    if part.buf == Buf::Input && part.len > 0 {
        return Err(PlanError::new("the caller's input would be overwritten"));
    }
    Ok(())
}
