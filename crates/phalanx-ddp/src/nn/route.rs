//! Where each parameter's gradient goes, and which parameters are used.

use phalanx_nn::{ParamId, Params};

use crate::error::{Error, Result};

/// How to handle parameters that a rank's loss does not depend on.
///
/// Finding them costs nothing: the tape knows them, and one element per parameter
/// behind the last bucket counts the ranks that used it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unused {
    /// A rank that does not use one contributes zeros. A parameter that no rank uses
    /// has no gradient, and optimizers skip it (PyTorch:
    /// `find_unused_parameters=True`).
    #[default]
    Allow,
    /// An error naming them (PyTorch's default, which does not name them).
    Refuse,
    /// Allowed, but they must be the same in every step; an error names the first that
    /// changes (PyTorch: `static_graph=True`).
    SameEveryStep,
}

/// Where the gradient of one parameter goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Selection {
    /// Into the reducer, under this number.
    Reduced(usize),
    /// Kept on this rank, in the flat region of the ignored.
    Ignored,
    /// Nowhere.
    Frozen,
    /// Belongs to a model that the wrapper was not made for.
    Unknown,
}

pub(crate) struct Routes {
    selection: Vec<Selection>,
    names: Vec<String>,
    lens: Vec<usize>,
    /// Gradients of ignored parameters; empty for all others.
    own: Vec<Vec<f32>>,
    /// Where later micro-batches of them, and frozen gradients, are written.
    scratch: Vec<f32>,
    /// Weights of the micro-batches of this step.
    weights: Vec<f32>,
    micro: usize,
    /// Whether the caller weighs the loss of the running micro-batch.
    pub(super) at_loss: bool,
    policy: Unused,
    /// Used by some micro-batch of this step.
    used: Vec<bool>,
    /// Used by the step that ended last.
    stepped: Vec<bool>,
    /// Used in the first step.
    first: Option<Vec<bool>>,
    /// Whether a backward of this step reported anything.
    any: bool,
}

impl Routes {
    /// # Errors
    ///
    /// `Usage` naming an ignored or frozen parameter that the model does not have, or one that is both.
    pub(crate) fn new(
        params: &Params,
        ignored: &[String],
        frozen: &[String],
        policy: Unused,
    ) -> Result<Routes> {
        for (what, names) in [("ignored", ignored), ("frozen", frozen)] {
            if let Some(name) = names.iter().find(|n| params.find(n).is_none()) {
                return Err(Error::usage(format!(
                    "{name} was to be {what}, but the model has no such parameter"
                )));
            }
        }
        if let Some(name) = ignored.iter().find(|n| frozen.contains(n)) {
            return Err(Error::usage(format!(
                "{name} is both ignored, so trained by each rank for itself, and frozen, so not trained; leave out one \
                 of both"
            )));
        }
        let mut next = 0;
        let selection: Vec<Selection> = params
            .infos()
            .iter()
            .map(|info| {
                if frozen.contains(&info.name) {
                    Selection::Frozen
                } else if ignored.contains(&info.name) {
                    Selection::Ignored
                } else {
                    next += 1;
                    Selection::Reduced(next - 1)
                }
            })
            .collect();
        let own = selection
            .iter()
            .zip(params.infos())
            .map(|(s, info)| match s {
                Selection::Ignored => vec![0.0; info.len],
                _ => Vec::new(),
            })
            .collect();
        Ok(Routes {
            names: params.infos().iter().map(|i| i.name.clone()).collect(),
            lens: params.infos().iter().map(|i| i.len).collect(),
            own,
            scratch: Vec::new(),
            weights: vec![1.0],
            micro: 0,
            at_loss: false,
            policy,
            used: vec![false; selection.len()],
            stepped: vec![false; selection.len()],
            first: None,
            any: false,
            selection,
        })
    }

    pub(crate) fn of(&self, param: ParamId) -> Selection {
        let known = self.selection.get(param.index());
        known.copied().unwrap_or(Selection::Unknown)
    }

    pub(crate) fn unknown(&self, param: ParamId) -> Error {
        Error::usage(format!(
            "parameter number {} is not one of the {} that DistributedDataParallel was made for; make a new one \
             after the model has changed",
            param.index(),
            self.selection.len()
        ))
    }

    /// Values of the ignored parameters, to outlive a broadcast.
    pub(crate) fn ignored_values(&self, params: &Params) -> Vec<(ParamId, Vec<f32>)> {
        params
            .ids()
            .filter(|id| self.of(*id) == Selection::Ignored)
            .map(|id| (id, params.get(id).to_vec()))
            .collect()
    }

    pub(crate) fn restore(&self, params: &mut Params, own: Vec<(ParamId, Vec<f32>)>) {
        for (id, values) in own {
            params.get_mut(id).copy_from_slice(&values);
        }
    }

    pub(crate) fn plan_step(&mut self, weights: &[f32]) {
        self.weights = weights.to_vec();
        self.micro = 0;
    }

    pub(crate) fn start_micro_batch(&mut self, index: usize) {
        self.at_loss = false;
        self.micro = index;
    }

