//! One suite that every kind of store passes. A fixture makes members of one
//! and the same store; where members can be separate (file, TCP), they are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{LONG, SHORT, join, serve};
use phalanx_store::{ErrorKind, FileStore, MemStore, Store, TcpServer};
use phalanx_wire::Token;
use phalanx_wire::store_msg::{MAX_KEY_BYTES, MAX_VALUE_BYTES};

trait Fixture {
    /// One more member.
    fn member(&self) -> Arc<dyn Store>;
}

struct Mem(MemStore);

impl Fixture for Mem {
    fn member(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }
}

struct InFile {
    folder: tempfile::TempDir,
}

impl Fixture for InFile {
    fn member(&self) -> Arc<dyn Store> {
        Arc::new(FileStore::open(self.folder.path().join("store")).unwrap())
    }
}

struct Tcp {
    server: TcpServer,
    token: Token,
}

impl Fixture for Tcp {
    fn member(&self) -> Arc<dyn Store> {
        Arc::new(join(&self.server, &self.token))
    }
}

fn mem() -> Box<dyn Fixture> {
    Box::new(Mem(MemStore::new()))
}

fn file() -> Box<dyn Fixture> {
    let folder = tempfile::tempdir().unwrap();
    Box::new(InFile { folder })
}

fn tcp() -> Box<dyn Fixture> {
    let (server, token) = serve();
    Box::new(Tcp { server, token })
}

/// Every check for every kind.
macro_rules! suite {
    ($kinds:tt: $($check:ident),* $(,)?) => {
        $(suite!(@one $kinds $check);)*
    };
    (@one [$($kind:ident),*] $check:ident) => {
        mod $check {
            $(#[test]
            fn $kind() {
                super::checks::$check(&*super::$kind());
            })*
        }
    };
}

suite!([mem, file, tcp]:
    set_and_get,
    get_waits_for_the_key,
    get_names_the_missing_key,
    wait_names_exactly_the_missing_keys,
    wait_needs_all_keys_at_once,
    wait_for_more_keys_than_one_message_holds,
    no_time_is_no_wait,
    add_counts_in_decimal_text,
    add_refuses_what_is_no_number,
    no_addition_is_lost,
    compare_set,
    one_of_many_wins,
    delete,
    delete_prefix,
    limits,
    a_wait_does_not_block_a_set,
    all_waiters_wake,
    no_lost_wakeup,
);

mod checks {
    use super::*;

    pub fn set_and_get(fixture: &dyn Fixture) {
        let (a, b) = (fixture.member(), fixture.member());
        assert_eq!(a.try_get("new").unwrap(), None);
        for value in [&b"1"[..], b"", b"\0\xff\n binary", &vec![7; 100_000]] {
            a.set("new", value).unwrap();
            assert_eq!(b.get("new", LONG).unwrap(), value);
            assert_eq!(a.try_get("new").unwrap().as_deref(), Some(value));
        }
        b.set("weird ünïcode /../ key\n", b"v").unwrap();
        assert_eq!(a.get("weird ünïcode /../ key\n", LONG).unwrap(), b"v");
    }

    pub fn get_waits_for_the_key(fixture: &dyn Fixture) {
        let (a, b) = (fixture.member(), fixture.member());
        let setter = thread::spawn(move || {
            thread::sleep(Duration::from_millis(30));
            b.set("late", b"here").unwrap();
        });
        assert_eq!(a.get("late", LONG).unwrap(), b"here");
        setter.join().unwrap();
    }

    pub fn get_names_the_missing_key(fixture: &dyn Fixture) {
        let store = fixture.member();
        let start = Instant::now();
        let error = store.get("rank/7", SHORT).unwrap_err();
        assert!(start.elapsed() >= SHORT, "{:?}", start.elapsed());
        assert!(start.elapsed() < LONG / 4, "{:?}", start.elapsed());
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_eq!(error.missing_keys(), ["rank/7"]);
        assert!(error.to_string().contains("rank/7"), "{error}");
        // The store is as good as before.
        store.set("rank/7", b"x").unwrap();
        assert_eq!(store.get("rank/7", LONG).unwrap(), b"x");
    }

    pub fn wait_names_exactly_the_missing_keys(fixture: &dyn Fixture) {
        let store = fixture.member();
        store.set("rank/0", b"").unwrap();
        store.set("rank/2", b"").unwrap();
        let error = store
            .wait(&["rank/3", "rank/0", "rank/1", "rank/2"], SHORT)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_eq!(error.missing_keys(), ["rank/3", "rank/1"]);
        assert!(error.to_string().contains("rank/3, rank/1"), "{error}");
        assert!(error.to_string().contains("2 of 4 keys"), "{error}");
        store.wait(&["rank/0", "rank/2"], LONG).unwrap();
        store.wait(&[], LONG).unwrap();
    }

