//! `--live`: the page of a job, by plain requests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Child;
use std::thread::JoinHandle;

use serde_json::Value;

use crate::support::{SOON, eventually, phalanx, run, succeed, wait};

/// A job that is shown, and its standard error so far.
struct Shown {
    job: Child,
    port: u16,
    secret: String,
    errors: JoinHandle<String>,
}

/// Starts `phalanx` and waits for the link.
fn start(args: &[&str], dir: &Path) -> Shown {
    let mut job = phalanx(args, dir).spawn().expect("phalanx starts");
    let mut lines = BufReader::new(job.stderr.take().expect("piped"));
    let mut line = String::new();
    while !line.starts_with("live") {
        line.clear();
        assert!(lines.read_line(&mut line).expect("text") > 0, "no link");
    }
    let (_, link) = line.trim().split_once("http://").expect("a link");
    let (host, secret) = link.split_once("/?key=").expect("a secret");
    assert_eq!(secret.len(), 32);
    let (_, port) = host.rsplit_once(':').expect("a port");
    let (port, secret) = (port.parse().expect("a number"), secret.to_owned());
    let errors = std::thread::spawn(move || {
        let mut rest = String::new();
        let _ = lines.read_to_string(&mut rest);
        rest
    });
    Shown {
        job,
        port,
        secret,
        errors,
    }
}

impl Shown {
    /// What a browser sends once it has opened the link.
    fn cookie(&self) -> String {
        format!("Cookie: phalanx-live-{}={}", self.port, self.secret)
    }

    /// The exit code and the rest of standard error.
    fn end(self) -> (i32, String) {
        let output = wait(self.job);
        (
            output.status.code().unwrap_or(-1),
            self.errors.join().expect("read"),
        )
    }
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("the page listens");
    stream.set_read_timeout(Some(SOON)).expect("a limit");
    stream
}

/// Sends `head` (the request line and more headers, HTTP/1.0 so that the answer has no chunks).
fn send(port: u16, head: &[&str]) -> BufReader<TcpStream> {
    let mut stream = connect(port);
    let text = format!("{}\r\n\r\n", head.join("\r\n"));
    stream.write_all(text.as_bytes()).expect("sent");
    BufReader::new(stream)
}

/// The whole answer: status, headers in lower case, body.
fn ask(port: u16, head: &[&str]) -> (u16, String, String) {
    let mut answer = String::new();
    send(port, head)
        .read_to_string(&mut answer)
        .expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).expect("a status");
    (
        status.parse().expect("a number"),
        head.to_lowercase(),
        body.to_owned(),
    )
}

/// What a page makes of the stream.
#[derive(Default)]
struct Page {
    state: BTreeMap<String, Value>,
    /// Points by curve.
    curves: BTreeMap<String, Vec<(f64, f64)>>,
    lines: BTreeMap<String, Vec<Value>>,
}

impl Page {
    fn take(&mut self, event: &str, data: Value) {
        if event == "whole" {
            *self = Page::default();
        }
        let Value::Object(data) = data else {
            panic!("{data}")
        };
        for (name, value) in data {
            let object = value.as_object().cloned().unwrap_or_default();
            match &*name {
                "curves" => {
                    for (name, new) in object {
                        let list = |side: &str| -> Vec<f64> {
                            let list = new[side].as_array().expect("numbers").iter();
                            list.map(|v| v.as_f64().expect("a number")).collect()
                        };
                        let curve = self.curves.entry(name).or_default();
                        if new["all"] == true {
                            curve.clear();
                        }
                        curve.extend(list("x").into_iter().zip(list("y")));
                        assert_eq!(new["total"], curve.len());
                    }
                }
                "lines" => {
                    for (rank, new) in object {
                        let new = new.as_array().expect("lines").iter().cloned();
                        self.lines.entry(rank).or_default().extend(new);
                    }
                }
                "report" => {
                    for (name, part) in object {
                        self.state.insert(format!("report.{name}"), part);
                    }
                }
                _ => drop(self.state.insert(name, value)),
            }
        }
    }

    /// Reads events until `done`, or to the end.
    fn read(&mut self, stream: &mut impl BufRead, done: impl Fn(&Page) -> bool) {
        let (mut event, mut line) = (String::new(), String::new());
        loop {
            line.clear();
            if stream.read_line(&mut line).expect("the stream") == 0 {
                return;
            }
            if let Some(name) = line.strip_prefix("event: ") {
                event = name.trim().to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                self.take(&event, serde_json::from_str(data).expect("JSON"));
                if done(self) {
                    return;
                }
            }
        }
    }

    fn texts(&self, rank: &str) -> Vec<&str> {
        let lines = self.lines.get(rank).map_or(&[][..], Vec::as_slice);
        let texts = lines.iter().map(|line| line["text"].as_str());
        texts.map(|text| text.expect("text")).collect()
    }
}

