//! A whole file, and the state dict in it.

use std::path::{Path, PathBuf};

use super::archive::Archive;
use super::build::shortened;
use super::machine;
use super::tensor::Tensor;
use super::value::{Arena, NodeId, Value};
use crate::{Error, Result};

/// Where programs keep a model's state dict among other things.
const WRAPPERS: [&str; 4] = ["model", "state_dict", "model_state_dict", "net"];

/// What `DistributedDataParallel` and `DataParallel` put before each name.
const WRAPPED: &str = "module.";

/// A `.pth` file, read and checked as a whole.
pub struct PthFile {
    path: PathBuf,
    arena: Arena,
    root: NodeId,
    warnings: Vec<String>,
}

impl PthFile {
    /// Reads the file at `path` and checks all that it says.
    ///
    /// Memory: the storages that it refers to, each once, and at most some
    /// hundred megabytes for the hardest pickle that is let through.
    ///
    /// # Errors
    ///
    /// `Usage` when there is no such file; `Io` when it cannot be read; `Data`,
    /// naming the file, the place and what was expected, when it is truncated,
    /// damaged, of another kind, or asks for anything but tensors and plain
    /// values.
    pub fn read(path: &Path) -> Result<PthFile> {
        let mut archive = Archive::open(path)?;
        let pickle = archive.pickle()?;
        let (arena, root) = machine::run(path, &pickle, &mut archive)?;
        Ok(PthFile {
            path: path.to_path_buf(),
            arena,
            root,
            warnings: archive.into_warnings(),
        })
    }

    /// What was saved.
    pub fn root(&self) -> Value<'_> {
        self.arena.value(self.root)
    }

    /// What is odd about the file but keeps nothing from being read.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The names and tensors of a model, in the file's order: of what was
    /// saved itself, or of its entry `model`, `state_dict`, `model_state_dict`
    /// or `net`. The prefix `module.` is taken away where all names have it.
    ///
    /// # Errors
    ///
    /// `Data` when there is none, naming what there is.
    pub fn state_dict(&self) -> Result<Vec<(String, &Tensor)>> {
        let root = self.root();
        let found = tensors(root).or_else(|| {
            WRAPPERS
                .iter()
                .find_map(|key| root.get(key).and_then(tensors))
        });
        let Some(mut found) = found else {
            return Err(Error::data(format!(
                "{} holds no state dict: {}",
                self.path.display(),
                describe(root)
            )));
        };
        strip_module(found.iter_mut().map(|(name, _)| name));
        Ok(found)
    }
}

/// The items of a dict that has tensors and nothing else.
fn tensors(value: Value<'_>) -> Option<Vec<(String, &Tensor)>> {
    let items: Option<Vec<_>> = value
        .items()?
        .map(|(name, value)| Some((name.to_owned(), value.as_tensor()?)))
        .collect();
    let numbered = value.numbered()?.next().is_some();
    items.filter(|items| !items.is_empty() && !numbered)
}

/// Takes `module.` from all names if all have it.
pub(crate) fn strip_module<'a>(names: impl Iterator<Item = &'a mut String>) {
    let mut names: Vec<&mut String> = names.collect();
    if names.iter().all(|name| name.starts_with(WRAPPED)) {
        for name in &mut names {
            name.drain(..WRAPPED.len());
        }
    }
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
