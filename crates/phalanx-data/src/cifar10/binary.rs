//! The binary version: records of one label byte and 3072 bytes of planes.

use std::path::Path;

use super::{Batch, CLASSES, PIXELS};
use phalanx_base::text::grouped;
use phalanx_base::{Error, Result};

/// A record: a label, then the planes.
const RECORD: usize = 1 + PIXELS;

/// Parses the bytes of one file.
///
/// # Errors
///
/// `Data`, naming the record and the offset.
pub(super) fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<Batch<'a>> {
    let path = path.display();
    let rest = bytes.len() % RECORD;
    if rest != 0 || bytes.is_empty() {
        return Err(Error::data(format!(
            "{path} ends after {} bytes, {rest} bytes into record {}; expected whole records of {RECORD} bytes; the file \
             is truncated or of another kind",
            grouped(bytes.len() as u64),
            bytes.len() / RECORD
        )));
    }
    let mut labels = Vec::with_capacity(bytes.len() / RECORD);
    for (i, record) in bytes.chunks_exact(RECORD).enumerate() {
        if usize::from(record[0]) >= CLASSES {
            return Err(Error::data(format!(
                "{path}: label {} in record {i}, at byte {}; expected 0 to {}",
                record[0],
                grouped((i * RECORD) as u64),
                CLASSES - 1
            )));
        }
        labels.push(record[0]);
    }
    Ok(Batch {
        planes: &bytes[1..],
        stride: RECORD,
        labels,
    })
}
