//! How ranks wait: what they know of each other's cores, and what happens when
//! there are far too few.

use std::time::{Duration, Instant};

use phalanx_comm::{GroupOptions, InitOptions, ProcessGroup, ReduceOp};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::common::{EVERYWHERE, Over, formed, groups, on_each};

/// Forms a group whose rank r computes with `threads[r]` threads.
fn with_threads(over: Over, threads: &[usize]) -> Vec<ProcessGroup> {
    formed(over, threads.len(), |rank, options| InitOptions {
        compute_threads: Some(threads[rank]),
        ..options
    })
}

#[test]
fn threads_of_every_rank_are_counted() {
    for over in [Over::Shm, Over::Tcp] {
        for group in with_threads(over, &[1, 1000]) {
            let text = group.describe();
            assert!(text.contains("2 ranks with 1001 threads on"), "{text}");
            assert!(text.ends_with(": 10 yields, futex"), "{text}");
        }
    }
    let options = GroupOptions {
        compute_threads: Some(500),
        ..GroupOptions::default()
    };
    for group in ProcessGroup::threads(3, options) {
        let text = group.describe();
        assert!(text.contains("3 ranks x 500 threads on"), "{text}");
    }
}

#[test]
fn subgroups_know_of_those_who_are_no_members() {
    for over in EVERYWHERE {
        on_each(groups(over, 4), |group| {
            let members = [1, 3];
            if let Some(sub) = group.new_group(&members).unwrap() {
                assert_eq!(sub.world_size(), 2);
                let text = sub.describe();
                assert!(text.contains("4 ranks x 1 thread on"), "{text}");
            }
        });
    }
}

/// Eight ranks on one core: with polling, every barrier would cost scheduler
/// ticks (12 ms each); the bound below leaves 100 times what sleeping costs.
#[test]
fn eight_ranks_share_one_core_in_bounded_time() {
    const ROUNDS: usize = 300;
    const LIMIT: Duration = Duration::from_secs(40);
    // Of this thread and those that it starts.
    let all = sched_getaffinity(None).unwrap();
    let core = (0..CpuSet::MAX_CPU).find(|&c| all.is_set(c)).unwrap();
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).unwrap();
    for over in EVERYWHERE {
        for world in [4, 8] {
            let start = Instant::now();
            on_each(groups(over, world), |group| {
                assert!(group.describe().contains("on 1 core: yield 100 us"));
                for round in 0..ROUNDS {
                    let mut data = [round as f32; 100];
                    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, [(round * world) as f32; 100]);
                    group.barrier().unwrap();
                }
                group.shutdown().unwrap();
            });
            let took = start.elapsed();
            assert!(took < LIMIT, "{over:?} with {world} ranks took {took:?}");
        }
    }
}
