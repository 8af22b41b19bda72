//! Resumable checkpoints of a running training: when one is saved, where the
//! last one is found, and how a training continues from it.
//!
//! Only rank 0 reads and writes files, so only its host needs the folder. Ranks
//! agree at the end of each step on what to do next: nothing, save, or save and
//! stop, because a signal or a flag asked one of them to.
//!
//! With DDP rank 0 copies the state, and saves the copy while training continues.
//! On a mesh no rank has all of it: rank 0 writes the file a tensor at a time, and
//! the ranks send their parts.

mod due;
mod history;
mod resumed;

pub use history::History;
pub use resumed::{Resumed, newest};

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::time::{Duration, Instant};

use phalanx_checkpoint::state::{Background, Folder, Place, SavedCheckpoint, Snapshot};
use phalanx_ddp::DistributedDataParallel;
use phalanx_global::CheckpointInfo;
use phalanx_nn::Params;
use serde::Deserialize;

use self::due::{Due, What};
use crate::args::{SaveErrors, SavingArgs};
use crate::best::{BestEpoch, KEPT_BEST};
use crate::error::{Error, ErrorKind, Result};
use crate::format::plural;
use crate::param_group::{ParamGroup, joined_state};
use crate::stop;
use crate::stop::signal_name;
use crate::update::Update;
use phalanx_member::RankContext;

/// What all ranks do after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveAction {
    /// Train on.
    Continue,
    /// Save, and train on.
    Save,
    /// Save, and stop.
    Stop,
}

/// What a checkpoint is taken of.
pub struct CheckpointSource<'a> {
    /// The model's parameters.
    pub params: &'a Params,
    /// In the place of the model's own buffers, where these are each rank's.
    pub buffers: Option<&'a [f32]>,
    /// The optimizer.
    pub update: &'a Update,
    /// The wrapper.
    pub ddp: &'a DistributedDataParallel,
}

/// What a program does with the JSON file of a complete checkpoint.
pub(crate) type AfterSaving<'a> = Box<dyn FnMut(&Path) -> Result<()> + 'a>;

/// Takes checkpoints of one training.
pub struct Saving<'a> {
    ctx: &'a RankContext,
    args: &'a SavingArgs,
    facts: BTreeMap<String, String>,
    /// What a file of the weights would say in addition to them.
    metadata: BTreeMap<String, String>,
    hook: Option<AfterSaving<'a>>,
    /// On rank 0, if there are checkpoints at all.
    background: Option<Background>,
    folder: Folder,
    /// Nothing is saved, as rank 0 cannot write.
    pub(crate) is_off: bool,
    /// Steps since the run was started or resumed.
    pub(crate) steps: u64,
    due: Due,
    /// Why all ranks stop, once they do: the signal that one of them got, or [`FLAG`].
    why: i32,
    /// How long the last save took that all ranks waited for.
    took: Duration,
    /// What a stop may take before a save was measured.
    estimate: Duration,
    /// Milliseconds that all ranks have asked their launchers for.
    grace_ms: i32,
}

/// How much longer a stop may take than the last save.
const SAVES_PER_STOP: u32 = 3;

/// A run that is shorter says nothing of a slow disk.
const TRIAL: Duration = Duration::from_secs(3);

/// What a slow disk takes in a second.
const SLOW_DISK_BYTES: f64 = 20e6;

/// No signal, but `--stop-after`; signals have larger numbers.
const FLAG: i32 = 1;

