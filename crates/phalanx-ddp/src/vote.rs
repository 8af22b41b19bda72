//! The commit vote: whether the optimizer may take this step.
//!
//! The last bucket has one element (*lane*) per rank behind its gradients, so the vote
//! costs no extra collective. A rank writes 0, or the code of its reason, to its own
//! lane, and 0 to all others. A lane is thus the sum of one number and zeros, which is
//! exact in every algorithm and recovered from the mean by one rounded multiplication.
//! All ranks get the same lanes, hence decide alike.
//!
//! | lane · world      | means                                         |
//! |-------------------|-----------------------------------------------|
//! | 0                 | yes                                           |
//! | `p + 1`           | no: the gradient of parameter `p` is not finite |
//! | `parameters + 1`  | no, for a reason of the caller's              |
//! | `parameters + 2 + i` | no: the gradient of number `i` of those that are not averaged is not finite |
//! | `-2²³`            | yes, but some of its numbers are so large that their sum over the ranks may overflow |
//! | `-(p + 1)`        | what a hook made of parameter `p`'s gradients is not finite; counts if no rank has a reason of its own |
//!
//! Behind the votes, and an element per parameter that counts the ranks that used it, each rank has three lanes for a
//! number that all ranks get, such as its loss.
//!
//! Source: torchft's `should_commit`, which is a separate collective.

use std::fmt;

use crate::parameters::ParamSpec;

/// What the ranks decided about a step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a step that was voted down must not reach the optimizer"]
pub enum Commit {
    /// No rank objects: pass the gradients to the optimizer.
    Yes,
    /// Some ranks object: the gradients are dropped, and every rank skips the step.
    No(Vec<Veto>),
}

impl Commit {
    /// Whether the optimizer may take the step.
    pub fn is_yes(&self) -> bool {
        *self == Commit::Yes
    }
}

/// Why one rank voted against a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Veto {
    /// The rank that voted no.
    pub rank: usize,
    /// The first parameter, in the order of backward, whose gradient had an
    /// infinity or a NaN; `None` when the rank had another reason.
    pub parameter: Option<String>,
}

/// `rank 1: the gradient of fc1.weight is not finite`
impl fmt::Display for Veto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.parameter {
            Some(name) => write!(
                f,
                "rank {}: the gradient of {name} is not finite",
                self.rank
            ),
            None => write!(f, "rank {} asked for it", self.rank),
        }
    }
}

/// The vetoes of one step, `rank 1: …; rank 3: …`; empty after a yes.
impl fmt::Display for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Commit::No(vetoes) = self else {
            return Ok(());
        };
        for (i, veto) in vetoes.iter().enumerate() {
            let semicolon = if i == 0 { "" } else { "; " };
            write!(f, "{semicolon}{veto}")?;
        }
        Ok(())
    }
}

/// This rank's vote during the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Ballot(i32);

/// A vote for the step that requires a check of the averaged gradients.
const LARGE: i32 = -(1 << 23);

impl Ballot {
    /// Votes no because of parameter number `param`, unless it already has.
    pub(crate) fn not_finite(&mut self, param: usize) {
        self.no(param);
    }

    /// Votes no for the caller's own reason; `params` is the number of parameters.
    pub(crate) fn veto(&mut self, params: usize) {
        self.no(params);
    }

    /// Votes no because of number `index` of the parameters that each rank trains for itself; `params`
    /// is the number of averaged parameters.
    #[cfg(feature = "nn")]
    pub(crate) fn own_not_finite(&mut self, params: usize, index: usize) {
        self.no(params + 1 + index);
    }

    /// Declares that this rank has numbers so large that their sum over the ranks may overflow.
    pub(crate) fn large(&mut self) {
        if self.0 == 0 {
            self.0 = LARGE;
        }
    }

    fn no(&mut self, code: usize) {
        if self.is_yes() {
            self.0 = lane_of(code);
        }
    }

    /// Votes no because the mean of parameter number `param` is not finite, unless it already has.
    pub(crate) fn mean_not_finite(&mut self, param: usize) {
        if self.is_yes() {
            self.0 = -lane_of(param);
        }
    }