    pub fn wait_needs_all_keys_at_once(fixture: &dyn Fixture) {
        let (a, b) = (fixture.member(), fixture.member());
        let waiter = thread::spawn(move || a.wait(&["x", "y"], Duration::from_millis(1000)));
        thread::sleep(Duration::from_millis(30));
        b.set("x", b"").unwrap();
        thread::sleep(Duration::from_millis(30));
        b.delete("x").unwrap();
        b.set("y", b"").unwrap();
        let error = waiter.join().unwrap().unwrap_err();
        assert_eq!(error.missing_keys(), ["x"]);
    }

    pub fn wait_for_more_keys_than_one_message_holds(fixture: &dyn Fixture) {
        let store = fixture.member();
        let keys: Vec<String> = (0..2100).map(|i| format!("rank/{i}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        for key in &keys {
            store.set(key, b"").unwrap();
        }
        store.wait(&keys, LONG).unwrap();
        for lost in [5, 1030, 2099] {
            store.delete(keys[lost]).unwrap();
        }
        let error = store.wait(&keys, SHORT).unwrap_err();
        assert_eq!(error.missing_keys(), ["rank/5", "rank/1030", "rank/2099"]);
    }

    pub fn no_time_is_no_wait(fixture: &dyn Fixture) {
        let store = fixture.member();
        store.set("there", b"v").unwrap();
        let zero = Duration::ZERO;
        assert_eq!(store.get("there", zero).unwrap(), b"v");
        store.wait(&["there"], zero).unwrap();
        let error = store.wait(&["there", "not"], zero).unwrap_err();
        assert_eq!(error.missing_keys(), ["not"]);
        // Nor is a very long time too much for anything inside.
        assert_eq!(store.get("there", Duration::MAX).unwrap(), b"v");
    }

    pub fn add_counts_in_decimal_text(fixture: &dyn Fixture) {
        let store = fixture.member();
        assert_eq!(store.add("n", 5).unwrap(), 5);
        assert_eq!(store.add("n", -7).unwrap(), -2);
        assert_eq!(store.get("n", LONG).unwrap(), b"-2");
        store.set("n", b"41").unwrap();
        assert_eq!(store.add("n", 1).unwrap(), 42);
        assert_eq!(store.add("zero", 0).unwrap(), 0);
        assert_eq!(store.get("zero", LONG).unwrap(), b"0");
    }

    pub fn add_refuses_what_is_no_number(fixture: &dyn Fixture) {
        let store = fixture.member();
        for value in [
            &b"abc"[..],
            b"",
            b" 1",
            b"1.0",
            b"\xff",
            b"9223372036854775808",
        ] {
            store.set("n", value).unwrap();
            let error = store.add("n", 1).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotANumber, "{error}");
            assert_eq!(store.get("n", LONG).unwrap(), value);
        }
        store.set("n", i64::MAX.to_string().as_bytes()).unwrap();
        let error = store.add("n", 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotANumber);
        assert!(error.to_string().contains('n'), "{error}");
        assert_eq!(store.add("n", -1).unwrap(), i64::MAX - 1);
    }

    pub fn no_addition_is_lost(fixture: &dyn Fixture) {
        const THREADS: usize = 8;
        const EACH: i64 = 1000;
        let members: Vec<_> = (0..THREADS).map(|_| fixture.member()).collect();
        let sums = AtomicU64::new(0);
        thread::scope(|scope| {
            for member in &members {
                let sums = &sums;
                scope.spawn(move || {
                    for _ in 0..EACH {
                        let sum = member.add("count", 1).unwrap();
                        sums.fetch_add(sum as u64, Ordering::Relaxed);
                    }
                });
            }
        });
        let total = THREADS as i64 * EACH;
        assert_eq!(members[0].add("count", 0).unwrap(), total);
        // Every sum was returned exactly once.
        let total = total as u64;
        assert_eq!(sums.into_inner(), total * (total + 1) / 2);
    }

    pub fn compare_set(fixture: &dyn Fixture) {
        let store = fixture.member();
        // Nothing there, something expected: nothing happens.
        assert_eq!(store.compare_set("k", Some(b"a"), b"b").unwrap(), b"");
        assert_eq!(store.try_get("k").unwrap(), None);
        // The first cause wins.
        assert_eq!(store.compare_set("k", None, b"first").unwrap(), b"first");
        assert_eq!(store.compare_set("k", None, b"second").unwrap(), b"first");
        assert_eq!(
            store.compare_set("k", Some(b"wrong"), b"x").unwrap(),
            b"first"
        );
        assert_eq!(
            store.compare_set("k", Some(b"first"), b"next").unwrap(),
            b"next"
        );
        assert_eq!(store.get("k", LONG).unwrap(), b"next");
        // Empty is a value, not its absence.
        store.set("k", b"").unwrap();
        assert_eq!(store.compare_set("k", None, b"x").unwrap(), b"");
        assert_eq!(store.compare_set("k", Some(b""), b"x").unwrap(), b"x");
    }

