//! Several launchers on this host acting as several nodes.

use std::io::ErrorKind::WouldBlock;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use phalanx_store::{Store, TcpStore};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, Initiator, Role};
use rustix::process::{Pid, Signal, kill_process};

use crate::launch::failures::REPORTS_3;
use crate::launch::harness::{Done, Family, REACH_MASTER, Running};
use crate::support::{SOON, at_once, eventually, free_port};

/// Two nodes' common ground: a port and a token file.
pub struct Job {
    pub family: Family,
    pub port: String,
    _dir: tempfile::TempDir,
    pub token: PathBuf,
}

impl Job {
    pub fn new() -> Self {
        let family = Family::new();
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("job.token");
        let done = family.run(&["token", "--out", token.to_str().unwrap()]);
        assert_eq!(done.code(), 0, "{done:#?}");
        let port = free_port();
        Job {
            family,
            port: port.to_string(),
            _dir: dir,
            token,
        }
    }

    pub fn token(&self) -> Token {
        Token::from_hex(std::fs::read_to_string(&self.token).unwrap().trim()).unwrap()
    }

    /// A named pipe, by which ranks wait for each other.
    pub fn pipe(&self) -> String {
        let path = self.token.with_file_name("pipe");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        path.display().to_string()
    }

    pub fn node(&self, node: &str, more: &[&str], script: &str) -> Running {
        self.node_of("2", node, self.token.to_str().unwrap(), more, script)
    }

    pub fn node_of(
        &self,
        nodes: &str,
        node: &str,
        token: &str,
        more: &[&str],
        script: &str,
    ) -> Running {
        self.node_in(&self.family, nodes, node, token, more, script)
    }

    /// In a family of its own, which can be ended alone.
    fn node_in(
        &self,
        family: &Family,
        nodes: &str,
        node: &str,
        token: &str,
        more: &[&str],
        script: &str,
    ) -> Running {
        let args = [
            "launch",
            "--nnodes",
            nodes,
            "--node-rank",
            node,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            &self.port,
            "--token-file",
            token,
            "--rdzv-timeout",
            "60",
        ];
        family.start(&[&args[..], more, &["sh", "-c", script]].concat())
    }
}

/// Whether the process has a handler for the signal.
fn catches(pid: Pid, signal: Signal) -> bool {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    let status = std::fs::read_to_string(path).unwrap_or_default();
    let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    caught.unwrap_or(0) >> (signal.as_raw() - 1) & 1 == 1
}

pub fn both(a: Running, b: Running) -> (Done, Done) {
    (a.wait(), b.wait())
}

#[test]
fn two_launchers_make_one_world_of_uneven_nodes() {
    let job = Job::new();
    let script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, node $GROUP_RANK of $GROUP_WORLD_SIZE, \
                  $PHALANX_STORE $PHALANX_BIND; cat $PHALANX_TOKEN_FILE";
    let b = job.node("1", &["--nproc-per-node", "1"], script);
    std::thread::sleep(Duration::from_millis(100));
    let a = job.node("0", &["--nproc-per-node", "2"], script);
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
    let address = format!("127.0.0.1:{} 127.0.0.1", job.port);
    assert!(
        a.out.contains(&format!(
            "[rank 0] 0 of 3, 0 of 2, node 0 of 2, {address}\n"
        )),
        "{a:#?}"
    );
    assert!(
        a.out.contains(&format!(
            "[rank 1] 1 of 3, 1 of 2, node 0 of 2, {address}\n"
        )),
        "{a:#?}"
    );
    assert!(
        b.out.contains(&format!(
            "[rank 2] 2 of 3, 0 of 1, node 1 of 2, {address}\n"
        )),
        "{b:#?}"
    );
    let token = std::fs::read_to_string(&job.token).unwrap();
    assert!(
        b.out.contains(token.trim()),
        "both nodes' ranks hold the job's token"
    );
}

#[test]
fn the_ranks_of_both_nodes_meet_at_a_port_of_node_0() {
    let job = Job::new();
    let script = format!("exec bash -c '{REACH_MASTER}'");
    let mut a = job.node("0", &["--no-prefix"], &script);
    let mut b = job.node("1", &["--no-prefix"], &script);
    let (port, same) = (a.line(), b.line());
    assert_eq!(port, same);
    assert_ne!(port, job.port, "that is where the launchers meet");
    let _rank_0 = std::net::TcpListener::bind(("0.0.0.0", port.parse().unwrap())).unwrap();
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
}

