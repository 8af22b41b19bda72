//! Predicts the cost of a plan, by formulas (docs/design/collectives.md §1, §4, §5) and constants.
//!
//! Symbols: n bytes per rank, P ranks, H hosts, L ranks on the largest host.
//! Wire and memory work of the same plan overlap (`plan::order`), so of the
//! two the longer counts; latencies are paid one after another.

use crate::plan::order::WINDOW;
use serde::{Deserialize, Serialize};

use crate::plan::{
    BROADCAST_TREE_MAX_BYTES as TREE_MAX_BYTES, Hosts, Method, direct_segment_bytes,
};

/// The constants of the formulas. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// One synchronisation of ranks on one host, s.
    pub sync_s: f64,
    /// Bytes that one core moves in a second.
    pub core_bytes_per_s: f64,
    /// A message to another host, without its bytes, s.
    pub wire_latency_s: f64,
    /// Cost to the sender of each further message of a round, s.
    pub wire_message_s: f64,
    /// Bytes that a host's network card moves in a second, each way.
    pub wire_bytes_per_s: f64,
}

impl Default for Costs {
    /// The design's constants for one host (5 µs, 10 GB/s), and a 10 Gbit/s wire
    /// with 30 µs.
    fn default() -> Self {
        Costs {
            sync_s: 5e-6,
            core_bytes_per_s: 10e9,
            wire_latency_s: 30e-6,
            wire_message_s: 4e-6,
            wire_bytes_per_s: 1.25e9,
        }
    }
}

/// Bytes of a segment of the hierarchical plans at most, per holder.
const SEGMENT_BYTES: f64 = (256 << 10) as f64;

impl Costs {
    /// Seconds that `method` takes for `bytes` per rank.
    pub fn predict(&self, method: Method, bytes: usize, hosts: &Hosts) -> f64 {
        let n = bytes as f64;
        let world = hosts.world();
        if world <= 1 {
            return 0.0;
        }
        let p = world as f64;
        let h = hosts.count() as f64;
        let l = hosts.most_ranks() as f64;
        let far = hosts.count() > 1;
        let sync = if l > 1.0 || !far { self.sync_s } else { 0.0 };
        let wire = if far { self.wire_latency_s } else { 0.0 };
        // A round in which all ranks exchange data with all others.
        let all = sync.max(wire) + (p - l - 1.0).max(0.0) * self.wire_message_s;
        let one = sync.max(wire);
        // Seconds for bytes through a host's network card, and through a core.
        let card = |bytes: f64| {
            if far {
                bytes / self.wire_bytes_per_s
            } else {
                0.0
            }
        };
        let core = |bytes: f64| bytes / self.core_bytes_per_s;
        let far_share = (p - l) / p;
        match method {
            Method::AllReduceOneRound => all + card(l * (p - l) * n) + core((p + 3.0) * n),
            Method::AllReduceDirect => {
                2.0 * all + card(2.0 * l * far_share * n).max(core((5.0 + 1.0 / p) * n))
            }
            Method::AllReduceRing => {
                let moved = 2.0 * (p - 1.0) / p * n;
                2.0 * (p - 1.0) * one + card(moved).max(core(5.0 * n))
            }
            Method::AllReduceRails => {
                let inside = if l > 1.0 { 2.0 * sync } else { 0.0 };
                let across = if far { 2.0 * wire } else { 0.0 };
                let moved = card(2.0 * (h - 1.0) / h * n);
                inside + across + moved.max(core((5.0 + 1.0 / l) * n))
            }
            Method::AllReduceChain => {
                let inside = if l > 1.0 { 2.0 * sync } else { 0.0 };
                let hops = 2.0 * (h - 1.0);
                let segment = card((n / 8.0).min(l * SEGMENT_BYTES));
                let moved = card(if h > 2.0 { 2.0 * n } else { (h - 1.0) * n });
                inside + hops * (wire + segment) + moved.max(core((5.0 + 1.0 / l) * n))
            }
            Method::BroadcastTree => {
                let rounds = p.log2().ceil();
                rounds * (one + card(n) + core(2.0 * n))
            }
            Method::BroadcastHosts => {
                let inside = if l > 1.0 { 2.0 * sync } else { 0.0 };
                // Small data down a tree, whose root's card sends it as often as it is
                // deep; large data along a chain, in segments.
                let (hops, moved) = if bytes <= TREE_MAX_BYTES {
                    (h.log2().ceil(), card(h.log2().ceil() * n))
                } else {
                    let segment = card((n / 8.0).min(l * SEGMENT_BYTES));
                    (h - 1.0, card(n) + (h - 2.0).max(0.0) * segment)
                };
                inside + hops * wire + moved.max(core(4.0 * n))
            }
            Method::AllGatherHosts => {
                let inside = if l > 1.0 { 2.0 * sync } else { 0.0 };
                let messages = (h - 2.0).max(0.0) * self.wire_message_s;
                let moved = card(l * (h - 1.0) * n);
                inside + wire + messages + moved.max(core(4.0 * (p - 1.0) * n))
            }
            Method::ReduceHosts => {
                let inside = if l > 1.0 { sync } else { 0.0 };
                // From host to host, and from the last one to the root.
                let segment = card((n / 8.0).min(l * SEGMENT_BYTES));
                let moved = card(if h > 2.0 { 2.0 * n } else { (h - 1.0) * n });
                inside + h * (wire + segment) + moved.max(core((5.0 + 1.0 / l) * n))
            }
            Method::ReduceScatterHosts => {
                let inside = if l > 1.0 { sync } else { 0.0 };
                let all_parts = p * n;
                let segment = card((all_parts / 8.0).min(l * SEGMENT_BYTES));
                // An inner host receives the prefix and its ranks' parts.
                let moved = card(all_parts + if h > 2.0 { l * n } else { 0.0 });
                inside + h * (wire + segment) + moved.max(core((4.0 + 1.0 / l) * all_parts))
            }
            Method::BroadcastScatter => 2.0 * all + card(2.0 * l * n).max(core(4.0 * n)),
            Method::ReduceRoot => all + card((p - l) * n).max(core((p + 2.0) * n)),
            Method::ReduceOwners => 2.0 * all + card(2.0 * l * n).max(core(5.0 * n)),
            Method::AllGather | Method::AllToAll | Method::ReduceScatter => {
                all + card(l * (p - l) * n).max(core(3.0 * (p - 1.0) * n))
            }
            Method::Gather | Method::Scatter => {
                all + card((p - l) * n).max(core(2.0 * (p - 1.0) * n))
            }
            Method::Barrier => p.log2().ceil() * one,
        }
    }

