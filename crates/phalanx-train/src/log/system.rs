//! What the ranks' processes use, and what their time goes to: each rank's thread puts its own into the store, rank 0's
//! thread reads all. No step and no collective is part of it.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use phalanx_base::process::proc_bytes;
use phalanx_base::{host_name, unix_time};
use phalanx_member::RankContext;
use phalanx_store::Store;
use serde_json::{Map, Value, json};

/// Seconds between two records.
const INTERVAL_VARIABLE: &str = "PHALANX_SYSTEM_INTERVAL_S";
const INTERVAL: Duration = Duration::from_secs(5);
/// More in large groups, so that `events.jsonl` does not grow with their size.
const INTERVAL_OF_A_RANK: Duration = Duration::from_millis(250);
/// `USER_HZ`, the unit of times that Linux reports to programs; the same on every architecture of today.
const TICKS_PER_SECOND: u64 = 100;
/// The shortest time over which the processor's use is measured.
const LEAST: Duration = Duration::from_millis(200);
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

/// The ranks of a group.
pub(super) struct Members {
    rank: usize,
    /// This rank's number among all that the job has started.
    number: usize,
    /// Those of all ranks, by rank.
    numbers: Vec<usize>,
    store: Arc<dyn Store>,
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (f.debug_struct("Members").field("numbers", &self.numbers)).finish()
    }
}

impl Members {
    pub(super) fn of(ctx: &RankContext) -> Members {
        let group = ctx.group();
        Members {
            rank: ctx.rank(),
            number: ctx.number(),
            numbers: group.global_ranks().to_vec(),
            store: group.store(),
        }
    }
}

/// Measures this rank, and on rank 0 knows the others.
#[derive(Debug)]
pub(super) struct System {
    members: Members,
    counters: Arc<Counters>,
    host: String,
    interval: Duration,
    /// When the command was started.
    started: Instant,
    /// Processor time when it was last measured.
    used: Option<(Instant, Duration)>,
    /// What was used of one core until then.
    percent: Option<f64>,
    /// What each rank said last, and how often it was seen, by its number.
    seen: HashMap<usize, (Vec<u8>, u32)>,
}

/// The key of what the rank with this number says.
fn key_of(number: usize) -> String {
    format!("system/{number}")
}

impl System {
    pub(super) fn new(ctx: &RankContext, counters: Arc<Counters>) -> System {
        let seconds = std::env::var(INTERVAL_VARIABLE).ok();
        let seconds = seconds.and_then(|text| text.parse().ok());
        let interval = seconds.and_then(|s: f64| Duration::try_from_secs_f64(s.max(0.01)).ok());
        System {
            members: Members::of(ctx),
            counters,
            host: host_name(),
            interval: interval
                .unwrap_or_else(|| INTERVAL.max(INTERVAL_OF_A_RANK * ctx.world() as u32)),
            started: ctx.started(),
            used: processor_time().map(|used| (Instant::now(), used)),
            percent: None,
            seen: HashMap::new(),
        }
    }

    /// The ranks are others from now on.
    pub(super) fn set_members(&mut self, members: Members) {
        self.members = members;
        self.post();
    }

    /// As if half an interval had passed since the last record.
    #[cfg(test)]
    pub(super) fn end_interval(&mut self) {
        self.interval = Duration::from_millis(300);
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
        if self.members.rank > 0 {
            let record = self.own().to_string();
            let key = key_of(self.members.number);
            // Without a store the group fails by itself.
            let _ = self.members.store.set(&key, record.as_bytes());
        }
    }

    /// The records of all ranks that said something lately; on rank 0.
    pub(super) fn all(&mut self) -> Value {
        let mut ranks = vec![self.own()];
        for (rank, number) in self.members.numbers.iter().enumerate().skip(1) {
            let Ok(Some(text)) = self.members.store.try_get(&key_of(*number)) else {
                continue;
            };
            let (last, times) = self.seen.entry(*number).or_default();
            *times = match *last == text {
                true => times.saturating_add(1),
                false => 0,
            };
            let record = serde_json::from_slice::<Map<_, _>>(&text);
            *last = text;
            if let (Ok(mut record), true) = (record, *times < SILENT) {
                // It may have had another rank when it said this.
                record.insert("rank".to_owned(), json!(rank));
                ranks.push(record.into());
            }
        }
        json!({ "ranks": ranks })
    }

    fn own(&mut self) -> Value {
        let counters = &self.counters;
        let seconds = |counter: &AtomicU64| counter.load(Relaxed) as f64 / 1e9;
        let mut percent = self.percent;
        if let Some(((then, before), used)) = self.used.zip(processor_time()) {
            // Shortly after the last record, as at the end of a run, too little is used to be counted.
            let wall = then.elapsed();
            let is_whole = wall >= self.interval / 2;
            if is_whole || percent.is_none() && wall >= LEAST {
                let used = used.saturating_sub(before).as_secs_f64();
                percent = Some(100.0 * used / wall.as_secs_f64().max(1e-3));
            }
            if is_whole {
                (self.used, self.percent) = (Some((Instant::now(), used)), percent);
            }
        }
        counters.wants_bytes.store(true, Relaxed);
        let mut record = json!({
            "rank": self.members.rank,
            "host": self.host,
            "pid": std::process::id(),
            "time": unix_time().as_secs_f64(),
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
        if self.members.rank == 0 {
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
pub(crate) fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
