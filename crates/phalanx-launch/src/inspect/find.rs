//! Finding and reading dumps. Files may be missing, cut off or hostile.

use std::path::{Path, PathBuf};

use phalanx_comm::recorder::Dump;

use crate::error::{Error, Result};
use crate::format::rank_list;

/// More files than any job leaves.
const MAX_FILES: usize = 4096;

/// The dumps that could be read, and notes about the others.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// At most one a rank, in rank order.
    pub(super) dumps: Vec<Dump>,
    pub(super) notes: Vec<String>,
}

/// Reads all dumps that `paths` name.
///
/// # Errors
///
/// When a path does not exist, or no dump could be read at all.
pub(super) fn read(paths: &[PathBuf]) -> Result<Found> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            files.extend(within(path)?);
        } else {
            files.push(path.clone());
        }
    }
    let mut found = Found::default();
    if files.len() > MAX_FILES {
        found.notes.push(format!(
            "of {} files only the first {MAX_FILES} were read",
            files.len()
        ));
        files.truncate(MAX_FILES);
    }
    for file in &files {
        match Dump::read(file) {
            Ok((dump, is_cut)) => {
                if is_cut {
                    found.notes.push(format!(
                        "{} was cut off; its newest {} operations were read",
                        file.display(),
                        dump.entries.len()
                    ));
                }
                found.add(dump, file);
            }
            Err(e) => found.notes.push(e.to_string()),
        }
    }
    if found.dumps.is_empty() {
        let mut error = Error::usage("no flight recorder dump could be read");
        if found.notes.is_empty() {
            let names: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
            error = error.note(
                "in",
                format!("{} (rank-N.json, or flight/rank-N.json)", names.join(", ")),
            );
        }
        for note in found.notes.iter().take(8) {
            error = error.note("since", note.clone());
        }
        return Err(error);
    }
    found.dumps.sort_by_key(|dump| dump.rank);
    found.leave_out_other_attempts();
    Ok(found)
}

impl Found {
    /// Leaves only what the attempt (or job) of the newest dump has left: ranks that it never had would be taken for lost.
    fn leave_out_other_attempts(&mut self) {
        let newest = self.dumps.iter().max_by_key(|dump| dump.taken_unix_ns);
        let job = newest.map_or(0, |dump| dump.job);
        let (dumps, others): (Vec<Dump>, Vec<Dump>) =
            self.dumps.drain(..).partition(|dump| dump.job == job);
        self.dumps = dumps;
        if !others.is_empty() {
            let ranks: Vec<usize> = others.iter().map(|dump| dump.rank).collect();
            let note = format!("ignored: {} of another attempt or job", rank_list(&ranks));
            self.notes.push(note);
        }
    }

    /// Adds a dump; of two dumps of one rank, the newer one is kept.
    fn add(&mut self, dump: Dump, file: &Path) {
        let Some(other) = self.dumps.iter_mut().find(|other| other.rank == dump.rank) else {
            self.dumps.push(dump);
            return;
        };
        self.notes.push(format!(
            "{} is a second dump of rank {}; the newer one is used (inspect the folders of several runs one at a time)",
            file.display(),
            dump.rank
        ));
        if dump.taken_unix_ns > other.taken_unix_ns {
            *other = dump;
        }
    }
}

/// The dumps in a folder, or in its folder `flight`.
fn within(dir: &Path) -> Result<Vec<PathBuf>> {
    let flight = dir.join("flight");
    let dir = if flight.is_dir() { &flight } else { dir };
    let failed = |e: std::io::Error| {
        Error::usage(format!("cannot read the folder {}", dir.display())).caused_by(e)
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("rank-") && name.ends_with(".json") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
