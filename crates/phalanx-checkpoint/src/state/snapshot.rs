//! A copy of a training's state.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;

use phalanx_nn::{ParamId, ParamInfo, Params};
use sha2::{Digest, Sha256};

use super::OptimizerState;
use super::manifest::{Manifest, Place};
use crate::pth::DType;
use crate::weights::{all_finite, write_header, write_values};
use phalanx_base::{Error, Result};

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
        let names = params.infos().iter().map(|info| &info.name[..]);
        let buffer_names = state.iter().map(|b| b.0.to_owned()).collect();
        let manifest = Manifest::new(place, (steps, &updates), names, buffer_names);
        Snapshot {
            params,
            optimizer: buffers.collect(),
            more: Vec::new(),
            metadata: BTreeMap::new(),
            manifest: Manifest {
                facts,
                progress,
                ..manifest
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
    /// [`read_tensors`](crate::read_tensors) returns.
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
        let parts = self.parts();
        let heads: Vec<_> = parts.iter().map(|p| (&p.name[..], &p.shape[..])).collect();
        let mut values = Vec::new();
        write_data(out, &self.metadata, &heads, |i, write| {
            match parts[i].from {
                Numbers::Flat(flat, id) => {
                    self.params.export_of(id, flat, &mut values);
                    write(&values)
                }
                Numbers::List(list) => write(list),
            }
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
        self.manifest.for_file(file, written)
    }
}

/// A tensor of the file.
struct Part<'a> {
    name: String,
    shape: Cow<'a, [usize]>,
    from: Numbers<'a>,
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

/// Writes a data file of float32 tensors with these names and shapes to `out`. `each` gives the
/// values of the tensor with this index to its second argument. Tensors of the model are checked for values that are
/// not finite.
pub(super) fn write_data(
    out: &mut dyn Write,
    metadata: &BTreeMap<String, String>,
    tensors: &[(&str, &[usize])],
    mut each: impl FnMut(usize, &mut dyn FnMut(&[f32]) -> std::io::Result<()>) -> std::io::Result<()>,
) -> std::io::Result<Written> {
    let mut out = Hashed {
        out,
        hash: Sha256::new(),
        bytes: 0,
    };
    let heads = tensors.iter().map(|(name, shape)| {
        let elements: usize = shape.iter().product();
        (*name, DType::F32, *shape, 4 * elements)
    });
    write_header(&mut out, metadata, heads)?;
    let mut not_finite = None;
    for (i, (name, _)) in tensors.iter().enumerate() {
        let model = name.strip_prefix(MODEL);
        each(i, &mut |values| {
            if let Some(name) = model
                && not_finite.is_none()
                && !all_finite(values)
            {
                not_finite = Some(name.to_owned());
            }
            write_values(&mut out, values)
        })?;
    }
    Ok(Written {
        not_finite,
        bytes: out.bytes,
        sha256: hex::encode(out.hash.finalize()),
    })
}

/// What was written.
pub(super) struct Written {
    pub(super) bytes: u64,
    pub(super) sha256: String,
    /// Name of the model's first tensor with an infinite or NaN value.
    pub(super) not_finite: Option<String>,
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
