//! Against a small server that keeps what it is sent, and fails as it is told.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::*;
use crate::{Delivery, ErrorKind, FINISH_WAIT, upload};

/// What the server does with a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Do {
    Answer,
    Status(u16),
    /// Does it, and closes the connection in the middle of the answer.
    CloseMidway,
    /// Answers with something else.
    Garble,
    /// Does not answer.
    Hang,
}

#[derive(Default)]
struct Store {
    /// Method and path of each request.
    requests: Vec<String>,
    authorizations: BTreeSet<String>,
    /// The runs that were made before this one.
    before: Vec<OfRun>,
    /// Key, step, value and time, as the real server keeps them: each once.
    metrics: BTreeSet<(String, u64, String, u64)>,
    params: BTreeMap<String, String>,
    tags: BTreeMap<String, String>,
    status: String,
    artifacts: BTreeMap<String, Vec<u8>>,
    /// The last one that was made.
    experiment: String,
    runs: usize,
    /// What to do with the next requests; afterwards they are answered.
    next: Vec<Do>,
    /// Longest value of a parameter that it takes.
    longest: usize,
}

/// Metrics, tags and status of a run that is not the newest.
struct OfRun {
    metrics: BTreeSet<(String, u64, String, u64)>,
    tags: BTreeMap<String, String>,
    status: String,
}

struct Fake {
    port: u16,
    store: Arc<Mutex<Store>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    fn start() -> Fake {
        Fake::at(0)
    }

    fn at(port: u16) -> Fake {
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let store = Arc::new(Mutex::new(Store {
            longest: 6000,
            ..Store::default()
        }));
        let ends = Arc::new(AtomicBool::new(false));
        let (at, end) = (Arc::clone(&store), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            let mut hung = Vec::new();
            for connection in listener.incoming().flatten() {
                if end.load(Ordering::SeqCst) {
                    return;
                }
                // A client that gives up is no matter.
                if let Ok(Some(connection)) = serve(connection, &at) {
                    hung.push(connection);
                }
            }
        });
        Fake {
            port,
            store,
            ends,
            thread: Some(thread),
        }
    }

    fn uri(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn tracker(&self) -> Box<Mlflow> {
        self.with_env(&Env::new())
    }

    fn with_env(&self, env: &Env) -> Box<Mlflow> {
        Box::new(Mlflow::new(Some(&self.uri()), env).expect("a tracker"))
    }

    fn get<T>(&self, read: impl FnOnce(&mut Store) -> T) -> T {
        read(&mut self.store.lock().expect("no panic"))
    }

    fn count(&self, path: &str) -> usize {
        self.get(|store| {
            store
                .requests
                .iter()
                .filter(|line| line.contains(path))
                .count()
        })
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Serves one request; returns a connection that hangs.
fn serve(connection: TcpStream, store: &Mutex<Store>) -> std::io::Result<Option<TcpStream>> {
    connection.set_read_timeout(Some(Duration::from_secs(20)))?;
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(None);
        }
    }
    let header = |name: &str| {
        let mut lines = head.lines().filter_map(|line| line.split_once(": "));
        lines
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.to_owned())
    };
    let len = header("content-length")
        .and_then(|len| len.parse().ok())
        .unwrap_or(0);
    let mut body = vec![0; len];
    reader.read_exact(&mut body)?;
    let line = head.lines().next().unwrap_or_default();
    let line = line.trim_end_matches(" HTTP/1.1").to_owned();
    let mut store = store.lock().expect("no panic");
    store.requests.push(line.clone());
    store.authorizations.extend(header("authorization"));
    let act = if store.next.is_empty() {
        Do::Answer
    } else {
        store.next.remove(0)
    };
    let (status, answer) = match act {
        Do::Hang => return Ok(Some(connection)),
        Do::Garble => (200, "<html>Log in</html>".to_owned()),
        Do::Status(status) => (
            status,
            "{\"error_code\": \"X\", \"message\": \"of the server\"}".to_owned(),
        ),
        Do::Answer | Do::CloseMidway => answer(&line, &body, &mut store),
    };
    drop(store);
    let mut text = format!(
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{answer}",
        answer.len()
    );
    if act == Do::CloseMidway {
        text.truncate(text.len() - 1);
    }
    (&connection).write_all(text.as_bytes())?;
    Ok(None)
}

