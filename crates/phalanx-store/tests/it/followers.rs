//! Copies of a server's keys, and clients that go on at another server.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::common::{LONG, Raw, SHORT, eventually, join, loopback, serve, serve_with};
use phalanx_garble::Dice;
use phalanx_store::{
    ErrorKind, Follower, ServerOptions, ServerState, Store, TcpServer, TcpStore, auth,
};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason, Role};
use phalanx_wire::store_msg::{MAX_KEY_BYTES, MAX_VALUE_BYTES, Request};

/// How long a test looks whether something does not happen.
const NEVER: Duration = Duration::from_millis(150);
/// How soon a client must be at another server.
const SOON: Duration = Duration::from_secs(1);

type Map = BTreeMap<String, Vec<u8>>;

fn follow(server: &TcpServer, token: &Token, id: u64) -> Follower {
    Follower::connect(&server.local_addr().to_string(), token.clone(), id, LONG).unwrap()
}

fn copy(follower: &Follower) -> Map {
    follower.entries().into_iter().collect()
}

/// Follows on a thread until the connection ends.
fn keep_following(mut follower: Follower) -> JoinHandle<Follower> {
    thread::spawn(move || {
        while follower.follow(LONG).is_ok() {}
        follower
    })
}

/// Writes the address as a whole.
fn name(file: &Path, server: &TcpServer) {
    let part = file.with_extension("part");
    std::fs::write(&part, format!("{}\n", server.local_addr())).unwrap();
    std::fs::rename(part, file).unwrap();
}

/// A different seed in every process.
fn dice() -> Dice {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let seed = now.as_nanos() as u64 | 1;
    println!("seed {seed}");
    Dice(seed)
}

/// Does a random operation on the store and on the map, and compares the results.
fn operate(store: &TcpStore, map: &mut Map, prefix: &str, dice: &mut Dice) {
    let key = format!("{prefix}{}/{}", dice.below(3), dice.below(5));
    let value = vec![dice.byte(); dice.below(400)];
    match dice.below(8) {
        0 => {
            store.delete(&key).unwrap();
            map.remove(&key);
        }
        1 => {
            store.delete_prefix(&key[..key.len() - 1]).unwrap();
            map.retain(|k, _| !k.starts_with(&key[..key.len() - 1]));
        }
        2 | 3 => {
            let expected = (dice.below(3) > 0).then(|| map.get(&key).cloned());
            let expected = expected.unwrap_or(Some(b"another".to_vec()));
            let now = store
                .compare_set(&key, expected.as_deref(), &value)
                .unwrap();
            if map.get(&key) == expected.as_ref() {
                map.insert(key.clone(), value);
            }
            assert_eq!(now, map.get(&key).cloned().unwrap_or_default(), "{key}");
        }
        4 => {
            assert_eq!(
                store.try_get(&key).unwrap().as_ref(),
                map.get(&key),
                "{key}"
            );
        }
        _ => {
            store.set(&key, &value).unwrap();
            map.insert(key, value);
        }
    }
}

