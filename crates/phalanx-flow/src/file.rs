//! `flow.toml`: a workflow of commands as a file.
//!
//! ```toml
//! name = "mnist"
//!
//! [inputs]                                        # of the workflow; each run may set them
//! epochs = 10                                     # an int with a default
//! rate = { type = "float", default = 0.1 }
//! images = { type = "folder", default = "data" }  # a path next to this file
//! seed = { type = "int" }                         # no default: --input seed=1
//!
//! [inputs.optimizer]                              # a group of inputs: --input optimizer.momentum=0.8
//! momentum = 0.9
//! decay = 0.0
//!
//! [tasks.train]
//! command = ["python3", "{inputs.program}", "--epochs", "{inputs.epochs}", "--out", "{outputs.model}"]
//! env = { OMP_NUM_THREADS = "2" }                 # values may have placeholders
//! secrets = ["WANDB_API_KEY"]                     # variables; see below
//! image = "pytorch/pytorch:2.9"                   # for exports only
//! version = "2"                                   # of the code; default "1"
//! cache = "1.2"                                   # cache version; without it: no cache
//! retries = { times = 2, backoff = "10s" }        # or: retries = 2
//! timeout = "2h"                                  # of each attempt
//! unrecoverable = [2]                             # exit codes that are not retried
//! after = []                                      # tasks that are done before, in addition to those below
//! requests = { cpus = 2, memory = "4GiB", gpus = 0, storage = "1GiB", ephemeral_storage = "1GiB" }
//! limits = { memory = "8GiB" }
//!
//! [tasks.train.when.SANDBOX]                      # replaces keys if the variable SANDBOX is set and not empty
//! limits = { memory = "4GiB" }
//!
//! [tasks.train.inputs]
//! program = { type = "file", value = "train.py" } # a constant: a path next to this file
//! epochs = "{inputs.epochs}"                      # an input of the workflow
//! seed = "{inputs.seed}"
//! kind = "cnn"                                    # a constant of type string
//! opt = "{inputs.optimizer}"                      # the group: {inputs.opt.decay}, INPUT_OPT_DECAY
//! momentum = "{inputs.optimizer.momentum}"        # one of it
//!
//! [tasks.train.outputs]
//! model = "file"
//! accuracies = "list[float]"
//!
//! [tasks.evaluate]
//! shell = '''./evaluate "$INPUT_MODEL" > "$OUTPUT_ACCURACY"'''
//! inputs = { model = "{train.model}" }            # hence it runs after train
//! outputs = { accuracy = "float" }
//!
//! [outputs]                                       # of the workflow
//! model = "{train.model}"
//! accuracy = "{evaluate.accuracy}"
//! ```
//!
//! A command runs in an empty folder of its own for each attempt. It gets each input as the
//! placeholder `{inputs.NAME}` and the variable `INPUT_NAME`: a value as text (strings as they
//! are, others as JSON), a file or folder as its path, which it must not change. It writes each
//! output to the path `{outputs.NAME}`, also `OUTPUT_NAME`: a file, a folder, a string as text,
//! another value as JSON. `{folder}` and `FLOW_FOLDER` are the folder of `flow.toml`.
//! The folder of the running program is at the end of `PATH`.
//!
//! A secret is a variable of the task's processes, which no other task gets. Its value is that of the same variable where
//! `flow run` is started, else the content of the file whose path is in `NAME_FILE`. It is not stored; in the task's log it is
//! `***`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_base::error::malformed;
use phalanx_base::error::{Error, Result};
use phalanx_base::files::read_regular;
use serde_json::{Map, Value as Json};
use toml::de::{DeTable, DeValue};

use crate::check::{Problem, check};
use crate::spec::{
    Action, Input, Resources, Retries, Source, Task, TaskInput, Type, Value, Workflow, parse_size,
};

/// The name of the file that commands read by default.
pub const FLOW_FILE: &str = "flow.toml";

/// Largest `flow.toml`.
const MOST_BYTES: u64 = 4 << 20;

impl Workflow {
    /// Reads and checks a `flow.toml`.
    ///
    /// # Errors
    ///
    /// Usage, naming the file, the line, the task and the key; those of reading.
    pub fn from_file(path: &Path) -> Result<Workflow> {
        let bytes = read_regular(path, MOST_BYTES).map_err(|error| {
            error.into_usage().note(
                "try",
                format!("`phalanx flow run FILE`, or a folder with {FLOW_FILE}"),
            )
        })?;
        let shown = path.display();
        let text = String::from_utf8(bytes)
            .map_err(|_| Error::usage(format!("{shown} is not text in UTF-8")))?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        let folder = std::path::absolute(folder.unwrap_or(Path::new(".")))?;
        Workflow::from_toml(&text, &folder, &shown.to_string())
    }

