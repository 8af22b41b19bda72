//! The handshake over real streams: deadlines, verdicts, and what strangers get.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::LONG;
use phalanx_store::auth::{self, RefusalLog};
use phalanx_store::{Error, ErrorKind};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason, Role};

fn token(digit: u8) -> Token {
    Token::from_hex(&format!("{digit:02x}").repeat(32)).unwrap()
}

fn hello(rank: u32) -> Hello {
    Hello::new(Role::Peer, token(1).job_id())
        .rank(rank)
        .world(2)
}

/// Both ends in two threads; the results of the initiator and the acceptor.
fn meet(
    initiator: Token,
    acceptor: Token,
    decide: impl FnOnce(&Hello) -> Result<Hello, RejectReason> + Send,
) -> (Result<Hello, Error>, Result<Hello, Error>) {
    let (mut here, mut there) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let accepted = scope.spawn(move || auth::accept(&mut there, &acceptor, LONG, decide));
        let initiated = auth::initiate(&mut here, hello(1), &initiator, LONG);
        drop(here);
        (initiated, accepted.join().unwrap())
    })
}

fn kind(result: Result<Hello, Error>) -> ErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn members_meet() {
    let (here, there) = meet(token(1), token(1), |peer| {
        assert_eq!(peer.rank, 1);
        Ok(hello(0))
    });
    assert_eq!(here.unwrap().rank, 0);
    assert_eq!(there.unwrap().rank, 1);
}

#[test]
fn both_sides_know_the_reason_of_a_rejection() {
    for reason in RejectReason::ALL {
        let (here, there) = meet(token(1), token(1), |_| Err(reason));
        let told = here.unwrap_err();
        assert_eq!(told.kind(), ErrorKind::Rejected(reason));
        assert!(told.to_string().contains(&reason.to_string()), "{told}");
        assert_eq!(kind(there), ErrorKind::Rejected(reason));
    }
}

#[test]
fn wrong_token_is_named_and_never_reaches_the_decision() {
    let (here, there) = meet(token(1), token(2), |_| panic!("a stranger was considered"));
    let error = here.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TokenMismatch);
    assert!(
        error.to_string().contains("the job token differs"),
        "{error}"
    );
    // The initiator went away instead of proving anything.
    assert_eq!(kind(there), ErrorKind::PeerLost);
}

/// The stream is as it was, and what was sent right after the verdict is there.
#[test]
fn the_stream_is_left_clean_and_blocking() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let acceptor = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        auth::accept(&mut stream, &token(1), LONG, |_| Ok(hello(0))).unwrap();
        stream.write_all(b"payload").unwrap();
        let mut echo = [0; 4];
        stream.read_exact(&mut echo).unwrap();
        echo
    });
    let mut stream = TcpStream::connect(addr).unwrap();
    auth::initiate(&mut stream, hello(1), &token(1), LONG).unwrap();
    assert_eq!(stream.read_timeout().unwrap(), None);
    assert_eq!(stream.write_timeout().unwrap(), None);
    stream.write_all(b"echo").unwrap();
    let mut payload = [0; 7];
    stream.read_exact(&mut payload).unwrap();
    assert_eq!(&payload, b"payload");
    assert_eq!(&acceptor.join().unwrap(), b"echo");
}

/// Accepts one connection on which `attack` has written, and returns the error.
fn attacked(timeout: Duration, attack: impl FnOnce(UnixStream) + Send + 'static) -> Error {
    let (here, mut there) = UnixStream::pair().unwrap();
    let attacker = thread::spawn(move || attack(here));
    let start = Instant::now();
    let error = auth::accept(&mut there, &token(1), timeout, |_| {
        panic!("a stranger was considered")
    })
    .unwrap_err();
    assert!(
        start.elapsed() < timeout + LONG / 2,
        "{:?}",
        start.elapsed()
    );
    drop(there);
    attacker.join().unwrap();
    error
}

#[test]
fn port_scan() {
    assert_eq!(attacked(LONG, drop).kind(), ErrorKind::PeerLost);
}

