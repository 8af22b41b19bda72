//! Ranks that are busy on their own and say so are waited for beyond the deadline; others are not.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use phalanx_comm::{Call, Error, ErrorKind, ProcessGroup, ReduceOp};

use crate::common::{Over, PATIENCE, SOON, at_once, everywhere, groups, on_each};

/// The deadline of the operations here. Over TCP it must be longer than the time between two signs of life.
const DEADLINE: Duration = Duration::from_secs(5);

/// Longer than that.
const LONG: Duration = Duration::from_secs(8);

/// `group` after its first operation, with the deadline.
fn hasty(group: &ProcessGroup) -> ProcessGroup {
    group.barrier().unwrap();
    group.with_call(Call {
        timeout: Some(DEADLINE),
        ..Call::default()
    })
}

#[test]
fn a_rank_in_a_phase_is_waited_for_beyond_the_deadline() {
    everywhere(|over| {
        at_once(&[in_a_barrier, in_an_all_reduce, in_a_message], |wait| {
            on_each(groups(over, 3), |group| {
                // No rank sleeps before all have come to the first barrier.
                let began = Instant::now();
                let hasty = hasty(&group);
                wait(&group, &hasty);
                assert!(began.elapsed() >= LONG || group.rank() == 1);
                let phase = group.flight().phase;
                assert_eq!(phase, None, "{over:?}: none was set before the first");
                group.shutdown().unwrap();
            });
        });
    });
}

fn in_a_barrier(group: &ProcessGroup, hasty: &ProcessGroup) {
    if group.rank() == 0 {
        let _outer = group.phase("evaluating", PATIENCE);
        {
            // One phase may begin inside another.
            let _inner = group.phase("saving", PATIENCE);
            std::thread::sleep(DEADLINE);
        }
        assert_eq!(group.flight().phase.unwrap().name, "evaluating");
        std::thread::sleep(LONG - DEADLINE);
    }
    hasty.barrier().unwrap();
}

/// Nor does it matter in which round of which plan a rank is waited for.
fn in_an_all_reduce(group: &ProcessGroup, hasty: &ProcessGroup) {
    if group.rank() == 2 {
        let _phase = group.phase("loading data", PATIENCE);
        std::thread::sleep(LONG);
    }
    let mut data = vec![1.0_f32; 50_000];
    hasty.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, [3.0; 50_000]);
}

/// And in messages.
fn in_a_message(group: &ProcessGroup, hasty: &ProcessGroup) {
    let mut data = [3.0_f32; 9];
    match group.rank() {
        0 => assert_eq!(hasty.recv(&mut data, 2).unwrap(), 2),
        1 => {}
        _ => {
            let phase = group.phase("saving", PATIENCE);
            std::thread::sleep(LONG);
            drop(phase);
            hasty.send(&data, 0).unwrap();
        }
    }
}

/// How long rank 0 waits for rank 1, which does `before` and never comes, and with what error.
fn waited(over: Over, before: impl Fn(&ProcessGroup) + Sync) -> (Duration, Error) {
    let over_now = Barrier::new(2);
    let mut ends = on_each(groups(over, 2), |group| {
        let hasty = hasty(&group);
        let began = Instant::now();
        if group.rank() == 1 {
            before(&group);
            over_now.wait();
            return None;
        }
        let error = hasty.barrier().unwrap_err();
        let took = began.elapsed();
        over_now.wait();
        Some((took, error))
    });
    let (took, error) = ends.remove(0).unwrap();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{over:?}: {error}");
    (took, error)
}

#[test]
fn a_phase_is_no_excuse_beyond_its_limit_nor_after_its_end() {
    everywhere(|over| at_once(&[beyond_its_limit, after_its_end], |test| test(over)));
}

fn beyond_its_limit(over: Over) {
    let limit = Duration::from_secs(4);
    let (took, error) = waited(over, |group| {
        // Its guard lives on: the rank hangs.
        std::mem::forget(group.phase("loading data", limit));
    });
    assert!(
        took >= limit + DEADLINE - Duration::from_secs(2),
        "{over:?}: {took:?}"
    );
    assert!(took < limit + SOON, "{over:?}: {took:?}");
    let text = error.to_string();
    assert!(text.contains("waiting for rank 1"), "{over:?}: {text}");
    assert!(text.contains("in a phase of its own"), "{over:?}: {text}");
    assert!(text.contains("is in loading data for"), "{over:?}: {text}");
}

fn after_its_end(over: Over) {
    let (took, error) = waited(over, |group| drop(group.phase("loading data", PATIENCE)));
    assert!(took < SOON, "{over:?}: {took:?}");
    assert!(
        !error.to_string().contains("loading data"),
        "{over:?}: {error}"
    );
}

#[test]
fn a_phase_does_not_count_while_its_rank_is_in_an_operation() {
    everywhere(|over| {
        let gate = Barrier::new(3);
        let took = on_each(groups(over, 3), |group| {
            let hasty = hasty(&group);
            let began = Instant::now();
            if group.rank() < 2 {
                let _phase = group.phase("saving", PATIENCE);
                hasty.barrier().unwrap_err();
            }
            let took = began.elapsed();
            gate.wait();
            took
        });
        assert!(took.iter().all(|took| *took < SOON), "{over:?}: {took:?}");
    });
}
