//! Flyte: a Python module for flytekit, with a function for each task that runs its command.

use std::collections::BTreeSet;

use serde_json::Value as Json;

use super::script;
use super::text::{
    Notes, ONE_STORAGE, SECRETS, filled, has_both, has_secrets, literal, quantity, uses_folder,
};
use crate::spec::{
    Action, Placeholder, Resources, Scalar, Source, Task, TaskInput, Type, Value, Workflow,
};

/// The fixed part of the module.
const START: &str = include_str!("flyte.py");

/// Words that Python or flytekit's own calls take for themselves.
const RESERVED: &str = "self ctx entity node_id overridden_interface add_node_to_compilation_state \
    False None True and as assert async await break class continue def del elif else except finally for from \
    global if import in is lambda nonlocal not or pass raise return try while with yield";

pub fn files<'a>(workflow: &'a Workflow, notes: &mut Notes) -> (Vec<(String, String)>, String) {
    notes.of("Flyte chooses the pause before a retry", |task| {
        task.retries.times > 0
    });
    notes.of(
        "a cached task compares the paths of its files, not their content",
        |task| task.cache.is_some() && task.inputs.values().any(|input| input.kind.is_path()),
    );
    notes.of("storage is ephemeral storage", |task| {
        let of = [&task.requests, &task.limits];
        of.iter()
            .any(|of| of.storage.is_some() && of.ephemeral_storage.is_none())
    });
    notes.of(ONE_STORAGE, has_both);
    notes.of(
        "the image must have the folder of flow.toml at $FLOW_FOLDER",
        uses_folder,
    );
    notes.of(SECRETS, has_secrets);
    notes.of(
        "the task runs in Flyte's default image unless its key `image` is set",
        |task| task.image.is_none(),
    );
    let of_task = |task: &'a Task| {
        task.inputs
            .keys()
            .chain(task.outputs.keys())
            .chain([&task.name])
    };
    let names = workflow.tasks.iter().flat_map(of_task);
    let own = workflow.inputs.keys().chain(workflow.outputs.keys());
    for name in names.chain(own).collect::<BTreeSet<_>>() {
        let other = identifier(name);
        if other != *name {
            notes.say(format_args!(
                "{name} is called {other} there: {name} is reserved"
            ));
        }
    }
    let folder = literal(&workflow.folder.to_string_lossy());
    let mut text = format!(
        "{START}\n\n# The folder of flow.toml.\n_FLOW_FOLDER = _os.environ.get(\"FLOW_FOLDER\", {folder})\n"
    );
    let groups: BTreeSet<&str> = workflow
        .inputs
        .keys()
        .filter_map(|name| group(name))
        .collect();
    for group in groups {
        let (fields, _) = parameters(workflow, &format!("{group}."));
        text.push_str(&format!(
            "\n\n@_dataclasses.dataclass\nclass _{group}_inputs:\n    {}\n",
            fields.join("\n    ")
        ));
    }
    for task in &workflow.tasks {
        text.push_str(&function(workflow, task));
    }
    let wf = workflow_name(workflow);
    text.push_str(&main(workflow, &wf));
    // Not the name of a module that it imports.
    let file = format!("flow_{wf}.py");
    let next = format!("pyflyte run {file} {wf}");
    (vec![(file, text)], next)
}

/// The workflow's name as a name of Python, which no task has.
fn workflow_name(workflow: &Workflow) -> String {
    let mut name = workflow.name.replace('-', "_");
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        name.insert_str(0, "wf_");
    }
    while workflow.task(&name).is_some() || identifier(&name) != name {
        name.push_str("_wf");
    }
    name
}

/// The group of an input `GROUP.NAME`.
fn group(name: &str) -> Option<&str> {
    Some(name.split_once('.')?.0)
}

/// `name` as a name of Python, `GROUP.NAME` as an attribute; two names stay two.
fn identifier(name: &str) -> String {
    if let Some((group, name)) = name.split_once('.') {
        return format!("{}.{}", identifier(group), identifier(name));
    }
    // `class_` becomes `class__`, as `class` becomes `class_`.
    let bare = name.trim_end_matches('_');
    match RESERVED.split(' ').any(|word| word == bare) {
        true => format!("{name}_"),
        false => name.to_owned(),
    }
}

