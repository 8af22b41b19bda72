//! Resumable checkpoints of a running training: when one is taken, where the
//! last one is found, and how a training goes on from it.
//!
//! Rank 0 reads and writes; the others hear of it, so only its host needs to
//! see the folder. Ranks agree at the end of each step on what to do next:
//! nothing, save, or save and stop, because somebody asked one of them to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx_comm::ReduceOp;
use phalanx_ddp::{DdpState, DistributedDataParallel, HookState};
use phalanx_nn::Params;
use phalanx_nn::optim::Optimizer;
use phalanx_train::state::{Background, Folder, Manifest, Place, Snapshot, State};
use serde::{Deserialize, Serialize};

use super::context::RankContext;
use crate::error::{Error, ErrorKind, Result};
use crate::ranks;
use crate::stop;

/// Folder of checkpoints in a run's output folder.
const FOLDER: &str = "checkpoints";

/// `--resume` with this goes on from the newest checkpoint, or from the start.
const AUTO: &str = "auto";

/// What to do about a checkpoint that cannot be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SaveErrors {
    /// End the training
    Stop,
    /// Warn, and train on
    Warn,
}

/// Arguments about resumable checkpoints.
#[derive(Debug, Clone, clap::Args)]
pub struct SavingArgs {
    /// Save resumable state every so many steps (later while the one before is still being written), after each epoch, and when SIGTERM or SIGUSR1 asks to stop
    #[arg(long, value_name = "STEPS")]
    pub save_every: Option<u64>,
    /// Resumable checkpoints to keep, the newest
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub keep: usize,
    /// What to do about a checkpoint that cannot be saved
    #[arg(long, value_enum, default_value_t = SaveErrors::Stop)]
    pub save_errors: SaveErrors,
    /// Go on from the newest checkpoint of the --output-dir, if there is one, of a run's folder, or from a checkpoint's JSON file
    #[arg(long, value_name = "auto|PATH")]
    pub resume: Option<String>,
    /// Save and stop after so many steps of this run
    #[arg(long, value_name = "STEPS")]
    pub stop_after: Option<u64>,
}

impl SavingArgs {
    /// Whether there are checkpoints at all.
    pub fn enabled(&self) -> bool {
        self.save_every.is_some() || self.resume.is_some() || self.stop_after.is_some()
    }

    /// Checks what can be checked before any rank is started.
    ///
    /// # Errors
    ///
    /// Usage errors naming the flag.
    pub fn validate(&self, has_folder: bool) -> Result<()> {
        ranks::check_count("--keep", self.keep, 1_000_000)?;
        for (flag, steps) in [
            ("--save-every", self.save_every),
            ("--stop-after", self.stop_after),
        ] {
            if steps == Some(0) {
                return Err(Error::usage(format!("{flag} must be at least 1")));
            }
        }
        if self.resume.as_deref() == Some(AUTO) && !has_folder {
            return Err(Error::usage(
                "--resume auto looks for checkpoints in the --output-dir; say which",
            ));
        }
        Ok(())
    }

    /// What must be the same on all ranks.
    pub fn must_agree(&self) -> Vec<String> {
        vec![
            format!("--save-every {:?}", self.save_every),
            format!("--stop-after {:?}", self.stop_after),
            format!("--resume {:?}", self.resume),
        ]
    }

    /// The run's folder that `--resume PATH` goes on in.
    pub fn resumed_dir(&self) -> Option<PathBuf> {
        let path = PathBuf::from(self.resume.as_ref().filter(|path| *path != AUTO)?);
        let checkpoints = if path.is_file() {
            path.parent()?
        } else {
            &path
        };
        if checkpoints.file_name()? == FOLDER {
            return Some(checkpoints.parent()?.to_path_buf());
        }
        checkpoints.join(FOLDER).is_dir().then_some(path)
    }
}

/// What is measured on the way, and must go on where it stopped.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct History {
    /// Test accuracy of each epoch, as bits: JSON would round.
    accuracies: Vec<u64>,
    /// All that went into the digest of the metrics.
    metrics: Vec<u64>,
    /// Sums of the running epoch's losses by part of the batches, and samples.
    losses: Vec<u64>,
    samples: u64,
    /// Steps that were voted down.
    skipped_steps: u64,
    hook: Option<Hook>,
}

/// The gradient hook's state; its numbers are in the data file.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Hook {
    name: String,
    steps: u64,
    /// Name and length.
    tensors: Vec<(String, usize)>,
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn floats(bits: &[u64]) -> Vec<f64> {
    bits.iter().map(|v| f64::from_bits(*v)).collect()
}

