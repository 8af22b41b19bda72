//! The `main` of programs whose ranks are this program, started again.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::builder::Resettable;
use clap::{ArgMatches, Command, CommandFactory as _, FromArgMatches as _};
use phalanx_base::stop;

use crate::config::{own_arguments, with_config};
use crate::error::{Error, Result};
use crate::flags::RankArgs;
use crate::rank_args::{PrintingRanks, run};
use crate::words::{dashed, find, taking_negative_numbers};
use crate::{Launch, Training, exit_code, log, run_helper};
use phalanx_member::RankContext;

/// As [`main_with`], of a program without flags of its own.
pub fn main(rank: impl Fn(&RankContext) -> Result<()> + Sync) -> ExitCode {
    main_with(|ctx, _: &NoArgs| rank(ctx))
}

// Not a doc comment: it would be the program's help.
#[derive(clap::Args)]
#[allow(missing_docs, reason = "a doc comment would be the program's help")]
pub struct NoArgs {}

/// Runs `rank` on every rank, as the command line says: the body of `main` for a program that trains without our trainer.
///
/// The program has the flags about ranks that `phalanx train` has, and those that clap reads into `A`: `--nproc-per-node N`
/// starts N ranks of it, and under `phalanx launch`, torchrun, Slurm or MPI it is one of theirs; without either it is the
/// only rank. Errors are printed, and their kind decides the exit code. Call it before anything else.
///
/// Rank 0 owns standard output. With `--max-restarts K` all ranks are started again when one is lost, and the program continues
/// from its own checkpoint. `--elastic` is refused: only our trainer repeats a step without the lost rank.
pub fn main_with<A: clap::Args + Send + Sync>(
    rank: impl Fn(&RankContext, &A) -> Result<()> + Sync,
) -> ExitCode {
    // Without this, those of our own flags are the description.
    let own = A::augment_args(Command::new(""));
    let command = Typed::<A>::command()
        .mut_arg("live", |arg| arg.hide(true))
        .about(Resettable::from(own.get_about().cloned()))
        .long_about(Resettable::from(own.get_long_about().cloned()));
    let killed = |_: &Training, _: &Error| {};
    main_of(killed, &[], command, |matches| {
        let Typed { own, ranks } = Typed::<A>::from_arg_matches(matches)?;
        let refused = || {
            Err(Error::usage(
                "--elastic (and --nnodes MIN:MAX) needs phalanx::Trainer, which this program does not use; with \
                 --max-restarts K all ranks start again from the last checkpoint",
            ))
        };
        if ranks.is_elastic() {
            return Ok(refused());
        }
        let outcome = run(&ranks, PrintingRanks::Rank0, &[], None, unseen, |ctx| {
            match ctx.elastic {
                // Under `phalanx launch --elastic`.
                Some(_) => refused(),
                None => rank(ctx, &own),
            }
        });
        Ok(outcome)
    })
}

/// Runs a job without a page.
fn unseen(job: Launch) -> Result<()> {
    if job.live().is_some() {
        let why = "this program was built without the live page";
        return Err(Error::usage(why).note("try", "phalanx launch --live -- PROGRAM"));
    }
    job.run(|result, _| result)
}

// Not a doc comment: it would be the program's help.
#[derive(clap::Parser)]
struct Typed<A: clap::Args> {
    #[command(flatten)]
    own: A,
    #[command(flatten)]
    ranks: RankArgs,
}

/// Parses the command line as `command`, does what `run` does with it, and returns the exit code. A helper process of the
/// launcher does its work instead.
pub fn main_of(
    killed: impl FnOnce(&Training, &Error),
    of_one_run: &[&str],
    command: Command,
    run: impl FnOnce(&ArgMatches) -> std::result::Result<Result<()>, clap::Error>,
) -> ExitCode {
    if let Some(outcome) = run_helper(killed) {
        return exit_code(outcome);
    }
    log::start();
    stop::tell_limits();
    // A launcher has several for each rank.
    phalanx_comm::raise_open_files();
    log::warn_of_nonsense();
    let mut command = taking_negative_numbers(command).args_override_self(true);
    command.build();
    let read =
        own_arguments().and_then(|typed| with_config(&command, of_one_run, words(&command, typed)));
    let words = match read {
        Ok(words) => words,
        Err(error) => return exit_code(Err(error)),
    };
    match command
        .try_get_matches_from_mut(std::env::args_os().take(1).chain(words))
        .and_then(|matches| run(&matches))
    {
        Ok(outcome) => exit_code(outcome),
        Err(error) => {
            // A closed output is no second error.
            let _ = error.print();
            match error.use_stderr() {
                true => ExitCode::from(2),
                false => ExitCode::SUCCESS,
            }
        }
    }
}

/// What was typed, with flags as torchrun's users type them (`--nproc_per_node`).
fn words(command: &Command, typed: Vec<OsString>) -> Vec<OsString> {
    let word = |word: OsString| match dashed(word.clone()) {
        (dashed, Some(name), _) if find(command, &name).is_some() => dashed,
        _ => word,
    };
    typed.into_iter().map(word).collect()
}
