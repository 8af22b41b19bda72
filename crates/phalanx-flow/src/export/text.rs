//! What the exports have in common: notes, quoted and filled texts, and amounts.

use std::time::Duration;

use serde_json::Value as Json;

use crate::spec::{Action, Placeholder, Resources, Source, Task, TaskInput, Type, Value, Workflow};

/// What an export does not express.
pub(super) struct Notes<'a> {
    pub(super) workflow: &'a Workflow,
    pub(super) engine: &'static str,
    pub(super) lines: Vec<String>,
}

impl Notes<'_> {
    pub(super) fn say(&mut self, what: impl std::fmt::Display) {
        self.lines.push(format!("{}: {what}", self.engine));
    }

    /// Says `what` of the tasks that `has` selects, if there are any.
    pub(super) fn of(&mut self, what: &str, has: impl Fn(&Task) -> bool) {
        let tasks = self.workflow.tasks.iter().filter(|task| has(task));
        let names: Vec<&str> = tasks.map(|task| task.name.as_str()).collect();
        if !names.is_empty() {
            self.say(format_args!("{what} ({})", names.join(", ")));
        }
    }
}

/// Said of a task with secrets, of Kubernetes.
pub(super) const SECRETS: &str = "create its secrets, with the variable as key and its name in lower case: kubectl create secret generic wandb-api-key --from-file=WANDB_API_KEY=FILE";

pub(super) fn has_secrets(task: &Task) -> bool {
    !task.secrets.is_empty()
}

/// `text` in double quotes, for Python and YAML alike: both read these escapes.
pub(super) fn literal(text: &str) -> String {
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
pub(super) fn filled(
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
pub(super) fn text_of(kind: Type, value: &Json) -> String {
    match kind.canonical(value) {
        Json::String(text) => text,
        other => other.to_string(),
    }
}

/// Bytes as Kubernetes and Flyte read them, in the largest unit that is exact.
pub(super) fn quantity(bytes: u64) -> String {
    let units = [(30, "Gi"), (20, "Mi"), (10, "Ki")];
    let unit = units
        .into_iter()
        .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1u64 << shift));
    unit.map_or(bytes.to_string(), |(shift, unit)| {
        format!("{}{unit}", bytes >> shift)
    })
}

/// The value of a task's input as it was set, if no task makes it, and its name in messages.
pub(super) fn constant<'a>(workflow: &'a Workflow, input: &'a TaskInput) -> Option<&'a Json> {
    match &input.value {
        Value::Constant(value) => Some(value),
        Value::From(Source::Input(name)) => workflow.inputs.get(name)?.default.as_ref(),
        Value::From(Source::Output { .. }) => None,
    }
}

/// Whether some text of `task` that it can see has the folder of `flow.toml`.
pub(super) fn uses_folder(task: &Task) -> bool {
    let words = match &task.action {
        Action::Command(argv) => argv.as_slice(),
        Action::Shell(text) => std::slice::from_ref(text),
        Action::Function => &[],
    };
    let mut texts = words.iter().chain(task.env.values());
    texts.any(|text| text.contains("{folder}") || text.contains("FLOW_FOLDER"))
}

/// `text` with each mark replaced.
pub(super) fn template(text: &str, marks: &[(&str, &str)]) -> String {
    let replace = |text: String, (mark, with): &(&str, &str)| text.replace(mark, with);
    marks.iter().fold(text.to_owned(), replace)
}

/// Shell commands that print where the workflow's outputs are, in the folder `results`.
pub(super) fn outputs(workflow: &Workflow, results: &str) -> String {
    let line = |(name, source): (&String, &Source)| match source {
        Source::Output { task, output } => {
            Some(format!("echo 'output {name}: {results}/{task}/{output}'\n"))
        }
        Source::Input(_) => None,
    };
    workflow.outputs.iter().filter_map(line).collect()
}

/// Said of a task with both kinds of storage.
pub(super) const ONE_STORAGE: &str =
    "the host has ephemeral_storage only; storage is not requested";

pub(super) fn has_both(task: &Task) -> bool {
    let of = [&task.requests, &task.limits];
    of.iter()
        .any(|of| of.storage.is_some() && of.ephemeral_storage.is_some())
}

/// Whole seconds, rounded up.
pub(super) fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// What one task uses on an engine with one amount of each resource: the limit, or the request;
/// storage is that of its host. Not zero, which is everything for Slurm.
pub(super) fn amounts(task: &Task) -> Resources {
    let (asked, limits) = (&task.requests, &task.limits);
    Resources {
        cpus: limits.cpus.or(asked.cpus).filter(|n| *n > 0),
        memory: limits.memory.or(asked.memory).filter(|n| *n > 0),
        gpus: limits.gpus.or(asked.gpus).filter(|n| *n > 0),
        storage: limits.on_host().or(asked.on_host()).filter(|n| *n > 0),
        ephemeral_storage: None,
    }
}