impl History {
    /// `losses` and `samples` are of the running epoch, over all ranks.
    pub fn new(accuracies: &[f64], metrics: &[f64], losses: &[f64], samples: usize) -> History {
        History {
            accuracies: bits(accuracies),
            metrics: bits(metrics),
            losses: bits(losses),
            samples: samples as u64,
            ..History::default()
        }
    }

    /// Test accuracy of each epoch.
    pub fn accuracies(&self) -> Vec<f64> {
        floats(&self.accuracies)
    }

    /// All that went into the digest of the metrics.
    pub fn metrics(&self) -> Vec<f64> {
        floats(&self.metrics)
    }

    /// Sums of the running epoch's losses by part, and samples.
    pub fn losses(&self) -> (Vec<f64>, usize) {
        (floats(&self.losses), self.samples as usize)
    }
}

/// Where a training goes on.
pub struct Resumed {
    manifest: Manifest,
    /// Rank 0 has the numbers.
    state: Option<State>,
    from: String,
}

impl Resumed {
    /// The checkpoint that `args` ask for; none, when they ask for none or
    /// `auto` finds none. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Usage or data, naming folder or file.
    pub fn find(ctx: &RankContext, args: &SavingArgs, dir: &Path) -> Result<Option<Resumed>> {
        let Some(wanted) = &args.resume else {
            return Ok(None);
        };
        let mut state = None;
        if ctx.is_main() {
            state = read(ctx, wanted, dir)?;
        }
        let text = match &state {
            Some(state) => Some(serde_json::to_string(state.manifest()).map_err(no_json)?),
            None => None,
        };
        let text: Option<String> = ctx.group.broadcast_object(Some(&text), 0)?;
        let Some(text) = text else {
            return Ok(None);
        };
        Ok(Some(Resumed {
            manifest: serde_json::from_str(&text).map_err(no_json)?,
            from: wanted.clone(),
            state,
        }))
    }

    /// An error unless the training now is the one that was saved.
    ///
    /// # Errors
    ///
    /// Usage, naming what differs and the way out.
    pub fn check(&self, facts: &BTreeMap<String, String>) -> Result<()> {
        let none = String::from("not there");
        for (name, now) in facts {
            let saved = self.manifest.facts.get(name).unwrap_or(&none);
            if saved != now {
                let what = format!(
                    "--resume {} goes on with a training whose {name} is {saved}, and here it is {now}",
                    self.from
                );
                let error = Error::usage(what);
                return Err(match name.as_str() {
                    GLOBAL_BATCH => error.note("try", format!("--global-batch-size {saved}")),
                    _ => error,
                });
            }
        }
        Ok(())
    }

    /// An error unless its place lies in epochs of so many steps.
    ///
    /// # Errors
    ///
    /// Failed, naming both.
    pub fn fits(&self, steps: usize) -> Result<()> {
        let Place {
            epoch,
            step_in_epoch,
            step,
            ..
        } = self.manifest.place;
        // Another sampler's padding makes a step more or less at another world size.
        let most = (u128::from(epoch) + 1) * (steps as u128 + 1);
        if step_in_epoch < steps as u64 && u128::from(step) <= most {
            return Ok(());
        }
        let what = format!(
            "--resume {}: step {step_in_epoch} of epoch {epoch} cannot be the training's step {step} where an epoch has {steps} steps",
            self.from
        );
        Err(Error::new(ErrorKind::Failed, what))
    }

    /// Where it goes on.
    pub fn place(&self) -> Place {
        self.manifest.place
    }

    /// What was measured before.
    ///
    /// # Errors
    ///
    /// Data, when the checkpoint is another program's.
    pub fn history(&self) -> Result<History> {
        History::deserialize(&self.manifest.progress).map_err(|e| {
            Error::new(
                ErrorKind::Failed,
                format!(
                    "--resume {}: the checkpoint does not say what was measured before it",
                    self.from
                ),
            )
            .caused_by(e)
        })
    }

    /// Sets the parameters on rank 0, whose are everybody's afterwards.
    ///
    /// # Errors
    ///
    /// Data, when it is of another model.
    pub fn params(&self, params: &mut Params) -> Result<()> {
        match &self.state {
            Some(state) => Ok(state.restore_params(params)?),
            None => Ok(()),
        }
    }

    /// Sets the wrapper's state on all ranks. *Blocks* until all call it.
    ///
    /// # Errors
    ///
    /// Usage, when gradients travelled otherwise; peers that are lost.
    pub fn wrapper(&self, ctx: &RankContext, ddp: &mut DistributedDataParallel) -> Result<()> {
        let history = self.history()?;
        let mut hook = None;
        if let Some(saved) = history.hook {
            let mut tensors = Vec::new();
            for (name, len) in saved.tensors {
                let mut values = match &self.state {
                    Some(state) => state.more(&name, len)?,
                    None => vec![0.0; len],
                };
                ctx.group.broadcast(&mut values, 0)?;
                tensors.push((name, values));
            }
            let steps = saved.steps;
            hook = Some((saved.name, HookState { steps, tensors }));
        }
        ddp.restore_state(&DdpState {
            skipped_steps: history.skipped_steps,
            hook,
        })?;
        Ok(())
    }

