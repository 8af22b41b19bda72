//! Golden sentences.

use phalanx_comm::recorder::{Phase, Position};

use super::*;

const S: u64 = 1_000_000_000;

fn entry(seq: u64, state: State) -> Entry {
    Entry {
        n: seq,
        seq: Some(seq),
        generation: 3,
        group: 0,
        op: "all_reduce".into(),
        dtype: Some("f32".into()),
        reduce: Some("mean".into()),
        count: 1000,
        method: "direct".into(),
        root: 0,
        target: 0,
        transport: "shm".into(),
        label: Some(0),
        state,
        queued_ns: seq * S,
        started_ns: Some(seq * S),
        progress_ns: None,
        done_ns: (state == State::Done).then_some(seq * S + 1000),
        waiting_ns: 0,
        folding_ns: 0,
        moving_ns: 0,
        awaited: Vec::new(),
        slowest: None,
    }
}

/// A rank that completed 809 to `done` and is in `running`.
fn dump(rank: usize, done: u64, running: Option<u64>) -> Dump {
    let mut entries: Vec<Entry> = running
        .map(|seq| entry(seq, State::Running))
        .into_iter()
        .collect();
    entries.extend((809..=done).rev().map(|seq| entry(seq, State::Done)));
    Dump {
        format: Dump::FORMAT.into(),
        rank,
        world: 4,
        generation: 3,
        formed_unix_ns: 0,
        joined: 0,
        joined_unix_ns: 0,
        job: 0,
        instead_of: None,
        is_lost: false,
        members: Vec::new(),
        host: "node-a".into(),
        pid: 100,
        reason: None,
        failure: None,
        ended: None,
        taken_ns: 900 * S,
        taken_unix_ns: 2000 * S,
        folder: None,
        stop_grace: None,
        is_busy: false,
        phase: None,
        position: None,
        recorded: 812,
        labels: vec!["bucket 4 of 7: layer3.0.conv1.weight, layer3.0.bn1.bias".into()],
        entries,
    }
}

fn late_loader() -> Dump {
    Dump {
        phase: Some(Phase {
            name: "loading data".into(),
            for_ms: 58_000,
        }),
        ..dump(2, 811, None)
    }
}

fn hang() -> Vec<Dump> {
    vec![
        dump(0, 811, Some(812)),
        dump(1, 811, Some(812)),
        late_loader(),
        dump(3, 811, Some(812)),
    ]
}

#[test]
fn a_late_rank() {
    let story = diagnose(&hang());
    assert_eq!(
        story.sentence,
        "generation 3: ranks 0, 1 and 3 wait in all_reduce seq 812 (bucket 4 of 7: layer3.0.conv1.weight, \
         layer3.0.bn1.bias); rank 2 last completed seq 811 and is in loading data for 58 s"
    );
    assert_eq!((story.seq, story.desync), (Some(812), false));
    assert_eq!(
        (&story.waiting[..], &story.late[..]),
        (&[0, 1, 3][..], &[2][..])
    );
    assert!(story.missing.is_empty());
}

#[test]
fn a_killed_rank_inside_and_outside_of_the_operation() {
    let mut dumps = hang();
    dumps[2].ended = Some("was killed by SIGKILL".into());
    dumps[2].position = Some(Position {
        epoch: 1,
        step: 212,
    });
    let story = diagnose(&dumps);
    assert!(
        story.sentence.ends_with(
            "rank 2 was killed by SIGKILL, last completed seq 811 and was in loading data for 58 s (epoch 1 step 212)"
        ),
        "{}",
        story.sentence
    );
    dumps[2] = Dump {
        ended: Some("was killed by SIGKILL".into()),
        ..dump(2, 811, Some(812))
    };
    let story = diagnose(&dumps);
    assert!(
        story
            .sentence
            .ends_with("rank 2 was killed by SIGKILL and was in it too"),
        "{}",
        story.sentence
    );
    assert_eq!(story.late, [2]);
}

#[test]
fn a_rank_that_was_killed_after_its_operation_is_named_too() {
    let mut dumps = hang();
    dumps[2] = Dump {
        ended: Some("was killed by SIGKILL".into()),
        ..dump(2, 812, None)
    };
    let story = diagnose(&dumps);
    assert_eq!(
        story.sentence,
        "generation 3: ranks 0, 1 and 3 wait in all_reduce seq 812 (bucket 4 of 7: layer3.0.conv1.weight, \
         layer3.0.bn1.bias); rank 2 was killed by SIGKILL and last completed seq 812; all have come to it"
    );
}

