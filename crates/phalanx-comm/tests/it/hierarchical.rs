//! Collectives over a grid of hosts and ranks, bit for bit: the chains against
//! the serial fold, rails against the fold of the hosts' folds; and how often data
//! goes from host to host.

use half::bf16;
use phalanx_comm::plan::{Collective, Hosts, Method};
use phalanx_comm::{
    Algorithm, Call, DType, ErrorKind, GroupOptions, InitOptions, ProcessGroup, ReduceOp, Rules,
};

use crate::common::{
    Over, PATIENCE, RING_BYTES, SEGMENT_BYTES, Value, assert_same_bits, formed, groups, on_each,
    serial_fold, values,
};

const GRIDS: [&[usize]; 6] = [&[2, 2], &[2, 4], &[3, 3], &[2, 1, 3], &[1, 3], &[1, 1, 1]];

fn on_hosts(sizes: &[usize], rules: &str) -> Vec<ProcessGroup> {
    ProcessGroup::threads(
        sizes.iter().sum(),
        GroupOptions {
            op_timeout: PATIENCE,
            first_op_timeout: PATIENCE,
            segment_bytes: SEGMENT_BYTES,
            ring_bytes: Some(RING_BYTES),
            rules: rules.parse().unwrap(),
            ranks_per_host: sizes.to_vec(),
            ..GroupOptions::default()
        },
    )
}

/// Left fold from `from` on, rounded at the end, scaled by the inverse of
/// `mean_of` if given.
fn fold<T: Value>(op: ReduceOp, inputs: &[&Vec<T>], mean_of: Option<usize>) -> Vec<T> {
    (0..inputs[0].len())
        .map(|i| {
            let mut wide = inputs[0][i].widen();
            for input in &inputs[1..] {
                wide = T::combine(op, wide, input[i].widen());
            }
            if let (ReduceOp::Mean, Some(world)) = (op, mean_of) {
                wide = T::scale(wide, world);
            }
            T::narrow(wide)
        })
        .collect()
}

/// The fold over hosts of the folds over their ranks.
fn rails_fold<T: Value>(op: ReduceOp, hosts: &Hosts, inputs: &[Vec<T>]) -> Vec<T> {
    let partials: Vec<Vec<T>> = (0..hosts.count())
        .map(|host| {
            fold(
                op,
                &inputs[hosts.ranks(host)].iter().collect::<Vec<_>>(),
                None,
            )
        })
        .collect();
    fold(op, &partials.iter().collect::<Vec<_>>(), Some(inputs.len()))
}

fn check<T: Value>(sizes: &[usize], counts: &[usize], chain_is_canonical: bool) {
    let hosts = Hosts::of_sizes(sizes);
    let world = hosts.world();
    let ops: Vec<ReduceOp> = ReduceOp::ALL
        .into_iter()
        .filter(|op| op.supports(T::DTYPE))
        .collect();
    for &count in counts {
        for &op in &ops {
            let inputs: Vec<Vec<T>> = (0..world).map(|r| values(r, count)).collect();
            let (canonical, rails) = (serial_fold(op, &inputs), rails_fold(op, &hosts, &inputs));
            let results = on_each(on_hosts(sizes, ""), |group| {
                [Algorithm::Chain, Algorithm::Hierarchical, Algorithm::Auto].map(|algorithm| {
                    let mut data = inputs[group.rank()].clone();
                    let call = Call {
                        algorithm,
                        ..Call::default()
                    };
                    group.with_call(call).all_reduce(&mut data, op).unwrap();
                    data
                })
            });
            for (rank, [chain, hierarchical, auto]) in results.iter().enumerate() {
                let named = |what| format!("{what} {op} of {count} on rank {rank} of {sizes:?}");
                if chain_is_canonical {
                    assert_same_bits(chain, &canonical, || named("chain"));
                }
                assert_same_bits(chain, &results[0][0], || named("chain, all ranks,"));
                assert_same_bits(hierarchical, &rails, || named("rails"));
                assert_same_bits(auto, &canonical, || named("auto"));
            }
        }
    }
}

#[test]
fn the_chain_is_canonical_and_rails_fold_by_hosts() {
    for sizes in GRIDS {
        check::<f32>(sizes, &[0, 1, 5, 10007], true);
        check::<f64>(sizes, &[1000], true);
        check::<i32>(sizes, &[1000], true);
        check::<u8>(sizes, &[1000], true);
        check::<bf16>(sizes, &[1000], false);
    }
}

#[test]
fn long_data_is_pipelined_over_hosts() {
    for sizes in [&[2usize, 2][..], &[2, 1, 3]] {
        check::<f32>(sizes, &[400_003], true);
    }
}

#[test]
fn the_default_chains_large_data_where_hosts_have_several_ranks() {
    let group = on_hosts(&[2, 2, 2], "").remove(0);
    let choose = |bytes| {
        group
            .selector()
            .choose(Collective::AllReduce, bytes, DType::F32)
    };
    assert_eq!(choose(25 << 20), Method::AllReduceChain);
    assert_eq!(choose(4), Method::AllReduceOneRound);
}

