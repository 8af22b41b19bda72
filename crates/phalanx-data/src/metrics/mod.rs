//! Metrics of a run and their files.
//!
//! [`Mean`] and [`Confusion`] keep sums and counts, not ratios, so that ranks
//! are weighted by their samples: add the sums over all ranks, then divide. [`roc_auc`] and [`quantile`] need the values of
//! all samples. [`MetricsLog`] and [`write_summary`] are the files of rank 0.

mod confusion;
mod log;
mod mean;
mod ranks;

pub use confusion::{Confusion, argmax};
pub use log::{MetricsLog, write_summary, write_summary_in};
pub use mean::Mean;
pub use ranks::{quantile, roc_auc, top_k};
