//! Requests and responses: round trips at the limits, one test per error.

use phalanx_wire::store_msg::{
    Failure, LENGTH_BYTES, MAX_KEY_BYTES, MAX_QUEUE_BYTES, MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES,
    MAX_VALUE_BYTES, MAX_WAIT_KEYS, MAX_WILL_BYTES, Request, Response, request_bytes,
    response_bytes,
};
use phalanx_wire::{Error, ErrorKind};

fn length_of(message: &[u8]) -> [u8; LENGTH_BYTES] {
    message[..LENGTH_BYTES].try_into().unwrap()
}

fn round_trip(request: &Request<'_>) {
    // Appended: what was in the buffer stays.
    let mut out = vec![9];
    request.encode(&mut out).unwrap();
    assert_eq!(out[0], 9);
    let message = &out[1..];
    assert_eq!(
        request_bytes(length_of(message)).unwrap(),
        message.len() - LENGTH_BYTES
    );
    assert_eq!(&Request::decode(&message[LENGTH_BYTES..]).unwrap(), request);
}

fn answer_round_trip(response: &Response) {
    let mut out = Vec::new();
    response.encode(&mut out).unwrap();
    assert_eq!(
        response_bytes(length_of(&out)).unwrap(),
        out.len() - LENGTH_BYTES
    );
    assert_eq!(&Response::decode(&out[LENGTH_BYTES..]).unwrap(), response);
}

fn body(request: &Request<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    request.encode(&mut out).unwrap();
    out.split_off(LENGTH_BYTES)
}

fn malformed(body: &[u8]) -> ErrorKind {
    Request::decode(body).unwrap_err().kind()
}

/// The longest queue's name that the key starts with.
fn queue_of(key: &str) -> &str {
    &key[..key.floor_char_boundary(MAX_QUEUE_BYTES)]
}

fn samples<'a>(key: &'a str, value: &'a [u8]) -> Vec<Request<'a>> {
    vec![
        Request::Set { key, value },
        Request::Get {
            key,
            timeout_ms: u32::MAX,
        },
        Request::TryGet { key },
        Request::Wait {
            keys: vec![key, "b", "c/d"],
            timeout_ms: 0,
        },
        Request::Add {
            key,
            delta: i64::MIN,
        },
        Request::Will {
            key,
            value: Some(&value[..value.len().min(MAX_WILL_BYTES)]),
        },
        Request::Will { key, value: None },
        Request::CompareSet {
            key,
            expected: None,
            desired: value,
        },
        Request::CompareSet {
            key,
            expected: Some(value),
            desired: b"",
        },
        Request::Delete { key },
        Request::DeletePrefix { prefix: key },
        Request::DeletePrefix { prefix: "" },
        Request::Follow { id: u64::MAX },
        Request::Ack { seq: 1 << 40 },
        Request::Leave,
        Request::Retire { key },
        Request::Append { key, value },
        Request::QueuePush {
            queue: queue_of(key),
            value,
        },
        Request::QueuePop {
            queue: queue_of(key),
            timeout_ms: 1,
        },
        Request::QueueLen {
            queue: queue_of(key),
        },
        Request::GetNumbered { key, timeout_ms: 7 },
    ]
}

#[test]
fn requests_round_trip() {
    for request in samples("rank/0", b"\0\xff value") {
        round_trip(&request);
    }
}

#[test]
fn requests_round_trip_at_the_limits() {
    let key = "é".repeat(MAX_KEY_BYTES / 2);
    let value = vec![0xa5; MAX_VALUE_BYTES];
    for request in samples(&key, &value) {
        round_trip(&request);
    }
    round_trip(&Request::CompareSet {
        key: &key,
        expected: Some(&value),
        desired: &value,
    });
    round_trip(&Request::Wait {
        keys: vec![&key; MAX_WAIT_KEYS],
        timeout_ms: 1,
    });
}

