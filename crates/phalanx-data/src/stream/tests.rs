//! Streams from servers that break off, from S3, and their cache.

mod server;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use phalanx_base::files::try_lock;
use phalanx_base::{Error, ErrorKind, Result};

use self::server::{Fault, Server};
use super::{Stream, StreamDataset};
use crate::dataset::Dataset;
use crate::loader::{Loader, LoaderOptions};
use crate::sampler::{Cursor, Sampler, SamplerConfig};

/// Tells a test that it is the child of one, and its folder.
const CHILD: &str = "PHALANX_TEST_STREAM";
const SHARDS: [usize; 5] = [7, 1, 12, 9, 4];
const BYTES: usize = 5000;

/// A folder with a folder `shards` of JSON lines, numbered, of about 5 kB each, and their index.
fn folder() -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a folder");
    let shards = root.path().join("shards");
    fs::create_dir(&shards).expect("a folder");
    let mut first = 0;
    for (i, samples) in SHARDS.iter().enumerate() {
        let line = |n| {
            format!(
                "{{\"n\": {n}, \"pad\": \"{}\"}}\n",
                format!("{n:05}").repeat(BYTES / 5)
            )
        };
        let text: String = (first..first + samples).map(line).collect();
        fs::write(shards.join(format!("s{i}.jsonl")), text).expect("a shard");
        first += samples;
    }
    let local = Stream::new(&shards.display().to_string());
    local.make_index(None, false).expect("an index");
    root
}

fn samples() -> u64 {
    SHARDS.iter().sum::<usize>() as u64
}

/// A stream whose cache is in `root`.
fn stream(place: &str, root: &Path) -> Stream {
    let mut stream = Stream::new(place).shuffle_buffer(10);
    stream.cache.0 = Some(root.join("cache"));
    stream
}

fn open(stream: Stream) -> Result<StreamDataset<u64>> {
    stream.map(|sample| {
        let n: u64 = sample.json("n")?;
        assert_eq!(n, sample.index());
        assert!(sample.text("pad")?.starts_with(&format!("{n:05}{n:05}")));
        Ok(n)
    })
}

fn all(data: &StreamDataset<u64>) -> Result<Vec<u64>> {
    let (numbers, mut batch) = ((0..data.len() as u64).collect::<Vec<_>>(), Vec::new());
    data.read_batch(0, &numbers, &mut batch)?;
    Ok(batch)
}

fn failed(stream: Stream) -> Error {
    open(stream)
        .and_then(|data| all(&data))
        .expect_err("an error")
}

/// What each rank reads from `cursor` on.
fn ranks(data: &Arc<StreamDataset<u64>>, world: usize, cursor: Cursor) -> Vec<Vec<u64>> {
    let start = |rank| {
        let data = Arc::clone(data);
        spawn(move || {
            let samples = data.len();
            let config = SamplerConfig {
                samples,
                world,
                rank,
                shuffle: true,
                seed: 5,
            };
            let sampler = Sampler::exact(config, 6).expect("a sampler");
            let sampler = sampler.shards(data.order()).expect("an order");
            let mut loader =
                Loader::new(Arc::clone(&data), LoaderOptions::default()).expect("a loader");
            loader.start(sampler.resume(cursor).expect("a plan"));
            let mut read = Vec::new();
            while let Some(batch) = loader.next_batch().expect("a batch") {
                read.extend_from_slice(&batch);
            }
            read
        })
    };
    let ranks: Vec<_> = (0..world).map(start).collect();
    ranks
        .into_iter()
        .map(|rank| rank.join().expect("a rank"))
        .collect()
}

fn sorted(parts: Vec<Vec<u64>>) -> Vec<u64> {
    let mut all = parts.concat();
    all.sort_unstable();
    all
}

fn epoch(epoch: u64) -> Cursor {
    Cursor { epoch, samples: 0 }
}

/// The files of the cache with this ending, and their bytes.
fn cached(root: &Path, ending: &str) -> Vec<(String, u64)> {
    let files = fs::read_dir(root.join("cache/shards"))
        .into_iter()
        .flatten()
        .flatten();
    let named = files.filter_map(|file| {
        let name = file.file_name().into_string().ok()?;
        name.ends_with(ending)
            .then_some((name, file.metadata().ok()?.len()))
    });
    named.collect()
}

