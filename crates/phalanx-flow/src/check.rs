//! Checks of a workflow: names, types, dependencies, resources.

use std::collections::BTreeSet;

use crate::spec::{
    Action, Placeholder, Resources, Source, Task, TaskInput, Type, Value, Workflow, is_input_name,
    is_name,
};

/// What is wrong, and where: the keys that lead to it in `flow.toml`.
#[derive(Debug, PartialEq)]
pub(crate) struct Problem {
    pub path: Vec<String>,
    pub message: String,
}

impl Problem {
    pub fn new(path: &[&str], message: impl Into<String>) -> Problem {
        Problem {
            path: path.iter().map(|&key| key.to_owned()).collect(),
            message: message.into(),
        }
    }

    /// `task "train", key "inputs.data"`.
    pub fn place(&self) -> String {
        match self.path.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["tasks", task] => format!("task {task:?}"),
            ["tasks", task, ref keys @ ..] => format!("task {task:?}, key {:?}", keys.join(".")),
            ref keys => format!("key {:?}", keys.join(".")),
        }
    }
}

type Checked = Result<(), Problem>;

/// Checks `workflow` and puts its tasks in an order in which each comes after those that it
/// depends on.
pub(crate) fn check(workflow: &mut Workflow) -> Checked {
    let name = &workflow.name;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
        let message = format!("{name:?} is not a name: use letters, digits, '_' and '-'");
        return Err(Problem::new(&["name"], message));
    }
    names(workflow.inputs.keys(), &["inputs"], is_input_name)?;
    names(workflow.outputs.keys(), &["outputs"], is_name)?;
    for (name, input) in &workflow.inputs {
        if let Some(value) = input.default.as_ref().filter(|v| !input.kind.accepts(v)) {
            let message = format!("the default {value} is not of type {}", input.kind);
            return Err(Problem::new(&["inputs", name], message));
        }
        if input.kind.is_path() && name.contains('.') {
            let message = "a file or folder cannot be in a group of inputs";
            return Err(Problem::new(&["inputs", name], message));
        }
    }
    if workflow.tasks.is_empty() {
        return Err(Problem::new(&["tasks"], "a workflow needs a task"));
    }
    let mut seen = BTreeSet::new();
    for task in &workflow.tasks {
        let path = ["tasks", task.name.as_str()];
        if !is_name(&task.name) || task.name == "inputs" || task.name == "outputs" {
            return Err(Problem::new(&path, not_a_name(&task.name)));
        }
        if !seen.insert(task.name.to_lowercase()) {
            return Err(Problem::new(&path, "another task has this name"));
        }
    }
    for task in &workflow.tasks {
        check_task(workflow, task)?;
    }
    for (name, source) in &workflow.outputs {
        known(workflow, source, &["outputs", name])?;
    }
    sort(workflow)
}

fn not_a_name(name: &str) -> String {
    format!("{name:?} is not a name: use a letter, then letters, digits and '_'")
}

/// Names become environment variables in upper case.
fn names<'a>(
    names: impl Iterator<Item = &'a String>,
    path: &[&str],
    is_name: fn(&str) -> bool,
) -> Checked {
    let mut seen = BTreeSet::new();
    for name in names {
        let path = [path, &[name]].concat();
        if !is_name(name) {
            return Err(Problem::new(&path, not_a_name(name)));
        }
        if !seen.insert(Task::input_variable(name)) {
            let message = "another name differs in upper and lower case or in '.' and '_' only";
            return Err(Problem::new(&path, message));
        }
    }
    Ok(())
}

/// The type of `source`.
fn known(workflow: &Workflow, source: &Source, path: &[&str]) -> Result<Type, Problem> {
    if let Some(kind) = workflow.type_of(source) {
        return Ok(kind);
    }
    let (message, known): (String, Vec<&String>) = match source {
        Source::Input(name) => (
            format!("the workflow has no input {name:?}"),
            workflow.inputs.keys().collect(),
        ),
        Source::Output { task, output } => match workflow.task(task) {
            Some(found) => (
                format!("task {task:?} has no output {output:?}"),
                found.outputs.keys().collect(),
            ),
            None => (
                format!("there is no task {task:?}"),
                workflow.tasks.iter().map(|task| &task.name).collect(),
            ),
        },
    };
    let known: Vec<&str> = known.into_iter().map(String::as_str).collect();
    let known = match known.is_empty() {
        true => "none".to_owned(),
        false => known.join(", "),
    };
    Err(Problem::new(path, format!("{message}; there are: {known}")))
}

