//! The flight recorder over every transport: what an error and a dump say
//! about a rank that does not come.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use phalanx_comm::recorder::{Dump, State};
use phalanx_comm::{Bucket, Call, ErrorKind, GroupOptions, ProcessGroup, ReduceOp};

use crate::common::{EVERYWHERE, Over, SOON, everywhere, groups, on_each};

#[test]
fn late_rank_is_named_with_what_it_is_doing() {
    everywhere(|over| {
        let dir = tempfile::tempdir().unwrap();
        let gate = Barrier::new(2);
        // Over tcp a rank says what it is doing when it has done so for 5 s.
        let limit = if over == Over::Tcp { 8 } else { 3 };
        let errors = on_each(groups(over, 2), |group| {
            group.set_flight_dir(dir.path());
            group.barrier().unwrap();
            if group.rank() == 1 {
                group.set_position(3, 7);
                group.set_phase("loading data");
                gate.wait();
                return None;
            }
            let call = Call {
                label: Some("bucket 4 of 7: layer3.0.conv1.weight".into()),
                timeout: Some(Duration::from_secs(limit)),
                ..Call::default()
            };
            let bucket = Bucket::from_slice(&[1.0_f32; 100]);
            let error = group
                .all_reduce_async(bucket, ReduceOp::Mean, call)
                .wait()
                .unwrap_err();
            gate.wait();
            Some(error)
        });
        let error = errors[0].as_ref().unwrap();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{over:?}");
        let text = error.to_string();
        assert!(text.contains("waiting for rank 1"), "{over:?}: {text}");
        // The culprit comes first, behind what failed where.
        let (what, rest) = text.split_once(": rank 1 (pid ").unwrap();
        assert!(what.starts_with("rank 0: all_reduce f32 mean "), "{text}");
        assert!(rest.contains("; timed out after "), "{text}");
        assert!(text.contains("is in loading data for"), "{over:?}: {text}");
        assert!(text.contains("(epoch 3 step 7)"), "{over:?}: {text}");
        if over != Over::Tcp {
            assert!(text.contains("last completed seq 0"), "{over:?}: {text}");
        }

        let (dump, is_cut) = Dump::read(&dir.path().join("rank-0.json")).unwrap();
        assert!(!is_cut);
        let reason = dump.reason.as_deref().unwrap_or_default();
        assert!(reason.contains("timed out after "), "{reason}");
        let last = &dump.entries[0];
        assert_eq!((last.state, last.seq), (State::Aborted, Some(1)));
        assert_eq!(last.awaited, [1]);
        assert_eq!(last.slowest, Some(1));
        assert_eq!(
            dump.label_of(last),
            Some("bucket 4 of 7: layer3.0.conv1.weight")
        );
        let took = Duration::from_nanos(last.done_ns.unwrap() - last.started_ns.unwrap());
        assert!(took > Duration::from_secs(limit - 1), "{took:?}");
        assert_eq!(dump.entries[1].op, "barrier");
        assert_eq!(dump.entries[1].state, State::Done);
    });
}

#[test]
fn operations_are_recorded_with_their_times() {
    for over in EVERYWHERE {
        let dumps = on_each(groups(over, 3), |group| {
            let mut large = vec![group.rank() as f32; 100_000];
            if group.rank() == 2 {
                std::thread::sleep(Duration::from_millis(400));
            }
            group.all_reduce(&mut large, ReduceOp::Sum).unwrap();
            group.broadcast(&mut large[..10], 1).unwrap();
            let part = group.new_group(&[0, 2]).unwrap();
            if let Some(part) = part {
                part.barrier().unwrap();
            }
            if group.rank() == 0 {
                group.send(&large[..5], 1).unwrap();
            } else if group.rank() == 1 {
                group.recv(&mut large[..5], 0).unwrap();
            }
            let dump = group.flight();
            group.shutdown().unwrap();
            dump
        });
        for (rank, dump) in dumps.iter().enumerate() {
            assert_eq!((dump.rank, dump.world), (rank, 3));
            let oldest: Vec<_> = dump.entries.iter().rev().collect();
            assert!(oldest.iter().all(|entry| entry.state == State::Done));
            let reduce = oldest[0];
            assert_eq!(reduce.describe(), "all_reduce f32 sum of 100000 elements");
            assert_eq!(reduce.method, "direct");
            assert_eq!(reduce.transport, format!("{over:?}").to_lowercase());
            let took = reduce.done_ns.unwrap() - reduce.started_ns.unwrap();
            let parts = reduce.waiting_ns + reduce.folding_ns + reduce.moving_ns;
            assert!(took.abs_diff(parts) < 1000, "{took} {parts}");
            if rank < 2 {
                assert_eq!(reduce.slowest, Some(2), "{over:?}");
                assert!(reduce.waiting_ns > 20_000_000, "{reduce:?}");
            }
            assert!(reduce.folding_ns > 0);
            assert_eq!(
                oldest[1].describe(),
                "broadcast f32 of 10 elements with root 1"
            );
            let of_group = oldest.iter().filter(|entry| entry.group != 0).count();
            assert_eq!(of_group, usize::from(rank != 1), "{over:?}");
            let sent = oldest.iter().filter(|entry| entry.op == "send/recv");
            assert_eq!(sent.count(), usize::from(rank < 2));
        }
    }
}

