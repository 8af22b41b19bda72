//! What one image program has that others have not, and how all of them are trained.

use std::path::PathBuf;
use std::sync::Arc;

use phalanx_data::augment::Augmentation;
use phalanx_data::metrics::Confusion;
use phalanx_data::{ImageBatch, ImageDataset};
use phalanx_launch::Speakers;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::{Params, Scope, Step, Tensor};
use phalanx_train::{
    Defaults, Determinism, Evaluation, Files, Measure, MicroBatch, RankContext, Reporter,
    SavingArgs, Settings, Trainer, TrainerBuilder,
};

use super::net::{Loss, Net, Network, Pixels};
use super::predictions::Predictions;
use super::prepare::{self, Fetch};
use crate::AnyRecipe;
use crate::error::{Error, Result, check_count};
use phalanx_train::choice_name;

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

/// Arguments of every image program.
#[derive(Debug, Clone, clap::Args)]
pub struct ImageArgs {
    #[command(flatten)]
    pub settings: Settings,
    /// Divide the test set among all ranks, each sample once; `false`: evaluate as the recipe's source document does
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, value_name = "true|false")]
    pub exact_validation: bool,
    /// Number of test batches whose predictions are written to predictions.jsonl
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub log_batches: usize,
    /// Images written per logged batch
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub log_images: usize,
}

impl ImageArgs {
    /// `--deterministic`.
    pub fn determinism(&self) -> Determinism {
        self.settings.split.determinism()
    }

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self, world: usize) -> Result<()> {
        self.settings.validate(world)?;
        if self.determinism() == Determinism::Shards && !self.exact_validation {
            return Err(Error::usage(
                "--exact-validation false tests in an order of its own; leave it out with --deterministic shards",
            ));
        }
        Ok(())
    }
}

/// Checks `--synthetic-samples`, which only synthetic data has.
///
/// # Errors
///
/// Usage, naming the flag.
pub fn check_synthetic_samples(
    samples: Option<usize>,
    data: &str,
    is_synthetic: bool,
) -> Result<()> {
    check_count("--synthetic-samples", samples.unwrap_or(1), 100_000_000)?;
    if samples.is_some() && !is_synthetic {
        return Err(Error::usage(format!(
            "--synthetic-samples requires --data synthetic, not {data}"
        )));
    }
    Ok(())
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

/// Where the images of a program come from: its flags about data.
pub trait Source {
    /// As the user typed it, for the summary.
    fn name(&self) -> String;

    /// How the data is downloaded first, where it may be missing.
    fn fetch(&self) -> Option<Fetch>;

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag or the folder.
    fn validate(&self) -> Result<()>;

    /// Settings that must be the same on all ranks, a flag and its value a line.
    fn must_agree(&self) -> Vec<String>;

    /// Reads or makes the data.
    ///
    /// # Errors
    ///
    /// Usage or data, naming folder or file.
    fn load(&self, seed: u64, preparation: Preparation) -> Result<Data>;

    /// Whether batch norms take the statistics of all ranks, where its programs have batch norms.
    fn sync_batch_norm(&self) -> bool {
        false
    }
}

/// What is done to images before they are trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preparation {
    /// What bytes become.
    pub pixels: Pixels,
    /// What changes from epoch to epoch.
    pub augmentation: Option<Augmentation>,
}

/// How a program trains, tests and saves.
pub struct Spec {
    /// What is done to its images.
    pub preparation: Preparation,
    /// What is minimized.
    pub loss: Loss,
    /// Parameters that are not trained, by name.
    pub frozen: Vec<String>,
    /// Whether validation also looks at each image mirrored, and adds the scores.
    pub tests_mirrored: bool,
    /// Whether `--sampler torch` drops a last batch that is short.
    pub drops_last: bool,
    /// Which ranks test under `--exact-validation false`.
    pub testers: Testers,
}

impl Spec {
    /// The network's pixels and loss; images as they are, all parameters, all samples.
    pub fn new(network: &Network) -> Spec {
        Spec {
            preparation: Preparation {
                pixels: network.pixels,
                augmentation: None,
            },
            loss: network.loss,
            frozen: Vec::new(),
            tests_mirrored: network.mirrored,
            drops_last: false,
            testers: Testers::Rank0,
        }
    }
}

/// What a program prints on standard output.
pub trait Lines: Reporter {
    /// Which ranks print.
    fn speakers(&self) -> Speakers {
        Speakers::Rank0
    }

    /// The ranks have met; data is not loaded yet.
    ///
    /// # Errors
    ///
    /// Those of writing to standard output; so for all of these.
    fn started(&mut self, _ctx: &RankContext) -> Result<()> {
        Ok(())
    }