fn check_task(workflow: &Workflow, task: &Task) -> Checked {
    fn at<'a>(task: &'a Task, keys: &[&'a str]) -> Vec<&'a str> {
        [&["tasks", task.name.as_str()], keys].concat()
    }
    let problem = |keys: &[&str], message: String| Err(Problem::new(&at(task, keys), message));
    names(task.inputs.keys(), &at(task, &["inputs"]), is_input_name)?;
    names(task.outputs.keys(), &at(task, &["outputs"]), is_name)?;
    for (name, TaskInput { kind, value }) in &task.inputs {
        match value {
            Value::Constant(value) if !kind.accepts(value) => {
                return problem(&["inputs", name], format!("{value} is not of type {kind}"));
            }
            Value::Constant(_) => {}
            Value::From(source) => {
                let other = known(workflow, source, &at(task, &["inputs", name]))?;
                if !kind.takes(other) {
                    let message = format!("{source} has type {other}, but {kind} is expected");
                    return problem(&["inputs", name], message);
                }
            }
        }
    }
    for other in &task.after {
        if workflow.task(other).is_none() {
            return problem(&["after"], format!("there is no task {other:?}"));
        }
    }
    let mut texts: Vec<(Vec<&str>, &str)> = Vec::new();
    match &task.action {
        Action::Command(argv) => {
            if argv.first().is_none_or(String::is_empty) {
                return problem(&["command"], "the command needs a program".to_owned());
            }
            texts.extend(argv.iter().map(|word| (vec!["command"], word.as_str())));
        }
        Action::Shell(text) => {
            let mut has_any = false;
            // A variable of the shell is none.
            Task::fill(&text.replace("${", ""), &mut |_| {
                has_any = true;
                String::new()
            });
            if has_any {
                let message = "a script has no placeholders: use \"$INPUT_NAME\", \"$OUTPUT_NAME\" and \"$FLOW_FOLDER\"";
                return problem(&["shell"], message.to_owned());
            }
        }
        Action::Function => {}
    }
    for (name, value) in &task.env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return problem(&["env", name], "this is not a variable's name".to_owned());
        }
        texts.push((vec!["env", name], value));
    }
    for name in &task.secrets {
        let is_own = ["FLOW_", "INPUT_", "OUTPUT_"]
            .iter()
            .any(|start| name.starts_with(start));
        if !is_name(name) || is_own || task.env.contains_key(name) {
            let message = format!("{name:?} is not a name, is the engine's, or is in `env` too");
            return problem(&["secrets"], message);
        }
    }
    for (keys, text) in texts {
        if text.contains('\0') {
            return problem(&keys, "a null character cannot be passed".to_owned());
        }
        let mut unknown = None;
        Task::fill(text, &mut |placeholder| {
            match placeholder {
                Placeholder::Input(name) if !task.inputs.contains_key(name) => {
                    unknown = Some(format!("the task has no input {name:?}"));
                }
                Placeholder::Output(name) if !task.outputs.contains_key(name) => {
                    unknown = Some(format!("the task has no output {name:?}"));
                }
                _ => {}
            }
            String::new()
        });
        if let Some(message) = unknown {
            return problem(&keys, message);
        }
    }
    check_resources(&task.requests, &task.limits)
        .map_err(|(key, message)| Problem::new(&at(task, &["limits", key]), message))
}

fn check_resources(asked: &Resources, limits: &Resources) -> Result<(), (&'static str, String)> {
    let wide = |n: Option<u32>| n.map(u64::from);
    for (key, asked, limit) in [
        ("cpus", wide(asked.cpus), wide(limits.cpus)),
        ("memory", asked.memory, limits.memory),
        ("gpus", wide(asked.gpus), wide(limits.gpus)),
        ("storage", asked.storage, limits.storage),
        (
            "ephemeral_storage",
            asked.ephemeral_storage,
            limits.ephemeral_storage,
        ),
    ] {
        let Some(limit) = limit else { continue };
        if limit < asked.unwrap_or(0) {
            return Err((key, format!("the limit {limit} is below the request")));
        }
        if limit == 0 && key != "gpus" {
            return Err((key, "must be more than 0".to_owned()));
        }
        if key == "gpus" && asked.is_some_and(|asked| asked != limit) {
            let message = "GPUs are not shared: request and limit must be equal";
            return Err((key, message.to_owned()));
        }
    }
    Ok(())
}

/// Tasks in the order of their names, but each after its dependencies.
fn sort(workflow: &mut Workflow) -> Checked {
    let mut done: Vec<Task> = Vec::new();
    let mut left = std::mem::take(&mut workflow.tasks);
    while !left.is_empty() {
        let is_ready = |task: &Task| {
            let needed = task.dependencies();
            needed
                .iter()
                .all(|name| done.iter().any(|t| t.name == *name))
        };
        match left.iter().position(is_ready) {
            Some(next) => done.push(left.remove(next)),
            None => return Err(cycle(&left)),
        }
    }
    workflow.tasks = done;
    Ok(())
}

/// Each task in `left` depends on another one there, so that a walk returns to where it was.
fn cycle(left: &[Task]) -> Problem {
    let mut walk: Vec<&str> = Vec::new();
    let mut next = left.first();
    while let Some(task) = next {
        if let Some(start) = walk.iter().position(|name| *name == task.name) {
            walk.drain(..start);
            walk.push(&task.name);
            break;
        }
        walk.push(&task.name);
        let needed = task.dependencies();
        next = left.iter().find(|task| needed.contains(task.name.as_str()));
    }
    let message = format!("tasks depend on each other: {}", walk.join(" needs "));
    Problem::new(
        &["tasks", walk.first().copied().unwrap_or_default()],
        message,
    )
}
