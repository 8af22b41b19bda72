//! Fuzz targets for every decoder of this crate. The tests here run them on
//! garbled seeds.

use crate::Token;
use crate::frame::{Header, Kind, MAX_FRAME_BYTES, seal};
use crate::handshake::{
    Acceptor, Awaiting, Hello, Initiator, PREFIX_BYTES, RejectReason, Role, body_bytes,
    version_notice,
};
use crate::store_msg::{
    Failure, LENGTH_BYTES, MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES, Request, Response, request_bytes,
    response_bytes,
};

/// Name, function and seeds of a target.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All fuzz targets of this crate.
pub const TARGETS: &[Target] = &[
    ("wire_frame", frame, frame_seeds),
    (
        "wire_strangers_handshake",
        strangers_handshake,
        handshake_seeds,
    ),
    ("wire_changed_handshake", changed_handshake, mask_seeds),
    ("wire_store_request", store_request, request_seeds),
    ("wire_store_response", store_response, response_seeds),
    ("wire_token", token_text, token_seeds),
];

fn token() -> Token {
    Token::from_hex(&"5a".repeat(32)).expect("64 digits")
}

fn hello(rank: u32) -> Hello {
    Hello::new(Role::Peer, token().job_id()).rank(rank).world(2)
}

/// A decoded header encodes to the same bytes.
fn frame(data: &[u8]) {
    let Some(bytes) = data.first_chunk::<{ Header::BYTES }>() else {
        return;
    };
    // As it is, and with a correct checksum, to reach the checks behind it.
    let mut sealed = *bytes;
    seal(&mut sealed);
    for bytes in [*bytes, sealed] {
        if let Ok(header) = Header::decode(&bytes) {
            assert_eq!(header.encode(), bytes);
            assert!(header.length <= MAX_FRAME_BYTES);
        }
    }
}

fn frame_seeds() -> Vec<Vec<u8>> {
    let with = |kind| {
        let mut header = Header::new(kind);
        (header.seq, header.count, header.length) = (7, 1 << 20, 4096);
        header.encode().to_vec()
    };
    Kind::ALL.into_iter().map(with).collect()
}

/// Without the token, no sequence of messages completes either state machine.
fn strangers_handshake(data: &[u8]) {
    let token = token();
    for awaiting in [
        Awaiting::Hello,
        Awaiting::Challenge,
        Awaiting::Proof,
        Awaiting::Verdict,
    ] {
        if let Some(prefix) = data.first_chunk::<PREFIX_BYTES>()
            && let Ok(bytes) = body_bytes(prefix, awaiting)
        {
            assert!(bytes < 512);
        }
    }
    let cut = data.len().min(PREFIX_BYTES + Hello::BYTES);
    let (first, rest) = data.split_at(cut);
    if let Ok((acceptor, challenge)) = Acceptor::start(first, &token) {
        assert_eq!(challenge.len(), 72);
        assert!(acceptor.verify(&rest[..rest.len().min(40)]).is_err());
    }
    if let Ok((acceptor, _)) = Acceptor::start(first, &token) {
        assert!(acceptor.verify(rest).is_err());
    }
    let Ok((initiator, first)) = Initiator::start(hello(1), &token) else {
        return;
    };
    // A genuine challenge, then `data` as the verdict.
    if let Ok((_, challenge)) = Acceptor::start(&first, &token)
        && let Ok((proving, _)) = initiator.answer(&challenge)
    {
        assert!(proving.finish(data).is_err());
    }
    if let Ok((initiator, _)) = Initiator::start(hello(1), &token) {
        assert!(initiator.answer(data).is_err());
    }
}

fn handshake_seeds() -> Vec<Vec<u8>> {
    let token = token();
    let mut seeds = vec![version_notice().to_vec()];
    for verdict in 0..2 {
        let Ok((initiator, first)) = Initiator::start(hello(1), &token) else {
            continue;
        };
        let Ok((acceptor, challenge)) = Acceptor::start(&first, &token) else {
            continue;
        };
        let Ok((_, proof)) = initiator.answer(&challenge) else {
            continue;
        };
        let Ok(proven) = acceptor.verify(&proof) else {
            continue;
        };
        let last = match verdict {
            0 => proven.welcome(hello(0)),
            _ => proven.reject(RejectReason::WrongGeneration),
        };
        seeds.push([&first[..], &proof].concat());
        seeds.push(challenge.to_vec());
        seeds.push(last.to_vec());
    }
    seeds
}

/// An attacker between the two sides changes their messages: `data` is XORed
/// onto them. Both sides succeed only if nothing was changed.
fn changed_handshake(data: &[u8]) {
    let token = token();
    let mut mask = data.iter();
    let mut changed = false;
    let mut carry = |message: &[u8]| -> Vec<u8> {
        let carried: Vec<u8> = message
            .iter()
            .map(|byte| byte ^ mask.next().copied().unwrap_or(0))
            .collect();
        changed |= carried != message;
        carried
    };
    let Ok((initiator, first)) = Initiator::start(hello(1), &token) else {
        return;
    };
    let Ok((acceptor, challenge)) = Acceptor::start(&carry(&first), &token) else {
        return;
    };
    let Ok((proving, proof)) = initiator.answer(&carry(&challenge)) else {
        assert!(changed);
        return;
    };
    let Ok(proven) = acceptor.verify(&carry(&proof)) else {
        assert!(changed);
        return;
    };
    // Every proof covers the hello, so it arrived unchanged.
    assert_eq!((proven.peer().rank, proven.peer().job), (1, hello(1).job));
    let verdict = carry(&proven.welcome(hello(0)));
    assert_eq!(proving.finish(&verdict).is_ok(), !changed);
}

