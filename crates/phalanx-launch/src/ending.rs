//! The end of a training that could not write it itself: in its folder, in its report, and at its trackers.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use phalanx_base::files::as_typed;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::say;

pub use folder::{deliver, record};

/// The training that this launcher's rank 0 runs, once that has said where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// The file in which rank 0 leaves the path of its folder.
    pointer: PathBuf,
    /// When the job began.
    since: SystemTime,
}

impl Training {
    pub fn new(pointer: PathBuf, since: SystemTime) -> Training {
        Training { pointer, since }
    }

    /// Its folder; none, where rank 0 runs elsewhere, or something else.
    pub fn folder(&self) -> Option<PathBuf> {
        phalanx_live::run_folder(&self.pointer)
    }
}

/// Adds to `error` where the report is, after [`record`].
pub fn with_report(run: &Path, training: &Training, error: Error) -> Error {
    match record(run, training, &error) {
        Ok(Some(report)) if !error.is_told() => {
            let here = std::env::current_dir().unwrap_or_default();
            let shown = report.strip_prefix(here).unwrap_or(&report);
            error.note("report", as_typed(shown))
        }
        Ok(_) => error,
        Err(why) => {
            say::note(format_args!(
                "warning: the end of the run is not written into {}: {}",
                run.display(),
                why.chain()
            ));
            error
        }
    }
}

/// What the terminal says of the error, on one line.
pub fn sentence(error: &Error) -> String {
    let said = error.note_of("said").and_then(|text| text.lines().next());
    match said {
        Some(said) => format!("{}: {said}", error.chain()),
        None => error.chain(),
    }
}

#[cfg(feature = "records")]
mod folder {
    use phalanx_base::env::real_env;
    use phalanx_base::files::Dir;
    use phalanx_report::{REPORT_FILE, write_of};
    use phalanx_track::{Ending, deliver_rest, record_end};

    use super::{Error, Path, PathBuf, Result, Training, say, sentence};
    use crate::error::ErrorKind;

    /// Writes into the folder `run` that its training has ended with `error`, and the report. Returns the report's file.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn record(run: &Path, training: &Training, error: &Error) -> Result<Option<PathBuf>> {
        let ending = match error.kind() {
            ErrorKind::Interrupted => Ending::Stopped,
            _ => Ending::Failed,
        };
        if !record_end(run, training.since, ending, &sentence(error))? {
            return Ok(None);
        }
        write_of(&Dir::open(run)?)?;
        Ok(Some(run.join(REPORT_FILE)))
    }

    /// Hands the rest of the run to its trackers. *Blocks* for at most ten seconds and one more for each tracker after the
    /// first.
    pub fn deliver(run: &Path) {
        for error in deliver_rest(run, &real_env()) {
            say::note(format_args!("warning: {}", error.chain()));
        }
    }
}

/// Of a program whose trainings have no folder.
#[cfg(not(feature = "records"))]
mod folder {
    use super::{Error, Path, PathBuf, Result, Training};

    pub fn record(_run: &Path, _training: &Training, _error: &Error) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    pub fn deliver(_run: &Path) {}
}
