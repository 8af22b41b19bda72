//! A new group of the ranks that are left and of newcomers: generations, majorities, stragglers, lost ranks, ranks as threads
//! and as processes that are killed.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use phalanx_comm::{
    Call, Error, ErrorKind, InitOptions, Newcomer, ProcessGroup, ReduceOp, ShrinkOptions,
    goes_on_with, is_over, report_hold, report_leaving, report_lost, report_over,
};
use phalanx_store::{MemStore, TcpServer};
use phalanx_wire::Token;

use crate::common::{
    EVERYWHERE, Over, PATIENCE, SOON, at_once, everywhere, groups, init_options, on_each,
};

/// Returns when *all* ranks are through a barrier: after one of the group
/// alone a rank may still be in it when the next one leaves.
fn all_ready(group: &ProcessGroup, gate: &Barrier) {
    group.barrier().unwrap();
    gate.wait();
}

/// Long enough that a rank which does come is never left out, also on a busy
/// machine.
const STRAGGLER_WAIT: Duration = Duration::from_millis(1200);

fn hasty() -> ShrinkOptions {
    ShrinkOptions {
        straggler_wait: STRAGGLER_WAIT,
        timeout: PATIENCE,
        ..ShrinkOptions::default()
    }
}

/// The sum of first ranks over the group, by which its members are checked.
fn sum_of_members(group: &ProcessGroup) -> i64 {
    let mut data = [group.global_rank() as i64];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    data[0]
}

#[test]
fn survivors_go_on_whoever_was_lost() {
    everywhere(|over| {
        {
            let world = 4;
            // The first, one between, the last.
            for victim in [0, world / 2, world - 1] {
                let gate = Barrier::new(world);
                on_each(groups(over, world), |group| {
                    all_ready(&group, &gate);
                    let rank = group.rank();
                    if rank == victim {
                        return; // its links end
                    }
                    let error = group.barrier().unwrap_err();
                    assert!(
                        matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Aborted),
                        "{error}"
                    );
                    let other_handle = group.clone();
                    let group = group.shrink(hasty()).unwrap();
                    assert_eq!(group.generation(), 1);
                    assert_eq!(group.world_size(), world - 1);
                    assert_eq!(group.rank(), rank - usize::from(rank > victim));
                    assert_eq!(group.global_rank(), rank);
                    let all: usize = (0..world).sum();
                    for _ in 0..3 {
                        assert_eq!(sum_of_members(&group), (all - victim) as i64);
                    }
                    // The old group stays as it ended.
                    let error = other_handle.barrier().unwrap_err();
                    assert!(error.kind() != ErrorKind::Timeout, "{error}");
                    drop(other_handle);
                    // Subgroups of the new one work.
                    let sub = group.new_group(&[0, 1]).unwrap();
                    assert_eq!(sub.is_some(), group.rank() < 2);
                    if let Some(sub) = sub {
                        sub.barrier().unwrap();
                    }
                    group.shutdown().unwrap();
                });
            }
        }
    });
}

#[test]
fn twice_in_a_row_down_to_one() {
    everywhere(|over| {
        let gates = [4, 3, 2].map(Barrier::new);
        on_each(groups(over, 4), |group| {
            let global_rank = group.rank();
            let mut group = group;
            // Rank 0 goes, then rank 3, then rank 2: of 4, of 3, of 2.
            for (generation, victim) in [(1, 0), (2, 3), (3, 2)] {
                all_ready(&group, &gates[generation as usize - 1]);
                if global_rank == victim {
                    return;
                }
                group.barrier().unwrap_err();
                let options = ShrinkOptions {
                    min_world: Some(1),
                    ..hasty()
                };
                // With a minimum of one, a fast rank must wait for the others.
                group = group.shrink(options).unwrap();
                assert_eq!(group.generation(), generation);
                assert_eq!(group.world_size(), 4 - generation as usize);
            }
            assert_eq!((group.rank(), group.global_rank()), (0, 1));
            assert_eq!(sum_of_members(&group), 1);
            // Nobody is left: the generation still changes hands.
            group.abort("enough");
            let group = group.shrink(hasty()).unwrap();
            assert_eq!((group.generation(), group.world_size()), (4, 1));
        });
    });
}