#[test]
fn the_store_outlives_the_ranks_of_all_nodes() {
    let job = Job::new();
    // Node 0's ranks are through at once; node 1's still need the store.
    let a = job.node("0", &[], "true");
    let b = job.node(
        "1",
        &[],
        "sleep 0.7; bash -c 'exec 3<>/dev/tcp/${PHALANX_STORE/:/\\/}' && echo reached",
    );
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
    assert_eq!(b.out, "[rank 1] reached\n");
    assert!(a.took > Duration::from_millis(600), "{a:#?}");
}

#[test]
fn a_failure_on_one_node_ends_all_and_is_named_everywhere() {
    let job = Job::new();
    let script = "trap '' TERM; echo pid $$; while :; do sleep 50; done";
    let mut a = job.node("0", &["--nproc-per-node", "2"], script);
    let mut b = job.node("1", &["--nproc-per-node", "2"], script);
    a.lines(2);
    let lines = b.lines(2);
    let pid: i32 = lines
        .iter()
        .find_map(|l| l.strip_prefix("[rank 3] pid "))
        .unwrap()
        .parse()
        .unwrap();
    let start = Instant::now();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let (a, b) = both(a, b);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    for done in [&a, &b] {
        assert_eq!(done.code(), 3, "{done:#?}");
        let first = done.last_error().lines().next().unwrap();
        assert!(
            first.starts_with(&format!("error: rank 3 (node 1, pid {pid}, host ")),
            "{first}"
        );
        assert!(first.ends_with("was killed by SIGKILL"), "{first}");
    }
    assert!(
        a.last_error()
            .contains("\n  so      ranks 0 and 1 were stopped"),
        "{a:#?}"
    );
    assert!(
        b.last_error().contains("\n  so      rank 2 was stopped"),
        "{b:#?}"
    );
}

#[test]
fn the_cause_on_one_node_beats_the_echo_on_another() {
    let job = Job::new();
    // Rank 0 loses its peer and says so long before the cause is seen.
    let pipe = job.pipe();
    let b = job.node(
        "1",
        &["--stop-grace-s", "60"],
        &format!("trap 'exit 1' TERM; : >{pipe}; while :; do sleep 0.05; done"),
    );
    let a = job.node("0", &[], &format!("read x <{pipe}; {REPORTS_3}"));
    let (a, b) = both(a, b);
    // Rank 1's own end came after the stop, so the echo is all there is ...
    assert_eq!((a.code(), b.code()), (3, 3), "{a:#?} {b:#?}");
    // ... but within the waiting time the cause wins on both nodes.
    let job = Job::new();
    let a = job.node("0", &[], "[ $RANK = 0 ] && exec sleep 50");
    // Rank 2 ends as soon as rank 1, which holds the pipe, has ended.
    let pipe = job.pipe();
    let b = job.node(
        "1",
        &["--nproc-per-node", "2"],
        &format!("[ $RANK = 1 ] && exec 3>{pipe} && exit 3; read x <{pipe}; exit 1"),
    );
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (1, 1), "{a:#?} {b:#?}");
    assert!(
        a.last_error().starts_with("error: rank 2 (node 1, "),
        "{a:#?}"
    );
}

#[test]
fn an_interrupt_of_one_launcher_ends_all() {
    let job = Job::new();
    let mut a = job.node("0", &[], "echo up; exec sleep 50");
    let mut b = job.node("1", &[], "echo up; exec sleep 50");
    a.line();
    b.line();
    b.signal(Signal::INT);
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (130, 130), "{a:#?} {b:#?}");
    assert!(a.last_error().starts_with("error: node 1 (host "), "{a:#?}");
    assert!(
        a.last_error().contains("was interrupted by SIGINT"),
        "{a:#?}"
    );
}

