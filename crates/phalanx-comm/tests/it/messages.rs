//! Sends and receives in flight at the same time, with tags, and beside collectives.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use phalanx_comm::{Bucket, Call, ErrorKind, Peer, ProcessGroup, ReduceOp, Work};

use crate::circles::LONG;
use crate::common::{EVERYWHERE, Over, SOON, at_once, everywhere, groups, on_each, values};

fn call() -> Call {
    Call::default()
}

/// Every rank sends to the next one first and receives afterwards, by blocking calls: of all sizes, also such as no
/// buffer of the system holds.
#[test]
fn sends_that_face_each_other_end() {
    for over in EVERYWHERE {
        for world in [2, 3] {
            on_each(groups(over, world), |group| {
                let (me, world) = (group.rank(), group.world_size());
                for (turn, len) in [0, 1, 100, 1 << 18, 3 << 20].into_iter().enumerate() {
                    let data = values::<f32>(turn * 8 + me, len);
                    group.send(&data, (me + 1) % world).unwrap();
                    let from = (me + world - 1) % world;
                    let mut into = vec![0f32; len];
                    assert_eq!(group.recv(&mut into, from).unwrap(), from);
                    assert!(
                        into == values::<f32>(turn * 8 + from, len),
                        "{over:?} {len}"
                    );
                }
                group.shutdown().unwrap();
            });
        }
    }
}

/// A rank sends before a collective that the other one enters before its receive.
#[test]
fn a_large_send_ends_while_the_other_rank_is_in_a_collective() {
    everywhere(|over| {
        on_each(groups(over, 2), |group| {
            let data = values::<f64>(1, 1 << 20);
            let mut sum = [1f32; 9];
            if group.rank() == 0 {
                group.send(&data, 1).unwrap();
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            } else {
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                let mut into = vec![0f64; 1 << 20];
                group.recv(&mut into, 0).unwrap();
                assert!(into == data);
            }
            assert_eq!(sum, [2f32; 9]);
        });
    });
}

#[test]
fn tags_tell_messages_apart_and_order_holds_within_one() {
    for over in EVERYWHERE {
        on_each(groups(over, 2), |group| {
            const EACH: usize = 5;
            let len = |tag: u32, k: usize| 10 + 3000 * (tag as usize + k);
            let data = |tag: u32, k: usize| values::<i32>(100 * tag as usize + k, len(tag, k));
            if group.rank() == 0 {
                let mut sent = Vec::new();
                for k in 0..EACH {
                    for tag in [0, 1, 2, u32::MAX - 5] {
                        let bucket = Bucket::from_slice(&data(tag % 7, k));
                        sent.push(group.send_async(bucket, Peer::rank(1).tag(tag), call()));
                    }
                }
                sent.into_iter().for_each(|work| drop(work.wait().unwrap()));
            } else {
                for tag in [2, u32::MAX - 5, 0, 1] {
                    for k in 0..EACH {
                        let mut into = vec![0; len(tag % 7, k)];
                        group.recv(&mut into, Peer::rank(0).tag(tag)).unwrap();
                        assert_eq!(into, data(tag % 7, k), "{over:?}");
                    }
                }
            }
            group.shutdown().unwrap();
        });
    }
}

/// Several receives were issued before anything came, and each rank takes from whoever comes first.
#[test]
fn receives_from_any_rank_get_every_message_once() {
    for over in EVERYWHERE {
        on_each(groups(over, 4), |group| {
            const EACH: usize = 20;
            if group.rank() == 0 {
                let receive = |_| group.recv_async(group.bucket::<i64>(2), Peer::any(), call());
                let mut next = [0; 4];
                let works: Vec<Work<_>> = (0..3 * EACH).map(receive).collect();
                for work in works {
                    let (got, from) = work.wait().unwrap();
                    assert_eq!(&got[..], [from as i64, next[from]], "{over:?}");
                    next[from] += 1;
                }
                assert_eq!(next, [0, 20, 20, 20]);
            } else {
                for k in 0..EACH {
                    group.send(&[group.rank() as i64, k as i64], 0).unwrap();
                }
            }
            group.barrier().unwrap();
        });
    }
}

