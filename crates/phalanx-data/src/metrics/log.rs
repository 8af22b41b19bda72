//! `metrics.jsonl` and `summary.json`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use phalanx_base::files::{self, Dir, atomic_write};
use phalanx_base::{Error, Result, refuse};

/// Maximum size of a log that is resumed; one of a million steps has 0.1 GiB.
const MAX_BYTES: u64 = 4 << 30;

/// A log of JSON objects, one per line. Each line is written before the call returns, so a
/// killed run loses none.
///
/// Ranks other than 0 use a [`disabled`](Self::disabled) one.
#[derive(Debug)]
pub struct MetricsLog {
    out: Option<(PathBuf, File)>,
    every_steps: u64,
    last_step: Option<u64>,
    /// Reused, so that a line needs no allocation.
    line: Vec<u8>,
}

impl MetricsLog {
    /// Creates the file `name` in `dir`, replacing an existing one. Every `every_steps`-th
    /// step is written.
    ///
    /// # Errors
    ///
    /// `Usage` when `every_steps` is 0; `System` or `DiskFull` naming the path.
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

    /// Continues the file `name` in `dir`, keeping the records for which `keep` returns
    /// true. Creates it if needed.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create) and [`Dir::write`].
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
            // An incomplete last line is not a record.
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

    /// Appends to the file at `path`, creating it if needed. An incomplete last line is
    /// ended first. Links are followed as
    /// [`atomic_write_with`](phalanx_base::files::atomic_write_with) follows them.
    ///
    /// # Errors
    ///
    /// `System` or `DiskFull` naming the path; `Usage` for a link of another user.
    pub fn append(path: &Path) -> Result<Self> {
        let failed = |e| Error::io("cannot open", path, e);
        let mut options = File::options();
        let options = options.read(true).append(true).create(true);
        let mut file = files::open_named(path, options)?;
        let mut last = [b'\n'];
        // A pipe or an empty file has no last line.
        if file.seek(SeekFrom::End(-1)).is_ok() {
            file.read_exact(&mut last).map_err(failed)?;
        }
        if last != *b"\n" {
            file.write_all(b"\n")
                .map_err(|e| Error::io("cannot write", path, e))?;
        }
        Ok(Self::to(file, path, 1))
    }

    /// A log that writes nothing, for ranks that do not log.
    pub fn disabled() -> Self {
        Self {
            out: None,
            every_steps: 1,
            last_step: None,
            line: Vec::new(),
        }
    }

    /// Writes the record of a step, for steps 0, N, 2N…
    ///
    /// # Errors
    ///
    /// `Internal` unless `step`, which counts over all epochs, increases from call to call;
    /// `DiskFull` or `System` naming the file.
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

    /// Writes any record: the end of an epoch, an evaluation, the configuration.
    ///
    /// # Errors
    ///
    /// `DiskFull` or `System` naming the file; `Internal` for a record that cannot be JSON. NaN
    /// and infinities become `null`.
    pub fn event(&mut self, record: &impl Serialize) -> Result<()> {
        let Some((path, file)) = &mut self.out else {
            return Ok(());
        };
        self.line.clear();
        serde_json::to_writer(&mut self.line, record).map_err(no_json)?;
        self.line.push(b'\n');
        // One system call per line, without a buffer.
        file.write_all(&self.line)
            .map_err(|e| Error::io("cannot write", path, e))
    }
}

/// Atomically writes `summary.json` or another small result, indented.
///
/// # Errors
///
/// `DiskFull` or `System` naming the path; `Internal` for a value that is not JSON.
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
        refuse!("steps between metric lines must be at least 1");
    }
    Ok(())
}

fn no_json(source: serde_json::Error) -> Error {
    Error::internal(format!("metrics cannot be written as JSON: {source}")).with_source(source)
}
