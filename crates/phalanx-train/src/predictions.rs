//! What the network makes of some test images after each evaluation.

use std::sync::Arc;

use phalanx_data::ImageDataset;
use phalanx_data::metrics::argmax;
use phalanx_nn::{Step, Tensor};
use phalanx_report::image;
use serde::{Deserialize, Serialize};

use crate::error::{Result, refuse};
use crate::trainer::Trainer;

const FILE: &str = "predictions.jsonl";

/// Most images of a batch.
const IMAGES: usize = 32;

/// Most rows in the file, more only if one epoch has more. The epochs that stay are spread evenly.
const MAX_ROWS: usize = 10_000;

/// One test image and what the network made of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Prediction {
    /// The evaluation, from 1.
    epoch: usize,
    /// Test batch and place in it, as the Flyte document counts: `0_31`.
    id: String,
    /// The image's number in the test set: `phalanx predict` and viewers find it by this.
    image: u64,
    /// The class with the highest score.
    guess: u32,
    /// The label.
    truth: u32,
    /// One a class, as the network gives them.
    scores: Vec<f32>,
}

/// The rows of `predictions.jsonl` and the images of `predictions.png`, which the run's report shows: the first 32 images of each
/// of the first test batches, by epoch. Rank 0 computes them, and no others; nothing elsewhere.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use phalanx_data::ImageDataset;
/// # use phalanx_nn::layers::Linear;
/// # use phalanx_train::{Predictions, Result, Trainer};
/// # fn train(trainer: &mut Trainer<'_, Linear>, test: Arc<dyn ImageDataset>) -> Result<()> {
/// let mut predictions = Predictions::of(trainer)?;
/// for epoch in trainer.epochs() {
///     // Training and evaluation.
///     predictions.add(epoch, 1, trainer, &test, |net, step, images, shape| {
///         let x = step.input(images, &[shape[0], 28 * 28])?;
///         Ok(net.forward(x)?)
///     })?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct Predictions {
    rows: Vec<Prediction>,
    has_pictures: bool,
}

impl Predictions {
    /// Those of the epochs before a resume.
    ///
    /// # Errors
    ///
    /// Those of reading the file.
    pub fn of<N>(trainer: &Trainer<'_, N>) -> Result<Predictions> {
        Ok(Predictions {
            rows: trainer.load_rows(FILE)?,
            has_pictures: false,
        })
    }

    /// Adds those of `epoch` for the first test `batches`, with the scores of `forward`, and writes the files. One that cannot be written is a warning.
    ///
    /// # Errors
    ///
    /// Those of reading images and of `forward`; `Usage`, when it does not give equally many scores for each image.
    pub fn add<N>(
        &mut self,
        epoch: usize,
        batches: usize,
        trainer: &mut Trainer<'_, N>,
        test: &Arc<dyn ImageDataset>,
        forward: impl for<'s> Fn(&N, &'s Step<'s>, &[f32], [usize; 4]) -> Result<Tensor<'s>>,
    ) -> Result<()> {
        let ctx = trainer.context();
        if !ctx.is_main() {
            return Ok(());
        }
        let _phase = ctx.phase("evaluating");
        // Of an attempt that came further than its checkpoint.
        self.rows.retain(|row| row.epoch < epoch);
        let mut images = Vec::new();
        let (batch, [h, w, c]) = (trainer.settings().test_batch_size, test.image_shape());
        let mut pixels = vec![0.0; h * w * c];
        for number in 0..batches {
            let first = batch.saturating_mul(number).min(test.len());
            let count = IMAGES.min(batch);
            let (mut inputs, mut labels) = (Vec::new(), Vec::new());
            for image in first..first.saturating_add(count).min(test.len()) {
                labels.push(test.read(image, &mut pixels)?);
                inputs.extend_from_slice(&pixels);
            }
            if labels.is_empty() {
                break;
            }
            let shape = [labels.len(), h, w, c];
            let scores =
                trainer.infer(|net, step| Ok(forward(net, step, &inputs, shape)?.to_vec()))?;
            if scores.is_empty() || scores.len() % labels.len() > 0 {
                let (scores, images) = (scores.len(), labels.len());
                refuse!("predictions: {scores} scores for {images} images");
            }
            if !self.has_pictures {
                images.extend_from_slice(&inputs);
            }
            let classes = scores.len() / labels.len();
            for (i, (truth, scores)) in labels.into_iter().zip(scores.chunks(classes)).enumerate() {
                self.rows.push(Prediction {
                    epoch,
                    id: format!("{number}_{i}"),
                    image: (first + i) as u64,
                    guess: argmax(scores).unwrap_or(0) as u32,
                    truth,
                    scores: scores.to_vec(),
                });
            }
        }
        self.thin(epoch);
        if !images.is_empty() {
            let png = image::sheet(&images, test.image_shape());
            if let Err(error) = png.and_then(|png| trainer.save_pictures(&png)) {
                ctx.note(&format!("warning: no predictions.png: {error}"));
            }
            self.has_pictures = true;
        }
        if let Err(error) = trainer.save_rows(FILE, &self.rows) {
            ctx.note(&format!(
                "warning: {FILE} was not written: {}",
                error.chain()
            ));
        }
        Ok(())
    }

    /// Leaves out epochs before `epoch` until at most [`MAX_ROWS`] rows are left. Which ones stay does not depend on
    /// resumes.
    fn thin(&mut self, epoch: usize) {
        let each = self.rows.iter().filter(|row| row.epoch == epoch).count();
        let most = (MAX_ROWS / each.max(1)).max(1);
        let mut every = 1;
        while epoch.div_ceil(every) + 1 > most && every < epoch {
            every *= 2;
        }
        let stays = |one: usize| one == epoch || most > 1 && one % every == 1 % every;
        self.rows.retain(|row| stays(row.epoch));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_epochs_of_many_stay() {
        let row = |epoch| Prediction {
            epoch,
            id: String::new(),
            image: 0,
            guess: 0,
            truth: 0,
            scores: Vec::new(),
        };
        for (each, most) in [(320, 31), (1000, 10), (6000, 1), (20_000, 1)] {
            let mut all = Predictions::default();
            for epoch in 1..=100 {
                all.rows.extend(vec![row(epoch); each]);
                all.thin(epoch);
                let mut epochs: Vec<usize> = all.rows.iter().map(|row| row.epoch).collect();
                epochs.dedup();
                assert_eq!(all.rows.len(), each * epochs.len(), "complete epochs");
                assert_eq!(epochs.last(), Some(&epoch));
                assert!(epochs.len() <= most, "{epoch}: {epochs:?}");
                if most > 1 {
                    assert_eq!(epochs[0], 1);
                    assert!(epochs.len() >= epoch.min(most / 2), "{epoch}: {epochs:?}");
                    let steps: Vec<usize> = epochs.windows(2).map(|two| two[1] - two[0]).collect();
                    let even = &steps[..steps.len().saturating_sub(1)];
                    assert!(even.windows(2).all(|two| two[0] == two[1]), "{epochs:?}");
                }
            }
        }
    }
}