/// PyTorch's pattern: receives and sends in flight around a collective, waited for in another order.
#[test]
fn messages_are_in_flight_beside_collectives() {
    for over in EVERYWHERE {
        on_each(groups(over, 3), |group| {
            let (me, world) = (group.rank(), 3);
            let n = 100_000;
            for turn in 0..5 {
                let data = |from: usize, to: usize| values::<f32>(turn * 16 + from * 4 + to, n);
                let others = || (0..world).filter(|other| *other != me);
                let receive = |from| (from, group.recv_async(group.bucket::<f32>(n), from, call()));
                let received: Vec<_> = others().map(receive).collect();
                let mut sum = vec![me as f32; 1000];
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [3f32; 1000]);
                let send = |to| group.send_async(Bucket::from_slice(&data(me, to)), to, call());
                let sent: Vec<_> = others().map(send).collect();
                let work = group.all_reduce_async(Bucket::from_slice(&sum), ReduceOp::Sum, call());
                for (from, work) in received.into_iter().rev() {
                    let (got, sender) = work.wait().unwrap();
                    assert_eq!(sender, from);
                    assert!(got[..] == data(from, me)[..], "{over:?}");
                }
                assert_eq!(work.wait().unwrap()[..], [9f32; 1000]);
                sent.into_iter().for_each(|work| drop(work.wait().unwrap()));
            }
            group.shutdown().unwrap();
        });
    }
}

/// A small generator of test programs.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % n
    }
}

/// One step of a random program; all ranks know all steps.
#[derive(Clone, Copy, Debug)]
enum Step {
    Send {
        from: usize,
        to: usize,
        tag: u32,
        len: usize,
        any: bool,
    },
    Reduce {
        group: usize,
        len: usize,
    },
}

/// A legal program, as MPI and PyTorch understand it: each rank does its part of the steps in order, sends and receives in
/// the background or blocking, and waits for those in flight in some order.
fn program(seed: u64, world: usize) -> Vec<Step> {
    let mut random = Random(seed);
    let lengths = [0, 1, 40, 5000, 200_000];
    let mut step = || match random.below(4) {
        0 => Step::Reduce {
            group: random.below(3),
            len: lengths[random.below(4)],
        },
        _ => {
            let from = random.below(world);
            Step::Send {
                from,
                to: (from + 1 + random.below(world - 1)) % world,
                tag: random.below(3) as u32,
                len: lengths[random.below(lengths.len())],
                // Only where no other message can be meant: see `tag_of`.
                any: random.below(4) == 0,
            }
        }
    };
    (0..30).map(|_| step()).collect()
}

/// Messages to receive from any rank have tags of their own.
fn tag_of(index: usize, tag: u32, any: bool) -> u32 {
    if any { 1000 + index as u32 } else { tag }
}

fn run_program(seed: u64, world: &ProcessGroup, groups: &[Option<ProcessGroup>]) {
    let me = world.rank();
    let mut random = Random(seed * 31 + me as u64);
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    for (index, step) in program(seed, world.world_size()).into_iter().enumerate() {
        match step {
            Step::Send {
                from,
                to,
                tag,
                len,
                any,
            } => {
                let tag = tag_of(index, tag, any);
                let data = || values::<i64>(index, len);
                if me == from {
                    let to = Peer::rank(to).tag(tag);
                    if random.below(2) == 0 {
                        world.send(&data(), to).unwrap();
                    } else {
                        sent.push(world.send_async(Bucket::from_slice(&data()), to, call()));
                    }
                } else if me == to {
                    let peer = if any { Peer::any() } else { Peer::rank(from) }.tag(tag);
                    // Blocking would wait for a rank that may do something else first; sends never do.
                    let work = world.recv_async(world.bucket::<i64>(len), peer, call());
                    received.push((index, from, work));
                }
            }
            Step::Reduce { group, len } => {
                if let Some(group) = &groups[group] {
                    let mut sum = vec![1i32; len];
                    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    assert!(sum.iter().all(|n| *n == group.world_size() as i32));
                }
            }
        }
        if random.below(3) == 0 && !received.is_empty() {
            let at = random.below(received.len());
            let (index, from, work): (usize, usize, Work<(Bucket<i64>, usize)>) =
                received.swap_remove(at);
            // The sender does not wait for anything that comes after.
            let (got, sender) = work.wait().unwrap();
            assert_eq!(sender, from);
            assert!(
                got[..] == values::<i64>(index, got.len())[..],
                "seed {seed} step {index}"
            );
        }
    }
    for (index, from, work) in received {
        let (got, sender) = work.wait().unwrap();
        assert_eq!(sender, from);
        assert!(
            got[..] == values::<i64>(index, got.len())[..],
            "seed {seed} step {index}"
        );
    }
    sent.into_iter().for_each(|work| drop(work.wait().unwrap()));
}

