//! A run's folder: what rank 0 writes there, and what an earlier run left.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx_base::files::{Dir, as_typed, atomic_write};
use phalanx_base::process::ProcessName;
use phalanx_checkpoint::state::{Folder, Place};
use phalanx_checkpoint::{self as checkpoint, Outline, Values};
use phalanx_data::metrics::{MetricsLog, write_summary_in};
use phalanx_report::{PICTURES_FILE, REPORT_FILE, Resumption};
use phalanx_track::EVENT_FILE_PREFIX;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::lock::Lock;
use super::run_dir::{self, RunDir, SUMMARY_FILE};
use crate::args::{FOLDER, Fresh, SavingArgs};
use crate::best::{BestEpoch, KEPT_BEST, kept_name};
use crate::error::{Error, ErrorKind, Result};
use crate::log::{self, Attempt, EVENTS_FILE, IMAGES_DIR, RUN_FILE, RunInfo, RunLog, TABLES_DIR};
use crate::say;
use phalanx_base::env::RUN_POINTER_VARIABLE;
use phalanx_member::RankContext;

const METRICS_FILE: &str = "metrics.jsonl";
/// Model FLOPs utilization, in the records of `metrics.jsonl`.
pub(crate) const MFU: &str = "mfu";
pub(crate) const BEST_FILE: &str = "best.safetensors";
const BEST_PTH: &str = "best.pth";
pub(crate) const ASIDE_BEST_FILE: &str = "aside-best.safetensors";
const PREDICTIONS_FILE: &str = "predictions.jsonl";
/// Most bytes of a file of rows that is read again.
const MAX_ROWS_BYTES: u64 = 1 << 30;
/// How far a tracker has come, in `.tracker-NAME.json`.
const TRACKER_PREFIX: &str = ".tracker-";

/// The files of one program besides those that every run has.
#[derive(Debug, Clone, Default)]
pub struct Files {
    /// The model's name, in a checkpoint's metadata.
    pub model: String,
    /// What else `phalanx predict` must know, there too.
    pub about: Vec<(&'static str, String)>,
    /// The weights at the end, where they are saved once: `NAME.safetensors`.
    pub weights: Option<String>,
    /// Accuracy of each epoch as a JSON list.
    pub accuracies: Option<String>,
    /// Whether every epoch is saved as `epoch_N.safetensors`.
    pub each_epoch: bool,
}

impl Files {
    /// The file of epoch `epoch`, counted from 1.
    fn epoch(epoch: usize) -> String {
        format!("epoch_{epoch}.safetensors")
    }

    /// What files of weights, and checkpoints, say in addition to them.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let own = ("model", self.model.clone());
        let about = self.about.iter().chain([&own]);
        about.map(|(k, v)| ((*k).to_owned(), v.clone())).collect()
    }

    /// Whether `name` is a file that a run of this program writes.
    fn has(&self, name: &str) -> bool {
        let weights = |ours: &str| name == ours || Path::new(name) == pytorch(Path::new(ours));
        let number = |name: &str| {
            let number = name.strip_prefix("epoch_")?;
            let number = number
                .strip_suffix(".safetensors")
                .or_else(|| number.strip_suffix(".pth"))?;
            number.parse::<usize>().ok()
        };
        [
            SUMMARY_FILE,
            PREDICTIONS_FILE,
            PICTURES_FILE,
            REPORT_FILE,
            RUN_FILE,
            EVENTS_FILE,
        ]
        .contains(&name)
            || name.starts_with(EVENT_FILE_PREFIX)
            || name.starts_with(TRACKER_PREFIX)
            || self.accuracies.as_deref() == Some(name)
            || self
                .weights
                .as_deref()
                .into_iter()
                .chain([BEST_FILE, ASIDE_BEST_FILE])
                .any(weights)
            || self.each_epoch && number(name).is_some()
    }
}

/// The PyTorch file next to a safetensors file: `epoch_N.pth` and
/// `mnist_cnn.pt`, as the documents call them.
fn pytorch(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_best = [BEST_FILE, ASIDE_BEST_FILE].contains(&&*name);
    path.with_extension(if name.starts_with("epoch_") || is_best {
        "pth"
    } else {
        "pt"
    })
}

