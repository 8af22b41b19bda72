//! IDX files. Headers are not trusted.
//!
//! A file is: big-endian magic (0, 0, type 8 = unsigned byte, number of dimensions), one
//! 32-bit length per dimension, then the bytes. A plain file must have exactly the size in
//! its header, a compressed one must be able to hold it, and memory grows only with the
//! bytes read.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::known::checksum_note;
use crate::gzip::Gzip;
use phalanx_base::files::open_regular;
use phalanx_base::text::grouped;
use phalanx_base::{Error, Result};

/// First bytes of a gzip stream.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Maximum compression ratio of deflate.
const DEFLATE_RATIO: u64 = 1032;
/// Maximum side of an image; MNIST's is 28.
const MAX_SIDE: u32 = 1024;
/// Maximum size of an unpacked file; MNIST's training images are 47 MB.
const MAX_BYTES: u64 = 2 << 30;

/// Images of equal size, one byte per pixel.
pub(super) struct Images {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) pixels: Vec<u8>,
}

pub(super) fn read_images(path: &Path, fashion: bool) -> Result<Images> {
    let (sizes, pixels) = read::<3>(path, fashion)?;
    Ok(Images {
        height: sizes[1] as usize,
        width: sizes[2] as usize,
        pixels,
    })
}

pub(super) fn read_labels(path: &Path, fashion: bool) -> Result<Vec<u8>> {
    read::<1>(path, fashion).map(|(_, labels)| labels)
}

/// Dimensions and content of an IDX file of `D` dimensions.
fn read<const D: usize>(path: &Path, fashion: bool) -> Result<([u32; D], Vec<u8>)> {
    let io = |source| Error::io("cannot read", path, source);
    let file = open_regular(path).map_err(|e| Error::not_opened("file", path, e))?;
    let stored_bytes = file.metadata().map_err(io)?.len();
    let mut raw = BufReader::with_capacity(1 << 16, file);
    // By content, not by name: browsers may unpack .gz files.
    let compressed = raw.fill_buf().map_err(io)?.starts_with(&GZIP);
    let mut content: Box<dyn Read> = if compressed {
        Box::new(Gzip::new(raw))
    } else {
        Box::new(raw)
    };
    let mut context = Context {
        path,
        fashion,
        compressed,
        present: 0,
    };

    let header_bytes = 4 + 4 * D as u64;
    let header = context.take(&mut content, header_bytes, header_bytes, "header bytes")?;
    let (magic, lengths) = header.split_at(4);
    if magic != [0, 0, 8, D as u8] {
        return Err(context.wrong_magic(magic, D));
    }
    let mut sizes = [0_u32; D];
    for (size, bytes) in sizes.iter_mut().zip(lengths.chunks_exact(4)) {
        *size = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    let body_bytes = context.check_sizes(&sizes)?;
    let total = header_bytes + body_bytes;
    // Both limits are checked before the body is allocated.
    let possible = if compressed {
        stored_bytes.saturating_mul(DEFLATE_RATIO)
    } else {
        stored_bytes
    };
    if total > possible && compressed {
        return Err(Error::data(format!(
            "{}: its header describes {} bytes, more than {} compressed bytes can hold{}",
            path.display(),
            grouped(total),
            grouped(stored_bytes),
            checksum_note(path, fashion)
        )));
    }
    if total > possible {
        return Err(context.truncated(stored_bytes, total, "bytes"));
    }
    let body = context.take(&mut content, body_bytes, total, "bytes")?;
    // Reading to the end also verifies gzip's checksum.
    match context.read_up_to(&mut content, 1) {
        Ok(more) if more.is_empty() => return Ok((sizes, body)),
        Ok(_) => {}
        Err(e) if ends_early(&e) => {
            return Err(Error::data(format!(
                "{} ends before the checksum of its {} bytes; the file is truncated{}",
                path.display(),
                grouped(total),
                checksum_note(path, fashion)
            )));
        }
        Err(e) => return Err(e),
    }
    Err(Error::data(format!(
        "{} has more than the {} bytes that its header describes{}",
        path.display(),
        grouped(total),
        checksum_note(path, fashion)
    )))
}

/// Context for error messages.
struct Context<'a> {
    path: &'a Path,
    fashion: bool,
    compressed: bool,
    /// Bytes of content read so far.
    present: u64,
}

