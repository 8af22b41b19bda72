//! A copy of a training's state.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;

use phalanx_nn::{ParamId, ParamInfo, Params};
use sha2::{Digest, Sha256};

use super::OptimizerState;
use super::manifest::{FORMAT, Manifest, NO_HASH, Place, VERSION};
use crate::checkpoint::write_header;
use crate::pth::DType;
use crate::{Error, Result};

/// Prefix of parameters and buffers in the data file.
pub(crate) const MODEL: &str = "model.";

/// Prefix of the optimizer's buffers: `optimizer.BUFFER.PARAMETER`.
pub(super) const OPTIMIZER: &str = "optimizer.";

/// Prefix of other values of the program.
pub(super) const MORE: &str = "more.";

/// A copy of the state between two steps. Taking it costs one copy in memory; it can be
/// saved later by another thread.
pub struct Snapshot {
    params: Params,
    optimizer: Vec<(String, Vec<f32>)>,
    more: Vec<(String, Vec<f32>)>,
    metadata: BTreeMap<String, String>,
    manifest: Manifest,
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
    /// memory.
    pub fn take_into<'a>(
        old: Option<Snapshot>,
        params: &Params,
        optimizer: impl Into<OptimizerState<'a>>,
        place: Place,
        facts: BTreeMap<String, String>,
        progress: serde_json::Value,
    ) -> Snapshot {
        let OptimizerState {
            steps,
            updates,
            buffers: state,
        } = optimizer.into();
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
        let buffers = state.iter().map(|(name, values)| {
            let at = old_buffers.iter().position(|(old, _)| old == name);
            let mut memory = at.map_or(Vec::new(), |at| old_buffers.swap_remove(at).1);
            memory.clear();
            memory.extend_from_slice(values);
            ((*name).to_owned(), memory)
        });
        let updates = params.infos().iter().zip(updates.iter());
        let fewer = updates.filter(|(_, count)| **count != steps);
        let optimizer_updates = fewer.map(|(info, count)| (info.name.clone(), *count));
        let optimizer_updates = optimizer_updates.collect();
        Snapshot {
            params,
            optimizer: buffers.collect(),
            more: Vec::new(),
            metadata: BTreeMap::new(),
            manifest: Manifest {
                format: FORMAT.to_owned(),
                version: VERSION,
                file: String::new(),
                bytes: 0,
                sha256: String::new(),
                place,
                optimizer_steps: steps,
                optimizer_updates,
                optimizer_buffers: state.iter().map(|b| b.0.to_owned()).collect(),
                facts,
                progress,
                manifest_sha256: NO_HASH.to_owned(),
            },
        }
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

    /// Adds named values, which [`State::extra`](super::State::extra) returns.
    #[must_use]
    pub fn with_extra(mut self, more: Vec<(String, Vec<f32>)>) -> Snapshot {
        self.more = more;
        self
    }

    /// Adds the metadata of the model's weights, which
    /// [`read_tensors`](crate::checkpoint::read_tensors) returns.
    #[must_use]
    pub fn with_metadata(mut self, metadata: BTreeMap<String, String>) -> Snapshot {
        self.metadata = metadata;
        self
    }

    /// The position at which it was taken.
    pub fn place(&self) -> Place {
        self.manifest.place
    }

    /// Location and length of its values.
    #[cfg(test)]
    pub(super) fn memory(&self) -> Vec<(*const f32, usize)> {
        let params = [self.params.flat(), self.params.buffers_flat()];
        let optimizer = self.optimizer.iter().map(|(_, values)| &values[..]);
        let all = params.into_iter().chain(optimizer);
        all.map(|values| (values.as_ptr(), values.len())).collect()
    }

    /// Writes the data file's content to `out`, a tensor at a time: beside the
    /// snapshot there is never more than one of them in memory.
    pub(super) fn write(&self, out: &mut dyn Write) -> std::io::Result<Written> {
        let mut out = Hashed {
            out,
            hash: Sha256::new(),
            bytes: 0,
        };
        let parts = self.parts();
        let heads = parts
            .iter()
            .map(|part| (&part.name[..], DType::F32, &part.shape[..], 4 * part.len()));
        write_header(&mut out, &self.metadata, heads)?;
        let (mut values, mut bytes) = (Vec::new(), Vec::new());
        for part in &parts {
            let row_major = match part.from {
                Numbers::Flat(flat, id) => {
                    self.params.export_of(id, flat, &mut values);
                    &values
                }
                Numbers::List(list) => list,
            };
            for some in row_major.chunks(CHUNK) {
                bytes.clear();
                bytes.extend(some.iter().flat_map(|v| v.to_le_bytes()));
                out.write_all(&bytes)?;
            }
        }
        Ok(Written {
            bytes: out.bytes,
            sha256: hex::encode(out.hash.finalize()),
        })
    }

    /// All tensors in the file's order: the model's by name, then the optimizer's
    /// buffer by buffer, then the rest.
    fn parts(&self) -> Vec<Part<'_>> {
        let mut parts = Vec::new();
        for (info, from) in in_order(&self.params) {
            parts.push(Part {
                name: format!("{MODEL}{}", info.name),
                shape: Cow::Borrowed(&info.shape),
                from,
            });
        }
        for (buffer, values) in &self.optimizer {
            for (id, info) in self.params.ids().zip(self.params.infos()) {
                parts.push(Part {
                    name: format!("{OPTIMIZER}{buffer}.{}", info.name),
                    shape: Cow::Borrowed(&info.shape),
                    from: Numbers::Flat(values, id),
                });
            }
        }
        for (name, values) in &self.more {
            parts.push(Part {
                name: format!("{MORE}{name}"),
                shape: Cow::Owned(vec![values.len()]),
                from: Numbers::List(values),
            });
        }
        parts
    }

    /// The manifest for a data file of that name.
    pub(super) fn manifest(&self, file: &str, written: Written) -> Manifest {
        Manifest {
            file: file.to_owned(),
            bytes: written.bytes,
            sha256: written.sha256,
            ..self.manifest.clone()
        }
    }
}

/// Numbers that become bytes at a time.
const CHUNK: usize = 1 << 14;

/// A tensor of the file.
struct Part<'a> {
    name: String,
    shape: Cow<'a, [usize]>,
    from: Numbers<'a>,
}

impl Part<'_> {
    /// Numbers in it.
    fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Where a tensor's numbers are.
#[derive(Clone, Copy)]
enum Numbers<'a> {
    /// In flat memory, in the place of that parameter and in the engine's order.
    Flat(&'a [f32], ParamId),
    /// Here, in PyTorch's order.
    List(&'a [f32]),
}

/// Parameters and buffers in ascending order of their names.
fn in_order(params: &Params) -> Vec<(&ParamInfo, Numbers<'_>)> {
    let parameters = params.ids().zip(params.infos());
    let parameters = parameters.map(|(id, info)| (info, Numbers::Flat(params.flat(), id)));
    let buffers = params.buffer_ids().zip(params.buffer_infos());
    let buffers = buffers.map(|(id, info)| (info, Numbers::List(params.buffer(id))));
    let mut all: Vec<_> = parameters.chain(buffers).collect();
    all.sort_by(|a, b| a.0.name.cmp(&b.0.name));
    all
}

/// What was written.
pub(super) struct Written {
    bytes: u64,
    sha256: String,
}

struct Hashed<'a> {
    out: &'a mut dyn Write,
    hash: Sha256,
    bytes: u64,
}

impl Write for Hashed<'_> {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        let taken = self.out.write(buffer)?;
        self.hash.update(&buffer[..taken]);
        self.bytes += taken as u64;
        Ok(taken)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}
