//! What one image program has that others have not, and how all of them are trained.

use std::path::PathBuf;
use std::sync::Arc;

use phalanx_data::metrics::{Confusion, argmax};
use phalanx_data::{ImageBatch, ImageDataset};
use phalanx_launch::{Speakers, number, real_env};
use phalanx_nn::losses::CrossEntropyOptions;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::{Params, Reduction, Scope, Step, Tensor};
use phalanx_train::{
    Defaults, Determinism, Evaluation, Files, Measure, MicroBatch, RankContext, Reporter,
    SavingArgs, Settings, Trainer, TrainerBuilder,
};
use serde::Serialize;

use super::AnyRecipe;
use super::prepare::{self, Fetch};
use crate::error::{Error, Result, check_count};

/// A training set and a test set.
pub struct Data {
    /// Trained on, augmented where the program does so.
    pub train: Arc<dyn ImageDataset>,
    /// Tested on, as it is.
    pub test: Arc<dyn ImageDataset>,
    /// For the person at the terminal.
    pub description: String,
    /// Tells other data apart, whatever its folder is called.
    pub content: String,
}

/// A network from images to one score a class.
pub trait Net {
    /// Images (N, H, W, C) to scores (N, classes).
    ///
    /// # Errors
    ///
    /// `Usage` for other shapes.
    fn forward<'s>(&self, x: Tensor<'s>) -> phalanx_nn::Result<Tensor<'s>>;
}

/// What training makes small. Validation takes the same without smoothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Loss {
    /// Of scores that are log-probabilities.
    Nll,
    /// Of scores as they are; this share of the target is spread over all classes.
    CrossEntropy { smoothing: f64 },
}

impl Loss {
    /// The loss of scores (N, classes), divided by `divisor`.
    ///
    /// # Errors
    ///
    /// `Usage` when labels do not fit.
    pub fn of<'s>(
        self,
        scores: Tensor<'s>,
        labels: &[u32],
        divisor: f32,
    ) -> phalanx_nn::Result<Tensor<'s>> {
        match self {
            Loss::Nll => scores.nll_loss(labels, divisor),
            Loss::CrossEntropy { smoothing: 0.0 } => scores.cross_entropy(labels, divisor),
            Loss::CrossEntropy { smoothing } => {
                let options = CrossEntropyOptions {
                    label_smoothing: smoothing,
                    reduction: Reduction::Sum,
                    ..CrossEntropyOptions::default()
                };
                scores
                    .cross_entropy_with(labels, options)?
                    .scale(1.0 / divisor)
            }
        }
    }

    /// The same without smoothing.
    pub fn plain(self) -> Loss {
        match self {
            Loss::Nll => Loss::Nll,
            Loss::CrossEntropy { .. } => Loss::CrossEntropy { smoothing: 0.0 },
        }
    }
}

/// Arguments of every image program.
#[derive(Debug, Clone, clap::Args)]
pub struct ImageArgs {
    #[command(flatten)]
    pub settings: Settings,
    /// Number of synthetic training samples; the test set has a sixth as many
    #[arg(long, value_name = "N")]
    pub synthetic_samples: Option<usize>,
    /// Divide the test set among all ranks, each sample once; `false`: evaluate as the recipe's source document does
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, value_name = "true|false")]
    pub exact_validation: bool,
    /// Number of test batches whose predictions are written to predictions.jsonl
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub log_batches: usize,
    /// Images written per logged batch
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub log_images: usize,
    /// Ranks of this host, where a launcher says how many.
    #[arg(skip)]
    pub ranks_here: Option<usize>,
}

impl ImageArgs {
    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self, world: usize) -> Result<()> {
        let samples = self.synthetic_samples.unwrap_or(1);
        check_count("--synthetic-samples", samples, 100_000_000)?;
        self.settings.validate(world)?;
        if self.settings.split.determinism() == Determinism::Shards && !self.exact_validation {
            return Err(Error::usage(
                "--exact-validation false tests in an order of its own; leave it out with --deterministic shards",
            ));
        }
        Ok(())
    }

    /// A usage error where the size of the synthetic set is typed and `data` are others.
    ///
    /// # Errors
    ///
    /// That one.
    pub fn refuse_synthetic_samples(&self, data: &str) -> Result<()> {
        match self.synthetic_samples {
            None => Ok(()),
            Some(_) => Err(Error::usage(format!(
                "--synthetic-samples requires --data synthetic, not {data}"
            ))),
        }
    }
}