#[test]
fn missing_and_old_dumps_are_named() {
    let mut dumps = hang();
    dumps.remove(1);
    dumps[2].generation = 2;
    let story = diagnose(&dumps);
    assert_eq!(
        story.sentence,
        "generation 3: rank 0 waits in all_reduce seq 812 (bucket 4 of 7: layer3.0.conv1.weight, \
         layer3.0.bn1.bias); rank 2 last completed seq 811 and is in loading data for 58 s; \
         ranks 1 and 3 left no dumps"
    );
    assert_eq!(story.missing, [1, 3]);
    assert_eq!(story.notes, ["ignored: rank 3 of an earlier generation"]);
    // Without the late rank's own dump it is at least named.
    let story = diagnose(&[
        dump(0, 811, Some(812)),
        dump(1, 811, Some(812)),
        dump(3, 811, Some(812)),
    ]);
    assert!(
        story.sentence.ends_with("; rank 2 left no dump"),
        "{}",
        story.sentence
    );
}

#[test]
fn nobody_misses_the_dump_of_a_rank_that_was_left_behind() {
    let mut dumps: Vec<Dump> = [0, 2, 3]
        .map(|rank| dump(rank, 811, Some(812)))
        .into_iter()
        .collect();
    assert_eq!(diagnose(&dumps).missing, [1]);
    for dump in &mut dumps {
        dump.members = vec![0, 2, 3];
    }
    let story = diagnose(&dumps);
    assert!(story.missing.is_empty());
    assert!(
        story.sentence.ends_with("all have come to it"),
        "{}",
        story.sentence
    );
}

/// Of an elastic job that has lost rank 1 in generation 1, and started process 4 in its place: those in it, and the lost one.
fn elastic() -> Vec<Dump> {
    let mut dumps: Vec<Dump> = [0, 2, 3, 4]
        .map(|rank| Dump {
            members: vec![0, 2, 3, 4],
            formed_unix_ns: 1300 * S,
            joined: 1,
            ..dump(rank, 811, Some(812))
        })
        .into();
    dumps[3].joined = 3;
    dumps[3].joined_unix_ns = 1300 * S;
    dumps[3].instead_of = Some(1);
    let lost = Dump {
        generation: 1,
        joined: 1,
        ended: Some("was killed by SIGKILL".into()),
        is_lost: true,
        taken_unix_ns: 1200 * S,
        entries: Vec::new(),
        ..late_loader()
    };
    dumps.insert(1, Dump { rank: 1, ..lost });
    dumps
}

#[test]
fn ranks_that_were_lost_and_joined_are_told_in_the_order_of_time() {
    let mut dumps = elastic();
    dumps[2].entries.remove(0);
    let story = diagnose(&dumps);
    assert_eq!(
        story.sentence,
        "generation 3: ranks 0, 3 and 4 wait in all_reduce seq 812 (bucket 4 of 7: layer3.0.conv1.weight, \
         layer3.0.bn1.bias); rank 2 last completed seq 811"
    );
    assert_eq!(
        (&story.members[..], &story.late[..]),
        (&[0, 2, 3, 4][..], &[2][..])
    );
    assert!(
        story.missing.is_empty() && story.notes.is_empty(),
        "{story:?}"
    );
    let text = super::super::render(&story, &dumps);
    let lines: Vec<&str> = text.lines().skip(1).take(3).collect();
    assert_eq!(
        lines,
        [
            "  00:20:00 UTC  rank 1 (pid 100, host node-a) was lost in generation 1: was killed by SIGKILL; loading data",
            "  00:21:40 UTC  rank 4 (pid 100, host node-a) joined generation 3 in place of rank 1",
            "  00:21:40 UTC  generation 3 was formed of ranks 0 and 2-4, which the group numbers from 0 in this order",
        ]
    );
    // Its launcher has read the recorder late.
    for dump in dumps.iter_mut().filter(|dump| dump.is_lost) {
        dump.taken_unix_ns += 3_600_000_000_000;
    }
    let late = super::super::render(&diagnose(&dumps), &dumps);
    let late: Vec<&str> = late.lines().skip(1).take(3).collect();
    assert_eq!(late[0], lines[0].replace("00:20:00", "00:21:40"));
    assert_eq!(late[1..], lines[1..]);
    // The table has those that are in it.
    assert!(
        text.contains("rank 0          rank 2          rank 3          rank 4\n"),
        "{text}"
    );
    // One that has joined and left nothing is missing, though there were four ranks at first.
    dumps.pop();
    let story = diagnose(&dumps);
    assert_eq!(story.missing, [4]);
    assert!(
        story.sentence.ends_with("; rank 4 left no dump"),
        "{}",
        story.sentence
    );
}

