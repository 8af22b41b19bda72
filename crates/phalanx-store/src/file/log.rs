//! Format of a store file: a header and a log of changes.
//!
//! | bytes | header |
//! |---|---|
//! | 0..8 | magic `PHXSTORE` |
//! | 8..12 | version |
//! | 12..20 | id: random, new whenever the file is started |
//! | 20..24 | CRC-32C of bytes 0..20 |
//!
//! A record is the CRC-32C of what follows it, then a change as
//! [`phalanx_wire::store_msg::Request`] encodes it (length and body): set,
//! delete or delete-prefix. Little endian throughout.

use std::fs::File;
use std::os::unix::fs::FileExt;

use phalanx_wire::store_msg::{LENGTH_BYTES, Request, request_bytes};

use crate::table::Table;
use crate::{Error, ErrorKind, Result};

/// Length of the header; the log follows it.
pub(super) const HEADER_BYTES: u64 = 24;

const MAGIC: [u8; 8] = *b"PHXSTORE";
const VERSION: u32 = 1;
const CRC_BYTES: usize = 4;

/// The header of a file with this id.
pub(super) fn header(id: u64) -> [u8; HEADER_BYTES as usize] {
    let mut out = [0; HEADER_BYTES as usize];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[12..20].copy_from_slice(&id.to_le_bytes());
    let crc = crc32c::crc32c(&out[..20]);
    out[20..].copy_from_slice(&crc.to_le_bytes());
    out
}

fn corrupt(location: &str, what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{location} {what}"))
}

/// Error for a record that ends too early.
pub(super) fn truncated(location: &str, at: u64) -> Error {
    corrupt(
        location,
        format_args!(
            "ends in the middle of the record at byte {at}: a member died while writing, or the disk is full; end the job and start it again"
        ),
    )
}

/// Starts an empty store in the file and returns its id. A file that is neither
/// empty nor a store is not changed: the user has named the wrong file.
pub(super) fn start(file: &File, location: &str) -> Result<u64> {
    let fail = |e| Error::io(format_args!("writing {location}"), e);
    let length = file.metadata().map_err(fail)?.len();
    if length > 0 {
        let mut magic = [0; MAGIC.len()];
        if file.read_exact_at(&mut magic, 0).is_err() || magic != MAGIC {
            return Err(corrupt(
                location,
                "is not a store file and was not changed; name another file",
            ));
        }
    }
    let id = getrandom::u64().map_err(|e| {
        Error::new(
            ErrorKind::Io,
            format!("the operating system gave no random bytes: {e}"),
        )
    })?;
    file.set_len(0).map_err(fail)?;
    file.write_all_at(&header(id), 0).map_err(fail)?;
    Ok(id)
}

/// Checks the header and returns the id.
pub(super) fn read_header(file: &File, location: &str) -> Result<u64> {
    let mut found = [0; HEADER_BYTES as usize];
    file.read_exact_at(&mut found, 0).map_err(|e| {
        if e.kind() == std::io::ErrorKind::UnexpectedEof {
            corrupt(location, "is too short for a store file")
        } else {
            Error::io(format_args!("reading {location}"), e)
        }
    })?;
    if found[..8] != MAGIC {
        return Err(corrupt(location, "is not a store file"));
    }
    let mut version = [0; 4];
    version.copy_from_slice(&found[8..12]);
    let version = u32::from_le_bytes(version);
    if version != VERSION {
        return Err(corrupt(
            location,
            format_args!(
                "has format {version}, this build reads {VERSION}: run the same phalanx version everywhere"
            ),
        ));
    }
    let mut id = [0; 8];
    id.copy_from_slice(&found[12..20]);
    let id = u64::from_le_bytes(id);
    if found != header(id) {
        return Err(corrupt(location, "has a damaged header"));
    }
    Ok(id)
}

/// Encodes one record.
pub(super) fn encode(request: &Request<'_>) -> Result<Vec<u8>, phalanx_wire::Error> {
    let mut record = vec![0; CRC_BYTES];
    request.encode(&mut record)?;
    let crc = crc32c::crc32c(&record[CRC_BYTES..]);
    record[..CRC_BYTES].copy_from_slice(&crc.to_le_bytes());
    Ok(record)
}

/// A decoded record.
pub(super) struct Record<'a> {
    pub(super) request: Request<'a>,
    /// Its length in the log.
    pub(super) bytes: usize,
}

/// Decodes the record at the start of `bytes`; `None` if more bytes are expected.
/// `at` is its offset in the file, for messages.
pub(super) fn next<'a>(bytes: &'a [u8], location: &str, at: u64) -> Result<Option<Record<'a>>> {
    let Some((crc, rest)) = bytes.split_first_chunk::<CRC_BYTES>() else {
        return Ok(None);
    };
    let Some(length) = rest.first_chunk::<LENGTH_BYTES>() else {
        return Ok(None);
    };
    let damaged = |why: &dyn std::fmt::Display| {
        corrupt(
            location,
            format_args!(
                "has a damaged record at byte {at} ({why}): end the job, remove the file and start again"
            ),
        )
    };
    let length = request_bytes(*length).map_err(|e| damaged(&e))?;
    let Some(message) = rest.get(..LENGTH_BYTES + length) else {
        return Ok(None);
    };
    if crc32c::crc32c(message) != u32::from_le_bytes(*crc) {
        return Err(damaged(&"checksum"));
    }
    let request = Request::decode(&message[LENGTH_BYTES..]).map_err(|e| damaged(&e))?;
    Ok(Some(Record {
        request,
        bytes: CRC_BYTES + message.len(),
    }))
}

/// Applies a change of another member.
pub(super) fn apply(
    table: &mut Table,
    request: &Request<'_>,
    location: &str,
    at: u64,
) -> Result<()> {
    match request {
        Request::Set { key, value } => table
            .set(key, value)
            .map_err(|failure| Error::failed(location, key, failure)),
        Request::Delete { key } => {
            table.delete(key);
            Ok(())
        }
        Request::DeletePrefix { prefix } => {
            table.delete_prefix(prefix);
            Ok(())
        }
        _ => Err(corrupt(
            location,
            format_args!("has a record at byte {at} that is not a change"),
        )),
    }
}