#[test]
fn queued_operations_are_seen_behind_the_one_that_waits() {
    let gate = Barrier::new(2);
    on_each(groups(Over::Thread, 2), |group| {
        if group.rank() == 1 {
            gate.wait();
            group.abort("enough");
            return;
        }
        let works: Vec<_> = (0..3)
            .map(|_| {
                let bucket = Bucket::from_slice(&[0_u8; 10]);
                group.all_reduce_async(bucket, ReduceOp::Max, Call::default())
            })
            .collect();
        while group.flight().entries[2].state != State::Running {
            std::thread::yield_now();
        }
        let states: Vec<State> = group.flight().entries.iter().map(|e| e.state).collect();
        assert_eq!(states, [State::Queued, State::Queued, State::Running]);
        gate.wait();
        for work in works {
            assert_eq!(work.wait().unwrap_err().kind(), ErrorKind::Aborted);
        }
        let dump = group.flight();
        assert!(dump.entries.iter().all(|e| e.state == State::Aborted));
    });
}

#[test]
fn a_panic_leaves_a_dump() {
    let dir = tempfile::tempdir().unwrap();
    let mut pair = groups(Over::Thread, 2);
    let group = pair.remove(1);
    group.set_flight_dir(dir.path());
    let panicked = std::thread::spawn(move || {
        group.set_phase("forward");
        let _held = group;
        panic!("on purpose");
    });
    assert!(panicked.join().is_err());
    let (dump, _) = Dump::read(&dir.path().join("rank-1.json")).unwrap();
    assert_eq!(dump.reason.as_deref(), Some("rank 1 panicked"));
    assert_eq!(dump.phase.unwrap().name, "forward");
}

/// A group that was formed anew tells of itself: not of the failure that it
/// outlived, and by the numbers by which people know the ranks.
#[test]
fn the_next_group_reports_its_own_failure() {
    everywhere(|over| {
        let dir = tempfile::tempdir().unwrap();
        let gate = Barrier::new(4);
        let over_gate = Barrier::new(3);
        on_each(groups(over, 4), |group| {
            group.set_flight_dir(dir.path());
            group.barrier().unwrap();
            gate.wait();
            let global_rank = group.rank();
            if global_rank == 1 {
                return; // its links end
            }
            group.barrier().unwrap_err();
            let (dump, _) = Dump::read(&file_of(&dir, global_rank)).unwrap();
            assert_eq!((dump.rank, dump.generation), (global_rank, 0));
            let old = dump.taken_ns;
            let group = group.reconfigure(1, &[0, 2, 3], SOON).unwrap();
            group.set_phase("backward");
            group.barrier().unwrap();

            let healthy = group.flight();
            assert_eq!((healthy.reason, healthy.failure), (None, None), "{over:?}");
            assert_eq!((healthy.rank, healthy.world), (global_rank, 4));
            assert_eq!((healthy.generation, healthy.members), (1, vec![0, 2, 3]));
            assert!(healthy.taken_ns > old);
            over_gate.wait();

            // The last rank does not come: number 2 now, 3 to people.
            if global_rank == 3 {
                over_gate.wait();
                return;
            }
            let call = Call {
                timeout: Some(Duration::from_secs(2)),
                ..Call::default()
            };
            let error = group.with_call(call).barrier().unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Aborted),
                "{error}"
            );
            let (dump, _) = Dump::read(&file_of(&dir, global_rank)).unwrap();
            assert_eq!((dump.rank, dump.generation), (global_rank, 1), "{over:?}");
            let reason = dump.reason.as_deref().unwrap_or_default();
            assert!(reason.contains("timed out after "), "{over:?}: {reason}");
            let last = &dump.entries[0];
            assert_eq!((last.generation, last.state), (1, State::Aborted));
            assert!(last.awaited.contains(&3), "{over:?}: {last:?}");
            assert!(
                last.awaited.iter().all(|r| [0, 2, 3].contains(r)),
                "{last:?}"
            );
            assert!(dump.taken_ns >= last.done_ns.unwrap());
            assert!(dump.phase.unwrap().for_ms >= 1500, "{over:?}");
            over_gate.wait();
        });
    });
}

