//! Reading a file and its state dict.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::archive::Archive;
use super::build::Torch;
use super::tensor::{Storage, Tensor};
use super::value::{Arena, Object, Value};
use crate::pickle::{self, Node, NodeId, shortened};
use phalanx_base::files::open_regular;
use phalanx_base::{Error, Result};

/// Keys under which programs store a model's state dict.
const WRAPPERS: [&str; 4] = ["model", "state_dict", "model_state_dict", "net"];

/// Prefix of names saved from `DistributedDataParallel` and `DataParallel`.
pub(crate) const WRAPPED: [&str; 2] = [DDP, "_orig_mod."];
/// The prefix of `DistributedDataParallel` and `AveragedModel`.
const DDP: &str = "module.";
/// The count of averages that `AveragedModel` saves in addition to the names with [`DDP`].
const N_AVERAGED: &str = "n_averaged";

/// Storages up to this size are read however small the tensors in them are.
const FREE_BYTES: u64 = 1 << 30;

/// Larger storages may be this many times as large as the tensors in them.
const MAX_UNSEEN: u64 = 16;

/// A `.pth` file, completely read and checked.
pub struct PthFile {
    path: PathBuf,
    arena: Arena,
    root: NodeId,
    archive: Archive,
}

impl PthFile {
    /// Reads and checks the file at `path`.
    ///
    /// *Memory:* each storage once, and at most a few hundred megabytes for the largest
    /// pickle accepted.
    ///
    /// # Errors
    ///
    /// `Usage` when the file does not exist; `System` when it cannot be read; `Data`, naming
    /// the file, the offset and what was expected, when it is truncated, damaged, of
    /// another format, or has anything but tensors and plain values.
    pub fn read(path: &Path) -> Result<PthFile> {
        let file = open_regular(path).map_err(|e| Error::not_opened("checkpoint", path, e))?;
        let file = PthFile::open(path, file)?;
        for node in &file.arena.nodes {
            if let Node::Object(Object::Storage(storage)) = node {
                file.load(storage)?;
            }
        }
        Ok(file)
    }

    /// As [`read`](Self::read), for `file`, which was opened at `path`. The values of
    /// tensors are read by [`bytes`](Self::bytes) only.
    pub(crate) fn open(path: &Path, file: File) -> Result<PthFile> {
        let archive = Archive::open(path, file)?;
        let pickle = archive.pickle()?;
        let ran = pickle::run(&pickle, Torch::new(&archive)).map_err(|refused| {
            Error::data(format!(
                "{}: data.pkl at byte {} of {}: {}",
                path.display(),
                refused.at,
                pickle.len(),
                refused.what
            ))
        });
        let (arena, root) = ran?;
        Ok(PthFile {
            path: path.to_path_buf(),
            arena,
            root,
            archive,
        })
    }