/// When an operation is answered, both copies have it.
#[test]
fn copies_have_what_is_answered() {
    let (server, token) = serve();
    let store = join(&server, &token);
    store.set("before", b"1").unwrap();
    let will = store.leave_will("will", b"gone").unwrap().unwrap();
    let mut copies = [follow(&server, &token, 8), follow(&server, &token, 3)];
    let (tell, told) = channel();
    let (go, may_go) = channel();
    let client = thread::spawn(move || {
        let mut dice = dice();
        let mut map = Map::from([("before".to_owned(), b"1".to_vec())]);
        for round in 0..150 {
            match round % 10 {
                9 => {
                    let sum = store.add("n", 3).unwrap();
                    map.insert("n".to_owned(), sum.to_string().into_bytes());
                }
                8 => {
                    store.append("text", &[round]).unwrap();
                    map.entry("text".to_owned()).or_default().push(round);
                }
                // Two elements come, one goes.
                6 | 7 => {
                    store.queue_push("q", &[round]).unwrap();
                    let number = 2 * (round / 10) + round % 10 - 6;
                    map.insert(format!("q/{number:016x}"), vec![round]);
                }
                5 if round > 9 => {
                    let first = store.queue_pop("q", LONG).unwrap();
                    let key = format!("q/{:016x}", round / 10 - 1);
                    assert_eq!(map.remove(&key), Some(first));
                }
                _ => operate(&store, &mut map, "k", &mut dice),
            }
            tell.send(map.clone()).unwrap();
            may_go.recv().unwrap();
        }
    });
    let mut last = Map::new();
    let mut dice = dice();
    loop {
        // Time for an answer that comes too early.
        thread::sleep(Duration::from_micros(dice.roll() % 500));
        match told.try_recv() {
            Ok(map) => {
                for follower in &copies {
                    assert_eq!(copy(follower), map);
                }
                last = map;
                go.send(()).unwrap();
            }
            Err(std::sync::mpsc::TryRecvError::Disconnected) => break,
            Err(_) => {
                let follower = &mut copies[dice.below(2)];
                let _ = follower.follow(Duration::from_millis(1)).unwrap();
            }
        }
    }
    client.join().unwrap();
    assert_eq!(server.followers(), [3, 8]);
    // What the server does by itself arrives too.
    server.clear_all_but("k");
    will.execute();
    last.retain(|key, _| key.starts_with('k'));
    last.insert("will".to_owned(), b"gone".to_vec());
    for follower in &mut copies {
        while copy(follower) != last {
            assert!(follower.follow(LONG).unwrap());
        }
    }
}

/// The server ends at a random moment; the clients go on at the one with a copy, and
/// nothing that was answered is missing.
#[test]
fn clients_go_on_at_a_server_with_a_copy() {
    const CLIENTS: u64 = 4;
    let (server, token) = serve();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("store");
    let others = [(); 2].map(|()| TcpServer::bind_closed(loopback(), token.clone()).unwrap());
    let end = Arc::new(AtomicBool::new(false));
    let mut dice = dice();
    let followers = [0, 1].map(|id| {
        let mut follower = follow(&server, &token, id);
        let (end, mut dice) = (end.clone(), Dice(dice.roll() | 1));
        thread::spawn(move || {
            // Slowly, and not up to the end of what was sent.
            while !end.load(Ordering::Acquire) {
                follower.follow(Duration::from_millis(5)).unwrap();
                thread::sleep(Duration::from_micros(dice.roll() % 500));
            }
            follower
        })
    });
    let done = [const { AtomicU64::new(0) }; CLIENTS as usize];
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for me in 0..CLIENTS {
            let store = join(&server, &token);
            store.move_with(file.clone(), LONG);
            let (done, stop) = (&done[me as usize], &stop);
            let mut dice = Dice(dice.roll() | 1);
            scope.spawn(move || {
                let mut map = Map::new();
                let own = format!("own/{me}");
                while !stop.load(Ordering::Acquire) {
                    operate(&store, &mut map, &format!("t{me}/"), &mut dice);
                    store.add("all", 1).unwrap();
                    store.add(&own, 1).unwrap();
                    done.fetch_add(1, Ordering::AcqRel);
                }
                for (key, value) in &map {
                    assert_eq!(store.try_get(key).unwrap().as_ref(), Some(value), "{key}");
                }
            });
        }
        thread::sleep(Duration::from_micros(dice.roll() % 100_000));
        let answered: Vec<u64> = done.iter().map(|n| n.load(Ordering::Acquire)).collect();
        end.store(true, Ordering::Release);
        let copies = followers.map(|follower| follower.join().unwrap());
        drop(server);
        for follower in &copies {
            let number = |key: &str| {
                let text = follower.get(key).map(String::from_utf8_lossy);
                text.map_or(0, |text| text.parse::<u64>().unwrap())
            };
            for (me, answered) in answered.iter().enumerate() {
                assert!(number(&format!("own/{me}")) >= *answered);
            }
            assert!(number("all") >= answered.iter().sum());
        }
        let chosen = dice.below(2);
        let here = &others[chosen];
        here.admit_followers(copies[chosen].entries(), Vec::new());
        // The other follower comes before the members.
        let follower = follow(here, &token, 1 - chosen as u64);
        assert_eq!(copy(&follower), copy(&copies[chosen]));
        let follower = keep_following(follower);
        eventually("the copy is acknowledged", || here.followers().len() == 1);
        here.open("host", b"1");
        name(&file, here);
        let before: Vec<u64> = done.iter().map(|n| n.load(Ordering::Acquire)).collect();
        eventually("all clients go on", || {
            let now = done.iter().map(|n| n.load(Ordering::Acquire));
            now.zip(&before).all(|(now, before)| now > before + 5)
        });
        stop.store(true, Ordering::Release);
        drop(follower); // it follows until the server ends
    });
    let store = join(
        &others[usize::from(others[0].followers().is_empty())],
        &token,
    );
    let total: u64 = done.iter().map(|n| n.load(Ordering::Acquire)).sum();
    let all = store.add("all", 0).unwrap();
    assert!(all as u64 >= total, "{all} of {total}");
}

