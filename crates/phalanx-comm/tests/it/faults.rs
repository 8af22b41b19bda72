//! What happens when something goes wrong: everybody leaves, with the cause.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use phalanx_comm::{Algorithm, Bucket, Call, Error, ErrorKind, P2POp, ProcessGroup, ReduceOp};

use crate::common::{EVERYWHERE, Over, SOON, at_once, everywhere, groups, on_each};

fn within(limit: Duration) -> Call {
    Call {
        timeout: Some(limit),
        ..Call::default()
    }
}

/// Returns when *all* ranks have done their first operation. After a barrier
/// of the group alone a rank may still be in it when the next one aborts.
fn all_ready(group: &ProcessGroup, gate: &Barrier) {
    group.barrier().unwrap();
    gate.wait();
}

/// The error that came first, by its text; all errors must agree on it.
fn first_cause(errors: &[(usize, Error)]) -> (usize, String) {
    let own: Vec<_> = errors
        .iter()
        .filter(|(_, e)| e.kind() != ErrorKind::Aborted)
        .collect();
    let echoes: Vec<_> = errors
        .iter()
        .filter(|(_, e)| e.kind() == ErrorKind::Aborted)
        .collect();
    assert_eq!(own.len(), 1, "more than one first cause: {errors:#?}");
    let (origin, error) = own[0];
    for (_, echo) in echoes {
        assert_eq!(echo.origin_rank(), Some(*origin), "{echo}");
    }
    (*origin, error.to_string())
}

#[test]
fn late_rank_is_named() {
    everywhere(|over| {
        let gate = Barrier::new(4);
        let limit = Duration::from_millis(1500);
        let failed = Barrier::new(4);
        let results = on_each(groups(over, 4), |group| {
            // All are there before the clock starts.
            all_ready(&group, &gate);
            let mut data = vec![1f32; 5000];
            let started = Instant::now();
            if group.rank() == 2 {
                failed.wait();
                // Over tcp what the others had sent may come before their words.
                let error = (0..2)
                    .find_map(|_| group.all_reduce(&mut data, ReduceOp::Sum).err())
                    .expect("it hears of it");
                assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
                return None;
            }
            let call = Call {
                label: Some("bucket 4 (fc1.weight)".into()),
                ..within(limit)
            };
            let error = group
                .with_call(call)
                .all_reduce(&mut data, ReduceOp::Sum)
                .unwrap_err();
            let took = started.elapsed();
            failed.wait();
            assert!(took < SOON, "{over:?}: took {took:?}");
            assert!(
                error.to_string().contains("bucket 4 (fc1.weight)"),
                "{error}"
            );
            Some((group.rank(), error))
        });
        let errors: Vec<_> = results.into_iter().flatten().collect();
        assert_eq!(errors.len(), 3);
        let own: Vec<_> = errors
            .iter()
            .filter(|(_, e)| e.kind() == ErrorKind::Timeout)
            .collect();
        // Of those that share memory exactly one is the first; over tcp
        // several may reach their deadline before they hear of the others'.
        assert!(!own.is_empty(), "{over:?}: {errors:#?}");
        assert!(over == Over::Tcp || own.len() == 1, "{over:?}: {errors:#?}");
        for (rank, error) in &errors {
            let text = error.message();
            assert!(
                text.contains("waiting for rank 2 to send data"),
                "{over:?}: {error}"
            );
            let others = [0, 1, 3].map(|r| text.contains(&format!("rank {r} to ")));
            assert_eq!(others, [false; 3], "{over:?}, rank {rank}: {error}");
        }
        for (_, error) in own {
            assert_eq!(error.peer(), Some(2));
            assert!(error.to_string().contains("limit 1.50 s"), "{error}");
            assert!(error.to_string().contains("seq 1"), "{error}");
        }
    });
}

fn fail_in_ring(group: &ProcessGroup, limit: Duration) -> Error {
    let call = Call {
        algorithm: Algorithm::Ring,
        ..within(limit)
    };
    group
        .with_call(call)
        .all_reduce(&mut [1f32; 1000], ReduceOp::Sum)
        .unwrap_err()
}

