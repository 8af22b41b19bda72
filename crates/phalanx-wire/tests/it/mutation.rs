//! Throws thousands of garbled messages at every decoder. The garbling is
//! pseudo-random with fixed seeds, so a failure repeats.
//!
//! Nothing may panic; a header with a wrong checksum is never accepted; and
//! whatever is accepted encodes to the very bytes it was decoded from, so no
//! two spellings of one message exist.

use phalanx_garble::Dice;
use phalanx_wire::Token;
use phalanx_wire::frame::{Header, Kind, MAX_FRAME_BYTES};
use phalanx_wire::handshake::{
    Acceptor, Awaiting, Hello, Initiator, MAX_MESSAGE_BYTES, PREFIX_BYTES, Role, body_bytes,
};
use phalanx_wire::store_msg::{
    Failure, LENGTH_BYTES, MAX_REQUEST_BYTES, MAX_WILL_BYTES, Request, Response, request_bytes,
};

/// CRC-32C bit by bit, so that the test does not trust the code under test.
fn slow_crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    })
}

#[test]
fn garbled_headers() {
    let mut dice = Dice(0x1234_5678_9abc_def1);
    let (mut accepted, mut sealed) = (0, 0);
    for _ in 0..200_000 {
        let header = Header {
            kind: Kind::ALL[dice.below(Kind::ALL.len())],
            flags: dice.roll() as u16,
            dtype: dice.byte(),
            op: dice.byte(),
            collective: dice.byte(),
            plan: dice.byte(),
            generation: dice.roll() as u32,
            group: dice.roll() as u32,
            seq: dice.roll(),
            step: dice.roll() as u32,
            stream: dice.roll() as u16,
            root: dice.roll() as u32,
            count: dice.roll(),
            offset: dice.roll() >> dice.below(40),
            length: dice.roll() as u32 % (MAX_FRAME_BYTES + 1),
        };
        let mut bytes = header.encode().to_vec();
        dice.garble(&mut bytes);
        bytes.resize(Header::BYTES, 0);
        // Half of them under a correct checksum, to get past it.
        if dice.below(2) == 0 {
            let crc = slow_crc(&bytes[..60]);
            bytes[60..].copy_from_slice(&crc.to_le_bytes());
            sealed += 1;
        }
        let bytes: [u8; Header::BYTES] = bytes.try_into().unwrap();
        if let Ok(header) = Header::decode(&bytes) {
            accepted += 1;
            let crc = u32::from_le_bytes(bytes[60..].try_into().unwrap());
            assert_eq!(crc, slow_crc(&bytes[..60]), "wrong checksum accepted");
            assert!(header.length <= MAX_FRAME_BYTES);
            assert!(header.offset.checked_add(header.length.into()).is_some());
            assert_eq!(header.encode(), bytes);
        }
    }
    // The test must reach both sides of the decoder.
    assert!(accepted > 1000 && accepted < sealed, "{accepted}/{sealed}");
}

#[test]
fn garbled_handshakes() {
    let mut dice = Dice(0xfeed_beef_0bad_cafe);
    let token = Token::from_hex(&"5a".repeat(32)).unwrap();
    let hello = Hello::new(Role::Peer, token.job_id()).rank(1).world(2);
    let mut accepted = 0;
    for _ in 0..5_000 {
        let (initiator, first) = Initiator::start(hello, &token).unwrap();
        let (acceptor, challenge) = Acceptor::start(&first, &token).unwrap();

        let mut garbled = first.to_vec();
        dice.garble(&mut garbled);
        let same = garbled == first[..];
        // A changed hello may be taken for a claim, but the challenge then
        // covers the claim, not what was said.
        if let Ok((_, reply)) = Acceptor::start(&garbled, &token) {
            let (again, _) = Initiator::start(hello, &token).unwrap();
            assert!(same || again.answer(&reply).is_err());
        }

        let mut garbled = challenge.to_vec();
        dice.garble(&mut garbled);
        if garbled != challenge[..] {
            assert!(initiator.answer(&garbled).is_err());
            let mut noise = garbled.clone();
            noise.extend_from_slice(&challenge);
            assert!(acceptor.verify(&noise).is_err());
            continue;
        }
        let (proving, proof) = initiator.answer(&garbled).unwrap();
        let mut garbled = proof.to_vec();
        dice.garble(&mut garbled);
        match acceptor.verify(&garbled) {
            Ok(proven) => {
                assert_eq!(garbled, proof[..]);
                let welcome = proven.welcome(hello);
                let mut garbled = welcome.to_vec();
                dice.garble(&mut garbled);
                let verdict = proving.finish(&garbled);
                assert_eq!(verdict.is_ok(), garbled == welcome[..]);
                accepted += 1;
            }
            Err(_) => assert_ne!(garbled, proof[..]),
        }
    }
    assert!(accepted < 5_000);
}