    /// Sets the optimizer's state on all ranks. *Blocks* until all call it.
    ///
    /// # Errors
    ///
    /// Data, when it is another optimizer's; peers that are lost.
    pub fn optimizer(
        &self,
        ctx: &RankContext,
        params: &Params,
        optimizer: &mut dyn Optimizer,
    ) -> Result<()> {
        if let Some(state) = &self.state {
            state.restore_optimizer(params, optimizer)?;
        }
        let mut buffers = Vec::new();
        for name in &self.manifest.optimizer_buffers {
            let own = optimizer.state().into_iter().find(|(own, _)| own == name);
            let mut values = match own {
                Some((_, values)) if self.state.is_some() => values.to_vec(),
                _ => vec![0.0; params.flat().len()],
            };
            ctx.group.broadcast(&mut values, 0)?;
            buffers.push((name.as_str(), values));
        }
        let views: Vec<(&str, &[f32])> = buffers.iter().map(|(n, v)| (*n, &v[..])).collect();
        Ok(optimizer.restore(self.manifest.optimizer_steps, &views)?)
    }
}

/// Reads the checkpoint on rank 0.
fn read(ctx: &RankContext, wanted: &str, dir: &Path) -> Result<Option<State>> {
    let path = if wanted == AUTO {
        dir.join(FOLDER)
    } else {
        PathBuf::from(wanted)
    };
    if path.is_file() {
        return Ok(Some(State::load(&path)?));
    }
    let inner = path.join(FOLDER);
    let path = if inner.is_dir() { inner } else { path };
    let (state, damaged) = Folder::new(&path, 1).newest()?;
    for text in damaged {
        ctx.note(&format!(
            "warning: passed over a damaged checkpoint: {text}"
        ));
    }
    if state.is_none() && wanted != AUTO {
        return Err(Error::usage(format!(
            "--resume {wanted}: there is no checkpoint in {}",
            path.display()
        )));
    }
    Ok(state)
}

fn no_json(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Failed, "a checkpoint's manifest is no JSON").caused_by(error)
}

/// The name of the fact that a flag can mend.
const GLOBAL_BATCH: &str = "global batch size";

/// What a resumed training must share with the one that was saved.
pub fn facts(
    program: &str,
    more: &[(&str, String)],
    global_batch: usize,
) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::from([
        ("program".to_owned(), program.to_owned()),
        (GLOBAL_BATCH.to_owned(), global_batch.to_string()),
    ]);
    facts.extend(more.iter().map(|(k, v)| ((*k).to_owned(), v.clone())));
    facts
}

/// What all ranks do after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Now {
    /// Train on.
    GoOn,
    /// Save, and train on.
    Save,
    /// Save, and stop.
    Stop,
}

/// What a checkpoint is taken of.
pub struct Whole<'a> {
    pub params: &'a Params,
    /// In the place of the model's own buffers, where these are each rank's.
    pub buffers: Option<&'a [f32]>,
    pub optimizer: &'a dyn Optimizer,
    pub ddp: &'a DistributedDataParallel,
}

/// Takes checkpoints of one training.
pub struct Saving<'a> {
    ctx: &'a RankContext,
    args: &'a SavingArgs,
    facts: BTreeMap<String, String>,
    /// On rank 0, if there are checkpoints at all.
    background: Option<Background>,
    path: PathBuf,
    /// Steps of this run.
    steps: u64,
    /// A checkpoint is due since the disk was last busy.
    due: bool,
}

