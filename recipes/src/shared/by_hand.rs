//! The run around a training loop written by hand: its folder, checkpoints, metrics, files and summary.

use std::collections::BTreeMap;
use std::path::PathBuf;

use phalanx_checkpoint::digest::optimizer_sha256;
use phalanx_checkpoint::state::Place;
use phalanx_checkpoint::{self as checkpoint, Outline, full_values};
use phalanx_ddp::{DdpOptions, DistributedDataParallel, verify_equal};
use phalanx_nn::Params;
use phalanx_nn::optim::Sgd;
use phalanx_train::different_arguments;
use phalanx_train::{
    CHECKPOINTS_DIR, CheckpointSource, Files, History, LabelArgs, Output, RankContext, Resumed,
    RunInfo, RunLog, SaveAction, Saving, SavingArgs, Update, default_output_dir, settings_by_name,
};
use serde_json::{Value, json};

use crate::error::Result;
use crate::format::plural;
use crate::say;

/// What a program with a loop of its own tells of itself.
pub struct Facts {
    /// What it is called at the command line.
    pub name: &'static str,
    /// The files it writes.
    pub files: Files,
    /// Steps of the whole run.
    pub steps: usize,
    /// The learning rate of its SGD.
    pub lr: f64,
    /// Its flags that shape the result, a flag and its value a line.
    pub shaping: Vec<String>,
    /// What a resumed run must share with the one that was saved.
    pub resumable: BTreeMap<String, String>,
}

/// One rank's part in the run.
pub struct ByHand<'a> {
    ctx: &'a RankContext,
    facts: Facts,
    /// The model's parameters.
    pub params: Params,
    /// Averages their gradients.
    pub ddp: DistributedDataParallel,
    update: Update,
    /// `metrics.jsonl` and TensorBoard's events.
    pub log: RunLog,
    saving: Saving<'a>,
    output: Output,
    /// Steps taken before this process started.
    pub first: usize,
}

/// After `taken` steps. There is one epoch, and every step sees all samples.
fn place(taken: usize) -> Place {
    Place {
        step_in_epoch: taken as u64,
        step: taken as u64,
        ..Place::default()
    }
}

