//! The batches of an epoch, as the training loop gets them.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, Range};
use std::rc::Rc;
use std::time::Duration;

use phalanx_data::loader::{LoadedBatch, Loader};
use phalanx_data::sampler::{Cursor, EpochPlan, Sampler};
use phalanx_data::{Dataset, ImageBatch};
use phalanx_ddp::GlobalBatch;
use phalanx_nn::StepKey;
use phalanx_nn::rng::philox::philox4x32_10;

use crate::error::{Error, ErrorKind, Result};
use crate::sample_log::SampleLog;
use crate::split::BatchSplit;
use phalanx_member::RankContext;

/// Which step it is, and what there is to do in it.
#[derive(Debug, Clone)]
pub struct StepContext {
    /// From 1.
    pub(crate) epoch: usize,
    /// In the epoch, from 0.
    pub(crate) index: usize,
    /// Of this rank's micro-batches, the empty ones last.
    pub(crate) sizes: Vec<usize>,
    /// Over all ranks.
    pub(crate) global: GlobalBatch,
    /// Where the data continue with it.
    pub(crate) before: Cursor,
    /// Where the data continue after it.
    pub(crate) cursor: Cursor,
}

impl StepContext {
    /// For messages.
    pub(crate) fn name(&self) -> String {
        format!("epoch {}, step {}", self.epoch, self.index + 1)
    }
}

/// Where the program is in its loop over the batches of an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum BatchPosition {
    /// It has taken no batch yet.
    #[default]
    Before,
    /// At the batch of this step of the epoch, from 0.
    At(usize),
    /// A part of an epoch has ended, before this step of the epoch.
    Paused(usize),
    /// The loop has ended, or was left.
    After,
}

/// What the batches of an epoch are read from.
struct Source<D: Dataset + ?Sized> {
    loader: Loader<D>,
    split: BatchSplit,
    plan: EpochPlan,
    /// The step of the epoch with which `plan` begins.
    first: usize,
    /// Micro-batches of the plan that were taken.
    taken: usize,
    waited: Rc<Cell<Duration>>,
    /// Of the group that it was divided for.
    generation: u32,
}

impl<D: Dataset + ?Sized> Source<D> {
    fn next(&mut self) -> Result<Option<LoadedBatch<D>>> {
        let before = self.loader.waited();
        let batch = self.loader.next_batch();
        let waited = self.loader.waited() - before;
        self.waited.set(self.waited.get() + waited);
        self.taken += 1;
        batch
    }

    /// Sizes of this rank's micro-batches in the epoch's step `index`, and those of the step over all ranks.
    fn sizes(&self, index: usize) -> (Vec<usize>, GlobalBatch) {
        self.split.sizes(&self.plan, index - self.first)
    }
}

/// The steps of one epoch, or of the rest of it where a training was resumed, or of a part of it (`--eval-every`). Made by
/// [`Trainer::batches`](crate::Trainer::batches).
pub struct Batches<'j, D: Dataset + ?Sized> {
    ctx: &'j RankContext,
    source: Rc<RefCell<Source<D>>>,
    epoch: usize,
    index: usize,
    /// Before step `index`.
    cursor: Cursor,
    /// The step of the epoch before which they end.
    steps: usize,
    /// The epoch continues after them.
    pauses: bool,
    /// The trainer's.
    position: Rc<Cell<BatchPosition>>,
}

impl<'j, D: Dataset + ?Sized> Batches<'j, D> {
    pub(crate) fn new(
        ctx: &'j RankContext,
        mut loader: Loader<D>,
        (split, plan): (BatchSplit, EpochPlan),
        [epoch, first, steps]: [usize; 3],
        pauses: bool,
        waited: Rc<Cell<Duration>>,
        position: Rc<Cell<BatchPosition>>,
    ) -> Self {
        loader.start(plan.clone());
        let cursor = plan.cursor_after(0);
        let source = Source {
            loader,
            split,
            plan,
            first,
            taken: 0,
            waited,
            generation: ctx.group().generation(),
        };
        Batches {
            ctx,
            source: Rc::new(RefCell::new(source)),
            cursor,
            epoch,
            index: first,
            steps,
            pauses,
            position,
        }
    }
}

impl<D: Dataset + ?Sized> Drop for Batches<'_, D> {
    fn drop(&mut self) {
        if !matches!(self.position.get(), BatchPosition::Paused(_)) {
            self.position.set(BatchPosition::After);
        }
    }
}

impl<'j, D: Dataset + ?Sized> Iterator for Batches<'j, D> {
    type Item = StepBatch<'j, D>;

    fn next(&mut self) -> Option<StepBatch<'j, D>> {
        if self.index == self.steps {
            self.position.set(match self.pauses {
                true => BatchPosition::Paused(self.index),
                false => BatchPosition::After,
            });
            return None;
        }
        self.position.set(BatchPosition::At(self.index));
        let source = self.source.borrow();
        let in_plan = self.index - source.first;
        let (sizes, global) = source.sizes(self.index);
        let context = StepContext {
            epoch: self.epoch,
            index: self.index,
            sizes,
            global,
            before: self.cursor,
            cursor: source.plan.cursor_after_step(self.cursor, in_plan),
        };
        self.cursor = context.cursor;
        self.index += 1;
        Some(StepBatch {
            ctx: self.ctx,
            generation: source.generation.into(),
            source: Rc::clone(&self.source),
            kept: RefCell::default(),
            context: RefCell::new(Rc::new(context)),
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.steps - self.index, Some(self.steps - self.index))
    }
}

