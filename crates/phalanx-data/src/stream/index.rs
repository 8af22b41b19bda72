//! The index of a place: its shards, and where each of their samples lies.
//!
//! The file `phalanx.index` has, for each shard, the offsets of its samples and the end of the last one, 8 bytes each, little
//! endian; then the list of shards as JSON, its length in 8 bytes, and [`MAGIC`]. Only the list is in memory.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use phalanx_base::files::try_atomic_write;
use phalanx_base::{Error, Result, refuse};
use sha2::{Digest, Sha256};

use super::shard::{Format, MAX_SAMPLE, Scan};
use crate::order::ShardOrder;

/// The name of an index beside its shards.
pub(super) const NAME: &str = "phalanx.index";
const MAGIC: &[u8; 8] = b"PHXINDX1";
/// Most bytes of a shard; the sum of those of all shards is a u64.
const MAX_SHARD: u64 = 1 << 38;
/// Most bytes of the list of shards.
const MAX_LIST: u64 = 1 << 30;

/// A file of the place.
#[derive(Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Object {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// The time of the last change, or the ETag of an object store.
    pub(super) stamp: String,
}

#[derive(serde::Serialize, serde::Deserialize)]
pub(super) struct Shard {
    #[serde(flatten)]
    pub(super) object: Object,
    pub(super) samples: u64,
    pub(super) digest: String,
    /// Number of places in it that were left out.
    pub(super) damaged: u64,
}

#[derive(serde::Serialize, serde::Deserialize)]
pub(super) struct List {
    pub(super) format: Format,
    pub(super) shards: Vec<Shard>,
}

/// An index that is open.
pub(super) struct Index {
    pub(super) list: List,
    /// Where the offsets of each shard begin.
    tables: Vec<u64>,
    file: File,
    /// Where it is, for messages.
    at: String,
}

/// The shards among `objects`, and their format.
///
/// # Errors
///
/// `Usage` when there are none, or of two formats.
pub(super) fn shards_of(place: &str, objects: Vec<Object>) -> Result<(Format, Vec<Object>)> {
    let mut found: Option<(Format, Vec<Object>)> = None;
    for object in objects {
        let Some(format) = Format::of(&object.name) else {
            if object.name.contains(".tar.") || object.name.contains(".jsonl.") {
                refuse!("{place}/{} is compressed; unpack it", object.name);
            }
            continue;
        };
        let (first, shards) = found.get_or_insert((format, Vec::new()));
        if *first != format {
            let (one, other) = (&shards[0].name, &object.name);
            let what = format!("{place} has shards of two formats: {one} and {other}");
            return Err(Error::usage(what).note("try", "a folder for each format"));
        }
        shards.push(object);
    }
    let none = || {
        Error::usage(format!(
            "{place} has no files .tar, .jsonl, .ndjson or .parquet"
        ))
    };
    found.ok_or_else(none)
}

/// Writes the index of `shards` to `path`; `scan` reads one of them. Each damaged shard is an error unless they are skipped.
///
/// # Errors
///
/// Those of `scan`; `Data`, naming shard and offset; those of writing.
pub(super) fn write(
    path: &Path,
    format: Format,
    shards: &[Object],
    skip_damaged: bool,
    scan: &dyn Fn(&Object) -> Result<Scan>,
) -> Result<()> {
    let fill = |out: &mut dyn Write| -> Result<()> {
        let io = |e| Error::io("cannot write", path, e);
        let mut list = Vec::new();
        for object in shards {
            let found = scan(object)?;
            if let (Some(first), false) = (&found.first, skip_damaged) {
                let fix = "`phalanx index --skip-damaged` leaves out what cannot be read";
                return Err(Error::data(first.clone()).note("try", fix));
            }
            for offset in &found.starts {
                out.write_all(&offset.to_le_bytes()).map_err(io)?;
            }
            list.push(Shard {
                object: object.clone(),
                samples: found.starts.len() as u64 - 1,
                digest: found.digest,
                damaged: found.damaged,
            });
        }
        let list = List {
            format,
            shards: list,
        };
        let list = serde_json::to_vec(&list).map_err(|e| Error::internal(e.to_string()))?;
        let length = (list.len() as u64).to_le_bytes();
        for part in [&list, &length[..], MAGIC] {
            out.write_all(part).map_err(io)?;
        }
        Ok(())
    };
    try_atomic_write(path, fill)
}