/// In a ring most ranks wait for one that waits itself.
#[test]
fn who_only_waits_is_not_blamed() {
    let limit = Duration::from_millis(1600);
    let (gate, failed) = (Barrier::new(4), Barrier::new(4));
    let errors = on_each(groups(Over::Thread, 4), |group| {
        all_ready(&group, &gate);
        match group.rank() {
            0 => {
                failed.wait();
            }
            // Begins after its followers, so that their deadlines come first.
            1 => std::thread::sleep(limit / 80),
            _ => {}
        }
        let error = fail_in_ring(&group, limit);
        if group.rank() > 0 {
            failed.wait();
        }
        (group.rank(), error)
    });
    let (_, text) = first_cause(&errors);
    assert!(text.contains("waiting for rank 0 to send data"), "{text}");
}

/// Rank 2 waits for rank 1, which can be seen to wait for rank 0.
#[test]
fn a_timeout_in_a_later_round_blames_who_holds_up_the_others() {
    let (gate, failed) = (Barrier::new(3), Barrier::new(2));
    on_each(groups(Over::Thread, 3), |group| {
        all_ready(&group, &gate);
        let limit = Duration::from_millis(if group.rank() == 2 { 2000 } else { 80_000 });
        if group.rank() == 0 {
            // Until rank 2 has given up.
            failed.wait();
        }
        let error = fail_in_ring(&group, limit);
        if group.rank() == 2 {
            failed.wait();
        }
        let text = error.message();
        assert!(
            text.contains("waiting for rank 0 to send data (or for whom they wait); rank 1 seems to wait as well"),
            "{error}"
        );
        assert_eq!(error.peer(), None);
    });
}

#[test]
fn several_late_ranks_are_all_named() {
    let failed = Barrier::new(4);
    on_each(groups(Over::Thread, 4), |group| {
        if group.rank() == 0 {
            let call = Call {
                algorithm: Algorithm::OneRound,
                ..within(Duration::from_millis(150))
            };
            let error = group
                .with_call(call)
                .all_reduce(&mut [1u8], ReduceOp::Sum)
                .unwrap_err();
            failed.wait();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            for rank in 1..4 {
                assert!(
                    error
                        .to_string()
                        .contains(&format!("rank {rank} to send data")),
                    "{error}"
                );
            }
        } else {
            // Stay until rank 0 has given up: leaving would be another error.
            failed.wait();
        }
    });
}

#[test]
fn desync_names_both_sides() {
    for over in EVERYWHERE {
        let gate = Barrier::new(2);
        let errors = on_each(groups(over, 2), |group| {
            all_ready(&group, &gate);
            let error = if group.rank() == 0 {
                group
                    .all_reduce(&mut [1f32; 100], ReduceOp::Sum)
                    .unwrap_err()
            } else {
                group.broadcast(&mut [1i64; 7], 0).unwrap_err()
            };
            (group.rank(), error)
        });
        // Both may notice; whoever was first, the texts agree on the two sides.
        for (rank, error) in &errors {
            let text = error.to_string();
            assert!(
                matches!(error.kind(), ErrorKind::Desync | ErrorKind::Aborted),
                "{over:?}: {error}"
            );
            assert!(
                text.contains("rank 0 called all_reduce f32 sum of 100"),
                "{rank}: {text}"
            );
            assert!(
                text.contains("rank 1 called broadcast i64 of 7"),
                "{rank}: {text}"
            );
        }
        assert!(errors.iter().any(|(_, e)| e.kind() == ErrorKind::Desync));
    }
}

#[test]
fn desync_covers_length_type_op_algorithm_and_order() {
    type Step = fn(&ProcessGroup) -> Result<(), Error>;
    let pairs: [(Step, Step); 6] = [
        (
            |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Sum),
            |g| g.all_reduce(&mut [0f32; 11], ReduceOp::Sum),
        ),
        (
            |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Sum),
            |g| g.all_reduce(&mut [0i32; 10], ReduceOp::Sum),
        ),
        (
            |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Sum),
            |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Mean),
        ),
        (
            |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Sum),
            |g| {
                let call = Call {
                    algorithm: Algorithm::Ring,
                    ..Call::default()
                };
                g.with_call(call).all_reduce(&mut [0f32; 10], ReduceOp::Sum)
            },
        ),
        (
            |g| g.broadcast(&mut [0u8; 3], 0).and_then(|()| g.barrier()),
            |g| g.barrier().and_then(|()| g.broadcast(&mut [0u8; 3], 0)),
        ),
        (
            |g| g.send(&[1f32; 4], 1).and_then(|()| g.barrier()),
            |g| g.recv(&mut [0f32; 5], 0).and_then(|_| g.barrier()),
        ),
    ];
    for (index, (zero, one)) in pairs.into_iter().enumerate() {
        let errors = on_each(groups(Over::Thread, 2), |group| {
            if group.rank() == 0 {
                zero(&group)
            } else {
                one(&group)
            }
        });
        let kinds: Vec<_> = errors
            .iter()
            .filter_map(|r| r.as_ref().err().map(Error::kind))
            .collect();
        assert!(
            kinds.contains(&ErrorKind::Desync),
            "pair {index}: {errors:#?}"
        );
    }
}

