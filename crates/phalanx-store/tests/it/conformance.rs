//! One suite that every kind of store passes. A fixture makes members of one
//! and the same store; where members can be separate (TCP), they are.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{LONG, SHORT, join, serve};
use phalanx_garble::Dice;
use phalanx_store::{ErrorKind, MemStore, Store, TcpServer};
use phalanx_wire::Token;
use phalanx_wire::store_msg::{MAX_KEY_BYTES, MAX_QUEUE_BYTES, MAX_VALUE_BYTES};

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

suite!([mem, tcp]:
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
    append,
    an_append_beyond_the_limit_changes_nothing,
    no_append_is_lost,
    multi_get_and_multi_set,
    numbered_values_are_read_together,
    pop_waits_for_an_element,
    pop_names_the_empty_queue,
    limits_of_queues,
    elements_are_keys,
    queues_and_appends_as_a_model,
    each_element_is_popped_once_and_in_order,
    each_waiting_popper_gets_one_element,
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

    pub fn append(fixture: &dyn Fixture) {
        let (a, b) = (fixture.member(), fixture.member());
        assert_eq!(a.append("k", b"").unwrap(), 0);
        assert_eq!(b.try_get("k").unwrap().as_deref(), Some(&b""[..]));
        assert_eq!(b.append("k", b"ab").unwrap(), 2);
        assert_eq!(a.append("k", b"\0\xff").unwrap(), 4);
        assert_eq!(b.get("k", LONG).unwrap(), b"ab\0\xff");
        a.set("k", b"1").unwrap();
        assert_eq!(b.append("k", b"2").unwrap(), 2);
        assert_eq!(a.add("k", 1).unwrap(), 13);
        // A new key wakes those that wait for it.
        let waiter = thread::spawn(move || b.get("new", LONG).unwrap());
        assert_eq!(a.append("new", b"v").unwrap(), 1);
        assert_eq!(waiter.join().unwrap(), b"v");
    }

    pub fn an_append_beyond_the_limit_changes_nothing(fixture: &dyn Fixture) {
        let store = fixture.member();
        let half = vec![1; MAX_VALUE_BYTES / 2];
        assert_eq!(store.append("k", &half).unwrap(), half.len() as u64);
        assert_eq!(store.append("k", b"2").unwrap(), half.len() as u64 + 1);
        let error = store.append("k", &half).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
        assert!(error.to_string().contains("\"k\""), "{error}");
        let full = store.append("k", &half[1..]).unwrap();
        assert_eq!(full, MAX_VALUE_BYTES as u64);
        assert_eq!(
            store.append("k", b"3").unwrap_err().kind(),
            ErrorKind::LimitExceeded
        );
        let error = store
            .append("k", &vec![1; MAX_VALUE_BYTES + 1])
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        let error = store.append("", b"").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        let value = store.get("k", LONG).unwrap();
        assert!(value == [&half[..], b"2", &half[1..]].concat());
    }

    pub fn no_append_is_lost(fixture: &dyn Fixture) {
        const THREADS: u8 = 8;
        const EACH: u64 = 100;
        let members: Vec<_> = (0..THREADS).map(|_| fixture.member()).collect();
        let lengths = AtomicU64::new(0);
        thread::scope(|scope| {
            for (me, member) in (0..).zip(&members) {
                let lengths = &lengths;
                scope.spawn(move || {
                    for _ in 0..EACH {
                        let length = member.append("all", &[me, me]).unwrap();
                        lengths.fetch_add(length, Ordering::Relaxed);
                    }
                });
            }
        });
        let all = members[0].get("all", LONG).unwrap();
        let total = u64::from(THREADS) * EACH;
        assert_eq!(all.len() as u64, 2 * total);
        for me in 0..THREADS {
            let appended = all.chunks(2).filter(|two| **two == [me, me]);
            assert_eq!(appended.count() as u64, EACH);
        }
        // Every length was returned exactly once.
        assert_eq!(lengths.into_inner(), total * (total + 1));
    }

    pub fn multi_get_and_multi_set(fixture: &dyn Fixture) {
        let (a, b) = (fixture.member(), fixture.member());
        let keys = ["x", "y", "x"];
        let getter = thread::spawn(move || b.multi_get(&keys, LONG).unwrap());
        a.multi_set(&[("x", b"1"), ("y", b"")]).unwrap();
        assert_eq!(getter.join().unwrap(), [&b"1"[..], b"", b"1"]);
        assert!(a.multi_get(&[], Duration::ZERO).unwrap().is_empty());
        a.multi_set(&[]).unwrap();
        let error = a.multi_get(&["x", "u", "y", "v"], SHORT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_eq!(error.missing_keys(), ["u", "v"]);
        let error = a.multi_set(&[("x", b"2"), ("", b""), ("y", b"2")]);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Usage);
        let now = a.multi_get(&["x", "y"], Duration::ZERO).unwrap();
        assert_eq!(now, [&b"2"[..], b""]);
    }

    /// The values of consecutive numbers, from any of them on, up to the first gap and the limits of a response.
    pub fn numbered_values_are_read_together(fixture: &dyn Fixture) {
        let (a, b) = (fixture.member(), fixture.member());
        let now = |key: &str| a.get_numbered(key, Duration::ZERO).unwrap();
        assert_eq!(now("log/0"), (vec![], false));
        let waits = thread::spawn(move || b.get_numbered("log/0", LONG).unwrap());
        thread::sleep(SHORT);
        let value = |n: usize| n.to_string().into_bytes();
        a.set("log/1", b"1").unwrap();
        a.set("log/", b"no").unwrap();
        a.set("log/00", b"no").unwrap();
        thread::sleep(SHORT);
        assert!(!waits.is_finished());
        a.set("log/0", b"0").unwrap();
        assert_eq!(waits.join().unwrap().0[..2], [value(0), value(1)][..]);
        (2..2100)
            .filter(|n| *n != 1999)
            .for_each(|n| a.set(&format!("log/{n}"), &value(n)).unwrap());
        for (first, end, more) in [
            (0, 1024, true),
            (1024, 1999, false),
            (1998, 1999, false),
            (1999, 1999, false),
            (2000, 2100, false),
            (2100, 2100, false),
        ] {
            let want: Vec<_> = (first..end).map(value).collect();
            assert_eq!(now(&format!("log/{first}")), (want, more));
        }
        // Neither without a number nor beyond the last one are there others.
        a.set(&format!("log/{}", u64::MAX), b"last").unwrap();
        for (key, want) in [
            ("log/", "no"),
            (&*format!("log/{}", u64::MAX), "last"),
            ("log/00", "no"),
        ] {
            let (values, more) = now(key);
            assert_eq!(values[0], want.as_bytes());
            assert!(!more || key == "log/00", "{key}");
        }
        // Of large values, as many as fit.
        let large = vec![7; MAX_VALUE_BYTES / 2];
        (0..4).for_each(|n| a.set(&format!("large{n}"), &large).unwrap());
        a.set("large4", &vec![8; MAX_VALUE_BYTES]).unwrap();
        assert_eq!(now("large1"), (vec![large.clone(); 2], true));
        assert_eq!(now("large3"), (vec![large], true));
        assert_eq!(now("large4"), (vec![vec![8; MAX_VALUE_BYTES]], false));
        assert_eq!(
            a.get_numbered("", SHORT).unwrap_err().kind(),
            ErrorKind::Usage
        );
    }

    pub fn pop_waits_for_an_element(fixture: &dyn Fixture) {
        let (a, b) = (fixture.member(), fixture.member());
        let popper = thread::spawn(move || b.queue_pop("jobs", LONG).unwrap());
        thread::sleep(SHORT);
        // Neither a key with the queue's name nor another queue is waited for.
        a.set("jobs", b"no").unwrap();
        a.set("jobs/", b"no").unwrap();
        a.queue_push("jobs/0", b"no").unwrap();
        thread::sleep(SHORT);
        assert!(!popper.is_finished());
        a.queue_push("jobs", b"here").unwrap();
        assert_eq!(popper.join().unwrap(), b"here");
        assert_eq!(a.queue_len("jobs").unwrap(), 0);
        assert_eq!(a.queue_len("jobs/0").unwrap(), 1);
    }

    pub fn pop_names_the_empty_queue(fixture: &dyn Fixture) {
        let store = fixture.member();
        let start = Instant::now();
        let error = store.queue_pop("jobs", SHORT).unwrap_err();
        assert!(start.elapsed() >= SHORT, "{:?}", start.elapsed());
        assert!(start.elapsed() < LONG / 4, "{:?}", start.elapsed());
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().contains("\"jobs\""), "{error}");
        let error = store.queue_pop("jobs", Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        // What has timed out takes no element.
        store.queue_push("jobs", b"x").unwrap();
        assert_eq!(store.queue_len("jobs").unwrap(), 1);
        assert_eq!(store.queue_pop("jobs", Duration::ZERO).unwrap(), b"x");
        store.queue_push("jobs", b"").unwrap();
        assert_eq!(store.queue_pop("jobs", Duration::MAX).unwrap(), b"");
    }

    pub fn limits_of_queues(fixture: &dyn Fixture) {
        let store = fixture.member();
        let usage = |error: phalanx_store::Error| {
            assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        };
        let queue = "q".repeat(MAX_QUEUE_BYTES + 1);
        for queue in ["", &queue] {
            usage(store.queue_push(queue, b"").unwrap_err());
            usage(store.queue_pop(queue, LONG).unwrap_err());
            usage(store.queue_len(queue).unwrap_err());
        }
        let mut value = vec![1; MAX_VALUE_BYTES + 1];
        usage(store.queue_push("q", &value).unwrap_err());
        value.pop();
        let queue = &queue[1..];
        store.queue_push(queue, &value).unwrap();
        assert_eq!(store.queue_pop(queue, LONG).unwrap(), value);
        assert_eq!(store.queue_len(queue).unwrap(), 0);
    }

    pub fn elements_are_keys(fixture: &dyn Fixture) {
        let (a, b) = (fixture.member(), fixture.member());
        for value in ["0", "1", "2", "3"] {
            a.queue_push("q", value.as_bytes()).unwrap();
        }
        assert_eq!(a.get("q/0000000000000000", LONG).unwrap(), b"0");
        assert!(b.delete("q/0000000000000000").unwrap());
        assert!(b.delete("q/0000000000000002").unwrap());
        assert_eq!(a.queue_len("q").unwrap(), 2);
        assert_eq!(a.queue_pop("q", LONG).unwrap(), b"1");
        assert_eq!(a.delete_prefix("q/").unwrap(), 1);
        assert_eq!(a.queue_len("q").unwrap(), 0);
        let popper = thread::spawn(move || b.queue_pop("q", LONG).unwrap());
        thread::sleep(SHORT);
        a.compare_set("q/00000000000000ff", None, b"set").unwrap();
        assert_eq!(popper.join().unwrap(), b"set");
        assert_eq!(a.delete_prefix("").unwrap(), 0);
    }

    /// Random operations of two members, and the same on plain collections.
    pub fn queues_and_appends_as_a_model(fixture: &dyn Fixture) {
        let members = [fixture.member(), fixture.member()];
        let mut dice = Dice(0x5eed_0f0f_1234_5679);
        let mut queues: BTreeMap<&str, VecDeque<Vec<u8>>> = BTreeMap::new();
        let mut values: BTreeMap<&str, Vec<u8>> = BTreeMap::new();
        for _ in 0..1000 {
            let store = &members[dice.below(2)];
            let name = ["q", "q/0", "q0", "é"][dice.below(4)];
            let queue = queues.entry(name).or_default();
            let value = vec![dice.byte(); dice.below(40)];
            match dice.below(9) {
                0..=2 => {
                    store.queue_push(name, &value).unwrap();
                    queue.push_back(value);
                }
                3..=5 => match queue.pop_front() {
                    Some(first) => assert_eq!(store.queue_pop(name, LONG).unwrap(), first),
                    None => {
                        store.queue_pop(name, Duration::ZERO).unwrap_err();
                    }
                },
                6 => {
                    let whole = values.entry(name).or_default();
                    whole.extend_from_slice(&value);
                    assert_eq!(store.append(name, &value).unwrap(), whole.len() as u64);
                }
                7 => {
                    let expected = values.get(name).cloned();
                    assert_eq!(store.try_get(name).unwrap(), expected);
                }
                _ => {}
            }
            assert_eq!(store.queue_len(name).unwrap(), queues[name].len() as u64);
        }
    }

    pub fn each_element_is_popped_once_and_in_order(fixture: &dyn Fixture) {
        const PUSHERS: usize = 4;
        const POPPERS: usize = 5;
        const EACH: usize = 100;
        let popped: Vec<Vec<[usize; 2]>> = thread::scope(|scope| {
            let poppers: Vec<_> = (0..POPPERS)
                .map(|_| {
                    let store = fixture.member();
                    let pop = move || {
                        let element = store.queue_pop("jobs", LONG).unwrap();
                        let text = String::from_utf8(element).unwrap();
                        let (from, number) = text.split_once(' ').unwrap();
                        [from, number].map(|part| part.parse().unwrap())
                    };
                    scope.spawn(move || (0..PUSHERS * EACH / POPPERS).map(|_| pop()).collect())
                })
                .collect();
            for me in 0..PUSHERS {
                let store = fixture.member();
                scope.spawn(move || {
                    for number in 0..EACH {
                        let element = format!("{me} {number}");
                        store.queue_push("jobs", element.as_bytes()).unwrap();
                    }
                });
            }
            poppers.into_iter().map(|p| p.join().unwrap()).collect()
        });
        for popped in &popped {
            for me in 0..PUSHERS {
                let of_one = popped.iter().filter(|[from, _]| *from == me);
                assert!(of_one.is_sorted(), "{popped:?}");
            }
        }
        let mut all: Vec<[usize; 2]> = popped.concat();
        all.sort_unstable();
        let pushed = (0..PUSHERS).flat_map(|me| (0..EACH).map(move |number| [me, number]));
        assert!(all.into_iter().eq(pushed));
        assert_eq!(fixture.member().delete_prefix("").unwrap(), 0);
    }

    pub fn each_waiting_popper_gets_one_element(fixture: &dyn Fixture) {
        let store = fixture.member();
        let poppers: Vec<_> = (0..8)
            .map(|_| {
                let store = fixture.member();
                thread::spawn(move || store.queue_pop("jobs", LONG).unwrap())
            })
            .collect();
        thread::sleep(SHORT);
        for number in 0..poppers.len() as u8 {
            store.queue_push("jobs", &[number]).unwrap();
        }
        let mut popped: Vec<u8> = poppers
            .into_iter()
            .flat_map(|popper| popper.join().unwrap())
            .collect();
        popped.sort_unstable();
        assert_eq!(popped, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(store.queue_len("jobs").unwrap(), 0);
    }
}
