//! The key of a task's call in the cache.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use phalanx_base::error::Result;
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

use crate::objects::{Object, Objects, cannot};
use crate::spec::{Action, Placeholder, Task, Type};
use crate::store::{Item, Items};

/// A task with its inputs: what decides whether a cached result fits.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub workflow: String,
    pub folder: PathBuf,
    pub task: Task,
    pub inputs: Items,
}

impl Call {
    /// The key of its result in the cache. Reads the files that the command names, and for a
    /// function this program.
    pub fn key(&self, objects: &Objects) -> Result<String> {
        let program = match self.task.action {
            Action::Function => {
                let failed = |error| cannot("read", Path::new("/proc/self/exe"), error);
                Some(objects.program().map_err(failed)?)
            }
            _ => None,
        };
        Ok(self.key_with(objects, program.as_deref()))
    }

    fn key_with(&self, objects: &Objects, program: Option<&str>) -> String {
        let task = &self.task;
        let words = match &task.action {
            Action::Command(words) => &words[..],
            Action::Shell(text) => std::slice::from_ref(text),
            Action::Function => &[],
        };
        let texts: Vec<&String> = words.iter().chain(task.env.values()).collect();
        let has_folder = |text: &&String| text.contains("{folder}") || text.contains("FLOW_FOLDER");
        let folder = texts.iter().any(has_folder);
        let folder = folder.then(|| self.folder.to_string_lossy());
        let files: BTreeMap<&String, Option<Object>> = texts
            .iter()
            .filter_map(|text| Some((*text, self.named_file(text)?)))
            .map(|(text, path)| (text, objects.content(&path, Type::File).ok()))
            .collect();
        let key = json!({
            "format": 2,
            "workflow": self.workflow,
            "task": task.name,
            "version": task.version,
            "cache": task.cache,
            "action": task.action,
            "program": program,
            "folder": folder,
            "files": files,
            "env": task.env,
            "inputs": self.inputs,
            "outputs": task.outputs,
        });
        hex::encode(Sha256::digest(key.to_string()))
    }

