//! Formats of shards: where the samples of a shard lie, and what is in one.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek, SeekFrom};
use std::ops::Range;

use phalanx_base::text::one_line;
use phalanx_base::{Error, Result};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::content::Content;
use super::rows;

/// Most bytes of a sample.
pub(super) const MAX_SAMPLE: u64 = 1 << 30;
/// Bytes of a block of a tar archive, and of its mark at the end: two of them, of zeros.
const BLOCK: u64 = 512;

/// A format of shards, by the ending of their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Format {
    /// `.tar`: a sample is the members of a key, as in WebDataset.
    Tar,
    /// `.jsonl`, `.ndjson`: a sample is a line.
    Jsonl,
    /// `.parquet`: a sample is a row, whose number stands for its place.
    Parquet,
}

impl Format {
    pub(super) fn of(name: &str) -> Option<Format> {
        match name.rsplit_once('.')?.1 {
            "tar" => Some(Format::Tar),
            "jsonl" | "ndjson" => Some(Format::Jsonl),
            "parquet" => Some(Format::Parquet),
            _ => None,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Format::Tar => "tar",
            Format::Jsonl => "JSON lines",
            Format::Parquet => "Parquet",
        }
    }
}

/// What was found in a shard.
pub(super) struct Scan {
    /// Where each sample begins, and where the last one ends.
    pub(super) starts: Vec<u64>,
    /// SHA-256 of the headers of a tar archive, or of all lines.
    pub(super) digest: String,
    /// Number of places that cannot be read.
    pub(super) damaged: u64,
    /// The first of them, and why.
    pub(super) first: Option<String>,
}

/// Finds the samples of the shard `name` in `file`, of `bytes`. What cannot be read is left out and counted.
///
/// # Errors
///
/// `Data`, naming the sample: two with one name, members of one that are not adjacent, or one that is too large; `System`.
pub(super) fn scan(format: Format, name: &str, file: &File, bytes: u64) -> Result<Scan> {
    let mut scan = Scan {
        starts: Vec::new(),
        digest: String::new(),
        damaged: 0,
        first: None,
    };
    let mut hash = Sha256::new();
    let end = match format {
        Format::Tar => scan.tar(name, file, bytes, &mut hash)?,
        Format::Jsonl => scan.lines(name, file, &mut hash)?,
        Format::Parquet => scan.starts(rows::scan(name, file, &mut hash)?),
    };
    scan.starts.push(end);
    let large = |ends: &&[u64]| ends[1] - ends[0] > MAX_SAMPLE;
    if let Some(ends) = scan.starts.windows(2).find(large) {
        let what = format!("{name}: the sample at byte {} is too large", ends[0]);
        return Err(Error::data(what).note("limit", format!("{MAX_SAMPLE} bytes a sample")));
    }
    scan.digest = hex::encode(hash.finalize());
    Ok(scan)
}

impl Scan {
    /// Samples with the numbers of rows as their places.
    fn starts(&mut self, rows: u64) -> u64 {
        self.starts.extend(0..rows);
        rows
    }

    fn damage(&mut self, what: String) {
        self.damaged += 1;
        self.first.get_or_insert(what);
    }

    /// Returns where the last sample ends. Members are not read.
    fn tar(&mut self, name: &str, file: &File, bytes: u64, hash: &mut Sha256) -> Result<u64> {
        let mut archive = tar::Archive::new(file);
        let failed = |e: io::Error| Error::data(format!("{name}: cannot be read: {e}"));
        let refused = |at: u64, what: String| {
            Err(Error::data(format!("{name}, at byte {at}: {what}")).note(
                "expected",
                "each name once, and the members of a sample one after the other",
            ))
        };
        let (mut end, mut broken) = (0, None);
        let (mut keys, mut members) = (HashSet::new(), HashSet::new());
        let mut current = String::new();
        for entry in archive.entries_with_seek().map_err(failed)? {
            let entry = match entry {
                Ok(entry) => entry,
                Err(e) => {
                    broken = Some(e.to_string());
                    break;
                }
            };
            let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let shown = one_line(&path);
            let (start, header) = (end, entry.header());
            hash.update(header.as_bytes());
            hash.update(path.as_bytes());
            if header.entry_type().is_gnu_sparse() {
                return refused(start, format!("{shown} is a sparse member"));
            }
            let padded = entry.size().div_ceil(BLOCK).saturating_mul(BLOCK);
            let to = entry.raw_file_position().saturating_add(padded);
            if to > bytes {
                broken = Some(format!("the member {shown} goes on to byte {to}"));
                break;
            }
            end = to;
            let Some((key, member)) = is_read(header.entry_type()).then(|| split(&path)).flatten()
            else {
                continue;
            };
            if key != current {
                if !keys.insert(key.to_owned()) {
                    let key = one_line(key);
                    return refused(start, format!("the sample {key} was there before"));
                }
                self.starts.push(start);
                members.clear();
                current = key.to_owned();
            }
            if !members.insert(member) {
                return refused(start, format!("{shown} was there before"));
            }
        }
        if broken.is_none() {
            broken = rest_of_tar(file, end).map_err(failed)?;
        }
        if let Some(why) = broken {
            // More members of the last sample may have followed.
            let last = self.starts.pop().unwrap_or(end);
            self.damage(format!("{name}: broken at byte {end} of {bytes}: {why}"));
            end = last;
        }
        Ok(end)
    }

