//! `train --download`: one rank of a host gets the data, the others wait.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::*;

/// A server on loopback: files of a folder, or nothing at all.
struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(folder: Option<PathBuf>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("address");
        let requests = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, ending) = (Arc::clone(&requests), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ending.load(Ordering::SeqCst) {
                    return;
                }
                // A client that went away is no error of ours.
                let _ = answer(stream.expect("a client"), folder.as_deref(), &seen);
            }
        });
        Server {
            address,
            requests,
            stop,
            thread: Some(thread),
        }
    }

    fn url(&self) -> String {
        format!("http://{}/sets", self.address)
    }

    fn requests(&self) -> Vec<String> {
        let mut all = self.requests.lock().expect("no panic").clone();
        all.sort();
        all
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(
    mut stream: TcpStream,
    folder: Option<&Path>,
    requests: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    while lines.next().transpose()?.is_some_and(|l| !l.is_empty()) {}
    let name = first.split(' ').nth(1).unwrap_or_default();
    let name = name.trim_start_matches("/sets/").to_owned();
    let content = folder.and_then(|folder| std::fs::read(folder.join(&name)).ok());
    requests.lock().expect("no panic").push(name);
    let (status, content) = match content {
        Some(content) => ("200 OK", content),
        None => ("404 Not Found", Vec::new()),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        content.len()
    )?;
    stream.write_all(&content)
}

/// The original files of MNIST, where there are any.
fn real_mnist() -> Option<PathBuf> {
    let near = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/mnist");
    let set = std::env::var_os("PHALANX_DATA").map(|d| PathBuf::from(d).join("mnist"));
    let found = [set, Some(near), Some("/work/shared/data/mnist".into())]
        .into_iter()
        .flatten()
        .find(|folder| folder.join("train-images-idx3-ubyte.gz").is_file());
    if found.is_none() {
        eprintln!("skipped: no MNIST here; set PHALANX_DATA to the folder above mnist");
    }
    found
}

#[test]
fn three_ranks_download_each_file_once() {
    let Some(folder) = real_mnist() else { return };
    let dir = tempfile::tempdir().expect("folder");
    let server = Server::start(Some(folder));
    let url = server.url();
    let args = [
        "train",
        "mnist",
        "--data",
        "new/mnist",
        "--download-from",
        &url,
        "--nproc-per-node",
        "3",
        "--threads",
        "1",
        "--stop-after",
        "1",
        "--output-dir",
        "out",
    ];
    succeed(&args, dir.path());
    let files = [
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
    ];
    assert_eq!(server.requests(), files);
    let there = std::fs::read_dir(dir.path().join("new/mnist")).expect("the folder");
    assert_eq!(there.count(), files.len(), "nothing is left over");
    // Nothing is asked for when all is there.
    succeed(&args, dir.path());
    assert_eq!(server.requests().len(), files.len());
}

#[test]
fn a_download_that_fails_ends_all_ranks_and_names_the_one_that_tried() {
    let dir = tempfile::tempdir().expect("folder");
    let server = Server::start(None);
    let url = server.url();
    let args = [
        "train",
        "resnet18",
        "--data",
        "new",
        "--download-from",
        &url,
    ];
    let ranks = ["--nproc-per-node", "3", "--output-dir", "out"];
    let (code, _, err) = run(&[&args[..], &ranks].concat(), dir.path());
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("error: rank 0 "), "{err}");
    let cause = "no source gave cifar-10-python.tar.gz";
    assert!(err.contains(cause), "{err}");
    assert_eq!(server.requests(), ["cifar-10-python.tar.gz"]);
}

#[test]
fn what_nobody_publishes_cannot_be_downloaded() {
    let dir = tempfile::tempdir().expect("folder");
    for args in [
        &["train", "mnist", "--download"][..],
        &["train", "resnet18", "--data", "synthetic", "--download"],
        &["train", "resnet9", "--custom-data", "true", "--download"],
    ] {
        let (code, _, err) = run(args, dir.path());
        assert_eq!(code, 2, "{err}");
        assert!(err.contains("--download gets a data set"), "{err}");
    }
}
