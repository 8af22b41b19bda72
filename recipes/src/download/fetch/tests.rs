//! Against servers on loopback that are slow, wrong, truncating, or absent.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use sha2::{Digest, Sha256};

use super::*;
use crate::download::sets::Sum;

const PATIENCE: Patience = Patience {
    silence: Duration::from_secs(4),
    attempts: 3,
    pause: Duration::from_millis(1),
};

/// What the server does with one request; the last for all further ones.
#[derive(Clone, Copy, Debug)]
enum Does {
    /// Sends what was asked for.
    Serves,
    /// Sends everything whatever was asked for.
    IgnoresRanges,
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
    /// Claims to send another part.
    SendsAnotherPart,
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
    let mut from = 0;
    let mut asked = String::new();
    for line in lines {
        let line = line?.to_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(range) = line.strip_prefix("range: bytes=") {
            asked = range.to_owned();
            from = range.trim_end_matches('-').parse().unwrap_or(0);
        }
    }
    requests.lock().unwrap().push(format!("{first} [{asked}]"));
    let all = content.len();
    if matches!(does, Does::IgnoresRanges | Does::NeverStops) {
        from = 0;
    }
    let part = content.get(from..).unwrap_or_default();
    let head = match (does, from) {
        (Does::Says(status), _) => format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n"),
        (Does::SendsAPage, _) => "HTTP/1.1 200 OK\r\nContent-Length: 13\r\n".to_owned(),
        (Does::NeverStops, _) => "HTTP/1.1 200 OK\r\n".to_owned(),
        (Does::Redirects, _) => {
            "HTTP/1.1 302 Found\r\nLocation: /sets/digits\r\nContent-Length: 0\r\n".to_owned()
        }
        (Does::SendsAnotherPart, 1..) => format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 1-{}/{all}\r\nContent-Length: {}\r\n",
            all - 1,
            part.len()
        ),
        (_, 0) => format!("HTTP/1.1 200 OK\r\nContent-Length: {all}\r\n"),
        (_, from) if from >= all => {
            "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n".to_owned()
        }
        (_, from) => format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {from}-{}/{all}\r\nContent-Length: {}\r\n",
            all - 1,
            part.len()
        ),
    };
    write!(stream, "{head}Connection: close\r\n\r\n")?;
    match does {
        Does::Says(_) | Does::Redirects => {}
        Does::SendsAPage => stream.write_all(b"please log in")?,
        Does::BreaksOffAfter(bytes) => stream.write_all(&part[..bytes.min(part.len())])?,
        Does::StallsAfter(bytes) => {
            stream.write_all(&part[..bytes.min(part.len())])?;
            // Until the client gives up, which it must.
            stream.set_read_timeout(Some(Duration::from_secs(30)))?;
            let _ = stream.read(&mut [0])?;
        }
        Does::NeverStops => {
            while !stop.load(Ordering::Relaxed) {
                stream.write_all(&[0; 4096])?;
            }
        }
        Does::Serves | Does::IgnoresRanges | Does::SendsAnotherPart => stream.write_all(part)?,
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
        sum: Sum::Sha256(sum),
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
        self.fetch_with(PATIENCE, sources)
    }

    fn fetch_with(&self, patience: Patience, sources: &[String]) -> Result<Got> {
        let (agent, file) = (agent(patience).unwrap(), content().1);
        let mut meter = Meter::silent();
        fetch(
            &agent,
            patience,
            sources,
            &Dir::open(self.folder.path()).unwrap(),
            &file,
            false,
            &mut meter,
        )
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
    assert_eq!(case.server.requests(), ["GET /sets/digits HTTP/1.1 []"]);
}

#[test]
fn a_download_that_breaks_off_goes_on_where_it_was() {
    let script = &[
        Does::BreaksOffAfter(100_000),
        Does::BreaksOffAfter(1),
        Does::StallsAfter(50_000),
        Does::Says("503 Service Unavailable"),
        Does::Says("429 Too Many Requests"),
        Does::Serves,
    ];
    let case = Case::new(script);
    case.fetch().unwrap();
    case.assert_whole();
    let asked: Vec<String> = case
        .server
        .requests()
        .iter()
        .map(|r| r["GET /sets/digits HTTP/1.1 ".len()..].to_owned())
        .collect();
    assert_eq!(
        asked,
        [
            "[]",
            "[100000-]",
            "[100001-]",
            "[150001-]",
            "[150001-]",
            "[150001-]"
        ]
    );
}

#[test]
fn servers_that_do_not_resume_begin_anew() {
    for second in [
        &[Does::BreaksOffAfter(9_999), Does::IgnoresRanges],
        &[Does::BreaksOffAfter(9_999), Does::SendsAnotherPart],
    ] {
        let case = Case::new(second);
        case.fetch().unwrap();
        case.assert_whole();
    }
}

