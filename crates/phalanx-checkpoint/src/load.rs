//! Loading weights from a safetensors or PyTorch file into a model.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use phalanx_nn::Params;
use safetensors::Dtype;

use crate::pth::{DType, LEGACY_START, PthFile, Saved, WRAPPED, ZIP_START, strip_all, strip_one};
use crate::state::{MAX_MANIFEST_BYTES, MODEL, State};
use crate::weights::{Outline, TensorId, TensorsFile, put};
use phalanx_base::files::{open_regular, read_open};
use phalanx_base::text::one_line;
use phalanx_base::{Error, Result};

/// What a file of weights has besides the weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Metadata of a safetensors file or a checkpoint; `.pth` files have none.
    pub metadata: BTreeMap<String, String>,
    /// Warnings about the file, one sentence each.
    pub warnings: Vec<String>,
}

/// One tensor of a file.
struct Found<'a> {
    /// Name of the type in the file's format: `F32`, `float32`.
    dtype_name: String,
    /// `None` for a type that only this format has.
    dtype: Option<DType>,
    shape: Vec<usize>,
    /// Reads its values: row-major, little-endian.
    bytes: Box<dyn Fn() -> Result<Vec<u8>> + 'a>,
}

/// Loads `params` from the file at `path`: safetensors or PyTorch's `.pth` (recognized by
/// content), the manifest (`.json`) of a resumable checkpoint, or the index
/// (`model.safetensors.index.json`) of a model in several files.
///
/// The file must have exactly the parameters and buffers of `params` with the same shapes;
/// parameters may be float64, float32, float16 or bfloat16. Prefixes
/// `module.`, `_orig_mod.` and `model.` that all names have are removed until names of the model
/// are left. Names, types and shapes are compared before any values are read.
///
/// # Errors
///
/// `Usage` when the file does not exist; `System` when it cannot be read; `Data` when it is
/// truncated, has another format, or belongs to another model, naming the first tensors
/// that differ, or when a value is not finite in float32. `params` is then unchanged.
pub fn load_params(path: &Path, params: &mut Params) -> Result<Loaded> {
    let outline = Outline::of(params);
    let mut all = Vec::new();
    let loaded = read_each(path, &outline, |tensor, values| {
        all.push((tensor, values));
        Ok(())
    })?;
    for (tensor, values) in all {
        put(params, outline.name(tensor), &values)?;
    }
    Ok(loaded)
}

/// The metadata of the file at `path`, without reading values. Accepts the formats of
/// [`read_tensors`].
///
/// # Errors
///
/// As [`load_params`], except for the model.
pub fn read_metadata(path: &Path) -> Result<BTreeMap<String, String>> {
    with_tensors(path, |_| Ok(())).map(|((), loaded)| loaded.metadata)
}

/// All tensors of the file at `path`: safetensors, PyTorch's `.pth`, the manifest
/// (`.json`) of a resumable checkpoint (the tensors of its model), or the index
/// (`model.safetensors.index.json`) of a model in several files.
///
/// # Errors
///
/// As [`load_params`], except for the model; also `Data` when tensors that share storage
/// would need far more memory than the file.
pub fn read_tensors(path: &Path) -> Result<(Vec<Saved>, Loaded)> {
    let file_bytes = std::fs::metadata(path).map_or(0, |m| m.len());
    with_tensors(path, |mut found| {
        strip_all(&mut found);
        let mut all = Vec::with_capacity(found.len());
        let mut total_bytes = 0u64;
        for (name, tensor) in found {
            let Some(dtype) = tensor.dtype else {
                let name = one_line(&name);
                let dtype = tensor.dtype_name;
                let what = format_args!("{name} is {dtype}, which .pth files cannot store");
                return Err(wrong(path, what));
            };
            let bytes = (tensor.shape.iter()).fold(dtype.size_bytes() as u64, |n, d| {
                n.saturating_mul(*d as u64)
            });
            total_bytes = total_bytes.saturating_add(bytes);
            // The tensors of a manifest or an index are in other files.
            if total_bytes > LARGEST_COPIES * file_bytes.max(1 << 20) && !is_json(path) {
                let what = format_args!(
                    "its tensors share so much memory that, each by itself, they take more than {LARGEST_COPIES} times the file"
                );
                return Err(wrong(path, what));
            }
            all.push(Saved {
                name,
                dtype,
                shape: tensor.shape,
                bytes: (tensor.bytes)()?,
            });
        }
        Ok(all)
    })
}

