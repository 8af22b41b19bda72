//! A new run of a workflow: its inputs, copied into the store.

use std::collections::BTreeMap;

use phalanx_base::error::{Error, ErrorKind, Result};
use serde_json::Value as Json;

use crate::resources::size;
use crate::spec::{Type, Value, Workflow};
use crate::store::{Item, Items, Node, Run, State, Store, now};

/// The values of `--input NAME=VALUE`; a file or folder is its absolute path.
///
/// # Errors
///
/// Usage: an unknown name, a value of another type.
pub(crate) fn inputs(workflow: &Workflow, words: &[String]) -> Result<BTreeMap<String, Json>> {
    let mut values = BTreeMap::new();
    let here = std::env::current_dir()?;
    for word in words {
        let (name, text) = word.split_once('=').ok_or_else(|| {
            Error::usage(format!("--input cannot be {word:?}")).note("try", "--input NAME=VALUE")
        })?;
        // An input of a group may be given without the group's name.
        let is_it = |known: &str| known.split_once('.').is_some_and(|(_, own)| own == name);
        let mut short = workflow.inputs.keys().filter(|known| is_it(known));
        let is_known = workflow.inputs.contains_key(name);
        let name = match (is_known, short.next(), short.next()) {
            (false, Some(only), None) => only,
            _ => name,
        };
        let Some(input) = workflow.inputs.get(name) else {
            let known: Vec<&str> = workflow.inputs.keys().map(String::as_str).collect();
            let known = match known.is_empty() {
                true => "none".to_owned(),
                false => known.join(", "),
            };
            let what = format!("--input {name}: the workflow has no such input");
            return Err(Error::usage(what).note("inputs", known));
        };
        let value = (input.kind.read(text))
            .map_err(|why| Error::usage(format!("--input {name}: {text:?} {why}")))?;
        let value = match value {
            Json::String(path) if input.kind.is_path() => here.join(path).to_string_lossy().into(),
            value => value,
        };
        values.insert(name.to_owned(), value);
    }
    Ok(values)
}

/// Starts a new run of `workflow` with `given`; returns its id. The store must be locked.
pub(crate) fn create(
    store: &Store,
    workflow: Workflow,
    given: &BTreeMap<String, Json>,
) -> Result<String> {
    record_run(store, workflow, given).map_err(|error| match error.kind() {
        ErrorKind::Usage => error,
        _ => error.note("then", "start it again"),
    })
}

fn record_run(store: &Store, workflow: Workflow, given: &BTreeMap<String, Json>) -> Result<String> {
    store.tidy()?;
    let mut sources = BTreeMap::new();
    let mut resolve = |kind: Type, value: &Json| -> Result<Item> {
        match value {
            Json::String(path) if kind.is_path() => {
                let path = std::path::absolute(workflow.folder.join(path))?;
                let object = store.objects.import(&path, kind)?;
                sources.insert(object.sha256.clone(), path);
                Ok(Item::Object(object))
            }
            value => Ok(Item::Value(kind.canonical(value))),
        }
    };
    let mut inputs = Items::new();
    for (name, input) in &workflow.inputs {
        let Some(value) = given.get(name).or(input.default.as_ref()) else {
            let what = format!("input {name:?} ({}) has no default", input.kind);
            return Err(Error::usage(what).note("try", format!("--input {name}=VALUE")));
        };
        inputs.insert(name.clone(), resolve(input.kind, value)?);
    }
    let mut constants = Items::new();
    let disk = rustix::fs::statvfs(&store.dir).ok();
    let free = disk.map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    for task in &workflow.tasks {
        // The store has both.
        let [kept, ephemeral] = [task.requests.storage, task.requests.ephemeral_storage];
        let asked = kept.unwrap_or(0).saturating_add(ephemeral.unwrap_or(0));
        if asked > free {
            let message = format!(
                "task {:?} requests {} of storage, but {} has {}",
                task.name,
                size(asked),
                store.dir.display(),
                size(free)
            );
            let error = Error::usage(message);
            return Err(error.note("try", "free some space, or another --store DIR"));
        }
        for (name, input) in &task.inputs {
            if let Value::Constant(value) = &input.value {
                let item = resolve(input.kind, value).map_err(|error| {
                    error.note("in", format!("task {:?}, input {name:?}", task.name))
                })?;
                constants.insert(format!("{}.{name}", task.name), item);
            }
        }
    }
    let number = store.next_number()?;
    let id = format!("{}-{number}", workflow.name);
    let run = Run {
        number,
        state: State::Interrupted,
        started: now(),
        ended: None,
        limits: String::new(),
        inputs,
        constants,
        sources,
        outputs: Items::new(),
        workflow,
    };
    store.write(|changes| {
        changes.run(&id, &run);
        for task in &run.workflow.tasks {
            changes.node(&id, &task.name, &Node::new());
        }
    })?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::objects::Objects;

    /// As `phalanx flow run` of a folder, up to its first task.
    fn start(dir: &Path, folder: &Path) -> Result<String> {
        let text = "name = \"w\"\n[inputs]\ndata = { type = \"folder\" }\n[tasks.a]\nshell = \"true\"\ninputs = { data = \"{inputs.data}\" }\n";
        let workflow = Workflow::from_toml(text, dir, "flow.toml")?;
        let store = Store::create(&dir.join("store"))?;
        let _lock = store.lock()?;
        let given = BTreeMap::from([("data".to_owned(), Json::from(folder.to_string_lossy()))]);
        create(&store, workflow, &given)
    }

    #[test]
    fn a_run_starts_after_one_that_was_killed_while_it_copied_an_input() {
        crate::objects::tests::as_another_user(|dir| {
            use std::os::unix::fs::PermissionsExt;
            let data = dir.join("data");
            fs::create_dir(&data).unwrap();
            fs::write(data.join("a"), "1").unwrap();
            fs::write(data.join("b"), "2").unwrap();
            let read_only = fs::Permissions::from_mode(0o444);
            fs::set_permissions(data.join("a"), read_only.clone()).unwrap();
            let objects = Objects::new(&dir.join("store"));
            let sum = objects.content(&data, Type::Folder).unwrap().sha256;
            // Half of a copy, by the names of older versions and of this one.
            for name in [format!("import-{sum}"), "import-0".to_owned()] {
                let left = dir.join("store/tmp").join(name);
                fs::create_dir_all(&left).unwrap();
                fs::write(left.join("a"), "").unwrap();
                fs::set_permissions(left.join("a"), read_only.clone()).unwrap();
                fs::set_permissions(&left, fs::Permissions::from_mode(0o555)).unwrap();
            }
            assert_eq!(start(dir, &data).unwrap(), "w-1");
            assert_eq!(start(dir, &data).unwrap(), "w-2");
            // The second one found all in the store.
            assert!(!dir.join("store/tmp").exists());
        });
    }

    #[test]
    fn a_folder_with_the_store_in_it_is_no_input() {
        let dir = tempfile::tempdir().unwrap();
        let text = start(dir.path(), dir.path()).unwrap_err().chain();
        assert!(text.contains("the store is in it"), "{text}");
    }
}
