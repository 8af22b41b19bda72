//! The progress of a run, for Kubeflow Trainer: what `kubectl describe trainjob` shows as its trainer status.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use phalanx_base::env::Env;
use phalanx_base::{files, say};
use phalanx_http::ureq::http::header::{AUTHORIZATION, CONTENT_TYPE};
use serde_json::{Value, json};

use crate::values::shown;
use crate::{Error, ErrorKind, Result, Tracker};

/// The variables that the Trainer's controller sets: the address, and the files with its certificate and this pod's token.
const URL: &str = "KUBEFLOW_TRAINER_SERVER_URL";
const ROOTS: &str = "KUBEFLOW_TRAINER_SERVER_CA_CERT";
const TOKEN: &str = "KUBEFLOW_TRAINER_SERVER_TOKEN";

/// The least time between two requests, except for the last one, and the longest wait for an answer.
const INTERVAL: Duration = Duration::from_secs(5);

/// The most metrics, and the most characters of a name, that the controller takes.
const MOST_METRICS: usize = 256;
const MOST_CHARS: usize = 64;

/// Largest token.
const TOKEN_BYTES: u64 = 64 << 10;

/// Posts how far the training is, the seconds that are left, and the newest value of each metric. A request that fails is a
/// warning, once, and the next one is made as if it had not.
#[derive(Default)]
struct Kubeflow {
    url: String,
    roots: PathBuf,
    token: PathBuf,
    /// Steps of the whole training; 0: unknown.
    total: u64,
    /// Steps that were taken, and after how many seconds: at the first record of this attempt, and at the last one.
    first: Option<(u64, f64)>,
    last: (u64, f64),
    metrics: BTreeMap<String, String>,
    sent: Option<Instant>,
    has_failed: bool,
}

/// The tracker for the Trainer whose controller has set its variables in `env`.
pub(crate) fn of(env: &Env) -> Option<Box<dyn Tracker + Send>> {
    let [url, roots, token] = [URL, ROOTS, TOKEN].map(|name| env.get(name));
    Some(Box::new(Kubeflow {
        url: url?.clone(),
        roots: roots?.into(),
        token: token?.into(),
        ..Kubeflow::default()
    }))
}

impl Kubeflow {
    /// The body of a request.
    fn status(&self) -> Value {
        let metrics = self.metrics.iter().take(MOST_METRICS);
        let metrics = metrics.map(|(name, value)| json!({"name": name, "value": value}));
        let time = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let mut status = json!({"metrics": metrics.collect::<Vec<_>>(), "lastUpdatedTime": time});
        if self.total > 0 {
            let ((done, now), total) = (self.last, self.total);
            status["progressPercentage"] = json!(done.min(total) * 100 / total);
            let (before, then) = self.first.unwrap_or(self.last);
            let each = (now - then) / done.saturating_sub(before) as f64;
            let left = each * total.saturating_sub(done) as f64;
            if left.is_finite() {
                status["estimatedRemainingSeconds"] = json!(left.clamp(0.0, 2e9) as i32);
            }
        }
        json!({ "trainerStatus": status })
    }

    fn send(&self) -> Result<()> {
        // Certificate and token are replaced before they expire.
        let token = files::read_regular(&self.token, TOKEN_BYTES)?;
        let token = String::from_utf8_lossy(&token);
        let roots = Some((ROOTS, Path::new(&self.roots)));
        let request = phalanx_http::agent_trusting(INTERVAL, false, roots)?.post(&self.url);
        let request = request.header(AUTHORIZATION, format!("Bearer {}", token.trim()));
        let request = request.header(CONTENT_TYPE, "application/json");
        let failed = |why| Error::new(ErrorKind::PeerLost, format!("{}: {why}", self.url));
        let answer = request.send(self.status().to_string());
        match answer.map_err(|e| failed(e.to_string()))?.status() {
            status if status.is_success() => Ok(()),
            status => Err(failed(format!("HTTP status {status}"))),
        }
    }

    /// Sends the status if the last request is long enough ago.
    fn post(&mut self, is_last: bool) -> Result<()> {
        if is_last || self.sent.is_none_or(|sent| sent.elapsed() >= INTERVAL) {
            self.sent = Some(Instant::now());
            if let Err(error) = self.send()
                && !std::mem::replace(&mut self.has_failed, true)
            {
                say::note(format_args!("warning: kubeflow: {}", error.chain()));
            }
        }
        Ok(())
    }
}

