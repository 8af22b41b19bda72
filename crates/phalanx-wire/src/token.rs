//! The secret of one job.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{Error, ErrorKind, Result};

/// 256 random bits that only the members of one job share.
///
/// The launcher creates it and passes it on by a private file, never on a command
/// line. It is never logged (`Debug` does not show it) and never sent: the
/// [handshake](crate::handshake) proves that both sides have it.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// A new token from the operating system's random source.
    ///
    /// # Errors
    /// [`ErrorKind::Random`] when that source fails.
    pub fn generate() -> Result<Token> {
        Ok(Token(random_bytes()?))
    }

    /// Parses the 64 hexadecimal digits of [`to_hex`](Self::to_hex). White space
    /// around them is ignored.
    ///
    /// # Errors
    /// [`ErrorKind::BadTokenText`] for anything else. The message does not repeat
    /// the text, which may be part of a secret.
    pub fn from_hex(text: &str) -> Result<Token> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text.trim(), &mut bytes)
            .map_err(|_| Error::new(ErrorKind::BadTokenText))?;
        Ok(Token(bytes))
    }

    /// The token as 64 lower-case hexadecimal digits. This is the secret itself.
    pub fn to_hex(&self) -> String {
        hex::encode(self.0)
    }

    /// An identifier of the job that does not reveal the token: the first eight
    /// bytes of a keyed hash of a fixed text. It is used in
    /// [`Hello::job`](crate::handshake::Hello::job) and into logs.
    pub fn job_id(&self) -> u64 {
        let proof = self.mac(&[b"phalanx job id"]);
        let mut first = [0; 8];
        first.copy_from_slice(&proof[..8]);
        u64::from_le_bytes(first)
    }

    /// HMAC-SHA-256 of the concatenated parts.
    pub(crate) fn mac(&self, parts: &[&[u8]]) -> [u8; 32] {
        self.keyed(parts).finalize().into_bytes().into()
    }

    /// Compares a MAC in constant time. The error has this kind.
    pub(crate) fn check(&self, parts: &[&[u8]], mac: &[u8; 32], wrong: ErrorKind) -> Result<()> {
        let equal = self.keyed(parts).verify_slice(mac);
        equal.map_err(|_| Error::new(wrong))
    }

    /// Compares the first bytes of a MAC in constant time.
    pub(crate) fn mac_starts_with(&self, parts: &[&[u8]], claimed: &[u8]) -> bool {
        self.keyed(parts).verify_truncated_left(claimed).is_ok()
    }

    fn keyed(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC pads a short key with zeros to the block size. A whole block
        // allows the constructor that cannot fail.
        let mut block = [0; 64];
        block[..32].copy_from_slice(&self.0);
        let mut mac = Hmac::<Sha256>::new(&block.into());
        for part in parts {
            mac.update(part);
        }
        mac
    }
}

/// `N` bytes from the operating system's random source.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| {
        let code = e.raw_os_error().unwrap_or(-1);
        Error::with(ErrorKind::Random, code.unsigned_abs(), 0u8)
    })?;
    Ok(bytes)
}

impl PartialEq for Token {
    /// Compares in constant time.
    fn eq(&self, other: &Self) -> bool {
        let mut differing = 0u8;
        for (a, b) in self.0.iter().zip(&other.0) {
            differing |= std::hint::black_box(a ^ b);
        }
        std::hint::black_box(differing) == 0
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_no_bit() {
        let token = Token::from_hex(&"ab".repeat(32)).unwrap();
        assert_eq!(format!("{token:?}"), "Token(secret)");
    }

    #[test]
    fn hex_round_trip_and_equality() {
        let token = Token::generate().unwrap();
        let again = Token::from_hex(&format!(" {}\n", token.to_hex())).unwrap();
        assert_eq!(token, again);
        assert_eq!(token.job_id(), again.job_id());
        let other = Token::generate().unwrap();
        assert_ne!(token, other);
        assert_ne!(token.job_id(), other.job_id());
    }

    #[test]
    fn one_bit_makes_another_token() {
        let zero = Token([0; 32]);
        for bit in 0..256 {
            let mut bytes = [0; 32];
            bytes[bit / 8] = 1 << (bit % 8);
            assert_ne!(zero, Token(bytes));
        }
    }

    #[test]
    fn bad_token_text() {
        for text in ["", "ab", &"zz".repeat(32), &"ab".repeat(33), "é"] {
            let error = Token::from_hex(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BadTokenText);
            assert!(text.is_empty() || !error.to_string().contains(text));
        }
    }

    /// RFC 4231, test case 2: the key "Jefe" zero-padded to 32 bytes is the
    /// same HMAC key.
    #[test]
    fn mac_is_hmac_sha_256() {
        let mut key = [0; 32];
        key[..4].copy_from_slice(b"Jefe");
        let token = Token(key);
        let parts: [&[u8]; 2] = [b"what do ya want ", b"for nothing?"];
        let mac = token.mac(&parts);
        assert_eq!(
            hex::encode(mac),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        let check = |mac: &_| token.check(&parts, mac, ErrorKind::BadProof);
        assert!(check(&mac).is_ok());
        for bit in 0..256 {
            let mut wrong = mac;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(check(&wrong).is_err());
        }
    }
}
