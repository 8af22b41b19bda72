//! Settings of their own for groups of parameters.

use std::sync::Arc;

use super::check_setting;
use crate::param::{Layout, ParamInfo, Params};
use crate::{Error, Result};

/// Settings that replace the optimizer's for some parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParamGroup {
    pub(super) lr_scale: f64,
    pub(super) weight_decay: Option<f64>,
    pub(super) elementwise: bool,
}

impl Default for ParamGroup {
    fn default() -> Self {
        Self::new()
    }
}

impl ParamGroup {
    /// The optimizer's settings.
    pub const fn new() -> Self {
        ParamGroup {
            lr_scale: 1.0,
            weight_decay: None,
            elementwise: false,
        }
    }

    /// Multiplies the optimizer's learning rate by this factor.
    #[must_use]
    pub const fn lr_scale(mut self, factor: f64) -> Self {
        self.lr_scale = factor;
        self
    }

    /// Sets the weight decay.
    #[must_use]
    pub const fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }

    /// Lets [`Muon`](super::Muon) update these matrices as it does vectors, by its [other](super::Muon::others) optimizer:
    /// embeddings and output layers, for example. No other optimizer has a choice.
    #[must_use]
    pub const fn elementwise(mut self) -> Self {
        self.elementwise = true;
        self
    }
}

/// The parameter for which a group is chosen. Where a rank's optimizer has only a shard of a parameter, these are the whole parameter's.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Parameter<'a> {
    /// PyTorch's dotted name, e.g. `conv1.weight`.
    pub name: &'a str,
    /// PyTorch's shape.
    pub shape: &'a [usize],
}

/// Chooses a parameter's group.
type Chooser = dyn Fn(&Parameter<'_>) -> ParamGroup + Send + Sync;

/// The groups of an optimizer; without a choice all parameters have its settings.
#[derive(Clone, Default)]
pub(super) struct GroupChooser(pub Option<Arc<Chooser>>);

impl std::fmt::Debug for GroupChooser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("GroupChooser")
            .field(&self.0.is_some())
            .finish()
    }
}

impl GroupChooser {
    pub(super) fn of(&self, parameter: Parameter<'_>) -> ParamGroup {
        let choose = self.0.as_ref();
        choose.map_or(ParamGroup::new(), |choose| choose(&parameter))
    }

    /// Of each of `params`.
    pub(super) fn all(&self, params: &Params) -> Vec<ParamSettings> {
        let own = |info: &ParamInfo| {
            let mut own = ParamSettings::new(info);
            own.group = self.of(own.parameter());
            own
        };
        params.infos().iter().map(own).collect()
    }
}

/// What an optimizer knows of one parameter.
#[derive(Clone, Debug)]
pub struct ParamSettings {
    name: String,
    shape: Vec<usize>,
    layout: Layout,
    pub(super) is_shard: bool,
    /// Elements in this optimizer's memory.
    pub(super) len: usize,
    pub(super) group: ParamGroup,
}

impl ParamSettings {
    fn new(info: &ParamInfo) -> Self {
        ParamSettings {
            name: info.whole_name().to_owned(),
            shape: info.whole_shape().to_vec(),
            layout: info.layout,
            is_shard: info.is_shard(),
            len: info.len,
            group: ParamGroup::new(),
        }
    }

    pub(super) fn parameter(&self) -> Parameter<'_> {
        Parameter {
            name: &self.name,
            shape: &self.shape,
        }
    }

    /// Checks the group's settings.
    pub(super) fn check(&self) -> Result<()> {
        check_setting("the group's lr_scale", self.group.lr_scale)?;
        let decay = self.group.weight_decay.unwrap_or(0.0);
        check_setting("the group's weight decay", decay)
    }

    /// The error, with the parameter's name.
    pub(super) fn named(&self, error: Error) -> Error {
        Error::usage(format!("parameter {}: {error}", self.name))
    }

    /// As a matrix of its first dimension and all others, where it has two dimensions or more and its group says nothing else.
    pub(super) fn matrix(&self) -> Option<Matrix> {
        let outputs = *self.shape.first()?;
        if self.shape.len() < 2 || self.group.elementwise || self.len == 0 {
            return None;
        }
        let inputs = self.shape[1..].iter().product();
        Some(Matrix {
            outputs,
            inputs,
            // Layouts of convolutions have the outputs last.
            outputs_last: !self.layout.order().is_empty(),
            is_shard: self.is_shard,
        })
    }
}

/// A parameter's sizes as a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// Whether its rows in memory are the inputs.
    pub(super) outputs_last: bool,
    /// Whether this optimizer has only a shard of it.
    pub(super) is_shard: bool,
}