#[test]
fn rules_choose_by_size_and_differing_ones_are_named() {
    on_each(on_hosts(&[3], "all_reduce=ring:1k-"), |group| {
        let talked_to = |count: usize| {
            let mut data = vec![1f32; count];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|x| *x == 3.0));
            group.bytes_sent_to().iter().filter(|n| **n > 0).count()
        };
        // Small data is not the rule's; a ring of three only sends to the next.
        assert_eq!(talked_to(16), 0);
        assert_eq!(talked_to(256), 1);
    });
    // Two ranks of one group that were configured differently.
    let two = formed(Over::Tcp, 2, |rank, options| InitOptions {
        rules: ["", "all_reduce=direct"][rank].parse::<Rules>().unwrap(),
        ..options
    });
    let errors = on_each(two, |group| {
        group.all_reduce(&mut [1f32; 8], ReduceOp::Sum).unwrap_err()
    });
    assert!(
        errors.iter().any(|e| e.kind() == ErrorKind::Desync
            && e.to_string().contains("rank 0 called")
            && e.to_string().contains("by one-round")
            && e.to_string().contains("by direct")),
        "{errors:?}"
    );
}

#[test]
fn the_wire_is_measured_alike_on_all_ranks_and_leaves_no_trace() {
    let three = formed(Over::Tcp, 3, |_, options| InitOptions {
        probe: true,
        ..options
    });
    let costs = on_each(three, |group| {
        assert_eq!(group.bytes_sent_to(), [0, 0, 0]);
        let costs = *group.selector().costs();
        group.shutdown().unwrap();
        costs
    });
    assert_eq!(costs[0], costs[1]);
    assert_eq!(costs[0], costs[2]);
    assert!(costs[0].wire_latency_s > 1e-6 && costs[0].wire_latency_s < 10.0);
    assert!(costs[0].wire_bytes_per_s > 1e4, "{costs:?}");
    // Nothing between hosts, nothing measured.
    let one = groups(Over::Shm, 2);
    assert_eq!(*one[0].selector().costs(), phalanx_comm::Costs::default());
}

/// Bytes that the ranks of each host sent to ranks of each other host.
fn between_hosts(hosts: &Hosts, sent: &[Vec<u64>]) -> Vec<Vec<u64>> {
    let mut between = vec![vec![0; hosts.count()]; hosts.count()];
    for (from, sent) in sent.iter().enumerate() {
        for (to, bytes) in sent.iter().enumerate() {
            between[hosts.host_of(from)][hosts.host_of(to)] += bytes;
        }
    }
    for (host, row) in between.iter_mut().enumerate() {
        row[host] = 0;
    }
    between
}

#[test]
fn a_broadcast_reaches_every_host_once() {
    for sizes in GRIDS.into_iter().chain([&[2usize, 2, 2, 2, 2][..]]) {
        let hosts = Hosts::of_sizes(sizes);
        let world = hosts.world();
        // Nothing, less than a line, a tree of hosts, a chain in segments.
        for count in [0usize, 3, 5000, 300_007] {
            for root in [0, world / 2, world - 1] {
                let want: Vec<f32> = values(root, count);
                let sent = on_each(on_hosts(sizes, "broadcast=hosts"), |group| {
                    let mut data: Vec<f32> = values(group.rank(), count);
                    group.broadcast(&mut data, root).unwrap();
                    assert_same_bits(&data, &want, || {
                        format!("{count} from {root} on rank {} of {sizes:?}", group.rank())
                    });
                    group.bytes_sent_to()
                });
                let between = between_hosts(&hosts, &sent);
                for host in 0..hosts.count() {
                    let received: u64 = between.iter().map(|row| row[host]).sum();
                    let whole = if hosts.host_of(root) == host {
                        0
                    } else {
                        count * 4
                    };
                    assert_eq!(received, whole as u64, "host {host} of {sizes:?}");
                    // In a chain no card sends more than it receives.
                    let sends: u64 = between[host].iter().sum();
                    assert!(count < 10_000 || sends <= count as u64 * 4);
                }
            }
        }
    }
}

#[test]
fn an_all_gather_brings_every_part_to_every_host_once() {
    for sizes in GRIDS {
        let hosts = Hosts::of_sizes(sizes);
        let world = hosts.world();
        for count in [0usize, 1, 5000, 70_001] {
            let want: Vec<f32> = (0..world).flat_map(|r| values(r, count)).collect();
            let sent = on_each(on_hosts(sizes, "all_gather=hosts"), |group| {
                let input: Vec<f32> = values(group.rank(), count);
                let mut data = vec![0f32; world * count];
                group.all_gather(&input, &mut data).unwrap();
                assert_same_bits(&data, &want, || {
                    format!("{count} on rank {} of {sizes:?}", group.rank())
                });
                group.bytes_sent_to()
            });
            for (from, row) in between_hosts(&hosts, &sent).iter().enumerate() {
                let parts = (hosts.ranks(from).len() * count * 4) as u64;
                for (to, bytes) in row.iter().enumerate() {
                    let whole = if from == to { 0 } else { parts };
                    assert_eq!(*bytes, whole, "host {from} to {to} of {sizes:?}");
                }
            }
        }
    }
}

