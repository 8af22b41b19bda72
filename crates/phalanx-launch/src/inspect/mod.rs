//! `phalanx inspect`: the flight recorders of all ranks, as one sentence.

pub mod analysis;
mod describe;
mod find;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod history;
mod table;

use std::path::PathBuf;

use phalanx_comm::recorder::Dump;

use crate::error::Result;
use crate::{say, system};
use analysis::Diagnosis;

/// Arguments of `phalanx inspect`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Example:\n  \
    phalanx inspect runs/mnist-2026-11-20-154233\n  \
    generation 0: ranks 0, 1 and 3 wait in all_reduce seq 812 (bucket 4 of 7: layer3.0.conv1.weight); rank 2\n  \
    last completed seq 811 and is in loading data for 58 s (epoch 3 step 101)\n\n\
    Recorders are written when a rank fails, and for a living job on SIGUSR2 to its launcher\n\
    (not to a rank, which it would end); with several launchers each has the ranks of its node:\n  \
    kill -USR2 PID_OF_PHALANX_LAUNCH_OR_TRAIN\n\n\
    In an elastic job ranks are named by their first number, which they keep when others are lost;\n\
    a process that takes the place of a lost one has a new number.")]
pub struct InspectArgs {
    /// A run's output folder, a folder of dumps, or dumps (rank-N.json), also of several hosts
    #[arg(required = true, value_name = "DIR|FILE")]
    paths: Vec<PathBuf>,
    /// Print the findings as one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `phalanx inspect`.
///
/// # Errors
///
/// Usage errors when there is nothing to read.
pub fn run(args: &InspectArgs) -> Result<()> {
    let found = find::read(&args.paths)?;
    let mut story = analysis::diagnose(&found.dumps);
    story.notes.extend(found.notes);
    if args.json {
        let text = serde_json::to_string_pretty(&story);
        let mut text = text.map_err(system("the findings cannot be written"))?;
        text.push('\n');
        return say::print_json(&text).map(|_| ());
    }
    say::print(&render(&story, &found.dumps))
}

fn render(story: &Diagnosis, dumps: &[Dump]) -> String {
    let mut text = format!("{}\n", story.sentence);
    for change in &story.changes {
        let at = history::time_of_day(change.unix_ms);
        text.push_str(&format!("  {at}  {}\n", change.text));
    }
    for note in &story.notes {
        text.push_str(&format!("  {note}\n"));
    }
    let table = table::last_operations(story, dumps);
    if !table.is_empty() {
        text.push_str(&format!("\n{table}"));
    }
    if let Some(line) = table::slowest(story) {
        text.push_str(&format!("\n{line}\n"));
    }
    text
}