    /// Reads and checks the text of a `flow.toml`. Relative paths refer to `folder`; `file` is
    /// its name in errors.
    ///
    /// # Errors
    ///
    /// Usage, naming the file, the line, the task and the key.
    pub fn from_toml(text: &str, folder: &Path, file: &str) -> Result<Workflow> {
        let line_at = |offset: usize| text[..offset.min(text.len())].matches('\n').count() + 1;
        let wrong = |error: toml::de::Error| malformed(file, text, error.span(), error.message());
        let spans = DeTable::parse(text).map_err(wrong)?;
        let values: Map<String, Json> = toml::from_str(text).map_err(wrong)?;
        let read = workflow(values, folder).and_then(|mut workflow| {
            check(&mut workflow)?;
            Ok(workflow)
        });
        read.map_err(|problem| {
            let line = line_at(offset_of(spans.get_ref(), &problem.path).unwrap_or(0));
            Error::usage(format!(
                "{file}:{line}: {}: {}",
                problem.place(),
                problem.message
            ))
        })
    }
}

/// Where the deepest key of `path` that exists begins.
fn offset_of(table: &DeTable<'_>, path: &[String]) -> Option<usize> {
    let (first, rest) = path.split_first()?;
    let (key, value) = table.iter().find(|(key, _)| key.get_ref() == first)?;
    let deeper = match value.get_ref() {
        DeValue::Table(table) => offset_of(table, rest),
        _ => None,
    };
    Some(deeper.unwrap_or(key.span().start))
}

/// The path of `key` in the table at `path`.
fn below(path: &[String], key: &str) -> Vec<String> {
    [path, &[key.to_owned()]].concat()
}

/// A table whose keys are taken one by one; what is left over is unknown.
struct Keys {
    path: Vec<String>,
    map: Map<String, Json>,
}

type Read<T> = std::result::Result<T, Problem>;

impl Keys {
    fn new(value: Json, path: Vec<String>) -> Read<Keys> {
        match value {
            Json::Object(map) => Ok(Keys { path, map }),
            other => Err(Problem {
                path,
                message: format!("a table is expected, not {other}"),
            }),
        }
    }

    fn problem<T>(&self, key: &str, message: impl Into<String>) -> Read<T> {
        Err(Problem {
            path: below(&self.path, key),
            message: message.into(),
        })
    }

    /// The value of `key` through `read`, which says what it expects otherwise.
    fn take<T>(
        &mut self,
        key: &str,
        read: impl FnOnce(Json) -> std::result::Result<T, String>,
    ) -> Read<Option<T>> {
        match self.map.remove(key).map(read).transpose() {
            Ok(value) => Ok(value),
            Err(message) => self.problem(key, message),
        }
    }

    fn table(&mut self, key: &str) -> Read<Keys> {
        let value = self.map.remove(key).unwrap_or_else(|| Map::new().into());
        Keys::new(value, below(&self.path, key))
    }

    /// Every entry through `read`.
    fn entries<T>(self, read: impl Fn(Json, Vec<String>) -> Read<T>) -> Read<BTreeMap<String, T>> {
        let path = self.path;
        let entry = |(key, value): (String, Json)| {
            let read = read(value, below(&path, &key))?;
            Ok((key, read))
        };
        self.map.into_iter().map(entry).collect()
    }

    fn finish(self, known: &str) -> Read<()> {
        match self.map.keys().next() {
            Some(key) => self.problem(key, format!("unknown key; the keys here are {known}")),
            None => Ok(()),
        }
    }
}

fn text(value: Json) -> std::result::Result<String, String> {
    match value {
        Json::String(text) => Ok(text),
        other => Err(format!("text in quotes is expected, not {other}")),
    }
}

fn texts(value: Json) -> std::result::Result<Vec<String>, String> {
    match value {
        Json::Array(items) => items.into_iter().map(text).collect(),
        other => Err(format!("a list of texts is expected, not {other}")),
    }
}

fn count(value: Json) -> std::result::Result<u32, String> {
    let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
    number.ok_or_else(|| format!("a whole number from 0 up is expected, not {value}"))
}

