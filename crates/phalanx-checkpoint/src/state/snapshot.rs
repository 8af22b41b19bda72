//! A copy of a training's state.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;

use phalanx_nn::Params;

use super::OptimizerState;
use super::manifest::{Place, Written};
use super::streamed::Streamed;
use crate::weights::{Outline, TensorId, full_values};
use phalanx_base::{Error, Result};

/// A copy of the state between two steps. Taking it costs one copy in memory; it can be
/// saved later by another thread.
pub struct Snapshot {
    params: Params,
    optimizer: Vec<(String, Vec<f32>)>,
    state: Streamed,
}

impl Snapshot {
    /// Copies `params` and the optimizer before the step at `place`. `facts` and `progress`
    /// are stored unchanged.
    pub fn take<'a>(
        params: &Params,
        optimizer: impl Into<OptimizerState<'a>>,
        place: Place,
        facts: BTreeMap<String, String>,
        progress: serde_json::Value,
    ) -> Snapshot {
        Snapshot::take_into(None, params, optimizer, place, facts, progress)
    }

    /// As [`take`](Snapshot::take), reusing the memory of `old` if it is of the same model
    /// and optimizer: copying into touched memory is several times as fast as into new
    /// memory. Buffers that `optimizer` owns are not copied.
    pub fn take_into<'a>(
        old: Option<Snapshot>,
        params: &Params,
        optimizer: impl Into<OptimizerState<'a>>,
        place: Place,
        facts: BTreeMap<String, String>,
        progress: serde_json::Value,
    ) -> Snapshot {
        let optimizer = optimizer.into();
        let (old_params, mut old_buffers) = match old {
            Some(old) => (Some(old.params), old.optimizer),
            None => (None, Vec::new()),
        };
        let alike = |old: &Params| {
            old.infos() == params.infos() && old.buffer_infos() == params.buffer_infos()
        };
        let params = match old_params.filter(alike) {
            Some(mut old) => {
                old.flat_mut().copy_from_slice(params.flat());
                old.buffers_flat_mut()
                    .copy_from_slice(params.buffers_flat());
                old
            }
            None => params.clone(),
        };
        let outline = Outline::of(&params);
        let state = Streamed::new(outline, &optimizer, place, facts, progress);
        let buffers = optimizer.buffers.into_iter().map(|(name, values)| {
            let at = old_buffers.iter().position(|(old, _)| old == name);
            let values = match values {
                Cow::Owned(values) => values,
                Cow::Borrowed(values) => {
                    let mut memory = at.map_or(Vec::new(), |at| old_buffers.swap_remove(at).1);
                    memory.clear();
                    memory.extend_from_slice(values);
                    memory
                }
            };
            (name.to_owned(), values)
        });
        Snapshot {
            params,
            optimizer: buffers.collect(),
            state,
        }
    }

    /// The memory of the optimizer's buffers, without which the snapshot cannot be saved.
    pub fn take_memory(&mut self) -> Vec<Vec<f32>> {
        let buffers = std::mem::take(&mut self.optimizer).into_iter();
        buffers.map(|(_, values)| values).collect()
    }

    /// Replaces the values of the model's buffers (running statistics), in the layout of
    /// [`Params::buffers_flat`].
    ///
    /// # Errors
    ///
    /// `Internal` when their number differs.
    pub fn with_buffers(mut self, values: &[f32]) -> Result<Snapshot> {
        let buffers = self.params.buffers_flat_mut();
        if buffers.len() != values.len() {
            return Err(Error::internal(format!(
                "{} values for {} of a model's buffers",
                values.len(),
                buffers.len()
            )));
        }
        buffers.copy_from_slice(values);
        Ok(self)
    }

    /// As [`Streamed::with_metadata`].
    #[must_use]
    pub fn with_metadata(mut self, metadata: BTreeMap<String, String>) -> Snapshot {
        self.state = self.state.with_metadata(metadata);
        self
    }

    /// The state without values.
    pub(super) fn state(&self) -> &Streamed {
        &self.state
    }

    /// Location and length of its values.
    #[cfg(test)]
    pub(super) fn memory(&self) -> Vec<(*const f32, usize)> {
        let params = [self.params.flat(), self.params.buffers_flat()];
        let optimizer = self.optimizer.iter().map(|(_, values)| &values[..]);
        let all = params.into_iter().chain(optimizer);
        all.map(|values| (values.as_ptr(), values.len())).collect()
    }

    /// Writes the data file's content to `out`, a tensor at a time: in addition to the
    /// snapshot there is never more than one of them in memory.
    pub(super) fn write(&self, out: &mut dyn Write) -> std::io::Result<Written> {
        self.state.write(out, &mut |tensor| {
            let TensorId::State { buffer, param } = tensor else {
                return Ok(full_values(&self.params, tensor));
            };
            let mut values = Vec::new();
            if let Some(id) = self.params.ids().nth(param) {
                let flat = self.optimizer.get(buffer).map(|(_, flat)| flat);
                let flat =
                    flat.ok_or_else(|| std::io::Error::other("the snapshot's memory was taken"))?;
                self.params.export_of(id, flat, &mut values);
            }
            Ok(values)
        })
    }
}