    /// Whether short segments make [`Method::AllReduceDirect`] faster.
    pub(crate) fn prefers_short_segments(&self, bytes: usize, hosts: &Hosts) -> bool {
        // Measured with one rank a host.
        if hosts.count() <= 2 || hosts.most_ranks() > 1 {
            return false;
        }
        let (n, p) = (bytes as f64, hosts.world() as f64);
        let segment = |is_short| direct_segment_bytes(bytes / hosts.world(), is_short) as f64;
        let (long, short) = (segment(false), segment(true));
        // Connections that share a card drift apart, which costs four segments
        // (measured with four hosts at 1 Gbit/s). Short segments make this cheaper, but
        // each segment is one more message to each peer, twice.
        let even = 4.0 * (long - short) / self.wire_bytes_per_s;
        let messages = 2.0 * (p - 1.0) * n / p * (1.0 / short - 1.0 / long);
        // The data in flight at once, a scatter and a gather each, must cover both
        // latencies.
        let windows = n / p / short / (WINDOW as f64 / 2.0);
        messages * self.wire_message_s < even
            && windows * 2.0 * self.wire_latency_s
                < self.predict(Method::AllReduceDirect, bytes, hosts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_crosses_where_the_design_says() {
        // docs/design/collectives.md §1: 28 KiB for 4 ranks, 8 KiB for 8, 4 KiB for 16.
        let costs = Costs::default();
        for (world, kib) in [(4, 28.0), (8, 8.0), (16, 3.5)] {
            let hosts = Hosts::one(world);
            let better = |kib: f64| {
                let bytes = (kib * 1024.0) as usize;
                costs.predict(Method::AllReduceOneRound, bytes, &hosts)
                    <= costs.predict(Method::AllReduceDirect, bytes, &hosts)
            };
            assert!(better(kib * 0.95) && !better(kib * 1.05), "{world} ranks");
        }
    }

    #[test]
    fn the_wire_bounds_large_all_reduces() {
        let costs = Costs {
            core_bytes_per_s: 1e12,
            ..Costs::default()
        };
        let n = 25 << 20;
        let bound = |hosts: f64| 2.0 * (hosts - 1.0) / hosts * n as f64 / costs.wire_bytes_per_s;
        let near = |got: f64, bound: f64| (got / bound - 1.0).abs() < 0.05;
        let flat = Hosts::of_sizes(&[1; 4]);
        assert!(near(
            costs.predict(Method::AllReduceDirect, n, &flat),
            bound(4.0)
        ));
        let grid = Hosts::of_sizes(&[4; 4]);
        assert!(near(
            costs.predict(Method::AllReduceRails, n, &grid),
            bound(4.0)
        ));
        // 31 ms for 25 MiB on 4 hosts at 10 Gbit/s (docs/design/collectives.md §4).
        assert!((bound(4.0) - 0.031).abs() < 0.001);
        // The chain costs H/(H − 1) of that; on two hosts nothing more.
        let chain = costs.predict(Method::AllReduceChain, n, &grid);
        assert!(
            chain > 1.3 * bound(4.0) && chain < 1.5 * bound(4.0),
            "{chain}"
        );
        let pair = Hosts::of_sizes(&[4, 4]);
        let chain = costs.predict(Method::AllReduceChain, n, &pair);
        assert!(chain < 1.15 * bound(2.0), "{chain}");
        // An exchange of all ranks with all others passes the card L times.
        let direct = costs.predict(Method::AllReduceDirect, n, &grid);
        assert!(direct > 3.9 * bound(4.0), "{direct}");
    }
}
