//! Which method carries out a collective.
//!
//! Pure functions of what all ranks know alike (sizes, world, options), so
//! all ranks choose alike. What was chosen is in every frame header; ranks
//! that were configured differently find out at the first frame.

use crate::plan::Method;

/// How all-reduce is carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// One round for small data, otherwise direct. Canonical order.
    #[default]
    Auto,
    /// Reduce-scatter by chunk owners, then all-gather: two rounds, least
    /// bytes, canonical order.
    Direct,
    /// Everyone sends everything to everyone and folds it all: one round,
    /// canonical order.
    OneRound,
    /// Over a ring: each rank sends only to its successor and receives only
    /// from its predecessor, in `2(P − 1)` steps. The order of additions is
    /// fixed and the same on all ranks, but not canonical.
    Ring,
}

impl Algorithm {
    /// The name used in options and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Auto => "auto",
            Algorithm::Direct => "direct",
            Algorithm::OneRound => "one-round",
            Algorithm::Ring => "ring",
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Algorithm {
    type Err = crate::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Algorithm::Auto),
            "direct" => Ok(Algorithm::Direct),
            "one-round" | "one_round" => Ok(Algorithm::OneRound),
            "ring" => Ok(Algorithm::Ring),
            _ => Err(crate::Error::usage(format!(
                "unknown all-reduce algorithm {text:?}: choose auto, direct, one-round or ring"
            ))),
        }
    }
}

/// What one synchronisation costs, in bytes that could be moved meanwhile:
/// 5 µs at 10 GB/s (collectives.md §1).
const SYNC_COST_BYTES: f64 = 50_000.0;
/// Least data for which a second round can pay (collectives.md §1).
const ONE_ROUND_MIN_BYTES: usize = 2 << 10;
/// Most data for which one round can pay (collectives.md §1).
const ONE_ROUND_MAX_BYTES: usize = 64 << 10;
/// Up to this size a tree of whole messages beats two rounds of chunks: the
/// data is no longer than a few latencies.
const BROADCAST_TREE_MAX_BYTES: usize = 64 << 10;
/// Up to this size per peer the root folds alone.
const REDUCE_ROOT_MAX_BYTES: usize = 32 << 10;

/// Data up to this size is reduced in one round: where the extra bytes,
/// `(P − 2 − 1/P)·n`, cost less than one more synchronisation.
pub(crate) fn one_round_max_bytes(world: usize) -> usize {
    let p = world as f64;
    let extra = p - 2.0 - 1.0 / p;
    if extra <= 0.0 {
        return ONE_ROUND_MAX_BYTES;
    }
    ((SYNC_COST_BYTES / extra) as usize).clamp(ONE_ROUND_MIN_BYTES, ONE_ROUND_MAX_BYTES)
}

pub(crate) fn all_reduce(algorithm: Algorithm, world: usize, bytes: usize) -> Method {
    match algorithm {
        Algorithm::Auto if bytes <= one_round_max_bytes(world) => Method::AllReduceOneRound,
        Algorithm::Auto | Algorithm::Direct => Method::AllReduceDirect,
        Algorithm::OneRound => Method::AllReduceOneRound,
        Algorithm::Ring => Method::AllReduceRing,
    }
}

pub(crate) fn broadcast(world: usize, bytes: usize) -> Method {
    if world <= 2 || bytes <= BROADCAST_TREE_MAX_BYTES {
        Method::BroadcastTree
    } else {
        Method::BroadcastScatter
    }
}

pub(crate) fn reduce(world: usize, bytes: usize) -> Method {
    if world <= 1 || bytes <= REDUCE_ROOT_MAX_BYTES {
        Method::ReduceRoot
    } else {
        Method::ReduceOwners
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crossings_are_those_of_the_design() {
        // collectives.md §1: 28 KiB for 4 ranks, 8 KiB for 8, 4 KiB for 16.
        let kib = |world| one_round_max_bytes(world) as f64 / 1024.0;
        assert_eq!(one_round_max_bytes(2), 64 << 10);
        assert!((kib(4) - 28.0).abs() < 1.0, "{}", kib(4));
        assert!((kib(8) - 8.0).abs() < 0.5, "{}", kib(8));
        assert!((kib(16) - 3.5).abs() < 0.5, "{}", kib(16));
        assert_eq!(one_round_max_bytes(1000), 2 << 10);
    }

    #[test]
    fn auto_never_leaves_canonical_order() {
        for world in 1..100 {
            for bytes in [0, 4, 1 << 10, 1 << 20, 1 << 30] {
                assert!(all_reduce(Algorithm::Auto, world, bytes).canonical());
            }
        }
    }

    #[test]
    fn names_parse_back() {
        for a in [
            Algorithm::Auto,
            Algorithm::Direct,
            Algorithm::OneRound,
            Algorithm::Ring,
        ] {
            assert_eq!(a.name().parse::<Algorithm>().ok(), Some(a));
        }
        assert!("rings".parse::<Algorithm>().is_err());
    }
}
