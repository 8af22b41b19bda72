//! Order and life of operations, buckets and handles.

use std::sync::Barrier;
use std::time::Duration;

use phalanx_comm::{Bucket, Call, DType, ErrorKind, ReduceOp};

use crate::common::{EVERYWHERE, Over, groups, on_each};

#[test]
fn several_in_flight_complete_in_order() {
    for over in EVERYWHERE {
        on_each(groups(over, 3), |group| {
            let works: Vec<_> = (0..20usize)
                .map(|i| {
                    let data = Bucket::from_slice(&vec![i as f32; 100 * (20 - i)]);
                    group.all_reduce_async(data, ReduceOp::Sum, Call::default())
                })
                .collect();
            let mut before = None;
            for (i, work) in works.into_iter().enumerate() {
                let (data, times) = work.wait_traced().unwrap();
                assert_eq!(data.len(), 100 * (20 - i));
                assert!(data.iter().all(|x| *x == 3.0 * i as f32));
                assert!(times.issued <= times.started && times.started <= times.finished);
                assert!(
                    before.is_none_or(|before| before <= times.started),
                    "{over:?} {i}"
                );
                before = Some(times.finished);
            }
        });
    }
}

#[test]
fn blocking_calls_queue_behind_asynchronous_ones() {
    on_each(groups(Over::Thread, 2), |group| {
        for round in 0..50 {
            let work = group.broadcast_async(
                Bucket::from_slice(&[if group.rank() == 0 { round } else { -1 }; 700]),
                0,
                Call::default(),
            );
            let mut data = [round * 2];
            group.all_reduce(&mut data, ReduceOp::Max).unwrap();
            assert_eq!(data, [round * 2]);
            assert!(work.is_done());
            assert!(work.wait().unwrap().iter().all(|x| *x == round));
        }
    });
}

#[test]
fn calls_from_several_threads_are_serialised() {
    for over in EVERYWHERE {
        on_each(groups(over, 2), |group| {
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    let group = group.clone();
                    scope.spawn(move || {
                        for _ in 0..30 {
                            // All alike: only then does it not matter which
                            // thread's call meets which.
                            let mut data = vec![1i32; 500];
                            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                            assert!(data.iter().all(|x| *x == 2));
                        }
                    });
                }
            });
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn dropped_work_is_safe() {
    for over in EVERYWHERE {
        on_each(groups(over, 2), |group| {
            for _ in 0..20 {
                let data = Bucket::<f32>::zeroed(3000);
                drop(group.all_reduce_async(data, ReduceOp::Sum, Call::default()));
            }
            let mut data = [1f32];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [2.0]);
            // Also as the last thing before the group is left.
            let data = Bucket::<f32>::zeroed(3000);
            drop(group.all_reduce_async(data, ReduceOp::Sum, Call::default()));
        });
    }
}

#[test]
fn work_outlives_its_group() {
    let works = on_each(groups(Over::Thread, 2), |group| {
        let data = Bucket::from_slice(&[2f32; 5000]);
        group.all_reduce_async(data, ReduceOp::Product, Call::default())
    });
    for work in works {
        assert!(work.wait().unwrap().iter().all(|x| *x == 4.0));
    }
}

#[test]
fn failed_work_that_nobody_waits_for_shows_in_the_next_call() {
    let failed = Barrier::new(2);
    on_each(groups(Over::Thread, 2), |group| {
        if group.rank() == 1 {
            failed.wait();
            return;
        }
        let call = Call {
            timeout: Some(Duration::from_millis(50)),
            ..Call::default()
        };
        drop(group.barrier_async(call));
        let error = group.barrier().unwrap_err();
        failed.wait();
        assert_eq!(error.kind(), ErrorKind::Aborted);
        assert_eq!(error.origin_rank(), Some(0));
        assert!(error.to_string().contains("timed out"), "{error}");
    });
}

#[test]
fn first_operation_has_its_own_deadline() {
    let options = phalanx_comm::GroupOptions {
        first_op_timeout: Duration::from_secs(40),
        op_timeout: Duration::from_millis(100),
        ..phalanx_comm::GroupOptions::default()
    };
    let failed = Barrier::new(2);
    on_each(phalanx_comm::ProcessGroup::threads(2, options), |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        group.barrier().unwrap();
        if group.rank() == 1 {
            failed.wait();
            assert_eq!(group.barrier().unwrap_err().kind(), ErrorKind::Aborted);
        } else {
            let error = group.barrier().unwrap_err();
            failed.wait();
            assert_eq!(error.kind(), ErrorKind::Timeout);
        }
    });
}

#[test]
fn one_rank_alone_needs_nobody() {
    on_each(groups(Over::Thread, 1), |group| {
        let mut data = [3f32, 4.0];
        let ops = ReduceOp::ALL.into_iter();
        for op in ops.filter(|op| op.supports(DType::F32)) {
            group.all_reduce(&mut data, op).unwrap();
            group.reduce(&mut data, op, 0).unwrap();
        }
        group.broadcast(&mut data, 0).unwrap();
        let mut out = [0f32; 2];
        group.all_gather(&data, &mut out).unwrap();
        group
            .reduce_scatter(&data, &mut out, ReduceOp::Mean)
            .unwrap();
        group.all_to_all(&data, &mut out).unwrap();
        group.gather(&data, Some(&mut out), 0).unwrap();
        group.scatter(Some(&data), &mut out, 0).unwrap();
        group.barrier().unwrap();
        assert_eq!((data, out), ([3.0, 4.0], [3.0, 4.0]));
        group.shutdown().unwrap();
    });
}

#[test]
fn payload_bytes_are_counted_per_peer() {
    on_each(groups(Over::Thread, 3), |group| {
        if group.rank() == 0 {
            group.send(&[0f64; 100], 2).unwrap();
            assert_eq!(group.bytes_sent_to(), [0, 0, 800]);
        } else if group.rank() == 2 {
            group.recv(&mut [0f64; 100], 0).unwrap();
            assert_eq!(group.bytes_sent_to(), [0, 0, 0]);
        }
        group.barrier().unwrap();
    });
}

/// A look at the group does not wait for its turn: not behind an operation
/// that waits for another rank.
#[test]
fn a_check_does_not_wait_for_operations_in_flight() {
    for over in EVERYWHERE {
        let gate = Barrier::new(2);
        on_each(groups(over, 2), |group| {
            let bucket = || Bucket::from_slice(&[1_u8; 10]);
            if group.rank() == 1 {
                gate.wait();
                let work = group.all_reduce_async(bucket(), ReduceOp::Max, Call::default());
                work.wait().unwrap();
                return;
            }
            let call = Call {
                timeout: Some(std::time::Duration::from_secs(10)),
                ..Call::default()
            };
            let work = group.all_reduce_async(bucket(), ReduceOp::Max, call);
            let works = group.check();
            gate.wait();
            works.unwrap();
            work.wait().unwrap();
        });
    }
}
