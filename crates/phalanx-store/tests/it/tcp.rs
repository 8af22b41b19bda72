//! What is particular to the store over TCP.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{LONG, Raw, SHORT, eventually, join, loopback, serve, serve_with};
use phalanx_store::{ErrorKind, Limits, MemStore, ServerOptions, Store, TcpServer, TcpStore, auth};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason, Role};
use phalanx_wire::store_msg::{MAX_VALUE_BYTES, MAX_WILL_BYTES, Request};

/// An address at which nobody listens.
fn free_addr() -> SocketAddr {
    let listener = TcpListener::bind(loopback()).unwrap();
    listener.local_addr().unwrap()
}

#[test]
fn server_gone_while_a_client_waits() {
    let (server, token) = serve();
    let addr = server.local_addr().to_string();
    let store = join(&server, &token);
    let waiter = thread::spawn(move || {
        let error = store.get("never", LONG).unwrap_err();
        (error, store)
    });
    eventually("the wait arrives", || server.pending_waits() == 1);
    let start = Instant::now();
    drop(server);
    let (error, store) = waiter.join().unwrap();
    assert!(start.elapsed() < LONG / 4);
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert!(error.to_string().contains(&addr), "{error}");
    // The next call does not hang either.
    let error = store.set("k", b"").unwrap_err();
    assert!(start.elapsed() < LONG / 2);
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert!(error.to_string().contains(&addr), "{error}");
}

#[test]
fn all_but_the_keys_of_a_prefix_are_removed_at_once() {
    let (server, token) = serve();
    let store = join(&server, &token);
    for key in ["a", "keep/a", "keeper", "z"] {
        store.set(key, b"x").unwrap();
    }
    server.clear_all_but("keep/");
    let left = ["a", "keep/a", "keeper", "z"].map(|key| store.try_get(key).unwrap().is_some());
    assert_eq!(left, [false, true, false, false]);
    assert_eq!(store.delete_prefix("").unwrap(), 1);
}

#[test]
fn address_in_use_says_which_and_what_to_do() {
    let (server, token) = serve();
    let addr = server.local_addr();
    let error = TcpServer::bind(addr, token).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddressInUse);
    let text = error.to_string();
    assert!(text.contains(&addr.to_string()), "{text}");
    assert!(text.contains("choose another port"), "{text}");
}

#[test]
fn a_port_is_free_again_after_the_server() {
    let (server, token) = serve();
    let addr = server.local_addr();
    let store = join(&server, &token);
    store.set("old", b"").unwrap();
    drop(server);
    let server = TcpServer::bind(addr, token.clone()).unwrap();
    assert_eq!(join(&server, &token).try_get("old").unwrap(), None);
}

#[test]
fn all_interfaces_are_refused() {
    let token = Token::generate().unwrap();
    let addr = SocketAddr::from(([0, 0, 0, 0], 0));
    let error = TcpServer::bind(addr, token).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("all interfaces"), "{error}");
}

#[test]
fn foreign_address() {
    let token = Token::generate().unwrap();
    let addr = SocketAddr::from(([192, 0, 2, 1], 0));
    let error = TcpServer::bind(addr, token).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("192.0.2.1"), "{error}");
}

#[test]
fn serves_on_a_listener_that_was_handed_over() {
    let token = Token::generate().unwrap();
    let listener = TcpListener::bind(loopback()).unwrap();
    let addr = listener.local_addr().unwrap();
    let server = TcpServer::from_listener(listener, token.clone()).unwrap();
    assert_eq!(server.local_addr(), addr);
    join(&server, &token).set("k", b"").unwrap();
}

#[test]
fn serves_ipv6() {
    let token = Token::generate().unwrap();
    let Ok(listener) = TcpListener::bind("[::1]:0") else {
        // A host without IPv6 has nothing to test here.
        return;
    };
    let server = TcpServer::from_listener(listener, token.clone()).unwrap();
    join(&server, &token).set("k", b"").unwrap();
}

