//! The commands: `run`, `list`, `show`, `logs`, `cancel`, `rm`, `prune`, `cache`, `export`.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches};
use phalanx_base::error::{Error, ErrorKind, Result, refuse};
use phalanx_base::files::atomic_write;
use phalanx_base::{format, say};
use serde_json::{Value as Json, json};

use crate::child::log_file;
use crate::create;
use crate::engine::{self, Options};
use crate::export::{self, ExportArgs};
use crate::file::FLOW_FILE;
use crate::flow::{Flow, helper};
use crate::lock::Engine;
use crate::objects::export_copy;
use crate::page::{self, shown, time, took};
use crate::prune::{self, Keep};
use crate::resources::size;
use crate::spec::{Action, Resources, Task, Workflow, parse_size};
use crate::store::{Item, Items, Node, Run, State, Store, objects_in};

/// Arguments of `phalanx flow`.
#[derive(clap::Args, Debug)]
pub struct FlowCli {
    #[command(subcommand)]
    command: Command,
    /// Folder of runs, results and cache
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "PHALANX_FLOW_DIR",
        default_value = ".phalanx/flow"
    )]
    store: PathBuf,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Run a workflow, or continue a run
    Run(RunArgs),
    /// List runs
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a run: its tasks, attempts, times and outputs
    Show {
        /// Run, or "last"
        run: String,
        /// Print JSON
        #[arg(long, conflicts_with = "html")]
        json: bool,
        /// Write one HTML page with the graph, a timeline and each task
        #[arg(long, value_name = "FILE")]
        html: Option<PathBuf>,
    },
    /// Print the output of a task
    Logs {
        /// Run, or "last"
        run: String,
        /// Task
        task: String,
        /// Attempt, from 1 [default: the last one]
        #[arg(long, value_name = "N")]
        attempt: Option<usize>,
        /// Print what is added until the attempt ends
        #[arg(long)]
        follow: bool,
    },
    /// Copy an output out of the store
    Get {
        /// Run, or "last"
        run: String,
        /// Output of the workflow, or TASK.OUTPUT
        output: String,
        /// Where to write it; a folder that exists gets it under its own name
        to: PathBuf,
    },
    /// Stop a run; it can be resumed
    Cancel {
        /// Run, or "last"
        run: String,
    },
    /// Remove runs; results that are cached stay
    Rm {
        /// Runs, or "last"
        #[arg(required = true, value_name = "RUN")]
        runs: Vec<String>,
    },
    /// Remove files that nothing needs and folders of failed attempts; with an age or a size, old runs and cached results too
    Prune(Keep),
    /// List, clear or verify cached results
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Write files that run a workflow on Flyte, Kubernetes or Slurm
    Export(ExportArgs),
}

#[derive(clap::Args, Debug)]
struct RunArgs {
    /// Workflow file, or its folder [default: flow.toml]
    file: Option<PathBuf>,
    /// Set an input of the workflow; a file or folder by its path
    #[arg(long, value_name = "NAME=VALUE")]
    input: Vec<String>,
    /// Continue a run ("last": the last one); tasks that are done are not run again
    #[arg(long, value_name = "RUN", conflicts_with_all = ["file", "input"])]
    resume: Option<String>,
    /// Do not use cached results; new ones are stored
    #[arg(long)]
    no_cache: bool,
    /// Processors that tasks may use together [default: all]
    #[arg(long, value_name = "N")]
    cpus: Option<u32>,
    /// Memory that tasks may request together, such as 8GiB [default: all]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,
    /// GPUs that tasks may use together [default: all]
    #[arg(long, value_name = "N")]
    gpus: Option<u32>,
}

#[derive(clap::Subcommand, Debug)]
enum CacheCommand {
    /// List cached results
    List,
    /// Forget cached results, and delete files that no run needs
    Clear {
        /// Those of this task only
        task: Option<String>,
    },
    /// Read all cached files and compare them with their SHA-256
    Verify,
}

