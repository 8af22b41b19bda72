//! Programs that mean somebody else, and scanners.

use phalanx_wire::frame::{Header, Kind};
use phalanx_wire::store_msg::Request;

use super::Shot;
use crate::line::Answer;

/// Connects and closes.
pub fn scan(shot: &Shot<'_>) -> Option<Answer> {
    shot.at(|_| Answer::Closed)
}

/// Connects and resets.
pub fn scan_reset(shot: &Shot<'_>) -> Option<Answer> {
    shot.at(|line| {
        line.reset();
        Answer::Closed
    })
}

/// Ends its own side at once.
pub fn half_closed(shot: &Shot<'_>) -> Option<Answer> {
    shot.say(b"", true)
}

/// Says one of several things and listens.
fn one_of(shot: &Shot<'_>, things: &[&[u8]]) -> Option<Answer> {
    shot.say(things[shot.turn as usize % things.len()], false)
}

/// What web clients and health checks send.
pub fn http(shot: &Shot<'_>) -> Option<Answer> {
    one_of(
        shot,
        &[
            b"GET /metrics HTTP/1.1\r\nHost: node0\r\nAccept: */*\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: node0\r\nContent-Length: 4294967295\r\n\r\n{",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
            b"OPTIONS * HTTP/1.0\r\n\r\n",
        ],
    )
}

/// A TLS client.
pub fn tls(shot: &Shot<'_>) -> Option<Answer> {
    let mut hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec();
    hello.extend(shot.dice.borrow_mut().noise(506));
    shot.say(&hello, false)
}

/// Other servers' clients, and other systems of distributed training.
pub fn other(shot: &Shot<'_>) -> Option<Answer> {
    one_of(
        shot,
        &[
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"*1\r\n$4\r\nPING\r\n",
            b"EHLO scanner.example\r\n",
            // Gloo's listener reads eight bytes of a sequence number.
            &[1, 0, 0, 0, 0, 0, 0, 0],
            // NCCL's socket magic, then a type.
            &[0x64, 0x4e, 0x43, 0x43, 0x4c, 0, 0, 0, 4, 0, 0, 0],
            // torch's TCPStore: validate, with its magic number.
            &[0, 0xce, 0xf7, 0x85, 0x3c],
            // libuv TCPStore: a set with a key of 2^63 bytes.
            &[1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
            b"\x03\0\0\x13\x0e\xe0\0\0\0\0\0\x01\0\x08\0\x03\0\0\0",
        ],
    )
}

/// Noise.
pub fn random(shot: &Shot<'_>) -> Option<Answer> {
    let noise = {
        let mut dice = shot.dice.borrow_mut();
        let bytes = 1 + dice.below(4096);
        dice.noise(bytes)
    };
    shot.say(&noise, false)
}

/// What members say later, said first.
pub fn frames(shot: &Shot<'_>) -> Option<Answer> {
    let mut bytes = Vec::new();
    match shot.turn % 4 {
        0 => bytes.extend(Header::new(Kind::Abort).encode()),
        1 => {
            let mut header = Header::new(Kind::Data);
            header.length = u32::MAX;
            header.offset = u64::MAX;
            header.count = u64::MAX;
            bytes.extend(header.encode());
        }
        2 => Request::DeletePrefix { prefix: "" }
            .encode(&mut bytes)
            .ok()?,
        _ => {
            let key = "launch/log/0";
            let value = b"{\"Abort\":{\"code\":1}}";
            Request::Set { key, value }.encode(&mut bytes).ok()?;
        }
    }
    // Longer than a hello, so that nobody waits for the rest of one.
    bytes.resize(bytes.len().max(96), 0);
    shot.say(&bytes, false)
}
