//! Weights in files: safetensors with PyTorch's names, shapes and order of
//! elements, so that Python reads them with `safetensors.torch.load_file`.
//!
//! Equal weights and metadata give equal bytes. Files are written atomically
//! and read completely before the first parameter changes.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use phalanx_nn::Params;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::files::atomic_write_with;
use crate::{Error, Result};

/// The key that the format reserves for metadata.
const METADATA: &str = "__metadata__";

/// A parameter or buffer in PyTorch's form.
struct Tensor {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// Parameters and buffers in ascending order of their names.
fn tensors(params: &Params) -> Vec<Tensor> {
    let parameters = params.ids().zip(params.infos()).map(|(id, info)| Tensor {
        name: info.name.clone(),
        shape: info.shape.clone(),
        values: params.export(id),
    });
    let buffers = params
        .buffer_ids()
        .zip(params.buffer_infos())
        .map(|(id, info)| Tensor {
            name: info.name.clone(),
            shape: info.shape.clone(),
            values: params.buffer(id).to_vec(),
        });
    let mut all: Vec<Tensor> = parameters.chain(buffers).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// SHA-256 of all weights.
///
/// Defined over the outside view, so that it depends on neither this engine's
/// memory layout nor the file format: for every parameter and buffer in
/// ascending byte order of the names, its float32 values in PyTorch's
/// row-major order, little-endian; nothing else. In Python:
///
/// ```text
/// h = hashlib.sha256()
/// for name in sorted(state): h.update(state[name].contiguous().numpy().tobytes())
/// ```
pub fn weights_digest(params: &Params) -> [u8; 32] {
    let mut hash = Sha256::new();
    for tensor in tensors(params) {
        hash.update(little_endian(&tensor.values));
    }
    hash.finalize().into()
}

/// [`weights_digest`] in hexadecimal.
pub fn weights_sha256(params: &Params) -> String {
    hex::encode(weights_digest(params))
}

/// Writes all parameters and buffers to `path`, atomically.
///
/// # Errors
///
/// `DiskFull` or `Io`, naming the path; the file is then as it was before.
pub fn save_params(
    path: &Path,
    params: &Params,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let tensors = tensors(params);
    // Written by hand because the library keeps metadata in a hash map, whose
    // order, hence the file's bytes, would change from run to run.
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA.to_owned(), json!(metadata));
    }
    let mut offset = 0;
    for tensor in &tensors {
        let end = offset + tensor.values.len() * size_of::<f32>();
        let entry = json!({
            "dtype": "F32",
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        });
        header.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // The data must begin at a multiple of 8.
    header.resize(header.len().next_multiple_of(8), b' ');
    atomic_write_with(path, |out: &mut dyn Write| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for tensor in &tensors {
            out.write_all(&little_endian(&tensor.values))?;
        }
        Ok(())
    })
}

/// Fills `params` from the file at `path` and returns the file's metadata.
///
/// The file must hold exactly the parameters and buffers of `params`, each
/// in its shape, in float32.
///
/// # Errors
///
/// `Usage` when there is no such file; `Io` when it cannot be read; `Data`
/// when it is truncated, no safetensors file, or of another model, naming
/// the first tensors that differ. `params` is then unchanged.
pub fn load_params(path: &Path, params: &mut Params) -> Result<BTreeMap<String, String>> {
    let bytes = std::fs::read(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => {
            Error::usage(format!("no checkpoint {}", path.display())).with_source(source)
        }
        _ => Error::io("cannot read", path, source),
    })?;
    let broken = |source: safetensors::SafeTensorError| {
        Error::data(format!(
            "{} is no complete safetensors file: {}",
            path.display(),
            explain(&source, &bytes)
        ))
        .with_source(source)
    };
    let file = SafeTensors::deserialize(&bytes).map_err(broken)?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(broken)?;
    let metadata = header.metadata().clone().unwrap_or_default();

    let expected = tensors(params);
    let strangers: Vec<&str> = file
        .names()
        .into_iter()
        .filter(|name| expected.iter().all(|t| t.name != *name))
        .collect();
    let missing: Vec<&str> = expected
        .iter()
        .map(|t| t.name.as_str())
        .filter(|name| file.tensor(name).is_err())
        .collect();
    if !strangers.is_empty() || !missing.is_empty() {
        return Err(Error::data(format!(
            "{} is of another model:{}{}",
            path.display(),
            listed(" it lacks", missing),
            listed(" the model does not know", strangers)
        )));
    }
    let mut values = Vec::with_capacity(expected.len());
    for tensor in &expected {
        let view = file.tensor(&tensor.name).map_err(broken)?;
        if view.dtype() != Dtype::F32 || view.shape() != tensor.shape {
            return Err(Error::data(format!(
                "{}: {} is {:?} of shape {:?}, the model has F32 of shape {:?}",
                path.display(),
                tensor.name,
                view.dtype(),
                view.shape(),
                tensor.shape
            )));
        }
        let floats = view.data().chunks_exact(4);
        values.push(
            floats
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect::<Vec<f32>>(),
        );
    }
    for (tensor, values) in expected.iter().zip(&values) {
        put(params, &tensor.name, values)?;
    }
    Ok(metadata.into_iter().collect())
}

/// Sets the parameter or buffer of that name, whose length was checked.
fn put(params: &mut Params, name: &str, values: &[f32]) -> Result<()> {
    if let Some(id) = params.find(name) {
        return params.import(id, values).map_err(|source| {
            Error::internal(format!("cannot import {name}: {source}")).with_source(source)
        });
    }
    if let Some(id) = params.find_buffer(name) {
        params.buffer_mut(id).copy_from_slice(values);
    }
    Ok(())
}

/// The library's message in the reader's terms where it has one.
fn explain(error: &safetensors::SafeTensorError, bytes: &[u8]) -> String {
    use safetensors::SafeTensorError as E;
    match error {
        E::HeaderTooSmall | E::InvalidHeaderLength | E::MetadataIncompleteBuffer => format!(
            "it has {} bytes, which is not what its header promises; it may be truncated",
            bytes.len()
        ),
        E::HeaderTooLarge => "the length of its header is absurd; it is of another kind".to_owned(),
        other => other.to_string(),
    }
}

/// `; it lacks a, b, c and 4 more`.
fn listed(what: &str, mut names: Vec<&str>) -> String {
    const SHOWN: usize = 4;
    if names.is_empty() {
        return String::new();
    }
    names.sort_unstable();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    let tail = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    format!("{what} {}{tail};", names.join(", "))
}

fn little_endian(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
