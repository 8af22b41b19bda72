//! The recorder by itself: wrap-around, many writers, hostile memory and files.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::layout::{ENTRIES, WORDS, entry_at};
use super::*;
use crate::plan::{Collective, Method};
use crate::{DType, ReduceOp};

fn recorder() -> Recorder {
    Recorder::new(1, 4, &Place::Private).unwrap()
}

#[test]
fn the_first_group_of_the_job_is_the_launchers() {
    let of = |rank, world, variables: &[(&str, &str)]| {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name);
        Place::of_group(rank, world, |name| find(name).map(|(_, v)| (*v).to_owned()))
    };
    let job = [("RANK", "1"), ("WORLD_SIZE", "4")];
    assert!(matches!(of(1, 4, &[]), Place::Private));
    assert!(matches!(of(1, 4, &job[..1]), Place::Private));
    // Variables that count something else.
    assert!(matches!(of(0, 4, &job), Place::Private));
    assert!(matches!(of(0, 4, &job), Place::Beside));
    assert!(matches!(of(1, 2, &job), Place::Beside));
    assert!(matches!(of(1, 4, &job), Place::Launcher));
    assert!(matches!(of(1, 4, &job), Place::Beside));
}

fn operation(count: usize, label: Option<&Arc<str>>) -> Operation {
    Operation {
        collective: Collective::AllReduce,
        method: Some(Method::AllReduceDirect),
        short_segments: false,
        automatic: true,
        dtype: Some(DType::F32),
        op: Some(ReduceOp::Sum),
        root: 0,
        target: 0,
        count,
        tail_padding: 0,
        lengths: 0,
        plan: None,
        label: label.cloned(),
        timeout: None,
    }
}

#[test]
fn the_last_4096_operations_are_kept_newest_first() {
    let recorder = recorder();
    let extra = 1000;
    for count in 0..ENTRIES + extra {
        let ticket = recorder.queued(2, 0, &operation(count, None));
        recorder.abandon(ticket);
    }
    let dump = recorder.dump();
    assert_eq!(dump.recorded as usize, ENTRIES + extra);
    assert_eq!(dump.entries.len(), ENTRIES);
    let counts: Vec<u64> = dump.entries.iter().map(|entry| entry.count).collect();
    let want: Vec<u64> = (extra as u64..(ENTRIES + extra) as u64).rev().collect();
    assert_eq!(counts, want);
    let newest = &dump.entries[0];
    assert_eq!(newest.state, State::Aborted);
    assert_eq!((newest.generation, newest.seq), (2, None));
    assert_eq!(
        newest.describe(),
        format!("all_reduce f32 sum of {} elements", ENTRIES + extra - 1)
    );
    assert!(newest.queued_ns <= dump.taken_ns);
}

/// Many writers and a reader that copies all the time: no entry is lost once
/// all is quiet, and none is ever a mixture of two.
#[test]
fn concurrent_writers_never_mix() {
    const WRITERS: usize = 4;
    const EACH: usize = 20_000;
    let recorder = recorder();
    let labels: Vec<Arc<str>> = (0..WRITERS).map(|w| format!("writer {w}").into()).collect();
    let check = |dump: &Dump| {
        for entry in &dump.entries {
            let writer = entry.count as usize / EACH;
            assert_eq!(entry.group as usize, writer);
            let label = format!("writer {writer}");
            assert_eq!(dump.label_of(entry), Some(label.as_str()));
        }
    };
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|w| {
                let (recorder, label) = (&recorder, &labels[w]);
                scope.spawn(move || {
                    for i in 0..EACH {
                        let operation = operation(w * EACH + i, Some(label));
                        recorder.abandon(recorder.queued(0, w as u32, &operation));
                    }
                })
            })
            .collect();
        let reader = scope.spawn(|| {
            let mut copies = 0;
            while running.load(SeqCst) || copies == 0 {
                check(&recorder.dump());
                copies += 1;
            }
        });
        writers.into_iter().for_each(|w| w.join().unwrap());
        running.store(false, SeqCst);
        reader.join().unwrap();
    });
    // A writer may have come to an entry that another was still making.
    let dump = recorder.dump();
    assert!(dump.recorded as usize >= WRITERS * EACH);
    assert_eq!(dump.entries.len(), ENTRIES);
    check(&dump);
}

