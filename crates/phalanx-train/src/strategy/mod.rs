//! How a training is distributed over the ranks: what [`Trainer`](crate::Trainer) does differently with
//! [`DistributedDataParallel`](phalanx_ddp::DistributedDataParallel) and on a mesh of ranks.
//!
//! The trainer has the loop, checkpoints, metrics and reports. A strategy has the parameters and the optimizers: it lays
//! them out, computes and averages the gradients of a step, and updates.

mod ddp;
mod exchange;
mod explain;
mod gather;
mod mesh;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use phalanx_checkpoint::{Outline, Values, weights_digest_with};
use phalanx_comm::ProcessGroup;
use phalanx_data::progress::Progress;
use phalanx_data::sampler::{Cursor, SamplerConfig};
use phalanx_data::{Dataset, ShardOrder};
use phalanx_ddp::{Commit, StepTimes};
use phalanx_member::RankContext;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::{GradView, ParamInfo, Params, Tape};
use serde_json::{Map, Value};

pub use self::ddp::{Ddp, MicroBatch};
pub use self::mesh::OnMesh;
use crate::args::Settings;
use crate::batch::{Engine, LoadedMicroBatches, Randomness, StepContext};
use crate::error::Result;
use crate::evaluation::Measure;
use crate::log::RunLog;
use crate::saving::{History, Resumed, SaveAction, Saving};
use crate::split::BatchSplit;
use phalanx_checkpoint::state::Place;

/// Makes an optimizer of parameters, for a learning rate.
pub(crate) type MakeOptimizer<'j> = Box<dyn Fn(&Params, f64) -> Box<dyn Optimizer> + 'j>;

/// What a strategy is made of, besides its own setup.
pub struct Parts<'a, 'j> {
    pub(crate) ctx: &'a RankContext,
    pub(crate) settings: &'a Settings,
    /// The checkpoint that the training continues, and the settings now.
    pub(crate) resumed: Option<(&'a Resumed, &'a BTreeMap<String, String>)>,
    /// As rank 0 starts with them; other ranks' values are replaced.
    pub(crate) params: Params,
    /// Settings that all ranks must have in common, one a line.
    pub(crate) facts: &'a [String],
    pub(crate) choices: Choices<'j>,
    pub(crate) tape: &'a mut Tape,
}

/// What a program chooses with the builder, whatever the strategy.
pub(crate) struct Choices<'j> {
    /// Parameters that are not trained, by name.
    pub(crate) frozen: Vec<String>,
    pub(crate) lr: f64,
    /// Of the training set; its world is that of the ranks that split a batch when the training was started.
    pub(crate) sampler: SamplerConfig,
    /// `--sampler torch` drops a last batch that is short.
    pub(crate) drop_last: bool,
    /// Of shuffled samples, where the training set has one of its own.
    pub(crate) order: Option<ShardOrder>,
    /// Batch norms take the statistics of all ranks' samples.
    pub(crate) sync_batch_norm: bool,
    /// By the names of their groups of parameters, the training's own, without a name, first.
    pub(crate) optimizers: Vec<(String, MakeOptimizer<'j>)>,
}

/// What a step needs of its trainer.
pub struct StepTools<'a> {
    pub(crate) ctx: &'a RankContext,
    pub(crate) tape: &'a mut Tape,
    pub(crate) split: &'a BatchSplit,
    pub(crate) step: &'a StepContext,
    pub(crate) randomness: Randomness,
    pub(crate) clip: Option<f64>,
    /// Gets the graph of the first step.
    pub(crate) log: Option<&'a mut RunLog>,
    pub(crate) progress: &'a Progress,
}

/// What a step's backward has left.
pub struct Gradients {
    /// Whether the ranks want the step.
    pub(crate) commit: Commit,
    /// Sums of the losses, by part of the global batch. Added over the ranks, each sample counts once.
    pub(crate) sums: Vec<f64>,
    /// Mean loss of this rank's samples.
    pub(crate) mean: f64,
    /// Mean loss of the samples of all ranks; of this rank's where the losses are added over shards.
    pub(crate) mean_of_all: f64,
    pub(crate) forward_ended: Instant,
}

/// What is announced of a strategy before the first step.
#[derive(Debug, Default)]
pub struct Description {
    /// Follows the model and its size.
    pub(crate) model: String,
    /// Lines after the model's.
    pub(crate) lines: Vec<String>,
    /// The global batch and how it is split.
    pub(crate) batch: String,
    /// Lines at the end.
    pub(crate) last: Vec<String>,
}

