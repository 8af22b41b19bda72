//! `phalanx flow`: workflows as a user runs them, and engines that are killed.
//!
//! The oracle is a journal that the tasks themselves write, outside of the store.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::programs::example;
use crate::support::{ended, eventually, phalanx, run, signal, succeed};

/// An empty folder. Folders in a store are read-only, so they are made writable to be removed.
struct Folder(tempfile::TempDir);

fn folder() -> Folder {
    Folder(tempfile::tempdir().expect("folder"))
}

impl Folder {
    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let mut chmod = Command::new("chmod");
        let _ = chmod.args(["-R", "u+w"]).arg(self.path()).status();
    }
}

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

fn write(dir: &Path, text: &str) {
    fs::write(dir.join("flow.toml"), text).expect("flow.toml");
}

fn journal(dir: &Path) -> Vec<String> {
    let text = fs::read_to_string(dir.join("journal")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn starts(dir: &Path, task: &str) -> usize {
    let line = format!("start {task}");
    journal(dir).iter().filter(|l| **l == line).count()
}

fn show(dir: &Path, run: &str) -> Value {
    let (out, _) = succeed(&["flow", "show", run, "--json"], dir);
    serde_json::from_str(&out).expect("JSON")
}

fn task<'a>(shown: &'a Value, name: &str) -> &'a Value {
    let mut tasks = shown["tasks"].as_array().expect("tasks").iter();
    tasks.find(|task| task["task"] == name).expect("the task")
}

/// What every script here begins with.
const LOG: &str = r#"echo "start $FLOW_TASK" >> "$FLOW_FOLDER/journal"; "#;

const TWO: &str = r#"name = "two"
[inputs]
epochs = 3
[tasks.make]
shell = '''LOG echo "$INPUT_SIZE numbers" > "$OUTPUT_DATA"'''
cache = "1"
inputs = { size = 5 }
outputs = { data = "file" }
[tasks.train]
command = ["sh", "-c", 'echo "start train" >> {folder}/journal; mkdir "$2"; cp "$1" "$2/copy"; echo a report > "$2/report.html"; echo "[0.5, $3]" > "$4"', "x", "{inputs.data}", "{outputs.model}", "{inputs.epochs}", "{outputs.losses}"]
cache = "1.2"
[tasks.train.inputs]
data = "{make.data}"
epochs = "{inputs.epochs}"
[tasks.train.outputs]
model = "folder"
losses = "list[float]"
[outputs]
model = "{train.model}"
losses = "{train.losses}"
"#;

