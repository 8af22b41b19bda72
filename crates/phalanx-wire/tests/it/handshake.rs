//! Every way in which a handshake can go, and every malformed message it must refuse.

use phalanx_wire::handshake::{
    Acceptor, Awaiting, Hello, Initiator, MAX_MESSAGE_BYTES, NO_RANK, Outcome, PREFIX_BYTES,
    Proven, Proving, RejectReason, Role, TAG_BYTES, body_bytes, version_notice,
};
use phalanx_wire::{Error, ErrorKind, Token};

fn token(digit: u8) -> Token {
    Token::from_hex(&format!("{digit:02x}").repeat(32)).unwrap()
}

fn hello(rank: u32) -> Hello {
    Hello::new(Role::Peer, token(1).job_id())
        .rank(rank)
        .world(4)
        .generation(7)
        .group(9)
        .stream(3)
}

/// Runs up to the verdict with both sides honest.
fn up_to_verdict() -> (Proving, Proven) {
    let (initiator, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let (acceptor, challenge) = Acceptor::start(&first, &token(1)).unwrap();
    let (proving, proof) = initiator.answer(&challenge).unwrap();
    (proving, acceptor.verify(&proof).unwrap())
}

fn kind<T>(result: Result<T, Error>) -> ErrorKind {
    match result {
        Ok(_) => panic!("a malformed message was accepted"),
        Err(error) => error.kind(),
    }
}

fn changed(message: &[u8], at: usize, to: u8) -> Vec<u8> {
    let mut bytes = message.to_vec();
    assert_ne!(bytes[at], to, "the test changes nothing");
    bytes[at] = to;
    bytes
}

#[test]
fn both_learn_who_the_other_is() {
    let (proving, proven) = up_to_verdict();
    let seen = *proven.peer();
    assert_eq!(
        Hello {
            nonce: [0; 32],
            ..seen
        },
        hello(1)
    );
    let Outcome::Welcome(peer) = proving.finish(&proven.welcome(hello(0))).unwrap() else {
        panic!("rejected");
    };
    assert_eq!(
        Hello {
            nonce: [0; 32],
            ..peer
        },
        hello(0)
    );
    assert_ne!(peer.nonce, seen.nonce);
    assert_ne!(peer.nonce, [0; 32]);
}

#[test]
fn every_reason_arrives() {
    for reason in RejectReason::ALL {
        let (proving, proven) = up_to_verdict();
        let outcome = proving.finish(&proven.reject(reason)).unwrap();
        assert_eq!(outcome, Outcome::Rejected(reason));
        assert_eq!(RejectReason::from_code(reason.code()).unwrap(), reason);
        assert!(!reason.to_string().is_empty());
    }
    assert_eq!(kind(RejectReason::from_code(0)), ErrorKind::UnknownCode);
    assert_eq!(kind(RejectReason::from_code(999)), ErrorKind::UnknownCode);
}

#[test]
fn every_role_round_trips() {
    for role in Role::ALL {
        let mine = Hello::new(role, 5);
        let (_, first) = Initiator::start(mine, &token(1)).unwrap();
        assert_eq!(first[PREFIX_BYTES], role as u8);
        assert!(Acceptor::start(&first, &token(1)).is_ok());
    }
    assert_eq!(Hello::new(Role::StoreClient, 5).rank, NO_RANK);
}

#[test]
fn same_group_names_the_first_difference() {
    let mine = hello(0);
    mine.check_same_group(&hello(3)).unwrap();
    let cases = [
        (Hello { job: 1, ..hello(3) }, RejectReason::WrongJob),
        (hello(3).generation(8), RejectReason::WrongGeneration),
        (
            hello(3).generation(8).world(9),
            RejectReason::WrongGeneration,
        ),
        (hello(3).group(8), RejectReason::WrongGroup),
        (hello(3).world(5), RejectReason::WrongWorld),
    ];
    for (peer, reason) in cases {
        assert_eq!(mine.check_same_group(&peer), Err(reason));
    }
}

#[test]
fn no_message_is_longer_than_the_limit() {
    let (initiator, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let (_, challenge) = Acceptor::start(&first, &token(1)).unwrap();
    let (_, proof) = initiator.answer(&challenge).unwrap();
    let (_, proven) = up_to_verdict();
    let welcome = proven.welcome(hello(0));
    let (_, proven) = up_to_verdict();
    let reject = proven.reject(RejectReason::Full);
    let lengths = [&first, &challenge, &proof, &welcome, &reject].map(|m| m.len());
    assert_eq!(lengths, [76, 72, 40, 108, 42]);
    assert!(lengths.iter().all(|bytes| *bytes <= MAX_MESSAGE_BYTES));
}

#[test]
fn the_token_never_travels() {
    let secret = [1_u8; 32];
    let (initiator, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let (acceptor, challenge) = Acceptor::start(&first, &token(1)).unwrap();
    let (_, proof) = initiator.answer(&challenge).unwrap();
    let welcome = acceptor.verify(&proof).unwrap().welcome(hello(0));
    for message in [first, challenge, proof, welcome] {
        assert!(!message.windows(8).any(|w| w == &secret[..8]));
    }
}

// One test per error.

#[test]
fn bad_magic_http_tls_and_ssh() {
    for opening in [
        b"GET / HT",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"SSH-2.0-",
        b"\0\0\0\0\0\0\0\0",
    ] {
        for awaiting in [
            Awaiting::Hello,
            Awaiting::Challenge,
            Awaiting::Proof,
            Awaiting::Verdict,
        ] {
            assert_eq!(kind(body_bytes(opening, awaiting)), ErrorKind::BadMagic);
        }
    }
}

#[test]
fn wrong_version() {
    let (_, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let error = Acceptor::start(&changed(&first, 4, 2), &token(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongVersion);
    assert!(error.to_string().contains("version 2"), "{error}");
}

/// A newer acceptor answers with its own version in the prefix, which is what
/// the initiator then reports.
#[test]
fn version_notice_is_understood() {
    let (initiator, _) = Initiator::start(hello(1), &token(1)).unwrap();
    let newer = changed(&version_notice(), 4, 2);
    assert_eq!(kind(initiator.answer(&newer)), ErrorKind::WrongVersion);
}

/// Within one version it is no way to turn a member away: it is not proven.
#[test]
fn version_notice_is_no_verdict() {
    let (initiator, _) = Initiator::start(hello(1), &token(1)).unwrap();
    assert_eq!(
        kind(initiator.answer(&version_notice())),
        ErrorKind::UnexpectedMessage
    );
    let (proving, _) = up_to_verdict();
    assert_eq!(
        kind(proving.finish(&version_notice())),
        ErrorKind::TokenMismatch
    );
}

#[test]
fn unknown_message_type() {
    let (_, first) = Initiator::start(hello(1), &token(1)).unwrap();
    for code in [0, 6, 255] {
        let malformed = changed(&first, 5, code);
        assert_eq!(
            kind(Acceptor::start(&malformed, &token(1))),
            ErrorKind::UnknownCode
        );
    }
}

#[test]
fn unexpected_message() {
    let (initiator, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let (acceptor, challenge) = Acceptor::start(&first, &token(1)).unwrap();
    // A hello sent back to its author, and a challenge where a hello is due.
    assert_eq!(kind(initiator.answer(&first)), ErrorKind::UnexpectedMessage);
    assert_eq!(
        kind(Acceptor::start(&challenge, &token(1))),
        ErrorKind::UnexpectedMessage
    );
    assert_eq!(kind(acceptor.verify(&first)), ErrorKind::UnexpectedMessage);
}

#[test]
fn wrong_length() {
    let (_, first) = Initiator::start(hello(1), &token(1)).unwrap();
    for (low, high) in [(0, 0), (67, 0), (69, 0), (0xff, 0xff)] {
        let mut malformed = first.to_vec();
        malformed[6] = low;
        malformed[7] = high;
        assert_eq!(
            kind(Acceptor::start(&malformed, &token(1))),
            ErrorKind::WrongLength
        );
    }
}

#[test]
fn truncated() {
    let (_, first) = Initiator::start(hello(1), &token(1)).unwrap();
    for length in 0..first.len() {
        assert_eq!(
            kind(Acceptor::start(&first[..length], &token(1))),
            ErrorKind::Truncated,
            "{length} bytes"
        );
    }
}

#[test]
fn trailing_bytes() {
    let (_, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let mut longer = first.to_vec();
    longer.push(0);
    assert_eq!(
        kind(Acceptor::start(&longer, &token(1))),
        ErrorKind::TrailingBytes
    );
}

#[test]
fn unknown_role() {
    let (_, first) = Initiator::start(hello(1), &token(1)).unwrap();
    for code in [0, 7, 255] {
        let malformed = changed(&first, PREFIX_BYTES, code);
        assert_eq!(
            kind(Acceptor::start(&malformed, &token(1))),
            ErrorKind::UnknownCode
        );
    }
}

#[test]
fn reserved_not_zero() {
    let (_, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let malformed = changed(&first, PREFIX_BYTES + 1, 1);
    assert_eq!(
        kind(Acceptor::start(&malformed, &token(1))),
        ErrorKind::ReservedNotZero
    );
}

/// Only a holder of the token makes a valid tag, no two hellos have the same, and
/// the proof counts, not the tag.
#[test]
fn tags() {
    let (initiator, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let tag = |hello: &[u8], digit| Acceptor::start(hello, &token(digit)).unwrap().0.tag();
    let valid = tag(&first, 1).unwrap();
    assert_eq!(first[first.len() - TAG_BYTES..], valid);
    assert_eq!(tag(&first, 2), None);
    let (_, other) = Initiator::start(hello(1), &token(1)).unwrap();
    assert_ne!(tag(&other, 1).unwrap(), valid);
    // Any change of the hello, its tag included, makes the tag invalid.
    for at in [PREFIX_BYTES + 2, PREFIX_BYTES + 30, first.len() - 1] {
        assert_eq!(tag(&changed(&first, at, first[at] ^ 1), 1), None, "{at}");
    }
    // What the peer sent is what it must prove, so a changed tag is found then.
    let at = first.len() - 1;
    let malformed = changed(&first, at, first[at] ^ 1);
    let (_, challenge) = Acceptor::start(&malformed, &token(1)).unwrap();
    assert_eq!(kind(initiator.answer(&challenge)), ErrorKind::TokenMismatch);
}

#[test]
fn token_mismatch_is_known_to_the_initiator() {
    let (initiator, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let (_, challenge) = Acceptor::start(&first, &token(2)).unwrap();
    let error = initiator.answer(&challenge).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TokenMismatch);
    assert!(
        error
            .to_string()
            .contains("the job token differs, or another program listens there"),
        "{error}"
    );
}

#[test]
fn bad_proof() {
    let (initiator, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let (acceptor, challenge) = Acceptor::start(&first, &token(1)).unwrap();
    let (_, proof) = initiator.answer(&challenge).unwrap();
    let at = proof.len() - 1;
    let malformed = changed(&proof, at, proof[at] ^ 1);
    assert_eq!(kind(acceptor.verify(&malformed)), ErrorKind::BadProof);
}

/// Whoever recorded a handshake cannot repeat it: the challenge is new.
#[test]
fn replayed_hello_and_proof() {
    let (initiator, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let (_, challenge) = Acceptor::start(&first, &token(1)).unwrap();
    let (_, proof) = initiator.answer(&challenge).unwrap();
    let (acceptor, second_challenge) = Acceptor::start(&first, &token(1)).unwrap();
    assert_ne!(challenge[..], second_challenge[..]);
    assert_eq!(kind(acceptor.verify(&proof)), ErrorKind::BadProof);
}

/// The MAC of the challenge cannot be sent back as a proof.
#[test]
fn reflected_proof() {
    let (_, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let (acceptor, challenge) = Acceptor::start(&first, &token(1)).unwrap();
    let mut reflected = Vec::from(&challenge[..4]);
    reflected.extend_from_slice(&[1, 3, 32, 0]);
    reflected.extend_from_slice(&challenge[challenge.len() - 32..]);
    assert_eq!(kind(acceptor.verify(&reflected)), ErrorKind::BadProof);
}

/// A hello that was changed on its way to the acceptor: the first proof shows it.
#[test]
fn hello_changed_on_its_way() {
    let (initiator, first) = Initiator::start(hello(1), &token(1)).unwrap();
    let rank_at = PREFIX_BYTES + 20;
    let malformed = changed(&first, rank_at, 2);
    let (_, challenge) = Acceptor::start(&malformed, &token(1)).unwrap();
    assert_eq!(kind(initiator.answer(&challenge)), ErrorKind::TokenMismatch);
}

/// The same the other way round: the welcome is covered byte by byte.
#[test]
fn verdict_changed_on_its_way() {
    let (_, proven) = up_to_verdict();
    let length = proven.welcome(hello(0)).len();
    for at in PREFIX_BYTES..length {
        let (proving, proven) = up_to_verdict();
        let welcome = proven.welcome(hello(0));
        let malformed = changed(&welcome, at, welcome[at] ^ 0x10);
        assert_eq!(
            kind(proving.finish(&malformed)),
            ErrorKind::TokenMismatch,
            "byte {at}"
        );
    }
    let (proving, proven) = up_to_verdict();
    let reject = proven.reject(RejectReason::DuplicateRank);
    let malformed = changed(&reject, PREFIX_BYTES, RejectReason::WrongRank.code() as u8);
    assert_eq!(kind(proving.finish(&malformed)), ErrorKind::TokenMismatch);
}

/// A verdict belongs to one handshake.
#[test]
fn verdict_of_another_handshake() {
    let (proving, _) = up_to_verdict();
    let (_, other) = up_to_verdict();
    assert_eq!(
        kind(proving.finish(&other.welcome(hello(0)))),
        ErrorKind::TokenMismatch
    );
}
