//! Files of weights: safetensors (`safetensors.torch.load_file` in Python) and PyTorch's
//! `.pth`, both with PyTorch's names, shapes and element order.
//!
//! Equal weights and metadata give equal bytes. Files are written atomically, and read
//! completely before a parameter changes.

mod file;
mod outline;

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::Write;
use std::path::Path;

use phalanx_nn::Params;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::pth::{self, DType, Head, Saved};
use phalanx_base::files::atomic_write_with;
use phalanx_base::{Error, Result};

pub(crate) use file::TensorsFile;
pub(crate) use outline::{NamedShape, check_len};
pub use outline::{Outline, TensorId, Values, full_values};

/// The key of the metadata in the format.
const METADATA: &str = "__metadata__";

/// Atomically writes all parameters and buffers to `path` as `torch.save(state_dict())`
/// does: float32, except for `num_batches_tracked`, which is int64. Buffers follow the
/// parameters of their layer.
///
/// # Errors
///
/// `DiskFull` or `System`, naming the path; the file is then unchanged.
pub fn save_pth(path: &Path, params: &Params) -> Result<()> {
    save_pth_with(path, &Outline::of(params), |tensor| {
        Ok(full_values(params, tensor))
    })
}

/// As [`save_pth`], of a model whose tensors `values` returns in full, one after the other: only one of them is in
/// memory. An error of `values` ends the writing.
///
/// # Errors
///
/// As [`save_pth`], and those of `values`.
pub fn save_pth_with(
    path: &Path,
    outline: &Outline,
    values: impl FnMut(TensorId) -> std::io::Result<Vec<f32>>,
) -> Result<()> {
    let root = pth::root_of(path);
    atomic_write_with(path, |out| write_pth_with(out, &root, outline, values))
}

/// As [`save_pth_with`], to `out`; `root` is the file's name without extension.
///
/// # Errors
///
/// Errors of `out` and `values`; `InvalidInput` when the number of values does not match a tensor's shape, or a name
/// exceeds the format's limits.
pub fn write_pth_with(
    out: &mut dyn Write,
    root: &str,
    outline: &Outline,
    mut values: impl FnMut(TensorId) -> std::io::Result<Vec<f32>>,
) -> std::io::Result<()> {
    let all = outline.as_in_state_dict();
    let heads: Vec<Head<'_>> = all.iter().map(|(_, named)| head(named)).collect();
    let bytes = |i: usize| {
        let (tensor, named) = all[i];
        let values = values(tensor)?;
        check_len(named, &values)?;
        Ok(saved_bytes(&named.0, &values))
    };
    pth::write_state_dict_with(out, root, &heads, bytes)
}

/// A tensor in PyTorch's format.
fn head(named: &NamedShape) -> Head<'_> {
    Head {
        name: &named.0,
        dtype: match is_count(&named.0) {
            true => DType::I64,
            false => DType::F32,
        },
        shape: &named.1,
    }
}

/// Its bytes there.
fn saved_bytes(name: &str, values: &[f32]) -> Vec<u8> {
    match is_count(name) {
        true => {
            let whole = values.iter().flat_map(|v| count(*v).to_le_bytes());
            whole.collect()
        }
        false => little_endian(values),
    }
}

/// Whether none of `values` is infinite or NaN. No early end, so that the compiler uses vectors.
pub(crate) fn all_finite(values: &[f32]) -> bool {
    values
        .iter()
        .fold(true, |all, value| all & value.is_finite())
}

/// SHA-256 of all weights.
///
/// It does not depend on the memory layout or the file format: it covers the float32
/// values, little-endian and in PyTorch's row-major order, of all parameters and buffers in
/// ascending byte order of their names. In Python:
///
/// ```text
/// h = hashlib.sha256()
/// for name in sorted(state): h.update(state[name].contiguous().numpy().tobytes())
/// ```
pub fn weights_digest(params: &Params) -> [u8; 32] {
    let values = |tensor| Ok::<_, Infallible>(full_values(params, tensor));
    let Ok(digest) = weights_digest_with(&Outline::of(params), values);
    digest
}

/// As [`weights_digest`], of a model whose tensors `values` returns in full, one after the other.
///
/// # Errors
///
/// Those of `values`.
pub fn weights_digest_with<E>(
    outline: &Outline,
    mut values: impl FnMut(TensorId) -> std::result::Result<Vec<f32>, E>,
) -> std::result::Result<[u8; 32], E> {
    let mut hash = Sha256::new();
    for (tensor, _) in outline.by_name() {
        hash.update(little_endian(&values(tensor)?));
    }
    Ok(hash.finalize().into())
}

/// [`weights_digest`] in hexadecimal.
pub fn weights_sha256(params: &Params) -> String {
    hex::encode(weights_digest(params))
}

