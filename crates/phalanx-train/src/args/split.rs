//! `--accumulate` and `--deterministic`: how a step is cut.

use phalanx_ddp::{Deterministic, ShardTree};

use crate::error::{Result, check_count, refuse};

/// How far the bits of a training are fixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Determinism {
    /// The same bits from run to run for one number of ranks, over any transport
    Ranks,
    /// The same bits for every number of ranks
    Shards,
    /// The same bits on all ranks only; between hosts, gradients are added in the fastest order
    Off,
}

/// Arguments that say how a step is cut.
#[derive(Debug, Clone, clap::Args)]
pub struct SplitArgs {
    /// Split each rank's batch into N micro-batches and accumulate their gradients: less memory, the same mean gradient
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub accumulate: usize,
    /// How far results are reproducible; `shards` needs a --global-batch-size [default: ranks; off with --algorithm
    /// fastest]
    #[arg(long, value_enum)]
    pub deterministic: Option<Determinism>,
    /// Number of shards of a global batch for --deterministic shards, at least one per rank [default: 8]
    #[arg(long, value_name = "N")]
    pub shards: Option<usize>,
}

/// Fixed parts of a global batch without `--shards`.
const SHARDS: usize = 8;

/// Micro-batches beyond this are surely a slip of the hand.
const MAX_ACCUMULATE: usize = 4096;

impl SplitArgs {
    /// How far bits are fixed.
    pub fn determinism(&self) -> Determinism {
        self.deterministic.unwrap_or(Determinism::Ranks)
    }

    /// Fixed parts of a global batch.
    pub fn shards(&self) -> usize {
        self.shards.unwrap_or(SHARDS)
    }

    /// The same for `world` ranks of a training that `first` were started for: no rank computes with more samples at a time.
    pub(crate) fn divided(&self, first: usize, world: usize) -> SplitArgs {
        let mut args = self.clone();
        if args.determinism() != Determinism::Shards {
            args.accumulate = (first * args.accumulate).div_ceil(world.max(1));
        }
        args
    }

    /// Heeds that gradients may be added in any order (`--algorithm fastest`): it follows from the
    /// measured wire, so that bits are not fixed from run to run.
    ///
    /// # Errors
    ///
    /// Usage, when just that was asked for.
    pub fn allow_any_order(&mut self) -> Result<()> {
        if self.deterministic == Some(Determinism::Ranks) {
            refuse!(
                "--algorithm fastest adds in whatever order was measured to be fastest, and --deterministic ranks promises \
                 the same bits in every run; leave one of them out"
            );
        }
        // Shards are folded in their tree, whatever the algorithm.
        self.deterministic.get_or_insert(Determinism::Off);
        Ok(())
    }

    /// Checks what can be checked before any rank is started; `typed_global` is the user's own
    /// global batch, `global_batch` what it is in any case.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(
        &self,
        world: usize,
        typed_global: Option<usize>,
        global_batch: usize,
        padded: bool,
    ) -> Result<()> {
        check_count("--accumulate", self.accumulate, MAX_ACCUMULATE)?;
        check_count("--shards", self.shards(), ShardTree::MAX_SHARDS)?;
        let in_shards = self.determinism() == Determinism::Shards;
        if padded && (self.accumulate > 1 || in_shards) {
            refuse!(
                "--sampler torch goes with neither --accumulate nor --deterministic shards; use --sampler exact"
            );
        }
        if !in_shards {
            if self.shards.is_some() {
                refuse!("--shards is for --deterministic shards; add that, or leave it out");
            }
            let each = (global_batch / world.max(1)).max(1);
            if self.accumulate > each {
                refuse!(
                    "--accumulate {} leaves some micro-batches without a sample, since a rank has {each} a step; use at \
                     most {each}, or a larger batch",
                    self.accumulate
                );
            }
            return Ok(());
        }
        if self.accumulate > 1 {
            refuse!(
                "--deterministic shards cuts every step into its shards already; leave out --accumulate, or raise \
                 --shards for smaller ones"
            );
        }
        let Some(global_batch) = typed_global else {
            refuse!(
                "--deterministic shards needs a --global-batch-size, since --batch-size grows with the number of ranks"
            );
        };
        let shards = self.shards();
        if world > shards {
            refuse!(
                "{world} ranks cannot share {shards} shards; use --shards {} or more, for all runs that are to be equal",
                world.next_power_of_two()
            );
        }
        if global_batch < shards {
            refuse!(
                "--global-batch-size {global_batch} leaves some of the {shards} shards without a sample; use at least \
                 {shards}"
            );
        }
        Ok(())
    }

    /// The wrapper's option.
    ///
    /// # Errors
    ///
    /// Usage, when there can be no such number of shards.
    pub fn deterministic(&self) -> Result<Deterministic> {
        Ok(match self.determinism() {
            Determinism::Ranks => Deterministic::Ranks,
            Determinism::Off => Deterministic::Off,
            Determinism::Shards => Deterministic::Shards(ShardTree::new(self.shards())?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rank_computes_with_more_samples_at_a_time_than_at_first() {
        let args = |accumulate| SplitArgs {
            accumulate,
            deterministic: None,
            shards: None,
        };
        for (first, accumulate) in [(3, 1), (4, 1), (4, 2), (8, 3), (1, 1)] {
            let batch = 64 * first * accumulate;
            for world in 1..=first {
                let now = args(accumulate).divided(first, world);
                let parts = now.accumulate * world;
                assert!(batch.div_ceil(parts) <= 64, "{first} {accumulate} {world}");
            }
            assert_eq!(
                args(accumulate).divided(first, first).accumulate,
                accumulate
            );
        }
        let shards = SplitArgs {
            deterministic: Some(Determinism::Shards),
            ..args(1)
        };
        assert_eq!(shards.divided(4, 3).accumulate, 1);
    }
}