fn answer(line: &str, body: &[u8], store: &mut Store) -> (u16, String) {
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let refused = |code: &str| {
        (
            400,
            json!({"error_code": code, "message": "no"}).to_string(),
        )
    };
    let info = |number: usize| {
        let artifacts = format!("mlflow-artifacts:/7/r{number}/artifacts");
        json!({"run_id": format!("r{number}"), "artifact_uri": artifacts})
    };
    let (path, _) = line.split_once('?').unwrap_or((line, ""));
    let answer = match path {
        "GET /api/2.0/mlflow/experiments/get-by-name" => return refused("RESOURCE_DOES_NOT_EXIST"),
        "POST /api/2.0/mlflow/experiments/create" => {
            store.experiment = text(&json["name"]);
            json!({"experiment_id": "7"})
        }
        "POST /api/2.0/mlflow/runs/search" => {
            let filter = text(&json["filter"]);
            let before = store.before.iter().map(|run| &run.tags);
            let all = before.chain([&store.tags]);
            let is_it = |tags: &BTreeMap<String, String>| {
                let id = tags.get("phalanx.id");
                id.is_some_and(|id| filter == format!("tags.`phalanx.id` = '{id}'"))
            };
            match all.map(is_it).position(|is_it| is_it) {
                None => json!({}),
                Some(at) => json!({"runs": [{"info": info(at + 1)}]}),
            }
        }
        "POST /api/2.0/mlflow/runs/create" => {
            assert_eq!(json["experiment_id"], "7");
            if store.runs > 0 {
                let before = OfRun {
                    metrics: std::mem::take(&mut store.metrics),
                    tags: std::mem::take(&mut store.tags),
                    status: std::mem::take(&mut store.status),
                };
                store.params.clear();
                store.before.push(before);
            }
            store.runs += 1;
            let tags = json["tags"].as_array().expect("tags").iter();
            let tags = tags.map(|tag| (text(&tag["key"]), text(&tag["value"])));
            store.tags.extend(tags);
            json!({"run": {"info": info(store.runs)}})
        }
        "POST /api/2.0/mlflow/runs/update" => {
            let status = text(&json["status"]);
            let id = text(&json["run_id"]);
            let number: usize = id[1..].parse().expect("a number");
            match store.before.get_mut(number - 1) {
                Some(before) => before.status = status,
                None => store.status = status,
            }
            json!({})
        }
        "POST /api/2.0/mlflow/runs/log-batch" => {
            assert_eq!(json["run_id"], format!("r{}", store.runs));
            let list = |name: &str| json[name].as_array().cloned().unwrap_or_default();
            let (metrics, params) = (list("metrics"), list("params"));
            assert!(metrics.len() <= 1000 && params.len() <= 100 && list("tags").len() <= 100);
            for param in params {
                let (key, value) = (text(&param["key"]), text(&param["value"]));
                if value.len() > store.longest
                    || store.params.get(&key).is_some_and(|v| *v != value)
                {
                    return refused("INVALID_PARAMETER_VALUE");
                }
                store.params.insert(key, value);
            }
            for metric in metrics {
                let number = |name: &str| metric[name].as_u64().expect("a number");
                let value = metric["value"].to_string();
                let entry = (
                    text(&metric["key"]),
                    number("step"),
                    value,
                    number("timestamp"),
                );
                store.metrics.insert(entry);
            }
            for tag in list("tags") {
                store.tags.insert(text(&tag["key"]), text(&tag["value"]));
            }
            json!({})
        }
        path => {
            let own = format!(
                "PUT /api/2.0/mlflow-artifacts/artifacts/7/r{}/artifacts/",
                store.runs
            );
            let Some(name) = path.strip_prefix(&own) else {
                return (404, "nothing here".to_owned());
            };
            store.artifacts.insert(name.to_owned(), body.to_vec());
            // As the real one.
            return (200, String::new());
        }
    };
    (200, answer.to_string())
}

/// A run's folder.
struct Run(tempfile::TempDir);

impl Run {
    fn new() -> Run {
        let run = Run(tempfile::tempdir().expect("folder"));
        let settings = json!({"--lr": "0.05", "--epochs": "3", "optimizer": "SGD lr 0.05"});
        run.run(1, &settings);
        run
    }

    fn run(&self, attempt: u64, settings: &Value) {
        self.branched(attempt, settings, &[]);
    }