/// Runs an operation on a thread; the receiver gets the result.
fn asked<T: Send + 'static>(
    server: &TcpServer,
    token: &Token,
    what: impl FnOnce(&TcpStore) -> T + Send + 'static,
) -> std::sync::mpsc::Receiver<T> {
    let store = join(server, token);
    let (tell, told) = channel();
    thread::spawn(move || tell.send(what(&store)));
    told
}

#[test]
fn responses_wait_for_a_follower_until_it_is_dropped() {
    let (server, token) = serve();
    let store = join(&server, &token);
    store.set("old", b"1").unwrap();
    let mut stalled = follow(&server, &token, 5);
    eventually("the copy is acknowledged", || server.followers() == [5]);
    // Nothing has changed since.
    assert_eq!(store.get("old", LONG).unwrap(), b"1");
    let waiting = asked(&server, &token, |store| store.get("new", LONG));
    eventually("the wait arrives", || server.pending_waits() == 1);
    let setting = asked(&server, &token, |store| store.set("new", b"2"));
    eventually("the wait ends", || server.pending_waits() == 0);
    let reading = asked(&server, &token, |store| store.try_get("old"));
    let late = asked(&server, &token, |store| store.wait(&["never"], SHORT));
    let early = setting.recv_timeout(NEVER);
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "{early:?}");
    assert!(waiting.try_recv().is_err() && reading.try_recv().is_err());
    assert!(late.try_recv().is_err());
    assert_eq!(server.followers(), [5]);
    server.drop_follower(5, "dropped");
    setting.recv_timeout(LONG).unwrap().unwrap();
    assert_eq!(waiting.recv_timeout(LONG).unwrap().unwrap(), b"2");
    assert!(reading.recv_timeout(LONG).unwrap().unwrap().is_some());
    let late = late.recv_timeout(LONG).unwrap().unwrap_err();
    assert_eq!(late.missing_keys(), ["never"]);
    assert_eq!(server.followers(), [0; 0]);
    assert_eq!(server.broken_followers(), [0; 0]);
    while stalled.follow(LONG).is_ok() {}
    let addr = server.local_addr().to_string();
    let error = Follower::connect(&addr, token.clone(), 5, LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Dropped, "{error}");
    store.set("more", b"").unwrap();
}

#[test]
fn responses_wait_for_a_broken_follower_until_it_follows_again() {
    let (server, token) = serve();
    let store = join(&server, &token);
    store.set("old", b"1").unwrap();
    drop(follow(&server, &token, 7));
    eventually("its end is noticed", || server.broken_followers() == [7]);
    let setting = asked(&server, &token, |store| store.set("new", b"2"));
    let early = setting.recv_timeout(NEVER);
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "{early:?}");
    assert_eq!(server.followers(), [0; 0]);
    let follower = follow(&server, &token, 7);
    assert_eq!(server.broken_followers(), [0; 0]);
    assert_eq!(follower.get("new"), Some(&b"2"[..]));
    setting.recv_timeout(LONG).unwrap().unwrap();
    assert_eq!(server.followers(), [7]);
    // The new connection replaces the old one without a break.
    let mut old = follower;
    let follower = keep_following(follow(&server, &token, 7));
    while old.follow(LONG).is_ok() {}
    store.set("more", b"3").unwrap();
    assert_eq!(server.broken_followers(), [0; 0]);
    drop(server);
    assert_eq!(follower.join().unwrap().get("more"), Some(&b"3"[..]));
}

