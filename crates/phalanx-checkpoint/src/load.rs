//! Loading weights from a safetensors or PyTorch file into a model.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use phalanx_nn::Params;
use safetensors::Dtype;

use crate::pth::{DType, LEGACY_START, PthFile, Saved, WRAPPED, ZIP_START, strip_all, strip_one};
use crate::state::{MAX_MANIFEST_BYTES, MODEL, State};
use crate::weights::{NamedShape, Outline, TensorId, TensorsFile, is_count, put};
use phalanx_base::files::{open_regular, read_open};
use phalanx_base::text::{matches, one_line};
use phalanx_base::{Error, Result};

/// What a file of weights has besides the weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Metadata of a safetensors file or a checkpoint; `.pth` files have none.
    pub metadata: BTreeMap<String, String>,
    /// Warnings about the file, one sentence each.
    pub warnings: Vec<String>,
    /// Number of the model's tensors that were loaded.
    pub tensors: usize,
    /// What all names of the file had in front, which was left out.
    pub dropped: String,
    /// Tensors of the model that keep their values, because they are [skipped](LoadOptions::skip) or the file may lack them:
    /// low-rank adapters and counts of batches.
    pub kept: Vec<String>,
    /// Tensors of the file that the model has no place for.
    pub unused: Vec<String>,
}

impl Loaded {
    /// What was not loaded as it is, for people: a sentence each.
    pub fn notes(&self) -> Vec<String> {
        let names = |all: &[String]| {
            let all: Vec<&str> = all.iter().map(String::as_str).collect();
            listed("", all)
        };
        let dropped = (!self.dropped.is_empty())
            .then(|| format!("without {} in front of all names", one_line(&self.dropped)));
        let kept =
            names(&self.kept).map(|all| format!("not loaded, with their initial values:{all}"));
        let unused = names(&self.unused).map(|all| format!("in the file only, and not used:{all}"));
        dropped.into_iter().chain(kept).chain(unused).collect()
    }
}

/// How [`load_params_with`] finds a model's tensors in a file.
///
/// ```
/// use phalanx_checkpoint::LoadOptions;
///
/// // A trunk that the file calls `encoder.…`, and a head for other classes.
/// let options = LoadOptions::new().rename("encoder.", "backbone.").skip("fc.*");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    renames: Vec<(String, String)>,
    skipped: Vec<String>,
    only_adapters: bool,
}

impl LoadOptions {
    /// The file has the model's names, and all of them.
    pub fn new() -> LoadOptions {
        LoadOptions::default()
    }

    /// Names of the file that begin with `old` begin with `new` instead. The first that fits a name counts.
    #[must_use]
    pub fn rename(mut self, old: &str, new: &str) -> LoadOptions {
        self.renames.push((old.to_owned(), new.to_owned()));
        self
    }

    /// Tensors whose names match `pattern` (`*`: any characters, `?`: one) are not loaded: those of the model keep their values,
    /// and the file may have others.
    #[must_use]
    pub fn skip(mut self, pattern: &str) -> LoadOptions {
        self.skipped.push(pattern.to_owned());
        self
    }

    /// Only the low-rank adapters are loaded, and the file has nothing else.
    #[must_use]
    pub fn only_adapters(mut self) -> LoadOptions {
        self.only_adapters = true;
        self
    }

    fn renamed(&self, name: &str) -> String {
        let mut fitting = self.renames.iter();
        let new = fitting.find_map(|(old, new)| Some(new.clone() + name.strip_prefix(&**old)?));
        new.unwrap_or_else(|| name.to_owned())
    }

    fn skips(&self, name: &str) -> bool {
        self.skipped.iter().any(|pattern| matches(pattern, name))
    }
}

/// Whether it is the name of a matrix of a low-rank adapter.
pub(crate) fn is_adapter(name: &str) -> bool {
    name.ends_with("lora_A.weight") || name.ends_with("lora_B.weight")
}

/// Buffers that GPT-2's files have and no model needs.
const NO_WEIGHTS: [&str; 2] = [".attn.bias", ".attn.masked_bias"];

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