    /// Memory for the gradient of a parameter that is not reduced. Backward
    /// finishes one parameter that is used once at a time, but a shared one
    /// may be interleaved with others, so that scratch is as long as all.
    pub(crate) fn slot(&mut self, param: ParamId) -> &mut [f32] {
        let index = param.index();
        let Some(&len) = self.lens.get(index) else {
            return &mut [];
        };
        if self.selection[index] == Selection::Ignored && self.micro == 0 {
            return &mut self.own[index];
        }
        let at: usize = self.lens[..index].iter().sum();
        let end = at + len;
        if self.scratch.len() < end {
            self.scratch.resize(end, 0.0);
        }
        &mut self.scratch[at..end]
    }

    /// Names of the ignored parameters.
    pub(crate) fn ignored_names(&self) -> Vec<String> {
        self.ignored().map(|i| self.names[i].clone()).collect()
    }

    fn ignored(&self) -> impl Iterator<Item = usize> {
        let all = self.selection.iter().enumerate();
        all.filter(|(_, s)| **s == Selection::Ignored)
            .map(|(i, _)| i)
    }

    /// The gradient of an ignored or frozen parameter is final. Returns its number among the ignored ones if the sum
    /// over this step's micro-batches is not finite.
    pub(crate) fn ready(&mut self, param: ParamId) -> Option<usize> {
        let index = param.index();
        if self.selection[index] != Selection::Ignored {
            return None;
        }
        // A rank's own mean: its weights over their sum.
        let total: f32 = self.weights.iter().sum();
        let own = self.weights.get(self.micro).copied().unwrap_or(0.0);
        let weight = match self.at_loss {
            true => 1.0 / total,
            false if own == total => 1.0,
            false => own / total,
        };
        let at: usize = self.lens[..index].iter().sum();
        let sum = &mut self.own[index];
        if own == 0.0 {
            if self.micro == 0 {
                sum.fill(0.0);
            }
        } else if self.micro == 0 {
            sum.iter_mut().for_each(|g| *g *= weight);
        } else {
            let new = &self.scratch[at..at + sum.len()];
            sum.iter_mut().zip(new).for_each(|(s, g)| *s += weight * g);
        }
        if phalanx_comm::all_finite(sum) {
            return None;
        }
        self.ignored().position(|i| i == index)
    }

    pub(crate) fn used(&mut self, param: ParamId) {
        if self.weights.get(self.micro) == Some(&0.0) {
            return; // a micro-batch without samples
        }
        self.any = true;
        if let Some(used) = self.used.get_mut(param.index()) {
            *used = true;
        }
    }

    /// Checks the used parameters of the ending step.
    pub(crate) fn check_unused(&mut self, rank: usize) -> Result<()> {
        if !self.any {
            return Ok(()); // a rank without data
        }
        let trained = |i: &usize| self.selection[*i] != Selection::Frozen;
        match (self.policy, &self.first) {
            (Unused::Refuse, _) => {
                let names: Vec<&str> = (0..self.used.len())
                    .filter(trained)
                    .filter(|i| !self.used[*i])
                    .map(|i| self.names[i].as_str())
                    .collect();
                if names.is_empty() {
                    return Ok(());
                }
                Err(Error::usage(format!(
                    "the loss of rank {rank} does not depend on {} of {} parameters: {}; leave them out of the \
                     model, freeze them, or allow it (Unused::Allow)",
                    names.len(),
                    self.used.len(),
                    names.join(", ")
                )))
            }
            (Unused::SameEveryStep, Some(first)) => {
                let changed = (0..self.used.len())
                    .filter(trained)
                    .find(|i| self.used[*i] != first[*i]);
                let Some(i) = changed else { return Ok(()) };
                let (then, now) = if first[i] {
                    ("used", "not used")
                } else {
                    ("not used", "used")
                };
                Err(Error::usage(format!(
                    "the graph was declared to be the same in every step, but on rank {rank} {} was {then} in the \
                     first and is {now} in this one",
                    self.names[i]
                )))
            }
            (Unused::SameEveryStep, None) => {
                self.first = Some(self.used.clone());
                Ok(())
            }
            (Unused::Allow, _) => Ok(()),
        }
    }

    /// The step is over.
    pub(crate) fn finish(&mut self) {
        self.stepped.copy_from_slice(&self.used);
        self.used.fill(false);
        self.any = false;
        self.at_loss = false;
        self.weights = vec![1.0];
        self.micro = 0;
    }

    /// Gradient of an ignored parameter.
    pub(crate) fn grad(&self, param: ParamId) -> &[f32] {
        self.own.get(param.index()).map_or(&[], Vec::as_slice)
    }

    /// Whether an optimizer must skip a parameter that is not reduced: it is frozen, or
    /// this rank's last step had no gradient for it.
    pub(crate) fn untouched(&self, param: ParamId) -> bool {
        match self.of(param) {
            Selection::Frozen => true,
            Selection::Ignored => !self.stepped[param.index()],
            Selection::Reduced(_) | Selection::Unknown => false,
        }
    }
}
