//! Holders of the token who do not belong there, or have gone mad.

use std::time::{Duration, Instant};

use phalanx_store::{Store, TcpStore};
use phalanx_wire::handshake::{Awaiting, Hello, Initiator, Outcome, Role};
use phalanx_wire::store_msg::{MAX_KEY_BYTES, MAX_VALUE_BYTES, Request};

use super::Shot;
use crate::line::{Answer, Line, Place};
use crate::scene::{Scene, Tallies, Target};

/// Keeps to the protocol, with the right token and a hello that `change` has
/// made wrong.
fn say_hello(shot: &Shot<'_>, change: impl FnOnce(Hello) -> Hello) -> Option<Answer> {
    let target = shot.target;
    let role = match target.place {
        Place::Tcp(_) => Role::Peer,
        Place::Unix(_) => Role::SharedMemory,
    };
    let hello = change(Hello::new(role, target.token.job_id()).rank(1).world(2));
    let Some(mut line) = target.open(shot.source) else {
        return Some(Answer::Unreachable);
    };
    let verdict = introduce(&mut line, hello, target);
    Some(match verdict {
        Some(Outcome::Welcome(_)) => Answer::Welcomed,
        Some(Outcome::Rejected(why)) => Answer::rejected(&why.to_string()),
        None => line.judge(),
    })
}

fn introduce(line: &mut Line, hello: Hello, target: &Target) -> Option<Outcome> {
    let (initiator, hello) = Initiator::start(hello, &target.token).ok()?;
    line.say(&hello);
    let challenge = line.message(Awaiting::Challenge)?;
    let (proving, proof) = initiator.answer(&challenge).ok()?;
    line.say(&proof);
    proving.finish(&line.message(Awaiting::Verdict)?).ok()
}

/// Another job's number.
pub fn wrong_job(shot: &Shot<'_>) -> Option<Answer> {
    say_hello(shot, |hello| Hello {
        job: hello.job ^ 1,
        ..hello
    })
}

/// The group has been formed anew since, or is not yet.
pub fn stale_epoch(shot: &Shot<'_>) -> Option<Answer> {
    let epoch = [1, 7, u32::MAX][shot.turn as usize % 3];
    say_hello(shot, |hello| hello.generation(epoch))
}

/// Another group.
pub fn wrong_group(shot: &Shot<'_>) -> Option<Answer> {
    say_hello(shot, |hello| hello.group(99))
}

/// Another number of ranks.
pub fn wrong_world(shot: &Shot<'_>) -> Option<Answer> {
    let world = [0, 3, u32::MAX][shot.turn as usize % 3];
    say_hello(shot, |hello| hello.world(world))
}

/// A rank that nobody expects.
pub fn wrong_rank(shot: &Shot<'_>) -> Option<Answer> {
    let rank = [0, 2, u32::MAX][shot.turn as usize % 3];
    say_hello(shot, |hello| hello.rank(rank))
}

/// A stream that nobody expects.
pub fn wrong_stream(shot: &Shot<'_>) -> Option<Answer> {
    say_hello(shot, |hello| hello.stream(777))
}

/// A second process that says it is rank 0, or rank 1: the first keeps its
/// place. Before the ranks have come there is nobody to be a duplicate of, so
/// this looks for them all the time.
pub fn duplicate_rank(scene: &Scene, tallies: &Tallies, _: usize) {
    let mut store = None;
    while scene.sleep(Duration::from_millis(5)) {
        if store.is_none() && scene.store().is_some() {
            store = scene.join(Duration::from_secs(2)).ok();
        }
        for rank in 0..2 {
            let answer = store.as_ref().and_then(|store| claim(store, rank));
            if let Some(answer) = answer {
                tallies.note("duplicate-rank", answer);
            }
        }
    }
}

/// Claims a rank's place if it is taken.
fn claim(store: &TcpStore, rank: usize) -> Option<Answer> {
    let key = format!("comm/0/0/2/member/{rank}");
    let before = store.try_get(&key).ok()??;
    let after = store.compare_set(&key, None, b"me").ok()?;
    if after == before {
        return Some(Answer::Refused("the place is taken".to_owned()));
    }
    if after == b"me" {
        // The group has formed in between and its keys are gone: ours must
        // not stay for the next.
        let _ = store.delete(&key);
        return None;
    }
    Some(Answer::Odd("another rank's record was replaced".to_owned()))
}

/// What a member may try against the store's limits. None of it may grow the
/// store's process beyond its bounds, or keep the other members waiting.
pub fn mad(scene: &Scene, tallies: &Tallies, _: usize) {
    while scene.sleep(Duration::from_millis(200)) {
        if let Some(target) = scene.store() {
            std::thread::scope(|scope| {
                for act in [oversize, pipeline, half_requests, waits, deaf] {
                    let target = &target;
                    scope.spawn(move || act(scene, target, tallies));
                }
            });
        }
    }
}

