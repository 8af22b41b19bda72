//! `system` events: what each rank did and used, over time.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::curve::spread;

/// Most values of one kind, of all ranks together, and most records.
const MAX_VALUES: usize = 20_000;
const MAX_RECORDS: usize = 300;
/// Most ranks. The slowest and the fastest are among the first as likely as among the others.
const MAX_RANKS: usize = 256;

/// `system` events as columns. Values are those of the records, which are sums since the attempt
/// began where the file has sums; `None` where a rank has not reported.
#[derive(Debug, Serialize)]
pub struct System {
    /// Seconds since the attempt began, and which attempt it is.
    elapsed_s: Vec<f64>,
    attempt: Vec<u64>,
    ranks: Vec<Rank>,
    /// Records and ranks of the file.
    records_total: usize,
    ranks_total: usize,
}

#[derive(Debug, Serialize)]
struct Rank {
    rank: u64,
    host: String,
    values: BTreeMap<&'static str, Vec<Option<f64>>>,
}

#[derive(Debug, Deserialize)]
struct Record {
    elapsed_s: f64,
    ranks: Vec<RankRecord>,
}

#[derive(Debug, Deserialize)]
struct RankRecord {
    rank: u64,
    host: Option<String>,
    steps: Option<f64>,
    train_s: Option<f64>,
    data_s: Option<f64>,
    exposed_s: Option<f64>,
    saving_s: Option<f64>,
    evaluation_s: Option<f64>,
    cpu_percent: Option<f64>,
    memory_bytes: Option<f64>,
    sent_bytes: Option<f64>,
    load: Option<f64>,
    memory_free_bytes: Option<f64>,
}

impl RankRecord {
    fn values(&self) -> [(&'static str, Option<f64>); 11] {
        [
            ("steps", self.steps),
            ("train_s", self.train_s),
            ("data_s", self.data_s),
            ("exposed_s", self.exposed_s),
            ("saving_s", self.saving_s),
            ("evaluation_s", self.evaluation_s),
            ("cpu_percent", self.cpu_percent),
            ("memory_bytes", self.memory_bytes),
            ("sent_bytes", self.sent_bytes),
            ("load", self.load),
            ("memory_free_bytes", self.memory_free_bytes),
        ]
    }
}

/// Milliseconds are enough.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

impl System {
    /// The records of `lines`, each with its attempt; `None` if there are none. Of many, some are
    /// read, the last of each attempt among them: its sums are the attempt's.
    pub fn read(lines: &[(u64, &[u8])]) -> Option<System> {
        let parse = |line: &[u8]| serde_json::from_slice::<Record>(line).ok();
        let last = lines.iter().rev().find_map(|(_, line)| parse(line))?;
        let most = (MAX_VALUES / last.ranks.len().max(1)).clamp(10, MAX_RECORDS);
        let mut chosen = spread(lines.len(), most);
        let ends = lines.windows(2).enumerate();
        chosen.extend(ends.filter_map(|(i, two)| (two[0].0 != two[1].0).then_some(i)));
        chosen.sort_unstable();
        chosen.dedup();
        let mut system = System {
            elapsed_s: Vec::new(),
            attempt: Vec::new(),
            ranks: Vec::new(),
            records_total: lines.len(),
            ranks_total: 0,
        };
        let mut ranks: BTreeMap<u64, Rank> = BTreeMap::new();
        for (attempt, line) in chosen.into_iter().map(|i| lines[i]) {
            let Some(record) = parse(line) else { continue };
            let before = system.elapsed_s.len();
            system.elapsed_s.push(rounded(record.elapsed_s));
            system.attempt.push(attempt);
            system.ranks_total = system.ranks_total.max(record.ranks.len());
            for now in record.ranks {
                if ranks.len() == MAX_RANKS && !ranks.contains_key(&now.rank) {
                    continue;
                }
                let values = now.values();
                let rank = ranks.entry(now.rank).or_insert_with(|| Rank {
                    rank: now.rank,
                    host: now.host.unwrap_or_default(),
                    values: BTreeMap::new(),
                });
                for (name, value) in values {
                    let Some(value) = value else { continue };
                    let column = rank.values.entry(name).or_default();
                    if column.len() <= before {
                        column.resize(before, None);
                        column.push(Some(rounded(value)));
                    }
                }
            }
        }
        system.ranks = ranks.into_values().collect();
        Some(system)
    }
}