#[test]
fn connects_by_name() {
    let (server, token) = serve();
    let addr = format!("localhost:{}", server.local_addr().port());
    let store = TcpStore::connect(&addr, token, LONG).unwrap();
    assert_eq!(store.addr(), addr);
    store.set("k", b"").unwrap();
}

#[test]
fn waits_for_a_server_that_comes_later() {
    let token = Token::generate().unwrap();
    let addr = free_addr();
    let (mine, theirs) = (token.clone(), token);
    let client = thread::spawn(move || {
        let store = TcpStore::connect(&addr.to_string(), mine, LONG).unwrap();
        store.set("k", b"v").unwrap();
    });
    thread::sleep(Duration::from_millis(150));
    let _server = TcpServer::bind(addr, theirs).unwrap();
    client.join().unwrap();
}

#[test]
fn nobody_listens() {
    let addr = free_addr().to_string();
    let token = Token::generate().unwrap();
    let start = Instant::now();
    let limit = Duration::from_millis(200);
    let error = TcpStore::connect(&addr, token, limit).unwrap_err();
    assert!(start.elapsed() >= limit && start.elapsed() < LONG / 4);
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let text = error.to_string();
    for part in [
        &addr[..],
        "ms (",
        "attempts",
        "refused",
        "does rank 0 or the launcher run",
    ] {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

#[test]
fn unknown_host() {
    let token = Token::generate().unwrap();
    // An empty label: refused by the resolver without asking the network.
    let error = TcpStore::connect("no..host:1", token, SHORT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let text = error.to_string();
    assert!(text.contains("no..host"), "{text}");
    assert!(text.contains("resolving"), "{text}");
}

#[test]
fn no_address_at_all() {
    for addr in [
        "",
        "localhost",
        ":29500",
        "localhost:",
        "localhost:0",
        "h:99999",
        "h:x",
    ] {
        let token = Token::generate().unwrap();
        let error = TcpStore::connect(addr, token, LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{addr}");
        assert!(error.to_string().contains("host:port"), "{error}");
    }
}

#[test]
fn a_wrong_token_is_told_on_both_sides() {
    let (server, _) = serve();
    let addr = server.local_addr().to_string();
    let start = Instant::now();
    // Longer than a stranger is doubted, unless the deadline comes first.
    let mut attempts = 0;
    let token = Token::generate().unwrap();
    let limit = Duration::from_millis(300);
    let error = TcpStore::connect_with(&addr, token, limit, |error| {
        assert_eq!(error.kind(), ErrorKind::TokenMismatch, "{error}");
        attempts += 1;
    });
    let error = error.unwrap_err();
    assert!(start.elapsed() < LONG / 4);
    assert_eq!(error.kind(), ErrorKind::TokenMismatch);
    let text = error.to_string();
    assert!(text.contains(&addr), "{text}");
    assert!(
        text.contains("the job token differs, or another program listens there"),
        "{text}"
    );
    assert!(attempts > 1, "{attempts} attempts");
    eventually("counted", || server.rejected() == attempts);
    let refused: Vec<String> = server.refused().iter().map(ToString::to_string).collect();
    assert_eq!(
        refused,
        [format!(
            "{attempts} connections from 127.0.0.1 were refused: they have another job token"
        )]
    );
}

/// Listens and does `answer` with every connection, until dropped.
fn fake_server(answer: impl Fn(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind(loopback()).unwrap();
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            answer(stream);
        }
    });
    addr
}

#[test]
fn something_else_listens_there() {
    let addr = fake_server(|mut stream| {
        let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n");
        let _ = stream.read(&mut [0; 512]);
    });
    let token = Token::generate().unwrap();
    let limit = Duration::from_millis(300);
    let error = TcpStore::connect(&addr.to_string(), token, limit).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains("another protocol"), "{error}");
    assert!(error.to_string().contains("\"SSH-\""), "{error}");
}

/// A stranger, or the server of another job, has the address for a while.
#[test]
fn who_is_in_the_servers_place_is_outlasted() {
    let (token, other) = (Token::generate().unwrap(), Token::generate().unwrap());
    for has_token in [false, true] {
        let listener = TcpListener::bind(loopback()).unwrap();
        let addr = listener.local_addr().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let store = thread::scope(|scope| {
            let joining = scope.spawn(|| {
                TcpStore::connect_with(&addr.to_string(), token.clone(), LONG, |error| {
                    let _ = tell.send(error.kind());
                })
            });
            let (mut stream, _) = listener.accept().unwrap();
            if has_token {
                let _ = auth::accept(&mut stream, &other, LONG, |_| unreachable!());
            } else {
                stream.write_all(b"HTTP/1.1 400 Bad Request\r\n").unwrap();
            }
            let kind = told.recv().unwrap();
            let want = [ErrorKind::WrongProtocol, ErrorKind::TokenMismatch];
            assert_eq!(kind, want[usize::from(has_token)]);
            drop((stream, listener));
            let server = TcpServer::bind(addr, token.clone()).unwrap();
            (joining.join().unwrap().unwrap(), server)
        });
        store.0.set("k", b"v").unwrap();
    }
}

/// As many threads as connections were reserved for ask without a new one.
#[test]
fn reserved_connections_are_used() {
    let (server, token) = serve();
    let store = join(&server, &token);
    store.reserve_connections(3).unwrap();
    eventually("three have come", || server.clients() == 3);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| store.get("k", LONG).unwrap());
        }
        eventually("both wait", || server.pending_waits() == 2);
        store.set("k", b"v").unwrap();
        assert_eq!(server.clients(), 3);
    });
    assert_eq!((server.clients(), server.rejected()), (3, 0));
}

