//! The result grid of all-reduce: transport x algorithm x world x type x op x
//! count, every rank compared bit for bit with a serial fold.

use half::{bf16, f16};
use phalanx_comm::plan::{Method, Spec};
use phalanx_comm::{Algorithm, Call, ProcessGroup, ReduceOp};

use crate::common::{
    EVERYWHERE, Over, Value, assert_same_bits, groups, on_each, serial_fold, values,
};

fn counts(world: usize) -> Vec<usize> {
    let mut counts = vec![0, 1, world - 1, world, world + 1, 1000, 10007];
    counts.dedup();
    counts
}

/// What the ring computes: chunk `c` is folded from rank `c` on round the
/// ring, and rounded at every hop.
fn ring_fold<T: Value>(op: ReduceOp, inputs: &[Vec<T>]) -> Vec<T> {
    let (world, count) = (inputs.len(), inputs[0].len());
    let spec = Spec {
        method: Method::AllReduceRing,
        world,
        count,
        elem_bytes: size_of::<T>(),
        root: 0,
        target: 0,
    };
    let mut result = inputs[0].clone();
    for chunk in (0..world).filter(|_| world > 1) {
        for i in spec.chunks().range(chunk) {
            let mut a = inputs[chunk][i];
            for hop in 1..world {
                let x = inputs[(chunk + hop) % world][i];
                let mut wide = T::combine(op, a.widen(), x.widen());
                if op == ReduceOp::Mean && hop == world - 1 {
                    wide = T::scale(wide, world);
                }
                a = T::narrow(wide);
            }
            result[i] = a;
        }
    }
    result
}

/// Inputs and results of one type, for all ops and counts of one world.
struct Cases<T> {
    all: Vec<Case<T>>,
}

struct Case<T> {
    op: ReduceOp,
    /// By rank.
    inputs: Vec<Vec<T>>,
    canonical: Vec<T>,
    ring: Vec<T>,
}

impl<T: Value> Cases<T> {
    fn new(world: usize) -> Self {
        let mut all = Vec::new();
        for count in counts(world) {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE)) {
                let inputs: Vec<Vec<T>> = (0..world).map(|r| values(r, count)).collect();
                let (canonical, ring) = (serial_fold(op, &inputs), ring_fold(op, &inputs));
                all.push(Case {
                    op,
                    inputs,
                    canonical,
                    ring,
                });
            }
        }
        Cases { all }
    }

    fn run(&self, group: &ProcessGroup, over: Over) {
        for case in &self.all {
            let Case {
                op,
                inputs,
                canonical,
                ring,
            } = case;
            for algorithm in [
                Algorithm::Direct,
                Algorithm::OneRound,
                Algorithm::Ring,
                Algorithm::Auto,
            ] {
                let mut data = inputs[group.rank()].clone();
                let call = Call {
                    algorithm,
                    ..Call::default()
                };
                group.all_reduce_with(&mut data, *op, &call).unwrap();
                let want = if algorithm == Algorithm::Ring {
                    ring
                } else {
                    canonical
                };
                assert_same_bits(&data, want, || {
                    format!(
                        "{over:?} {algorithm} {} {op} of {} on rank {} of {}",
                        T::DTYPE,
                        data.len(),
                        group.rank(),
                        group.world_size()
                    )
                });
            }
        }
    }
}

