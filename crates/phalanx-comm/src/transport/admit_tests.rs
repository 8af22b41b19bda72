//! Tests that members are admitted and strangers disturb no member.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_store::ErrorKind as StoreKind;
use phalanx_store::auth::initiate;
use phalanx_wire::handshake::Initiator;

use super::*;

const LIMIT: Duration = Duration::from_secs(60);

struct Scene {
    listener: TcpListener,
    address: SocketAddr,
    token: Token,
}

fn scene() -> Scene {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    lengthen_backlog(&listener);
    let address = listener.local_addr().unwrap();
    Scene {
        listener,
        address,
        token: Token::generate().unwrap(),
    }
}

impl Scene {
    fn hello(&self, rank: u32) -> Hello {
        Hello::new(Role::Peer, self.token.job_id())
            .rank(rank)
            .world(3)
            .generation(5)
            .group(2)
    }

    fn admit(&self, expected: &[(usize, u16)]) -> Result<Vec<Admitted<TcpStream>>> {
        let deadline = Instant::now() + LIMIT;
        admit(
            &self.listener,
            self.hello(0),
            &self.token,
            expected,
            deadline,
            |_| Ok(true),
        )
    }

    fn call(&self, hello: Hello, token: &Token) -> phalanx_store::Result<(TcpStream, Hello)> {
        let mut socket = TcpStream::connect(self.address).unwrap();
        initiate(&mut socket, hello, token, LIMIT).map(|peer| (socket, peer))
    }
}

