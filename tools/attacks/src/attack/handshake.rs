//! Lies within the handshake, by somebody without the token.

use phalanx_wire::Token;
use phalanx_wire::handshake::{Awaiting, Hello, Initiator, Role};

use super::Shot;
use crate::line::{Answer, CHALLENGE_BYTES, Line};

/// A hello as a stranger would make it who has read our source.
pub(super) fn hello_as(role: Role) -> Option<Vec<u8>> {
    let token = Token::generate().ok()?;
    let hello = Hello::new(role, token.job_id()).rank(1).world(2);
    let (_, message) = Initiator::start(hello, &token).ok()?;
    Some(message.to_vec())
}

fn strangers_hello(turn: u64) -> Option<Vec<u8>> {
    hello_as(Role::ALL[turn as usize % Role::ALL.len()])
}

/// The first so many bytes of a hello, then the end.
pub fn truncated(shot: &Shot<'_>) -> Option<Answer> {
    let hello = strangers_hello(shot.turn)?;
    let cut = shot.turn as usize % hello.len();
    shot.say(&hello[..cut], true)
}

/// Changed bytes anywhere in a hello, and more bytes than are asked for.
pub fn garbled(shot: &Shot<'_>) -> Option<Answer> {
    let mut hello = strangers_hello(shot.turn)?;
    {
        let mut dice = shot.dice.borrow_mut();
        dice.lie(&mut hello);
        dice.garble(&mut hello);
    }
    // The prefix stays, or most would end at the magic number.
    let whole = strangers_hello(shot.turn)?;
    hello.resize(hello.len().max(whole.len()), 0);
    hello[..8].copy_from_slice(&whole[..8]);
    // What a changed hello is answered with says nothing, but whoever asked
    // for the wrong thing may be left waiting for its own second message.
    shot.say(&hello, true)
}

/// Length fields at the edges of their ranges, and many bytes behind them.
pub fn oversize(shot: &Shot<'_>) -> Option<Answer> {
    const LENGTHS: [u16; 8] = [0, 1, 67, 69, 504, 512, 0x7fff, 0xffff];
    let turn = shot.turn as usize;
    let mut lie = b"PHHS\x01".to_vec();
    lie.push(1 + (turn / LENGTHS.len() % 6) as u8);
    lie.extend(LENGTHS[turn % LENGTHS.len()].to_le_bytes());
    lie.resize(70_000, 0x41);
    shot.say(&lie, false)
}

/// Another version in the prefix.
pub fn version(shot: &Shot<'_>) -> Option<Answer> {
    let mut hello = strangers_hello(shot.turn)?;
    hello[4] = [0, 2, 255][shot.turn as usize % 3];
    shot.say(&hello, false)
}

/// Says hello and hears the challenge, which proves nothing to a stranger.
fn challenged(shot: &Shot<'_>, hello: &[u8]) -> Result<(Line, Vec<u8>), Answer> {
    let mut line = shot.target.open(shot.source).ok_or(Answer::Unreachable)?;
    line.say(hello);
    let challenge = line.message(Awaiting::Challenge);
    let challenge = challenge.ok_or_else(|| line.judge())?;
    Ok((line, challenge))
}

/// Sends this instead of a proof.
fn instead_of_a_proof(
    shot: &Shot<'_>,
    hello: &[u8],
    proof: impl FnOnce(&[u8]) -> Vec<u8>,
) -> Option<Answer> {
    Some(match challenged(shot, hello) {
        Err(answer) => answer,
        Ok((mut line, challenge)) => {
            line.say(&proof(&challenge));
            match line.judge() {
                // It has been challenged before.
                Answer::Closed => Answer::Challenged,
                other => other,
            }
        }
    })
}

/// A proof message around these 32 bytes.
fn proof(mac: &[u8]) -> Vec<u8> {
    let mut message = b"PHHS\x01\x03\x20\0".to_vec();
    message.extend_from_slice(mac);
    message.resize(40, 0);
    message
}

/// Keeps to the protocol, with another token.
pub fn wrong_token(shot: &Shot<'_>) -> Option<Answer> {
    let token = Token::generate().ok()?;
    // An initiator checks the challenge, so it would leave; we go on with
    // whatever it would have said to an acceptor of its own.
    let (initiator, hello) = Initiator::start(Hello::new(Role::Peer, 1), &token).ok()?;
    let (_, own) = phalanx_wire::handshake::Acceptor::start(&hello, &token).ok()?;
    let (_, wrong) = initiator.answer(&own).ok()?;
    instead_of_a_proof(shot, &hello, |_| wrong.to_vec())
}

/// Right but for one bit: what a comparison that stops early would leak on.
pub fn guessed(shot: &Shot<'_>) -> Option<Answer> {
    let target = shot.target;
    let hello = Hello::new(Role::StoreClient, target.token.job_id());
    let (initiator, hello) = Initiator::start(hello, &target.token).ok()?;
    let bit = shot.turn as usize % 256;
    instead_of_a_proof(shot, &hello, |challenge| {
        let right = initiator
            .answer(challenge)
            .ok()
            .map(|(_, proof)| proof.to_vec());
        let mut wrong = right.unwrap_or_else(|| proof(&[0; 32]));
        wrong[8 + bit / 8] ^= 1 << (bit % 8);
        wrong
    })
}

/// Both messages of a member, recorded and sent again.
pub fn replayed(shot: &Shot<'_>) -> Option<Answer> {
    let recorded = shot.recorded.as_ref()?;
    instead_of_a_proof(shot, &recorded.hello, |_| recorded.proof.clone())
}

/// A member's hello, and the challenge that it once got.
pub fn replayed_challenge(shot: &Shot<'_>) -> Option<Answer> {
    let recorded = shot.recorded.as_ref()?;
    instead_of_a_proof(shot, &recorded.hello, |_| recorded.challenge.clone())
}

/// The other side's own words: its challenge as our proof, or as our hello.
pub fn reflected(shot: &Shot<'_>) -> Option<Answer> {
    let hello = strangers_hello(shot.turn)?;
    match shot.turn % 3 {
        0 => instead_of_a_proof(shot, &hello, <[u8]>::to_vec),
        1 => instead_of_a_proof(shot, &hello, |c| proof(&c[CHALLENGE_BYTES - 32..])),
        _ => instead_of_a_proof(shot, &hello, |c| proof(&c[8..40])),
    }
}

/// Two connections with one hello: the answer on one as proof on the other.
pub fn crossed(shot: &Shot<'_>) -> Option<Answer> {
    let hello = strangers_hello(shot.turn)?;
    let first = challenged(shot, &hello);
    let answer = instead_of_a_proof(shot, &hello, |second| match &first {
        Ok((_, first)) => proof(&first[CHALLENGE_BYTES - 32..]),
        Err(_) => proof(&second[CHALLENGE_BYTES - 32..]),
    });
    drop(first);
    answer
}