/// Where a rank hangs must not be forgotten because it does other things.
#[test]
fn operations_that_are_not_over_stay() {
    let recorder = recorder();
    let stuck = recorder.queued(0, 0, &operation(77, None));
    for count in 0..3 * ENTRIES {
        recorder.abandon(recorder.queued(0, 9, &operation(count, None)));
    }
    let dump = recorder.dump();
    assert_eq!(dump.entries.len(), ENTRIES);
    let oldest = dump.entries.last().unwrap();
    assert_eq!((oldest.n, oldest.count), (stuck, 77));
    assert_eq!(oldest.state, State::Queued);
    assert_eq!(dump.entries[0].count as usize, 3 * ENTRIES - 1);
}

#[test]
fn beyond_4096_operations_in_flight_nothing_is_noted_and_nothing_breaks() {
    let recorder = recorder();
    let tickets: Vec<u64> = (0..ENTRIES + 10)
        .map(|count| recorder.queued(0, 0, &operation(count, None)))
        .collect();
    assert!(tickets[..ENTRIES].iter().all(|t| *t != NO_TICKET));
    assert!(tickets[ENTRIES..].iter().all(|t| *t == NO_TICKET));
    tickets.iter().for_each(|ticket| recorder.abandon(*ticket));
    let dump = recorder.dump();
    assert_eq!(dump.entries.len(), ENTRIES);
    assert!(dump.entries.iter().all(|e| (e.count as usize) < ENTRIES));
    assert!(dump.entries.iter().all(|e| e.state == State::Aborted));
    assert_ne!(recorder.queued(0, 0, &operation(1, None)), NO_TICKET);
}

#[test]
fn labels_beyond_the_room_are_said_to_be_lost() {
    let recorder = recorder();
    for i in 0..LABELS + 5 {
        let label: Arc<str> = format!("label {i} {}", "é".repeat(200)).into();
        recorder.queued(0, 0, &operation(i, Some(&label)));
        // The same text at another address is the same label.
        let again: Arc<str> = label.to_string().into();
        recorder.queued(0, 0, &operation(i, Some(&again)));
    }
    let dump = recorder.dump();
    assert_eq!(dump.labels.len(), LABELS);
    for entry in &dump.entries {
        let label = dump.label_of(entry).unwrap();
        if (entry.count as usize) < LABELS {
            assert!(label.starts_with(&format!("label {} é", entry.count)));
            assert!(label.len() <= LABEL_BYTES);
        } else {
            assert_eq!(label, "a label that was not kept");
        }
    }
}

#[test]
fn phase_position_and_reason_are_in_the_dump() {
    let recorder = recorder();
    assert_eq!(recorder.dump().phase, None);
    recorder.set_phase("loading data");
    recorder.set_position(3, 212);
    std::thread::sleep(Duration::from_millis(30));
    recorder.failed((0, 0), "rank 2 is gone", Failure::PeerLost);
    recorder.failed((0, 0), "an echo of it", Failure::Aborted);
    let dump = recorder.dump();
    assert_eq!((dump.rank, dump.world), (1, 4));
    assert_eq!(dump.reason.as_deref(), Some("rank 2 is gone"));
    assert_eq!(dump.failure, Some(Failure::PeerLost));
    let at = dump.position.unwrap();
    assert_eq!((at.epoch, at.step), (3, 212));
    let phase = dump.phase.unwrap();
    assert_eq!(phase.name, "loading data");
    assert!((25..60_000).contains(&phase.for_ms), "{}", phase.for_ms);
    // The moment of the failure counts, not that of the reading.
    std::thread::sleep(Duration::from_millis(50));
    let later = recorder.dump();
    assert!(later.taken_ns.abs_diff(dump.taken_ns) < 5_000_000);
}

