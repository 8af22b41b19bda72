//! How each global batch is cut into the micro-batches of the ranks, the same
//! way whether ranks share it, one rank takes several parts of it, or its
//! parts are fixed logical shards.

use std::ops::Range;

use phalanx_data::ShardOrder;
use phalanx_data::sampler::{Cursor, EpochPlan, Sampler, SamplerConfig, TorchBatches};
use phalanx_ddp::{Deterministic, GlobalBatch, ShardTree};

use crate::args::{SamplerKind, Settings, SplitArgs};
use crate::error::Result;

/// The parts of every global batch, and which of them are this rank's. Part
/// `p` of `n` has samples `p, p + n, p + 2n, …`.
#[derive(Debug, Clone)]
pub struct BatchSplit {
    parts: usize,
    mine: Range<usize>,
    world: usize,
    /// Where parts are folded as shards.
    tree: Option<ShardTree>,
}

impl BatchSplit {
    /// How `args` cut batches for `rank` of `world`.
    ///
    /// # Errors
    ///
    /// Usage, when there can be no such number of shards.
    pub fn new(args: &SplitArgs, world: usize, rank: usize) -> Result<BatchSplit> {
        Ok(match args.deterministic()? {
            Deterministic::Shards(tree) => BatchSplit {
                parts: tree.shards(),
                mine: tree.range(world, rank),
                world,
                tree: Some(tree),
            },
            Deterministic::Ranks | Deterministic::Off => BatchSplit {
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

    /// Number of ranks that split a batch.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Number of parts of a global batch over all ranks.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// This rank's parts.
    pub fn mine(&self) -> Range<usize> {
        self.mine.clone()
    }

    /// Samples of the smallest micro-batch that has any in a step of `samples` over all ranks. Those that all ranks take at the same
    /// time count as one if they are `joined`.
    pub fn smallest(&self, samples: usize, joined: bool) -> usize {
        let each = self.parts / self.world;
        let size = |part: usize| (samples + self.parts - 1 - part) / self.parts;
        let together = |i: usize| (0..self.world).map(|rank| size(rank * each + i)).sum();
        match joined {
            true => (0..each)
                .map(together)
                .filter(|n| *n > 0)
                .min()
                .unwrap_or(0),
            false => (samples / self.parts).max(1),
        }
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
        let plans: phalanx_base::Result<Vec<EpochPlan>> =
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

impl Settings {
    /// This rank's parts of a training set of `samples`, whose shuffled samples come in `order`, if it has one of its own.
    ///
    /// # Errors
    ///
    /// Usage, when batches cannot be cut so.
    pub fn samplers(
        &self,
        split: &BatchSplit,
        config: SamplerConfig,
        drop_last: bool,
        order: Option<&ShardOrder>,
    ) -> Result<Vec<Sampler>> {
        let (world, global) = (config.world, self.global_batch(config.world));
        split.samplers(config, |config| {
            let sampler = match self.sampler {
                SamplerKind::Exact => Sampler::exact(config, global)?.drop_last(self.drop_last),
                SamplerKind::Torch => Sampler::torch(
                    config,
                    TorchBatches {
                        batch_size: global / world,
                        drop_samples: false,
                        drop_batch: drop_last || self.drop_last,
                    },
                )?,
            };
            sampler.shards(order.cloned())
        })
    }
}
