//! Kubernetes: a Job for each task, a volume claim for all results, and `submit.sh`, which creates each Job
//! when those that it needs are complete. A Job that waited inside its pod would hold its resources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use phalanx_process::error::{Error, Result};
use serde_json::{Value as Json, json};

use super::{Notes, amounts, literal, outputs, quantity, script, seconds, template, uses_folder};
use crate::spec::{Resources, Task, Workflow};

/// Where the volume is mounted.
const VOLUME: &str = "/flow";
/// The folder of inputs on the volume.
const INPUTS: &str = "/flow/inputs";
/// The folder of `flow.toml` on the volume.
const FOLDER: &str = "/flow/folder";

pub fn files(workflow: &Workflow, notes: &mut Notes) -> Result<(Vec<(String, String)>, String)> {
    notes.of(
        "results are not cached; complete Jobs are not run again",
        |task| task.cache.is_some(),
    );
    notes.of("types of values are not checked between tasks", |task| {
        task.outputs.values().any(|kind| !kind.is_path())
    });
    notes.of(
        "the pause before a retry is Kubernetes' own: 10 s, doubled each time, at most 6 minutes",
        |task| task.retries.times > 0,
    );
    notes.of("a request of GPUs without a limit is a limit too", |task| {
        task.limits.gpus.is_none() && task.requests.gpus.is_some_and(|n| n > 0)
    });
    notes.of("only exit codes 1 to 255 can be unrecoverable", |task| {
        task.unrecoverable
            .iter()
            .any(|code| !(1..=255).contains(code))
    });
    if workflow.tasks.iter().any(uses_folder) {
        notes.say(format_args!(
            "copy the folder {} to {FOLDER} on the volume",
            workflow.folder.display()
        ));
    }
    let all = dns(&workflow.name, 30);
    let mut used = BTreeSet::new();
    let mut jobs = BTreeMap::new();
    let mut files = Vec::new();
    let mut copies = BTreeMap::new();
    for task in &workflow.tasks {
        let plain = format!("{all}-{}", dns(&task.name, 28));
        let mut job = plain.clone();
        while !used.insert(job.clone()) {
            job = format!("{plain}-{}", used.len());
        }
        let image = task.image.as_deref().ok_or_else(|| {
            Error::usage(format!("task {:?} has no container image", task.name)).note(
                "fix",
                "--image IMAGE, or its key `image`: Kubernetes runs each task in a container",
            )
        })?;
        for input in task.inputs.values().filter(|input| input.kind.is_path()) {
            if let Some(value) = super::constant(workflow, input) {
                let local = script::absolute(workflow, value);
                copies.insert(on_volume(&local), local);
            }
        }
        let path_of = |value: &Json| {
            let path = on_volume(&script::absolute(workflow, value));
            format!("\"$FLOW_INPUTS/\"{}", script::quote(&path))
        };
        files.push((
            format!("tasks/{}.sh", task.name),
            script::attempt(workflow, task, &path_of),
        ));
        files.push((
            format!("tasks/{}.yaml", task.name),
            yaml(&manifest(&all, &job, image, task)),
        ));
        jobs.insert(task.name.as_str(), job);
    }
    for (there, here) in copies {
        notes.say(format_args!(
            "copy {} to {INPUTS}/{there} on the volume",
            here.display()
        ));
    }
    files.push(("volume.yaml".to_owned(), yaml(&claim(&all))));
    files.push(("submit.sh".to_owned(), submit(workflow, &all, &jobs)));
    Ok((files, "sh submit.sh".to_owned()))
}

/// `name` as part of a name in Kubernetes: lower case letters, digits and `-`, at most `most` characters.
fn dns(name: &str, most: usize) -> String {
    // Names are ASCII.
    let plain = name[..name.len().min(most)]
        .to_lowercase()
        .replace('_', "-");
    match plain.trim_matches('-') {
        "" => "flow".to_owned(),
        name => name.to_owned(),
    }
}

/// Where a file or folder of this machine is expected in the volume's folder of inputs.
fn on_volume(path: &Path) -> String {
    path.to_string_lossy().trim_matches('/').to_owned()
}

fn claim(all: &str) -> Json {
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": all, "labels": { "phalanx-flow": all } },
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": { "requests": { "storage": "10Gi" } },
        },
    })
}

