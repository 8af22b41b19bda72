//! The end of a training that could not write it itself, and the instructions of a launcher to its guard.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use phalanx_base::job_files::run_folder;
use phalanx_process::{Guard, Notes};
use phalanx_store::TcpStore;
use phalanx_wire::Token;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind};
use crate::report::JobFailure;

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

/// Names of the guard's notes: what it publishes to the other nodes, and the job's folder and beginning; both as JSON.
const VERDICT: &str = "verdict";
const JOB: &str = "job";

/// Sets the store and the verdict that `guard` publishes there under `key` when this launcher is killed.
pub fn tell(guard: &Guard, store: &str, token: &Token, key: &str, verdict: &JobFailure) {
    note(guard, VERDICT, &(store, token.to_hex(), key, verdict));
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
        let verdict: Option<(String, String, String, JobFailure)> = noted(&notes, VERDICT);
        if let Some((store, token, key, verdict)) = verdict
            && let Ok(token) = Token::from_hex(&token)
            && let Ok(store) = TcpStore::connect(&store, token, TELL_LIMIT)
        {
            let _ = verdict.publish_at(&store, &key);
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
