//! `phalanx flow export`: files that run a workflow on Flyte, Kubernetes or Slurm.
//!
//! | file | makes |
//! |---|---|
//! | `flyte` | a Python module for flytekit; `flyte.py` is its fixed part |
//! | `kubernetes` | a Job for each task, a volume claim, and `submit.sh` |
//! | `slurm` | a batch script for each task, and `submit.sh` |
//! | `script` | the shell script of one attempt, for the last two |

mod cli;
mod flyte;
mod kubernetes;
mod script;
mod slurm;

pub(crate) use cli::{ExportArgs, run};
use kubernetes::Volume;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use phalanx_base::error::{Error, Result};
use phalanx_base::files::Dir;
use serde_json::Value as Json;

use crate::engine::canonical;
use crate::spec::{Action, Placeholder, Resources, Source, Task, TaskInput, Type, Value, Workflow};

/// A system that runs exported workflows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Engine {
    /// Flyte: a Python module for flytekit
    Flyte,
    /// Kubernetes: Jobs on a shared volume, and a script that submits them in order
    Kubernetes,
    /// Slurm: batch scripts with dependencies, and a script that submits them
    Slurm,
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Engine::Flyte => "flyte",
            Engine::Kubernetes => "kubernetes",
            Engine::Slurm => "slurm",
        }
    }
}

/// A workflow for another engine.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Export {
    /// The files: path in the folder and text.
    pub files: Vec<(String, String)>,
    /// What to do with them.
    pub next: String,
    /// What the engine does differently, or what must be done by hand; one line each.
    pub notes: Vec<String>,
}

/// Makes files that run `workflow` on `engine`.
///
/// `inputs` are values of the workflow's inputs; others have their defaults. Nothing is written; for Kubernetes, files
/// and folders that are inputs are read.
///
/// # Errors
///
/// Usage: a task is a Rust function, an image is missing (Kubernetes), an input has no value
/// (Kubernetes and Slurm).
pub(crate) fn export(
    workflow: &Workflow,
    inputs: &BTreeMap<String, Json>,
    engine: Engine,
    volume: &Volume,
) -> Result<Export> {
    for task in &workflow.tasks {
        if task.action == Action::Function {
            return Err(Error::usage(format!(
                "task {:?} is a function of a Rust program",
                task.name
            ))
            .note("so", "only commands and scripts can run on another engine"));
        }
    }
    if engine != Engine::Kubernetes && *volume != Volume::default() {
        return Err(Error::usage(
            "--volume-size, --access-mode and --storage-class are for --to kubernetes",
        ));
    }
    let mut workflow = workflow.clone();
    for (name, input) in &mut workflow.inputs {
        if let Some(value) = inputs.get(name) {
            input.default = Some(value.clone());
        }
        if input.default.is_none() && engine != Engine::Flyte {
            return Err(Error::usage(format!("input {name:?} has no value"))
                .note("fix", format!("--input {name}=VALUE")));
        }
    }
    let mut notes = Notes {
        workflow: &workflow,
        engine: engine.name(),
        lines: Vec::new(),
    };
    let (files, next) = match engine {
        Engine::Flyte => flyte::files(&workflow, &mut notes),
        Engine::Kubernetes => kubernetes::files(&workflow, volume, &mut notes)?,
        Engine::Slurm => slurm::files(&workflow, &mut notes),
    };
    Ok(Export {
        files,
        next,
        notes: notes.lines,
    })
}

impl Export {
    /// Writes the files to `folder`, which is created if needed. Files of these names are replaced.
    ///
    /// # Errors
    ///
    /// Those of writing, naming the file.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let dir = Dir::create(folder)?;
        for (name, text) in &self.files {
            let (dir, name) = match name.split_once('/') {
                Some((sub, name)) => (&dir.create_sub(sub)?, name),
                None => (&dir, name.as_str()),
            };
            dir.write(name, |out| out.write_all(text.as_bytes()))?;
        }
        Ok(())
    }
}

/// What an export does not express.
struct Notes<'a> {
    workflow: &'a Workflow,
    engine: &'static str,
    lines: Vec<String>,
}

impl Notes<'_> {
    fn say(&mut self, what: impl std::fmt::Display) {
        self.lines.push(format!("{}: {what}", self.engine));
    }

    /// Says `what` of the tasks that `has` selects, if there are any.
    fn of(&mut self, what: &str, has: impl Fn(&Task) -> bool) {
        let tasks = self.workflow.tasks.iter().filter(|task| has(task));
        let names: Vec<&str> = tasks.map(|task| task.name.as_str()).collect();
        if !names.is_empty() {
            self.say(format_args!("{what} ({})", names.join(", ")));
        }
    }
}

