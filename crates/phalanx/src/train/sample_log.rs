//! Which samples each step trained on, for those who want to check.

use std::path::Path;

use phalanx_train::metrics::MetricsLog;
use serde_json::json;

use super::context::RankContext;
use crate::error::Result;

/// One line a step: epoch, step, and the samples of this rank.
pub struct SampleLog {
    log: MetricsLog,
    wanted: bool,
    samples: Vec<u64>,
}

impl SampleLog {
    /// Goes on with `FILE.<rank>.jsonl`; nothing without a file.
    ///
    /// # Errors
    ///
    /// Those of opening it.
    pub fn open(ctx: &RankContext, file: Option<&Path>) -> Result<SampleLog> {
        let log = match file {
            Some(file) => {
                let mut name = file.as_os_str().to_owned();
                name.push(format!(".{}.jsonl", ctx.rank()));
                MetricsLog::resume(name.as_ref(), 1, |_| true)?
            }
            None => MetricsLog::disabled(),
        };
        Ok(SampleLog {
            log,
            wanted: file.is_some(),
            samples: Vec::new(),
        })
    }

    /// Samples of a micro-batch of the running step.
    pub fn add(&mut self, samples: &[u64]) {
        if self.wanted {
            self.samples.extend_from_slice(samples);
        }
    }

    /// The step is over. `epoch` counts from 1, `index` from 0.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn step(&mut self, epoch: usize, index: usize) -> Result<()> {
        if self.wanted {
            let record = json!({"epoch": epoch, "step": index, "samples": self.samples});
            self.log.event(&record)?;
            self.samples.clear();
        }
        Ok(())
    }
}