/// 1,000 programs on groups that share ranks: each ends with the right data, and none is taken for a deadlock.
#[test]
fn random_programs_end_with_the_right_data() {
    let programs = 150;
    for (nth, over) in EVERYWHERE.into_iter().enumerate() {
        let world = 3;
        on_each(groups(over, world), |group| {
            let all = group.new_group(&[0, 1, 2]).unwrap();
            let some = group.new_group(&[0, 2]).unwrap();
            let whole = group.new_group(&[2, 1, 0]).unwrap();
            let groups = [all, some, whole];
            let share = programs / EVERYWHERE.len() + 1;
            for seed in 0..share as u64 {
                run_program(1 + seed + 1000 * nth as u64, &group, &groups);
            }
            group.barrier().unwrap();
        });
    }
}

#[test]
fn messages_of_one_group_do_not_reach_another() {
    for over in EVERYWHERE {
        on_each(groups(over, 2), |group| {
            let other = group.new_group(&[0, 1]).unwrap().unwrap();
            let peer = 1 - group.rank();
            group.send(&[1u8], peer).unwrap();
            other.send(&[2u8], peer).unwrap();
            let mut got = [[0u8]; 2];
            other.recv(&mut got[1], peer).unwrap();
            group.recv(&mut got[0], peer).unwrap();
            assert_eq!(got, [[1], [2]]);
        });
    }
}

#[test]
fn a_receive_that_no_message_comes_for_ends_at_its_deadline_or_with_the_group() {
    for over in EVERYWHERE {
        let started = Instant::now();
        on_each(groups(over, 2), |group| {
            let dropped = group.recv_async(group.bucket::<u8>(4), 1 - group.rank(), call());
            group.barrier().unwrap();
            group.shutdown().unwrap();
            let error = dropped.wait().unwrap_err();
            assert!(
                error.to_string().contains("the group was shut down"),
                "{error}"
            );
        });
        let errors = on_each(groups(over, 2), |group| {
            let limit = Some(Duration::from_millis(200));
            let hasty = Call {
                timeout: limit,
                label: Some("stage 3".into()),
                ..call()
            };
            if group.rank() == 0 {
                let peer = Peer::rank(1).tag(6);
                group
                    .recv_async(group.bucket::<u8>(4), peer, hasty)
                    .wait()
                    .map(drop)
            } else {
                std::thread::sleep(Duration::from_millis(600));
                group.barrier()
            }
        });
        let error = errors[0].as_ref().unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(1)));
        let text = error.to_string();
        for part in ["rank 1 to send data", "with tag 6 of stage 3"] {
            assert!(text.contains(part), "{over:?}: {text}");
        }
        assert_eq!(errors[1].as_ref().unwrap_err().kind(), ErrorKind::Aborted);
        assert!(started.elapsed() < SOON);
    }
}

#[test]
fn a_rank_that_left_is_named_to_who_needs_it() {
    for over in EVERYWHERE {
        let gate = Barrier::new(2);
        let errors = on_each(groups(over, 3), |group| {
            let rank = group.rank();
            if rank == 0 {
                return None;
            }
            let mut into = [0u8; 2];
            // Messages of the other one still come.
            group.send(&[7u8, rank as u8], 3 - rank).unwrap();
            let from = group.recv(&mut into, Peer::any()).unwrap();
            assert_eq!((from, into), (3 - rank, [7, 3 - rank as u8]));
            gate.wait();
            Some(group.recv(&mut into, 0).unwrap_err())
        });
        for error in errors.iter().flatten() {
            let kind = error.kind();
            assert!(
                matches!(kind, ErrorKind::PeerLost | ErrorKind::Aborted),
                "{over:?}: {error}"
            );
            let text = error.to_string();
            assert!(text.contains("rank 0 left"), "{over:?}: {text}");
        }
        assert_eq!(errors.iter().flatten().count(), 2);
    }
}

