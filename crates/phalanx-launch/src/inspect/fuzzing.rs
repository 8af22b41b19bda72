//! See `fuzzing.rs` of the crate.

use phalanx_comm::recorder::{Dump, Failure, Phase, Position};
use serde_json::json;

use super::analysis;

/// One or several dumps, as people hand them over: cut off, of several jobs,
/// made up. Between two there is a zero byte.
pub fn dumps(data: &[u8]) {
    let parts = data.split(|byte| *byte == 0).take(8);
    let mut dumps: Vec<Dump> = Vec::new();
    for (dump, _) in parts.filter_map(|part| Dump::from_json(part).ok()) {
        // As `find` does: one a rank, in rank order.
        if dumps.iter().all(|known| known.rank != dump.rank) {
            dumps.push(dump);
        }
    }
    dumps.sort_by_key(|dump| dump.rank);
    for dump in &dumps {
        let _ = analysis::last_known(dump);
    }
    // A world as large as a dump may claim takes a list of as many numbers.
    if dumps.is_empty() || dumps.iter().any(|dump| dump.world > 1 << 12) {
        return;
    }
    let story = analysis::diagnose(&dumps);
    let text = super::render(&story, &dumps);
    assert!(text.starts_with(&story.sentence));
    // It goes to a terminal.
    assert!(
        !text.contains(|c: char| c.is_control() && c != '\n'),
        "{text:?}"
    );
    assert!(serde_json::to_string(&story).is_ok());
}

/// Seeds of [`dumps`].
pub fn dumps_seeds() -> Vec<Vec<u8>> {
    let entry = |seq: u64, state: &str| {
        json!({
            "n": seq, "seq": seq, "epoch": 0, "group": 0, "op": "all_reduce", "dtype": "f32", "reduce": "sum",
            "count": 100, "method": "direct", "root": 0, "target": 0, "transport": "shm+tcp", "label": 0,
            "state": state, "queued_ns": 1000 * seq, "started_ns": 1000 * seq + 1, "done_ns": 1000 * seq + 9,
            "waiting_ns": 3, "folding_ns": 1, "moving_ns": 4, "awaited": [2], "slowest": 2
        })
    };
    let dump = |rank: usize, newest: &str| {
        let mut dump = json!({
            "format": Dump::FORMAT, "rank": rank, "world": 3, "epoch": 0, "host": "node-a", "pid": 100 + rank,
            "taken_ns": 900_000, "taken_unix_ns": 2_000_000, "recorded": 812,
            "labels": ["bucket 4 of 7: layer3.0.conv1.weight"]
        });
        dump["phase"] = json!(Phase {
            name: "loading data".into(),
            for_ms: 58_000
        });
        dump["position"] = json!(Position { epoch: 3, step: 7 });
        dump["failure"] = json!(Failure::PeerLost);
        dump["reason"] = json!("rank 2 is gone: its connection was closed");
        dump["ended"] = json!("was killed by SIGKILL");
        dump["entries"] = json!([entry(812, newest), entry(811, "done")]);
        dump.to_string().into_bytes()
    };
    let elastic = |rank: usize, extra: serde_json::Value| {
        let mut dump: serde_json::Value =
            serde_json::from_slice(&dump(rank, "done")).unwrap_or_default();
        let extra = extra.as_object().into_iter().flatten();
        extra.for_each(|(name, value)| dump[name] = value.clone());
        dump.to_string().into_bytes()
    };
    let changed = [
        elastic(0, json!({"members": [0, 3], "formed_unix_ns": 1_900_000})),
        elastic(1, json!({"is_lost": true, "job": 7})),
        elastic(
            3,
            json!({"members": [0, 3], "joined": 2, "joined_unix_ns": 1_800_000, "instead_of": 1}),
        ),
    ]
    .join(&0);
    let together = [dump(0, "running"), dump(1, "aborted"), dump(2, "queued")].join(&0);
    let mut cut = dump(0, "running");
    cut.truncate(cut.len() - 40);
    vec![
        together,
        cut,
        dump(1, "done"),
        changed,
        b"{\"format\": 7}".to_vec(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_dumps() {
        let seeds = dumps_seeds();
        let of_seed = |seed: &[u8]| {
            let parts = seed.split(|byte| *byte == 0);
            parts.filter(|part| Dump::from_json(part).is_ok()).count()
        };
        assert_eq!((of_seed(&seeds[0]), of_seed(&seeds[2])), (3, 1));
    }
}
