//! `phalanx doctor`: checks this host, or the job as whose rank it was started.
//!
//! Each rank looks at its host before the ranks meet, so that the report of a host can be printed when they do not.

mod check;
mod data;
mod host;
mod job;
mod pairs;
mod report;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx::watch;
use phalanx_launch::RankArgs;

use crate::error::{Error, ErrorKind, Result};
use crate::{launch, say};
use check::Check;
use report::{HostReport, Report};

/// Arguments of `phalanx doctor`.
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "Exit codes: 0 no problem found (there may be warnings), 1 problems, 2 usage error, 3 or 4 the ranks did not meet."
)]
pub struct DoctorArgs {
    /// Also check the data set in this folder: readable, and equal on all hosts
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Folder in which runs will be written; its disk is checked
    #[arg(long, value_name = "DIR", default_value = "runs")]
    output_dir: PathBuf,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: RankArgs,
}

/// Runs `phalanx doctor`.
///
/// # Errors
///
/// Problems that were found (printed, exit code 1), and whatever kept the ranks from meeting.
pub fn run(args: &DoctorArgs) -> Result<()> {
    let have_met = AtomicBool::new(false);
    let outcome = watch::run_ranks(&args.ranks, |ctx| {
        have_met.store(true, Ordering::Relaxed);
        job::examine(ctx, args)
    });
    match outcome {
        Err(error)
            if error.kind() != ErrorKind::Usage
                && !have_met.load(Ordering::Relaxed)
                && args.ranks.is_rank()? =>
        {
            report_alone(args, &error)?;
            Err(error)
        }
        outcome => outcome,
    }
}

/// Prints the report of this host, whose ranks have not met those of the others; once a host.
fn report_alone(args: &DoctorArgs, error: &Error) -> Result<()> {
    let place = launch::rank_place(&launch::real_env())?;
    if place.as_ref().is_some_and(|place| place.local_rank > 0) {
        return Ok(());
    }
    let mut host = HostReport {
        name: phalanx_base::host_name(),
        address: host::address(&args.ranks, place.as_ref()).map(|ip| ip.to_string()),
        ranks: vec![place.map_or(args.ranks.rank.unwrap_or(0), |place| place.rank)],
        checks: host::checks(args)?,
    };
    if let Some(data) = &args.data {
        host.checks.push(data::scan(data).check());
    }
    // As text, the error follows on standard error.
    let why = match args.json {
        true => format!(": {}", error.chain()),
        false => String::new(),
    };
    let met = Check::problem(
        "meeting",
        format!("the ranks did not meet{why}"),
        "start all ranks; open the ports between the hosts; see docs/guide/several-machines.md",
    );
    let report = Report {
        world: args.ranks.known_world()?,
        hosts: vec![host],
        job: vec![met],
        pairs: Vec::new(),
    };
    report.print(args.json)
}

/// How rank 0 ends when the report, which it has printed, has `problems`.
fn verdict(problems: usize) -> Result<()> {
    if problems == 0 {
        return Ok(());
    }
    let text = crate::format::plural(problems, "problem");
    Err(Error::new(ErrorKind::Failed, format!("{text} found")).printed())
}

impl Report {
    fn print(&self, as_json: bool) -> Result<()> {
        match as_json {
            true => say::print_json(&format!("{:#}\n", self.json())).map(drop),
            false => say::print(&self.text()),
        }
    }
}