/// As [`load_params`], but not all of the file has to be the model's, as `options` say: what is missing and what is left over
/// is in the result. One tensor after the other is read.
///
/// # Errors
///
/// As [`load_params`]; also `Usage` where a rename gives two tensors one name, and where nothing is left to load. `params` may
/// have some of the file's values then.
pub fn load_params_with(path: &Path, params: &mut Params, options: &LoadOptions) -> Result<Loaded> {
    let outline = Outline::of(params);
    read_some(path, &outline, options, |tensor, values| {
        put(params, outline.name(tensor), &values)
    })
}

/// Names and shapes of the tensors in the file at `path`, without reading values. Accepts the formats of [`read_tensors`].
///
/// # Errors
///
/// As [`load_params`], except for the model.
pub fn read_shapes(path: &Path) -> Result<BTreeMap<String, Vec<usize>>> {
    let shapes = |mut found: AllFound<'_>| {
        strip_all(&mut found);
        let all = found.into_iter().map(|(name, found)| (name, found.shape));
        Ok(all.collect())
    };
    with_tensors(path, shapes).map(|(shapes, _)| shapes)
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
        Loaded {
            metadata,
            warnings,
            ..Loaded::default()
        }
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
            let Loaded {
                metadata, warnings, ..
            } = opened.loaded();
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
    take: impl FnMut(TensorId, Vec<f32>) -> Result<()>,
) -> Result<Loaded> {
    read_some(path, outline, &LoadOptions::new(), take)
}

/// As [`read_each`], of the tensors that `options` leave.
fn read_some(
    path: &Path,
    outline: &Outline,
    options: &LoadOptions,
    mut take: impl FnMut(TensorId, Vec<f32>) -> Result<()>,
) -> Result<Loaded> {
    let each = |mut found: AllFound<'_>| {
        let mut expected = outline.by_name();
        expected.retain(|(_, (name, _))| !options.only_adapters || is_adapter(name));
        let mut loaded = Loaded {
            dropped: rename(path, &mut found, &expected, options)?,
            ..Loaded::default()
        };
        let found: HashMap<String, Found<'_>> = found.into_iter().collect();
        for (tensor, dtype, found) in matched(path, &expected, &found, options, &mut loaded)? {
            let bytes = (found.bytes)()?;
            let values = dtype.to_f32(&bytes);
            check_finite(path, outline.name(tensor), dtype, &bytes, &values)?;
            take(tensor, values)?;
            loaded.tensors += 1;
        }
        Ok(loaded)
    };
    let (loaded, of_file) = with_tensors(path, each)?;
    Ok(Loaded {
        metadata: of_file.metadata,
        warnings: of_file.warnings,
        ..loaded
    })
}

/// Whether there is a tensor of this name among `expected`, which are sorted.
fn knows(expected: &[(TensorId, &NamedShape)], name: &str) -> bool {
    let found = expected.binary_search_by(|(_, known)| known.0.as_str().cmp(name));
    found.is_ok()
}

/// What is in front of all names in files of PEFT's adapters.
pub(crate) const FRONT: &str = "base_model.model.";

/// A name of PEFT's, which keeps the output projection of an attention in the layer that it has wrapped, without that.
pub(crate) fn from_peft(name: &str) -> String {
    name.replace(".base_layer.", ".")
}