/// Runs `phalanx flow`. Must be called on the main thread.
///
/// # Errors
///
/// Those of the command; [`ErrorKind::Failed`] when a task has failed.
pub fn run(cli: &FlowCli) -> Result<()> {
    run_with(cli, None)
}

/// Runs the command line of a program with one workflow: `run`, `list`, `show`, `logs`, `cancel`,
/// `rm`, `prune` and `cache`, as `phalanx flow`. Call it first in `main`: tasks are this program, started again.
pub fn main(flow: Flow) -> ExitCode {
    let outcome = helper(Some(&flow)).unwrap_or_else(|| {
        phalanx_base::stop::tell_limits();
        let args: Vec<OsString> = std::env::args_os().collect();
        main_of(&flow, args)
    });
    phalanx_process::error_file::exit_code(outcome)
}

/// As [`run`], of a program with one workflow of functions.
fn main_of(flow: &Flow, args: Vec<OsString>) -> Result<()> {
    // Not a doc comment: it would be the program's help.
    #[derive(clap::Parser)]
    #[command(disable_help_subcommand = true)]
    struct Program {
        #[command(flatten)]
        cli: FlowCli,
    }
    let name = flow.workflow.name.clone();
    let about = format!("Run the workflow {name}.");
    let mut parser = Program::command().name(name).about(about);
    parser = parser.mut_subcommand("run", |run| run.mut_arg("file", |file| file.hide(true)));
    let parsed = parser.try_get_matches_from_mut(args);
    match parsed.and_then(|matches| Program::from_arg_matches(&matches)) {
        Ok(program) => run_with(&program.cli, Some(flow)),
        Err(error) => {
            // A closed output is no second error.
            let _ = error.print();
            match error.use_stderr() {
                true => Err(Error::usage("wrong arguments").printed()),
                false => Ok(()),
            }
        }
    }
}

fn run_with(cli: &FlowCli, flow: Option<&Flow>) -> Result<()> {
    match &cli.command {
        Command::Run(args) => return run_flow(&cli.store, args, flow),
        Command::Export(args) => {
            return export::run(args, workflow_of(args.file.as_deref(), flow)?);
        }
        _ => {}
    }
    let store = Store::open(&cli.store)?;
    match &cli.command {
        Command::Run(_) | Command::Export(_) => Ok(()),
        Command::List { json } => list(&store, *json),
        Command::Show { run, json, html } => show(&store, run, *json, html.as_deref()),
        Command::Logs {
            run,
            task,
            attempt,
            follow,
        } => logs(&store, run, task, *attempt, *follow),
        Command::Get { run, output, to } => get(&store, run, output, to),
        Command::Cancel { run } => cancel(&store, run),
        Command::Rm { runs } => prune::rm(&store, runs),
        Command::Prune(keep) => prune::prune(&store, keep),
        Command::Cache(command) => cache(&store, command),
    }
}

fn run_flow(dir: &Path, args: &RunArgs, flow: Option<&Flow>) -> Result<()> {
    let own = std::env::args().next().filter(|_| flow.is_some());
    let options = Options {
        command: own.unwrap_or_else(|| "phalanx flow".to_owned()),
        no_cache: args.no_cache,
        resources: Resources {
            cpus: args.cpus,
            memory: args.memory,
            gpus: args.gpus,
            ..Resources::default()
        },
    };
    let (store, lock, id) = match &args.resume {
        Some(run) => {
            let store = Store::open(dir)?;
            let lock = store.lock()?;
            let (id, run) = store.find(run)?;
            check_program(&id, &run, flow)?;
            (store, lock, id)
        }
        None => {
            let workflow = workflow_of(args.file.as_deref(), flow)?;
            engine::check_machine(&workflow, &options)?;
            let given = create::inputs(&workflow, &args.input)?;
            let store = Store::create(dir)?;
            let lock = store.lock()?;
            let id = create::create(&store, workflow, &given)?;
            (store, lock, id)
        }
    };
    let outputs = engine::execute(&store, &lock, &id, &options)?;
    let lines = outputs
        .iter()
        .map(|(name, item)| format!("{name} = {}\n", shown(&store, item)));
    say::print(&lines.collect::<String>())
}

