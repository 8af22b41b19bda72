//! Validation: exact over all ranks, or as the documents do it.

use std::sync::Arc;

use phalanx_comm::ReduceOp;
use phalanx_ddp::ShardTree;
use phalanx_nn::{Params, Step, Tape, Tensor};
use phalanx_train::Dataset;
use phalanx_train::loader::{Batch, Loader, LoaderOptions};
use phalanx_train::metrics::{Confusion, argmax};
use phalanx_train::sampler::{EpochPlan, Sampler, SamplerConfig};
use serde::Serialize;

use super::context::RankContext;
use super::cut::Cut;
use super::program::{Loss, Net, Program, Testers};
use super::settings::Settings;
use crate::error::{Error, Result};

/// Result of one pass over the test set.
#[derive(Debug, Clone)]
pub struct Tested {
    /// Mean over all samples; in a document's own way, over batches' means.
    pub loss: f64,
    /// Share of right answers.
    pub accuracy: f64,
    /// Who was taken for whom, over all samples.
    pub confusion: Confusion,
}

impl Tested {
    /// Nothing tested yet.
    pub fn nothing() -> Tested {
        Tested {
            loss: f64::NAN,
            accuracy: f64::NAN,
            confusion: Confusion::new(0),
        }
    }

    fn new(loss: f64, confusion: Confusion) -> Tested {
        Tested {
            loss,
            accuracy: confusion.accuracy().unwrap_or(f64::NAN),
            confusion,
        }
    }

    /// Rows of the true class, columns of the answer.
    pub fn matrix(&self) -> Vec<&[i64]> {
        let classes = self.confusion.classes();
        self.confusion
            .counts()
            .chunks_exact(classes.max(1))
            .collect()
    }

    /// Share of each class that was recognised; `None` for one that is not in
    /// the test set.
    pub fn class_accuracies(&self) -> Vec<Option<f64>> {
        (0..self.confusion.classes())
            .map(|class| self.confusion.recall(class))
            .collect()
    }
}

/// One test image and what the network made of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// Test batch and place in it, as the Flyte document counts: `0_31`.
    pub id: String,
    /// The image's number in the test set: `phalanx predict` and viewers find it by this.
    pub image: u64,
    /// The class with the highest score.
    pub guess: u32,
    /// The label.
    pub truth: u32,
    /// One a class, as the network gives them.
    pub scores: Vec<f32>,
}

/// What a test pass needs to know.
pub struct Tester<'a, P: Program> {
    /// The rank.
    pub ctx: &'a RankContext,
    /// The program.
    pub program: &'a P,
    /// Its network.
    pub net: &'a P::Net,
    /// How batches are cut over ranks.
    pub cut: &'a Cut,
    /// The test set.
    pub data: &'a Arc<dyn Dataset>,
}