fn mask_seeds() -> Vec<Vec<u8>> {
    let at = |byte: usize, bits: u8| {
        let mut mask = vec![0; 300];
        mask[byte] = bits;
        mask
    };
    // One change in each message.
    vec![at(0, 0), at(10, 1), at(90, 0x80), at(160, 0xff), at(250, 2)]
}

/// A decoded request is within the limits and encodes to the same bytes.
fn store_request(data: &[u8]) {
    if let Some(length) = data.first_chunk::<LENGTH_BYTES>()
        && let Ok(bytes) = request_bytes(*length)
    {
        assert!((1..=MAX_REQUEST_BYTES).contains(&bytes));
    }
    if let Ok(request) = Request::decode(data) {
        assert!(request.check().is_ok());
        let mut again = Vec::new();
        assert!(request.encode(&mut again).is_ok());
        assert_eq!(&again[LENGTH_BYTES..], data);
    }
}

fn request_seeds() -> Vec<Vec<u8>> {
    let requests = [
        Request::Set {
            key: "rank/0",
            value: b"127.0.0.1:4000",
        },
        Request::Get {
            key: "rank/1",
            timeout_ms: 1000,
        },
        Request::TryGet { key: "a" },
        Request::Wait {
            keys: vec!["rank/0", "rank/1", "é"],
            timeout_ms: 5,
        },
        Request::Add {
            key: "n",
            delta: -1,
        },
        Request::Will {
            key: "k",
            value: Some(b"gone"),
        },
        Request::Will {
            key: "k",
            value: None,
        },
        Request::CompareSet {
            key: "k",
            expected: Some(b"old"),
            desired: b"new",
        },
        Request::CompareSet {
            key: "k",
            expected: None,
            desired: b"",
        },
        Request::Delete { key: "k" },
        Request::DeletePrefix { prefix: "" },
        Request::Follow { id: 3 },
        Request::Ack { seq: 9 },
        Request::Leave,
        Request::Retire { key: "k" },
        Request::Append {
            key: "k",
            value: b"more",
        },
        Request::QueuePush {
            queue: "jobs",
            value: b"job",
        },
        Request::QueuePop {
            queue: "jobs",
            timeout_ms: 1000,
        },
        Request::QueueLen { queue: "jobs" },
        Request::GetNumbered {
            key: "job/log/0",
            timeout_ms: 1000,
        },
    ];
    let body = |request: &Request<'_>| {
        let mut bytes = Vec::new();
        request.encode(&mut bytes).ok()?;
        Some(bytes.split_off(LENGTH_BYTES))
    };
    requests.iter().filter_map(body).collect()
}

/// As [`store_request`].
fn store_response(data: &[u8]) {
    if let Some(length) = data.first_chunk::<LENGTH_BYTES>()
        && let Ok(bytes) = response_bytes(*length)
    {
        assert!((1..=MAX_RESPONSE_BYTES).contains(&bytes));
    }
    if let Ok(response) = Response::decode(data) {
        let mut again = Vec::new();
        assert!(response.encode(&mut again).is_ok());
        assert_eq!(&again[LENGTH_BYTES..], data);
    }
}

fn response_seeds() -> Vec<Vec<u8>> {
    let mut responses = vec![
        Response::Done,
        Response::Value(b"127.0.0.1:4000".to_vec()),
        Response::NotFound,
        Response::Number(-3),
        Response::Existed(true),
        Response::Removed(9),
        Response::Missing(["rank/0", "rank/1"].map(str::to_owned).into()),
        Response::Change {
            seq: 4,
            key: "rank/0".to_owned(),
            value: Some(b"127.0.0.1:4000".to_vec()),
        },
        Response::Change {
            seq: 5,
            key: "k".to_owned(),
            value: None,
        },
        Response::Copied { seq: 5 },
        Response::Values {
            values: vec![b"first".to_vec(), Vec::new()],
            more: true,
        },
    ];
    responses.extend(Failure::ALL.map(Response::Failed));
    let body = |response: &Response| {
        let mut bytes = Vec::new();
        response.encode(&mut bytes).ok()?;
        Some(bytes.split_off(LENGTH_BYTES))
    };
    responses.iter().filter_map(body).collect()
}

/// 64 digits, or an error that does not repeat the text.
fn token_text(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match Token::from_hex(text) {
        Ok(token) => assert_eq!(token.to_hex(), text.trim().to_ascii_lowercase()),
        Err(error) => {
            let of_nothing = Token::from_hex("").map_err(|e| e.to_string());
            assert_eq!(of_nothing, Err(error.to_string()));
        }
    }
}

fn token_seeds() -> Vec<Vec<u8>> {
    vec![
        "5a".repeat(32).into_bytes(),
        format!(" {}\n", "0F".repeat(32)).into_bytes(),
        b"PHALANX_TOKEN=".to_vec(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_accepted() {
        for bytes in frame_seeds() {
            assert!(Header::decode(bytes.first_chunk().unwrap()).is_ok());
        }
        assert!(request_seeds().iter().all(|s| Request::decode(s).is_ok()));
        assert_eq!(request_seeds().len(), 20);
        assert!(response_seeds().iter().all(|s| Response::decode(s).is_ok()));
        assert_eq!(handshake_seeds().len(), 7);
    }

    #[test]
    fn every_target_survives_garbled_seeds() {
        for (_, run, seeds) in TARGETS {
            phalanx_garble::feed(&seeds(), 3000, run);
        }
    }
}