/// Tensors that share storage are copied, up to this many times the size of their file.
const LARGEST_COPIES: u64 = 16;

type AllFound<'a> = Vec<(String, Found<'a>)>;

/// An open file with tensors.
enum Opened {
    Checkpoint(Box<State>),
    Safetensors(TensorsFile),
    PyTorch(PthFile),
}

impl Opened {
    /// Opens a safetensors or PyTorch file, recognized by its content.
    fn new(path: &Path) -> Result<Opened> {
        let file = open_regular(path).map_err(|e| Error::not_opened("checkpoint", path, e))?;
        Ok(match is_pytorch(path, &file)? {
            true => Opened::PyTorch(PthFile::open(path, file)?),
            false => Opened::Safetensors(TensorsFile::new(path, file)?),
        })
    }

    fn tensors(&self) -> Result<AllFound<'_>> {
        match self {
            Opened::Safetensors(file) => Ok(in_safetensors(file)),
            Opened::PyTorch(file) => in_pytorch(file),
            Opened::Checkpoint(state) => {
                let all = in_safetensors(state.file()).into_iter();
                Ok(all
                    .filter_map(|(name, found)| Some((name.strip_prefix(MODEL)?.to_owned(), found)))
                    .collect())
            }
        }
    }

    fn loaded(&self) -> Loaded {
        let (metadata, warnings) = match self {
            Opened::Checkpoint(state) => (state.file().metadata(), Vec::new()),
            Opened::Safetensors(file) => (file.metadata(), Vec::new()),
            Opened::PyTorch(file) => (BTreeMap::new(), file.warnings().to_vec()),
        };
        Loaded { metadata, warnings }
    }
}

/// The index of a model that Hugging Face's libraries have saved as several files:
/// `model.safetensors.index.json` or `pytorch_model.bin.index.json`.
#[derive(serde::Deserialize)]
struct Index {
    /// Each tensor's file, next to the index.
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads the index at `path`; `None` if it is the manifest of a checkpoint.
    fn read(path: &Path) -> Result<Option<Index>> {
        if !path.to_string_lossy().ends_with(".index.json") {
            return Ok(None);
        }
        let file = open_regular(path).map_err(|e| Error::not_opened("checkpoint", path, e))?;
        let text = read_open(path, file, MAX_MANIFEST_BYTES)?;
        let index: Index = serde_json::from_slice(&text).map_err(|source| {
            let why = source.to_string();
            let why = format_args!("expected the index of a model: {}", one_line(&why));
            wrong(path, why).with_source(source)
        })?;
        let outside = |name: &&String| Path::new(name).file_name() != Some(name.as_ref());
        match index.weight_map.values().find(outside) {
            Some(name) => {
                let name = one_line(name);
                let why = format_args!("its file {name} is not in the same folder");
                Err(wrong(path, why))
            }
            None => Ok(Some(index)),
        }
    }

    /// Calls `take` with the tensors of its files.
    fn with_tensors<R>(
        &self,
        path: &Path,
        take: impl FnOnce(AllFound<'_>) -> Result<R>,
    ) -> Result<(R, Loaded)> {
        let names: BTreeSet<&String> = self.weight_map.values().collect();
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            let opened = Opened::new(&path.with_file_name(name));
            let opened = opened.map_err(|e| e.note("index", path.display().to_string()))?;
            files.push((name, opened));
        }
        let (mut all, mut loaded) = (Vec::new(), Loaded::default());
        for (file, opened) in &files {
            let there = opened.tensors()?.into_iter();
            all.extend(there.filter(|(name, _)| self.weight_map.get(name) == Some(file)));
            let Loaded { metadata, warnings } = opened.loaded();
            loaded.metadata.extend(metadata);
            loaded.warnings.extend(warnings);
        }
        let found: HashSet<&String> = all.iter().map(|(name, _)| name).collect();
        if let Some((name, file)) = self
            .weight_map
            .iter()
            .find(|(name, _)| !found.contains(name))
        {
            let (name, file) = (one_line(name), one_line(file));
            let why = format_args!("{file} lacks {name}, which the index says it has");
            return Err(wrong(path, why));
        }
        Ok((take(all)?, loaded))
    }
}

