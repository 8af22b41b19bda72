//! `phalanx train`: recipes, and how their ranks come to be.

mod cifar;
mod linear;
mod mnist;
mod mobilenetv2;
mod modelarts;
mod prepare;
mod program;
mod resnet18;
mod resnet9;
mod whiten;

use std::path::PathBuf;

use phalanx_launch::{AlgorithmArg, RankArgs, Speakers};
use phalanx_train::{DefaultDir, RankContext, SavingArgs, Settings, prepare_run};

use crate::error::{Error, Result};
use crate::launch;

pub use program::{Net, mirrored};

/// Arguments of `phalanx train`.
#[derive(Debug, clap::Args)]
pub struct TrainArgs {
    #[command(subcommand)]
    recipe: Recipe,
}

#[derive(Debug, clap::Subcommand)]
enum Recipe {
    /// The OneFlow document's linear model: two weights, 500 steps
    #[command(mut_arg("save_every", |a| a.help("Save a resumable checkpoint every N steps, at the end, and on SIGTERM (exit code 130) or SIGUSR1, which stop the training")))]
    Linear {
        #[command(flatten)]
        args: linear::LinearArgs,
        #[command(flatten)]
        ranks: RankArgs,
    },
    /// PyTorch's basic MNIST CNN on MNIST, Fashion-MNIST or synthetic digits
    #[command(
        mut_arg("epochs", |a| a.help("Number of epochs [default: 3]")),
        mut_arg("batch_size", |a| a.help("Samples per rank and step [default: 64]")),
        mut_arg("lr", |a| a.help("Learning rate [default: 0.05]")),
        mut_arg("synthetic_samples", |a| a.help("Number of synthetic training samples; the test set has a sixth as many [default: 60000]"))
    )]
    Mnist {
        #[command(flatten)]
        args: Box<mnist::MnistArgs>,
        #[command(flatten)]
        ranks: RankArgs,
    },
    /// The ModelArts document's ResNet-18 on CIFAR-10; --recipe fast for few epochs
    #[command(
        mut_arg("epochs", |a| a.help("Number of epochs [default: 100; --recipe fast: 6]")),
        mut_arg("batch_size", |a| a.help("Samples per rank and step [default: 128; --recipe fast: 64]")),
        mut_arg("lr", |a| a.help("Learning rate [default: 0.01; --recipe fast: 0.1]")),
        mut_arg("output_dir", |a| a.help("Folder for metrics, summary and weights; with --resume PATH, the resumed run's folder [default: output_dir]")),
        mut_arg("synthetic_samples", |a| a.help("Number of synthetic training samples; the test set has a sixth as many [default: 50000]"))
    )]
    Resnet18 {
        #[command(flatten)]
        args: Box<resnet18::Resnet18Args>,
        #[command(flatten)]
        ranks: RankArgs,
    },
    /// ResNet-9 on CIFAR-10, as in the training-speed records: 80 % accuracy within minutes
    #[command(
        mut_arg("epochs", |a| a.help("Number of epochs [default: 3]")),
        mut_arg("batch_size", |a| a.help("Samples per rank and step [default: 128]")),
        mut_arg("lr", |a| a.help("Highest learning rate, for a global batch of 256 [default: 0.4]")),
        mut_arg("synthetic_samples", |a| a.help("Number of synthetic training samples; the test set has a sixth as many [default: 50000]"))
    )]
    Resnet9 {
        #[command(flatten)]
        args: Box<resnet9::Resnet9Args>,
        #[command(flatten)]
        ranks: RankArgs,
    },
    /// The OneFlow document's MobileNetV2 on CIFAR-10
    #[command(
        mut_arg("epochs", |a| a.help("Number of epochs [default: 1]")),
        mut_arg("batch_size", |a| a.help("Samples per rank and step [default: 64]")),
        mut_arg("lr", |a| a.help("Learning rate [default: 0.001]")),
        mut_arg("synthetic_samples", |a| a.help("Number of synthetic training samples; the test set has a sixth as many [default: 50000]"))
    )]
    Mobilenetv2 {
        #[command(flatten)]
        args: Box<mobilenetv2::MobilenetArgs>,
        #[command(flatten)]
        ranks: RankArgs,
    },
}

impl TrainArgs {
    /// Lets what was typed about ranks decide what nobody typed about the training.
    ///
    /// # Errors
    ///
    /// Usage, when the two contradict each other.
    fn settle(&mut self) -> Result<()> {
        let (settings, ranks) = match &mut self.recipe {
            Recipe::Linear { .. } => return Ok(()),
            Recipe::Mnist { args, ranks } => (&mut args.images.settings, ranks),
            Recipe::Resnet18 { args, ranks } => (&mut args.images.settings, ranks),
            Recipe::Resnet9 { args, ranks } => (&mut args.images.settings, ranks),
            Recipe::Mobilenetv2 { args, ranks } => (&mut args.images.settings, ranks),
        };
        match ranks.algorithm {
            AlgorithmArg::Fastest => settings.split.allow_any_order(),
            _ => Ok(()),
        }
    }

