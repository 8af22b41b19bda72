//! What `phalanx plan` says: the plan of each operation and size with its
//! predicted time, and how much of a bucket's time does not depend on its size.

use phalanx_comm::plan::{Collective, Method};
use phalanx_comm::{DType, Selector};
use serde_json::{Value, json};

use crate::format::{self, plural};
use crate::units::{self, ByteSize};

/// Operations of the table.
const OPERATIONS: [Collective; 6] = [
    Collective::AllReduce,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllToAll,
];

/// Bucket sizes that are compared, in KiB.
const BUCKETS_KIB: [usize; 8] = [
    256,
    512,
    1 << 10,
    2 << 10,
    4 << 10,
    8 << 10,
    16 << 10,
    32 << 10,
];

/// A bucket is large enough when this much of its time does not depend on
/// its size (docs/design/collectives.md §7).
const FIXED_SHARE: f64 = 0.03;

/// Bytes per rank of the plan of an operation that `phalanx bench` would
/// call one of `bytes`.
fn per_rank(collective: Collective, bytes: usize, world: usize) -> usize {
    match collective {
        Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => {
            bytes.div_ceil(world.max(1))
        }
        _ => bytes,
    }
}

/// A row of the selection table.
struct Row {
    collective: Collective,
    bytes: usize,
    chosen: Method,
    seconds: f64,
    /// What it was chosen from, with predictions.
    others: Vec<(Method, f64)>,
}

fn rows(selector: &Selector, sizes: &[ByteSize]) -> Vec<Row> {
    let mut rows = Vec::new();
    for collective in OPERATIONS {
        for size in sizes {
            let bytes = per_rank(collective, size.0, selector.hosts().world());
            let chosen = selector.choose(collective, bytes, DType::F32);
            let others = selector
                .candidates(collective, bytes, DType::F32)
                .filter(|method| *method != chosen)
                .map(|method| (method, selector.predict(method, bytes)))
                .collect();
            rows.push(Row {
                collective,
                bytes: size.0,
                chosen,
                seconds: selector.predict(chosen, bytes),
                others,
            });
        }
    }
    rows
}

/// Predicted time of an all-reduce of a bucket, and how much of it is fixed.
fn buckets(selector: &Selector) -> Vec<(usize, f64, f64)> {
    BUCKETS_KIB
        .iter()
        .map(|kib| {
            let bytes = kib << 10;
            let method = selector.choose(Collective::AllReduce, bytes, DType::F32);
            let seconds = selector.predict(method, bytes);
            let fixed = selector.predict(method, 0);
            (
                bytes,
                seconds,
                if seconds > 0.0 { fixed / seconds } else { 0.0 },
            )
        })
        .collect()
}

/// The smallest bucket with little fixed cost, otherwise the largest.
fn advised(buckets: &[(usize, f64, f64)]) -> usize {
    let enough = buckets.iter().find(|(_, _, fixed)| *fixed <= FIXED_SHARE);
    enough.or(buckets.last()).map_or(0, |(bytes, _, _)| *bytes)
}

