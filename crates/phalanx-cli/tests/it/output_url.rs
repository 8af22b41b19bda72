//! Runs that are kept in an object store. `PHALANX_TEST_S3` names the `moto_server` of `pip install 'moto[server]'`.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::{Job, ended, eventually, free_port, phalanx, process_of, signal, succeed};

const TRAIN: &str = "train mnist --data synthetic:240 --global-batch-size 24 --epochs 6 --threads 1 --log-interval 1 \
                     --deterministic shards --test-batch-size 50 --nproc-per-node 2 --save-every 5";

struct Moto {
    port: u16,
    _process: Job,
}

impl Moto {
    /// With the bucket `bucket`; `None` where there is no such server.
    fn start() -> Option<Moto> {
        let Some(program) = std::env::var_os("PHALANX_TEST_S3") else {
            println!("skipped: PHALANX_TEST_S3 does not name a moto_server");
            return None;
        };
        let port = free_port();
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        command.env("INITIAL_NO_AUTH_ACTION_COUNT", "100000");
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let moto = Moto {
            port,
            _process: Job::start(&mut command),
        };
        eventually("the server answers", || moto.ask("PUT /bucket").is_some());
        Some(moto)
    }

    fn ask(&self, line: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let head = "HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(format!("{line} {head}").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.starts_with("HTTP/1.1 200").then_some(answer)
    }

    /// The names of the objects below `prefix`.
    fn names(&self, prefix: &str) -> BTreeSet<String> {
        let listed = self.ask(&format!("GET /bucket?list-type=2&prefix={prefix}/"));
        let listed = listed.expect("a list");
        let keys = listed.split("<Key>").skip(1);
        let names = keys.map(|rest| rest.split('<').next().expect("a key"));
        names
            .map(|name| name[prefix.len() + 1..].to_owned())
            .collect()
    }

    /// `phalanx train` with these words in `dir`.
    fn train(&self, dir: &Path, more: &str) -> Command {
        let line = format!("{TRAIN} --output-dir run {more}");
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut command = phalanx(&words, dir);
        self.reach(&mut command);
        command
    }

    fn reach(&self, command: &mut Command) {
        command
            .env("AWS_ENDPOINT", format!("http://127.0.0.1:{}", self.port))
            .env("AWS_ACCESS_KEY_ID", "mock_key")
            .env("AWS_SECRET_ACCESS_KEY", "mock_secret")
            .env("AWS_REGION", "us-east-1");
    }
}

fn files(dir: &Path) -> BTreeSet<String> {
    let below = |dir: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(dir).expect("a folder").flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| !name.starts_with('.')).collect()
    };
    let mut all = BTreeSet::new();
    for name in below(dir) {
        match dir.join(&name).is_dir() {
            true if name == "flight" => {}
            true => {
                all.extend((below(&dir.join(&name)).iter()).map(|file| format!("{name}/{file}")))
            }
            // Made of the others.
            false if name.starts_with("events.out.") => {}
            false => drop(all.insert(name)),
        }
    }
    all
}

/// Whether a process of the job in `dir` runs.
fn runs_in(dir: &Path) -> bool {
    let wanted = format!("TMPDIR={}", dir.display());
    let entries = std::fs::read_dir("/proc").expect("processes").flatten();
    entries.into_iter().any(|entry| {
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        variables.any(|variable| variable == wanted.as_bytes())
    })
}

/// The digest that the last lines name.
fn weights(err: &str) -> String {
    let line = err.lines().rfind(|line| line.starts_with("weights "));
    line.expect("a digest")
        .split('…')
        .next()
        .expect("it")
        .to_owned()
}

#[test]
fn a_run_is_kept_in_an_object_store_and_continued_from_there() {
    let Some(moto) = Moto::start() else { return };
    let folder = || tempfile::tempdir().expect("a folder");
    let (whole, cut, new) = (folder(), folder(), folder());
    let words: Vec<&str> = TRAIN.split_whitespace().collect();
    let (_, err) = succeed(
        &[&words[..], &["--output-dir", "run"]].concat(),
        whole.path(),
    );
    let expected = weights(&err);

    // Killed with all its processes when a checkpoint was sent.
    let to = "--output-url s3://bucket/runs/a/";
    let job = Job::start(&mut moto.train(
        cut.path(),
        &format!("{to} --log-interval 1 --max-restarts 0"),
    ));
    eventually("a checkpoint is there", || {
        let names = moto.names("runs/a");
        names
            .iter()
            .any(|name| name.starts_with("checkpoints/") && name.ends_with(".json"))
    });
    let ranks = [0, 1].map(|rank| process_of(rank, cut.path()));
    signal(job.id(), "KILL");
    for rank in ranks {
        let _ = Command::new("kill")
            .args(["-s", "KILL", &rank.to_string()])
            .status();
    }
    ended(job);
    // The guard of the killed launcher sends what is left.
    eventually("its processes have ended", || !runs_in(cut.path()));

    // Another training does not go there.
    let other = moto.train(new.path(), to).output().expect("it runs");
    let err = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(2), "{err}");
    assert!(err.contains("s3://bucket/runs/a has another run"), "{err}");

    // On another host.
    for is_first in [true, false] {
        let job = Job::start(&mut moto.train(new.path(), &format!("{to} --resume auto")));
        let (code, _, err) = ended(job);
        assert_eq!(code, 0, "{err}");
        if is_first {
            assert!(err.contains(" copied from s3://bucket/runs/a\n"), "{err}");
            assert_eq!(weights(&err), expected);
        }
        assert_eq!(moto.names("runs/a"), files(&new.path().join("run")));
    }
    let mut report = phalanx(
        &["report", "run", "--upload", "s3://bucket/runs/b"],
        new.path(),
    );
    moto.reach(&mut report);
    let (code, out, err) = ended(Job::start(&mut report));
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("run is in the object store"), "{out}");
    assert_eq!(moto.names("runs/b"), files(&new.path().join("run")));

    for (url, why) in [
        ("s3://none/a", "there is no such bucket"),
        ("file:///tmp/a", "--output-url file:///tmp/a: give s3://"),
    ] {
        let dir = folder();
        let job = Job::start(&mut moto.train(dir.path(), &format!("--output-url {url}")));
        let (code, _, err) = ended(job);
        assert_eq!(code, 2, "{err}");
        assert!(err.contains(why), "{err}");
    }
}
