//! The end of a training that could not write it itself, and the instructions of a launcher to its guard.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use phalanx_base::job_files::run_folder;
use phalanx_process::{Guard, Notes};
use phalanx_store::TcpStore;
use phalanx_wire::Token;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind};
use crate::nodes::{LauncherEvent, LauncherLog};

/// A training whose rank 0 ran on this host.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// Its folder.
    pub folder: PathBuf,
    /// When its job began.
    pub since: SystemTime,
}

impl Training {
    /// That of the job in the folder `job`; none, where rank 0 runs elsewhere, or something else.
    pub(crate) fn of_job(job: &Path, since: SystemTime) -> Option<Training> {
        run_folder(job).map(|folder| Training { folder, since })
    }
}

/// How long the guard tries to inform the other nodes.
const TELL_LIMIT: Duration = Duration::from_secs(2);

/// Names of the guard's notes: what it writes into the launchers' log, and the job's folder and beginning; both as JSON.
const EVENT: &str = "event";
const JOB: &str = "job";

/// Sets the store, and what `guard` writes into the log of the launchers there when this launcher is killed.
pub fn set_event(guard: &Guard, store: &str, token: &Token, event: &LauncherEvent) {
    note(guard, EVENT, &(store, token.to_hex(), event));
}

fn note(guard: &Guard, name: &str, value: &impl Serialize) {
    if let Ok(text) = serde_json::to_string(value) {
        guard.note(name, &text);
    }
}

fn noted<T: DeserializeOwned>(notes: &Notes, name: &str) -> Option<T> {
    serde_json::from_str(notes.get(name)?).ok()
}

/// Sets the folder and the beginning of the job whose training `guard` ends when this launcher is killed.
pub fn watch(guard: &Guard, folder: &Path, began: SystemTime) {
    note(guard, JOB, &(folder, began));
}

/// Of the guard of a launcher that was killed: what it does once the launcher's folder is removed. `end` ends the training.
pub fn killed(notes: Notes, end: impl FnOnce(&Training, &Error)) -> impl FnOnce() {
    let job: Option<(PathBuf, SystemTime)> = noted(&notes, JOB);
    // The launcher's folder names the training's.
    let training = job.and_then(|(folder, began)| Training::of_job(&folder, began));
    move || {
        let event: Option<(String, String, LauncherEvent)> = noted(&notes, EVENT);
        if let Some((store, token, event)) = event
            && let Ok(token) = Token::from_hex(&token)
            && let Ok(store) = TcpStore::connect(&store, token, TELL_LIMIT)
        {
            let _ = LauncherLog::new(Arc::new(store)).append(|_| Some(event.clone()));
        }
        if let Some(training) = training {
            let error = Error::new(
                ErrorKind::PeerLost,
                "the launcher was killed, and its ranks with it",
            );
            end(&training, &error);
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
