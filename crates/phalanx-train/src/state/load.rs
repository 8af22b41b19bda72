//! Reading a checkpoint back.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_nn::Params;
use phalanx_nn::optim::Optimizer;
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use super::manifest::Manifest;
use super::snapshot::{MODEL, MORE, OPTIMIZER};
use crate::checkpoint::{explain, put, tensors};
use crate::pth::DType;
use crate::{Error, Result};

/// A manifest longer than this is none.
const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// A checkpoint in memory, whole: its length and hash were checked.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    manifest: Manifest,
    data: Vec<u8>,
}

impl State {
    /// Reads the checkpoint whose manifest is at `path`.
    ///
    /// # Errors
    ///
    /// `Usage` when there is no such file; `Io` when it cannot be read; `Data`,
    /// naming the file, when it or its data is damaged or of another kind.
    pub fn load(path: &Path) -> Result<State> {
        let read = |path: &Path| {
            fs::read(path).map_err(|source| match source.kind() {
                std::io::ErrorKind::NotFound => {
                    Error::usage(format!("no checkpoint {}", path.display())).with_source(source)
                }
                _ => Error::io("cannot read", path, source),
            })
        };
        let wrong = |what: String| Error::data(format!("{}: {what}", path.display()));
        let size_bytes = fs::metadata(path).map_or(0, |m| m.len());
        if size_bytes > MAX_MANIFEST_BYTES {
            return Err(wrong(format!(
                "it has {size_bytes} bytes; a manifest has at most {MAX_MANIFEST_BYTES}"
            )));
        }
        let text = read(path)?;
        let manifest = Manifest::from_text(&text).map_err(wrong)?;
        if Path::new(&manifest.file).file_name() != Some(manifest.file.as_ref()) {
            return Err(wrong(format!(
                "its data file {:?} does not lie beside it",
                manifest.file
            )));
        }
        let data_path = path.with_file_name(&manifest.file);
        let data = read(&data_path)?;
        if data.len() as u64 != manifest.bytes {
            return Err(Error::data(format!(
                "{} has {} bytes, its manifest says {}; it may be truncated",
                data_path.display(),
                data.len(),
                manifest.bytes
            )));
        }
        let sha256 = hex::encode(Sha256::digest(&data));
        if sha256 != manifest.sha256 {
            return Err(Error::data(format!(
                "{} is damaged: its SHA-256 is {sha256}, its manifest says {}",
                data_path.display(),
                manifest.sha256
            )));
        }
        Ok(State {
            path: path.to_path_buf(),
            manifest,
            data,
        })
    }

    /// Its manifest's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it says beside the numbers.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The data file's content.
    pub(crate) fn data(&self) -> &[u8] {
        &self.data
    }

    /// Sets all parameters and buffers.
    ///
    /// # Errors
    ///
    /// `Data` when the checkpoint is of another model, naming the first tensor
    /// that differs; `params` is then unchanged.
    pub fn restore_params(&self, params: &mut Params) -> Result<()> {
        let file = self.tensors()?;
        let mut all = Vec::new();
        for tensor in tensors(params) {
            let values = self.values(&file, &format!("{MODEL}{}", tensor.name), &tensor.shape)?;
            all.push((tensor.name, values));
        }
        let saved = file.names().iter().filter(|n| n.starts_with(MODEL)).count();
        if saved != all.len() {
            return Err(self.wrong(format_args!(
                "it has {saved} tensors of a model, this model has {}",
                all.len()
            )));
        }
        for (name, values) in &all {
            put(params, name, values)?;
        }
        Ok(())
    }

    /// Sets the optimizer's steps and buffers; `params` are those that it was
    /// made for.
    ///
    /// # Errors
    ///
    /// `Data` when the checkpoint is of another model or optimizer; it is then
    /// unchanged.
    pub fn restore_optimizer(&self, params: &Params, optimizer: &mut dyn Optimizer) -> Result<()> {
        let buffers = self.optimizer_buffers(params)?;
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

    /// The optimizer's buffers by name, each laid out like [`Params::flat`] of `params`.
    ///
    /// # Errors
    ///
    /// `Data` when the checkpoint is of another model.
    pub fn optimizer_buffers(&self, params: &Params) -> Result<Vec<(&str, Vec<f32>)>> {
        let file = self.tensors()?;
        let mut as_params = params.clone();
        let mut buffers = Vec::new();
        for buffer in &self.manifest.optimizer_buffers {
            as_params.flat_mut().fill(0.0);
            for id in params.ids() {
                let info = &params.infos()[id.index()];
                let name = format!("{OPTIMIZER}{buffer}.{}", info.name);
                let values = self.values(&file, &name, &info.shape)?;
                as_params.import(id, &values).map_err(|source| {
                    Error::internal(format!("cannot import {name}: {source}")).with_source(source)
                })?;
            }
            buffers.push((buffer.as_str(), as_params.flat().to_vec()));
        }
        Ok(buffers)
    }

    /// The list of `len` numbers that was saved under this name
    /// ([`Snapshot::with_more`](super::Snapshot::with_more)).
    ///
    /// # Errors
    ///
    /// `Data` when there is none, or it has another length.
    pub fn more(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        self.values(&self.tensors()?, &format!("{MORE}{name}"), &[len])
    }

    fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.data).map_err(|source| {
            self.wrong(format_args!(
                "its data is no safetensors file: {}",
                explain(&source, &self.data)
            ))
            .with_source(source)
        })
    }

    fn values(&self, file: &SafeTensors<'_>, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let view = file.tensor(name).map_err(|source| {
            self.wrong(format_args!("it lacks {name}"))
                .with_source(source)
        })?;
        if view.dtype() != Dtype::F32 || view.shape() != shape {
            return Err(self.wrong(format_args!(
                "{name} is {:?} of shape {:?}, expected F32 of shape {shape:?}",
                view.dtype(),
                view.shape()
            )));
        }
        Ok(DType::F32.to_f32(view.data()))
    }

    fn wrong(&self, what: std::fmt::Arguments<'_>) -> Error {
        Error::data(format!("{}: {what}", self.path.display()))
    }
}
