//! The training flags of every program.

mod attempt;
mod gradient;
mod labels;
mod mesh;
mod precision;
pub(crate) mod saving;
mod split;
mod start;
mod tune;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser as _};
use clap::{Args as _, FromArgMatches as _};
use phalanx_ddp::{BucketCaps, Buffers, DdpOptions, Every, Exchange};
use phalanx_track::TrackArgs;

pub(crate) use self::attempt::{Attempt, restarts_ranks};
pub(crate) use self::gradient::needs_whole;
pub use self::gradient::{ExchangeArg, GradientType};
pub use self::labels::LabelArgs;
pub use self::mesh::{Mesh, MeshArgs};
pub use self::precision::PrecisionArg;
pub(crate) use self::saving::{AUTO, FOLDER, Found, Fresh};
pub use self::saving::{FolderArgs, SaveErrors, SavingArgs};
pub use self::split::{Determinism, SplitArgs};
pub use self::start::Start;
pub use self::tune::TuneArgs;
pub(crate) use self::tune::lora_metadata;
use crate::error::{Error, Result, check_count, refuse};
use crate::format::number;
use crate::{choice_name, lr_finder};

/// The name of the fact that comes first: another program's others differ anyway.
pub(crate) const PROGRAM: &str = "program";

/// The name of the fact that older checkpoints lack.
pub(crate) const GRADIENT_TYPE: &str = "--gradient-type";

/// The name of the fact that a flag can mend.
pub(crate) const GLOBAL_BATCH: &str = "global batch size";

/// Flags of a run that say what it writes, where it continues and where it stops, and not how it trains. A `--config` that is a
/// run does not set them.
pub const OF_ONE_RUN: [&str; 8] = [
    "find-lr",
    "log-samples",
    "output-dir",
    "output-url",
    "overwrite",
    "profile",
    "resume",
    "stop-after",
];

/// Which samples a rank gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SamplerKind {
    /// Each sample exactly once per epoch, for any number of ranks; no padding, no dropping
    Exact,
    /// Like PyTorch's DistributedSampler: repeats samples to pad
    Torch,
}

