//! The shell script of one attempt of a task.
//!
//! The folder `$FLOW_RESULTS` is shared by all tasks: `TASK/NAME` is the output `NAME` of `TASK`. An
//! attempt writes to a folder of its own, which becomes `TASK` when all outputs are there.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value as Json;

use super::text::{constant, filled, text_of};
use crate::spec::{Action, Placeholder, Source, Task, Type, Value, Workflow};

/// `text` as one word of a shell command.
pub fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The script of one attempt of `task`; its exit code is the command's. `path_of` gives the path of
/// a file or folder that no task makes, as a shell word.
pub fn attempt(workflow: &Workflow, task: &Task, path_of: &dyn Fn(&Json) -> String) -> String {
    let name = &task.name;
    let mut lines = vec![
        "#!/bin/sh".to_owned(),
        format!(
            "# One attempt of the task {name:?} of the workflow {:?}.",
            workflow.name
        ),
        "set -eu".to_owned(),
        ": \"${FLOW_RESULTS:?is the folder of all results}\"".to_owned(),
        "export FLOW_RESULTS FLOW_FOLDER".to_owned(),
        "newline='\n'".to_owned(),
    ];
    for (input, of) in &task.inputs {
        let variable = Task::input_variable(input);
        let value = match &of.value {
            Value::From(Source::Output { task, output }) if of.kind.is_path() => {
                format!("\"$FLOW_RESULTS/{task}/{output}\"")
            }
            Value::From(Source::Output { task, output }) => {
                // Without a final newline of the file. Command substitution alone would remove them all.
                let file = format!("\"$FLOW_RESULTS/{task}/{output}\"");
                lines.push(format!("{variable}=$(cat {file}; printf .)"));
                lines.push(format!("{variable}=${{{variable}%.}}"));
                format!("${{{variable}%\"$newline\"}}")
            }
            Value::From(Source::Input(_)) | Value::Constant(_) => {
                let value = constant(workflow, of).unwrap_or(&Json::Null);
                match of.kind.is_path() {
                    true => path_of(value),
                    false => quote(&text_of(of.kind, value)),
                }
            }
        };
        lines.push(format!("export {variable}={value}"));
    }
    let all = workflow.tasks.iter().flat_map(|task| &task.secrets);
    for name in all.collect::<BTreeSet<_>>() {
        let file = format!("{name}_FILE");
        lines.push(match task.secrets.contains(name) {
            true => format!(
                "{name}=${{{name}:-$(cat \"${{{file}:?or {name} must be set, a secret}}\")}}\nexport {name}\nunset {file}"
            ),
            false => format!("unset {name} {file}"),
        });
    }
    lines.extend([
        "mkdir -p \"$FLOW_RESULTS\"".to_owned(),
        format!("attempt=$(mktemp -d \"$FLOW_RESULTS/.{name}.XXXXXX\")"),
        "trap 'rm -rf \"$attempt\"' EXIT".to_owned(),
        "mkdir \"$attempt/outputs\" \"$attempt/work\"".to_owned(),
    ]);
    for output in task.outputs.keys() {
        let variable = Task::output_variable(output);
        lines.push(format!("export {variable}=\"$attempt/outputs/{output}\""));
    }
    lines.push("cd \"$attempt/work\"".to_owned());
    lines.push(format!("( {}exec {} ) &", environment(task), command(task)));
    // In a container this shell is process 1, which no signal ends by itself; `wait` ends at a signal.
    lines.extend(
        [
            "child=$!",
            "trap 'kill \"$child\" 2>/dev/null' TERM",
            "code=0",
            "wait \"$child\" || code=$?",
            "while kill -0 \"$child\" 2>/dev/null; do wait \"$child\" || code=$?; done",
            "[ \"$code\" -eq 0 ] || exit \"$code\"",
        ]
        .map(str::to_owned),
    );
    // As in the engine, no retry helps.
    let codes = task.unrecoverable.iter();
    let code = codes.copied().find(|code| (1..=255).contains(code));
    let code = code.unwrap_or(1);
    for (output, kind) in &task.outputs {
        let variable = Task::output_variable(output);
        let test = if *kind == Type::Folder { "-d" } else { "-f" };
        let missing = quote(&format!(
            "task {name}: the command has not written the {kind} {output}"
        ));
        lines.push(format!(
            "[ {test} \"${variable}\" ] || {{ echo {missing} >&2; exit {code}; }}"
        ));
    }
    lines.extend([
        // The exit trap's folder stays where it was.
        "cd /".to_owned(),
        format!("rm -rf \"$FLOW_RESULTS/{name}\""),
        format!("mv \"$attempt/outputs\" \"$FLOW_RESULTS/{name}\""),
    ]);
    lines.join("\n") + "\n"
}

/// `text` with placeholders as one word of a shell command.
fn word(text: &str) -> String {
    let variable = |placeholder: Placeholder<'_>| match placeholder {
        Placeholder::Input(name) => format!("\"${}\"", Task::input_variable(name)),
        Placeholder::Output(name) => format!("\"${}\"", Task::output_variable(name)),
        Placeholder::Folder => "\"$FLOW_FOLDER\"".to_owned(),
    };
    filled(text, quote, variable).concat()
}

fn environment(task: &Task) -> String {
    let set = task
        .env
        .iter()
        .map(|(name, value)| format!("export {name}={}; ", word(value)));
    set.collect()
}

fn command(task: &Task) -> String {
    let words = match &task.action {
        Action::Command(argv) => argv.iter().map(|arg| word(arg)).collect(),
        Action::Shell(text) => vec![
            "sh".to_owned(),
            "-eu".to_owned(),
            "-c".to_owned(),
            quote(text),
        ],
        Action::Function => Vec::new(),
    };
    words.join(" ")
}

/// The path `text` of a file or folder, relative to the folder of `flow.toml`.
pub fn absolute(workflow: &Workflow, value: &Json) -> std::path::PathBuf {
    workflow
        .folder
        .join(Path::new(value.as_str().unwrap_or_default()))
}