fn workflow_of(file: Option<&Path>, flow: Option<&Flow>) -> Result<Workflow> {
    match (file, flow) {
        (Some(_), Some(_)) => refuse!("this program runs its own workflow; it takes no file"),
        (None, Some(flow)) => flow.workflow(),
        (Some(file), None) if file.is_dir() => Workflow::from_file(&file.join(FLOW_FILE)),
        (file, None) => Workflow::from_file(file.unwrap_or(Path::new(FLOW_FILE))),
    }
}

/// A run of functions is continued by their program.
fn check_program(id: &str, run: &Run, flow: Option<&Flow>) -> Result<()> {
    let functions = |task: &Task| task.action == Action::Function;
    let is_of_functions = run.workflow.tasks.iter().any(functions);
    match flow {
        None if is_of_functions => {
            refuse!("the tasks of {id} are functions of a program; resume it with that program")
        }
        Some(flow) if flow.workflow.name != run.workflow.name => refuse!(
            "{id} is a run of {:?}, not of {:?}",
            run.workflow.name,
            flow.workflow.name
        ),
        _ => Ok(()),
    }
}

fn json_of(store: &Store, items: &Items) -> Json {
    let item = |(name, item): (&String, &Item)| {
        let value = match item {
            Item::Value(value) => value.clone(),
            Item::Object(object) => json!({
                "type": object.kind,
                "sha256": object.sha256,
                "bytes": object.bytes,
                "path": store.objects.path(object),
            }),
        };
        (name.clone(), value)
    };
    Json::Object(items.iter().map(item).collect())
}

/// The state as it is: a run without an engine does not run.
fn state_of(engine: Option<&Engine>, id: &str, run: &Run) -> State {
    match run.state {
        State::Running if !engine.is_some_and(|engine| engine.runs(id)) => State::Interrupted,
        state => state,
    }
}

fn list(store: &Store, json: bool) -> Result<()> {
    let mut rows = Vec::new();
    let mut text = format!(
        "{:<24} {:<12} {:<21} {:>10}\n",
        "RUN", "STATE", "STARTED", "TIME"
    );
    let engine = store.engine()?;
    for (id, run) in store.runs()? {
        let state = state_of(engine.as_ref(), &id, &run);
        text.push_str(&format!(
            "{id:<24} {:<12} {:<21} {:>10}\n",
            state.name(),
            time(run.started),
            took(run.started, run.ended)
        ));
        rows.push(json!({
            "run": id,
            "workflow": run.workflow.name,
            "state": state,
            "started": time(run.started),
            "ended": run.ended.map(time),
        }));
    }
    match json {
        true => print_json(&rows.into()),
        false => say::print(&text),
    }
}

fn print_json(value: &Json) -> Result<()> {
    let text = serde_json::to_string_pretty(value).unwrap_or_default();
    say::print_json(&format!("{text}\n")).map(|_| ())
}

/// The tasks of a run, in the order in which they can run; without an engine, none runs.
fn nodes_of(store: &Store, id: &str, run: &Run) -> Result<Vec<(String, Node)>> {
    let node = |task: &Task| {
        let mut node = store.node(id, &task.name)?;
        if node.state == State::Running && run.state != State::Running {
            node.state = State::Interrupted;
        }
        Ok((task.name.clone(), node))
    };
    run.workflow.tasks.iter().map(node).collect()
}