    pub fn one_of_many_wins(fixture: &dyn Fixture) {
        let members: Vec<_> = (0..8).map(|_| fixture.member()).collect();
        for round in 0..10 {
            let key = format!("abort/{round}");
            let seen: Vec<Vec<u8>> = thread::scope(|scope| {
                let racers: Vec<_> = members
                    .iter()
                    .enumerate()
                    .map(|(rank, member)| {
                        let key = &key;
                        scope.spawn(move || {
                            let mine = rank.to_string();
                            member.compare_set(key, None, mine.as_bytes()).unwrap()
                        })
                    })
                    .collect();
                racers.into_iter().map(|r| r.join().unwrap()).collect()
            });
            let winner = members[0].get(&key, LONG).unwrap();
            assert!(seen.iter().all(|cause| *cause == winner), "{seen:?}");
        }
    }

    pub fn delete(fixture: &dyn Fixture) {
        let (a, b) = (fixture.member(), fixture.member());
        assert!(!a.delete("k").unwrap());
        a.set("k", b"1").unwrap();
        assert!(b.delete("k").unwrap());
        assert!(!b.delete("k").unwrap());
        assert_eq!(a.try_get("k").unwrap(), None);
        assert_eq!(a.get("k", SHORT).unwrap_err().missing_keys(), ["k"]);
        b.set("k", b"2").unwrap();
        assert_eq!(a.get("k", LONG).unwrap(), b"2");
    }

    pub fn delete_prefix(fixture: &dyn Fixture) {
        let store = fixture.member();
        for key in ["e1/a", "e1/b/c", "e1", "e10/a", "e2/a"] {
            store.set(key, b"").unwrap();
        }
        assert_eq!(store.delete_prefix("e1/").unwrap(), 2);
        assert_eq!(store.delete_prefix("e1/").unwrap(), 0);
        for (key, there) in [
            ("e1/a", false),
            ("e1/b/c", false),
            ("e1", true),
            ("e10/a", true),
            ("e2/a", true),
        ] {
            assert_eq!(store.try_get(key).unwrap().is_some(), there, "{key}");
        }
    }

    pub fn limits(fixture: &dyn Fixture) {
        let store = fixture.member();
        let longest = vec![1; MAX_VALUE_BYTES];
        store.set("k", &longest).unwrap();
        assert_eq!(store.get("k", LONG).unwrap(), longest);
        let mut too_long = longest.clone();
        too_long.push(1);
        let error = store.set("k", &too_long).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("1048577"), "{error}");
        for (expected, desired) in [(Some(&too_long[..]), &b""[..]), (None, &too_long[..])] {
            let error = store.compare_set("k", expected, desired).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
        }
        // The longest pair crosses every kind of store too.
        assert_eq!(
            store.compare_set("k", Some(&longest), &longest).unwrap(),
            longest
        );
        let long_key = "k".repeat(MAX_KEY_BYTES + 1);
        for key in ["", &long_key] {
            let usage = |error: phalanx_store::Error| {
                assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
            };
            usage(store.set(key, b"").unwrap_err());
            usage(store.get(key, SHORT).unwrap_err());
            usage(store.try_get(key).unwrap_err());
            usage(store.wait(&["k", key], SHORT).unwrap_err());
            usage(store.add(key, 1).unwrap_err());
            usage(store.compare_set(key, None, b"").unwrap_err());
            usage(store.delete(key).unwrap_err());
        }
        assert!(store.delete_prefix(&long_key).is_err());
        // After all these refusals it still works.
        assert!(store.delete("k").unwrap());
    }

    pub fn a_wait_does_not_block_a_set(fixture: &dyn Fixture) {
        // One and the same member on all threads.
        let store = fixture.member();
        let waiters: Vec<_> = (0..12)
            .map(|i| {
                let store = store.clone();
                thread::spawn(move || store.get(&format!("later/{i}"), LONG).unwrap())
            })
            .collect();
        thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        for i in 0..100 {
            store.set(&format!("other/{i}"), b"v").unwrap();
            store.try_get("other/0").unwrap();
        }
        assert!(start.elapsed() < LONG / 4, "{:?}", start.elapsed());
        for i in 0..waiters.len() {
            store.set(&format!("later/{i}"), b"v").unwrap();
        }
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), b"v");
        }
    }

    pub fn all_waiters_wake(fixture: &dyn Fixture) {
        let waiters: Vec<_> = (0..16)
            .map(|_| {
                let store = fixture.member();
                thread::spawn(move || store.wait(&["a", "go", "b"], LONG).unwrap())
            })
            .collect();
        let store = fixture.member();
        for key in ["b", "go", "a"] {
            thread::sleep(Duration::from_millis(5));
            store.set(key, b"").unwrap();
        }
        for waiter in waiters {
            waiter.join().unwrap();
        }
    }

    pub fn no_lost_wakeup(fixture: &dyn Fixture) {
        const ROUNDS: usize = 100;
        let (a, b) = (fixture.member(), fixture.member());
        let ping = thread::spawn(move || {
            for i in 0..ROUNDS {
                a.set(&format!("ping/{i}"), b"").unwrap();
                a.get(&format!("pong/{i}"), LONG).unwrap();
            }
        });
        for i in 0..ROUNDS {
            b.get(&format!("ping/{i}"), LONG).unwrap();
            b.set(&format!("pong/{i}"), b"").unwrap();
        }
        ping.join().unwrap();
    }
}