    /// With the attempts that went on with other settings, and after how many steps.
    fn branched(&self, attempt: u64, settings: &Value, branches: &[(u64, u64)]) {
        let branches = branches.iter();
        let branches: Vec<_> = branches
            .map(|(attempt, step)| json!({"attempt": attempt, "step": step}))
            .collect();
        let run = json!({"id": "3f9a", "program": "mnist", "started": 1000.5, "attempt": attempt, "ranks": 2,
            "settings": settings, "branches": branches, "git": {"commit": "c0ffee", "branch": null}});
        self.write("run.json", &run.to_string());
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, text).expect("written");
    }

    fn add(&self, name: &str, text: &str) {
        let old = std::fs::read_to_string(self.0.path().join(name)).unwrap_or_default();
        self.write(name, &(old + text));
    }

    /// The records of these steps: two numbers each.
    fn steps(&self, steps: std::ops::Range<u64>) {
        let line = |n: u64| {
            format!(
                "{{\"step\":{n},\"epoch\":1,\"loss\":{}.25,\"lr\":0.1,\"elapsed_s\":{n}.5}}\n",
                n + 1
            )
        };
        self.add("metrics.jsonl", &steps.map(line).collect::<String>());
    }

    fn finish(&self) {
        self.add(
            "events.jsonl",
            "{\"kind\":\"finish\",\"status\":\"finished\",\"time\":2000.0}\n",
        );
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn later(&self, fake: &Fake) -> String {
        format!(
            "phalanx report {} --upload {}",
            self.path().display(),
            fake.uri()
        )
    }
}

/// The metrics of `steps` steps.
#[track_caller]
fn has_all(fake: &Fake, steps: u64) {
    let metric =
        |name: &str, n: u64, value: String| (name.to_owned(), n, value, 1_001_000 + 1000 * n);
    let all = |n| {
        [
            metric("loss", n, format!("{}.25", n + 1)),
            metric("lr", n, "0.1".to_owned()),
        ]
    };
    let expected: BTreeSet<_> = (0..steps).flat_map(all).collect();
    fake.get(|store| {
        let of_steps = store
            .metrics
            .iter()
            .filter(|(name, ..)| name == "loss" || name == "lr");
        assert!(
            of_steps.cloned().collect::<BTreeSet<_>>() == expected,
            "{:?}",
            store.metrics
        );
    });
}

#[track_caller]
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_run_is_sent_as_it_grows_and_once() {
    let (fake, run) = (Fake::start(), Run::new());
    run.steps(0..3);
    let delivery = Delivery::start(run.path(), fake.tracker()).expect("started");
    eventually("three steps", || fake.get(|store| store.metrics.len() == 6));
    run.steps(3..1500);
    run.add(
        "metrics.jsonl",
        "{\"step\":1500,\"train_loss\":0.30000000000000004,\"accuracy\":null,\"elapsed_s\":1}\n",
    );
    let system = json!({"kind": "system", "time": 1001.5, "elapsed_s": 1.0,
        "ranks": [{"rank": 1, "pid": 7, "cpu_percent": 98.5, "host": "a"}]});
    run.add("events.jsonl", &format!("{system}\n"));
    for name in [
        "report.html",
        "best.safetensors",
        "best.pth",
        ".lock",
        "images/a b.png",
        "checkpoints/x",
        "predictions.jsonl",
    ] {
        run.write(name, name);
    }
    std::os::unix::fs::symlink("/etc/passwd", run.path().join("link")).expect("link");
    run.write("summary.json", "{\"total_s\":9.5,\"recipe\":\"mnist\"}");
    run.finish();
    delivery.finish(FINISH_WAIT).expect("delivered");
    has_all(&fake, 1500);
    fake.get(|store| {
        let mut has = |name: &str, step, value: &str, time| {
            let entry = (name.to_owned(), step, value.to_owned(), time);
            assert!(store.metrics.remove(&entry), "{entry:?}");
        };
        has("train_loss", 1500, "0.30000000000000004", 1_001_500);
        has("system/rank_1/cpu_percent", 1, "98.5", 1_001_500);
        has("summary/total_s", 0, "9.5", 1_010_000);
        assert_eq!(store.metrics.len(), 3000);
        let param = |name: &str| store.params[name].as_str();
        assert_eq!(
            [
                param("lr"),
                param("epochs"),
                param("optimizer"),
                param("ranks")
            ],
            ["0.05", "3", "SGD lr 0.05", "2"]
        );
        assert_eq!(store.status, "FINISHED");
        assert_eq!(&*store.tags["mlflow.source.git.commit"], "c0ffee");
        assert!(!store.tags.contains_key("mlflow.source.git.branch"));
        let names: Vec<&str> = store.artifacts.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "best%2Epth",
                "best%2Esafetensors",
                "events%2Ejsonl",
                "images/a%20b%2Epng",
                "metrics%2Ejsonl",
                "predictions%2Ejsonl",
                "report%2Ehtml",
                "run%2Ejson",
                "summary%2Ejson"
            ]
        );
        assert_eq!(store.artifacts["report%2Ehtml"], b"report.html");
        assert_eq!(
            store.requests.last().map(String::as_str),
            Some("PUT /api/2.0/mlflow-artifacts/artifacts/7/r1/artifacts/best%2Esafetensors")
        );
        store.requests.clear();
    });
    // Nothing is left, until something is added.
    upload(run.path(), fake.tracker()).expect("nothing to do");
    assert_eq!(fake.get(|store| store.requests.len()), 0);
    run.steps(1500..1502);
    upload(run.path(), fake.tracker()).expect("uploaded");
    has_all(&fake, 1502);
    assert_eq!(
        fake.get(|store| store.requests.len()),
        2,
        "a batch and metrics.jsonl"
    );
    // Another server has nothing of it.
    let other = Fake::start();
    upload(run.path(), other.tracker()).expect("uploaded");
    has_all(&other, 1502);
}

