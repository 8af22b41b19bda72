//! What one image program has that others have not; [`super::fit`] is the rest.

use std::sync::Arc;

use phalanx_nn::losses::CrossEntropyOptions;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::optim::schedule::Schedule;
use phalanx_nn::{Params, Reduction, Scope, Tensor};
use phalanx_train::Dataset;

use super::output::Files;
use super::prepare::Fetch;
use super::settings::Settings;
use super::voice::Voice;
use crate::error::Result;

/// A training set and a test set.
pub struct Data {
    /// Trained on, augmented where the program does so.
    pub train: Arc<dyn Dataset>,
    /// Tested on, as it is.
    pub test: Arc<dyn Dataset>,
    /// For the person at the terminal.
    pub description: String,
    /// Tells other data apart, whatever its folder is called.
    pub content: String,
}

/// A network from images to one score a class.
pub trait Net {
    /// Images (N, H, W, C) to scores (N, classes).
    ///
    /// # Errors
    ///
    /// `Usage` for other shapes.
    fn forward<'s>(&self, x: Tensor<'s>) -> phalanx_nn::Result<Tensor<'s>>;
}

/// What training makes small. Validation takes the same without smoothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Loss {
    /// Of scores that are log-probabilities.
    Nll,
    /// Of scores as they are; this share of the target is spread over all classes.
    CrossEntropy { smoothing: f64 },
}

impl Loss {
    /// The loss of scores (N, classes), divided by `divisor`.
    ///
    /// # Errors
    ///
    /// `Usage` when labels do not fit.
    pub fn of<'s>(
        self,
        scores: Tensor<'s>,
        labels: &[u32],
        divisor: f32,
    ) -> phalanx_nn::Result<Tensor<'s>> {
        match self {
            Loss::Nll => scores.nll_loss(labels, divisor),
            Loss::CrossEntropy { smoothing: 0.0 } => scores.cross_entropy(labels, divisor),
            Loss::CrossEntropy { smoothing } => {
                let options = CrossEntropyOptions {
                    label_smoothing: smoothing,
                    reduction: Reduction::Sum,
                    ..CrossEntropyOptions::default()
                };
                scores
                    .cross_entropy_with(labels, options)?
                    .scale(1.0 / divisor)
            }
        }
    }

    /// The same without smoothing.
    pub fn plain(self) -> Loss {
        match self {
            Loss::Nll => Loss::Nll,
            Loss::CrossEntropy { .. } => Loss::CrossEntropy { smoothing: 0.0 },
        }
    }
}

/// A program of `phalanx train` that classifies images.
pub trait Program {
    /// Its network.
    type Net: Net;

    /// What it is called at the command line.
    fn name(&self) -> &'static str;

    /// What its network is called.
    fn title(&self) -> &'static str;

    /// What every program has.
    fn settings(&self) -> &Settings;

    /// The files it writes.
    fn files(&self) -> Files;

    /// As the user typed it, for the summary.
    fn data_name(&self) -> String;

    /// Settings of its own that must be the same on all ranks, a flag and its value a line.
    /// Those that differ from a checkpoint's are told.
    fn must_agree(&self) -> Vec<String>;

    /// How its data are got first, where they may be missing.
    fn fetch(&self) -> Option<Fetch>;

    /// Reads or makes its data.
    ///
    /// # Errors
    ///
    /// Usage or data, naming folder or file.
    fn data(&self) -> Result<Data>;

    /// Registers its parameters.
    fn net(&self, scope: &mut Scope) -> Self::Net;

    /// Sets parameters that start otherwise than registered. Rank 0's are
    /// everybody's afterwards.
    ///
    /// # Errors
    ///
    /// Those of reading samples.
    fn prepare(&self, _params: &mut Params, _data: &Data) -> Result<()> {
        Ok(())
    }

    /// Parameters that are not trained, by name.
    fn frozen(&self) -> Vec<String> {
        Vec::new()
    }

    /// The optimizer, and in words. `world` ranks train.
    fn optimizer(&self, params: &Params, world: usize) -> (Box<dyn Optimizer>, String);

    /// The learning rate of each step; none keeps the optimizer's. `steps` are
    /// all of the run.
    ///
    /// # Errors
    ///
    /// Usage, when so few steps make no schedule.
    fn schedule(&self, _world: usize, _steps: usize) -> Result<Option<Schedule>> {
        Ok(None)
    }

    /// What is made small.
    fn loss(&self) -> Loss;

    /// Whether validation also looks at each image mirrored, and adds the scores.
    fn tests_mirrored(&self) -> bool {
        false
    }

    /// Whether `--sampler torch` drops a last batch that is short.
    fn drops_last(&self) -> bool {
        false
    }

    /// Who tests under `--exact-validation false`.
    fn testers(&self) -> Testers;

    /// What it prints.
    fn voice(&self) -> Box<dyn Voice>;
}

/// Who tests the whole test set in a document's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Testers {
    /// Rank 0, while the others wait.
    Rank0,
    /// Every rank, each the whole set.
    Everybody,
}
