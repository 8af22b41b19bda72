//! What every process of a job needs: errors with their exit codes, whole lines on its two
//! outputs, the signals that ask it to stop, and its environment.

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