#[test]
fn a_second_run_is_a_cache_hit_and_a_version_bump_misses() {
    let dir = folder();
    let dir = dir.path();
    let two = TWO.replace("LOG", LOG);
    write(dir, &two);
    let (out, err) = succeed(&["flow", "run"], dir);
    assert!(
        out.starts_with("losses = [0.5,3.0]\nmodel = "),
        "{out}{err}"
    );
    let model = out.lines().find_map(|line| line.strip_prefix("model = "));
    let copy = Path::new(model.expect("a path")).join("copy");
    assert_eq!(fs::read_to_string(copy).expect("the model"), "5 numbers\n");
    // Nothing runs again, and the result is the same.
    let (again, err) = succeed(&["flow", "run"], dir);
    assert_eq!(again, out);
    assert!(err.contains("Cached train (from two-1)"), "{err}");
    // The log is that of the run which made the result.
    let (log, err) = succeed(&words("flow logs two-2 train"), dir);
    assert_eq!(log, succeed(&words("flow logs two-1 train"), dir).0);
    assert_eq!(err, "train of two-2 is cached: this is its log in two-1\n");
    // A copy that can be changed and removed.
    for output in ["model", "train.model"] {
        succeed(&["flow", "get", "last", output, "mine"], dir);
        let copy = dir.join("mine/copy");
        assert_eq!(fs::read_to_string(&copy).expect("the copy"), "5 numbers\n");
        fs::write(&copy, "changed").expect("writable");
        let (code, _, err) = run(&["flow", "get", "last", output, "mine/copy"], dir);
        assert!(code == 2 && err.contains("mine/copy exists"), "{err}");
        fs::remove_dir_all(dir.join("mine")).expect("removed");
    }
    let (code, _, err) = run(&words("flow get last modle ."), dir);
    assert!(
        code == 2 && err.contains("one of") && err.contains("model"),
        "{err}"
    );
    assert_eq!((starts(dir, "make"), starts(dir, "train")), (1, 1));
    // Another input: only what depends on it.
    let (out, _) = succeed(&words("flow run --input epochs=4"), dir);
    assert!(out.contains("[0.5,4.0]"), "{out}");
    assert_eq!((starts(dir, "make"), starts(dir, "train")), (1, 2));
    // Another version.
    write(dir, &two.replace("\"1.2\"", "\"1.3\""));
    succeed(&["flow", "run"], dir);
    assert_eq!((starts(dir, "make"), starts(dir, "train")), (1, 3));
    succeed(&words("flow run --no-cache"), dir);
    assert_eq!((starts(dir, "make"), starts(dir, "train")), (2, 4));
    // A damaged file is not served.
    let shown = show(dir, "last");
    let data = task(&shown, "make")["outputs"]["data"]["path"]
        .as_str()
        .expect("a path");
    let sum = Command::new("sha256sum")
        .arg(data)
        .output()
        .expect("sha256sum")
        .stdout;
    let named = task(&shown, "make")["outputs"]["data"]["sha256"]
        .as_str()
        .expect("a sum");
    assert!(String::from_utf8_lossy(&sum).starts_with(named));
    fs::remove_file(data).expect("removed");
    fs::write(data, "6 numbers\n").expect("written");
    let (code, _, err) = run(&words("flow cache verify"), dir);
    assert_eq!(code, 1, "{err}");
    let (_, err) = succeed(&["flow", "run"], dir);
    assert!(err.contains("Damaged make: not from the cache"), "{err}");
    assert_eq!((starts(dir, "make"), starts(dir, "train")), (3, 4));
    succeed(&words("flow cache verify"), dir);
    let (out, _) = succeed(&words("flow cache clear train"), dir);
    assert!(out.contains(" forgotten"), "{out}");
    succeed(&["flow", "run"], dir);
    assert_eq!((starts(dir, "make"), starts(dir, "train")), (3, 5));
    // The page has no program, and its link leads to the report in the output of a task.
    fs::create_dir(dir.join("a page")).expect("folder");
    succeed(&["flow", "show", "last", "--html", "a page/run.html"], dir);
    let page = fs::read_to_string(dir.join("a page/run.html")).expect("a page");
    assert!(
        page.contains("<svg ") && page.contains("class=\"cached\"") && !page.contains("<script")
    );
    let links = page
        .split("href=\"")
        .filter_map(|tail| tail.split('"').next());
    let report = links.filter(|link| link.ends_with("/report.html")).last();
    let report = dir.join("a page").join(report.expect("a link"));
    assert_eq!(fs::read_to_string(report).expect("it"), "a report\n");
    let (out, _) = succeed(&["flow", "list"], dir);
    assert_eq!(out.matches("done").count(), 7, "{out}");
}

#[test]
fn failures_are_retried_unless_nothing_can_cure_them() {
    let dir = folder();
    let dir = dir.path();
    let text = r#"name = "fail"
[tasks.third]
shell = '''LOG [ "$FLOW_ATTEMPT" = 3 ] || exit 7'''
retries = { times = 2, backoff = "10ms" }
[tasks.never]
shell = '''LOG echo no such option >&2; exit 2'''
retries = { times = 5, backoff = "10ms" }
[tasks.slow]
shell = '''LOG sleep 60 & wait'''
timeout = "300ms"
retries = { times = 1, backoff = "10ms" }
[tasks.without]
shell = '''LOG true'''
outputs = { x = "int" }
[tasks.wrong]
shell = '''LOG echo many > "$OUTPUT_X"'''
outputs = { x = "int" }
[tasks.later]
shell = '''LOG true'''
after = ["never", "third"]
"#;
    write(dir, &text.replace("LOG", LOG));
    let (code, _, err) = run(&words("flow run --cpus 8"), dir);
    assert_eq!(code, 1, "{err}");
    let tries = ["third", "never", "slow", "without", "wrong", "later"].map(|t| starts(dir, t));
    assert_eq!(tries, [3, 1, 2, 1, 1, 0], "{err}");
    let shown = show(dir, "fail-1");
    let end = |name: &str| {
        task(&shown, name)["attempts"]
            .as_array()
            .and_then(|a| a.last())
            .expect("an attempt")["end"]
            .clone()
    };
    assert_eq!(end("third"), "done");
    assert_eq!(end("never"), "exit code 2");
    assert_eq!(end("slow"), "timeout after 300ms");
    assert_eq!(end("wrong"), "output \"x\" is not of type int");
    assert!(
        end("without")
            .as_str()
            .expect("text")
            .contains("\"x\" is missing")
    );
    assert_eq!(task(&shown, "later")["state"], "skipped");
    succeed(&words("flow show last --html run.html"), dir);
    let page = fs::read_to_string(dir.join("run.html")).expect("a page");
    let count = |text: &str| page.matches(text).count();
    // Each once more in the legend.
    assert_eq!(count("bar retried"), 2 + 1 + 1);
    assert_eq!(count("bar failed"), 4 + 1);
    assert_eq!(count("bar done"), 1 + 1);
    assert!(page.contains("retries: 5, the first after 10ms"));
    let (out, _) = succeed(&words("flow logs last never"), dir);
    assert_eq!(out, "no such option\n");
    // What is done stays so.
    let (code, ..) = run(&words("flow run --resume last --cpus 8"), dir);
    assert_eq!(code, 1);
    assert_eq!((starts(dir, "third"), starts(dir, "never")), (3, 2));
}

