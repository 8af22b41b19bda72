//! Burn's learner on several ranks.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn::data::dataloader::DataLoader;
use burn::optim::GradientsAccumulator;
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerEvent, LearnerModel, LearningResult,
    SupervisedLearningStrategy, SupervisedTraining, SupervisedTrainingEventProcessor, TrainLoader,
    TrainStep, TrainingComponents, TrainingItem, TrainingStrategy, ValidLoader,
};
use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_ddp::ReplicaOptions;
use phalanx_launch::RankContext;

use crate::{DistributedDataParallel, Error, ErrorKind, Result};

/// Data-parallel training by Burn's [`Learner`].
///
/// Each rank trains on its part of the training data, of consecutive samples, in batches of the size of the loader; the
/// gradients are averaged over the ranks as by [`DistributedDataParallel::begin`]. Rank 0 alone validates, computes metrics
/// (those of training on its own batches), saves checkpoints, decides on early stopping and shows the progress; the other
/// ranks wait for it meanwhile. All ranks stop together, after the step in which one of them was interrupted.
///
/// A training that continues from [`SupervisedTraining::checkpoint`] reads it on every rank, so that its folder must be
/// there on every host.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use burn::data::dataloader::DataLoader;
/// use burn::train::{InferenceStep, Learner, LearnerModel, TrainStep};
/// use phalanx_burn::{DataParallel, RankContext, Result};
///
/// fn train<M: LearnerModel>(
///     rank: &RankContext,
///     learner: Learner<M>,
///     train: Arc<dyn DataLoader<<M as TrainStep>::Input>>,
///     valid: Arc<dyn DataLoader<<M as InferenceStep>::Input>>,
/// ) -> Result<M> {
///     let ranks = DataParallel::new(rank, Default::default());
///     let training = ranks.training("runs/mnist", train, valid).num_epochs(3);
///     ranks.result(training.launch(learner))
/// }
/// ```
pub struct DataParallel(Arc<Ranks>);

struct Ranks {
    group: ProcessGroup,
    phase_limit: Duration,
    options: ReplicaOptions,
    /// What Burn's errors have no place for.
    failed: Mutex<Option<Error>>,
}

impl DataParallel {
    /// Over all ranks of the job.
    pub fn new(rank: &RankContext, options: ReplicaOptions) -> DataParallel {
        DataParallel(Arc::new(Ranks {
            group: rank.group(),
            phase_limit: rank.phase_limit,
            options,
            failed: Mutex::new(None),
        }))
    }

    /// A training with this strategy, as [`SupervisedTraining::new`]: artifacts are written to `directory`, by rank 0. All
    /// ranks must set the same number of epochs.
    pub fn training<M: LearnerModel>(
        &self,
        directory: impl AsRef<Path>,
        train: Arc<dyn DataLoader<<M as TrainStep>::Input>>,
        valid: Arc<dyn DataLoader<<M as InferenceStep>::Input>>,
    ) -> SupervisedTraining<M> {
        let strategy = TrainingStrategy::Custom(Arc::clone(&self.0) as Arc<_>);
        let training =
            SupervisedTraining::new(directory, train, valid).with_training_strategy(strategy);
        match self.0.group.rank() {
            0 => training,
            _ => training.with_application_logger(None),
        }
    }