fn show(store: &Store, run: &str, json: bool, html: Option<&Path>) -> Result<()> {
    let (id, mut run) = store.find(run)?;
    let engine = store.engine()?;
    run.state = state_of(engine.as_ref(), &id, &run);
    let engine = engine.filter(|_| run.state == State::Running);
    let nodes = nodes_of(store, &id, &run)?;
    if let Some(file) = html {
        let path = std::path::absolute(file)?;
        let page = page::page(store, &id, &run, &nodes, path.parent().unwrap_or(&path));
        atomic_write(file, page.as_bytes())?;
        return say::print(&format!("{}\n", file.display()));
    }
    if json {
        let task = |(task, (name, node)): (&Task, &(String, Node))| {
            json!({
                "task": name,
                "state": node.state,
                "needs": task.dependencies(),
                "cached": node.cached,
                "inputs": json_of(store, &node.inputs),
                "outputs": json_of(store, &node.outputs),
                "attempts": node.attempts.iter().map(|attempt| json!({
                    "started": time(attempt.started),
                    "ended": attempt.ended.map(time),
                    "end": attempt.end,
                    "limits": attempt.limits,
                    "gpus": attempt.gpus,
                })).collect::<Vec<_>>(),
            })
        };
        let tasks = run.workflow.tasks.iter().zip(&nodes);
        let tasks: Vec<Json> = tasks.map(task).collect();
        return print_json(&json!({
            "run": id,
            "workflow": run.workflow.name,
            "state": run.state,
            "started": time(run.started),
            "ended": run.ended.map(time),
            "engine": engine.as_ref().map(Engine::json),
            "limits": run.limits,
            "inputs": json_of(store, &run.inputs),
            "outputs": json_of(store, &run.outputs),
            "tasks": tasks,
        }));
    }
    let mut text = format!("{id}: {}, started {}", run.state.name(), time(run.started));
    if let Some(engine) = &engine {
        text.push_str(&format!("\nengine: {engine}"));
    }
    text.push_str(&format!("\nlimits by {}\n", run.limits));
    let items = |label: &str, items: &Items| {
        let lines = items
            .iter()
            .map(|(name, item)| format!("{label} {name} = {}\n", shown(store, item)));
        lines.collect::<String>()
    };
    text.push_str(&items("input ", &run.inputs));
    for (task, (name, node)) in run.workflow.tasks.iter().zip(&nodes) {
        let needs: Vec<&str> = task.dependencies().into_iter().collect();
        let cached = node
            .cached
            .as_ref()
            .map(|run| format!(" (cached from {run})"));
        text.push_str(&format!(
            "\n{name}: {}{}",
            node.state.name(),
            cached.unwrap_or_default()
        ));
        match needs.is_empty() {
            true => text.push('\n'),
            false => text.push_str(&format!(", needs {}\n", needs.join(", "))),
        }
        for (at, attempt) in node.attempts.iter().enumerate() {
            let end = attempt.end.as_deref().unwrap_or("running");
            let time = took(attempt.started, attempt.ended);
            text.push_str(&format!("  attempt {}: {end}, {time}", at + 1));
            if !attempt.gpus.is_empty() {
                text.push_str(&format!(", GPU {}", attempt.gpus.join(", ")));
            }
            if !attempt.limits.is_empty() {
                text.push_str(&format!(", limits: {}", attempt.limits));
            }
            text.push('\n');
        }
        text.push_str(&items("  output", &node.outputs));
    }
    if !run.outputs.is_empty() {
        text.push('\n');
    }
    text.push_str(&items("output", &run.outputs));
    say::print(&text)
}

