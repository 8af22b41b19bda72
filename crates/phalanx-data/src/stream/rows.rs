//! Shards of Parquet: a row is a sample. Row groups are decoded whole, and some of them are kept.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use phalanx_base::{Error, Result, lock};
use sha2::{Digest, Sha256};

use super::content::Content;
use crate::parquet::{Field, ParquetFile, Row};

/// Most bytes of the decoded row groups that are kept, unless one has more.
const KEPT: usize = 512 << 20;

/// Most rows of a shard.
const MOST_ROWS: usize = 1 << 27;

/// The row groups that were decoded last, the newest at the end.
#[derive(Default)]
pub(super) struct Rows(Mutex<Vec<Group>>);

struct Group {
    shard: usize,
    /// The number of its first row.
    first: u64,
    rows: Vec<Content>,
    bytes: usize,
}

fn open(name: &str, file: &File) -> Result<ParquetFile> {
    ParquetFile::new(name, file.try_clone()?)
}

/// The number of rows of a shard. `hash` gets the description of all its parts.
///
/// # Errors
///
/// `Data`, naming it, when it is damaged.
pub(super) fn scan(name: &str, file: &File, hash: &mut Sha256) -> Result<u64> {
    let groups = open(name, file)?.row_groups();
    let rows = groups
        .iter()
        .fold(0_usize, |sum, rows| sum.saturating_add(*rows));
    if rows > MOST_ROWS {
        let what = format!("{name} says that it has {rows} rows");
        return Err(Error::data(what).note("limit", format!("{MOST_ROWS} rows a shard")));
    }
    let footer = || -> io::Result<Vec<u8>> {
        let end = file.metadata()?.len().saturating_sub(8);
        let mut length = [0; 4];
        file.read_exact_at(&mut length, end)?;
        let length = u64::from(u32::from_le_bytes(length)).min(end);
        let mut footer = vec![0; length as usize];
        file.read_exact_at(&mut footer, end - length)?;
        Ok(footer)
    };
    hash.update(footer().map_err(|e| Error::io("cannot read", name.as_ref(), e))?);
    Ok(rows as u64)
}

/// Adds the columns of `row` to a sample; those of a group have its name and a point in front.
fn add(row: &Row, front: &str, bytes: &mut Vec<u8>, columns: &mut Vec<(String, Range<usize>)>) {
    for (name, field) in row.get_column_iter() {
        let (name, start) = (format!("{front}{name}"), bytes.len());
        match field {
            Field::Null => continue,
            Field::Group(row) => {
                add(row, &format!("{name}."), bytes, columns);
                continue;
            }
            Field::Str(text) => bytes.extend_from_slice(text.as_bytes()),
            Field::Bytes(value) => bytes.extend_from_slice(value.data()),
            // Numbers and lists, as JSON.
            other => bytes.extend_from_slice(other.to_json_value().to_string().as_bytes()),
        }
        columns.push((name, start..bytes.len()));
    }
}

impl Rows {
    /// Row `number` of the shard with this number and name, which is open as `file`.
    ///
    /// # Errors
    ///
    /// `Data`, naming the shard.
    pub(super) fn read(&self, shard: (usize, &str), file: &File, number: u64) -> Result<Content> {
        let mut kept = lock(&self.0);
        let row = |group: &Group| {
            let place = number.checked_sub(group.first);
            let place = place.filter(|_| group.shard == shard.0)?;
            group.rows.get(place as usize).cloned()
        };
        if let Some(row) = kept.iter().find_map(row) {
            return Ok(row);
        }
        let (file, mut first) = (open(shard.1, file)?, 0);
        for (group, rows) in file.row_groups().into_iter().enumerate() {
            if number >= first + rows as u64 {
                first += rows as u64;
                continue;
            }
            let (mut all, mut size) = (Vec::new(), 0);
            file.read(group, |row| {
                let (mut bytes, mut columns) = (Vec::new(), Vec::new());
                add(&row, "", &mut bytes, &mut columns);
                size += bytes.len() + 64 * columns.len();
                all.push(Content::Members(bytes, columns));
                Ok(())
            })?;
            while !kept.is_empty()
                && kept.iter().map(|group| group.bytes).sum::<usize>() + size > KEPT
            {
                kept.remove(0);
            }
            kept.push(Group {
                shard: shard.0,
                first,
                rows: all,
                bytes: size,
            });
            break;
        }
        let gone = || Error::data(format!("{} has no row {number}", shard.1));
        kept.last().and_then(row).ok_or_else(gone)
    }
}
