//! Loading a checkpoint.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use phalanx_nn::optim::Optimizer;
use phalanx_nn::{ParamInfo, Params};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use sha2::{Digest, Sha256};

use super::manifest::Manifest;
use super::streamed::{MODEL, OPTIMIZER};
use crate::pth::DType;
use crate::weights::{Outline, TensorId, TensorsFile, put};
use phalanx_base::files::{open_regular, read_open, read_pieces};
use phalanx_base::text::one_line;
use phalanx_base::{Error, Result};

/// Maximum size of a manifest.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// An open checkpoint with checked length and hash. Its values are read on demand.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    manifest: Manifest,
    file: TensorsFile,
}

impl State {
    /// Reads the checkpoint whose manifest is at `path`.
    ///
    /// # Errors
    ///
    /// `Usage` when the file does not exist or is not a regular file; `System` when it cannot
    /// be read; `Data`, naming the file, when it or its data file is damaged or has another
    /// format.
    pub fn load(path: &Path) -> Result<State> {
        let open =
            |path: &Path| open_regular(path).map_err(|e| Error::not_opened("checkpoint", path, e));
        let wrong = |what: String| Error::data(format!("{}: {what}", path.display()));
        let text = read_open(path, open(path)?, MAX_MANIFEST_BYTES)?;
        let manifest = Manifest::from_text(&text).map_err(wrong)?;
        if Path::new(&manifest.file).file_name() != Some(manifest.file.as_ref()) {
            return Err(wrong(format!(
                "its data file {:?} is not in the same folder",
                manifest.file
            )));
        }
        let data_path = path.with_file_name(&manifest.file);
        let data = open(&data_path)?;
        let cannot_read = |e| Error::io("cannot read", &data_path, e);
        let size_bytes = data.metadata().map_err(cannot_read)?.len();
        if size_bytes != manifest.bytes {
            return Err(Error::data(format!(
                "{} has {size_bytes} bytes, but its manifest says {}; it may be truncated",
                data_path.display(),
                manifest.bytes
            )));
        }
        let mut hash = Sha256::new();
        let hashed = read_pieces(&data, |piece| {
            hash.update(piece);
            Ok(())
        });
        hashed.map_err(cannot_read)?;
        let sha256 = hex::encode(hash.finalize());
        if sha256 != manifest.sha256 {
            return Err(Error::data(format!(
                "{} is damaged: its SHA-256 is {sha256}, but its manifest says {}",
                data_path.display(),
                manifest.sha256
            )));
        }
        Ok(State {
            path: path.to_path_buf(),
            manifest,
            file: TensorsFile::new(&data_path, data)?,
        })
    }

    /// Path of its manifest.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// A sentence, if its weights are not finite.
    pub fn warning(&self) -> Option<String> {
        let name = self.manifest.not_finite.as_ref()?;
        Some(format!(
            "{} has infinite or NaN weights (first in {})",
            self.path.display(),
            one_line(name)
        ))
    }

    /// The data file.
    pub(crate) fn file(&self) -> &TensorsFile {
        &self.file
    }

    /// Sets all parameters and buffers.
    ///
    /// # Errors
    ///
    /// `Data` when the checkpoint belongs to another model, naming the first tensor that
    /// differs; `params` is then unchanged.
    pub fn restore_params(&self, params: &mut Params) -> Result<()> {
        let outline = Outline::of(params);
        let all = self.of_model(&outline)?;
        // Nothing is read for another model, and nothing is changed before everything is
        // read.
        let values: Result<Vec<_>> = all.iter().map(|(_, found)| self.values(found)).collect();
        for ((tensor, _), values) in all.iter().zip(values?) {
            put(params, outline.name(*tensor), &values)?;
        }
        Ok(())
    }

