//! `metrics.jsonl` and `summary.json`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::files::{self, Dir, atomic_write};
use crate::{Error, Result};

/// A log of more bytes is not gone on with; that of a million steps has 0.1 GiB.
const MAX_BYTES: u64 = 4 << 30;

/// Appends one JSON object a line; every line is in the file before the call
/// returns, so a killed run leaves all of them.
///
/// Ranks other than 0 hold a [`disabled`](Self::disabled) one and call it all
/// the same.
#[derive(Debug)]
pub struct MetricsLog {
    out: Option<(PathBuf, File)>,
    every_steps: u64,
    last_step: Option<u64>,
    /// Kept, so that a line costs no allocation.
    line: Vec<u8>,
}

impl MetricsLog {
    /// A new file `name` in `dir`, in the place of an older one. Of the steps, each
    /// `every_steps`-th is written.
    ///
    /// # Errors
    ///
    /// `Usage` when `every_steps` is 0; `Io` or `DiskFull` naming the path.
    pub fn create(dir: &Dir, name: &str, every_steps: u64) -> Result<Self> {
        check_interval(every_steps)?;
        let file = dir.create_file(name)?;
        Ok(Self::to(file, &dir.path().join(name), every_steps))
    }

    fn to(file: File, path: &Path, every_steps: u64) -> Self {
        Self {
            out: Some((path.to_owned(), file)),
            every_steps,
            ..Self::disabled()
        }
    }

    /// Goes on with the file `name` in `dir`, of whose records only those stay that
    /// `keep` wants, in their order; a new file if there is none.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create); also what [`Dir::write`] says.
    pub fn resume(
        dir: &Dir,
        name: &str,
        every_steps: u64,
        keep: impl Fn(&serde_json::Value) -> bool,
    ) -> Result<Self> {
        check_interval(every_steps)?;
        let old = dir.read(name, MAX_BYTES)?.unwrap_or_default();
        let mut kept = Vec::with_capacity(old.len());
        for line in old.split_inclusive(|b| *b == b'\n') {
            // A line that was cut off by a kill is no record.
            if line.ends_with(b"\n")
                && serde_json::from_slice(line).is_ok_and(|record| keep(&record))
            {
                kept.extend_from_slice(line);
            }
        }
        dir.write(name, |out| out.write_all(&kept))?;
        let file = dir.append_file(name)?;
        Ok(Self::to(file, &dir.path().join(name), every_steps))
    }

    /// Goes on at the end of the file at `path`, whatever it holds; a new file if there is
    /// none. A last line without an end gets one. Links are followed as
    /// [`atomic_write_with`](crate::files::atomic_write_with) follows them.
    ///
    /// # Errors
    ///
    /// `Io` or `DiskFull` naming the path; `Usage` for a link of another user.
    pub fn append(path: &Path) -> Result<Self> {
        let failed = |e| Error::io("cannot open", path, e);
        let mut options = File::options();
        let options = options.read(true).append(true).create(true);
        let mut file = files::open_named(path, options)?;
        let mut last = [b'\n'];
        // What cannot be sought in (a pipe, an empty file) has no last line.
        if file.seek(SeekFrom::End(-1)).is_ok() {
            file.read_exact(&mut last).map_err(failed)?;
        }
        if last != *b"\n" {
            file.write_all(b"\n")
                .map_err(|e| Error::io("cannot write", path, e))?;
        }
        Ok(Self::to(file, path, 1))
    }

    /// Writes nothing, for the ranks that do not log.
    pub fn disabled() -> Self {
        Self {
            out: None,
            every_steps: 1,
            last_step: None,
            line: Vec::new(),
        }
    }

    /// Writes the record of a step if it is this step's turn: steps 0, N, 2N…
    ///
    /// # Errors
    ///
    /// `Internal` when `step` does not rise from call to call (over all
    /// epochs there is one count); `DiskFull` or `Io` naming the file.
    pub fn step(&mut self, step: u64, record: &impl Serialize) -> Result<()> {
        if self.last_step.is_some_and(|last| step <= last) {
            return Err(Error::internal(format!(
                "metrics of step {step} after those of step {}",
                self.last_step.unwrap_or_default()
            )));
        }
        self.last_step = Some(step);
        if step.is_multiple_of(self.every_steps) {
            self.event(record)
        } else {
            Ok(())
        }
    }

    /// Writes any record: the end of an epoch, a test, the configuration.
    ///
    /// # Errors
    ///
    /// `DiskFull` or `Io` naming the file; `Internal` for a record that is no
    /// JSON. NaN and infinities become `null`.
    pub fn event(&mut self, record: &impl Serialize) -> Result<()> {
        let Some((path, file)) = &mut self.out else {
            return Ok(());
        };
        self.line.clear();
        serde_json::to_writer(&mut self.line, record).map_err(no_json)?;
        self.line.push(b'\n');
        // One system call a line: nothing is left behind in a buffer.
        file.write_all(&self.line)
            .map_err(|e| Error::io("cannot write", path, e))
    }
}

/// Writes `summary.json` or any other small result, indented, atomically.
///
/// # Errors
///
/// `DiskFull` or `Io` naming the path; `Internal` for a value that is not JSON.
pub fn write_summary(path: &Path, summary: &impl Serialize) -> Result<()> {
    atomic_write(path, &indented(summary)?)
}

/// As [`write_summary`], to the file `name` in `dir`.
///
/// # Errors
///
/// As [`write_summary`].
pub fn write_summary_in(dir: &Dir, name: &str, summary: &impl Serialize) -> Result<()> {
    let bytes = indented(summary)?;
    dir.write(name, |out| out.write_all(&bytes))
}

fn indented(summary: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(summary).map_err(no_json)?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn check_interval(every_steps: u64) -> Result<()> {
    if every_steps == 0 {
        return Err(Error::usage(
            "steps between metric lines must be at least 1",
        ));
    }
    Ok(())
}

fn no_json(source: serde_json::Error) -> Error {
    Error::internal(format!("metrics cannot be written as JSON: {source}")).with_source(source)
}
