//! What programs that classify images share: their data, their flags and their evaluation.

use std::sync::Arc;

use phalanx::PrintingRanks;
use phalanx::data::metrics::Confusion;
use phalanx::data::{ImageDataset, StoredImages};
use phalanx::prelude::*;
use phalanx::train::{Determinism, Predictions, Strategy};

use super::device::{Classifier, Engine, EngineArgs, On, OnCpu};
use super::net::{Loss, Network};
use super::views::Views;
use crate::format::{on_or_off, thousands};

/// A training set and a test set.
pub struct Data {
    /// Trained on, augmented where the program does so.
    pub train: Arc<dyn ImageDataset>,
    /// Tested on, as it is.
    pub test: Arc<dyn ImageDataset>,
    /// As it was typed, for the summary.
    pub name: String,
    /// For the person at the terminal.
    pub description: String,
    /// Distinguishes other data, whatever its folder is called.
    pub content: String,
    /// Names of the classes of images of one's own.
    pub classes: Option<Vec<String>>,
}

impl Data {
    /// Images that were read from `folder`.
    pub fn stored(folder: &str, [train, test]: [StoredImages; 2]) -> Data {
        let name = train.name();
        let [n, m] = [&train, &test].map(ImageDataset::len);
        let hashes = format!("{:.16} + {:.16}", train.sha256(), test.sha256());
        Data {
            description: format!("{name} in {folder}, {}", counts(n, m)),
            content: format!("{name} {n} + {m}, SHA-256 {hashes}"),
            train: Arc::new(train),
            test: Arc::new(test),
            name: folder.to_owned(),
            classes: None,
        }
    }

    /// The size and classes of images of one's own, for the files of a training.
    pub fn about_own(&self) -> Vec<(&'static str, String)> {
        let [size, ..] = self.train.image_shape();
        let about = |classes| {
            let classes = serde_json::json!(classes).to_string();
            [("image_size", size.to_string()), ("classes", classes)]
        };
        self.classes.iter().flat_map(about).collect()
    }

    /// Adds the name of the data to the summary.
    pub fn name_in_summary<M, S: Strategy>(&self, trainer: &mut Trainer<'_, M, S>) {
        trainer.add_to_summary("data", self.name.as_str());
    }
}

/// How many images there are.
pub fn counts(train: usize, test: usize) -> String {
    format!("{} train / {} test", thousands(train), thousands(test))
}

/// Flags of every program that classifies images.
#[derive(Debug, Clone, clap::Args)]
pub struct ImageArgs<E: EngineArgs = OnCpu> {
    #[command(flatten)]
    pub engine: E,
    /// Print the lines of the recipe's source document, and evaluate as it does: one rank, or each, evaluates the whole test set
    #[arg(long)]
    pub document: bool,
    /// Number of test batches of which the predictions of up to 32 images are written to predictions.jsonl
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub log_batches: usize,
}

impl<E: EngineArgs> ImageArgs<E> {
    /// Checks them, and the training flags, before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn check(&self, settings: &Settings, world: usize) -> Result<()> {
        settings.validate(world)?;
        if settings.split.determinism() == Determinism::Shards && self.document {
            return Err(Error::usage(
                "--document tests in an order of its own; leave it out with --deterministic shards",
            ));
        }
        Ok(())
    }

    /// Which ranks print.
    pub fn printing(&self) -> PrintingRanks {
        match self.document {
            true => PrintingRanks::AllUnmarked,
            false => PrintingRanks::Rank0,
        }
    }

    /// Gives the training of `network` on `data` and `engine` its name, and the flags that shape it.
    ///
    /// # Errors
    ///
    /// Usage, when the network does not take the images of one of the sets.
    pub fn describe<'j, M, S: Strategy>(
        &self,
        builder: TrainerBuilder<'j, M, S>,
        (network, engine): (&Network, &E::Engine),
        data: &Data,
    ) -> Result<TrainerBuilder<'j, M, S>> {
        if data.classes.is_some() && !network.any_size {
            let what = format!(
                "{} is no folder for {}; resnet18, resnet50 and mobilenetv2 take folders of classes",
                data.name, network.model
            );
            return Err(Error::usage(what));
        }
        network.check_images(&*data.train, "training images")?;
        network.check_images(&*data.test, "test images")?;
        Ok(builder
            .title(network.title)
            .data(&data.description, &data.content)
            .unit("images")
            .hyperparameters(vec![format!("--document {}", on_or_off(self.document))])
            .same_on_all_ranks(vec![format!("--log-batches {}", self.log_batches)])
            .same_on_all_ranks(engine.facts()))
    }
}

/// Checks a flag whose value must lie in 0..1 (1 excluded).
///
/// # Errors
///
/// Usage, naming the flag.
pub fn check_share(flag: &str, value: f64) -> Result<()> {
    match (0.0..1.0).contains(&value) {
        true => Ok(()),
        false => Err(Error::usage(format!(
            "{flag} must lie in 0..1 (1 excluded)"
        ))),
    }
}

/// Which ranks test the whole test set in a document's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Testers {
    /// Rank 0, while the others wait.
    Rank0,
    /// Every rank, each the whole set.
    Everybody,
}

/// What follows each epoch: the evaluation, and the predictions for some test images.
pub struct Tests<'a, E: EngineArgs> {
    args: &'a ImageArgs<E>,
    data: &'a Data,
    loss: Loss,
    /// The mean of the scores of these views of each image is taken.
    pub views: Views,
    /// Under `--document`.
    pub testers: Testers,
    predictions: Predictions,
}

/// A training of a network on an engine.
type Training<'j, N, E> = Trainer<'j, On<N, <E as EngineArgs>::Engine>>;

