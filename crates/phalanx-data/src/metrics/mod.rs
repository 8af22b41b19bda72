//! Metrics of a run and their files.
//!
//! [`Mean`], [`accuracy`] and [`Confusion`] keep sums and counts, not ratios, so that ranks
//! are weighted by their samples: add the sums over all ranks, then divide. [`MetricsLog`]
//! and [`write_summary`] are the files of rank 0.

mod confusion;
mod log;
mod mean;

pub use confusion::{Confusion, accuracy, argmax};
pub use log::{MetricsLog, write_summary, write_summary_in};
pub use mean::Mean;