#[test]
fn all_may_go_on_after_an_abort() {
    for over in EVERYWHERE {
        let gate = Barrier::new(3);
        on_each(groups(over, 3), |group| {
            all_ready(&group, &gate);
            let rank = group.rank();
            if rank == 1 {
                group.abort("changed my mind");
            }
            let started = Instant::now();
            let group = group.shrink(ShrinkOptions {
                straggler_wait: PATIENCE,
                timeout: PATIENCE,
                ..ShrinkOptions::default()
            });
            let group = group.unwrap();
            assert_eq!((group.rank(), group.world_size()), (rank, 3));
            assert!(started.elapsed() < SOON, "nobody was waited for");
            assert_eq!(sum_of_members(&group), 3);
            group.shutdown().unwrap();
        });
    }
}

/// Nobody waits for a rank that is reported lost, and no majority is needed where all that do not come are.
#[test]
fn ranks_that_are_reported_lost_are_not_waited_for() {
    everywhere(|over| {
        let gate = Barrier::new(4);
        on_each(groups(over, 4), |group| {
            all_ready(&group, &gate);
            if group.rank() != 3 {
                if group.rank() == 0 {
                    for rank in 0..3 {
                        report_lost(&*group.store(), rank, "it is a test").unwrap();
                    }
                }
                // In its place a rank that is still there, and hears nothing.
                gate.wait();
                return;
            }
            let options = ShrinkOptions {
                straggler_wait: Duration::MAX,
                timeout: PATIENCE,
                ..ShrinkOptions::default()
            };
            let group = group.shrink(options).unwrap();
            gate.wait();
            assert_eq!(
                (group.rank(), group.world_size(), group.global_rank()),
                (0, 1, 3)
            );
            assert_eq!(sum_of_members(&group), 3);
        });
    });
}

#[test]
fn ranks_that_form_anew_hear_that_the_job_ends() {
    everywhere(|over| {
        let gate = Barrier::new(2);
        on_each(groups(over, 2), |group| {
            all_ready(&group, &gate);
            if group.rank() == 1 {
                report_over(&*group.store(), "nobody needs it").unwrap();
                gate.wait();
                return;
            }
            let error = group.shrink(ShrinkOptions::default()).unwrap_err();
            gate.wait();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            assert!(
                error.to_string().contains("the job ends: nobody needs it"),
                "{error}"
            );
        });
    });
}

/// The options of `hasty`, with which nobody is left out.
fn patient() -> ShrinkOptions {
    ShrinkOptions {
        straggler_wait: Duration::MAX,
        timeout: PATIENCE,
        ..ShrinkOptions::default()
    }
}

/// A store of its own, a token, and two ranks that have formed a group there.
fn two_with_store(over: Over) -> (Arc<dyn phalanx_store::Store>, Token, Vec<ProcessGroup>) {
    let token = Token::generate().unwrap();
    let store: Arc<dyn phalanx_store::Store> = Arc::new(MemStore::new());
    let groups = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let (store, options) = (Arc::clone(&store), init_options(over, &token));
                scope.spawn(move || ProcessGroup::from_store(store, rank, 2, options).unwrap())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (store, token, groups)
}

/// A host that is down, or stopped with its launcher, closes no connection.
#[test]
fn a_rank_that_is_reported_lost_is_not_waited_for_in_an_operation() {
    let (store, _, mut groups) = two_with_store(Over::Tcp);
    let silent = groups.pop().unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| groups[0].barrier().unwrap_err());
        std::thread::sleep(Duration::from_millis(50));
        report_lost(&*store, 1, "its host is down").unwrap();
        let error = waits.join().unwrap();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert_eq!(error.peer(), Some(1), "{error}");
        let message = error.message();
        assert_eq!(message, "rank 1 was reported lost: its host is down");
    });
    // It lives, and learns that the group has ended; the first barrier is one that the other has begun.
    let error = (0..2).find_map(|_| silent.barrier().err()).unwrap();
    assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
}

