//! Slurm: a batch script for each task, and `submit.sh`, which submits them in order.

use std::time::Duration;

use super::script;
use super::text::{
    Notes, ONE_STORAGE, amounts, has_both, has_secrets, outputs, seconds, template, uses_folder,
};
use crate::spec::{Task, Workflow};

/// Extra time for a job in addition to its attempts: start, and the end of a command that was stopped.
const MARGIN: Duration = Duration::from_secs(60);

pub fn files(workflow: &Workflow, notes: &mut Notes) -> (Vec<(String, String)>, String) {
    notes.of("results are not cached", |task| task.cache.is_some());
    notes.of("container images are not used", |task| task.image.is_some());
    notes.of("types of values are not checked between tasks", |task| {
        task.outputs.values().any(|kind| !kind.is_path())
    });
    notes.of(
        "Slurm has one amount of each resource: it gets the limit, not the smaller request",
        |task| {
            let (asked, limits) = (&task.requests, &task.limits);
            (asked.cpus.is_some() && limits.cpus.is_some_and(|n| Some(n) != asked.cpus))
                || (asked.memory.is_some()
                    && limits.memory.is_some_and(|n| Some(n) != asked.memory))
                || (asked.on_host().is_some()
                    && limits.on_host().is_some_and(|n| Some(n) != asked.on_host()))
        },
    );
    notes.of("disk space is requested (--tmp), not limited", |task| {
        task.limits.on_host().is_some()
    });
    notes.of(ONE_STORAGE, has_both);
    notes.of(
        "secrets are variables of the shell that runs submit.sh, which Slurm keeps until the job ends; with NAME_FILE, the path of a file, it keeps no secret",
        has_secrets,
    );
    let mut files = Vec::new();
    for task in &workflow.tasks {
        let path_of =
            |value: &_| script::quote(&script::absolute(workflow, value).to_string_lossy());
        files.push((
            format!("tasks/{}.sh", task.name),
            script::attempt(workflow, task, &path_of),
        ));
        files.push((format!("tasks/{}.sbatch", task.name), batch(workflow, task)));
    }
    files.push(("submit.sh".to_owned(), submit(workflow)));
    (
        files,
        "on a file system that all nodes share: sh submit.sh".to_owned(),
    )
}

fn batch(workflow: &Workflow, task: &Task) -> String {
    let name = &task.name;
    let amounts = amounts(task);
    let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
    let options = [
        Some(format!("--job-name={}-{name}", workflow.name)),
        Some("--nodes=1 --ntasks=1".to_owned()),
        amounts.cpus.map(|n| format!("--cpus-per-task={n}")),
        amounts
            .memory
            .map(|bytes| format!("--mem={}M", mebibytes(bytes))),
        amounts.gpus.map(|n| format!("--gpus={n}")),
        amounts
            .storage
            .map(|bytes| format!("--tmp={}M", mebibytes(bytes))),
        time(task).map(|minutes| format!("--time={minutes}")),
        Some("--requeue --open-mode=append".to_owned()),
        Some(format!("--output=logs/{name}.log")),
    ];
    let options: Vec<String> = options
        .iter()
        .flatten()
        .map(|o| format!("#SBATCH {o}"))
        .collect();
    let folder = match uses_folder(task) {
        true => script::quote(&workflow.folder.to_string_lossy()),
        false => "''".to_owned(),
    };
    let limit = task
        .timeout
        .map(|limit| format!("timeout -k 10 {} ", seconds(limit).max(1)));
    let mut codes: Vec<String> = task.unrecoverable.iter().map(i32::to_string).collect();
    if codes.is_empty() {
        codes.push("none".to_owned());
    }
    let marks = [
        ("@NAME@", workflow.name.as_str()),
        ("@TASK@", name),
        ("@OPTIONS@", &options.join("\n")),
        ("@LIMIT@", &limit.unwrap_or_default()),
        (
            "@PAUSE@",
            &seconds(task.retries.backoff).min(3600).to_string(),
        ),
        (
            "@ATTEMPTS@",
            &(u64::from(task.retries.times) + 1).to_string(),
        ),
        ("@UNRECOVERABLE@", &codes.join(" | ")),
        // The last one: a folder may have any name.
        ("@FOLDER@", &folder),
    ];
    template(include_str!("slurm_task.sh"), &marks)
}

/// Minutes for all attempts and pauses, if attempts are limited.
fn time(task: &Task) -> Option<u64> {
    let limit = task.timeout?;
    let pauses = (1..=task.retries.times.min(64)).map(|attempt| task.retries.pause(attempt));
    let more = task.retries.times.saturating_sub(64);
    let pauses = pauses.sum::<Duration>() + task.retries.pause(64).saturating_mul(more);
    let attempts = limit.saturating_mul(task.retries.times.saturating_add(1));
    let all = attempts.saturating_add(pauses).saturating_add(MARGIN);
    Some(all.as_secs().div_ceil(60))
}

fn submit(workflow: &Workflow) -> String {
    let marks = [("@NAME@", workflow.name.as_str())];
    let mut text = template(include_str!("slurm_submit.sh"), &marks);
    for task in &workflow.tasks {
        let needs = task.dependencies();
        let needs: String = needs.iter().map(|need| format!(":$job_{need}")).collect();
        let name = &task.name;
        text.push_str(&format!(
            "submit {name} \"{needs}\" \"$@\"\njob_{name}=$id\n"
        ));
    }
    text + &outputs(workflow, "results")
}