impl<'a> ByHand<'a> {
    /// Opens the run's folder, restores the checkpoint if there is one to resume, and says so.
    ///
    /// # Errors
    ///
    /// Usage and system errors, naming flag, folder or file.
    pub fn open(
        ctx: &'a RankContext,
        args: &'a SavingArgs,
        dir: Option<PathBuf>,
        mut params: Params,
        facts: Facts,
    ) -> Result<ByHand<'a>> {
        let name = facts.name;
        let dir = dir.unwrap_or_else(|| default_output_dir(name));
        let dir = ctx.folder_of_rank_0(dir)?;
        let resumed = Resumed::find(ctx, args, &dir)?;
        let shaping = settings_by_name(&facts.shaping);
        if let Some(resumed) = &resumed {
            resumed.check(&facts.resumable)?;
            resumed.params(&mut params, &shaping)?;
        }
        let mut must_agree = vec![format!("train {name}")];
        must_agree.extend(args.must_agree());
        must_agree.extend(facts.shaping.clone());
        let mut shown = settings_by_name(&must_agree);
        shown.remove("no");
        let options = DdpOptions {
            must_agree,
            ..DdpOptions::default()
        };
        let ddp = DistributedDataParallel::new(ctx.group.clone(), &mut params, options);
        let mut ddp = ddp.map_err(different_arguments)?;
        let mut update = Update::Whole(Box::new(Sgd::new(&params, facts.lr)));
        if let Some(resumed) = &resumed {
            resumed.wrapper(ctx, &mut ddp)?;
            resumed.update(ctx, &params, &mut update, &shaping)?;
        }
        let first = resumed.as_ref().map_or(0, |r| r.place().step as usize);
        let _starting = ctx.phase("starting");
        let mut output = Output::open(ctx, dir, facts.files.clone(), args)?;
        if first >= facts.steps {
            let digest = checkpoint::weights_sha256(&params);
            output.find_complete(ctx, &digest, ("iterations", facts.steps))?;
        }
        let saved = facts.resumable.clone().into_iter();
        let saved = saved.chain(shaping.clone()).collect();
        let info = RunInfo {
            program: name,
            title: name,
            data: "",
            steps: facts.steps,
            settings: shown,
            params: params.infos(),
            frozen: &[],
            labels: &LabelArgs::default(),
        };
        let log = output.log(ctx, resumed.as_ref().map(Resumed::place), &info)?;
        let checkpoints = output.checkpoints(CHECKPOINTS_DIR, args.keep());
        let saving = Saving::open(ctx, args, saved, checkpoints, resumed.as_ref())?;
        let saving = saving.with_metadata(facts.files.metadata());
        output.begin(output.dir(), args)?;
        output.reopen()?;
        ctx.note(&format!(
            "phalanx {}  {name}  {}\noutput   {}",
            env!("CARGO_PKG_VERSION"),
            ctx.describe(phalanx_nn::isa_name()),
            output.dir().display()
        ));
        if let Some(resumed) = &resumed {
            let all = plural(facts.steps, "step");
            ctx.note(&match first < facts.steps {
                true => format!("resumed  after {first} of {all}"),
                false => format!(
                    "resumed  after {first} of {all}: the run is complete; --iterations N for more"
                ),
            });
            resumed.announce_changes(ctx, &shaping);
        }
        Ok(ByHand {
            ctx,
            facts,
            params,
            ddp,
            update,
            log,
            saving,
            output,
            first,
        })
    }

    /// Ends step number `taken`, counted from 1: averages, updates the parameters unless a rank has voted
    /// against it, and saves when it is time. `true`: training goes on.
    ///
    /// # Errors
    ///
    /// Those of the group, and of writing the checkpoint; with a signal that stops the run, that one.
    pub fn end_step(&mut self, taken: usize) -> Result<bool> {
        let commit = self.ddp.finish()?;
        if commit.is_yes() {
            self.update.step(&mut self.params, &mut self.ddp, None)?;
        } else {
            let step = format_args!("step {taken}");
            self.ctx.note_skipped(&commit, step);
        }
        let mut now = self.saving.after_step(taken as u64)?;
        if taken == self.facts.steps && self.saving.enabled() {
            now = SaveAction::Save;
        }
        if now != SaveAction::Continue {
            let _phase = self.ctx.phase("saving");
            self.log.flush();
            let whole = CheckpointSource {
                params: &self.params,
                buffers: None,
                update: &self.update,
                ddp: &self.ddp,
            };
            self.saving
                .save(now, &whole, place(taken), History::default())?;
        }
        if now == SaveAction::Stop {
            self.log.stop();
            self.saving.stop(place(taken))?;
            return Ok(false);
        }
        Ok(true)
    }

    /// Compares the weights of all ranks, and saves them with the summary.
    ///
    /// # Errors
    ///
    /// Different weights; those of writing.
    pub fn finish(mut self, last_line: impl FnOnce(&Params) -> String) -> Result<()> {
        let ctx = self.ctx;
        let digest = checkpoint::weights_digest(&self.params);
        verify_equal(&ctx.group, &self.params, digest)?;
        ctx.line(&last_line(&self.params))?;
        let optimizer = self.update.state(Vec::new())?.map(optimizer_sha256);
        let phase = ctx.phase("saving");
        if self.output.complete().is_some() {
            self.log.finish();
            ctx.note(&format!(
                "complete nothing was changed in {}",
                self.output.dir().display()
            ));
            return Ok(ctx.group.barrier()?);
        }
        self.saving.finish()?;
        let outline = Outline::of(&self.params);
        let values = &mut |tensor| Ok(full_values(&self.params, tensor));
        self.output.save_weights(&outline, values)?;
        self.log.finish();
        self.output
            .save_summary(&self.summary(&digest, optimizer))?;
        drop(phase);
        // Nobody leaves before the files are complete.
        ctx.group.barrier()?;
        self.output.announce_report(ctx);
        Ok(())
    }

    fn summary(&self, digest: &[u8], optimizer: Option<String>) -> Value {
        json!({
            "recipe": self.facts.name,
            "version": env!("CARGO_PKG_VERSION"),
            "arguments": say::arguments(),
            "world_size": self.ctx.world(),
            "transport": self.ctx.describe(phalanx_nn::isa_name()),
            "iterations": self.facts.steps,
            "lr": self.facts.lr,
            "skipped_steps": self.ddp.skipped_steps(),
            "total_s": self.ctx.started.elapsed().as_secs_f64(),
            "weights_sha256": hex::encode(digest),
            "optimizer_sha256": optimizer,
        })
    }
}