#[test]
fn tags_and_the_note_of_a_run_are_tags_also_when_they_change() {
    let (fake, run) = (Fake::start(), Run::new());
    let write = |tags: Value, note: &str| {
        let about =
            json!({"id": "3f9a", "started": 1000.5, "attempt": 1, "tags": tags, "note": note});
        run.write("run.json", &about.to_string());
    };
    write(json!({"base": null, "kind": "x"}), "old");
    run.steps(0..2);
    run.finish();
    upload(run.path(), fake.tracker()).expect("uploaded");
    let has = |name: &str| fake.get(|store| store.tags.get(name).cloned());
    assert_eq!(has("base").as_deref(), Some(""));
    assert_eq!(has("mlflow.note.content").as_deref(), Some("old"));
    // What `phalanx report --tag --note` writes.
    write(json!({"base": null, "kind": "longer"}), "new");
    upload(run.path(), fake.tracker()).expect("uploaded");
    assert_eq!(has("kind").as_deref(), Some("longer"));
    assert_eq!(has("mlflow.note.content").as_deref(), Some("new"));
    fake.get(|store| assert_eq!((store.runs, &*store.status), (1, "FINISHED")));
}

#[test]
fn a_resumed_run_goes_on_and_changed_settings_are_tags() {
    let (fake, run) = (Fake::start(), Run::new());
    run.steps(0..5);
    upload(run.path(), fake.tracker()).expect("uploaded");
    assert_eq!(
        fake.get(|store| store.status.clone()),
        "",
        "it may still run"
    );
    run.run(2, &json!({"--lr": "0.05", "--epochs": "4", "--new": "1"}));
    run.steps(5..6);
    run.add(
        "events.jsonl",
        "{\"kind\":\"finish\",\"status\":\"failed\",\"time\":7,\"error\":\"rank 1 is lost\"}\n",
    );
    upload(run.path(), fake.tracker()).expect("uploaded");
    has_all(&fake, 6);
    fake.get(|store| {
        assert_eq!((store.runs, &*store.status), (1, "FAILED"));
        assert_eq!(
            (&*store.params["epochs"], &*store.params["new"]),
            ("3", "1")
        );
        assert_eq!(
            (&*store.tags["attempt-2/epochs"], &*store.tags["error"]),
            ("4", "rank 1 is lost")
        );
        assert!(
            store
                .requests
                .iter()
                .any(|line| line.contains("runs/search"))
        );
    });
    // A damaged position: the run is found by its id, and the server has each metric once.
    run.write(".tracker-mlflow.json", "{\"position\": 7");
    run.run(3, &json!({"--lr": "0.05", "--epochs": "3"}));
    upload(run.path(), fake.tracker()).expect("uploaded");
    has_all(&fake, 6);
    assert_eq!(fake.get(|store| store.runs), 1);
}