#[test]
fn http_and_tls() {
    for opening in [
        &b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"[..],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ] {
        let error = attacked(LONG, move |mut s| s.write_all(opening).unwrap());
        assert_eq!(error.kind(), ErrorKind::WrongProtocol);
        assert!(error.to_string().contains("not a phalanx message"));
    }
}

#[test]
fn truncated_hello() {
    let error = attacked(LONG, |mut s| s.write_all(b"PHHS\x01\x01\x44\0abc").unwrap());
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(error.to_string().contains("11 bytes"), "{error}");
}

#[test]
fn oversize_length() {
    let error = attacked(LONG, |mut s| {
        s.write_all(b"PHHS\x01\x01\xff\xff").unwrap();
    });
    assert_eq!(error.kind(), ErrorKind::WrongProtocol);
    assert!(error.to_string().contains("65535"), "{error}");
}

#[test]
fn another_version_is_told_ours() {
    let error = attacked(LONG, |mut s| {
        s.write_all(b"PHHS\x02\x01\x44\0").unwrap();
        let mut notice = Vec::new();
        s.read_to_end(&mut notice).unwrap();
        assert_eq!(&notice[..6], b"PHHS\x01\x05");
    });
    assert_eq!(
        error.kind(),
        ErrorKind::Rejected(RejectReason::WrongVersion)
    );
}

#[test]
fn silence_is_bounded() {
    let error = attacked(Duration::from_millis(60), |mut s| {
        let mut nothing = Vec::new();
        s.read_to_end(&mut nothing).unwrap();
    });
    assert_eq!(error.kind(), ErrorKind::Timeout);
}

/// A byte now and then does not buy more time.
#[test]
fn slow_loris_is_bounded() {
    let error = attacked(Duration::from_millis(150), |mut s| {
        for byte in b"PHHS\x01\x01\x44\0".iter().chain(&[0; 68]) {
            thread::sleep(Duration::from_millis(100));
            if s.write_all(&[*byte]).is_err() {
                return;
            }
        }
        panic!("was given all the time that it took");
    });
    assert_eq!(error.kind(), ErrorKind::Timeout);
}

#[test]
fn an_acceptor_that_says_nothing_is_bounded() {
    let (mut here, there) = UnixStream::pair().unwrap();
    let limit = Duration::from_millis(60);
    let error = auth::initiate(&mut here, hello(0), &token(1), limit).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    drop(there);
    let error = auth::initiate(&mut here, hello(0), &token(1), limit).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost);
}

/// A stream whose owner is stopped for a while after it has sent its proof.
struct Stopped {
    stream: UnixStream,
    writes: u32,
    pause: Duration,
}

impl Read for Stopped {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(into)
    }
}

impl Write for Stopped {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.stream.write(bytes)?;
        self.writes += 1;
        if self.writes == 2 {
            thread::sleep(self.pause);
        }
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

impl auth::Channel for Stopped {
    fn set_timeouts(&self, limit: Option<Duration>) -> std::io::Result<()> {
        auth::Channel::set_timeouts(&self.stream, limit)
    }
}

/// The welcome lies there when it is looked for, late as that is.
#[test]
fn who_was_stopped_finds_its_welcome() {
    let (here, mut there) = UnixStream::pair().unwrap();
    let acceptor = thread::spawn(move || {
        let _ = auth::accept(&mut there, &token(1), LONG, |_| Ok(hello(1)));
        there
    });
    let limit = Duration::from_millis(500);
    let mut stopped = Stopped {
        stream: here,
        writes: 0,
        pause: 2 * limit,
    };
    let peer = auth::initiate(&mut stopped, hello(0), &token(1), limit).unwrap();
    assert_eq!(peer.rank, 1);
    drop(acceptor.join().unwrap());
}

#[test]
fn one_line_a_minute_and_source() {
    let log = RefusalLog::new();
    let source = |n: u32| IpAddr::from(n.to_be_bytes());
    assert!(log.warn(source(1), "test", &"scan"));
    for _ in 0..100 {
        assert!(!log.warn(source(1), "test", &"scan"));
    }
    assert!(log.warn(source(2), "test", &"scan"));
    // A scan from everywhere cannot make it grow without bound.
    let written = (3..5000).filter(|n| log.warn(source(*n), "test", &"scan"));
    assert_eq!(written.count(), 1022);
}