pub(super) fn as_json(selector: &Selector, sizes: &[ByteSize], measured: bool) -> Value {
    let hosts = selector.hosts();
    let costs = selector.costs();
    let buckets = buckets(selector);
    json!({
        "world": hosts.world(),
        "ranks_per_host": (0..hosts.count()).map(|h| hosts.ranks(h).len()).collect::<Vec<_>>(),
        "measured": measured,
        "in_shared_memory": hosts.count() <= 1,
        "costs": {
            "sync_us": costs.sync_s * 1e6,
            "core_gb_s": costs.core_bytes_per_s / 1e9,
            "wire_latency_us": costs.wire_latency_s * 1e6,
            "wire_message_us": costs.wire_message_s * 1e6,
            "wire_gb_s": costs.wire_bytes_per_s / 1e9,
        },
        "rules": selector.rules().to_string(),
        "selection": rows(selector, sizes).iter().map(|row| json!({
            "op": row.collective.name(),
            "bytes": row.bytes,
            "plan": row.chosen.name(),
            "predicted_us": row.seconds * 1e6,
            "others": row.others.iter().map(|(method, seconds)| json!({
                "plan": method.name(), "predicted_us": seconds * 1e6,
            })).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
        "buckets": buckets.iter().map(|(bytes, seconds, fixed)| json!({
            "bytes": bytes, "predicted_us": seconds * 1e6, "fixed_share": fixed,
        })).collect::<Vec<_>>(),
        "advised_bucket_bytes": advised(&buckets),
    })
}

pub(super) fn as_text(selector: &Selector, sizes: &[ByteSize], measured: Option<&str>) -> String {
    let hosts = selector.hosts();
    let most = hosts.most_ranks();
    let largest = if hosts.count() > 1 && hosts.count() * most != hosts.world() {
        format!(", {most} on the largest")
    } else {
        String::new()
    };
    let mut lines = vec![format!(
        "ranks    {} on {}{largest}",
        hosts.world(),
        plural(hosts.count(), "host"),
    )];
    if hosts.world() == 1 {
        lines.push(
            "plan     none: one rank sends nothing; say how many there will be with --nproc-per-node and --nnodes"
                .into(),
        );
        return lines.join("\n");
    }
    lines.extend(cost_lines(selector, measured));
    if !selector.rules().is_empty() {
        lines.push(format!("rules    {}", selector.rules()));
    }
    lines.push(format!(
        "{:>15} {:>10} {:>18} {:>12}   others",
        "operation", "bytes", "plan", "predicted"
    ));
    for row in rows(selector, sizes) {
        let others = row.others.iter();
        let others: Vec<String> = others
            .map(|(method, seconds)| format!("{} {}", method.name(), time(*seconds)))
            .collect();
        let line = format!(
            "{:>15} {:>10} {:>18} {:>12}   {}",
            row.collective.name(),
            format::bytes(row.bytes),
            row.chosen.name(),
            time(row.seconds),
            others.join(", ")
        );
        lines.push(line.trim_end().to_owned());
    }
    let buckets = buckets(selector);
    lines.push(format!(
        "buckets  {} is the smallest of which at most {:.0} % is fixed cost",
        format::bytes(advised(&buckets)),
        FIXED_SHARE * 100.0
    ));
    for (bytes, seconds, fixed) in buckets {
        lines.push(format!(
            "{:>15} {:>12} {:>6.1} % fixed {:>8.2} GB/s",
            format::bytes(bytes),
            time(seconds),
            fixed * 100.0,
            bytes as f64 / seconds.max(1e-12) / 1e9
        ));
    }
    lines.join("\n")
}

/// How ranks wait, and what a message and a step cost.
fn cost_lines(selector: &Selector, measured: Option<&str>) -> Vec<String> {
    let (hosts, costs) = (selector.hosts(), selector.costs());
    let most = hosts.most_ranks();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut lines = vec![match measured {
        Some(group) => format!("waiting  {group}"),
        None => {
            let how = match most <= cores {
                true => "they poll before they sleep",
                false => "more ranks than cores, so they yield, then sleep",
            };
            let (ranks, cores) = (plural(most, "rank"), plural(cores, "core"));
            format!("waiting  {ranks} on {cores} as here: {how}")
        }
    }];
    let inside = format!(
        "{} a synchronisation, {:.1} GB/s a core",
        time(costs.sync_s),
        costs.core_bytes_per_s / 1e9
    );
    let wire = format!(
        "{} a message between hosts, {:.2} GB/s a network card",
        time(costs.wire_latency_s),
        costs.wire_bytes_per_s / 1e9
    );
    let how = measured.map_or("given", |_| "measured");
    lines.push(match hosts.count() {
        0 | 1 => format!("costs    {inside} (assumed)"),
        _ => format!("costs    {wire} ({how}); {inside} (assumed)"),
    });
    if hosts.count() <= 1 {
        lines.push(
            "memory   ranks of one host work directly in the memory they share, faster than any plan: see phalanx bench.\n         \
             Below is what --transport tcp would do"
                .into(),
        );
    }
    lines
}

fn time(seconds: f64) -> String {
    units::time(seconds * 1e6)
}

#[cfg(test)]
mod tests {
    use phalanx_comm::plan::Hosts;
    use phalanx_comm::{Costs, Rules};

    use super::*;

    #[test]
    fn one_rank_has_no_table() {
        let selector = Selector::new(Hosts::of_sizes(&[1]), Costs::default(), Rules::default());
        let text = as_text(&selector, &[ByteSize(4)], None);
        assert!(text.contains("one rank sends nothing"), "{text}");
        assert!(!text.contains("0.0 µs"), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }

    #[test]
    fn the_table_names_plan_time_and_bucket() {
        let selector = Selector::new(Hosts::of_sizes(&[4; 4]), Costs::default(), Rules::default());
        let sizes = [ByteSize(4), ByteSize(25 << 20)];
        let text = as_text(&selector, &sizes, None);
        assert!(text.starts_with("ranks    16 on 4 hosts\n"), "{text}");
        let row = text
            .lines()
            .find(|l| l.contains("all_reduce") && l.contains("25 MiB"));
        assert!(
            row.is_some_and(|l| l.contains("chain") && l.contains("direct")),
            "{text}"
        );
        let json = as_json(&selector, &sizes, false);
        assert_eq!(json["selection"][1]["plan"], "chain");
        assert_eq!(json["ranks_per_host"], json!([4, 4, 4, 4]));
        assert!(
            json["advised_bucket_bytes"]
                .as_u64()
                .is_some_and(|b| b >= 1 << 20)
        );
    }
}
