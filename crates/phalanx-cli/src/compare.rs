//! `phalanx compare`: the same training with one worker and with several, and
//! the ModelArts document's table of duration and accuracy, from real runs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use phalanx_base::files::Dir;
use phalanx_data::metrics::write_summary_in;
use serde::Serialize;
use serde_json::Value;

use crate::error::{Error, ErrorKind, Result, refuse};
use crate::launch;
use crate::say;
use crate::training::TrainArgs;
use phalanx_train::{FolderArgs, RunDir};

/// The result file.
const COMPARISON_FILE: &str = "comparison.json";

/// Arguments of `phalanx compare`.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "phalanx compare [OPTIONS] [--] RECIPE [FLAGS]...",
    after_help = "Example:\n  \
        phalanx compare --workers 1,2 resnet18 --recipe fast --data data/cifar10\n\n\
        RECIPE and FLAGS are those of phalanx train. --batch-size is of each worker, as in the document;\n\
        with --global-batch-size all runs take the same steps."
)]
pub(crate) struct CompareArgs {
    /// Numbers of workers (ranks on this host), one run for each; the first is the baseline
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2",
        value_name = "N,N..."
    )]
    workers: Vec<usize>,
    /// Folder for comparison.json and a folder for each run [default: runs/compare-RECIPE-<date>-<time>]
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    #[command(flatten)]
    folder: FolderArgs,
    /// Recipe and flags, as after `phalanx train`
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "RECIPE"
    )]
    training: Vec<OsString>,
}

/// The result of one run.
#[derive(Debug, Serialize)]
struct Run {
    workers: usize,
    /// From the start of the command to its end.
    duration_s: f64,
    /// Of that, in training steps.
    train_s: f64,
    images_per_s: f64,
    /// What is counted there, such as `images`.
    #[serde(skip)]
    unit: String,
    /// On the test set after the last epoch, 0 to 1.
    accuracy: f64,
    /// How many times faster than the first run.
    speedup: f64,
    output_dir: PathBuf,
}

/// `comparison.json`.
#[derive(Debug, Serialize)]
struct Comparison<'a> {
    version: &'static str,
    recipe: &'a str,
    /// The command line after the recipe.
    arguments: Vec<String>,
    cores: usize,
    runs: &'a [Run],
}