#[test]
fn newcomers_join_are_lost_and_others_take_their_numbers_place() {
    for over in [Over::Shm, Over::Tcp] {
        let (store, token, groups) = two_with_store(over);
        let newcomer = |number| {
            Newcomer::from_store(Arc::clone(&store), number, init_options(over, &token)).unwrap()
        };
        assert!(!goes_on_with(&*store, 2, [0, 1]).unwrap(), "nobody said so");
        groups[0].announce_elastic(true).unwrap();
        groups[1].withdraw_elastic().unwrap();
        assert!(
            !goes_on_with(&*store, 2, [0, 1]).unwrap(),
            "it was taken back"
        );
        groups[0].announce_elastic(true).unwrap();
        assert!(goes_on_with(&*store, 2, [1, 7]).unwrap());
        assert!(
            !goes_on_with(&*store, 2, [5, 7]).unwrap(),
            "they are in no group"
        );
        let gate = &Barrier::new(4);
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let requests = group.membership_requests();
                    while requests.read().unwrap().joining != [5, 7] {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    group.barrier().unwrap();
                    let group = group.grow(&[5, 7], patient()).unwrap();
                    assert_eq!((group.world_size(), group.generation()), (4, 1));
                    assert_eq!(group.global_ranks(), [0, 1, 5, 7]);
                    assert_eq!(sum_of_members(&group), 13);
                    assert!(group.membership_requests().read().unwrap().is_none());
                    gate.wait();
                    // Rank 5 goes.
                    group.barrier().unwrap_err();
                    let group = group.shrink(patient()).unwrap();
                    assert_eq!(sum_of_members(&group), 8);
                    group.shutdown().unwrap();
                });
            }
            for number in [5, 7] {
                let newcomer = newcomer(number);
                let store = &store;
                scope.spawn(move || {
                    let group = newcomer.join(&patient()).unwrap().expect("the job runs");
                    assert_eq!(
                        (group.rank(), group.global_rank()),
                        ((number - 1) / 2, number)
                    );
                    let dump = group.flight();
                    assert_eq!((dump.rank, dump.joined), (number, 1));
                    assert_eq!(dump.members, [0, 1, 5, 7]);
                    assert_eq!(sum_of_members(&group), 13);
                    gate.wait();
                    if number == 5 {
                        report_lost(&**store, 5, "it is a test").unwrap();
                        return;
                    }
                    group.announce_joined(true).unwrap();
                    group.barrier().unwrap_err();
                    let group = group.shrink(patient()).unwrap();
                    assert_eq!((group.rank(), group.world_size()), (2, 3));
                    assert_eq!(sum_of_members(&group), 8);
                    group.shutdown().unwrap();
                });
            }
        });
        assert!(!goes_on_with(&*store, 2, [5]).unwrap(), "it has no state");
        assert!(goes_on_with(&*store, 2, [7]).unwrap());
    }
}

/// As an elastic training waits, which has no limit for members.
#[test]
fn a_newcomer_that_comes_late_is_waited_for() {
    let (store, token, groups) = two_with_store(Over::Tcp);
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(|| {
                group.barrier().unwrap();
                let group = group.grow(&[5, 7], patient()).unwrap();
                assert_eq!(sum_of_members(&group), 13);
                group.shutdown().unwrap();
            });
        }
        for (number, late) in [(5, 400), (7, 0)] {
            let (store, options) = (Arc::clone(&store), init_options(Over::Tcp, &token));
            scope.spawn(move || {
                let newcomer = Newcomer::from_store(store.clone(), number, options).unwrap();
                // It is invited already.
                let invited = format!("reform/invited/{number}");
                store.get(&invited, PATIENCE).unwrap();
                std::thread::sleep(Duration::from_millis(late));
                let group = newcomer.join(&patient()).unwrap().expect("the job runs");
                assert_eq!(sum_of_members(&group), 13);
                group.shutdown().unwrap();
            });
        }
    });
}