impl Index {
    /// Reads the list of shards in `file`, which is at `at`.
    ///
    /// # Errors
    ///
    /// `Data` when it is no index, or a damaged one.
    pub(super) fn open(at: &str, file: File) -> Result<Index> {
        let wrong = |what: String| {
            let fix = "make it again with `phalanx index`";
            Error::data(format!("{at} is not a complete index: {what}")).note("fix", fix)
        };
        let failed = |e: io::Error| wrong(e.to_string());
        let length = file.metadata().map_err(failed)?.len();
        let mut end = [0; 16];
        let tail = length
            .checked_sub(16)
            .ok_or_else(|| wrong("it is too short".into()))?;
        file.read_exact_at(&mut end, tail).map_err(failed)?;
        let (size, magic) = end.split_at(8);
        let size = u64::from_le_bytes(size.try_into().unwrap_or_default());
        if magic != MAGIC || size > tail.min(MAX_LIST) {
            return Err(wrong("its end is not that of an index".into()));
        }
        let mut list = vec![0; size as usize];
        file.read_exact_at(&mut list, tail - size).map_err(failed)?;
        let list: List = serde_json::from_slice(&list).map_err(|e| wrong(e.to_string()))?;
        let (mut tables, mut next) = (Vec::with_capacity(list.shards.len()), 0_u64);
        for shard in &list.shards {
            let name = &shard.object.name;
            // The sum of all is a u64.
            if shard.object.bytes.max(shard.damaged) > MAX_SHARD {
                return Err(wrong(format!("{name} is too large")));
            }
            if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
                return Err(wrong(format!("{name:?} is no name of a shard")));
            }
            tables.push(next);
            let entries = shard.samples.checked_add(1);
            let after = entries.and_then(|n| next.checked_add(n.checked_mul(8)?));
            next = after.ok_or_else(|| wrong(format!("{name} has too many samples")))?;
        }
        if next != tail - size {
            let has = tail - size;
            return Err(wrong(format!("it has {has} bytes of offsets, not {next}")));
        }
        let at = at.to_owned();
        Ok(Index {
            list,
            tables,
            file,
            at,
        })
    }

    /// Whether it is of these files, as they are now. That of a folder whose files were copied into an object store has their
    /// names and sizes.
    pub(super) fn is_of(&self, shards: &[Object]) -> bool {
        let is_time = |object: &Object| object.stamp.bytes().all(|c| c.is_ascii_digit());
        let same = |(ours, now): (&Shard, &Object)| {
            let copy = Object {
                stamp: now.stamp.clone(),
                ..ours.object.clone()
            };
            ours.object == *now || is_time(&ours.object) && !is_time(now) && copy == *now
        };
        let listed = &self.list.shards;
        listed.len() == shards.len() && listed.iter().zip(shards).all(same)
    }

    /// Where a sample of a shard lies.
    pub(super) fn range(&self, shard: usize, sample: u64) -> Result<Range<u64>> {
        let (about, mut ends) = (&self.list.shards[shard].object, [0; 16]);
        let read = self
            .file
            .read_exact_at(&mut ends, self.tables[shard] + 8 * sample);
        read.map_err(|e| Error::io("cannot read", self.at.as_ref(), e))?;
        let [start, end] = [0, 8].map(|i| {
            let bytes = ends[i..i + 8].try_into();
            u64::from_le_bytes(bytes.unwrap_or_default())
        });
        if start >= end || end > about.bytes || end - start > MAX_SAMPLE {
            let (at, name) = (&self.at, &about.name);
            let what =
                format!("{at}: sample {sample} of {name} has the impossible place {start}..{end}");
            return Err(Error::data(what).note("fix", "make it again with `phalanx index`"));
        }
        Ok(start..end)
    }

    pub(super) fn order(&self, buffer: usize) -> ShardOrder {
        ShardOrder::new(self.list.shards.iter().map(|shard| shard.samples), buffer)
    }

    /// SHA-256 of what was found in the shards, whatever their names, format and place.
    pub(super) fn content(&self) -> String {
        let mut hash = Sha256::new();
        for shard in &self.list.shards {
            hash.update(&shard.digest);
            hash.update(shard.samples.to_le_bytes());
        }
        hex::encode(hash.finalize())
    }
}
