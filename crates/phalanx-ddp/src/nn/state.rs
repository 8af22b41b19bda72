//! Agrees on a common state after a group was re-formed.

use phalanx_comm::ProcessGroup;
use phalanx_nn::Params;
use phalanx_nn::optim::Optimizer;

use crate::error::{Error, Result};

/// Gives every rank the state of the rank whose optimizer has taken most steps (the
/// lowest of those): parameters, buffers, optimizer state and step counts. Returns that
/// number of steps, at which the sampler continues.
///
/// After the ranks have formed another group: a rank may have applied a step whose last all-reduce
/// did not complete on another rank. All ranks that applied a step have the same bits,
/// so the state of the furthest rank is the one that all would have.
///
/// *Blocks* until all ranks of the group call it.
///
/// # Errors
///
/// `Comm` when a peer is lost or late; `Mismatch` when a rank has another
/// kind of optimizer. A rank's state is unchanged after an error.
pub fn agree_on_state(
    group: &ProcessGroup,
    params: &mut Params,
    optimizer: &mut dyn Optimizer,
) -> Result<u64> {
    if group.world_size() == 1 {
        return Ok(optimizer.steps());
    }
    let mut all = vec![0i64; group.world_size()];
    let gathered = group.all_gather(&[optimizer.steps().cast_signed()], &mut all);
    gathered.map_err(not_agreed)?;
    let best = (0..group.world_size())
        .max_by_key(|rank| (all[*rank].cast_unsigned(), std::cmp::Reverse(*rank)))
        .unwrap_or(0);
    take_state(group, best, params, &mut [optimizer])?;
    Ok(optimizer.steps())
}

/// Gives every rank the state of rank `donor`: parameters, buffers, and the state and step counts of all `optimizers`.
/// A rank takes it over when it has all of it.
///
/// *Blocks* until all ranks of the group call it. Needs memory for another copy of the state on the ranks that get it.
///
/// # Errors
///
/// As [`agree_on_state`].
pub fn take_state(
    group: &ProcessGroup,
    donor: usize,
    params: &mut Params,
    optimizers: &mut [&mut dyn Optimizer],
) -> Result<()> {
    let gives = group.rank() == donor;
    let send = |own: &[f32]| {
        let mut values = own.to_vec();
        group.broadcast(&mut values, donor).map_err(not_agreed)?;
        Ok::<_, Error>(values)
    };
    let (flat, buffers) = (send(params.flat())?, send(params.buffers_flat())?);
    let mut states = Vec::with_capacity(optimizers.len());
    for optimizer in &*optimizers {
        let about = gives.then(|| {
            let state = optimizer.state();
            let names: Vec<String> = state.iter().map(|(name, _)| (*name).to_owned()).collect();
            (optimizer.steps(), optimizer.updates().to_vec(), names)
        });
        let about: (u64, Vec<u64>, Vec<String>) = group
            .broadcast_object(about.as_ref(), donor)
            .map_err(not_agreed)?;
        let mut tensors: Vec<(String, Vec<f32>)> = Vec::with_capacity(about.2.len());
        for (slot, name) in about.2.into_iter().enumerate() {
            // Laid out like the parameters, which are the same on all ranks.
            let own = gives.then(|| optimizer.state()[slot].1);
            let mut values = own.map_or_else(|| vec![0.0; flat.len()], <[f32]>::to_vec);
            group.broadcast(&mut values, donor).map_err(not_agreed)?;
            tensors.push((name, values));
        }
        states.push((about.0, about.1, tensors));
    }
    if gives {
        return Ok(());
    }
    for (optimizer, (steps, updates, tensors)) in optimizers.iter_mut().zip(&states) {
        let tensors: Vec<(&str, &[f32])> = tensors
            .iter()
            .map(|(name, values)| (name.as_str(), values.as_slice()))
            .collect();
        optimizer.restore(*steps, updates, &tensors).map_err(|e| {
            Error::mismatch(format!(
                "rank {}'s optimizer cannot take over the state of rank {donor}: {e}",
                group.rank()
            ))
        })?;
    }
    params.flat_mut().copy_from_slice(&flat);
    params.buffers_flat_mut().copy_from_slice(&buffers);
    Ok(())
}

fn not_agreed(error: phalanx_comm::Error) -> Error {
    Error::comm_while("the ranks could not agree on a state", error)
}
