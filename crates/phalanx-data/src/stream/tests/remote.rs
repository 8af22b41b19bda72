use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_base::ErrorKind;

use super::super::{Stream, StreamDataset};
use super::*;
use crate::dataset::Dataset;
use crate::loader::{Loader, LoaderOptions};
use crate::sampler::{Cursor, Sampler, SamplerConfig};

/// What a server does with a request.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Ends the connection after so many bytes of the body.
    Drop(usize),
    Status(u16),
    /// A byte, and then one each 50 ms.
    Slow,
    /// Gives whole files only.
    NoRange,
    /// A status with this body, as S3 has it for another region.
    Xml(u16, &'static str),
}

/// A server of the files of a folder. Each request takes the next fault; `last` is that of all later ones.
struct Server {
    url: String,
    /// Of all requests: path, first byte.
    seen: Arc<Mutex<Vec<(String, usize)>>>,
    closing: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn new(folder: PathBuf, faults: Vec<Option<Fault>>, last: Option<Fault>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (seen, closing) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let faults = Arc::new(Mutex::new(faults.into_iter()));
        let (log, end) = (Arc::clone(&seen), Arc::clone(&closing));
        let thread = std::thread::spawn(move || {
            let mut threads = Vec::new();
            for stream in listener.incoming() {
                if end.load(Ordering::Relaxed) {
                    break;
                }
                let (folder, faults, log, end) = (
                    folder.clone(),
                    Arc::clone(&faults),
                    Arc::clone(&log),
                    Arc::clone(&end),
                );
                threads.push(std::thread::spawn(move || {
                    let next = || faults.lock().unwrap().next().unwrap_or(last);
                    answer(stream.unwrap(), &folder, &next, &log, &end);
                }));
            }
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
        });
        Server {
            url,
            seen,
            closing,
            thread: Some(thread),
        }
    }

    /// One whose every answer is `fault`.
    fn all(folder: PathBuf, fault: Fault) -> Server {
        Server::new(folder, Vec::new(), Some(fault))
    }

