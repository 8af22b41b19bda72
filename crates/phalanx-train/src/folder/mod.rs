//! A run's folder: which it is, who writes there, and what lies in it.

mod lock;
mod output;
mod run_dir;
mod weights;

use std::ffi::OsString;
use std::path::PathBuf;

pub(crate) use self::lock::Lock;
pub use self::output::Files;
pub(crate) use self::output::{BEST_FILE, MFU, Output, json_lines, next_step};
pub use self::run_dir::RunDir;
pub(crate) use self::run_dir::default_output_dir;
pub use self::weights::{file_of, weights_of};
use crate::args::{Attempt, SavingArgs};
use crate::error::Result;
use crate::{FLIGHT_DIR, stop};

/// Settles what must be the same for all ranks before they start: the output
/// folder (a new `runs/PROGRAM-<date>-<time>`, where none is typed and no run is resumed), and
/// whether they will save when they are asked to stop. `has_first`: whether rank 0 is among them, if that is known yet; it
/// settles the folder by itself otherwise. Ranks that are started again continue from their last checkpoint.
///
/// # Errors
///
/// Usage, naming what is in the folder's way.
pub fn prepare_run(
    has_first: Option<bool>,
    output_dir: &mut Option<PathBuf>,
    saving: &mut SavingArgs,
    program: &str,
) -> Result<PreparedRun> {
    let attempt = Attempt::of_this_process()?;
    if saving.enabled() {
        stop::expect(saving.stop_grace());
    }
    let mut extra = Vec::new();
    let mut dir = match (&*output_dir, saving.resumed_dir()) {
        (Some(typed), _) => RunDir::at(typed.clone()),
        (None, resumed) => {
            let dir = match resumed {
                Some(resumed) => RunDir::at(resumed),
                None if has_first == Some(true) => RunDir::of_attempt(program, &attempt),
                // Rank 0 sends which one it is.
                None => RunDir::at(default_output_dir(program)),
            };
            if has_first.is_some() {
                let mut flag = OsString::from("--output-dir=");
                flag.push(dir.path());
                extra.push(flag);
            }
            *output_dir = Some(dir.path().to_owned());
            dir
        }
    };
    // No other process writes there, or needs to see it.
    if has_first == Some(true) {
        let prepared = dir.prepare(saving.folder);
        prepared.map_err(|error| error.note("try", "another folder with --output-dir"))?;
        saving.found = dir.settle(&attempt, saving)?;
    }
    saving.attempt = attempt;
    let flight = has_first.map(|_| dir.path().join(FLIGHT_DIR));
    Ok(PreparedRun {
        extra,
        flight,
        _dir: dir,
    })
}

/// What is known before the ranks start, and kept until they have ended.
pub struct PreparedRun {
    /// The flags that name the folder for the ranks.
    pub extra: Vec<OsString>,
    /// Where flight recorders go, if that is known yet.
    pub flight: Option<PathBuf>,
    _dir: RunDir,
}
