//! Against servers on loopback that are slow, wrong, truncating, or absent.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::*;

/// What the server does with one request; the last for all further ones.
#[derive(Clone, Copy, Debug)]
enum Does {
    /// Sends the file.
    Serves,
    /// Promises all and closes after so many bytes.
    BreaksOffAfter(usize),
    /// Sends so many bytes, then nothing more.
    StallsAfter(usize),
    /// A page of its own.
    SendsAPage,
    /// That status and no file.
    Says(&'static str),
    /// Sends without end.
    NeverStops,
    /// To itself.
    Redirects,
}

struct Server {
    url: String,
    stop: Arc<AtomicBool>,
    requests: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
    address: std::net::SocketAddr,
}

impl Server {
    fn start(content: &'static [u8], script: &'static [Does]) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let thread = std::thread::spawn({
            let (stop, requests) = (Arc::clone(&stop), Arc::clone(&requests));
            move || {
                for (i, stream) in listener.incoming().enumerate() {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let does = script[i.min(script.len() - 1)];
                    // A client that has heard enough goes away: no error of ours.
                    let _ = answer(stream.unwrap(), content, does, &requests, &stop);
                }
            }
        });
        Server {
            url: format!("http://{address}/sets"),
            stop,
            requests,
            thread: Some(thread),
            address,
        }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

fn answer(
    mut stream: TcpStream,
    content: &[u8],
    does: Does,
    requests: &Mutex<Vec<String>>,
    stop: &AtomicBool,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    while lines
        .next()
        .transpose()?
        .is_some_and(|line| !line.is_empty())
    {}
    requests.lock().unwrap().push(first);
    let head = match does {
        Does::Says(status) => format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n"),
        Does::SendsAPage => "HTTP/1.1 200 OK\r\nContent-Length: 13\r\n".to_owned(),
        Does::NeverStops => "HTTP/1.1 200 OK\r\n".to_owned(),
        Does::Redirects => {
            "HTTP/1.1 302 Found\r\nLocation: /sets/digits\r\nContent-Length: 0\r\n".to_owned()
        }
        _ => format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n", content.len()),
    };
    write!(stream, "{head}Connection: close\r\n\r\n")?;
    match does {
        Does::Says(_) | Does::Redirects => {}
        Does::SendsAPage => stream.write_all(b"please log in")?,
        Does::BreaksOffAfter(bytes) => stream.write_all(&content[..bytes])?,
        Does::StallsAfter(bytes) => {
            stream.write_all(&content[..bytes])?;
            // Until the client gives up, which it must.
            stream.set_read_timeout(Some(Duration::from_secs(30)))?;
            let _ = stream.read(&mut [0])?;
        }
        Does::NeverStops => {
            while !stop.load(Ordering::Relaxed) {
                stream.write_all(&[0; 4096])?;
            }
        }
        Does::Serves => stream.write_all(content)?,
    }
    stream.shutdown(Shutdown::Both)
}

/// 300 KB that repeat late, and the file that they are.
fn content() -> (&'static [u8], File) {
    static CONTENT: std::sync::OnceLock<(Vec<u8>, String)> = std::sync::OnceLock::new();
    let (bytes, sum) = CONTENT.get_or_init(|| {
        let bytes: Vec<u8> = (0..300_000_u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        let sum = hex::encode(Sha256::digest(&bytes));
        (bytes, sum)
    });
    let file = File {
        name: "digits",
        bytes: bytes.len() as u64,
        sha256: sum,
    };
    (bytes, file)
}

struct Case {
    folder: tempfile::TempDir,
    server: Server,
}

impl Case {
    fn new(script: &'static [Does]) -> Case {
        Case {
            folder: tempfile::tempdir().unwrap(),
            server: Server::start(content().0, script),
        }
    }

    fn fetch(&self) -> Result<Got> {
        self.fetch_from(std::slice::from_ref(&self.server.url))
    }

    fn fetch_from(&self, sources: &[String]) -> Result<Got> {
        self.fetch_within(Duration::from_secs(4), sources, false)
    }

    fn fetch_within(&self, silence: Duration, sources: &[String], force: bool) -> Result<Got> {
        let agent = phalanx_http::agent(silence, false).unwrap();
        let dir = Dir::open(self.folder.path()).unwrap();
        fetch(&agent, sources, &dir, &content().1, force)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn assert_whole(&self) {
        assert_eq!(self.names(), ["digits"]);
        let got = std::fs::read(self.folder.path().join("digits")).unwrap();
        assert!(got == content().0);
    }
}

#[test]
fn a_file_comes_once() {
    let case = Case::new(&[Does::Serves]);
    let url = format!("{}/digits", case.server.url);
    assert_eq!(case.fetch().unwrap(), Got::From(url));
    case.assert_whole();
    assert_eq!(case.fetch().unwrap(), Got::Already);
    assert_eq!(case.server.requests(), ["GET /sets/digits HTTP/1.1"]);
}

#[test]
fn a_download_that_fails_starts_again() {
    let case = Case::new(&[
        Does::BreaksOffAfter(100_000),
        Does::Says("503 Service Unavailable"),
        Does::Says("429 Too Many Requests"),
        Does::Serves,
    ]);
    case.fetch().unwrap();
    case.assert_whole();
    assert_eq!(case.server.requests(), ["GET /sets/digits HTTP/1.1"; 4]);
}

#[test]
fn the_attempts_are_bounded_and_leave_nothing() {
    let case = Case::new(&[Does::BreaksOffAfter(200_000)]);
    let error = case.fetch().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System);
    let text = error.render();
    let url = &case.server.url;
    assert!(text.starts_with("error: no source gave digits\n"), "{text}");
    let why = format!("tried   {url}/digits: broke off after 200000 bytes (");
    assert!(text.contains(&why), "{text}");
    assert_eq!(case.names(), [""; 0]);
    assert_eq!(case.server.requests().len(), 4);
    // A file that the server does not have is not asked for again.
    let case = Case::new(&[Does::Says("404 Not Found")]);
    let text = case.fetch().unwrap_err().render();
    assert!(text.contains("/digits: HTTP status 404"), "{text}");
    assert_eq!(case.server.requests().len(), 1);
}

#[test]
fn another_file_is_refused_by_its_sum() {
    let case = Case::new(&[Does::SendsAPage]);
    let error = case.fetch().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System);
    let text = error.render();
    assert!(text.starts_with("error: no source gave digits\n"), "{text}");
    assert!(
        text.contains("/sets/digits: wrong checksum (SHA-256 "),
        "{text}"
    );
    assert_eq!(case.names(), [""; 0]);
}

#[test]
fn what_never_ends_does_not_fill_the_disk() {
    let case = Case::new(&[Does::NeverStops]);
    let text = case.fetch().unwrap_err().render();
    assert!(
        text.contains("/sets/digits: wrong checksum (SHA-256 "),
        "{text}"
    );
    assert_eq!(case.names(), [""; 0]);
    assert_eq!(case.server.requests().len(), 1);
}

#[test]
fn a_silent_or_turning_server_is_given_up() {
    for does in [&[Does::StallsAfter(0)], &[Does::StallsAfter(50_000)]] {
        let (case, silence) = (Case::new(does), Duration::from_millis(300));
        let sources = std::slice::from_ref(&case.server.url);
        let error = case.fetch_within(silence, sources, false).unwrap_err();
        let text = error.render();
        assert!(text.contains("timeout"), "{text}");
        assert_eq!(case.server.requests().len(), 4);
        assert_eq!(case.names(), [""; 0]);
    }
    let case = Case::new(&[Does::Redirects]);
    let text = case.fetch().unwrap_err().render();
    assert!(text.contains("too many redirects"), "{text}");
}

#[test]
fn the_next_source_is_asked() {
    let case = Case::new(&[Does::Says("404 Not Found"), Does::Serves]);
    // A port that nobody listens on: bound, and given back.
    let gone = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let sources = [
        format!("http://{gone}/x"),
        format!("{}/y", case.server.url),
        case.server.url.clone(),
    ];
    let got = case.fetch_from(&sources).unwrap();
    assert_eq!(got, Got::From(format!("{}/digits", case.server.url)));
    let error = case.fetch_from(&sources[..1]);
    assert_eq!(error.unwrap(), Got::Already);
    std::fs::remove_file(case.folder.path().join("digits")).unwrap();
    let text = case.fetch_from(&sources[..1]).unwrap_err().render();
    assert!(text.to_lowercase().contains("connection refused"), "{text}");
    assert!(
        text.contains("perhaps this machine has no way out"),
        "{text}"
    );
}

#[test]
fn a_wrong_file_in_its_place_is_not_overwritten() {
    let case = Case::new(&[Does::Serves]);
    std::fs::write(case.folder.path().join("digits"), "mine").unwrap();
    let error = case.fetch().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.render().contains("download with --force"));
    assert_eq!(case.server.requests().len(), 0);
    let (silence, sources) = (Duration::from_secs(4), [case.server.url.clone()]);
    case.fetch_within(silence, &sources, true).unwrap();
    case.assert_whole();
}

#[test]
fn two_at_a_time_do_not_disturb_each_other() {
    let case = Case::new(&[Does::Serves]);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| case.fetch().unwrap());
        }
    });
    case.assert_whole();
}

#[test]
fn a_link_in_the_place_of_the_file_is_not_followed() {
    let case = Case::new(&[Does::Serves]);
    let at = |name: &str| case.folder.path().join(name);
    let elsewhere = tempfile::tempdir().unwrap();
    let target = elsewhere.path().join("precious");
    std::os::unix::fs::symlink(&target, at("digits")).unwrap();
    case.fetch().unwrap();
    case.assert_whole();
    assert!(!target.exists(), "the link was followed");
    // Readable as any new file is.
    std::fs::write(at("plain"), "").unwrap();
    let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions();
    assert_eq!(mode("digits"), mode("plain"));
}