#[test]
fn tasks_wait_for_resources_and_limits_hold() {
    let dir = folder();
    let dir = dir.path();
    let text = r#"name = "limits"
[tasks.a]
shell = '''LOG sleep 0.3; echo end >> "$FLOW_FOLDER/journal"'''
requests = { gpus = 1 }
[tasks.b]
shell = '''LOG sleep 0.3; echo end >> "$FLOW_FOLDER/journal"'''
requests = { gpus = 1 }
[tasks.c]
shell = '''ulimit -v > "$OUTPUT_KIB"; nproc > "$OUTPUT_CPUS"; echo "gpu:$CUDA_VISIBLE_DEVICES" > "$OUTPUT_GPUS"'''
limits = { memory = "4GiB", cpus = 1 }
requests = { memory = "1KiB" }
outputs = { kib = "string", cpus = "int", gpus = "string" }
after = ["a", "b"]
"#;
    write(dir, &text.replace("LOG", LOG));
    let (code, _, err) = run(&words("flow run --gpus 0"), dir);
    assert_eq!(code, 2, "{err}");
    assert!(
        err.contains("task \"a\" requests 1 GPU, but this machine has 0"),
        "{err}"
    );
    assert_eq!(journal(dir), [""; 0]);
    let storage = r#"name = "full"
[tasks.a]
shell = '''true'''
requests = { storage = "1KiB", ephemeral_storage = "9000TiB" }
"#;
    fs::write(dir.join("storage.toml"), storage).expect("a file");
    let (code, _, err) = run(&words("flow run storage.toml"), dir);
    assert!(code == 2 && err.contains("of storage, but"), "{err}");
    let (_, err) = succeed(&words("flow run --gpus 1 --cpus 8"), dir);
    assert!(err.contains("Waiting b: 0 of 1 GPUs free"), "{err}");
    assert_eq!(journal(dir), ["start a", "end", "start b", "end"]);
    let shown = show(dir, "last");
    let outputs = &task(&shown, "c")["outputs"];
    assert_eq!(outputs["gpus"], "gpu:");
    let said = task(&shown, "c")["attempts"][0]["limits"]
        .as_str()
        .expect("text")
        .to_owned();
    if said.contains("rlimit") {
        assert_eq!(outputs["kib"], "4194304");
        assert_eq!(outputs["cpus"], 1);
    } else {
        assert!(said.contains("cgroup"), "{said}");
    }
}

#[test]
fn a_task_that_exceeds_its_memory_fails() {
    let dir = folder();
    let text = |limit: &str| {
        let script = "head -c 400000000 /dev/zero | tail -c 399999999 | wc -c > \"$OUTPUT_N\"; [ \"$(cat \"$OUTPUT_N\")\" = 399999999 ]";
        format!(
            "name = \"memory\"\n[tasks.a]\nshell = '''{script}'''\nlimits = {{ memory = \"{limit}\" }}\noutputs = {{ n = \"int\" }}\n"
        )
    };
    write(dir.path(), &text("2GiB"));
    succeed(&["flow", "run"], dir.path());
    write(dir.path(), &text("100MiB"));
    let (code, _, err) = run(&["flow", "run"], dir.path());
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("Failed a"), "{err}");
}