fn annotation(kind: Type) -> String {
    match kind {
        Type::List(item) => format!("_list[{}]", annotation(item.into())),
        Type::Int => "_int".to_owned(),
        Type::Float => "_float".to_owned(),
        Type::Bool => "_bool".to_owned(),
        // JSON as text: numbers of Flyte's own structures are all floating point.
        Type::String | Type::Json => "_str".to_owned(),
        Type::File => "_File".to_owned(),
        Type::Folder => "_Folder".to_owned(),
    }
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

/// `value` of type `kind` in Python.
fn python(workflow: &Workflow, kind: Type, value: &Json) -> String {
    match (kind, value) {
        (Type::Json, value) => literal(&value.to_string()),
        (Type::File | Type::Folder, value) => {
            let path = script::absolute(workflow, value);
            format!("{}({})", annotation(kind), literal(&path.to_string_lossy()))
        }
        (Type::List(item), Json::Array(items)) => {
            let items = items.iter().map(|v| python(workflow, item.into(), v));
            format!("[{}]", list(items))
        }
        (_, Json::Bool(true)) => "True".to_owned(),
        (_, Json::Bool(false)) => "False".to_owned(),
        (_, Json::String(text)) => literal(text),
        (kind, value) => kind.canonical(value).to_string(),
    }
}

/// The type that a task's input has in Flyte: that of its source. Flyte converts no integer to a float.
fn kind_of(workflow: &Workflow, input: &TaskInput) -> Type {
    match &input.value {
        Value::From(source) => workflow.type_of(source).unwrap_or(input.kind),
        Value::Constant(_) => input.kind,
    }
}

fn outputs_type<'a>(owner: &str, outputs: impl Iterator<Item = (&'a String, Type)>) -> String {
    let field = |(name, kind): (&String, _)| {
        format!("({}, {})", literal(&identifier(name)), annotation(kind))
    };
    match list(outputs.map(field)).as_str() {
        "" => format!("_{owner}_outputs = None\n"),
        fields => {
            format!("_{owner}_outputs = _typing.NamedTuple(\"{owner}_outputs\", [{fields}])\n")
        }
    }
}

fn resources(of: &Resources) -> String {
    let amounts = [
        ("cpu", of.cpus.map(|n| n.to_string())),
        ("mem", of.memory.map(quantity)),
        ("gpu", of.gpus.map(|n| n.to_string())),
        ("ephemeral_storage", of.on_host().map(quantity)),
    ];
    let set =
        |(name, n): &(&str, Option<String>)| Some(format!("{name}={}", literal(n.as_deref()?)));
    format!(
        "_flytekit.Resources({})",
        list(amounts.iter().filter_map(set))
    )
}

/// `text` with placeholders as an expression.
fn expression(text: &str) -> String {
    let value = |placeholder: Placeholder<'_>| match placeholder {
        Placeholder::Input(name) => format!("_run.inputs[{}]", literal(name)),
        Placeholder::Output(name) => format!("_run.outputs[{}]", literal(name)),
        Placeholder::Folder => "_FLOW_FOLDER".to_owned(),
    };
    filled(text, literal, value).join(" + ")
}

/// `value`, whose integers become floats where `kind` says so.
fn float(kind: Type, value: &str) -> String {
    match kind {
        Type::Float => format!("_float({value})"),
        Type::List(Scalar::Float) => format!("[_float(_item) for _item in {value}]"),
        _ => value.to_owned(),
    }
}

fn function(workflow: &Workflow, task: &Task) -> String {
    let name = identifier(&task.name);
    let mut options = Vec::new();
    if task.retries.times > 0 {
        options.push(format!("retries={}", task.retries.times));
    }
    if let Some(limit) = task.timeout {
        options.push(format!(
            "timeout=_datetime.timedelta(seconds={})",
            limit.as_secs_f64()
        ));
    }
    if let Some(cache) = &task.cache {
        options.push(format!("cache=_flytekit.Cache(version={})", literal(cache)));
    }
    for (key, of) in [("requests", &task.requests), ("limits", &task.limits)] {
        if *of != Resources::default() {
            options.push(format!("{key}={}", resources(of)));
        }
    }
    if let Some(image) = &task.image {
        options.push(format!("container_image={}", literal(image)));
    }
    let secrets = list(task.secrets.iter().map(|name| literal(name)));
    if !secrets.is_empty() {
        options.push(format!("secret_requests=[*_map(_secret, [{secrets}])]"));
    }
    let parameter = |(input, of): (&String, &TaskInput)| match of_group(input, of) {
        Some((own, group)) => format!("{}: _{group}_inputs", identifier(own)),
        None => format!(
            "{}: {}",
            identifier(input),
            annotation(kind_of(workflow, of))
        ),
    };
    // Inputs of one group are next to each other.
    let mut parameters: Vec<String> = task.inputs.iter().map(parameter).collect();
    parameters.dedup();
    let parameters = parameters.join(", ");
    let inputs = list(task.inputs.iter().map(|(input, of)| {
        let value = float(of.kind, &identifier(input));
        format!("{}: {value}", literal(input))
    }));
    let outputs = list(task.outputs.keys().map(|output| literal(output)));
    let argv = list(
        match &task.action {
            Action::Command(argv) => argv.iter().map(|arg| expression(arg)).collect(),
            Action::Shell(text) => ["sh", "-eu", "-c", text].map(literal).to_vec(),
            Action::Function => Vec::new(),
        }
        .into_iter(),
    );
    let variable =
        |(name, value): (&String, &String)| format!("{}: {}", literal(name), expression(value));
    let env = list(task.env.iter().map(variable));
    let results = list(task.outputs.iter().map(|(output, kind)| {
        let (key, name) = (identifier(output), literal(output));
        let value = match kind {
            Type::File | Type::Folder => format!("{}(_run.path({name}))", annotation(*kind)),
            Type::String | Type::Json => format!("_run.text({name})"),
            _ => float(*kind, &format!("_run.value({name})")),
        };
        format!("{key}={value}")
    }));
    let result = match results.is_empty() {
        true => String::new(),
        false => format!("    return _{name}_outputs({results})\n"),
    };
    format!(
        "\n\n{}\n\n@_flytekit.task({})\n\
         def {name}({parameters}) -> _{name}_outputs:\n    \
             _run = _Attempt({}, {{{inputs}}}, [{outputs}])\n    \
             _run.run([{argv}], {{{env}}}, {:?}, [{secrets}])\n\
         {result}",
        outputs_type(&name, task.outputs.iter().map(|(name, kind)| (name, *kind))),
        options.join(", "),
        literal(&task.name),
        task.unrecoverable,
    )
}