    /// The file below the workflow's folder that a word of a command names, perhaps after `=`.
    fn named_file(&self, word: &str) -> Option<PathBuf> {
        let folder = self.folder.to_string_lossy();
        let word = Task::fill(word, &mut |placeholder| match placeholder {
            Placeholder::Folder => folder.to_string(),
            Placeholder::Input(name) => match self.inputs.get(name) {
                Some(Item::Value(Json::String(text))) => text.clone(),
                Some(Item::Value(value)) => value.to_string(),
                _ => String::new(),
            },
            Placeholder::Output(_) => String::new(),
        });
        let after = word.split_once('=').map(|(_, after)| after);
        let mut paths = [Some(&word[..]), after]
            .into_iter()
            .flatten()
            .map(Path::new);
        let path = paths.find(|path| path.starts_with(&self.folder) && path.is_file())?;
        fs::canonicalize(path).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::spec::{Source, TaskInput, Value};

    fn commands(folder: &Path, script: &Path) -> Call {
        let words = ["sh", "{folder}/run.sh", "{inputs.a}", "{outputs.model}"];
        let mut task = Task::new("train", Action::Command(words.map(str::to_owned).to_vec()));
        task.cache = Some("1".into());
        task.env = BTreeMap::from([("CONFIG".into(), format!("x={}", script.display()))]);
        task.outputs = BTreeMap::from([("model".into(), Type::File), ("n".into(), Type::Int)]);
        for name in ["a", "b", "c"] {
            let value = Value::From(Source::Input(name.into()));
            let kind = Type::Json;
            task.inputs.insert(name.into(), TaskInput { kind, value });
        }
        let object = Object {
            kind: Type::File,
            sha256: "ab".repeat(32),
            bytes: 3,
        };
        Call {
            workflow: "w".into(),
            folder: folder.to_owned(),
            task,
            inputs: Items::from([
                ("a".into(), Item::Value(json!(1))),
                ("b".into(), Item::Value(json!([1.5, 2.0]))),
                ("c".into(), Item::Object(object)),
            ]),
        }
    }

    type Change = fn(&mut Call);

    /// Each makes another call of what it gets, whatever was changed in it before.
    const CHANGES: [Change; 18] = [
        |call| call.workflow.push('x'),
        |call| call.folder.push("x"),
        |call| call.task.name.push('x'),
        |call| call.task.version.push('x'),
        |call| call.task.cache.get_or_insert_default().push('x'),
        |call| command(call).push("{folder}".into()),
        |call| command(call).insert(0, "env".into()),
        |call| command(call)[1].push('x'),
        |call| {
            let words = command(call).split_off(2).join(" ");
            command(call).push(words + "x");
        },
        |call| call.task.action = Action::Shell(format!("{:?}{{folder}}", call.task.action)),
        |call| {
            let variable = format!("X{}", call.task.env.len());
            call.task.env.insert(variable, "1".into());
        },
        |call| call.task.env.values_mut().for_each(|value| value.push('x')),
        |call| {
            let name = format!("x{}", call.inputs.len());
            call.inputs.insert(name, Item::Value(Json::Null));
        },
        |call| change_input(call, "a"),
        |call| change_input(call, "b"),
        |call| change_input(call, "c"),
        |call| {
            let kind = call.task.outputs.get_mut("n").expect("the output");
            *kind = match kind {
                Type::Int => Type::Json,
                _ => Type::Int,
            };
        },
        |call| {
            let name = format!("x{}", call.task.outputs.len());
            call.task.outputs.insert(name, Type::Folder);
        },
    ];

    fn command(call: &mut Call) -> &mut Vec<String> {
        if let Action::Shell(text) = &call.task.action {
            call.task.action = Action::Command(vec!["sh".into(), "-c".into(), text.clone()]);
        }
        match &mut call.task.action {
            Action::Command(words) => words,
            other => panic!("{other:?}"),
        }
    }

    fn change_input(call: &mut Call, name: &str) {
        let item = call.inputs.get_mut(name).expect("the input");
        *item = match item {
            Item::Value(value) => Item::Value(json!([value, 1])),
            Item::Object(object) => {
                let mut object = object.clone();
                object.sha256.replace_range(..1, "0");
                match object.kind {
                    Type::File => object.kind = Type::Folder,
                    _ => object.bytes += 1,
                }
                Item::Object(object)
            }
        };
    }

    #[test]
    fn calls_that_differ_in_one_thing_have_different_keys() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("run.sh");
        let config = dir.path().join("config");
        fs::write(&script, "one").unwrap();
        fs::write(&config, "one").unwrap();
        // Each key is that of a new store: none is remembered.
        let key = |call: &Call| call.key_with(&Objects::new(dir.path()), None);
        let mut number = 7_u64;
        let mut random = |limit: usize| {
            number = number
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            usize::try_from(number >> 33).unwrap() % limit
        };
        for _ in 0..300 {
            let mut one = commands(dir.path(), &config);
            for _ in 0..random(6) {
                CHANGES[random(CHANGES.len())](&mut one);
            }
            let key_of_one = key(&one);
            assert_eq!(key_of_one, key(&one.clone()));
            // What has no influence on the result.
            let mut equal = one.clone();
            equal.task.retries.times += 1;
            equal.task.timeout = Some(Duration::from_secs(1));
            equal.task.requests.cpus = Some(2);
            equal.task.image = Some("x".into());
            equal.task.secrets.push("KEY".into());
            assert_eq!(key_of_one, key(&equal));
            for (at, change) in CHANGES.iter().enumerate() {
                let mut other = one.clone();
                change(&mut other);
                assert_ne!(key_of_one, key(&other), "change {at} of {one:?}");
            }
        }
        // Files that are named, by content.
        let call = commands(dir.path(), &config);
        for (path, text) in [(&script, "two"), (&config, "two")] {
            let before = key(&call);
            fs::write(path, text).unwrap();
            assert_ne!(before, key(&call), "{}", path.display());
            fs::write(path, "one").unwrap();
            assert_eq!(before, key(&call), "{}", path.display());
        }
        // The folder counts where it is used.
        let mut without = call.clone();
        without.task.action = Action::Shell("true".into());
        without.task.env.clear();
        let mut elsewhere = without.clone();
        elsewhere.folder.push("x");
        assert_eq!(key(&without), key(&elsewhere));
        for call in [&mut without, &mut elsewhere] {
            call.task.action = Action::Shell("cat \"$FLOW_FOLDER/x\"".into());
        }
        assert_ne!(key(&without), key(&elsewhere));
    }

    #[test]
    fn functions_of_different_programs_have_different_keys() {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(dir.path());
        let mut call = commands(dir.path(), dir.path());
        call.task.action = Action::Function;
        call.task.env.clear();
        let key = |program: &str| call.key_with(&objects, Some(program));
        assert_eq!(key("a"), key("a"));
        assert_ne!(key("a"), key("b"));
        // That of this process, as sha256sum has it.
        let program = std::env::current_exe().unwrap();
        let sum = std::process::Command::new("sha256sum")
            .arg(program)
            .output();
        let sum = String::from_utf8(sum.unwrap().stdout).unwrap();
        let sum = sum.split(' ').next().unwrap();
        assert_eq!(call.key(&objects).unwrap(), key(sum));
    }
}