#[test]
fn a_stopped_run_is_resumed_and_two_engines_do_not_meet() {
    let dir = folder();
    let dir = dir.path();
    let text = r#"name = "stop"
[tasks.one]
shell = '''LOG true'''
[tasks.two]
shell = '''LOG echo $$ > "$FLOW_FOLDER/pid"; [ -e "$FLOW_FOLDER/go" ] || { sleep 60 & wait; }'''
after = ["one"]
"#;
    write(dir, &text.replace("LOG", LOG));
    let start = |args: &str| -> Child {
        let _ = fs::remove_file(dir.join("pid"));
        phalanx(&words(args), dir).spawn().expect("it starts")
    };
    let alive = |pid: &str| Path::new("/proc").join(pid.trim()).exists();
    let started = || fs::read_to_string(dir.join("pid")).is_ok_and(|pid| pid.ends_with('\n'));
    let engine = start("flow run");
    eventually("task two starts", started);
    let (code, _, err) = run(&["flow", "run"], dir);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("in use by another engine"), "{err}");
    let pid = fs::read_to_string(dir.join("pid")).expect("pid");
    signal(engine.id(), "TERM");
    let (code, _, err) = ended(engine);
    assert_eq!(code, 130, "{err}");
    assert!(!alive(&pid), "{err}");
    assert_eq!(show(dir, "last")["state"], "interrupted");
    // Killed: the task dies too.
    let engine = start("flow run --resume last");
    eventually("task two starts again", started);
    let pid = fs::read_to_string(dir.join("pid")).expect("pid");
    signal(engine.id(), "KILL");
    ended(engine);
    eventually("the task of a killed engine ends", || !alive(&pid));
    assert_eq!(show(dir, "last")["state"], "interrupted");
    // Canceled.
    let engine = start("flow run --resume last");
    eventually("task two starts a third time", started);
    succeed(&words("flow cancel stop-1"), dir);
    assert_eq!(ended(engine).0, 130);
    assert_eq!(show(dir, "last")["state"], "canceled");
    fs::write(dir.join("go"), "").expect("go");
    succeed(&words("flow run --resume stop-1"), dir);
    assert_eq!((starts(dir, "one"), starts(dir, "two")), (1, 4));
}

/// Two projects with one store, and a script that is changed.
#[test]
fn a_result_is_used_for_the_same_project_and_script_only() {
    let dir = folder();
    let dir = dir.path();
    let text = r#"name = "w"
[tasks.train]
command = ["sh", "{folder}/train.sh", "{outputs.model}"]
cache = "1"
outputs = { model = "string" }
[outputs]
model = "{train.model}"
"#;
    let script = |project: &str, model: &str| {
        let text = format!("echo {model} > \"$1\"\n");
        fs::write(dir.join(project).join("train.sh"), text).expect("a script");
    };
    let model = |project: &str| succeed(&["flow", "run", project], dir);
    for project in ["a", "b"] {
        fs::create_dir(dir.join(project)).expect("a folder");
        write(&dir.join(project), text);
        script(project, project);
        assert_eq!(model(project).0, format!("model = {project}\n"));
    }
    let (out, err) = model("a");
    assert_eq!(out, "model = a\n");
    assert!(err.contains("Cached train (from w-1)"), "{err}");
    script("a", "new");
    assert_eq!(model("a").0, "model = new\n");
}

#[test]
fn a_task_that_changes_its_input_fails_alone_and_the_run_is_resumed() {
    let dir = folder();
    let dir = dir.path();
    // `use` and `read` have the same input at the same time.
    let text = r#"name = "inputs"
[inputs]
data = { type = "folder", default = "data" }
[tasks.bad]
shell = '''LOG [ -e "$FLOW_FOLDER/fixed" ] || { chmod u+w "$INPUT_DATA/"; echo 1 > "$INPUT_DATA/x.lock"; }'''
inputs = { data = "{inputs.data}" }
[tasks.make]
shell = '''LOG mkdir "$OUTPUT_ALL"; echo 7 > "$OUTPUT_ALL/a"'''
outputs = { all = "folder" }
[tasks.use]
shell = '''LOG [ -e "$FLOW_FOLDER/fixed" ] || { chmod u+w "$INPUT_ALL/"; echo 1 > "$INPUT_ALL/y.lock"; touch "$FLOW_FOLDER/changed"; }'''
inputs = { all = "{make.all}" }
[tasks.read]
shell = '''LOG until [ -e "$FLOW_FOLDER/changed" ]; do sleep 0.01; done; cat "$INPUT_ALL/a" > "$OUTPUT_N"'''
inputs = { all = "{make.all}" }
outputs = { n = "int" }
[tasks.late]
shell = '''LOG cat "$INPUT_DATA/a" > "$OUTPUT_N"'''
inputs = { data = "{inputs.data}" }
outputs = { n = "int" }
after = ["read"]
"#;
    write(dir, &text.replace("LOG", LOG));
    fs::create_dir(dir.join("data")).expect("a folder");
    fs::write(dir.join("data/a"), "5\n").expect("an input");
    let (code, _, err) = run(&words("flow run --cpus 8"), dir);
    assert_eq!(code, 1, "{err}");
    let shown = show(dir, "last");
    for (name, input, file) in [("bad", "data", "x.lock"), ("use", "all", "y.lock")] {
        let task = task(&shown, name);
        assert_eq!(task["state"], "failed", "{err}");
        let end = task["attempts"].as_array().and_then(|a| a.last());
        let end = end.expect("an attempt")["end"].as_str().expect("text");
        let start = format!("it changed its input {input:?}: ");
        assert!(end.starts_with(&start) && end.ends_with(file), "{end}");
    }
    assert_eq!(task(&shown, "read")["outputs"]["n"], 7, "{err}");
    assert_eq!(task(&shown, "late")["outputs"]["n"], 5, "{err}");
    let before = (starts(dir, "read"), starts(dir, "late"));
    fs::write(dir.join("fixed"), "").expect("a file");
    succeed(&words("flow run --resume last --cpus 8"), dir);
    assert_eq!((starts(dir, "read"), starts(dir, "late")), before);
    // Both ends: what was stored is whole, and a new run starts.
    let data = show(dir, "last")["inputs"]["data"]["path"].clone();
    let names = fs::read_dir(data.as_str().expect("a path")).expect("the input");
    assert_eq!(names.count(), 1);
    succeed(&words("flow run --cpus 8"), dir);
}

