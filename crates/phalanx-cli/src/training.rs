//! `phalanx train`: one of the recipes, and how its ranks come to be.

use std::path::PathBuf;

use clap::error::ErrorKind as ClapError;
use phalanx_comm::Algorithm;
use phalanx_launch::RankArgs;
use phalanx_recipes::{AnyRecipe, RECIPES, Recipe};
use phalanx_train::prepare_run;

use crate::error::{Error, Result};
use crate::launch;

/// Arguments of `phalanx train`.
#[derive(Debug)]
pub struct TrainArgs {
    recipe: Box<dyn AnyRecipe>,
    ranks: RankArgs,
}

impl clap::Args for TrainArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        command
            .subcommand_required(true)
            .arg_required_else_help(true)
            .subcommands(RECIPES.iter().map(Recipe::command))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        TrainArgs::augment_args(command)
    }
}

impl clap::FromArgMatches for TrainArgs {
    fn from_arg_matches(matches: &clap::ArgMatches) -> std::result::Result<TrainArgs, clap::Error> {
        let chosen = matches.subcommand();
        let known = chosen.and_then(|(name, flags)| Some((Recipe::find(name)?, flags)));
        let Some((recipe, flags)) = known else {
            return Err(clap::Error::new(ClapError::MissingSubcommand));
        };
        let (recipe, ranks) = recipe.parse(flags)?;
        Ok(TrainArgs { recipe, ranks })
    }

    fn update_from_arg_matches(
        &mut self,
        matches: &clap::ArgMatches,
    ) -> std::result::Result<(), clap::Error> {
        *self = TrainArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

impl TrainArgs {
    /// The recipe and the ranks, when what was typed has decided what nobody typed.
    ///
    /// # Errors
    ///
    /// Usage, when flags contradict each other.
    fn settled(&mut self) -> Result<(&mut dyn AnyRecipe, &mut RankArgs)> {
        let (recipe, ranks) = (&mut *self.recipe, &mut self.ranks);
        recipe.settle();
        if let (Algorithm::Fastest, Some(settings)) = (ranks.algorithm, recipe.settings()) {
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