/// A collective sends no message, and a message is no frame of a collective: still no rank waits for the deadline.
#[test]
fn messages_against_collectives_name_both_sides_at_once() {
    type Step = fn(&ProcessGroup) -> Result<(), Error>;
    let barrier: Step = |g| g.barrier();
    let recv: Step = |g| g.recv(&mut [0f32; 4], 1 - g.rank()).map(drop);
    let large_send: Step = |g| g.send(&vec![0f32; 50_000], 1 - g.rank());
    let batch: Step = |g| {
        let mut into = [0f32; 4];
        g.batch_send_recv([P2POp::recv(&mut into, 1 - g.rank())])
    };
    let reduce: Step = |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Sum);
    let long: Step = |g| g.all_reduce(&mut vec![0f32; 90_000], ReduceOp::Sum);
    let pairs = [
        ("recv and all_reduce", recv, reduce),
        ("all_reduce and recv", reduce, recv),
        ("recv and barrier", recv, barrier),
        ("send and all_reduce", large_send, reduce),
        ("large all_reduce and send", long, large_send),
        ("batch and all_reduce", batch, reduce),
    ];
    everywhere(|over| {
        at_once(&pairs, |&(name, zero, one)| {
            for warm in [0, 1] {
                let gate = Barrier::new(2);
                let errors = on_each(groups(over, 2), |group| {
                    for _ in 0..warm {
                        group.barrier().unwrap();
                    }
                    gate.wait();
                    let started = Instant::now();
                    // A send ends: a rank in a collective takes it in.
                    let done = [zero, one][group.rank()](&group);
                    let error = done.and_then(|()| group.barrier()).unwrap_err();
                    assert!(started.elapsed() < SOON, "{name}: {error}");
                    error
                });
                let sides =
                    |text: &str| text.contains("rank 0 called ") && text.contains("rank 1 called ");
                for error in &errors {
                    assert!(
                        matches!(error.kind(), ErrorKind::Desync | ErrorKind::Aborted),
                        "{name} over {over:?}: {error}"
                    );
                    assert!(sides(&error.to_string()), "{name} over {over:?}: {error}");
                    // A send is complete, and its rank in the barrier.
                    let may_be_past = name.contains("send");
                    let names_it = error.to_string().contains("send/recv f32 of");
                    assert!(names_it || may_be_past, "{error}");
                }
                assert!(errors.iter().any(|e| e.kind() == ErrorKind::Desync));
            }
        });
    });
}

/// What was sent before the sender went into a collective is still received.
/// Neither can ever send: found at once, over every transport, alone or in a batch.
#[test]
fn receives_that_face_each_other_name_both_sides_at_once() {
    everywhere(|over| {
        for in_batch in [false, true] {
            let started = Instant::now();
            let errors = on_each(groups(over, 2), |group| {
                // Message numbers differ in the two directions.
                if group.rank() == 0 {
                    group.send(&[1u8; 10], 1).unwrap();
                } else if group.rank() == 1 {
                    group.recv(&mut [0u8; 10], 0).unwrap();
                }
                let mut data = [0f32; 5];
                let other = 1 - group.rank();
                let received = if in_batch && other == 0 {
                    group.batch_send_recv([P2POp::recv(&mut data, other)])
                } else {
                    group.recv(&mut data, other).map(drop)
                };
                received.unwrap_err()
            });
            assert!(started.elapsed() < SOON);
            for error in &errors {
                assert!(
                    matches!(error.kind(), ErrorKind::Desync | ErrorKind::Aborted),
                    "{over:?}: {error}"
                );
                let text = error.to_string();
                for side in ["from rank 1 (seq 0)", "from rank 0 (seq 1)"] {
                    assert!(text.contains(side), "{over:?}: {text}");
                }
                assert!(text.contains("none sends"), "{text}");
            }
            let kinds: Vec<_> = errors.iter().map(Error::kind).collect();
            assert!(kinds.contains(&ErrorKind::Desync), "{errors:?}");
        }
    });
}

