//! The original archives, read as they are: nothing is unpacked onto the disk,
//! so no name in an archive can lead anywhere.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::{Batch, MAX_FILE_BYTES, Split, binary, pickle};
use crate::{Error, Result};

/// Members beyond this are no archive of CIFAR-10 (it has eight).
const MAX_MEMBERS: usize = 64;
/// Bytes of all members together beyond which reading stops.
const MAX_TOTAL_BYTES: u64 = 512 << 20;

/// Reads the members of one split, in their order.
///
/// # Errors
///
/// `Data` when the archive is truncated, damaged or lacks a member; `Io`.
pub(super) fn read(path: &Path, split: Split) -> Result<Vec<(PathBuf, Batch)>> {
    let shown = path.display();
    let file = File::open(path).map_err(|e| Error::io("cannot read", path, e))?;
    // One byte above the limit tells "too large" from "ends there".
    let inside = MultiGzDecoder::new(BufReader::new(file)).take(MAX_TOTAL_BYTES + 1);
    let mut archive = tar::Archive::new(inside);
    let broken = |source: std::io::Error| {
        Error::data(format!(
            "{shown}: the archive cannot be read on, {source}; expected a complete tar.gz of CIFAR-10"
        ))
        .with_source(source)
    };
    let wanted = split.files();
    let mut found: Vec<Option<(PathBuf, Batch)>> = wanted.iter().map(|_| None).collect();
    let mut total = 0;
    for (count, member) in archive.entries().map_err(broken)?.enumerate() {
        if found.iter().all(Option::is_some) {
            break;
        }
        let member = member.map_err(broken)?;
        total += member.size();
        if count >= MAX_MEMBERS || total > MAX_TOTAL_BYTES {
            return Err(Error::data(format!(
                "{shown}: more than {MAX_MEMBERS} members or {MAX_TOTAL_BYTES} bytes; expected an archive of CIFAR-10"
            )));
        }
        let name = member.path_bytes().into_owned();
        let name = String::from_utf8_lossy(&name).into_owned();
        let last = name.rsplit('/').next().unwrap_or_default();
        let (stem, is_binary) = match last.strip_suffix(".bin") {
            Some(stem) => (stem, true),
            None => (last, false),
        };
        let Some(place) = wanted.iter().position(|w| *w == stem) else {
            continue;
        };
        let size = member.size();
        if size > MAX_FILE_BYTES {
            return Err(Error::data(format!(
                "{shown}: member {name} claims {size} bytes; no file of CIFAR-10 is as large"
            )));
        }
        let mut bytes = Vec::new();
        member
            .take(MAX_FILE_BYTES)
            .read_to_end(&mut bytes)
            .map_err(broken)?;
        if (bytes.len() as u64) < size {
            return Err(Error::data(format!(
                "{shown}: member {name} ends after {} of {size} bytes; the archive is truncated",
                bytes.len()
            )));
        }
        let inner = path.join(&name);
        let batch = if is_binary {
            binary::parse(&inner, &bytes)?
        } else {
            pickle::parse(&inner, &bytes)?
        };
        found[place] = Some((inner, batch));
    }
    let missing = found.iter().position(Option::is_none).map(|i| wanted[i]);
    if let Some(name) = missing {
        return Err(Error::data(format!(
            "{shown} has no member {name} (or {name}.bin); expected an archive of CIFAR-10"
        )));
    }
    Ok(found.into_iter().flatten().collect())
}
