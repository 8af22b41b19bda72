//! `phalanx train`: one of the recipes.

use clap::error::ErrorKind as ClapError;
use phalanx::{Subcommand, Training};
use phalanx_recipes::programs;

use crate::error::{Result, refuse};

/// Arguments of `phalanx train`.
#[derive(Debug)]
pub struct TrainArgs(pub(crate) Training<'static>);

impl clap::Args for TrainArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        command
            .subcommand_required(true)
            .arg_required_else_help(true)
            .subcommands(programs().iter().map(Subcommand::command))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        TrainArgs::augment_args(command)
    }
}

impl clap::FromArgMatches for TrainArgs {
    fn from_arg_matches(matches: &clap::ArgMatches) -> std::result::Result<TrainArgs, clap::Error> {
        let chosen = matches.subcommand();
        let found = chosen.and_then(|(name, flags)| {
            let program = programs()
                .into_iter()
                .find(|program| program.name() == name);
            Some((program?, flags))
        });
        match found {
            Some((program, flags)) => Ok(TrainArgs(program.training(flags)?)),
            None => Err(clap::Error::new(ClapError::MissingSubcommand)),
        }
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
    /// Checks that this training can be run with each of these numbers of workers, and gives the recipe's name.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub(crate) fn check_comparable(&mut self, worlds: &[usize]) -> Result<&str> {
        let training = &mut self.0;
        let settings = &training.settings;
        if settings.output_dir.is_some() {
            refuse!(
                "each run of a comparison has a folder of its own; put --output-dir before the recipe"
            );
        }
        if settings.saving.resume.is_some() || settings.saving.stop_after.is_some() {
            refuse!("a comparison is of whole runs; leave out --resume and --stop-after");
        }
        training.ranks.check_untyped_world()?;
        worlds.iter().try_for_each(|world| training.check(*world))?;
        Ok(&training.name)
    }
}