    /// The data is loaded.
    ///
    /// # Errors
    ///
    /// As [`started`](Self::started).
    fn loaded(&mut self, _ctx: &RankContext) -> Result<()> {
        Ok(())
    }
}

/// A program of `phalanx train` that classifies images.
pub trait Program {
    /// Its network.
    type Net: Net;

    /// What it is called at the command line.
    const NAME: &'static str;

    /// Its network, for all commands.
    const NETWORK: Network;

    /// Epochs, batch size and learning rate where none are typed, for the help.
    const DEFAULTS: Defaults;

    /// The same with another value of a flag, which is named.
    const OTHER_DEFAULTS: Option<(&'static str, Defaults)> = None;

    /// The folder of a run without `--output-dir`; none for a new one for each run.
    const DEFAULT_DIR: Option<&'static str> = None;

    /// The flags that every program has.
    fn images(&self) -> &ImageArgs;

    /// The same, to be changed.
    fn images_mut(&mut self) -> &mut ImageArgs;

    /// Its flags about data, and about batch norms.
    fn source(&self) -> &dyn Source;

    /// The files it writes; the model's name in them is the network's.
    fn files(&self) -> Files {
        Files {
            weights: Some(format!("{}.safetensors", Self::NETWORK.model)),
            ..Files::default()
        }
    }

    /// How it trains, tests and saves.
    fn spec(&self) -> Spec;

    /// Epochs, batch size and learning rate where none are typed.
    fn defaults(&self) -> Defaults {
        Self::DEFAULTS
    }

    /// Checks its own flags before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    fn validate(&self) -> Result<()> {
        Ok(())
    }

    /// Settings of its own that must be the same on all ranks, a flag and its value a line.
    /// Those that differ from a checkpoint's are told.
    fn must_agree(&self) -> Vec<String> {
        Vec::new()
    }

    /// Registers its parameters.
    fn net(&self, scope: &mut Scope) -> Self::Net;

    /// Sets parameters that start otherwise than registered. Rank 0's are
    /// everybody's afterwards.
    ///
    /// # Errors
    ///
    /// Those of reading samples.
    fn initialise(&self, _params: &mut Params, _data: &Data) -> Result<()> {
        Ok(())
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

    /// What it prints.
    fn lines(&self) -> Box<dyn Lines>;

    /// Trains as one rank.
    ///
    /// # Errors
    ///
    /// Anything that ends the training; the kind decides the exit code.
    fn train(&self, ctx: &RankContext) -> Result<()>
    where
        Self: Sized,
    {
        run(ctx, self)
    }
}

/// [`Program::images`], [`Program::images_mut`] and [`Program::source`] of a struct with the fields `images` and
/// `$source`.
macro_rules! fields {
    ($source:ident) => {
        fn images(&self) -> &ImageArgs {
            &self.images
        }

        fn images_mut(&mut self) -> &mut ImageArgs {
            &mut self.images
        }

        fn source(&self) -> &dyn Source {
            &self.$source
        }
    };
}
pub(crate) use fields;

impl<P: Program + Send + Sync + std::fmt::Debug> AnyRecipe for P {
    fn name(&self) -> &'static str {
        P::NAME
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
        P::DEFAULT_DIR
    }

    fn settle(&mut self) {
        self.images_mut().settings.defaults = self.defaults();
    }

    fn validate(&self, world: usize) -> Result<()> {
        self.images().validate(world)?;
        if self.source().sync_batch_norm() {
            self.images().settings.check_sync_batch_norm()?;
        }
        Program::validate(self)?;
        self.source().validate()
    }

    fn speakers(&self) -> Speakers {
        self.lines().speakers()
    }