/// This test again in another process.
fn child(test: &str, root: &Path, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a program"));
    command.args(["--exact", &format!("stream::tests::{test}"), "--nocapture"]);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
        command.env_remove(name);
    }
    command
        .env(CHILD, root)
        .env("PHALANX_CACHE", root.join("cache"));
    command.envs(variables.iter().copied()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn ended(child: Child) -> String {
    let output = child.wait_with_output().expect("its end");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
    text
}

#[test]
fn a_server_that_fails_for_a_while_is_asked_for_the_rest() {
    let root = folder();
    let drop = |bytes| vec![Fault::Drop(bytes)];
    let random = 20_000
        + (Instant::now().elapsed().as_nanos() as usize + std::process::id() as usize * 7919)
            % 14_000;
    for (faults, resumed) in [
        (drop(random), Some(random)),
        (drop(0), Some(0)),
        ([17_000, 17_001, 3, 20_000].map(Fault::Drop).to_vec(), None),
        (
            [500, 503, 429, 408]
                .map(|status| Fault::Status(status, ""))
                .to_vec(),
            Some(0),
        ),
        (vec![Fault::Stall(18_000)], None),
        (vec![Fault::Drip(10), Fault::Drip(10)], None),
        (
            vec![Fault::Drop(30_000), Fault::NoRange, Fault::NoRange],
            Some(0),
        ),
    ] {
        let _ = fs::remove_dir_all(root.path().join("cache"));
        let server = Server::new(root.path());
        let shown = format!("{faults:?}");
        // The first one has the only shard that is as long.
        let data = open(stream(&server.place(), root.path())).expect("a stream");
        server.fail("s0.jsonl", faults);
        assert_eq!(
            all(&data).expect("a batch"),
            (0..samples()).collect::<Vec<_>>(),
            "{shown}"
        );
        let asked = server.asked("s0.jsonl");
        assert!(asked.len() > 1, "{shown}: {asked:?}");
        assert!(
            resumed.is_none_or(|at| asked.contains(&at)),
            "{shown}: {asked:?}"
        );
        assert_eq!(server.asked("s1.jsonl"), [0]);
        // All is there now.
        assert_eq!(all(&data).expect("a batch").len() as u64, samples());
        assert_eq!(server.asked("s0.jsonl"), asked);
        assert_eq!(
            (
                cached(root.path(), ".part"),
                cached(root.path(), ".shard").len()
            ),
            (vec![], 6)
        );
        let about = data.describe();
        assert!(
            about.contains("cache of 64 GiB in ") && about.contains(" KiB used"),
            "{about}"
        );
    }
}

#[test]
fn a_server_that_does_not_recover_is_given_up_with_url_and_cause() {
    let check = |fault: Fault, cause: &str| {
        let root = folder();
        let server = Server::new(root.path());
        let data = open(stream(&server.place(), root.path())).expect("a stream");
        server.fail("s2.jsonl", vec![fault; 100_000]);
        let since = Instant::now();
        let error = all(&data).expect_err("no shard");
        assert!(
            since.elapsed() < Duration::from_secs(30),
            "{:?}",
            since.elapsed()
        );
        assert_eq!(error.kind(), ErrorKind::System, "{error:?}");
        let text = error.to_string();
        let url = format!("{}/s2.jsonl: ", server.place());
        assert!(text.starts_with(&url) && text.contains(cause), "{error:?}");
        assert_eq!(cached(root.path(), ".part"), []);
        error.note_of("tried").is_some()
    };
    std::thread::scope(|scope| {
        for (fault, cause) in [
            (Fault::Status(503, "SlowDown"), "503"),
            (Fault::Stall(100), "it sent 100 bytes in 1 s"),
            (Fault::Drip(7), ""),
            (Fault::Drop(100), ""),
        ] {
            scope.spawn(move || assert!(check(fault, cause)));
        }
    });
    assert!(!check(Fault::Status(410, "gone"), "410 Gone: gone"));
}

#[test]
fn a_wrong_length_or_range_is_an_error() {
    let root = folder();
    let server = Server::new(root.path());
    let data = open(stream(&server.place(), root.path())).expect("a stream");
    server.fail("s2.jsonl", vec![Fault::Short(100)]);
    let error = all(&data).expect_err("another length");
    assert!(
        error
            .to_string()
            .ends_with("/s2.jsonl is not what it was when its index was made"),
        "{error:?}"
    );
    server.fail("s2.jsonl", vec![Fault::Drop(20_000), Fault::Shifted]);
    let error = all(&data).expect_err("another range");
    assert!(error.to_string().contains("/s2.jsonl: "), "{error:?}");
    assert_eq!(all(&data).expect("a batch").len() as u64, samples());
}

#[test]
fn two_versions_of_a_shard_are_never_mixed() {
    let root = folder();
    for tagged in [true, false] {
        for later in [false, true] {
            let _ = fs::remove_dir_all(root.path().join("cache"));
            let server = Server::new(root.path());
            server.tag(tagged);
            let place = server.place();
            // Its size was asked for before, or not.
            let data = open(stream(&place, root.path())).expect("a stream");
            let path = root.path().join("shards/s2.jsonl");
            let old = fs::read(&path).expect("a shard");
            let new = String::from_utf8_lossy(&old)
                .replace("00010", "99999")
                .into_bytes();
            if later {
                server.fail("s2.jsonl", vec![Fault::Change(30_000, new)]);
            } else {
                fs::write(&path, new).expect("a shard");
            }
            let error = all(&data).expect_err("another version");
            assert_eq!(error.kind(), ErrorKind::Data, "{error:?}");
            let what = format!("{place}/s2.jsonl is not what it was when its index was made");
            assert_eq!(error.to_string(), what);
            assert!(
                error
                    .note_of("fix")
                    .expect("a fix")
                    .contains("phalanx index")
            );
            assert_eq!(cached(root.path(), ".part"), []);
            fs::write(&path, &old).expect("a shard");
            let again = open(stream(&place, root.path())).expect("a stream");
            assert_eq!(all(&again).expect("a batch").len() as u64, samples());
            // One byte more.
            fs::write(&path, [&old[..], b"\n"].concat()).expect("a shard");
            let again = open(stream(&place, root.path())).expect("a stream");
            assert_eq!(all(&again).expect_err("another length").to_string(), what);
            fs::write(&path, &old).expect("a shard");
        }
    }
}

/// One of the same length, with an ETag and without.
#[test]
fn no_old_index_is_used() {
    let root = folder();
    let shards = root.path().join("shards");
    let path = shards.join("s1.jsonl");
    for (tagged, from, to) in [(true, ": ", ":\t"), (false, ":\t", ": ")] {
        let server = Server::new(root.path());
        server.tag(tagged);
        let read = || all(&open(stream(&server.place(), root.path())).expect("a stream"));
        assert_eq!(read().expect("a batch").len() as u64, samples());
        let index = || fs::read(shards.join("phalanx.index")).expect("an index");
        let (text, old) = (fs::read_to_string(&path).expect("a shard"), index());
        fs::write(&path, text.replace(from, to)).expect("a shard");
        let local = Stream::new(&shards.display().to_string());
        local.make_index(None, false).expect("an index");
        assert!(index() != old && index().len() == old.len());
        assert_eq!(read().expect("a batch").len() as u64, samples());
    }
}

#[test]
fn what_is_missing_or_refused_is_said_in_a_sentence() {
    let root = folder();
    let server = Server::new(root.path());
    let place = server.place();
    let of = |place: &str| failed(stream(place, root.path()));
    for (status, what) in [
        (403, "the server does not allow it"),
        (401, "the server does not accept the credentials"),
        (404, "there is no such file"),
    ] {
        server.fail("s3.jsonl", vec![Fault::Status(status, ""); 3]);
        let error = of(&place);
        assert_eq!(error.to_string(), format!("{place}/s3.jsonl: {what}"));
        assert_eq!(error.kind(), ErrorKind::Usage, "{error:?}");
        server.fail("s3.jsonl", Vec::new());
        fs::remove_dir_all(root.path().join("cache")).expect("a cache");
    }
    let error = of(&format!("{}/none", server.url));
    assert_eq!(
        error.to_string(),
        format!("{}/none/phalanx.index: there is no such file", server.url)
    );
    assert!(
        error
            .note_of("perhaps")
            .expect("a hint")
            .contains("an HTTP server lists no files")
    );
    // What is no index, and a shard larger than the cache.
    fs::create_dir(root.path().join("page")).expect("a folder");
    fs::write(
        root.path().join("page/phalanx.index"),
        "<html>not found</html>",
    )
    .expect("a page");
    let error = of(&format!("{}/page", server.url));
    assert!(
        error
            .to_string()
            .contains("/page/phalanx.index is not a complete index"),
        "{error:?}"
    );
    let error = failed(stream(&place, root.path()).cache_limit(40_000));
    assert_eq!(error.kind(), ErrorKind::Usage, "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("/s2.jsonl has 60") && text.ends_with("bytes, the cache may have 40000"),
        "{text}"
    );
    assert!(
        error
            .note_of("fix")
            .expect("a fix")
            .contains("PHALANX_CACHE_BYTES")
    );
    let error = stream(&place, root.path())
        .make_index(None, false)
        .expect_err("nowhere to write");
    assert!(
        error
            .note_of("fix")
            .expect("a fix")
            .contains("--output FILE")
    );
    // Made of what the server has.
    let output = root.path().join("made");
    stream(&place, root.path())
        .make_index(Some(&output), false)
        .expect("an index");
    assert_eq!(
        all(&open(stream(&place, root.path()).index(output)).unwrap())
            .unwrap()
            .len() as u64,
        samples()
    );
}

/// A disk that is full, by a limit of the size of files.
#[test]
fn a_full_disk_says_what_to_do() {
    if let Some(root) = std::env::var_os(CHILD) {
        phalanx_base::stop::tell_limits();
        let place = std::env::var("PLACE").expect("a place");
        let error = failed(Stream::new(&place));
        assert_eq!(error.kind(), ErrorKind::DiskFull, "{error:?}");
        assert!(
            error
                .note_of("fix")
                .expect("a fix")
                .contains("PHALANX_CACHE"),
            "{error:?}"
        );
        assert_eq!(cached(Path::new(&root), ".part"), []);
        return;
    }
    let root = folder();
    let server = Server::new(root.path());
    let program = child("a_full_disk_says_what_to_do", root.path(), &[]);
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -f 40; exec \"$0\" \"$@\""])
        .arg(program.get_program())
        .args(program.get_args());
    command
        .env(CHILD, root.path())
        .env("PHALANX_CACHE", root.path().join("cache"))
        .env("PLACE", server.place());
    ended(
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process"),
    );
}