fn wrong(path: &Path, what: std::fmt::Arguments<'_>) -> Error {
    Error::data(format!("{}: {what}", path.display()))
}

/// Calls `take` with the tensors of a file of any format.
fn with_tensors<R>(
    path: &Path,
    take: impl FnOnce(AllFound<'_>) -> Result<R>,
) -> Result<(R, Loaded)> {
    if let Some(index) = Index::read(path)? {
        return index.with_tensors(path, take);
    }
    let opened = match is_json(path) {
        true => Opened::Checkpoint(Box::new(State::load(path)?)),
        false => Opened::new(path)?,
    };
    Ok((take(opened.tensors()?)?, opened.loaded()))
}

/// The tensors of a PyTorch file, by name.
fn in_pytorch(file: &PthFile) -> Result<AllFound<'_>> {
    let tensors = file.named_as_saved()?;
    file.check_storages(tensors.iter().map(|(_, tensor)| *tensor))?;
    let shared = file.shared(tensors.iter().map(|(_, tensor)| *tensor));
    let found = tensors.into_iter().map(|(name, tensor)| {
        let found = Found {
            dtype_name: tensor.dtype().to_string(),
            dtype: Some(tensor.dtype()),
            shape: tensor.shape().to_vec(),
            bytes: match shared.contains(tensor.storage_name()) {
                true => Box::new(|| file.bytes(tensor)),
                false => Box::new(|| file.bytes_once(tensor)),
            },
        };
        (name, found)
    });
    Ok(found.collect())
}

/// The tensors of a safetensors file, by name.
fn in_safetensors(file: &TensorsFile) -> AllFound<'_> {
    let all = file.tensors().into_iter().map(|(name, tensor)| {
        let found = Found {
            dtype_name: format!("{:?}", tensor.dtype),
            dtype: dtype(tensor.dtype),
            shape: tensor.shape.clone(),
            bytes: Box::new(|| file.bytes(tensor)),
        };
        (name, found)
    });
    all.collect()
}

/// Whether it is a manifest or an index, with the tensors in files next to it.
fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "json")
}

/// Whether the file starts like one of PyTorch's formats, or has such a name and does not
/// start like safetensors.
fn is_pytorch(path: &Path, file: &File) -> Result<bool> {
    let mut start = Vec::new();
    (file.take(LEGACY_START.len() as u64).read_to_end(&mut start))
        .map_err(|source| Error::io("cannot read", path, source))?;
    let called = path.extension().is_some_and(|e| e == "pth" || e == "pt");
    // After the length of a safetensors header.
    let other = start.get(8) == Some(&b'{');
    Ok(start.starts_with(&ZIP_START) || start == LEGACY_START || (called && !other))
}

/// The type with this name; safetensors has some that are not supported here.
fn dtype(of: Dtype) -> Option<DType> {
    Some(match of {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool,
        _ => return None,
    })
}

