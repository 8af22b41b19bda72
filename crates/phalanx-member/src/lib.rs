//! Which processes belong to a job, and the groups that they form.
//!
//! All that is decided about the processes of a job is in one list of events, its [`Log`], in the job's store. The
//! [`State`] follows from the events, so every process that reads them knows the same: which processes ask to join, are to
//! leave or were lost, and which of them form the next group. Launchers write what happens to processes, ranks write the
//! groups that they form ([`shrink`], [`grow`]), and a process that was started later asks to join ([`Newcomer`]).
#![forbid(unsafe_code)]

mod context;
mod group;
mod log;
#[cfg(test)]
mod model_tests;
mod state;

pub use context::{Elastic, FORMING, RankContext};
pub use group::{Newcomer, ShrinkOptions, grow, shrink};
pub use log::{EventLog, Log, Replay, Replayed, insist};
pub use state::{Event, Group, RequestedChange, State};