#[test]
fn responses_round_trip() {
    let value = vec![1; MAX_VALUE_BYTES];
    let key = "k".repeat(MAX_KEY_BYTES);
    let mut all = vec![
        Response::Done,
        Response::Value(Vec::new()),
        Response::Value(value.clone()),
        Response::NotFound,
        Response::Number(-1),
        Response::Existed(true),
        Response::Existed(false),
        Response::Removed(u64::MAX),
        Response::Missing(vec!["a".to_owned()]),
        Response::Missing(vec![key.clone(); MAX_WAIT_KEYS]),
        Response::Change {
            seq: u64::MAX,
            key: key.clone(),
            value: Some(value),
        },
        Response::Change {
            seq: 0,
            key: "k".to_owned(),
            value: None,
        },
        Response::Copied { seq: 7 },
        Response::Values {
            values: vec![vec![1; MAX_VALUE_BYTES]],
            more: false,
        },
        Response::Values {
            values: vec![vec![1; MAX_VALUE_BYTES / MAX_WAIT_KEYS]; MAX_WAIT_KEYS],
            more: true,
        },
    ];
    all.extend(Failure::ALL.map(Response::Failed));
    for response in &all {
        answer_round_trip(response);
    }
}

/// What breaks a limit is refused before it is sent, and leaves nothing behind.
#[test]
fn refused_before_it_is_sent() {
    let long_key = "k".repeat(MAX_KEY_BYTES + 1);
    let long_value = vec![0; MAX_VALUE_BYTES + 1];
    let check = |request: Request<'_>, kind| {
        let mut out = vec![1, 2, 3];
        let error: Error = request.encode(&mut out).unwrap_err();
        assert_eq!(error.kind(), kind);
        assert_eq!(out, [1, 2, 3]);
    };
    check(Request::TryGet { key: "" }, ErrorKind::KeyEmpty);
    check(Request::Delete { key: &long_key }, ErrorKind::KeyTooLong);
    check(
        Request::DeletePrefix { prefix: &long_key },
        ErrorKind::KeyTooLong,
    );
    let key = "k";
    let value = &long_value;
    check(Request::Set { key, value }, ErrorKind::ValueTooLong);
    check(Request::Append { key, value }, ErrorKind::ValueTooLong);
    let queue = key;
    check(Request::QueuePush { queue, value }, ErrorKind::ValueTooLong);
    for (queue, kind) in [
        ("", ErrorKind::KeyEmpty),
        (&long_key[..=MAX_QUEUE_BYTES], ErrorKind::KeyTooLong),
    ] {
        check(Request::QueuePush { queue, value: b"" }, kind);
        let timeout_ms = 0;
        check(Request::QueuePop { queue, timeout_ms }, kind);
        check(Request::QueueLen { queue }, kind);
    }
    for (expected, desired) in [(Some(&value[..]), &b""[..]), (None, value)] {
        check(
            Request::CompareSet {
                key,
                expected,
                desired,
            },
            ErrorKind::ValueTooLong,
        );
    }
    for keys in [vec![], vec!["k"; MAX_WAIT_KEYS + 1]] {
        check(
            Request::Wait {
                keys,
                timeout_ms: 0,
            },
            ErrorKind::WaitKeys,
        );
    }
    let mut out = Vec::new();
    assert!(Response::Value(value.clone()).encode(&mut out).is_err());
    for values in [
        vec![],
        vec![Vec::new(); MAX_WAIT_KEYS + 1],
        vec![vec![0; MAX_VALUE_BYTES / 2 + 1]; 2],
    ] {
        let values = Response::Values {
            values,
            more: false,
        };
        assert!(values.encode(&mut out).is_err());
    }
    assert!(Response::Missing(vec![]).encode(&mut out).is_err());
    assert!(
        Response::Missing(vec![String::new()])
            .encode(&mut out)
            .is_err()
    );
    for (key, value) in [("", None), (&*long_key, None), ("k", Some(value.clone()))] {
        let (seq, key) = (1, key.to_owned());
        let change = Response::Change { seq, key, value };
        assert!(change.encode(&mut out).is_err());
    }
    assert!(out.is_empty());
}

// One test per error.