impl<D: Dataset + ?Sized> ExactSizeIterator for Batches<'_, D> {}

/// The samples of one step on this rank: one micro-batch or several, which
/// [`Trainer::step`](crate::Trainer::step) reads.
pub struct StepBatch<'j, D: Dataset + ?Sized> {
    ctx: &'j RankContext,
    source: Rc<RefCell<Source<D>>>,
    /// The micro-batches, for the next step on them ([`Trainer::step_of`](crate::Trainer::step_of)).
    pub(crate) kept: RefCell<Vec<LoadedBatch<D>>>,
    context: RefCell<Rc<StepContext>>,
    /// Of the group that it was divided for.
    generation: Cell<u32>,
}

impl<D: Dataset + ?Sized> StepBatch<'_, D> {
    /// The epoch, from 1.
    pub fn epoch(&self) -> usize {
        self.context().epoch
    }

    /// The step in the epoch, from 0.
    pub fn index(&self) -> usize {
        self.context().index
    }

    pub(crate) fn context(&self) -> Rc<StepContext> {
        Rc::clone(&self.context.borrow())
    }

    /// Divides it, and what is left of its epoch, by `split`, unless it was divided for the group of this `generation`. Gives
    /// the step with which the rest of the epoch begins, if that was divided anew, and where.
    pub(crate) fn renew(
        &self,
        generation: u32,
        split: &BatchSplit,
        samplers: &[Sampler],
    ) -> Result<Option<(usize, Cursor)>> {
        if self.generation.replace(generation) == generation {
            return Ok(None);
        }
        let old = self.context();
        self.kept.take();
        let mut source = self.source.borrow_mut();
        let divides = source.generation != generation;
        if divides {
            let plan = split.rest(samplers, old.before)?;
            source.loader.start(plan.clone());
            (source.plan, source.split) = (plan, split.clone());
            (source.first, source.taken) = (old.index, 0);
            source.generation = generation;
        }
        let (sizes, global) = source.sizes(old.index);
        self.context.replace(Rc::new(StepContext {
            sizes,
            global,
            ..(*old).clone()
        }));
        Ok(divides.then_some((old.index, old.before)))
    }

    /// Samples on this rank.
    pub fn len(&self) -> usize {
        self.context().sizes.iter().sum()
    }

    /// Whether this rank has no sample in this step, as in the last one of an epoch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Samples over all ranks.
    pub fn global_len(&self) -> usize {
        self.context().global.samples
    }

    /// Goes to its first micro-batch, past those of steps that were not taken.
    pub(crate) fn seek(&self) -> Result<()> {
        let mut source = self.source.borrow_mut();
        let first = (self.index() - source.first) * source.plan.parts();
        while source.taken < first {
            let _ = source.next()?;
        }
        match source.taken == first {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "{} was taken before; each batch is for one step",
                    self.context().name()
                ),
            )),
        }
    }

    /// The next micro-batch. *Blocks* until it is read.
    pub(crate) fn next(&self) -> Result<Option<LoadedBatch<D>>> {
        let _phase = self.ctx.phase("loading data");
        self.source.borrow_mut().next()
    }
}

/// The micro-batches of a step on this rank, as a strategy reads them.
pub struct LoadedMicroBatches<'b, 'j, D: Dataset + ?Sized> {
    batch: &'b StepBatch<'j, D>,
    /// Those that another step on the same batch has kept.
    kept: std::vec::IntoIter<LoadedBatch<D>>,
    is_fresh: bool,
    /// They are kept for the next step on the same batch.
    keeps: bool,
    /// Parts of the global batch that are this rank's and were not read.
    parts: Range<usize>,
    samples: Option<&'b mut SampleLog>,
}

impl<'b, 'j, D: Dataset + ?Sized> LoadedMicroBatches<'b, 'j, D> {
    /// Those of `batch`, which are the `parts` of the global batch. They are noted in `samples`, or
    /// kept for the next step where there is none.
    pub(crate) fn new(
        batch: &'b StepBatch<'j, D>,
        parts: Range<usize>,
        samples: Option<&'b mut SampleLog>,
    ) -> Result<Self> {
        let kept = batch.kept.take().into_iter();
        let is_fresh = kept.len() == 0;
        if is_fresh {
            batch.seek()?;
        }
        Ok(LoadedMicroBatches {
            batch,
            kept,
            is_fresh,
            keeps: samples.is_none(),
            parts,
            samples,
        })
    }

