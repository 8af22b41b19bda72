//! `phalanx download`, and `train --download`: one rank of a host gets the data, the others wait.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::*;

/// What a server does.
#[derive(Clone)]
enum Does {
    /// It has nothing at all.
    Nothing,
    /// It has the files of a folder.
    Serve(PathBuf),
    /// The same, but the first answer about each file breaks off in its middle.
    BreakOff(PathBuf),
}

/// A server on loopback, and what it was asked for.
struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(does: Does) -> Server {
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
                let _ = answer(stream.expect("a client"), &does, &seen);
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
    does: &Does,
    requests: &Mutex<Vec<String>>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    while lines.next().transpose()?.is_some_and(|l| !l.is_empty()) {}
    let name = first.split(' ').nth(1).unwrap_or_default();
    let name = name.trim_start_matches("/sets/").to_owned();
    let (folder, breaks_off) = match does {
        Does::Nothing => (None, false),
        Does::Serve(folder) => (Some(folder), false),
        Does::BreakOff(folder) => (Some(folder), true),
    };
    let content = folder.and_then(|folder| std::fs::read(folder.join(&name)).ok());
    let mut seen = requests.lock().expect("no panic");
    let is_first = !seen.contains(&name);
    seen.push(name);
    drop(seen);
    let Some(content) = content else {
        return write!(
            stream,
            "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
    };
    let all = content.len();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Length: {all}\r\nConnection: close\r\n\r\n"
    )?;
    let end = if breaks_off && is_first { all / 2 } else { all };
    stream.write_all(&content[..end])
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
    let server = Server::start(Does::Serve(folder));
    let url = server.url();
    let args = [
        "train",
        "mnist",
        "--data",
        "new/mnist",
        "--download",
        &url,
        "--nproc-per-node",
        "3",
        "--threads",
        "1",
        "--stop-after",
        "1",
        "--output-dir",
        "out",
        "--overwrite",
    ];
    succeed(&args, dir.path());
    assert_eq!(server.requests(), MNIST_FILES);
    let there = std::fs::read_dir(dir.path().join("new/mnist")).expect("the folder");
    assert_eq!(there.count(), MNIST_FILES.len(), "nothing is left over");
    // Nothing is asked for when all is there.
    succeed(&args, dir.path());
    assert_eq!(server.requests().len(), MNIST_FILES.len());
}

#[test]
fn a_download_that_fails_ends_all_ranks_and_names_the_one_that_tried() {
    let dir = tempfile::tempdir().expect("folder");
    let server = Server::start(Does::Nothing);
    let url = server.url();
    let args = ["train", "resnet18", "--data", "new", "--download", &url];
    let ranks = ["--nproc-per-node", "3", "--output-dir", "out"];
    let (code, _, err) = run(&[&args[..], &ranks].concat(), dir.path());
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("error: rank 0 "), "{err}");
    let cause = "no source gave cifar-10-python.tar.gz";
    assert!(err.contains(cause), "{err}");
    assert_eq!(server.requests(), ["cifar-10-python.tar.gz"]);
}

#[test]
fn a_set_is_downloaded_though_every_answer_breaks_off_once() {
    let Some(folder) = real_mnist() else { return };
    let dir = tempfile::tempdir().expect("folder");
    let server = Server::start(Does::BreakOff(folder.clone()));
    let url = server.url();
    let args = ["download", "mnist", "--to", "mnist", "--from", &url];
    let (out, err) = succeed(&args, dir.path());
    for name in MNIST_FILES {
        assert!(out.contains(&format!("{name}  from {url}/{name}")), "{out}");
        let (ours, theirs) = (dir.path().join("mnist").join(name), folder.join(name));
        assert!(
            std::fs::read(ours).expect("there") == std::fs::read(theirs).expect("there"),
            "{name} is another"
        );
    }
    assert!(
        out.contains("next: phalanx train mnist --data mnist"),
        "{out}"
    );
    assert_eq!(err.matches("broke off after").count(), 4, "{err}");
    assert_eq!(server.requests().len(), 8, "{:?}", server.requests());
    // All is there: nobody is asked.
    let (out, _) = succeed(&args, dir.path());
    assert_eq!(out.matches("  is there").count(), 4, "{out}");
    assert_eq!(server.requests().len(), 8);
}

