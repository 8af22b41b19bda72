//! Dumps as files: `rank-N.json`, one JSON document each.
//!
//! The newest operation comes first and every operation has its own line, so that a
//! truncated file can still be read up to the cut.

use std::fmt;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::process::geteuid;

use super::dump::{Dump, Entry};
use super::layout::{ENTRIES, LABELS};
use crate::status::words::{MASK_WORDS, printable};

/// Largest file that is read; ours have at most two megabytes.
pub const MAX_DUMP_BYTES: u64 = 8 << 20;

/// Longest string kept from a file.
const MAX_TEXT_BYTES: usize = 1024;

/// Why a file is not a dump.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DumpError(String);

impl Dump {
    /// Writes `rank-N.json` into `dir`, which is created if needed; atomically replaces
    /// an older file. That of a process of a later attempt stays: this process was lost, and the job continued without it.
    ///
    /// # Errors
    ///
    /// Those of the file system.
    pub fn write_into(&self, dir: &Path) -> std::io::Result<PathBuf> {
        // A symbolic link could lead anywhere.
        if let Ok(about) = std::fs::symlink_metadata(dir)
            && about.is_symlink()
            && ![0, geteuid().as_raw()].contains(&about.uid())
        {
            let what = format!(
                "it is a symbolic link of another user (uid {})",
                about.uid()
            );
            return Err(std::io::Error::new(
                std::io::ErrorKind::PermissionDenied,
                what,
            ));
        }
        std::fs::create_dir_all(dir)?;
        let name = format!("rank-{}.json", self.rank);
        let path = dir.join(&name);
        let temporary = dir.join(format!(".{name}.{}.tmp", std::process::id()));
        // The times alone could differ between hosts, and the generations between runs.
        if Dump::read(&path).is_ok_and(|(other, _)| {
            other.joined > self.joined && other.joined_unix_ns > self.joined_unix_ns
        }) {
            return Ok(path);
        }
        // Created, never opened: where others may write to the directory, the name may
        // be a link to a file that is not ours. A file of an earlier process is removed.
        let _ = std::fs::remove_file(&temporary);
        let written = File::create_new(&temporary)
            .and_then(|mut file| file.write_all(self.to_json()?.as_bytes()))
            .and_then(|()| std::fs::rename(&temporary, &path));
        if let Err(e) = written {
            if e.kind() != std::io::ErrorKind::AlreadyExists {
                let _ = std::fs::remove_file(&temporary);
            }
            return Err(e);
        }
        Ok(path)
    }

    fn to_json(&self) -> std::io::Result<String> {
        let head = Dump {
            entries: Vec::new(),
            ..self.clone()
        };
        // The entries are the last field: the head ends with "[]}".
        let mut text = serde_json::to_string(&head)?;
        text.truncate(text.len() - "]}".len());
        for (i, entry) in self.entries.iter().enumerate() {
            text.push_str(if i == 0 { "\n" } else { ",\n" });
            text.push_str(&serde_json::to_string(entry)?);
        }
        text.push_str("\n]}\n");
        Ok(text)
    }

    /// Reads a dump. The flag is true if the file was truncated and only the newest
    /// operations could be read.
    ///
    /// # Errors
    ///
    /// What is wrong with the file: missing, too large, no dump, of another
    /// version.
    pub fn read(path: &Path) -> Result<(Dump, bool), DumpError> {
        let failed = |what: &dyn fmt::Display| DumpError(format!("{}: {what}", path.display()));
        let mut bytes = Vec::new();
        // Not blocking: opening a named pipe would wait for its writer.
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(path);
        let file = file.map_err(|e| failed(&e))?;
        if !file.metadata().is_ok_and(|about| about.is_file()) {
            return Err(failed(&"it is not a regular file"));
        }
        file.take(MAX_DUMP_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(|e| failed(&e))?;
        if bytes.len() as u64 > MAX_DUMP_BYTES {
            return Err(failed(&format!(
                "larger than {} MiB: no flight recorder writes so much",
                MAX_DUMP_BYTES >> 20
            )));
        }
        Dump::from_json(&bytes).map_err(|e| failed(&e))
    }

    /// As [`Dump::read`], from bytes.
    ///
    /// # Errors
    ///
    /// As [`Dump::read`].
    pub fn from_json(bytes: &[u8]) -> Result<(Dump, bool), DumpError> {
        let refused = |text: String| Err(DumpError(text));
        let (mut dump, is_cut) = match serde_json::from_slice::<Dump>(bytes) {
            Ok(dump) => (dump, false),
            Err(e) if e.is_eof() => match salvage(bytes) {
                Some(dump) => (dump, true),
                None => return refused(format!("ends after {} bytes, in its head", bytes.len())),
            },
            Err(e) => {
                return refused(format!(
                    "is not a flight recorder dump: {}",
                    printable(&e.to_string())
                ));
            }
        };
        if dump.format != Dump::FORMAT {
            let theirs: String = printable(&dump.format).chars().take(40).collect();
            return refused(format!(
                "has the format {theirs:?}, this program reads {:?}",
                Dump::FORMAT
            ));
        }
        // A newcomer has a higher number than the first ranks.
        let is_known = dump.rank < dump.world || dump.members.contains(&dump.rank);
        if dump.world > MAX_WORLD || !is_known {
            return refused(format!(
                "claims to be of rank {} of {}",
                dump.rank, dump.world
            ));
        }
        dump.entries.truncate(ENTRIES);
        dump.labels.truncate(LABELS);
        let clean = |text: &mut String| {
            text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
            *text = printable(text);
        };
        clean(&mut dump.host);
        dump.reason.iter_mut().for_each(clean);
        dump.ended.iter_mut().for_each(clean);
        dump.labels.iter_mut().for_each(clean);
        if let Some(phase) = &mut dump.phase {
            clean(&mut phase.name);
        }
        for entry in &mut dump.entries {
            let Entry {
                op,
                method,
                transport,
                dtype,
                reduce,
                awaited,
                ..
            } = entry;
            [op, method, transport].into_iter().for_each(clean);
            dtype.iter_mut().chain(reduce).for_each(clean);
            awaited.truncate(64 * MASK_WORDS);
        }
        Ok((dump, is_cut))
    }
}

/// More ranks than any job has; a limit for tables sized by it.
const MAX_WORLD: usize = 1 << 20;

/// Reads the complete lines of a truncated file.
fn salvage(bytes: &[u8]) -> Option<Dump> {
    let end = bytes.iter().rposition(|byte| *byte == b'\n')?;
    let kept = bytes[..end].strip_suffix(b",").unwrap_or(&bytes[..end]);
    serde_json::from_slice(&[kept, b"]}"].concat()).ok()
}