/// Atomically writes all parameters and buffers to `path` as safetensors.
///
/// # Errors
///
/// `DiskFull` or `System`, naming the path; the file is then unchanged.
pub fn save_params(
    path: &Path,
    params: &Params,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    save_params_with(path, &Outline::of(params), metadata, |tensor| {
        Ok(full_values(params, tensor))
    })
}

/// As [`save_params`], of a model whose tensors `values` returns in full, one after the other: only one of them is in
/// memory. An error of `values` ends the writing.
///
/// # Errors
///
/// As [`save_params`], and those of `values`.
pub fn save_params_with(
    path: &Path,
    outline: &Outline,
    metadata: &BTreeMap<String, String>,
    values: impl FnMut(TensorId) -> std::io::Result<Vec<f32>>,
) -> Result<()> {
    atomic_write_with(path, |out| {
        write_params_with(out, outline, metadata, values).map(drop)
    })
}

/// As [`save_params_with`], to `out`. Returns the first tensor, parameters before buffers, with an infinite or NaN
/// value, if there is one.
///
/// # Errors
///
/// Errors of `out` and `values`; `InvalidInput` when the number of values does not match a tensor's shape.
pub fn write_params_with(
    out: &mut dyn Write,
    outline: &Outline,
    metadata: &BTreeMap<String, String>,
    mut values: impl FnMut(TensorId) -> std::io::Result<Vec<f32>>,
) -> std::io::Result<Option<TensorId>> {
    let mut not_finite = None;
    write_all(
        out,
        &outline.by_name(),
        metadata,
        &mut values,
        |tensor, values| {
            if !all_finite(values) && not_finite.is_none_or(|first| tensor < first) {
                not_finite = Some(tensor);
            }
        },
    )?;
    Ok(not_finite)
}

/// Writes the tensors `all` as float32 safetensors in this order; `seen` gets the values of each.
pub(crate) fn write_all(
    out: &mut dyn Write,
    all: &[(TensorId, impl Borrow<NamedShape>)],
    metadata: &BTreeMap<String, String>,
    values: &mut Values<'_>,
    mut seen: impl FnMut(TensorId, &[f32]),
) -> std::io::Result<()> {
    let heads = all.iter().map(|(_, named)| {
        let (name, shape) = named.borrow();
        let elements: usize = shape.iter().product();
        (&name[..], DType::F32, &shape[..], 4 * elements)
    });
    write_header(out, metadata, heads)?;
    for (tensor, named) in all {
        let values = values(*tensor)?;
        check_len(named.borrow(), &values)?;
        seen(*tensor, &values);
        write_values(out, &values)?;
    }
    Ok(())
}

/// Atomically writes `tensors` to `path`: in PyTorch's format if its name ends in `.pth` or
/// `.pt`, otherwise as safetensors with `metadata`. `num_batches_tracked` is int64 in
/// PyTorch's format.
///
/// # Errors
///
/// `DiskFull` or `System`, naming the path; the file is then unchanged.
pub fn save_tensors(
    path: &Path,
    mut tensors: Vec<Saved>,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let torch = path.extension().is_some_and(|e| e == "pth" || e == "pt");
    if !torch {
        // In the order of the library: larger types first, so that all are aligned.
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

/// Whether PyTorch stores an integer under this name.
pub(crate) fn is_count(name: &str) -> bool {
    name.rsplit('.').next() == Some("num_batches_tracked")
}

/// The integer value of a count. A mean of counts over ranks may be off by a rounding, or
/// lie between them where ranks skipped a step.
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

/// Writes the header of a safetensors file: name, type, shape and byte range of each
/// tensor, in the order of the data.
pub(crate) fn write_header<'a>(
    out: &mut dyn Write,
    metadata: &BTreeMap<String, String>,
    tensors: impl Iterator<Item = (&'a str, DType, &'a [usize], usize)>,
) -> std::io::Result<()> {
    // Not written by the library, which keeps metadata in a hash map: its order, and so the
    // file's bytes, would change from run to run.
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

/// Numbers that become bytes at a time.
const CHUNK: usize = 1 << 14;

/// Writes `values`, little-endian.
pub(crate) fn write_values(out: &mut dyn Write, values: &[f32]) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(4 * CHUNK.min(values.len()));
    for some in values.chunks(CHUNK) {
        bytes.clear();
        bytes.extend(some.iter().flat_map(|v| v.to_le_bytes()));
        out.write_all(&bytes)?;
    }
    Ok(())
}

pub(crate) fn little_endian(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Sets the parameter or buffer with this name, whose length was checked.
pub(crate) fn put(params: &mut Params, name: &str, values: &[f32]) -> Result<()> {
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