/// Long enough for every rank to have asked what the others are in.
#[test]
fn a_late_sender_is_no_desync() {
    everywhere(|over| {
        on_each(groups(over, 2), |group| {
            let other = 1 - group.rank();
            for turn in 0..4i64 {
                let mut data = [turn; 3];
                if (turn as usize + group.rank()).is_multiple_of(2) {
                    std::thread::sleep(Duration::from_millis(450));
                    group.send(&data, other).unwrap();
                } else {
                    group.recv(&mut data, other).unwrap();
                }
                assert_eq!(data, [turn; 3]);
            }
            group.shutdown().unwrap();
        });
    });
}

#[test]
fn a_message_sent_before_a_collective_is_no_desync() {
    for over in EVERYWHERE {
        on_each(groups(over, 2), |group| {
            for turn in 0..200 {
                let (me, other) = (group.rank(), 1 - group.rank());
                let mut data = [turn as f32; 4];
                if (turn + me) % 2 == 0 {
                    group.send(&data, other).unwrap();
                } else {
                    if turn % 50 < 2 {
                        // Let the sender wait in the collective.
                        std::thread::sleep(Duration::from_millis(30));
                    }
                    let mut into = [0f32; 4];
                    group.recv(&mut into, other).unwrap();
                    assert_eq!(into, data);
                }
                group.all_reduce(&mut data, ReduceOp::Max).unwrap();
                assert_eq!(data, [turn as f32; 4]);
            }
        });
    }
}

/// A receive of another length or type than what was sent.
#[test]
fn messages_of_another_length_or_type_name_both_sides() {
    type Step = fn(&ProcessGroup) -> Result<(), Error>;
    let receives: [Step; 3] = [
        |g| g.recv(&mut [0f32; 5], 0).map(drop),
        |g| g.recv(&mut [0f32; 3], 0).map(drop),
        |g| g.recv(&mut [0i32; 4], 0).map(drop),
    ];
    for over in EVERYWHERE {
        for recv in receives {
            let errors = on_each(groups(over, 2), |group| {
                let started = Instant::now();
                let error = if group.rank() == 0 {
                    // Small messages are sent before anybody takes them.
                    let sent = group.send(&[1f32; 4], 1);
                    sent.and_then(|()| group.barrier()).unwrap_err()
                } else {
                    recv(&group).unwrap_err()
                };
                assert!(started.elapsed() < SOON, "{over:?}: {error}");
                error
            });
            assert_eq!(errors[1].kind(), ErrorKind::Desync, "{over:?}");
            for error in errors {
                let text = error.to_string();
                assert!(text.contains("rank 0 called send/recv f32 of 4"), "{text}");
                assert!(text.contains("rank 1 called send/recv"), "{text}");
            }
        }
    }
}

#[test]
fn abort_unblocks_everyone() {
    for over in EVERYWHERE {
        let gate = Barrier::new(4);
        let took = on_each(groups(over, 4), |group| {
            all_ready(&group, &gate);
            if group.rank() == 0 {
                std::thread::sleep(Duration::from_millis(100));
                group.abort("disk full");
                let error = group.barrier().unwrap_err();
                assert_eq!(error.origin_rank(), Some(0));
                return Instant::now();
            }
            let error = group
                .all_reduce(&mut [1f32; 3000], ReduceOp::Sum)
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{over:?}: {error}");
            assert_eq!(error.origin_rank(), Some(0));
            assert!(error.to_string().contains("disk full"), "{error}");
            // Refused from now on, with the same cause.
            let again = group.barrier().unwrap_err();
            assert_eq!(again.kind(), ErrorKind::Aborted);
            assert!(again.to_string().contains("disk full"), "{again}");
            Instant::now()
        });
        let last = took.iter().max().unwrap().duration_since(took[0]);
        assert!(last < SOON, "{over:?}: {last:?} after the abort");
    }
}

#[test]
fn abort_also_ends_what_is_queued() {
    let aborted = Barrier::new(2);
    on_each(groups(Over::Thread, 2), |group| {
        if group.rank() == 1 {
            aborted.wait();
            return;
        }
        let works: Vec<_> = (0..5)
            .map(|_| {
                let data = Bucket::<f32>::zeroed(1000);
                group.all_reduce_async(data, ReduceOp::Sum, Call::default())
            })
            .collect();
        group.abort("changed my mind");
        aborted.wait();
        for work in works {
            let error = work.wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Aborted);
            assert!(error.to_string().contains("changed my mind"), "{error}");
        }
    });
}

