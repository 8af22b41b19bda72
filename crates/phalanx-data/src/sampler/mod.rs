//! Samplers: which samples each rank gets, in which order.
//!
//! Two orders of the same permutation (PyTorch's, from seed + epoch):
//!
//! * **exact** (the default of a run): the permutation is cut into
//!   consecutive global batches; rank r takes elements r, r + world, … of
//!   each. Every sample once per epoch at any world size, nothing padded or
//!   dropped unless [`Sampler::drop_last`] says so; the last batch may be short, or empty on some ranks, and every
//!   rank takes the same number of steps. The global batches do not depend
//!   on the world size, so a run continues from any [`Cursor`] on any number of
//!   ranks.
//! * **torch**: what `DistributedSampler` and `DataLoader` do, padding and
//!   dropping included, bit for bit, for comparing runs with PyTorch's.
//!
//! The epoch belongs to the iterator that [`Sampler::epochs`] returns, so there is no
//! `set_epoch` to forget.

mod exact;
mod plan;
mod torch;

pub use plan::{EpochPlan, StepPlan};
pub use torch::TorchBatches;

use crate::order::ShardOrder;
use phalanx_base::{Error, Result, refuse};
use phalanx_checkpoint::state::Place;
use phalanx_nn::rng::torch::Generator;

/// Settings of a [`Sampler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerConfig {
    /// Number of samples in the data set.
    pub samples: usize,
    /// Number of ranks.
    pub world: usize,
    /// This rank, from 0.
    pub rank: usize,
    /// Whether to shuffle; otherwise samples are in the data set's order.
    pub shuffle: bool,
    /// Seed of the permutations; epoch e uses seed + e.
    pub seed: u64,
}

/// A position in the order of samples, valid for any world size: with the seed, the
/// resumable state of a sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Number of samples of this epoch that all ranks together have taken, including
    /// padding of the torch order.
    pub samples: u64,
}

impl Cursor {
    /// The start of training.
    pub const START: Self = Self {
        epoch: 0,
        samples: 0,
    };
}

impl From<Place> for Cursor {
    fn from(place: Place) -> Self {
        Self {
            epoch: place.epoch,
            samples: place.samples,
        }
    }
}

/// The samples of one rank.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    order: Order,
    shards: Option<ShardOrder>,
}

#[derive(Clone, Copy, Debug)]
enum Order {
    Exact {
        global_batch: usize,
        drop_last: bool,
    },
    Torch(TorchBatches),
}

impl Sampler {
    /// The exact order with `global_batch` samples a step over all ranks.
    ///
    /// # Errors
    ///
    /// Usage: no rank, a rank outside the world, or an empty batch.
    pub fn exact(config: SamplerConfig, global_batch: usize) -> Result<Self> {
        check(&config, global_batch)?;
        let order = Order::Exact {
            global_batch,
            drop_last: false,
        };
        Ok(Self::of(config, order))
    }

    /// PyTorch's order: `DistributedSampler` under a `DataLoader`.
    ///
    /// # Errors
    ///
    /// Usage: no rank, a rank outside the world, or an empty batch.
    pub fn torch(config: SamplerConfig, batches: TorchBatches) -> Result<Self> {
        check(&config, batches.batch_size)?;
        Ok(Self::of(config, Order::Torch(batches)))
    }

    fn of(config: SamplerConfig, order: Order) -> Self {
        Self {
            config,
            order,
            shards: None,
        }
    }

    /// The same where an epoch ends before a last batch that is short, as with `DataLoader(drop_last=True)`: in the exact
    /// order the global batch of all ranks, in PyTorch's that of each rank, after `DistributedSampler`'s padding.
    #[must_use]
    pub fn drop_last(mut self, drop: bool) -> Self {
        match &mut self.order {
            Order::Exact { drop_last, .. } => *drop_last = drop,
            Order::Torch(batches) => batches.drop_batch = drop,
        }
        self
    }

    /// The same where shuffled samples come in the order of their shards, if there is one ([`Dataset::order`](crate::Dataset::order)).
    ///
    /// # Errors
    ///
    /// Usage: the shards have fewer samples than the data set.
    pub fn shards(mut self, order: Option<ShardOrder>) -> Result<Self> {
        let (has, needed) = (order.as_ref(), self.config.samples);
        if let Some(has) = has.map(ShardOrder::samples)
            && has < needed as u64
        {
            refuse!("the shards have {has} samples, but the data set has {needed}");
        }
        self.shards = order;
        Ok(self)
    }

