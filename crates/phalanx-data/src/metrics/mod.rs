//! What a run measures, and where it is written.
//!
//! [`Mean`], [`accuracy`] and [`Confusion`] keep sums and counts, never
//! ratios, so that ranks with short batches weigh what they should: add the
//! sums over all ranks, then divide. [`MetricsLog`] and [`write_summary`] are
//! the files of rank 0.

mod confusion;
mod log;
mod mean;

pub use confusion::{Confusion, accuracy, argmax};
pub use log::{MetricsLog, write_summary, write_summary_in};
pub use mean::Mean;
