//! Tasks and workflows, run on this machine.
//!
//! A [`Workflow`] is a graph of tasks: commands in a `flow.toml`, or functions of a Rust
//! program ([`Flow`]). A task has typed inputs and named outputs, retries with backoff, a
//! timeout, a cache with a version, and resources that it needs and may use at most.
//!
//! The module [`file`](mod@file) documents `flow.toml`. Both forms are run by the same engine:
//! one process, whose state is in an embedded store, so that another one continues what it left.

#![forbid(unsafe_code)]
// They panic where an output cannot be written; `say` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod call;
mod check;
mod child;
mod cli;
mod create;
mod engine;
mod export;
pub mod file;
mod flow;
mod lock;
mod objects;
mod page;
mod probe;
mod prune;
mod resources;
mod secrets;
pub mod spec;
mod store;

pub use cli::{FlowCli, main, run};
pub use flow::{File, Flow, Folder, TaskSettings};
pub use phalanx_base::error::{Error, ErrorKind, Result};
pub use spec::{Resources, Type, Workflow};

/// Where this process is that of a task, or a helper of an engine: does its work and returns how
/// it ended. A program that calls [`run`] calls this first.
pub fn run_helper() -> Option<Result<()>> {
    flow::helper(None)
}