fn manifest(all: &str, job: &str, image: &str, task: &Task) -> Json {
    let labels = json!({ "phalanx-flow": all });
    let amount = |of: &Resources| {
        let amounts = [
            ("cpu", of.cpus.map(|n| n.to_string())),
            ("memory", of.memory.map(quantity)),
            ("ephemeral-storage", of.storage.map(quantity)),
            ("nvidia.com/gpu", amounts(task).gpus.map(|n| n.to_string())),
        ];
        let set = amounts
            .into_iter()
            .filter_map(|(name, amount)| Some((name.to_owned(), amount?.into())));
        Json::Object(set.collect())
    };
    let mut pod = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "containers": [{
            "name": "task",
            "image": image,
            "command": ["sh", format!("/flow-scripts/{}.sh", task.name)],
            "env": [
                { "name": "FLOW_RESULTS", "value": format!("{VOLUME}/results") },
                { "name": "FLOW_INPUTS", "value": INPUTS },
                { "name": "FLOW_FOLDER", "value": FOLDER },
            ],
            "resources": { "requests": amount(&task.requests), "limits": amount(&task.limits) },
            "volumeMounts": [
                { "name": "flow", "mountPath": VOLUME },
                { "name": "scripts", "mountPath": "/flow-scripts", "readOnly": true },
            ],
        }],
        "volumes": [
            { "name": "flow", "persistentVolumeClaim": { "claimName": all } },
            { "name": "scripts", "configMap": { "name": format!("{all}-scripts") } },
        ],
    });
    if let Some(limit) = task.timeout {
        // Of each pod, and each attempt is a pod.
        pod["activeDeadlineSeconds"] = seconds(limit).max(1).into();
    }
    let mut spec = json!({
        "backoffLimit": task.retries.times.min(i32::MAX as u32),
        "template": { "metadata": { "labels": labels }, "spec": pod },
    });
    let codes: BTreeSet<i32> = task
        .unrecoverable
        .iter()
        .copied()
        .filter(|c| (1..=255).contains(c))
        .collect();
    if !codes.is_empty() {
        let when = json!({ "containerName": "task", "operator": "In", "values": codes });
        spec["podFailurePolicy"] =
            json!({ "rules": [{ "action": "FailJob", "onExitCodes": when }] });
    }
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": { "name": job, "labels": labels },
        "spec": spec,
    })
}

/// `value` as YAML: strings in double quotes, one entry a line.
fn yaml(value: &Json) -> String {
    let mut out = String::new();
    block(value, 0, &mut out);
    out
}

fn block(value: &Json, depth: usize, out: &mut String) {
    let indent = "  ".repeat(depth);
    let is_block = |value: &Json| match value {
        Json::Object(map) => !map.is_empty(),
        Json::Array(list) => !list.is_empty(),
        _ => false,
    };
    let scalar = |value: &Json| match value {
        Json::String(text) => literal(text),
        other => other.to_string(),
    };
    match value {
        Json::Object(map) => {
            for (key, value) in map {
                if is_block(value) {
                    out.push_str(&format!("{indent}{key}:\n"));
                    block(value, depth + 1, out);
                } else {
                    out.push_str(&format!("{indent}{key}: {}\n", scalar(value)));
                }
            }
        }
        Json::Array(list) => {
            for value in list {
                let start = out.len() + indent.len();
                if is_block(value) {
                    block(value, depth + 1, out);
                    // In the place of two of its spaces.
                    out.replace_range(start..start + 2, "- ");
                } else {
                    out.push_str(&format!("{indent}- {}\n", scalar(value)));
                }
            }
        }
        _ => {}
    }
}

fn submit(workflow: &Workflow, all: &str, jobs: &BTreeMap<&str, String>) -> String {
    let (mut names, mut scripts, mut cases) = (String::new(), String::new(), String::new());
    for task in &workflow.tasks {
        let (name, needs) = (&task.name, Vec::from_iter(task.dependencies()).join(" "));
        let job = &jobs[name.as_str()];
        names.push_str(&format!(" {name}"));
        scripts.push_str(&format!(" --from-file=tasks/{name}.sh"));
        cases.push_str(&format!("        '{name}') job={job} needs='{needs}' ;;\n"));
    }
    let marks = [
        ("@NAME@", workflow.name.as_str()),
        ("@ALL@", all),
        ("@TASKS@", &names),
        ("@SCRIPTS@", &scripts),
        ("@CASES@", &cases),
        ("@OUTPUTS@", &outputs(workflow)),
    ];
    template(include_str!("kubernetes_submit.sh"), &marks)
}