impl<'a> Saving<'a> {
    /// Prepares to save into the run's folder `dir`; what an earlier run left
    /// there goes, unless this one goes on with it. From now on, SIGTERM and
    /// SIGUSR1 end the training in an orderly way, if there are checkpoints.
    ///
    /// # Errors
    ///
    /// System, naming the folder.
    pub fn open(
        ctx: &'a RankContext,
        args: &'a SavingArgs,
        facts: BTreeMap<String, String>,
        dir: &Path,
        resumed: bool,
    ) -> Result<Saving<'a>> {
        let folder = Folder::new(&dir.join(FOLDER), args.keep);
        if args.enabled() {
            stop::listen()?;
        }
        if ctx.is_main() && !resumed {
            folder.clear()?;
        }
        Ok(Saving {
            ctx,
            args,
            facts,
            path: folder.path().to_owned(),
            background: (args.enabled() && ctx.is_main()).then(|| Background::new(folder)),
            steps: 0,
            due: false,
        })
    }

    /// Whether there are checkpoints at all.
    pub fn enabled(&self) -> bool {
        self.args.enabled()
    }

    /// What to do after the training's step number `step`, counted from 1; the same on all
    /// ranks. *Blocks* until all ranks call it, if there are checkpoints.
    ///
    /// # Errors
    ///
    /// A save that failed, unless these are only warned of; peers that are lost.
    pub fn after_step(&mut self, step: u64) -> Result<Now> {
        if !self.enabled() {
            return Ok(Now::GoOn);
        }
        self.steps += 1;
        let mut save = false;
        if let Some(background) = &mut self.background {
            self.due |= self.args.save_every.is_some_and(|n| step.is_multiple_of(n));
            save = self.due && !background.is_busy();
            let outcome = background.poll();
            self.heed(outcome.map(|_| ()))?;
        }
        let stop = stop::asked().is_some() || self.args.stop_after.is_some_and(|n| self.steps >= n);
        let mut wishes = [i32::from(save), i32::from(stop)];
        if self.ctx.world() > 1 {
            self.ctx.group.all_reduce(&mut wishes, ReduceOp::Max)?;
        }
        self.due &= !save;
        Ok(match wishes {
            [_, 1] => Now::Stop,
            [1, _] => Now::Save,
            _ => Now::GoOn,
        })
    }

    /// After the first step of a run that saves on the way, when the optimizer has all
    /// its state: finds rank 0 the memory for a checkpoint, so that no later step has to
    /// wait while the system clears each of its pages.
    pub fn prepare(&mut self, params: &Params, optimizer: &dyn Optimizer) {
        if let (0, Some(_), Some(background)) =
            (self.steps, self.args.save_every, &mut self.background)
        {
            let (place, nothing) = (Place::default(), serde_json::Value::Null);
            let spare = Snapshot::take(params, optimizer, place, BTreeMap::new(), nothing);
            background.set_spare(spare);
        }
    }

    /// Saves on rank 0, while training goes on: all that the step waits for is a copy
    /// of the state in memory. Before a stop it is on the disk on return. *Blocks* until
    /// all ranks call it.
    ///
    /// # Errors
    ///
    /// As [`after_step`](Self::after_step); before a stop also a save that failed: there
    /// is nothing to go on from.
    pub fn save(
        &mut self,
        now: Now,
        whole: &Whole<'_>,
        place: Place,
        mut history: History,
    ) -> Result<()> {
        let state = whole.ddp.gather_state()?;
        history.skipped_steps = state.skipped_steps;
        let mut more = Vec::new();
        if let Some((name, hook)) = state.hook {
            let lengths = hook.tensors.iter().map(|(name, v)| (name.clone(), v.len()));
            history.hook = Some(Hook {
                name,
                steps: hook.steps,
                tensors: lengths.collect(),
            });
            more = hook.tensors;
        }
        let Some(background) = &mut self.background else {
            return Ok(());
        };
        let progress = serde_json::to_value(&history).map_err(no_json)?;
        // For its memory.
        let before = background.wait();
        let (old, facts) = (background.spare(), self.facts.clone());
        let (params, optimizer) = (whole.params, whole.optimizer);
        let mut snapshot = Snapshot::take_over(old, params, optimizer, place, facts, progress);
        if let Some(buffers) = whole.buffers {
            snapshot = snapshot.with_buffers(buffers)?;
        }
        let snapshot = snapshot.with_more(more);
        let begun = match now {
            Now::Stop => Ok(Some(background.save(snapshot)?)),
            _ => background.begin(snapshot),
        };
        self.heed(before.and(begun).map(|_| ()))
    }

    /// Waits until what was begun is on the disk.
    ///
    /// # Errors
    ///
    /// As [`after_step`](Self::after_step).
    pub fn finish(&mut self) -> Result<()> {
        let Some(background) = &mut self.background else {
            return Ok(());
        };
        let outcome = background.wait();
        self.heed(outcome.map(|_| ()))
    }

    /// Says how to go on from what was saved. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Peers that are lost.
    pub fn stop(&mut self, place: Place) -> Result<()> {
        self.ctx.group.barrier()?;
        let why = match stop::asked() {
            Some(signal) => format!("asked by signal {signal}"),
            None => "as asked".to_owned(),
        };
        self.ctx.note(&format!(
            "stopped {why} after {} steps; saved in {}\n  go on with --resume auto and the same --output-dir",
            place.step,
            self.path.display()
        ));
        Ok(())
    }

    fn heed(&self, outcome: phalanx_train::Result<()>) -> Result<()> {
        match outcome {
            Err(error) if self.args.save_errors == SaveErrors::Warn => {
                self.ctx
                    .note(&format!("warning: no checkpoint was saved: {error}"));
                Ok(())
            }
            other => Ok(other?),
        }
    }
}