    /// Refuses storages that are far larger than the `tensors` in them.
    pub(crate) fn check_storages<'a>(
        &self,
        tensors: impl Iterator<Item = &'a Tensor>,
    ) -> Result<()> {
        let (mut shown, mut storages) = (0u64, HashMap::new());
        for tensor in tensors {
            shown = shown.saturating_add((tensor.len() * tensor.dtype().size_bytes()) as u64);
            let storage = &*tensor.storage;
            storages.insert(&storage.name, storage.size_bytes as u64);
        }
        let stored = storages
            .values()
            .fold(0, |sum: u64, n| sum.saturating_add(*n));
        if stored > FREE_BYTES && stored > MAX_UNSEEN.saturating_mul(shown) {
            return Err(Error::data(format!(
                "{}: its tensors use {shown} of the {stored} bytes of their storages; \
                 clone() them in Python before torch.save()",
                self.path.display()
            )));
        }
        Ok(())
    }

    /// The values of a tensor of this file in row-major order, little-endian.
    pub(crate) fn bytes(&self, tensor: &Tensor) -> Result<Vec<u8>> {
        self.load(&tensor.storage)?;
        Ok(tensor.to_bytes())
    }

    /// As [`bytes`](Self::bytes), without keeping the storage in memory, which others may need.
    pub(crate) fn bytes_once(&self, tensor: &Tensor) -> Result<Vec<u8>> {
        let storage = &tensor.storage;
        match storage.bytes.get() {
            Some(_) => Ok(tensor.to_bytes()),
            None => {
                let bytes = (self.archive).read(&storage.name, storage.size_bytes as u64)?;
                Ok(tensor.to_bytes_of(&bytes))
            }
        }
    }

    /// The names of storages that several of `tensors` have.
    pub(crate) fn shared<'a>(&self, tensors: impl Iterator<Item = &'a Tensor>) -> HashSet<&'a str> {
        let mut seen = HashSet::new();
        let names = tensors.map(Tensor::storage_name);
        names.filter(|name| !seen.insert(*name)).collect()
    }

    /// Reads a storage, once.
    fn load(&self, storage: &Arc<Storage>) -> Result<()> {
        if storage.bytes.get().is_none() {
            let bytes = (self.archive).read(&storage.name, storage.size_bytes as u64)?;
            storage.bytes.get_or_init(|| bytes);
        }
        Ok(())
    }

    /// The saved object.
    pub fn root(&self) -> Value<'_> {
        Value::of(&self.arena, self.root)
    }

    /// Warnings about the file.
    pub fn warnings(&self) -> &[String] {
        self.archive.warnings()
    }

    /// The names and tensors of a model in the file's order: the saved object itself, or
    /// its entry `model`, `state_dict`, `model_state_dict` or `net`. Prefixes
    /// `module.` and `_orig_mod.` that all names have are removed.
    ///
    /// # Errors
    ///
    /// `Data` when there is none, naming the entries of the file.
    pub fn state_dict(&self) -> Result<Vec<(String, &Tensor)>> {
        let mut found = self.named_as_saved()?;
        strip_all(&mut found);
        Ok(found)
    }

    /// As [`state_dict`](Self::state_dict), with all prefixes.
    pub(crate) fn named_as_saved(&self) -> Result<Vec<(String, &Tensor)>> {
        let root = self.root();
        let found = tensors(root).or_else(|| {
            WRAPPERS
                .iter()
                .find_map(|key| root.get(key).and_then(tensors))
        });
        let Some(found) = found else {
            return Err(Error::data(format!(
                "{} has no state dict: {}",
                self.path.display(),
                describe(root)
            )));
        };
        Ok(found)
    }
}

/// The items of a dict with tensors only.
fn tensors(value: Value<'_>) -> Option<Vec<(String, &Tensor)>> {
    let items: Option<Vec<_>> = value
        .items()?
        .map(|(name, value)| Some((name.to_owned(), value.as_tensor()?)))
        .collect();
    let numbered = value.numbered()?.next().is_some();
    items.filter(|items| !items.is_empty() && !numbered)
}

/// Removes the prefixes of wrappers that all names have, in any order and number.
pub(crate) fn strip_all<T>(all: &mut Vec<(String, T)>) {
    while strip_one(all, &WRAPPED).is_some() {}
}

/// Removes the first of `prefixes` that all names have, and returns it.
pub(crate) fn strip_one<'p, T>(
    all: &mut Vec<(String, T)>,
    prefixes: &[&'p str],
) -> Option<&'p str> {
    let all_have = |prefix: &&&str| {
        let has = |name: &str| name.starts_with(**prefix);
        all.iter().any(|(name, _)| has(name))
            && (all.iter()).all(|(name, _)| has(name) || (**prefix == DDP && name == N_AVERAGED))
    };
    let prefix = *prefixes.iter().find(all_have)?;
    all.retain(|(name, _)| name.starts_with(prefix));
    for (name, _) in all {
        name.drain(..prefix.len());
    }
    Some(prefix)
}

fn describe(root: Value<'_>) -> String {
    const SHOWN: usize = 6;
    let Some(items) = root.items() else {
        return format!("it is {}, expected a dict of tensors", root.kind());
    };
    let mut entries: Vec<String> = items
        .take(SHOWN + 1)
        .map(|(name, value)| format!("{:?} is {}", shortened(name), value.kind()))
        .collect();
    if entries.is_empty() {
        return "it is a dict without names".to_owned();
    }
    if entries.len() > SHOWN {
        entries[SHOWN] = "and so on".to_owned();
    }
    format!("in its dict {}", entries.join(", "))
}
