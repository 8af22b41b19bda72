//! Agrees on a common state after a group was re-formed.

use phalanx_comm::ProcessGroup;
use phalanx_nn::Params;
use phalanx_nn::optim::Optimizer;

use crate::error::{Error, Result};

/// Longest name of an optimizer's state; a peer's length is checked against it.
const MAX_NAME_BYTES: usize = 256;

/// Gives every rank the state of the rank whose optimizer has taken most steps (the
/// lowest of those): parameters, buffers, optimizer state and step counts. Returns that
/// number of steps, at which the sampler continues.
///
/// After [`ProcessGroup::shrink`]: a rank may have applied a step whose last all-reduce
/// did not complete on another rank. All ranks that applied a step have the same bits,
/// so the state of the furthest rank is the one that all would have.
///
/// *Blocks* until all ranks of the group call it.
///
/// # Errors
///
/// `Comm` when a peer is lost or late; `Mismatch` when a rank has another
/// kind of optimizer. The state of a rank is undefined after an error.
pub fn agree_on_state(
    group: &ProcessGroup,
    params: &mut Params,
    optimizer: &mut dyn Optimizer,
) -> Result<u64> {
    let failed = |e| Error::comm_while("the ranks could not agree on a state", e);
    if group.world_size() == 1 {
        return Ok(optimizer.steps());
    }
    let names: Vec<&'static str> = optimizer.state().iter().map(|(name, _)| *name).collect();
    let mine = [optimizer.steps().cast_signed(), names.len() as i64];
    let mut all = vec![0i64; 2 * group.world_size()];
    group.all_gather(&mine, &mut all).map_err(failed)?;
    let steps = |rank: usize| all[2 * rank].cast_unsigned();
    let best = (0..group.world_size())
        .max_by_key(|rank| (steps(*rank), std::cmp::Reverse(*rank)))
        .unwrap_or(0);
    group.broadcast(params.flat_mut(), best).map_err(failed)?;
    group
        .broadcast(params.buffers_flat_mut(), best)
        .map_err(failed)?;
    // All ranks have the same number of parameters.
    let mut updates: Vec<i64> = optimizer
        .updates()
        .iter()
        .map(|n| n.cast_signed())
        .collect();
    group.broadcast(&mut updates, best).map_err(failed)?;
    let updates: Vec<u64> = updates.into_iter().map(i64::cast_unsigned).collect();
    let count = usize::try_from(all[2 * best + 1]).unwrap_or(0);
    let mut state: Vec<(String, Vec<f32>)> = Vec::new();
    for slot in 0..count {
        let own = (group.rank() == best).then(|| optimizer.state()[slot]);
        let mut name = vec![0u8; MAX_NAME_BYTES];
        if let Some((text, _)) = own {
            let len = text.len().min(MAX_NAME_BYTES);
            name[..len].copy_from_slice(&text.as_bytes()[..len]);
        }
        group.broadcast(&mut name, best).map_err(failed)?;
        // Laid out like the parameters, which are the same on all ranks.
        let mut values = own.map_or_else(|| vec![0.0; params.flat().len()], |(_, v)| v.to_vec());
        group.broadcast(&mut values, best).map_err(failed)?;
        let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
        state.push((String::from_utf8_lossy(&name[..end]).into_owned(), values));
    }
    let state: Vec<(&str, &[f32])> = state
        .iter()
        .map(|(name, values)| (name.as_str(), values.as_slice()))
        .collect();
    optimizer
        .restore(steps(best), &updates, &state)
        .map_err(|e| {
            Error::mismatch(format!(
                "rank {}'s optimizer cannot take over the state of rank {best}: {e}",
                group.rank()
            ))
        })?;
    Ok(steps(best))
}