#[test]
fn the_next_process_goes_on_too() {
    let case = Case::new(&[
        Does::BreaksOffAfter(200_000),
        Does::Says("404 Not Found"),
        Does::Serves,
    ]);
    let error = case.fetch().unwrap_err().render();
    assert!(error.contains("HTTP status 404"), "{error}");
    assert!(
        error.contains("digits.part (the next attempt resumes it)"),
        "{error}"
    );
    assert_eq!(case.names(), ["digits.part"]);
    case.fetch().unwrap();
    case.assert_whole();
    assert!(case.server.requests()[2].ends_with("[200000-]"));
}

#[test]
fn leftovers_that_are_longer_than_the_file_are_dropped() {
    let case = Case::new(&[Does::Serves]);
    std::fs::write(case.folder.path().join("digits.part"), vec![7; 400_000]).unwrap();
    case.fetch().unwrap();
    case.assert_whole();
}

#[test]
fn leftovers_of_something_else_are_noticed() {
    // Its length fits, so only the sum tells; then it is fetched from the start.
    let case = Case::new(&[Does::Serves]);
    std::fs::write(case.folder.path().join("digits.part"), vec![7; 1000]).unwrap();
    case.fetch().unwrap();
    case.assert_whole();
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
        text.contains("it sent more than 1648576 bytes where 300000 are expected"),
        "{text}"
    );
    assert_eq!(case.names(), [""; 0]);
    assert_eq!(case.server.requests().len(), 1);
}

#[test]
fn a_silent_or_turning_server_is_given_up() {
    let case = Case::new(&[Does::StallsAfter(0)]);
    let patience = Patience {
        silence: Duration::from_millis(300),
        ..PATIENCE
    };
    let text = case.fetch_with(patience, std::slice::from_ref(&case.server.url));
    let text = text.unwrap_err().render();
    assert!(text.contains("timeout"), "{text}");
    assert!(case.server.requests().len() <= 3);
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
}

#[test]
fn two_at_a_time_download_once() {
    let case = Case::new(&[Does::Serves]);
    let got: Vec<Got> = std::thread::scope(|scope| {
        let both: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| case.fetch().unwrap()))
            .collect();
        both.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(
        got.iter().filter(|g| **g == Got::Already).count(),
        1,
        "{got:?}"
    );
    case.assert_whole();
    assert_eq!(case.server.requests().len(), 1);
}

#[test]
fn what_lies_in_the_place_of_a_part_is_not_written() {
    let case = Case::new(&[Does::Serves]);
    let at = |name: &str| case.folder.path().join(name);
    let elsewhere = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(elsewhere.path(), "precious").unwrap();
    let refused = |why: &str| {
        let error = case.fetch().unwrap_err();
        let text = error.render();
        assert_eq!(error.kind(), ErrorKind::Usage, "{text}");
        assert!(
            text.contains("digits.part ") && text.contains(why),
            "{text}"
        );
        assert_eq!(std::fs::read(elsewhere.path()).unwrap(), b"precious");
        std::fs::remove_file(at("digits.part")).unwrap();
    };
    std::os::unix::fs::symlink(elsewhere.path(), at("digits.part")).unwrap();
    refused("a symbolic link");
    if std::fs::hard_link(elsewhere.path(), at("digits.part")).is_ok() {
        refused("has another name too");
    }
    let made = std::process::Command::new("mkfifo")
        .arg(at("digits.part"))
        .status();
    assert!(made.unwrap().success());
    refused("a named pipe");
    assert_eq!(case.server.requests().len(), 0);
    case.fetch().unwrap();
    case.assert_whole();
    // Readable as any new file is.
    std::fs::write(at("plain"), "").unwrap();
    let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions();
    assert_eq!(mode("digits"), mode("plain"));
}

#[test]
fn who_locks_a_part_and_does_not_write_is_named_and_not_waited_for_for_ever() {
    use std::os::unix::fs::PermissionsExt;
    let case = Case::new(&[Does::Serves]);
    let path = case.folder.path().join("digits.part");
    // As an older version left it: anybody could open it, and lock it.
    let part = OsFile::create(&path).unwrap();
    part.set_permissions(PermissionsExt::from_mode(0o644))
        .unwrap();
    assert!(try_lock(&part));
    let short = Patience {
        silence: Duration::from_millis(30),
        ..PATIENCE
    };
    let sources = std::slice::from_ref(&case.server.url);
    let error = case.fetch_with(short, sources).unwrap_err();
    let text = error.render();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{text}");
    assert!(
        text.contains("digits.part is locked by another process"),
        "{text}"
    );
    assert!(text.contains("has not written to it for 300ms"), "{text}");
    if !lock_holder(&part).is_empty() {
        let who = format!("(process {})", std::process::id());
        assert!(text.contains(&who), "{text}");
    }
    assert!(
        text.contains("fix ") && text.contains("or remove "),
        "{text}"
    );
    assert_eq!(part.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    // The way out.
    std::fs::remove_file(&path).unwrap();
    case.fetch_with(short, sources).unwrap();
    case.assert_whole();
}

#[test]
fn ranges_are_read() {
    assert_eq!(range_start("bytes 4096-8191/8192"), Some(4096));
    assert_eq!(range_start("bytes */8192"), None);
    assert_eq!(range_start("lines 1-2/3"), None);
}
