//! A training's state, copied out of its way.

use std::collections::BTreeMap;
use std::io::Write;

use phalanx_nn::Params;
use phalanx_nn::optim::Optimizer;
use sha2::{Digest, Sha256};

use super::manifest::{FORMAT, Manifest, NO_HASH, Place, VERSION};
use crate::checkpoint::{Tensor, tensors, write_tensors};
use crate::pth::Saved;

/// Before the names of parameters and buffers in the data file.
pub(crate) const MODEL: &str = "model.";

/// Before the names of the optimizer's buffers: `optimizer.BUFFER.PARAMETER`.
pub(super) const OPTIMIZER: &str = "optimizer.";

/// Before the names of what else a program saves.
pub(super) const MORE: &str = "more.";

/// A copy of the state between two steps. Taking it costs a copy of memory;
/// everything else can happen elsewhere and later.
pub struct Snapshot {
    params: Params,
    optimizer: Vec<(String, Vec<f32>)>,
    more: Vec<(String, Vec<f32>)>,
    manifest: Manifest,
}

impl Snapshot {
    /// Keeps `params` and copies the optimizer as they are before the step at
    /// `place`. `facts` and `progress` are given back as they are.
    pub fn take(
        params: Params,
        optimizer: &dyn Optimizer,
        place: Place,
        facts: BTreeMap<String, String>,
        progress: serde_json::Value,
    ) -> Snapshot {
        let buffers = optimizer.state();
        Snapshot {
            params,
            more: Vec::new(),
            manifest: Manifest {
                format: FORMAT.to_owned(),
                version: VERSION,
                file: String::new(),
                bytes: 0,
                sha256: String::new(),
                place,
                optimizer_steps: optimizer.steps(),
                optimizer_buffers: buffers.iter().map(|b| b.0.to_owned()).collect(),
                facts,
                progress,
                manifest_sha256: NO_HASH.to_owned(),
            },
            optimizer: buffers
                .into_iter()
                .map(|(name, values)| (name.to_owned(), values.to_vec()))
                .collect(),
        }
    }

    /// The same with more lists of numbers, which [`State::more`](super::State::more)
    /// gives back by name.
    #[must_use]
    pub fn with_more(mut self, more: Vec<(String, Vec<f32>)>) -> Snapshot {
        self.more = more;
        self
    }

    /// Where it was taken.
    pub fn place(&self) -> Place {
        self.manifest.place
    }

    /// Writes the data file's content to `out`.
    pub(super) fn write(&self, out: &mut dyn Write) -> std::io::Result<Written> {
        let mut all: Vec<Saved> = Vec::new();
        for mut tensor in tensors(&self.params) {
            tensor.name.insert_str(0, MODEL);
            all.push(tensor.into());
        }
        let mut as_params = self.params.clone();
        for (buffer, values) in &self.optimizer {
            as_params.flat_mut().copy_from_slice(values);
            for (id, info) in as_params.ids().zip(as_params.infos()) {
                let tensor = Tensor {
                    name: format!("{OPTIMIZER}{buffer}.{}", info.name),
                    shape: info.shape.clone(),
                    values: as_params.export(id),
                };
                all.push(tensor.into());
            }
        }
        for (name, values) in &self.more {
            let tensor = Tensor {
                name: format!("{MORE}{name}"),
                shape: vec![values.len()],
                values: values.clone(),
            };
            all.push(tensor.into());
        }
        let mut out = Hashed {
            out,
            hash: Sha256::new(),
            bytes: 0,
        };
        write_tensors(&mut out, &BTreeMap::new(), &all)?;
        Ok(Written {
            bytes: out.bytes,
            sha256: hex::encode(out.hash.finalize()),
        })
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