    /// The next one, and which part of the global batch it is. *Blocks* until it is read.
    pub(crate) fn next(&mut self) -> Result<Option<(usize, LoadedBatch<D>)>> {
        let Some(part) = self.parts.next() else {
            // Before the ranks agree on the step: it is in the files of all, or of none.
            if let Some(samples) = self.samples.take_if(|_| self.batch.ctx.elastic.is_some()) {
                let step = self.batch.context();
                samples.step(step.epoch, step.index, self.batch.generation.get());
            }
            return Ok(None);
        };
        let next = match self.is_fresh {
            true => self.batch.next()?,
            false => self.kept.next(),
        };
        let Some(loaded) = next else {
            return Ok(None);
        };
        if let Some(samples) = &mut self.samples
            && !loaded.indices().is_empty()
        {
            samples.add(loaded.indices());
        }
        Ok(Some((part, loaded)))
    }

    /// Gives back one that [`next`](Self::next) gave.
    pub(crate) fn keep(&mut self, loaded: LoadedBatch<D>) {
        if self.keeps {
            self.batch.kept.borrow_mut().push(loaded);
        }
    }
}

/// What the random numbers of a step's micro-batches follow from.
#[derive(Clone, Copy)]
pub struct Randomness {
    pub(crate) seed: u64,
    /// The epoch, from 0.
    pub(crate) epoch: u64,
    pub(crate) step: u64,
}

impl Randomness {
    /// Of an evaluation: it follows from the sample alone.
    pub(crate) fn of_evaluation(seed: u64) -> Randomness {
        Randomness {
            seed,
            epoch: u64::MAX,
            step: 0,
        }
    }

    /// The engine's key, for dropout.
    pub(crate) fn key(self, samples: &[u64]) -> StepKey<'_> {
        let key = StepKey::new(self.epoch, self.step).seed(self.seed);
        key.samples(samples)
    }

    /// Fills `values` with the standard normal numbers of `sample` in the `call`th call.
    pub(crate) fn fill_normal(self, sample: u64, call: u32, values: &mut [f32]) {
        // The engine's dropout takes the key without this constant.
        let key = [
            self.seed as u32 ^ 0x6e6f_726d,
            (self.seed >> 32) as u32 ^ call,
        ];
        for (block, four) in values.chunks_mut(4).enumerate() {
            let counter = [self.epoch, self.step, sample, block as u64].map(|n| n as u32);
            let words = philox4x32_10(counter, key).map(f64::from);
            // Box and Muller, from uniform numbers in (0, 1].
            for (pair, words) in four.chunks_mut(2).zip(words.chunks_exact(2)) {
                let [a, b] = [words[0], words[1]].map(|word| (word + 1.0) / 4_294_967_296.0);
                let (sin, cos) = (std::f64::consts::TAU * b).sin_cos();
                let radius = (-2.0 * a.ln()).sqrt();
                for (value, factor) in pair.iter_mut().zip([cos, sin]) {
                    *value = (radius * factor) as f32;
                }
            }
        }
    }
}

/// What a model computes with.
pub trait Engine: Sized {
    /// Its tensors.
    type Tensor<'s>;
    /// The step in which these live.
    type Step<'s>;
    /// What a micro-batch knows of the other ranks.
    type Peers;
}

/// Samples that a model is given together, in a training with the strategy `S`. It dereferences to the data set's own batch
/// type.
pub struct MicroBatchOf<'s, B, S: Engine> {
    step: &'s S::Step<'s>,
    data: &'s B,
    indices: &'s [u64],
    randomness: Randomness,
    /// Calls of [`randomness`](Self::randomness).
    calls: &'s Cell<u32>,
    /// In a training step that ranks take together.
    pub(crate) peers: Option<&'s S::Peers>,
}

impl<B, S: Engine> Clone for MicroBatchOf<'_, B, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B, S: Engine> Copy for MicroBatchOf<'_, B, S> {}

impl<'s, B, S: Engine> MicroBatchOf<'s, B, S> {
    pub(crate) fn new(
        step: &'s S::Step<'s>,
        data: &'s B,
        indices: &'s [u64],
        randomness: Randomness,
        calls: &'s Cell<u32>,
    ) -> Self {
        MicroBatchOf {
            step,
            data,
            indices,
            randomness,
            calls,
            peers: None,
        }
    }

    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.indices.len()
    }

    /// The samples' numbers in the data set.
    pub fn indices(&self) -> &'s [u64] {
        self.indices
    }

    /// The data, for as long as the step lasts.
    pub fn data(&self) -> &'s B {
        self.data
    }

    /// What random numbers follow from, and how often it was asked for before in this step.
    pub(crate) fn randomness(&self) -> (Randomness, u32) {
        let call = self.calls.replace(self.calls.get() + 1);
        (self.randomness, call)
    }

    /// The step, in which all tensors live.
    pub fn step(&self) -> &'s S::Step<'s> {
        self.step
    }
}

impl<'s, S: Engine> MicroBatchOf<'s, ImageBatch, S> {
    /// One label an image.
    pub fn labels(&self) -> &'s [u32] {
        &self.data.labels
    }
}

impl<B, S: Engine> Deref for MicroBatchOf<'_, B, S> {
    type Target = B;

    fn deref(&self) -> &B {
        self.data
    }
}
