//! The victim: a small training job, started the way people start them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use phalanx_wire::Token;
use serde_json::Value;

use crate::line::Place;
use crate::proc;

/// A job that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(240);

/// The second rank comes this much later, so that the first is seen waiting
/// for it: its own ports are open only while the group forms.
const LATE_S: &str = "1";

/// How the ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Two launchers with a rank each, over TCP.
    TwoLaunchers,
    /// One launcher, two ranks, shared memory.
    SharedMemory,
}

impl Kind {
    /// Both.
    pub const ALL: [Kind; 2] = [Kind::TwoLaunchers, Kind::SharedMemory];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::TwoLaunchers => "two launchers, tcp",
            Kind::SharedMemory => "one launcher, shared memory",
        }
    }
}

/// A started job.
pub struct Job {
    kind: Kind,
    launchers: Vec<Child>,
    /// Its secret, which only some attacks use.
    pub token: Token,
    /// Where its store listens.
    pub store: SocketAddr,
    folder: PathBuf,
    started: Instant,
    ended: Option<Instant>,
    peaks: BTreeMap<u32, u64>,
    /// Its processes at the last look.
    pub family: BTreeSet<u32>,
    /// Processes whose arguments or environment showed the token.
    leaks: BTreeSet<u32>,
}

/// What a job that has ended leaves.
#[derive(Debug)]
pub struct Trace {
    /// Every logged loss in order, to the bit, and the weights' hash.
    pub results: Vec<(String, u64)>,
    /// SHA-256 of the weights.
    pub weights: String,
    /// From start to end.
    pub elapsed: Duration,
    /// The largest process, in KiB.
    pub peak_kib: u64,
    /// What it wrote to stderr.
    pub said: String,
    /// Processes that showed the token.
    pub leaks: usize,
}

impl Job {
    /// Starts it; everything it writes goes into `folder`.
    pub fn start(phalanx: &Path, kind: Kind, samples: usize, folder: &Path) -> Result<Job, String> {
        fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let token_file = folder.join("job.token");
        let minted = command(phalanx)
            .arg("token")
            .arg("--out")
            .arg(&token_file)
            .status();
        if !minted.is_ok_and(|status| status.success()) {
            return Err(format!("`{} token` failed", phalanx.display()));
        }
        let text = fs::read_to_string(&token_file).map_err(|e| e.to_string())?;
        let token = Token::from_hex(&text).map_err(|e| e.to_string())?;
        let port = free_port()?;
        let shown = folder.join("store");
        let nodes = if kind == Kind::TwoLaunchers { 2 } else { 1 };
        let mut job = Job {
            kind,
            launchers: Vec::new(),
            token,
            store: SocketAddr::from(([127, 0, 0, 1], port)),
            folder: folder.to_owned(),
            started: Instant::now(),
            ended: None,
            peaks: BTreeMap::new(),
            family: BTreeSet::new(),
            leaks: BTreeSet::new(),
        };
        for node in 0..nodes {
            let err = folder.join(format!("stderr.{node}"));
            let err = File::create(&err).map_err(|e| format!("{}: {e}", err.display()))?;
            let mut launch = command(phalanx);
            let ranks = 2 / nodes;
            let words =
                format!("launch --nnodes {nodes} --node-rank {node} --nproc-per-node {ranks}");
            launch.args(words.split(' '));
            launch.arg("--token-file").arg(&token_file);
            let mut transport = "shm";
            if kind == Kind::TwoLaunchers {
                // Where the launchers meet. One launcher needs no port that everybody knows.
                transport = "tcp";
                let words = format!("--master-addr 127.0.0.1 --master-port {port}");
                launch.args(words.split(' '));
            }
            let train = format!(
                "train mnist --epochs 1 --data synthetic:{samples} --log-interval 1 --threads 1 --batch-size 16 \
                 --transport {transport} --output-dir"
            );
            launch
                .args(["--", "/bin/sh", "-c"])
                .arg(format!(
                    "[ $RANK = 0 ] && echo $PHALANX_STORE >'{}'; \
                     [ $RANK = 0 ] || sleep {LATE_S}; exec \"$0\" \"$@\"",
                    shown.display()
                ))
                .arg(phalanx)
                .args(train.split(' '))
                .arg(folder.join("out"))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(err);
            let child = launch.spawn();
            let child = child.map_err(|e| format!("cannot start {}: {e}", phalanx.display()))?;
            job.launchers.push(child);
        }
        if kind == Kind::SharedMemory {
            job.store = job.told_store(&shown)?;
        }
        Ok(job)
    }

