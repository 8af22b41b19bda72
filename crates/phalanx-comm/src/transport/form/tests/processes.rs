//! Ranks as real processes, and their deaths.
//!
//! The test binary runs itself: [`child`] does nothing in a normal run and is
//! a rank when the variables below are set.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;

use phalanx_store::{TcpServer, TcpStore};

use super::*;

const PLACE: &str = "PHALANX_TEST_STORE";
const TOKEN: &str = "PHALANX_TEST_TOKEN";
const RANK: &str = "PHALANX_TEST_RANK";
const PREFER: &str = "PHALANX_TEST_PREFER";
/// How many more files the child may open when it begins to form.
const FILES: &str = "PHALANX_TEST_FILES";

/// Exit status of a child that cannot form the group; a panic has another.
const NOT_FORMED: i32 = 3;

/// A child that does not outlive its test.
struct Rank(Child);

impl Rank {
    fn start(rank: usize, place: &str, token: &Token, prefer: Transport, temp: &Path) -> Rank {
        Rank(
            Rank::command(rank, place, token, prefer, temp)
                .spawn()
                .unwrap(),
        )
    }

    fn command(rank: usize, place: &str, token: &Token, prefer: Transport, temp: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "transport::form::tests::processes::child",
                "--nocapture",
            ])
            .env(PLACE, place)
            .env(TOKEN, token.to_hex())
            .env(RANK, rank.to_string())
            .env(PREFER, prefer.name())
            .env("TMPDIR", temp)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    /// SIGKILL: nothing in the process gets a chance to say goodbye.
    fn kill(&mut self) -> u32 {
        self.0.kill().unwrap();
        self.0.id()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The child: forms, sends one byte to rank 0, then waits for one that never
/// comes.
#[test]
fn child() {
    let Ok(place) = std::env::var(PLACE) else {
        return;
    };
    let variable = |name| std::env::var(name).unwrap();
    let token = Token::from_hex(&variable(TOKEN)).unwrap();
    let store = TcpStore::connect(&place, token.clone(), PATIENCE).unwrap();
    let rank: usize = variable(RANK).parse().unwrap();
    let prefer: Transport = serde_json::from_value(variable(PREFER).into()).unwrap();
    if let Ok(more) = std::env::var(FILES) {
        allow_files(more.parse().unwrap());
    }
    let mut mesh = form(&store, &options(rank, 3, &token, prefer)).unwrap_or_else(|e| {
        eprintln!("{e}");
        std::process::exit(NOT_FORMED)
    });
    exchange(&mut mesh, 100_000).unwrap();
    assert_eq!(mesh.link(0).try_send(b"!").unwrap(), 1);
    // Until killed, or rank 0 or 2 is gone. The cause is passed on before we
    // leave, as the layer above does.
    let e = recv_byte(&mut mesh, 0).unwrap_err();
    mesh.abort_handle()
        .poison(&Poison::new(rank, e.to_string()));
}

/// Lets this process open `more` more files.
fn allow_files(more: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let open = names(Path::new("/proc/self/fd"));
    let highest = open.iter().map(|name| name.parse::<u64>().unwrap()).max();
    let end = highest.unwrap() + 1;
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(end);
    setrlimit(Resource::Nofile, limit).unwrap();
    // Uses up the free descriptor numbers below the limit.
    while let Ok(file) = std::fs::File::open("/dev/null") {
        std::mem::forget(file);
    }
    let most = Some(end + more);
    let limit = Rlimit {
        current: most,
        maximum: most,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Kills rank 2 while ranks 0 and 1 wait, `waiting` deciding for whom.
fn kill_one(prefer: Transport, kind: TransportKind) {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind("127.0.0.1:0".parse().unwrap(), token.clone()).unwrap();
    let place = server.local_addr().to_string();
    let temp = tempfile::tempdir().unwrap();
    let mut bystander = Rank::start(1, &place, &token, prefer, temp.path());
    let mut victim = Rank::start(2, &place, &token, prefer, temp.path());
    let store = TcpStore::connect(&place, token.clone(), PATIENCE).unwrap();
    let mut mesh = form(&store, &options(0, 3, &token, prefer)).unwrap();
    assert_eq!(mesh.describe(), [(1, kind), (2, kind)]);
    exchange(&mut mesh, 100_000).unwrap();
    assert_eq!(recv_byte(&mut mesh, 1).unwrap(), b'!');
    assert_eq!(recv_byte(&mut mesh, 2).unwrap(), b'!');

    let start = Instant::now();
    let pid = victim.kill();
    // We wait for the innocent one; the dead one is named nevertheless.
    let e = recv_byte(&mut mesh, 1).unwrap_err();
    let elapsed = start.elapsed();
    assert!(elapsed < SOON, "{elapsed:?}");
    match e.kind() {
        ErrorKind::PeerLost => assert_eq!(e.peer(), Some(2), "{e}"),
        // The bystander saw it first and notified us.
        _ => assert_eq!(e.origin_rank(), Some(1), "{e}"),
    }
    let named = match kind {
        TransportKind::Tcp => "rank 2 is gone".to_owned(),
        _ => format!("rank 2 (process {pid}) died"),
    };
    assert!(e.to_string().contains(&named), "{e}");
    mesh.abort_handle().poison(&Poison::new(0, e.to_string()));
    // The bystander ends too: it saw the same, or is notified by us.
    drop(mesh);
    let status = bystander.0.wait().unwrap();
    assert!(status.success(), "{status}");
    assert!(start.elapsed() < SOON);
    drop(victim);
    assert_eq!(names(temp.path()), [""; 0], "left in the temporary folder");
    let shared = names(Path::new("/dev/shm"));
    assert!(
        !shared.iter().any(|name| name.contains("phalanx")),
        "{shared:?}"
    );
}

/// The store's server sees the connection of the dead one close.
#[test]
fn who_is_killed_while_the_group_forms_is_named_at_once() {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind("127.0.0.1:0".parse().unwrap(), token.clone()).unwrap();
    let place = server.local_addr().to_string();
    let temp = tempfile::tempdir().unwrap();
    for prefer in [Transport::Auto, Transport::Tcp] {
        let store = TcpStore::connect(&place, token.clone(), PATIENCE).unwrap();
        let mut victim = Rank::start(1, &place, &token, prefer, temp.path());
        let error = std::thread::scope(|scope| {
            let rank_0 = scope.spawn(|| form(&store, &options(0, 3, &token, prefer)).unwrap_err());
            // Rank 2 never comes.
            let started = Instant::now();
            while store.try_get("comm/1/0/3/member/1").unwrap().is_none() {
                assert!(started.elapsed() < PATIENCE);
                std::thread::sleep(Duration::from_millis(5));
            }
            let pid = victim.kill();
            let killed = Instant::now();
            let error = rank_0.join().unwrap();
            assert!(killed.elapsed() < SOON, "{error}");
            assert!(
                error
                    .to_string()
                    .contains(&format!("rank 1 (process {pid} on ")),
                "{error}"
            );
            error
        });
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert_eq!(error.peer(), Some(1));
        // The next kind of transport begins anew.
        drop(victim);
        store.delete_prefix("").unwrap();
    }
}

#[test]
fn a_killed_process_is_named_at_once_over_shm() {
    kill_one(Transport::Shm, TransportKind::Shm);
}

#[test]
fn a_killed_process_is_named_at_once_over_tcp() {
    kill_one(Transport::Tcp, TransportKind::Tcp);
}

/// Ranks 1 and 2 wait on one host: one of them reports it, the other is silent.
#[test]
fn a_rank_that_starts_late_is_named_while_the_group_forms() {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind("127.0.0.1:0".parse().unwrap(), token.clone()).unwrap();
    let place = server.local_addr().to_string();
    let temp = tempfile::tempdir().unwrap();
    let (sender, lines) = channel();
    let mut ranks = Vec::new();
    for rank in [1, 2] {
        let mut command = Rank::command(rank, &place, &token, Transport::Auto, temp.path());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        ranks.push(Rank(child));
        let sender = sender.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(|line| line.ok()) {
                if line.starts_with("forming the group: waiting ")
                    && sender.send((rank, line)).is_err()
                {
                    return;
                }
            }
        });
    }
    // At first a rank may wait for both others.
    let expected = format!(" s for rank 0 of 3 to arrive (the store at {place}); deadline in ");
    let mut said = 0;
    while said < 2 {
        let (rank, line) = lines.recv_timeout(PATIENCE).unwrap();
        if line.contains(&expected) {
            assert_eq!(rank, 1, "{line}");
            said += 1;
        }
    }
}

/// Wherever forming reaches the limit for open files, it ends at once for all ranks.
#[test]
fn running_out_of_files_ends_forming_and_names_the_limit() {
    for more in [0, 1, 3] {
        let token = Token::generate().unwrap();
        let server = TcpServer::bind("127.0.0.1:0".parse().unwrap(), token.clone()).unwrap();
        let place = server.local_addr().to_string();
        let temp = tempfile::tempdir().unwrap();
        let store = TcpStore::connect(&place, token.clone(), PATIENCE).unwrap();
        let start = |rank| {
            let mut command = Rank::command(rank, &place, &token, Transport::Tcp, temp.path());
            command.stderr(Stdio::null());
            command
        };
        let limited = Rank(start(1).env(FILES, more.to_string()).spawn().unwrap());
        let other = Rank(start(2).spawn().unwrap());
        let began = Instant::now();
        let error = form(&store, &options(0, 3, &token, Transport::Tcp)).unwrap_err();
        assert!(began.elapsed() < SOON, "{error}");
        assert_eq!(error.origin_rank(), Some(1), "{error}");
        assert!(error.to_string().contains("(ulimit -n)"), "{error}");
        for mut rank in [limited, other] {
            let status = rank.0.wait().unwrap();
            assert_eq!(status.code(), Some(NOT_FORMED), "{status}");
        }
    }
}