fn size(value: Json) -> std::result::Result<u64, String> {
    match value {
        Json::String(text) => parse_size(&text),
        other => (other.as_u64())
            .ok_or_else(|| format!("a size such as \"4GiB\" is expected, not {other}")),
    }
}

fn duration(value: Json) -> std::result::Result<Duration, String> {
    let text = text(value).map_err(|_| "a duration such as \"90s\" or \"2h\" is expected")?;
    humantime::parse_duration(&text)
        .map_err(|error| format!("{text:?} is not a duration such as \"90s\" or \"2h\": {error}"))
}

fn kind(value: Json) -> std::result::Result<Type, String> {
    text(value)?.parse()
}

fn source(value: Json) -> std::result::Result<Source, String> {
    let text = text(value)?;
    Source::parse(&text).ok_or_else(|| {
        format!("{text:?} is not of the form \"{{inputs.NAME}}\" or \"{{TASK.OUTPUT}}\"")
    })
}

fn workflow(values: Map<String, Json>, folder: &Path) -> Read<Workflow> {
    let mut keys = Keys::new(Json::Object(values), Vec::new())?;
    let Some(name) = keys.take("name", text)? else {
        return keys.problem("name", "missing: a workflow has a name");
    };
    let inputs = workflow_inputs(keys.table("inputs")?)?;
    let outputs = keys
        .table("outputs")?
        .entries(|value, path| source(value).map_err(|message| Problem { path, message }))?;
    // Types of outputs, to infer those of inputs.
    let tables = keys.table("tasks")?.map;
    keys.finish("name, inputs, tasks, outputs")?;
    let mut tasks = Vec::new();
    let mut open = Vec::new();
    for (name, value) in tables {
        let (task, inputs) = task(&name, value)?;
        tasks.push(task);
        open.push(inputs);
    }
    let mut workflow = Workflow {
        name,
        folder: PathBuf::from(folder),
        inputs,
        tasks,
        outputs,
    };
    for (index, inputs) in open.into_iter().enumerate() {
        workflow.tasks[index].inputs = with_groups(inputs, &workflow)?
            .entries(|value, path| task_input(value, path, &workflow))?;
    }
    Ok(workflow)
}

/// Inputs, and groups of inputs: tables without `type` and `default`.
fn workflow_inputs(keys: Keys) -> Read<BTreeMap<String, Input>> {
    let mut inputs = BTreeMap::new();
    for (name, value) in keys.map {
        let path = below(&keys.path, &name);
        let table = value.as_object().filter(|table| !table.is_empty());
        match table.is_some_and(|t| !t.contains_key("type") && !t.contains_key("default")) {
            true => {
                let group = Keys::new(value, path)?.entries(workflow_input)?;
                inputs.extend((group.into_iter()).map(|(n, input)| (format!("{name}.{n}"), input)));
            }
            false => {
                inputs.insert(name, workflow_input(value, path)?);
            }
        }
    }
    Ok(inputs)
}

/// A task's `inputs` with an entry `NAME.X` for each input `GROUP.X` in place of
/// `NAME = "{inputs.GROUP}"`.
fn with_groups(mut inputs: Keys, workflow: &Workflow) -> Read<Keys> {
    for (name, value) in std::mem::take(&mut inputs.map) {
        if name.contains('.') {
            return inputs.problem(&name, "a name has no '.'");
        }
        let group = match value.as_str().and_then(Source::parse) {
            Some(Source::Input(group)) => format!("{group}."),
            _ => {
                inputs.map.insert(name, value);
                continue;
            }
        };
        let own = workflow
            .inputs
            .keys()
            .filter_map(|input| input.strip_prefix(&group));
        let mut own = own.peekable();
        match own.peek() {
            None => inputs.map.extend([(name, value)]),
            Some(_) => inputs.map.extend(own.map(|own| {
                let source = format!("{{inputs.{group}{own}}}");
                (format!("{name}.{own}"), source.into())
            })),
        }
    }
    Ok(inputs)
}

fn workflow_input(value: Json, path: Vec<String>) -> Read<Input> {
    if !value.is_object() {
        return match Type::of(&value) {
            Some(kind) => Ok(Input {
                kind,
                default: Some(value),
            }),
            None => Err(no_type(path)),
        };
    }
    let mut keys = Keys::new(value, path)?;
    let Some(kind) = keys.take("type", kind)? else {
        return keys.problem("type", "missing");
    };
    let default = keys.take("default", Ok)?;
    keys.finish("type, default")?;
    Ok(Input { kind, default })
}

