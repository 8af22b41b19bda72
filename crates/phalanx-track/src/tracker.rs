//! What gets the records of a run.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::Result;

/// Gets what a run logs, in the order in which it was logged; see [`Delivery`](crate::Delivery).
///
/// All methods are called from one thread, which is not the training's: they may block. After an error of kind
/// [`System`](crate::ErrorKind::System), [`PeerLost`](crate::ErrorKind::PeerLost) or
/// [`Timeout`](crate::ErrorKind::Timeout) the same records are given again; any other ends the delivery.
///
/// A process that is killed may have handed over some records without having noted it. They are given again by the
/// next one.
pub trait Tracker {
    /// A short name, in lower-case letters: in messages, and of the file `.tracker-NAME.json` in the run's folder,
    /// which has what was delivered.
    fn name(&self) -> &str;

    /// Called once, first: the run's folder, and the [`state`](Self::state) that an earlier process kept of the
    /// same run (`null`, if there was none). Returns whether the delivery continues after what was delivered then;
    /// otherwise all records are given.
    ///
    /// # Errors
    ///
    /// Any: the delivery does not begin.
    fn begin(&mut self, dir: &Path, state: &Value) -> Result<bool> {
        let _ = (dir, state);
        Ok(true)
    }

    /// What the next process needs to continue: kept in `.tracker-NAME.json`, readable for others. No secrets.
    fn state(&self) -> Value {
        Value::Null
    }

    /// `run.json`: before the other records, and again for each resume.
    ///
    /// # Errors
    ///
    /// As the trait says.
    fn run(&mut self, run: &Value) -> Result<()>;

    /// Lines of `metrics.jsonl`: one or several.
    ///
    /// # Errors
    ///
    /// As the trait says.
    fn metrics(&mut self, records: &[Value]) -> Result<()>;

    /// A line of `events.jsonl`.
    ///
    /// # Errors
    ///
    /// As the trait says.
    fn event(&mut self, event: &Value) -> Result<()>;

    /// `summary.json`.
    ///
    /// # Errors
    ///
    /// As the trait says.
    fn summary(&mut self, summary: &Value) -> Result<()>;

    /// Called last, when the training has ended and all of its records were given.
    ///
    /// # Errors
    ///
    /// As the trait says.
    fn finish(&mut self) -> Result<()>;

    /// How long the end of a training waits for it, where that is longer than for others.
    fn patience(&self) -> Duration {
        Duration::ZERO
    }

    /// The command that delivers the rest of the run in the folder `dir` later, if there is one.
    fn later(&self, dir: &Path) -> Option<String> {
        let _ = dir;
        None
    }
}
