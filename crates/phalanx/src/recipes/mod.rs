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
use phalanx_train::{RankContext, SavingArgs, Settings, prepare_run};

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

/// A recipe's arguments: all that `train` and `compare` need of it.
trait AnyRecipe: Sync {
    /// What it is called at the command line.
    fn name(&self) -> &'static str;

    /// The training flags, where it has them all.
    fn settings(&mut self) -> Option<&mut Settings>;

    /// `--output-dir`, and the arguments about checkpoints.
    fn folder(&mut self) -> (&mut Option<PathBuf>, &mut SavingArgs);

    /// The folder of a run without `--output-dir`; none for a new one for each run.
    fn default_dir(&self) -> Option<&'static str> {
        None
    }

    /// Lets what was typed, and the environment, decide what nobody typed.
    ///
    /// # Errors
    ///
    /// Usage, when a variable is no number.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    fn validate(&self, world: usize) -> Result<()>;

    /// Who prints.
    fn speakers(&self) -> Speakers;

    /// Trains as one rank.
    ///
    /// # Errors
    ///
    /// Anything that ends the training; the kind decides the exit code.
    fn run_rank(&self, ctx: &RankContext) -> Result<()>;
}

impl Recipe {
    fn parts(&mut self) -> (&mut dyn AnyRecipe, &mut RankArgs) {
        match self {
            Recipe::Linear { args, ranks } => (args, ranks),
            Recipe::Mnist { args, ranks } => (&mut **args, ranks),
            Recipe::Resnet18 { args, ranks } => (&mut **args, ranks),
            Recipe::Resnet9 { args, ranks } => (&mut **args, ranks),
            Recipe::Mobilenetv2 { args, ranks } => (&mut **args, ranks),
        }
    }
}

impl TrainArgs {
    /// The recipe and the ranks, when what was typed has decided what nobody typed.
    ///
    /// # Errors
    ///
    /// Usage, when flags contradict each other.
    fn settled(&mut self) -> Result<(&mut dyn AnyRecipe, &mut RankArgs)> {
        let (recipe, ranks) = self.recipe.parts();
        recipe.settle()?;
        if let (AlgorithmArg::Fastest, Some(settings)) = (ranks.algorithm, recipe.settings()) {
            settings.split.allow_any_order()?;
        }
        Ok((recipe, ranks))
    }

    /// Checks that this training can be run with each of these numbers of workers, and gives the recipe's name.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub(crate) fn check_comparable(&mut self, worlds: &[usize]) -> Result<&'static str> {
        let (recipe, ranks) = self.settled()?;
        let name = recipe.name();
        let Some(settings) = recipe.settings() else {
            return Err(Error::usage(format!(
                "train {name} has no accuracy to compare; choose another recipe"
            )));
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
        worlds
            .iter()
            .try_for_each(|world| recipe.validate(*world))?;
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
    let (recipe, ranks) = args.settled()?;
    let default = recipe.default_dir().map(PathBuf::from);
    let (output_dir, saving) = recipe.folder();
    if output_dir.is_none() && saving.resumed_path().is_none() {
        *output_dir = default;
    }
    recipe.validate(ranks.known_world()?)?;
    let (name, (output_dir, saving)) = (recipe.name(), recipe.folder());
    let prepared = prepare_run(ranks.has_first()?, output_dir, saving, name)?;
    let (recipe, speakers) = (&*recipe, recipe.speakers());
    let (extra, flight) = (&prepared.extra, Some(&*prepared.flight));
    launch::run_ranks(ranks, speakers, extra, flight, |ctx| {
        recipe.validate(ctx.world())?;
        recipe.run_rank(ctx)
    })
}