fn no_type(path: Vec<String>) -> Problem {
    Problem {
        path,
        message: "the type is not clear; write { type = \"...\", ... }".to_owned(),
    }
}

/// A task without its inputs, whose types may depend on other tasks.
fn task(name: &str, value: Json) -> Read<(Task, Keys)> {
    let mut keys = Keys::new(value, vec!["tasks".to_owned(), name.to_owned()])?;
    let when = keys.table("when")?;
    for (variable, changes) in when.map {
        let changes = Keys::new(changes, below(&when.path, &variable))?;
        if std::env::var_os(&variable).is_some_and(|value| !value.is_empty()) {
            keys.map.extend(changes.map);
        }
    }
    let command = keys.take("command", texts)?;
    let action = match (command, keys.take("shell", text)?) {
        (Some(argv), None) => Action::Command(argv),
        (None, Some(text)) => Action::Shell(text),
        (None, None) => return keys.problem("command", "missing: a task has `command` or `shell`"),
        (Some(_), Some(_)) => {
            return keys.problem("shell", "a task has `command` or `shell`, not both");
        }
    };
    let mut task = Task::new(name, action);
    if let Some(version) = keys.take("version", text)? {
        task.version = version;
    }
    task.image = keys.take("image", text)?;
    task.cache = keys.take("cache", text)?;
    task.timeout = keys.take("timeout", duration)?;
    task.after = keys.take("after", texts)?.unwrap_or_default();
    if let Some(codes) = keys.take("unrecoverable", |value| {
        serde_json::from_value(value).map_err(|_| "a list of exit codes is expected".to_owned())
    })? {
        task.unrecoverable = codes;
    }
    task.env = keys
        .table("env")?
        .entries(|value, path| text(value).map_err(|message| Problem { path, message }))?;
    task.secrets = keys.take("secrets", texts)?.unwrap_or_default();
    if keys.map.get("retries").is_some_and(Json::is_object) {
        let mut own = keys.table("retries")?;
        task.retries.times = own.take("times", count)?.unwrap_or(0);
        if let Some(backoff) = own.take("backoff", duration)? {
            task.retries.backoff = backoff;
        }
        own.finish("times, backoff")?;
    } else {
        let times = keys.take("retries", count)?.unwrap_or(0);
        task.retries = Retries {
            times,
            ..Retries::default()
        };
    }
    task.requests = resources(keys.table("requests")?)?;
    task.limits = resources(keys.table("limits")?)?;
    task.outputs = keys
        .table("outputs")?
        .entries(|value, path| kind(value).map_err(|message| Problem { path, message }))?;
    let inputs = keys.table("inputs")?;
    keys.finish("command, shell, env, secrets, image, version, cache, retries, timeout, unrecoverable, after, requests, limits, when, inputs, outputs")?;
    Ok((task, inputs))
}

fn resources(mut keys: Keys) -> Read<Resources> {
    let resources = Resources {
        cpus: keys.take("cpus", count)?,
        memory: keys.take("memory", size)?,
        gpus: keys.take("gpus", count)?,
        storage: keys.take("storage", size)?,
        ephemeral_storage: keys.take("ephemeral_storage", size)?,
    };
    keys.finish("cpus, memory, gpus, storage, ephemeral_storage")?;
    Ok(resources)
}

