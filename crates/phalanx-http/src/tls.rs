//! TLS: root certificates.

use std::path::Path;
use std::sync::Arc;

use phalanx_base::error::{Error, Result};
use phalanx_base::files::read_regular;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

/// Limit for a file of root certificates; the usual ones have 230 kB.
const MAX_ROOTS_BYTES: u64 = 64 << 20;

/// Verifies certificates unless `insecure`, by the roots in a file that a variable names, or the built-in ones.
pub(crate) fn config(insecure: bool, file: Option<(&str, &Path)>) -> Result<TlsConfig> {
    let tls = TlsConfig::builder().disable_verification(insecure);
    let tls = match file {
        Some((variable, path)) => tls.root_certs(roots(variable, path)?),
        None => tls,
    };
    Ok(tls.build())
}

/// The certificates in a PEM file.
fn roots(variable: &str, path: &Path) -> Result<RootCerts> {
    let wrong = |e: String| {
        Error::usage(format!(
            "{variable} names {}, which is not a certificate file: {e}",
            path.display()
        ))
    };
    let text = read_regular(path, MAX_ROOTS_BYTES).map_err(|e| wrong(e.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&text) {
        if let PemItem::Certificate(certificate) = item.map_err(|e| wrong(e.to_string()))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        return Err(wrong("it has none".to_owned()));
    }
    Ok(RootCerts::Specific(Arc::new(certificates)))
}

#[cfg(test)]
mod tests {
    use phalanx_base::error::ErrorKind;

    use super::*;

    #[test]
    fn certificates_are_read_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("roots.pem");
        assert!(
            roots(crate::ROOTS, &path)
                .unwrap_err()
                .chain()
                .contains("SSL_CERT_FILE")
        );
        for text in [
            "no certificates here",
            "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n",
        ] {
            std::fs::write(&path, text).unwrap();
            let error = roots(crate::ROOTS, &path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{text}");
        }
        let pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        std::fs::write(&path, pem.repeat(2)).unwrap();
        let RootCerts::Specific(found) = roots(crate::ROOTS, &path).unwrap() else {
            panic!("not those of the file");
        };
        assert_eq!(found.len(), 2);
    }
}
