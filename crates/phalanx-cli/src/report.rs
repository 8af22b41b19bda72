//! `phalanx report`: runs as one HTML page.

use std::path::PathBuf;

use phalanx_base::files::{Dir, as_typed, atomic_write};
use phalanx_report::{REPORT_FILE, Run, page, write_in, write_of};

use crate::error::Result;
use crate::say;
use phalanx_base::env::real_env;
use phalanx_track::{TrackArgs, is_object_store, record_unseen_end, upload};
use phalanx_train::{LabelArgs, check_folder_of};

/// Arguments of `phalanx report`.
#[derive(Debug, clap::Args)]
pub struct ReportArgs {
    /// Folders of runs; several are drawn over each other
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// File to write [default: report.html, in the run's folder if there is one RUN]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Also send the runs to an MLflow tracking server, or the copy below a URL s3://… or gs://…: what was not delivered yet [default URI: MLFLOW_TRACKING_URI]
    #[arg(long, value_name = "URI", num_args = 0..=1, default_missing_value = "")]
    upload: Option<String>,
    /// Also write offline runs into the folders' wandb/, for `wandb sync`; replaces existing ones, whose paths are wrong after
    /// a folder was moved
    #[arg(long)]
    wandb: bool,
    #[command(flatten)]
    labels: LabelArgs,
}

/// Runs `phalanx report`.
///
/// # Errors
///
/// Usage for a folder that holds no run; those of reading and writing, naming the file.
pub fn run(args: &ReportArgs) -> Result<()> {
    if let Some(file) = &args.output {
        check_folder_of("--output", file)?;
    }
    for run in args.runs.iter().filter(|run| run.is_dir()) {
        // Its report can be made all the same.
        if let Err(error) = record_unseen_end(run, &real_env()) {
            say::note(format_args!("warning: {}", error.chain()));
        }
    }
    if !args.labels.is_empty() {
        let is_written_below = args.output.is_none() && args.runs.len() == 1;
        for run in &args.runs {
            args.labels.add_to_folder(run)?;
            if !is_written_below {
                write_of(&Dir::open(run)?)?;
            }
        }
    }
    let runs: phalanx_base::Result<Vec<Run>> = args.runs.iter().map(|run| Run::read(run)).collect();
    let page = page(&runs?)?;
    let output = match (&args.output, &args.runs[..]) {
        (None, [run]) => {
            // No link is followed there.
            write_in(&Dir::open(run)?, &page)?;
            run.join(REPORT_FILE)
        }
        (file, _) => {
            let file = file.clone().unwrap_or_else(|| REPORT_FILE.into());
            atomic_write(&file, page.as_bytes())?;
            file
        }
    };
    say::print(&format!("{}\n", output.display()))?;
    let to = TrackArgs {
        mlflow: args.upload.clone().filter(|to| !is_object_store(to)),
        wandb: args.wandb,
        output_url: args.upload.clone().filter(|to| is_object_store(to)),
    };
    for run in &args.runs {
        to.prepare(run, false, false)?;
        for tracker in to.trackers(&real_env())? {
            let done = match tracker.name() {
                "wandb" => format!("wandb sync {}/wandb/offline-run-*", as_typed(run)),
                "mlflow" => format!("{} is on the MLflow server", run.display()),
                _ => format!("{} is in the object store", run.display()),
            };
            upload(run, tracker)?;
            say::print(&format!("{done}\n"))?;
        }
    }
    Ok(())
}