/// Launcher, guard and ranks of a node at once, as when its host loses its power. The rank of the other node, which
/// has only lost a peer, is not the headline.
#[test]
fn a_node_that_is_gone_is_named_and_not_a_rank_that_has_lost_it() {
    let job = Job::new();
    let pipe = job.pipe();
    let a = job.node("0", &[], &format!("read x <{pipe}; {REPORTS_3}"));
    let node_1 = Family::new();
    let script = format!("exec 3>{pipe}; echo up; while :; do sleep 0.05; done");
    let mut b = job.node_in(&node_1, "2", "1", job.token.to_str().unwrap(), &[], &script);
    b.line();
    // Its connection to the store, which tells of its end, is made with its first beat.
    let beat = TcpStore::connect(&format!("127.0.0.1:{}", job.port), job.token(), SOON).unwrap();
    beat.wait(&["launch/beat/1"], SOON).unwrap();
    // It cannot say anything, and neither can its guard; the kernel ends its rank.
    b.signal(Signal::STOP);
    let start = Instant::now();
    node_1.kill();
    let done = a.wait();
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    assert_eq!(done.code(), 3, "{done:#?}");
    let last = done.last_error();
    let lost = last.split(", 127.0.0.1, rank 1): ").collect::<Vec<_>>();
    assert!(
        lost[0].starts_with("error: lost node 1 (host "),
        "{done:#?}"
    );
    assert!(
        lost[1].starts_with("the connection of its launcher was closed"),
        "{done:#?}"
    );
    assert!(
        last.contains("\n  so      rank 0 (node 0, pid "),
        "{done:#?}"
    );
}

/// The others wait for it until their deadline.
#[test]
fn a_mistake_on_one_node_ends_it_at_once() {
    let limit = ["--rdzv-timeout", "2"];
    for (wrong, right) in [("1", "0"), ("0", "1")] {
        let job = Job::new();
        let waiting = job.node(right, &limit, "echo never");
        let mistaken = job.node(wrong, &["--bogus-flag", "1"], "echo never");
        let (mistaken, waiting) = both(mistaken, waiting);
        assert_eq!((mistaken.code(), &*mistaken.out), (2, ""), "{mistaken:#?}");
        assert!(
            mistaken.last_error().contains("--bogus-flag"),
            "{mistaken:#?}"
        );
        assert_eq!((waiting.code(), &*waiting.out), (4, ""), "{waiting:#?}");
        let missing = waiting.last_error();
        assert!(missing.contains(&format!("node {wrong}")), "{waiting:#?}");
    }
}

#[test]
fn a_mistake_that_comes_too_late_harms_no_other_node() {
    let job = Job::new();
    let end = job.token.with_file_name("end");
    let script = format!(
        "echo up; until [ -e {} ]; do sleep 0.05; done",
        end.display()
    );
    let (mut a, mut b) = (job.node("0", &[], &script), job.node("1", &[], &script));
    a.line();
    b.line();
    let mistaken = job.node("1", &["--bogus-flag", "1"], "echo never").wait();
    assert_eq!(mistaken.code(), 2, "{mistaken:#?}");
    std::fs::write(end, "").unwrap();
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
}

/// The node whose rank has waited in vain does not know for whom.
#[test]
fn a_rank_that_is_stopped_on_another_node_is_named_everywhere() {
    let job = Job::new();
    let end = job.token.with_file_name("end");
    let waits = format!(
        "until [ -e {} ]; do sleep 0.05; done; echo '{{\"phalanx_exit_code\":4}}' >$TORCHELASTIC_ERROR_FILE; exit 4",
        end.display()
    );
    let a = job.node("0", &[], &waits);
    let mut b = job.node("1", &[], "echo $$; exec sleep 50");
    let line = b.line();
    let pid: i32 = line.strip_prefix("[rank 1] ").unwrap().parse().unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::STOP).unwrap();
    eventually("it is stopped", || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
        status.is_ok_and(|text| text.contains("State:\tT"))
    });
    std::fs::write(end, "").unwrap();
    let (a, b) = both(a, b);
    for done in [&a, &b] {
        assert_eq!(done.code(), 4, "{done:#?}");
        let first = done.last_error().lines().next().unwrap();
        assert!(
            first.starts_with(&format!("error: rank 1 (node 1, pid {pid}, host "))
                && first.contains(" is stopped by a signal or a debugger; rank 0 (node 0, pid "),
            "{first}"
        );
    }
}