    /// Checks that this training can be run with each of these numbers of workers, and gives the recipe's name.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub(crate) fn check_comparable(&mut self, worlds: &[usize]) -> Result<&'static str> {
        self.settle()?;
        type Check<'a> = Box<dyn Fn(usize) -> Result<()> + 'a>;
        let (name, settings, ranks, check): (_, _, _, Check<'_>) = match &self.recipe {
            Recipe::Linear { .. } => {
                return Err(Error::usage(
                    "train linear has no accuracy to compare; choose another recipe",
                ));
            }
            Recipe::Mnist { args, ranks } => (
                "mnist",
                &args.images.settings,
                ranks,
                Box::new(|world| mnist::validate(args, world)),
            ),
            Recipe::Resnet18 { args, ranks } => (
                "resnet18",
                &args.images.settings,
                ranks,
                Box::new(|world| resnet18::validate(args, world)),
            ),
            Recipe::Resnet9 { args, ranks } => (
                "resnet9",
                &args.images.settings,
                ranks,
                Box::new(|world| resnet9::validate(args, world)),
            ),
            Recipe::Mobilenetv2 { args, ranks } => (
                "mobilenetv2",
                &args.images.settings,
                ranks,
                Box::new(|world| mobilenetv2::validate(args, world)),
            ),
        };
        if settings.output_dir.is_some() {
            return Err(Error::usage(
                "each run of a comparison has a folder of its own; put --output-dir before the recipe",
            ));
        }
        if settings.saving.resume.is_some() || settings.saving.stop_after.is_some() {
            return Err(Error::usage(
                "a comparison is of whole runs; leave out --resume and --stop-after",
            ));
        }
        ranks.check_untyped_world()?;
        worlds.iter().try_for_each(|world| check(*world))?;
        Ok(name)
    }
}

/// Runs `phalanx train`: as one rank when a launcher set the environment, else
/// as all of them.
///
/// # Errors
///
/// Whatever ended the training; the kind decides the exit code.
pub fn run(mut args: TrainArgs) -> Result<()> {
    args.settle()?;
    match args.recipe {
        Recipe::Linear { ranks, mut args } => {
            linear::validate(&args)?;
            let before = before_ranks(
                &ranks,
                &mut args.output_dir,
                &mut args.saving,
                &DefaultDir::New("linear"),
            )?;
            before.run(&ranks, Speakers::All, |ctx| linear::run_rank(ctx, &args))
        }
        Recipe::Mnist { ranks, mut args } => {
            mnist::validate(&args, ranks.known_world()?)?;
            let Settings {
                output_dir, saving, ..
            } = &mut args.images.settings;
            let before = before_ranks(&ranks, output_dir, saving, &DefaultDir::New("mnist"))?;
            let speakers = speakers(args.document);
            before.run(&ranks, speakers, |ctx| mnist::run_rank(ctx, &args))
        }
        Recipe::Resnet18 { ranks, mut args } => {
            args.images.settings.defaults = args.defaults();
            args.ranks_here = launch::number(&launch::real_env(), "LOCAL_WORLD_SIZE")?;
            let Settings {
                output_dir, saving, ..
            } = &mut args.images.settings;
            let default = DefaultDir::Fixed(resnet18::OUTPUT_DIR);
            let before = before_ranks(&ranks, output_dir, saving, &default)?;
            resnet18::validate(&args, ranks.known_world()?)?;
            let speakers = speakers(args.document);
            before.run(&ranks, speakers, |ctx| resnet18::run_rank(ctx, &args))
        }
        Recipe::Resnet9 { ranks, mut args } => {
            args.images.settings.defaults = args.defaults();
            resnet9::validate(&args, ranks.known_world()?)?;
            let Settings {
                output_dir, saving, ..
            } = &mut args.images.settings;
            let before = before_ranks(&ranks, output_dir, saving, &DefaultDir::New("resnet9"))?;
            before.run(&ranks, Speakers::Rank0, |ctx| resnet9::run_rank(ctx, &args))
        }
        Recipe::Mobilenetv2 { ranks, mut args } => {
            args.images.settings.defaults = args.defaults();
            mobilenetv2::validate(&args, ranks.known_world()?)?;
            let Settings {
                output_dir, saving, ..
            } = &mut args.images.settings;
            let before = before_ranks(&ranks, output_dir, saving, &DefaultDir::New("mobilenetv2"))?;
            before.run(&ranks, Speakers::Rank0, |ctx| {
                mobilenetv2::run_rank(ctx, &args)
            })
        }
    }
}

/// Settles what must be the same for all ranks before they start.
///
/// # Errors
///
/// Usage, naming what is in the folder's way.
fn before_ranks(
    ranks: &RankArgs,
    output_dir: &mut Option<PathBuf>,
    saving: &mut SavingArgs,
    default: &DefaultDir<'_>,
) -> Result<Before> {
    prepare_run(ranks.has_first()?, output_dir, saving, default).map(Before)
}

/// What is known before the ranks start, and kept until they have ended.
struct Before(phalanx_train::PreparedRun);

impl Before {
    /// Starts the ranks, each of which does `rank`.
    fn run(
        &self,
        ranks: &RankArgs,
        speakers: Speakers,
        rank: impl Fn(&RankContext) -> Result<()> + Sync,
    ) -> Result<()> {
        let Before(run) = self;
        launch::run_ranks(ranks, speakers, &run.extra, Some(&run.flight), rank)
    }
}

/// Who prints: in a document's form every rank, unmarked as there.
fn speakers(document: bool) -> Speakers {
    if document {
        Speakers::Unmarked
    } else {
        Speakers::Rank0
    }
}