impl Context<'_> {
    /// Reads exactly `bytes` more bytes; `total` is the expected size.
    fn take(&mut self, from: &mut dyn Read, bytes: u64, total: u64, unit: &str) -> Result<Vec<u8>> {
        let got = match self.read_up_to(from, bytes) {
            Ok(got) => got,
            Err(e) if ends_early(&e) => return Err(self.truncated(self.present, total, unit)),
            Err(e) => return Err(e),
        };
        if (got.len() as u64) < bytes {
            return Err(self.truncated(self.present, total, unit));
        }
        Ok(got)
    }

    /// Reads up to `bytes` bytes; memory grows as they are read.
    fn read_up_to(&mut self, from: &mut dyn Read, bytes: u64) -> Result<Vec<u8>> {
        let mut got = Vec::new();
        let result = from.take(bytes).read_to_end(&mut got);
        self.present += got.len() as u64;
        // Of the decompressor, not of the system.
        let is_damage = |error: &io::Error| error.raw_os_error().is_none();
        match result {
            Ok(_) => {
                // Growth by doubling may leave half of it unused.
                got.shrink_to_fit();
                Ok(got)
            }
            Err(source) if self.compressed && is_damage(&source) => Err(Error::data(format!(
                "{}: the compressed data is damaged after {} bytes of content{}",
                self.path.display(),
                grouped(self.present),
                checksum_note(self.path, self.fashion)
            ))
            .with_source(source)),
            Err(source) => Err(Error::io("cannot read", self.path, source)),
        }
    }

    fn truncated(&self, present: u64, total: u64, unit: &str) -> Error {
        Error::data(format!(
            "{} ends after {} of {} {unit}; the file is truncated{}",
            self.path.display(),
            grouped(present),
            grouped(total),
            checksum_note(self.path, self.fashion)
        ))
    }

    fn wrong_magic(&self, magic: &[u8], dimensions: usize) -> Error {
        let what = if dimensions == 3 { "image" } else { "label" };
        let hint = match magic {
            [0, 0, 8, 1] => "\n  it is a file of labels",
            [0, 0, 8, 3] => "\n  it is a file of images",
            [b'<', ..] => "\n  it looks like a web page; download the file itself",
            _ => "",
        };
        Error::data(format!(
            "{} is not an IDX {what} file: it starts with {}, not 0000080{dimensions}{hint}",
            self.path.display(),
            hex::encode(magic)
        ))
    }

    /// Number of bytes after the header, if its lengths are plausible.
    fn check_sizes(&self, sizes: &[u32]) -> Result<u64> {
        let unbelievable = || {
            Error::data(format!(
                "{}: its header describes {sizes:?} elements at byte 4; not MNIST{}",
                self.path.display(),
                checksum_note(self.path, self.fashion)
            ))
        };
        if sizes.contains(&0) || sizes.iter().skip(1).any(|&s| s > MAX_SIDE) {
            return Err(unbelievable());
        }
        sizes
            .iter()
            .try_fold(1_u64, |product, &s| product.checked_mul(u64::from(s)))
            .filter(|&bytes| bytes <= MAX_BYTES)
            .ok_or_else(unbelievable)
    }
}

/// Whether the error is the early end of a compressed stream.
fn ends_early(error: &Error) -> bool {
    std::error::Error::source(error)
        .and_then(|s| s.downcast_ref::<io::Error>())
        .is_some_and(|s| s.kind() == io::ErrorKind::UnexpectedEof)
}
