//! Hosts that vanish from a job, and launchers that only stop for a while. A host is a network namespace; where none
//! can be made, those tests say so.

use std::hint::spin_loop;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::launch::harness::{Done, Family, Running};
use crate::launch::nodes::SetOnDrop;
use crate::support::free_port;

/// It takes 2 s; 25 s and more without heartbeats.
const NOTICED: Duration = Duration::from_secs(10);
/// A pause that must not be an alarm, and how long it may become on a busy machine.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(1400);

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Two namespaces, 10.79.0.1 and 10.79.0.2, joined by a cable.
struct Hosts([String; 2]);

impl Hosts {
    fn make() -> Option<Hosts> {
        let name = |host| {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            format!("phx-lost-{host}-{}-{count}", std::process::id())
        };
        let hosts = Hosts(["a", "b"].map(name));
        let [a, b] = &hosts.0;
        let made = [a, b].iter().all(|host| ip(&["netns", "add", host]))
            && ip(&[
                "link", "add", "v", "netns", a, "type", "veth", "peer", "name", "v", "netns", b,
            ])
            && [(a, "10.79.0.1/24"), (b, "10.79.0.2/24")]
                .iter()
                .all(|(host, address)| {
                    ip(&["-n", host, "addr", "add", address, "dev", "v"])
                        && ip(&["-n", host, "link", "set", "lo", "up"])
                        && ip(&["-n", host, "link", "set", "v", "up"])
                });
        if !made {
            println!(
                "skipped: network namespaces cannot be made here (they need root and iproute2)"
            );
        }
        made.then_some(hosts)
    }

    /// Plugs the cable in or out.
    fn cable(&self, state: &str) {
        assert!(ip(&["-n", &self.0[1], "link", "set", "v", state]));
    }

    fn launch(&self, family: &Family, node: usize, token: &Path, more: &[&str]) -> Running {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[node]]);
        command.arg(env!("CARGO_BIN_EXE_phalanx"));
        command.args(arguments(
            "10.79.0.1",
            "29500",
            &node.to_string(),
            token,
            more,
        ));
        family.start_as(command)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.0 {
            ip(&["netns", "del", host]);
        }
    }
}

fn ip(args: &[&str]) -> bool {
    let output = Command::new("ip").args(args).output();
    output.is_ok_and(|output| output.status.success())
}

fn arguments(address: &str, port: &str, node: &str, token: &Path, more: &[&str]) -> Vec<String> {
    let mut args = vec!["launch", "--nnodes", "2", "--node-rank", node];
    args.extend(["--master-addr", address, "--master-port", port]);
    args.extend([
        "--rdzv-timeout",
        "60",
        "--token-file",
        token.to_str().unwrap(),
    ]);
    args.extend(more);
    args.into_iter().map(str::to_owned).collect()
}

/// A token, and what ranks wait for that end well.
fn folder(family: &Family) -> (tempfile::TempDir, std::path::PathBuf, String) {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("job.token");
    assert_eq!(
        family
            .run(&["token", "--out", token.to_str().unwrap()])
            .code(),
        0
    );
    let end = dir.path().join("end");
    let script = format!(
        "echo up; until [ -e {} ]; do sleep 0.05; done",
        end.display()
    );
    (dir, token, script)
}

/// Waits for both, and says how long after `cut` each ended.
fn both_after(cut: Instant, a: Running, b: Running) -> [(Done, Duration); 2] {
    std::thread::scope(|scope| {
        let b = scope.spawn(move || (b.wait(), cut.elapsed()));
        [(a.wait(), cut.elapsed()), b.join().unwrap()]
    })
}

#[test]
fn hosts_whose_cable_is_cut_name_each_other_soon() {
    let Some(hosts) = Hosts::make() else { return };
    let family = Family::new();
    let (_dir, token, _) = folder(&family);
    let sleeps = ["sh", "-c", "echo up; exec sleep 200"];
    let [mut a, mut b] = [0, 1].map(|node| hosts.launch(&family, node, &token, &sleeps));
    a.line();
    b.line();
    hosts.cable("down");
    let ends = both_after(Instant::now(), a, b);
    for (node, (done, after)) in ends.iter().enumerate() {
        println!(
            "measured: node {node} ended {:.2} s after the cut",
            after.as_secs_f64()
        );
        let other = 1 - node;
        assert_eq!(done.code(), 3, "{done:#?}");
        assert!(*after < NOTICED, "{after:?}: {done:#?}");
        let want = format!("error: lost the connection to node {other} (host ");
        assert!(done.last_error().starts_with(&want), "{done:#?}");
        let ranks = format!(
            "10.79.0.{}, rank {other}): nothing has come from it for ",
            other + 1
        );
        assert!(done.last_error().contains(&ranks), "{done:#?}");
    }
}

#[test]
fn a_cable_that_is_back_soon_is_no_loss() {
    let Some(hosts) = Hosts::make() else { return };
    let family = Family::new();
    let (dir, token, script) = folder(&family);
    let ranks = ["sh", "-c", &script];
    let [mut a, mut b] = [0, 1].map(|node| hosts.launch(&family, node, &token, &ranks));
    a.line();
    b.line();
    let pause = paused(|| hosts.cable("down"), || hosts.cable("up"));
    goes_on(dir.path(), pause, a, b);
}

/// Every core computes; then launcher, guard and ranks of a node stop for a second.
#[test]
fn a_launcher_that_is_stopped_on_a_busy_machine_is_no_loss() {
    for stopped in [0, 1] {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _end = SetOnDrop(&over);
            let families = [Family::new(), Family::new()];
            let (dir, token, script) = folder(&families[0]);
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            for _ in 0..2 * cores {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        spin_loop()
                    }
                });
            }
            let port = free_port().to_string();
            let ranks = ["--nproc-per-node", "2", "sh", "-c", &script];
            let [mut a, mut b] = [0, 1].map(|node: usize| {
                let args = arguments("127.0.0.1", &port, &node.to_string(), &token, &ranks);
                let args: Vec<&str> = args.iter().map(String::as_str).collect();
                families[node].start(&args)
            });
            a.lines(2);
            b.lines(2);
            let signal = |signal| {
                for text in families[stopped].alive() {
                    let pid = text.split(' ').next().and_then(|pid| pid.parse().ok());
                    let _ = kill_process(Pid::from_raw(pid.unwrap()).unwrap(), signal);
                }
            };
            let pause = paused(|| signal(Signal::STOP), || signal(Signal::CONT));
            goes_on(dir.path(), pause, a, b);
        });
    }
}

/// How long it was between two actions that are meant to be [`PAUSE`] apart.
fn paused(begin: impl FnOnce(), end: impl FnOnce()) -> Duration {
    let began = Instant::now();
    begin();
    std::thread::sleep(PAUSE);
    end();
    began.elapsed()
}

/// The job has gone on for long enough to have noticed a loss, and ends well.
fn goes_on(dir: &Path, pause: Duration, a: Running, b: Running) {
    std::thread::sleep(2 * PAUSE);
    std::fs::write(dir.join("end"), "").unwrap();
    let [(a, _), (b, _)] = both_after(Instant::now(), a, b);
    if pause > LONGEST_PAUSE {
        println!("not judged: this machine made {pause:?} of a pause of {PAUSE:?}");
        return;
    }
    assert_eq!((a.code(), b.code()), (0, 0), "{a:#?} {b:#?}");
}