    /// All steps of epoch `epoch`. A pure function.
    pub fn epoch(&self, epoch: u64) -> EpochPlan {
        self.plan(epoch, 0)
    }

    /// The steps after the first `done` samples of all ranks.
    fn plan(&self, epoch: u64, done: usize) -> EpochPlan {
        let (config, permutation) = (&self.config, self.permutation(epoch));
        match self.order {
            Order::Exact {
                global_batch,
                drop_last,
            } => exact::plan(config, epoch, permutation, global_batch, drop_last, done),
            Order::Torch(batches) => {
                torch::plan(config, epoch, permutation, batches, done / config.world)
            }
        }
    }

    /// The rest of the epoch of `cursor`.
    ///
    /// No samples are read to find the position.
    ///
    /// # Errors
    ///
    /// Usage: the cursor is beyond the epoch's end, or (torch order only) not between two
    /// steps of this world size.
    pub fn resume(&self, cursor: Cursor) -> Result<EpochPlan> {
        let (epoch, world) = (cursor.epoch, self.config.world);
        let done = match self.order {
            Order::Exact { .. } => within(cursor, self.config.samples)?,
            Order::Torch(batches) => {
                let per_rank = torch::samples_per_rank(&self.config, batches.drop_samples);
                let end = torch::kept(per_rank, batches) * world;
                let done = within(cursor, end)?;
                let step = batches.batch_size.saturating_mul(world);
                if done != end && !done.is_multiple_of(step) {
                    refuse!(
                        "cannot resume epoch {epoch} after {done} samples in the torch order: \
                         {world} ranks take {step} a step\n  use the world size and batch \
                         that the run was started with, or the exact order"
                    );
                }
                done
            }
        };
        Ok(self.plan(epoch, done))
    }

    /// An endless iterator over the epochs from `start` on.
    ///
    /// # Errors
    ///
    /// As [`resume`](Self::resume).
    pub fn epochs(&self, start: Cursor) -> Result<Epochs> {
        let first = (start.samples > 0)
            .then(|| self.resume(start))
            .transpose()?;
        Ok(Epochs {
            sampler: self.clone(),
            epoch: start.epoch,
            first,
        })
    }

    /// The settings of the sampler.
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    fn permutation(&self, epoch: u64) -> Box<dyn Iterator<Item = u64>> {
        let n = self.config.samples;
        let seed = self.config.seed.wrapping_add(epoch);
        match &self.shards {
            _ if !self.config.shuffle => Box::new(0..n as u64),
            Some(order) => Box::new(order.permutation(seed, n as u64)),
            None => Box::new(Generator::new(seed).randperm(n).into_iter()),
        }
    }
}

/// An iterator over the plans of successive epochs; see [`Sampler::epochs`].
#[derive(Debug)]
pub struct Epochs {
    sampler: Sampler,
    epoch: u64,
    /// The rest of a resumed epoch.
    first: Option<EpochPlan>,
}

impl Iterator for Epochs {
    type Item = EpochPlan;

    fn next(&mut self) -> Option<EpochPlan> {
        let plan = match self.first.take() {
            Some(rest) => rest,
            None => self.sampler.epoch(self.epoch),
        };
        self.epoch += 1;
        Some(plan)
    }
}

/// Checks the cursor's number of samples against the epoch's.
fn within(cursor: Cursor, end: usize) -> Result<usize> {
    usize::try_from(cursor.samples)
        .ok()
        .filter(|&done| done <= end)
        .ok_or_else(|| {
            Error::usage(format!(
                "cannot resume epoch {} after {} samples: it has {end}",
                cursor.epoch, cursor.samples
            ))
        })
}

fn check(config: &SamplerConfig, batch: usize) -> Result<()> {
    let SamplerConfig { world, rank, .. } = *config;
    if world == 0 {
        refuse!("a sampler needs at least one rank");
    }
    if rank >= world {
        refuse!("rank {rank} is outside a world of {world} ranks");
    }
    if batch == 0 {
        refuse!("the batch size must be at least 1");
    }
    Ok(())
}