impl<'a> Saving<'a> {
    /// Prepares to save into `folder`. What comes after the place where a resumed run continues is set aside. From now on, SIGTERM, SIGINT, SIGHUP and
    /// SIGUSR1 end the training after a step, if there are checkpoints, or if this process is the only one of the training.
    ///
    /// # Errors
    ///
    /// System, naming the folder.
    pub fn open(
        ctx: &'a RankContext,
        args: &'a SavingArgs,
        (facts, metadata): (BTreeMap<String, String>, BTreeMap<String, String>),
        hook: Option<AfterSaving<'a>>,
        folder: Folder,
        resumed: Option<&Resumed>,
    ) -> Result<Saving<'a>> {
        if args.enabled() || ctx.world() == 1 && stop::is_watched_here() {
            stop::listen()?;
        }
        if args.enabled() {
            ctx.group().set_stop_grace(args.stop_grace());
        }
        if let Some(resumed) = resumed {
            resumed.set_aside(ctx, &folder)?;
        }
        Ok(Saving {
            ctx,
            args,
            facts,
            metadata,
            hook,
            background: (args.enabled() && ctx.is_main()).then(|| Background::new(folder.clone())),
            folder,
            is_off: false,
            took: Duration::ZERO,
            steps: 0,
            due: Due::new(args.save_every),
            why: 0,
            estimate: Duration::ZERO,
            grace_ms: 0,
        })
    }

    /// Whether there are checkpoints at all.
    pub fn enabled(&self) -> bool {
        self.args.enabled()
    }

    /// This rank saves into `folder` from now on, as rank 0 that was lost has done.
    pub(crate) fn take_over(&mut self, folder: Folder) {
        self.background = self.enabled().then(|| Background::new(folder.clone()));
        self.folder = folder;
    }

    /// What this rank wants to do after the training's step number `step`, counted from 1, for
    /// [`decide`](Self::decide); nothing where there are no checkpoints.
    ///
    /// # Errors
    ///
    /// A save that failed, unless these are only warned of; `Interrupted` by a signal, if there are
    /// no checkpoints.
    pub fn wishes(&mut self, step: u64) -> Result<Option<[i32; 3]>> {
        if !self.enabled() {
            return match stop::asked().filter(|_| self.ctx.world() == 1) {
                Some(signal) => Err(Error::new(
                    ErrorKind::Interrupted,
                    format!(
                        "interrupted by {}",
                        signal_name(stop::received().unwrap_or(signal))
                    ),
                )),
                None => Ok(None),
            };
        }
        self.steps += 1;
        let mut save = false;
        if let Some(background) = &mut self.background {
            let warns = self.ctx.started().elapsed() > TRIAL;
            match self.due.after(step, background.is_busy(), warns) {
                What::Nothing => {}
                What::Save => save = true,
                What::Hurry => background.hurry(),
                What::Warn { since } => self.ctx.note(&format!(
                    "warning: a checkpoint is due since step {since}, and after step {step} the previous one is still being written\n  the disk ({}) is too slow for this interval; raise --save-every",
                    self.folder.path().display()
                )),
            }
            let outcome = background.poll();
            self.handle_saved(outcome)?;
        }
        let enough = self.args.stop_after.is_some_and(|n| self.steps >= n);
        // Of several, the largest: SIGTERM before SIGUSR1.
        let why = stop::asked().unwrap_or(0).max(i32::from(enough) * FLAG);
        Ok(Some([i32::from(save), why, self.grace_wanted()]))
    }

    /// What to do, by the wishes of all ranks: the largest of each.
    pub fn decide(&mut self, wishes: [i32; 3]) -> SaveAction {
        if wishes[2] != self.grace_ms {
            self.grace_ms = wishes[2];
            let grace = Duration::from_millis(u64::try_from(self.grace_ms).unwrap_or(0));
            self.ctx.group().set_stop_grace(grace);
        }
        if self.why <= FLAG && wishes[1] > FLAG {
            stop::agreed();
        }
        self.why = wishes[1];
        match wishes {
            [0, 0, _] => SaveAction::Continue,
            [_, 0, _] => SaveAction::Save,
            _ => SaveAction::Stop,
        }
    }

    /// Milliseconds from SIGTERM to SIGKILL that this rank needs for a save: what was typed, or what the last one took
    /// (before the first, what its size lets expect) with some room, and not less than usual.
    fn grace_wanted(&self) -> i32 {
        let background = self.background.as_ref().map(Background::took);
        let needed = match background.unwrap_or_default().max(self.took) {
            Duration::ZERO => self.estimate,
            took => took.saturating_mul(SAVES_PER_STOP),
        };
        let grace = match self.args.stop_grace_s {
            Some(_) => self.args.stop_grace(),
            None => needed.max(stop::GRACE),
        };
        i32::try_from(grace.as_millis()).unwrap_or(i32::MAX)
    }

    /// Whether there is nothing to [prepare](Self::prepare).
    pub(crate) fn is_prepared(&self) -> bool {
        self.steps > 0 || self.args.save_every.is_none()
    }

    /// After the first step of a run that saves on the way, when the optimizer has all
    /// its state: finds rank 0 the memory for a checkpoint, so that no later step has to
    /// wait while the system clears each of its pages. *Blocks* until all ranks call it, if
    /// the optimizer is sharded.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn prepare(&mut self, params: &Params, update: &Update) -> Result<()> {
        if self.is_prepared() {
            return Ok(());
        }
        let buffers = update.optimizer().state().len();
        let bytes = size_of_val(params.flat()) * (1 + buffers);
        self.estimate = Duration::from_secs_f64(bytes as f64 / SLOW_DISK_BYTES);
        let optimizer = update.state(Vec::new())?;
        if let (Some(background), Some(optimizer)) = (&mut self.background, optimizer) {
            let (place, nothing) = (Place::default(), serde_json::Value::Null);
            let spare = Snapshot::take(params, optimizer, place, BTreeMap::new(), nothing);
            background.set_spare(spare);
        }
        Ok(())
    }

    /// Saves on rank 0, while training continues: all that the step waits for is a copy
    /// of the state in memory. Before a stop it is on the disk on return. *Blocks* until
    /// all ranks call it.
    ///
    /// # Errors
    ///
    /// As [`wishes`](Self::wishes); before a stop also a save that failed: there
    /// is nothing to continue from.
    pub(crate) fn save(
        &mut self,
        action: SaveAction,
        source: &CheckpointSource<'_>,
        groups: &[ParamGroup],
        place: Place,
        mut history: History,
    ) -> Result<()> {
        // For its memory.
        let (before, mut old) = match &mut self.background {
            Some(background) => (background.wait(), background.spare()),
            None => (Ok(None), None),
        };
        let memory = match (source.update, &mut old) {
            (Update::Part(_), Some(old)) => old.take_memory(),
            _ => Vec::new(),
        };
        history.skipped_steps = source.ddp.skipped_steps();
        let joined = joined_state(source.update, groups, source.params, memory)?;
        let (optimizer, mut saved) = joined.unzip();
        let saved = saved.get_or_insert_default();
        if let Some(main) = saved.first_mut() {
            main.skipped_steps = history.skipped_steps;
        }
        for (group, saved) in groups.iter().zip(saved.iter_mut().skip(1)) {
            saved.skipped_steps = group.ddp.skipped_steps();
        }
        history.groups = std::mem::take(saved);
        let (Some(background), Some(optimizer)) = (&mut self.background, optimizer) else {
            return Ok(());
        };
        let progress = serde_json::to_value(&history).map_err(no_json)?;
        let (facts, params) = (self.facts.clone(), source.params);
        let mut snapshot = Snapshot::take_into(old, params, optimizer, place, facts, progress);
        if let Some(buffers) = source.buffers {
            snapshot = snapshot.with_buffers(buffers)?;
        }
        let snapshot = snapshot.with_metadata(self.metadata.clone());
        let begun = match action {
            SaveAction::Stop => Ok(Some(background.save(snapshot)?)),
            _ => background.begin(snapshot),
        };
        self.handle_saved(before)?;
        self.handle_saved(begun)
    }

    /// Saves a training whose model and optimizer are split over the ranks, by `save`. Returns when the checkpoint is on
    /// the disk. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save), on all ranks.
    pub(crate) fn save_streamed(
        &mut self,
        action: SaveAction,
        place: Place,
        history: &History,
        save: impl FnOnce(&Folder, &CheckpointInfo) -> phalanx_global::Result<SavedCheckpoint>,
    ) -> Result<()> {
        if !self.enabled() {
            return Ok(());
        }
        let info = CheckpointInfo {
            place,
            facts: self.facts.clone(),
            progress: serde_json::to_value(history).map_err(no_json)?,
            metadata: self.metadata.clone(),
        };
        let began = Instant::now();
        let saved = save(&self.folder, &info);
        self.took = began.elapsed();
        match saved {
            // Without it, or the other ranks, the training cannot continue.
            Err(error) if action == SaveAction::Stop || error.comm().is_some() => Err(error.into()),
            saved => self.handle_saved(saved.map(Some).map_err(Error::from)),
        }
    }

    /// Waits until what was begun is on the disk.
    ///
    /// # Errors
    ///
    /// As [`wishes`](Self::wishes).
    pub fn finish(&mut self) -> Result<()> {
        let Some(background) = &mut self.background else {
            return Ok(());
        };
        let outcome = background.wait();
        self.handle_saved(outcome)
    }

    /// Says how to continue from what was saved, after a barrier.
    ///
    /// # Errors
    ///
    /// After SIGTERM, on all ranks, `Interrupted`, which is printed:
    /// whatever was to come after the training must not take it for complete.
    pub fn stop(&mut self, place: Place) -> Result<()> {
        let why = match self.why {
            FLAG => "as asked".to_owned(),
            // Ctrl-C counts as this, and a launcher sends this for it.
            // With 0 the launchers of all ranks have left.
            0 | stop::SIGTERM => "as asked by SIGTERM or Ctrl-C".to_owned(),
            signal => format!("as asked by {}", signal_name(signal)),
        };
        let steps = plural(usize::try_from(place.step).unwrap_or(usize::MAX), "step");
        self.ctx.note(&format!(
            "stopped {why} after {steps}; saved in {}\n  continue with --resume auto and the same --output-dir",
            self.folder.path().display()
        ));
        match self.why {
            stop::SIGTERM => {
                Err(Error::new(ErrorKind::Interrupted, "interrupted by SIGTERM").printed())
            }
            _ => Ok(()),
        }
    }

    /// Passes `outcome` of saving weights on the way on, or warns of it; `whose` they are.
    ///
    /// # Errors
    ///
    /// As [`wishes`](Self::wishes).
    pub fn handle_weights_error(&self, whose: &str, outcome: Result<()>) -> Result<()> {
        match outcome {
            Err(error) if self.args.save_errors == SaveErrors::Warn => {
                let text = error.chain();
                self.ctx
                    .note(&format!("warning: {whose} weights were not saved: {text}"));
                Ok(())
            }
            other => other,
        }
    }

    /// The folder of checkpoints, if there are any.
    pub(crate) fn folder(&self) -> Option<&Folder> {
        self.enabled().then_some(&self.folder)
    }

    /// Removes the files of earlier best weights with which no checkpoint continues any more.
    fn remove_unused_bests(&self) -> Result<()> {
        let Some(dir) = self.folder.existing()? else {
            return Ok(());
        };
        let mut names = dir.names()?;
        names.retain(|name| name.starts_with(KEPT_BEST));
        if names.is_empty() {
            return Ok(());
        }
        let mut used = HashSet::new();
        for progress in self.folder.progress()? {
            let history = History::deserialize(progress).map_err(no_json)?;
            used.extend(history.bests().filter_map(BestEpoch::kept_name));
        }
        names.retain(|name| {
            Path::new(name)
                .file_stem()
                .is_none_or(|stem| !used.contains(&*stem.to_string_lossy()))
        });
        names.iter().try_for_each(|name| dir.remove(name))
    }

    fn handle_saved(
        &mut self,
        outcome: phalanx_base::Result<Option<SavedCheckpoint>>,
    ) -> Result<()> {
        match outcome {
            Ok(None) => Ok(()),
            Ok(Some(saved)) => {
                if let Some(name) = saved.not_finite {
                    self.ctx.note(&format!(
                        "warning: {} has infinite or NaN weights (first in {name}); --resume auto prefers a checkpoint with finite ones",
                        saved.path.display()
                    ));
                }
                if self.ctx.is_main() {
                    // They are removed after the next checkpoint.
                    let _ = self.remove_unused_bests();
                }
                match self.hook.as_mut().filter(|_| self.ctx.is_main()) {
                    Some(hook) => hook(&saved.path),
                    None => Ok(()),
                }
            }
            Err(error) if self.args.save_errors == SaveErrors::Warn => {
                self.ctx
                    .note(&format!("warning: no checkpoint was saved: {error}"));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

impl Drop for Saving<'_> {
    /// After a training that failed: what was still being written may be worth a warning.
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

fn no_json(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Failed, "a checkpoint's manifest is not JSON").caused_by(error)
}