#[test]
fn first_cause_wins() {
    for over in EVERYWHERE {
        let gate = Barrier::new(3);
        on_each(groups(over, 3), |group| {
            all_ready(&group, &gate);
            if group.rank() == 2 {
                group.abort("the first cause");
            }
            let error = group
                .all_reduce(&mut [1f32; 9000], ReduceOp::Sum)
                .unwrap_err();
            group.abort("an echo");
            let again = group.barrier().unwrap_err();
            for error in [error, again] {
                assert_eq!(error.origin_rank(), Some(2), "{over:?}: {error}");
                assert!(error.to_string().contains("the first cause"), "{error}");
                assert!(!error.to_string().contains("an echo"), "{error}");
            }
        });
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    for over in EVERYWHERE {
        let gate = Barrier::new(3);
        let results = on_each(groups(over, 3), |group| {
            all_ready(&group, &gate);
            if group.rank() == 1 {
                return None;
            }
            let error = group
                .all_reduce(&mut [1f32; 9000], ReduceOp::Sum)
                .unwrap_err();
            Some((group.rank(), error))
        });
        let errors: Vec<_> = results.into_iter().flatten().collect();
        assert!(
            errors.iter().any(|(_, e)| e.kind() == ErrorKind::PeerLost),
            "{errors:#?}"
        );
        for (_, error) in &errors {
            assert!(
                matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Aborted),
                "{over:?}: {error}"
            );
            assert!(error.message().contains("rank 1"), "{over:?}: {error}");
        }
    }
}

#[test]
fn a_panicking_rank_unblocks_the_others() {
    for over in EVERYWHERE {
        let mut members = groups(over, 3);
        let last = members.pop().unwrap();
        let waiting = std::thread::spawn(move || {
            on_each(members, |group| {
                (group.rank(), group.barrier().unwrap_err())
            })
        });
        let panicked = std::thread::spawn(move || {
            let _group = last;
            std::thread::sleep(Duration::from_millis(50));
            std::panic::resume_unwind(Box::new("silent"));
        });
        assert!(panicked.join().is_err());
        for (_, error) in waiting.join().unwrap() {
            assert_eq!(error.kind(), ErrorKind::Aborted, "{over:?}: {error}");
            assert_eq!(error.origin_rank(), Some(2));
            assert!(error.to_string().contains("rank 2 panicked"), "{error}");
        }
    }
}

#[test]
fn orderly_end_is_no_loss() {
    for over in EVERYWHERE {
        for world in [2, 3, 5] {
            on_each(groups(over, world), |group| {
                let other = group.clone();
                let mut data = vec![1f32; 2000];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                // Ranks come to the end at different times.
                std::thread::sleep(Duration::from_millis(15 * group.rank() as u64));
                group.shutdown().unwrap();
                let error = other.barrier().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Usage);
                assert!(error.to_string().contains("shut down"), "{error}");
                let work = other.barrier_async(Call::default());
                assert_eq!(work.wait().unwrap_err().kind(), ErrorKind::Usage);
            });
        }
    }
}

#[test]
fn failures_agree_on_the_first_cause() {
    for over in EVERYWHERE {
        let gate = Barrier::new(3);
        let errors = on_each(groups(over, 3), |group| {
            all_ready(&group, &gate);
            // Only rank 0 has a deadline.
            let limit = Duration::from_secs(if group.rank() == 0 { 0 } else { 40 });
            if group.rank() == 1 {
                std::thread::sleep(Duration::from_millis(200));
            }
            let call = within(limit);
            let error = group
                .with_call(call)
                .all_reduce(&mut [1f32; 9000], ReduceOp::Sum)
                .unwrap_err();
            (group.rank(), error)
        });
        let (origin, text) = first_cause(&errors);
        assert_eq!(origin, 0, "{text}");
    }
}

/// One operation of the desync matrix.
type Step = fn(&ProcessGroup) -> Result<(), Error>;