    /// One node's store takes a free port, which only its ranks are told; rank 0 has
    /// `shown` it.
    fn told_store(&mut self, shown: &Path) -> Result<SocketAddr, String> {
        loop {
            let text = fs::read_to_string(shown).unwrap_or_default();
            if let Some(line) = text.strip_suffix('\n') {
                return line.parse().map_err(|e| format!("{line}: {e}"));
            }
            if self.has_ended()? {
                let said = fs::read_to_string(self.folder.join("stderr.0")).unwrap_or_default();
                return Err(format!("rank 0 did not say where its store is: {said}"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Looks at its processes: where they listen now, what they need.
    pub fn look(&mut self) -> BTreeSet<Place> {
        let roots: Vec<u32> = self.launchers.iter().map(Child::id).collect();
        let family = proc::family(&roots);
        for (pid, peak) in proc::peaks(&family) {
            let most = self.peaks.entry(pid).or_default();
            *most = peak.max(*most);
        }
        let secret = self.token.to_hex();
        self.leaks
            .extend(family.iter().filter(|pid| proc::shows(**pid, &secret)));
        let places = proc::listening(&family);
        self.family = family;
        places
    }

    /// Whether all launchers have ended.
    pub fn has_ended(&mut self) -> Result<bool, String> {
        if self.started.elapsed() > LIMIT {
            return Err(format!("the job did not end within {LIMIT:?}"));
        }
        for launcher in &mut self.launchers {
            if launcher.try_wait().map_err(|e| e.to_string())?.is_none() {
                return Ok(false);
            }
        }
        self.ended.get_or_insert_with(Instant::now);
        Ok(true)
    }

    /// What it leaves; an error when it did not succeed.
    pub fn finish(mut self) -> Result<Trace, String> {
        let ended = self.ended.unwrap_or_else(Instant::now);
        let elapsed = ended.duration_since(self.started);
        let mut said = String::new();
        let mut failed = None;
        for (node, launcher) in self.launchers.iter_mut().enumerate() {
            let status: ExitStatus = launcher.wait().map_err(|e| e.to_string())?;
            let path = self.folder.join(format!("stderr.{node}"));
            let text = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            said.push_str(&String::from_utf8_lossy(&text));
            if !status.success() {
                failed = Some(format!("the launcher of node {node} ended with {status}"));
            }
        }
        if let Some(failed) = failed {
            let lines: Vec<&str> = said.lines().collect();
            let last = lines[lines.len().saturating_sub(40)..].join("\n  | ");
            return Err(format!("{} ({}):\n  | {last}", failed, self.kind.name()));
        }
        let (results, weights) = results(&self.folder.join("out"))?;
        Ok(Trace {
            results,
            weights,
            elapsed,
            peak_kib: self.peaks.values().copied().max().unwrap_or(0),
            said,
            leaks: self.leaks.len(),
        })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for launcher in &mut self.launchers {
            // Its guard ends the ranks.
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
    }
}

/// `phalanx` without what a cluster engine or a launcher around us set.
fn command(phalanx: &Path) -> Command {
    let mut command = Command::new(phalanx);
    command.env_clear();
    for name in ["PATH", "HOME", "TMPDIR"] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command
}

fn free_port() -> Result<u16, String> {
    std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|l| l.local_addr())
        .map(|a| a.port())
        .map_err(|e| format!("no free port: {e}"))
}

/// Losses to the bit, in order, and the weights' hash.
fn results(folder: &Path) -> Result<(Vec<(String, u64)>, String), String> {
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))
    };
    let mut losses = Vec::new();
    for line in read("metrics.jsonl")?.lines() {
        let entry: Value = serde_json::from_str(line).map_err(|e| format!("{line}: {e}"))?;
        for name in ["loss", "test_loss", "accuracy"] {
            if let Some(value) = entry.get(name).and_then(Value::as_f64) {
                losses.push((format!("{name} at step {}", entry["step"]), value.to_bits()));
            }
        }
    }
    let summary = read("summary.json")?;
    let summary: Value = serde_json::from_str(&summary).map_err(|e| e.to_string())?;
    let weights = summary["weights_sha256"].as_str();
    let weights = weights.ok_or("summary.json names no weights_sha256")?;
    if losses.is_empty() {
        return Err("metrics.jsonl holds no loss".to_owned());
    }
    Ok((losses, weights.to_owned()))
}
