//! What the ranks' processes use, and what their time goes to: each rank's thread puts its own into the store, rank 0's
//! thread reads all. No step and no collective is part of it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use phalanx_base::host_name;
use phalanx_base::process::proc_bytes;
use phalanx_launch::RankContext;
use phalanx_store::Store;
use serde_json::{Value, json};

/// Seconds between two records.
const INTERVAL_VARIABLE: &str = "PHALANX_SYSTEM_INTERVAL_S";
const INTERVAL: Duration = Duration::from_secs(5);
/// More in large groups, so that `events.jsonl` does not grow with their size.
const INTERVAL_OF_A_RANK: Duration = Duration::from_millis(250);
/// `USER_HZ`, in which Linux tells programs times; the same on every architecture of today.
const TICKS_PER_SECOND: u64 = 100;
/// Intervals after which a rank that says nothing is left out.
const SILENT: u32 = 3;

/// What a rank's time goes to, in nanoseconds since the attempt began. Its training thread writes, its log's thread reads.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) steps: AtomicU64,
    pub(crate) train: AtomicU64,
    pub(crate) data: AtomicU64,
    pub(crate) exposed: AtomicU64,
    pub(crate) saving: AtomicU64,
    pub(crate) evaluation: AtomicU64,
    pub(crate) sent_bytes: AtomicU64,
    /// `sent_bytes` is asked for: adding it up takes time in large groups.
    pub(crate) wants_bytes: AtomicBool,
}

/// Measures this rank, and on rank 0 knows the others.
pub(super) struct System {
    rank: usize,
    world: usize,
    store: Arc<dyn Store>,
    /// Of the keys in the store.
    prefix: String,
    counters: Arc<Counters>,
    host: String,
    interval: Duration,
    /// When the command was started.
    started: Instant,
    /// Processor time at the record before.
    used: Option<(Instant, Duration)>,
    /// What each rank said last, and how often it was seen.
    seen: Vec<(Vec<u8>, u32)>,
}

impl fmt::Debug for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("System").field("rank", &self.rank).finish()
    }
}

impl System {
    pub(super) fn new(ctx: &RankContext, counters: Arc<Counters>) -> System {
        let seconds = std::env::var(INTERVAL_VARIABLE).ok();
        let seconds = seconds.and_then(|text| text.parse().ok());
        let interval = seconds.and_then(|s: f64| Duration::try_from_secs_f64(s.max(0.01)).ok());
        System {
            rank: ctx.rank(),
            world: ctx.world(),
            store: ctx.group().store(),
            prefix: format!("system/{}", ctx.group().generation()),
            counters,
            host: host_name(),
            interval: interval
                .unwrap_or_else(|| INTERVAL.max(INTERVAL_OF_A_RANK * ctx.world() as u32)),
            started: ctx.started(),
            used: processor_time().map(|used| (Instant::now(), used)),
            seen: vec![(Vec::new(), 0); ctx.world()],
        }
    }

    pub(super) fn interval(&self) -> Duration {
        self.interval
    }

    /// Steps that this attempt has taken.
    pub(super) fn steps(&self) -> u64 {
        self.counters.steps.load(Relaxed)
    }

    pub(super) fn started(&self) -> Instant {
        self.started
    }

    /// Puts this rank's record into the store, for rank 0.
    pub(super) fn post(&mut self) {
        if self.rank > 0 {
            let record = self.own().to_string();
            let key = format!("{}/{}", self.prefix, self.rank);
            // Without a store the group fails by itself.
            let _ = self.store.set(&key, record.as_bytes());
        }
    }

    /// The records of all ranks that said something lately; on rank 0.
    pub(super) fn all(&mut self) -> Value {
        let mut ranks = vec![self.own()];
        for rank in 1..self.world {
            let key = format!("{}/{rank}", self.prefix);
            let Ok(Some(text)) = self.store.try_get(&key) else {
                continue;
            };
            let (last, times) = &mut self.seen[rank];
            *times = match *last == text {
                true => times.saturating_add(1),
                false => 0,
            };
            let record = serde_json::from_slice::<Value>(&text);
            *last = text;
            if let (Ok(record), true) = (record, *times < SILENT) {
                ranks.push(record);
            }
        }
        json!({ "ranks": ranks })
    }

    fn own(&mut self) -> Value {
        let counters = &self.counters;
        let seconds = |counter: &AtomicU64| counter.load(Relaxed) as f64 / 1e9;
        let now = processor_time().map(|used| (Instant::now(), used));
        let percent = now.zip(self.used).map(|((now, used), (then, before))| {
            let wall = now.saturating_duration_since(then).as_secs_f64();
            100.0 * used.saturating_sub(before).as_secs_f64() / wall.max(1e-3)
        });
        self.used = now;
        counters.wants_bytes.store(true, Relaxed);
        let mut record = json!({
            "rank": self.rank,
            "host": self.host,
            "pid": std::process::id(),
            "time": super::run::now(),
            "cpu_percent": percent,
            "memory_bytes": status_bytes("/proc/self/status", "VmRSS:"),
            "sent_bytes": counters.sent_bytes.load(Relaxed),
            "steps": counters.steps.load(Relaxed),
            "train_s": seconds(&counters.train),
            "data_s": seconds(&counters.data),
            "exposed_s": seconds(&counters.exposed),
            "saving_s": seconds(&counters.saving),
            "evaluation_s": seconds(&counters.evaluation),
        });
        if self.rank == 0 {
            record["memory_free_bytes"] = json!(status_bytes("/proc/meminfo", "MemAvailable:"));
            let load = std::fs::read_to_string("/proc/loadavg").ok();
            let load = load.and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
            record["load"] = json!(load);
        }
        record
    }
}

/// The line `name` of a file of /proc, in bytes.
fn status_bytes(path: &str, name: &str) -> Option<u64> {
    proc_bytes(&std::fs::read_to_string(path).ok()?, name)
}

/// Processor time of all threads of this process, in user and system mode.
fn processor_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name, in parentheses, may have spaces.
    let (_, rest) = text.rsplit_once(") ")?;
    let ticks = |at: usize| rest.split(' ').nth(at)?.parse::<u64>().ok();
    let ticks = ticks(11)?.checked_add(ticks(12)?)?;
    Some(Duration::from_millis(
        ticks.saturating_mul(1000 / TICKS_PER_SECOND),
    ))
}

/// The processor's name.
pub(super) fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