#[test]
fn message_too_long() {
    for (announced, ok) in [
        (MAX_REQUEST_BYTES, true),
        (MAX_REQUEST_BYTES + 1, false),
        (u32::MAX as usize, false),
    ] {
        let result = request_bytes((announced as u32).to_le_bytes());
        assert_eq!(result.is_ok(), ok);
        if let Err(error) = result {
            assert_eq!(error.kind(), ErrorKind::MessageTooLong);
        }
    }
    let over = (MAX_RESPONSE_BYTES as u32 + 1).to_le_bytes();
    let error = response_bytes(over).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MessageTooLong);
}

#[test]
fn empty_message() {
    assert_eq!(
        request_bytes([0; 4]).unwrap_err().kind(),
        ErrorKind::Truncated
    );
    assert_eq!(malformed(b""), ErrorKind::Truncated);
    assert_eq!(
        Response::decode(b"").unwrap_err().kind(),
        ErrorKind::Truncated
    );
}

#[test]
fn unknown_request_and_response() {
    for code in [0, 19, 0x81, 0xff] {
        assert_eq!(malformed(&[code]), ErrorKind::UnknownCode);
    }
    for code in [0, 1, 0x80, 0x8c, 0xff] {
        let error = Response::decode(&[code]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnknownCode);
    }
    for failure in [0, 8, 255] {
        let error = Response::decode(&[0x88, failure]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnknownCode);
    }
}

#[test]
fn truncated_anywhere() {
    for request in samples("rank/0", b"value") {
        let body = body(&request);
        for length in 0..body.len() {
            assert_eq!(
                malformed(&body[..length]),
                ErrorKind::Truncated,
                "{request:?}"
            );
        }
    }
}