#[test]
fn all_ranks_read_the_order_of_the_folder() {
    let root = folder();
    let server = Server::new(root.path());
    let local = Stream::new(&root.path().join("shards").display().to_string()).shuffle_buffer(10);
    let local = Arc::new(open(local).expect("a stream"));
    let data = Arc::new(open(stream(&server.place(), root.path())).expect("a stream"));
    assert_eq!(data.content(), local.content());
    for world in 1..=4 {
        for number in 0..2 {
            let read = ranks(&data, world, epoch(number));
            assert_eq!(read, ranks(&local, world, epoch(number)));
            assert_eq!(sorted(read), (0..samples()).collect::<Vec<_>>());
        }
        let middle = Cursor {
            epoch: 1,
            samples: 12,
        };
        assert_eq!(ranks(&data, world, middle), ranks(&local, world, middle));
    }
    for i in 0..5 {
        assert_eq!(server.asked(&format!("s{i}.jsonl")), [0]);
    }
}

#[test]
fn a_cache_smaller_than_the_set_keeps_its_limit() {
    let root = folder();
    let server = Server::new(root.path());
    // s2, the largest, and one more.
    let limit = 110_000;
    fs::create_dir_all(root.path().join("cache/shards")).expect("a folder");
    let foreign = [
        "notes.part",
        "x.shard",
        "room.lock.shard",
        &format!("{}.shard.bak", "a".repeat(64)),
        &format!("{}.part", "b".repeat(64)),
        &format!("{}.shard", "C".repeat(64)),
    ];
    for name in foreign {
        fs::write(
            root.path().join("cache/shards").join(name),
            vec![0; 200_000],
        )
        .expect("a file");
    }
    let data = || {
        Arc::new(open(stream(&server.place(), root.path()).cache_limit(limit)).expect("a stream"))
    };
    let (data, other) = (data(), data());
    let folder = root.path().to_owned();
    let reader = spawn(move || {
        (0..3)
            .map(|number| sorted(ranks(&other, 2, epoch(number))))
            .collect::<Vec<_>>()
    });
    let ours = spawn(move || {
        (0..3)
            .map(|number| sorted(ranks(&data, 2, epoch(number))))
            .collect::<Vec<_>>()
    });
    let mut most = 0;
    while !ours.is_finished() || !reader.is_finished() {
        let ours = |name: &str| !foreign.contains(&name);
        // Nobody makes room meanwhile.
        let lock = File::open(folder.join("cache/shards/room.lock"));
        if let Some(_lock) = lock.ok().filter(try_lock) {
            let files = cached(&folder, "")
                .into_iter()
                .filter(|(name, _)| ours(name));
            most = most.max(files.map(|(_, bytes)| bytes).sum::<u64>());
        }
        sleep(Duration::from_millis(1));
    }
    for read in [ours, reader] {
        assert_eq!(
            read.join().expect("a reader"),
            vec![(0..samples()).collect::<Vec<_>>(); 3]
        );
    }
    // A file that is renamed while they are listed may count twice.
    assert!(most > 0 && most <= limit + 61_000, "{most}");
    let now = cached(&folder, ".shard")
        .iter()
        .filter(|(name, _)| !foreign.contains(&&**name))
        .map(|(_, bytes)| bytes)
        .sum::<u64>();
    assert!(now <= limit, "{now}");
    for name in foreign {
        assert_eq!(
            fs::read(folder.join("cache/shards").join(name))
                .expect("a foreign file")
                .len(),
            200_000,
            "{name}"
        );
    }
    assert!(server.asked("s2.jsonl").len() > 1);
}

