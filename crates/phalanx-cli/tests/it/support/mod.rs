//! What all tests share that start processes.
use std::net::TcpListener;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// What happens at once is over by then, also on a busy machine. What does not
/// happen at once is made to take longer than this.
pub const SOON: Duration = Duration::from_secs(30);

/// Longer than any program here runs that is to end, even pinned to one core.
pub const LIMIT: Duration = Duration::from_secs(240);

/// What a launcher or a cluster engine says to ranks, and `phalanx` to itself.
const CONTRACT: [&str; 8] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PHALANX_TOKEN",
    "PHALANX_BIND",
];

/// `phalanx` with these arguments in `dir`, its output for [`finish`]. No
/// variable of the test's own environment makes it a rank of another job.
pub fn phalanx(args: &[&str], dir: &Path) -> Command {
    heed_signals();
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.args(args).current_dir(dir).env("TMPDIR", dir);
    for name in CONTRACT {
        command.env_remove(name);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs to the end; kills what has not ended after [`LIMIT`].
pub fn finish(command: &mut Command) -> Output {
    wait(command.spawn().expect("phalanx starts"))
}

/// Waits for the end; kills what has not ended after [`LIMIT`].
pub fn wait(child: Child) -> Output {
    let pid = child.id();
    let (done, waiting) = channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if waiting.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            signal(pid, "KILL");
        }
    });
    let output = child.wait_with_output().expect("output");
    drop(done);
    watchdog.join().expect("watchdog");
    output
}

/// A process that a failed test does not leave behind: it is killed, and what it said is printed.
pub struct Job(Option<Child>);

impl Job {
    pub fn start(command: &mut Command) -> Job {
        Job(Some(command.spawn().expect("phalanx starts")))
    }
}

impl From<Job> for Child {
    fn from(mut job: Job) -> Child {
        job.0.take().expect("only here it is taken")
    }
}

impl Deref for Job {
    type Target = Child;

    fn deref(&self) -> &Child {
        self.0.as_ref().expect("it is taken with the job")
    }
}

impl DerefMut for Job {
    fn deref_mut(&mut self) -> &mut Child {
        self.0.as_mut().expect("it is taken with the job")
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            // A panic on top of another one would end all tests; a rank may hold the pipes for a moment.
            let (said, heard) = channel();
            std::thread::spawn(move || said.send(child.wait_with_output()));
            if let Ok(Ok(output)) = heard.recv_timeout(SOON) {
                let (out, err) = (text(&output.stdout), text(&output.stderr));
                eprintln!("killed, since the test has ended before it:\n{out}\n{err}");
            }
        }
    }
}

/// Exit code (-1: killed), standard output and standard error.
pub fn ended(child: impl Into<Child>) -> (i32, String, String) {
    let output = wait(child.into());
    let code = output.status.code().unwrap_or(-1);
    (code, text(&output.stdout), text(&output.stderr))
}

/// Runs `phalanx` to its end; exit code, standard output and standard error.
pub fn run(args: &[&str], dir: &Path) -> (i32, String, String) {
    ended(phalanx(args, dir).spawn().expect("phalanx starts"))
}

/// Runs and requires success; standard output and error.
#[track_caller]
pub fn succeed(args: &[&str], dir: &Path) -> (String, String) {
    let (code, out, err) = run(args, dir);
    assert_eq!(code, 0, "{args:?} failed\n{out}\n{err}");
    (out, err)
}

/// Sends the signal of that name (`KILL`).
#[track_caller]
pub fn signal(pid: u32, name: &str) {
    let pid = pid.to_string();
    let sent = Command::new("kill").args(["-s", name, &pid]).status();
    assert!(sent.expect("kill runs").success(), "kill -s {name} {pid}");
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Children see each signal as a terminal's would, whatever our own parent
/// ignored (`nohup` SIGHUP; `sh -c 'x &'` SIGINT and SIGQUIT): what is ignored
/// stays so over an exec, what has a handler becomes the default again.
pub fn heed_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
        let ignored = ignored.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
        use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
            if ignored.unwrap_or(0) >> (signal - 1) & 1 == 1 {
                let noted = std::sync::Arc::new(AtomicBool::new(false));
                signal_hook::flag::register(signal, noted).unwrap();
            }
        }
    });
}

/// A free port outside the range from which the system picks: other tests'
/// stores come from there.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = u16::try_from(std::process::id() % 1000).unwrap() * 16;
    loop {
        let port = 12_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// The process of rank `rank` of the job whose folder is `dir`.
#[track_caller]
pub fn process_of(rank: usize, dir: &Path) -> u32 {
    find_process(rank, dir).expect("the rank runs")
}

/// The same, if it runs. A rank that was started again is another one.
pub fn find_process(rank: usize, dir: &Path) -> Option<u32> {
    let wanted = [format!("RANK={rank}"), format!("TMPDIR={}", dir.display())];
    let is_it = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let has = |wanted: &String| {
            let mut variables = environment.split(|byte| *byte == 0);
            variables.any(|variable| variable == wanted.as_bytes())
        };
        wanted.iter().all(has)
    };
    let names = std::fs::read_dir("/proc").expect("processes").flatten();
    let mut pids = names.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // A zombie has an empty environment.
    pids.find(is_it)
}

/// Runs `test` on all `cases` at the same time, where most of the time is spent waiting. A panic in one is a panic here.
pub fn at_once<C: Sync>(cases: &[C], test: impl Fn(&C) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            let test = &test;
            scope.spawn(move || test(case));
        }
    });
}

/// Looks until it holds.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < 2 * SOON, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