/// A copy without what the others were told of the drop is that of no store that goes on: not even what all of them have
/// is answered before.
#[test]
fn all_others_know_of_a_dropped_follower_before_anything_is_answered() {
    let (server, token) = serve();
    let store = join(&server, &token);
    store.set("old", b"1").unwrap();
    let mut other = follow(&server, &token, 1);
    let _stalled = follow(&server, &token, 2);
    eventually("both follow", || server.followers() == [1, 2]);
    let setting = asked(&server, &token, |store| store.set("new", b"2"));
    eventually("the other has it", || {
        other.follow(SHORT).unwrap();
        other.get("new").is_some()
    });
    server.drop_follower(2, "dropped/2");
    let reading = asked(&server, &token, |store| store.try_get("old"));
    let early = setting.recv_timeout(NEVER);
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "{early:?}");
    assert!(reading.try_recv().is_err());
    assert_eq!(server.registered_followers(), [1]);
    assert_eq!(server.known_keys("dropped"), None);
    eventually("the other knows", || {
        other.follow(SHORT).unwrap();
        other.get("dropped/2").is_some()
    });
    setting.recv_timeout(LONG).unwrap().unwrap();
    assert!(reading.recv_timeout(LONG).unwrap().unwrap().is_some());
}

#[test]
fn a_follower_that_retires_is_dropped() {
    let (server, token) = serve();
    let store = join(&server, &token);
    let follower = follow(&server, &token, 3);
    eventually("it follows", || server.followers() == [3]);
    let setting = asked(&server, &token, |store| store.set("new", b"2"));
    let early = setting.recv_timeout(NEVER);
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "{early:?}");
    follower.retire("retired/3");
    setting.recv_timeout(LONG).unwrap().unwrap();
    assert!(store.try_get("retired/3").unwrap().is_some());
    assert_eq!(server.known_keys("ret"), Some(vec!["retired/3".to_owned()]));
    assert_eq!(server.broken_followers(), [0; 0]);
    assert_eq!(server.registered_followers(), [0; 0]);
    let error = Follower::connect(&server.local_addr().to_string(), token, 3, LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Dropped, "{error}");
}

/// A store that goes on at another server answers nothing until its followers know where it is, and takes none that the
/// first one had dropped.
#[test]
fn all_followers_know_of_the_new_server_before_anything_is_answered() {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind_closed(loopback(), token.clone()).unwrap();
    let addr = server.local_addr().to_string();
    server.admit_followers(vec![("old".to_owned(), b"1".to_vec())], vec![2]);
    let error = Follower::connect(&addr, token.clone(), 2, LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Dropped, "{error}");
    let mut follower = Follower::connect(&addr, token.clone(), 1, LONG).unwrap();
    eventually("it follows", || server.followers() == [1]);
    server.open("host", b"1");
    let reading = asked(&server, &token, |store| store.try_get("old"));
    let early = reading.recv_timeout(NEVER);
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "{early:?}");
    eventually("it knows", || {
        follower.follow(SHORT).unwrap();
        follower.get("host") == Some(b"1")
    });
    assert!(reading.recv_timeout(LONG).unwrap().unwrap().is_some());
}

/// One that leaves goes on elsewhere: nothing is answered without it, and its end proves nothing.
#[test]
fn responses_wait_for_a_follower_that_has_left() {
    let (server, token) = serve();
    let store = join(&server, &token);
    follow(&server, &token, 3).leave();
    eventually("its end is noticed", || server.followers().is_empty());
    let setting = asked(&server, &token, |store| store.set("new", b"2"));
    let early = setting.recv_timeout(NEVER);
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "{early:?}");
    assert_eq!(server.broken_followers(), [0; 0]);
    server.drop_follower(3, "dropped");
    setting.recv_timeout(LONG).unwrap().unwrap();
    store.set("more", b"3").unwrap();
}