#[test]
fn a_download_without_room_names_the_file() {
    let (dir, set) = (
        tempfile::tempdir().expect("folder"),
        tempfile::tempdir().expect("folder"),
    );
    let first = "train-images-idx3-ubyte.gz";
    std::fs::write(set.path().join(first), vec![0; 4 << 20]).expect("written");
    let server = Server::start(Does::Serve(set.path().into()));
    let url = server.url();
    let inner = phalanx(
        &["download", "mnist", "--to", "got", "--from", &url],
        dir.path(),
    );
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "ulimit -f 64 && exec \"$0\" \"$@\""]);
    limited.arg(inner.get_program()).args(inner.get_args());
    limited.current_dir(dir.path());
    limited
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let output = wait(limited.spawn().expect("a shell"));
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    let why = format!("error: cannot write got/{first}: the file would exceed the size limit");
    assert!(err.contains(&why), "{err}");
}

#[test]
fn a_folder_that_others_may_write_into_gets_no_data_unasked() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("folder");
    let shared = dir.path().join("shared");
    std::fs::create_dir(&shared).expect("folder");
    std::fs::set_permissions(&shared, PermissionsExt::from_mode(0o777)).expect("mode");
    let server = Server::start(Does::Nothing);
    let url = server.url();
    let download = ["download", "mnist", "--to", "shared", "--from", &url];
    let train = "train mnist --data shared --output-dir out --download";
    let train: Vec<&str> = train.split(' ').chain([&url[..]]).collect();
    for args in [&download[..], &train] {
        let (code, _, err) = run(args, dir.path());
        assert_eq!(code, 2, "{err}");
        assert!(
            err.contains("shared can be written by all users (mode 777)"),
            "{err}"
        );
        assert!(err.contains("fix     chmod go-w shared"), "{err}");
        assert!(server.requests().is_empty());
        let (code, _, err) = run(&[args, &["--allow-shared-folder"]].concat(), dir.path());
        assert_eq!(code, 1, "{err}");
        assert!(
            err.contains("no source gave train-images-idx3-ubyte.gz"),
            "{err}"
        );
        assert_eq!(server.requests().len(), 1);
        server.requests.lock().expect("no panic").clear();
    }
}

/// On a terminal, which `script` makes.
#[test]
fn a_download_shows_a_bar_on_a_terminal() {
    let Some(folder) = real_mnist() else { return };
    let dir = tempfile::tempdir().expect("folder");
    let server = Server::start(Does::Serve(folder));
    let command = format!(
        "'{}' download mnist --to mnist --from {}",
        env!("CARGO_BIN_EXE_phalanx"),
        server.url()
    );
    let inner = phalanx(&[], dir.path());
    let mut script = std::process::Command::new("script");
    script.args(["--quiet", "--return", "--command", &command, "typescript"]);
    script.current_dir(dir.path()).env("TERM", "xterm");
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => script.env(name, value),
            None => script.env_remove(name),
        };
    }
    script.stdin(std::process::Stdio::null());
    script.stdout(std::process::Stdio::piped());
    script.stderr(std::process::Stdio::piped());
    let Ok(child) = script.spawn() else {
        eprintln!("skipped: there is no script(1) to make a terminal");
        return;
    };
    let output = wait(child);
    let shown = text(&output.stdout);
    assert!(output.status.success(), "{shown}{}", text(&output.stderr));
    // The largest file: its bar, its size, its rate.
    for part in [
        "train-images-idx3-ubyte.gz",
        "━",
        " %  ",
        "MiB",
        "/s",
        " left",
    ] {
        assert!(shown.contains(part), "no {part:?} in {shown:?}");
    }
}