/// Over two to four hosts, with as many ranks each and not, up to 16.
const FOLDED: [&[usize]; 8] = [
    &[2, 2],
    &[1, 3],
    &[3, 1],
    &[2, 1, 3],
    &[3, 3, 3],
    &[1, 2, 1, 4],
    &[5, 1, 2, 3],
    &[4, 4, 4, 4],
];

/// What the ranks of each host must have sent to each other host: `along` bytes to
/// the next one, and of the last one to each what `taken` says.
fn along_and_taken(hosts: &Hosts, along: usize, taken: impl Fn(usize) -> usize) -> Vec<Vec<u64>> {
    let last = hosts.count() - 1;
    let bytes = |from: usize, to: usize| {
        let passed = if to == from + 1 { along } else { 0 };
        let result = if from == last && to != last {
            taken(to)
        } else {
            0
        };
        (passed + result) as u64
    };
    let row = |from| (0..=last).map(|to| bytes(from, to)).collect();
    (0..=last).map(row).collect()
}

fn reduces<T: Value>(sizes: &[usize], count: usize, op: ReduceOp) {
    let hosts = Hosts::of_sizes(sizes);
    let world = hosts.world();
    let inputs: Vec<Vec<T>> = (0..world).map(|r| values(r, count)).collect();
    let want = serial_fold(op, &inputs);
    for root in [0, world / 2, world - 1] {
        let sent = on_each(on_hosts(sizes, "reduce=hosts"), |group| {
            let rank = group.rank();
            let mut data = inputs[rank].clone();
            group.reduce(&mut data, op, root).unwrap();
            // The others keep theirs.
            let want = if rank == root { &want } else { &inputs[rank] };
            assert_same_bits(&data, want, || {
                format!("{op} of {count} to {root} on rank {rank} of {sizes:?}")
            });
            group.bytes_sent_to()
        });
        let all = count * size_of::<T>();
        let to_root = |host| if hosts.host_of(root) == host { all } else { 0 };
        let expected = along_and_taken(&hosts, all, to_root);
        assert_eq!(between_hosts(&hosts, &sent), expected, "{sizes:?}");
    }
}

fn reduce_scatters<T: Value>(sizes: &[usize], count: usize, op: ReduceOp) {
    let hosts = Hosts::of_sizes(sizes);
    let world = hosts.world();
    let inputs: Vec<Vec<T>> = (0..world).map(|r| values(r, world * count)).collect();
    let want = serial_fold(op, &inputs);
    let sent = on_each(on_hosts(sizes, "reduce_scatter=hosts"), |group| {
        let rank = group.rank();
        let mut part = values::<T>(rank + 77, count);
        let input = &inputs[rank];
        group.reduce_scatter(input, &mut part, op).unwrap();
        let want = &want[rank * count..(rank + 1) * count];
        assert_same_bits(&part, want, || {
            format!("{op} of {count} on rank {rank} of {sizes:?}")
        });
        group.bytes_sent_to()
    });
    let part = count * size_of::<T>();
    let taken = |host| hosts.ranks(host).len() * part;
    let expected = along_and_taken(&hosts, world * part, taken);
    assert_eq!(between_hosts(&hosts, &sent), expected, "{sizes:?}");
}

#[test]
fn a_reduce_passes_every_host_once_in_rank_order() {
    for sizes in FOLDED {
        for count in [0, 1, 5000] {
            reduces::<f32>(sizes, count, ReduceOp::Sum);
        }
        reduces::<f32>(sizes, 1003, ReduceOp::Mean);
        reduces::<f64>(sizes, 1003, ReduceOp::Sum);
        reduces::<i32>(sizes, 1003, ReduceOp::Max);
    }
    // In many segments.
    reduces::<f32>(&[2, 1, 3], 400_003, ReduceOp::Sum);
}

#[test]
fn a_reduce_scatter_passes_every_host_once_in_rank_order() {
    for sizes in FOLDED {
        for count in [0, 1, 1000] {
            reduce_scatters::<f32>(sizes, count, ReduceOp::Sum);
        }
        reduce_scatters::<f32>(sizes, 333, ReduceOp::Mean);
        reduce_scatters::<f64>(sizes, 333, ReduceOp::Sum);
        reduce_scatters::<i32>(sizes, 333, ReduceOp::Max);
    }
    reduce_scatters::<f32>(&[2, 1, 3], 70_001, ReduceOp::Sum);
}