#[test]
fn only_lost_ranks_have_left_dumps() {
    let dumps = vec![elastic().remove(1)];
    let story = diagnose(&dumps);
    assert_eq!(
        story.sentence,
        "the job went on without rank 1; no other rank has left a dump, as when a job succeeds"
    );
    assert_eq!(story.changes.len(), 1);
    assert!(story.missing.is_empty());
}

/// The others have not formed a new group yet.
#[test]
fn a_rank_that_was_just_lost_is_one_of_its_generation() {
    let mut dumps = hang();
    dumps[2].ended = Some("was killed by SIGKILL".into());
    dumps[2].is_lost = true;
    let story = diagnose(&dumps);
    assert_eq!(
        (&story.late[..], &story.waiting[..]),
        (&[2][..], &[0, 1, 3][..])
    );
    assert!(
        story
            .sentence
            .contains("; rank 2 was killed by SIGKILL, last completed")
    );
    assert_eq!(story.changes.len(), 1);
}

#[test]
fn different_operations_under_one_number() {
    let mut dumps = hang();
    let mut other = entry(812, State::Aborted);
    other.op = "broadcast".into();
    other.reduce = None;
    other.count = 7;
    other.root = 1;
    other.label = None;
    dumps[2].entries.insert(0, other);
    let story = diagnose(&dumps);
    assert_eq!(
        story.sentence,
        "generation 3: ranks are in different operations: at seq 812 ranks 0, 1 and 3 called all_reduce f32 mean \
         of 1000 elements (bucket 4 of 7: layer3.0.conv1.weight, layer3.0.bn1.bias) and rank 2 called \
         broadcast f32 of 7 elements with root 1"
    );
    assert!(story.desync);
    dumps[2].entries[0] = Entry {
        method: "ring".into(),
        ..entry(812, State::Running)
    };
    let story = diagnose(&dumps);
    assert!(story.sentence.contains("by direct"), "{}", story.sentence);
    assert!(
        story
            .sentence
            .contains("rank 2 called all_reduce f32 mean of 1000 elements by ring"),
        "{}",
        story.sentence
    );
}

#[test]
fn all_came_and_one_does_not_go_on() {
    let mut dumps: Vec<Dump> = (0..4).map(|rank| dump(rank, 811, Some(812))).collect();
    for rank in [0, 1, 3] {
        dumps[rank].entries[0].awaited = vec![2];
    }
    let story = diagnose(&dumps);
    assert!(
        story
            .sentence
            .contains("ranks 0-3 wait in all_reduce seq 812"),
        "{}",
        story.sentence
    );
    assert!(
        story
            .sentence
            .ends_with("all have come to it; rank 2 did not continue"),
        "{}",
        story.sentence
    );
    assert_eq!(story.late, [2]);
}

/// Between ranks 1 and 3; most wait for rank 2, which only heard of it late.
#[test]
fn nobody_is_blamed_by_vote_for_a_broken_connection() {
    let mut dumps: Vec<Dump> = (0..4).map(|rank| dump(rank, 811, Some(812))).collect();
    for rank in [0, 1, 3] {
        dumps[rank].entries[0].awaited = vec![2];
    }
    dumps[3].reason = Some("all_reduce: rank 1 is gone: its connection was closed".into());
    dumps[3].failure = Some(Failure::PeerLost);
    let story = diagnose(&dumps);
    let sentence = &story.sentence;
    assert!(sentence.ends_with("all have come to it"), "{sentence}");
    assert!(story.late.is_empty());
    assert!(story.notes[0].contains("on rank 3: all_reduce: rank 1 is gone"));
}