#[test]
fn another_file_than_the_published_one_is_refused_by_its_sum() {
    let (dir, wrong) = (
        tempfile::tempdir().expect("folder"),
        tempfile::tempdir().expect("folder"),
    );
    for name in MNIST_FILES.iter().chain([&CIFAR_ARCHIVE]) {
        std::fs::write(wrong.path().join(name), "something else").expect("written");
    }
    let server = Server::start(Does::Serve(wrong.path().into()));
    let url = server.url();
    // As a command of its own; and on three ranks, of which one tries and all end.
    let train = ["train", "resnet9", "--data", "new", "--output-dir", "out"];
    let ranks = ["--nproc-per-node", "3", "--download", &url];
    for (args, name, sum) in [
        (
            vec!["download", "mnist", "--to", "new", "--from", &url],
            MNIST_FILES[2],
            "SHA-256 ",
        ),
        (
            [&train[..], &ranks].concat(),
            CIFAR_ARCHIVE,
            "expected SHA-256 6d958be074577803…",
        ),
    ] {
        let (code, _, err) = run(&args, dir.path());
        assert_eq!(code, 1, "{err}");
        for part in [name, "wrong checksum (", sum] {
            assert!(err.contains(part), "no {part:?} in {err}");
        }
        assert!(!dir.path().join("new").exists(), "nothing is kept");
    }
    assert!(!dir.path().join("out/summary.json").exists());
}

/// An archive that somebody got by other means: the first rank unpacks it, and
/// all train on what it held.
#[test]
fn an_archive_is_unpacked_once_and_trained_on_by_all_ranks() {
    let dir = tempfile::tempdir().expect("folder");
    let data = dir.path().join("data");
    std::fs::create_dir(&data).expect("folder");
    archive(&data.join(CIFAR_ARCHIVE));
    let server = Server::start(Does::Nothing);
    let url = server.url();
    let args = [
        "train",
        "resnet9",
        "--data",
        "data",
        "--download",
        &url,
        "--nproc-per-node",
        "2",
        "--threads",
        "1",
        "--train-samples",
        "16",
        "--test-samples",
        "10",
        "--batch-size",
        "2",
        "--epochs",
        "4",
        "--output-dir",
        "out",
    ];
    let (_, err) = succeed(&args, dir.path());
    assert!(
        err.contains("CIFAR-10 in data, 16 train / 10 test"),
        "{err}"
    );
    assert_eq!(server.requests().len(), 0, "nothing was missing");
    let folder = data.join("cifar-10-batches-py");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("unpacked")
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names, BATCHES);
    // The test images are of class 0 to 9 in turn.
    let summary = json(&dir.path().join("out/summary.json"));
    let matrix: Vec<Vec<i64>> =
        serde_json::from_value(summary["confusion"].clone()).expect("matrix");
    assert!(matrix.iter().all(|row| row.iter().sum::<i64>() == 1));
}

const MNIST_FILES: [&str; 4] = [
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
];
const CIFAR_ARCHIVE: &str = "cifar-10-python.tar.gz";
const BATCHES: [&str; 6] = [
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
];

/// An archive in CIFAR-10's form: plain images of class 0 to 9 in turn.
pub(super) fn archive(path: &Path) {
    let file = std::fs::File::create(path).expect("created");
    let packed = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    let mut archive = tar::Builder::new(packed);
    let batch = batch();
    for name in BATCHES {
        let mut header = tar::Header::new_ustar();
        let inner = format!("cifar-10-batches-py/{name}");
        header.set_path(inner).expect("a short path");
        header.set_size(batch.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        archive.append(&header, &batch[..]).expect("written");
    }
    let packed = archive.into_inner().expect("written");
    packed.finish().expect("written");
}

/// Ten thousand images as Python 2 pickled them.
fn batch() -> Vec<u8> {
    const IMAGES: usize = 10_000;
    let mut bytes = b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(".to_vec();
    (0..IMAGES).for_each(|i| bytes.extend([b'K', (i % 10) as u8]));
    bytes.extend(b"eU\x04dataq\x04");
    bytes.extend(b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07(K\x01M");
    bytes.extend((IMAGES as u16).to_le_bytes());
    bytes.extend(b"M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T");
    bytes.extend(((IMAGES * 3072) as u32).to_le_bytes());
    bytes.resize(bytes.len() + IMAGES * 3072, 77);
    bytes.extend(b"tbu.");
    bytes
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
        assert!(err.contains("--download needs a folder"), "{err}");
    }
}