/// The training flags of every program. Epochs, batch size and learning rate have [`Defaults`]
/// of the program's own, which its help shows.
#[derive(Debug, Clone, clap::Args)]
#[allow(
    rustdoc::invalid_html_tags,
    reason = "doc comments of flags are their help"
)]
pub struct Settings {
    /// Read flags from FILE: one a line, as in `--lr 0.1`, or the run.json of a run; flags of the command line take precedence
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Number of epochs
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,
    /// Stop after N steps, within an epoch if need be; without --epochs, train as many epochs as that takes
    #[arg(long, value_name = "N")]
    pub max_steps: Option<u64>,
    /// Find a learning rate: train for 100 steps (--max-steps) while it rises from 1e-7 to 10, suggest one, and show the loss over it in report.html; no weights are saved
    #[arg(long)]
    pub find_lr: bool,
    /// Evaluate every N steps of an epoch, besides at its end
    #[arg(long, value_name = "N")]
    pub eval_every: Option<usize>,
    /// Train on the first N samples only
    #[arg(long, value_name = "N")]
    pub limit_train: Option<usize>,
    /// Evaluate on the first N samples only
    #[arg(long, value_name = "N")]
    pub limit_test: Option<usize>,
    /// Samples per rank and step
    #[arg(long, value_name = "N")]
    pub batch_size: Option<usize>,
    /// Samples per step over all ranks, instead of --batch-size per rank
    #[arg(long, value_name = "N", conflicts_with = "batch_size")]
    pub global_batch_size: Option<usize>,
    /// Samples per rank and step in evaluation
    #[arg(long, default_value_t = 500, value_name = "N")]
    pub test_batch_size: usize,
    /// Learning rate
    #[arg(long, visible_alias = "learning-rate")]
    pub lr: Option<f64>,
    /// Seed for weights, shuffling, dropout, augmentation and synthetic data
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Initial weights: `torch` for the bits PyTorch draws from this --seed, a file (.pth, .safetensors, a checkpoint's .json, the .index.json of a model in several files), or a run folder (its last weights)
    #[arg(long, default_value = "torch", value_parser = PathBufValueParser::new().map(Start::from), value_name = "torch|FILE|DIR")]
    pub init: Start,
    #[command(flatten)]
    #[allow(missing_docs, reason = "a doc comment would be its help")]
    pub tune: TuneArgs,
    /// How samples are divided among ranks
    #[arg(long, value_enum, default_value_t = SamplerKind::Exact)]
    pub sampler: SamplerKind,
    /// Leave out the last batch of an epoch where it is short, as PyTorch's DataLoader(drop_last=True) does
    #[arg(long)]
    pub drop_last: bool,
    /// Print the loss every N steps, if the program prints losses
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub log_interval: usize,
    /// Size of a gradient bucket in MiB [default: 4 on one host, 8 across hosts; 1 for the first and last bucket]
    #[arg(long, value_name = "MIB")]
    pub bucket_cap_mb: Option<f64>,
    /// Gradient synchronization: all-reduce, reduce-scatter, or inside the optimizer step; the results are bit-identical
    #[arg(long, value_enum, default_value_t = ExchangeArg::Auto)]
    pub exchange: ExchangeArg,
    /// Data type of the inputs of convolutions and linear layers, and of stored activations; weights and sums are
    /// always fp32
    #[arg(long, value_enum, default_value_t = PrecisionArg::Fp32)]
    pub precision: PrecisionArg,
    /// Data type of gradients in their exchange
    #[arg(long, value_enum, default_value_t = GradientType::F32)]
    pub gradient_type: GradientType,
    #[command(flatten)]
    #[allow(missing_docs, reason = "a doc comment would be its help")]
    pub split: SplitArgs,
    /// Data loader threads per rank
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub workers: usize,
    #[command(flatten)]
    #[allow(missing_docs, reason = "a doc comment would be its help")]
    pub saving: SavingArgs,
    /// Stop at the first NaN or infinity with an error that names its operation; steps take longer
    #[arg(long)]
    pub anomaly: bool,
    /// Log histograms of parameters and gradients every N steps; 0: never
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub watch: usize,
    /// Append the indices of each step's samples to FILE.<rank>.jsonl; a resumed run first removes the steps it will
    /// repeat
    #[arg(long, value_name = "FILE")]
    pub log_samples: Option<PathBuf>,
    /// Folder for metrics, summary and weights; with --resume PATH, the resumed run's folder [default: runs/PROGRAM-<date>-<time>]
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// Profile steps 3 to 12: print the time of operations and layers, and write a Chrome trace of operations and communication per rank to FILE.<rank>.json
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "a doc comment would be its help")]
    pub track: TrackArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "a doc comment would be its help")]
    pub labels: LabelArgs,
    /// What holds where nothing was typed.
    #[arg(skip)]
    pub defaults: Defaults,
}

/// A program's own values of settings that were not typed. Its recipe may decide
/// them, so that the parser cannot.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Defaults {
    /// `--epochs`.
    pub epochs: usize,
    /// `--batch-size`.
    pub batch_size: usize,
    /// `--lr`.
    pub lr: f64,
    /// `--max-steps`, where `--epochs` is not typed either.
    pub max_steps: Option<u64>,
    /// `--eval-every`.
    pub eval_every: Option<usize>,
}

impl Defaults {
    /// `--epochs`, `--batch-size` and `--lr`.
    pub const fn new(epochs: usize, batch_size: usize, lr: f64) -> Defaults {
        Defaults {
            epochs,
            batch_size,
            lr,
            max_steps: None,
            eval_every: None,
        }
    }

    /// `--max-steps`, for a program that counts steps instead of epochs. It applies where `--epochs` is not typed either.
    pub const fn max_steps(mut self, steps: u64) -> Defaults {
        self.max_steps = Some(steps);
        self
    }

    /// `--eval-every`.
    pub const fn eval_every(mut self, steps: usize) -> Defaults {
        self.eval_every = Some(steps);
        self
    }
}

impl Default for Defaults {
    /// Those of `train mnist`.
    fn default() -> Defaults {
        Defaults::new(3, 64, 0.05)
    }
}

/// A usage error unless `lr` is a number from 0 up.
///
/// # Errors
///
/// That one.
pub fn check_lr(lr: f64) -> Result<()> {
    if lr.is_finite() && lr >= 0.0 {
        Ok(())
    } else {
        Err(Error::usage("--lr must be a number from 0 up"))
    }
}

/// Samples of one step; a million images of 28 x 28 are 3 GB.
const MAX_BATCH: usize = 1 << 20;

