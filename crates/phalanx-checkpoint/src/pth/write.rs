//! Writing a state dict as `torch.save` does.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use rawzip::extra_fields::ExtraFieldId;
use rawzip::path::EntryPath;
use rawzip::{CompressionMethod, Crc32Option, Header, ZipArchiveWriter, ZipDataWriter};

use super::tensor::{DType, row_major};
use phalanx_base::Result;
use phalanx_base::files::atomic_write_with;

/// Alignment of each entry's data, so that a reader may map the file.
const ALIGNMENT_BYTES: u64 = 64;

/// Size of the fixed part of a zip entry's local header, and of an extra field's header.
const LOCAL_HEADER_BYTES: u64 = 30;
const EXTRA_HEAD_BYTES: u64 = 4;

/// Kind of the extra field that PyTorch uses for padding, filled with `Z`.
const PADDING_FIELD: ExtraFieldId = ExtraFieldId::new(u16::from_le_bytes(*b"FB"));

/// A tensor to write.
#[derive(Clone, Debug)]
pub struct Saved {
    /// PyTorch's dotted name.
    pub name: String,
    /// Data type.
    pub dtype: DType,
    /// PyTorch's shape.
    pub shape: Vec<usize>,
    /// Values, row-major, little-endian.
    pub bytes: Vec<u8>,
}

/// A tensor without its values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    pub name: &'a str,
    pub dtype: DType,
    pub shape: &'a [usize],
}

impl Saved {
    /// Whether none of its values is infinite or NaN.
    pub fn is_finite(&self) -> bool {
        self.dtype.is_finite(&self.bytes)
    }

    pub(crate) fn head(&self) -> Head<'_> {
        Head {
            name: &self.name,
            dtype: self.dtype,
            shape: &self.shape,
        }
    }
}

/// Atomically writes `tensors` to `path` as a state dict. The archive's root folder is
/// named after the file, as PyTorch does. Equal tensors and names give equal bytes.
///
/// # Errors
///
/// As [`atomic_write_with`]; also when a name or the number of tensors exceeds the format's
/// limits.
pub fn save_state_dict(path: &Path, tensors: &[Saved]) -> Result<()> {
    atomic_write_with(path, |out| write_state_dict(out, &root_of(path), tensors))
}

/// The root folder of an archive.
pub(crate) fn root_of(path: &Path) -> String {
    path.file_stem().map_or_else(
        || "archive".into(),
        |stem| stem.to_string_lossy().into_owned(),
    )
}

/// As [`save_state_dict`], to `out`.
///
/// # Errors
///
/// Errors of `out`; `InvalidInput` when the number of bytes does not match a tensor's
/// shape, or a name exceeds the format's limits.
pub fn write_state_dict(out: &mut dyn Write, root: &str, tensors: &[Saved]) -> std::io::Result<()> {
    for tensor in tensors {
        let elements = super::tensor::count(&tensor.shape);
        let needed = elements.and_then(|n| n.checked_mul(tensor.dtype.size_bytes()));
        if needed != Some(tensor.bytes.len()) {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                format!(
                    "{} of shape {:?} has {} bytes",
                    tensor.name,
                    tensor.shape,
                    tensor.bytes.len()
                ),
            ));
        }
    }
    let heads: Vec<Head<'_>> = tensors.iter().map(Saved::head).collect();
    write_archive(out, root, &pickle(&heads), tensors.len(), |i| {
        Ok(&tensors[i].bytes)
    })
}