/// The group of the task that `input` belongs to, and that of the workflow from which it is.
fn of_group<'a>(input: &'a str, of: &'a TaskInput) -> Option<(&'a str, &'a str)> {
    match &of.value {
        Value::From(Source::Input(source)) => Some((group(input)?, group(source)?)),
        _ => None,
    }
}

/// The workflow's inputs whose names begin with `prefix`, as fields of a dataclass: those without
/// a default first; and whether all have one.
fn parameters(workflow: &Workflow, prefix: &str) -> (Vec<String>, bool) {
    let (mut required, mut optional) = (Vec::new(), Vec::new());
    for (name, input) in &workflow.inputs {
        let Some(name) = name.strip_prefix(prefix) else {
            continue;
        };
        let field = format!("{}: {}", identifier(name), annotation(input.kind));
        match &input.default {
            None => required.push(field),
            Some(value) => {
                let value = python(workflow, input.kind, value);
                optional.push(format!(
                    "{field} = _dataclasses.field(default_factory=lambda: {value})"
                ));
            }
        }
    }
    let has_defaults = required.is_empty();
    required.append(&mut optional);
    (required, has_defaults)
}

fn main(workflow: &Workflow, wf: &str) -> String {
    let (mut required, mut optional) = (Vec::new(), Vec::new());
    for (name, input) in &workflow.inputs {
        let (parameter, default) = match group(name) {
            Some(group) => {
                let class = format!("_{group}_inputs");
                let (_, has_defaults) = parameters(workflow, &format!("{group}."));
                let default = has_defaults.then(|| format!("{class}()"));
                (format!("{}: {class}", identifier(group)), default)
            }
            None => (
                format!("{}: {}", identifier(name), annotation(input.kind)),
                (input.default.as_ref()).map(|value| python(workflow, input.kind, value)),
            ),
        };
        match default {
            None => required.push(parameter),
            Some(value) => optional.push(format!("{parameter} = {value}")),
        }
    }
    required.append(&mut optional);
    // Inputs of one group are next to each other.
    required.dedup();
    let reference = |source: &Source| match source {
        Source::Input(name) => identifier(name),
        Source::Output { task, output } => format!("_of_{task}.{}", identifier(output)),
    };
    let type_of = |(name, source)| (name, workflow.type_of(source).unwrap_or(Type::Json));
    let mut text = format!(
        "\n\n{}\n\n@_flytekit.workflow\ndef {wf}({}) -> _{wf}_outputs:\n",
        outputs_type(wf, workflow.outputs.iter().map(type_of)),
        required.join(", ")
    );
    for task in &workflow.tasks {
        let argument = |(name, input): (&String, &TaskInput)| {
            let value = match &input.value {
                Value::From(source) => reference(source),
                Value::Constant(value) => python(workflow, input.kind, value),
            };
            match of_group(name, input) {
                Some((own, group)) => format!("{}={}", identifier(own), identifier(group)),
                None => format!("{}={value}", identifier(name)),
            }
        };
        let mut arguments: Vec<String> = task.inputs.iter().map(argument).collect();
        arguments.dedup();
        let arguments = arguments.join(", ");
        let name = &task.name;
        text.push_str(&format!(
            "    _of_{name} = {}({arguments})\n",
            identifier(name)
        ));
        for other in &task.after {
            text.push_str(&format!("    _of_{other} >> _of_{name}\n"));
        }
    }
    let result =
        |(name, source): (&String, &Source)| format!("{}={}", identifier(name), reference(source));
    let results = list(workflow.outputs.iter().map(result));
    if !results.is_empty() {
        text.push_str(&format!("    return _{wf}_outputs({results})\n"));
    }
    text
}