/// It was stopped, or hangs in a file system.
#[test]
fn a_newcomer_that_has_asked_and_does_not_come_is_left_out() {
    let (store, _, groups) = two_with_store(Over::Tcp);
    for (key, value) in [("joining", "1"), ("taken/5", "1"), ("joining/1", "5")] {
        let key = format!("reform/{key}");
        store.set(&key, value.as_bytes()).unwrap();
    }
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(|| {
                let asked = group.membership_requests().read().unwrap();
                assert_eq!(asked.joining, [5]);
                group.barrier().unwrap();
                let group = group.grow(&[5], patient()).unwrap();
                assert_eq!(group.global_ranks(), [0, 1]);
                assert!(group.membership_requests().read().unwrap().is_none());
                assert_eq!(sum_of_members(&group), 1);
                group.shutdown().unwrap();
            });
        }
    });
}

#[test]
fn a_newcomer_that_is_lost_before_it_joins_holds_nobody_up() {
    let (store, _, groups) = two_with_store(Over::Shm);
    on_each(groups, |group| {
        group.barrier().unwrap();
        report_lost(&*store, 4, "it is a test").unwrap();
        let group = group.grow(&[4], patient()).unwrap();
        assert_eq!((group.world_size(), sum_of_members(&group)), (2, 1));
        group.shutdown().unwrap();
    });
}

/// It has come to the meeting, and is lost before it connects to the others.
#[test]
fn a_member_that_is_lost_before_it_connects_is_not_waited_for() {
    let (store, _, groups) = two_with_store(Over::Tcp);
    let started = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let text = store.get("reform/invited/7", PATIENCE).unwrap();
            let invitation: serde_json::Value = serde_json::from_slice(&text).unwrap();
            let meeting = format!("reform/{:016x}/1", invitation["job"].as_u64().unwrap());
            store.set(&format!("{meeting}/here/7"), b"1").unwrap();
            let decided = store.get(&format!("{meeting}/members"), PATIENCE);
            assert_eq!(decided.unwrap(), b"0 1 7");
            std::thread::sleep(Duration::from_millis(300));
            report_lost(&*store, 7, "it is a test").unwrap();
        });
        for group in groups {
            scope.spawn(|| {
                group.barrier().unwrap();
                let group = group.grow(&[7], patient()).unwrap();
                assert_eq!((group.world_size(), group.generation()), (2, 2));
                assert_eq!(sum_of_members(&group), 1);
                group.shutdown().unwrap();
            });
        }
    });
    assert!(started.elapsed() < PATIENCE / 4, "{:?}", started.elapsed());
}

#[test]
fn a_rank_that_is_asked_to_leaves_and_holds_nobody_up() {
    for over in [Over::Shm, Over::Tcp] {
        let (store, _, groups) = two_with_store(over);
        // Numbers that are no members' are not those of this group.
        for number in [0, 9] {
            report_leaving(&*store, number).unwrap();
        }
        report_hold(&*store, Some("it is a test")).unwrap();
        on_each(groups, |group| {
            let asked = group.membership_requests().read().unwrap();
            assert_eq!((asked.joining, asked.leaving), (vec![], vec![0]));
            assert_eq!(asked.hold.as_deref(), Some("it is a test"));
            group.barrier().unwrap();
            if group.rank() == 0 {
                return group.shutdown().unwrap();
            }
            report_lost(&*store, 0, "it has left").unwrap();
            report_hold(&*store, None).unwrap();
            let group = group.grow(&[], patient()).unwrap();
            assert_eq!((group.rank(), group.world_size()), (0, 1));
            assert!(group.membership_requests().read().unwrap().is_none());
            group.shutdown().unwrap();
        });
    }
}

