//! Workflows of Rust functions.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_base::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::check::check;
use crate::child::work_dir;
use crate::objects::{cannot, copy_all};
use crate::probe::fields_of;
use crate::spec::{
    Action, Input, Resources, Retries, Source, Task, TaskInput, Type, Value, Workflow,
};

/// A file as an input or output of a task's function: the path where it is, or was written. An
/// output below the task's work folder is moved from there, any other one is copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename = "phalanx_flow::File")]
pub struct File(pub PathBuf);

/// A folder as an input or output of a task's function: the path where it is, or was written. An
/// output below the task's work folder is moved from there, any other one is copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename = "phalanx_flow::Folder")]
pub struct Folder(pub PathBuf);

type Function = Box<dyn Fn(Map<String, Json>, &Path) -> Result<()>>;

/// A workflow of Rust functions, built step by step; [`main`](crate::main) runs it.
///
/// A function takes a struct with its inputs and returns one with its outputs. Field names are
/// the names, and field types the types: integers, floats, `bool`, `String`, vectors of these,
/// [`File`], [`Folder`]; all others are JSON. It runs in a process of its own, in an empty
/// folder. An error of kind `Usage` is not retried, others are.
///
/// ```no_run
/// use std::process::ExitCode;
/// use phalanx_flow::{File, Flow, Result};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Deserialize)]
/// struct Settings {
///     epochs: i64,
/// }
///
/// #[derive(Serialize, Deserialize)]
/// struct Trained {
///     model: File,
///     accuracies: Vec<f64>,
/// }
///
/// fn train(settings: Settings) -> Result<Trained> {
///     std::fs::write("model.bin", "weights")?;
///     Ok(Trained {
///         model: File("model.bin".into()),
///         accuracies: vec![0.9; settings.epochs as usize],
///     })
/// }
///
/// fn main() -> ExitCode {
///     let flow = Flow::new("mnist")
///         .input("epochs", 10)
///         .task("train", train, |task| task.cache("1.2").retries(2))
///         .output("model", "{train.model}");
///     phalanx_flow::main(flow)
/// }
/// ```
pub struct Flow {
    pub(crate) workflow: Workflow,
    functions: BTreeMap<String, Function>,
    problem: Option<String>,
}

/// Settings of one task of a [`Flow`].
#[derive(Debug)]
pub struct TaskSettings {
    task: Task,
    problem: Option<String>,
}

impl TaskSettings {
    /// Binds the input `name` to `source`: `{inputs.NAME}` or `{TASK.OUTPUT}`. An input that is
    /// not bound is the workflow's of the same name.
    pub fn bind(mut self, name: &str, source: &str) -> Self {
        match Source::parse(source) {
            Some(source) => self.set(name, Value::From(source)),
            None => self.fail(format!(
                "{source:?} is not of the form \"{{inputs.NAME}}\" or \"{{TASK.OUTPUT}}\""
            )),
        }
        self
    }

    /// Sets the input `name` to a constant; of a file or folder, its path.
    pub fn value(mut self, name: &str, value: impl Into<Json>) -> Self {
        self.set(name, Value::Constant(value.into()));
        self
    }

    fn set(&mut self, name: &str, value: Value) {
        match self.task.inputs.get_mut(name) {
            Some(input) => input.value = value,
            None => self.fail(format!("its function has no input {name:?}")),
        }
    }

    fn fail(&mut self, why: String) {
        let name = &self.task.name;
        self.problem
            .get_or_insert_with(|| format!("task {name:?}: {why}"));
    }

    /// Caches results under this version. Another version, and another build of the program, do not
    /// use them.
    pub fn cache(mut self, version: &str) -> Self {
        self.task.cache = Some(version.to_owned());
        self
    }

    /// Gives it the secret `name`, a variable of the environment: its value there, else the content of the file whose path is in
    /// `NAME_FILE`. It is not stored, no other task gets it, and in the task's log it is `***`.
    pub fn secret(mut self, name: &str) -> Self {
        self.task.secrets.push(name.to_owned());
        self
    }

