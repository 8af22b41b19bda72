//! The barrier that says who did not come.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use phalanx_comm::{ErrorKind, ProcessGroup, ReduceOp};
use phalanx_store::{MemStore, Store};
use phalanx_wire::Token;

use crate::common::{EVERYWHERE, Over, PATIENCE, SOON, everywhere, groups, init_options, on_each};

#[test]
fn everybody_comes() {
    for over in EVERYWHERE {
        for world in 1..=8 {
            on_each(groups(over, world), |group| {
                for _ in 0..3 {
                    group.monitored_barrier(PATIENCE).unwrap();
                }
                group.barrier().unwrap();
                let left = group.store().delete_prefix("monitored/").unwrap();
                assert_eq!(left, 0, "keys were left in the store");
            });
        }
    }
}

/// All ranks hear who was late, the late ones too; then the group goes on.
#[test]
fn late_ranks_are_named_by_rank_0_and_nothing_is_poisoned() {
    everywhere(|over| {
        for world in [2, 8] {
            let late: Vec<usize> = (0..world).filter(|r| r % 3 == 1).collect();
            // Until rank 0 has given up.
            let given_up = Barrier::new(late.len() + 1);
            let errors = on_each(groups(over, world), |group| {
                let rank = group.rank();
                if late.contains(&rank) {
                    given_up.wait();
                }
                let error = group
                    .monitored_barrier(Duration::from_millis(1500))
                    .unwrap_err();
                if rank == 0 {
                    given_up.wait();
                }
                let mut data = [1f32];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [world as f32]);
                group.monitored_barrier(PATIENCE).unwrap();
                error
            });
            let names = match world {
                2 => "rank 1 did not arrive within 1.5",
                _ => "ranks 1, 4, 7 did not arrive within 1.5",
            };
            for (rank, error) in errors.into_iter().enumerate() {
                assert_eq!(error.kind(), ErrorKind::Timeout);
                let text = error.to_string();
                assert!(text.contains("monitored_barrier: "), "{text}");
                assert!(text.contains(names), "{text}");
                if rank == 0 {
                    let arrived = if world == 8 { "0, 2, 3, 5, 6" } else { "0" };
                    assert!(text.contains(&format!("arrived: {arrived}")), "{text}");
                } else {
                    assert!(text.contains("rank 0 says: "), "{text}");
                    assert_eq!(error.peer(), Some(0));
                }
            }
        }
    });
}

#[test]
fn rank_0_that_does_not_come_is_named_and_hears_of_it() {
    for over in [Over::Thread, Over::Shm] {
        let given_up = Barrier::new(3);
        let errors = on_each(groups(over, 3), |group| {
            if group.rank() == 0 {
                given_up.wait();
            }
            let error = group
                .monitored_barrier(Duration::from_millis(200))
                .unwrap_err();
            if group.rank() > 0 {
                given_up.wait();
            }
            group.barrier().unwrap();
            error
        });
        for (rank, error) in errors.into_iter().enumerate() {
            assert_eq!(error.kind(), ErrorKind::Timeout);
            let text = error.to_string();
            let wanted = if rank == 0 {
                "ranks 1, 2 gave up before rank 0 arrived"
            } else {
                "rank 0 did not arrive within 0.20 s"
            };
            assert!(text.contains(wanted), "{text}");
        }
    }
}

#[test]
fn an_abort_ends_the_wait_at_once() {
    let start = Instant::now();
    let errors = on_each(groups(Over::Thread, 3), |group| {
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_millis(100));
            group.abort("out of memory");
            return None;
        }
        Some(group.monitored_barrier(PATIENCE).unwrap_err())
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.kind(), ErrorKind::Aborted);
        assert!(
            error.to_string().contains("rank 2: out of memory"),
            "{error}"
        );
    }
    assert!(start.elapsed() < SOON);
}

/// Job 1 ends with a barrier that rank 1 never came to, and its verdict is still there when job 2 uses the same store.
#[test]
fn a_job_does_not_read_the_verdict_of_another_in_the_same_store() {
    let all = MemStore::new();
    let job = || -> Vec<ProcessGroup> {
        let token = Token::generate().unwrap();
        let members: Vec<_> = (0..2)
            .map(|rank| {
                let store: Arc<dyn Store> = Arc::new(all.clone());
                let options = init_options(Over::Shm, &token);
                std::thread::spawn(move || ProcessGroup::from_store(store, rank, 2, options))
            })
            .collect();
        let formed = members.into_iter().map(|member| member.join().unwrap());
        formed.map(Result::unwrap).collect()
    };
    on_each(job(), |group| {
        if group.rank() == 0 {
            let late = group.monitored_barrier(Duration::from_millis(200));
            assert_eq!(late.unwrap_err().kind(), ErrorKind::Timeout);
        }
        group.barrier().unwrap();
    });
    on_each(job(), |group| group.monitored_barrier(PATIENCE).unwrap());
}