/// Reads the file at `path` tensor by tensor: `take` gets the values of all parameters and
/// buffers of `outline`, as [`load_params`] sets them, in ascending order of their names. Names,
/// types and shapes are compared before any values are read; only one tensor is in memory, and
/// what tensors of a `.pth` file share.
///
/// # Errors
///
/// As [`load_params`], and those of `take`, which end the reading.
pub fn read_each(
    path: &Path,
    outline: &Outline,
    mut take: impl FnMut(TensorId, Vec<f32>) -> Result<()>,
) -> Result<Loaded> {
    // `model.` is the prefix of Lightning's modules; a model's own names may begin with any of these.
    const PREFIXES: [&str; 3] = [WRAPPED[0], WRAPPED[1], "model."];
    let each = |mut found: AllFound<'_>| {
        let expected = outline.by_name();
        let known = |name: &String| {
            (expected.binary_search_by(|(_, known)| known.0.as_str().cmp(name))).is_ok()
        };
        while !found.iter().any(|(name, _)| known(name)) && strip_one(&mut found, &PREFIXES) {}
        let found = found.into_iter().collect();
        for (tensor, dtype, found) in matched(path, outline, &found)? {
            let bytes = (found.bytes)()?;
            let values = dtype.to_f32(&bytes);
            check_finite(path, outline.name(tensor), dtype, &bytes, &values)?;
            take(tensor, values)?;
        }
        Ok(())
    };
    with_tensors(path, each).map(|((), loaded)| loaded)
}

/// Refuses values that are not finite, of which training and predictions become NaN.
fn check_finite(path: &Path, name: &str, dtype: DType, bytes: &[u8], values: &[f32]) -> Result<()> {
    let Some(at) = values.iter().position(|value| !value.is_finite()) else {
        return Ok(());
    };
    let wide = (dtype == DType::F64)
        .then(|| bytes.as_chunks().0.get(at))
        .flatten()
        .map(|value| f64::from_le_bytes(*value))
        .filter(|value| value.is_finite());
    let what = match wide {
        Some(wide) => format!("{wide:e}, which is too large for float32,"),
        None => values[at].to_string(),
    };
    let count = values.iter().filter(|value| !value.is_finite()).count();
    let all = values.len();
    let what = format_args!(
        "{name} has {what} at index {at} ({count} of its {all} values are not finite)"
    );
    Err(wrong(path, what))
}

/// The tensors of `outline`, after comparing all names, types and shapes.
fn matched<'f, 'a>(
    path: &Path,
    outline: &Outline,
    found: &'f HashMap<String, Found<'a>>,
) -> Result<Vec<(TensorId, DType, &'f Found<'a>)>> {
    let expected = outline.by_name();
    let missing: Vec<&str> = expected
        .iter()
        .map(|(_, (name, _))| name.as_str())
        .filter(|name| !found.contains_key(*name))
        .collect();
    let strangers: Vec<&str> = found
        .keys()
        .map(String::as_str)
        .filter(|name| {
            expected
                .binary_search_by(|(_, known)| known.0.as_str().cmp(name))
                .is_err()
        })
        .collect();
    if !strangers.is_empty() || !missing.is_empty() {
        let differs = [
            listed("it lacks", missing),
            listed("the model does not know", strangers),
        ];
        let differs: Vec<String> = differs.into_iter().flatten().collect();
        return Err(Error::data(format!(
            "{} is of another model: {}",
            path.display(),
            differs.join("; ")
        )));
    }
    let mut all = Vec::with_capacity(expected.len());
    for (tensor, (name, shape)) in expected {
        let Some(found) = found.get(name) else {
            continue;
        };
        // Only buffers such as counts may be integers.
        let is_parameter = matches!(tensor, TensorId::Param(_));
        let dtype = found
            .dtype
            .filter(|dtype| dtype.is_float() || !is_parameter);
        match dtype {
            Some(dtype) if found.shape == *shape => all.push((tensor, dtype, found)),
            _ => {
                let (dtype, has) = (&found.dtype_name, &found.shape);
                let what = format_args!(
                    "{name} is {dtype} of shape {has:?}, the model has F32 of shape {shape:?}"
                );
                return Err(wrong(path, what));
            }
        }
    }
    Ok(all)
}

/// `it lacks a, b, c, d and 4 more`; empty if there are none.
fn listed(what: &str, mut names: Vec<&str>) -> Option<String> {
    const SHOWN: usize = 4;
    if names.is_empty() {
        return None;
    }
    names.sort_unstable();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    let tail = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    let names: Vec<_> = names.into_iter().map(one_line).collect();
    Some(format!("{what} {}{tail}", names.join(", ")))
}