/// To read the output, a file of zeros without blocks, takes many minutes.
#[test]
fn timeouts_and_signals_are_seen_while_an_output_is_read() {
    let dir = folder();
    let dir = dir.path();
    let text = r#"name = "large"
[tasks.large]
shell = '''truncate -s 1T "$OUTPUT_X"; touch "$FLOW_FOLDER/made"'''
outputs = { x = "file" }
[tasks.slow]
shell = '''until [ -e "$FLOW_FOLDER/made" ]; do sleep 0.01; done; LOG sleep 60 & wait'''
timeout = "500ms"
"#;
    write(dir, &text.replace("LOG", LOG));
    let mut engine = phalanx(&words("flow run --cpus 8"), dir);
    let mut engine = engine.spawn().expect("it starts");
    let err = engine.stderr.take().expect("a pipe");
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(err));
    let mut says = |text: &str| lines.any(|line| line.expect("text").contains(text));
    assert!(says("Failed slow: timeout after 500ms"));
    assert_eq!(task(&show(dir, "last"), "large")["state"], "running");
    signal(engine.id(), "INT");
    assert!(says("Stopping large"));
    signal(engine.id(), "INT");
    assert_eq!(ended(engine).0, 130);
    assert_eq!(show(dir, "last")["state"], "interrupted");
}