#[test]
fn a_launcher_sees_declared_phases_and_when_groups_were_formed() {
    let recorder = recorder();
    assert_eq!(
        (recorder.dump().is_busy, recorder.dump().formed_unix_ns),
        (false, 0)
    );
    recorder.join(2, &[0, 1], None);
    let first = recorder.dump();
    assert_eq!((first.generation, first.joined), (2, 2));
    assert!(first.joined_unix_ns > 0 && first.formed_unix_ns > 0);
    std::thread::sleep(Duration::from_millis(30));
    // A subgroup, and the next generation.
    recorder.join(2, &[0, 1], None);
    assert!(
        recorder
            .dump()
            .formed_unix_ns
            .abs_diff(first.formed_unix_ns)
            < 5_000_000
    );
    recorder.join(3, &[1], None);
    let next = recorder.dump();
    assert_eq!((next.generation, next.joined), (3, 2));
    assert!(next.formed_unix_ns > first.formed_unix_ns + 5_000_000);

    let short = recorder.begin_phase("saving", Duration::from_millis(20));
    std::thread::sleep(Duration::from_millis(30));
    assert!(!recorder.dump().is_busy, "its time is over");
    let long = recorder.begin_phase("evaluating", Duration::from_secs(60));
    assert!(recorder.dump().is_busy);
    recorder.end_phase(&long);
    recorder.end_phase(&short);
    assert!(!recorder.dump().is_busy);
}

#[test]
fn a_launcher_reads_what_a_dead_rank_wrote() {
    use std::os::fd::AsRawFd;
    let file = create_memory().unwrap();
    assert!(Dump::from_memory(&file).unwrap_err().contains("never"));
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let memory = Memory::shared(&path).unwrap();
    assert!(Memory::shared(&path).is_err(), "it has an owner");
    let private = recorder();
    private.set_phase("backward");
    private.queued(5, 0, &operation(77, None));
    for i in 0..WORDS {
        let word = private.memory.word(i).load(Relaxed);
        memory.word(i).store(word, Relaxed);
    }
    drop(memory);
    let dump = Dump::from_memory(&file).unwrap();
    assert_eq!(dump.pid, std::process::id());
    assert_eq!(dump.entries[0].count, 77);
    assert_eq!(dump.phase.unwrap().name, "backward");
}

#[test]
fn unsealed_and_short_memory_files_are_refused() {
    use std::os::fd::AsRawFd;
    let file = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, memory::BYTES as u64).unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    assert!(Memory::shared(&path).is_err(), "not sealed");
    rustix::fs::ftruncate(&file, 4096).unwrap();
    rustix::fs::fcntl_add_seals(
        &file,
        rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW,
    )
    .unwrap();
    assert!(Memory::shared(&path).is_err(), "too short");
    assert!(Dump::from_memory(&file).is_err());
    assert!(Memory::shared("/dev/null").is_err());
}

/// A small generator: the same bytes in every run.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

#[test]
fn whatever_the_memory_says_can_be_decoded() {
    let clock = Clock::best();
    for seed in 1..200 {
        let mut next = random(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
        let mut words = recorder().memory.copy();
        let newest = next() % 10_000;
        words[head::TICKETS] = newest;
        for _ in 0..3000 {
            let ticket = newest.saturating_sub(next() % 300);
            let at = entry_at(ticket);
            words[at] = ticket.wrapping_add(1);
            words[at + 1 + (next() % 15) as usize] = next() >> (next() % 64);
            words[(next() % WORDS as u64) as usize] = next() >> (next() % 64);
        }
        if seed % 4 == 0 {
            words[head::TICKETS] = next();
        }
        let dump = Dump::decode(&words, clock.anchor());
        for entry in &dump.entries {
            let _ = (entry.describe(), dump.label_of(entry));
        }
    }
}

fn written(recorder: &Recorder) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    recorder.set_dir(dir.path());
    let path = recorder.write().unwrap().unwrap();
    assert_eq!(path.file_name().unwrap(), "rank-1.json");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    std::fs::read(path).unwrap()
}

