//! The folder with a run's checkpoints.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::load::{MAX_MANIFEST_BYTES, State};
use super::manifest::{Manifest, Written};
use super::pace::Pacer;
use super::snapshot::Snapshot;
use super::streamed::Streamed;
use crate::weights::TensorId;
use phalanx_base::files::Dir;
use phalanx_base::{Error, Result};

const PREFIX: &str = "step-";
/// Prefix of manifests that `newest` does not find.
const ASIDE: &str = "aside-";
const MANIFEST: &str = ".json";
const DATA: &str = ".safetensors";

/// A checkpoint that was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedCheckpoint {
    /// Path of its manifest.
    pub path: PathBuf,
    /// Name of the first parameter or buffer with an infinite or NaN value, if there is one.
    pub not_finite: Option<String>,
}

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
    /// never this one, nor the newest with finite weights. *Blocks* until the checkpoint is on the disk.
    ///
    /// # Errors
    ///
    /// `DiskFull` or `System`, naming the path. Older checkpoints are not affected.
    pub fn save(&self, snapshot: &Snapshot) -> Result<SavedCheckpoint> {
        self.save_at(snapshot, None)
    }

    /// As [`save`](Self::save), at the pace of `pacer`.
    pub(super) fn save_at(
        &self,
        snapshot: &Snapshot,
        pacer: Option<&Pacer>,
    ) -> Result<SavedCheckpoint> {
        let write = |out: &mut dyn Write| match pacer {
            Some(pacer) => snapshot.write(&mut pacer.writer(out)),
            None => snapshot.write(out),
        };
        self.save_data(snapshot.state(), write)
    }

    /// As [`save`](Self::save), of a training whose tensors `values` returns in full, one after the
    /// other: only one of them is in memory. An error of `values` ends the saving.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save), and those of `values`.
    pub fn save_streamed(
        &self,
        state: &Streamed,
        mut values: impl FnMut(TensorId) -> std::io::Result<Vec<f32>>,
    ) -> Result<SavedCheckpoint> {
        self.save_data(state, |out| state.write(out, &mut values))
    }

    /// Writes the data file of a checkpoint by `write`, then its manifest.
    fn save_data(
        &self,
        state: &Streamed,
        write: impl FnOnce(&mut dyn Write) -> std::io::Result<Written>,
    ) -> Result<SavedCheckpoint> {
        let (dir, step) = (self.made()?, state.place().step);
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
        let not_finite = written.not_finite.clone();
        let manifest = state.manifest(&file, written);
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
        Ok(SavedCheckpoint {
            path: self.path.join(manifest_name),
            not_finite,
        })
    }

    /// Renames all checkpoints after `step` (all, if it is `None`) to `aside-step-…json`,
    /// so that [`newest`](Self::newest) does not find them: a training that resumes at
    /// `step` is another branch. Returns the new paths, from which they can still be
    /// loaded. An earlier one of the same step is replaced. Only [`clear`](Self::clear)
    /// removes them.
    ///
    /// # Errors
    ///
    /// `System`, naming the path.
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

    /// The newest complete checkpoint with finite weights, or else the newest complete one; `None`
    /// if there is none, or no folder. The second value has a sentence for each newer one that is
    /// passed over.
    ///
    /// # Errors
    ///
    /// `Data` when all checkpoints are damaged, with the reason for the newest; `System` when
    /// the folder cannot be read.
    pub fn newest(&self) -> Result<(Option<State>, Vec<String>)> {
        let (mut passed, mut first, mut not_finite) = (Vec::new(), None, None);
        let all = match self.existing()? {
            Some(dir) => manifests(&dir, "")?,
            None => Vec::new(),
        };
        for (_, manifest) in all.iter().rev() {
            let state = match State::load(&self.path.join(manifest)) {
                Ok(state) => state,
                Err(error) => {
                    passed.push(format!("passed over a damaged checkpoint: {error}"));
                    first.get_or_insert(error);
                    continue;
                }
            };
            let Some(warning) = state.warning() else {
                return Ok((Some(state), passed));
            };
            passed.push(format!("passed over a checkpoint: {warning}"));
            not_finite.get_or_insert((passed.len() - 1, state));
        }
        match (not_finite, first) {
            (Some((newer, state)), _) => {
                passed.truncate(newer);
                Ok((Some(state), passed))
            }
            (None, None) => Ok((None, passed)),
            (None, Some(first)) => Err(Error::data(format!(
                "no checkpoint in {} is complete: {first}",
                self.path.display()
            ))),
        }
    }

    /// Removes all checkpoints, including those set aside.
    ///
    /// # Errors
    ///
    /// `System`, naming the path.
    pub fn clear(&self) -> Result<()> {
        let Some(dir) = self.existing()? else {
            return Ok(());
        };
        for (_, name) in manifests(&dir, ASIDE)? {
            dir.remove(&name)?;
        }
        keep_newest(&dir, 0, None)
    }

    /// What all checkpoints, also those set aside, say of the program's progress.
    ///
    /// # Errors
    ///
    /// `System` when one cannot be read, `Data` when it is damaged.
    pub fn progress(&self) -> Result<Vec<serde_json::Value>> {
        let Some(dir) = self.existing()? else {
            return Ok(Vec::new());
        };
        let all = [manifests(&dir, "")?, manifests(&dir, ASIDE)?].concat();
        let read = |(_, name): &(u64, String)| {
            let text = dir.read(name, MAX_MANIFEST_BYTES)?.unwrap_or_default();
            let manifest = Manifest::from_text(&text);
            let manifest = manifest.map_err(|why| Error::data(format!("{name}: {why}")))?;
            Ok(manifest.progress)
        };
        all.iter().map(read).collect()
    }

    /// Opens the folder, if it exists.
    ///
    /// # Errors
    ///
    /// `System`, naming the path.
    pub fn existing(&self) -> Result<Option<Dir>> {
        match &self.above {
            Some(above) => above.sub(&self.name()),
            None if self.path.exists() => Dir::open(&self.path).map(Some),
            None => Ok(None),
        }
    }

    /// Opens the folder, creating it if needed.
    ///
    /// # Errors
    ///
    /// `System`, naming the path.
    pub fn made(&self) -> Result<Dir> {
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

/// Removes all but the newest `keep` checkpoints in `dir`; `saved` counts as the newest. If none of them has finite
/// weights, the newest one that has stays as well.
fn keep_newest(dir: &Dir, keep: usize, saved: Option<&str>) -> Result<()> {
    let mut all = manifests(dir, "")?;
    all.sort_by_key(|(_, name)| Some(name.as_str()) == saved);
    let read = |(_, name): &(u64, String)| -> Option<Manifest> {
        let text = dir.read(name, MAX_MANIFEST_BYTES).ok()??;
        serde_json::from_slice(&text).ok()
    };
    let is_finite = |read: &Option<Manifest>| matches!(read, Some(m) if m.not_finite.is_none());
    let kept = all.split_off(all.len().saturating_sub(keep));
    let mut used: Vec<Option<Manifest>> = kept.iter().map(read).collect();
    if !kept.is_empty()
        && !used.iter().any(is_finite)
        && let Some(last) = all.iter().rposition(|one| is_finite(&read(one)))
    {
        used.push(read(&all.remove(last)));
    }
    for (_, name) in &all {
        // First the manifest: data without one is not a checkpoint.
        dir.remove(name)?;
    }
    used.extend(manifests(dir, ASIDE)?.iter().map(read));
    let used: HashSet<String> = used.into_iter().flatten().map(|m| m.file).collect();
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
