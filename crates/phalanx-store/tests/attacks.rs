//! Hostile and stray connections while members work.
//!
//! In every test two members set and get without a pause, a third waits, and
//! new members join, while an attacker does its worst. None of them may see an
//! error or a long delay, and the server must have counted the attacker.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{LONG, Raw, eventually, join, serve_with};
use phalanx_store::{ErrorKind, ServerOptions, Store, TcpServer, TcpStore};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Acceptor, Hello, Initiator, Role};
use phalanx_wire::store_msg::Request;

/// No member may ever wait longer for a set and a get. Generous, as the
/// machine may be busy with other things; a member that is really held up
/// waits for a handshake deadline or for ever.
const DELAY: Duration = Duration::from_secs(4);

/// Runs `attack` while members work; it gets the server's address and token
/// (which an attacker would not have, except where a test says so).
/// Returns how many connections the server refused.
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
            while !over.load(Ordering::Relaxed) {
                let start = Instant::now();
                join(&server, &token).add("joined", 1).unwrap();
                assert!(start.elapsed() < DELAY, "join took {:?}", start.elapsed());
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
    assert_eq!(rejected, 200);
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
    assert_eq!(rejected, 50);
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
    assert_eq!(rejected, 50);
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
    assert_eq!(rejected, 75);
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
    assert_eq!(rejected, 50);
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
    assert_eq!(rejected, 20);
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
    assert_eq!(rejected, 4);
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
    assert_eq!(rejected, CONNECTIONS as u64);
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
    assert_eq!(rejected, 30);
}

#[test]
fn wrong_token() {
    let rejected = under_attack(|server, _| {
        let addr = server.local_addr().to_string();
        for _ in 0..20 {
            let token = Token::generate().unwrap();
            let error = TcpStore::connect(&addr, token, LONG).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TokenMismatch);
        }
        eventually("all counted", || server.rejected() >= 20);
    });
    assert_eq!(rejected, 20);
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
    assert_eq!(rejected, 40);
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
    assert_eq!(rejected, 200);
}