#[test]
fn files_come_back_whole_or_up_to_the_cut() {
    let recorder = recorder();
    let label: Arc<str> = "bucket 0 of 2: fc1.weight".into();
    for count in 0..20 {
        recorder.queued(0, 0, &operation(count, Some(&label)));
    }
    let bytes = written(&recorder);
    let (whole, is_cut) = Dump::from_json(&bytes).unwrap();
    assert!(!is_cut);
    assert_eq!(whole.entries.len(), 20);
    assert_eq!(whole.label_of(&whole.entries[3]), Some(&*label));
    let mut salvaged = 0;
    for end in 0..bytes.len() - 1 {
        match Dump::from_json(&bytes[..end]) {
            Ok((dump, is_cut)) => {
                assert!(is_cut || dump.entries.len() == 20);
                assert_eq!(dump.entries, whole.entries[..dump.entries.len()]);
                salvaged = salvaged.max(dump.entries.len());
            }
            Err(e) => assert!(!e.to_string().is_empty()),
        }
    }
    assert_eq!(salvaged, 20);
}

#[test]
fn hostile_files_are_refused_or_tamed() {
    let bytes = written(&recorder());
    let text = String::from_utf8(bytes.clone()).unwrap();
    for (change, want) in [
        (("flight 1", "flight 2"), "has the format"),
        (("\"rank\":1", "\"rank\":9"), "claims to be of rank 9 of 4"),
        (("\"world\":4", "\"world\":99999999999"), "claims"),
        (
            ("\"rank\":1", "\"rank\":-1"),
            "is not a flight recorder dump",
        ),
        (
            ("\"format\"", "\"fromat\""),
            "is not a flight recorder dump",
        ),
    ] {
        let lie = text.replace(change.0, change.1);
        let error = Dump::from_json(lie.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(want), "{change:?}: {error}");
    }
    for garbage in [&b"[1]"[..], b"{}", b"\xff\xfe", &[b'['; 100_000]] {
        assert!(Dump::from_json(garbage).is_err());
    }
    let mut next = random(7);
    for _ in 0..5000 {
        let mut bytes = bytes.clone();
        for _ in 0..1 + next() % 4 {
            let at = (next() % bytes.len() as u64) as usize;
            bytes[at] = next() as u8;
        }
        if let Ok((dump, _)) = Dump::from_json(&bytes) {
            assert!(!dump.host.chars().any(char::is_control));
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rank-0.json");
    std::fs::write(&path, vec![b' '; MAX_DUMP_BYTES as usize + 1]).unwrap();
    let error = Dump::read(&path).unwrap_err().to_string();
    assert!(error.contains("rank-0.json: larger than 8 MiB"), "{error}");
}

/// A process of a host that was suspended, lost and resumed, whose number another process has in the next attempt.
#[test]
fn the_file_of_a_later_attempt_stays() {
    let dir = tempfile::tempdir().unwrap();
    let dump = |joined: u32, at: u64| {
        let mut dump = recorder().dump();
        (dump.joined, dump.joined_unix_ns) = (joined, at);
        dump.pid = joined * 100 + at as u32;
        dump
    };
    let written = |dump: &Dump| {
        let path = dump.write_into(dir.path()).unwrap();
        Dump::read(&path).unwrap().0.pid
    };
    let (lost, next) = (dump(0, 10), dump(1, 20));
    assert_eq!(written(&lost), lost.pid);
    assert_eq!(written(&next), next.pid);
    assert_eq!(written(&lost), next.pid, "the job went on without it");
    assert_eq!(written(&next), next.pid, "its own is replaced");
    // A run that was resumed into the same folder, and one of a host whose clock is behind.
    for later in [dump(0, 30), dump(2, 5)] {
        assert_eq!(written(&later), later.pid);
    }
}

#[test]
fn a_failure_of_a_newer_version_is_another_one() {
    let recorder = recorder();
    recorder.failed((0, 0), "rank 2 is gone", Failure::PeerLost);
    let dir = tempfile::tempdir().unwrap();
    let path = recorder.dump().write_into(dir.path()).unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    let read = |text: &str| Dump::from_json(text.as_bytes()).unwrap().0.failure;
    assert_eq!(read(&text), Some(Failure::PeerLost));
    let newer = text.replace("\"peer_lost\"", "\"out_of_coffee\"");
    assert_eq!(read(&newer), Some(Failure::Other));
    // Written before there were kinds.
    let older = text.replace("\"failure\":\"peer_lost\",", "");
    assert_ne!(older, text);
    assert_eq!(read(&older), None);
}
