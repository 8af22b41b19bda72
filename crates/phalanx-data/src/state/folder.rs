//! The folder with a run's checkpoints.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::load::{MAX_MANIFEST_BYTES, State};
use super::manifest::Manifest;
use super::pace::Pacer;
use super::snapshot::{Snapshot, Written};
use super::streamed::Streamed;
use crate::checkpoint::Piece;
use crate::files::Dir;
use crate::{Error, Result};

const PREFIX: &str = "step-";
/// Prefix of manifests that `newest` does not find.
const ASIDE: &str = "aside-";
const MANIFEST: &str = ".json";
const DATA: &str = ".safetensors";

/// The name of the manifest of the checkpoint after `step` steps.
pub fn manifest_name(step: u64) -> String {
    format!("{PREFIX}{step:09}{MANIFEST}")
}

/// A folder of checkpoints, of which the newest are kept. Only one process may write into
/// it.
#[derive(Clone, Debug)]
pub struct Folder {
    /// The parent folder, if it may not be reached through a link.
    above: Option<Dir>,
    path: PathBuf,
    keep: usize,
}

impl Folder {
    /// The folder at `path`, which need not exist. Each save keeps the newest `keep`
    /// checkpoints, at least one.
    pub fn new(path: &Path, keep: usize) -> Folder {
        Folder {
            above: None,
            path: path.to_path_buf(),
            keep: keep.max(1),
        }
    }