    fn is_yes(self) -> bool {
        self.0 == 0 || self.0 == LARGE
    }

    /// Writes the vote of `rank` to the lanes.
    pub(crate) fn cast(self, lanes: &mut [f32], rank: usize) {
        lanes.fill(0.0);
        if let Some(lane) = lanes.get_mut(rank) {
            *lane = self.0 as f32;
        }
    }
}

/// Lanes of a rank for a number that all ranks get: its 64 bits in parts, each of which survives the mean as a vote does.
pub(crate) const CARRIED_LANES: usize = 3;
const PART_BITS: u32 = 22;

/// Writes `value` of `rank` to the lanes.
pub(crate) fn carry(value: f64, lanes: &mut [f32], rank: usize) {
    lanes.fill(0.0);
    let own = lanes.chunks_exact_mut(CARRIED_LANES).nth(rank);
    let mut bits = value.to_bits();
    for lane in own.into_iter().flatten() {
        *lane = (bits % (1 << PART_BITS)) as f32;
        bits >>= PART_BITS;
    }
}

/// The sum of all ranks' numbers in the averaged `lanes`, in the order of the ranks.
pub(crate) fn carried(lanes: &[f32], world: usize) -> f64 {
    let part = |lane: &f32| (f64::from(*lane) * world as f64).round() as u64;
    let ranks = lanes.chunks_exact(CARRIED_LANES);
    let bits = ranks.map(|own| {
        own.iter()
            .rev()
            .fold(0, |bits, lane| bits << PART_BITS | part(lane))
    });
    bits.map(f64::from_bits).sum()
}

/// The parameter of a lane with `code` plus 1, among those that are averaged and each rank's own.
pub(crate) fn name_of(code: usize, params: &[ParamSpec], own: &[String]) -> Option<String> {
    match code.checked_sub(params.len()) {
        None => Some(params[code].name.clone()),
        Some(beyond) => own.get(beyond.checked_sub(1)?).cloned(),
    }
}

fn lane_of(code: usize) -> i32 {
    // Beyond 2^22 a lane could be off by one after the mean.
    i32::try_from(code + 1).unwrap_or(i32::MAX).min(1 << 22)
}

/// The ranks that have numbers so large that their sums may overflow, by the averaged `lanes`.
pub(crate) fn large(lanes: &[f32], world: usize) -> Vec<usize> {
    let ranks = 0..world;
    ranks.filter(|&rank| is_large(lanes[rank], world)).collect()
}

fn is_large(lane: f32, world: usize) -> bool {
    // Off by one at most, and far from all other codes.
    (f64::from(lane) * world as f64 - f64::from(LARGE)).abs() <= 16.0
}