/// The run's folder; only rank 0 touches it.
#[derive(Debug)]
pub struct Output {
    dir: PathBuf,
    files: Files,
    is_fresh: bool,
    /// The summary, if the run is complete and stays as it is.
    complete: Option<Value>,
    /// On rank 0.
    opened: Option<Dir>,
    _lock: Option<Lock>,
    /// What was saved last, for the closing line.
    saved: PathBuf,
}

impl Output {
    /// Prepares `dir` on rank 0: creates it, keeps other trainings out of it, and removes an earlier run's
    /// results, if `args` say that they may go. All ranks' flight recorders go there. From `lost`, the rank 0 before, it is
    /// taken over.
    ///
    /// # Errors
    ///
    /// Usage or system, naming the folder.
    pub fn open(
        ctx: &RankContext,
        dir: PathBuf,
        files: Files,
        args: &SavingArgs,
        lost: Option<&ProcessName>,
    ) -> Result<Output> {
        let fresh = args.fresh();
        ctx.group().set_flight_dir(&dir.join(crate::FLIGHT_DIR));
        let (mut opened, mut lock) = (None, None);
        if ctx.is_main() {
            let mut dir = Dir::create(&dir)?;
            args.folder.check(&dir)?;
            let is_first = fresh.is_some() && args.attempt.restarts == 0;
            let taken = match args.overwrite && is_first {
                true => Lock::take_now(&dir)?,
                false => Lock::take(&dir, lost)?,
            };
            if ctx.elastic.is_some() {
                dir = taken.claimed()?;
            }
            lock = Some(taken);
            if is_first {
                // The training that was waited for has left its results.
                RunDir::at(dir.path().to_owned()).check(args, dir.path())?;
            }
            if let Some(fresh) = fresh {
                if !args.overwrite && dir.has(METRICS_FILE) {
                    ctx.note(&format!(
                        "note: replacing the log of an earlier run in {}, which saved no weights",
                        dir.path().display()
                    ));
                }
                clear_earlier_run(&dir, &files, fresh)?;
                let checkpoints = Folder::within(&dir, FOLDER, 1);
                checkpoints.clear()?;
                if let Some(dir) = checkpoints.existing()? {
                    let mut names = dir.names()?;
                    names.retain(|name| name.starts_with(KEPT_BEST));
                    names.iter().try_for_each(|name| dir.remove(name))?;
                }
            }
            name_to_launcher(&dir);
            opened = Some(dir);
        }
        Ok(Output {
            saved: dir.clone(),
            dir,
            files,
            opened,
            complete: None,
            is_fresh: fresh.is_some(),
            _lock: lock,
        })
    }

    /// One that nothing is written into, of a program that only evaluates or measures.
    pub(crate) fn nowhere(dir: PathBuf) -> Output {
        Output {
            saved: dir.clone(),
            dir,
            files: Files::default(),
            opened: None,
            complete: None,
            is_fresh: false,
            _lock: None,
        }
    }