#[test]
fn processes_share_what_one_of_them_fetches() {
    if std::env::var_os(CHILD).is_some() {
        let data = open(Stream::new(&std::env::var("PLACE").expect("a place"))).expect("a stream");
        assert_eq!(all(&data).expect("a batch").len() as u64, samples());
        return;
    }
    let root = folder();
    let server = Server::new(root.path());
    server.fail("s2.jsonl", vec![Fault::Drop(20_000)]);
    let variables = [("PLACE", &*server.place())];
    let start = || {
        child(
            "processes_share_what_one_of_them_fetches",
            root.path(),
            &variables,
        )
        .spawn()
    };
    let children: Vec<_> = (0..3).map(|_| start().expect("a process")).collect();
    let data = open(stream(&server.place(), root.path())).expect("a stream");
    assert_eq!(all(&data).expect("a batch").len() as u64, samples());
    children.into_iter().for_each(|child| drop(ended(child)));
    assert_eq!(server.asked("s2.jsonl"), [0, 20_000]);
    assert_eq!(server.asked("s0.jsonl"), [0]);
    assert_eq!(server.asked("phalanx.index"), [0]);
}

#[test]
fn what_a_killed_job_leaves_is_removed_and_no_file_of_others() {
    if std::env::var_os(CHILD).is_some() {
        let data = open(Stream::new(&std::env::var("PLACE").expect("a place"))).expect("a stream");
        let _ = all(&data);
        return;
    }
    let root = folder();
    let server = Server::new(root.path());
    server.fail("s2.jsonl", vec![Fault::Stall(20_000); 100]);
    let variables = [("PLACE", &*server.place())];
    let mut job = child(
        "what_a_killed_job_leaves_is_removed_and_no_file_of_others",
        root.path(),
        &variables,
    )
    .spawn()
    .expect("a process");
    let until = Instant::now() + Duration::from_secs(20);
    while server.asked("s2.jsonl").is_empty() || cached(root.path(), ".part").len() != 1 {
        assert!(Instant::now() < until);
        sleep(Duration::from_millis(5));
    }
    // What is being written by somebody who lives is not removed.
    let limited = |place: &str| open(stream(place, root.path())).expect("a stream");
    let part = cached(root.path(), ".part").remove(0);
    let mut batch = Vec::new();
    limited(&server.place())
        .read_batch(0, &[0], &mut batch)
        .expect("a batch");
    job.kill().expect("killed");
    job.wait().expect("its end");
    assert_eq!(cached(root.path(), ".part"), [part]);
    server.fail("s2.jsonl", Vec::new());
    let old = root
        .path()
        .join(format!("cache/shards/{}.shard.12-34.part", "0".repeat(64)));
    let held = root
        .path()
        .join(format!("cache/shards/{}.shard.56-78.part", "0".repeat(64)));
    let foreign = root.path().join("cache/shards/mine.part");
    let [_, held_file, _] = [&old, &held, &foreign].map(|path| File::create(path).expect("a file"));
    assert!(try_lock(&held_file));
    assert_eq!(
        all(&limited(&server.place())).expect("a batch").len() as u64,
        samples()
    );
    assert!(!old.exists() && held.exists() && foreign.exists());
    assert_eq!(cached(root.path(), ".part").len(), 2);
}