/// Both have the name "none" for the job, as torchrun gives it.
#[test]
fn nodes_that_log_into_one_folder_keep_their_logs_apart() {
    let job = Job::new();
    let logs = job.token.with_file_name("logs");
    let more = ["--log-dir", logs.to_str().unwrap()];
    let script = "echo rank $RANK";
    let (a, b) = both(job.node("0", &more, script), job.node("1", &more, script));
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
    for (node, done) in [(0, &a), (1, &b)] {
        let begin = format!("logs: {}/none_node{node}_", logs.display());
        let line = done.err.lines().find(|line| line.starts_with(&begin));
        let folder = line.and_then(|line| line.strip_prefix("logs: "));
        let folder = folder.unwrap_or_else(|| panic!("{done:#?}"));
        let log = std::fs::read_to_string(format!("{folder}/attempt_0/0/stdout.log"));
        assert_eq!(log.unwrap(), format!("rank {node}\n"));
    }
}

#[test]
fn a_killed_launcher_is_noticed_by_the_other_nodes() {
    for (victim, want) in [
        ("1", "the launcher of node 1 (pid "),
        ("0", "lost the launcher of node 0 (host "),
    ] {
        let job = Job::new();
        let script = "trap '' TERM; echo up; while :; do sleep 50; done";
        let mut a = job.node("0", &[], script);
        let mut b = job.node("1", &[], script);
        a.line();
        b.line();
        let (dead, other) = if victim == "0" { (a, b) } else { (b, a) };
        let start = Instant::now();
        dead.signal(Signal::KILL);
        let done = other.wait();
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert_eq!(done.code(), 3, "{done:#?}");
        assert!(done.last_error().contains(want), "{want}: {done:#?}");
        job.family.assert_gone_soon();
        drop(dead);
    }
}

#[test]
fn a_stranger_with_another_token_is_refused_and_harms_nobody() {
    let job = Job::new();
    let other = job.token.with_file_name("other.token");
    let other = other.to_str().unwrap();
    assert_eq!(job.family.run(&["token", "--out", other]).code(), 0);
    let a = job.node("0", &[], "echo $WORLD_SIZE");
    // It may be the launcher of the job before that still listens there, so it tries
    // again, for 10 s at most.
    let soon = ["--rdzv-timeout", "1"];
    let stranger = job.node_of("2", "1", other, &soon, "echo never").wait();
    assert_eq!(stranger.code(), 2, "{stranger:#?}");
    assert!(
        stranger.err.contains(&format!("127.0.0.1:{}", job.port)),
        "{stranger:#?}"
    );
    assert!(stranger.err.contains("token"), "{stranger:#?}");
    let b = job.node("1", &[], "echo $WORLD_SIZE");
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
    assert_eq!(a.out, "[rank 0] 2\n");
}

/// Another program answers on node 0's port before node 0 is there.
#[test]
fn a_stranger_in_the_place_of_node_0_is_outlasted() {
    let job = Job::new();
    let listener = TcpListener::bind(format!("127.0.0.1:{}", job.port)).unwrap();
    let b = job.node("1", &[], "echo $RANK");
    for answer in ["HTTP/1.1 400 Bad Request\r\n\r\n", ""] {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(answer.as_bytes()).unwrap();
    }
    drop(listener);
    let a = job.node("0", &[], "echo $RANK");
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
}

/// At the deadline the answer is named, as is the address.
#[test]
fn what_a_stranger_answered_is_reported() {
    let job = Job::new();
    let listener = TcpListener::bind(format!("127.0.0.1:{}", job.port)).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n");
            }
        });
        let done = job.node("1", &["--rdzv-timeout", "1"], "true").wait();
        over.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(listener.local_addr().unwrap()));
        assert_eq!(done.code(), 4, "{done:#?}");
        let last = done.last_error();
        assert!(last.contains("\"SSH-\""), "{last}");
        assert!(last.contains(&format!("127.0.0.1:{}", job.port)), "{last}");
    });
}

/// A node with another token and one with another port: after ten seconds both
/// sides say what they see.
#[test]
fn what_keeps_nodes_apart_is_said_on_both_sides() {
    let job = Job::new();
    let other = job.token.with_file_name("other.token");
    let other = other.to_str().unwrap();
    assert_eq!(job.family.run(&["token", "--out", other]).code(), 0);
    let token = job.token.to_str().unwrap();
    let limit = ["--rdzv-timeout", "12"];
    let elsewhere = free_port().to_string();
    let a = job.node_of("3", "0", token, &limit, "true");
    let b = job.node_of("3", "1", other, &limit, "true");
    let port = [&limit[..], &["--master-port", &elsewhere]].concat();
    let c = job.node_of("3", "2", token, &port, "true");
    let (a, b, c) = (a.wait(), b.wait(), c.wait());
    assert_eq!((a.code(), b.code(), c.code()), (4, 2, 4));
    let refused = "connections from 127.0.0.1 were refused: they have another job token";
    let mut lines = a.err.lines();
    let is_said =
        lines.any(|l| l.starts_with("waiting for node 1, 2 of 3: ") && l.contains(refused));
    assert!(is_said, "{a:#?}");
    assert!(a.last_error().contains(refused), "{a:#?}");
    assert!(b.last_error().contains("it has another token"), "{b:#?}");
    let waiting =
        format!("waiting for the launcher of node 0 at 127.0.0.1:{elsewhere}: connecting");
    assert!(c.err.contains(&waiting), "{c:#?}");
}

