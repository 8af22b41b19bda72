//! A page by its requests, without a launcher.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use phalanx_base::job_files::JOB_FILE;
use serde_json::json;
use tokio::sync::Notify;

use super::view::View;
use super::*;

const SOON: Duration = Duration::from_secs(30);

fn connect(page: &Page) -> TcpStream {
    let (_, rest) = page.link().rsplit_once(':').unwrap();
    let (port, _) = rest.split_once('/').unwrap();
    let port: u16 = port.parse().unwrap();
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

/// The answer to a request of these bytes: nothing, if the connection was closed without one.
fn ask(page: &Page, request: &[u8]) -> String {
    let mut stream = connect(page);
    // The rest of a request that is refused need not be read.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or("none")
}

/// `/?key=SECRET`, or another path in the place of `/`.
fn with_key(page: &Page, path: &str) -> String {
    let (_, key) = page.link().split_once('?').unwrap();
    format!("{path}?{key}")
}

fn page() -> Page {
    page_of(Path::new("/no job"))
}

fn page_of(job: &Path) -> Page {
    Page::of_job(&Address::default(), job).unwrap()
}

/// Another user of the host has the port, but not the link.
#[test]
fn nothing_is_shown_without_the_secret_on_loopback_too() {
    let page = page();
    for path in ["/", "/events", "/page.js", "/?key=", "/none"] {
        let get = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let answer = ask(&page, get.as_bytes());
        assert_eq!(status(&answer), "403", "{path}: {answer}");
        assert!(answer.contains("on standard error"), "{answer}");
        assert!(!answer.contains("set-cookie"), "{answer}");
    }
}

#[test]
fn requests_have_limits() {
    let page = page();
    let path = with_key(&page, "/");
    let get = |more: &str| format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n");
    assert_eq!(status(&ask(&page, get("").as_bytes())), "200");
    let many = "X: y\r\n".repeat(100);
    assert_eq!(status(&ask(&page, get(&many).as_bytes())), "431");
    let long = format!("X: {}\r\n", "y".repeat(64 << 10));
    assert!(["431", "none"].contains(&status(&ask(&page, get(&long).as_bytes()))));
    let path = format!(
        "GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "y".repeat(64 << 10)
    );
    assert!(["414", "431", "none"].contains(&status(&ask(&page, path.as_bytes()))));
    for garbage in [
        &b"\0\0\0\0\r\n\r\n"[..],
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let answer = ask(&page, garbage);
        assert!(
            ["400", "none", "505"].contains(&status(&answer)),
            "{answer}"
        );
    }
    // A second request of the same connection is not answered.
    let twice = format!("{0}{0}", get(""));
    assert_eq!(
        ask(&page, twice.as_bytes()).matches("HTTP/1.1 200").count(),
        1
    );
}

#[test]
fn a_request_that_does_not_arrive_is_given_up() {
    let page = page();
    let started = Instant::now();
    let answer = ask(&page, b"GET / HTTP/1.1\r\nHost: local");
    assert!(started.elapsed() >= Duration::from_secs(4));
    assert!(["408", "none"].contains(&status(&answer)), "{answer}");
}

#[test]
fn connections_beyond_the_limit_are_closed_and_others_go_on() {
    let page = page();
    let get = with_key(&page, "/");
    let get = format!("GET {get} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let get = get.as_bytes();
    let idle: Vec<TcpStream> = (0..250).map(|_| connect(&page)).collect();
    assert_eq!(status(&ask(&page, get)), "none");
    drop(idle);
    let started = Instant::now();
    while status(&ask(&page, get)) != "200" {
        assert!(started.elapsed() < SOON, "never answered again");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn there_are_few_streams_and_all_end_with_the_job() {
    let job = tempfile::tempdir().unwrap();
    let page = page_of(job.path());
    let events = with_key(&page, "/events");
    let stream = || {
        let mut stream = connect(&page);
        let request = format!("GET {events} HTTP/1.0\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut first = [0; 12];
        stream.read_exact(&mut first).unwrap();
        (stream, first)
    };
    let mut streams: Vec<_> = (0..32).map(|_| stream()).collect();
    assert!(streams.iter().all(|(_, first)| first == b"HTTP/1.0 200"));
    assert_eq!(&stream().1, b"HTTP/1.0 503");
    let started = Instant::now();
    let end = r#"{"ranks": [], "notes": [], "ended": 1, "message": "it \n failed"}"#;
    std::fs::write(job.path().join(JOB_FILE), end).unwrap();
    drop(page);
    assert!(started.elapsed() < SOON);
    for (stream, _) in &mut streams {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains(r#""message":"it \n failed""#), "{rest}");
        assert!(rest.ends_with("\n\n"), "{rest}");
    }
}

#[test]
fn a_slow_reader_is_dropped() {
    let hub = Hub::<View>::default();
    let mut number = 0;
    let mut count = |n: usize, bytes: usize| {
        let dropped = Arc::new(Notify::new());
        let _reader = hub.subscribe(dropped.clone()).unwrap();
        for _ in 0..n {
            number += 1;
            hub.update(|view| view.set("notes", json!([number, "x".repeat(bytes)])));
        }
        let mut waiting = std::pin::pin!(dropped.notified());
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        waiting.as_mut().poll(&mut cx).is_ready()
    };
    assert!(!count(32, 1));
    assert!(count(33, 1));
    assert!(count(12, 6 << 20), "too many bytes");
}