impl Tracker for Kubeflow {
    fn name(&self) -> &str {
        "kubeflow"
    }

    fn run(&mut self, run: &Value) -> Result<()> {
        let setting = |name: &str| run["settings"][name].as_str()?.parse::<u64>().ok();
        let each = run["steps_per_epoch"].as_u64().unwrap_or(0);
        let all = setting("--epochs").map(|epochs| epochs.saturating_mul(each));
        let limits = [all, setting("--max-steps")].into_iter().flatten();
        (self.total, self.first) = (limits.min().unwrap_or(0), None);
        Ok(())
    }

    fn metrics(&mut self, records: &[Value]) -> Result<()> {
        for record in records {
            let (step, clock) = (record["step"].as_u64(), record["elapsed_s"].as_f64());
            // That of a batch counts from 0.
            let taken = step.unwrap_or(0) + u64::from(record["loss"].is_number());
            self.last = (taken, clock.unwrap_or(0.0));
            self.first.get_or_insert(self.last);
            let is_metric = |name: &str| !["step", "elapsed_s"].contains(&name);
            for (name, value) in record.as_object().into_iter().flatten() {
                if value.is_number() && name.len() <= MOST_CHARS && is_metric(name) {
                    self.metrics.insert(name.clone(), shown(value));
                }
            }
        }
        self.post(false)
    }

    fn event(&mut self, _: &Value) -> Result<()> {
        self.post(false)
    }