/// Numbers for a test that is to be the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Engines killed at random moments, or stopped by a full disk, each continued by the next:
/// `FLOW_KILLS` of them. Tasks are killed too.
#[test]
fn no_kill_loses_or_repeats_what_was_recorded() {
    let kills: u64 = std::env::var("FLOW_KILLS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(10);
    let seed = std::env::var("FLOW_SEED")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(7);
    let mut random = Random(seed);
    let mut left = kills;
    while left > 0 {
        left -= one_killed_run(&mut random, left);
    }
}

/// One run, whose engine is killed up to `most` times; returns how often.
fn one_killed_run(random: &mut Random, most: u64) -> u64 {
    let dir = folder();
    let dir = dir.path();
    // Inputs that are copied into the store: a folder of files, and a file that may not be written.
    let mut lines = String::new();
    for at in 0..40 {
        let folder = dir.join("data").join((at % 4).to_string());
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("x").with_extension(at.to_string()), "line\n").expect("a file");
        lines.push_str("line\n");
    }
    fs::write(dir.join("word"), "word\n").expect("a file");
    for path in ["word", "data/0/x.0", "data/3"] {
        let mode = fs::Permissions::from_mode(if path == "data/3" { 0o555 } else { 0o444 });
        fs::set_permissions(dir.join(path), mode).expect("read-only");
    }
    // Eight tasks in a chain of pairs; each adds its own line to what the one before gave.
    let mut text =
        "name = \"kills\"\n[inputs]\ndata = { type = \"folder\", default = \"data\" }\n".to_owned();
    for at in 0..8 {
        let before = match at {
            0 | 1 => {
                "data = \"{inputs.data}\", word = { type = \"file\", value = \"word\" }".to_owned()
            }
            _ => format!("before = \"{{t{}.text}}\"", at - 2),
        };
        text.push_str(&format!(
            "[tasks.t{at}]\nretries = {{ times = 1000, backoff = \"1ms\" }}\nshell = '''{LOG}echo $$ > \"$FLOW_FOLDER/pid$FLOW_TASK\"; for n in 1 2 3 4; do sleep 0.0{}; done; {{ [ -n \"${{INPUT_BEFORE-}}\" ] || cat \"$INPUT_DATA\"/*/* \"$INPUT_WORD\"; [ -z \"${{INPUT_BEFORE-}}\" ] || cat \"$INPUT_BEFORE\"; echo {at}; }} > \"$OUTPUT_TEXT\"; mkdir \"$OUTPUT_ALL\"; cp \"$OUTPUT_TEXT\" \"$OUTPUT_ALL/copy\"; echo \"end $FLOW_TASK\" >> \"$FLOW_FOLDER/journal\"'''\ncache = \"1\"\ninputs = {{ {} }}\noutputs = {{ text = \"file\", all = \"folder\" }}\n",
            1 + random.below(5),
            before
        ));
    }
    write(dir, &text);
    let mut killed = 0;
    let mut args = vec!["flow", "run", "--cpus", "2"];
    let mut done: BTreeMap<String, usize> = BTreeMap::new();
    loop {
        let is_disturbed = killed < most;
        // Files of at most that many KiB: writes of the engine fail as on a full disk.
        let limit = (is_disturbed && random.below(4) == 0).then(|| random.below(200));
        let mut engine = match limit {
            Some(kib) => limited(&phalanx(&args, dir), kib),
            None => phalanx(&args, dir),
        };
        engine.stdout(Stdio::null()).stderr(Stdio::piped());
        let engine = engine.spawn().expect("it starts");
        if is_disturbed {
            // Without a run it copies its inputs.
            let pause = if args.len() > 4 { 200 } else { 100 };
            std::thread::sleep(Duration::from_millis(random.below(pause)));
            kill_task(dir, random.below(8));
            std::thread::sleep(Duration::from_millis(random.below(pause)));
            if limit.is_none() {
                kill(engine.id());
            }
        }
        let (code, _, err) = ended(engine);
        // What was recorded as done before this engine has not been started by it.
        for (name, count) in &done {
            assert_eq!(starts(dir, name), *count, "{name} ran again\n{err}");
        }
        let has_store = dir.join(".phalanx/flow/state.redb").exists();
        let (known, out, _) = match has_store {
            true => run(&words("flow show last --json"), dir),
            false => (2, String::new(), String::new()),
        };
        if known == 0 {
            args = vec!["flow", "run", "--cpus", "2", "--resume", "last"];
            let shown: Value = serde_json::from_str(&out).expect("JSON");
            for task in shown["tasks"].as_array().expect("tasks") {
                if task["state"] == "done" {
                    let name = task["task"].as_str().expect("a name").to_owned();
                    let ends = format!("end {name}");
                    assert!(
                        journal(dir).contains(&ends),
                        "{name} is done, but never ended"
                    );
                    let count = starts(dir, &name);
                    done.insert(name, count);
                }
            }
        }
        if code == 0 {
            break;
        }
        let want = if limit.is_some() { 1 } else { -1 };
        assert_eq!(code, want, "{err}");
        assert!(limit.is_none() || err.contains("File too large"), "{err}");
        killed += 1;
    }
    let shown = show(dir, "last");
    assert_eq!(shown["state"], "done");
    for (name, at) in [("t6", [0, 2, 4, 6]), ("t7", [1, 3, 5, 7])] {
        let own: String = at.iter().map(|n| format!("{n}\n")).collect();
        let want = format!("{lines}word\n{own}");
        for (output, file) in [("text", ""), ("all", "copy")] {
            let path = task(&shown, name)["outputs"][output]["path"]
                .as_str()
                .expect("a path");
            let path = if file.is_empty() {
                path.into()
            } else {
                Path::new(path).join(file)
            };
            assert_eq!(fs::read_to_string(&path).expect("an output"), want);
        }
    }
    succeed(&words("flow cache verify"), dir);
    // All from the cache: nothing starts.
    let before = journal(dir).len();
    succeed(&["flow", "run"], dir);
    assert_eq!(journal(dir).len(), before);
    killed.max(1)
}

/// The same command, which may write files of `kib` KiB at most.
fn limited(command: &Command, kib: u64) -> Command {
    let mut shell = Command::new("bash");
    let script = format!("ulimit -f {kib}; exec \"$0\" \"$@\"");
    shell.args(["-c", &script]).arg(command.get_program());
    shell.args(command.get_args());
    if let Some(dir) = command.get_current_dir() {
        shell.current_dir(dir);
    }
    shell
}

/// Kills the process of task `at`, if it runs.
fn kill_task(dir: &Path, at: u64) {
    let pid = fs::read_to_string(dir.join(format!("pidt{at}"))).unwrap_or_default();
    let Ok(pid) = pid.trim().parse::<u32>() else {
        return;
    };
    // Its number may be another process's by now.
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let ours = format!("FLOW_FOLDER={}\0", dir.display());
    if String::from_utf8_lossy(&environment).contains(&ours) {
        kill(pid);
    }
}

/// It may have ended meanwhile.
fn kill(pid: u32) {
    let mut kill = Command::new("kill");
    kill.args(["-s", "KILL", &pid.to_string()]);
    let _ = kill.stderr(Stdio::null()).status();
}

