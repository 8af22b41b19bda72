//! Whether the files of a task are whole, and its outputs as an attempt has written them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx_base::error::{ErrorKind, Result};
use phalanx_base::files::read_regular;

use crate::child::outputs_dir;
use crate::objects::Objects;
use crate::spec::{Task, Type};
use crate::store::{Item, Items, Store, objects_in};

/// Largest text of an output value.
const MOST_VALUE: u64 = 16 << 20;

/// An input that cannot be used.
pub(super) struct Broken {
    pub input: String,
    pub sha256: String,
    pub why: String,
}

pub(super) fn has(items: &Items, sha256: &str) -> bool {
    objects_in(items).any(|(_, object)| object.sha256 == sha256)
}

/// Whether all files and folders in `items` are whole.
pub(super) fn check(store: &Store, items: &Items) -> std::result::Result<(), String> {
    objects_in(items).try_for_each(|(_, object)| store.objects.check_changes(object))
}

/// The first input that is not whole.
pub(super) fn broken(store: &Store, inputs: &Items) -> Option<Broken> {
    objects_in(inputs).find_map(|(name, object)| {
        Some(Broken {
            why: store.objects.check_changes(object).err()?,
            input: name.clone(),
            sha256: object.sha256.clone(),
        })
    })
}

/// Copies inputs that are not whole from where they came, or says why that is not possible.
pub(super) fn mend(
    store: &Store,
    inputs: &Items,
    sources: &BTreeMap<String, PathBuf>,
) -> Result<std::result::Result<(), Broken>> {
    for (name, object) in objects_in(inputs) {
        if let Some(source) = sources.get(&object.sha256)
            && let Err(why) = store.objects.check_changes(object)
            && let Err(and) = store.objects.restore(object, source)?
        {
            return Ok(Err(Broken {
                input: name.clone(),
                sha256: object.sha256.clone(),
                why: format!("{why}, and {and}"),
            }));
        }
    }
    Ok(broken(store, inputs).map_or(Ok(()), Err))
}

/// Moves the outputs of an attempt into the store, or says which one is missing or wrong.
pub(super) fn collect(
    objects: &Objects,
    task: &Task,
    dir: &Path,
) -> Result<std::result::Result<Items, String>> {
    let mut items = Items::new();
    for (name, kind) in &task.outputs {
        let path = outputs_dir(dir).join(name);
        let Ok(found) = path.symlink_metadata() else {
            let variable = Task::output_variable(name);
            return Ok(Err(format!(
                "output {name:?} is missing: the task must write it to ${variable}"
            )));
        };
        let is_right = match kind {
            Type::Folder => found.is_dir(),
            _ => found.is_file(),
        };
        if !is_right {
            return Ok(Err(format!("output {name:?} is not a {kind}")));
        }
        let item = if kind.is_path() {
            match objects.adopt(&path, *kind) {
                Ok(object) => Item::Object(object),
                Err(error) if error.kind() == ErrorKind::Usage => {
                    return Ok(Err(error.chain()));
                }
                Err(error) => return Err(error),
            }
        } else {
            let text = read_regular(&path, MOST_VALUE).map(String::from_utf8);
            let Ok(Ok(text)) = text else {
                return Ok(Err(format!(
                    "output {name:?} is not text of at most 16 MiB"
                )));
            };
            let text = text.strip_suffix('\n').unwrap_or(&text);
            match kind.read(text) {
                Ok(value) => Item::Value(kind.canonical(&value)),
                Err(why) => return Ok(Err(format!("output {name:?} {why}"))),
            }
        };
        items.insert(name.clone(), item);
    }
    Ok(Ok(items))
}
