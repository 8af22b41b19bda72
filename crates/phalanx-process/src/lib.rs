//! Shared by all processes of a job: errors with exit codes, output, signals that request a
//! stop, environment variables.

#![forbid(unsafe_code)]
// They panic where an output cannot be written; `say` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod context;
mod convert;
pub mod env;
pub mod error;
pub mod format;
pub mod say;
pub mod stop;

pub use context::RankContext;
pub use convert::unlike;
pub use phalanx_comm::host_name;