    /// Says in the folder `run`, this one or the one around it, that the training begins: what it writes from now on, a
    /// later attempt continues.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn begin(&self, run: &Path, saving: &SavingArgs) -> Result<()> {
        match &self.opened {
            Some(_) => run_dir::begin(&Dir::open(run)?, &saving.attempt),
            None => Ok(()),
        }
    }

    /// Whether the run that is resumed is complete: it has ended with the weights `weights_sha256`, and with no fewer
    /// epochs than it is to have now, `epochs`. Its files then stay as they are.
    ///
    /// *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Those of reading; peers that are lost.
    pub fn find_complete(
        &mut self,
        ctx: &RankContext,
        weights_sha256: &str,
        (epochs, steps): (usize, u64),
    ) -> Result<()> {
        let mut text = None;
        if let Some(dir) = &self.opened {
            let bytes = dir.read(SUMMARY_FILE, MAX_ROWS_BYTES)?.unwrap_or_default();
            let summary: Option<Value> = serde_json::from_slice(&bytes).ok();
            let summary = summary.filter(|summary| {
                // Older ones do not have the steps.
                let is_as_long = match summary["planned_steps"].as_u64() {
                    Some(had) => had >= steps,
                    None => summary["epochs"].as_u64() >= Some(epochs as u64),
                };
                summary["weights_sha256"] == weights_sha256 && is_as_long
            });
            text = summary.map(|summary| summary.to_string());
        }
        let text: Option<String> = ctx.group().broadcast_object(Some(&text), 0)?;
        self.complete = text.and_then(|text| serde_json::from_str(&text).ok());
        Ok(())
    }

    /// The summary of a complete run, after [`find_complete`](Self::find_complete).
    pub fn complete(&self) -> Option<&Value> {
        self.complete.as_ref()
    }

    /// Removes the summary of a run that now continues, with which it would be complete, and the
    /// report, which shows that summary. Those of a complete run stay.
    ///
    /// # Errors
    ///
    /// System, naming the file.
    pub fn reopen(&self) -> Result<()> {
        match &self.opened {
            Some(dir) if self.complete.is_none() => {
                let _ = dir.remove(REPORT_FILE);
                Ok(dir.remove(SUMMARY_FILE)?)
            }
            _ => Ok(()),
        }
    }

    /// The folder of checkpoints in it, of which the newest `keep` stay.
    pub fn checkpoints(&self, keep: usize) -> Folder {
        match &self.opened {
            Some(dir) => Folder::within(dir, FOLDER, keep),
            None => Folder::new(&self.dir.join(FOLDER), keep),
        }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Says where the report is, if there is one.
    pub fn announce_report(&self, ctx: &RankContext) {
        if self.opened.as_ref().is_some_and(|dir| dir.has(REPORT_FILE)) {
            let file = self.dir.join(REPORT_FILE);
            ctx.note(&format!("report   {}", file.display()));
        }
    }

    /// `error`, by which the run fails, with where the report will be once the log is dropped. Errors that are not this
    /// rank's own, and a stop, are left as they are; so are those of a rank whose launcher writes the report.
    pub fn with_report(&self, error: Error) -> Error {
        match error.kind() {
            ErrorKind::PeerLost | ErrorKind::Timeout | ErrorKind::Stopped => error,
            _ if self.opened.is_none() || error.is_printed() || log::has_launcher() => error,
            _ => error.note("report", as_typed(&self.dir.join(REPORT_FILE))),
        }
    }

    /// What was saved last; the folder, when nothing was.
    pub fn saved(&self) -> &Path {
        &self.saved
    }

    /// The log of the run: on rank 0 up to where a resumed run continues. Where an attempt before had saved no checkpoint,
    /// its metrics are kept as `metrics-N.jsonl`. To a complete run nothing is added. `past_cut`: `--max-steps` had cut the epoch
    /// that the run continues; the evaluation of the cut epoch is removed.
    ///
    /// # Errors
    ///
    /// Those of creating `metrics.jsonl`.
    pub fn log(
        &self,
        ctx: &RankContext,
        resumed: Option<Place>,
        info: &RunInfo,
        past_cut: bool,
    ) -> Result<RunLog> {
        let epoch = resumed.filter(|_| past_cut);
        let epoch = epoch.map(|place| next_step(place, info.steps).1 as f64);
        self.log_from(ctx, resumed, info, false, |record| {
            let is_of_cut = record.get("train_loss").is_some() && epoch_of(record) == epoch;
            (past_cut && is_of_cut).then_some(false)
        })
    }

    /// As [`log`](Self::log), if `keeps_it` does not say whether a record stays; `takes_over`: from a rank that was lost.
    fn log_from(
        &self,
        ctx: &RankContext,
        resumed: Option<Place>,
        info: &RunInfo,
        takes_over: bool,
        keeps_it: impl Fn(&Value) -> Option<bool>,
    ) -> Result<RunLog> {
        let next = resumed.map(|place| next_step(place, info.steps));
        let start = |attempt: u64| {
            let (step, epoch) = next.unzip();
            json!({ "attempt": attempt, "resumed_at": step, "epoch": epoch, "takes_over": takes_over })
        };
        let Some(dir) = self.opened.as_ref().filter(|_| self.complete.is_none()) else {
            return Ok(RunLog::start(ctx, MetricsLog::disabled(), None, start(0)));
        };
        let attempt = Attempt::next(dir, self.is_fresh);
        let from = next.map(|(step, epoch)| Resumption {
            step: step as f64,
            epoch: Some(epoch as f64),
        });
        let metrics = match from {
            Some(from) => MetricsLog::resume(dir, METRICS_FILE, 1, |record| {
                keeps_it(record).unwrap_or_else(|| keeps(from, attempt.version, record))
            })?,
            None => {
                if !self.is_fresh && dir.has(METRICS_FILE) {
                    set_metrics_aside(dir)?;
                }
                MetricsLog::create(dir, METRICS_FILE, 1)?
            }
        };
        let step = next.map_or(0, |(step, _)| step);
        let run = log::document(ctx, info, &attempt, step);
        if let Err(error) = log::write(dir, &run) {
            log::warn(RUN_FILE, error);
        }
        let events_log = match self.is_fresh {
            true => MetricsLog::create(dir, EVENTS_FILE, 1),
            false => MetricsLog::resume(dir, EVENTS_FILE, 1, |_| true),
        };
        let events_log = events_log.map_err(|error| log::warn(EVENTS_FILE, error));
        let files = log::Files {
            dir: dir.clone(),
            log: events_log.ok(),
            run,
        };
        Ok(RunLog::start(
            ctx,
            metrics,
            Some(files),
            start(attempt.number()),
        ))
    }

    /// The log of the run on the rank that takes the place of rank 0, at `place`; `records` are the last ones of metrics, which
    /// rank 0 may not have written.
    ///
    /// # Errors
    ///
    /// As [`log`](Self::log).
    pub fn log_of_lost(
        &self,
        ctx: &RankContext,
        place: Place,
        info: &RunInfo,
        records: &[Value],
    ) -> Result<RunLog> {
        let names = |record: &Value| -> Vec<String> {
            let record = record.as_object().into_iter().flatten();
            // A rank may lack it where another has it.
            let names = record.map(|(name, _)| name).filter(|name| *name != MFU);
            names.cloned().collect()
        };
        let same = |a: &Value, b: &Value| step_of(a) == step_of(b) && names(a) == names(b);
        let written = match &self.opened {
            Some(dir) => dir.read(METRICS_FILE, MAX_ROWS_BYTES)?.unwrap_or_default(),
            None => Vec::new(),
        };
        let written: Vec<Value> = written
            .split(|byte| *byte == b'\n')
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect();
        // All but steps' losses stay.
        let is_own = |record: &Value| record.get("loss").is_none().then_some(true);
        let mut log = self.log_from(ctx, Some(place), info, true, is_own)?;
        for record in records {
            if !written.iter().any(|known| same(known, record)) {
                log.write(record)?;
            }
        }
        Ok(log)
    }

    /// Sets the folder, of a rank that does not write there.
    pub fn set_dir(&mut self, dir: PathBuf) {
        self.saved.clone_from(&dir);
        self.dir = dir;
    }

    /// Whether this rank writes into the folder.
    pub fn is_opened(&self) -> bool {
        self.opened.is_some()
    }

    /// Saves the weights of a finished epoch, where the program does so.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn save_epoch(
        &mut self,
        epoch: usize,
        outline: &Outline,
        values: &mut Values<'_>,
    ) -> Result<()> {
        if self.files.each_epoch {
            let about = [("epoch", epoch.to_string())];
            self.save(&Files::epoch(epoch), outline, values, &about)?;
        }
        Ok(())
    }

    /// Saves the weights at the end, where the program does so: those of `outline`, which `values` returns a tensor at a
    /// time.
    ///
    /// # Errors
    ///
    /// Those of writing, and of `values`.
    pub fn save_weights(&mut self, outline: &Outline, values: &mut Values<'_>) -> Result<()> {
        match self.files.weights.clone() {
            Some(name) => self.save(&name, outline, values, &[]),
            None => Ok(()),
        }
    }

    fn save(
        &mut self,
        name: &str,
        outline: &Outline,
        values: &mut Values<'_>,
        more: &[(&str, String)],
    ) -> Result<()> {
        if let Some(dir) = &self.opened {
            let mut metadata = self.files.metadata();
            metadata.extend(more.iter().map(|(k, v)| ((*k).to_owned(), v.clone())));
            let mut not_finite = None;
            dir.write(name, |out| {
                not_finite = checkpoint::write_params_with(out, outline, &metadata, &mut *values)?;
                Ok(())
            })?;
            if let Some(tensor) = not_finite {
                say::note(format_args!(
                    "warning: {name} gets infinite or NaN weights (first in {})",
                    outline.name(tensor)
                ));
            }
            let pytorch = pytorch(Path::new(name));
            let pytorch = pytorch.to_string_lossy();
            let root = Path::new(name).file_stem().unwrap_or_default();
            let root = root.to_string_lossy();
            let saved = dir.write(&*pytorch, |out| {
                checkpoint::write_pth_with(out, &root, outline, values)
            });
            if let Err(error) = saved {
                // What lies there is of other weights than the file next to it.
                let _ = dir.remove(&pytorch);
                return Err(error);
            }
        }
        self.saved = self.dir.join(name);
        Ok(())
    }

    /// Saves the weights of the best epoch so far. The file of the best ones before stays in `checkpoints`, which may continue
    /// with them, under another name.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn save_best(
        &mut self,
        best: &BestEpoch,
        checkpoints: Option<&Folder>,
        outline: &Outline,
        values: &mut Values<'_>,
    ) -> Result<()> {
        if let (Some(dir), Some(checkpoints)) = (&self.opened, checkpoints)
            && let Some(name) = self.best_metadata().as_ref().and_then(kept_name)
        {
            let kept = checkpoints.made()?;
            let [weights, pth] = ["safetensors", "pth"].map(|end| format!("{name}.{end}"));
            // First this one, so that it never lies next to the weights of another epoch.
            if dir.has(BEST_PTH) {
                dir.rename_into(BEST_PTH, &kept, &pth)?;
            }
            let linked = dir.link_into(BEST_FILE, &kept, &weights);
            linked.or_else(|_| dir.rename_into(BEST_FILE, &kept, &weights))?;
        }
        let saved = self.saved.clone();
        let outcome = self.save(BEST_FILE, outline, values, &best.metadata());
        self.saved = saved;
        outcome
    }

    /// What the file of the best weights says of them, on rank 0.
    fn best_metadata(&self) -> Option<BTreeMap<String, String>> {
        let path = self.opened.as_ref()?.path().join(BEST_FILE);
        let is_file = path.is_file();
        is_file.then(|| checkpoint::read_metadata(&path).unwrap_or_default())
    }

    /// Whether the file of the best weights is there and has those of `best`. Only rank 0 looks.
    pub fn has_best(&self, best: &BestEpoch) -> bool {
        let all = best.metadata();
        self.best_metadata().is_some_and(|there| {
            all.iter()
                .all(|(name, value)| there.get(*name) == Some(value))
        })
    }

    /// Before the first step: makes the file of the best weights that of `best`, which may be among the `checkpoints`, and
    /// gives whether it is missing. One of a branch that this run leaves is renamed to `aside-best`. Only rank 0 looks.
    ///
    /// # Errors
    ///
    /// Those of renaming.
    pub fn lacks_best(
        &self,
        ctx: &RankContext,
        best: Option<&BestEpoch>,
        checkpoints: Option<&Folder>,
    ) -> Result<bool> {
        let Some(dir) = self.opened.as_ref().filter(|_| self.complete.is_none()) else {
            return Ok(false);
        };
        let kept = checkpoints.map(Folder::existing).transpose()?.flatten();
        let is_there = || best.is_some_and(|best| self.has_best(best));
        if let Some(metadata) = self.best_metadata().filter(|_| !is_there()) {
            let name = kept_name(&metadata);
            for (from, to) in [(BEST_PTH, "aside-best.pth"), (BEST_FILE, ASIDE_BEST_FILE)] {
                if !dir.has(from) {
                    dir.remove(to)?;
                    continue;
                }
                // For a run that continues that branch; without links, only the file aside is left of it.
                if let (Some(kept), Some(name)) = (&kept, &name) {
                    let end = from.trim_start_matches("best");
                    let _ = dir.link_into(from, kept, &format!("{name}{end}"));
                }
                dir.rename(from, to)?;
            }
            ctx.note(&format!(
                "renamed {BEST_FILE}, newer than the checkpoint resumed, to {ASIDE_BEST_FILE}"
            ));
        }
        if let (Some(kept), Some(name)) = (kept, best.and_then(BestEpoch::kept_name)) {
            for to in [BEST_PTH, BEST_FILE] {
                let from = format!("{name}{}", to.trim_start_matches("best"));
                if kept.has(&from) && !dir.has(to) {
                    kept.rename_into(&from, dir, to)?;
                }
            }
        }
        Ok(best.is_some() && !is_there())
    }

    /// Saves the list of accuracies, where the document has one.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn save_accuracies(&self, accuracies: &[f64]) -> Result<()> {
        match (&self.opened, &self.files.accuracies) {
            (Some(dir), Some(name)) => Ok(write_summary_in(dir, name, &accuracies)?),
            _ => Ok(()),
        }
    }

    /// Writes `rows` to the file `name`, a JSON object a line.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn save_rows(&self, name: &str, rows: &[impl Serialize]) -> Result<()> {
        let Some(dir) = &self.opened else {
            return Ok(());
        };
        let text = json_lines(name, rows)?;
        dir.write(name, |out| out.write_all(&text))
    }

    /// The rows of the file `name` that [`save_rows`](Self::save_rows) wrote; none without the file. Lines that are
    /// not such rows are left out.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn load_rows<T: DeserializeOwned>(&self, name: &str) -> Result<Vec<T>> {
        let Some(dir) = &self.opened else {
            return Ok(Vec::new());
        };
        let text = dir.read(name, MAX_ROWS_BYTES)?.unwrap_or_default();
        let lines = text.split(|byte| *byte == b'\n');
        Ok(lines
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect())
    }

    /// Writes `png`, the images of `predictions.jsonl`, to `predictions.png`.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn save_pictures(&self, png: &[u8]) -> Result<()> {
        match &self.opened {
            Some(dir) => Ok(dir.write(PICTURES_FILE, |out| out.write_all(png))?),
            None => Ok(()),
        }
    }

    /// Writes the summary, with which a run is complete, and `report.html`. A report that cannot
    /// be written is a warning.
    ///
    /// # Errors
    ///
    /// Those of writing.
    pub fn save_summary(&self, summary: &serde_json::Value) -> Result<()> {
        if let Some(dir) = &self.opened {
            write_summary_in(dir, SUMMARY_FILE, summary)?;
        }
        self.save_report();
        Ok(())
    }

    /// Writes `report.html`. One that cannot be written is a warning.
    pub fn save_report(&self) {
        if let Some(Err(error)) = self.opened.as_ref().map(phalanx_report::write_of) {
            say::note(format_args!("warning: no {REPORT_FILE}: {error}"));
        }
    }
}