/// Resumed from an earlier step with another `--lr`: the steps after it are taken again, with other losses.
#[test]
fn a_branch_that_was_left_stays_in_a_parent_run() {
    let lr = |lr: &str| json!({"--lr": lr, "--epochs": "3"});
    let loss = |step: u64, loss: f64| {
        format!("{{\"step\":{step},\"epoch\":1,\"loss\":{loss},\"elapsed_s\":1}}\n")
    };
    let losses = |metrics: &BTreeSet<(String, u64, String, u64)>| -> Vec<(u64, String)> {
        let of_steps = metrics.iter().filter(|(name, ..)| name == "loss");
        of_steps
            .map(|(_, step, value, _)| (*step, value.clone()))
            .collect()
    };
    let is = |steps: &[(u64, f64)]| -> Vec<(u64, String)> {
        steps.iter().map(|(s, v)| (*s, v.to_string())).collect()
    };
    // Sent after each attempt, or the second one was not sent at all.
    for (sent_second, lost) in [(true, false), (true, true), (false, false)] {
        let (fake, run) = (Fake::start(), Run::new());
        run.run(1, &lr("0.05"));
        let first: Vec<(u64, f64)> = (0..6).map(|n| (n, n as f64 + 0.5)).collect();
        run.write(
            "metrics.jsonl",
            &first.iter().map(|(n, v)| loss(*n, *v)).collect::<String>(),
        );
        let epoch = "{\"step\":4,\"epoch\":1,\"train_loss\":3.5,\"elapsed_s\":1}\n";
        run.add("metrics.jsonl", epoch);
        upload(run.path(), fake.tracker()).expect("uploaded");
        // From step 4 on: the record of the epoch before it stays.
        let mut now = first[..4].to_vec();
        now.push((4, 0.25));
        let write = |now: &[(u64, f64)]| {
            let lines = now.iter().map(|(n, v)| loss(*n, *v));
            run.write("metrics.jsonl", &(lines.collect::<String>() + epoch));
        };
        run.branched(2, &lr("0.01"), &[(2, 4)]);
        write(&now);
        if sent_second {
            if lost {
                // The answer to the new run.
                use Do::{Answer, CloseMidway};
                fake.get(|store| store.next = vec![Answer, Answer, Answer, CloseMidway]);
                upload(run.path(), fake.tracker()).expect_err("no answer");
            }
            upload(run.path(), fake.tracker()).expect("uploaded");
            fake.get(|store| assert_eq!(losses(&store.metrics), is(&now)));
        }
        // A third attempt goes on where the second ended, with the same settings.
        now.push((5, 0.125));
        run.branched(3, &lr("0.01"), &[(2, 4)]);
        write(&now);
        run.finish();
        upload(run.path(), fake.tracker()).expect("uploaded");
        fake.get(|store| {
            assert_eq!(store.runs, 2);
            assert_eq!(losses(&store.metrics), is(&now));
            assert_eq!(&*store.params["lr"], "0.01");
            assert_eq!(&*store.tags["mlflow.parentRunId"], "r1");
            assert_eq!(store.status, "FINISHED");
            let parent = &store.before[0];
            assert_eq!(losses(&parent.metrics), is(&first));
            assert_eq!(parent.status, "KILLED");
        });
        // Changed settings where no step is taken again: the same run.
        run.branched(4, &lr("0.02"), &[(2, 4), (4, 6)]);
        upload(run.path(), fake.tracker()).expect("uploaded");
        assert_eq!(fake.get(|store| store.runs), 2);
    }
}