/// What a follower does not read is limited by closing it, not by dropping it.
#[test]
fn a_follower_that_does_not_read_is_broken_at_the_memory_limit() {
    let mut options = ServerOptions::default();
    options.max_buffered_bytes = 8 << 20;
    let (server, token) = serve_with(options);
    let mut deaf = Raw::connect(&server, &token);
    deaf.send(&[Request::Follow { id: 1 }]);
    eventually("it follows", || server.clients() == 1);
    let value = vec![1; MAX_VALUE_BYTES];
    let mut members = Vec::new();
    for i in 0..30 {
        let mut member = Raw::connect(&server, &token);
        let (key, value) = (&format!("k{i}"), &value);
        member.send(&[Request::Set { key, value }]);
        members.push(member);
    }
    eventually("it is closed", || server.broken_followers() == [1]);
    let held = &members[0].0;
    held.set_read_timeout(Some(SHORT)).unwrap();
    assert!(held.peek(&mut [0]).is_err(), "a response that was not held");
    held.set_read_timeout(Some(LONG)).unwrap();
    server.drop_follower(1, "dropped");
    for member in &mut members {
        assert_eq!(member.receive().as_deref(), Some("Done"));
    }
}

/// A member that makes impossible acknowledgements is closed.
#[test]
fn impossible_acknowledgements() {
    let (server, token) = serve();
    let follow = Request::Follow { id: 1 };
    for seq in [0, 2, u64::MAX] {
        let mut raw = Raw::connect(&server, &token);
        raw.send(&[follow.clone(), Request::Ack { seq }]);
        while raw.receive().is_some() {}
    }
    let mut raw = Raw::connect(&server, &token);
    raw.send(&[Request::Ack { seq: 0 }]);
    assert_eq!(raw.receive().as_deref(), Some("Failed(BadRequest)"));
    assert_eq!(raw.receive(), None);
}

