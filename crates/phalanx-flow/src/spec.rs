//! The data model: a workflow, its tasks, their inputs and outputs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// A graph of tasks with typed inputs and named outputs.
///
/// Build it with [`Workflow::from_file`] or [`Flow`](crate::Flow); both check it, so that
/// names, types and dependencies are consistent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workflow {
    /// Its name: letters, digits, `_` and `-`.
    pub name: String,
    /// The folder of `flow.toml`; relative paths of files and `{folder}` refer to it.
    pub folder: PathBuf,
    /// Its inputs by name; those of a group are `GROUP.NAME`.
    pub inputs: BTreeMap<String, Input>,
    /// Its tasks, each after all tasks that it depends on.
    pub tasks: Vec<Task>,
    /// Its outputs by name, each an input or a task's output.
    pub outputs: BTreeMap<String, Source>,
}

/// An input of a workflow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// Its type.
    #[serde(rename = "type")]
    pub kind: Type,
    /// Its value unless the run sets one; `None`: every run must set it. For a file or folder,
    /// its path.
    pub default: Option<Json>,
}

/// The type of an input or output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Type {
    /// `int`: an integer of 64 bits.
    Int,
    /// `float`: a finite number; an integer is accepted.
    Float,
    /// `bool`.
    Bool,
    /// `string`.
    String,
    /// `list[T]` of one of the types above.
    List(Scalar),
    /// `json`: any JSON value.
    Json,
    /// `file`: a regular file, identified by its content.
    File,
    /// `folder`: a folder, identified by its content.
    Folder,
}

/// The type of a list's items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scalar {
    /// `int`.
    Int,
    /// `float`.
    Float,
    /// `bool`.
    Bool,
    /// `string`.
    String,
}

/// Where a task's input or a workflow's output comes from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// `{inputs.NAME}` or `{inputs.GROUP.NAME}`: an input of the workflow.
    Input(String),
    /// `{TASK.OUTPUT}`: an output of a task.
    Output {
        /// The task.
        task: String,
        /// Its output.
        output: String,
    },
}

/// One task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Its name: letters, digits and `_`.
    pub name: String,
    /// The version of what it does; another version does not use cached results of this one.
    pub version: String,
    /// What it runs.
    pub action: Action,
    /// Container image, for exports; a local run does not use it.
    pub image: Option<String>,
    /// Environment variables; values may have placeholders.
    pub env: BTreeMap<String, String>,
    /// Environment variables whose values are secret: from the environment of the engine, or files. Only names are stored.
    #[serde(default)]
    pub secrets: Vec<String>,
    /// What happens after a recoverable failure.
    pub retries: Retries,
    /// Time limit of one attempt.
    pub timeout: Option<Duration>,
    /// Cache version; `None`: results are not cached.
    pub cache: Option<String>,
    /// Resources that must be free before it starts.
    pub requests: Resources,
    /// Most that it may use.
    pub limits: Resources,
    /// Exit codes of a command that no retry can cure.
    pub unrecoverable: Vec<i32>,
    /// Its inputs by name; those of a group of the workflow's inputs are `GROUP.NAME`.
    pub inputs: BTreeMap<String, TaskInput>,
    /// Its outputs by name.
    pub outputs: BTreeMap<String, Type>,
    /// Tasks that must be done before, in addition to those of its inputs.
    pub after: Vec<String>,
}

/// What a task runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// A program and its arguments, which may have placeholders ([`Task::fill`]).
    Command(Vec<String>),
    /// A script for `sh -eu`; it gets its inputs as environment variables only.
    Shell(String),
    /// A function of the program that defines the workflow.
    Function,
}

/// An input of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskInput {
    /// Its type.
    #[serde(rename = "type")]
    pub kind: Type,
    /// Its value.
    pub value: Value,
}

/// The value of a task's input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Value {
    /// A constant; for a file or folder, its path.
    Constant(Json),
    /// Another value of the workflow.
    From(Source),
}

/// What happens after a recoverable failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retries {
    /// Further attempts after the first one.
    pub times: u32,
    /// Pause before the second attempt; doubled before each further one, at most 1 hour.
    pub backoff: Duration,
}

impl Default for Retries {
    /// None; 1 second where only the number is set.
    fn default() -> Self {
        Retries {
            times: 0,
            backoff: Duration::from_secs(1),
        }
    }
}

impl Retries {
    /// The pause after attempt `attempt`, counted from 1.
    pub fn pause(&self, attempt: u32) -> Duration {
        let doubled = 1u32
            .checked_shl(attempt.saturating_sub(1))
            .unwrap_or(u32::MAX);
        self.backoff
            .saturating_mul(doubled)
            .min(Duration::from_secs(3600))
    }
}