fn note(tallies: &Tallies, what: &str, times: usize) {
    tallies.note_many("mad-member", Answer::Refused(what.to_owned()), times as u64);
}

/// A member's bare connection.
fn join(target: &Target) -> Option<Line> {
    let mut line = Line::open(&target.place, 0, Duration::from_secs(4))?;
    let hello = Hello::new(Role::StoreClient, target.token.job_id());
    match introduce(&mut line, hello, target)? {
        Outcome::Welcome(_) => Some(line),
        Outcome::Rejected(_) => None,
    }
}

/// Lengths beyond every limit: told, and closed.
fn oversize(_: &Scene, target: &Target, tallies: &Tallies) {
    let mut long_key = vec![1];
    long_key.extend(((MAX_KEY_BYTES + 1) as u16).to_le_bytes());
    long_key.resize(MAX_KEY_BYTES + 64, b'k');
    let mut long_value = b"\x01\x01\0k".to_vec();
    long_value.extend(((MAX_VALUE_BYTES + 1) as u32).to_le_bytes());
    long_value.resize(MAX_VALUE_BYTES + 64, 0);
    let mut many = vec![4, 0, 0, 0, 0];
    many.extend(1025_u16.to_le_bytes());
    many.resize(5000, 1);
    for body in [&long_key[..], &long_value, &many, &[99, 0, 0], &[0]] {
        let Some(mut line) = join(target) else {
            continue;
        };
        line.say(&(body.len() as u32).to_le_bytes());
        line.say(body);
        if line.hear(6).is_some_and(|answer| answer[4..] == [0x88, 5]) {
            note(tallies, "bad requests", 1);
        }
    }
    for length in [0_u32, 1 << 24, 0x7fff_ffff, u32::MAX] {
        let Some(mut line) = join(target) else {
            continue;
        };
        line.say(&length.to_le_bytes());
        if line.hear(6).is_some_and(|answer| answer[4..] == [0x88, 5]) {
            note(tallies, "bad lengths", 1);
        }
    }
}

fn encoded(request: &Request<'_>) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    request.encode(&mut bytes).ok()?;
    Some(bytes)
}

/// Sends `request` on so many connections and holds them for a second. Returns how many there were.
fn hold(scene: &Scene, target: &Target, connections: usize, request: &[u8]) -> usize {
    let lines = (0..connections).filter_map(|_| {
        let mut line = join(target)?;
        line.say(request);
        Some(line)
    });
    let held: Vec<Line> = lines.collect();
    scene.sleep(Duration::from_secs(1));
    held.len()
}

/// Two megabytes of tiny requests at once: others come first now and then.
fn pipeline(_: &Scene, target: &Target, tallies: &Tallies) {
    let Some(mut line) = join(target) else { return };
    let Some(one) = encoded(&Request::TryGet { key: "a" }) else {
        return;
    };
    line.say(&one.repeat((2 << 20) / one.len()));
    line.judge();
    note(tallies, "pipelined requests", (2 << 20) / one.len());
}

/// Large requests of which the last byte never comes.
fn half_requests(scene: &Scene, target: &Target, tallies: &Tallies) {
    let value = vec![7; MAX_VALUE_BYTES];
    let set = Request::CompareSet {
        key: "half",
        expected: Some(&value),
        desired: &value,
    };
    let Some(mut request) = encoded(&set) else {
        return;
    };
    request.pop();
    note(tallies, "half requests", hold(scene, target, 150, &request));
}

/// Waits for a thousand keys of a thousand bytes, many times.
fn waits(scene: &Scene, target: &Target, tallies: &Tallies) {
    let keys: Vec<String> = (0..1024).map(|i| format!("{i:0>1024}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let wait = Request::Wait {
        keys,
        timeout_ms: u32::MAX,
    };
    let Some(request) = encoded(&wait) else {
        return;
    };
    note(tallies, "long waits", hold(scene, target, 200, &request));
}

/// Asks for a megabyte again and again, and takes none of it.
fn deaf(scene: &Scene, target: &Target, tallies: &Tallies) {
    let Some(mut line) = join(target) else { return };
    let (key, value) = ("attacks/large", vec![7; MAX_VALUE_BYTES]);
    let set = encoded(&Request::Set { key, value: &value });
    let (Some(set), Some(get)) = (set, encoded(&Request::TryGet { key })) else {
        return;
    };
    line.say(&set);
    line.hear(5);
    let start = Instant::now();
    let mut held = Vec::new();
    for _ in 0..150 {
        let Some(mut line) = join(target) else {
            continue;
        };
        line.say(&get.repeat(20));
        held.push(line);
        if start.elapsed() > Duration::from_secs(5) || scene.is_over() {
            break;
        }
    }
    scene.sleep(Duration::from_secs(1));
    note(tallies, "answers not taken", held.len());
}