    /// Sets the optimizer's steps and buffers. `params` are the parameters it was created
    /// for.
    ///
    /// # Errors
    ///
    /// `Data` when the checkpoint belongs to another model or optimizer; `optimizer` is
    /// then unchanged.
    pub fn restore_optimizer(&self, params: &Params, optimizer: &mut dyn Optimizer) -> Result<()> {
        let mut buffers = Vec::new();
        for buffer in &self.manifest.optimizer_buffers {
            let mut flat = Vec::with_capacity(params.flat().len());
            for info in params.infos() {
                let region = info.region(&self.optimizer_values(buffer, info)?);
                flat.extend(region.map_err(|e| Error::internal(e.to_string()).with_source(e))?);
            }
            buffers.push((&buffer[..], flat));
        }
        let views: Vec<(&str, &[f32])> = buffers.iter().map(|(n, v)| (*n, &v[..])).collect();
        optimizer
            .restore(
                self.manifest.optimizer_steps,
                &self.manifest.updates(params),
                &views,
            )
            .map_err(|source| {
                self.wrong(format_args!("it is of another optimizer: {source}"))
                    .with_source(source)
            })
    }

    /// What the optimizer's `buffer` has of a parameter, in PyTorch's row-major order.
    ///
    /// # Errors
    ///
    /// `Data` when the checkpoint belongs to another model; `System`.
    pub fn optimizer_values(&self, buffer: &str, param: &ParamInfo) -> Result<Vec<f32>> {
        let name = format!("{OPTIMIZER}{buffer}.{}", param.name);
        self.values(self.tensor(&name, &param.shape)?)
    }

    /// Reads it tensor by tensor: `take` gets the values of parameters, buffers and the
    /// optimizer's state, in the order of `outline`. Names, types and shapes are compared before
    /// any values are read; only one tensor is in memory.
    ///
    /// # Errors
    ///
    /// `Data` when the checkpoint belongs to another model, naming the first tensor that
    /// differs; `System`; those of `take`, which end the reading.
    pub fn read_each(
        &self,
        outline: &Outline,
        mut take: impl FnMut(TensorId, Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        for (tensor, found) in self.matched(outline)? {
            take(tensor, self.values(found)?)?;
        }
        Ok(())
    }

    fn of_model(&self, outline: &Outline) -> Result<Vec<(TensorId, &TensorInfo)>> {
        let mut all = Vec::new();
        for (tensor, (name, shape)) in outline.by_name() {
            all.push((tensor, self.tensor(&format!("{MODEL}{name}"), shape)?));
        }
        let model = outline.params().iter().chain(outline.buffers());
        let known: HashSet<&str> = model.map(|(name, _)| &name[..]).collect();
        let names = self.file.tensors();
        let mut saved = (names.iter()).filter_map(|(name, _)| name.strip_prefix(MODEL));
        if let Some(stranger) = saved.find(|name| !known.contains(name)) {
            return Err(self.wrong(format_args!(
                "the model does not know {}, which it has",
                one_line(stranger)
            )));
        }
        Ok(all)
    }

    fn matched(&self, outline: &Outline) -> Result<Vec<(TensorId, &TensorInfo)>> {
        let mut all = self.of_model(outline)?;
        let buffers = &self.manifest.optimizer_buffers;
        for (buffer, of) in buffers.iter().enumerate() {
            if buffers[..buffer].contains(of) {
                return Err(self.wrong(format_args!("it has {} twice", one_line(of))));
            }
            for (param, (name, shape)) in outline.params().iter().enumerate() {
                let found = self.tensor(&format!("{OPTIMIZER}{of}.{name}"), shape)?;
                all.push((TensorId::State { buffer, param }, found));
            }
        }
        Ok(all)
    }

    /// The tensor with this name, float32 of this shape.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo> {
        let found = self.file.tensor(name);
        let found = found.ok_or_else(|| self.wrong(format_args!("it lacks {name}")))?;
        if found.dtype != Dtype::F32 || found.shape != shape {
            return Err(self.wrong(format_args!(
                "{name} is {:?} of shape {:?}, expected F32 of shape {shape:?}",
                found.dtype, found.shape
            )));
        }
        Ok(found)
    }

    fn values(&self, tensor: &TensorInfo) -> Result<Vec<f32>> {
        Ok(DType::F32.to_f32(&self.file.bytes(tensor)?))
    }

    fn wrong(&self, what: std::fmt::Arguments<'_>) -> Error {
        Error::data(format!("{}: {what}", self.path.display()))
    }
}