#[test]
fn mistakes_are_named_and_harm_nothing() {
    on_each(groups(Over::Thread, 2), |group| {
        let error = group.send(&[1u8], Peer::any()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(
            error.to_string().contains("a message is sent to one rank"),
            "{error}"
        );
        let me = group.rank();
        let work = group.recv_async(group.bucket::<u8>(1), me, call());
        assert_eq!(work.wait().unwrap_err().kind(), ErrorKind::Usage);
        group.barrier().unwrap();
    });
}

/// Legal programs in which ranks wait for longer than a circle needs to be found, each for the other.
#[test]
fn who_sends_late_is_in_no_circle() {
    type Program = fn(&ProcessGroup);
    let beside_a_collective: Program = |group| {
        let mut sum = [1f32; 9];
        if group.rank() == 0 {
            let issue =
                || group.all_reduce_async(Bucket::from_slice(&[1f32; 9]), ReduceOp::Sum, call());
            let (first, second) = (issue(), issue());
            first.wait().unwrap();
            std::thread::sleep(LONG);
            group.send(&[5u8], 1).unwrap();
            second.wait().unwrap();
        } else {
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            group.recv(&mut [0u8], 0).unwrap();
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        }
    };
    let after_a_limited_wait: Program = |group| {
        if group.rank() == 0 {
            let work = group.recv_async(group.bucket::<u8>(1), 1, call());
            let work = work.wait_for(LONG).unwrap_err();
            group.send(&[5u8], 1).unwrap();
            work.wait().unwrap();
        } else {
            group.recv(&mut [0u8], 0).unwrap();
            group.send(&[6u8], 0).unwrap();
        }
    };
    let by_another_thread: Program = |group| {
        if group.rank() == 0 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    group.send(&[4u8], 1).unwrap();
                    std::thread::sleep(LONG);
                    group.send(&[5u8], 1).unwrap();
                });
                group.recv(&mut [0u8], 1).unwrap();
            });
        } else {
            group.recv(&mut [0u8], 0).unwrap();
            group.recv(&mut [0u8], 0).unwrap();
            group.send(&[6u8], 0).unwrap();
        }
    };
    let programs = [beside_a_collective, after_a_limited_wait, by_another_thread];
    everywhere(|over| {
        at_once(&programs, |program| {
            on_each(groups(over, 2), |group| {
                program(&group);
                group.shutdown().unwrap();
            });
        });
    });
}

#[test]
fn a_panic_ends_the_group_though_a_receive_is_in_flight() {
    for over in EVERYWHERE {
        let started = Instant::now();
        let errors = on_each(groups(over, 2), |group| {
            if group.rank() == 0 {
                return Some(group.recv(&mut [0u8; 4], 1).unwrap_err());
            }
            let panicked = std::thread::spawn(move || {
                let _work = group.recv_async(group.bucket::<u8>(4), 0, call());
                std::panic::resume_unwind(Box::new("on purpose"));
            });
            assert!(panicked.join().is_err());
            None
        });
        let error = errors[0].as_ref().unwrap();
        assert_eq!(error.kind(), ErrorKind::Aborted, "{over:?}: {error}");
        assert!(error.to_string().contains("rank 1 panicked"), "{error}");
        assert!(started.elapsed() < SOON);
    }
}

#[test]
fn a_rank_in_a_monitored_barrier_takes_messages_in() {
    everywhere(|over| {
        on_each(groups(over, 2), |group| {
            let data = values::<f64>(1, 3 << 20);
            if group.rank() == 0 {
                std::thread::sleep(Duration::from_millis(300));
                group.send(&data, 1).unwrap();
                group.monitored_barrier(SOON).unwrap();
            } else {
                group.monitored_barrier(SOON).unwrap();
                let mut into = vec![0f64; 3 << 20];
                group.recv(&mut into, 0).unwrap();
                assert!(into == data);
            }
        });
    });
}

#[test]
fn a_receive_from_any_rank_ends_when_all_have_left() {
    for over in EVERYWHERE {
        let errors = on_each(groups(over, 3), |group| {
            (group.rank() == 0).then(|| {
                std::thread::sleep(Duration::from_millis(300));
                group.recv(&mut [0u8], Peer::any()).unwrap_err()
            })
        });
        let error = errors[0].as_ref().unwrap();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{over:?}: {error}");
    }
}