fn get(store: &Store, run: &str, output: &str, to: &Path) -> Result<()> {
    let (id, run) = store.find(run)?;
    let tasks = run.workflow.tasks.iter();
    let of_task = output
        .split_once('.')
        .filter(|(task, _)| tasks.clone().any(|t| t.name == *task));
    let (outputs, name) = match of_task {
        Some((task, name)) => (store.node(&id, task)?.outputs, name),
        None => (run.outputs, output),
    };
    let Some(item) = outputs.get(name) else {
        let names: Vec<&str> = outputs.keys().map(String::as_str).collect();
        return Err(
            Error::usage(format!("{id} has no output {output:?}")).note("one of", names.join(", "))
        );
    };
    let to = match to.is_dir() {
        true => to.join(name),
        false => to.to_owned(),
    };
    if to.symlink_metadata().is_ok() {
        refuse!("{} exists", to.display());
    }
    let written = match item {
        Item::Value(_) => fs::write(&to, format!("{}\n", shown(store, item))),
        Item::Object(object) => export_copy(&store.objects.path(object), &to),
    };
    written.map_err(|error| {
        let what = format!("cannot write {}", to.display());
        Error::new(ErrorKind::System, what).caused_by(error)
    })?;
    say::print(&format!("{}\n", to.display()))
}

