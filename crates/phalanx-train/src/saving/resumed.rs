//! A checkpoint that a training continues from.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use phalanx_base::files::as_typed;
use phalanx_checkpoint::state::{Folder, Manifest, Place, State};
use phalanx_global::GlobalParams;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::{ParamId, Params};
use serde::Deserialize;

use super::{History, no_json};
use crate::args::{AUTO, FOLDER, Found, GLOBAL_BATCH, GRADIENT_TYPE, PROGRAM, SavingArgs};
use crate::error::{Error, ErrorKind, Result, refuse};
use crate::format::plural;
use crate::param_group::ParamGroup;
use crate::update::Update;
use phalanx_member::RankContext;

/// Flags of all trainings on which no optimizer's state depends.
const OF_NO_OPTIMIZER: [&str; 10] = [
    "--accumulate",
    "--deterministic",
    "--drop-last",
    "--epochs",
    "--eval-every",
    "--find-lr",
    "--limit-test",
    "--lr",
    "--max-steps",
    "--precision",
];

/// What a fact was in checkpoints that do not have it.
fn before_it_was_saved(fact: &str) -> Option<&'static str> {
    // Until 2026-11-22.
    (fact == GRADIENT_TYPE).then_some("f32")
}

/// Where a training continues.
pub struct Resumed {
    manifest: Manifest,
    /// Rank 0 has the numbers.
    state: Option<State>,
    from: String,
}

impl Resumed {
    /// The checkpoint that rank 0's `args` ask for; none, when they ask for none or
    /// `auto` finds none. *Blocks* until all ranks call it, whatever theirs are: they are compared later.
    ///
    /// # Errors
    ///
    /// Usage or data, naming folder or file.
    pub fn find(ctx: &RankContext, args: &SavingArgs, dir: &Path) -> Result<Option<Resumed>> {
        let mut state = None;
        if ctx.is_main() && args.enabled() {
            let _phase = ctx.phase("reading the checkpoint");
            state = read_wanted(ctx, args, dir)?;
        }
        let text = match &state {
            Some(state) => Some(serde_json::to_string(state.manifest()).map_err(no_json)?),
            None => None,
        };
        let text: Option<String> = ctx.group().broadcast_object(Some(&text), 0)?;
        let Some(text) = text else {
            return Ok(None);
        };
        Ok(Some(Resumed {
            manifest: serde_json::from_str(&text).map_err(no_json)?,
            from: args.resume.clone().unwrap_or_else(|| AUTO.to_owned()),
            state,
        }))
    }

    /// An error unless the training now is the one that was saved.
    ///
    /// # Errors
    ///
    /// Usage, naming what differs and the way out.
    pub fn check(&self, facts: &BTreeMap<String, String>) -> Result<()> {
        let (first, rest): (Vec<_>, Vec<_>) = facts.iter().partition(|(name, _)| *name == PROGRAM);
        for (name, now) in first.into_iter().chain(rest) {
            let saved = self.manifest.facts.get(name).map(String::as_str);
            let saved = saved.or_else(|| before_it_was_saved(name));
            if saved == Some(now) {
                continue;
            }
            let from = &self.from;
            let Some(saved) = saved else {
                refuse!("--resume {from} continues a training without {name}; this run has {now}");
            };
            let what = format!(
                "--resume {from} continues a training whose {name} is {saved}; this run has {now}"
            );
            let error = Error::usage(what);
            return Err(match name.as_str() {
                GLOBAL_BATCH => error.note("try", format!("--global-batch-size {saved}")),
                _ => error,
            });
        }
        Ok(())
    }

    /// Which of `settings` are others than those of the run that was saved, a line each: they
    /// are allowed, but one who forgets a flag must hear of it. What the checkpoint does not
    /// say is passed over.
    pub fn changed(&self, settings: &BTreeMap<String, String>) -> Vec<String> {
        let line = |(flag, now): (&String, &String)| {
            let saved = self.manifest.facts.get(flag)?;
            (saved != now).then(|| format!("{flag} {saved} -> {now}"))
        };
        settings.iter().filter_map(line).collect()
    }

    /// Prints them on rank 0.
    pub fn announce_changes(&self, ctx: &RankContext, settings: &BTreeMap<String, String>) {
        for line in self.changed(settings) {
            ctx.note(&format!("changed since the checkpoint: {line}"));
        }
    }

    /// An error unless its place lies in epochs of this many steps.
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

    /// Sets aside what `folder` has of a branch that this run leaves: checkpoints of more
    /// steps than the one it continues from, all of them if that lies elsewhere. Nothing on
    /// other ranks than 0.
    ///
    /// # Errors
    ///
    /// System, naming the file.
    pub(super) fn set_aside(&self, ctx: &RankContext, folder: &Folder) -> Result<()> {
        let Some(state) = &self.state else {
            return Ok(());
        };
        let real = |path: &Path| std::fs::canonicalize(path).ok();
        let from = real(state.path()).and_then(|path| path.parent().map(Path::to_owned));
        let here = from.is_some() && from == real(folder.path());
        let aside = folder.set_aside(here.then_some(self.manifest.place.step))?;
        if let Some(newest) = aside.last() {
            ctx.note(&format!(
                "renamed {}, newer than the checkpoint resumed; to use the last: --resume {}",
                plural(aside.len(), "checkpoint"),
                as_typed(newest)
            ));
        }
        Ok(())
    }