/// A program of `phalanx train` that classifies images.
pub trait Program {
    /// Its network.
    type Net: Net;

    /// What it is called at the command line.
    fn name(&self) -> &'static str;

    /// What its network is called.
    fn title(&self) -> &'static str;

    /// What every program has.
    fn images(&self) -> &ImageArgs;

    /// The same, to be changed.
    fn images_mut(&mut self) -> &mut ImageArgs;

    /// Epochs, batch size and learning rate where none are typed.
    fn defaults(&self) -> Defaults;

    /// As [`AnyRecipe::default_dir`].
    fn default_dir(&self) -> Option<&'static str> {
        None
    }

    /// Checks what is its own before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    fn validate(&self, world: usize) -> Result<()>;

    /// Whether every rank prints, as in its document.
    fn prints_on_all(&self) -> bool {
        false
    }

    /// The files it writes.
    fn files(&self) -> Files;

    /// As the user typed it, for the summary.
    fn data_name(&self) -> String;

    /// Settings of its own that must be the same on all ranks, a flag and its value a line.
    /// Those that differ from a checkpoint's are told.
    fn must_agree(&self) -> Vec<String>;

    /// How its data are got first, where they may be missing.
    fn fetch(&self) -> Option<Fetch>;

    /// Reads or makes its data.
    ///
    /// # Errors
    ///
    /// Usage or data, naming folder or file.
    fn data(&self) -> Result<Data>;

    /// Registers its parameters.
    fn net(&self, scope: &mut Scope) -> Self::Net;

    /// Sets parameters that start otherwise than registered. Rank 0's are
    /// everybody's afterwards.
    ///
    /// # Errors
    ///
    /// Those of reading samples.
    fn prepare(&self, _params: &mut Params, _data: &Data) -> Result<()> {
        Ok(())
    }

    /// Parameters that are not trained, by name.
    fn frozen(&self) -> Vec<String> {
        Vec::new()
    }

    /// The learning rate where `world` ranks train.
    fn lr(&self, _world: usize) -> f64 {
        self.images().settings.lr()
    }

    /// The optimizer.
    fn optimizer(&self, params: &Params, lr: f64) -> Box<dyn Optimizer>;

    /// The optimizer in words.
    fn optimizer_title(&self, lr: f64) -> String;

    /// The learning rate of each step; none keeps the optimizer's. `steps` are
    /// all of the run.
    ///
    /// # Errors
    ///
    /// Usage, when so few steps make no schedule.
    fn schedule(&self, _lr: f64, _steps: u64) -> Result<Option<Schedule>> {
        Ok(None)
    }

    /// What is made small.
    fn loss(&self) -> Loss;

    /// Whether validation also looks at each image mirrored, and adds the scores.
    fn tests_mirrored(&self) -> bool {
        false
    }

    /// Whether `--sampler torch` drops a last batch that is short.
    fn drops_last(&self) -> bool {
        false
    }

    /// Who tests under `--exact-validation false`.
    fn testers(&self) -> Testers;

    /// What it prints.
    fn reporter(&self) -> Box<dyn Reporter>;

    /// What it prints when the ranks have met, before data is loaded.
    ///
    /// # Errors
    ///
    /// Those of writing to standard output.
    fn started(&self, _ctx: &RankContext) -> Result<()> {
        Ok(())
    }

    /// What it prints when data is loaded.
    ///
    /// # Errors
    ///
    /// Those of writing to standard output.
    fn loaded(&self, _ctx: &RankContext) -> Result<()> {
        Ok(())
    }
}