impl<'a, E: EngineArgs> Tests<'a, E> {
    /// Tests of `data`, with `loss`, which is minimized, but for its smoothing; by rank 0 under `--document`.
    ///
    /// # Errors
    ///
    /// Those of reading the predictions of the epochs before a resume.
    pub fn of<N: Classifier>(
        trainer: &mut Training<'_, N, E>,
        args: &'a ImageArgs<E>,
        data: &'a Data,
        loss: Loss,
    ) -> Result<Self> {
        data.name_in_summary(trainer);
        Ok(Tests {
            args,
            data,
            loss,
            views: Views::One,
            testers: Testers::Rank0,
            predictions: Predictions::of(trainer)?,
        })
    }

    /// Trains with these tests after each epoch.
    ///
    /// # Errors
    ///
    /// Those of reading images and of the model; peers that are lost.
    pub fn train<N: Classifier>(&mut self, trainer: &mut Training<'_, N, E>) -> Result<()> {
        let loss = self.loss;
        for epoch in trainer.epochs() {
            for batch in trainer.batches(&self.data.train)? {
                trainer.step(&batch, |net, batch| {
                    let scores = net.forward(batch.images()?)?;
                    loss.of(scores, batch.labels(), batch.samples() as f32)
                })?;
            }
            self.run(trainer, epoch)?;
        }
        Ok(())
    }

    /// Evaluates after epoch `epoch`, and writes the predictions. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Those of reading images and of the model; peers that are lost.
    fn run<N: Classifier>(&mut self, trainer: &mut Training<'_, N, E>, epoch: usize) -> Result<()> {
        self.evaluate(trainer)?;
        let (views, test) = (self.views, &self.data.test);
        let batches = self.args.log_batches;
        (self.predictions).add(epoch, batches, trainer, test, |net, step, images, shape| {
            scores(net, views, step, images, shape)
        })
    }

    /// Measures the accuracy with the mean of the scores of these views (test-time augmentation). It is logged and put into the
    /// summary as `tta_accuracy`, next to the epochs'. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Those of reading images and of the model; peers that are lost.
    pub fn report_accuracy_of<N: Classifier>(
        &mut self,
        trainer: &mut Training<'_, N, E>,
        views: Views,
    ) -> Result<()> {
        self.views = views;
        let measure =
            |net: &On<N, E::Engine>, batch: MicroBatch<'_, ImageBatch>| self.measure(net, &batch);
        let accuracy = trainer.measure(&self.data.test, measure)?.accuracy;
        trainer.log(&[("tta_accuracy", accuracy)])?;
        trainer.add_to_summary("tta_accuracy", accuracy);
        let (views, percent) = (views.count(), 100.0 * accuracy);
        let text = format!("accuracy over {views} views of each test image: {percent:.2} %");
        trainer.context().note(&text);
        Ok(())
    }

    /// Evaluates as the settings say; the same result on all ranks, except under
    /// `--document` where it is each rank's own (rank 0's on all, if only that one
    /// evaluates).
    fn evaluate<N: Classifier>(&self, trainer: &mut Training<'_, N, E>) -> Result<()> {
        let (ctx, test) = (trainer.context(), &self.data.test);
        let measure =
            |net: &On<N, E::Engine>, batch: MicroBatch<'_, ImageBatch>| self.measure(net, &batch);
        if !self.args.document {
            return trainer.evaluate(test, measure).map(drop);
        }
        let _phase = ctx.phase("evaluating");
        trainer.check_weights()?;
        // As the documents' programs have it: the ModelArts one takes the mean of the batches'
        // means, the Flyte one sums the loss over samples.
        let evaluation = match self.testers {
            Testers::Everybody => {
                let measured = trainer.measure_here(test, measure)?;
                let batches = measured.len().max(1) as f64;
                let means: f64 = measured.iter().map(|m| m.loss / m.samples as f64).sum();
                Evaluation::new(means / batches, confusion(test.classes(), &measured)?)
            }
            Testers::Rank0 => {
                let (loss, counts): (u64, Vec<i64>) = trainer.on_rank_0(|trainer| {
                    let measured = trainer.measure_here(test, measure)?;
                    let sum: f64 = measured.iter().map(|m| m.loss).sum();
                    let counts = confusion(test.classes(), &measured)?;
                    let loss = sum / test.len() as f64;
                    Ok((loss.to_bits(), counts.counts().to_vec()))
                })?;
                let mut confusion = Confusion::new(test.classes());
                confusion.counts_mut().copy_from_slice(&counts);
                Evaluation::new(f64::from_bits(loss), confusion)
            }
        };
        trainer.record(evaluation)
    }

    fn measure(
        &self,
        net: &On<impl Classifier, E::Engine>,
        batch: &MicroBatch<'_, ImageBatch>,
    ) -> Result<Measure> {
        let (step, shape) = (batch.step(), batch.shape());
        let scores = scores(net, self.views, step, &batch.images, shape)?;
        let measure = Measure::of_scores(&scores, batch.labels())?;
        let loss = self.loss.plain().of(scores, batch.labels(), 1.0)?;
        Ok(measure.with_loss(loss))
    }
}

/// The network's answers to images, each seen in these views.
fn scores<'s>(
    net: &On<impl Classifier, impl Engine>,
    views: Views,
    step: &'s Step<'s>,
    images: &[f32],
    shape: [usize; 4],
) -> Result<Tensor<'s>> {
    views.scores(images, shape, |view| net.forward(step.input(view, &shape)?))
}

/// The counts of all batches together.
fn confusion(classes: usize, measured: &[Measure]) -> Result<Confusion> {
    let mut all = Confusion::new(classes);
    for counts in measured.iter().filter_map(|m| m.confusion.as_ref()) {
        all.merge(counts)?;
    }
    Ok(all)
}
