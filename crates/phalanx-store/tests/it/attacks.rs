//! Hostile and stray connections while members work.
//!
//! In every test two members set and get without a pause, a third waits, and
//! new members join, while an attacker does its worst. None of them may see an
//! error or a long delay, and the server must have counted the attacker.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{LONG, Raw, eventually, join, serve_with};
use phalanx_store::{ErrorKind, RefusalReason, ServerOptions, Store, TcpServer, TcpStore};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Acceptor, Hello, Initiator, Role};
use phalanx_wire::store_msg::Request;

/// No member may ever wait longer for a set and a get. Generous, as the
/// machine may be busy with other things; a member that is really held up
/// waits for a handshake deadline or for ever.
const DELAY: Duration = Duration::from_secs(30);

/// Runs `attack` while members work; it gets the server's address and token
/// (which an attacker would not have, except where a test says so).
/// Returns how many connections the server refused; on a busy machine a
/// member's may be among them, which then tries again.
fn under_attack(attack: impl Fn(&TcpServer, &Token) + Sync) -> u64 {
    let mut options = ServerOptions::default();
    options.handshake_timeout = Duration::from_millis(400);
    let (server, token) = serve_with(options);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        // Also when an assertion fails: the members must end, or the failure
        // would show as a hang.
        let _end = SetOnDrop(&over);
        let waiting = join(&server, &token);
        let waiter = scope.spawn(move || waiting.get("the end", LONG).unwrap());
        let members: Vec<_> = (0..2)
            .map(|rank| {
                let store = join(&server, &token);
                let over = &over;
                scope.spawn(move || work(&store, rank, over))
            })
            .collect();
        let joiner = scope.spawn(|| {
            // At least once: a short attack may be over before we begin.
            loop {
                let start = Instant::now();
                join(&server, &token).add("joined", 1).unwrap();
                assert!(start.elapsed() < DELAY, "join took {:?}", start.elapsed());
                if over.load(Ordering::Relaxed) {
                    break;
                }
                thread::sleep(Duration::from_millis(10));
            }
        });
        attack(&server, &token);
        over.store(true, Ordering::Relaxed);
        for member in members {
            assert!(member.join().unwrap() > 0);
        }
        joiner.join().unwrap();
        let last = join(&server, &token);
        assert!(last.add("joined", 0).unwrap() > 0);
        last.set("the end", b"reached").unwrap();
        assert_eq!(waiter.join().unwrap(), b"reached");
    });
    eventually("everyone has left", || server.clients() == 0);
    server.rejected()
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sets and gets until it is over; returns how often.
fn work(store: &TcpStore, rank: usize, over: &AtomicBool) -> u64 {
    let key = format!("step/{rank}");
    let mut step = 0_u64;
    while !over.load(Ordering::Relaxed) || step == 0 {
        let start = Instant::now();
        let value = step.to_le_bytes();
        store.set(&key, &value).unwrap();
        assert_eq!(store.get(&key, LONG).unwrap(), value);
        assert!(start.elapsed() < DELAY, "a step took {:?}", start.elapsed());
        step += 1;
    }
    step
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// Sends, and returns what came back before the server closed.
fn say(addr: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(addr);
    // The server may have closed in the middle of a long message.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

fn genuine_hello(token: &Token) -> (Initiator, Vec<u8>) {
    let hello = Hello::new(Role::StoreClient, token.job_id());
    let (initiator, message) = Initiator::start(hello, token).unwrap();
    (initiator, message.to_vec())
}

#[test]
fn port_scan_connects_and_closes() {
    let rejected = under_attack(|server, _| {
        for _ in 0..200 {
            drop(connect(server.local_addr()));
        }
        eventually("all counted", || server.rejected() >= 200);
    });
    assert!(rejected >= 200, "{rejected}");
}

#[test]
fn port_scan_with_resets() {
    under_attack(|server, _| {
        for _ in 0..100 {
            let stream = connect(server.local_addr());
            let socket = socket2::SockRef::from(&stream);
            socket.set_linger(Some(Duration::ZERO)).unwrap();
        }
        eventually("all counted", || server.rejected() >= 100);
    });
}

#[test]
fn http_get() {
    let rejected = under_attack(|server, _| {
        for _ in 0..50 {
            let request = b"GET /metrics HTTP/1.1\r\nHost: node0\r\nAccept: */*\r\n\r\n";
            assert_eq!(say(server.local_addr(), request), b"");
        }
    });
    assert!(rejected >= 50, "{rejected}");
}

#[test]
fn tls_hello() {
    let mut hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec();
    hello.resize(517, 0x5a);
    let rejected = under_attack(|server, _| {
        for _ in 0..50 {
            assert_eq!(say(server.local_addr(), &hello), b"");
        }
    });
    assert!(rejected >= 50, "{rejected}");
}

#[test]
fn truncated_hello() {
    let rejected = under_attack(|server, token| {
        let (_, hello) = genuine_hello(token);
        for length in 1..hello.len() {
            let mut stream = connect(server.local_addr());
            stream.write_all(&hello[..length]).unwrap();
        }
        eventually("all counted", || server.rejected() >= 75);
    });
    assert!(rejected >= 75, "{rejected}");
}

/// Both messages of a member, recorded and sent again: the challenge differs.
#[test]
fn replayed_hello() {
    let rejected = under_attack(|server, token| {
        let (initiator, hello) = genuine_hello(token);
        let (_, challenge) = Acceptor::start(&hello, token).unwrap();
        let (_, proof) = initiator.answer(&challenge).unwrap();
        for _ in 0..50 {
            let mut stream = connect(server.local_addr());
            stream.write_all(&hello).unwrap();
            let mut fresh = vec![0; challenge.len()];
            stream.read_exact(&mut fresh).unwrap();
            assert_ne!(fresh, challenge[..]);
            stream.write_all(&proof).unwrap();
            let mut verdict = Vec::new();
            let _ = stream.read_to_end(&mut verdict);
            assert_eq!(verdict, b"");
        }
    });
    assert!(rejected >= 50, "{rejected}");
}

/// The server's own challenge, sent back as a proof.
#[test]
fn reflected_challenge() {
    let rejected = under_attack(|server, _| {
        // An attacker knows the format, not the token.
        let (_, hello) = genuine_hello(&Token::generate().unwrap());
        for _ in 0..20 {
            let mut stream = connect(server.local_addr());
            stream.write_all(&hello).unwrap();
            let mut challenge = [0; 72];
            stream.read_exact(&mut challenge).unwrap();
            let mut proof = b"PHHS\x01\x03\x20\0".to_vec();
            proof.extend_from_slice(&challenge[40..]);
            stream.write_all(&proof).unwrap();
            let mut verdict = Vec::new();
            let _ = stream.read_to_end(&mut verdict);
            assert_eq!(verdict, b"");
        }
    });
    assert!(rejected >= 20, "{rejected}");
}

#[test]
fn oversize_lengths() {
    let rejected = under_attack(|server, token| {
        let addr = server.local_addr();
        for length in [69_u16, 512, 0x7fff, 0xffff] {
            let mut lie = b"PHHS\x01\x01".to_vec();
            lie.extend_from_slice(&length.to_le_bytes());
            lie.resize(4096, 0);
            assert_eq!(say(addr, &lie), b"");
        }
        // A member that has gone mad is closed, too, and told so.
        for length in [0x7fff_ffff_u32, u32::MAX] {
            let mut raw = Raw::connect(server, token);
            raw.0.write_all(&length.to_le_bytes()).unwrap();
            assert_eq!(raw.receive().unwrap(), "Failed(BadRequest)");
            assert_eq!(raw.receive(), None);
        }
    });
    assert!(rejected >= 4, "{rejected}");
}

/// More slow connections than the server has places for: members still join,
/// because whoever has been slow for a while gives up its place.
#[test]
fn slow_loris() {
    const CONNECTIONS: usize = 150;
    let rejected = under_attack(|server, token| {
        let (_, hello) = genuine_hello(token);
        let mut slow: Vec<TcpStream> = (0..CONNECTIONS)
            .map(|_| connect(server.local_addr()))
            .collect();
        for byte in &hello[..20] {
            for stream in &mut slow {
                let _ = stream.write_all(&[*byte]);
            }
            thread::sleep(Duration::from_millis(50));
        }
        eventually("all refused", || server.rejected() >= CONNECTIONS as u64);
    });
    assert!(rejected >= CONNECTIONS as u64, "{rejected}");
}

/// Says a proper hello, and nothing more.
#[test]
fn half_a_handshake() {
    let rejected = under_attack(|server, token| {
        let (_, hello) = genuine_hello(token);
        let held: Vec<TcpStream> = (0..30)
            .map(|_| {
                let mut stream = connect(server.local_addr());
                stream.write_all(&hello).unwrap();
                stream
            })
            .collect();
        eventually("all refused", || server.rejected() >= 30);
        drop(held);
    });
    assert!(rejected >= 30, "{rejected}");
}

#[test]
fn wrong_token() {
    let rejected = under_attack(|server, _| {
        let addr = server.local_addr().to_string();
        for _ in 0..20 {
            let token = Token::generate().unwrap();
            let limit = Duration::from_millis(1);
            let error = TcpStore::connect(&addr, token, limit).unwrap_err();
            // On a busy machine the challenge may come too late.
            let kinds = [ErrorKind::TokenMismatch, ErrorKind::Timeout];
            assert!(kinds.contains(&error.kind()), "{error}");
        }
        eventually("all counted", || server.rejected() >= 20);
    });
    assert!(rejected >= 20, "{rejected}");
}

/// Requests before, or instead of, a handshake are not served.
#[test]
fn requests_without_a_handshake() {
    let mut request = Vec::new();
    Request::DeletePrefix { prefix: "" }
        .encode(&mut request)
        .unwrap();
    request.resize(64, 0);
    let rejected = under_attack(|server, token| {
        join(server, token).set("kept", b"v").unwrap();
        for _ in 0..20 {
            assert_eq!(say(server.local_addr(), &request), b"");
            // A proper hello and then a request instead of the proof.
            let (_, mut hello) = genuine_hello(token);
            hello.extend_from_slice(&request);
            assert_eq!(say(server.local_addr(), &hello).len(), 72);
        }
        assert_eq!(join(server, token).get("kept", LONG).unwrap(), b"v");
    });
    assert!(rejected >= 40, "{rejected}");
}

/// Seeded noise from several connections at once.
#[test]
fn noise() {
    let rejected = under_attack(|server, _| {
        thread::scope(|scope| {
            for seed in 1..=4_u64 {
                scope.spawn(move || {
                    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    for _ in 0..50 {
                        let bytes: Vec<u8> = (0..600)
                            .map(|_| {
                                state ^= state << 13;
                                state ^= state >> 7;
                                state ^= state << 17;
                                state as u8
                            })
                            .collect();
                        assert_eq!(say(server.local_addr(), &bytes), b"");
                    }
                });
            }
        });
    });
    assert!(rejected >= 200, "{rejected}");
}

/// A crowd that connects and says nothing: whoever comes behind it is not
/// kept waiting until each of the crowd has had its fair time.
#[test]
fn members_join_through_a_silent_crowd() {
    const CROWD: usize = 1000;
    // 64 places times 250 ms would be four seconds, every time.
    const TRIES: usize = 5;
    let slowest = std::sync::Mutex::new(Duration::ZERO);
    for _ in 0..TRIES {
        under_attack(|server, token| {
            let crowd: Vec<TcpStream> = (0..CROWD).map(|_| connect(server.local_addr())).collect();
            let start = Instant::now();
            join(server, token).add("through the crowd", 1).unwrap();
            *slowest.lock().unwrap() = start.elapsed();
            drop(crowd);
        });
        if *slowest.lock().unwrap() < Duration::from_millis(2500) {
            return;
        }
    }
    panic!("{slowest:?} and more in each of {TRIES} tries");
}

/// Says a proper hello on each of `count` connections and nothing more, and does so
/// again on each that is closed, until it is over. `up` tells when all have been
/// challenged.
fn half_open(addr: SocketAddr, hello: &[u8], count: usize, up: &AtomicBool, over: &AtomicBool) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let open = || {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.set_nonblocking(true).unwrap();
        let _ = stream.write_all(hello);
        stream
    };
    let mut streams: Vec<TcpStream> = (0..count).map(|_| open()).collect();
    let mut challenged = vec![false; count];
    while !over.load(Ordering::Relaxed) {
        let mut fds: Vec<_> = streams
            .iter()
            .map(|stream| PollFd::new(stream, PollFlags::IN))
            .collect();
        let turn = Timespec {
            tv_sec: 0,
            tv_nsec: 10_000_000,
        };
        poll(&mut fds, Some(&turn)).unwrap();
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        for (i, _) in ready.iter().enumerate().filter(|(_, ready)| **ready) {
            if matches!(streams[i].read(&mut [0; 512]), Ok(1..)) {
                challenged[i] = true;
            } else {
                streams[i] = open();
            }
        }
        if challenged.iter().all(|done| *done) {
            up.store(true, Ordering::Relaxed);
        }
    }
}

/// Strangers that say hello, hear the challenge, and say nothing more, many times
/// more than there are places, and come again when they are closed: members join
/// as if they were not there.
#[test]
fn members_join_through_half_open_handshakes() {
    const STRANGERS: usize = 1000;
    const PLACES: usize = 64;
    // 64 places times 250 ms would be four seconds, every time.
    const TRIES: usize = 5;
    let mut options = ServerOptions::default();
    options.max_pending_handshakes = PLACES;
    let (server, token) = serve_with(options);
    let (_, hello) = genuine_hello(&Token::generate().unwrap());
    let (up, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut times = Vec::new();
    thread::scope(|scope| {
        let _end = SetOnDrop(&over);
        scope.spawn(|| half_open(server.local_addr(), &hello, STRANGERS, &up, &over));
        eventually("all have been challenged", || up.load(Ordering::Relaxed));
        for _ in 0..TRIES {
            let start = Instant::now();
            join(&server, &token).add("through them", 1).unwrap();
            times.push(start.elapsed());
            if start.elapsed() < Duration::from_secs(2) {
                return;
            }
        }
        panic!("joining took {times:?}");
    });
    assert!(server.rejected() >= STRANGERS as u64 - PLACES as u64);
    let refused = server.refused();
    assert_eq!(refused[0].reason, RefusalReason::WrongToken, "{refused:?}");
}

/// The same with hellos of members that were recorded, as many as there are: each
/// counts as a member's only once.
#[test]
fn a_recorded_hello_is_worth_one_place() {
    let mut options = ServerOptions::default();
    options.max_pending_handshakes = 2;
    let (server, token) = serve_with(options);
    let (_, hello) = genuine_hello(&token);
    let (up, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let _end = SetOnDrop(&over);
        scope.spawn(|| half_open(server.local_addr(), &hello, 50, &up, &over));
        eventually("all have been challenged", || up.load(Ordering::Relaxed));
        for _ in 0..10 {
            join(&server, &token).add("between them", 1).unwrap();
        }
    });
}

/// A member that sends a quarter of a million requests at once is served in
/// turns: the others do not wait for the last of them.
#[test]
fn a_pipeline_does_not_hold_up_others() {
    let (server, token) = serve_with(ServerOptions::default());
    let mut request = Vec::new();
    Request::TryGet { key: "a" }.encode(&mut request).unwrap();
    let many = request.repeat((2 << 20) / request.len());
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _end = SetOnDrop(&over);
        for _ in 0..2 {
            let mut raw = Raw::connect(&server, &token);
            let (mut reader, many, over) = (raw.0.try_clone().unwrap(), &many, &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) && raw.0.write_all(many).is_ok() {}
                let _ = raw.0.shutdown(std::net::Shutdown::Both);
            });
            scope.spawn(move || while matches!(reader.read(&mut [0; 1 << 16]), Ok(1..)) {});
        }
        let store = join(&server, &token);
        let mut times: Vec<Duration> = (0..50)
            .map(|_| {
                let before = Instant::now();
                store.set("k", b"v").unwrap();
                before.elapsed()
            })
            .collect();
        times.sort();
        // Most of them: the machine may be busy with other things.
        assert!(times[25] < DELAY, "{times:?}");
    });
}