fn grid(over: Over) {
    for world in 1..=8 {
        let (f32s, f64s) = (Cases::<f32>::new(world), Cases::<f64>::new(world));
        let (f16s, bf16s) = (Cases::<f16>::new(world), Cases::<bf16>::new(world));
        let (i32s, i64s) = (Cases::<i32>::new(world), Cases::<i64>::new(world));
        let (i8s, u8s) = (Cases::<i8>::new(world), Cases::<u8>::new(world));
        on_each(groups(over, world), |group| {
            f32s.run(&group, over);
            f64s.run(&group, over);
            f16s.run(&group, over);
            bf16s.run(&group, over);
            i32s.run(&group, over);
            i64s.run(&group, over);
            i8s.run(&group, over);
            u8s.run(&group, over);
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn canonical_equals_serial_fold_over_threads() {
    grid(Over::Thread);
}

#[test]
fn canonical_equals_serial_fold_over_shm() {
    grid(Over::Shm);
}

#[test]
fn canonical_equals_serial_fold_over_tcp() {
    grid(Over::Tcp);
}

#[test]
fn large_worlds_equal_the_serial_fold() {
    for world in [13, 16] {
        let inputs: Vec<Vec<f32>> = (0..world).map(|r| values(r, 10007)).collect();
        let want = serial_fold(ReduceOp::Mean, &inputs);
        on_each(groups(Over::Thread, world), |group| {
            let mut data = inputs[group.rank()].clone();
            group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
            assert_same_bits(&data, &want, || format!("rank {} of {world}", group.rank()));
        });
    }
}

#[test]
fn long_data_equals_the_serial_fold() {
    // Three segments of 256 KiB a chunk, the last one short.
    const WORLD: usize = 3;
    let count = WORLD * (2 * (64 << 10) + 1000) + 5;
    let inputs: Vec<Vec<f32>> = (0..WORLD).map(|r| values(r, count)).collect();
    let want = serial_fold(ReduceOp::Mean, &inputs);
    for over in EVERYWHERE {
        on_each(groups(over, WORLD), |group| {
            let mut data = inputs[group.rank()].clone();
            group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
            assert_same_bits(&data, &want, || format!("{over:?}, rank {}", group.rank()));
        });
    }
}

#[test]
fn all_ranks_bitwise_equal() {
    // Also where numbers are not numbers: every rank holds the same bits.
    for over in EVERYWHERE {
        for algorithm in [Algorithm::Direct, Algorithm::OneRound, Algorithm::Ring] {
            let results = on_each(groups(over, 3), |group| {
                let mut data: Vec<f32> = values(group.rank(), 3000);
                data[7] = f32::NAN;
                data[1000 + group.rank()] = f32::INFINITY;
                data[1500] = if group.rank() == 1 {
                    f32::NEG_INFINITY
                } else {
                    f32::INFINITY
                };
                let call = Call {
                    algorithm,
                    ..Call::default()
                };
                group
                    .all_reduce_with(&mut data, ReduceOp::Mean, &call)
                    .unwrap();
                data.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            assert!(f32::from_bits(results[0][7]).is_nan());
            assert!(f32::from_bits(results[0][1500]).is_nan());
            assert!(f32::from_bits(results[0][1001]).is_infinite());
            assert!(
                results.iter().all(|r| *r == results[0]),
                "{over:?} {algorithm}"
            );
        }
    }
}

#[test]
fn nan_on_any_rank_wins_min_and_max() {
    for at in 0..3 {
        on_each(groups(Over::Thread, 3), |group| {
            for op in [ReduceOp::Min, ReduceOp::Max] {
                let mut data = vec![group.rank() as f32; 100];
                if group.rank() == at {
                    data[50] = f32::NAN;
                }
                group.all_reduce(&mut data, op).unwrap();
                assert!(data[50].is_nan());
                assert!(!data[49].is_nan());
            }
        });
    }
}

#[test]
fn ring_talks_to_neighbours_only() {
    for over in EVERYWHERE {
        for world in [2, 3, 5, 8] {
            on_each(groups(over, world), |group| {
                let mut data = vec![1f32; 10_000];
                let before = group.bytes_sent_to();
                let call = Call {
                    algorithm: Algorithm::Ring,
                    ..Call::default()
                };
                group
                    .all_reduce_with(&mut data, ReduceOp::Sum, &call)
                    .unwrap();
                let sent: Vec<u64> = group
                    .bytes_sent_to()
                    .iter()
                    .zip(before)
                    .map(|(a, b)| a - b)
                    .collect();
                let next = (group.rank() + 1) % world;
                for (peer, bytes) in sent.iter().enumerate() {
                    if peer == next {
                        let ideal = 2.0 * 40_000.0 * (world - 1) as f64 / world as f64;
                        assert!(
                            (*bytes as f64 / ideal - 1.0).abs() < 0.02,
                            "{bytes} {ideal}"
                        );
                    } else {
                        assert_eq!(*bytes, 0, "{over:?}: rank {} sent to {peer}", group.rank());
                    }
                }
            });
        }
    }
}
