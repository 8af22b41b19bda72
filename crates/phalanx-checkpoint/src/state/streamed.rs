//! A checkpoint whose values are read while it is written.

use std::collections::BTreeMap;
use std::io::Write;

use sha2::{Digest, Sha256};

use super::OptimizerState;
use super::manifest::{Manifest, Place, Written};
use crate::weights::{Outline, TensorId, Values, all_finite, write_all};

/// Prefix of parameters and buffers in the data file.
pub(crate) const MODEL: &str = "model.";

/// Prefix of the optimizer's buffers: `optimizer.BUFFER.PARAMETER`.
pub(super) const OPTIMIZER: &str = "optimizer.";

/// A training's state without the values of its tensors:
/// [`Folder::save_streamed`](super::Folder::save_streamed) asks for them one after the other.
pub struct Streamed {
    outline: Outline,
    metadata: BTreeMap<String, String>,
    manifest: Manifest,
}

impl Streamed {
    /// The state before the step at `place`. Of `optimizer` only the counts and the names of
    /// its buffers are used. `facts` and `progress` are stored unchanged.
    pub fn new(
        outline: Outline,
        optimizer: &OptimizerState<'_>,
        place: Place,
        facts: BTreeMap<String, String>,
        progress: serde_json::Value,
    ) -> Streamed {
        let names = outline.params().iter().map(|(name, _)| &name[..]);
        let buffers = optimizer.buffers.iter().map(|b| b.0.to_owned()).collect();
        let counts = (optimizer.steps, &optimizer.updates[..]);
        let manifest = Manifest {
            facts,
            progress,
            ..Manifest::new(place, counts, names, buffers)
        };
        Streamed {
            outline,
            metadata: BTreeMap::new(),
            manifest,
        }
    }

    /// Adds the metadata of the model's weights, which
    /// [`read_tensors`](crate::read_tensors) returns.
    #[must_use]
    pub fn with_metadata(mut self, metadata: BTreeMap<String, String>) -> Streamed {
        self.metadata = metadata;
        self
    }

    /// The position at which it was taken.
    pub(super) fn place(&self) -> Place {
        self.manifest.place
    }

    /// Writes the data file's content to `out`: the model's tensors by name, then the
    /// optimizer's buffer by buffer. Tensors of the model are checked for values
    /// that are not finite.
    pub(super) fn write(
        &self,
        out: &mut dyn Write,
        values: &mut Values<'_>,
    ) -> std::io::Result<Written> {
        let mut all = Vec::new();
        for (tensor, named) in self.outline.by_name() {
            all.push((tensor, (format!("{MODEL}{}", named.0), named.1.clone())));
        }
        for (buffer, of) in self.manifest.optimizer_buffers.iter().enumerate() {
            for (param, (name, shape)) in self.outline.params().iter().enumerate() {
                let name = format!("{OPTIMIZER}{of}.{name}");
                all.push((TensorId::State { buffer, param }, (name, shape.clone())));
            }
        }
        let mut out = Hashed {
            out,
            hash: Sha256::new(),
            bytes: 0,
        };
        let mut not_finite = None;
        write_all(&mut out, &all, &self.metadata, values, |tensor, values| {
            let is_model = !matches!(tensor, TensorId::State { .. });
            if is_model && not_finite.is_none() && !all_finite(values) {
                not_finite = Some(self.outline.name(tensor).to_owned());
            }
        })?;
        Ok(Written {
            not_finite,
            bytes: out.bytes,
            sha256: hex::encode(out.hash.finalize()),
        })
    }

    /// The manifest for a data file of that name.
    pub(super) fn manifest(&self, file: &str, written: Written) -> Manifest {
        self.manifest.for_file(file, written)
    }
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
