//! Hosts × ranks: which rank handles which elements on every host.
//!
//! On a host with L ranks, local rank `l` is the *holder* of slice `l` of L. If all
//! hosts have the same number of ranks, the holders of a slice form a *rail*. Otherwise
//! slices of different hosts overlap; then the data is split at all borders of all
//! hosts, and each run of elements between two borders has one holder on every host.

use super::{Chunks, Hosts, Spec};
use std::ops::Range;

/// Most and least bytes of a run that are handled at once; see
/// `all_reduce_direct`.
const SEGMENT_MAX_BYTES: usize = 256 << 10;
const SEGMENT_MIN_BYTES: usize = 64 << 10;
/// Segments of a run that is long enough.
const SEGMENTS: usize = 8;

/// A run of elements and its holder on every host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) elems: Range<usize>,
    pub(super) holders: Vec<usize>,
}

/// Runs that are handled at the same time: no rank holds two of them.
pub(super) type Unit = Vec<Run>;

/// The slices of a host's ranks.
pub(super) fn slices(spec: &Spec, hosts: &Hosts, host: usize) -> Chunks {
    Chunks::new(spec.count, hosts.ranks(host).len(), spec.line_elems())
}

/// All units, in the order in which they are handled; the same on all ranks.
pub(super) fn units(spec: &Spec, hosts: &Hosts) -> Vec<Unit> {
    units_within(spec, hosts, std::iter::empty())
}

/// [`units`] none of whose runs crosses one of the `borders`.
pub(super) fn units_within(
    spec: &Spec,
    hosts: &Hosts,
    borders: impl Iterator<Item = usize>,
) -> Vec<Unit> {
    let mut layers: Vec<Unit> = Vec::new();
    for run in runs(spec, hosts, borders) {
        let clashes = |layer: &Unit| {
            layer
                .iter()
                .any(|other| run.holders.iter().any(|h| other.holders.contains(h)))
        };
        match layers.iter_mut().find(|layer| !clashes(layer)) {
            Some(layer) => layer.push(run),
            None => layers.push(vec![run]),
        }
    }
    let longest = layers.iter().flatten().map(|run| run.elems.len()).max();
    let segment = segment_elems(spec, longest.unwrap_or(0));
    let segments = longest.unwrap_or(0).div_ceil(segment);
    let mut units = Vec::new();
    for k in 0..segments {
        for layer in &layers {
            let unit: Unit = layer
                .iter()
                .map(|run| Run {
                    elems: segment_of(&run.elems, k, segment),
                    holders: run.holders.clone(),
                })
                .filter(|run| !run.elems.is_empty())
                .collect();
            if !unit.is_empty() {
                units.push(unit);
            }
        }
    }
    units
}

/// Elements of a segment; no unit has a longer run.
pub(super) fn segment_elems(spec: &Spec, longest: usize) -> usize {
    spec.segment_elems(
        longest.div_ceil(SEGMENTS),
        SEGMENT_MIN_BYTES..=SEGMENT_MAX_BYTES,
    )
}

fn segment_of(range: &Range<usize>, k: usize, segment: usize) -> Range<usize> {
    let start = (range.start + k * segment).min(range.end);
    start..(start + segment).min(range.end)
}

/// The runs between the borders of all hosts' slices, and `more` borders.
fn runs(spec: &Spec, hosts: &Hosts, more: impl Iterator<Item = usize>) -> Vec<Run> {
    let mut borders = vec![0, spec.count];
    borders.extend(more.filter(|border| *border < spec.count));
    for host in 0..hosts.count() {
        let slices = slices(spec, hosts, host);
        borders.extend((0..hosts.ranks(host).len()).map(|l| slices.range(l).end));
    }
    borders.sort_unstable();
    borders.dedup();
    borders
        .windows(2)
        .map(|pair| Run {
            elems: pair[0]..pair[1],
            holders: (0..hosts.count())
                .map(|host| holder(spec, hosts, host, pair[0]))
                .collect(),
        })
        .collect()
}

/// The rank of `host` that holds element `at`.
fn holder(spec: &Spec, hosts: &Hosts, host: usize, at: usize) -> usize {
    let slices = slices(spec, hosts, host);
    let ranks = hosts.ranks(host);
    let local = (0..ranks.len()).find(|l| slices.range(*l).contains(&at));
    ranks.start + local.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::Method;
    use super::super::tests::sent;
    use super::*;

    #[test]
    fn units_tile_the_data_and_nobody_holds_two_runs_at_once() {
        for sizes in [&[2usize, 2][..], &[2, 1, 3], &[4, 4, 4, 4], &[1, 5], &[3]] {
            let hosts = Hosts::of_sizes(sizes);
            for count in [0, 1, 17, 1000, 1 << 20] {
                let spec = Spec {
                    method: Method::AllReduceRails,
                    world: hosts.world(),
                    count,
                    elem_bytes: 4,
                    root: 0,
                    short_segments: false,
                };
                let mut all: Vec<Range<usize>> = Vec::new();
                for unit in units(&spec, &hosts) {
                    let mut holders: Vec<usize> =
                        unit.iter().flat_map(|run| run.holders.clone()).collect();
                    let held = holders.len();
                    holders.sort_unstable();
                    holders.dedup();
                    assert_eq!(holders.len(), held);
                    for run in &unit {
                        for (host, rank) in run.holders.iter().enumerate() {
                            assert_eq!(hosts.host_of(*rank), host);
                            let held = sent::held(&spec, &hosts, *rank);
                            assert!(held.start <= run.elems.start && run.elems.end <= held.end);
                        }
                    }
                    all.extend(unit.into_iter().map(|run| run.elems));
                }
                all.sort_unstable_by_key(|range| range.start);
                let mut at = 0;
                for range in all {
                    assert_eq!(range.start, at);
                    at = range.end;
                }
                assert_eq!(at, count, "{sizes:?}");
            }
        }
    }

    #[test]
    fn equal_hosts_have_one_rail_per_local_rank() {
        let hosts = Hosts::of_sizes(&[4, 4, 4]);
        let spec = Spec {
            method: Method::AllReduceRails,
            world: 12,
            count: 4096,
            elem_bytes: 4,
            root: 0,
            short_segments: false,
        };
        let units = units(&spec, &hosts);
        assert_eq!(units.len(), 1);
        let holders: Vec<Vec<usize>> = units[0].iter().map(|r| r.holders.clone()).collect();
        assert_eq!(holders[1], [1, 5, 9]);
        assert_eq!(holders.len(), 4);
    }
}