#[test]
fn nothing_is_wrong_or_nothing_is_known() {
    let dumps: Vec<Dump> = (0..4).map(|rank| dump(rank, 811, None)).collect();
    assert_eq!(
        diagnose(&dumps).sentence,
        "generation 3: no rank is in an operation; all last completed seq 811"
    );
    assert_eq!(
        diagnose(&[]).sentence,
        "generation 0: no operation was recorded"
    );
}

#[test]
fn the_first_failure_tells_its_reason() {
    let mut dumps = hang();
    dumps[0].reason = Some("timed out".into());
    dumps[1].reason = Some("the group was aborted by rank 0".into());
    dumps[1].taken_unix_ns += S;
    dumps[3].entries.push(Entry {
        seq: None,
        n: 900,
        ..entry(0, State::Queued)
    });
    assert_eq!(
        diagnose(&dumps).notes,
        [
            "first failure, on rank 0: timed out",
            "rank 3 has 1 more operation queued"
        ]
    );
}

#[test]
fn who_comes_last_is_counted() {
    let mut dumps = hang();
    for entry in &mut dumps[2].entries {
        entry.started_ns = entry.started_ns.map(|at| at + 3_000_000);
    }
    let story = diagnose(&dumps);
    assert_eq!(story.compared, 3);
    assert_eq!(
        story.slowest,
        [Arrivals {
            rank: 2,
            last: 3,
            mean_late_us: 3000
        }]
    );
    // Another host's monotonic clock began elsewhere; the wall clock counts.
    let mut far = dumps.clone();
    far[2].host = "node-b".into();
    far[2].taken_ns += 50 * S;
    for entry in &mut far[2].entries {
        entry.started_ns = entry.started_ns.map(|at| at + 50 * S);
    }
    let story = diagnose(&far);
    assert_eq!(story.slowest[0].mean_late_us, 3000);
    assert!(story.notes[0].contains("clocks of several hosts"));
}

#[test]
fn a_subgroup_is_named() {
    let mut dumps: Vec<Dump> = (0..4).map(|rank| dump(rank, 811, None)).collect();
    dumps[1].entries.insert(
        0,
        Entry {
            group: 0x99,
            label: None,
            ..entry(5, State::Running)
        },
    );
    dumps[3].entries.insert(
        0,
        Entry {
            group: 0x99,
            label: None,
            ..entry(4, State::Done)
        },
    );
    assert_eq!(
        diagnose(&dumps).sentence,
        "generation 3: rank 1 waits in all_reduce seq 5 of group 0x99; rank 3 last completed seq 4"
    );
}

#[test]
fn who_waits_in_another_group_is_said_to_be_there() {
    let mut dumps = [dump(0, 811, None), dump(1, 811, Some(812))];
    dumps.iter_mut().for_each(|dump| dump.world = 2);
    let other = Entry {
        group: 0x2f,
        label: None,
        awaited: vec![1],
        ..entry(4, State::Running)
    };
    dumps[0].entries.insert(0, other);
    assert_eq!(
        diagnose(&dumps).sentence,
        "generation 3: rank 1 waits in all_reduce seq 812 (bucket 4 of 7: layer3.0.conv1.weight, layer3.0.bn1.bias); \
         rank 0 last completed seq 811 and is in all_reduce seq 4 of group 0x2f, where it waits for rank 1"
    );
}

/// Whatever a hostile file says, there is a sentence and no panic.
#[test]
fn absurd_dumps_are_survived() {
    let mut state = 7_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..2000 {
        let mut dumps = hang();
        for dump in &mut dumps {
            dump.taken_ns = next() >> (next() % 64);
            dump.taken_unix_ns = next() >> (next() % 64);
            for entry in &mut dump.entries {
                match next() % 6 {
                    0 => entry.seq = Some(next() >> (next() % 64)),
                    1 => entry.started_ns = Some(next()),
                    2 => entry.label = Some(next() as u16),
                    3 => entry.awaited = vec![next() as u32],
                    4 => entry.done_ns = Some(next()),
                    _ => entry.group = next() as u32,
                }
            }
        }
        let story = diagnose(&dumps);
        assert!(story.sentence.starts_with("generation 3: "));
        let _ = super::super::render(&story, &dumps);
        let _ = dumps.iter().map(last_known).count();
    }
}
