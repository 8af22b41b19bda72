//! Where a rank's samples come from.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use phalanx_comm::ProcessGroup;
use phalanx_data::ShardOrder;
use phalanx_data::sampler::{Sampler, SamplerConfig};

use crate::args::Settings;
use crate::error::{Error, Result};
use crate::split::BatchSplit;

/// This rank's parts of the training set.
pub(super) struct Sources {
    pub(super) split: BatchSplit,
    pub(super) samplers: Vec<Sampler>,
    pub(super) config: SamplerConfig,
    /// `--sampler torch` drops a last batch that is short.
    pub(super) drop_last: bool,
    /// Of shuffled samples, where the training set has one of its own.
    pub(super) order: Option<ShardOrder>,
    /// Samples of a step over all ranks.
    pub(super) global_batch: usize,
    /// Steps of an epoch.
    pub(super) steps: usize,
    /// Samples of the last one over all ranks.
    pub(super) last_batch: usize,
    /// What samples are called, and how many of these a sample has.
    pub(super) unit: (&'static str, usize),
    /// For data, so far.
    pub(super) waited: Rc<Cell<Duration>>,
}

impl Sources {
    /// The parts of this rank of `group`, of a training whose samples and ranks at its start are those of `config`.
    ///
    /// # Errors
    ///
    /// Usage, when batches cannot be cut so, or no step is left.
    pub(super) fn new(
        settings: &Settings,
        config: SamplerConfig,
        (drop_last, order): (bool, Option<ShardOrder>),
        unit: (&'static str, usize),
        group: &ProcessGroup,
    ) -> Result<Sources> {
        let split = BatchSplit::new(&settings.split, group.world_size(), group.rank())?;
        let config = SamplerConfig {
            rank: group.rank(),
            ..config
        };
        let samplers = settings.samplers(&split, config, drop_last, order.as_ref())?;
        let plan = split.epoch(&samplers, 0);
        let (steps, global_batch) = (
            plan.len() / split.mine().len(),
            settings.global_batch(config.world),
        );
        if steps == 0 {
            return Err(Error::usage(match config.samples {
                0 => "the training set has no samples".to_owned(),
                samples => format!(
                    "no step is left: a short last batch is left out, and the training set has {samples} samples where a step \
                     takes {global_batch}"
                ),
            }));
        }
        Ok(Sources {
            last_batch: split.sizes(&plan, steps - 1).1.samples,
            split,
            samplers,
            config,
            drop_last,
            order,
            global_batch,
            steps,
            unit,
            waited: Rc::default(),
        })
    }
}
