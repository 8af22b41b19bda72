//! The side that was connected to.

use super::{
    Awaiting, Hello, LABEL_CHALLENGE, LABEL_PROOF, LABEL_REJECT, LABEL_WELCOME, Message,
    RejectReason, TAG_BYTES, Type, open,
};
use crate::token::random_bytes;
use crate::{Error, ErrorKind, Result, Token};

/// Has challenged; waits for the proof. The hello is a mere claim until then,
/// so it cannot be looked at.
#[derive(Debug)]
pub struct Acceptor {
    hello: [u8; Hello::BYTES],
    peer: Hello,
    nonce: [u8; 32],
    token: Token,
}

/// Knows that the peer holds the token; owes it a verdict.
#[derive(Debug)]
#[must_use = "the initiator waits for a welcome or a rejection"]
pub struct Proven(Acceptor);

impl Acceptor {
    /// Takes a hello and challenges. Send the message, then read one while
    /// [`Awaiting::Proof`].
    ///
    /// # Errors
    /// [`ErrorKind::Random`], [`ErrorKind::ReservedNotZero`], and the kinds of
    /// [`body_bytes`](super::body_bytes).
    pub fn start(hello: &[u8], token: &Token) -> Result<(Acceptor, Message)> {
        let (_, mut r) = open(hello, Awaiting::Hello)?;
        let hello: [u8; Hello::BYTES] = r.array()?;
        r.end()?;
        let peer = Hello::decode(&hello)?;
        let nonce = random_bytes()?;
        let mac = token.mac(&[LABEL_CHALLENGE, &hello, &nonce]);
        let message = Message::new(Type::Challenge, &[&nonce, &mac]);
        let token = token.clone();
        Ok((
            Acceptor {
                hello,
                peer,
                nonce,
                token,
            },
            message,
        ))
    }

    /// The tag of the hello, if it was made with our token. It proves nothing,
    /// as a hello can be recorded and sent again, but without it the peer is no
    /// member: an acceptor that must close somebody closes those first. Each
    /// hello has its own tag, so one that comes twice is a recorded one.
    pub fn tag(&self) -> Option<[u8; TAG_BYTES]> {
        Hello::valid_tag(&self.hello, &self.token)
    }

    /// Takes the proof.
    ///
    /// # Errors
    /// [`ErrorKind::BadProof`] when the initiator does not hold the token, and
    /// the kinds of [`body_bytes`](super::body_bytes). Answer with nothing:
    /// close.
    pub fn verify(self, proof: &[u8]) -> Result<Proven> {
        let (_, mut r) = open(proof, Awaiting::Proof)?;
        let mac: [u8; 32] = r.array()?;
        r.end()?;
        let parts: [&[u8]; 3] = [LABEL_PROOF, &self.hello, &self.nonce];
        if !self.token.mac_is(&parts, &mac) {
            return Err(Error::new(ErrorKind::BadProof));
        }
        Ok(Proven(self))
    }
}

impl Proven {
    /// The hello of the peer, now believed.
    pub fn peer(&self) -> &Hello {
        &self.0.peer
    }

    /// Accepts the peer; this side introduces itself with `hello`.
    pub fn welcome(self, hello: Hello) -> Message {
        let Acceptor {
            hello: theirs,
            nonce,
            token,
            ..
        } = self.0;
        let mine = Hello { nonce, ..hello }.encode();
        let mac = token.mac(&[LABEL_WELCOME, &theirs, &nonce, &mine]);
        Message::new(Type::Welcome, &[&mine, &mac])
    }

    /// Refuses the peer and tells it why.
    pub fn reject(self, reason: RejectReason) -> Message {
        let Acceptor {
            hello: theirs,
            nonce,
            token,
            ..
        } = self.0;
        let code = reason.code().to_le_bytes();
        let mac = token.mac(&[LABEL_REJECT, &theirs, &nonce, &code]);
        Message::new(Type::Reject, &[&code, &mac])
    }
}

/// What to send to a peer of another protocol version before closing, so that
/// its user reads "wrong version" instead of "connection closed". It says
/// nothing but this side's version, in the prefix that all versions share, and
/// is not proven, because the versions may prove differently.
pub fn version_notice() -> Message {
    let code = RejectReason::WrongVersion.code().to_le_bytes();
    Message::new(Type::Reject, &[&code, &[0; 32]])
}