/// Points of each named number of `metrics.jsonl`.
fn logged(run: &Path) -> BTreeMap<String, Vec<(f64, f64)>> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics.jsonl");
    let mut logged: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for line in text.lines() {
        let record: Value = serde_json::from_str(line).expect("JSON");
        let step = record["step"].as_f64().expect("a step");
        for (name, value) in record.as_object().expect("an object") {
            if let Some(value) = value.as_f64().filter(|_| name != "step") {
                logged.entry(name.clone()).or_default().push((step, value));
            }
        }
    }
    logged
}

fn weights(run: &Path) -> Value {
    let text = std::fs::read_to_string(run.join("summary.json")).expect("summary.json");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    assert!(summary["weights_sha256"].is_string());
    summary["weights_sha256"].clone()
}

#[test]
fn a_training_is_shown_while_it_runs_and_nobody_disturbs_it() {
    let dir = tempfile::tempdir().expect("folder");
    let train = "train mnist --data synthetic:1280 --epochs 2 --threads 1 --log-interval 1 \
                 --nproc-per-node 2 --output-dir";
    let words = |more: &'static str| -> Vec<&'static str> {
        train.split_whitespace().chain(more.split(' ')).collect()
    };
    succeed(&words("plain"), dir.path());
    let shown = start(&words("out --live"), dir.path());
    let port = shown.port;
    let cookie = shown.cookie();
    let events = ["GET /events HTTP/1.0", "Host: localhost", &cookie];
    let mut stream = send(port, &events);
    let idle: Vec<TcpStream> = (0..100).map(|_| connect(port)).collect();
    let slow = send(port, &events);
    for garbage in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"\r\n\r\n",
        &[b'a'; 70_000],
    ] {
        // It may be closed before all is written.
        let _ = connect(port).write_all(garbage);
    }
    // Another user of this host, who has no link.
    for path in ["/", "/events"] {
        let get = format!("GET {path} HTTP/1.0");
        let (status, _, body) = ask(port, &[&get, "Host: localhost"]);
        assert_eq!(status, 403, "{path}");
        assert!(body.contains("on standard error"), "{body}");
        assert!(!body.contains(&shown.secret) && !body.contains("<html"));
    }
    for (head, status) in [
        (&["GET / HTTP/1.0", "Host: localhost"][..], 200),
        (&["HEAD /events HTTP/1.0", "Host: 127.0.0.1:1"], 200),
        (&["GET / HTTP/1.0", "Host: evil.example"], 421),
        (&["GET /events HTTP/1.0", "Host: evil.example:80"], 421),
        (&["GET / HTTP/1.0"], 400),
        (
            &[
                "GET /events HTTP/1.0",
                "Host: localhost",
                "Origin: http://evil.example",
            ],
            403,
        ),
        (&["POST / HTTP/1.0", "Host: localhost"], 405),
        (&["GET /../etc/passwd HTTP/1.0", "Host: localhost"], 404),
    ] {
        let (found, headers, body) = ask(port, &[head, &[&*cookie]].concat());
        assert_eq!(found, status, "{head:?}");
        assert!(body.len() < 2000, "{head:?}");
        for header in [
            "content-security-policy: default-src 'none';",
            "x-content-type-options: nosniff",
            "cache-control: no-store",
        ] {
            assert!(headers.contains(header), "{head:?}: {headers}");
        }
        assert!(!headers.contains("access-control"), "{headers}");
    }
    // All that the page asks for is here.
    let (_, _, html) = ask(port, &["GET / HTTP/1.0", "Host: localhost", &cookie]);
    for quoted in html
        .split('"')
        .filter(|text| text.contains(".js") || text.contains(".css"))
    {
        let (status, ..) = ask(
            port,
            &[
                &format!("GET /{quoted} HTTP/1.0"),
                "Host: localhost",
                &cookie,
            ],
        );
        assert_eq!(status, 200, "{quoted}");
    }
    let mut page = Page::default();
    page.read(&mut stream, |page| page.curves.contains_key("loss"));
    assert_eq!(page.state["job"]["state"], "running");
    for rank in page.state["ranks"].as_array().expect("ranks") {
        assert_eq!(rank["state"], "running");
    }
    page.read(&mut stream, |_| false);
    assert_eq!(page.state["job"]["state"], "finished");
    for rank in page.state["ranks"].as_array().expect("ranks") {
        assert_eq!(rank["state"], "done");
    }
    let (code, errors) = shown.end();
    assert_eq!(code, 0, "{errors}");
    drop((idle, slow));
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "closed");
    let [plain, out] = ["plain", "out"].map(|name| dir.path().join(name));
    assert_eq!(page.curves, logged(&out));
    assert_eq!(weights(&plain), weights(&out));
    let folder = out.canonicalize().expect("a folder");
    assert_eq!(page.state["folder"], folder.to_str().expect("text"));
    let summary = &page.state["report.summary"]["weights_sha256"];
    assert_eq!(*summary, weights(&out));
    let texts = page.texts("0").join("\n");
    assert!(texts.contains("accuracy="), "{texts}");
}