/// The step that comes next, counted from 0 over the epochs of this many steps, and its epoch, from 1.
pub(crate) fn next_step(place: Place, steps: usize) -> (u64, u64) {
    let before = place.epoch.saturating_mul(steps as u64);
    (before.saturating_add(place.step_in_epoch), place.epoch + 1)
}

fn step_of(record: &Value) -> f64 {
    record["step"].as_f64().unwrap_or(f64::INFINITY)
}

fn epoch_of(record: &Value) -> Option<f64> {
    record["epoch"].as_f64()
}

/// Whether a record of `metrics.jsonl`, written by a run of this version, stays for a run that resumes at `from`.
fn keeps(from: Resumption, version: u64, record: &Value) -> bool {
    let is_own = record.get("loss").or(record.get("train_loss")).is_none();
    let step = step_of(record);
    match epoch_of(record) {
        None => step < from.step,
        Some(_) if is_own && version < log::VERSION => from.keeps(step, None),
        epoch => from.keeps(step, epoch),
    }
}

/// Reports this run's folder to a launcher that asks for it. The training does not depend on it.
fn name_to_launcher(dir: &Dir) {
    if let Some(pointer) = std::env::var_os(RUN_POINTER_VARIABLE)
        && let Ok(path) = dir.path().canonicalize()
    {
        let _ = atomic_write(Path::new(&pointer), path.as_os_str().as_encoded_bytes());
    }
}

