//! All-reduce beyond the grid: long data, numbers that are none, and what the
//! ring sends where.

use phalanx_comm::{Algorithm, Call, ReduceOp};

use crate::common::{EVERYWHERE, Over, assert_same_bits, groups, on_each, serial_fold, values};

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
                    .with_call(call)
                    .all_reduce(&mut data, ReduceOp::Mean)
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
                    .with_call(call)
                    .all_reduce(&mut data, ReduceOp::Sum)
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