    fn run_rank(&self, ctx: &RankContext) -> Result<()> {
        self.train(ctx)
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

/// Downloads and loads the data of `program`.
///
/// # Errors
///
/// Usage or data, naming folder or file.
pub fn load<P: Program>(ctx: &RankContext, program: &P, lines: &mut dyn Lines) -> Result<Data> {
    let (settings, source) = (&program.images().settings, program.source());
    lines.started(ctx)?;
    prepare::data(ctx, source.fetch(), settings.saving.folder)?;
    let loading = ctx.phase("loading data");
    let data = source.load(settings.seed, program.spec().preparation)?;
    drop(loading);
    lines.loaded(ctx)?;
    Ok(data)
}

/// The files of `program`, with what `phalanx predict` must know of the weights.
pub fn files<P: Program>(program: &P, data: &Data) -> Files {
    let (mut files, spec) = (program.files(), program.spec());
    files.model = P::NETWORK.model.to_owned();
    if data.train.image_shape()[2] > 1 {
        // `phalanx predict` looks at images as validation did.
        files
            .about
            .push(("pixels", choice_name(&spec.preparation.pixels)));
        if spec.tests_mirrored {
            files.about.push(("mirrored", "true".into()));
        }
    }
    files
}

/// Settings of `program` that shape the training, a flag and its value a line.
pub fn shaping<P: Program>(program: &P) -> Vec<String> {
    let exact = program.images().exact_validation;
    let mut shaping = vec![format!("--exact-validation {exact}")];
    shaping.extend(program.source().must_agree());
    shaping.extend(program.must_agree());
    shaping
}

/// Trains `program` as one rank with DDP.
///
/// # Errors
///
/// Anything that ends the training; the kind decides the exit code.
pub fn run<P: Program>(ctx: &RankContext, program: &P) -> Result<()> {
    let (args, source) = (program.images(), program.source());
    let (settings, spec) = (&args.settings, program.spec());
    let mut lines = program.lines();
    let starting = ctx.phase("starting");
    let data = load(ctx, program, &mut *lines)?;
    let lr = program.lr(ctx.world());
    let builder = TrainerBuilder::new(
        ctx,
        settings,
        P::NAME,
        &data.train,
        |scope| program.net(scope),
        |params, lr| program.optimizer(params, lr),
    );
    let builder = match source.sync_batch_norm() {
        true => builder.sync_batch_norm(),
        false => builder,
    };
    let mut trainer = builder
        .title(P::NETWORK.title)
        .data(&data.description, &data.content)
        .unit("images")
        .init(|params| program.initialise(params, &data))
        .frozen(spec.frozen.clone())
        .lr(lr)
        .optimizer_title(&program.optimizer_title(lr))
        .try_schedule(|lr, steps| program.schedule(lr, steps))
        .drop_last(spec.drops_last)
        .shaped_by(shaping(program))
        .must_agree(vec![
            format!("--log-batches {}", args.log_batches),
            format!("--log-images {}", args.log_images),
        ])
        .files(files(program, &data))
        .reporter(lines)
        .start()?;
    drop(starting);
    trainer.add_to_summary("data", source.name());
    let names = data.test.class_names();
    if !names.is_empty() {
        trainer.add_to_summary("classes", names);
    }
    let loss = spec.loss;
    let mut predictions = Predictions::of(&trainer)?;
    if trainer.epochs().is_empty() && trainer.last_evaluation().loss.is_nan() {
        // Resumed after its last epoch, from an older checkpoint, which does not have its evaluation.
        evaluate(args, &spec, &mut trainer, &data)?;
    }
    for epoch in trainer.epochs() {
        for batch in trainer.batches(&data.train)? {
            trainer.step(&batch, |net, batch| {
                let scores = net.forward(batch.images()?)?;
                Ok(loss.of(scores, batch.labels(), batch.samples() as f32)?)
            })?;
        }
        evaluate(args, &spec, &mut trainer, &data)?;
        predictions.add(epoch, args, &spec, &mut trainer, &data.test)?;
    }
    trainer.finish()?;
    Ok(())
}

/// Evaluates as the settings say; the same result on all ranks, except under
/// `--exact-validation false` where it is each rank's own (rank 0's on all, if only that one
/// evaluates).
fn evaluate<N: Net>(
    args: &ImageArgs,
    spec: &Spec,
    trainer: &mut Trainer<'_, N>,
    data: &Data,
) -> Result<()> {
    let ctx = trainer.context();
    let test = &data.test;
    let measure = |net: &N, batch: MicroBatch<'_, ImageBatch>| measure(spec, net, batch);
    if args.exact_validation {
        trainer.evaluate(test, measure)?;
        return Ok(());
    }
    let _phase = ctx.phase("evaluating");
    trainer.check_weights()?;
    // As the documents' programs have it: the ModelArts one takes the mean of the batches'
    // means, the Flyte one sums the loss over samples.
    let evaluation = match spec.testers {
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

fn measure(spec: &Spec, net: &dyn Net, batch: MicroBatch<'_, ImageBatch>) -> Result<Measure> {
    let scores = scores(spec, net, batch.step(), &batch.images, batch.shape())?;
    let measure = Measure::of_scores(&scores, batch.labels())?;
    let loss = spec.loss.plain().of(scores, batch.labels(), 1.0)?;
    Ok(measure.with_loss(loss))
}

/// The network's answers to images, each also seen in a mirror where the program wants it so.
pub fn scores<'s>(
    spec: &Spec,
    net: &dyn Net,
    step: &'s Step<'s>,
    images: &[f32],
    shape: [usize; 4],
) -> Result<Tensor<'s>> {
    let scores = net.forward(step.input(images, &shape)?)?;
    if !spec.tests_mirrored {
        return Ok(scores);
    }
    let [_, h, w, c] = shape;
    let mirrored = mirrored(images, [h, w, c]);
    let other = net.forward(step.input(&mirrored, &shape)?)?;
    Ok(scores.add(other)?.scale(0.5)?)
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