/// Requests that are never finished, answers that are never taken, and waits
/// for long lists of keys: the server buffers a bounded amount for all.
#[test]
fn buffers_are_bounded_over_all_members() {
    const LIMIT: u64 = 8 << 20;
    let mut options = ServerOptions::default();
    options.max_buffered_bytes = LIMIT;
    let (server, token) = serve_with(options);
    let honest = join(&server, &token);
    let waiter = join(&server, &token);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| waiter.get("the end", LONG).unwrap());
        let value = vec![7; 1 << 20];
        honest.set("large", &value).unwrap();
        let mut half = Vec::new();
        let set = Request::Set {
            key: "half",
            value: &value,
        };
        set.encode(&mut half).unwrap();
        half.pop();
        let mut deaf = Vec::new();
        Request::TryGet { key: "large" }.encode(&mut deaf).unwrap();
        // Equally long lists: the newest is refused.
        let keys: Vec<String> = (0..1024).map(|i| format!("{i:0>1024}")).collect();
        let wait = Request::Wait {
            keys: keys.iter().map(String::as_str).collect(),
            timeout_ms: 60_000,
        };
        let mut held = Vec::new();
        let mut refused = 0;
        for _ in 0..16 {
            let mut raw = Raw::connect(&server, &token);
            raw.0.write_all(&half).unwrap();
            held.push(raw);
            let mut raw = Raw::connect(&server, &token);
            raw.0.write_all(&deaf.repeat(12)).unwrap();
            held.push(raw);
            let mut raw = Raw::connect(&server, &token);
            raw.send(std::slice::from_ref(&wait));
            raw.0
                .set_read_timeout(Some(Duration::from_millis(20)))
                .unwrap();
            let mut answer = [0; 6];
            if raw.0.read_exact(&mut answer).is_ok() {
                assert_eq!(answer[4..], [0x88, 2], "Failed(StoreFull)");
                refused += 1;
            }
            held.push(raw);
            // Others are served meanwhile.
            honest.set("still", b"here").unwrap();
            // One read may bring more than there is room for.
            let most = LIMIT + (4 << 20);
            assert!(
                server.buffered_bytes() <= most,
                "{}",
                server.buffered_bytes()
            );
        }
        assert!(refused > 4, "{refused} waits were refused");
        honest.set("the end", b"reached").unwrap();
        assert_eq!(waiting.join().unwrap(), b"reached");
        drop(held);
        eventually("all memory is given back", || {
            server.buffered_bytes() < 1 << 20
        });
    });
}
