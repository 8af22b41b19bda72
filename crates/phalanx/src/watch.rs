//! What a program does for the jobs that it starts: their pages, and the ends of their trainings.

use phalanx_base::env::real_env;
use phalanx_base::files::{Dir, as_typed};
use phalanx_base::say;
use phalanx_launch::{Launch, PrintingRanks, RankArgs, RankContext, Training, sentence};
use phalanx_live::Page;
use phalanx_report::{REPORT_FILE, write_of};
use phalanx_track::{Ending, deliver_rest, record_end};
use phalanx_train::{Error, ErrorKind, Result};

/// Runs `job` with its page, if it is asked for. Then completes the folder and the trackers of its training, where that could
/// not do it itself.
///
/// # Errors
///
/// Those of the page and of the job.
pub fn run(job: Launch) -> Result<()> {
    let address = job.live();
    let page = address.map(|address| Page::of_job(address, job.folder()));
    let page = page.transpose()?;
    if let Some(page) = &page {
        say::note(format_args!("live: {}", page.link()));
    }
    job.run(|result, training| {
        let result = match training {
            Some(training) => result.map_err(|error| with_report(training, error)),
            None => result,
        };
        drop(page);
        if let (Err(_), Some(training)) = (&result, training) {
            deliver(training);
        }
        result
    })
}

/// Runs `rank` in every rank as `args` say. Rank 0 prints on standard output.
///
/// # Errors
///
/// The root cause.
pub fn run_ranks(args: &RankArgs, rank: impl Fn(&RankContext) -> Result<()> + Sync) -> Result<()> {
    phalanx_launch::run_ranks(args, PrintingRanks::Rank0, &[], None, run, rank)
}

/// Completes the folder and the trackers of a training whose launcher was killed, and could only say `error`.
pub fn killed(training: &Training, error: &Error) {
    // The guard has no output.
    let _ = record(training, error);
    deliver(training);
}

/// Adds to `error` where the report is, after [`record`].
fn with_report(training: &Training, error: Error) -> Error {
    match record(training, &error) {
        Ok(true) if !error.is_printed() => {
            let report = training.folder.join(REPORT_FILE);
            let here = std::env::current_dir().unwrap_or_default();
            let shown = report.strip_prefix(here).unwrap_or(&report);
            error.note("report", as_typed(shown))
        }
        Ok(_) => error,
        Err(why) => {
            say::note(format_args!(
                "warning: the end of the run is not written into {}: {}",
                training.folder.display(),
                why.chain()
            ));
            error
        }
    }
}

/// Writes into the training's folder that it has ended with `error`, and the report. Returns whether this is its end.
fn record(training: &Training, error: &Error) -> Result<bool> {
    let ending = match error.kind() {
        ErrorKind::Interrupted => Ending::Stopped,
        _ => Ending::Failed,
    };
    let Training { folder, since } = training;
    let is_end = record_end(folder, *since, ending, &sentence(error))?;
    if is_end {
        write_of(&Dir::open(folder)?)?;
    }
    Ok(is_end)
}

/// Hands the rest of the run to its trackers. *Blocks* for at most ten seconds and one more for each tracker after the
/// first; five minutes for a copy in an object store.
fn deliver(training: &Training) {
    for error in deliver_rest(&training.folder, &real_env()) {
        say::note(format_args!("warning: {}", error.chain()));
    }
}
