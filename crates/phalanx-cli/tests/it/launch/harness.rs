//! Starts launchers with a mark in the environment that all their
//! descendants inherit, so that leftovers can be found in /proc, and with a folder
//! for temporary files of their own.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{SOON, heed_signals};

/// Nothing here takes longer unless it hangs.
pub const LIMIT: Duration = Duration::from_secs(100);

/// Says the port, and waits until somebody listens there.
pub const REACH_MASTER: &str = "echo $MASTER_PORT; \
    until (exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT) 2>/dev/null; do sleep 0.05; done; echo reached";

/// The only folder in `dir`.
pub fn one_folder(dir: &Path) -> PathBuf {
    let mut all = fs::read_dir(dir).unwrap().flatten();
    let one = all.next().expect("a folder").path();
    assert!(all.next().is_none(), "only one");
    one
}

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// All processes of one test.
pub struct Family {
    mark: String,
    temporary: tempfile::TempDir,
    /// Nothing was left to tidy up after those.
    are_killed: AtomicBool,
}

impl Family {
    pub fn new() -> Self {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        Family {
            mark: format!("phalanx-test-{}-{number}", std::process::id()),
            temporary: tempfile::tempdir().unwrap(),
            are_killed: AtomicBool::new(false),
        }
    }

    /// `phalanx` with these arguments and a clean cluster environment.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.args(args);
        self.prepare(&mut command);
        command
    }

    fn prepare(&self, command: &mut Command) {
        heed_signals();
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let foreign = [
                "SLURM_", "OMPI_", "PMI", "PET_", "PHALANX_", "MASTER_", "OMP_", "TORCH",
            ]
            .iter()
            .any(|prefix| text.starts_with(prefix));
            if foreign || matches!(text.as_ref(), "RANK" | "WORLD_SIZE" | "LOCAL_RANK") {
                command.env_remove(&name);
            }
        }
        if !command.get_envs().any(|(name, _)| name == "TMPDIR") {
            command.env("TMPDIR", self.temporary.path());
        }
        command
            .env("PHALANX_TEST_MARK", &self.mark)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }

    /// Runs a program that becomes `phalanx`, with the same environment.
    pub fn run_as(&self, command: Command) -> Done {
        self.start_as(command).wait()
    }

    /// Starts such a program.
    pub fn start_as(&self, mut command: Command) -> Running {
        self.prepare(&mut command);
        Running::new(command)
    }

    /// Starts it.
    pub fn start(&self, args: &[&str]) -> Running {
        Running::new(self.command(args))
    }

    /// Starts it and waits for its end.
    pub fn run(&self, args: &[&str]) -> Done {
        self.start(args).wait()
    }

    /// Living processes of this family (zombies have no environment).
    pub fn alive(&self) -> Vec<String> {
        let of = |(path, _): (PathBuf, Vec<u8>)| describe(&path);
        self.processes().map(of).collect()
    }

    /// The process that is this rank.
    pub fn pid_of_rank(&self, rank: usize) -> Pid {
        let variable = format!("RANK={rank}").into_bytes();
        let is_rank = |environ: &[u8]| environ.split(|byte| *byte == 0).any(|v| v == variable);
        let (path, _) = self
            .processes()
            .find(|(_, environ)| is_rank(environ))
            .expect("the rank runs");
        let pid = path.file_name().unwrap().to_str().unwrap().parse();
        Pid::from_raw(pid.unwrap()).unwrap()
    }

    /// Their folders in `/proc` and their environments.
    fn processes(&self) -> impl Iterator<Item = (PathBuf, Vec<u8>)> {
        let needle = format!("PHALANX_TEST_MARK={}\0", self.mark).into_bytes();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        entries.filter_map(move |entry| {
            let environ = fs::read(entry.path().join("environ")).ok()?;
            let is_ours = environ.windows(needle.len()).any(|part| part == needle);
            is_ours.then(|| (entry.path(), environ))
        })
    }

    /// Asserts that nobody is left, now or soon. (Two seconds are promised,
    /// which `tools/ci/random_faults.py` holds us to; a machine that runs many
    /// tests at once does not.)
    pub fn assert_gone_soon(&self) {
        let until = Instant::now() + SOON;
        loop {
            let alive = self.alive();
            if alive.is_empty() {
                return;
            }
            if Instant::now() > until {
                panic!("still there after {SOON:?}: {alive:#?}");
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Kills whoever is left, and gives them.
    pub fn kill(&self) -> Vec<String> {
        let left = self.alive();
        // At once: none sees another's end and says so.
        for signal in [Signal::STOP, Signal::KILL] {
            for text in &left {
                let pid = text.split(' ').next().and_then(|p| p.parse().ok());
                if let Some(pid) = pid.and_then(Pid::from_raw) {
                    self.are_killed.store(true, Ordering::Relaxed);
                    let _ = kill_process(pid, signal);
                }
            }
        }
        left
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        let left = self.kill();
        if !thread::panicking() {
            assert!(left.is_empty(), "left behind: {left:#?}");
            let files: Vec<_> = fs::read_dir(self.temporary.path()).unwrap().collect();
            let may_be = self.are_killed.load(Ordering::Relaxed);
            assert!(may_be || files.is_empty(), "left behind: {files:#?}");
        }
    }
}

fn describe(proc_dir: &Path) -> String {
    let cmdline = fs::read(proc_dir.join("cmdline")).unwrap_or_default();
    let cmdline = String::from_utf8_lossy(&cmdline).replace('\0', " ");
    let pid = proc_dir.file_name().unwrap().to_string_lossy();
    format!("{pid} {cmdline}")
}

/// A started launcher.
pub struct Running {
    child: Option<Child>,
    started: Instant,
    lines: Receiver<String>,
    seen: Vec<String>,
    readers: Option<(JoinHandle<()>, JoinHandle<String>)>,
}

/// What a launcher did.
#[derive(Debug)]
pub struct Done {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
    pub took: Duration,
}

impl Done {
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or(-1)
    }

    /// stdout's lines, sorted: ranks come in any order.
    pub fn sorted(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.out.lines().collect();
        lines.sort_unstable();
        lines
    }

    /// The last thing on stderr: from the last line that begins with
    /// `error:` on.
    pub fn last_error(&self) -> &str {
        match self.err.rfind("\nerror: ") {
            Some(at) => &self.err[at + 1..],
            None if self.err.starts_with("error: ") => &self.err,
            None => panic!("no error on stderr: {self:#?}"),
        }
    }
}

impl Running {
    pub fn new(mut command: Command) -> Self {
        let started = Instant::now();
        let mut child = command.spawn().unwrap();
        let stdout = child.stdout.take().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let (sender, lines) = channel();
        let out = thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let err = thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Running {
            child: Some(child),
            started,
            lines,
            seen: Vec::new(),
            readers: Some((out, err)),
        }
    }

    pub fn pid(&self) -> Pid {
        let id = self.child.as_ref().unwrap().id();
        Pid::from_raw(i32::try_from(id).unwrap()).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// The next line of stdout.
    pub fn line(&mut self) -> String {
        let line = self.lines.recv_timeout(LIMIT).expect("a line on stdout");
        self.seen.push(line.clone());
        line
    }

    /// The next `count` lines of stdout.
    pub fn lines(&mut self, count: usize) -> Vec<String> {
        (0..count).map(|_| self.line()).collect()
    }

    /// Waits for the end, kills and fails after [`LIMIT`].
    pub fn wait(mut self) -> Done {
        let mut child = self.child.take().unwrap();
        let until = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > until {
                let _ = child.kill();
                let _ = child.wait();
                panic!(
                    "the launcher did not end within {LIMIT:?}; stdout so far: {:#?}",
                    self.seen
                );
            }
            thread::sleep(Duration::from_millis(2));
        };
        let took = self.started.elapsed();
        let (out, err) = self.readers.take().unwrap();
        let err = err.join().unwrap();
        out.join().unwrap();
        self.seen.extend(self.lines.try_iter());
        let mut out = self.seen.join("\n");
        if !out.is_empty() {
            out.push('\n');
        }
        Done {
            status,
            out,
            err,
            took,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Only when a test failed half-way.
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