/// `rows` as JSON, an object a line; `name` for errors.
pub(crate) fn json_lines(name: &str, rows: &[impl Serialize]) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    for row in rows {
        serde_json::to_writer(&mut text, row).map_err(|e| {
            Error::new(ErrorKind::Failed, format!("{name}: a row is not JSON")).caused_by(e)
        })?;
        text.push(b'\n');
    }
    Ok(text)
}

/// Keeps the metrics of an attempt that saved no checkpoint as `metrics-N.jsonl`.
fn set_metrics_aside(dir: &Dir) -> Result<()> {
    let names = (1..).map(|n| format!("metrics-{n}.jsonl"));
    let free = names.into_iter().find(|name| !dir.has(name));
    dir.rename(METRICS_FILE, &free.unwrap_or_default())
}

/// Removes what an earlier run left in the same folder, complete or not, so
/// that a summary and weights always belong to the metrics next to them.
fn clear_earlier_run(dir: &Dir, files: &Files, _: &Fresh) -> Result<()> {
    let failed = |e: phalanx_base::Error| e.note("try", "another folder with --output-dir");
    let folders = [
        (crate::FLIGHT_DIR, "rank-", ".json"),
        (IMAGES_DIR, "", ".png"),
        (TABLES_DIR, "", ".jsonl"),
    ];
    for name in dir.names().map_err(failed)? {
        for (folder, start, ending) in folders.iter().filter(|(folder, ..)| name == *folder) {
            remove_within(dir, folder, start, ending).map_err(failed)?;
        }
        // Complete, or the temporary file of a run that was killed while saving:
        // `.NAME.<random>.tmp`.
        let temporary_of = || {
            let inner = name.strip_prefix('.')?.strip_suffix(".tmp")?;
            Some(inner.rsplit_once('.')?.0)
        };
        if files.has(&name) || temporary_of().is_some_and(|name| files.has(name)) {
            match dir.remove(&name) {
                // Neither report nor pictures end a run.
                Err(_) if [REPORT_FILE, PICTURES_FILE].contains(&&*name) => {}
                removed => removed.map_err(failed)?,
            }
        }
    }
    Ok(())
}

