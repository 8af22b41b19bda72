//! The end of a training that could not write it itself: in its folder, in its report, and at its trackers; and what the guard
//! of a launcher that was killed tells the other nodes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use phalanx_base::files::as_typed;
use phalanx_process::{Guard, Notes};
use phalanx_store::TcpStore;
use phalanx_wire::Token;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::nodes::{LauncherEvent, LauncherLog};
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

/// How long the guard tries to tell the other nodes.
const TELL_LIMIT: Duration = Duration::from_secs(2);

/// Names of the guard's notes: where the other nodes meet, the job token in hexadecimal, a [`LauncherEvent`] as JSON, a
/// [`Training`] as JSON.
const STORE: &str = "store";
const TOKEN: &str = "token";
const EVENT: &str = "event";
const TRAINING: &str = "training";

/// Sets the store, and what `guard` writes into the log of the launchers there when this launcher is killed.
pub fn tell(guard: &Guard, store: &str, token: &Token, event: &LauncherEvent) {
    let event = serde_json::to_string(event).unwrap_or_default();
    for (name, text) in [(STORE, store), (TOKEN, &token.to_hex()), (EVENT, &event)] {
        guard.note(name, text);
    }
}

/// Sets the training whose end `guard` writes when this launcher is killed.
pub fn watch(guard: &Guard, training: &Training) {
    if let Ok(text) = serde_json::to_string(training) {
        guard.note(TRAINING, &text);
    }
}

/// Of the guard of a launcher that was killed: what it does once the launcher's folder is removed.
pub fn killed(notes: Notes) -> impl FnOnce() {
    let training: Option<Training> = notes
        .get(TRAINING)
        .and_then(|text| serde_json::from_str(text).ok());
    // The launcher's folder has the pointer to it.
    let run = training.as_ref().and_then(Training::folder);
    move || {
        let event = notes.get(EVENT);
        let event = event.and_then(|text| serde_json::from_str::<LauncherEvent>(text).ok());
        if let (Some(store), Some(token), Some(event)) = (notes.get(STORE), notes.get(TOKEN), event)
            && let Ok(token) = Token::from_hex(token)
            && let Ok(store) = TcpStore::connect(store, token, TELL_LIMIT)
        {
            let _ = LauncherLog::new(Arc::new(store)).append(|_| Some(event.clone()));
        }
        if let (Some(run), Some(training)) = (run, training) {
            let error = Error::new(
                ErrorKind::PeerLost,
                "the launcher was killed, and its ranks with it",
            );
            // Nobody reads what it could say.
            let _ = record(&run, &training, &error);
            deliver(&run);
        }
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

    use super::{Error, ErrorKind, Path, PathBuf, Result, Training, say, sentence};

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