/// `"{TASK.OUTPUT}"`, a constant, or a table `{ type, value }` with either as its value.
fn task_input(value: Json, path: Vec<String>, workflow: &Workflow) -> Read<TaskInput> {
    let is_table = value
        .as_object()
        .is_some_and(|map| map.contains_key("type"));
    let (value, declared, path) = match is_table {
        false => (value, None, path),
        true => {
            let mut keys = Keys::new(value, path)?;
            let kind = keys.take("type", kind)?;
            let Some(value) = keys.take("value", Ok)? else {
                return keys.problem("value", "missing");
            };
            let path = keys.path.clone();
            keys.finish("type, value")?;
            (value, kind, path)
        }
    };
    match value.as_str().and_then(Source::parse) {
        Some(source) => Ok(TaskInput {
            // Of an unknown source any type does: the check says that it is unknown.
            kind: declared.or(workflow.type_of(&source)).unwrap_or(Type::Json),
            value: Value::From(source),
        }),
        None => Ok(TaskInput {
            kind: declared.or(Type::of(&value)).ok_or_else(|| no_type(path))?,
            value: Value::Constant(value),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example at the top of this file.
    fn example() -> String {
        let own = include_str!("file.rs").lines();
        let block = own.skip_while(|line| *line != "//! ```toml").skip(1);
        let block = block.take_while(|line| *line != "//! ```");
        block
            .map(|line| line.trim_start_matches("//!").trim_start().to_owned() + "\n")
            .collect()
    }

    fn read(text: &str) -> Result<Workflow> {
        Workflow::from_toml(text, Path::new("/w"), "flow.toml")
    }

    fn error(text: &str) -> String {
        read(text).unwrap_err().chain()
    }

    #[test]
    fn the_documented_example_is_read() {
        let flow = read(&example()).unwrap();
        assert_eq!(flow.name, "mnist");
        assert_eq!(flow.inputs["images"].kind, Type::Folder);
        assert_eq!(flow.inputs["seed"].default, None);
        let names: Vec<&str> = flow.tasks.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(
            names,
            ["train", "evaluate"],
            "in the order in which they can run"
        );
        let train = &flow.tasks[0];
        assert_eq!(train.retries.times, 2);
        assert_eq!(train.timeout, Some(Duration::from_secs(7200)));
        assert_eq!(train.requests.memory, Some(4 << 30));
        assert_eq!(train.inputs["kind"].kind, Type::String);
        assert_eq!(train.inputs["program"].kind, Type::File);
        let decay = Value::From(Source::Input("optimizer.decay".into()));
        assert_eq!(train.inputs["opt.decay"].value, decay);
        assert_eq!(train.inputs["opt.momentum"].kind, Type::Float);
        assert_eq!(train.inputs["momentum"].kind, Type::Float);
        assert!(!train.inputs.contains_key("opt"));
        let evaluate = &flow.tasks[1];
        assert_eq!(
            evaluate.inputs["model"].kind,
            Type::File,
            "that of train.model"
        );
        assert_eq!(Vec::from_iter(evaluate.dependencies()), ["train"]);
        assert_eq!(evaluate.argv().unwrap()[..3], ["sh", "-eu", "-c"]);
    }

    #[test]
    fn a_script_may_use_variables_of_the_shell() {
        let flow = "name = \"w\"\n[tasks.a]\nshell = 'echo ${folder} ${x}'\n";
        assert!(read(flow).is_ok());
        assert!(error(&flow.replace("${folder}", "{folder}")).contains("no placeholders"));
    }

    #[test]
    fn keys_are_replaced_where_a_variable_is_set() {
        let with = |variable: &str| {
            let flow = format!(
                "name = \"w\"\n[tasks.a]\ncommand = [\"x\"]\nretries = 2\ntimeout = \"1s\"\n\
                 [tasks.a.when.{variable}]\ntimeout = \"9s\"\n"
            );
            let task = read(&flow).unwrap().tasks.remove(0);
            (task.retries.times, task.timeout.unwrap().as_secs())
        };
        // cargo sets the first one.
        assert_eq!(with("CARGO_MANIFEST_DIR"), (2, 9));
        assert_eq!(with("NO_SUCH_VARIABLE"), (2, 1));
    }

    #[test]
    fn a_workflow_survives_json() {
        let flow = read(&example()).unwrap();
        let json = serde_json::to_string(&flow).unwrap();
        assert_eq!(serde_json::from_str::<Workflow>(&json).unwrap(), flow);
    }

    #[test]
    fn errors_name_line_task_and_key() {
        let with = |lines: &str| format!("name = \"w\"\n[tasks.a]\ncommand = [\"x\"]\n{lines}\n");
        for (text, want) in [
            (
                "name = 1".to_owned(),
                "flow.toml:1: key \"name\": text in quotes",
            ),
            (
                "name = \"w\"\nname = \"v\"".into(),
                "flow.toml:2: duplicate key",
            ),
            ("a =".into(), "flow.toml:1: "),
            (
                "name = \"w\"".into(),
                "key \"tasks\": a workflow needs a task",
            ),
            (
                with("retrys = 2"),
                "flow.toml:4: task \"a\", key \"retrys\": unknown key",
            ),
            (
                with("retries = -2"),
                "flow.toml:4: task \"a\", key \"retries\": a whole number",
            ),
            (
                with("timeout = \"soon\""),
                "flow.toml:4: task \"a\", key \"timeout\": \"soon\" is not a duration",
            ),
            (
                with("limits = { memory = \"x\" }"),
                "key \"limits.memory\": \"x\" is not a size",
            ),
            (
                with("requests = { cpus = 2 }\nlimits = { cpus = 1 }"),
                "flow.toml:5: task \"a\", key \"limits.cpus\": the limit 1 is below",
            ),
            (
                with("requests.ephemeral_storage = \"2M\"\nlimits.ephemeral_storage = \"1M\""),
                "key \"limits.ephemeral_storage\": the limit 1000000 is below",
            ),
            (with("shell = \"x\""), "not both"),
            (
                with("[tasks.a.inputs]\nx = \"{b.y}\""),
                "flow.toml:5: task \"a\", key \"inputs.x\": there is no task \"b\"; there are: a",
            ),
            (
                with("[tasks.a.inputs]\nx = \"{inputs.y}\""),
                "the workflow has no input \"y\"; there are: none",
            ),
            (
                with("[tasks.a.inputs]\nx = { type = \"int\", value = \"no\" }"),
                "flow.toml:5: task \"a\", key \"inputs.x\": \"no\" is not of type int",
            ),
            (
                with("[tasks.a.inputs]\nx = 1\nX = 2"),
                "upper and lower case",
            ),
            (
                with("[tasks.a.outputs]\ny = \"path\""),
                "unknown type \"path\"",
            ),
            (
                with("env = { A = \"{inputs.q}\" }"),
                "key \"env.A\": the task has no input \"q\"",
            ),
            (
                with("secrets = [\"A\"]\nenv = { A = \"x\" }"),
                "flow.toml:4: task \"a\", key \"secrets\": \"A\" is not a name, ",
            ),
            (
                with("secrets = [\"FLOW_RUN\"]"),
                "\"FLOW_RUN\" is not a name, is the engine's",
            ),
            (with("secrets = \"A\""), "a list of texts is expected"),
            (
                with("after = [\"a\"]"),
                "tasks depend on each other: a needs a",
            ),
            (
                with("[outputs]\no = \"model\""),
                "flow.toml:5: key \"outputs.o\": \"model\" is not of the form",
            ),
            (
                with("[tasks.a.inputs]\n\"g.x\" = 1"),
                "flow.toml:5: task \"a\", key \"inputs.g.x\": a name has no '.'",
            ),
            (
                with("[inputs.g]\nx = 1\n[tasks.a.inputs]\ng = \"{inputs.g}\"\ng_x = 1"),
                "key \"inputs.g_x\": another name differs in upper and lower case or in '.'",
            ),
            (
                with("[inputs.g]\nx = { type = \"file\" }"),
                "key \"inputs.g.x\": a file or folder cannot be in a group",
            ),
            (
                with("[inputs.g]\nx = {}"),
                "flow.toml:5: key \"inputs.g.x.type\": missing",
            ),
            (
                with("[inputs.g]\nx = 1\n[outputs]\no = \"{inputs.g}\""),
                "the workflow has no input \"g\"; there are: g.x",
            ),
            (
                with("[inputs]\nn = { type = \"int\", default = 1.5 }"),
                "key \"inputs.n\": the default 1.5 is not of type int",
            ),
            (
                with("outputs.y = \"float\"\n[tasks.b]\nshell = \"echo {inputs.y}\""),
                "task \"b\", key \"shell\": a script has no placeholders",
            ),
            (
                with(
                    "outputs.y = \"float\"\n[tasks.b]\nshell = \"\"\ninputs.y = { type = \"int\", value = \"{a.y}\" }",
                ),
                "{a.y} has type float, but int is expected",
            ),
        ] {
            let said = error(&text);
            assert!(said.contains(want), "{text}\n{said}\n{want}");
        }
    }

    #[test]
    fn a_cycle_is_named() {
        let text = "name = \"w\"\n[tasks.a]\nshell = \"\"\nafter = [\"c\"]\n[tasks.b]\nshell = \"\"\nafter = [\"a\"]\n[tasks.c]\nshell = \"\"\nafter = [\"b\"]\n[tasks.d]\nshell = \"\"\nafter = [\"c\"]\n";
        let said = error(text);
        assert!(said.contains("a needs c needs b needs a"), "{said}");
        assert!(said.starts_with("flow.toml:2: "), "{said}");
    }
}