/// `elapsed_s` begins at 0 in each attempt.
#[test]
fn what_ranks_use_has_steps_of_its_own_in_each_attempt() {
    let (fake, run) = (Fake::start(), Run::new());
    let attempt = |times: &[f64]| {
        run.add("events.jsonl", "{\"kind\":\"start\",\"time\":1}\n");
        for time in times {
            let ranks = json!([{"rank": 0, "cpu_percent": time}]);
            let system = json!({"kind": "system", "time": 2, "elapsed_s": time, "ranks": ranks});
            run.add("events.jsonl", &format!("{system}\n"));
        }
    };
    attempt(&[0.5, 5.5, 10.5]);
    upload(run.path(), fake.tracker()).expect("uploaded");
    run.run(2, &json!({"--lr": "0.05"}));
    attempt(&[0.5, 5.5]);
    attempt(&[1.5]);
    upload(run.path(), fake.tracker()).expect("uploaded");
    let mut steps = fake.get(|store| {
        let all = store.metrics.iter();
        all.map(|(_, step, value, _)| (*step, value.clone()))
            .collect::<Vec<_>>()
    });
    steps.sort();
    let is = [
        (0, 0.5),
        (5, 5.5),
        (10, 10.5),
        (11, 0.5),
        (16, 5.5),
        (18, 1.5),
    ];
    assert_eq!(steps, is.map(|(step, value)| (step, value.to_string())));
}

#[test]
fn failures_that_pass_lose_and_repeat_nothing() {
    let (fake, run) = (Fake::start(), Run::new());
    fake.get(|store| {
        store.next = vec![
            Do::Status(500),
            Do::CloseMidway,
            Do::Garble,
            Do::Answer,
            Do::Status(503),
        ]
    });
    let delivery = Delivery::start(run.path(), fake.tracker()).expect("started");
    run.steps(0..300);
    run.finish();
    delivery.finish(Duration::from_secs(30)).expect("delivered");
    has_all(&fake, 300);
    assert_eq!(
        fake.get(|store| (store.runs, store.status.clone())),
        (1, "FINISHED".to_owned())
    );
    // The answer to a new run, and to metrics, is lost.
    let (fake, run) = (Fake::start(), Run::new());
    run.steps(0..3);
    run.finish();
    use Do::{Answer, CloseMidway, Status};
    fake.get(|store| {
        store.next = vec![
            Answer,
            Answer,
            Answer,
            CloseMidway,
            Answer,
            Answer,
            Answer,
            Answer,
            CloseMidway,
            Status(429),
        ]
    });
    let delivery = Delivery::start(run.path(), fake.tracker()).expect("started");
    delivery.finish(Duration::from_secs(30)).expect("delivered");
    has_all(&fake, 3);
    assert_eq!(fake.get(|store| store.runs), 1);
}

#[test]
fn a_server_that_is_away_is_waited_for_and_the_rest_can_be_uploaded() {
    let run = Run::new();
    let fake = Fake::start();
    let port = fake.port;
    drop(fake);
    let of = |env: &Env| {
        let uri = format!("http://127.0.0.1:{port}");
        Box::new(Mlflow::new(Some(&uri), env).expect("a tracker"))
    };
    let tracker = || of(&Env::new());
    let env = Env::from([(EXPERIMENT.to_owned(), "digits".to_owned())]);
    let delivery = Delivery::start(run.path(), of(&env)).expect("started");
    run.steps(0..4);
    let began = Instant::now();
    let error = delivery
        .finish(Duration::from_secs(1))
        .expect_err("no server");
    assert!(began.elapsed() < Duration::from_secs(5));
    let text = error.render();
    assert!(
        text.contains("mlflow: 5 records were not delivered (") && text.contains("refused"),
        "{text}"
    );
    let fake = Fake::at(port);
    assert!(text.contains(&run.later(&fake)), "{text}");
    drop(fake);
    // It comes while the training goes on.
    eventually("the lock is free", || {
        Delivery::start(run.path(), tracker()).is_ok()
    });
    eventually("the lock is free", || {
        match Delivery::start(run.path(), tracker()) {
            Err(_) => false,
            Ok(delivery) => {
                run.steps(4..9);
                std::thread::sleep(Duration::from_millis(300));
                let fake = Fake::at(port);
                eventually("metrics", || fake.get(|store| store.metrics.len() == 18));
                run.finish();
                delivery.finish(FINISH_WAIT).expect("delivered");
                has_all(&fake, 9);
                // That of the process that never reached the server.
                assert_eq!(fake.get(|store| store.experiment.clone()), "digits");
                true
            }
        }
    });
}

#[test]
fn a_server_that_hangs_is_left_in_time() {
    let (fake, run) = (Fake::start(), Run::new());
    fake.get(|store| store.next = vec![Do::Hang; 9]);
    run.steps(0..4);
    let delivery = Delivery::start(run.path(), fake.tracker()).expect("started");
    let began = Instant::now();
    let error = delivery
        .finish(Duration::from_secs(1))
        .expect_err("it hangs");
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(
        error
            .chain()
            .contains("5 records were not delivered (not done after 1 s)"),
        "{}",
        error.chain()
    );
}

