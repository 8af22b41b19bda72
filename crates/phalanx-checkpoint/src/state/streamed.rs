//! A checkpoint whose values are given while it is written.

use std::collections::BTreeMap;
use std::io::Write;

use super::OptimizerState;
use super::manifest::{Manifest, Place};
use super::snapshot::{MODEL, OPTIMIZER, Written, write_data};
use crate::weights::{NamedShape, Outline, Piece, check_len};

/// A training's state without its values, which
/// [`Folder::save_streamed`](super::Folder::save_streamed) asks for tensor by tensor. The file
/// is the one of a [`Snapshot`](super::Snapshot).
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

    /// Adds the metadata of the model's weights, as
    /// [`Snapshot::with_metadata`](super::Snapshot::with_metadata).
    #[must_use]
    pub fn with_metadata(mut self, metadata: BTreeMap<String, String>) -> Streamed {
        self.metadata = metadata;
        self
    }

    /// Number of steps taken.
    pub(super) fn step(&self) -> u64 {
        self.manifest.place.step
    }

    /// Writes the data file's content to `out`: the model's tensors by name, then the
    /// optimizer's buffer by buffer.
    pub(super) fn write(
        &self,
        out: &mut dyn Write,
        values: &mut dyn FnMut(Piece) -> std::io::Result<Vec<f32>>,
    ) -> std::io::Result<Written> {
        let model = self.outline.by_name().into_iter();
        let mut all: Vec<(Piece, String, &NamedShape)> = model
            .map(|(piece, named)| (piece, format!("{MODEL}{}", named.0), named))
            .collect();
        for (buffer, of) in self.manifest.optimizer_buffers.iter().enumerate() {
            for (param, named) in self.outline.params().iter().enumerate() {
                let name = format!("{OPTIMIZER}{of}.{}", named.0);
                all.push((Piece::State { buffer, param }, name, named));
            }
        }
        let heads: Vec<_> = all
            .iter()
            .map(|(_, name, named)| (&name[..], &named.1[..]))
            .collect();
        write_data(out, &self.metadata, &heads, |i, write| {
            let values = values(all[i].0)?;
            check_len(all[i].2, &values)?;
            write(&values)
        })
    }

    /// The manifest for a data file of that name.
    pub(super) fn manifest(&self, file: &str, written: Written) -> Manifest {
        self.manifest.for_file(file, written)
    }
}
