//! A user's training program with the whole command line of `phalanx train`.

use std::process::ExitCode;
use std::sync::Arc;

use clap::builder::Resettable;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches};
use phalanx_base::error::Result;
use phalanx_base::say::{self, Secrets};
use phalanx_launch::{NoArgs, PrintingRanks, RankArgs, main_of};
use phalanx_train::{Defaults, Job, OF_ONE_RUN, Settings};

use crate::training::{Subcommand, Training};
use crate::watch;

/// Runs `train` on every rank, as the command line says: the body of a training program's `main`.
///
/// The program takes the flags of `phalanx train`: `--nproc-per-node N` starts N ranks of it,
/// and under `phalanx launch`, torchrun, Slurm or MPI it is one of theirs; without either it
/// trains alone. Errors are printed, and their kind decides the exit code. `--help` lists all
/// flags. Call it before anything else: each rank is this program, started again.
///
/// ```no_run
/// use std::process::ExitCode;
/// use phalanx::comm::ReduceOp;
///
/// fn main() -> ExitCode {
///     phalanx::main(|job| {
///         let mut sum = [job.rank() as f32];
///         job.group().all_reduce(&mut sum, ReduceOp::Sum)?;
///         job.print(&format!("{} ranks: {sum:?}", job.world_size()))
///     })
/// }
/// ```
pub fn main(train: impl Fn(&Job<'_>) -> Result<()> + Sync) -> ExitCode {
    Program::new().main(train)
}

/// As [`main`], of a program that has flags of its own, which clap reads into `A`.
///
/// ```no_run
/// use std::process::ExitCode;
///
/// #[derive(clap::Args)]
/// struct Args {
///     /// SGD momentum
///     #[arg(long, default_value_t = 0.9)]
///     momentum: f64,
/// }
///
/// fn main() -> ExitCode {
///     phalanx::main_with(|job, args: &Args| job.print(&args.momentum.to_string()))
/// }
/// ```
pub fn main_with<A: clap::Args + Send + Sync>(
    train: impl Fn(&Job<'_>, &A) -> Result<()> + Sync,
) -> ExitCode {
    Program::new().main_with(train)
}

/// A training program: its name, description and defaults, and what is checked before its ranks start. `A` are the flags
/// of its own.
///
/// ```no_run
/// use phalanx::prelude::*;
///
/// #[derive(clap::Args)]
/// struct Args {
///     /// SGD momentum
///     #[arg(long, default_value_t = 0.9)]
///     momentum: f64,
/// }
///
/// fn main() -> ExitCode {
///     Program::new()
///         .about("Trains a toy")
///         .defaults(Defaults::new(10, 32, 0.1))
///         .check(|args: &Args, settings, world| match args.momentum < 1.0 {
///             true => settings.validate(world),
///             false => Err(Error::usage("--momentum must be less than 1")),
///         })
///         .main_with(|job, args| job.print(&format!("momentum {}", args.momentum)))
/// }
/// ```
pub struct Program<A = NoArgs> {
    name: String,
    about: Option<String>,
    defaults: Defaults,
    /// A flag with its value, and the defaults that hold with it.
    others: Option<Others<A>>,
    output_dir: Option<&'static str>,
    /// Field and text of flags of ours.
    help: Vec<(&'static str, &'static str)>,
    check: fn(&A, &Settings, usize) -> Result<()>,
    printing: fn(&A) -> PrintingRanks,
}

type Others<A> = (&'static str, Defaults, fn(&A) -> bool);

impl<A> Default for Program<A> {
    fn default() -> Program<A> {
        Program::new()
    }
}

impl<A> Program<A> {
    /// A program with the name of this executable file.
    pub fn new() -> Program<A> {
        let own = std::env::current_exe().ok();
        let name = own.as_deref().and_then(|path| path.file_stem());
        Program {
            name: name.map_or_else(|| "train".into(), |n| n.to_string_lossy().into_owned()),
            about: None,
            defaults: Defaults::default(),
            others: None,
            output_dir: None,
            help: Vec::new(),
            check: |_, settings, world| settings.validate(world),
            printing: |_| PrintingRanks::Rank0,
        }
    }

    /// Sets its name: in its help, in `runs/NAME-<date>-<time>` and in checkpoints, which
    /// only a program of the same name resumes.
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Sets the description in its help; without it, the doc comment of its own flags' type is that.
    pub fn about(mut self, about: &str) -> Self {
        self.about = Some(about.to_owned());
        self
    }

    /// Sets the defaults of `--epochs`, `--batch-size` and `--lr`, and of `--max-steps` and `--eval-every` if they have one.
    pub fn defaults(mut self, defaults: Defaults) -> Self {
        self.defaults = defaults;
        self
    }

    /// Sets other defaults that apply when `holds` returns true; `flag`, as `--recipe fast`, names the case in the help.
    pub fn defaults_with(
        mut self,
        flag: &'static str,
        defaults: Defaults,
        holds: fn(&A) -> bool,
    ) -> Self {
        self.others = Some((flag, defaults, holds));
        self
    }

    /// Sets the default of `--output-dir`; without it, each run has a new folder in `runs`.
    pub fn output_dir(mut self, dir: &'static str) -> Self {
        self.output_dir = Some(dir);
        self
    }

    /// Replaces the help of a training flag; `field` is its name in [`Settings`].
    ///
    /// # Panics
    ///
    /// When the program starts, if there is no such flag.
    pub fn help(mut self, field: &'static str, text: &'static str) -> Self {
        self.help.push((field, text));
        self
    }

    /// Sets what is checked before any rank is started, so that a wrong flag is one error and not one of each rank;
    /// the number is that of ranks. It takes the place of [`Settings::validate`] and calls it, for the number of ranks that
    /// divide a batch among them. Each rank calls it again.
    pub fn check(mut self, check: fn(&A, &Settings, usize) -> Result<()>) -> Self {
        self.check = check;
        self
    }

    /// Sets which ranks print on standard output; without it, rank 0 does.
    pub fn printing(mut self, printing: fn(&A) -> PrintingRanks) -> Self {
        self.printing = printing;
        self
    }
}

impl Program {
    /// As [`main`].
    pub fn main(self, train: impl Fn(&Job<'_>) -> Result<()> + Sync) -> ExitCode {
        self.main_with(|job, _| train(job))
    }
}

impl Subcommand {
    /// Runs it as a program of its own, as [`main_with`] does.
    pub fn main(self) -> ExitCode {
        main_of(watch::killed, &OF_ONE_RUN, self.command(), |matches| {
            Ok(self.training(matches)?.run())
        })
    }
}

impl<A: clap::Args + Send + Sync> Program<A> {
    /// As [`main_with`].
    pub fn main_with(self, train: impl Fn(&Job<'_>, &A) -> Result<()> + Sync) -> ExitCode {
        main_of(watch::killed, &OF_ONE_RUN, self.command(), |matches| {
            let training = self.training(matches, &train)?;
            Ok(training.run())
        })
    }

    /// The program as a subcommand of `phalanx train`, whose `main` does what [`main_with`](Self::main_with) does besides.
    #[doc(hidden)]
    pub fn subcommand(self, train: fn(&Job<'_>, &A) -> Result<()>) -> Subcommand
    where
        A: 'static,
    {
        Subcommand {
            command: self.command(),
            parse: Box::new(move |matches| self.training(matches, train)),
        }
    }

    fn command(&self) -> clap::Command {
        let of = |value: &dyn Fn(&Defaults) -> String| {
            let others = self.others.as_ref();
            let others = others.map(|(flag, others, _)| format!("; {flag}: {}", value(others)));
            let usual = value(&self.defaults);
            format!("[default: {usual}{}]", others.unwrap_or_default())
        };
        let dir = self.output_dir.map_or_else(
            || format!("runs/{}-<date>-<time>", self.name),
            ToOwned::to_owned,
        );
        let texts = [
            (
                "epochs",
                format!(
                    "Number of epochs {}",
                    of(&|d| match d.max_steps {
                        None => d.epochs.to_string(),
                        Some(steps) => format!("as many as {steps} steps take"),
                    })
                ),
            ),
            (
                "batch_size",
                format!(
                    "Samples per rank and step {}",
                    of(&|d| d.batch_size.to_string())
                ),
            ),
            ("lr", format!("Learning rate {}", of(&|d| d.lr.to_string()))),
            (
                "output_dir",
                format!(
                    "Folder for metrics, summary and weights; with --resume PATH, the resumed run's folder [default: {dir}]"
                ),
            ),
        ];
        let shown = |n: Option<u64>| n.map_or("none".to_owned(), |n| n.to_string());
        let others = self.others.as_ref();
        let steps = |field, text, default: fn(&Defaults) -> Option<u64>| {
            let other = others.and_then(|(_, others, _)| default(others));
            default(&self.defaults).or(other)?;
            Some((field, format!("{text} {}", of(&|d| shown(default(d))))))
        };
        let max_steps = steps(
            "max_steps",
            "Stop after N steps, within an epoch if need be; without --epochs, train as many epochs as that takes",
            |d| d.max_steps,
        );
        let eval_every = steps(
            "eval_every",
            "Evaluate every N steps of an epoch, besides at its end",
            |d| d.eval_every.map(|n| n as u64),
        );
        let own = self
            .help
            .iter()
            .map(|(field, text)| (*field, (*text).to_owned()));
        let command = Typed::<A>::command().name(self.name.clone());
        let command = texts
            .into_iter()
            .chain(max_steps)
            .chain(eval_every)
            .chain(own)
            .fold(command, |command, (field, text)| {
                command.mut_arg(field, |arg| arg.help(text))
            });
        if let Some(about) = &self.about {
            return command.about(about.clone()).long_about(Resettable::Reset);
        }
        // Without this, those of our own flags.
        let own = A::augment_args(clap::Command::new(self.name.clone()));
        command
            .about(Resettable::from(own.get_about().cloned()))
            .long_about(Resettable::from(own.get_long_about().cloned()))
    }

    /// The parsed flags, and the function that runs on each rank.
    fn training<'t>(
        &self,
        matches: &ArgMatches,
        train: impl Fn(&Job<'_>, &A) -> Result<()> + Sync + 't,
    ) -> std::result::Result<Training<'t>, clap::Error>
    where
        A: 't,
    {
        say::hide(secrets(&self.command(), matches));
        let Typed {
            own,
            mut settings,
            ranks,
        } = Typed::<A>::from_arg_matches(matches)?;
        settings.defaults = match &self.others {
            Some((_, others, holds)) if holds(&own) => *others,
            _ => self.defaults,
        };
        let (check, printing) = (self.check, (self.printing)(&own));
        let own = Arc::new(own);
        let checked = Arc::clone(&own);
        Ok(Training {
            name: self.name.clone(),
            settings,
            ranks,
            output_dir: self.output_dir,
            printing,
            check: Box::new(move |settings, world| check(&checked, settings, world)),
            train: Box::new(move |job| train(job, &own)),
        })
    }
}

/// What the arguments with clap's `hide_env_values` got.
fn secrets(command: &Command, matches: &ArgMatches) -> Secrets {
    let mut secrets = Secrets::default();
    let all = command.get_arguments();
    for arg in all.filter(|arg| arg.is_hide_env_values_set() && arg.get_action().takes_values()) {
        let long = arg.get_long_and_visible_aliases().unwrap_or_default();
        secrets
            .flags
            .extend(long.iter().map(|name| format!("--{name}")));
        let short = arg.get_short_and_visible_aliases().unwrap_or_default();
        secrets
            .flags
            .extend(short.iter().map(|name| format!("-{name}")));
        let values = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
        secrets
            .values
            .extend(values.map(|value| value.to_string_lossy().into_owned()));
    }
    secrets
}

// Not a doc comment: it would be the program's help.
#[derive(clap::Parser)]
struct Typed<A: clap::Args> {
    #[command(flatten)]
    own: A,
    #[command(flatten, next_help_heading = "Training")]
    settings: Box<Settings>,
    #[command(flatten)]
    ranks: RankArgs,
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    /// Trains a toy.
    ///
    /// On paper.
    #[derive(clap::Args)]
    struct Described {
        /// A flag
        #[arg(long)]
        toy: bool,
    }

    #[test]
    fn the_help_describes_the_program_and_not_our_flags() {
        let program = || Program::<NoArgs>::new().name("toy");
        let help = |program: Program| program.command().render_long_help().to_string();
        let text = help(program());
        assert!(text.starts_with("Usage: toy"), "{text}");
        let text = help(program().about("A toy"));
        assert!(text.starts_with("A toy\n\nUsage:"), "{text}");
        let program = || Program::<Described>::new().name("toy");
        let mut command = program().command();
        let long = command.render_long_help().to_string();
        assert!(
            long.starts_with("Trains a toy.\n\nOn paper.\n\nUsage:"),
            "{long}"
        );
        let short = command.render_help().to_string();
        assert!(short.starts_with("Trains a toy"), "{short}");
        let mut command = program().about("A toy").command();
        let long = command.render_long_help().to_string();
        assert!(long.starts_with("A toy\n\nUsage:"), "{long}");
    }

    #[test]
    fn help_names_the_defaults_that_hold() {
        let other = Defaults::new(7, 8, 0.5);
        let program = Program::new().defaults(Defaults::new(2, 3, 0.25));
        let program = program.defaults_with("--toy", other, |args: &Described| args.toy);
        let mut command = program.command();
        let text = command.render_help().to_string();
        for default in ["2; --toy: 7", "3; --toy: 8", "0.25; --toy: 0.5"] {
            assert!(text.contains(&format!("[default: {default}]")), "{text}");
        }
        for (flag, epochs, batch) in [("--toy", 7, 8), ("--seed=1", 2, 3)] {
            let matches = command.try_get_matches_from_mut(["toy", flag]);
            let training = program.training(&matches.expect("flags"), |_, _| Ok(()));
            let settings = training.expect("a training").settings;
            assert_eq!((settings.epochs(), settings.batch_size()), (epochs, batch));
        }
    }

    #[test]
    fn the_values_of_arguments_with_hidden_variables_are_secrets() {
        let secret = |name: &'static str| Arg::new(name).long(name).hide_env_values(true);
        let command = || {
            Command::new("train")
                .args_override_self(true)
                .arg(
                    secret("key")
                        .short('k')
                        .visible_alias("api-key")
                        .alias("old-key"),
                )
                .arg(secret("verbose").action(ArgAction::SetTrue))
                .arg(Arg::new("lr").long("lr"))
        };
        let mut built = command();
        let typed = ["train", "--lr", "1", "--old-key", "abc"];
        let matches = built.try_get_matches_from_mut(typed).expect("parsed");
        let Secrets { flags, values } = secrets(&built, &matches);
        assert_eq!(flags, ["--key", "--api-key", "-k"]);
        assert_eq!(values, ["abc"]);
    }
}