#[test]
fn other_programs_show_states_and_output_and_readers_need_the_secret() {
    let dir = tempfile::tempdir().expect("folder");
    let program = "echo out $RANK; echo err $RANK >&2; \
                   while [ ! -e go ]; do sleep 0.05; done; exit $((RANK * 7))";
    let args = [
        "launch",
        "--live",
        "0.0.0.0:0",
        "--nproc-per-node",
        "2",
        "sh",
        "-c",
        program,
    ];
    let shown = start(&args, dir.path());
    let port = shown.port;
    let secret = shown.secret.clone();
    let host = format!("Host: 127.0.0.1:{port}");
    for (path, status) in [
        ("/".to_owned(), 403),
        ("/events".to_owned(), 403),
        (format!("/?key={}", "0".repeat(32)), 403),
        (format!("/?key={secret}"), 200),
    ] {
        let (found, headers, body) = ask(port, &[&format!("GET {path} HTTP/1.0"), &host]);
        assert_eq!(found, status, "{path}");
        assert_eq!(headers.contains("set-cookie: "), status == 200);
        assert!(!body.contains(&secret));
    }
    let wrong = ask(port, &["GET / HTTP/1.0", "Host: evil.example"]);
    assert_eq!(wrong.0, 421);
    let cookie = shown.cookie();
    let mut stream = send(port, &["GET /events HTTP/1.0", &host, &cookie]);
    let mut page = Page::default();
    page.read(&mut stream, |page| {
        ["0", "1"].iter().all(|rank| page.texts(rank).len() == 2)
    });
    for rank in ["0", "1"] {
        let mut texts = page.texts(rank);
        texts.sort_unstable();
        assert_eq!(texts, [format!("err {rank}"), format!("out {rank}")]);
    }
    // A reader that comes back gets it all again.
    let mut again = Page::default();
    let mut other = send(
        port,
        &["GET /events HTTP/1.0", &host, &cookie, "Last-Event-ID: 1"],
    );
    again.read(&mut other, |_| true);
    assert_eq!(again.lines, page.lines);
    std::fs::write(dir.path().join("go"), "").expect("written");
    page.read(&mut stream, |_| false);
    assert_eq!(page.state["job"]["state"], "failed");
    let message = page.state["job"]["message"].as_str().expect("a message");
    assert!(message.contains("rank 1 "), "{message}");
    assert_eq!(page.state["ranks"][1]["state"], "failed");
    assert_eq!(page.state["ranks"][1]["end"], "exited with code 7");
    assert_eq!(
        page.state.get("folder"),
        Some(&Value::Null),
        "no run of ours"
    );
    let (code, errors) = shown.end();
    assert_eq!(code, 1, "{errors}");
    eventually("the port is closed", || {
        TcpStream::connect(("127.0.0.1", port)).is_err()
    });
}

#[test]
fn wrong_addresses_are_usage_errors() {
    let dir = tempfile::tempdir().expect("folder");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("an address").to_string();
    for (args, why) in [
        (&["launch", "--live=host", "true"][..], "PORT"),
        (&["launch", "--live", "99999", "true"], "65535"),
        (&["launch", "--live", &taken, "true"], "cannot listen on"),
        (&["train", "mnist", "--live", "[::1]"], "a port"),
        (
            &["train", "mnist", "--live", "--transport", "thread"],
            "processes",
        ),
        (&["compare", "mnist", "--live"], "several"),
        (&["live", "none"], "no folder none"),
        (&["live", ".", "--address", &taken], "cannot listen on"),
        (&["live", ".", "--address", "host"], "PORT"),
    ] {
        let (code, out, err) = run(args, dir.path());
        assert_eq!(code, 2, "{args:?}: {out}{err}");
        assert!(err.contains(why), "{args:?}: {err}");
    }
}

/// What the page of a folder has of its runs.
#[derive(Default)]
struct Runs(BTreeMap<String, (Value, Page)>);