    fn requests(&self, of: &str) -> Vec<usize> {
        let seen = self.seen.lock().unwrap();
        seen.iter()
            .filter(|(path, _)| path.ends_with(of))
            .map(|(_, from)| *from)
            .collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(&self.url["http://".len()..]);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn answer(
    mut stream: TcpStream,
    folder: &Path,
    next: &dyn Fn() -> Option<Fault>,
    log: &Mutex<Vec<(String, usize)>>,
    end: &AtomicBool,
) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let Some(Ok(first)) = lines.next() else {
        return;
    };
    let headers: BTreeMap<String, String> = (&mut lines)
        .map_while(|line| line.ok().filter(|line| !line.is_empty()))
        .filter_map(|line| {
            let (name, value) = line.split_once(": ")?;
            Some((name.to_ascii_lowercase(), value.to_owned()))
        })
        .collect();
    let words: Vec<&str> = first.split(' ').collect();
    let from = headers.get("range").and_then(|range| {
        range
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse()
            .ok()
    });
    log.lock()
        .unwrap()
        .push((words[1].to_owned(), from.unwrap_or(0)));
    let fault = match words[0] {
        // All that is asked of `Server::all`, which has no files.
        _ if !folder.join("shards").exists() => next(),
        "GET" if !words[1].ends_with(".index") => next(),
        _ => None,
    };
    let (status, text) = match fault {
        Some(Fault::Status(code)) => (code, ""),
        Some(Fault::Xml(code, text)) => (code, text),
        _ => (0, ""),
    };
    if status > 0 {
        let _ = write!(
            stream,
            "HTTP/1.1 {status} No\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
            text.len()
        );
        return;
    }
    let Ok(body) = fs::read(folder.join(words[1].trim_start_matches('/'))) else {
        let _ = write!(
            stream,
            "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        return;
    };
    let (from, total) = (
        from.filter(|_| !matches!(fault, Some(Fault::NoRange))),
        body.len(),
    );
    let status = match from {
        Some(from) => format!(
            "206 Partial Content\r\nContent-Range: bytes {from}-{}/{total}",
            total - 1
        ),
        None => "200 OK".to_owned(),
    };
    let body = &body[from.unwrap_or(0)..];
    let head = format!(
        "HTTP/1.1 {status}\r\nETag: \"x\"\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all(head.as_bytes());
    match fault {
        _ if words[0] == "HEAD" => {}
        Some(Fault::Drop(bytes)) => {
            let _ = stream.write_all(&body[..bytes.min(body.len())]);
        }
        Some(Fault::Slow) => {
            for byte in body {
                if end.load(Ordering::Relaxed) || stream.write_all(&[*byte]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        _ => {
            let _ = stream.write_all(body);
        }
    }
}

/// A folder `shards` with shards of JSON lines, so many samples each, and their index.
fn shards(sizes: &[usize]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("shards");
    fs::create_dir(&folder).unwrap();
    let mut first = 0;
    for (i, size) in sizes.iter().enumerate() {
        let line = |n| format!("{{\"n\": {n}, \"pad\": \"{}\"}}\n", "x".repeat(3000));
        fs::write(
            folder.join(format!("s{i}.jsonl")),
            (first..first + size).map(line).collect::<String>(),
        )
        .unwrap();
        first += size;
    }
    stream(&folder.display().to_string(), root.path(), 1 << 20)
        .make_index(None, false)
        .unwrap();
    root
}

fn stream(place: &str, root: &Path, limit: u64) -> Stream {
    Stream::new(place)
        .cache(root.join("cache"), limit)
        .shuffle_buffer(8)
}

fn numbers(stream: Stream) -> phalanx_base::Result<StreamDataset<u64>> {
    stream.map(|sample| sample.json("n"))
}

/// Reads an epoch of two ranks at the same time.
fn read(data: &Arc<StreamDataset<u64>>, epoch: u64) -> phalanx_base::Result<Vec<u64>> {
    let rank = |rank| -> phalanx_base::Result<Vec<u64>> {
        let config = SamplerConfig {
            samples: data.len(),
            world: 2,
            rank,
            shuffle: true,
            seed: 5,
        };
        let sampler = Sampler::exact(config, 4)?.shards(data.order())?;
        let mut loader = Loader::new(Arc::clone(data), LoaderOptions::default())?;
        loader.start(sampler.resume(Cursor { epoch, samples: 0 })?);
        let mut all = Vec::new();
        while let Some(batch) = loader.next_batch()? {
            all.extend_from_slice(&batch);
        }
        Ok(all)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(move || rank(1));
        let mut all: Vec<u64> = rank(0)?;
        all.extend(other.join().unwrap()?);
        all.sort_unstable();
        Ok(all)
    })
}

#[test]
fn a_server_that_breaks_off_is_asked_for_the_rest() {
    let root = shards(&[8, 8]);
    // Whatever byte the connection ends at, and answers in between that are none.
    let faults = [5000, 1, 12_000, 0, 700]
        .map(|n| Some(Fault::Drop(n)))
        .to_vec();
    let faults = [
        faults,
        vec![Some(Fault::Status(500)), Some(Fault::Status(429))],
    ]
    .concat();
    let server = Server::new(root.path().into(), faults, None);
    let data = numbers(stream(
        &format!("{}/shards", server.url),
        root.path(),
        1 << 20,
    ))
    .unwrap();
    assert!(data.describe().contains("cache of 1 MiB in "), "{data:?}");
    assert_eq!(
        read(&Arc::new(data), 0).unwrap(),
        (0..16).collect::<Vec<_>>()
    );
    let mut starts = server.requests("s0.jsonl");
    starts.extend(server.requests("s1.jsonl"));
    assert!(starts.iter().any(|from| *from > 0), "{starts:?}");
    let files = names(&root.path().join("cache"));
    assert_eq!(
        files.iter().filter(|name| name.ends_with(".shard")).count(),
        3,
        "{files:?}"
    );
    assert_eq!(files.len(), 4);
}

#[test]
fn a_server_that_gives_nothing_is_named_with_url_offset_and_status() {
    let root = shards(&[8]);
    let fails = |last, kind, culprits: &[&str]| {
        let server = Server::new(
            root.path().into(),
            vec![Some(Fault::Drop(7000))],
            Some(last),
        );
        let data = numbers(stream(
            &format!("{}/shards", server.url),
            root.path(),
            1 << 20,
        ))
        .unwrap();
        let began = Instant::now();
        let mut batch = Vec::new();
        let error = data.read_batch(0, &[3], &mut batch).unwrap_err();
        assert_eq!(error.kind(), kind, "{error:?}");
        let text = error.render();
        for culprit in [&server.url[..], "s0.jsonl"].iter().chain(culprits) {
            assert!(text.contains(culprit), "{culprit}: {text}");
        }
        assert!(began.elapsed() < Duration::from_secs(20));
        // Nothing is left but the index.
        drop(data);
        assert_eq!(names(&root.path().join("cache")).len(), 2);
        fs::remove_dir_all(root.path().join("cache")).unwrap();
        server.requests("s0.jsonl").len()
    };
    let broken = ErrorKind::System;
    assert_eq!(
        fails(Fault::Status(500), broken, &["500", "byte 7000", "6 times"]),
        7
    );
    assert_eq!(fails(Fault::Status(429), broken, &["429", "byte 7000"]), 7);
    assert_eq!(fails(Fault::Drop(0), broken, &["byte 7000"]), 7);
    assert_eq!(
        fails(
            Fault::Status(403),
            ErrorKind::Usage,
            &["credentials are refused"]
        ),
        2
    );
    assert_eq!(
        fails(Fault::Status(404), ErrorKind::Usage, &["there is no"]),
        2
    );
    fails(Fault::NoRange, broken, &["Range request not supported"]);
    assert_eq!(fails(Fault::Slow, broken, &["bytes came in 1 s"]), 7);
}

#[test]
fn an_object_that_changed_is_refused() {
    let root = shards(&[8]);
    let server = Server::new(root.path().into(), Vec::new(), None);
    let open = || {
        numbers(stream(
            &format!("{}/shards", server.url),
            root.path(),
            1 << 20,
        ))
        .unwrap()
    };
    let data = open();
    let path = root.path().join("shards/s0.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, &text[..10_000]).unwrap();
    let error = data.read_batch(0, &[0], &mut Vec::new()).unwrap_err();
    assert!(
        error.to_string().contains("s0.jsonl is not what it was"),
        "{error}"
    );
    // No index.
    fs::remove_file(root.path().join("shards/phalanx.index")).unwrap();
    let place = format!("{}/shards", server.url);
    let error = numbers(stream(&place, root.path(), 1 << 20))
        .unwrap_err()
        .render();
    assert!(
        error.contains(&format!("make it once with `phalanx index {place}`")),
        "{error}"
    );
}

/// Twelve shards of 25 kB, of which the cache holds four. Two jobs of two ranks read them in three epochs.
#[test]
fn a_cache_smaller_than_the_set_serves_two_jobs() {
    let root = shards(&[8; 12]);
    let server = Server::new(root.path().into(), Vec::new(), None);
    let place = format!("{}/shards", server.url);
    let limit = 4 * 25_000;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let data = Arc::new(numbers(stream(&place, root.path(), limit)).unwrap());
                for epoch in 0..3 {
                    assert_eq!(read(&data, epoch).unwrap(), (0..96).collect::<Vec<_>>());
                    assert!(used(&root.path().join("cache")) <= limit);
                }
            });
        }
    });
    let files = names(&root.path().join("cache"));
    assert!(
        files
            .iter()
            .all(|name| name.ends_with(".shard") || name == "lock"),
        "{files:?}"
    );
    // Too small for a shuffle buffer.
    let error = numbers(stream(&place, root.path(), 60_000).shuffle_buffer(16)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("too small for a shuffle buffer of 16 samples"),
        "{error}"
    );
}

/// Starts this test again as a process of its own with variables for S3.
fn with_s3(test: &str, variables: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        &format!("stream::tests::remote::{test}"),
        "--nocapture",
    ]);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
        command.env_remove(name);
    }
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