impl<P: Program + Sync> AnyRecipe for P {
    fn name(&self) -> &'static str {
        Program::name(self)
    }

    fn settings(&mut self) -> Option<&mut Settings> {
        Some(&mut self.images_mut().settings)
    }

    fn folder(&mut self) -> (&mut Option<PathBuf>, &mut SavingArgs) {
        let Settings {
            output_dir, saving, ..
        } = &mut self.images_mut().settings;
        (output_dir, saving)
    }

    fn default_dir(&self) -> Option<&'static str> {
        Program::default_dir(self)
    }

    fn settle(&mut self) -> Result<()> {
        let defaults = self.defaults();
        let images = self.images_mut();
        images.settings.defaults = defaults;
        images.ranks_here = number(&real_env(), "LOCAL_WORLD_SIZE")?;
        Ok(())
    }

    fn validate(&self, world: usize) -> Result<()> {
        self.images().validate(world)?;
        Program::validate(self, world)
    }

    fn speakers(&self) -> Speakers {
        match self.prints_on_all() {
            true => Speakers::Unmarked,
            false => Speakers::Rank0,
        }
    }

    fn run_rank(&self, ctx: &RankContext) -> Result<()> {
        run(ctx, self)
    }
}

/// Who tests the whole test set in a document's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Testers {
    /// Rank 0, while the others wait.
    Rank0,
    /// Every rank, each the whole set.
    Everybody,
}

/// Trains `program` as one rank.
///
/// # Errors
///
/// Anything that ends the training; the kind decides the exit code.
pub fn run<P: Program>(ctx: &RankContext, program: &P) -> Result<()> {
    let args = program.images();
    let settings = &args.settings;
    let starting = ctx.phase("starting");
    program.started(ctx)?;
    prepare::data(ctx, program.fetch(), settings.saving.folder)?;
    let loading = ctx.phase("loading data");
    let data = program.data()?;
    drop(loading);
    program.loaded(ctx)?;
    let lr = program.lr(ctx.world());
    let mut shaping = vec![format!("--exact-validation {}", args.exact_validation)];
    shaping.extend(program.must_agree());
    let builder = TrainerBuilder::new(
        ctx,
        settings,
        program.name(),
        &data.train,
        |scope| program.net(scope),
        |params, lr| program.optimizer(params, lr),
    );
    let mut trainer = builder
        .title(program.title())
        .data(&data.description, &data.content)
        .unit("images")
        .init(|params| program.prepare(params, &data))
        .frozen(program.frozen())
        .lr(lr)
        .optimizer_title(&program.optimizer_title(lr))
        .try_schedule(|lr, steps| program.schedule(lr, steps))
        .drop_last(program.drops_last())
        .shaped_by(shaping)
        .must_agree(vec![
            format!("--log-batches {}", args.log_batches),
            format!("--log-images {}", args.log_images),
        ])
        .files(program.files())
        .reporter(program.reporter())
        .start()?;
    drop(starting);
    trainer.add_to_summary("data", program.data_name());
    let loss = program.loss();
    if trainer.epochs().is_empty() {
        // Resumed after its last epoch.
        evaluate(program, &mut trainer, &data)?;
    }
    for _ in trainer.epochs() {
        for batch in trainer.batches(&data.train)? {
            trainer.step(&batch, |net, batch| {
                let scores = net.forward(batch.images()?)?;
                Ok(loss.of(scores, batch.labels(), batch.samples() as f32)?)
            })?;
        }
        evaluate(program, &mut trainer, &data)?;
    }
    let predictions = {
        let _phase = ctx.phase("saving");
        predictions(program, &mut trainer, &data)?
    };
    trainer.finish_with(|trainer| trainer.save_rows("predictions.jsonl", &predictions))?;
    Ok(())
}

