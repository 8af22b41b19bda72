//! A server of files over HTTP, and of lists as S3 has them, that fails as it is told.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

/// What is done with a request of a body.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// Closes the connection after so many bytes.
    Drop(usize),
    /// Sends nothing more after so many bytes.
    Stall(usize),
    /// Sends so many bytes, one each 100 ms, and closes the connection.
    Drip(usize),
    Status(u16, &'static str),
    /// Sends the whole file, whatever was asked for.
    NoRange,
    /// Sends other bytes than were asked for, and says so.
    Shifted,
    /// Says that it is so many bytes shorter.
    Short(usize),
    /// Closes the connection after so many bytes, and has another content from then on.
    Change(usize, Vec<u8>),
}

#[derive(Default)]
struct State {
    root: PathBuf,
    faults: Mutex<HashMap<String, VecDeque<Fault>>>,
    /// Of each request of a body: the path, and the first byte.
    seen: Mutex<Vec<(String, usize)>>,
    /// Without ETags.
    untagged: AtomicBool,
    closing: AtomicBool,
    /// What the bucket has below `set/`, or the name itself.
    listed: Mutex<String>,
}

pub(super) struct Server {
    pub(super) url: String,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Of the files below `root`.
    pub(super) fn new(root: &Path) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let state = Arc::new(State {
            root: root.to_owned(),
            ..State::default()
        });
        let shared = Arc::clone(&state);
        let thread = spawn(move || {
            let mut threads = Vec::new();
            for stream in listener.incoming() {
                if shared.closing.load(Ordering::Relaxed) {
                    break;
                }
                let (stream, state) = (stream.expect("a connection"), Arc::clone(&shared));
                threads.push(spawn(move || {
                    let _ = state.answer(stream);
                }));
            }
            threads
                .into_iter()
                .for_each(|thread| thread.join().expect("an answer"));
        });
        Server {
            url,
            state,
            thread: Some(thread),
        }
    }

    pub(super) fn place(&self) -> String {
        format!("{}/shards", self.url)
    }

    /// The faults of the next requests for the body of a file with this name; of `bucket`: for lists.
    pub(super) fn fail(&self, name: &str, faults: Vec<Fault>) {
        self.state
            .faults
            .lock()
            .unwrap()
            .insert(name.to_owned(), faults.into());
    }

    pub(super) fn tag(&self, tagged: bool) {
        self.state.untagged.store(!tagged, Ordering::Relaxed);
    }

    /// Answers lists of the bucket: it has the files of `folder`, below `set` if that is `shards`.
    pub(super) fn list(&self, folder: &str) {
        *self.state.listed.lock().unwrap() = folder.to_owned();
    }

    /// The first bytes that were asked for of the file with this name.
    pub(super) fn asked(&self, name: &str) -> Vec<usize> {
        let seen = self.state.seen.lock().unwrap();
        let of = seen
            .iter()
            .filter(|(path, _)| path.ends_with(&format!("/{name}")));
        of.map(|(_, from)| *from).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.closing.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(&self.url["http://".len()..]);
        self.thread.take().unwrap().join().expect("the server");
    }
}

/// Without `%XX`.
fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, more)) = rest.split_first() {
        let code = (*first == b'%')
            .then(|| u8::from_str_radix(std::str::from_utf8(&more[..2]).unwrap(), 16).unwrap());
        bytes.push(code.unwrap_or(*first));
        rest = &more[if code.is_some() { 2 } else { 0 }..];
    }
    String::from_utf8(bytes).unwrap()
}