    /// The trained model, which is the same on all ranks.
    ///
    /// # Errors
    ///
    /// What ended the training: as [`DistributedDataParallel::new`] and [`DistributedDataParallel::begin`]; `Failed` for
    /// Burn's own errors, such as one of a data set.
    pub fn result<M>(&self, result: LearningResult<M>) -> Result<M> {
        let failed = self.0.failed.lock();
        let failed = failed.unwrap_or_else(PoisonError::into_inner).take();
        match (failed, result.error) {
            (Some(error), _) => Err(error),
            (None, Some(error)) => Err(Error::new(ErrorKind::Failed, error.to_string())),
            (None, None) => Ok(result.model),
        }
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Ranks {
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        if self.group.rank() == 0 {
            return OnRank0(self).train(learner, train, valid, components);
        }
        let interrupter = components.interrupter.clone();
        let first_epoch = components.checkpoint.unwrap_or(0) + 1;
        let (model, processor) = self.fit(components, learner, train, valid, first_epoch);
        LearningResult {
            model: model.valid(),
            renderer: processor.renderer(),
            interrupted: interrupter.interruption(),
            error: interrupter.error(),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        first_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let interrupter = components.interrupter.clone();
        let mut run = Run {
            ranks: self,
            learner,
            components,
        };
        if let Err(error) = run.fit(train, valid, first_epoch) {
            interrupter.stop(Some(&error.to_string()));
            let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
            failed.get_or_insert(error);
        }
        (run.learner.model(), run.components.event_processor)
    }
}

/// With Burn's own beginning and end of a training, which show the progress and the summary.
struct OnRank0<'a>(&'a Ranks);

impl<M: LearnerModel> SupervisedLearningStrategy<M> for OnRank0<'_> {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        first_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        self.0.fit(components, learner, train, valid, first_epoch)
    }
}

struct Run<'a, M: LearnerModel> {
    ranks: &'a Ranks,
    learner: Learner<M>,
    components: TrainingComponents<M>,
}

