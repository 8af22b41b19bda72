//! Web pages that show a job while it runs (`--live`), and all runs below a folder (`phalanx live`).
//!
//! ```text
//! launcher ─ Page ─▶ inbox ─▶ follower thread ─▶ Hub ─▶ server thread ─▶ browsers
//! (states, output)            (run's folder)    (view)     (HTTP)
//! ```
//!
//! The launcher only stores what it knows; the follower thread looks at that and at the run's
//! folder twice a second (`RunsPage` at all runs' folders), and the hub passes what has changed to the readers. None of them waits
//! for a reader: one that is too slow is dropped.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[cfg_attr(not(feature = "server"), allow(dead_code, reason = "read by the page"))]
mod address;
#[cfg(not(feature = "server"))]
mod no_page;
#[cfg(feature = "server")]
mod page;
#[cfg_attr(not(feature = "server"), allow(dead_code, reason = "read by the page"))]
mod tail;

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use address::Address;
#[cfg(not(feature = "server"))]
pub use no_page::Page;
#[cfg(feature = "server")]
pub use page::{Page, RunsPage};
pub use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_base::files::read_regular;
pub use tail::Tail;

/// The state of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It runs.
    Running,
    /// Other ranks wait for it.
    Late,
    /// A signal or a debugger has stopped it.
    Stopped,
    /// It has ended with success.
    Done,
    /// It has ended otherwise.
    Failed,
    /// The launcher has ended it, after another rank's end or a signal.
    Ended,
    /// It runs on another host, whose launcher knows more.
    Elsewhere,
}

/// A rank of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rank {
    /// Its number in the job.
    pub rank: usize,
    /// Name of its host.
    pub host: String,
    /// Its process, if that is on this host.
    pub pid: Option<i32>,
    /// Its state.
    pub state: State,
    /// How it has ended: `exited with code 1`.
    pub end: Option<String>,
}

/// How a job has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// With success.
    Finished,
    /// By a signal, which is named.
    Stopped(String),
    /// By an error.
    Failed(String),
}

/// The longest path of a folder.
const PATH_BYTES: u64 = 16 << 10;

/// The folder that is named in the file `pointer`, once it is.
pub fn run_folder(pointer: &Path) -> Option<PathBuf> {
    let path = read_regular(pointer, PATH_BYTES).ok()?;
    let path = PathBuf::from(OsString::from_vec(path));
    path.is_absolute().then_some(path)
}