/// A port forwarder whose back end is not up yet does this: try again.
#[test]
fn a_server_that_closes_is_tried_again_until_the_deadline() {
    let addr = fake_server(drop);
    let token = Token::generate().unwrap();
    let limit = Duration::from_millis(200);
    let error = TcpStore::connect(&addr.to_string(), token, limit).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("attempts"), "{error}");
}

#[test]
fn a_server_that_says_nothing_is_bounded() {
    let listener = TcpListener::bind(loopback()).unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let token = Token::generate().unwrap();
    let limit = Duration::from_millis(200);
    let start = Instant::now();
    let error = TcpStore::connect(&addr, token, limit).unwrap_err();
    assert!(start.elapsed() < LONG / 4, "{:?}", start.elapsed());
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("no handshake"), "{error}");
}

#[test]
fn a_member_with_another_role_or_job_is_rejected_with_a_reason() {
    let (server, token) = serve();
    let meet = |hello| {
        let mut stream = TcpStream::connect(server.local_addr()).unwrap();
        auth::initiate(&mut stream, hello, &token, LONG)
            .unwrap_err()
            .kind()
    };
    assert_eq!(
        meet(Hello::new(Role::Peer, token.job_id())),
        ErrorKind::Rejected(RejectReason::WrongRole)
    );
    assert_eq!(
        meet(Hello::new(Role::StoreClient, token.job_id() ^ 1)),
        ErrorKind::Rejected(RejectReason::WrongJob)
    );
    eventually("counted", || server.rejected() == 2);
}

#[test]
fn members_beyond_the_limit_are_reported() {
    let mut options = ServerOptions::default();
    options.max_clients = 2;
    let (server, token) = serve_with(options);
    let (a, _b) = (join(&server, &token), join(&server, &token));
    let addr = server.local_addr().to_string();
    let limit = Duration::from_millis(100);
    let error = TcpStore::connect(&addr, token.clone(), limit).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(
        error.to_string().contains("too many connections"),
        "{error}"
    );
    a.set("k", b"").unwrap();
    drop(a);
    TcpStore::connect(&addr, token, LONG).unwrap();
}