impl Settings {
    /// Those of a command line without flags, for programs that have other flags.
    ///
    /// # Errors
    ///
    /// None, unless a default is not a value of its flag.
    pub fn untyped() -> Result<Settings> {
        let command = Settings::augment_args(clap::Command::new("phalanx"));
        let matches = command.try_get_matches_from(["phalanx"]);
        let settings = matches.and_then(|matches| Settings::from_arg_matches(&matches));
        settings.map_err(|e| Error::usage(e.to_string().trim_start_matches("error: ").trim()))
    }

    /// Number of epochs.
    pub fn epochs(&self) -> usize {
        self.epochs.unwrap_or(self.defaults.epochs)
    }

    /// The steps after which the training ends, if these are limited.
    pub fn max_steps(&self) -> Option<u64> {
        let default = match self.find_lr {
            true => Some(lr_finder::STEPS),
            false => self.defaults.max_steps,
        };
        match self.typed_epochs() {
            None => self.max_steps.or(default),
            Some(_) => self.max_steps,
        }
    }

    /// Epochs, if their number was typed and matters.
    pub(crate) fn typed_epochs(&self) -> Option<usize> {
        self.epochs.filter(|_| !self.find_lr)
    }

    /// Steps between two evaluations in an epoch, if there are any.
    pub fn eval_every(&self) -> Option<usize> {
        let every = self.eval_every.or(self.defaults.eval_every);
        every.filter(|_| !self.find_lr)
    }

    /// Samples per rank and step, unless the global batch is given.
    pub fn batch_size(&self) -> usize {
        self.batch_size.unwrap_or(self.defaults.batch_size)
    }

    /// Learning rate.
    pub fn lr(&self) -> f64 {
        self.lr.unwrap_or(self.defaults.lr)
    }

    /// Samples of a training set of `samples` that are trained on.
    pub(crate) fn limited_train(&self, samples: usize) -> usize {
        self.limit_train.map_or(samples, |limit| samples.min(limit))
    }