/// Removes an earlier run's files from a folder of flight recorders, logged images or tables.
fn remove_within(dir: &Dir, folder: &str, start: &str, ending: &str) -> phalanx_base::Result<()> {
    let Some(inner) = dir.sub(folder)? else {
        return Ok(());
    };
    for name in inner.names()? {
        if name.starts_with(start) && name.ends_with(ending) {
            match inner.remove(&name) {
                // Whichever program made the folder unwritable learns it when the next ones are written.
                Err(_) if folder == crate::FLIGHT_DIR => {}
                removed => removed?,
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::args::saving::tests::saving;
    use crate::args::{Attempt, Found};

    use super::*;

    #[test]
    fn only_files_of_this_program_are_an_earlier_runs() {
        let files = Files {
            model: "net".to_owned(),
            about: Vec::new(),
            weights: Some("net.safetensors".to_owned()),
            accuracies: None,
            each_epoch: true,
        };
        for ours in [
            "summary.json",
            "predictions.jsonl",
            "events.out.tfevents.1700000000.host.7.0",
            "predictions.png",
            "report.html",
            "net.safetensors",
            "epoch_12.safetensors",
            "epoch_12.pth",
            "net.pt",
            "best.safetensors",
            "best.pth",
            "aside-best.pth",
        ] {
            assert!(files.has(ours), "{ours}");
        }
        for other in [
            "metrics.jsonl",
            "notes.txt",
            "epoch_best.safetensors",
            "epoch_x.pth",
            "mnist_cnn.safetensors",
        ] {
            assert!(!files.has(other), "{other}");
        }
        let dir = tempfile::tempdir().expect("folder");
        for name in [
            "epoch_3.safetensors",
            ".epoch_3.safetensors.77-1.tmp",
            ".notes.tmp",
            "notes.txt",
        ] {
            std::fs::write(dir.path().join(name), "old").expect("written");
        }
        let opened = Dir::open(dir.path()).expect("folder");
        let found = RunDir::at(dir.path().to_owned())
            .settle(&Attempt::default(), &saving(&["--overwrite"]));
        let Found::Nothing(fresh) = found.expect("settled") else {
            panic!("not fresh");
        };
        clear_earlier_run(&opened, &files, &fresh).expect("cleared");
        let mut left: Vec<_> = std::fs::read_dir(dir.path())
            .expect("folder")
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        left.sort();
        assert_eq!(left, [".notes.tmp", "notes.txt"]);
    }
}
