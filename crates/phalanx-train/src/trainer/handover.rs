//! What a rank that is behind, or joins, takes over from another one.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use phalanx_checkpoint::state::Place;
use phalanx_ddp::Commit;
use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::batch::StepContext;
use crate::error::{Error, Result};
use crate::evaluation::Evaluation;
use crate::saving::History;
use crate::strategy::{Strategy, skipped_steps};
use crate::timing::Timing;

/// A step whose gradients are averaged.
pub(super) struct Averaged {
    pub group: usize,
    pub step: Rc<StepContext>,
    pub commit: Commit,
    /// The model's buffers before the step and after it.
    pub buffers: [Vec<f32>; 2],
}

/// What a rank that is behind, or joins, takes over besides the model and the optimizers.
#[derive(Serialize, Deserialize)]
pub(super) struct Handover {
    pub completed: u64,
    result: String,
    place: Place,
    history: History,
    /// Of each group of parameters.
    skipped: Vec<u64>,
    initial: Option<String>,
    weights: String,
    /// Steps since the run was started or resumed.
    saved_steps: u64,
    /// The training's folder.
    folder: PathBuf,
    /// Since the command was started.
    elapsed: Duration,
    timing: Timing,
}

impl<M, S: Strategy> Trainer<'_, M, S> {
    pub(super) fn handover(&self) -> Handover {
        let running = self.course.running.as_ref();
        let losses = running.map(|running| running.losses.full());
        let results = &self.course.results;
        Handover {
            completed: self.elastic.completed,
            result: self.elastic.result.clone(),
            place: self.course.place,
            history: self.measured(&losses.unwrap_or_default()),
            skipped: skipped_steps(&self.strategy),
            initial: results.initial.clone(),
            weights: results.weights.clone(),
            saved_steps: self.saving.steps,
            folder: self.reports.output.dir().to_owned(),
            elapsed: self.ctx.started().elapsed(),
            timing: results.timing.clone(),
        }
    }

    /// Takes over the result of the unit that another rank has completed, and where this one joins, what the training has
    /// measured until then.
    pub(super) fn adopt(&mut self, handover: Handover) -> Result<()> {
        let own = std::mem::replace(&mut self.elastic.completed, handover.completed);
        self.elastic.result = handover.result;
        self.strategy.set_skipped_steps(&handover.skipped);
        if !std::mem::take(&mut self.elastic.joining) {
            if handover.completed != own + 1 {
                return Err(Error::internal(format!(
                    "this rank has completed {own} units of the training and another {}",
                    handover.completed
                )));
            }
            return match self.elastic.averaged.take() {
                Some(averaged) => self.complete(averaged),
                None => Ok(()),
            };
        }
        self.course.place = handover.place;
        let history = handover.history;
        if let Some(schedule) = &mut self.course.schedule {
            history.replay(schedule, handover.place.step);
        }
        self.course.take_program(&history);
        let results = &mut self.course.results;
        results.accuracies = history.accuracies();
        results.metrics = history.metrics().unwrap_or_default();
        results.last = history.last().unwrap_or_else(Evaluation::nothing);
        results.last_step = history.last_step();
        results.best.go_on(history.best(), &history.judged);
        (results.initial, results.weights) = (handover.initial, handover.weights);
        self.saving.steps = handover.saved_steps;
        self.reports.output.set_dir(handover.folder);
        // Should this rank write the run's files, its times continue from there.
        self.ctx.runs_since(handover.elapsed);
        // The peak is this rank's own.
        let own = std::mem::replace(&mut results.timing, handover.timing);
        results.timing.peak_flops_per_s = own.peak_flops_per_s;
        self.course.history = history;
        self.update_loop();
        Ok(())
    }

    /// Completes the step that another rank has completed.
    fn complete(&mut self, averaged: Averaged) -> Result<()> {
        let [before, after] = averaged.buffers;
        // Where parameters are whole, those of the other rank were taken over.
        if !S::CAN_GROW {
            self.set_buffers(&after);
        }
        self.update(averaged.group, &averaged.step, &averaged.commit, &before)
    }
}