    /// Samples of a test set of `samples` that are evaluated.
    pub(crate) fn limited_test(&self, samples: usize) -> usize {
        match self.find_lr {
            // The result is not used.
            true => samples.min(1),
            false => self.limit_test.map_or(samples, |limit| samples.min(limit)),
        }
    }

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self, world: usize) -> Result<()> {
        // The largest are far above any use; beyond them memory or arithmetic
        // would give out in less clear words.
        let counts = [
            ("--epochs", self.epochs(), usize::MAX),
            ("--batch-size", self.batch_size(), MAX_BATCH),
            ("--test-batch-size", self.test_batch_size, MAX_BATCH),
            ("--log-interval", self.log_interval, usize::MAX),
            ("--workers", self.workers, 64),
            ("--eval-every", self.eval_every().unwrap_or(1), usize::MAX),
            ("--limit-train", self.limit_train.unwrap_or(1), usize::MAX),
            ("--limit-test", self.limit_test.unwrap_or(1), usize::MAX),
            (
                "--max-steps",
                self.max_steps().unwrap_or(1) as usize,
                usize::MAX,
            ),
            (
                "--global-batch-size",
                self.global_batch_size.unwrap_or(1),
                MAX_BATCH,
            ),
        ];
        for (flag, value, largest) in counts {
            check_count(flag, value, largest)?;
        }
        if let Some(file) = &self.profile {
            check_folder_of("--profile", file)?;
        }
        self.exchange.validate(self)?;
        self.saving.validate(self.output_dir.is_some())?;
        self.track.validate()?;
        self.tune.validate(matches!(self.init, Start::File(_)))?;
        // `auto` may find no checkpoint: a script that is started again says both.
        if matches!(self.init, Start::File(_)) && self.saving.resumed_path().is_some() {
            refuse!(
                "--resume restores the checkpoint's weights, so --init has no effect; remove one of them"
            );
        }
        if self.find_lr && self.saving.enabled() {
            refuse!(
                "--find-lr saves no checkpoints; remove --save-every, --resume and --stop-after"
            );
        }
        if let (true, Some(steps @ ..lr_finder::LEAST_STEPS)) = (self.find_lr, self.max_steps) {
            refuse!(
                "--find-lr needs at least {} steps, and --max-steps is {steps}",
                lr_finder::LEAST_STEPS
            );
        }
        check_lr(self.lr())?;
        if self
            .bucket_cap_mb
            .is_some_and(|cap| !(cap.is_finite() && cap > 0.0))
        {
            refuse!("--bucket-cap-mb must be above 0");
        }
        if let Some(global) = self.global_batch_size {
            if global < world {
                refuse!(
                    "--global-batch-size {global} leaves some of the {world} ranks without a sample; use at least {world}"
                );
            }
            if self.sampler == SamplerKind::Torch && !global.is_multiple_of(world) {
                refuse!(
                    "--sampler torch gives every rank the same batch size, and --global-batch-size {global} is not \
                     divisible by {world} ranks; use --sampler exact or another size"
                );
            }
        }
        self.split.validate(
            world,
            self.global_batch_size,
            self.global_batch(world),
            self.sampler == SamplerKind::Torch,
        )?;
        if self.split.determinism() == Determinism::Shards
            && self.gradient_type != GradientType::F32
        {
            refuse!("--deterministic shards adds gradients as they are; leave out --gradient-type");
        }
        Ok(())
    }

    /// Checks that batch norms can take the statistics of all ranks' samples.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn check_sync_batch_norm(&self) -> Result<()> {
        match self.split.determinism() {
            Determinism::Shards => refuse!(
                "--deterministic shards takes the batch norm statistics of each shard, and synchronized batch norms those of all \
                 ranks; leave out one of them"
            ),
            _ => Ok(()),
        }
    }

    /// Checks that the training can continue when ranks are lost or join.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn check_elastic(&self) -> Result<()> {
        let why = match self.sampler {
            _ if self.find_lr => "cannot be used with --find-lr; remove one of them",
            SamplerKind::Torch => {
                "divides every batch among the ranks that are left; use --sampler exact"
            }
            _ => return Ok(()),
        };
        Err(Error::usage(format!("--elastic {why}")))
    }

    /// Samples of a step over all ranks.
    pub fn global_batch(&self, world: usize) -> usize {
        self.global_batch_size.unwrap_or(self.batch_size() * world)
    }

    /// Steps between two records of the loss in a training of `steps` steps. Few enough for a curve, and enough that
    /// writing them takes no noticeable time. The loss of a batch that is cut into shards needs a collective.
    pub fn record_interval(&self, steps: u64) -> usize {
        let points = match self.split.determinism() {
            Determinism::Shards => 50,
            Determinism::Ranks | Determinism::Off => 1000,
        };
        (steps as usize / points).clamp(1, self.log_interval)
    }

    /// The wrapper's options. Running statistics become the mean of all ranks'
    /// at the end of each epoch, before they are used.
    ///
    /// # Errors
    ///
    /// Usage, when there can be no such number of shards.
    pub fn ddp_options(
        &self,
        exchange: Exchange,
        must_agree: Vec<String>,
        frozen: Vec<String>,
    ) -> Result<DdpOptions> {
        Ok(DdpOptions {
            caps: self
                .bucket_cap_mb
                .map(|mib| BucketCaps::uniform((mib * f64::from(1 << 20)) as usize)),
            deterministic: self.split.deterministic()?,
            buffers: Buffers::Mean(Every::Epoch),
            exchange,
            frozen,
            must_agree,
            ..DdpOptions::default()
        })
    }

    /// What a resumed run must share with the one that was saved.
    pub fn resumable(&self, program: &str, data: &str, world: usize) -> BTreeMap<String, String> {
        let mut more = vec![
            ("data", data.to_owned()),
            ("--seed", self.seed.to_string()),
            ("--sampler", choice_name(&self.sampler)),
            (GRADIENT_TYPE, choice_name(&self.gradient_type)),
        ];
        if self.split.determinism() == Determinism::Shards {
            more.push(("--shards", self.split.shards().to_string()));
        }
        more.push((PROGRAM, program.to_owned()));
        more.push((GLOBAL_BATCH, self.global_batch(world).to_string()));
        let more = more.into_iter();
        more.map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// What must be the same on all ranks, a fact a line, so that a difference
    /// names just the flag. A new flag is named here, whether or not it is compared: it must be where a rank
    /// takes part in a collective only if the flag says so.
    pub fn must_agree(&self) -> Vec<String> {
        let Settings {
            // In `shaping`.
            epochs: _,
            max_steps: _,
            find_lr: _,
            eval_every: _,
            drop_last: _,
            limit_test: _,
            // In what the data set is called.
            limit_train: _,
            lr: _,
            precision: _,
            split: _,
            tune: _,
            batch_size: _,
            global_batch_size,
            test_batch_size,
            seed,
            sampler,
            log_interval,
            exchange,
            watch,
            gradient_type,
            saving,
            bucket_cap_mb,
            // Each host may have the file in another place.
            init,
            // What they come to is compared.
            defaults: _,
            // Of each rank or host.
            anomaly: _,
            config: _,
            workers: _,
            track: _,
            labels: _,
            log_samples: _,
            output_dir: _,
            profile: _,
        } = self;
        let batch = match global_batch_size {
            Some(global) => format!("--global-batch-size {global}"),
            None => format!("--batch-size {}", self.batch_size()),
        };
        let mut facts = vec![
            batch,
            format!("--seed {seed}"),
            format!("--sampler {}", choice_name(sampler)),
            format!("--test-batch-size {test_batch_size}"),
            format!("--log-interval {log_interval}"),
            format!("--gradient-type {}", choice_name(gradient_type)),
            format!("--exchange {}", choice_name(exchange)),
            format!("--watch {watch}"),
            format!("--shards {}", self.split.shards()),
        ];
        facts.push(match init {
            Start::Torch => "no --init".to_owned(),
            Start::File(_) => "--init FILE".to_owned(),
        });
        facts.push(match bucket_cap_mb {
            Some(mib) => format!("--bucket-cap-mb {mib}"),
            None => "no --bucket-cap-mb".to_owned(),
        });
        facts.extend(self.shaping());
        facts.extend(saving.must_agree());
        facts
    }

    /// Settings that each rank may have its own of, by name, for those who read about the run.
    pub(crate) fn of_each_rank(&self) -> BTreeMap<String, String> {
        let bucket = self
            .bucket_cap_mb
            .map_or("default".to_owned(), |cap| cap.to_string());
        let mut all = vec![
            ("--workers", self.workers.to_string()),
            ("--bucket-cap-mb", bucket),
        ];
        if let Start::File(path) = &self.init {
            all.push(("--init", path.display().to_string()));
        }
        let all = all.into_iter();
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// What shapes the training besides what a resumed run must share with the one that
    /// was saved: a flag and its value a line.
    pub fn shaping(&self) -> Vec<String> {
        let limits = [
            ("--max-steps", self.max_steps()),
            ("--eval-every", self.eval_every().map(|n| n as u64)),
            ("--limit-test", self.limit_test.map(|n| n as u64)),
        ];
        let limits = limits.map(|(flag, n)| match n {
            Some(n) => format!("{flag} {n}"),
            None => format!("{flag} none"),
        });
        let epochs = match (self.typed_epochs(), self.max_steps()) {
            // As many as that takes.
            (None, Some(_)) => "none".to_owned(),
            _ => self.epochs().to_string(),
        };
        let mut shaping = vec![
            format!("--epochs {epochs}"),
            format!("--lr {}", number(self.lr())),
            format!("--precision {}", self.precision.title()),
            format!("--accumulate {}", self.split.accumulate),
            format!("--deterministic {}", choice_name(&self.split.determinism())),
            format!("--drop-last {}", self.drop_last),
        ];
        shaping.extend(limits);
        shaping.extend(self.tune.shaping());
        if self.find_lr {
            shaping.push("--find-lr true".to_owned());
        }
        shaping
    }
}

/// Flags and values, one of each a line, as facts.
pub fn settings(lines: &[String]) -> BTreeMap<String, String> {
    let pairs = lines.iter().filter_map(|line| line.split_once(' '));
    pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

/// A usage error unless the folder is there that `file`, the value of `flag`, goes into.
///
/// # Errors
///
/// That.
pub fn check_folder_of(flag: &str, file: &Path) -> Result<()> {
    let wrong = |why: String| Err(Error::usage(format!("{flag} {}: {why}", file.display())));
    match file.parent() {
        _ if file.is_dir() => wrong("it is a folder; name a file in it".to_owned()),
        Some(folder) if !folder.as_os_str().is_empty() && !folder.is_dir() => {
            wrong(format!("there is no folder {}", folder.display()))
        }
        _ => Ok(()),
    }
}