#[test]
fn a_users_mistake_ends_the_delivery_at_once_and_no_secret_is_shown() {
    let (fake, run) = (Fake::start(), Run::new());
    let set = |pairs: &[(&str, &str)]| {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect::<Env>()
    };
    let wrong = set(&[
        ("MLFLOW_TRACKING_USERNAME", "ada"),
        ("MLFLOW_TRACKING_PASSWORD", "s3cret"),
    ]);
    for status in [401, 403] {
        fake.get(|store| {
            (
                store.requests.clear(),
                store.next = vec![Do::Status(status); 99],
            )
        });
        let delivery = Delivery::start(run.path(), fake.with_env(&wrong)).expect("started");
        std::thread::sleep(Duration::from_millis(700));
        let error = delivery.finish(FINISH_WAIT).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Usage);
        let text = error.render();
        assert!(
            text.contains(&format!("HTTP status {status}"))
                && text.contains("MLFLOW_TRACKING_PASSWORD"),
            "{text}"
        );
        assert!(
            !text.contains("s3cret") && text.contains(&run.later(&fake)),
            "{text}"
        );
        assert_eq!(fake.get(|store| store.requests.len()), 1, "not tried again");
    }
    fake.get(|store| store.next.clear());
    upload(run.path(), fake.with_env(&wrong)).expect("uploaded");
    upload(
        run.path(),
        fake.with_env(&set(&[("MLFLOW_TRACKING_TOKEN", "t0ken")])),
    )
    .expect("uploaded");
    // `ada:s3cret` in Base64.
    assert!(fake.get(|store| store.authorizations.contains("Basic YWRhOnMzY3JldA==")));
    for name in std::fs::read_dir(run.path()).expect("folder") {
        let text = std::fs::read(name.expect("entry").path()).expect("a file");
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(!text.contains("s3cret") && !text.contains("YWRhOnMz") && !text.contains("t0ken"));
    }
    // No MLflow server.
    fake.get(|store| store.next = vec![Do::Status(302); 9]);
    let other = Box::new(
        Mlflow::new(Some(&format!("{}/other", fake.uri())), &Env::new()).expect("a tracker"),
    );
    fake.get(|store| store.next.clear());
    let error = upload(run.path(), other).expect_err("another server");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error
            .chain()
            .contains("is not an MLflow tracking server (HTTP status 404)"),
        "{}",
        error.chain()
    );
}

#[test]
fn long_values_are_cut_for_older_servers() {
    let (fake, run) = (Fake::start(), Run::new());
    fake.get(|store| store.longest = 250);
    run.run(1, &json!({"--long": "x".repeat(7000), "--lr": "1"}));
    upload(run.path(), fake.tracker()).expect("uploaded");
    fake.get(|store| {
        assert_eq!(
            (store.params["long"].len(), &*store.params["lr"]),
            (250, "1")
        );
    });
    assert_eq!(fake.count("log-batch"), 3);
}

#[test]
fn addresses_and_names() {
    let of = |uri: &str| {
        Mlflow::new(Some(uri), &Env::new()).map(|mlflow| mlflow.server.uri().to_owned())
    };
    assert_eq!(of("http://a:5000/").expect("one"), "http://a:5000");
    assert_eq!(
        of("https://ada:s3cret@b/path/").expect("one"),
        "https://b/path"
    );
    for wrong in [
        "sqlite:///mlflow.db",
        "mlruns",
        "http://",
        "ftp://a",
        "http://ada:s3cret@",
    ] {
        let error = of(wrong).expect_err(wrong);
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(!error.render().contains("s3cret"));
    }
    let error = Mlflow::new(None, &Env::new()).err().expect("no address");
    assert!(error.chain().contains("MLFLOW_TRACKING_URI"));
    for (name, taken) in [
        ("a b/c.d", "a b/c.d"),
        ("/../x//y/.", "x/y"),
        ("", "_"),
        ("a%b\"", "a_b_"),
        ("größe", "größe"),
    ] {
        assert_eq!(name_of(name), taken);
    }
    assert_eq!(name_of(&"é".repeat(400)).chars().count(), 250);
}