#[test]
fn members_with_a_flaw_are_told_the_reason() {
    let scene = scene();
    let other = Token::generate().unwrap();
    std::thread::scope(|scope| {
        let admitting = scope.spawn(|| scene.admit(&[(1, 0), (2, 0)]));
        let good = scene.hello(1);
        let reject = |hello: Hello| match scene.call(hello, &scene.token).unwrap_err().kind() {
            StoreKind::Rejected(reason) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(reject(good.generation(4)), RejectReason::WrongGeneration);
        assert_eq!(reject(good.group(3)), RejectReason::WrongGroup);
        assert_eq!(reject(good.world(4)), RejectReason::WrongWorld);
        assert_eq!(reject(good.rank(7)), RejectReason::WrongRank);
        assert_eq!(reject(good.stream(9)), RejectReason::WrongStream);
        let control = Hello {
            role: Role::Control,
            ..good
        };
        assert_eq!(reject(control), RejectReason::WrongRole);
        let stranger = scene.call(good, &other).unwrap_err();
        assert_eq!(stranger.kind(), StoreKind::TokenMismatch);
        let (_first, peer) = scene.call(good, &scene.token).unwrap();
        assert_eq!(peer.rank, 0);
        assert_eq!(reject(good), RejectReason::DuplicateRank);
        let (_second, _) = scene.call(scene.hello(2), &scene.token).unwrap();
        assert_eq!(admitting.join().unwrap().unwrap().len(), 2);
    });
}

#[test]
fn strangers_disturb_nobody() {
    let scene = scene();
    std::thread::scope(|scope| {
        let admitting = scope.spawn(|| scene.admit(&[(1, 0), (2, 0)]));
        // More silent connections than handshakes may be open.
        let silent: Vec<TcpStream> = (0..100)
            .map(|_| TcpStream::connect(scene.address).unwrap())
            .collect();
        for garbage in [
            &b"GET /metrics HTTP/1.1\r\n\r\n"[..],
            &[0xff; 600],
            b"PHHS",
            b"",
        ] {
            let mut socket = TcpStream::connect(scene.address).unwrap();
            socket.write_all(garbage).unwrap();
        }
        let start = Instant::now();
        for rank in [1, 2] {
            // A member tries again when it is rejected, as `dial` does.
            while scene.call(scene.hello(rank), &scene.token).is_err() {
                assert!(start.elapsed() < LIMIT);
            }
        }
        assert_eq!(admitting.join().unwrap().unwrap().len(), 2);
        // The pending ones were closed.
        for mut socket in silent {
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            let end = socket.read(&mut [0; 64]);
            // End of stream, or a reset for those never taken off the backlog
            // (once the listener is gone, below).
            if end.is_ok_and(|n| n == 0) {
                return;
            }
        }
        panic!("no silent connection was closed");
    });
}

#[test]
fn the_deadline_is_kept_and_the_absent_are_known() {
    let scene = scene();
    // Long enough for a question, however busy the machine is.
    let deadline = Instant::now() + Duration::from_secs(2);
    let mut asked = Vec::new();
    let members = admit(
        &scene.listener,
        scene.hello(0),
        &scene.token,
        &[(1, 0)],
        deadline,
        |missing| {
            asked.extend_from_slice(missing);
            Ok(true)
        },
    );
    assert!(members.unwrap().is_empty());
    assert!(asked.contains(&(1, 0)));
    assert!(Instant::now() < deadline + LIMIT / 2);
}

#[test]
fn the_caller_can_give_up_or_fail() {
    let scene = scene();
    let far = Instant::now() + LIMIT;
    let me = scene.hello(0);
    let gave_up = admit(&scene.listener, me, &scene.token, &[(1, 0)], far, |_| {
        Ok(false)
    });
    assert!(gave_up.unwrap().is_empty());
    let failed = admit(&scene.listener, me, &scene.token, &[(1, 0)], far, |_| {
        Err(crate::Error::usage("enough"))
    });
    assert!(failed.is_err());
    assert!(Instant::now() < far);
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Keeps `count` connections open that only say hello with another token, and reopens
/// each that is closed, until `over`; `up` is set when each was challenged.
fn half_open(scene: &Scene, count: usize, up: &AtomicBool, over: &AtomicBool) {
    let token = Token::generate().unwrap();
    let (_, hello) = Initiator::start(scene.hello(1), &token).unwrap();
    let open = || {
        let mut socket = TcpStream::connect(scene.address).ok()?;
        socket.set_nonblocking(true).unwrap();
        socket.write_all(&hello).ok()?;
        Some(socket)
    };
    let mut held: Vec<Option<TcpStream>> = (0..count).map(|_| open()).collect();
    let mut challenged = vec![false; count];
    while !over.load(Ordering::Relaxed) {
        up.fetch_or(challenged.iter().all(|c| *c), Ordering::Relaxed);
        for (slot, challenged) in held.iter_mut().zip(&mut challenged) {
            let is_open = slot.as_mut().is_some_and(|socket| {
                let heard = socket.read(&mut [0; 512]);
                *challenged |= matches!(heard, Ok(1..));
                matches!(heard, Ok(1..))
                    || heard.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock)
            });
            if !is_open {
                *slot = open();
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Many more strangers than places, all with a hello, that reconnect when they are
/// closed: with 64 places and 250 ms for each, each member took seconds.
#[test]
fn members_get_through_half_open_handshakes() {
    const MEMBERS: u32 = 20;
    let scene = scene();
    let expected: Vec<(usize, u16)> = (1..=MEMBERS).map(|rank| (rank as usize, 0)).collect();
    let (up, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _end = SetOnDrop(&over);
        scope.spawn(|| half_open(&scene, 500, &up, &over));
        let admitting = scope.spawn(|| {
            let (token, prepare) = (scene.token.clone(), TcpStream::prepare);
            let mut handshakes = Handshakes::new(&scene.listener, token, String::new(), prepare);
            handshakes.limit = 64;
            let deadline = Instant::now() + LIMIT;
            let me = scene.hello(0);
            let members = run(&mut handshakes, me, &expected, deadline, |_| Ok(true));
            assert!(handshakes.count() <= 64);
            members
        });
        let start = Instant::now();
        while !up.load(Ordering::Relaxed) {
            assert!(start.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(1));
        }
        let start = Instant::now();
        for rank in 1..=MEMBERS {
            while scene.call(scene.hello(rank), &scene.token).is_err() {
                assert!(start.elapsed() < LIMIT);
            }
        }
        let took = start.elapsed();
        let members = admitting.join().unwrap().unwrap();
        assert_eq!(members.len(), MEMBERS as usize);
        assert!(took < Duration::from_secs(10), "{took:?}");
    });
}
