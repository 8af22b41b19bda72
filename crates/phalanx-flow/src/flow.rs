//! Workflows of Rust functions.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use phalanx_process::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::check::check;
use crate::probe::fields_of;
use crate::spec::{
    Action, Input, Resources, Retries, Source, Task, TaskInput, Type, Value, Workflow,
};

/// A file as an input or output of a task's function: the path where it is, or was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename = "phalanx_flow::File")]
pub struct File(pub PathBuf);

/// A folder as an input or output of a task's function: the path where it is, or was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename = "phalanx_flow::Folder")]
pub struct Folder(pub PathBuf);

type Function = Box<dyn Fn(Map<String, Json>, &Path) -> Result<()>>;

/// A workflow of Rust functions, built step by step; [`main`] runs it.
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

    /// Caches results under this version; another one does not use them.
    pub fn cache(mut self, version: &str) -> Self {
        self.task.cache = Some(version.to_owned());
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

    /// Waits for the end of task `name`, beside those of its inputs.
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
            kinds
                .iter()
                .try_for_each(|(name, kind)| write_output(&outputs.join(name), *kind, &value[name]))
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

fn write_output(path: &Path, kind: Type, value: &Json) -> Result<()> {
    let text = match (kind, value) {
        (Type::File | Type::Folder, Json::String(from)) => {
            let from = Path::new(from);
            return fs::rename(from, path)
                .or_else(|_| crate::objects::copy_all(from, path))
                .map_err(|error| crate::objects::cannot("read output", from, error).into_usage());
        }
        (Type::String, Json::String(text)) => text.clone(),
        (_, value) => value.to_string(),
    };
    fs::write(path, text).map_err(|error| crate::objects::cannot("write", path, error))
}

/// Runs the command line of a program with one workflow: `run`, `list`, `show`, `logs`, `cancel`,
/// `rm`, `prune` and `cache`, as `phalanx flow`. Call it first in `main`: tasks are this program, started again.
pub fn main(flow: Flow) -> ExitCode {
    let outcome = helper(Some(&flow)).unwrap_or_else(|| {
        phalanx_process::stop::tell_limits();
        let args: Vec<OsString> = std::env::args_os().collect();
        crate::cli::main_of(&flow, args)
    });
    phalanx_launch::exit_code(outcome)
}

/// The process of a task's attempt, and helpers of the launcher.
pub(crate) fn helper(flow: Option<&Flow>) -> Option<Result<()>> {
    if let Some(outcome) = phalanx_launch::run_helper() {
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
