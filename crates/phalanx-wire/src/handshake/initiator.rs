//! The side that opened the connection.

use super::{
    Awaiting, Hello, LABEL_CHALLENGE, LABEL_PROOF, LABEL_REJECT, LABEL_WELCOME, RejectReason, Type,
    message, open,
};
use crate::token::random_bytes;
use crate::{Error, ErrorKind, Result, Token};

/// Initiator that has sent its hello and waits for the challenge.
#[derive(Debug)]
pub struct Initiator {
    hello: [u8; Hello::BYTES],
    token: Token,
}

/// Initiator that has sent its proof and waits for the verdict.
#[derive(Debug)]
pub struct Proving {
    hello: [u8; Hello::BYTES],
    nonce: [u8; 32],
    token: Token,
}

/// Result of a handshake for the initiator. Both verdicts are authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Connected to this peer.
    Welcome(Hello),
    /// Refused.
    Rejected(RejectReason),
}

impl Initiator {
    /// Starts a handshake with a fresh nonce. Send the message, then read a
    /// message with [`Awaiting::Challenge`].
    ///
    /// # Errors
    /// [`ErrorKind::Random`].
    pub fn start(hello: Hello, token: &Token) -> Result<(Initiator, Vec<u8>)> {
        let hello = Hello {
            nonce: random_bytes()?,
            ..hello
        };
        let hello = hello.encode_tagged(token);
        let message = message(Type::Hello, &[&hello]);
        let token = token.clone();
        Ok((Initiator { hello, token }, message))
    }

    /// Checks the challenge and returns the proof. Send it, then read a message
    /// with [`Awaiting::Verdict`].
    ///
    /// # Errors
    /// [`ErrorKind::TokenMismatch`] when the acceptor does not have the token,
    /// and the kinds of [`body_bytes`](super::body_bytes).
    pub fn answer(self, challenge: &[u8]) -> Result<(Proving, Vec<u8>)> {
        let (_, mut r) = open(challenge, Awaiting::Challenge)?;
        let nonce: [u8; 32] = r.array()?;
        let mac: [u8; 32] = r.array()?;
        r.end()?;
        let hello = self.hello;
        let parts: [&[u8]; 3] = [LABEL_CHALLENGE, &hello, &nonce];
        self.token.check(&parts, &mac, ErrorKind::TokenMismatch)?;
        let proof = self.token.mac(&[LABEL_PROOF, &hello, &nonce]);
        let message = message(Type::Proof, &[&proof]);
        let proving = Proving {
            hello,
            nonce,
            token: self.token,
        };
        Ok((proving, message))
    }
}

impl Proving {
    /// Checks the verdict.
    ///
    /// # Errors
    /// [`ErrorKind::TokenMismatch`] when the verdict is not the acceptor's,
    /// [`ErrorKind::NonceMismatch`], and the kinds of
    /// [`body_bytes`](super::body_bytes).
    pub fn finish(self, verdict: &[u8]) -> Result<Outcome> {
        let (kind, mut r) = open(verdict, Awaiting::Verdict)?;
        if kind == Type::Reject {
            let code = r.u16()?;
            let mac: [u8; 32] = r.array()?;
            r.end()?;
            let parts: [&[u8]; 4] = [LABEL_REJECT, &self.hello, &self.nonce, &code.to_le_bytes()];
            self.token.check(&parts, &mac, ErrorKind::TokenMismatch)?;
            return Ok(Outcome::Rejected(RejectReason::from_code(code)?));
        }
        let peer: [u8; Hello::BYTES] = r.array()?;
        let mac: [u8; 32] = r.array()?;
        r.end()?;
        let parts: [&[u8]; 4] = [LABEL_WELCOME, &self.hello, &self.nonce, &peer];
        self.token.check(&parts, &mac, ErrorKind::TokenMismatch)?;
        let peer = Hello::decode(&peer)?;
        if peer.nonce != self.nonce {
            return Err(Error::new(ErrorKind::NonceMismatch));
        }
        Ok(Outcome::Welcome(peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::{Acceptor, Role};

    /// Only a side with the token can send this message, so the test signs it.
    #[test]
    fn nonce_mismatch() {
        let token = Token::from_hex(&"01".repeat(32)).unwrap();
        let hello = Hello::new(Role::Peer, 1);
        let (initiator, first) = Initiator::start(hello, &token).unwrap();
        let (_, challenge) = Acceptor::start(&first, &token).unwrap();
        let (proving, _) = initiator.answer(&challenge).unwrap();
        let peer = Hello {
            nonce: [7; 32],
            ..hello
        }
        .encode();
        let parts: [&[u8]; 4] = [LABEL_WELCOME, &proving.hello, &proving.nonce, &peer];
        let welcome = message(Type::Welcome, &[&peer, &token.mac(&parts)]);
        let error = proving.finish(&welcome).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NonceMismatch);
    }
}
