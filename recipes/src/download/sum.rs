//! Checksums of files.

use std::io::{BufReader, Read};
use std::path::Path;

use md5::Md5;
use phalanx_base::files::open_regular;
use sha2::{Digest, Sha256};

use super::sets::Sum;

impl Sum {
    /// Its name and its digits, for messages.
    pub(super) fn shown(self) -> String {
        match self {
            Sum::Sha256(digits) => show("SHA-256", digits),
            Sum::Md5(digits) => show("MD5", digits),
        }
    }
}

fn show(name: &str, digits: &str) -> String {
    match digits.get(..16) {
        Some(start) if digits.len() > 32 => format!("{name} {start}…"),
        _ => format!("{name} {digits}"),
    }
}

/// `Ok(None)` if the file at `path` has this checksum, else the one that it has.
pub(super) fn differs(path: &Path, sum: Sum) -> std::io::Result<Option<String>> {
    let (digits, wanted, name) = match sum {
        Sum::Sha256(wanted) => (digest::<Sha256>(path)?, wanted, "SHA-256"),
        Sum::Md5(wanted) => (digest::<Md5>(path)?, wanted, "MD5"),
    };
    Ok((digits != wanted).then(|| show(name, &digits)))
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
