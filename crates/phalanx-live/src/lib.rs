//! Web pages that show a job while it runs (`--live`), and all runs below a folder (`phalanx live`).
//!
//! ```text
//! job's folder ─▶ follower thread ─▶ Hub ─▶ server thread ─▶ browsers
//! run's folder                      (view)     (HTTP)
//! ```
//!
//! The follower thread reads twice a second what a launcher has written into the job's folder, and the run's folder
//! ([`Page::of_runs`]: all runs' folders), and the hub passes what has changed to the readers. None of them waits
//! for a reader: one that is too slow is dropped.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod page;

pub use page::Page;
use phalanx_base::error::{Error, ErrorKind, Result};
