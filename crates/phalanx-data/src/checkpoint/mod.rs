//! Weights in files: safetensors, which Python reads with
//! `safetensors.torch.load_file`, and PyTorch's own `.pth`, both with PyTorch's
//! names, shapes and order of elements.
//!
//! Equal weights and metadata give equal bytes. Files are written atomically
//! and read completely before the first parameter changes.

mod file;
mod load;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use phalanx_nn::{ParamInfo, Params};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::Result;
use crate::files::atomic_write_with;
use crate::pth::{self, DType, Saved};

pub(crate) use file::{MAX_TENSORS, TensorsFile};
pub(crate) use load::put;
pub use load::{Loaded, load_params, read_metadata, read_tensors};

/// The key that the format reserves for metadata.
const METADATA: &str = "__metadata__";

/// A parameter or buffer in PyTorch's form.
pub(crate) struct Tensor {
    pub name: String,
    pub shape: Vec<usize>,
    /// Row-major.
    pub values: Vec<f32>,
}

impl From<Tensor> for Saved {
    fn from(tensor: Tensor) -> Saved {
        Saved {
            name: tensor.name,
            dtype: DType::F32,
            shape: tensor.shape,
            bytes: little_endian(&tensor.values),
        }
    }
}

/// Parameters and buffers in ascending order of their names.
pub(crate) fn tensors(params: &Params) -> Vec<Tensor> {
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

/// Writes all parameters and buffers to `path` as `torch.save(state_dict())`
/// would, atomically: float32, but for `num_batches_tracked`, which is int64
/// there. Buffers follow the parameters of their layer.
///
/// # Errors
///
/// `DiskFull` or `Io`, naming the path; the file is then as it was before.
pub fn save_pth(path: &Path, params: &Params) -> Result<()> {
    pth::save_state_dict(path, &state_dict(params))
}

/// Writes the file of [`save_pth`] to `out`; `root` is the name of the file without its ending.
///
/// # Errors
///
/// As [`write_state_dict`](pth::write_state_dict).
pub fn write_pth(out: &mut dyn Write, root: &str, params: &Params) -> std::io::Result<()> {
    pth::write_state_dict(out, root, &state_dict(params))
}

/// All parameters and buffers in PyTorch's order.
fn state_dict(params: &Params) -> Vec<Saved> {
    let saved = |info: &ParamInfo, values: &[f32]| {
        let (dtype, bytes) = if is_count(&info.name) {
            let whole = values.iter().flat_map(|v| count(*v).to_le_bytes());
            (DType::I64, whole.collect())
        } else {
            (DType::F32, little_endian(values))
        };
        Saved {
            name: info.name.clone(),
            dtype,
            shape: info.shape.clone(),
            bytes,
        }
    };
    let mut buffers: Vec<Saved> = params
        .buffer_ids()
        .zip(params.buffer_infos())
        .map(|(id, info)| saved(info, params.buffer(id)))
        .collect();
    let mut all = Vec::with_capacity(params.len() + buffers.len());
    let mut infos = params.ids().zip(params.infos()).peekable();
    while let Some((id, info)) = infos.next() {
        all.push(saved(info, &params.export(id)));
        let layer = layer_of(&info.name);
        if infos
            .peek()
            .is_none_or(|(_, next)| layer_of(&next.name) != layer)
        {
            all.extend(buffers.extract_if(.., |b| layer_of(&b.name) == layer));
        }
    }
    all.append(&mut buffers);
    all
}

/// `bn1` of `bn1.weight`.
fn layer_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(layer, _)| layer)
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
    atomic_write_with(path, |out| write_params(out, params, metadata))
}

/// Writes the file of [`save_params`] to `out`.
///
/// # Errors
///
/// Those of `out`.
pub fn write_params(
    out: &mut dyn Write,
    params: &Params,
    metadata: &BTreeMap<String, String>,
) -> std::io::Result<()> {
    let tensors: Vec<Saved> = tensors(params).into_iter().map(Saved::from).collect();
    write_tensors(out, metadata, &tensors)
}

/// Writes `tensors` to `path` atomically: as PyTorch does where its name ends
/// in `.pth` or `.pt`, as safetensors with `metadata` otherwise. Counts of
/// batches (`num_batches_tracked`) are int64 for PyTorch.
///
/// # Errors
///
/// `DiskFull` or `Io`, naming the path; the file is then as it was before.
pub fn save_tensors(
    path: &Path,
    mut tensors: Vec<Saved>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let torch = path.extension().is_some_and(|e| e == "pth" || e == "pt");
    if !torch {
        // As the library orders them: wider numbers first, so that all are aligned.
        tensors.sort_by(|a, b| {
            let width = |t: &Saved| std::cmp::Reverse(t.dtype.size_bytes());
            (width(a), &a.name).cmp(&(width(b), &b.name))
        });
        return atomic_write_with(path, |out| write_tensors(out, metadata, &tensors));
    }
    for tensor in &mut tensors {
        if is_count(&tensor.name) && tensor.dtype.is_float() {
            let whole = tensor.dtype.to_f32(&tensor.bytes).into_iter();
            tensor.bytes = whole.flat_map(|v| count(v).to_le_bytes()).collect();
            tensor.dtype = DType::I64;
        }
    }
    pth::save_state_dict(path, &tensors)
}

/// Whether PyTorch has a whole number under this name.
fn is_count(name: &str) -> bool {
    name.rsplit('.').next() == Some("num_batches_tracked")
}

/// The whole number that a count stands for. A mean of equal counts over ranks may be a
/// rounding away from them, and one over ranks that sat a step out lies between.
fn count(value: f32) -> i64 {
    value.round() as i64
}

/// Writes a safetensors file of `tensors` to `out`, in their order.
pub(crate) fn write_tensors(
    out: &mut dyn Write,
    metadata: &BTreeMap<String, String>,
    tensors: &[Saved],
) -> std::io::Result<()> {
    let heads = tensors
        .iter()
        .map(|t| (&t.name[..], t.dtype, &t.shape[..], t.bytes.len()));
    write_header(out, metadata, heads)?;
    for tensor in tensors {
        out.write_all(&tensor.bytes)?;
    }
    Ok(())
}

/// Writes what comes before the numbers in a safetensors file: of each tensor
/// its name, type, shape and bytes, in the order in which they follow.
pub(crate) fn write_header<'a>(
    out: &mut dyn Write,
    metadata: &BTreeMap<String, String>,
    tensors: impl Iterator<Item = (&'a str, DType, &'a [usize], usize)>,
) -> std::io::Result<()> {
    // Written by hand because the library keeps metadata in a hash map, whose
    // order, hence the file's bytes, would change from run to run.
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA.to_owned(), json!(metadata));
    }
    let mut offset = 0;
    for (name, dtype, shape, bytes) in tensors {
        let end = offset + bytes;
        let entry = json!({
            "dtype": dtype.safetensors_name(),
            "shape": shape,
            "data_offsets": [offset, end],
        });
        header.insert(name.to_owned(), entry);
        offset = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // The data must begin at a multiple of 8.
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)
}

pub(crate) fn little_endian(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