/// `text` in double quotes, for Python and YAML alike: both read these escapes.
fn literal(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            ' '..='~' => out.push(c),
            c if c.is_alphanumeric() => out.push(c),
            c if (c as u32) < 0x1_0000 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push_str(&format!("\\U{:08x}", c as u32)),
        }
    }
    out.push('"');
    out
}

/// The parts of `text`: what lies between placeholders by `literal`, and each placeholder by `value`.
fn filled(
    text: &str,
    literal: impl Fn(&str) -> String,
    value: impl Fn(Placeholder<'_>) -> String,
) -> Vec<String> {
    let mut values = Vec::new();
    let marked = Task::fill(text, &mut |placeholder| {
        values.push(value(placeholder));
        // In no text.
        "\0".to_owned()
    });
    let mut values = values.into_iter();
    let mut parts = Vec::new();
    for piece in marked.split('\0') {
        if !piece.is_empty() || text.is_empty() {
            parts.push(literal(piece));
        }
        parts.extend(values.next());
    }
    parts
}

/// The text in which commands get a value: a string as it is, others as JSON.
fn text_of(kind: Type, value: &Json) -> String {
    match canonical(kind, value) {
        Json::String(text) => text,
        other => other.to_string(),
    }
}

/// Bytes as Kubernetes and Flyte read them, in the largest unit that is exact.
fn quantity(bytes: u64) -> String {
    let units = [(30, "Gi"), (20, "Mi"), (10, "Ki")];
    let unit = units
        .into_iter()
        .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1u64 << shift));
    unit.map_or(bytes.to_string(), |(shift, unit)| {
        format!("{}{unit}", bytes >> shift)
    })
}

/// The value of a task's input as it was set, if no task makes it, and its name in messages.
fn constant<'a>(workflow: &'a Workflow, input: &'a TaskInput) -> Option<&'a Json> {
    match &input.value {
        Value::Constant(value) => Some(value),
        Value::From(Source::Input(name)) => workflow.inputs.get(name)?.default.as_ref(),
        Value::From(Source::Output { .. }) => None,
    }
}

/// Whether some text of `task` that it can see has the folder of `flow.toml`.
fn uses_folder(task: &Task) -> bool {
    let words = match &task.action {
        Action::Command(argv) => argv.as_slice(),
        Action::Shell(text) => std::slice::from_ref(text),
        Action::Function => &[],
    };
    let mut texts = words.iter().chain(task.env.values());
    texts.any(|text| text.contains("{folder}") || text.contains("FLOW_FOLDER"))
}

/// `text` with each mark replaced.
fn template(text: &str, marks: &[(&str, &str)]) -> String {
    let replace = |text: String, (mark, with): &(&str, &str)| text.replace(mark, with);
    marks.iter().fold(text.to_owned(), replace)
}

/// Shell commands that print where the workflow's outputs are, in the folder `results`.
fn outputs(workflow: &Workflow, results: &str) -> String {
    let line = |(name, source): (&String, &Source)| match source {
        Source::Output { task, output } => {
            Some(format!("echo 'output {name}: {results}/{task}/{output}'\n"))
        }
        Source::Input(_) => None,
    };
    workflow.outputs.iter().filter_map(line).collect()
}

/// Said of a task with both kinds of storage.
const ONE_STORAGE: &str = "the host has ephemeral_storage only; storage is not requested";

fn has_both(task: &Task) -> bool {
    let of = [&task.requests, &task.limits];
    of.iter()
        .any(|of| of.storage.is_some() && of.ephemeral_storage.is_some())
}

/// Whole seconds, rounded up.
fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// What one task uses on an engine with one amount of each resource: the limit, or the request;
/// storage is that of its host. Not zero, which is everything for Slurm.
fn amounts(task: &Task) -> Resources {
    let (asked, limits) = (&task.requests, &task.limits);
    Resources {
        cpus: limits.cpus.or(asked.cpus).filter(|n| *n > 0),
        memory: limits.memory.or(asked.memory).filter(|n| *n > 0),
        gpus: limits.gpus.or(asked.gpus).filter(|n| *n > 0),
        storage: limits.on_host().or(asked.on_host()).filter(|n| *n > 0),
        ephemeral_storage: None,
    }
}

#[cfg(test)]
mod tests;
