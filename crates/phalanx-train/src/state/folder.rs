//! The folder of a run's checkpoints.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::load::State;
use super::manifest::Manifest;
use super::pace::Pacer;
use super::snapshot::Snapshot;
use crate::files::{atomic_write, atomic_write_with, create_folder};
use crate::{Error, Result};

const PREFIX: &str = "step-";
/// Before the name of a manifest that no run goes on from by itself.
const ASIDE: &str = "aside-";
const MANIFEST: &str = ".json";
const DATA: &str = ".safetensors";

/// Checkpoints in one folder, the newest of which are kept. One process at a
/// time writes into it.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    keep: usize,
}

impl Folder {
    /// The folder at `path`, which need not exist; after each save the newest
    /// `keep` checkpoints stay, at least one.
    pub fn new(path: &Path, keep: usize) -> Folder {
        Folder {
            path: path.to_path_buf(),
            keep: keep.max(1),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Saves `snapshot`, then removes those of the fewest steps beyond the ones to
    /// keep, but never this one. Blocks until the checkpoint is on the disk; gives
    /// its manifest's path.
    ///
    /// # Errors
    ///
    /// `DiskFull` or `Io`, naming the path. The older checkpoints are then all
    /// there, but for those that were to be removed.
    pub fn save(&self, snapshot: &Snapshot) -> Result<PathBuf> {
        self.save_at(snapshot, None)
    }

    /// As [`save`](Self::save), as fast as `pacer` lets it.
    pub(super) fn save_at(&self, snapshot: &Snapshot, pacer: Option<&Pacer>) -> Result<PathBuf> {
        create_folder(&self.path)?;
        let step = snapshot.place().step;
        let name = format!("{PREFIX}{step:09}");
        let manifest_path = self.path.join(format!("{name}{MANIFEST}"));
        let file = self.free_name(&name);
        let data_path = self.path.join(&file);
        let mut written = None;
        atomic_write_with(&data_path, |out| {
            written = Some(match pacer {
                Some(pacer) => snapshot.write(&mut pacer.writer(out)),
                None => snapshot.write(out),
            }?);
            Ok(())
        })?;
        let Some(written) = written else {
            return Err(Error::internal("a checkpoint was saved but not written"));
        };
        let manifest = snapshot.manifest(&file, written);
        let text = manifest
            .to_text()
            .map_err(|e| Error::internal(format!("a manifest is no JSON: {e}")).with_source(e));
        if let Err(error) = text.and_then(|text| atomic_write(&manifest_path, text.as_bytes())) {
            let _ = fs::remove_file(&data_path);
            return Err(error);
        }
        self.keep_newest(self.keep, Some(&manifest_path))?;
        Ok(manifest_path)
    }

    /// Sets aside all checkpoints of more than `step` steps, all of them without a
    /// `step`: they are of another branch than a training that goes on from there, and
    /// [`newest`](Self::newest) must not find them. Gives their manifests' new paths,
    /// `aside-step-…json`, from which they can still be loaded; each takes the place of
    /// one of as many steps that was set aside before. Nothing but
    /// [`clear`](Self::clear) removes them.
    ///
    /// # Errors
    ///
    /// `Io`, naming the path.
    pub fn set_aside(&self, step: Option<u64>) -> Result<Vec<PathBuf>> {
        let mut aside = Vec::new();
        for (of, path) in self.manifests("")? {
            if step.is_some_and(|step| of <= step) {
                continue;
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let to = self.path.join(format!("{ASIDE}{name}"));
            // One rename moves the checkpoint: its data stay where they are.
            fs::rename(&path, &to).map_err(|e| Error::io("cannot set aside", &path, e))?;
            aside.push(to);
        }
        Ok(aside)
    }

    /// The newest checkpoint that is complete; `None` where there is none, or
    /// no folder. Damaged ones before it are named in the second value.
    ///
    /// # Errors
    ///
    /// `Data` when there are checkpoints but all are damaged, with the reason
    /// of the newest; `Io` when the folder cannot be read.
    pub fn newest(&self) -> Result<(Option<State>, Vec<String>)> {
        let mut damaged = Vec::new();
        for (_, manifest) in self.manifests("")?.iter().rev() {
            match State::load(manifest) {
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

    /// Removes all checkpoints, also those set aside.
    ///
    /// # Errors
    ///
    /// `Io`, naming the path.
    pub fn clear(&self) -> Result<()> {
        for (_, path) in self.manifests(ASIDE)? {
            remove(&path)?;
        }
        self.keep_newest(0, None)
    }

    /// `saved` counts as the newest, whatever its step.
    fn keep_newest(&self, keep: usize, saved: Option<&Path>) -> Result<()> {
        let mut manifests = self.manifests("")?;
        manifests.sort_by_key(|(_, path)| Some(path.as_path()) == saved);
        let surplus = manifests.len().saturating_sub(keep);
        for (_, path) in &manifests[..surplus] {
            // First the manifest: data without one is no checkpoint.
            remove(path)?;
        }
        let used: HashSet<String> = manifests[surplus..]
            .iter()
            .chain(&self.manifests(ASIDE)?)
            .filter_map(|(_, path)| {
                let manifest: Manifest = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
                Some(manifest.file)
            })
            .collect();
        for name in self.names()? {
            if name.starts_with(PREFIX) && name.ends_with(DATA) && !used.contains(&name) {
                remove(&self.path.join(name))?;
            }
        }
        Ok(())
    }

    /// Manifests whose names begin with `before`, by step, fewest first.
    fn manifests(&self, before: &str) -> Result<Vec<(u64, PathBuf)>> {
        let mut found: Vec<(u64, PathBuf)> = self
            .names()?
            .into_iter()
            .filter_map(|name| {
                let step = name.strip_prefix(before)?.strip_prefix(PREFIX)?;
                let step = step.strip_suffix(MANIFEST)?;
                Some((step.parse().ok()?, self.path.join(&name)))
            })
            .collect();
        found.sort();
        Ok(found)
    }

    fn names(&self) -> Result<Vec<String>> {
        let failed = |source| Error::io("cannot list", &self.path, source);
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(failed(e)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            names.extend(name.into_string());
        }
        Ok(names)
    }

    /// A name that no manifest can refer to yet: a checkpoint of the same step
    /// stays whole until its manifest is replaced.
    fn free_name(&self, name: &str) -> String {
        let plain = format!("{name}{DATA}");
        if !self.path.join(&plain).exists() {
            return plain;
        }
        let mut count = 2;
        loop {
            let numbered = format!("{name}-{count}{DATA}");
            if !self.path.join(&numbered).exists() {
                return numbered;
            }
            count += 1;
        }
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io("cannot remove", path, e))
        }
        _ => Ok(()),
    }
}