#[test]
fn a_process_number_that_is_used_twice_is_refused() {
    for over in [Over::Shm, Over::Tcp] {
        let (store, token, groups) = two_with_store(over);
        let newcomer = |number| {
            Newcomer::from_store(Arc::clone(&store), number, init_options(over, &token)).unwrap()
        };
        let refused = |error: Error, number: usize, why: &str| {
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            let words = format!("process number {number} is {why}");
            assert!(error.to_string().contains(&words), "{error}");
        };
        const OTHER: &str = "that of another process";
        for (newcomers, number, why) in [
            (&[1][..], 1, "that of a member"),
            (&[7, 5, 7][..], 7, "given twice"),
        ] {
            let error = groups[0].clone().grow(newcomers, patient()).unwrap_err();
            refused(error, number, why);
        }
        report_lost(&*store, 9, "it is a test").unwrap();
        refused(newcomer(9).join(&patient()).unwrap_err(), 9, OTHER);
        let requests = groups[0].membership_requests();
        let wait_for = |numbers: &[usize]| {
            while requests.read().unwrap().joining != numbers {
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        std::thread::scope(|scope| {
            let [member, five] = [1, 5].map(|number| {
                let newcomer = newcomer(number);
                scope.spawn(move || newcomer.join(&patient()))
            });
            while !member.is_finished() {
                requests.read().unwrap();
            }
            refused(member.join().unwrap().unwrap_err(), 1, "that of a member");
            wait_for(&[5]);
            // It waits, it has joined, it was lost.
            refused(newcomer(5).join(&patient()).unwrap_err(), 5, OTHER);
            for group in groups {
                scope.spawn(move || {
                    let group = group.grow(&[5], patient()).unwrap();
                    assert_eq!(sum_of_members(&group), 6);
                    group.shutdown().unwrap();
                });
            }
            let group = five.join().unwrap().unwrap().expect("the job runs");
            assert_eq!(sum_of_members(&group), 6);
            refused(newcomer(5).join(&patient()).unwrap_err(), 5, OTHER);
            group.shutdown().unwrap();
        });
        report_lost(&*store, 5, "it is a test").unwrap();
        refused(newcomer(5).join(&patient()).unwrap_err(), 5, OTHER);
    }
}

#[test]
fn a_newcomer_hears_that_the_job_is_over() {
    let (store, token, _groups) = two_with_store(Over::Shm);
    assert!(!is_over(&*store).unwrap());
    report_over(&*store, "all is done").unwrap();
    assert!(is_over(&*store).unwrap());
    let newcomer = Newcomer::from_store(store, 2, init_options(Over::Shm, &token)).unwrap();
    assert!(newcomer.join(&patient()).unwrap().is_none());
}

/// A garbled invitation is an error and no wait.
#[test]
fn an_invitation_that_is_none_is_refused() {
    let (store, token, _groups) = two_with_store(Over::Shm);
    store.set("reform/invited/2", b"{\"job\": 1}").unwrap();
    let newcomer = Newcomer::from_store(store, 2, init_options(Over::Shm, &token)).unwrap();
    let error = newcomer.join(&patient()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
}

#[test]
fn a_straggler_is_refused_with_the_reason() {
    everywhere(|over| {
        let formed = Barrier::new(4);
        on_each(groups(over, 4), |group| {
            let rank = group.rank();
            all_ready(&group, &formed);
            if rank == 2 {
                formed.wait();
                let error = group.shrink(hasty()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Excluded, "{error}");
                let text = error.to_string();
                assert!(
                    text.contains("generation 1 was formed without this rank (first rank 2)")
                        && text.contains("first ranks 0, 1, 3")
                        && text.contains("waited 1.2 s"),
                    "{text}"
                );
                return;
            }
            let group = group.shrink(hasty()).unwrap();
            formed.wait();
            for _ in 0..20 {
                assert_eq!(sum_of_members(&group), 4);
            }
            group.shutdown().unwrap();
        });
    });
}

#[test]
fn less_than_a_majority_does_not_go_on() {
    let gate = Barrier::new(4);
    on_each(groups(Over::Tcp, 4), |group| {
        all_ready(&group, &gate);
        if group.rank() >= 2 {
            return;
        }
        let error = group
            .shrink(ShrinkOptions {
                timeout: Duration::from_millis(3000),
                ..hasty()
            })
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("2 of 4 ranks came within 3.0 s, 3 are needed, more than half")
                && text.contains("did not come: 2, 3"),
            "{text}"
        );
    });
}

/// However the ranks are delayed, at most one group comes of it, and who is
/// not in it is told.
#[test]
fn there_is_never_more_than_one_group() {
    for round in 0..6_u64 {
        let gate = Barrier::new(5);
        let outcomes = on_each(groups(Over::Shm, 5), |group| {
            all_ready(&group, &gate);
            let rank = group.rank() as u64;
            let pause = (rank * 7919 + round * 104_729) % 400;
            std::thread::sleep(Duration::from_millis(pause));
            let options = ShrinkOptions {
                min_world: Some(2),
                straggler_wait: Duration::from_millis(100),
                timeout: PATIENCE,
            };
            match group.shrink(options) {
                Ok(group) => {
                    let sum = sum_of_members(&group);
                    let outcome = (group.generation(), group.world_size(), sum);
                    group.shutdown().unwrap();
                    Some(outcome)
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Excluded, "{error}");
                    None
                }
            }
        });
        let members: Vec<i64> = (0..5).filter(|r| outcomes[*r as usize].is_some()).collect();
        let want = (1, members.len(), members.iter().sum::<i64>());
        assert!(members.len() >= 2, "round {round}: {outcomes:?}");
        for outcome in outcomes.iter().flatten() {
            assert_eq!(*outcome, want, "round {round}: {outcomes:?}");
        }
    }
}

#[test]
fn a_subgroup_cannot_be_formed_anew() {
    on_each(groups(Over::Thread, 2), |group| {
        let sub = group.new_group(&[0, 1]).unwrap().unwrap();
        let error = sub.shrink(hasty()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        group.barrier().unwrap();
    });
}

#[test]
fn a_store_that_died_with_rank_0_is_the_end_and_says_so() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let token = Token::generate().unwrap();
    let gate = Arc::new(Barrier::new(3));
    let members: Vec<_> = (0..3)
        .map(|rank| {
            let (token, gate) = (token.clone(), gate.clone());
            std::thread::spawn(move || {
                let group = ProcessGroup::init(InitOptions {
                    init_method: format!("tcp://127.0.0.1:{port}"),
                    rank: Some(rank),
                    world_size: Some(3),
                    ..init_options(Over::Tcp, &token)
                })
                .unwrap();
                all_ready(&group, &gate);
                if rank == 0 {
                    return;
                }
                group.barrier().unwrap_err();
                let error = group.shrink(hasty()).unwrap_err();
                assert!(
                    error.to_string().contains("rank 0 hosts the store"),
                    "{error}"
                );
            })
        })
        .collect();
    for member in members {
        member.join().unwrap();
    }
}

/// Every rank aborts at the same moment with a cause of its own; each is a
/// "host" of its own here. All report the same one.
#[test]
fn hosts_agree_on_one_first_cause() {
    for _ in 0..10 {
        let gate = Barrier::new(4);
        let errors = on_each(groups(Over::Tcp, 4), |group| {
            all_ready(&group, &gate);
            let rank = group.rank();
            group.abort(&format!("cause of {rank}"));
            let error = group.barrier().unwrap_err();
            gate.wait();
            error
        });
        let origin = errors[0].origin_rank().unwrap();
        for error in &errors {
            assert_eq!(error.origin_rank(), Some(origin), "{errors:#?}");
            assert!(error.message().contains(&format!("cause of {origin}")));
        }
    }
}

/// A store that hangs does not hold an abort up.
#[test]
fn an_abort_does_not_wait_for_a_store_that_hangs() {
    struct Hangs(MemStore, std::sync::atomic::AtomicBool);
    impl phalanx_store::Store for Hangs {
        fn set(&self, key: &str, value: &[u8]) -> phalanx_store::Result<()> {
            self.0.set(key, value)
        }
        fn get(&self, key: &str, timeout: Duration) -> phalanx_store::Result<Vec<u8>> {
            self.0.get(key, timeout)
        }
        fn try_get(&self, key: &str) -> phalanx_store::Result<Option<Vec<u8>>> {
            self.0.try_get(key)
        }
        fn wait(&self, keys: &[&str], timeout: Duration) -> phalanx_store::Result<()> {
            self.0.wait(keys, timeout)
        }
        fn add(&self, key: &str, delta: i64) -> phalanx_store::Result<i64> {
            self.0.add(key, delta)
        }
        fn compare_set(
            &self,
            key: &str,
            expected: Option<&[u8]>,
            desired: &[u8],
        ) -> phalanx_store::Result<Vec<u8>> {
            while self.1.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.0.compare_set(key, expected, desired)
        }
        fn delete(&self, key: &str) -> phalanx_store::Result<bool> {
            self.0.delete(key)
        }
        fn delete_prefix(&self, prefix: &str) -> phalanx_store::Result<u64> {
            self.0.delete_prefix(prefix)
        }
    }
    let store = Arc::new(Hangs(MemStore::new(), false.into()));
    let token = Token::generate().unwrap();
    let members: Vec<_> = (0..2)
        .map(|rank| {
            let (store, options) = (store.clone(), init_options(Over::Tcp, &token));
            std::thread::spawn(move || ProcessGroup::from_store(store, rank, 2, options))
        })
        .collect();
    let members = members
        .into_iter()
        .map(|m| m.join().unwrap().unwrap())
        .collect();
    let gate = Barrier::new(2);
    let took = on_each(members, |group: ProcessGroup| {
        group.barrier().unwrap();
        if gate.wait().is_leader() {
            store.1.store(true, SeqCst);
        }
        gate.wait();
        let start = Instant::now();
        if group.rank() == 0 {
            group.abort("no time");
        }
        let error = group.barrier().unwrap_err();
        assert_eq!(error.origin_rank(), Some(0), "{error}");
        start.elapsed()
    });
    store.1.store(false, SeqCst);
    assert!(took.iter().all(|t| *t < SOON), "{took:?}");
}

const PLACE: &str = "PHALANX_TEST_REFORM_STORE";
const TOKEN: &str = "PHALANX_TEST_REFORM_TOKEN";
const RANK: &str = "PHALANX_TEST_REFORM_RANK";
const OVER: &str = "PHALANX_TEST_REFORM_OVER";
const PROCESSES: usize = 4;

struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A rank that is a process of its own: reduces until somebody dies, forms
/// anew, and so on; ends well when two are left and have reduced.
#[test]
fn child() {
    let Ok(place) = std::env::var(PLACE) else {
        return;
    };
    let variable = |name| std::env::var(name).unwrap();
    let token = Token::from_hex(&variable(TOKEN)).unwrap();
    let rank: usize = variable(RANK).parse().unwrap();
    let over = if variable(OVER) == "tcp" {
        Over::Tcp
    } else {
        Over::Shm
    };
    let store = phalanx_store::TcpStore::connect(&place, token.clone(), PATIENCE).unwrap();
    let options = init_options(over, &token);
    let mut group = ProcessGroup::from_store(Arc::new(store), rank, PROCESSES, options).unwrap();
    let mut data = vec![1f32; 20_000];
    loop {
        let store = group.store();
        store
            .set(&format!("test/ready/{}/{rank}", group.generation()), b"1")
            .unwrap();
        if group.world_size() == 2 {
            break;
        }
        let error: Error = loop {
            data.fill(1.0);
            match group.all_reduce(&mut data, ReduceOp::Sum) {
                Ok(()) => assert!(data.iter().all(|x| *x == group.world_size() as f32)),
                Err(error) => break error,
            }
        };
        assert!(
            matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Aborted),
            "{error}"
        );
        group = group
            .shrink(ShrinkOptions {
                min_world: Some(2),
                ..hasty()
            })
            .unwrap();
    }
    group.shutdown().unwrap();
}