#[test]
fn trailing_bytes() {
    for request in samples("rank/0", b"value") {
        let mut body = body(&request);
        body.push(0);
        assert_eq!(malformed(&body), ErrorKind::TrailingBytes);
    }
    let error = Response::decode(&[0x81, 0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TrailingBytes);
}

#[test]
fn key_empty() {
    assert_eq!(malformed(&[3, 0, 0]), ErrorKind::KeyEmpty);
}

#[test]
fn key_too_long() {
    // Announced only: refused before it is looked for.
    assert_eq!(malformed(&[3, 1, 4]), ErrorKind::KeyTooLong);
    assert_eq!(malformed(&[8, 0xff, 0xff]), ErrorKind::KeyTooLong);
}

#[test]
fn key_not_utf8() {
    assert_eq!(malformed(&[3, 2, 0, 0xc3, 0x28]), ErrorKind::KeyNotUtf8);
}

#[test]
fn value_too_long() {
    let mut set = vec![1, 1, 0, b'k'];
    set.extend_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(malformed(&set), ErrorKind::ValueTooLong);
    let error = Response::decode(&[0x82, 1, 0, 0x10, 0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ValueTooLong);
}

#[test]
fn wait_keys() {
    assert_eq!(malformed(&[4, 0, 0, 0, 0, 0, 0]), ErrorKind::WaitKeys);
    assert_eq!(malformed(&[4, 0, 0, 0, 0, 1, 4]), ErrorKind::WaitKeys);
    assert_eq!(malformed(&[4, 0, 0, 0, 0, 0xff, 0xff]), ErrorKind::WaitKeys);
    // The count is legal, the keys are not there.
    assert_eq!(malformed(&[4, 0, 0, 0, 0, 0, 4]), ErrorKind::Truncated);
}

#[test]
fn bad_flag() {
    assert_eq!(malformed(&[6, 1, 0, b'k', 2]), ErrorKind::BadFlag);
    let error = Response::decode(&[0x85, 7]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadFlag);
}

/// The bytes of the messages between a server and its followers, and their limits.
#[test]
fn messages_of_followers() {
    assert_eq!(
        body(&Request::Follow { id: 0x0102 }),
        [10, 2, 1, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(body(&Request::Ack { seq: 3 }), [11, 3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(body(&Request::Leave), [12]);
    assert_eq!(body(&Request::Retire { key: "k" }), [13, 1, 0, b'k']);
    let seq = 4;
    let mut out = Vec::new();
    for value in [Some(b"v".to_vec()), None] {
        let change = Response::Change {
            seq,
            key: "k".to_owned(),
            value,
        };
        change.encode(&mut out).unwrap();
    }
    Response::Copied { seq }.encode(&mut out).unwrap();
    let change = [0x89, 4, 0, 0, 0, 0, 0, 0, 0, 1, 0, b'k'];
    let golden = [
        &[18, 0, 0, 0][..],
        &change,
        &[1, 1, 0, 0, 0, b'v', 13, 0, 0, 0],
        &change,
        &[0, 9, 0, 0, 0, 0x8a, 4, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    assert_eq!(out, golden);
    let broken = |at: usize, with: u8| {
        let mut change = [&change[..], &[1, 1, 0, 0, 0, b'v']].concat();
        change[at] = with;
        Response::decode(&change).unwrap_err().kind()
    };
    let no_key = [0x89, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let error = Response::decode(&no_key).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::KeyEmpty);
    assert_eq!(broken(10, 0xff), ErrorKind::KeyTooLong);
    assert_eq!(broken(11, 0xff), ErrorKind::KeyNotUtf8);
    assert_eq!(broken(12, 2), ErrorKind::BadFlag);
    assert_eq!(broken(13, 2), ErrorKind::Truncated);
    assert_eq!(broken(16, 1), ErrorKind::ValueTooLong);
    assert_eq!(broken(12, 0), ErrorKind::TrailingBytes);
}

/// The bytes of appends and of queues, and their limits.
#[test]
fn messages_of_appends_and_queues() {
    let (key, queue, value) = ("k", "q", &b"v"[..]);
    let (k, q, v) = ([1, 0, b'k'], [1, 0, b'q'], [1, 0, 0, 0, b'v']);
    let golden = |code: u8, fields: [&[u8]; 2]| [&[code], fields[0], fields[1]].concat();
    let append = body(&Request::Append { key, value });
    assert_eq!(append, golden(14, [&k, &v]));
    let push = body(&Request::QueuePush { queue, value });
    assert_eq!(push, golden(15, [&q, &v]));
    let timeout_ms = 0x0102;
    let pop = body(&Request::QueuePop { queue, timeout_ms });
    assert_eq!(pop, golden(16, [&q, &[2, 1, 0, 0]]));
    let count = body(&Request::QueueLen { queue });
    assert_eq!(count, golden(17, [&q, &[]]));
    let failed = [2, 0, 0, 0, 0x88, 7];
    let mut out = Vec::new();
    let failure = Response::Failed(Failure::ValueTooLong);
    failure.encode(&mut out).unwrap();
    assert_eq!(out, failed);
    // An element's key is longer than its queue's name.
    let long = "q".repeat(MAX_QUEUE_BYTES + 1);
    let length = (long.len() as u16).to_le_bytes();
    for (code, rest) in [(15, &[0; 4][..]), (16, &[0; 4]), (17, &[])] {
        let empty = [&[code, 0, 0][..], rest].concat();
        assert_eq!(malformed(&empty), ErrorKind::KeyEmpty);
        assert_eq!(malformed(&[code, 1, 0, 0xff]), ErrorKind::KeyNotUtf8);
        let too_long = [&[code][..], &length, long.as_bytes(), rest].concat();
        assert_eq!(malformed(&too_long), ErrorKind::KeyTooLong);
    }
    for code in [14, 15] {
        let too_long = [&[code][..], &k, &u32::MAX.to_le_bytes()].concat();
        assert_eq!(malformed(&too_long), ErrorKind::ValueTooLong);
    }
}

#[test]
fn a_will_is_short() {
    let long = vec![7; MAX_WILL_BYTES + 1];
    let will = |value| Request::Will {
        key: "k",
        value: Some(value),
    };
    let error = will(&long[..]).check().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ValueTooLong);
    let mut too_long = body(&will(&long[1..]));
    let at = too_long.len() - MAX_WILL_BYTES - 4;
    too_long[at..at + 4].copy_from_slice(&(MAX_WILL_BYTES as u32 + 1).to_le_bytes());
    too_long.push(7);
    assert_eq!(malformed(&too_long), ErrorKind::ValueTooLong);
    // The flag is 0 or 1.
    let mut odd = body(&Request::Will {
        key: "k",
        value: None,
    });
    *odd.last_mut().unwrap() = 2;
    assert_eq!(malformed(&odd), ErrorKind::BadFlag);
}