/// As on a file system without locks, and behind a process that hangs.
#[test]
fn nobody_waits_for_a_lock_without_end() {
    let root = folder();
    let server = Server::new(root.path());
    let data = open(stream(&server.place(), root.path())).expect("a stream");
    let lock = |i| {
        let file = File::create(root.path().join(format!("cache/shards/shard-{i:02x}.lock")))
            .expect("a file");
        assert!(try_lock(&file));
        file
    };
    let _held: Vec<_> = (0..256).map(lock).collect();
    let since = Instant::now();
    assert_eq!(all(&data).expect("a batch").len() as u64, samples());
    assert!(since.elapsed() >= super::cache::WAIT && since.elapsed() < Duration::from_secs(30));
}

#[test]
fn names_are_taken_as_they_are() {
    let root = tempfile::tempdir().expect("a folder");
    let shards = root.path().join("a b%20");
    fs::create_dir(&shards).expect("a folder");
    let names = ["a%2Fb.jsonl", "b#~.jsonl", "c d+&=é.jsonl", "d?[x]*.jsonl"];
    for (i, name) in names.iter().enumerate() {
        fs::write(
            shards.join(name),
            format!("{{\"n\": {i}, \"pad\": \"{i:05}{i:05}\"}}\n"),
        )
        .expect("a shard");
    }
    Stream::new(&shards.display().to_string())
        .make_index(None, false)
        .expect("an index");
    let server = Server::new(root.path());
    let place = format!("{}/a%20b%2520", server.url);
    let data = open(stream(&place, root.path())).expect("a stream");
    assert_eq!(all(&data).expect("a batch"), [0, 1, 2, 3]);
    let server = Server::new(root.path());
    server.list("a b%20");
    let variables = [
        ("AWS_ENDPOINT", &*server.url),
        ("PLACE", "s3://bucket/a b%20"),
        ("SAMPLES", "4"),
    ];
    ended(
        s3("s3_is_read", root.path(), &variables)
            .spawn()
            .expect("a process"),
    );
}

