//! Parameters that share an optimizer, and the wrapper that averages their gradients.

use std::borrow::Cow;

use phalanx_checkpoint::state::OptimizerState;
use phalanx_ddp::DistributedDataParallel;
use phalanx_nn::{ParamId, Params};
use serde::{Deserialize, Serialize};

use crate::error::{Result, refuse};
use crate::update::Update;

/// One of a training's groups of parameters. The first has all that are in no other.
pub(crate) struct ParamGroup {
    /// What its parameters' names begin with; empty for the first group.
    pub(crate) name: String,
    pub(crate) params: Vec<ParamId>,
    pub(crate) ddp: DistributedDataParallel,
    pub(crate) update: Update,
    /// The learning rate that the optimizer was made with.
    pub(crate) lr: f64,
    /// Of the gradients of its last step, if they are clipped.
    pub(crate) norm: Option<f64>,
}

/// What is saved of a group of parameters besides the numbers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SavedGroup {
    pub(crate) name: String,
    /// Its optimizer's steps.
    pub(crate) steps: u64,
    /// Names of its optimizer's buffers.
    pub(crate) buffers: Vec<String>,
    /// Steps that were voted down.
    pub(crate) skipped_steps: u64,
}

impl SavedGroup {
    /// Of the group `name`, whose optimizer has this state.
    pub(crate) fn new(name: &str, state: &OptimizerState<'_>) -> SavedGroup {
        SavedGroup {
            name: name.to_owned(),
            steps: state.steps,
            buffers: state.buffers.iter().map(|b| b.0.to_owned()).collect(),
            ..SavedGroup::default()
        }
    }
}

/// The parameters of the groups with these names, those of none first.
///
/// # Errors
///
/// Usage, when a group has none.
pub(crate) fn split(params: &Params, names: &[&str]) -> Result<Vec<Vec<ParamId>>> {
    let mut groups = vec![Vec::new(); names.len() + 1];
    for (id, info) in params.ids().zip(params.infos()) {
        let is_in = |name: &&str| {
            let rest = info.name.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with('.'))
        };
        let group = names.iter().position(is_in);
        groups[group.map_or(0, |i| i + 1)].push(id);
    }
    match groups.iter().position(Vec::is_empty) {
        None => Ok(groups),
        Some(0) => refuse!(
            "optimizer_of: no parameter is left for the optimizer that the trainer was made with"
        ),
        Some(i) => refuse!(
            "optimizer_of(\"{0}\"): no further parameter's name begins with \"{0}.\"",
            names[i - 1]
        ),
    }
}

/// The state of all optimizers as if they were one, and what else is saved of each: `main`'s and
/// that of `more` groups, if there are any. Each parameter's part is that of its own optimizer. Where each rank has a
/// part of the state, only rank 0 gets it; it is put into `memory`.
///
/// # Errors
///
/// Peers that are lost.
pub(crate) fn joined_state<'a>(
    main: &'a Update,
    more: &'a [ParamGroup],
    params: &Params,
    memory: Vec<Vec<f32>>,
) -> Result<Option<(OptimizerState<'a>, Vec<SavedGroup>)>> {
    let joined = main.state(memory)?;
    // On all ranks for all groups, whether or not this rank gets one.
    let states = more.iter().map(|group| group.update.state(Vec::new()));
    let states: Vec<Option<_>> = states.collect::<Result<_>>()?;
    let states: Option<Vec<_>> = states.into_iter().collect();
    let (Some(mut joined), Some(states)) = (joined, states) else {
        return Ok(None);
    };
    if more.is_empty() {
        return Ok(Some((joined, Vec::new())));
    }
    let mut saved = vec![SavedGroup::new("", &joined)];
    for (group, state) in more.iter().zip(states) {
        saved.push(SavedGroup::new(&group.name, &state));
        for id in &group.params {
            joined.updates.to_mut()[id.index()] = state.updates[id.index()];
        }
        for (name, values) in &state.buffers {
            let known = joined.buffers.iter().position(|(known, _)| known == name);
            let at = known.unwrap_or(joined.buffers.len());
            if known.is_none() {
                let zeros = vec![0.0; params.flat().len()];
                joined.buffers.push((name, Cow::Owned(zeros)));
            }
            copy_own(params, &group.params, values, joined.buffers[at].1.to_mut());
        }
    }
    Ok(Some((joined, saved)))
}

/// Copies the elements of the parameters `own`, in memory laid out like `params`.
fn copy_own(params: &Params, own: &[ParamId], from: &[f32], to: &mut [f32]) {
    for id in own {
        let range = params.infos()[id.index()].range();
        to[range.clone()].copy_from_slice(&from[range]);
    }
}
