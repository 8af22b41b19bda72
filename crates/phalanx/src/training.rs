//! A training program with its parsed flags, from these to its ranks.

use std::fmt;

use phalanx_base::error::Result;
use phalanx_comm::Algorithm;
use phalanx_launch::{PrintingRanks, RankArgs, run_ranks};
use phalanx_train::{Job, Settings, prepare_run};

use crate::watch;

type Parse = dyn Fn(&clap::ArgMatches) -> std::result::Result<Training<'static>, clap::Error>;

/// A training program as a subcommand, for the command `phalanx`.
pub struct Subcommand {
    pub(crate) command: clap::Command,
    pub(crate) parse: Box<Parse>,
}

impl Subcommand {
    /// Its name: the word that is typed.
    pub fn name(&self) -> &str {
        self.command.get_name()
    }

    /// Its flags, for [`clap::Command::subcommand`].
    pub fn command(&self) -> clap::Command {
        self.command.clone()
    }

    /// The training of what was typed after its name.
    ///
    /// # Errors
    ///
    /// Those of clap.
    pub fn training(
        &self,
        matches: &clap::ArgMatches,
    ) -> std::result::Result<Training<'static>, clap::Error> {
        (self.parse)(matches)
    }
}

type Check<'t> = dyn Fn(&Settings, usize) -> Result<()> + Sync + 't;
type Train<'t> = dyn Fn(&Job<'_>) -> Result<()> + Sync + 't;

/// A program and the flags that were typed.
pub struct Training<'t> {
    /// The name of the program.
    pub name: String,
    /// The training flags.
    pub settings: Box<Settings>,
    /// The flags about ranks.
    pub ranks: RankArgs,
    pub(crate) output_dir: Option<&'static str>,
    pub(crate) printing: PrintingRanks,
    pub(crate) check: Box<Check<'t>>,
    pub(crate) train: Box<Train<'t>>,
}

impl fmt::Debug for Training<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Training")
            .field("name", &self.name)
            .field("settings", &self.settings)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

impl Training<'_> {
    /// Checks the flags for `world` ranks, as far as it can be done before any is started.
    ///
    /// # Errors
    ///
    /// Usage, naming the flag.
    pub fn check(&mut self, world: usize) -> Result<()> {
        if self.ranks.algorithm == Algorithm::Fastest {
            self.settings.split.allow_any_order()?;
        }
        if self.ranks.is_elastic() {
            self.settings.check_elastic()?;
        }
        (self.check)(&self.settings, world)
    }

    /// Trains: as one rank where a launcher has set the environment, else as all of them. *Blocks* until they have ended.
    ///
    /// # Errors
    ///
    /// Whatever ended the training; the kind decides the exit code.
    pub fn run(mut self) -> Result<()> {
        let Settings {
            output_dir, saving, ..
        } = &mut *self.settings;
        if output_dir.is_none() && saving.resumed_path().is_none() {
            *output_dir = self.output_dir.map(Into::into);
        }
        self.check(self.ranks.known_world()?)?;
        let Training {
            name,
            mut settings,
            ranks,
            printing,
            check,
            train,
            ..
        } = self;
        let Settings {
            output_dir, saving, ..
        } = &mut *settings;
        let prepared = prepare_run(ranks.has_first()?, output_dir, saving, &name)?;
        let (extra, flight) = (&prepared.extra, prepared.flight.as_deref());
        run_ranks(&ranks, printing, extra, flight, watch::run, |ctx| {
            check(&settings, ctx.world())?;
            let job = Job::new(&name, ctx, &settings);
            train(&job)?;
            job.check_finished()
        })
    }
}
