//! The published archives, read directly or unpacked. Only the data set's known file names
//! are written, whatever names the archive has.

use std::cell::Cell;
use std::io::{BufReader, Read};
use std::path::Path;

use super::find::{BINARY, PYTHON};
use super::{Batch, MAX_FILE_BYTES, Split, binary, pickle};
use crate::gzip::Gzip;
use phalanx_base::files::{Dir, folder_of, open_regular};
use phalanx_base::{Error, Result};

/// Maximum number of members; the published archives have eight.
const MAX_MEMBERS: usize = 64;
/// Maximum size of all members together.
const MAX_TOTAL_BYTES: u64 = 512 << 20;

/// Calls `take` with the batch of each member named in `files` and its index in `files`, in
/// the archive's order.
///
/// # Errors
///
/// `Data` when the archive is truncated, damaged or lacks a member; `System`; errors of `take`.
pub(super) fn read(
    path: &Path,
    files: &[&str],
    mut take: impl FnMut(usize, &Path, &Batch<'_>) -> Result<()>,
) -> Result<()> {
    members(path, files, |member| {
        let batch = member.parse(path)?;
        take(member.place, &path.join(&member.name), &batch)
    })
}

/// Writes the files of both splits into their published folder next to the archive, each
/// after it was checked.
///
/// # Errors
///
/// As [`read`]; `DiskFull` or `System`, naming the file.
pub(super) fn unpack(path: &Path) -> Result<()> {
    let wanted = [Split::Train.files(), Split::Test.files()].concat();
    let parent = Dir::open(&folder_of(path))?;
    members(path, &wanted, |member| {
        member.parse(path)?;
        let (published, ending) = if member.is_binary {
            (BINARY, ".bin")
        } else {
            (PYTHON, "")
        };
        let name = format!("{}{ending}", wanted[member.place]);
        let folder = parent.create_sub(published)?;
        folder.write(name, |out| out.write_all(&member.bytes))
    })
}

/// Counts the bytes read.
struct Counted<'a, R> {
    inner: R,
    count: &'a Cell<u64>,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let taken = self.inner.read(buffer)?;
        self.count.set(self.count.get() + taken as u64);
        Ok(taken)
    }
}

/// A file of the data set in an archive.
struct Member {
    /// Index in the list of wanted files.
    place: usize,
    /// Name in the archive.
    name: String,
    is_binary: bool,
    bytes: Vec<u8>,
}

impl Member {
    fn parse(&self, archive: &Path) -> Result<Batch<'_>> {
        let inner = archive.join(&self.name);
        if self.is_binary {
            binary::parse(&inner, &self.bytes)
        } else {
            pickle::parse(&inner, &self.bytes)
        }
    }
}

/// Calls `take` with every member named in `wanted`. Of several with a name the last one counts, as when `tar` unpacks them.
fn members(path: &Path, wanted: &[&str], mut take: impl FnMut(Member) -> Result<()>) -> Result<()> {
    let shown = path.display();
    let file = open_regular(path).map_err(|e| Error::not_opened("archive", path, e))?;
    let at = Cell::new(0);
    let inside = Counted {
        inner: Gzip::new(BufReader::new(file)),
        count: &at,
    };
    // One byte above the limit distinguishes too large from exactly the limit.
    let mut archive = tar::Archive::new(inside.take(MAX_TOTAL_BYTES + 1));
    let broken = |source: std::io::Error| {
        Error::data(format!(
            "{shown}: the archive cannot be read after {} bytes of content: {source}; expected a complete tar.gz of CIFAR-10",
            at.get()
        ))
        .with_source(source)
    };
    let mut found = vec![false; wanted.len()];
    let mut total = 0;
    for (count, member) in archive.entries().map_err(broken)?.enumerate() {
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
                "{shown}: member {name:?} has {size} bytes; no file of CIFAR-10 is as large"
            )));
        }
        let mut bytes = Vec::new();
        member
            .take(MAX_FILE_BYTES)
            .read_to_end(&mut bytes)
            .map_err(broken)?;
        if (bytes.len() as u64) < size {
            return Err(Error::data(format!(
                "{shown}: member {name:?} ends after {} of {size} bytes; the archive is truncated",
                bytes.len()
            )));
        }
        take(Member {
            place,
            name,
            is_binary,
            bytes,
        })?;
        found[place] = true;
    }
    match found.iter().position(|there| !there).map(|i| wanted[i]) {
        Some(name) => Err(Error::data(format!(
            "{shown} has no member {name} (or {name}.bin); expected an archive of CIFAR-10"
        ))),
        None => Ok(()),
    }
}