/// Strangers that say hello and then nothing, and come again when they are closed.
#[test]
fn half_open_handshakes_do_not_keep_nodes_apart() {
    const STRANGERS: usize = 500;
    let job = Job::new();
    let script = "echo $RANK";
    let a = job.node("0", &[], script);
    let address: SocketAddr = format!("127.0.0.1:{}", job.port).parse().unwrap();
    let over = AtomicBool::new(false);
    let (a, b) = std::thread::scope(|scope| {
        let _end = SetOnDrop(&over);
        let (tell, told) = channel();
        scope.spawn(|| strangers(address, STRANGERS, tell, &over));
        told.recv_timeout(SOON).unwrap();
        both(a, job.node("1", &[], script))
    });
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
    // Alone it is 0.1 s.
    assert!(b.took < Duration::from_secs(10), "{b:#?}");
}

pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// `count` hellos of another job at a time, until it is over; tells when all have
/// been said once.
fn strangers(address: SocketAddr, count: usize, tell: Sender<()>, over: &AtomicBool) {
    let token = Token::generate().unwrap();
    let hello = Hello::new(Role::StoreClient, token.job_id());
    let (_, hello) = Initiator::start(hello, &token).unwrap();
    let open = || {
        let mut stream = TcpStream::connect(address).ok()?;
        stream.set_nonblocking(true).unwrap();
        stream.write_all(&hello).ok()?;
        Some(stream)
    };
    let mut held: Vec<Option<TcpStream>> = vec![];
    held.resize_with(count, || None);
    while !over.load(Ordering::Relaxed) {
        for slot in &mut held {
            let is_open = slot.as_mut().is_some_and(|stream| {
                let error = stream.read(&mut [0; 512]);
                matches!(error, Ok(1..)) || error.is_err_and(|e| e.kind() == WouldBlock)
            });
            if !is_open {
                *slot = open();
            }
        }
        if held.iter().all(Option::is_some) {
            let _ = tell.send(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn tokens_must_be_there_and_private() {
    let job = Job::new();
    let family = &job.family;
    let node_0 = ["launch", "--nnodes", "2", "--node-rank", "0"];
    let there = ["--master-addr", "127.0.0.1", "true"];
    let done = family.run(&[&node_0[..], &there].concat());
    assert_eq!(done.code(), 2, "{done:#?}");
    assert!(done.err.contains("phalanx token --out "), "{done:#?}");
    // The variable names the file as the flag does.
    let mut command = family.command(&[&node_0[..], &there].concat());
    command.env("PHALANX_TOKEN_FILE", "no.such.file");
    let done = Running::new(command).wait();
    assert_eq!(done.code(), 2, "{done:#?}");
    assert!(
        done.err.contains("cannot read the token file no.such.file"),
        "{done:#?}"
    );
    std::fs::set_permissions(&job.token, std::fs::Permissions::from_mode(0o644)).unwrap();
    let done = job.node("0", &[], "true").wait();
    assert_eq!(done.code(), 2, "{done:#?}");
    assert!(
        done.err.contains("mode 0644") && done.err.contains("chmod 600"),
        "{done:#?}"
    );
}

#[test]
fn a_master_that_never_starts_is_named_within_the_deadline() {
    let job = Job::new();
    let done = job.node("1", &["--rdzv-timeout", "1"], "true").wait();
    assert_eq!(done.code(), 4, "{done:#?}");
    assert!(done.took > Duration::from_millis(900), "{done:#?}");
    assert!(done.took < SOON, "{done:#?}");
    let last = done.last_error();
    assert!(last.contains(&format!("127.0.0.1:{}", job.port)), "{last}");
    assert!(last.contains("--master-addr"), "{last}");
}

#[test]
fn the_host_of_node_0_is_never_guessed() {
    let family = Family::new();
    for node in ["0", "1"] {
        let done = family.run(&["launch", "--nnodes", "2", "--node-rank", node, "true"]);
        assert_eq!(done.code(), 2, "{done:#?}");
        assert!(done.err.contains("--master-addr HOST"), "{done:#?}");
    }
}

#[test]
fn a_node_that_never_comes_is_named_within_the_deadline() {
    let job = Job::new();
    let token = job.token.to_str().unwrap();
    let a = job.node_of("3", "0", token, &["--rdzv-timeout", "4"], "true");
    let b = job.node_of("3", "1", token, &[], "true");
    let (a, b) = both(a, b);
    assert_eq!(a.code(), 4, "{a:#?}");
    assert!(
        a.last_error()
            .starts_with("error: node 2 of 3 did not join within "),
        "{a:#?}"
    );
    // The other one does not wait its own 60 s.
    assert_eq!(b.code(), 4, "{b:#?}");
    assert!(b.took < SOON, "{b:#?}");
}

/// Its flag and both values are named, the others wait for another launcher, and a job that runs continues: of a fixed number of
/// nodes and of others, whether ranks start again or continue in place.
#[test]
fn a_launcher_with_other_flags_ends_alone() {
    let cases = [
        ("2", false, true),
        ("2", true, true),
        ("2:3", false, true),
        ("2:3", true, true),
        ("2", false, false),
        ("2:3", true, false),
    ];
    at_once(&cases, |&(nodes, is_elastic, is_numbered)| {
        let job = Job::new();
        let endpoint = format!("127.0.0.1:{}", job.port);
        let node = |number: Option<&str>,
                    nodes: &str,
                    restarts: &str,
                    is_elastic: bool,
                    command: &[&str]| {
            let token = job.token.to_str().unwrap();
            let mut args = vec![
                "launch",
                "--rdzv-endpoint",
                &endpoint,
                "--token-file",
                token,
            ];
            args.extend(["--rdzv-conf", "join_timeout=60,last_call_timeout=0"]);
            args.extend(["--nnodes", nodes, "--max-restarts", restarts]);
            args.extend(match number {
                Some(number) => ["--node-rank", number],
                None => ["--rdzv-backend", "c10d"],
            });
            args.extend(is_elastic.then_some("--elastic"));
            job.family.start(&[&args, command].concat())
        };
        let end = job.token.with_file_name("end");
        let script = format!(
            "echo up; until [ -e {} ]; do sleep 0.05; done",
            end.display()
        );
        let script = ["sh", "-c", &script];
        let number = |number: &'static str| Some(number).filter(|_| is_numbered);
        let right = |own| node(number(own), nodes, "2", is_elastic, &script);
        let refused = |when: &str| {
            let never = ["sh", "-c", "echo never"];
            let own = number("1");
            let other = if nodes == "2" { "4" } else { "1:4" };
            let is_given = |is_given| if is_given { "given" } else { "left out" };
            for (wrong, wants) in [
                (
                    node(own, other, "2", is_elastic, &never),
                    ["--nnodes", nodes, other],
                ),
                (
                    node(own, nodes, "1", is_elastic, &never),
                    ["--max-restarts", "2", "1"],
                ),
                (
                    node(own, nodes, "2", !is_elastic, &never),
                    ["--elastic", is_given(is_elastic), is_given(!is_elastic)],
                ),
            ] {
                let done = wrong.wait();
                assert_eq!((done.code(), &*done.out), (2, ""), "{when}: {done:#?}");
                let [flag, theirs, ours] = wants;
                let error = done.last_error();
                let has = format!("was started with {flag} {theirs}, ");
                assert!(error.contains(&has), "{when}: {has}: {done:#?}");
                assert!(
                    error.contains(&format!(" with {ours}\n")),
                    "{when}: {done:#?}"
                );
            }
            let other_program = node(own, nodes, "2", is_elastic, &["true"]);
            let mut wrong = vec![(other_program, "has the program true")];
            // Launchers that come and go are numbered by arrival.
            if nodes == "2" {
                let numbering = if is_numbered { None } else { Some("1") };
                let mixed = node(numbering, nodes, "2", is_elastic, &never);
                wrong.push((mixed, "has --node-rank and the one on host"));
            }
            for (wrong, want) in wrong {
                let done = wrong.wait();
                assert_eq!((done.code(), &*done.out), (2, ""), "{when}: {done:#?}");
                assert!(
                    done.last_error().contains(want),
                    "{when}: {want}: {done:#?}"
                );
            }
        };
        let mut a = right("0");
        eventually("the store listens", || {
            TcpStream::connect(&endpoint).is_ok()
        });
        refused("before the job has begun");
        let mut b = right("1");
        assert_eq!([a.line(), b.line()], ["[rank 0] up", "[rank 1] up"]);
        refused("while it runs");
        std::fs::write(end, "").unwrap();
        let (a, b) = both(a, b);
        assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
    });
}

/// Of the launchers that wait, one is killed or interrupted. Another one takes its place, and only one.
#[test]
fn a_launcher_that_ends_before_the_job_begins_can_be_started_again() {
    for (signal, code, is_numbered) in [
        (Signal::KILL, -1, true),
        (Signal::INT, 130, true),
        (Signal::TERM, 130, false),
    ] {
        let job = Job::new();
        let endpoint = format!("127.0.0.1:{}", job.port);
        let node = |number: &str| {
            let token = job.token.to_str().unwrap();
            let mut args = vec!["launch", "--nnodes", "3", "--rdzv-endpoint", &endpoint];
            args.extend(["--token-file", token, "--rdzv-conf", "join_timeout=60"]);
            args.extend(match is_numbered {
                true => ["--node-rank", number],
                false => ["--rdzv-backend", "c10d"],
            });
            args.extend(["sh", "-c", "echo $RANK"]);
            job.family.start(&args)
        };
        let a = node("0");
        eventually("the store listens", || {
            TcpStream::connect(&endpoint).is_ok()
        });
        let store = phalanx_store::TcpStore::connect(&endpoint, job.token(), SOON).unwrap();
        let wait_for = |what: &str, count: usize| {
            eventually("the log has it", || {
                let (events, _) = store.get_numbered("launch/log/0", Duration::ZERO).unwrap();
                let events = events.iter().map(|event| String::from_utf8_lossy(event));
                events.filter(|event| event.contains(what)).count() == count
            });
        };
        let b = node("1");
        wait_for("Arrived", 2);
        b.signal(signal);
        let b = b.wait();
        assert_eq!((b.code(), &*b.out), (code, ""), "{b:#?}");
        wait_for("Lost", 1);
        let b = node("1");
        wait_for("Arrived", 3);
        if is_numbered {
            let again = node("1").wait();
            assert_eq!((again.code(), &*again.out), (2, ""), "{again:#?}");
            let want = "node 1 has already joined: host ";
            assert!(again.last_error().contains(want), "{again:#?}");
        }
        let c = node("2");
        let mut out = String::new();
        for done in [a.wait(), b.wait(), c.wait()] {
            assert_eq!(done.code(), 0, "{done:#?}");
            out += &done.out;
        }
        let mut ranks: Vec<&str> = out.lines().collect();
        ranks.sort_unstable();
        assert_eq!(ranks, ["[rank 0] 0", "[rank 1] 1", "[rank 2] 2"]);
    }
}

#[test]
fn a_node_that_waits_in_vain_says_which_launcher_was_refused() {
    let job = Job::new();
    let token = job.token.to_str().unwrap();
    let a = job.node_of("2", "0", token, &["--rdzv-timeout", "4"], "echo never");
    let b = job.node_of("3", "1", token, &[], "echo never");
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (4, 2), "{a:#?} {b:#?}");
    for done in [&a, &b] {
        assert!(
            done.last_error()
                .contains("was started with --nnodes 2, node 1"),
            "{done:#?}"
        );
        assert_eq!(done.out, "");
    }
    assert!(
        a.err
            .contains("waiting for node 1 of 2: a launcher on host "),
        "{a:#?}"
    );
}

#[test]
fn waiting_can_be_interrupted() {
    let job = Job::new();
    for node in ["0", "1"] {
        let running = job.node(node, &[], "true");
        eventually("it heeds Ctrl-C", || catches(running.pid(), Signal::INT));
        let start = Instant::now();
        running.signal(Signal::INT);
        let done = running.wait();
        assert_eq!(done.code(), 130, "{done:#?}");
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    }
}
