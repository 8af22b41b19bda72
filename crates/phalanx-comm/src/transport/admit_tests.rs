//! Who is let in, and who disturbs nobody.

use std::io::{Read, Write};
use std::net::SocketAddr;

use phalanx_store::ErrorKind as StoreKind;
use phalanx_store::auth::initiate;

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
            .epoch(5)
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
        assert_eq!(reject(good.epoch(4)), RejectReason::WrongEpoch);
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
            // A member tries again when it is turned away, as `dial` does.
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
    let deadline = Instant::now() + Duration::from_millis(300);
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

/// A full door after `time`: which of the connections were closed. Those for
/// which `speaks` says so have sent a byte; number 0 is a member that is being
/// let in right now.
fn closed_at_a_full_door(time: Duration, speaks: impl Fn(u64) -> bool) -> Vec<usize> {
    let scene = scene();
    let mut door = Door::<TcpStream>::new(scene.hello(0), &scene.token, &[]);
    let mut others = Vec::new();
    for id in 0..MAX_PENDING_HANDSHAKES as u64 {
        assert!(door.has_room());
        let mut other = TcpStream::connect(scene.address).unwrap();
        if speaks(id) {
            other.write_all(b"P").unwrap();
        }
        others.push(other);
        let socket = loop {
            match scene.listener.take() {
                Ok((socket, _)) => break socket,
                Err(_) => std::thread::yield_now(),
            }
        };
        door.pending.push_back(Pending {
            id,
            since: Instant::now(),
            socket,
            heard: Arc::default(),
            sealed: Arc::new(AtomicBool::new(id == 0)),
            closed: false,
            thread: std::thread::spawn(|| ()),
        });
    }
    std::thread::sleep(time);
    // However often it is asked, room is made once.
    for _ in 0..3 {
        assert!(!door.has_room());
    }
    let closed = others.iter_mut().map(|other| {
        other.set_nonblocking(true).unwrap();
        other.read(&mut [0; 1]).is_ok_and(|n| n == 0)
    });
    closed.enumerate().filter(|c| c.1).map(|c| c.0).collect()
}

#[test]
fn room_is_made_by_the_oldest_stranger_never_by_a_member() {
    assert_eq!(closed_at_a_full_door(FAIR_TIME, |_| true), [1]);
}

#[test]
fn room_is_made_by_the_silent_first() {
    let closed = closed_at_a_full_door(SILENT_TIME, |id| id % 2 == 0);
    let silent: Vec<usize> = (0..MAX_PENDING_HANDSHAKES)
        .filter(|id| id % 2 == 1)
        .collect();
    assert_eq!(closed, silent);
}