    fn lines(&mut self, name: &str, file: &File, hash: &mut Sha256) -> Result<u64> {
        let failed = |e: io::Error| Error::data(format!("{name}: cannot be read: {e}"));
        let mut reader = BufReader::with_capacity(1 << 20, file);
        let (mut line, mut at) = (Vec::new(), 0);
        for number in 1_u64.. {
            line.clear();
            let mut limited = (&mut reader).take(MAX_SAMPLE + 1);
            let read = limited.read_until(b'\n', &mut line).map_err(failed)? as u64;
            if read == 0 {
                break;
            }
            hash.update(&line);
            match (line.trim_ascii(), read > MAX_SAMPLE) {
                ([], _) => {}
                (_, true) => self.starts.push(at),
                (text, _) => match serde_json::from_slice::<Map<String, Value>>(text) {
                    Ok(_) => self.starts.push(at),
                    Err(e) => self.damage(format!("{name}: line {number}, at byte {at}: {e}")),
                },
            }
            at += read;
        }
        Ok(at)
    }
}

/// Whether a member of this type has a file's content.
fn is_read(kind: tar::EntryType) -> bool {
    kind.is_file() || kind.is_contiguous()
}

/// Why the archive in `file`, whose members end at `end`, is not complete.
fn rest_of_tar(mut file: &File, end: u64) -> io::Result<Option<String>> {
    file.seek(SeekFrom::Start(end))?;
    let (mut reader, mut blank) = (BufReader::new(file), 0);
    loop {
        let rest = reader.fill_buf()?;
        let zeros = rest.iter().take_while(|byte| **byte == 0).count();
        blank += zeros as u64;
        if zeros < rest.len() {
            let what =
                "there are data after the mark at its end; two archives in one file cannot be read";
            return Ok(Some(what.to_owned()));
        }
        if zeros == 0 {
            let what = "the mark at its end is missing";
            return Ok((blank < 2 * BLOCK).then(|| what.to_owned()));
        }
        reader.consume(zeros);
    }
}

/// Key and ending of a member, as WebDataset has them: the path up to the first dot of its last part, and what follows that
/// dot, in small letters. `None` for those that it skips, and for hidden files, which it does not: some programs add `._NAME`.
fn split(path: &str) -> Option<(&str, String)> {
    let first = path.split('/').next().unwrap_or_default();
    if first.len() >= 4 && first.starts_with("__") && first.ends_with("__") {
        return None;
    }
    let name = path.rfind('/').map_or(0, |slash| slash + 1);
    let dot = path[name..].find('.').filter(|dot| *dot > 0)? + name;
    Some((&path[..dot], path[dot + 1..].to_ascii_lowercase()))
}

/// Takes the bytes of a sample apart. Returns its key, if it has one.
///
/// # Errors
///
/// Why it cannot be read.
pub(super) fn parse(
    format: Format,
    bytes: Vec<u8>,
) -> std::result::Result<(Option<String>, Content), String> {
    match format {
        Format::Tar => {
            let (key, members) = members(&bytes).map_err(|e| e.to_string())?;
            Ok((Some(key), Content::Members(bytes, members)))
        }
        Format::Jsonl => {
            // Lines that follow are blank or damaged.
            let line = bytes.split(|byte| *byte == b'\n').next();
            let object = serde_json::from_slice(line.unwrap_or_default().trim_ascii());
            Ok((None, Content::Object(object.map_err(|e| e.to_string())?)))
        }
        Format::Parquet => Err("a row is not read by its bytes".to_owned()),
    }
}

/// Extension and place of each member.
type Members = Vec<(String, Range<usize>)>;

fn members(bytes: &[u8]) -> io::Result<(String, Members)> {
    let (mut key, mut members) = (None, Vec::new());
    for entry in tar::Archive::new(Cursor::new(bytes)).entries_with_seek()? {
        let entry = entry?;
        let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let start = entry.raw_file_position();
        let end = start.saturating_add(entry.size());
        if end > bytes.len() as u64 {
            return Err(io::Error::other("a member goes on beyond the sample"));
        }
        if !is_read(entry.header().entry_type()) {
            continue;
        }
        if let Some((of, member)) = split(&path) {
            if key.get_or_insert_with(|| of.to_owned()) != of {
                return Err(io::Error::other("it has members of two samples"));
            }
            members.push((member, start as usize..end as usize));
        }
    }
    let key = key.ok_or_else(|| io::Error::other("it has no members"))?;
    Ok((key, members))
}