/// A subgroup's end is not its ranks' when they go on.
#[test]
fn the_abort_of_a_subgroup_is_outlived() {
    let dir = tempfile::tempdir().unwrap();
    // After a barrier of the group alone a rank may still be in it.
    let (both, all) = (Barrier::new(2), Barrier::new(3));
    on_each(groups(Over::Thread, 3), |group| {
        group.set_flight_dir(dir.path());
        let rank = group.rank();
        let part = group.new_group(&[0, 2]).unwrap();
        if let Some(part) = part {
            both.wait();
            if rank == 0 {
                part.abort("enough of it");
            }
            part.barrier().unwrap_err();
            assert!(group.flight().reason.unwrap().contains("enough of it"));
        }
        group.barrier().unwrap();
        all.wait();
        assert_eq!(group.flight().reason, None);
        // What ends the rank comes later.
        if rank == 0 {
            group.abort("now all");
        }
        group.barrier().unwrap_err();
        let (dump, _) = Dump::read(&file_of(&dir, rank)).unwrap();
        let reason = dump.reason.unwrap();
        assert!(reason.contains("now all"), "{reason}");
    });
}

fn file_of(dir: &tempfile::TempDir, rank: usize) -> std::path::PathBuf {
    dir.path().join(format!("rank-{rank}.json"))
}

/// In a folder that others may write to, a link where our file is made is not
/// followed.
#[test]
fn a_dump_is_not_written_through_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let precious = dir.path().join("precious");
    std::fs::write(&precious, "not ours").unwrap();
    let name = format!(".rank-0.json.{}.tmp", std::process::id());
    std::os::unix::fs::symlink(&precious, dir.path().join(name)).unwrap();
    let group = groups(Over::Thread, 1).remove(0);
    group.set_flight_dir(dir.path());
    group.abort("to have a dump");
    assert_eq!(std::fs::read_to_string(&precious).unwrap(), "not ours");
    let (dump, _) = Dump::read(&file_of(&dir, 0)).unwrap();
    assert_eq!(dump.reason.as_deref(), Some("to have a dump"));
    let left = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 2, "the temporary file is gone");
}

/// Ranks from 128 up are named as any other: by the rank that waits for one, and by one that waits for a rank
/// that itself waits for another.
#[test]
fn ranks_above_127_are_named() {
    let groups = ProcessGroup::threads(200, GroupOptions::default());
    let call = Call {
        timeout: Some(Duration::from_secs(2)),
        ..Call::default()
    };
    std::thread::scope(|scope| {
        // Rank 199 does not send.
        let waits = scope.spawn(|| groups[150].recv(&mut [0.0_f32], 199));
        // Until rank 150 waits.
        let since = Instant::now();
        while groups[150]
            .flight()
            .entries
            .first()
            .is_none_or(|e| e.awaited != [199])
        {
            assert!(since.elapsed() < SOON, "{:?}", groups[150].flight().entries);
            std::thread::yield_now();
        }
        let hasty = groups[0].with_call(call);
        let error = hasty.recv(&mut [0.0_f32], 150).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{text}");
        assert!(text.contains("waiting for rank 199"), "{text}");
        assert!(text.contains("rank 150 seems to wait"), "{text}");
        assert_eq!(groups[0].flight().entries[0].awaited, [150]);
        let error = waits.join().unwrap().unwrap_err();
        assert_eq!(error.origin_rank(), Some(0), "{error}");
    });
}