    fn summary(&mut self, _: &Value) -> Result<()> {
        // It may have ended earlier than planned.
        self.total = self.total.min(self.last.0);
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.post(true)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// A controller that answers with these statuses, then ends. Gives the path, the token and the body of each request.
    fn controller(statuses: &'static [u16]) -> (String, Receiver<[String; 3]>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/apis/status", listener.local_addr().expect("one"));
        let (requests, received) = channel();
        std::thread::spawn(move || {
            for status in statuses {
                let (connection, _) = listener.accept().expect("a request");
                let mut reader = BufReader::new(&connection);
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") {
                    assert_ne!(reader.read_line(&mut head).expect("a line"), 0);
                }
                let header = |name: &str| {
                    let mut lines = head.lines().filter_map(|line| line.split_once(": "));
                    let line = lines.find(|(n, _)| n.eq_ignore_ascii_case(name));
                    line.map_or(String::new(), |(_, value)| value.to_owned())
                };
                let mut body = vec![0; header("content-length").parse().expect("a length")];
                reader.read_exact(&mut body).expect("a body");
                let first = head.lines().next().unwrap_or_default().to_owned();
                let body = String::from_utf8(body).expect("text");
                let text = format!(
                    "HTTP/1.1 {status} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                );
                (&connection).write_all(text.as_bytes()).expect("written");
                let _ = requests.send([first, header("authorization"), body]);
            }
        });
        (url, received)
    }

    /// The tracker, and the folder with its token.
    fn tracker(url: &str) -> (Kubeflow, tempfile::TempDir) {
        let folder = tempfile::tempdir().expect("folder");
        let certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        std::fs::write(folder.path().join("ca.crt"), certificate).expect("written");
        std::fs::write(folder.path().join("token"), "first\n").expect("written");
        let made = Kubeflow {
            url: url.to_owned(),
            roots: folder.path().join("ca.crt"),
            token: folder.path().join("token"),
            ..Kubeflow::default()
        };
        (made, folder)
    }

    fn earlier(tracker: &mut Kubeflow) {
        tracker.sent = Instant::now().checked_sub(INTERVAL);
    }

    #[test]
    fn progress_is_posted_every_five_seconds_and_at_the_end() {
        let (url, received) = controller(&[200, 200, 200]);
        let (mut tracker, folder) = tracker(&url);
        let run = json!({"settings": {"--epochs": "5"}, "steps_per_epoch": 4, "typed": []});
        tracker.run(&run).expect("no error");
        let loss = |step: u64| json!({"step": step, "epoch": 1, "elapsed_s": 2.0 + step as f64, "loss": 0.5, "lr": null});
        tracker.metrics(&[loss(1)]).expect("no error");
        let [line, token, body] = received.recv().expect("a request");
        assert_eq!(line, "POST /apis/status HTTP/1.1");
        assert_eq!(token, "Bearer first");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        let status = &body["trainerStatus"];
        assert_eq!(status["progressPercentage"], 10);
        // One record shows no speed.
        assert_eq!(status.get("estimatedRemainingSeconds"), None);
        let metrics = json!([{"name": "epoch", "value": "1"}, {"name": "loss", "value": "0.5"}]);
        assert_eq!(status["metrics"], metrics);
        let time = status["lastUpdatedTime"].as_str().expect("a time");
        let time = humantime::parse_rfc3339(time).expect("RFC 3339");
        assert!(time.elapsed().expect("in the past") < Duration::from_secs(60));

        // Within five seconds nothing is sent.
        tracker.metrics(&[loss(2)]).expect("no error");
        tracker.event(&json!({"kind": "system"})).expect("no error");
        std::fs::write(folder.path().join("token"), "second").expect("written");
        let test =
            json!({"step": 4, "epoch": 1, "elapsed_s": 5.0, "test_loss": 0.25, "accuracy": 1});
        tracker.metrics(&[test]).expect("no error");
        earlier(&mut tracker);
        tracker.event(&json!({"kind": "system"})).expect("no error");
        let [_, token, body] = received.recv().expect("a request");
        assert_eq!(token, "Bearer second");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        let status = &body["trainerStatus"];
        assert_eq!(status["progressPercentage"], 20);
        // Two steps in two seconds; sixteen are left.
        assert_eq!(status["estimatedRemainingSeconds"], 16);
        let names = status["metrics"].as_array().expect("metrics").iter();
        let names: Vec<&str> = names.filter_map(|m| m["name"].as_str()).collect();
        assert_eq!(names, ["accuracy", "epoch", "loss", "test_loss"]);

        // It stopped early.
        tracker.summary(&json!({})).expect("no error");
        tracker.finish().expect("no error");
        let [_, _, body] = received.recv().expect("a request");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!(body["trainerStatus"]["progressPercentage"], 100);
        assert_eq!(body["trainerStatus"]["estimatedRemainingSeconds"], 0);
        assert!(received.recv().is_err(), "a fourth request");
    }

    #[test]
    fn a_limit_of_steps_is_the_end() {
        let (mut tracker, _folder) = tracker("http://127.0.0.1:1");
        for (settings, total) in [
            (json!({"--epochs": "3"}), 12),
            (json!({"--epochs": "3", "--max-steps": "7"}), 7),
            (json!({"--epochs": "1", "--max-steps": "7"}), 4),
            (json!({"--max-steps": "70"}), 70),
            (json!({}), 0),
        ] {
            let run = json!({"settings": settings, "steps_per_epoch": 4});
            tracker.run(&run).expect("no error");
            assert_eq!(tracker.total, total, "{settings}");
        }
        assert_eq!(
            tracker.status()["trainerStatus"].get("progressPercentage"),
            None
        );
    }

    #[test]
    fn a_controller_that_fails_is_no_error() {
        let record = json!({"step": 0, "elapsed_s": 1.0, "loss": 0.5});
        let (url, received) = controller(&[403, 503, 200]);
        let (mut kubeflow, folder) = tracker(&url);
        for _ in 0..3 {
            kubeflow
                .metrics(std::slice::from_ref(&record))
                .expect("no error");
            // The next one waits for its time, too.
            kubeflow
                .metrics(std::slice::from_ref(&record))
                .expect("no error");
            received.recv().expect("a request");
            earlier(&mut kubeflow);
        }
        // There is no controller any more, no token, or no certificate.
        kubeflow
            .metrics(std::slice::from_ref(&record))
            .expect("no error");
        for name in ["token", "ca.crt"] {
            std::fs::remove_file(folder.path().join(name)).expect("removed");
            earlier(&mut kubeflow);
            kubeflow.finish().expect("no error");
            assert!(kubeflow.has_failed);
        }
    }

    #[test]
    fn it_posts_only_where_the_controller_has_set_its_variables() {
        let mut env = Env::new();
        for name in [URL, ROOTS, TOKEN] {
            assert!(of(&env).is_none(), "{env:?}");
            env.insert(name.to_owned(), "x".to_owned());
        }
        assert_eq!(
            of(&env).map(|tracker| tracker.name().to_owned()).as_deref(),
            Some("kubeflow")
        );
    }
}