/// On a disk of its own, which needs root.
#[test]
fn a_full_disk_is_said_and_the_run_continues_when_there_is_space() {
    let dir = folder();
    let dir = dir.path();
    fs::create_dir(dir.join("disk")).expect("a folder");
    let text = r#"name = "full"
[tasks.small]
shell = '''LOG echo 1 > "$OUTPUT_X"'''
outputs = { x = "int" }
[tasks.fill]
shell = '''LOG [ -e "$FLOW_FOLDER/filled" ] || cat /dev/zero 2>/dev/null > "$FLOW_FOLDER/disk/junk" || touch "$FLOW_FOLDER/filled"'''
after = ["small"]
[tasks.last]
shell = '''LOG head -c 1000000 /dev/zero > "$OUTPUT_X"'''
outputs = { x = "file" }
after = ["fill"]
"#;
    write(dir, &text.replace("LOG", LOG));
    // The input of this one is larger than the disk.
    fs::create_dir(dir.join("in")).expect("a folder");
    fs::write(dir.join("in/big"), vec![1; 9_000_000]).expect("an input");
    let import = "name = \"in\"\n[tasks.a]\nshell = \"true\"\n[tasks.a.inputs]\nbig = { type = \"file\", value = \"big\" }\n";
    write(&dir.join("in"), import);
    let script = r#"mount -t tmpfs -o size=6m none disk || exit 77
"$0" flow run in --store disk/i 2> full; echo "import $?"
echo 1 > in/big
"$0" flow run in --store disk/i; echo "import again $?"
rm -r disk/i
"$0" flow run --store disk/s; echo "first $?"
rm disk/junk
"$0" flow run --store disk/s --resume last; echo "second $?""#;
    let binary = env!("CARGO_BIN_EXE_phalanx");
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", script, binary])
        .current_dir(dir);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(child) = command.spawn() else { return };
    let (_, out, err) = ended(child);
    if !out.contains("first") {
        // Not allowed here: nothing can be tested.
        return;
    }
    assert!(
        out.contains("first 1\n") && out.contains("second 0\n"),
        "{out}{err}"
    );
    assert!(err.contains("No space left on device"), "{err}");
    assert!(
        err.contains("free some space") && err.contains("--resume full-1"),
        "{err}"
    );
    let full = fs::read_to_string(dir.join("full")).expect("the error");
    assert!(
        out.contains("import 1\n") && out.contains("import again 0\n"),
        "{out}{full}"
    );
    assert!(
        full.contains("free some space") && full.contains("start it again"),
        "{full}"
    );
    assert!(!full.contains("--resume"), "{full}");
    assert_eq!((starts(dir, "small"), starts(dir, "last")), (1, 1), "{err}");
}

#[test]
fn functions_of_a_program_are_tasks() {
    let dir = folder();
    let dir = dir.path();
    let of = |program: &Path, args: &str| {
        let mut command = Command::new(program);
        command.args(args.split(' ')).current_dir(dir);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        ended(command.spawn().expect("it starts"))
    };
    let line = |args: &str| of(example("flow").as_ref(), args);
    let (code, out, err) = line("run --cpus 4");
    assert_eq!(code, 0, "{out}{err}");
    // The same descent, in Python's words: w += 0.01 * 2 * 28.5 * (3 - w), five times.
    let mut weight = 0.0f64;
    for _ in 0..5 {
        weight += 0.01 * 2.0 * 28.5 * (3.0 - weight);
    }
    let said = out
        .lines()
        .find_map(|l| l.strip_prefix("weight = "))
        .expect("the weight");
    let said: f64 = said.parse().expect("a number");
    assert!((said - weight).abs() < 1e-9, "{said} {weight}");
    let (code, out, err) = line("run --input epochs=6");
    assert_eq!(code, 0, "{out}{err}");
    assert!(err.contains("Cached data (from line-1)"), "{err}");
    let (_, out, _) = line("logs last fast");
    assert_eq!(out.matches("epoch ").count(), 6, "{out}");
    // Another program, with the same names.
    let other = dir.join("other");
    let mut program = fs::read(example("flow")).expect("the program");
    program.push(0);
    fs::write(&other, program).expect("another program");
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755)).expect("a mode");
    let (code, out, err) = of(&other, "run --input epochs=6");
    assert_eq!(code, 0, "{out}{err}");
    assert!(!err.contains("Cached"), "{err}");
    // Of kind Usage: not retried.
    let (code, _, err) = line("run --input samples=0");
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("Failed data: exit code 2"), "{err}");
    assert!(err.contains("samples must be at least 1"), "{err}");
}