/// Runs `phalanx compare`; `parse` reads the words after `phalanx train`, and gives none where help was asked for.
///
/// # Errors
///
/// Usage, before anything is started, but for a training that measures no accuracy; or what ended a run, which is named.
pub(crate) fn run(
    args: &CompareArgs,
    parse: impl FnOnce(&[OsString]) -> Result<Option<Box<TrainArgs>>>,
) -> Result<()> {
    for (i, workers) in args.workers.iter().enumerate() {
        launch::check_local_ranks("--workers", *workers)?;
        if args.workers[..i].contains(workers) {
            refuse!("--workers names {workers} twice");
        }
    }
    if args.workers.len() < 2 {
        refuse!("--workers needs at least two numbers, as in --workers 1,2");
    }
    // Under a launcher each rank would compare for itself.
    if launch::rank_place(&launch::real_env())?.is_some() {
        refuse!("phalanx compare starts its ranks itself; start it once, not under a launcher");
    }
    let Some(mut training) = parse(&args.training)? else {
        return Ok(());
    };
    let recipe = training.check_comparable(&args.workers)?;
    let dir = args.output_dir.clone();
    let claim = || RunDir::claim(&format!("compare-{recipe}"));
    let mut claimed = dir.map_or_else(claim, RunDir::at);
    let prepared = claimed.prepare(args.folder);
    prepared.map_err(|error| error.note("try", "another folder with --output-dir"))?;
    let dir = claimed.path();
    let opened = Dir::open(dir)?;
    let mut runs: Vec<Run> = Vec::new();
    for (i, workers) in args.workers.iter().copied().enumerate() {
        let name = format!("workers-{workers}");
        let output_dir = dir.join(&name);
        say::note(format_args!(
            "compare  run {} of {}: {}",
            i + 1,
            args.workers.len(),
            counted(workers)
        ));
        // No link may lead from there to another folder.
        let outcome = (opened.sub(&name))
            .and_then(|_| start(&args.training, workers, &output_dir))
            .and_then(|()| Run::read(workers, output_dir, runs.first()));
        match outcome {
            Ok(run) => runs.push(run),
            Err(error) => {
                let error = error.note(
                    "in",
                    format!(
                        "run {} of {} of the comparison, with {}",
                        i + 1,
                        args.workers.len(),
                        counted(workers)
                    ),
                );
                return Err(match runs.last() {
                    Some(_) => {
                        error.note("kept", format!("the finished runs in {}", dir.display()))
                    }
                    None => error,
                });
            }
        }
    }
    let comparison = Comparison {
        version: env!("CARGO_PKG_VERSION"),
        recipe,
        arguments: (args.training.iter().skip(1))
            .map(|word| word.to_string_lossy().into_owned())
            .collect(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        runs: &runs,
    };
    let path = dir.join(COMPARISON_FILE);
    write_summary_in(&opened, COMPARISON_FILE, &comparison)?;
    say::print(&table(recipe, &runs))?;
    say::note(format_args!("saved {}", path.display()));
    Ok(())
}

/// One training in processes of its own, to the end.
fn start(training: &[OsString], workers: usize, output_dir: &Path) -> Result<()> {
    let mut own: Vec<OsString> = vec!["train".into()];
    own.extend(training.iter().cloned());
    let mut flag = OsString::from("--output-dir=");
    flag.push(output_dir);
    let flight_dir = output_dir.join(phalanx_train::FLIGHT_DIR);
    launch::start(workers, own, &[flag], flight_dir, phalanx::watch::run)
}

impl Run {
    /// What the training left in its folder.
    fn read(workers: usize, output_dir: PathBuf, first: Option<&Run>) -> Result<Run> {
        let path = output_dir.join("summary.json");
        let wrong = |why: String| {
            Error::new(
                ErrorKind::Failed,
                format!("{} {why}, though the training ended well", path.display()),
            )
        };
        let text = std::fs::read_to_string(&path)
            .map_err(|e| wrong("cannot be read".into()).caused_by(e))?;
        let summary: Value =
            serde_json::from_str(&text).map_err(|e| wrong("is not JSON".into()).caused_by(e))?;
        let number = |name: &str| {
            let value = summary[name].as_f64();
            value.ok_or_else(|| wrong(format!("lacks {name}")))
        };
        if summary["accuracy"].is_null() {
            refuse!("the training measures no accuracy to compare; choose another recipe");
        }
        let duration_s = number("total_s")?;
        Ok(Run {
            workers,
            duration_s,
            train_s: number("train_s")?,
            images_per_s: number("images_per_s")?,
            unit: summary["unit"].as_str().unwrap_or("images").to_owned(),
            accuracy: number("accuracy")?,
            speedup: first.map_or(1.0, |first| first.duration_s / duration_s),
            output_dir,
        })
    }
}

/// The document's table, a column a run, with two rows of ours.
fn table(recipe: &str, runs: &[Run]) -> String {
    let mut text = format!("Training result comparison: {recipe}\n\n");
    let unit = runs.first().map_or("images", |run| &run.unit);
    let (first, rest) = unit.split_at_checked(1).unwrap_or(("", unit));
    let rate = format!("{}{rest}/s", first.to_uppercase());
    let mut row = |name: &str, cell: fn(&Run) -> String| {
        text.push_str(&format!("{name:<14}"));
        for run in runs {
            text.push_str(&format!("  {:>14}", cell(run)));
        }
        text.push('\n');
    };
    row("Resource Type", |run| counted(run.workers));
    row("Duration", |run| duration(run.duration_s));
    row("Accuracy", |run| format!("{:.2} %", 100.0 * run.accuracy));
    row(&rate, |run| format!("{:.0}", run.images_per_s));
    row("Speed-up", |run| format!("{:.2}", run.speedup));
    text
}

fn counted(workers: usize) -> String {
    crate::format::plural(workers, "worker")
}

/// `42.1 seconds`, from two minutes on `12.3 minutes`.
fn duration(seconds: f64) -> String {
    if seconds < 120.0 {
        format!("{seconds:.1} seconds")
    } else {
        format!("{:.1} minutes", seconds / 60.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(workers: usize, duration_s: f64, accuracy: f64, speedup: f64) -> Run {
        Run {
            workers,
            duration_s,
            train_s: duration_s - 1.0,
            images_per_s: 1234.56,
            unit: "images".to_owned(),
            accuracy,
            speedup,
            output_dir: PathBuf::new(),
        }
    }

    #[test]
    fn the_table_has_a_column_a_run() {
        let runs = [run(1, 3600.0, 0.8012, 1.0), run(16, 119.96, 0.805, 30.0)];
        let expected = "\
Training result comparison: resnet18

Resource Type         1 worker      16 workers
Duration          60.0 minutes   120.0 seconds
Accuracy               80.12 %         80.50 %
Images/s                  1235            1235
Speed-up                  1.00           30.00
";
        assert_eq!(table("resnet18", &runs), expected);
    }
}