impl<P: Program> Tester<'_, P> {
    /// Tests as the settings say; the same result on all ranks, except
    /// under `--exact-validation false` where it is each rank's own (rank 0's
    /// on all, if only that one tests).
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Samples that cannot be read, peers that are lost.
    pub fn test(&self, params: &Params, tape: &mut Tape) -> Result<Tested> {
        if self.settings().exact_validation {
            return self.exact(params, tape);
        }
        match self.program.testers() {
            Testers::Everybody => self.whole(params, tape),
            Testers::Rank0 => {
                let mut tested = None;
                if self.ctx.is_main() {
                    tested = Some(self.whole(params, tape)?);
                }
                self.share(tested)
            }
        }
    }

    fn settings(&self) -> &Settings {
        self.program.settings()
    }

    /// Every sample once over all ranks, sums and counts reduced.
    fn exact(&self, params: &Params, tape: &mut Tape) -> Result<Tested> {
        let config = SamplerConfig {
            samples: self.data.len(),
            world: self.ctx.world(),
            rank: self.ctx.rank(),
            shuffle: false,
            seed: 0,
        };
        // Cut as in training, so that no sum depends on the ranks if none may.
        let cut = self.cut;
        let batch = self.settings().test_batch_size.saturating_mul(cut.parts());
        let samplers = cut.samplers(config, |config| Ok(Sampler::exact(config, batch)?))?;
        let plan = cut.epoch(&samplers, 0);
        let parts = plan.parts();
        let mut sums = vec![0.0; plan.len() / parts * cut.parts()];
        let mut confusion = Confusion::new(self.data.classes());
        self.pass(params, tape, plan, |index, batch, scores, loss| {
            sums[index / parts * cut.parts() + cut.mine().start + index % parts] = loss;
            Ok(confusion.add_scores(scores, &batch.labels)?)
        })?;
        ShardTree::gather_values(&self.ctx.group, &mut sums)?; // DDP
        self.ctx
            .group
            .all_reduce(confusion.counts_mut(), ReduceOp::Sum)?; // DDP
        let total: f64 = sums.iter().sum();
        Ok(Tested::new(total / self.data.len() as f64, confusion))
    }

    /// All of the set on this rank, as the documents' programs have it: the
    /// Flyte one sums the loss over samples, the ModelArts one takes the mean
    /// of the batches' means.
    fn whole(&self, params: &Params, tape: &mut Tape) -> Result<Tested> {
        let batch = self.settings().test_batch_size;
        let mut confusion = Confusion::new(self.data.classes());
        let (mut sum, mut means, mut batches) = (0.0, 0.0, 0);
        self.pass(
            params,
            tape,
            whole_plan(self.data.len(), batch)?,
            |_, batch, scores, loss| {
                sum += loss;
                means += loss / batch.labels.len() as f64;
                batches += 1;
                Ok(confusion.add_scores(scores, &batch.labels)?)
            },
        )?;
        let loss = match self.program.testers() {
            Testers::Rank0 => sum / self.data.len() as f64,
            Testers::Everybody => means / f64::from(batches.max(1)),
        };
        Ok(Tested::new(loss, confusion))
    }

    /// Rank 0's result on all ranks. The collective is also the barrier in
    /// which the others wait, as long as rank 0 is evaluating.
    fn share(&self, tested: Option<Tested>) -> Result<Tested> {
        let classes = self.data.classes();
        let mut tested = tested.unwrap_or_else(|| Tested::new(0.0, Confusion::new(classes)));
        let mut loss = [tested.loss];
        self.ctx.group.broadcast(&mut loss, 0)?;
        self.ctx.group.broadcast(tested.confusion.counts_mut(), 0)?;
        Ok(Tested::new(loss[0], tested.confusion))
    }

    /// The first images of each of the first test batches: image, guess, truth
    /// and scores. Rank 0 computes them, and no others; nothing elsewhere.
    ///
    /// # Errors
    ///
    /// Samples that cannot be read.
    pub fn predictions(&self, params: &Params, tape: &mut Tape) -> Result<Vec<Prediction>> {
        let mut rows = Vec::new();
        if !self.ctx.is_main() {
            return Ok(rows);
        }
        let batch = self.settings().test_batch_size;
        let shape = self.data.image_shape();
        let mut pixels = vec![0.0; shape.iter().product()];
        for number in 0..self.settings().log_batches {
            let first = batch.saturating_mul(number).min(self.data.len());
            let images = self.settings().log_images.min(batch);
            let (mut inputs, mut labels) = (Vec::new(), Vec::new());
            for image in first..first.saturating_add(images).min(self.data.len()) {
                labels.push(self.data.read(image, &mut pixels)?);
                inputs.extend_from_slice(&pixels);
            }
            if labels.is_empty() {
                break;
            }
            let step = tape.inference(params);
            let scores = self.scores(&step, &inputs, labels.len())?.to_vec();
            let classes = scores.len() / labels.len();
            for (i, (truth, scores)) in labels.into_iter().zip(scores.chunks(classes)).enumerate() {
                rows.push(Prediction {
                    id: format!("{number}_{i}"),
                    image: (first + i) as u64,
                    guess: argmax(scores).unwrap_or(0) as u32,
                    truth,
                    scores: scores.to_vec(),
                });
            }
        }
        Ok(rows)
    }

    /// Gives each batch of `plan` to `take`: its place in the plan, the batch,
    /// its scores, and the sum of its losses.
    fn pass(
        &self,
        params: &Params,
        tape: &mut Tape,
        plan: EpochPlan,
        mut take: impl FnMut(usize, &Batch, &[f32], f64) -> Result<()>,
    ) -> Result<()> {
        let loss: Loss = self.program.loss().plain();
        let mut loader = loader(self.settings(), self.data)?;
        loader.start(plan);
        let mut index = 0;
        while let Some(batch) = loader.next_batch()? {
            if !batch.labels.is_empty() {
                let step = tape.inference(params);
                let scores = self.scores(&step, &batch.images, batch.labels.len())?;
                let values = scores.to_vec();
                let sum = f64::from(loss.of(scores, &batch.labels, 1.0)?.item());
                take(index, &batch, &values, sum)?;
            }
            index += 1;
        }
        Ok(())
    }

    /// The network's answers to `n` images, each also seen in a mirror where
    /// the program wants it so.
    fn scores<'s>(&self, step: &'s Step<'s>, images: &[f32], n: usize) -> Result<Tensor<'s>> {
        let [h, w, c] = self.data.image_shape();
        let shape = [n, h, w, c];
        let scores = self.net.forward(step.input(images, &shape)?)?;
        if !self.program.tests_mirrored() {
            return Ok(scores);
        }
        let mirrored = mirrored(images, [h, w, c]);
        let other = self.net.forward(step.input(&mirrored, &shape)?)?;
        Ok(scores.add(other)?.scale(0.5)?)
    }
}

/// Images (N, H, W, C) with left and right exchanged.
pub fn mirrored(images: &[f32], [_, w, c]: [usize; 3]) -> Vec<f32> {
    let mut out = Vec::with_capacity(images.len());
    for row in images.chunks_exact((w * c).max(1)) {
        for pixel in row.chunks_exact(c.max(1)).rev() {
            out.extend_from_slice(pixel);
        }
    }
    out
}

/// The first `samples` samples in order, in batches, for one rank alone.
fn whole_plan(samples: usize, batch: usize) -> Result<EpochPlan> {
    let alone = SamplerConfig {
        samples,
        world: 1,
        rank: 0,
        shuffle: false,
        seed: 0,
    };
    Ok(Sampler::exact(alone, batch)?.epoch(0))
}

/// Reads `data` ahead of the loop.
///
/// # Errors
///
/// System, when it refuses a thread.
pub fn loader(settings: &Settings, data: &Arc<dyn Dataset>) -> Result<Loader> {
    let options = LoaderOptions {
        workers: settings.workers,
        ..LoaderOptions::default()
    };
    Loader::new(data.clone(), options).map_err(Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrored_rows_keep_their_channels() {
        // Two images of 1 x 2 pixels of 3 channels.
        let images: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let expected = [3., 4., 5., 0., 1., 2., 9., 10., 11., 6., 7., 8.];
        assert_eq!(mirrored(&images, [1, 2, 3]), expected);
        assert_eq!(mirrored(&mirrored(&images, [1, 2, 3]), [1, 2, 3]), images);
    }
}
