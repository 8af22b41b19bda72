//! Evaluation over all ranks, each sample once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use phalanx_checkpoint::digest::MetricsDigest;
use phalanx_checkpoint::load_params;
use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_data::Dataset;
use phalanx_data::loader::{Loader, LoaderOptions};
use phalanx_data::metrics::Confusion;
use phalanx_data::sampler::{EpochPlan, Sampler, SamplerConfig};
use phalanx_ddp::ShardTree;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Purpose, Trainer};
use crate::batch::{BatchPosition, Randomness};
use crate::error::{Error, Result, refuse};
use crate::evaluation::{Evaluation, Measure};
use crate::folder::BEST_FILE;
use crate::saving::History;
use crate::strategy::{MicroBatch, Strategy};

/// The most rows of all ranks that [`Trainer::predict`] exchanges at once.
const ROWS_AT_ONCE: usize = 1 << 14;

impl<M, S: Strategy> Trainer<'_, M, S> {
    /// Evaluates `data` over all ranks, each sample once, and records the result as this
    /// epoch's: in the metrics, the progress output and the summary. In the loop over an epoch's batches it is
    /// recorded in the metrics, at the step of the batch. `measure` gives the sums
    /// over one batch, in evaluation mode (no dropout, running statistics: the mean of all ranks', as a
    /// checkpoint has them). With `--deterministic shards` the result does not depend on the number of ranks.
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Samples that cannot be read, those of `measure`, weights that differ between ranks, peers
    /// that are lost.
    pub fn evaluate<D: Dataset + ?Sized>(
        &mut self,
        data: &Arc<D>,
        measure: impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, S>) -> Result<Measure>,
    ) -> Result<Evaluation> {
        let evaluation = {
            let _phase = self.ctx.phase("evaluating");
            let measured = self.measure(data, measure);
            self.noted(measured)?
        };
        if self.best.is_none() {
            self.record(evaluation.clone())?;
        }
        Ok(evaluation)
    }

    /// As [`evaluate`](Self::evaluate), without recording the result.
    ///
    /// # Errors
    ///
    /// As [`evaluate`](Self::evaluate).
    pub fn measure<D: Dataset + ?Sized>(
        &mut self,
        data: &Arc<D>,
        measure: impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, S>) -> Result<Measure>,
    ) -> Result<Evaluation> {
        let (mut measure, mut own_result) = (measure, None);
        let measured = self.evaluating(|trainer| {
            let evaluation =
                trainer.with_averages(|trainer| trainer.measure_all(data, &mut measure))?;
            let is_elastic = trainer.ctx.elastic.is_some();
            if is_elastic && trainer.strategy.is_sharded() {
                // Until here, ranks have met those of their part of the batch only.
                trainer.ctx.group().barrier()?;
            }
            let nothing = MetricsDigest::new();
            let shared = is_elastic.then(|| History::new(&[], &nothing, (&[], 0), &evaluation));
            own_result = Some(evaluation);
            Ok(shared)
        });
        measured.map(|shared| {
            let of_another = || shared.and_then(|history| history.last());
            let evaluation = own_result.or_else(of_another);
            evaluation.unwrap_or_else(Evaluation::nothing)
        })
    }

    /// Runs `work`, in which all ranks take part, with the weights and running statistics that a checkpoint would have.
    fn evaluating<R: Serialize + DeserializeOwned>(
        &mut self,
        work: impl FnMut(&mut Self) -> Result<R>,
    ) -> Result<R> {
        let began = Instant::now();
        self.admit()?;
        self.check_weights()?;
        // Between two steps of an epoch each rank has statistics of its own, with which it trains on.
        let result = match self.course.running {
            Some(_) => self.with_mean_buffers(|trainer| trainer.together(work)),
            None => self.together(work),
        };
        self.count_evaluation(began);
        self.count_time(0);
        result
    }

    /// Runs `work` with the buffers that a checkpoint would have.
    pub(super) fn with_mean_buffers<R>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<R>,
    ) -> Result<R> {
        let Some(mean) = self.mean_buffers()? else {
            return work(self);
        };
        let own = self.strategy.params().buffers_flat().to_vec();
        self.set_buffers(&mean);
        let result = work(self);
        self.set_buffers(&own);
        result
    }

    /// Sets the model's buffers.
    pub(super) fn set_buffers(&mut self, values: &[f32]) {
        let params = self.strategy.state().params;
        params.buffers_flat_mut().copy_from_slice(values);
    }

    fn measure_all<D: Dataset + ?Sized>(
        &mut self,
        data: &Arc<D>,
        measure: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, S>) -> Result<Measure>,
    ) -> Result<Evaluation> {
        let samples = self.settings.limited_test(data.len());
        let config = in_order(samples, self.strategy.batch_group());
        // Split as in training, so that no sum depends on the ranks if none may.
        let split = self.sources.split.clone();
        let batch = self.settings.test_batch_size.saturating_mul(split.parts());
        let samplers = split.samplers(config, |config| Sampler::exact(config, batch))?;
        let plan = split.epoch(&samplers, 0);
        let parts = plan.parts();
        let mut losses = vec![0.0; plan.len() / parts * split.parts()];
        let mut values: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let (mut confusion, slots): (Option<Confusion>, _) = (None, losses.len());
        self.pass(data, plan, measure, |index, measured| {
            let slot = index / parts * split.parts() + split.mine().start + index % parts;
            losses[slot] = measured.loss;
            for (name, sum) in measured.values {
                values.entry(name).or_insert_with(|| vec![0.0; slots])[slot] = sum;
            }
            if let Some(counts) = measured.confusion {
                confusion
                    .get_or_insert_with(|| Confusion::new(counts.classes()))
                    .merge(&counts)?;
            }
            Ok(())
        })?;
        // Rank 0 has the first batch, others may have none.
        let group = self.strategy.batch_group();
        let names: Vec<String> = values.keys().cloned().collect();
        let measured = (confusion.as_ref().map_or(0, Confusion::classes), names);
        let (classes, names): (usize, Vec<String>) = group.broadcast_object(Some(&measured), 0)?;
        let mut confusion = confusion.unwrap_or_else(|| Confusion::new(classes));
        if confusion.classes() != classes {
            refuse!(
                "rank {} classified into {} classes, rank 0 into {classes}",
                self.ctx.rank(),
                confusion.classes()
            );
        }
        ShardTree::gather_values(group, &mut losses)?;
        if classes > 0 {
            group.all_reduce(confusion.counts_mut(), ReduceOp::Sum)?;
        }
        let samples = samples as f64;
        let total: f64 = losses.iter().sum();
        let mut evaluation = Evaluation::new(total / samples, confusion);
        for name in names {
            let mut sums = values.remove(&name).unwrap_or_else(|| vec![0.0; slots]);
            ShardTree::gather_values(group, &mut sums)?;
            let total: f64 = sums.iter().sum();
            evaluation.values.insert(name, total / samples);
        }
        Ok(evaluation)
    }

    /// Gives `take` what is measured of each batch of `plan` that has samples, with its place
    /// in the plan.
    fn pass<D: Dataset + ?Sized>(
        &mut self,
        data: &Arc<D>,
        plan: EpochPlan,
        measure: &mut impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch, S>) -> Result<Measure>,
        mut take: impl FnMut(usize, Measure) -> Result<()>,
    ) -> Result<()> {
        let mut loader = Loader::new(Arc::clone(data), self.loader_options())?;
        loader.start(plan);
        let mut index = 0;
        while let Some(batch) = loader.next_batch()? {
            let random = Randomness::of_evaluation(self.settings.seed);
            let (tape, indices) = (&mut self.model.tape, batch.indices());
            let measured = self.strategy.measure(
                tape,
                &self.model.net,
                (&*batch, indices),
                random,
                measure,
            )?;
            if let Some(mut measured) = measured {
                if let Some(wrong) = measured.wrong.take() {
                    return Err(Error::usage(wrong));
                }
                measured.samples = indices.len();
                take(index, measured)?;
            }
            index += 1;
        }
        Ok(())
    }

    pub(super) fn loader_options(&self) -> LoaderOptions {
        LoaderOptions {
            workers: self.settings.workers,
            ..LoaderOptions::default()
        }
    }
}

