//! Which processes belong to a job, and the groups that they form.
//!
//! Every decision about the processes of a job is an event in the job's [`Log`], a list of events in its store. The
//! [`State`] follows from the events, so every process that reads them has the same state: which processes ask to join, are
//! to leave or were lost, and which processes form the next group. Launchers write what happens to processes. Ranks write
//! the groups that they form ([`shrink`], [`grow`]). A process that was started later asks to join ([`Newcomer`]).
#![forbid(unsafe_code)]

mod context;
mod group;
mod log;
#[cfg(test)]
mod model_tests;
mod requests;
mod state;

pub use context::{Elastic, FORMING, RankContext};
pub use group::{Newcomer, ShrinkOptions, grow, shrink};
pub use log::{EventLog, Log, Replay, Replayed, insist};
pub use requests::Requests;
pub use state::{Event, Group, RequestedChange, State};