/// The `flow.toml` of the guide.
#[test]
fn the_workflow_of_the_guide_runs() {
    let dir = folder();
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/workflows.md");
    let guide = fs::read_to_string(guide).expect("the guide");
    let (_, after) = guide.split_once("```toml\n").expect("a block");
    let (text, _) = after.split_once("```").expect("its end");
    write(dir.path(), text);
    let programs = Path::new(env!("CARGO_BIN_EXE_phalanx")).parent();
    let path = std::env::var("PATH").expect("PATH");
    let path = format!("{}:{path}", programs.expect("a folder").display());
    let mut command = phalanx(&["flow", "run"], dir.path());
    let (code, out, err) = ended(command.env("PATH", path).spawn().expect("it starts"));
    assert_eq!(code, 0, "{out}{err}");
    let run = out.lines().find_map(|line| line.strip_prefix("run = "));
    let metrics = Path::new(run.expect("a folder")).join("metrics.jsonl");
    let records = fs::read_to_string(metrics)
        .expect("metrics")
        .lines()
        .count();
    assert!(
        records > 0 && out.contains(&format!("records = {records}\n")),
        "{out}"
    );
}

const SECRETS: &str = r#"name = "secrets"
[tasks.with]
command = ["sh", "-c", 'printf %s "$KEY" | sha256sum >"$1"; env; cat /proc/self/environ; echo; echo "a $KEY b"; echo "{$KEY}" >&2; [ -e {folder}/go ]', "x", "{outputs.sum}"]
secrets = ["KEY"]
retries = { times = 1, backoff = "1ms" }
outputs = { sum = "string" }
cache = "1"
[tasks.without]
shell = 'env; echo "${KEY-none} ${KEY_FILE-none}" >"$OUTPUT_ALL"'
after = ["with"]
outputs = { all = "string" }
[outputs]
sum = "{with.sum}"
all = "{without.all}"
"#;

/// The files below `dir` that have `text`.
fn files_with(text: &str, dir: &Path) -> String {
    let mut grep = Command::new("grep");
    let found = grep.args(["-rlaF", text]).arg(dir).output();
    String::from_utf8(found.expect("grep runs").stdout).expect("UTF-8")
}

#[test]
fn a_secret_reaches_its_task_and_no_file() {
    let (outside, dir) = (folder(), folder());
    let dir = dir.path();
    write(dir, SECRETS);
    let secret = "hunter2-\u{e4}'\"$";
    let file = |name: &str, text: &str| {
        let path = outside.path().join(name);
        fs::write(&path, text).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let flow = |args: &[&str], variable: &str, value: &str| {
        let mut command = phalanx(&[&["flow"], args].concat(), dir);
        ended(command.env(variable, value).spawn().expect("it starts"))
    };
    let (code, _, err) = flow(&["run"], "KEY", "");
    assert_eq!(code, 2, "{err}");
    for why in ["the secret KEY has no value", "KEY_FILE", "task \"with\""] {
        assert!(err.contains(why), "{err}");
    }
    let (code, _, err) = flow(&["run"], "KEY_FILE", &file("empty", "\n"));
    let why = "empty has no text for the secret KEY";
    assert!(code == 2 && err.contains(why), "{err}");
    assert!(!dir.join(".phalanx").exists(), "nothing ran");
    // All attempts fail: their logs and folders stay.
    let (code, _, err) = flow(&["run"], "KEY_FILE", &file("key", &format!("{secret}\n")));
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("a *** b") && !err.contains("hunter2"), "{err}");
    fs::write(dir.join("go"), "").expect("written");
    let (code, out, err) = flow(&["run", "--resume", "last"], "KEY", secret);
    assert_eq!(code, 0, "{err}");
    let mut digest = Command::new("sh");
    let digest = digest.args(["-c", "printf %s \"$0\" | sha256sum", secret]);
    let digest = String::from_utf8(digest.output().expect("sh runs").stdout).expect("UTF-8");
    let sum = format!("sum = {}\n", digest.trim_end());
    assert!(
        out.contains(&sum) && out.contains("all = none none\n"),
        "{out}"
    );
    let (log, _) = succeed(&words("flow logs last with"), dir);
    for line in ["a *** b\n", "{***}\n", "\nKEY=***\n"] {
        assert!(log.contains(line), "{line:?}: {log}");
    }
    // Another value is no other call.
    let (code, _, err) = flow(&["run"], "KEY", "other");
    assert!(code == 0 && err.contains("Cached with"), "{err}");
    succeed(&words("flow show last --html run.html"), dir);
    for engine in ["flyte", "kubernetes", "slurm"] {
        let (code, _, err) = flow(&["export", "--image", "i", "--to", engine], "KEY", secret);
        assert_eq!(code, 0, "{err}");
    }
    assert_eq!(files_with("hunter2", dir), "");
    // The search finds what is there.
    let page = files_with("secrets: KEY", dir);
    assert!(page.contains("run.html"), "{page}");
}