#[test]
fn garbled_prefixes() {
    let mut dice = Dice(77);
    let token = Token::from_hex(&"5a".repeat(32)).unwrap();
    let (_, first) = Initiator::start(Hello::new(Role::Peer, 1), &token).unwrap();
    for _ in 0..50_000 {
        let mut prefix = first[..PREFIX_BYTES].to_vec();
        dice.garble(&mut prefix);
        prefix.resize(PREFIX_BYTES, 0);
        let prefix: [u8; PREFIX_BYTES] = prefix.try_into().unwrap();
        for awaiting in [
            Awaiting::Hello,
            Awaiting::Challenge,
            Awaiting::Proof,
            Awaiting::Verdict,
        ] {
            if let Ok(bytes) = body_bytes(&prefix, awaiting) {
                assert!(PREFIX_BYTES + bytes <= MAX_MESSAGE_BYTES);
            }
        }
    }
}

#[test]
fn garbled_requests() {
    let mut dice = Dice(0x0123_4567_89ab_cdef);
    let mut accepted = 0;
    for _ in 0..100_000 {
        let key = ["k", "rank/0", "a/long/key/é"][dice.below(3)];
        let value = [&b""[..], b"1", b"some value"][dice.below(3)];
        let timeout_ms = dice.roll() as u32;
        let request = match dice.below(18) {
            0 => Request::Set { key, value },
            1 => Request::Get { key, timeout_ms },
            2 => Request::TryGet { key },
            3 => Request::Wait {
                keys: vec![key; 1 + dice.below(9)],
                timeout_ms,
            },
            4 => Request::Add {
                key,
                delta: dice.roll() as i64,
            },
            5 => Request::CompareSet {
                key,
                expected: (dice.below(2) == 0).then_some(value),
                desired: value,
            },
            6 => Request::Delete { key },
            7 => Request::Will {
                key,
                value: (value.len() <= MAX_WILL_BYTES && dice.below(2) == 0).then_some(value),
            },
            8 => Request::Follow { id: dice.roll() },
            9 => Request::Ack { seq: dice.roll() },
            10 => Request::Leave,
            11 => Request::Retire { key },
            12 => Request::Append { key, value },
            13 => Request::QueuePush { queue: key, value },
            14 => Request::QueuePop {
                queue: key,
                timeout_ms,
            },
            15 => Request::QueueLen { queue: key },
            16 => Request::GetNumbered { key, timeout_ms },
            _ => Request::DeletePrefix { prefix: key },
        };
        let mut message = Vec::new();
        request.encode(&mut message).unwrap();
        let mut body = message.split_off(LENGTH_BYTES);
        dice.garble(&mut body);
        if let Ok(decoded) = Request::decode(&body) {
            accepted += 1;
            let mut again = Vec::new();
            decoded.encode(&mut again).unwrap();
            assert_eq!(again[LENGTH_BYTES..], body);
        }
        let length = [dice.byte(), dice.byte(), dice.byte(), dice.byte()];
        if let Ok(bytes) = request_bytes(length) {
            assert!((1..=MAX_REQUEST_BYTES).contains(&bytes));
        }
    }
    assert!(accepted > 1000, "{accepted}");
}

#[test]
fn garbled_responses() {
    let mut dice = Dice(0xdead_10cc_dead_10cc);
    let mut accepted = 0;
    for _ in 0..100_000 {
        let response = match dice.below(11) {
            0 => Response::Done,
            1 => Response::Value(b"some value".to_vec()),
            2 => Response::NotFound,
            3 => Response::Number(dice.roll() as i64),
            4 => Response::Existed(dice.below(2) == 0),
            5 => Response::Removed(dice.roll()),
            6 => Response::Missing(vec!["rank/3".to_owned(); 1 + dice.below(9)]),
            7 => Response::Copied { seq: dice.roll() },
            9 => Response::Values {
                values: vec![b"1".to_vec(); 1 + dice.below(9)],
                more: dice.below(2) == 0,
            },
            8 => Response::Change {
                seq: dice.roll(),
                key: "k".to_owned(),
                value: (dice.below(2) == 0).then(|| b"1".to_vec()),
            },
            _ => Response::Failed(Failure::ALL[dice.below(Failure::ALL.len())]),
        };
        let mut message = Vec::new();
        response.encode(&mut message).unwrap();
        let mut body = message.split_off(LENGTH_BYTES);
        dice.garble(&mut body);
        if let Ok(decoded) = Response::decode(&body) {
            accepted += 1;
            let mut again = Vec::new();
            decoded.encode(&mut again).unwrap();
            assert_eq!(again[LENGTH_BYTES..], body);
        }
    }
    assert!(accepted > 1000, "{accepted}");
}

/// Pure noise, of every length up to some kilobytes.
#[test]
fn noise() {
    let mut dice = Dice(42);
    for length in 0..3000 {
        let bytes: Vec<u8> = (0..length).map(|_| dice.byte()).collect();
        let _ = Request::decode(&bytes);
        let _ = Response::decode(&bytes);
        if let Some(header) = bytes.first_chunk::<{ Header::BYTES }>() {
            assert!(Header::decode(header).is_err());
        }
    }
}