impl<M> Trainer<'_, M> {
    /// After the loop over the epochs: [`evaluate`](Self::evaluate), [`predict`](Self::predict) and [`infer`](Self::infer) use the
    /// weights of the best evaluation from here on, those of `best.safetensors`. Evaluations are no longer recorded, and
    /// [`finish`](Self::finish) saves the weights of the last step as always.
    ///
    /// ```no_run
    /// # use phalanx_train::{Result, Trainer};
    /// # use phalanx_nn::layers::Linear;
    /// # use phalanx_data::ImageDataset;
    /// # use std::sync::Arc;
    /// # fn end(mut trainer: Trainer<'_, Linear>, test: Arc<dyn ImageDataset>) -> Result<()> {
    /// trainer.load_best()?;
    /// let classes = trainer.predict(&test, |model, batch| {
    ///     let n = batch.samples();
    ///     let scores = model.forward(batch.input(&batch.images, &[n, 28 * 28])?)?;
    ///     Ok(scores.topk(1, 1)?.1)
    /// })?;
    /// trainer.save_rows("predictions", &classes)?;
    /// trainer.finish()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// `Usage`, when there was no evaluation, or in the loop over the batches of an epoch; `Data`, when the file is gone or
    /// damaged; peers that are lost.
    pub fn load_best(&mut self) -> Result<()> {
        if self.purpose != Purpose::Train {
            refuse!("only a training has best weights");
        }
        if matches!(self.course.position.get(), BatchPosition::At(_)) {
            refuse!("load_best comes after the loop over the epochs, not in one over batches");
        }
        if !self.is_complete() {
            self.end_epoch()?;
        }
        let Some(best) = self.course.results.best.so_far().cloned() else {
            refuse!("there are no best weights: no epoch was evaluated");
        };
        let _phase = self.ctx.phase("loading the best weights");
        self.together(|trainer| {
            let (ctx, output) = (trainer.ctx, &trainer.reports.output);
            let mut params = trainer.strategy.params().clone();
            if ctx.is_main() {
                let path = output.dir().join(BEST_FILE);
                if !output.has_best(&best) {
                    let what = format!("{} has not the best weights of this run", path.display());
                    return Err(Error::data(what));
                }
                load_params(&path, &mut params)?;
            }
            ctx.group().broadcast(params.flat_mut(), 0)?;
            ctx.group().broadcast(params.buffers_flat_mut(), 0)?;
            trainer.best = Some(params);
            Ok(())
        })
    }

    /// Runs the model in evaluation mode on all samples of `data`, divided among the ranks, and gives what `rows` gives for
    /// each sample, in the order of the data set, on all ranks. `rows` gives a row for each sample of its batch, in order, such
    /// as a class or a `Vec` of scores.
    ///
    /// Ranks exchange rows as JSON, which has no NaN and no infinities. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Samples that cannot be read; those of `rows`; `Usage`, when it gives another number of rows than the batch has samples;
    /// peers that are lost.
    pub fn predict<D: Dataset + ?Sized, T: Serialize + DeserializeOwned>(
        &mut self,
        data: &Arc<D>,
        mut rows: impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch>) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        let _phase = self.ctx.phase("evaluating");
        let predicted = self.evaluating(|trainer| {
            let (mut indices, mut own) = (Vec::new(), Vec::new());
            let group = trainer.ctx.group();
            let config = in_order(data.len(), &group);
            let batch = trainer.settings.test_batch_size;
            let plan = Sampler::exact(config, batch.saturating_mul(config.world))?.epoch(0);
            let mut measure = |model: &M, batch: MicroBatch<'_, D::Batch>| {
                let (samples, rows) = (batch.indices(), rows(model, batch)?);
                if rows.len() != samples.len() {
                    refuse!(
                        "predict: {} rows for a batch of {} samples",
                        rows.len(),
                        samples.len()
                    );
                }
                indices.extend_from_slice(samples);
                own.extend(rows);
                Ok(Measure::empty())
            };
            trainer
                .with_averages(|trainer| trainer.pass(data, plan, &mut measure, |_, _| Ok(())))?;
            let mut most = [own.len() as u64];
            group.all_reduce(&mut most, ReduceOp::Max)?;
            let (mut own, mut all) = (indices.into_iter().zip(own), Vec::with_capacity(data.len()));
            // What is exchanged at once has a limit.
            let at_once = (ROWS_AT_ONCE / config.world).max(1);
            for _ in (0..most[0]).step_by(at_once) {
                let part: Vec<(u64, T)> = own.by_ref().take(at_once).collect();
                all.extend(group.all_gather_object(&part)?.into_iter().flatten());
            }
            all.sort_by_key(|(index, _)| *index);
            Ok(all.into_iter().map(|(_, row)| row).collect())
        });
        self.noted(predicted)
    }

    /// Measures all of `data` on this rank alone, batch by batch. No other rank takes part, so in the loop over an
    /// epoch's batches the running statistics are this rank's own.
    ///
    /// # Errors
    ///
    /// Samples that cannot be read, those of `measure`.
    pub fn measure_here<D: Dataset + ?Sized>(
        &mut self,
        data: &Arc<D>,
        mut measure: impl for<'s> FnMut(&M, MicroBatch<'s, D::Batch>) -> Result<Measure>,
    ) -> Result<Vec<Measure>> {
        let alone = SamplerConfig {
            world: 1,
            rank: 0,
            ..in_order(data.len(), self.strategy.batch_group())
        };
        let plan = Sampler::exact(alone, self.settings.test_batch_size)?.epoch(0);
        let began = Instant::now();
        let mut all = Vec::with_capacity(plan.len());
        self.with_averages(|trainer| {
            trainer.pass(data, plan, &mut measure, |_, measured| {
                all.push(measured);
                Ok(())
            })
        })?;
        self.count_evaluation(began);
        Ok(all)
    }
}

/// The samples of a data set in their order, shared out among the ranks of `group`.
fn in_order(samples: usize, group: &ProcessGroup) -> SamplerConfig {
    SamplerConfig {
        samples,
        world: group.world_size(),
        rank: group.rank(),
        shuffle: false,
        seed: 0,
    }
}