/// Counts the votes in the averaged `lanes`; `name` maps numbers to parameters.
pub(crate) fn count(lanes: &[f32], world: usize, name: impl Fn(usize) -> Option<String>) -> Commit {
    // A NaN does not count as a yes.
    let lanes = || {
        lanes[..world]
            .iter()
            .enumerate()
            .filter(|(_, lane)| **lane != 0.0 && !is_large(**lane, world))
    };
    let is_own = |lane: f32| lane > 0.0 || lane.is_nan();
    let any_own = lanes().any(|(_, lane)| is_own(*lane));
    let vetoes: Vec<Veto> = lanes()
        // A non-finite gradient of one rank makes the mean of all not finite.
        .filter(|(_, lane)| is_own(**lane) == any_own)
        .map(|(rank, lane)| {
            let code = (f64::from(lane.abs()) * world as f64).round();
            let parameter = (code >= 1.0).then(|| name(code as usize - 1)).flatten();
            Veto { rank, parameter }
        })
        .collect();
    if vetoes.is_empty() {
        Commit::Yes
    } else {
        Commit::No(vetoes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vote_survives_the_mean_of_every_world() {
        for world in (1..=130).chain([1000, 4096]) {
            for code in [0, 1, 2, 77, 99_999, (1 << 22) - 1] {
                let mut ballot = Ballot::default();
                if code > 0 {
                    ballot.not_finite(code - 1);
                }
                let mut lanes = vec![f32::NAN; world];
                ballot.cast(&mut lanes, world - 1);
                lanes
                    .iter_mut()
                    .for_each(|lane| *lane *= 1.0 / world as f32);
                let commit = count(&lanes, world, |p| Some(p.to_string()));
                let want = match code {
                    0 => Commit::Yes,
                    code => Commit::No(vec![Veto {
                        rank: world - 1,
                        parameter: Some((code - 1).to_string()),
                    }]),
                };
                assert_eq!(commit, want, "world {world}, code {code}");
            }
        }
    }

    #[test]
    fn every_bit_of_a_number_survives_the_mean_of_every_world() {
        let largest = f64::from_bits(u64::MAX >> 12 | 0x7fe << 52);
        for world in (1..=130).chain([1000, 4096]) {
            for value in [0.1, -3.0e-300, largest, f64::INFINITY, f64::NAN] {
                let mut lanes = vec![f32::NAN; world * CARRIED_LANES];
                carry(value, &mut lanes, world - 1);
                let inverse = 1.0 / world as f32;
                lanes.iter_mut().for_each(|lane| *lane *= inverse);
                let bits = value.to_bits();
                assert_eq!(carried(&lanes, world).to_bits(), bits, "{world}: {value}");
            }
        }
    }

    #[test]
    fn large_numbers_are_a_yes_in_every_world_unless_there_is_a_reason() {
        for world in (1..=130).chain([1000, 4096]) {
            let mut ballot = Ballot::default();
            ballot.large();
            let mut lanes = vec![0.0; world];
            ballot.cast(&mut lanes, world - 1);
            let inverse = 1.0 / world as f32;
            lanes.iter_mut().for_each(|lane| *lane *= inverse);
            assert_eq!(large(&lanes, world), [world - 1]);
            assert_eq!(count(&lanes, world, |_| None), Commit::Yes);
            ballot.not_finite(2);
            ballot.large();
            ballot.cast(&mut lanes, world - 1);
            lanes.iter_mut().for_each(|lane| *lane *= inverse);
            assert!(large(&lanes, world).is_empty() && !count(&lanes, world, |_| None).is_yes());
        }
    }

    #[test]
    fn the_first_reason_is_kept_and_garbage_is_a_no() {
        let mut ballot = Ballot::default();
        ballot.not_finite(3);
        ballot.not_finite(1);
        ballot.veto(8);
        let mut lanes = [0.0; 2];
        ballot.cast(&mut lanes, 0);
        assert_eq!(lanes, [4.0, 0.0]);
        for garbage in [f32::NAN, f32::INFINITY, -3.0, 1e30] {
            let commit = count(&[0.0, garbage], 2, |_| None);
            assert_eq!(commit.to_string(), "rank 1 asked for it");
        }
    }

    #[test]
    fn what_became_of_gradients_counts_if_no_rank_has_a_reason_of_its_own() {
        let mut mean = Ballot::default();
        mean.mean_not_finite(4);
        mean.not_finite(1);
        let mut own = Ballot::default();
        own.not_finite(2);
        own.mean_not_finite(4);
        let count = |ballots: [Ballot; 3]| {
            let lanes: Vec<f32> = ballots.iter().map(|b| b.0 as f32 / 3.0).collect();
            count(&lanes, 3, |p| Some(p.to_string())).to_string()
        };
        let no = "the gradient of";
        assert_eq!(
            count([mean, mean, mean]),
            format!(
                "rank 0: {no} 4 is not finite; rank 1: {no} 4 is not finite; rank 2: {no} 4 is not finite"
            )
        );
        assert_eq!(
            count([mean, own, mean]),
            format!("rank 1: {no} 2 is not finite")
        );
        let mut veto = Ballot::default();
        veto.veto(usize::MAX - 1);
        assert_eq!(
            count([veto, mean, mean]),
            format!("rank 0: {no} {} is not finite", (1 << 22) - 1)
        );
    }
}
