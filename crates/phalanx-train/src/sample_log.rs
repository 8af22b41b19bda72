//! Which samples each step trained on, for those who want to check.

use std::path::{Path, PathBuf};

use phalanx_base::files::atomic_write;
use phalanx_checkpoint::state::Place;
use phalanx_data::metrics::MetricsLog;
use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result};
use crate::say;
use phalanx_member::RankContext;

/// One line a step: epoch, step, and the samples of this rank.
pub struct SampleLog {
    log: MetricsLog,
    wanted: bool,
    samples: Vec<u64>,
}

impl SampleLog {
    /// Continues at the end of `FILE.<rank>.jsonl`; nothing without a file. A training that was
    /// resumed at `resumed` takes the steps after it again: their lines go first.
    ///
    /// # Errors
    ///
    /// Those of opening it.
    pub fn open(
        ctx: &RankContext,
        file: Option<&Path>,
        resumed: Option<Place>,
    ) -> Result<SampleLog> {
        let log = match file {
            Some(file) => {
                let name = file;
                let file = crate::of_rank(name, ctx.number(), "jsonl");
                if let Some(place) = resumed {
                    cut(&file, place)?;
                    if ctx.elastic.is_some() && ctx.is_main() {
                        of_newcomers(name, ctx.first_world())
                            .iter()
                            .try_for_each(|file| cut(file, place))?;
                    }
                }
                MetricsLog::append(&file)?
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

    /// The step is over. `epoch` counts from 1, `index` from 0. In an elastic training a step may be begun several times, by
    /// groups of other generations; the last counts. After a line that cannot be written, which is a warning, no more are.
    pub fn step(&mut self, epoch: usize, index: usize, generation: u32) {
        if self.wanted {
            let mut record = json!({"epoch": epoch, "step": index, "samples": self.samples});
            if generation > 0 {
                record["generation"] = json!(generation);
            }
            if let Err(error) = self.log.event(&record) {
                let why = error.chain();
                say::note(format_args!(
                    "warning: --log-samples writes no further lines: {why}"
                ));
                self.wanted = false;
            }
            self.samples.clear();
        }
    }

    /// The running step is begun again.
    pub fn begin_again(&mut self) {
        self.samples.clear();
    }
}

/// The files `FILE.N.jsonl` of processes that an attempt before has started in place of lost ranks: from number `first` on.
fn of_newcomers(file: &Path, first: usize) -> Vec<PathBuf> {
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let prefix = file.file_name().unwrap_or_default().to_string_lossy();
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let number = |path: &PathBuf| {
        let name = path.file_name()?.to_str()?;
        let rest = name.strip_prefix(&*prefix)?.strip_prefix('.')?;
        rest.strip_suffix(".jsonl")?.parse::<usize>().ok()
    };
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| number(path) >= Some(first)).collect()
}

/// Takes the last lines off the file that are of steps from `place` on, and one that a kill
/// cut off; what is before them (an earlier run's, somebody's notes) stays.
fn cut(path: &Path, place: Place) -> Result<()> {
    let failed = |e: std::io::Error| {
        let what = format!("cannot take later steps off {}", path.display());
        Error::new(ErrorKind::System, what).caused_by(e)
    };
    let old = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed(e)),
    };
    let keep = kept(&old, place);
    if keep == old.len() {
        return Ok(());
    }
    // As a whole, and over no link of another user.
    atomic_write(path, &old[..keep])
}

/// How many bytes of `old` stay. Steps ascend in what one attempt has written.
fn kept(old: &[u8], place: Place) -> usize {
    let mut keep = old.len();
    let mut next = (u64::MAX, u64::MAX);
    for line in old.split_inclusive(|b| *b == b'\n').rev() {
        let later = match serde_json::from_slice::<Value>(line) {
            Ok(record) => match (record["epoch"].as_u64(), record["step"].as_u64()) {
                (Some(epoch), Some(step)) => {
                    let after = std::mem::replace(&mut next, (epoch, step));
                    next < after && next >= (place.epoch + 1, place.step_in_epoch)
                }
                _ => false,
            },
            Err(_) => !line.ends_with(b"\n") && line.starts_with(b"{"),
        };
        if !later {
            break;
        }
        keep -= line.len();
    }
    keep
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_runs_later_steps_are_taken_again() {
        let line = |epoch: u64, step: u64| {
            let record = json!({"epoch": epoch, "step": step, "samples": [7]});
            format!("{record}\n")
        };
        let before = format!(
            "a note\n{}{}a note\n{}{}",
            line(1, 0),
            line(9, 9),
            line(1, 0),
            line(2, 1)
        );
        let place = Place {
            epoch: 1,
            step_in_epoch: 2,
            ..Place::default()
        };
        let after = format!("{before}{}{}{{\"epoch\":3,\"st", line(2, 2), line(3, 0));
        assert_eq!(kept(after.as_bytes(), place), before.len());
        assert_eq!(kept(before.as_bytes(), place), before.len());
        // Somebody's last words, though without an end.
        let noted = format!("{before}and so on");
        assert_eq!(kept(noted.as_bytes(), place), noted.len());
        assert_eq!(kept(b"", place), 0);
    }

    #[test]
    fn an_attempt_from_the_first_step_takes_off_the_one_before_it_alone() {
        let line = |epoch: u64, step: u64| {
            let record = json!({"epoch": epoch, "step": step, "samples": [7]});
            format!("{record}\n")
        };
        let earlier = format!("{}{}{}", line(1, 0), line(1, 1), line(2, 0));
        let attempt = format!("{}{}{}", line(1, 0), line(1, 1), "{\"epoch\":2,\"st");
        let both = format!("{earlier}{attempt}");
        assert_eq!(kept(both.as_bytes(), Place::default()), earlier.len());
        assert_eq!(kept(attempt.as_bytes(), Place::default()), 0);
    }
}
