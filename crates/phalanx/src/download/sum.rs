//! Whether a file is the published one.

use std::io::{BufReader, Read};
use std::path::Path;

use md5::Md5;
use phalanx_data::files::open_regular;
use sha2::{Digest, Sha256};

use super::sets::Sum;

impl Sum {
    /// What it is called, and its digits.
    pub(super) fn shown(self) -> String {
        match self {
            Sum::Sha256(digits) => format!("SHA-256 {}…", &digits[..16.min(digits.len())]),
            Sum::Md5(digits) => format!("MD5 {digits}"),
        }
    }
}

/// `Ok(None)` if the file at `path` has that sum, else the sum that it has.
pub(super) fn differs(path: &Path, sum: Sum) -> std::io::Result<Option<String>> {
    let (digits, wanted, name) = match sum {
        Sum::Sha256(wanted) => (digest::<Sha256>(path)?, wanted, "SHA-256"),
        Sum::Md5(wanted) => (digest::<Md5>(path)?, wanted, "MD5"),
    };
    let shown = match name {
        "MD5" => format!("{name} {digits}"),
        _ => format!("{name} {}…", &digits[..16]),
    };
    Ok((digits != wanted).then_some(shown))
}

fn digest<D: Digest>(path: &Path) -> std::io::Result<String> {
    let mut file = BufReader::with_capacity(1 << 16, open_regular(path)?);
    let mut hash = D::new();
    let mut bytes = vec![0; 1 << 16];
    loop {
        match file.read(&mut bytes)? {
            0 => return Ok(hex::encode(hash.finalize())),
            count => hash.update(&bytes[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_known_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        // RFC 1321 A.5 and FIPS 180-2 B.1.
        let md5 = Sum::Md5("900150983cd24fb0d6963f7d28e17f72");
        assert_eq!(differs(&path, md5).unwrap(), None);
        let sha256 =
            Sum::Sha256("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(differs(&path, sha256).unwrap(), None);
        std::fs::write(&path, "abd").unwrap();
        assert!(
            differs(&path, md5)
                .unwrap()
                .unwrap()
                .starts_with("MD5 4911e516")
        );
        assert!(
            differs(&path, sha256)
                .unwrap()
                .unwrap()
                .starts_with("SHA-256 a52d159f")
        );
    }
}