    /// As [`new`](Self::new), for the folder `name` in `dir`, which may not be a symbolic
    /// link.
    pub fn within(dir: &Dir, name: &str, keep: usize) -> Folder {
        Folder {
            above: Some(dir.clone()),
            ..Folder::new(&dir.path().join(name), keep)
        }
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Saves `snapshot`, then removes the oldest checkpoints beyond those to keep, but
    /// never this one. *Blocks* until the checkpoint is on the disk. Returns the path of
    /// its manifest.
    ///
    /// # Errors
    ///
    /// `DiskFull` or `Io`, naming the path. Older checkpoints are not affected.
    pub fn save(&self, snapshot: &Snapshot) -> Result<PathBuf> {
        self.save_at(snapshot, None)
    }

    /// As [`save`](Self::save), at the pace of `pacer`.
    pub(super) fn save_at(&self, snapshot: &Snapshot, pacer: Option<&Pacer>) -> Result<PathBuf> {
        let step = snapshot.place().step;
        let write = |out: &mut dyn Write| match pacer {
            Some(pacer) => snapshot.write(&mut pacer.writer(out)),
            None => snapshot.write(out),
        };
        self.save_data(step, write, |file, written| {
            snapshot.manifest(file, written)
        })
    }

    /// As [`save`](Self::save), of a training whose full tensors `values` gives, one after the
    /// other: only one of them is in memory. An error of `values` ends the saving.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save), and those of `values`.
    pub fn save_streamed(
        &self,
        state: &Streamed,
        mut values: impl FnMut(Piece) -> std::io::Result<Vec<f32>>,
    ) -> Result<PathBuf> {
        self.save_data(
            state.step(),
            |out| state.write(out, &mut values),
            |file, written| state.manifest(file, written),
        )
    }

    /// Writes the data file of the checkpoint after `step` steps, then its manifest.
    fn save_data(
        &self,
        step: u64,
        write: impl FnOnce(&mut dyn Write) -> std::io::Result<Written>,
        manifest: impl FnOnce(&str, Written) -> Manifest,
    ) -> Result<PathBuf> {
        let dir = self.made()?;
        let name = format!("{PREFIX}{step:09}");
        let manifest_name = manifest_name(step);
        let file = free_name(&dir, &name);
        let mut written = None;
        dir.write(&file, |out| {
            written = Some(write(out)?);
            Ok(())
        })?;
        let Some(written) = written else {
            return Err(Error::internal("a checkpoint was saved but not written"));
        };
        let manifest = manifest(&file, written);
        let text = manifest
            .to_text()
            .map_err(|e| Error::internal(format!("a manifest is not JSON: {e}")).with_source(e));
        let saved = text.and_then(|text| {
            let text = text.as_bytes();
            dir.write(&manifest_name, |out| out.write_all(text))
        });
        if let Err(error) = saved {
            let _ = dir.remove(&file);
            return Err(error);
        }
        keep_newest(&dir, self.keep, Some(&manifest_name))?;
        Ok(self.path.join(manifest_name))
    }

    /// Renames all checkpoints after `step` (all, if it is `None`) to `aside-step-…json`,
    /// so that [`newest`](Self::newest) does not find them: a training that resumes at
    /// `step` is another branch. Returns the new paths, from which they can still be
    /// loaded. An earlier one of the same step is replaced. Only [`clear`](Self::clear)
    /// removes them.
    ///
    /// # Errors
    ///
    /// `Io`, naming the path.
    pub fn set_aside(&self, step: Option<u64>) -> Result<Vec<PathBuf>> {
        let mut aside = Vec::new();
        let Some(dir) = self.existing()? else {
            return Ok(aside);
        };
        for (of, name) in manifests(&dir, "")? {
            if step.is_some_and(|step| of <= step) {
                continue;
            }
            let to = format!("{ASIDE}{name}");
            // Renaming the manifest is enough; the data file stays.
            dir.rename(&name, &to)?;
            aside.push(self.path.join(to));
        }
        Ok(aside)
    }

    /// The newest complete checkpoint; `None` if there is none, or no folder. The second
    /// value names newer ones that are damaged.
    ///
    /// # Errors
    ///
    /// `Data` when all checkpoints are damaged, with the reason for the newest; `Io` when
    /// the folder cannot be read.
    pub fn newest(&self) -> Result<(Option<State>, Vec<String>)> {
        let mut damaged = Vec::new();
        let all = match self.existing()? {
            Some(dir) => manifests(&dir, "")?,
            None => Vec::new(),
        };
        for (_, manifest) in all.iter().rev() {
            match State::load(&self.path.join(manifest)) {
                Ok(state) => return Ok((Some(state), damaged)),
                Err(error) => damaged.push(error.to_string()),
            }
        }
        match damaged.first() {
            None => Ok((None, damaged)),
            Some(first) => Err(Error::data(format!(
                "no checkpoint in {} is complete: {first}",
                self.path.display()
            ))),
        }
    }

    /// Removes all checkpoints, including those set aside.
    ///
    /// # Errors
    ///
    /// `Io`, naming the path.
    pub fn clear(&self) -> Result<()> {
        let Some(dir) = self.existing()? else {
            return Ok(());
        };
        for (_, name) in manifests(&dir, ASIDE)? {
            dir.remove(&name)?;
        }
        keep_newest(&dir, 0, None)
    }

    /// Opens the folder, if it exists.
    fn existing(&self) -> Result<Option<Dir>> {
        match &self.above {
            Some(above) => above.sub(&self.name()),
            None if self.path.exists() => Dir::open(&self.path).map(Some),
            None => Ok(None),
        }
    }

    /// Opens the folder, creating it if needed.
    fn made(&self) -> Result<Dir> {
        match &self.above {
            Some(above) => above.create_sub(&self.name()),
            None => Dir::create(&self.path),
        }
    }

    fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

/// Removes all but the newest `keep` checkpoints in `dir`; `saved` counts as the newest.
fn keep_newest(dir: &Dir, keep: usize, saved: Option<&str>) -> Result<()> {
    let mut all = manifests(dir, "")?;
    all.sort_by_key(|(_, name)| Some(name.as_str()) == saved);
    let surplus = all.len().saturating_sub(keep);
    for (_, name) in &all[..surplus] {
        // First the manifest: data without one is not a checkpoint.
        dir.remove(name)?;
    }
    let used: HashSet<String> = all[surplus..]
        .iter()
        .chain(&manifests(dir, ASIDE)?)
        .filter_map(|(_, name)| {
            let text = dir.read(name, MAX_MANIFEST_BYTES).ok()??;
            let manifest: Manifest = serde_json::from_slice(&text).ok()?;
            Some(manifest.file)
        })
        .collect();
    for name in dir.names()? {
        if name.starts_with(PREFIX) && name.ends_with(DATA) && !used.contains(&name) {
            dir.remove(&name)?;
        }
    }
    Ok(())
}

/// Steps and names of the manifests in `dir` with the prefix `before`, in ascending order
/// of steps.
fn manifests(dir: &Dir, before: &str) -> Result<Vec<(u64, String)>> {
    let of = |name: &str| {
        let step = name.strip_prefix(before)?.strip_prefix(PREFIX)?;
        step.strip_suffix(MANIFEST)?.parse().ok()
    };
    let names = dir.names()?.into_iter();
    let mut found: Vec<(u64, String)> = names.filter_map(|name| Some((of(&name)?, name))).collect();
    found.sort();
    Ok(found)
}

/// A new name, so that an existing checkpoint of the same step stays complete until its
/// manifest is replaced.
fn free_name(dir: &Dir, name: &str) -> String {
    let plain = format!("{name}{DATA}");
    if !dir.has(&plain) {
        return plain;
    }
    let mut count = 2;
    loop {
        let numbered = format!("{name}-{count}{DATA}");
        if !dir.has(&numbered) {
            return numbered;
        }
        count += 1;
    }
}