impl State {
    fn wait(&self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until && !self.closing.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(10));
        }
    }

    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let Some(first) = lines.next().transpose()? else {
            return Ok(());
        };
        let mut headers = BTreeMap::new();
        for line in lines {
            let line = line?;
            let Some((name, value)) = line.split_once(": ") else {
                break;
            };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        let (method, target) = first.split_once(' ').expect("a request");
        let target = target.split(' ').next().unwrap();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let path = decoded(path);
        let listed = self.listed.lock().unwrap().clone();
        let prefix = if listed == "shards" { "set" } else { &listed };
        let is_list = path == "/bucket" && !query.is_empty();
        let local = match path.strip_prefix("/bucket/") {
            Some(object) => object.replacen(prefix, &listed, 1),
            None => path.trim_start_matches('/').to_owned(),
        };
        let file = self.root.join(local);
        let name = path.rsplit('/').next().unwrap();
        let is_body = method == "GET";
        let mut fault = match is_body {
            true => self
                .faults
                .lock()
                .unwrap()
                .get_mut(name)
                .and_then(VecDeque::pop_front),
            false => None,
        };
        let from: Option<usize> = headers.get("range").and_then(|range| {
            range
                .strip_prefix("bytes=")?
                .strip_suffix('-')?
                .parse()
                .ok()
        });
        if is_body {
            self.seen
                .lock()
                .unwrap()
                .push((path.clone(), from.unwrap_or(0)));
        }
        let end = |stream: &mut TcpStream, status: &str, text: &str| {
            write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
                text.len()
            )
        };
        if let Some(Fault::Status(code, text)) = fault {
            return end(&mut stream, &format!("{code} No"), text);
        }
        let tag = |content: &[u8]| format!("\"{:.32}\"", hex::encode(Sha256::digest(content)));
        if is_list {
            let mut text = "<ListBucketResult><IsTruncated>false</IsTruncated>".to_owned();
            for entry in fs::read_dir(self.root.join(&listed))? {
                let entry = entry?;
                let (name, content) = (
                    entry.file_name().into_string().unwrap(),
                    fs::read(entry.path())?,
                );
                let key = format!("{prefix}/{name}").replace('&', "&amp;");
                text += &format!(
                    "<Contents><Key>{key}</Key><Size>{}</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{}</ETag></Contents>",
                    content.len(),
                    tag(&content).replace('"', "&quot;")
                );
            }
            return end(&mut stream, "200 OK", &(text + "</ListBucketResult>"));
        }
        let Ok(body) = fs::read(&file) else {
            return end(&mut stream, "404 Not Found", "");
        };
        let tag = Some(tag(&body)).filter(|_| !self.untagged.load(Ordering::Relaxed));
        if headers
            .get("if-match")
            .is_some_and(|wanted| Some(wanted) != tag.as_ref())
        {
            return end(&mut stream, "412 Precondition Failed", "");
        }
        let mut from = from.filter(|from| *from < body.len());
        if let Some(Fault::NoRange) = fault {
            from = None;
        }
        if let (Some(from), Some(Fault::Shifted)) = (&mut from, &fault) {
            *from -= 1;
        }
        let length = body.len();
        let status = match from {
            Some(from) => format!(
                "206 Partial Content\r\nContent-Range: bytes {from}-{}/{length}",
                length - 1
            ),
            None => "200 OK".to_owned(),
        };
        let tag = tag
            .map(|tag| format!("ETag: {tag}\r\n"))
            .unwrap_or_default();
        let tag = match listed.is_empty() {
            true => tag,
            false => format!("{tag}Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"),
        };
        let mut body = &body[from.unwrap_or(0)..];
        if let Some(Fault::Short(bytes)) = fault {
            body = &body[bytes..];
        }
        write!(
            stream,
            "HTTP/1.1 {status}\r\n{tag}Content-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        )?;
        if method == "HEAD" {
            return Ok(());
        }
        match &mut fault {
            Some(Fault::Drop(bytes)) => body = &body[..body.len().min(*bytes)],
            Some(Fault::Stall(bytes)) => {
                stream.write_all(&body[..body.len().min(*bytes)])?;
                self.wait(Duration::from_secs(60));
                return Ok(());
            }
            Some(Fault::Drip(bytes)) => {
                for byte in &body[..body.len().min(*bytes)] {
                    stream.write_all(&[*byte])?;
                    self.wait(Duration::from_millis(100));
                }
                return Ok(());
            }
            Some(Fault::Change(bytes, new)) => {
                fs::write(&file, std::mem::take(new))?;
                body = &body[..body.len().min(*bytes)];
            }
            _ => {}
        }
        stream.write_all(body)
    }
}
