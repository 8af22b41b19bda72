//! Kubernetes: a Job for each task, a volume claim for all results, and `submit.sh`, which creates each Job
//! when those that it needs are complete. A Job that waited inside its pod would hold its resources.
//!
//! Names of Jobs and the folder of results have a digest of all scripts, manifests and input files: complete Jobs of
//! another export are not taken for those of this one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use phalanx_base::error::{Error, Result};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

use super::script;
use super::text::{
    Notes, ONE_STORAGE, SECRETS, amounts, constant, has_both, has_secrets, literal, outputs,
    quantity, seconds, template, uses_folder,
};
use crate::objects::digest;
use crate::spec::{Resources, Task, Type, Workflow, parse_size};

/// Where the volume is mounted.
const VOLUME: &str = "/flow";
/// The folder of inputs on the volume.
const INPUTS: &str = "/flow/inputs";
/// The folder of `flow.toml` on the volume.
const FOLDER: &str = "/flow/folder";

/// Paths and texts.
type Files = Vec<(String, String)>;

/// The volume of all results and inputs.
#[derive(clap::Args, Clone, Debug, Default, PartialEq)]
pub(crate) struct Volume {
    /// Kubernetes: size of the volume [default: 10GiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub volume_size: Option<u64>,
    /// Kubernetes: access mode of the volume; with ReadWriteOnce all pods run on one node [default: ReadWriteMany]
    #[arg(long, value_name = "MODE", value_parser = ["ReadWriteMany", "ReadWriteOnce"])]
    pub access_mode: Option<String>,
    /// Kubernetes: storage class of the volume [default: that of the cluster]
    #[arg(long, value_name = "NAME")]
    pub storage_class: Option<String>,
}

pub fn files(workflow: &Workflow, volume: &Volume, notes: &mut Notes) -> Result<(Files, String)> {
    notes.of(
        "results are not cached; complete Jobs are not run again while the export is the same",
        |task| task.cache.is_some(),
    );
    notes.of("types of values are not checked between tasks", |task| {
        task.outputs.values().any(|kind| !kind.is_path())
    });
    notes.of(
        "the pause before a retry is Kubernetes' own: 10 s, doubled each time, at most 6 minutes",
        |task| task.retries.times > 0,
    );
    notes.of(ONE_STORAGE, has_both);
    notes.of(SECRETS, has_secrets);
    notes.of("a request of GPUs without a limit is a limit too", |task| {
        task.limits.gpus.is_none() && task.requests.gpus.is_some_and(|n| n > 0)
    });
    notes.of("only exit codes 1 to 255 can be unrecoverable", |task| {
        task.unrecoverable
            .iter()
            .any(|code| !(1..=255).contains(code))
    });
    let all = dns(&workflow.name, 30);
    if workflow.tasks.iter().any(uses_folder) {
        notes.say(format_args!(
            "copy the folder {} to {FOLDER} on the volume; when it changes, copy it again and {}",
            workflow.folder.display(),
            again(&all)
        ));
    }
    let mut hash = Sha256::new();
    for (there, (here, kind)) in copies(workflow) {
        notes.say(format_args!(
            "copy {} to {INPUTS}/{there} on the volume",
            here.display()
        ));
        match digest(&here, kind, false) {
            Ok(object) => hash.update(object.sha256),
            Err(error) => notes.say(format_args!(
                "{} cannot be read here ({error}): when it changes, {}",
                here.display(),
                again(&all)
            )),
        }
    }
    // What decides the results, without the names that it gives.
    for (name, text) in tasks(workflow, &all, "")?.0 {
        hash.update(format!("{name}\n{text}\0"));
    }
    let run = &hex::encode(hash.finalize())[..8];
    let (mut files, jobs) = tasks(workflow, &all, run)?;
    files.push(("volume.yaml".to_owned(), yaml(&claim(&all, volume))));
    files.push(("submit.sh".to_owned(), submit(workflow, &all, run, &jobs)));
    Ok((files, "sh submit.sh".to_owned()))
}

/// What to do when something has changed that an export does not see.
fn again(all: &str) -> String {
    format!("run `kubectl delete job -l phalanx-flow={all}` before submit.sh")
}

/// Files and folders of this machine that are inputs, by where they are on the volume.
fn copies(workflow: &Workflow) -> BTreeMap<String, (PathBuf, Type)> {
    let inputs = workflow.tasks.iter().flat_map(|task| task.inputs.values());
    let paths = inputs.filter(|input| input.kind.is_path());
    let copy = |input| {
        let local = script::absolute(workflow, constant(workflow, input)?);
        Some((on_volume(&local), (local, input.kind)))
    };
    paths.filter_map(copy).collect()
}

/// The script and the Job of each task, and the names of the Jobs. `run` becomes part of them.
fn tasks<'a>(
    workflow: &'a Workflow,
    all: &str,
    run: &str,
) -> Result<(Files, BTreeMap<&'a str, String>)> {
    let mut used = BTreeSet::new();
    let mut jobs = BTreeMap::new();
    let mut files = Vec::new();
    for task in &workflow.tasks {
        // At most 63 characters with a number behind.
        let plain = format!("{all}-{}-{run}", dns(&task.name, 20));
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
            yaml(&manifest(all, run, &job, image, task)),
        ));
        jobs.insert(task.name.as_str(), job);
    }
    Ok((files, jobs))
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

fn claim(all: &str, volume: &Volume) -> Json {
    let mut claim = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": all, "labels": { "phalanx-flow": all } },
        "spec": {
            "accessModes": [volume.access_mode.as_deref().unwrap_or("ReadWriteMany")],
            "resources": { "requests": { "storage": quantity(volume.volume_size.unwrap_or(10 << 30)) } },
        },
    });
    if let Some(class) = &volume.storage_class {
        claim["spec"]["storageClassName"] = class.as_str().into();
    }
    claim
}

fn manifest(all: &str, run: &str, job: &str, image: &str, task: &Task) -> Json {
    let labels = json!({ "phalanx-flow": all });
    let amount = |of: &Resources| {
        let amounts = [
            ("cpu", of.cpus.map(|n| n.to_string())),
            ("memory", of.memory.map(quantity)),
            ("ephemeral-storage", of.on_host().map(quantity)),
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
                { "name": "FLOW_RESULTS", "value": format!("{VOLUME}/results/{run}") },
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
            { "name": "scripts", "configMap": { "name": format!("{all}-scripts-{run}") } },
        ],
    });
    if let Some(env) = pod["containers"][0]["env"].as_array_mut() {
        env.extend(task.secrets.iter().map(|name| {
            let key = json!({ "name": dns(name, 63), "key": name });
            json!({ "name": name, "valueFrom": { "secretKeyRef": key } })
        }));
    }
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

fn submit(workflow: &Workflow, all: &str, run: &str, jobs: &BTreeMap<&str, String>) -> String {
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
        ("@RUN@", run),
        ("@TASKS@", &names),
        ("@SCRIPTS@", &scripts),
        ("@CASES@", &cases),
        ("@OUTPUTS@", &outputs(workflow, &format!("results/{run}"))),
    ];
    template(include_str!("kubernetes_submit.sh"), &marks)
}