fn logs(store: &Store, run: &str, task: &str, attempt: Option<usize>, follow: bool) -> Result<()> {
    let (id, run) = store.find(run)?;
    if run.workflow.task(task).is_none() {
        let names: Vec<&str> = run
            .workflow
            .tasks
            .iter()
            .map(|task| task.name.as_str())
            .collect();
        return Err(
            Error::usage(format!("{id} has no task {task:?}")).note("one of", names.join(", "))
        );
    }
    let mut id = id;
    let mut node = store.node(&id, task)?;
    if let (None, Some(from)) = (attempt, node.cached.clone())
        && node.attempts.is_empty()
        && let Ok((from, _)) = store.find(&from)
    {
        say::note(format_args!(
            "{task} of {id} is cached: this is its log in {from}"
        ));
        node = store.node(&from, task)?;
        id = from;
    }
    let number = attempt.unwrap_or(node.attempts.len());
    if number == 0 || number > node.attempts.len() {
        let cached = node
            .cached
            .map(|run| format!("; its result is that of {run}"));
        refuse!(
            "task {task:?} of {id} has {}{}",
            format::plural(node.attempts.len(), "attempt"),
            cached.unwrap_or_default()
        );
    }
    let path = log_file(&store.attempt_dir(&id, task, number));
    let mut read_to = 0;
    loop {
        // Looked at before the log, so that its last lines are read.
        let node = store.node(&id, task)?;
        let is_over = node
            .attempts
            .get(number - 1)
            .is_none_or(|attempt| attempt.end.is_some());
        let runs = |engine: Engine| engine.runs(&id);
        let is_over = is_over || !store.engine()?.is_some_and(runs);
        let mut text = Vec::new();
        if let Ok(mut file) = fs::File::open(&path) {
            file.seek(SeekFrom::Start(read_to))?;
            read_to += file.read_to_end(&mut text)? as u64;
        }
        say::print(&String::from_utf8_lossy(&text))?;
        if !follow || is_over {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn cancel(store: &Store, run: &str) -> Result<()> {
    let (id, run) = store.find(run)?;
    if matches!(run.state, State::Done | State::Failed | State::Canceled) {
        refuse!("{id} has ended: {}", run.state.name());
    }
    let Some(engine) = store.engine()? else {
        let _lock = store.lock()?;
        store.update(&id, |run| run.state = State::Canceled)?;
        return say::print(&format!("{id} is canceled; it did not run\n"));
    };
    if engine.name.is_none() {
        return Err(Error::usage(format!(
            "cannot cancel {id}: the store is in use by {engine}"
        ))
        .note(
            "try",
            "again in a second; an engine of an older version ends by Ctrl-C or SIGTERM only",
        ));
    }
    if !engine.runs(&id) {
        return Err(Error::usage(format!("{id} does not run")).note("engine", engine.to_string()));
    }
    store.ask_to_cancel(&id)?;
    let unsure = match engine.is_sure {
        true => String::new(),
        false => format!(
            "If that engine has ended, continue with `flow run --resume {id}`, or remove it with `flow rm {id}`.\n"
        ),
    };
    say::print(&format!("{id} is asked to stop: {engine}\n{unsure}"))
}

fn cache(store: &Store, command: &CacheCommand) -> Result<()> {
    match command {
        CacheCommand::List => {
            let mut text = format!(
                "{:<20} {:<10} {:<24} {:<21} {:>10}\n",
                "TASK", "VERSION", "RUN", "TIME", "SIZE"
            );
            for (_, entry) in store.cache()? {
                let sizes = objects_in(&entry.outputs).map(|(_, object)| object.bytes);
                let bytes = size(sizes.sum());
                text.push_str(&format!(
                    "{:<20} {:<10} {:<24} {:<21} {bytes:>10}\n",
                    entry.task,
                    entry.version,
                    entry.run,
                    time(entry.time)
                ));
            }
            say::print(&text)
        }
        CacheCommand::Clear { task } => {
            let _lock = store.lock()?;
            let entries = store.cache()?;
            let gone = entries
                .iter()
                .filter(|(_, entry)| task.as_ref().is_none_or(|task| *task == entry.task));
            let gone: Vec<_> = gone.cloned().collect();
            let count = gone.len();
            let removed = prune::forget(store, gone)?;
            say::print(&format!(
                "{} forgotten, {} deleted\n",
                format::plural(count, "result"),
                format::plural(removed.count, "file or folder")
            ))
        }
        CacheCommand::Verify => {
            let entries = store.cache()?;
            let mut damaged = 0;
            for (_, entry) in &entries {
                for (name, object) in objects_in(&entry.outputs) {
                    if let Err(why) = store.objects.check(object) {
                        damaged += 1;
                        say::note(format!("{}.{name} of {}: {why}", entry.task, entry.run));
                    }
                }
            }
            if damaged > 0 {
                let message = format!("{} damaged", format::plural(damaged, "cached output"));
                return Err(Error::new(ErrorKind::Failed, message)
                    .note("so", "tasks that need one run again"));
            }
            say::print(&format!(
                "{} verified\n",
                format::plural(entries.len(), "cached result")
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command as Process, Stdio};
    use std::sync::mpsc::channel;

    use super::*;
    use crate::store::tests::run;

    fn is_alive(process: &mut Child) -> bool {
        process.try_wait().unwrap().is_none()
    }

    #[test]
    fn cancel_ends_no_other_process() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(dir.path()).unwrap();
        // It has the number of an engine that was killed.
        let mut other = Process::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        fs::write(store.dir.join("engine.lock"), other.id().to_string()).unwrap();
        store
            .write(|changes| {
                changes.run("w-1", &run(1, State::Running, 5));
                changes.run("w-2", &run(2, State::Running, 6));
            })
            .unwrap();
        let lock = store.lock().unwrap();
        let (stops, stopped) = channel();
        let watch = lock.watch(&store, "w-2", move || stops.send(()).unwrap());
        let watch = watch.unwrap();
        let error = cancel(&store, "w-1").unwrap_err().chain();
        assert_eq!(error, "w-1 does not run");
        assert!(is_alive(&mut other));
        // The other one is asked, and notices.
        assert!(stopped.try_recv().is_err());
        cancel(&store, "w-2").unwrap();
        stopped.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(store.cancel_file("w-2").exists());
        drop(watch);
        // An earlier request does not stop it when it is continued.
        let (stops, stopped) = channel();
        drop(lock.watch(&store, "w-2", move || stops.send(()).unwrap()));
        assert!(!store.cancel_file("w-2").exists() && stopped.try_recv().is_err());
        drop(lock);
        cancel(&store, "w-1").unwrap();
        assert_eq!(store.find("w-1").unwrap().1.state, State::Canceled);
        assert!(is_alive(&mut other));
        drop(other.stdin.take());
        other.wait().unwrap();
    }
}
