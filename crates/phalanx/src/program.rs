//! A user's training program with the whole command line of `phalanx train`.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::builder::Resettable;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches};
use phalanx_base::error::{Error, Result};
use phalanx_base::say::{self, Secrets};
use phalanx_base::stop;
use phalanx_comm::Algorithm;
use phalanx_launch::words::{dashed, taking_negative_numbers};
use phalanx_launch::{RankArgs, Speakers, exit_code, log, run_helper, run_ranks, tell_other_nodes};
use phalanx_train::{Defaults, Job, Settings, prepare_run};

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
pub fn main_with<A: clap::Args + Sync>(
    train: impl Fn(&Job<'_>, &A) -> Result<()> + Sync,
) -> ExitCode {
    Program::new().main_with(train)
}

/// A training program with a name, description or defaults of its own.
#[derive(Debug, Clone)]
pub struct Program {
    name: String,
    about: Option<String>,
    defaults: Defaults,
}

impl Default for Program {
    fn default() -> Program {
        Program::new()
    }
}

impl Program {
    /// A program with the name of this executable file.
    pub fn new() -> Program {
        let own = std::env::current_exe().ok();
        let name = own.as_deref().and_then(|path| path.file_stem());
        Program {
            name: name.map_or_else(|| "train".into(), |n| n.to_string_lossy().into_owned()),
            about: None,
            defaults: Defaults::default(),
        }
    }

    /// Sets its name: in its help, in `runs/NAME-<date>-<time>` and in checkpoints, which
    /// only a program of the same name resumes.
    pub fn name(mut self, name: &str) -> Program {
        self.name = name.to_owned();
        self
    }

    /// Sets the description in its help; without it, the doc comment of its own flags' type is that.
    pub fn about(mut self, about: &str) -> Program {
        self.about = Some(about.to_owned());
        self
    }

    /// Sets the defaults of `--epochs`, `--batch-size` and `--lr`.
    pub fn defaults(mut self, defaults: Defaults) -> Program {
        self.defaults = defaults;
        self
    }

    /// As [`main`].
    pub fn main(self, train: impl Fn(&Job<'_>) -> Result<()> + Sync) -> ExitCode {
        self.main_with(|job, _: &NoArgs| train(job))
    }

    /// As [`main_with`].
    pub fn main_with<A: clap::Args + Sync>(
        self,
        train: impl Fn(&Job<'_>, &A) -> Result<()> + Sync,
    ) -> ExitCode {
        let outcome = match run_helper() {
            Some(outcome) => outcome,
            None => {
                log::start();
                stop::tell_limits();
                // A launcher has several for each rank.
                phalanx_comm::raise_open_files();
                log::warn_of_nonsense();
                match self.parse::<A>() {
                    Ok(typed) => self.run(typed, train),
                    Err(error) => {
                        // A closed output is no second error.
                        let _ = error.print();
                        if !error.use_stderr() {
                            return ExitCode::SUCCESS;
                        }
                        let text = error.render().to_string();
                        tell_other_nodes(&Error::usage(text.trim_start_matches("error: ")));
                        return ExitCode::from(2);
                    }
                }
            }
        };
        exit_code(outcome)
    }

    fn parse<A: clap::Args>(&self) -> std::result::Result<Typed<A>, clap::Error> {
        let mut command = self.command::<A>();
        let own = |name: &str| command.get_arguments().any(|a| a.get_long() == Some(name));
        let mut args = std::env::args_os();
        let mut words: Vec<OsString> = args.next().into_iter().collect();
        for word in args {
            // As torchrun's users type them.
            match dashed(word.clone()) {
                (dashed, Some(name), _) if own(&name) => words.push(dashed),
                _ => words.push(word),
            }
        }
        let matches = command.try_get_matches_from_mut(words)?;
        say::hide(secrets(&command, &matches));
        Typed::from_arg_matches(&matches)
    }

    fn command<A: clap::Args>(&self) -> clap::Command {
        let Defaults {
            epochs,
            batch_size,
            lr,
        } = self.defaults;
        let mut command = taking_negative_numbers(Typed::<A>::command())
            .name(self.name.clone())
            .args_override_self(true)
            .mut_arg("epochs", |a| {
                a.help(format!("Number of epochs [default: {epochs}]"))
            })
            .mut_arg("batch_size", |a| {
                a.help(format!("Samples per rank and step [default: {batch_size}]"))
            })
            .mut_arg("lr", |a| a.help(format!("Learning rate [default: {lr}]")))
            .mut_arg("output_dir", |a| {
                let dir = format!("runs/{}-<date>-<time>", self.name);
                a.help(format!("Folder for metrics, summary and weights; with --resume PATH, the resumed run's folder [default: {dir}]"))
            });
        // Without this, those of our own flags.
        let own = A::augment_args(clap::Command::new(self.name.clone()));
        command = command
            .about(Resettable::from(own.get_about().cloned()))
            .long_about(Resettable::from(own.get_long_about().cloned()));
        if let Some(about) = &self.about {
            command = command.about(about.clone()).long_about(Resettable::Reset);
        }
        command
    }

    fn run<A: clap::Args + Sync>(
        &self,
        typed: Typed<A>,
        train: impl Fn(&Job<'_>, &A) -> Result<()> + Sync,
    ) -> Result<()> {
        let Typed {
            own,
            mut settings,
            ranks,
        } = typed;
        settings.defaults = self.defaults;
        if ranks.algorithm == Algorithm::Fastest {
            settings.split.allow_any_order()?;
        }
        settings.validate(ranks.known_world()?)?;
        let Settings {
            output_dir, saving, ..
        } = &mut *settings;
        let prepared = prepare_run(ranks.has_first()?, output_dir, saving, &self.name)?;
        let (extra, flight) = (&prepared.extra, Some(&*prepared.flight));
        run_ranks(&ranks, Speakers::Rank0, extra, flight, |ctx| {
            let job = Job::new(&self.name, ctx, &settings);
            train(&job, &own)?;
            job.check_finished()
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

// Likewise.
#[derive(clap::Args)]
struct NoArgs {}

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
        let program = Program::new().name("toy");
        let help = |program: &Program| program.command::<NoArgs>().render_long_help().to_string();
        assert!(
            help(&program).starts_with("Usage: toy"),
            "{}",
            help(&program)
        );
        let named = program.clone().about("A toy");
        assert!(
            help(&named).starts_with("A toy\n\nUsage:"),
            "{}",
            help(&named)
        );
        let mut command = program.command::<Described>();
        let long = command.render_long_help().to_string();
        assert!(
            long.starts_with("Trains a toy.\n\nOn paper.\n\nUsage:"),
            "{long}"
        );
        assert!(
            command
                .render_help()
                .to_string()
                .starts_with("Trains a toy")
        );
        let mut command = named.command::<Described>();
        let long = command.render_long_help().to_string();
        assert!(long.starts_with("A toy\n\nUsage:"), "{long}");
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