#[test]
fn limits_of_the_server() {
    let mut options = ServerOptions::default();
    options.limits = Limits::new(2, 100);
    let (server, token) = serve_with(options);
    let store = join(&server, &token);
    store.set("a", b"1").unwrap();
    store.set("b", b"1").unwrap();
    let error = store.set("c", b"1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.to_string().contains("\"c\""), "{error}");
    let error = store.set("a", &[0; 100]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert_eq!(store.get("a", LONG).unwrap(), b"1");
    assert_eq!(store.add("a", 1).unwrap(), 2);
    let error = store.append("a", &[0; 100]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    let error = store.queue_push("c", b"").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.to_string().contains("\"c\""), "{error}");
    assert_eq!(
        store.compare_set("d", None, b"").unwrap_err().kind(),
        ErrorKind::LimitExceeded
    );
}

#[test]
fn a_client_that_disappears_takes_its_waits_along() {
    let (server, token) = serve();
    let keys: Vec<String> = (0..100).map(|i| format!("never/{i}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    for _ in 0..3 {
        let mut raw = Raw::connect(&server, &token);
        raw.send(&[Request::Wait {
            keys: keys.clone(),
            timeout_ms: u32::MAX,
        }]);
        eventually("the wait arrives", || server.pending_waits() == 1);
        drop(raw);
        eventually("the wait is gone", || server.pending_waits() == 0);
        eventually("the client is gone", || server.clients() == 0);
    }
    // What it waited for can come without harm.
    let store = join(&server, &token);
    for key in &keys {
        store.set(key, b"").unwrap();
    }
}

#[test]
fn a_wait_that_timed_out_leaves_nothing_behind() {
    let (server, token) = serve();
    let store = join(&server, &token);
    for _ in 0..3 {
        store.wait(&["x", "y", "x"], SHORT).unwrap_err();
    }
    eventually("no wait is left", || server.pending_waits() == 0);
    store.set("x", b"").unwrap();
    store.set("y", b"").unwrap();
    store.wait(&["x", "y", "x"], LONG).unwrap();
}

/// One element ends the wait that began first, and no other.
#[test]
fn poppers_are_served_in_the_order_of_their_requests() {
    let (server, token) = serve();
    let store = join(&server, &token);
    let mut poppers = [(); 3].map(|()| Raw::connect(&server, &token));
    for (waits, popper) in (1..).zip(&mut poppers) {
        popper.send(&[Request::QueuePop {
            queue: "jobs",
            timeout_ms: u32::MAX,
        }]);
        eventually("the wait arrives", || server.pending_waits() == waits);
    }
    for (number, popper) in (1..).zip(&mut poppers) {
        store.queue_push("jobs", &[number]).unwrap();
        assert_eq!(popper.receive().unwrap(), format!("Value([{number}])"));
        let left = 3 - usize::from(number);
        eventually("one wait has ended", || server.pending_waits() == left);
    }
    // One that is gone, and one that has timed out, are passed over.
    poppers[0].send(&[Request::QueuePop {
        queue: "jobs",
        timeout_ms: u32::MAX,
    }]);
    eventually("the wait arrives", || server.pending_waits() == 1);
    let [gone, mut late, mut other] = poppers;
    drop(gone);
    eventually("the wait is gone", || server.pending_waits() == 0);
    late.send(&[Request::QueuePop {
        queue: "jobs",
        timeout_ms: 1,
    }]);
    assert_eq!(late.receive().unwrap(), "NotFound");
    store.queue_push("jobs", &[4]).unwrap();
    assert_eq!(store.queue_len("jobs").unwrap(), 1);
    other.send(&[
        Request::QueuePop {
            queue: "jobs",
            timeout_ms: 0,
        },
        Request::QueueLen { queue: "jobs" },
    ]);
    assert_eq!(other.receive().unwrap(), "Value([4])");
    assert_eq!(other.receive().unwrap(), "Number(0)");
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let (server, token) = serve();
    let store = join(&server, &token);
    let mut raw = Raw::connect(&server, &token);
    raw.send(&[
        Request::Add { key: "n", delta: 1 },
        Request::Get {
            key: "later",
            timeout_ms: 100_000,
        },
        Request::Add { key: "n", delta: 1 },
        Request::Get {
            key: "never",
            timeout_ms: 1,
        },
        Request::Add { key: "n", delta: 1 },
    ]);
    assert_eq!(raw.receive().unwrap(), "Number(1)");
    eventually("the wait arrives", || server.pending_waits() == 1);
    assert_eq!(store.get("n", LONG).unwrap(), b"1");
    store.set("later", b"").unwrap();
    for expected in [
        "Value([])",
        "Number(2)",
        "Missing([\"never\"])",
        "Number(3)",
    ] {
        assert_eq!(raw.receive().unwrap(), expected);
    }
}

/// A member that asks for megabytes and does not read them harms nobody.
#[test]
fn a_member_that_does_not_read() {
    let (server, token) = serve();
    let store = join(&server, &token);
    store.set("big", &vec![1; MAX_VALUE_BYTES]).unwrap();
    let mut raw = Raw::connect(&server, &token);
    let requests = vec![Request::TryGet { key: "big" }; 200];
    raw.send(&requests);
    for i in 0..200 {
        store.set("k", i.to_string().as_bytes()).unwrap();
    }
    for _ in 0..200 {
        assert!(raw.receive().unwrap().starts_with("Value([1, 1"));
    }
}

#[test]
fn a_member_that_breaks_the_protocol_is_told_and_closed() {
    let (server, token) = serve();
    let store = join(&server, &token);
    let lies: [&[u8]; 5] = [
        &[0xff, 0xff, 0xff, 0xff],
        &[0, 0, 0, 0],
        &[1, 0, 0, 0, 99],
        &[3, 0, 0, 0, 3, 0, 0],
        b"GET / HTTP/1.1\r\n\r\n",
    ];
    for lie in lies {
        let mut raw = Raw::connect(&server, &token);
        raw.0.write_all(lie).unwrap();
        assert_eq!(raw.receive().unwrap(), "Failed(BadRequest)");
        assert_eq!(raw.receive(), None);
        store.set("k", b"").unwrap();
    }
    eventually("all closed", || server.clients() == 1);
}

/// A client that leaves in the middle of a request has asked nothing.
#[test]
fn half_a_request() {
    let (server, token) = serve();
    let store = join(&server, &token);
    let mut request = Vec::new();
    let key = "half";
    Request::Set { key, value: b"v" }
        .encode(&mut request)
        .unwrap();
    let mut raw = Raw::connect(&server, &token);
    raw.0.write_all(&request[..request.len() - 1]).unwrap();
    drop(raw);
    eventually("it is gone", || server.clients() == 1);
    assert_eq!(store.try_get(key).unwrap(), None);
}

/// Here none has to give up its place for another, which one that is not
/// scheduled for 20 ms has to where there are fewer places than clients.
#[test]
fn many_clients_join_at_once() {
    let mut options = ServerOptions::default();
    options.max_pending_handshakes = 100;
    let (server, token) = serve_with(options);
    thread::scope(|scope| {
        for rank in 0..100 {
            let (server, token) = (&server, &token);
            scope.spawn(move || {
                let store = join(server, token);
                store.set(&format!("rank/{rank}"), b"").unwrap();
                let all: Vec<String> = (0..100).map(|r| format!("rank/{r}")).collect();
                let all: Vec<&str> = all.iter().map(String::as_str).collect();
                store.wait(&all, LONG).unwrap();
            });
        }
    });
    assert_eq!(server.rejected(), 0);
    eventually("all have left", || server.clients() == 0);
}

/// The figure of the design is well below a millisecond, which the printed
/// percentiles show. The fastest of all keeps other load on the machine out
/// of what is required: nothing waits for a timer of 40 ms.
#[test]
fn a_round_trip_is_fast() {
    let (server, token) = serve();
    let store = join(&server, &token);
    let mut times: Vec<Duration> = (0..500)
        .map(|_| {
            let start = Instant::now();
            store.set("k", b"value").unwrap();
            assert_eq!(store.get("k", LONG).unwrap(), b"value");
            start.elapsed()
        })
        .collect();
    times.sort();
    println!("set + get: p10 {:?}, median {:?}", times[50], times[250]);
    assert!(times[0] < Duration::from_millis(10), "{:?}", times[0]);
}

/// A member that ends without a word is spoken for by the server.
#[test]
fn a_will_is_executed_when_its_member_is_gone() {
    let (server, token) = serve();
    let store = join(&server, &token);
    let waiter = thread::spawn({
        let store = join(&server, &token);
        move || store.get("failed", LONG).unwrap()
    });
    eventually("the wait arrives", || server.pending_waits() == 1);
    let mut raw = Raw::connect(&server, &token);
    for (key, value) in [("other", &b"x"[..]), ("failed", b"rank 3 is gone")] {
        let value = Some(value);
        raw.send(&[Request::Will { key, value }]);
        assert_eq!(raw.receive().unwrap(), "Done");
    }
    assert_eq!(store.try_get("failed").unwrap(), None);
    drop(raw);
    assert_eq!(waiter.join().unwrap(), b"rank 3 is gone");
    assert_eq!(
        store.try_get("other").unwrap(),
        None,
        "the last will counts"
    );

    // What is there already stays.
    let mut raw = Raw::connect(&server, &token);
    let (key, value) = ("failed", Some(&b"rank 4 is gone"[..]));
    raw.send(&[Request::Will { key, value }]);
    assert_eq!(raw.receive().unwrap(), "Done");
    drop(raw);
    eventually("it has left", || server.clients() <= 2);
    assert_eq!(store.get("failed", LONG).unwrap(), b"rank 3 is gone");
}

#[test]
fn a_will_that_was_taken_back_is_not_executed() {
    let (server, token) = serve();
    let store = Arc::new(join(&server, &token));
    for _ in 0..20 {
        let will = store.leave_will("failed", b"rank 3 is gone").unwrap();
        drop(will.expect("this store notices"));
    }
    let long = vec![7; MAX_WILL_BYTES + 1];
    let error = store.leave_will("failed", &long).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    eventually("they have left", || server.clients() == 1);
    assert_eq!(store.try_get("failed").unwrap(), None);
    let will = store.leave_will("failed", b"rank 3 is gone").unwrap();
    will.expect("this store notices").execute();
    assert_eq!(store.get("failed", LONG).unwrap(), b"rank 3 is gone");
    // As the next entry of a list.
    for (key, value) in [("log/0", "a"), ("log/1", "b"), ("log/3", "d")] {
        store.set(key, value.as_bytes()).unwrap();
    }
    let will = store.leave_will("log/", b"rank 3 is gone").unwrap();
    will.expect("this store notices").execute();
    assert_eq!(store.get("log/2", LONG).unwrap(), b"rank 3 is gone");
    assert_eq!(store.try_get("log/").unwrap(), None);
    assert!(MemStore::new().leave_will("k", b"v").unwrap().is_none());
}

/// More keys than one request takes: still all at one moment, and exactly those
/// that are missing then.
#[test]
fn a_wait_for_very_many_keys_sees_what_goes_away_meanwhile() {
    let (server, token) = serve();
    let store = join(&server, &token);
    let keys: Vec<String> = (0..1500).map(|n| format!("key/{n}")).collect();
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    for key in &names[..1499] {
        store.set(key, b"1").unwrap();
    }
    std::thread::scope(|scope| {
        let other = join(&server, &token);
        scope.spawn(move || {
            // While the second part is waited for.
            std::thread::sleep(Duration::from_millis(300));
            other.delete("key/7").unwrap();
            other.set("key/1499", b"1").unwrap();
        });
        let error = store.wait(&names, Duration::from_secs(2)).unwrap_err();
        assert_eq!(error.missing_keys(), ["key/7"]);
        store.set("key/7", b"1").unwrap();
        store.wait(&names, Duration::from_secs(2)).unwrap();
    });
}