impl Runs {
    /// Reads events until `done`.
    fn read(&mut self, stream: &mut impl BufRead, done: impl Fn(&Runs) -> bool) {
        let mut line = String::new();
        let begun = std::time::Instant::now();
        while !done(self) {
            // There is a line every ten seconds.
            assert!(begun.elapsed() < SOON, "{:?}", self.0.keys());
            line.clear();
            assert!(stream.read_line(&mut line).expect("the stream") > 0);
            let Some(data) = line.strip_prefix("data: ") else {
                continue;
            };
            let mut data: Value = serde_json::from_str(data).expect("JSON");
            let runs = data["runs"].as_object_mut().map(std::mem::take);
            for (name, change) in runs.into_iter().flatten() {
                if change.is_null() {
                    self.0.remove(&name);
                    continue;
                }
                let run = self.0.entry(name).or_default();
                if change["all"] == true {
                    *run = Default::default();
                }
                if let Some(row) = change.get("row") {
                    run.0 = row.clone();
                }
                let curves = change.get("curves").cloned().unwrap_or_default();
                run.1.take("change", serde_json::json!({"curves": curves}));
            }
        }
    }

    fn row(&self, name: &str) -> &Value {
        self.0.get(name).map_or(&Value::Null, |(row, _)| row)
    }

    fn losses(&self, name: &str) -> &[(f64, f64)] {
        let curve = self.0.get(name).and_then(|(_, run)| run.curves.get("loss"));
        curve.map_or(&[], Vec::as_slice)
    }
}

#[test]
fn runs_of_a_folder_are_shown_as_they_come_and_go() {
    let dir = tempfile::tempdir().expect("folder");
    let runs = dir.path().join("runs");
    let a = runs.join("a");
    std::fs::create_dir_all(&a).expect("folder");
    let shown = start(&["live", "runs"], dir.path());
    let (port, cookie) = (shown.port, shown.cookie());
    let get = |path: &str| {
        ask(
            port,
            &[&format!("GET {path} HTTP/1.0"), "Host: localhost", &cookie],
        )
    };
    for path in ["/", "/events", "/report.json?id=1"] {
        let get = format!("GET {path} HTTP/1.0");
        assert_eq!(ask(port, &[&get, "Host: localhost"]).0, 403, "{path}");
    }
    let mut stream = send(port, &["GET /events HTTP/1.0", "Host: localhost", &cookie]);
    let mut page = Runs::default();
    // A run that goes on, with lines that are no records, and one that is not complete.
    let step = |n: u32, loss: f64| format!("{{\"step\":{n},\"loss\":{loss}}}\n");
    let metrics = step(0, 4.0) + "garbage\n[1]\n\n" + &step(1, 3.0) + &step(2, 2.0) + "{\"step\":3";
    std::fs::write(a.join("metrics.jsonl"), metrics).expect("written");
    std::fs::write(a.join("run.json"), "{\"id\":\"a\",\"host\":\"elsewhere\"}").expect("written");
    page.read(&mut stream, |page| page.losses("a").len() == 3);
    page.read(&mut stream, |page| page.row("a")["is_read"] == true);
    assert_eq!(page.row("a")["state"], "running");
    assert_eq!(
        (&page.row("a")["step"], &page.row("a")["loss"]),
        (&3.0.into(), &2.0.into())
    );
    // One that finishes.
    succeed(
        &["train", "linear", "--output-dir", "runs/deep/b"],
        dir.path(),
    );
    let b = runs.join("deep/b");
    let left = std::fs::read_dir(&b).expect("a folder").count();
    page.read(&mut stream, |page| {
        page.row("deep/b")["state"] == "finished"
    });
    assert_eq!(page.losses("deep/b"), logged(&b)["loss"]);
    let id = &page.row("deep/b")["id"];
    let (status, _, report) = get(&format!("/report.json?id={id}"));
    assert_eq!(status, 200, "{report}");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report[0]["status"], "finished");
    assert_eq!(report[1]["name"], "b");
    assert_eq!(get("/report.json?id=99").0, 404);
    assert_eq!(get("/report.json").0, 404);
    let (_, _, html) = get("/run?id=1");
    for file in html.split('"').filter(|text| text.ends_with(".js")) {
        assert_eq!(get(&format!("/{file}")).0, 200, "{file}");
    }
    // It is resumed from step 1, as a file in the place of the old one.
    std::fs::write(a.join("new"), step(0, 4.0) + &step(1, 3.5)).expect("written");
    std::fs::rename(a.join("new"), a.join("metrics.jsonl")).expect("renamed");
    page.read(&mut stream, |page| {
        page.losses("a") == [(0.0, 4.0), (1.0, 3.5)]
    });
    std::fs::remove_dir_all(&a).expect("removed");
    page.read(&mut stream, |page| page.row("a").is_null());
    assert_eq!(std::fs::read_dir(&b).expect("a folder").count(), left);
    let pid = rustix::process::Pid::from_child(&shown.job);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("sent");
    let (code, errors) = shown.end();
    assert_eq!(code, 130, "{errors}");
}