/// Rank 0 does the first, the others the second; what each is called.
const MATRIX: [(&str, Step, &str, Step, &str); 11] = [
    (
        "operation",
        |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Sum),
        "called all_reduce f32 sum of 10 elements",
        |g| g.all_gather(&[0f32; 10], &mut vec![0f32; 10 * g.world_size()]),
        "called all_gather f32 of 10 elements",
    ),
    (
        "dtype",
        |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Sum),
        "called all_reduce f32 sum",
        |g| g.all_reduce(&mut [0i64; 10], ReduceOp::Sum),
        "called all_reduce i64 sum",
    ),
    (
        "reduction",
        |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Sum),
        "called all_reduce f32 sum",
        |g| g.all_reduce(&mut [0f32; 10], ReduceOp::Mean),
        "called all_reduce f32 mean",
    ),
    (
        "count",
        |g| g.all_reduce(&mut [0f32; 4000], ReduceOp::Sum),
        "of 4000 elements",
        |g| g.all_reduce(&mut [0f32; 4001], ReduceOp::Sum),
        "of 4001 elements",
    ),
    (
        // Whoever is first notices at its first or second operation.
        "order",
        |g| g.broadcast(&mut [0u8; 3], 0).and_then(|()| g.barrier()),
        "called b",
        |g| g.barrier().and_then(|()| g.broadcast(&mut [0u8; 3], 0)),
        "called b",
    ),
    (
        "one more operation",
        |g| g.barrier().and_then(|()| g.barrier()),
        "called barrier (seq ",
        |g| g.broadcast(&mut [0u8; 3], 0),
        "called b",
    ),
    // From here on both sides only receive, or begin with it.
    (
        "broadcast root",
        |g| g.broadcast(&mut [0f32; 5], 1),
        "called broadcast f32 of 5 elements with root 1",
        |g| g.broadcast(&mut [0f32; 5], 0),
        "called broadcast f32 of 5 elements with root 0",
    ),
    (
        "scatter root",
        |g| g.scatter(None, &mut [0f32; 5], 1),
        "called scatter f32 of 5 elements with root 1",
        |g| g.scatter(None, &mut [0f32; 5], 0),
        "called scatter f32 of 5 elements with root 0",
    ),
    (
        "gather root",
        |g| g.gather(&[0f32; 5], Some(&mut vec![0f32; 5 * g.world_size()]), 0),
        "called gather f32 of 5 elements with root 0",
        |g| {
            let mut all = vec![0f32; 5 * g.world_size()];
            let place = (g.rank() == 1).then_some(all.as_mut_slice());
            g.gather(&[0f32; 5], place, 1)
        },
        // A third rank may be through with it and in the next operation.
        "called ",
    ),
    (
        "reduce root",
        |g| g.reduce(&mut [0f32; 5], ReduceOp::Sum, 0),
        "called reduce f32 sum of 5 elements with root 0",
        |g| g.reduce(&mut [0f32; 5], ReduceOp::Sum, 1),
        "called ",
    ),
    (
        "receivers of different operations",
        |g| g.broadcast(&mut [0f32; 5], 1),
        "called broadcast f32 of 5 elements with root 1",
        |g| g.scatter(None, &mut [0f32; 5], 0),
        "called scatter f32 of 5 elements with root 0",
    ),
];

#[test]
fn every_rank_learns_both_sides_of_a_desync_at_once() {
    everywhere(|over| {
        for world in 2..=4 {
            for (what, zero, zero_called, other, other_called) in MATRIX {
                let gate = Barrier::new(world);
                let what = format!("{what} over {over:?}, world {world}");
                let errors = on_each(groups(over, world), |group| {
                    all_ready(&group, &gate);
                    let started = Instant::now();
                    // A rank whose part is only to send may be through; it
                    // hears of it in its next operation.
                    let step = if group.rank() == 0 { zero } else { other };
                    let error = step(&group)
                        .and_then(|()| group.barrier())
                        .expect_err(&what);
                    let took = started.elapsed();
                    assert!(took < SOON, "{what}: {took:?}");
                    gate.wait();
                    error
                });
                let kinds: Vec<_> = errors.iter().map(Error::kind).collect();
                assert!(kinds.contains(&ErrorKind::Desync), "{what}: {errors:#?}");
                for error in &errors {
                    assert!(
                        matches!(error.kind(), ErrorKind::Desync | ErrorKind::Aborted),
                        "{what}: {error}"
                    );
                    let text = error.to_string();
                    // The lower rank is named first, and only rank 0 differs.
                    let (zero, others) = text
                        .split_once("different operations: rank 0 ")
                        .and_then(|(_, both)| both.split_once(", rank "))
                        .unwrap_or_else(|| panic!("{what}: {text}"));
                    assert!(zero.contains(zero_called), "{what}: {text}");
                    assert!(others.contains(other_called), "{what}: {text}");
                }
            }
        }
    });
}