    /// Sets the version of the function's code (default 1).
    pub fn version(mut self, version: &str) -> Self {
        self.task.version = version.to_owned();
        self
    }

    /// Tries again up to `times` times, with pauses of 1, 2, 4 ... seconds.
    pub fn retries(self, times: u32) -> Self {
        self.retries_after(times, Retries::default().backoff)
    }

    /// As [`retries`](Self::retries), with another first pause.
    pub fn retries_after(mut self, times: u32, backoff: Duration) -> Self {
        self.task.retries = Retries { times, backoff };
        self
    }

    /// Limits each attempt's time.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.task.timeout = Some(limit);
        self
    }

    /// Sets the resources that must be free before it starts.
    pub fn requests(mut self, resources: Resources) -> Self {
        self.task.requests = resources;
        self
    }

    /// Sets the resources that it may use at most.
    pub fn limits(mut self, resources: Resources) -> Self {
        self.task.limits = resources;
        self
    }

    /// Waits for the end of task `name`, in addition to those of its inputs.
    pub fn after(mut self, name: &str) -> Self {
        self.task.after.push(name.to_owned());
        self
    }
}

impl Flow {
    /// An empty workflow. Relative paths refer to the current folder.
    pub fn new(name: &str) -> Flow {
        Flow {
            workflow: Workflow {
                name: name.to_owned(),
                folder: std::env::current_dir().unwrap_or_default(),
                inputs: BTreeMap::new(),
                tasks: Vec::new(),
                outputs: BTreeMap::new(),
            },
            functions: BTreeMap::new(),
            problem: None,
        }
    }

    fn fail(&mut self, problem: String) {
        self.problem.get_or_insert(problem);
    }

    /// Adds an input of the workflow with a default, which decides its type.
    pub fn input(mut self, name: &str, default: impl Into<Json>) -> Flow {
        let default = default.into();
        match Type::of(&default) {
            Some(kind) => {
                let default = Some(default);
                self.workflow
                    .inputs
                    .insert(name.to_owned(), Input { kind, default });
            }
            None => self.fail(format!("input {name:?}: null has no type")),
        }
        self
    }

    /// Adds an input of the workflow that has a type; without a `default` each run must set it.
    pub fn typed_input(mut self, name: &str, kind: Type, default: Option<Json>) -> Flow {
        self.workflow
            .inputs
            .insert(name.to_owned(), Input { kind, default });
        self
    }

    /// Adds a task that calls `function`.
    pub fn task<I, O>(
        mut self,
        name: &str,
        function: impl Fn(I) -> Result<O> + 'static,
        settings: impl FnOnce(TaskSettings) -> TaskSettings,
    ) -> Flow
    where
        I: DeserializeOwned,
        O: Serialize + DeserializeOwned,
    {
        let mut task = Task::new(name, Action::Function);
        match (fields_of::<I>(), fields_of::<O>()) {
            (Ok(inputs), Ok(outputs)) => {
                for (field, kind) in inputs {
                    let value = Value::From(Source::Input(field.to_owned()));
                    task.inputs
                        .insert(field.to_owned(), TaskInput { kind, value });
                }
                let outputs = outputs.into_iter();
                task.outputs = outputs
                    .map(|(field, kind)| (field.to_owned(), kind))
                    .collect();
            }
            (Err(why), _) => self.fail(format!("task {name:?}: the type of its inputs {why}")),
            (_, Err(why)) => self.fail(format!("task {name:?}: the type of its outputs {why}")),
        }
        let kinds = task.outputs.clone();
        let set = settings(TaskSettings {
            task,
            problem: None,
        });
        if let Some(problem) = set.problem {
            self.fail(problem);
        }
        self.workflow.tasks.push(set.task);
        let call = move |inputs: Map<String, Json>, outputs: &Path| {
            let inputs = match inputs.is_empty() {
                // For `()`.
                true => serde_json::from_value(Json::Null)
                    .or_else(|_| serde_json::from_value(Map::new().into())),
                false => serde_json::from_value(inputs.into()),
            };
            let inputs =
                inputs.map_err(|error| Error::usage(format!("the inputs do not fit: {error}")))?;
            let value = serde_json::to_value(function(inputs)?)
                .map_err(|error| Error::usage(format!("the outputs are not JSON: {error}")))?;
            write_outputs(outputs, &kinds, &value)
        };
        self.functions.insert(name.to_owned(), Box::new(call));
        self
    }

