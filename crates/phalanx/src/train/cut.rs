//! How each global batch is cut into the micro-batches of the ranks, the same
//! way whether ranks share it, one rank takes several parts of it, or its
//! parts are fixed logical shards.

use std::ops::Range;

use phalanx_ddp::{Deterministic, GlobalBatch, ShardTree};
use phalanx_train::sampler::{Cursor, EpochPlan, Sampler, SamplerConfig};

use crate::error::{Error, Result};
use crate::ranks;

/// How far the bits of a training are fixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Determinism {
    /// The same from run to run at one number of ranks, over any transport
    Ranks,
    /// The same for every number of ranks, too
    Shards,
    /// The same on all ranks; between hosts, gradients are added in whatever order is fastest
    Off,
}

/// Arguments that say how a step is cut.
#[derive(Debug, Clone, clap::Args)]
pub struct CutArgs {
    /// Cut each rank's batch of a step into N micro-batches, one backward each: less memory, the same mean gradient
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub accumulate: usize,
    /// Whether results may depend on the number of ranks; with `shards`, choose the --global-batch-size
    #[arg(long, value_enum, default_value_t = Determinism::Ranks)]
    pub deterministic: Determinism,
    /// Fixed parts of a global batch under --deterministic shards, at least one a rank
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub shards: usize,
}

/// Micro-batches beyond this are surely a slip of the hand.
const MAX_ACCUMULATE: usize = 4096;

impl CutArgs {
    /// Checks what can be checked before any rank is started; `global_batch`
    /// is the user's own.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self, world: usize, global_batch: Option<usize>, padded: bool) -> Result<()> {
        ranks::check_count("--accumulate", self.accumulate, MAX_ACCUMULATE)?;
        ranks::check_count("--shards", self.shards, ShardTree::MAX_SHARDS)?;
        if padded && (self.accumulate > 1 || self.deterministic == Determinism::Shards) {
            return Err(Error::usage(
                "--sampler torch goes with neither --accumulate nor --deterministic shards; use --sampler exact",
            ));
        }
        if self.deterministic != Determinism::Shards {
            return Ok(());
        }
        if self.accumulate > 1 {
            return Err(Error::usage(
                "--deterministic shards cuts every step into its shards already; leave out --accumulate, or raise \
                 --shards for smaller ones",
            ));
        }
        let Some(global_batch) = global_batch else {
            return Err(Error::usage(
                "--deterministic shards needs a --global-batch-size, since --batch-size grows with the number of ranks",
            ));
        };
        if world > self.shards {
            return Err(Error::usage(format!(
                "{world} ranks cannot share {} shards; use --shards {} or more, for all runs that are to be equal",
                self.shards,
                world.next_power_of_two()
            )));
        }
        if global_batch < self.shards {
            return Err(Error::usage(format!(
                "--global-batch-size {global_batch} leaves some of the {} shards without a sample; use at least {0}",
                self.shards
            )));
        }
        Ok(())
    }

    /// What must be the same on all ranks.
    pub fn must_agree(&self) -> Vec<String> {
        vec![
            format!("--accumulate {}", self.accumulate),
            format!("--deterministic {:?}", self.deterministic).to_lowercase(),
            format!("--shards {}", self.shards),
        ]
    }

    /// The wrapper's option.
    ///
    /// # Errors
    ///
    /// Usage, when there can be no such number of shards.
    pub fn deterministic(&self) -> Result<Deterministic> {
        Ok(match self.deterministic {
            Determinism::Ranks => Deterministic::Ranks,
            Determinism::Off => Deterministic::Off,
            Determinism::Shards => Deterministic::Shards(ShardTree::new(self.shards)?),
        })
    }
}

/// The parts of every global batch, and which of them are this rank's. Part
/// `p` of `n` has samples `p, p + n, p + 2n, …`.
#[derive(Debug, Clone)]
pub struct Cut {
    parts: usize,
    mine: Range<usize>,
    world: usize,
    /// Where parts are folded as shards.
    tree: Option<ShardTree>,
}

impl Cut {
    /// How `args` cut batches for `rank` of `world`.
    ///
    /// # Errors
    ///
    /// Usage, when there can be no such number of shards.
    pub fn new(args: &CutArgs, world: usize, rank: usize) -> Result<Cut> {
        Ok(match args.deterministic()? {
            Deterministic::Shards(tree) => Cut {
                parts: tree.shards(),
                mine: tree.range(world, rank),
                world,
                tree: Some(tree),
            },
            Deterministic::Ranks | Deterministic::Off => Cut {
                parts: world * args.accumulate,
                mine: rank * args.accumulate..(rank + 1) * args.accumulate,
                world,
                tree: None,
            },
        })
    }

    /// The tree over shards, if results must not depend on the ranks.
    pub fn tree(&self) -> Option<ShardTree> {
        self.tree
    }

    /// Number of parts of a global batch over all ranks.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// This rank's parts.
    pub fn mine(&self) -> Range<usize> {
        self.mine.clone()
    }

    /// One sampler a part, made by `make`.
    ///
    /// # Errors
    ///
    /// Those of `make`.
    pub fn samplers(
        &self,
        config: SamplerConfig,
        make: impl Fn(SamplerConfig) -> Result<Sampler>,
    ) -> Result<Vec<Sampler>> {
        let part = |rank| {
            make(SamplerConfig {
                world: self.parts,
                rank,
                ..config
            })
        };
        self.mine().map(part).collect()
    }

    /// Epoch `epoch` of this rank: its micro-batches of each step in turn.
    pub fn epoch(&self, samplers: &[Sampler], epoch: u64) -> EpochPlan {
        let plans: Vec<EpochPlan> = samplers.iter().map(|s| s.epoch(epoch)).collect();
        EpochPlan::interleave(&plans)
    }

    /// What `cursor` leaves of its epoch, in the same way.
    ///
    /// # Errors
    ///
    /// Usage, when no step of this cut begins there.
    pub fn rest(&self, samplers: &[Sampler], cursor: Cursor) -> Result<EpochPlan> {
        let plans: phalanx_train::Result<Vec<EpochPlan>> =
            samplers.iter().map(|s| s.resume(cursor)).collect();
        Ok(EpochPlan::interleave(&plans?))
    }

    /// Sizes of this rank's micro-batches in step `index` of `plan`, and those
    /// of the step over all ranks. Empty ones come last, and on all ranks the
    /// later parts are the shorter.
    pub fn sizes(&self, plan: &EpochPlan, index: usize) -> (Vec<usize>, GlobalBatch) {
        let parts = plan.parts();
        let slices = (0..parts).filter_map(|p| plan.slice(index * parts + p));
        let (sizes, lens): (Vec<usize>, Vec<usize>) =
            slices.map(|(indices, len)| (indices.len(), len)).unzip();
        let samples = lens.first().copied().unwrap_or(0);
        let micro_batches = samples.min(self.parts);
        let per_rank = (self.parts / self.world).max(1);
        let global = GlobalBatch {
            samples,
            micro_batches,
            active_ranks: micro_batches.div_ceil(per_rank).min(self.world),
        };
        (sizes, global)
    }
}
