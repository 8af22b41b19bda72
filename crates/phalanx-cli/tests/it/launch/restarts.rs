//! Several nodes start their ranks again together.

use phalanx_store::{Store, TcpStore};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::launch::harness::Running;
use crate::launch::nodes::{Job, both};
use crate::support::{SOON, eventually};

/// What a rank says first, and then waits to be ended.
const SAYS: &str = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, node $GROUP_RANK of $GROUP_WORLD_SIZE, \
     attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS, port $MASTER_PORT, pid $$;";

/// The lines of `count` ranks, sorted, without port and pid, and these two.
fn said(launcher: &mut Running, count: usize) -> (Vec<String>, Vec<String>, Vec<i32>) {
    let mut lines = launcher.lines(count);
    lines.sort_unstable();
    let parts = |line: &String| {
        let (said, rest) = line.split_once(", port ").unwrap();
        let (port, pid) = rest.split_once(", pid ").unwrap();
        (
            said.to_owned(),
            port.to_owned(),
            pid.parse::<i32>().unwrap(),
        )
    };
    let mut all = (Vec::new(), Vec::new(), Vec::new());
    for (said, port, pid) in lines.iter().map(parts) {
        all.0.push(said);
        all.1.push(port);
        all.2.push(pid);
    }
    all
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// The same of two nodes with one and two ranks in one attempt, which both must see; the port and their pids.
fn attempt_of(nodes: &mut [Running; 2], attempt: u32, most: u32) -> (String, [Vec<i32>; 2]) {
    let [a, b] = nodes;
    let (a, b) = (said(a, 1), said(b, 2));
    let want = |rank: usize, local: usize, ranks: usize, node: usize| {
        format!(
            "[rank {rank}] {rank} of 3, {local} of {ranks}, node {node} of 2, attempt {attempt} of {most}"
        )
    };
    assert_eq!(a.0, [want(0, 0, 1, 0)]);
    assert_eq!(b.0, [want(1, 0, 2, 1), want(2, 1, 2, 1)]);
    assert_eq!(b.1, [a.1[0].as_str(); 2]);
    (a.1[0].clone(), [a.2, b.2])
}

#[test]
fn a_failure_on_any_node_restarts_the_ranks_of_all() {
    let job = Job::new();
    let script = format!("{SAYS} [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exec sleep 50");
    let more = ["--max-restarts", "3"];
    let a = job.node("0", &more, &script);
    let b = job.node(
        "1",
        &[&more[..], &["--nproc-per-node", "2"]].concat(),
        &script,
    );
    let mut nodes = [a, b];
    let (first, pids) = attempt_of(&mut nodes, 0, 3);
    let store = TcpStore::connect(&format!("127.0.0.1:{}", job.port), job.token(), SOON).unwrap();
    store.set("left by a rank", b"").unwrap();
    kill(pids[1][1]);
    let (second, more_pids) = attempt_of(&mut nodes, 1, 3);
    assert_eq!(store.try_get("left by a rank").unwrap(), None);
    for pid in pids.iter().flatten() {
        assert!(
            !std::path::Path::new(&format!("/proc/{pid}")).exists(),
            "{pid}"
        );
    }
    kill(more_pids[0][0]);
    let (third, _) = attempt_of(&mut nodes, 2, 3);
    assert!(
        first != second && second != third,
        "{first} {second} {third}"
    );
    let [a, b] = nodes;
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
    for done in [&a, &b] {
        let restarts: Vec<&str> = done
            .err
            .lines()
            .filter(|l| l.starts_with("restart "))
            .collect();
        let want = [
            format!("restart 1 of 3: rank 2 (node 1, pid {}, host ", pids[1][1]),
            format!(
                "restart 2 of 3: rank 0 (node 0, pid {}, host ",
                more_pids[0][0]
            ),
        ];
        assert_eq!(restarts.len(), 2, "{done:#?}");
        for (line, want) in restarts.iter().zip(want) {
            assert!(
                line.starts_with(&want) && line.ends_with("was killed by SIGKILL"),
                "{line}"
            );
        }
    }
}

#[test]
fn the_last_failure_ends_the_job_on_all_nodes_with_its_cause() {
    let job = Job::new();
    let script = "[ $RANK = 1 ] && exit 9; exec sleep 50";
    let more = ["--max-restarts", "2"];
    let (a, b) = both(job.node("0", &more, script), job.node("1", &more, script));
    for done in [&a, &b] {
        assert_eq!(done.code(), 1, "{done:#?}");
        assert!(
            done.last_error().starts_with("error: rank 1 (node 1, pid "),
            "{done:#?}"
        );
        let first = done.last_error().lines().next().unwrap();
        assert!(first.ends_with("exited with code 9"), "{done:#?}");
        for restart in [
            "\nrestart 2 of 2: rank 1 (node 1, ",
            "restart 1 of 2: rank 1 (node 1, ",
        ] {
            assert!(done.err.contains(restart), "{done:#?}");
        }
        assert!(!done.err.contains("restart 3"), "{done:#?}");
    }
    assert!(
        a.last_error().contains("\n  so      rank 0 was stopped"),
        "{a:#?}"
    );
}

/// Its ranks are needed again.
#[test]
fn a_node_whose_ranks_have_succeeded_starts_them_again_with_the_others() {
    let job = Job::new();
    let more = ["--max-restarts", "1"];
    let mut a = job.node("0", &more, SAYS);
    let end = job.token.with_file_name("end");
    let script = format!(
        "{SAYS} until [ -e {} ]; do sleep 0.05; done; [ $TORCHELASTIC_RESTART_COUNT = 1 ]",
        end.display()
    );
    let b = job.node("1", &more, &script);
    let (_, _, pids) = said(&mut a, 1);
    eventually("it has ended", || {
        !std::path::Path::new(&format!("/proc/{}", pids[0])).exists()
    });
    std::fs::write(end, "").unwrap();
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
    for done in [&a, &b] {
        assert_eq!(done.out.lines().count(), 2, "{done:#?}");
        assert!(
            done.err.contains("restart 1 of 1: rank 1 (node 1, pid "),
            "{done:#?}"
        );
    }
}

#[test]
fn an_interrupt_a_killed_launcher_and_a_usage_error_are_not_followed_by_a_restart() {
    let exe = env!("CARGO_BIN_EXE_phalanx");
    let mistake = format!(
        "echo up; [ $RANK = 0 ] || exec {exe} train resnet18 --data-url no-such-folder; exec sleep 50"
    );
    for (signal, script, code, want) in [
        (
            Some(Signal::INT),
            "echo up; exec sleep 50",
            130,
            "was interrupted by SIGINT",
        ),
        (
            Some(Signal::KILL),
            "echo up; exec sleep 50",
            3,
            "the launcher of node 1 (pid ",
        ),
        (None, &mistake, 2, "no data folder no-such-folder"),
    ] {
        let job = Job::new();
        let more = ["--max-restarts", "3"];
        let mut a = job.node("0", &more, script);
        let mut b = job.node("1", &more, script);
        if let Some(signal) = signal {
            a.line();
            b.line();
            b.signal(signal);
        }
        let done = a.wait();
        assert_eq!(done.code(), code, "{done:#?}");
        assert!(done.last_error().contains(want), "{want}: {done:#?}");
        assert!(!done.err.contains("restart "), "{done:#?}");
        let done = b.wait();
        assert_eq!(
            done.code(),
            if signal == Some(Signal::KILL) {
                -1
            } else {
                code
            },
            "{done:#?}"
        );
    }
}

/// It has nothing to stop then, but the ranks must not start again.
#[test]
fn an_interrupt_while_the_ranks_are_stopped_for_a_restart_ends_the_job() {
    let job = Job::new();
    let stops = "trap 'echo stopping' TERM; echo up; while :; do sleep 0.05; done";
    let script = format!("[ $RANK = 1 ] && read x <{} && exit 9; {stops}", job.pipe());
    let more = ["--max-restarts", "3", "--stop-grace-s", "60"];
    let mut a = job.node("0", &more, &script);
    let b = job.node("1", &more, &script);
    assert_eq!(a.line(), "[rank 0] up");
    std::fs::write(job.token.with_file_name("pipe"), "go\n").unwrap();
    assert_eq!(a.line(), "[rank 0] stopping");
    // The other node may have got it first, so it counts as the same interrupt; the second ends the ranks.
    eventually("both are there", || {
        a.signal(Signal::INT);
        std::thread::sleep(std::time::Duration::from_millis(250));
        job.family.alive().is_empty()
    });
    let (a, b) = both(a, b);
    assert_eq!((a.code(), b.code()), (130, 130), "{a:#?} {b:#?}");
    for done in [&a, &b] {
        assert!(
            done.last_error().contains("was interrupted by SIGINT"),
            "{done:#?}"
        );
        assert!(!done.err.contains("restart "), "{done:#?}");
    }
}

/// A launcher of a job whose launchers come and go; the first one has the store.
fn come(job: &Job, nodes: &str, is_first: bool, more: &[&str], script: &str) -> Running {
    let node = if is_first { "0" } else { "1" };
    let more = [&["--rdzv-conf", "last_call_timeout=0"], more].concat();
    job.node_of(nodes, node, job.token.to_str().unwrap(), &more, script)
}

/// Asserts that launchers with these numbers of ranks are the nodes of one attempt, in this order, and gives the pids.
fn assert_world(nodes: &mut [(&mut Running, usize)], attempt: u32) -> Vec<i32> {
    let world: usize = nodes.iter().map(|(_, ranks)| ranks).sum();
    let count = nodes.len();
    let (mut first, mut pids, mut ports) = (0, Vec::new(), Vec::new());
    for (node, (launcher, ranks)) in nodes.iter_mut().enumerate() {
        let (said, port, pid) = said(launcher, *ranks);
        let want = (0..*ranks).map(|local| {
            let rank = first + local;
            format!("[rank {rank}] {rank} of {world}, {local} of {ranks}, node {node} of {count}, attempt {attempt} of 0")
        });
        assert_eq!(said, want.collect::<Vec<_>>());
        first += *ranks;
        pids.extend(pid);
        ports.extend(port);
    }
    ports.dedup();
    assert_eq!(ports.len(), 1, "{ports:?}");
    pids
}

#[test]
fn launchers_come_and_go_and_the_ranks_start_again_with_those_that_are_there() {
    let job = Job::new();
    let script = format!("{SAYS} [ $TORCHELASTIC_RESTART_COUNT = 4 ] || exec sleep 50");
    let mut a = come(&job, "1:3", true, &[], &script);
    assert_world(&mut [(&mut a, 1)], 0);
    let mut b = come(&job, "1:3", false, &["--nproc-per-node", "2"], &script);
    assert_world(&mut [(&mut a, 1), (&mut b, 2)], 1);
    let mut c = come(&job, "1:3", false, &[], &script);
    assert_world(&mut [(&mut a, 1), (&mut b, 2), (&mut c, 1)], 2);
    b.signal(Signal::KILL);
    assert_world(&mut [(&mut a, 1), (&mut c, 1)], 3);
    c.signal(Signal::INT);
    let (a, c) = both(a, c);
    assert_eq!((a.code(), c.code()), (0, 130), "{a:#?} {c:#?}");
    assert!(
        a.out
            .contains("[rank 0] 0 of 1, 0 of 1, node 0 of 1, attempt 4 of 0"),
        "{a:#?}"
    );
    let restarts: Vec<&str> = a
        .err
        .lines()
        .filter(|l| l.starts_with("restart "))
        .collect();
    let want = [
        (
            "restart with 3 ranks on 2 nodes: a node has joined (host ",
            "",
        ),
        (
            "restart with 4 ranks on 3 nodes: a node has joined (host ",
            "",
        ),
        (
            "restart with 2 ranks on 2 nodes: the launcher of node 1 (pid ",
            "its ranks with it",
        ),
        (
            "restart with 1 rank on 1 node: node 1 (host ",
            "was interrupted by SIGINT",
        ),
    ];
    assert_eq!(restarts.len(), want.len(), "{a:#?}");
    for (line, (start, end)) in restarts.iter().zip(want) {
        assert!(line.starts_with(start) && line.ends_with(end), "{line}");
    }
    assert!(c.err.contains(restarts[2]), "{c:#?}");
    assert!(
        c.last_error().contains("was interrupted by SIGINT"),
        "{c:#?}"
    );
    drop(b.wait());
}

/// Nothing comes from them any more, as if their hosts had vanished.
#[test]
fn the_ranks_start_again_without_two_launchers_that_are_lost_at_once() {
    let job = Job::new();
    let script = format!("{SAYS} [ $TORCHELASTIC_RESTART_COUNT = 3 ] || exec sleep 50");
    let mut a = come(&job, "1:3", true, &[], &script);
    assert_world(&mut [(&mut a, 1)], 0);
    let mut b = come(&job, "1:3", false, &[], &script);
    assert_world(&mut [(&mut a, 1), (&mut b, 1)], 1);
    let mut c = come(&job, "1:3", false, &[], &script);
    assert_world(&mut [(&mut a, 1), (&mut b, 1), (&mut c, 1)], 2);
    b.signal(Signal::STOP);
    c.signal(Signal::STOP);
    assert_world(&mut [(&mut a, 1)], 3);
    let a = a.wait();
    assert_eq!(a.code(), 0, "{a:#?}");
    let restarts: Vec<&str> = a
        .err
        .lines()
        .filter(|l| l.starts_with("restart with 1 rank on 1 node: "))
        .collect();
    assert_eq!(restarts.len(), 1, "{a:#?}");
    for node in [1, 2] {
        let want = format!("lost the connection to node {node} (host ");
        assert!(restarts[0].contains(&want), "{a:#?}");
    }
    for lost in [b, c] {
        lost.signal(Signal::CONT);
        let done = lost.wait();
        assert_eq!(done.code(), 3, "{done:#?}");
    }
}

/// Also where a rank has failed, so that the ranks of all are to start again, which the lost node never does.
#[test]
fn the_loss_of_a_node_is_not_followed_by_a_restart() {
    for fails in [false, true] {
        let job = Job::new();
        let more = ["--max-restarts", "3"];
        let script = format!("{SAYS} exec sleep 50");
        let mut a = job.node("0", &more, &script);
        let mut b = job.node("1", &more, &script);
        let (_, _, pids) = said(&mut a, 1);
        said(&mut b, 1);
        b.signal(Signal::STOP);
        if fails {
            kill(pids[0]);
        }
        let a = a.wait();
        assert_eq!(a.code(), 3, "{a:#?}");
        let want = "error: lost the connection to node 1 (host ";
        assert!(a.last_error().starts_with(want), "{a:#?}");
        assert!(!a.err.contains("restart "), "{a:#?}");
        b.signal(Signal::CONT);
        let b = b.wait();
        assert_eq!(b.code(), 3, "{b:#?}");
    }
}

#[test]
fn with_fewer_than_min_nodes_it_waits_for_more() {
    let job = Job::new();
    let mut a = come(&job, "2:3", true, &[], &format!("{SAYS} exec sleep 50"));
    let mut b = come(&job, "2:3", false, &[], &format!("{SAYS} exec sleep 50"));
    assert_world(&mut [(&mut a, 1), (&mut b, 1)], 0);
    b.signal(Signal::KILL);
    drop(b.wait());
    let mut c = come(&job, "2:3", false, &[], &format!("{SAYS} exec sleep 50"));
    let pids = assert_world(&mut [(&mut a, 1), (&mut c, 1)], 1);
    // No restart is allowed after a failure.
    kill(pids[1]);
    let (a, c) = both(a, c);
    for done in [&a, &c] {
        assert_eq!(done.code(), 3, "{done:#?}");
        let want = format!("error: rank 1 (node 1, pid {}, host ", pids[1]);
        assert!(done.last_error().starts_with(&want), "{done:#?}");
    }
    let done = come(
        &Job::new(),
        "2:3",
        true,
        &["--rdzv-timeout", "1"],
        "echo never",
    )
    .wait();
    assert_eq!((done.code(), done.out.as_str()), (4, ""), "{done:#?}");
    let want = "error: 1 of at least 2 nodes have joined within 1 s";
    assert!(done.last_error().starts_with(want), "{done:#?}");
}

/// It takes the place of one that is lost.
#[test]
fn a_launcher_beyond_max_waits_and_mistakes_of_another_harm_nobody() {
    let job = Job::new();
    let end = job.token.with_file_name("end");
    let script = format!("{SAYS} until [ -e {} ]; do sleep 0.05; done", end.display());
    let mut a = come(&job, "1:2", true, &[], &script);
    assert_world(&mut [(&mut a, 1)], 0);
    let mut b = come(&job, "1:2", false, &[], &script);
    assert_world(&mut [(&mut a, 1), (&mut b, 1)], 1);
    let store = TcpStore::connect(&format!("127.0.0.1:{}", job.port), job.token(), SOON).unwrap();
    let mut c = come(&job, "1:2", false, &[], &script);
    let has_arrived = |id: u64| {
        let events = (0..).map_while(|n| store.try_get(&format!("launch/log/{n}")).unwrap());
        let events = events.map(|event| serde_json::from_slice::<Value>(&event).unwrap());
        let mut arrived = events.filter_map(|event| event["Arrived"]["id"].as_u64());
        arrived.any(|other| other >= id)
    };
    eventually("it waits", || has_arrived(2));
    for (nodes, more, want) in [
        ("1:3", &[][..], "started with --nnodes 1:2"),
        (
            "1:2",
            &["--max-restarts", "1"],
            "started with --max-restarts 0",
        ),
        ("1:2", &["--bogus-flag", "1"], "--bogus-flag"),
    ] {
        let done = come(&job, nodes, false, more, "echo never").wait();
        assert_eq!((done.code(), done.out.as_str()), (2, ""), "{done:#?}");
        assert!(done.last_error().contains(want), "{done:#?}");
    }
    b.signal(Signal::KILL);
    drop(b.wait());
    assert_world(&mut [(&mut a, 1), (&mut c, 1)], 2);
    let d = come(&job, "1:2", false, &[], "echo never");
    eventually("it waits", || has_arrived(3));
    std::fs::write(end, "").unwrap();
    let done = [a.wait(), c.wait(), d.wait()];
    assert!(done.iter().all(|done| done.code() == 0), "{done:#?}");
    assert_eq!(done[2].out, "");
    assert!(
        done[2].err.contains("finished without this node"),
        "{done:#?}"
    );
}