#[test]
fn a_closed_server_serves_nobody() {
    let token = Token::generate().unwrap();
    let server = TcpServer::bind_closed(loopback(), token.clone()).unwrap();
    let addr = server.local_addr().to_string();
    let refused = || {
        let mut stream = std::net::TcpStream::connect(&addr).unwrap();
        let hello = Hello::new(Role::StoreClient, token.job_id());
        auth::initiate(&mut stream, hello, &token, LONG).unwrap_err()
    };
    let not_open = ErrorKind::Rejected(RejectReason::NotOpen);
    assert_eq!(refused().kind(), not_open);
    let error = TcpStore::connect(&addr, token.clone(), SHORT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let error = Follower::connect(&addr, token.clone(), 1, LONG).unwrap_err();
    assert_eq!(error.kind(), not_open, "{error}");
    assert!(
        !error.is_refused() && error.to_string().contains("not open"),
        "{error}"
    );
    let state = || TcpStore::state_of(&addr, token.clone(), LONG);
    assert_eq!(state(), ServerState::Closed);
    server.admit_followers(vec![("a".to_owned(), b"1".to_vec())], Vec::new());
    assert_eq!(state(), ServerState::Closed);
    let mut follower = Follower::connect(&addr, token.clone(), 1, LONG).unwrap();
    assert_eq!(follower.entries(), [("a".to_owned(), b"1".to_vec())]);
    assert_eq!(refused().kind(), not_open);
    eventually("the copy is acknowledged", || server.followers() == [1]);
    server.close();
    assert_eq!(server.followers(), [0; 0]);
    while follower.follow(LONG).is_ok() {}
    let error = Follower::connect(&addr, token.clone(), 1, LONG).unwrap_err();
    assert_eq!(error.kind(), not_open, "{error}");
    // Members wait until it opens.
    let member = thread::spawn({
        let (addr, token) = (addr.clone(), token.clone());
        move || TcpStore::connect(&addr, token, LONG).unwrap()
    });
    server.admit_followers(vec![("b".to_owned(), b"2".to_vec())], Vec::new());
    thread::sleep(SHORT);
    assert!(!member.is_finished());
    server.open("host", b"1");
    let member = member.join().unwrap();
    assert_eq!(member.try_get("a").unwrap(), None);
    assert_eq!(member.try_get("b").unwrap().as_deref(), Some(&b"2"[..]));
    let open = state();
    assert!(matches!(open, ServerState::Open(_)), "{open:?}");
    assert_eq!(state(), open);
    let at = server.local_addr();
    drop(server);
    assert_eq!(state(), ServerState::Ended);
    // Another one in its place is not taken for it.
    let other = TcpServer::bind(at, token.clone()).unwrap();
    assert_ne!(state(), open);
    let error = member.try_get("b").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    drop(other);
    let start = Instant::now();
    let error = Follower::connect(&addr, token.clone(), 1, LONG).unwrap_err();
    assert!(error.is_refused() && start.elapsed() < SOON, "{error}");
    let error = member.set("a", b"").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
}

#[test]
fn waits_go_on_at_the_other_server() {
    let (server, token) = serve();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("store");
    let other = TcpServer::bind_closed(loopback(), token.clone()).unwrap();
    let limit = Duration::from_millis(1500);
    let start = Instant::now();
    let found = asked(&server, &token, {
        let file = file.clone();
        move |store| {
            store.move_with(file, LONG);
            (store.get("later", LONG), store.addr())
        }
    });
    let missing = asked(&server, &token, {
        let file = file.clone();
        move |store| {
            store.move_with(file, LONG);
            (store.wait(&["never"], limit), Instant::now())
        }
    });
    eventually("the waits arrive", || server.pending_waits() == 2);
    other.open("host", b"1");
    // The first server still answers.
    name(&file, &other);
    let named = Instant::now();
    eventually("the waits move", || other.pending_waits() == 2);
    assert!(named.elapsed() < SOON, "{:?}", named.elapsed());
    drop(server);
    join(&other, &token).set("later", b"1").unwrap();
    let (found, addr) = found.recv_timeout(LONG).unwrap();
    assert_eq!(found.unwrap(), b"1");
    assert_eq!(addr, other.local_addr().to_string());
    let (missing, end) = missing.recv_timeout(LONG).unwrap();
    assert_eq!(missing.unwrap_err().missing_keys(), ["never"]);
    let took = end - start;
    assert!(took >= limit && took < limit + SOON, "{took:?}");
}

/// A queue and a value that was appended to are those of the copy; a pop that waits moves.
#[test]
fn queues_and_appends_go_on_at_the_other_server() {
    let (server, token) = serve();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("store");
    let store = join(&server, &token);
    let follower = keep_following(follow(&server, &token, 1));
    for number in 0..4 {
        store.queue_push("jobs", &[number]).unwrap();
        store.append("text", &[number]).unwrap();
    }
    assert_eq!(store.queue_pop("jobs", LONG).unwrap(), [0]);
    let popped = asked(&server, &token, {
        let file = file.clone();
        move |store| {
            store.move_with(file, LONG);
            store.queue_pop("later", LONG)
        }
    });
    eventually("the wait arrives", || server.pending_waits() == 1);
    drop(server);
    let copy = follower.join().unwrap();
    let other = TcpServer::bind_closed(loopback(), token.clone()).unwrap();
    other.admit_followers(copy.entries(), Vec::new());
    other.open("host", b"1");
    other.drop_followers();
    name(&file, &other);
    store.move_with(file, LONG);
    assert_eq!(store.queue_len("jobs").unwrap(), 3);
    assert_eq!(store.append("text", &[4]).unwrap(), 5);
    store.queue_push("jobs", &[4]).unwrap();
    for number in 1..5 {
        assert_eq!(store.queue_pop("jobs", LONG).unwrap(), [number]);
    }
    eventually("the wait moves", || other.pending_waits() == 1);
    store.queue_push("later", b"here").unwrap();
    assert_eq!(popped.recv_timeout(LONG).unwrap().unwrap(), b"here");
}

/// Nobody knows of an element that a copy still has.
#[test]
fn a_pop_waits_for_the_followers() {
    let (server, token) = serve();
    let store = join(&server, &token);
    let waiting = asked(&server, &token, |store| store.queue_pop("jobs", LONG));
    eventually("the wait arrives", || server.pending_waits() == 1);
    let mut follower = follow(&server, &token, 1);
    eventually("the copy is acknowledged", || server.followers() == [1]);
    let pushing = thread::spawn(move || store.queue_push("jobs", b"1").unwrap());
    eventually("the wait ends", || server.pending_waits() == 0);
    let early = waiting.recv_timeout(NEVER);
    assert!(matches!(early, Err(RecvTimeoutError::Timeout)), "{early:?}");
    assert!(!pushing.is_finished());
    eventually("the copy is acknowledged", || {
        let _ = follower.follow(SHORT).unwrap();
        waiting.try_recv().is_ok_and(|value| value.unwrap() == b"1")
    });
    pushing.join().unwrap();
    assert_eq!(follower.entries(), []);
}

/// Without another server, the first error is returned after the limit.
#[test]
fn the_search_for_a_server_ends() {
    let (server, token) = serve();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("store");
    let store = join(&server, &token);
    store.move_with(file.clone(), 2 * NEVER);
    store.set("a", b"1").unwrap();
    drop(server);
    for text in ["", "nonsense", "host:port\n"] {
        std::fs::write(&file, text).unwrap();
        let start = Instant::now();
        let error = store.try_get("a").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        let took = start.elapsed();
        assert!(took >= 2 * NEVER && took < 2 * NEVER + SOON, "{took:?}");
    }
    // Another server that opens late is found.
    let other = TcpServer::bind_closed(loopback(), token.clone()).unwrap();
    name(&file, &other);
    store.move_with(file, LONG);
    let opening = thread::spawn(move || {
        thread::sleep(SHORT);
        other.open("host", b"1");
        other
    });
    assert_eq!(store.try_get("a").unwrap(), None);
    assert!(store.leave_will("will", b"1").unwrap().is_some());
    drop(opening.join().unwrap());
}

#[test]
fn keys_that_are_left_out_are_not_copied() {
    let (server, token) = serve();
    let store = join(&server, &token);
    server.leave_out("beat/");
    store.set("beat/0", b"1").unwrap();
    store.set("a", b"1").unwrap();
    let mut follower = follow(&server, &token, 1);
    eventually("the copy is acknowledged", || server.followers() == [1]);
    // They do not wait for the follower either.
    store.set("beat/1", b"2").unwrap();
    store.add("beat/2", 1).unwrap();
    assert!(store.delete("beat/0").unwrap());
    assert!(!follower.follow(SHORT).unwrap());
    let held = asked(&server, &token, |store| store.set("a", b"2"));
    eventually("it is behind", || server.followers_behind() == [1]);
    store.queue_push("beat", b"1").unwrap();
    assert_eq!(store.queue_pop("beat", LONG).unwrap(), b"1");
    assert!(held.try_recv().is_err());
    let follower = keep_following(follower);
    held.recv_timeout(LONG).unwrap().unwrap();
    assert_eq!(store.delete_prefix("beat").unwrap(), 2);
    store.set("b", b"2").unwrap();
    drop(server);
    let copy = copy(&follower.join().unwrap());
    assert_eq!(copy.keys().collect::<Vec<_>>(), ["a", "b"]);
}

/// A copy of many and large values is made while they change, in little memory.
#[test]
fn large_copies() {
    const LIMIT: u64 = 10 << 20;
    let mut options = ServerOptions::default();
    options.max_buffered_bytes = LIMIT;
    let (server, token) = serve_with(options);
    let store = join(&server, &token);
    let mut expected = Map::new();
    let mut set = |key: String, bytes: usize, byte: u8| {
        let value = vec![byte; bytes];
        store.set(&key, &value).unwrap();
        expected.insert(key, value);
    };
    for i in 0..12 {
        set(format!("large/{i}"), MAX_VALUE_BYTES, i);
    }
    set("k".repeat(MAX_KEY_BYTES), MAX_VALUE_BYTES, 1);
    for i in 0..3000 {
        set(format!("small/{i}"), i % 50, i as u8);
    }
    let stop = AtomicBool::new(false);
    let most = AtomicU64::new(0);
    let followers = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                most.fetch_max(server.buffered_bytes(), Ordering::AcqRel);
                thread::sleep(Duration::from_micros(200));
            }
        });
        let first = keep_following(follow(&server, &token, 1));
        let changing = scope.spawn(|| {
            for i in 0..200 {
                set(format!("small/{}", i * 7), 60, 1);
            }
            set("large/3".to_owned(), MAX_VALUE_BYTES, 0xee);
        });
        let second = keep_following(follow(&server, &token, 2));
        changing.join().unwrap();
        stop.store(true, Ordering::Release);
        [first, second]
    });
    assert!(server.broken_followers().is_empty());
    drop(server);
    for follower in followers {
        assert!(copy(&follower.join().unwrap()) == expected);
    }
    assert!(most.load(Ordering::Acquire) <= LIMIT);
}