/// Evaluates as the settings say; the same result on all ranks, except under
/// `--exact-validation false` where it is each rank's own (rank 0's on all, if only that one
/// evaluates).
fn evaluate<P: Program>(program: &P, trainer: &mut Trainer<'_, P::Net>, data: &Data) -> Result<()> {
    let ctx = trainer.context();
    let test = &data.test;
    let measure = |net: &P::Net, batch: MicroBatch<'_, ImageBatch>| measure(program, net, batch);
    if program.images().exact_validation {
        trainer.evaluate(test, measure)?;
        return Ok(());
    }
    let _phase = ctx.phase("evaluating");
    trainer.check_weights()?;
    // As the documents' programs have it: the ModelArts one takes the mean of the batches'
    // means, the Flyte one sums the loss over samples.
    let evaluation = match program.testers() {
        Testers::Everybody => {
            let measured = trainer.measure_here(test, measure)?;
            let batches = measured.len().max(1) as f64;
            let means: f64 = measured.iter().map(|m| m.loss / m.samples as f64).sum();
            Evaluation::new(means / batches, confusion(test.classes(), &measured)?)
        }
        Testers::Rank0 => {
            let mut counts = Confusion::new(test.classes());
            let mut loss = [0.0];
            if ctx.is_main() {
                let measured = trainer.measure_here(test, measure)?;
                let sum: f64 = measured.iter().map(|m| m.loss).sum();
                loss = [sum / test.len() as f64];
                counts = confusion(test.classes(), &measured)?;
            }
            // The collective is also the barrier in which the others wait.
            ctx.group.broadcast(&mut loss, 0)?;
            ctx.group.broadcast(counts.counts_mut(), 0)?;
            Evaluation::new(loss[0], counts)
        }
    };
    trainer.record(evaluation)
}

/// The counts of all batches together.
fn confusion(classes: usize, measured: &[Measure]) -> Result<Confusion> {
    let mut all = Confusion::new(classes);
    for counts in measured.iter().filter_map(|m| m.confusion.as_ref()) {
        all.merge(counts)?;
    }
    Ok(all)
}

fn measure<P: Program>(
    program: &P,
    net: &P::Net,
    batch: MicroBatch<'_, ImageBatch>,
) -> Result<Measure> {
    let scores = scores(program, net, batch.step(), &batch.images, batch.shape())?;
    let measure = Measure::of_scores(&scores, batch.labels())?;
    let loss = program.loss().plain().of(scores, batch.labels(), 1.0)?;
    Ok(measure.with_loss(loss))
}

/// The network's answers to images, each also seen in a mirror where the program wants it so.
fn scores<'s, P: Program>(
    program: &P,
    net: &P::Net,
    step: &'s Step<'s>,
    images: &[f32],
    shape: [usize; 4],
) -> Result<Tensor<'s>> {
    let scores = net.forward(step.input(images, &shape)?)?;
    if !program.tests_mirrored() {
        return Ok(scores);
    }
    let [_, h, w, c] = shape;
    let mirrored = mirrored(images, [h, w, c]);
    let other = net.forward(step.input(&mirrored, &shape)?)?;
    Ok(scores.add(other)?.scale(0.5)?)
}

/// One test image and what the network made of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Prediction {
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

/// The first images of each of the first test batches: image, guess, truth
/// and scores. Rank 0 computes them, and no others; nothing elsewhere.
fn predictions<P: Program>(
    program: &P,
    trainer: &mut Trainer<'_, P::Net>,
    data: &Data,
) -> Result<Vec<Prediction>> {
    let mut rows = Vec::new();
    if !trainer.context().is_main() {
        return Ok(rows);
    }
    let args = program.images();
    let (test, batch) = (&data.test, args.settings.test_batch_size);
    let [h, w, c] = test.image_shape();
    let mut pixels = vec![0.0; h * w * c];
    for number in 0..args.log_batches {
        let first = batch.saturating_mul(number).min(test.len());
        let images = args.log_images.min(batch);
        let (mut inputs, mut labels) = (Vec::new(), Vec::new());
        for image in first..first.saturating_add(images).min(test.len()) {
            labels.push(test.read(image, &mut pixels)?);
            inputs.extend_from_slice(&pixels);
        }
        if labels.is_empty() {
            break;
        }
        let shape = [labels.len(), h, w, c];
        let scores =
            trainer.infer(|net, step| Ok(scores(program, net, step, &inputs, shape)?.to_vec()))?;
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