/// As [`write_state_dict`], of tensors whose bytes `bytes` returns, one after the other.
pub(crate) fn write_state_dict_with(
    out: &mut dyn Write,
    root: &str,
    heads: &[Head<'_>],
    bytes: impl FnMut(usize) -> std::io::Result<Vec<u8>>,
) -> std::io::Result<()> {
    write_archive(out, root, &pickle(heads), heads.len(), bytes)
}

/// Writes the archive of a pickle and its storages, which `storage` gives.
pub(crate) fn write_archive<B: AsRef<[u8]>>(
    out: &mut dyn Write,
    root: &str,
    pickle: &[u8],
    storages: usize,
    mut storage: impl FnMut(usize) -> std::io::Result<B>,
) -> std::io::Result<()> {
    let mut zip = ZipArchiveWriter::new(out);
    let mut entry = |name: &str, bytes: &[u8]| add(&mut zip, &format!("{root}/{name}"), bytes);
    entry("data.pkl", pickle)?;
    entry(".format_version", b"1")?;
    entry(".storage_alignment", ALIGNMENT_BYTES.to_string().as_bytes())?;
    entry("byteorder", b"little")?;
    for key in 0..storages {
        entry(&format!("data/{key}"), storage(key)?.as_ref())?;
    }
    entry("version", b"3\n")?;
    zip.finish().map_err(to_io)?;
    Ok(())
}

fn add<W: Write>(zip: &mut ZipArchiveWriter<W>, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let unpadded = zip.stream_offset() + LOCAL_HEADER_BYTES + name.len() as u64 + EXTRA_HEAD_BYTES;
    let padding = unpadded.next_multiple_of(ALIGNMENT_BYTES) - unpadded;
    let (mut entry, config) = zip
        .new_file(EntryPath::verbatim(name.as_bytes()))
        .compression_method(CompressionMethod::STORE)
        .extra_field(PADDING_FIELD, &vec![b'Z'; padding as usize], Header::LOCAL)
        .map_err(to_io)?
        .crc32(Crc32Option::Custom(crc32fast::hash(bytes)))
        .start()
        .map_err(to_io)?;
    let mut data: ZipDataWriter<_> = config.wrap(&mut entry);
    data.write_all(bytes)?;
    let (_, descriptor) = data.finish().map_err(to_io)?;
    entry.finish(descriptor).map_err(to_io)?;
    Ok(())
}

fn to_io(error: rawzip::Error) -> std::io::Error {
    match error.into_kind() {
        rawzip::ErrorKind::IO(error) => error,
        other => std::io::Error::new(std::io::ErrorKind::InvalidInput, other.to_string()),
    }
}

/// Protocol 2 without memo, which readers do not need.
pub(crate) fn pickle(tensors: &[Head<'_>]) -> Vec<u8> {
    let mut p = Pickle(b"\x80\x02".to_vec());
    p.ordered_dict();
    p.op(b"(");
    for (key, tensor) in tensors.iter().enumerate() {
        p.text(tensor.name);
        p.global("torch._utils", "_rebuild_tensor_v2");
        p.op(b"((");
        p.text("storage");
        p.global("torch", tensor.dtype.storage_class());
        p.text(&key.to_string());
        p.text("cpu");
        p.int(super::tensor::count(tensor.shape).unwrap_or(0));
        p.op(b"tQ");
        p.int(0);
        p.sizes(tensor.shape);
        p.sizes(&row_major(tensor.shape));
        // `requires_grad` is false, no hooks.
        p.op(b"\x89");
        p.ordered_dict();
        p.op(b"tR");
    }
    p.op(b"u");
    p.metadata(tensors);
    p.op(b".");
    p.0
}

struct Pickle(Vec<u8>);

impl Pickle {
    fn op(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn global(&mut self, module: &str, name: &str) {
        self.op(format!("c{module}\n{name}\n").as_bytes());
    }

    fn ordered_dict(&mut self) {
        self.global("collections", "OrderedDict");
        self.op(b")R");
    }

    fn text(&mut self, text: &str) {
        self.op(b"X");
        // Names are below the 64 KiB of a zip entry.
        self.op(&(text.len() as u32).to_le_bytes());
        self.op(text.as_bytes());
    }

    fn int(&mut self, value: usize) {
        if let Ok(byte) = u8::try_from(value) {
            self.op(&[b'K', byte]);
        } else if let Ok(short) = u16::try_from(value) {
            self.op(b"M");
            self.op(&short.to_le_bytes());
        } else if let Ok(long) = i32::try_from(value) {
            self.op(b"J");
            self.op(&long.to_le_bytes());
        } else {
            self.op(&[0x8a, 8]);
            self.op(&(value as u64).to_le_bytes());
        }
    }

    fn sizes(&mut self, sizes: &[usize]) {
        self.op(b"(");
        for size in sizes {
            self.int(*size);
        }
        self.op(b"t");
    }

    /// `_metadata`: the version of each module. Batch norm with `num_batches_tracked` has
    /// 2; all others here have 1.
    fn metadata(&mut self, tensors: &[Head<'_>]) {
        let mut modules: BTreeMap<&str, usize> = BTreeMap::from([("", 1)]);
        let counted: BTreeSet<&str> = tensors
            .iter()
            .filter_map(|t| t.name.strip_suffix(".num_batches_tracked"))
            .collect();
        for tensor in tensors {
            for (at, _) in tensor.name.match_indices('.') {
                let module = &tensor.name[..at];
                let version = if counted.contains(module) { 2 } else { 1 };
                modules.insert(module, version);
            }
        }
        self.op(b"}(");
        self.text("_metadata");
        self.ordered_dict();
        self.op(b"(");
        for (module, version) in modules {
            self.text(module);
            self.op(b"}(");
            self.text("version");
            self.int(version);
            self.op(b"u");
        }
        self.op(b"uub");
    }
}