/// Amounts of resources; `None` is no request, or no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Processors.
    pub cpus: Option<u32>,
    /// Memory in bytes.
    pub memory: Option<u64>,
    /// GPUs.
    pub gpus: Option<u32>,
    /// Space on disk in bytes, for inputs and outputs.
    pub storage: Option<u64>,
    /// Space on disk in bytes, for files that are removed with the task.
    pub ephemeral_storage: Option<u64>,
}

impl Resources {
    /// Space on the disk of the host that runs the task, where outputs are on another one: the
    /// amount for both if there is only one.
    pub(crate) fn on_host(&self) -> Option<u64> {
        self.ephemeral_storage.or(self.storage)
    }
}

/// A name between braces in a command or variable: [`Task::fill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placeholder<'a> {
    /// `{inputs.NAME}`: the value, or the path of a file or folder.
    Input(&'a str),
    /// `{outputs.NAME}`: the path where the command writes this output.
    Output(&'a str),
    /// `{folder}`: the folder of `flow.toml`.
    Folder,
}

impl Workflow {
    /// The task `name`.
    pub fn task(&self, name: &str) -> Option<&Task> {
        self.tasks.iter().find(|task| task.name == name)
    }

    /// The type of `source`, if it exists.
    pub fn type_of(&self, source: &Source) -> Option<Type> {
        match source {
            Source::Input(name) => self.inputs.get(name).map(|input| input.kind),
            Source::Output { task, output } => self.task(task)?.outputs.get(output).copied(),
        }
    }
}

impl Task {
    /// A task without inputs, outputs, retries or limits.
    pub fn new(name: &str, action: Action) -> Task {
        Task {
            name: name.to_owned(),
            version: "1".to_owned(),
            action,
            image: None,
            env: BTreeMap::new(),
            secrets: Vec::new(),
            retries: Retries::default(),
            timeout: None,
            cache: None,
            requests: Resources::default(),
            limits: Resources::default(),
            unrecoverable: vec![2],
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            after: Vec::new(),
        }
    }

    /// The names of all tasks that must be done before this one.
    pub fn dependencies(&self) -> BTreeSet<&str> {
        let inputs = self.inputs.values().filter_map(|input| match &input.value {
            Value::From(Source::Output { task, .. }) => Some(task.as_str()),
            _ => None,
        });
        inputs
            .chain(self.after.iter().map(String::as_str))
            .collect()
    }

    /// The task's command as arguments: `sh -eu -c TEXT` for a script, `None` for a function.
    pub fn argv(&self) -> Option<Vec<String>> {
        match &self.action {
            Action::Command(argv) => Some(argv.clone()),
            Action::Shell(text) => Some(["sh", "-eu", "-c", text].map(str::to_owned).to_vec()),
            Action::Function => None,
        }
    }

    /// `text` with its placeholders `{inputs.NAME}`, `{outputs.NAME}` and `{folder}` replaced.
    /// All other braces stay. Scripts ([`Action::Shell`]) have no placeholders.
    pub fn fill(text: &str, with: &mut dyn FnMut(Placeholder<'_>) -> String) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find('{') {
            let (before, tail) = rest.split_at(start);
            out.push_str(before);
            let found = tail.find('}').and_then(|end| {
                let placeholder = placeholder(&tail[1..end])?;
                Some((placeholder, &tail[end + 1..]))
            });
            match found {
                Some((placeholder, after)) => {
                    out.push_str(&with(placeholder));
                    rest = after;
                }
                None => {
                    out.push('{');
                    rest = &tail[1..];
                }
            }
        }
        out.push_str(rest);
        out
    }

    /// The environment variable with the value or path of the input `name`: `INPUT_NAME`.
    pub fn input_variable(name: &str) -> String {
        format!("INPUT_{}", name.to_uppercase().replace('.', "_"))
    }

    /// The environment variable with the path of the output `name`: `OUTPUT_NAME`.
    pub fn output_variable(name: &str) -> String {
        format!("OUTPUT_{}", name.to_uppercase())
    }
}

fn placeholder(inside: &str) -> Option<Placeholder<'_>> {
    if inside == "folder" {
        return Some(Placeholder::Folder);
    }
    let (what, name) = inside.split_once('.')?;
    match what {
        "inputs" if is_input_name(name) => Some(Placeholder::Input(name)),
        "outputs" if is_name(name) => Some(Placeholder::Output(name)),
        _ => None,
    }
}

/// Whether `name` is a letter followed by letters, digits and `_`.
pub(crate) fn is_name(name: &str) -> bool {
    name.len() <= 64
        && name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Whether `name` is that of an input: `NAME`, or `GROUP.NAME`.
pub(crate) fn is_input_name(name: &str) -> bool {
    let (group, name) = name.split_once('.').unwrap_or((name, name));
    is_name(group) && is_name(name)
}

impl Source {
    /// Reads `{inputs.NAME}`, `{inputs.GROUP.NAME}` or `{TASK.OUTPUT}`; `None` for any other text.
    pub fn parse(text: &str) -> Option<Source> {
        let inside = text.strip_prefix('{')?.strip_suffix('}')?;
        let (owner, name) = inside.split_once('.')?;
        match owner {
            "inputs" if is_input_name(name) => Some(Source::Input(name.to_owned())),
            task if is_name(task) && is_name(name) => Some(Source::Output {
                task: task.to_owned(),
                output: name.to_owned(),
            }),
            _ => None,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Input(name) => write!(f, "{{inputs.{name}}}"),
            Source::Output { task, output } => write!(f, "{{{task}.{output}}}"),
        }
    }
}

impl Type {
    /// Whether it is a file or a folder.
    pub fn is_path(self) -> bool {
        matches!(self, Type::File | Type::Folder)
    }

    /// The type of `value`, if a value of that type is written so.
    pub fn of(value: &Json) -> Option<Type> {
        Some(match value {
            Json::Bool(_) => Type::Bool,
            Json::Number(n) if n.is_i64() => Type::Int,
            Json::Number(_) => Type::Float,
            Json::String(_) => Type::String,
            Json::Object(_) => Type::Json,
            Json::Array(items) => {
                let mut kinds = items.iter().map(Type::of);
                let first = kinds.next().flatten()?;
                let all_same = kinds.all(|kind| kind == Some(first));
                first
                    .scalar()
                    .filter(|_| all_same)
                    .map_or(Type::Json, Type::List)
            }
            Json::Null => return None,
        })
    }

    pub(crate) fn scalar(self) -> Option<Scalar> {
        use Scalar::{Bool, Float, Int, String};
        let mut all = [Int, Float, Bool, String].into_iter();
        all.find(|scalar| Type::from(*scalar) == self)
    }

    /// Whether `value` has this type. An integer is a `float` too; a file or folder is a path.
    pub fn accepts(self, value: &Json) -> bool {
        match (self, value) {
            (Type::Json, _) => true,
            (Type::Int, Json::Number(n)) => n.is_i64(),
            (Type::Float, Json::Number(n)) => n.as_f64().is_some_and(f64::is_finite),
            (Type::Bool, Json::Bool(_)) => true,
            (Type::String | Type::File | Type::Folder, Json::String(_)) => true,
            (Type::List(scalar), Json::Array(items)) => {
                let kind = Type::from(scalar);
                items.iter().all(|item| kind.accepts(item))
            }
            _ => false,
        }
    }

    /// Whether a value of type `other` may be bound to an input of this type.
    pub fn takes(self, other: Type) -> bool {
        self == other
            || matches!(
                (self, other),
                (Type::Float, Type::Int) | (Type::List(Scalar::Float), Type::List(Scalar::Int))
            )
            || (self == Type::Json && !other.is_path())
    }

    /// Reads a value of this type from text: a string is taken as it is, a path too, all others are JSON.
    ///
    /// # Errors
    ///
    /// A sentence without a subject: "is not of type int".
    pub fn read(self, text: &str) -> Result<Json, String> {
        if matches!(self, Type::String | Type::File | Type::Folder) {
            return Ok(text.into());
        }
        let value = serde_json::from_str(text).ok();
        value
            .filter(|value| self.accepts(value))
            .ok_or_else(|| format!("is not of type {self}"))
    }

    /// `value` as it is written: `3` as a float is `3.0`.
    pub(crate) fn canonical(self, value: &Json) -> Json {
        match (self, value) {
            (Type::Float, Json::Number(n)) => n.as_f64().map_or(Json::Null, Json::from),
            (Type::List(item), Json::Array(items)) => {
                let item = Type::from(item);
                items.iter().map(|value| item.canonical(value)).collect()
            }
            (_, value) => value.clone(),
        }
    }
}

impl From<Scalar> for Type {
    fn from(scalar: Scalar) -> Type {
        match scalar {
            Scalar::Int => Type::Int,
            Scalar::Float => Type::Float,
            Scalar::Bool => Type::Bool,
            Scalar::String => Type::String,
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Type::Int => "int",
            Type::Float => "float",
            Type::Bool => "bool",
            Type::String => "string",
            Type::Json => "json",
            Type::File => "file",
            Type::Folder => "folder",
            Type::List(scalar) => return write!(f, "list[{}]", Type::from(*scalar)),
        })
    }
}

impl FromStr for Type {
    type Err = String;

    fn from_str(text: &str) -> Result<Type, String> {
        let unknown = || {
            format!(
                "unknown type {text:?}: one of int, float, bool, string, list[int], list[float], list[bool], list[string], json, file, folder"
            )
        };
        let scalars = [Type::Int, Type::Float, Type::Bool, Type::String];
        let all = [&scalars[..], &[Type::Json, Type::File, Type::Folder]].concat();
        let lists = scalars
            .iter()
            .filter_map(|kind| kind.scalar().map(Type::List));
        let mut all = all.into_iter().chain(lists);
        all.find(|kind| kind.to_string() == text)
            .ok_or_else(unknown)
    }
}

impl TryFrom<String> for Type {
    type Error = String;

    fn try_from(text: String) -> Result<Type, String> {
        text.parse()
    }
}

impl From<Type> for String {
    fn from(kind: Type) -> String {
        kind.to_string()
    }
}

/// Reads a size: `1073741824`, `500M`, `4GiB`, `30Gi`. Units are powers of 1000 (`K`, `M`, `G`,
/// `T`, with or without `B`) or of 1024 (`Ki`, `Mi`, `Gi`, `Ti`).
///
/// # Errors
///
/// A sentence that names the text.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let failed = || format!("{text:?} is not a size such as 512MiB or 4GiB");
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = text[digits.len()..].trim();
    let unit = unit.strip_suffix('B').unwrap_or(unit);
    let (base, unit) = match unit.strip_suffix('i') {
        Some(unit) if !unit.is_empty() => (1024u64, unit),
        Some(_) => return Err(failed()),
        None => (1000, unit),
    };
    let power = match unit {
        "" => 0,
        "K" | "k" => 1,
        "M" => 2,
        "G" => 3,
        "T" => 4,
        _ => return Err(failed()),
    };
    let number: u64 = digits.parse().map_err(|_| failed())?;
    number.checked_mul(base.pow(power)).ok_or_else(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn types_are_read_and_written() {
        for text in ["int", "list[float]", "json", "folder", "list[string]"] {
            assert_eq!(text.parse::<Type>().map(String::from), Ok(text.to_owned()));
        }
        for text in ["", "list", "list[file]", "list[list[int]]", "Int"] {
            assert!(text.parse::<Type>().is_err(), "{text}");
        }
    }

    #[test]
    fn values_have_types() {
        for (value, kind) in [
            (json!(3), "int"),
            (json!(3.5), "float"),
            (json!([1, 2]), "list[int]"),
            (json!([1, "a"]), "json"),
            (json!({"a": 1}), "json"),
        ] {
            assert_eq!(Type::of(&value).map(String::from).as_deref(), Some(kind));
        }
        assert!(Type::Float.accepts(&json!(3)) && !Type::Int.accepts(&json!(3.0)));
        assert!(Type::Float.takes(Type::Int) && !Type::Int.takes(Type::Float));
        assert!(!Type::Json.takes(Type::File));
        assert_eq!(Type::Int.read(" 7 "), Ok(json!(7)));
        assert_eq!(Type::String.read("7"), Ok(json!("7")));
        assert!(Type::Bool.read("yes").is_err());
    }

    #[test]
    fn sizes_have_decimal_and_binary_units() {
        for (text, want) in [
            ("7", 7),
            ("500M", 500_000_000),
            ("100Mi", 100 << 20),
            ("30 GiB", 30 << 30),
            ("2KB", 2000),
        ] {
            assert_eq!(parse_size(text), Ok(want), "{text}");
        }
        for text in ["", "G", "-1", "1.5G", "1i", "99999999999T", "1 Gi B i"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn placeholders_are_replaced_and_other_braces_stay() {
        let text = "a{inputs.x}b{outputs.y} {folder} {z} ${inputs.} {{inputs.x}} {";
        let mut with = |p: Placeholder<'_>| match p {
            Placeholder::Input(name) => format!("<{name}>"),
            Placeholder::Output(name) => format!("[{name}]"),
            Placeholder::Folder => "F".into(),
        };
        let want = "a<x>b[y] F {z} ${inputs.} {<x>} {";
        assert_eq!(Task::fill(text, &mut with), want);
    }

    #[test]
    fn pauses_double_up_to_an_hour() {
        let retries = Retries {
            times: 9,
            backoff: Duration::from_secs(10),
        };
        let pauses = [1, 2, 3, 10, 40].map(|n| retries.pause(n).as_secs());
        assert_eq!(pauses, [10, 20, 40, 3600, 3600]);
    }
}