impl<M: LearnerModel> Run<'_, M> {
    fn fit(
        &mut self,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        first_epoch: usize,
    ) -> Result<()> {
        let group = &self.ranks.group;
        let device = match self.learner.model().devices().first() {
            Some(device) if device.is_autodiff() => device.clone(),
            Some(device) => device.clone().autodiff(),
            None => return Err(Error::usage("the model has no parameters")),
        };
        self.learner.fork(&device);
        let (rank, world) = (group.rank(), group.world_size());
        let bound = |rank| rank * train.num_items() / world;
        let train = match world {
            // A slice would be shuffled in another order.
            1 => train,
            _ => train.slice(bound(rank), bound(rank + 1)),
        };
        let train = train.to_device(&device);
        let valid = valid.to_device(&device.inner());
        let options = self.ranks.options.clone();
        let (mut ddp, model) = DistributedDataParallel::new(group, self.learner.model(), options)?;
        self.learner.load_model(model.into_record());
        let last_epoch = self.components.num_epochs;
        for epoch in first_epoch..=last_epoch {
            if self.train(&mut ddp, &train, epoch)? {
                return Ok(());
            }
            let model = ddp.sync_statistics(self.learner.model())?;
            self.learner.load_model(model.into_record());
            let mut ends = epoch == last_epoch;
            if rank == 0 {
                let _phase = group.phase("evaluating", self.ranks.phase_limit);
                ends |= self.validate(&valid, epoch);
            }
            if self.agree(ends)? {
                break;
            }
        }
        ddp.verify_equal(&self.learner.model())
    }

    /// Whether the training ends, on all ranks: some rank says so, was interrupted, or has failed.
    fn agree(&self, ends: bool) -> Result<bool> {
        const INTERRUPTED: i32 = 2;
        const FAILED: i32 = 3;
        let (group, interrupter) = (&self.ranks.group, &self.components.interrupter);
        let rank = i32::try_from(group.rank()).unwrap_or(i32::MAX - FAILED);
        let mut what = [match (interrupter.error(), interrupter.should_stop()) {
            (Some(_), _) => FAILED + rank,
            (None, true) => INTERRUPTED,
            (None, false) => i32::from(ends),
        }];
        group.all_reduce(&mut what, ReduceOp::Max)?;
        if what[0] == INTERRUPTED && !interrupter.should_stop() {
            interrupter.stop(Some("another rank was interrupted"));
        }
        match what[0] - FAILED {
            // Burn's result has this rank's own error.
            other if other >= 0 && other != rank => Err(Error::new(
                ErrorKind::Failed,
                format!("the training ended because rank {other} has failed"),
            )),
            _ => Ok(what[0] > 0),
        }
    }

    /// An epoch over this rank's part of the data; whether a rank was interrupted.
    fn train(
        &mut self,
        ddp: &mut DistributedDataParallel,
        loader: &TrainLoader<M>,
        epoch: usize,
    ) -> Result<bool> {
        self.tell_train(|| LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items: loader.num_items(),
        });
        let mut batches = loader.iter();
        let mut iteration = 0;
        loop {
            // What Burn calls an accumulation: the sum of the gradients of several batches.
            let mut sum = GradientsAccumulator::new();
            let mut items = Vec::new();
            let before = batches.progress().items_processed;
            for _ in 0..self.components.grad_accumulation.unwrap_or(1) {
                match batches.next() {
                    Some(Ok(batch)) => {
                        let output = self.learner.train_step(batch);
                        sum.accumulate(&self.learner.model(), output.grads);
                        items.push((output.item, batches.progress()));
                    }
                    Some(Err(error)) => {
                        self.components.interrupter.fail(error);
                        break;
                    }
                    None => break,
                }
            }
            let samples = batches.progress().items_processed - before;
            if self.agree(false)? {
                return Ok(true);
            }
            let mut step = ddp.begin(&[samples])?;
            if step.is_over() {
                break;
            }
            let model = self.learner.model();
            if samples > 0 {
                step.add(&model, sum.grads())?;
            }
            let gradients = step.finish(&model)?;
            self.learner.lr_step();
            self.learner.optimizer_step(gradients);
            for (item, progress) in items {
                iteration += 1;
                let lr = Some(self.learner.lr_current());
                self.tell_train(|| {
                    let item = TrainingItem::new(item, progress, Some(iteration), lr);
                    LearnerEvent::ProcessedItem(item)
                });
            }
        }
        self.tell_train(|| LearnerEvent::EndSplit(epoch));
        Ok(false)
    }

    /// What follows an epoch, on rank 0; whether the training ends.
    fn validate(&mut self, loader: &ValidLoader<M>, epoch: usize) -> bool {
        self.tell_valid(LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items: loader.num_items(),
        });
        let model = self.learner.model().valid();
        let mut batches = loader.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => {
                    self.components.interrupter.fail(error);
                    break;
                }
            };
            iteration += 1;
            let progress = batches.progress();
            let item = InferenceStep::step(&model, batch);
            let item = TrainingItem::new(item, progress, Some(iteration), None);
            self.tell_valid(LearnerEvent::ProcessedItem(item));
            if self.components.interrupter.should_stop() {
                break;
            }
        }
        self.tell_valid(LearnerEvent::EndSplit(epoch));
        self.tell_train(|| LearnerEvent::EndEpoch(epoch));
        let TrainingComponents {
            checkpointer,
            early_stopping,
            event_processor,
            event_store,
            interrupter,
            ..
        } = &mut self.components;
        if checkpointer.is_some() || early_stopping.is_some() {
            // They look at the metrics.
            interrupter.fail_on_error(event_processor.flush());
        }
        if interrupter.should_stop() {
            return true;
        }
        if let Some(checkpointer) = checkpointer {
            checkpointer.checkpoint(&self.learner, epoch, event_store);
        }
        early_stopping
            .as_mut()
            .is_some_and(|rule| rule.should_stop(epoch, event_store))
    }

    /// Metrics and progress are those of rank 0.
    fn tell_train(&mut self, event: impl FnOnce() -> LearnerEvent<<M as TrainStep>::Output>) {
        if self.ranks.group.rank() == 0 {
            let sent = self.components.event_processor.process_train(event());
            self.components.interrupter.fail_on_error(sent);
        }
    }

    fn tell_valid(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        let sent = self.components.event_processor.process_valid(event);
        self.components.interrupter.fail_on_error(sent);
    }
}