/// A group of parameters that has an optimizer of its own.
pub struct Group<'a> {
    /// Empty for the training's own.
    pub(crate) name: &'a str,
    pub(crate) optimizer: &'a dyn Optimizer,
    /// The learning rate that the optimizer was made with.
    pub(crate) lr: f64,
    /// Of the averaged gradients of its last step, if they are clipped.
    pub(crate) norm: Option<f64>,
    /// When communication began and ended in its last step, where that is measured.
    pub(crate) times: Option<&'a StepTimes>,
    /// The averaged gradients, where this rank has them in full.
    pub(crate) gradients: Option<&'a dyn GradView>,
    /// Steps that the ranks voted down.
    pub(crate) skipped: u64,
}

/// What a rank changes in steps.
pub struct State<'a> {
    pub(crate) params: &'a mut Params,
    /// By group.
    pub(crate) optimizers: Vec<&'a mut dyn Optimizer>,
}

/// What is reported of a strategy, at any time.
pub struct Report {
    /// The parameters of the model, in full.
    pub(crate) infos: Vec<ParamInfo>,
    /// Bytes that this rank has sent to all others.
    pub(crate) sent_bytes: u64,
    /// Its own entries of `summary.json`.
    pub(crate) summary: Map<String, Value>,
    /// The ranks have the same weights.
    pub(crate) equal_weights: bool,
}

/// How a training is distributed over the ranks. A program chooses one with the trainer's builder; it does not call these
/// methods.
pub trait Strategy: Engine {
    /// What the builder has for it.
    type Setup;

    /// Checks the settings for `world` ranks, before anything is made. Gives the number of ranks that split a batch, and its
    /// own settings that shape the training, one a line.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    fn plan(setup: &Self::Setup, settings: &Settings, world: usize)
    -> Result<(usize, Vec<String>)>;

    /// Lays the parameters out and makes the optimizers. Rank 0's parameters are sent to all ranks, after
    /// all have compared their settings. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage, when ranks were started with different settings; peers that are lost.
    fn build(setup: Self::Setup, parts: Parts<'_, '_>) -> Result<Self>;

    /// Whether ranks take in others in an elastic training, and leave it when they are asked to.
    const CAN_GROW: bool;

    /// Whether ranks have parts of the parameters or of the optimizers' state: all of them take part in a save, and a rank
    /// whose gradients are averaged completes the step itself, as those that have completed it may have other parts.
    fn is_sharded(&self) -> bool;

    /// Checks that it can continue with other ranks.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    fn check_elastic(setup: &Self::Setup) -> Result<()>;

    /// The ranks of `group`, the group after a loss, whose model replica has lost a rank.
    fn broken_copies(&self, _group: &ProcessGroup) -> Vec<usize> {
        Vec::new()
    }

    /// Those of `leaving`, numbers of ranks in the job, that can leave at the same time.
    fn may_leave(&self, leaving: &[usize]) -> Vec<usize> {
        leaving.to_vec()
    }

    /// Takes over from rank `donor` of `group`, with which the training continues, what is not [sharded](Self::is_sharded).
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost; this rank's state is as before then.
    fn take_state(&mut self, _group: &ProcessGroup, _donor: usize) -> Result<()> {
        Ok(())
    }