    /// Adds an output of the workflow: `{TASK.OUTPUT}` or `{inputs.NAME}`.
    pub fn output(mut self, name: &str, source: &str) -> Flow {
        match Source::parse(source) {
            Some(source) => {
                self.workflow.outputs.insert(name.to_owned(), source);
            }
            None => self.fail(format!(
                "output {name:?}: {source:?} is not of the form \"{{TASK.OUTPUT}}\""
            )),
        }
        self
    }

    /// The workflow, checked.
    ///
    /// # Errors
    ///
    /// Usage, naming the task and the key.
    pub fn workflow(&self) -> Result<Workflow> {
        if let Some(problem) = &self.problem {
            return Err(Error::usage(problem.clone()));
        }
        let mut workflow = self.workflow.clone();
        check(&mut workflow)
            .map_err(|problem| Error::usage(format!("{}: {}", problem.place(), problem.message)))?;
        Ok(workflow)
    }

    fn call(&self, task: &str, inputs: Map<String, Json>, outputs: &Path) -> Result<()> {
        match self.functions.get(task) {
            Some(function) => function(inputs, outputs),
            None => Err(Error::usage(format!("this program has no task {task:?}"))),
        }
    }
}

/// Writes what a function returned to the folder `outputs` of its attempt.
fn write_outputs(outputs: &Path, kinds: &BTreeMap<String, Type>, value: &Json) -> Result<()> {
    let mut paths = BTreeMap::new();
    for (name, kind) in kinds {
        match (kind, &value[name]) {
            (Type::File | Type::Folder, Json::String(from)) => {
                let from = fs::canonicalize(from)
                    .map_err(|error| cannot("read output", from.as_ref(), error).into_usage())?;
                paths.insert(name, from);
            }
            (Type::String, Json::String(text)) => write(&outputs.join(name), text)?,
            (_, value) => write(&outputs.join(name), &value.to_string())?,
        }
    }
    let work = fs::canonicalize(work_dir(outputs.parent().unwrap_or(outputs)))?;
    for (name, from) in &paths {
        let overlaps = |other: &PathBuf| other.starts_with(from) || from.starts_with(other);
        let is_part = paths.iter().any(|(n, other)| n != name && overlaps(other));
        // Only what the task has made itself is moved.
        let is_own = from.starts_with(&work) && *from != work && !is_part;
        let path = outputs.join(name);
        if !is_own || fs::rename(from, &path).is_err() {
            copy_all(from, &path).map_err(|error| {
                let is_wrong = error.kind() == std::io::ErrorKind::InvalidInput;
                let error = cannot("copy output", from, error);
                if is_wrong { error.into_usage() } else { error }
            })?;
        }
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|error| cannot("write", path, error))
}

