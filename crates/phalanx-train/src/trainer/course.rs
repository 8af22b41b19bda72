//! How far a training has come, and what was measured on the way.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

use phalanx_checkpoint::digest::MetricsDigest;
use phalanx_checkpoint::state::Place;
use phalanx_nn::optim::schedule::Schedule;
use serde_json::Value;

use super::extent::{Extent, LoopState};
use super::losses::{EpochLoss, Losses};
use crate::args::Settings;
use crate::batch::BatchPosition;
use crate::best::{Best, BestMeasure, EarlyStopping};
use crate::error::Result;
use crate::evaluation::Evaluation;
use crate::lr_finder::{self, LrFinder};
use crate::saving::{History, Resumed, SaveAction};
use crate::strategy::State;
use crate::timing::Timing;

/// Makes a schedule of a learning rate and a number of steps.
pub(super) type MakeSchedule<'j> = Box<dyn FnOnce(f64, u64) -> Result<Option<Schedule>> + 'j>;

/// A course, as the builder describes it.
#[derive(Default)]
pub(super) struct CoursePlan<'j> {
    pub(super) schedule: Option<MakeSchedule<'j>>,
    pub(super) best: Option<String>,
    pub(super) early_stopping: Option<EarlyStopping>,
}

/// How far a training has come.
pub(super) struct Course {
    pub(super) extent: Extent,
    /// The step of the epoch before which its round ends.
    pub(super) round_end: usize,
    pub(super) schedule: Option<Schedule>,
    pub(super) lr_finder: Option<LrFinder>,
    /// The learning rate that the program has set.
    pub(super) set_lr: Option<f64>,
    /// What was decided after the round's last step, to be done after its evaluation; with a state of the program's own also
    /// after other steps, to be done before the next one.
    pub(super) due: SaveAction,
    pub(super) own_state: OwnState,
    pub(super) place: Place,
    /// What was measured before it was resumed.
    pub(super) history: History,
    /// The epoch that is being trained.
    pub(super) running: Option<Running>,
    pub(super) loop_state: Rc<LoopState>,
    /// Where the program is in the batches that it got last.
    pub(super) position: Rc<Cell<BatchPosition>>,
    /// An epoch that has ended and is not saved yet.
    pub(super) ended: Option<Ended>,
    pub(super) results: Results,
}

/// An epoch between its first step and its last.
pub(super) struct Running {
    pub(super) epoch: usize,
    pub(super) losses: EpochLoss,
    pub(super) began: Instant,
}

/// An epoch after its last step.
pub(super) struct Ended {
    pub(super) epoch: usize,
    /// Where its evaluation is drawn in curves.
    pub(super) step: usize,
    pub(super) train_loss: f64,
    /// The sums of its losses, and their samples, if `--max-steps` has cut it.
    pub(super) losses: Losses,
    /// Its weights were compared.
    pub(super) is_checked: bool,
    /// It has its evaluation.
    pub(super) is_recorded: bool,
}

/// A state of the program's own, in its checkpoints.
#[derive(Default)]
pub(super) struct OwnState {
    pub(super) value: Option<Value>,
    /// The program has one: what it does after a step belongs to the checkpoint of that step.
    pub(super) is_used: bool,
}

/// What is measured on the way.
pub(super) struct Results {
    /// SHA-256 of the weights before the first step, on rank 0, unless the run was resumed.
    pub(super) initial: Option<String>,
    /// SHA-256 of the weights after the last epoch.
    pub(super) weights: String,
    /// That of their averages, which are in the files, on rank 0.
    pub(super) averages: Option<String>,
    /// Test accuracy of each epoch.
    pub(super) accuracies: Vec<f64>,
    /// The last one, and the steps of the training before it, as far as they are known.
    pub(super) last: Evaluation,
    pub(super) last_step: Option<u64>,
    /// What was measured before it, where `--max-steps` has cut an epoch for it.
    pub(super) before_cut: Option<History>,
    pub(super) best: Best,
    pub(super) metrics: MetricsDigest,
    pub(super) timing: Timing,
}

impl CoursePlan<'_> {
    /// The course of a training whose epochs have this number of `steps`, at its start or where it is `resumed`. The optimizers of
    /// `state` get the schedule's momentum.
    ///
    /// # Errors
    ///
    /// Usage, naming the flag or the builder's method; those of the schedule; a checkpoint of another training.
    pub(super) fn begin(
        self,
        settings: &Settings,
        steps: usize,
        lr: f64,
        resumed: Option<&Resumed>,
        state: State<'_>,
    ) -> Result<Course> {
        let (place, mut history) = match resumed {
            Some(resumed) => {
                resumed.fits(steps)?;
                (resumed.place(), resumed.history()?)
            }
            None => Default::default(),
        };
        let extent = Extent::new(settings, steps);
        if extent.goes_past_cut(place) {
            history.go_past_cut(place.step, extent.is_end_of_part(place));
        }
        let lr_finder = settings.find_lr.then(LrFinder::default);
        let mut schedule = match (&lr_finder, self.schedule) {
            (Some(_), _) => Some(lr_finder::schedule(extent.all())),
            (None, Some(make)) => make(lr, extent.all())?,
            (None, None) => None,
        };
        if let Some(schedule) = &mut schedule {
            if let Some(momentum) = schedule.momentum() {
                // An optimizer without momentum of its own has it from now on, and state for it.
                for optimizer in state.optimizers {
                    optimizer.set_momentum(momentum)?;
                }
            }
            history.replay(schedule, place.step);
        }
        let wanted = self.best.as_deref().map(BestMeasure::parse).transpose()?;
        let mut best = Best::new(wanted, self.early_stopping);
        best.go_on(history.best(), &history.judged);
        let mut course = Course {
            extent,
            round_end: steps,
            schedule,
            lr_finder,
            set_lr: None,
            due: SaveAction::Continue,
            own_state: OwnState::default(),
            place,
            running: None,
            loop_state: Rc::default(),
            position: Rc::default(),
            ended: None,
            results: Results {
                initial: None,
                weights: String::new(),
                averages: None,
                accuracies: history.accuracies(),
                last: history.last().unwrap_or_else(Evaluation::nothing),
                last_step: history.last().and_then(|_| history.last_step()),
                before_cut: None,
                best,
                metrics: history.metrics().unwrap_or_default(),
                timing: Timing::default(),
            },
            history: History::default(),
        };
        course.take_program(&history);
        course.history = history;
        Ok(course)
    }
}

impl Course {
    /// Takes over what the program has set in the training that `history` is of.
    pub(super) fn take_program(&mut self, history: &History) {
        self.set_lr = history.lr();
        self.own_state.value = history.state.clone();
        self.own_state.is_used |= self.own_state.value.is_some();
    }

    /// Whether no step is left.
    pub(super) fn is_last(&self) -> bool {
        self.extent.is_over(self.place) || self.results.best.stops()
    }
}
