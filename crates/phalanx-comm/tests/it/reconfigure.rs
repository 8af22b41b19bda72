//! The next group of the same processes, and how a group ends before it.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use phalanx_comm::{Call, Detached, ErrorKind, ProcessGroup, report_lost};
use phalanx_store::{MemStore, Store};
use phalanx_wire::Token;
use phalanx_wire::store_msg::{Request, Response};

use crate::common::{
    EVERYWHERE, Over, PATIENCE, SOON, all_ready, groups, init_options, on_each, sum_of_members,
    two_with_store,
};

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
    impl Store for Hangs {
        fn location(&self) -> String {
            self.0.location()
        }

        fn execute(&self, request: &Request<'_>) -> phalanx_store::Result<Response> {
            while matches!(request, Request::CompareSet { .. }) && self.1.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.0.execute(request)
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

/// Ranks are numbered as the list says, and one that is not in it forms nothing.
#[test]
fn the_next_group_has_the_ranks_that_are_named() {
    for over in EVERYWHERE {
        let gate = Barrier::new(3);
        on_each(groups(over, 3), |group| {
            let rank = group.rank();
            all_ready(&group, &gate);
            if rank == 1 {
                let mut process = group.detach(false).unwrap();
                let last = process.last().unwrap().clone();
                assert_eq!((last.generation, &last.members[..]), (0, &[0, 1, 2][..]));
                for members in [&[2, 0][..], &[1, 1]] {
                    let next = process.next(4, members).unwrap();
                    let error = process.form(next, PATIENCE).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
                }
                return;
            }
            let other = group.clone();
            let group = group.reconfigure(4, &[2, 0], PATIENCE).unwrap();
            assert_eq!((group.generation(), group.global_ranks()), (4, &[2, 0][..]));
            assert_eq!((group.rank(), group.global_rank()), (1 - rank / 2, rank));
            assert_eq!(sum_of_members(&group), 2);
            other.barrier().unwrap_err();
            drop(other);
            let sub = group.new_group(&[0, 1]).unwrap().unwrap();
            let error = sub.reconfigure(5, &[2, 0], PATIENCE).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            group.shutdown().unwrap();
        });
    }
}

/// A process that was in no group takes part with what the others have measured.
#[test]
fn a_process_that_was_in_no_group_joins_the_next_one() {
    for over in [Over::Shm, Over::Tcp] {
        let (store, token, groups) = two_with_store(over);
        let (give, take) = std::sync::mpsc::sync_channel(2);
        std::thread::scope(|scope| {
            for group in groups {
                let give = give.clone();
                scope.spawn(move || {
                    group.barrier().unwrap();
                    let mut process = group.detach(false).unwrap();
                    let next = process.next(1, &[0, 7, 1]).unwrap();
                    give.send(next.clone()).unwrap();
                    let group = process.form(next, PATIENCE).unwrap();
                    assert_eq!(sum_of_members(&group), 8);
                    group.shutdown().unwrap();
                });
            }
            let options = init_options(over, &token);
            let mut process = Detached::from_store(store, 7, options).unwrap();
            assert!(process.last().is_none() && process.next(1, &[7]).is_none());
            let group = process.form(take.recv().unwrap(), PATIENCE).unwrap();
            assert_eq!((group.rank(), group.flight().joined), (1, 1));
            assert_eq!(sum_of_members(&group), 8);
            group.shutdown().unwrap();
        });
    }
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
        let group = hasty_calls.reconfigure(1, &[0, 1], PATIENCE).unwrap();
        if group.rank() == 0 {
            let error = group.recv(&mut [0u8; 1], 1).unwrap_err();
            failed.wait();
            assert!(error.to_string().contains("the label"), "{error}");
        } else {
            failed.wait();
        }
    });
}