const CHILD: &str = "PHALANX_TEST_S3";

#[test]
fn credentials_and_regions_are_explained() {
    let root = tempfile::tempdir().unwrap();
    if std::env::var_os(CHILD).is_some() {
        let error = numbers(stream("s3://bucket/set", root.path(), 1 << 20)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        print!("{}", error.render());
        return;
    }
    let test = "credentials_and_regions_are_explained";
    const MALFORMED: &str = "<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is malformed; \
                             the region 'us-east-1' is wrong; expecting 'eu-west-1'</Message></Error>";
    let keys = [
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        (CHILD, "1"),
    ];
    for (fault, culprit) in [
        (
            Fault::Xml(400, MALFORMED),
            "the bucket is in another region",
        ),
        (Fault::Status(301), "the bucket is in another region"),
        (Fault::Status(403), "the credentials are refused"),
    ] {
        let server = Server::all(root.path().into(), fault);
        let text = with_s3(
            test,
            &[&keys[..], &[("AWS_ENDPOINT", &server.url)]].concat(),
        );
        assert!(
            text.contains(&format!("error: s3://bucket/set/phalanx.index: {culprit}")),
            "{text}"
        );
    }
    let server = Server::all(root.path().into(), Fault::Status(404));
    let without = [
        (CHILD, "1"),
        ("AWS_METADATA_ENDPOINT", &server.url),
        ("AWS_ENDPOINT", &server.url),
    ];
    let text = with_s3(test, &without);
    assert!(text.contains("there are no credentials"), "{text}");
}

/// With `PHALANX_MOTO_SERVER=/path/to/moto_server` (`pip install moto[server]`), against Amazon's protocol as moto has it.
#[test]
fn s3_is_indexed_and_read() {
    let root = shards(&[8, 3, 8]);
    if std::env::var_os(CHILD).is_some() {
        let made = stream("s3://bucket/set", root.path(), 1 << 20)
            .make_index(None, false)
            .unwrap();
        assert!(
            made.starts_with("s3://bucket/set/phalanx.index: 3 shards of JSON lines, 19 samples"),
            "{made}"
        );
        let data = Arc::new(numbers(stream("s3://bucket/set", root.path(), 1 << 20)).unwrap());
        assert_eq!(read(&data, 0).unwrap(), (0..19).collect::<Vec<_>>());
        // An object with another ETag than the indexed one.
        let local = numbers(stream(
            &root.path().join("shards").display().to_string(),
            root.path(),
            1 << 20,
        ))
        .unwrap();
        assert_eq!(local.content(), data.content());
        return;
    }
    let Some(moto) = std::env::var_os("PHALANX_MOTO_SERVER") else {
        println!("skipped: PHALANX_MOTO_SERVER does not name a moto_server");
        return;
    };
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut command = Command::new(moto);
    command.args(["-H", "127.0.0.1", "-p", &free.port().to_string()]);
    command
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null());
    let mut moto = command.spawn().unwrap();
    let put = |path: &str, body: &[u8]| {
        let mut stream = TcpStream::connect(free).ok()?;
        let head = format!(
            "PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).ok()?;
        BufReader::new(stream)
            .lines()
            .next()?
            .ok()
            .filter(|line| line.contains(" 200 "))
    };
    let until = Instant::now() + Duration::from_secs(60);
    while put("/bucket", b"").is_none() {
        assert!(Instant::now() < until, "moto does not answer");
        std::thread::sleep(Duration::from_millis(100));
    }
    for name in ["s0.jsonl", "s1.jsonl", "s2.jsonl"] {
        put(
            &format!("/bucket/set/{name}"),
            &fs::read(root.path().join("shards").join(name)).unwrap(),
        )
        .unwrap();
    }
    let endpoint = format!("http://{free}");
    let variables = [
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        (CHILD, "1"),
        ("AWS_ENDPOINT", &endpoint),
    ];
    let text = with_s3("s3_is_indexed_and_read", &variables);
    moto.kill().unwrap();
    moto.wait().unwrap();
    assert!(text.contains("1 passed"), "{text}");
}