/// Gives the tensors of a file the names that a model has, by `options`. Returns what was in front of all names.
fn rename(
    path: &Path,
    found: &mut AllFound<'_>,
    expected: &[(TensorId, &NamedShape)],
    options: &LoadOptions,
) -> Result<String> {
    // `model.` is the prefix of Lightning's modules, the last that of PEFT's adapters; a model's own names may begin with any of these.
    const PREFIXES: [&str; 4] = [WRAPPED[0], WRAPPED[1], "model.", FRONT];
    let known = |name: &str| knows(expected, name);
    let any = |found: &AllFound<'_>| found.iter().any(|(name, _)| known(&options.renamed(name)));
    let mut dropped = String::new();
    while !any(found)
        && let Some(prefix) = strip_one(found, &PREFIXES)
    {
        dropped.push_str(prefix);
    }
    for (name, _) in found.iter_mut() {
        *name = options.renamed(name);
        if options.only_adapters {
            *name = from_peft(name);
        }
    }
    // As files of Hugging Face's models without their head.
    let first = expected.first().map(|(_, (name, _))| name.as_str());
    if let Some((front, _)) = first.and_then(|name| name.split_once('.'))
        && let front = format!("{front}.")
        && (expected.iter()).all(|(_, (name, _))| name.starts_with(&front))
        && !found.iter().any(|(name, _)| known(name))
        && (found.iter()).any(|(name, _)| known(&format!("{front}{name}")))
    {
        for (name, _) in found.iter_mut() {
            name.insert_str(0, &front);
        }
    }
    let mut seen = HashSet::new();
    match found
        .iter()
        .map(|(name, _)| name)
        .find(|name| !seen.insert(*name))
    {
        Some(name) => {
            let what = format_args!("two of its tensors become {}", one_line(name));
            Err(wrong(path, what))
        }
        None => Ok(dropped),
    }
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

/// The tensors of a model in a file, after comparing all names, types and shapes. What is not loaded is noted in `loaded`.
fn matched<'f, 'a>(
    path: &Path,
    expected: &[(TensorId, &NamedShape)],
    found: &'f HashMap<String, Found<'a>>,
    options: &LoadOptions,
    loaded: &mut Loaded,
) -> Result<Vec<(TensorId, DType, &'f Found<'a>)>> {
    let optional = |name: &str| {
        let new = is_adapter(name) && !options.only_adapters;
        new || is_count(name) || options.skips(name)
    };
    let (mut all, mut missing, mut differing) = (Vec::new(), vec![], None);
    for (tensor, (name, shape)) in expected {
        let Some(found) = found.get(name).filter(|_| !options.skips(name)) else {
            match optional(name) {
                true => loaded.kept.push(name.clone()),
                false => missing.push(name.as_str()),
            }
            continue;
        };
        // Only buffers such as counts may be integers.
        let is_parameter = matches!(tensor, TensorId::Param(_));
        let dtype = found
            .dtype
            .filter(|dtype| dtype.is_float() || !is_parameter);
        match dtype {
            Some(dtype) if found.shape == *shape => all.push((*tensor, dtype, found)),
            _ => {
                let (dtype, has) = (&found.dtype_name, &found.shape);
                let what = format!(
                    "{name} is {dtype} of shape {has:?}, the model has F32 of shape {shape:?}"
                );
                differing = differing.or(Some(what));
            }
        }
    }
    let known = |name: &str| knows(expected, name);
    let strange = found.keys().filter(|name| !known(name));
    let mut strangers = Vec::new();
    for name in strange {
        let is_buffer =
            NO_WEIGHTS.iter().any(|end| name.ends_with(end)) && found[name].shape.len() != 1;
        match is_buffer || options.skips(name) || is_tied_head(name, known, found)? {
            true => loaded.unused.push(name.clone()),
            false => strangers.push(name.as_str()),
        }
    }
    loaded.unused.sort_unstable();
    let differs = [
        listed("it lacks", missing),
        listed("the model does not know", strangers),
    ];
    let differs: Vec<String> = differs.into_iter().flatten().collect();
    if !differs.is_empty() {
        return Err(Error::data(format!(
            "{} is of another model: {}",
            path.display(),
            differs.join("; ")
        )));
    }
    match differing {
        Some(what) => Err(wrong(path, format_args!("{what}"))),
        None if all.is_empty() && !expected.is_empty() => {
            Err(wrong(path, format_args!("nothing of it is left to load")))
        }
        None => Ok(all),
    }
}

/// Whether it is GPT-2's output layer, which a file may have a second time although its weight is that of the embedding.
fn is_tied_head(
    name: &str,
    known: impl Fn(&str) -> bool,
    found: &HashMap<String, Found<'_>>,
) -> Result<bool> {
    let tied = found
        .get("transformer.wte.weight")
        .filter(|_| known("transformer.wte.weight"));
    match (found.get(name).filter(|_| name == "lm_head.weight"), tied) {
        (Some(head), Some(tied)) if head.shape == tied.shape => {
            Ok((head.bytes)()? == (tied.bytes)()?)
        }
        _ => Ok(false),
    }
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
