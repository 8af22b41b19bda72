//! Fuzz targets for everything in this crate that reads untrusted bytes. The tests
//! here run them on garbled seeds.

use std::io::{Read, Write};
use std::time::Duration;

use phalanx_wire::Token;
use phalanx_wire::handshake::{Acceptor, Hello, Initiator, Role};
use phalanx_wire::store_msg::Request;

use crate::auth;

/// Name, function and seeds of a target.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All fuzz targets of this crate.
pub const TARGETS: &[Target] = &[
    ("store_handshake", handshake, handshake_seeds),
    ("store_session", session, session_seeds),
];

pub(crate) fn token() -> Token {
    Token::from_hex(&"5a".repeat(32)).expect("64 digits")
}

/// A peer that has sent all its bytes.
struct Script<'a> {
    input: &'a [u8],
    received: usize,
}

impl Read for Script<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        // In pieces, as a network gives them.
        let piece = into.len().min(7);
        self.input.read(&mut into[..piece])
    }
}

impl Write for Script<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.received += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl auth::Channel for Script<'_> {
    fn set_timeouts(&self, _: Option<Duration>) -> std::io::Result<()> {
        Ok(())
    }
}

/// Without the token, neither side of a handshake over a stream completes, and the
/// peer receives no more than a challenge or a notice.
fn handshake(data: &[u8]) {
    let token = token();
    let hello = Hello::new(Role::Peer, token.job_id());
    let limit = Duration::from_secs(5);
    let mut peer = Script {
        input: data,
        received: 0,
    };
    assert!(auth::accept(&mut peer, &token, limit, |_| Ok(hello)).is_err());
    assert!(
        peer.received <= 72,
        "{} bytes for an unauthenticated peer",
        peer.received
    );
    let mut peer = Script {
        input: data,
        received: 0,
    };
    assert!(auth::initiate(&mut peer, hello, &token, limit).is_err());
    assert_eq!(peer.received, 76, "a hello, and no proof");
}

fn handshake_seeds() -> Vec<Vec<u8>> {
    let token = token();
    let hello = Hello::new(Role::Peer, token.job_id());
    let messages = || -> phalanx_wire::Result<Vec<Vec<u8>>> {
        let (initiator, first) = Initiator::start(hello, &token)?;
        let (acceptor, challenge) = Acceptor::start(&first, &token)?;
        let (_, proof) = initiator.answer(&challenge)?;
        let welcome = acceptor.verify(&proof)?.welcome(hello);
        Ok(vec![
            [&first[..], &proof].concat(),
            [&challenge[..], &welcome].concat(),
        ])
    };
    messages().unwrap_or_default()
}

/// A connection of the server. The first byte says whether it is authenticated, the
/// second how its bytes are split; the rest is what it sends.
fn session(data: &[u8]) {
    if let [member, piece, says @ ..] = data {
        crate::tcp::fuzzing::session(member & 1 == 1, 1 + usize::from(*piece) * 8, says);
    }
}

fn session_seeds() -> Vec<Vec<u8>> {
    let keys: Vec<String> = (0..20).map(|i| format!("key/{i}")).collect();
    let value = [7; 300];
    let requests = [
        Request::Set {
            key: "a",
            value: &value,
        },
        Request::Get {
            key: "a",
            timeout_ms: 0,
        },
        Request::Add { key: "n", delta: 5 },
        Request::CompareSet {
            key: "a",
            expected: Some(&value),
            desired: b"b",
        },
        Request::Wait {
            keys: keys.iter().map(String::as_str).collect(),
            timeout_ms: 0,
        },
        Request::TryGet { key: "a" },
        Request::Append {
            key: "a",
            value: b"c",
        },
        Request::QueuePush {
            queue: "q",
            value: b"1",
        },
        Request::GetNumbered {
            key: "n",
            timeout_ms: 0,
        },
        Request::QueueLen { queue: "q" },
        Request::QueuePop {
            queue: "q",
            timeout_ms: 0,
        },
        Request::QueuePop {
            queue: "q",
            timeout_ms: 0,
        },
        Request::Delete { key: "a" },
        Request::DeletePrefix { prefix: "k" },
        Request::Add { key: "n", delta: 5 },
        Request::Follow { id: 7 },
        Request::Ack { seq: 1 },
        Request::Retire { key: "a" },
    ];
    let mut all = vec![1, 16];
    let mut seeds = Vec::new();
    for request in &requests {
        let mut one = vec![1, 0];
        if request.encode(&mut one).is_ok() && request.encode(&mut all).is_ok() {
            seeds.push(one);
        }
    }
    seeds.push(all);
    for mut says in handshake_seeds() {
        says.splice(0..0, [0, 3]);
        seeds.push(says);
    }
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_survives_garbled_seeds() {
        for (_, run, seeds) in TARGETS {
            phalanx_garble::feed(&seeds(), 2000, run);
        }
    }
}
