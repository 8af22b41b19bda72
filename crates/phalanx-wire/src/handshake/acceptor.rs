//! The side that accepted the connection.

use super::{
    Awaiting, Hello, LABEL_CHALLENGE, LABEL_PROOF, LABEL_REJECT, LABEL_WELCOME, RejectReason,
    TAG_BYTES, Type, message, open,
};
use crate::token::random_bytes;
use crate::{ErrorKind, Result, Token};

/// Acceptor that has sent its challenge and waits for the proof. The peer's hello
/// is not accessible before that.
#[derive(Debug)]
pub struct Acceptor {
    hello: [u8; Hello::BYTES],
    peer: Hello,
    nonce: [u8; 32],
    token: Token,
}

/// Acceptor whose peer has proven the token; it must send a verdict.
#[derive(Debug)]
#[must_use = "the initiator waits for a welcome or a rejection"]
pub struct Proven(Acceptor);

impl Acceptor {
    /// Takes a hello and returns the challenge. Send it, then read a message with
    /// [`Awaiting::Proof`].
    ///
    /// # Errors
    /// [`ErrorKind::Random`], [`ErrorKind::ReservedNotZero`], and the kinds of
    /// [`body_bytes`](super::body_bytes).
    pub fn start(hello: &[u8], token: &Token) -> Result<(Acceptor, Vec<u8>)> {
        let (_, mut r) = open(hello, Awaiting::Hello)?;
        let hello: [u8; Hello::BYTES] = r.array()?;
        r.end()?;
        let peer = Hello::decode(&hello)?;
        let nonce = random_bytes()?;
        let mac = token.mac(&[LABEL_CHALLENGE, &hello, &nonce]);
        let message = message(Type::Challenge, &[&nonce, &mac]);
        let acceptor = Acceptor {
            hello,
            peer,
            nonce,
            token: token.clone(),
        };
        Ok((acceptor, message))
    }

    /// The tag of the hello, if it is valid for our token. It is no proof, since a
    /// hello can be recorded and replayed, but a peer without a valid tag does not
    /// have the token: an acceptor without free slots closes such connections first.
    /// Tags are unique, so a tag that arrives twice was replayed.
    pub fn tag(&self) -> Option<[u8; TAG_BYTES]> {
        Hello::valid_tag(&self.hello, &self.token)
    }

    /// Checks the proof.
    ///
    /// # Errors
    /// [`ErrorKind::BadProof`] when the initiator does not have the token, and
    /// the kinds of [`body_bytes`](super::body_bytes). Close the connection
    /// without an answer.
    pub fn verify(self, proof: &[u8]) -> Result<Proven> {
        let (_, mut r) = open(proof, Awaiting::Proof)?;
        let mac: [u8; 32] = r.array()?;
        r.end()?;
        let parts: [&[u8]; 3] = [LABEL_PROOF, &self.hello, &self.nonce];
        self.token.check(&parts, &mac, ErrorKind::BadProof)?;
        Ok(Proven(self))
    }
}

impl Proven {
    /// The peer's hello, which is now authenticated.
    pub fn peer(&self) -> &Hello {
        &self.0.peer
    }

    /// Accepts the peer. `hello` describes this side.
    pub fn welcome(self, hello: Hello) -> Vec<u8> {
        let (theirs, nonce, token) = (self.0.hello, self.0.nonce, self.0.token);
        let mine = Hello { nonce, ..hello }.encode();
        let mac = token.mac(&[LABEL_WELCOME, &theirs, &nonce, &mine]);
        message(Type::Welcome, &[&mine, &mac])
    }

    /// Refuses the peer and sends it the reason.
    pub fn reject(self, reason: RejectReason) -> Vec<u8> {
        let (theirs, nonce, token) = (self.0.hello, self.0.nonce, self.0.token);
        let code = reason.code().to_le_bytes();
        let mac = token.mac(&[LABEL_REJECT, &theirs, &nonce, &code]);
        message(Type::Reject, &[&code, &mac])
    }
}

/// Message to a peer of another protocol version before its connection is closed,
/// so that its user reads "wrong version" instead of "connection closed". It holds
/// only this side's version, in the prefix that all versions share, and is not
/// authenticated.
pub fn version_notice() -> Vec<u8> {
    let code = RejectReason::WrongVersion.code().to_le_bytes();
    message(Type::Reject, &[&code, &[0; 32]])
}