/// The process of a task's attempt, and helpers of the launcher.
pub(crate) fn helper(flow: Option<&Flow>) -> Option<Result<()>> {
    if let Some(outcome) = phalanx_process::run_helper(|_| || {}) {
        return Some(outcome);
    }
    match flow {
        Some(flow) => crate::child::run(Some(&|task, inputs, outputs| {
            flow.call(task, inputs, outputs)
        })),
        None => crate::child::run(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct In {
        epochs: i64,
        scale: f64,
    }

    #[derive(Serialize, Deserialize)]
    struct Out {
        losses: Vec<f64>,
        model: File,
    }

    fn train(inputs: In) -> Result<Out> {
        Ok(Out {
            losses: vec![inputs.scale; inputs.epochs as usize],
            model: File("model".into()),
        })
    }

    #[test]
    fn types_come_from_the_function() {
        let flow = Flow::new("w")
            .input("epochs", 3)
            .task("train", train, |task| {
                task.value("scale", 1).cache("1").retries(2)
            })
            .output("losses", "{train.losses}");
        let workflow = flow.workflow().unwrap();
        let task = &workflow.tasks[0];
        assert_eq!(task.inputs["epochs"].kind, Type::Int);
        assert_eq!(task.outputs["model"], Type::File);
        assert_eq!(task.outputs["losses"].to_string(), "list[float]");
        assert_eq!(task.retries.times, 2);
    }

    #[test]
    fn outputs_are_moved_from_the_work_folder_and_copied_from_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let attempt = dir.path().join("attempt");
        let work = work_dir(&attempt);
        for folder in ["attempt/work/own/sub", "attempt/inputs", "data", "object"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        let users = dir.path().join("data/train.csv");
        fs::write(&users, "1").unwrap();
        fs::write(work.join("own/sub/model"), "2").unwrap();
        fs::write(work.join("both"), "3").unwrap();
        std::os::unix::fs::symlink(&users, work.join("link")).unwrap();
        let input = attempt.join("inputs/data");
        std::os::unix::fs::symlink(dir.path().join("object"), &input).unwrap();
        fs::write(dir.path().join("object/x"), "4").unwrap();
        let value = serde_json::json!({
            "users": users, "folder": dir.path().join("data"), "link": work.join("link"),
            "input": input, "own": work.join("own"), "one": work.join("both"),
            "two": work.join("both"), "losses": [0.5],
        });
        let kinds = [
            ("users", Type::File),
            ("folder", Type::Folder),
            ("link", Type::File),
            ("input", Type::Folder),
            ("own", Type::Folder),
            ("one", Type::File),
            ("two", Type::File),
            ("losses", Type::Json),
        ];
        let kinds = kinds.map(|(name, kind)| (name.to_owned(), kind)).into();
        let outputs = attempt.join("outputs");
        fs::create_dir(&outputs).unwrap();
        write_outputs(&outputs, &kinds, &value).unwrap();
        let read = |path: &str| {
            let path = outputs.join(path);
            assert!(!path.is_symlink());
            fs::read_to_string(path).unwrap()
        };
        for (path, text) in [
            ("users", "1"),
            ("folder/train.csv", "1"),
            ("link", "1"),
            ("input/x", "4"),
            ("own/sub/model", "2"),
            ("one", "3"),
            ("two", "3"),
            ("losses", "[0.5]"),
        ] {
            assert_eq!(read(path), text, "{path}");
        }
        // What is the user's, or the store's, is where it was.
        assert_eq!(fs::read_to_string(&users).unwrap(), "1");
        assert!(dir.path().join("object/x").exists());
        assert!(!work.join("own").exists(), "moved");
        let missing = serde_json::json!({ "users": work.join("none") });
        let kinds = BTreeMap::from([("users".to_owned(), Type::File)]);
        let error = write_outputs(&outputs, &kinds, &missing).unwrap_err();
        assert_eq!(error.kind(), phalanx_base::error::ErrorKind::Usage);
    }

    #[test]
    fn mistakes_name_the_task() {
        let missing = Flow::new("w")
            .input("epochs", 3)
            .task("train", train, |task| task);
        let text = missing.workflow().unwrap_err().chain();
        assert_eq!(
            text,
            "task \"train\", key \"inputs.scale\": the workflow has no input \"scale\"; there are: epochs"
        );
        let unknown = Flow::new("w").task("train", train, |task| task.value("depth", 1));
        let text = unknown.workflow().unwrap_err().chain();
        assert_eq!(text, "task \"train\": its function has no input \"depth\"");
    }
}