    /// Continues with the ranks of the new group, unless a part of the state is lost: returns what was lost then, on all
    /// ranks. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    fn reform(
        &mut self,
        ctx: &RankContext,
        settings: &Settings,
        tape: &mut Tape,
    ) -> Result<Option<String>>;

    /// Sets the number of skipped steps of each group.
    fn set_skipped_steps(&mut self, skipped: &[u64]);

    /// The ranks that split a batch, this one included.
    fn batch_group(&self) -> &ProcessGroup;

    /// The parameters of this rank.
    fn params(&self) -> &Params;

    /// The groups of parameters, the training's own first.
    fn groups(&self) -> Vec<Group<'_>>;

    /// The parameters and optimizers of this rank, to change them.
    fn state(&mut self) -> State<'_>;

    /// Restores optimizers, gradient exchange, and the parameters unless [`build`](Self::build) has, from a checkpoint.
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage, when the checkpoint is of other optimizers; data, when it is of another model; peers that are lost.
    fn restore(
        &mut self,
        ctx: &RankContext,
        resumed: &Resumed,
        shaping: &BTreeMap<String, String>,
    ) -> Result<()>;

    /// What is announced. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    fn describe(&self, ctx: &RankContext, settings: &Settings) -> Result<Description>;

    /// Begins an epoch, or the rest of one, at `cursor`; in an elastic training again when its ranks have changed.
    ///
    /// # Errors
    ///
    /// Usage, when no step begins there.
    fn begin_epoch(&mut self, _step_in_epoch: usize, _cursor: Cursor) -> Result<()> {
        Ok(())
    }

    /// Forward and backward of this rank's micro-batches, gradients averaged over all ranks. *Blocks* until all ranks
    /// call it.
    ///
    /// # Errors
    ///
    /// Those of `loss` and of reading; peers that are lost.
    fn gradients<M, D: Dataset + ?Sized>(
        &mut self,
        group: usize,
        tools: StepTools<'_>,
        model: &M,
        batches: &mut LoadedMicroBatches<'_, '_, D>,
        loss: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, Self>) -> Result<Self::Tensor<'s>>,
    ) -> Result<Gradients>;

    /// The optimizer's step of a group. *Blocks* until all ranks call it, but not in an elastic training.
    ///
    /// # Errors
    ///
    /// Impossible settings; peers that are lost.
    fn update(&mut self, group: usize, clip: Option<f64>) -> Result<()>;

    /// Gives all ranks what each has updated, in an elastic training. [`reform`](Self::reform) does it too. *Blocks* until all
    /// ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    fn gather_updated(&mut self, _group: usize) -> Result<()> {
        Ok(())
    }

    /// Whether each rank has buffers of its own, whose mean checkpoints and evaluations between two steps take.
    fn has_own_buffers(&self, _ctx: &RankContext, _split: &BatchSplit) -> bool {
        false
    }

    /// Makes the buffers those of all ranks, and checks that ranks with the same parameters have the same values. Gives the
    /// SHA-256 of the weights, on rank 0 at least. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Ranks whose weights differ, by name; peers that are lost.
    fn end_epoch(&mut self, ctx: &RankContext) -> Result<Option<String>>;

    /// Runs `write` on rank 0, which asks for the weights a tensor at a time. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Those of `write`; peers that are lost.
    fn gather_weights<R>(
        &self,
        ctx: &RankContext,
        write: impl FnOnce(&Outline, &mut Values<'_>) -> Result<R>,
    ) -> Result<Option<R>>;

    /// Measures one batch of an evaluation; nothing if it is empty.
    ///
    /// # Errors
    ///
    /// Those of `measure`.
    fn measure<M, B>(
        &self,
        tape: &mut Tape,
        model: &M,
        batch: (&B, &[u64]),
        randomness: Randomness,
        measure: &mut impl for<'s> FnMut(&M, MicroBatch<'s, B, Self>) -> Result<Measure>,
    ) -> Result<Option<Measure>>;

    /// Finds the memory for checkpoints, after the first step.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    fn prepare_saving(&self, _saving: &mut Saving<'_>) -> Result<()> {
        Ok(())
    }

    /// Takes a checkpoint; `buffers` stand in for the model's own. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Those of saving; peers that are lost.
    fn save(
        &mut self,
        ctx: &RankContext,
        saving: &mut Saving<'_>,
        action: SaveAction,
        buffers: Option<&[f32]>,
        place: Place,
        history: History,
    ) -> Result<()>;

    /// SHA-256 of the optimizers' state as one rank alone would have it, on rank 0 at least. *Blocks* until all ranks
    /// call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    fn optimizer_sha256(&self) -> Result<Option<String>>;

    /// What is reported of it.
    fn report(&self, settings: &Settings) -> Report;
}

/// SHA-256 of the weights, on rank 0. *Blocks* until all ranks call it.
///
/// # Errors
///
/// Peers that are lost.
pub(crate) fn weights_sha256<S: Strategy>(
    strategy: &S,
    ctx: &RankContext,
) -> Result<Option<String>> {
    strategy.gather_weights(ctx, |outline, values| {
        Ok(hex::encode(weights_digest_with(outline, values)?))
    })
}

/// Steps of each group that the ranks voted down.
pub(crate) fn skipped_steps(strategy: &impl Strategy) -> Vec<u64> {
    strategy
        .groups()
        .iter()
        .map(|group| group.skipped)
        .collect()
}

/// Communication of a step that backward did not hide.
pub(crate) fn exposed(times: Option<&StepTimes>) -> Duration {
    times.map_or(Duration::ZERO, StepTimes::exposed)
}

impl State<'_> {
    /// Puts the averages of the weights, where optimizers have them, in the place of the weights, and gives what these were.
    pub(crate) fn show_averages(self) -> Option<Vec<f32>> {
        let (params, mut own) = (self.params, None);
        for optimizer in &self.optimizers {
            let Some(averages) = optimizer.averages().filter(|all| !all.is_empty()) else {
                continue;
            };
            own.get_or_insert_with(|| params.flat().to_vec());
            let ids: Vec<_> = params.ids().zip(optimizer.updates()).collect();
            for (id, _) in ids.into_iter().filter(|(_, updates)| **updates > 0) {
                let averages = &averages[params.infos()[id.index()].range()];
                params.get_mut(id).copy_from_slice(averages);
            }
        }
        own
    }
}