fn kill_two_of_four(over: &str, victims: [usize; 2]) {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind("127.0.0.1:0".parse().unwrap(), token.clone()).unwrap();
    let place = server.local_addr().to_string();
    let temp = tempfile::tempdir().unwrap();
    let mut ranks: Vec<Rank> = (0..PROCESSES)
        .map(|rank| {
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "reform::child", "--nocapture"])
                .env(PLACE, &place)
                .env(TOKEN, token.to_hex())
                .env(RANK, rank.to_string())
                .env(OVER, over)
                .env("TMPDIR", temp.path())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            Rank(child)
        })
        .collect();
    let store = phalanx_store::TcpStore::connect(&place, token, PATIENCE).unwrap();
    use phalanx_store::Store;
    let mut alive: Vec<usize> = (0..PROCESSES).collect();
    for (generation, victim) in victims.into_iter().enumerate() {
        let ready: Vec<String> = alive
            .iter()
            .map(|r| format!("test/ready/{generation}/{r}"))
            .collect();
        let ready: Vec<&str> = ready.iter().map(String::as_str).collect();
        store.wait(&ready, PATIENCE).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        ranks[victim].0.kill().unwrap();
        let killed = Instant::now();
        alive.retain(|r| *r != victim);
        let again: Vec<String> = alive
            .iter()
            .map(|r| format!("test/ready/{}/{r}", generation + 1))
            .collect();
        let again: Vec<&str> = again.iter().map(String::as_str).collect();
        store.wait(&again, PATIENCE).unwrap();
        let took = killed.elapsed();
        assert!(took < SOON, "{over} {victims:?}: {took:?}");
    }
    for rank in alive {
        let status = ranks[rank].0.wait().unwrap();
        assert!(status.success(), "{over} {victims:?} rank {rank}: {status}");
    }
    drop(ranks);
    let left: Vec<_> = std::fs::read_dir(temp.path()).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    let shared = std::fs::read_dir(Path::new("/dev/shm")).unwrap().flatten();
    assert!(
        !shared
            .into_iter()
            .any(|e| e.file_name().to_string_lossy().contains("phalanx"))
    );
}

#[test]
fn killed_processes_are_left_behind_over_shm() {
    at_once(&[[0, 2], [3, 1]], |victims| {
        kill_two_of_four("shm", *victims)
    });
}

#[test]
fn killed_processes_are_left_behind_over_tcp() {
    at_once(&[[0, 3], [1, 0]], |victims| {
        kill_two_of_four("tcp", *victims)
    });
}

/// The calls of the old handle carry over.
#[test]
fn defaults_of_the_handle_carry_over() {
    let failed = Barrier::new(2);
    on_each(groups(Over::Thread, 2), |group| {
        let hasty_calls = group.with_call(Call {
            label: Some("the label".into()),
            timeout: Some(Duration::from_millis(50)),
            ..Call::default()
        });
        drop(group);
        let group = hasty_calls.shrink(hasty()).unwrap();
        if group.rank() == 0 {
            let error = group.recv(&mut [0u8; 1], 1).unwrap_err();
            failed.wait();
            assert!(error.to_string().contains("the label"), "{error}");
        } else {
            failed.wait();
        }
    });
}