fn s3(test: &str, root: &Path, variables: &[(&str, &str)]) -> Command {
    let mut command = child(test, root, variables);
    command
        .env("AWS_ACCESS_KEY_ID", "key")
        .env("AWS_SECRET_ACCESS_KEY", "secret");
    command
}

/// The body of the tests of S3: reads all of `PLACE`, or finds the error that is `WRONG`.
#[test]
fn s3_is_read() {
    let Some(root) = std::env::var_os(CHILD) else {
        return;
    };
    let (place, root) = (
        std::env::var("PLACE").expect("a place"),
        PathBuf::from(root),
    );
    let mut stream = Stream::new(&place).shuffle_buffer(10);
    if let Ok(file) = std::env::var("INDEX") {
        stream = stream.index(file);
    }
    if let Ok(file) = std::env::var("OUTPUT") {
        println!(
            "{}",
            stream
                .make_index(Some(file.as_ref()), false)
                .expect("an index")
        );
        return;
    }
    if let Ok(wrong) = std::env::var("WRONG") {
        let error = failed(stream);
        let kind = if wrong.contains("was made") {
            ErrorKind::Data
        } else {
            ErrorKind::Usage
        };
        assert_eq!(
            (error.kind(), error.to_string()),
            (kind, wrong),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(
            text.contains("has no files") || error.note_of("fix").is_some(),
            "{error:?}"
        );
        return;
    }
    let data = Arc::new(open(stream).expect("a stream"));
    assert_eq!(
        data.len().to_string(),
        std::env::var("SAMPLES").unwrap_or(samples().to_string())
    );
    assert_eq!(
        all(&data).expect("a batch"),
        (0..data.len() as u64).collect::<Vec<_>>()
    );
    if root.join("shards").is_dir() {
        let local = Stream::new(&root.join("shards").display().to_string()).shuffle_buffer(10);
        let local = Arc::new(open(local).expect("a stream"));
        assert_eq!(local.content(), data.content());
        let middle = Cursor {
            epoch: 1,
            samples: 12,
        };
        for cursor in [epoch(0), middle] {
            assert_eq!(ranks(&data, 2, cursor), ranks(&local, 2, cursor));
        }
    }
}

#[test]
fn an_index_in_s3_is_used_where_it_fits() {
    let root = folder();
    let read = |server: &Server, more: &[(&str, &str)]| {
        let mut variables =
            BTreeMap::from([("AWS_ENDPOINT", &*server.url), ("PLACE", "s3://bucket/set")]);
        variables.extend(more.iter().copied());
        let variables: Vec<_> = variables.into_iter().collect();
        ended(
            s3("s3_is_read", root.path(), &variables)
                .spawn()
                .expect("a process"),
        )
    };
    let shards = root.path().join("shards");
    let fetched = |server: &Server| {
        (0..5)
            .map(|i| server.asked(&format!("s{i}.jsonl")).len())
            .collect::<Vec<_>>()
    };
    let server = Server::new(root.path());
    server.list("shards");
    // That of the folder, copied beside the shards.
    let text = read(&server, &[]);
    assert!(!text.contains("in s3://"), "{text}");
    assert_eq!(fetched(&server), [1; 5]);
    // None: it is made in the cache, once, of shards that are there already only where the versions are known.
    fs::rename(shards.join("phalanx.index"), root.path().join("kept")).expect("an index");
    let text = read(&server, &[]);
    assert!(
        text.contains("indexing 5 files in s3://bucket/set, which reads them all"),
        "{text}"
    );
    let made = fetched(&server);
    let _ = fs::remove_file(shards.join("phalanx.index"));
    let text = read(&server, &[]);
    assert!(!text.contains("in s3://"), "{text}");
    let _ = fs::remove_file(shards.join("phalanx.index"));
    // Made by `phalanx index`, and used.
    let output = root.path().join("made").display().to_string();
    let text = read(&server, &[("OUTPUT", &output)]);
    assert!(
        text.contains("5 shards of JSON lines, 33 samples"),
        "{text}"
    );
    read(&server, &[("INDEX", &output)]);
    assert_eq!(fetched(&server), made);
    assert_eq!(cached(root.path(), ".index").len(), 1);
    fs::copy(&output, shards.join("phalanx.index")).expect("an index");
    // Another version of the same length: an index of the store is not used any more, nor is one of the folder.
    let path = shards.join("s1.jsonl");
    let old = fs::read(&path).expect("a shard");
    fs::write(
        &path,
        String::from_utf8_lossy(&old).replace("\"pad\": ", "\"pad\":\t"),
    )
    .expect("a shard");
    let text = read(&server, &[]);
    assert!(text.contains("indexing 5 files in s3://"), "{text}");
    let wrong = format!("{output} is not the index of s3://bucket/set as it is now");
    read(&server, &[("INDEX", &output), ("WRONG", &wrong)]);
    // That of the folder was made again meanwhile.
    fs::write(&path, &old).expect("a shard");
    let wrong = "s3://bucket/set/s1.jsonl is not what it was when its index was made";
    read(&server, &[("WRONG", wrong)]);
}

#[test]
fn s3_says_what_is_wrong() {
    let root = folder();
    let server = Server::new(root.path());
    server.list("shards");
    let xml = |code: &str| {
        format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>No</Message></Error>")
    };
    let closed = TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("an address");
    let closed = format!("http://{closed}/latest/api/token");
    let of = |test: &mut Command| ended(test.spawn().expect("a process"));
    for (status, code, wrong) in [
        (
            403,
            "InvalidAccessKeyId",
            "the server does not accept the credentials",
        ),
        (
            403,
            "SignatureDoesNotMatch",
            "the server does not accept the credentials",
        ),
        (403, "AccessDenied", "the server does not allow it"),
        (404, "NoSuchBucket", "there is no such bucket"),
        (301, "PermanentRedirect", "the bucket is in another region"),
        (
            400,
            "AuthorizationHeaderMalformed",
            "the bucket is in another region",
        ),
    ] {
        server.fail(
            "bucket",
            vec![Fault::Status(status, Box::leak(xml(code).into_boxed_str())); 2],
        );
        let wrong = format!("s3://bucket/set: {wrong}");
        let variables = [
            ("AWS_ENDPOINT", &*server.url),
            ("PLACE", "s3://bucket/set"),
            ("WRONG", &wrong),
        ];
        of(&mut s3("s3_is_read", root.path(), &variables));
    }
    let variables = [
        ("AWS_ENDPOINT", &*server.url),
        ("PLACE", "s3://bucket/set"),
        ("WRONG", "s3://bucket/set: there are no credentials"),
        ("AWS_METADATA_ENDPOINT", &closed),
    ];
    of(&mut child("s3_is_read", root.path(), &variables));
}

/// With `PHALANX_TEST_S3` naming the `moto_server` of `pip install 'moto[server]'`.
#[test]
fn s3_of_moto_is_read() {
    let Some(moto) = std::env::var_os("PHALANX_TEST_S3") else {
        println!("skipped: PHALANX_TEST_S3 does not name a moto_server");
        return;
    };
    struct Moto(Child);
    impl Drop for Moto {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    let root = folder();
    let free = TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("an address");
    let mut command = Command::new(moto);
    command.args(["-H", "127.0.0.1", "-p", &free.port().to_string()]);
    // Signatures are checked after these requests.
    command.env("INITIAL_NO_AUTH_ACTION_COUNT", "1000");
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let _moto = Moto(command.spawn().expect("moto"));
    let ask = |line: &str, body: &[u8]| {
        let mut stream = TcpStream::connect(free).ok()?;
        let head = format!(
            "{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).ok()?;
        let answer = BufReader::new(stream).lines().next()?.ok();
        answer.filter(|line| line.contains(" 200 "))
    };
    let until = Instant::now() + Duration::from_secs(60);
    while ask("PUT /bucket", b"").is_none() {
        assert!(Instant::now() < until, "moto does not answer");
        sleep(Duration::from_millis(100));
    }
    let endpoint = format!("http://{free}");
    let read = |place: &str, more: &[(&str, &str)]| {
        let variables = [&[("AWS_ENDPOINT", &*endpoint), ("PLACE", place)], more].concat();
        ended(
            s3("s3_is_read", root.path(), &variables)
                .spawn()
                .expect("a process"),
        )
    };
    for i in 0..5 {
        let name = format!("s{i}.jsonl");
        let content = fs::read(root.path().join("shards").join(&name)).expect("a shard");
        ask(&format!("PUT /bucket/a/set/{name}"), &content).expect("stored");
        ask(&format!("PUT /bucket/a/set/more/{name}"), &content).expect("stored");
    }
    let text = read("s3://bucket/a/set/", &[]);
    assert!(text.contains("indexing 5 files in s3://"), "{text}");
    let output = root.path().join("made").display().to_string();
    read("s3://bucket/a/set", &[("OUTPUT", &output)]);
    let index = fs::read(&output).expect("an index");
    ask("PUT /bucket/a/set/phalanx.index", &index).expect("stored");
    fs::remove_dir_all(root.path().join("cache")).expect("a cache");
    let text = read("s3://bucket/a/set", &[]);
    assert!(!text.contains("in s3://"), "{text}");
    read(
        "s3://none/set",
        &[("WRONG", "s3://none/set: there is no such bucket")],
    );
    read(
        "s3://bucket/none",
        &[(
            "WRONG",
            "s3://bucket/none has no files .tar, .jsonl, .ndjson or .parquet",
        )],
    );
    ask("POST /moto-api/reset-auth", b"0").expect("signatures are checked");
    read(
        "s3://bucket/a/set",
        &[(
            "WRONG",
            "s3://bucket/a/set: the server does not accept the credentials",
        )],
    );
}