    /// Where it continues.
    pub fn place(&self) -> Place {
        self.manifest.place
    }

    /// What was measured before.
    ///
    /// # Errors
    ///
    /// Data, when the checkpoint is another program's.
    pub fn history(&self) -> Result<History> {
        let read = History::deserialize(&self.manifest.progress);
        let checked = read.and_then(|history| match history.metrics() {
            Some(_) => Ok(history),
            None => Err(serde::de::Error::custom("metrics_state is none of SHA-256")),
        });
        checked.map_err(|e| {
            Error::new(
                ErrorKind::Failed,
                format!(
                    "--resume {}: the checkpoint has no metrics history",
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
    /// Data, when it is of another model; usage, if `settings` have changed since the checkpoint, naming them.
    pub fn params(&self, params: &mut Params, settings: &BTreeMap<String, String>) -> Result<()> {
        let Some(state) = &self.state else {
            return Ok(());
        };
        let restored = state.restore_params(params);
        restored.map_err(|error| self.another_model(error, settings))
    }

    /// Loads parameters and optimizer of a mesh: rank 0 reads a tensor at a time, and each rank gets its parts. *Blocks*
    /// until all ranks call it.
    ///
    /// # Errors
    ///
    /// As [`params`](Self::params) and [`update`](Self::update), on all ranks.
    pub(crate) fn mesh(
        &self,
        weights: &mut GlobalParams,
        optimizer: &mut dyn Optimizer,
        settings: &BTreeMap<String, String>,
    ) -> Result<()> {
        let loaded = weights.load_state(self.state.as_ref(), &self.manifest, optimizer);
        loaded.map_err(|error| match error.kind() {
            phalanx_global::ErrorKind::File => self.another_model(error.into(), settings),
            phalanx_global::ErrorKind::Usage => self.another_optimizer(error.into(), settings),
            _ => error.into(),
        })
    }

    fn another_model(&self, error: Error, settings: &BTreeMap<String, String>) -> Error {
        let changed = self.changed(settings);
        match changed.is_empty() {
            true => error,
            false => error.into_usage().note("changed", changed.join("\n")),
        }
    }

    /// Restores an optimizer of the parameters `own` after `steps` steps, with the buffers `names`. Rank 0 reads them a
    /// parameter at a time, and each rank keeps its part. *Blocks* until all ranks call it.
    ///
    /// # Errors
    ///
    /// Data, when it is of another model; usage, when it is of another optimizer; peers that are lost.
    fn optimizer(
        &self,
        ctx: &RankContext,
        (params, own): (&Params, &[ParamId]),
        update: &mut Update,
        (steps, names): (u64, &[String]),
        settings: &BTreeMap<String, String>,
    ) -> Result<()> {
        let _phase = ctx.is_main().then(|| ctx.phase("reading the checkpoint"));
        let (all, mut updates) = (self.manifest.updates(params), vec![0; params.len()]);
        own.iter()
            .for_each(|id| updates[id.index()] = all[id.index()]);
        let mut parts = Vec::new();
        for name in names {
            let mut part = vec![0.0; update.part_len(params)];
            for id in own {
                let info = &params.infos()[id.index()];
                let mut values = match &self.state {
                    Some(state) => info.region(&state.optimizer_values(name, info)?)?,
                    None => Vec::new(),
                };
                values.resize(info.len, 0.0);
                ctx.group().broadcast(&mut values, 0)?;
                update.copy_part(params, *id, &values, &mut part);
            }
            parts.push((&name[..], part));
        }
        let views: Vec<(&str, &[f32])> = parts.iter().map(|(n, v)| (*n, &v[..])).collect();
        let restored = update.restore(steps, &updates, &views);
        restored.map_err(|cause| self.another_optimizer(cause, settings))
    }

    /// Gives the optimizer its state, on all ranks. *Blocks* until all call it.
    ///
    /// # Errors
    ///
    /// Usage, when it is of another optimizer, telling of `settings` that have changed; peers that
    /// are lost.
    pub fn update(
        &self,
        ctx: &RankContext,
        params: &Params,
        update: &mut Update,
        settings: &BTreeMap<String, String>,
    ) -> Result<()> {
        let own: Vec<ParamId> = params.ids().collect();
        let manifest = &self.manifest;
        let saved = (manifest.optimizer_steps, &manifest.optimizer_buffers[..]);
        self.optimizer(ctx, (params, &own), update, saved, settings)
    }

    fn another_optimizer(&self, cause: Error, settings: &BTreeMap<String, String>) -> Error {
        let from = &self.from;
        let mut own = settings.clone();
        own.retain(|flag, _| !OF_NO_OPTIMIZER.contains(&&**flag));
        let saved = |flag: &String| self.manifest.facts.get(flag);
        own.retain(|flag, now| saved(flag).is_some_and(|saved| saved != now));
        let pairs = |value: &dyn Fn(&String) -> String| {
            let pairs: Vec<String> = own.keys().map(value).collect();
            pairs.join(", ")
        };
        let what = match own.is_empty() {
            true => format!("--resume {from}: it was saved with another optimizer"),
            false => format!(
                "--resume {from} continues a training with {}; this run has {}",
                pairs(&|flag| format!("{flag} {}", self.manifest.facts[flag])),
                pairs(&|flag| format!("{flag} {}", own[flag])),
            ),
        };
        Error::usage(what).caused_by(cause)
    }

    /// [`wrapper`](Self::wrapper) and [`update`](Self::update) of all `groups` of a training.
    ///
    /// # Errors
    ///
    /// As those; usage, when other groups were saved.
    pub(crate) fn groups(
        &self,
        ctx: &RankContext,
        params: &Params,
        groups: &mut [ParamGroup],
        settings: &BTreeMap<String, String>,
    ) -> Result<()> {
        let saved = self.history()?.groups;
        let names = |names: Vec<&str>| match &names[..] {
            [] | [_] => "one optimizer".to_owned(),
            [_, more @ ..] => format!("optimizers of their own for {}", more.join(" and ")),
        };
        let was = names(saved.iter().map(|group| &group.name[..]).collect());
        let now = names(groups.iter().map(|group| &group.name[..]).collect());
        if was != now {
            let from = &self.from;
            refuse!("--resume {from} continues a training with {was}; this run has {now}");
        }
        if let [only] = groups {
            only.ddp.set_skipped_steps(self.history()?.skipped_steps);
            return self.update(ctx, params, &mut only.update, settings);
        }
        for (group, saved) in groups.iter_mut().zip(saved) {
            group.ddp.set_skipped_steps(saved.skipped_steps);
            let (own, update) = ((params, &group.params[..]), &mut group.update);
            self.optimizer(ctx, own, update, (saved.steps, &saved.buffers), settings)?;
        }
        Ok(())
    }
}

/// The newest checkpoint with finite weights of a run's folder, or of its folder of checkpoints, and the folder;
/// without any, the newest one. `note` gets a line for each that is passed over.
///
/// # Errors
///
/// Data, when there are only damaged ones; system.
pub fn newest(path: &Path, note: impl Fn(&str)) -> Result<(Option<State>, PathBuf)> {
    let inner = path.join(FOLDER);
    let path = match inner.is_dir() {
        true => inner,
        false => path.to_owned(),
    };
    let (state, passed) = Folder::new(&path, 1).newest()?;
    for text in passed {
        note(&format!("warning: {text}"));
    }
    Ok((state, path))
}

/// Reads the checkpoint that is wanted on rank 0. What an earlier attempt has saved comes before what was typed, which is
/// where that one began.
fn read_wanted(ctx: &RankContext, args: &SavingArgs, dir: &Path) -> Result<Option<State>> {
    let restarts = args.attempt.restarts;
    if restarts > 0 && matches!(args.found, Found::Attempt) {
        if let Some(state) = read(ctx, AUTO, dir)? {
            return Ok(Some(state));
        }
        ctx.note(&format!(
            "warning: restart {restarts} finds no checkpoint in {}: the attempt before had saved none",
            dir.join(FOLDER).display()
        ));
    }
    match &args.resume {
        Some(wanted) => read(ctx, wanted, dir),
        None => Ok(None),
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
        let weights = ["pt", "pth", "safetensors"];
        let is_weights = |end: &OsStr| weights.iter().any(|w| end == *w);
        if path.extension().is_some_and(is_weights) {
            let what = format!("--resume {wanted}: weights alone are not a resumable checkpoint");
            return Err(Error::usage(what)
                .note("try", "the .json of a checkpoint, or the run's folder")
                .note(
                    "or",
                    format!("--init {} starts a new training with them", as_typed(&path)),
                ));
        }
        let state = State::load(&path)?;
        warn_not_finite(ctx, &state);
        return Ok(Some(state));
    }
    let found = newest(&path, |text| ctx.note(text));
    let (state, path) = found.map_err(|error| match error.kind() {
        // All are damaged or unreadable: what is to become of them a person must say.
        ErrorKind::Data => error
            .into_usage()
            .note(
                "fix",
                "make them readable, or name a whole one with --resume FILE.json",
            )
            .note(
                "or",
                "begin anew in another --output-dir, or here with --overwrite instead of --resume",
            ),
        _ => error,
    })?;
    if state.is_none() && wanted != AUTO {
        refuse!(
            "--resume {wanted}: there is no checkpoint in {}",
            path.display()
        );
    }
    if let Some(state) = &state {
        warn_not_finite(ctx, state);
    }
    Ok(state)
}

/// Warns of a checkpoint that a run resumes from though its weights are not finite.
fn warn_not_finite(ctx: &RankContext, state: &State) {
    if let Some(warning) = state.warning() {
        ctx.note(&format!("warning: the checkpoint {warning}"));
    }
}
