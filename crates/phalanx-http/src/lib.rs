//! The HTTP client of downloads and trackers.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use phalanx_data::files::read_regular;
use phalanx_process::error::{Error, Result};
pub use ureq;
use ureq::Agent;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

/// The variable with a file of root certificates to trust instead of the built-in ones, as for
/// OpenSSL and curl.
pub const ROOTS: &str = "SSL_CERT_FILE";

/// Limit for a file of root certificates; the usual ones have 230 kB.
const MAX_ROOTS_BYTES: u64 = 64 << 20;

/// An HTTP client. `silence` is the timeout for connecting, for the answer and for each read and
/// write; `insecure` takes any certificate of a server. Statuses of errors are answers.
///
/// # Errors
///
/// `Usage` if the file of root certificates cannot be read.
pub fn agent(silence: Duration, insecure: bool) -> Result<Agent> {
    let mut config = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(silence))
        .timeout_recv_response(Some(silence))
        .timeout_per_read(Some(silence))
        .timeout_per_write(Some(silence))
        .user_agent(concat!("phalanx/", env!("CARGO_PKG_VERSION")));
    if has_tls() {
        let tls = TlsConfig::builder()
            .disable_verification(insecure)
            .unversioned_rustls_crypto_provider(Arc::new(rustls_graviola::default_provider()));
        let tls = match std::env::var_os(ROOTS).filter(|path| !path.is_empty()) {
            Some(path) => tls.root_certs(roots(Path::new(&path))?),
            None => tls,
        };
        config = config.tls_config(tls.build());
    }
    Ok(config.build().into())
}

/// The certificates in a PEM file.
fn roots(path: &Path) -> Result<RootCerts> {
    let wrong = |e: String| {
        Error::usage(format!(
            "{ROOTS} names {}, which is not a certificate file: {e}",
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

/// Why https does not work where [`has_tls`] is false, for messages.
pub const NO_TLS: &str = "https needs a processor with AVX2 and ADX (Intel since Broadwell, AMD since Zen), or a 64-bit ARM with AES; this one, or its virtual machine, has less";

/// Whether this processor has the instructions that the TLS library needs.
pub fn has_tls() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = std::arch::is_x86_feature_detected!("aes")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
        && std::arch::is_x86_feature_detected!("bmi1")
        && std::arch::is_x86_feature_detected!("adx")
        && std::arch::is_x86_feature_detected!("avx2");
    #[cfg(target_arch = "aarch64")]
    let has = std::arch::is_aarch64_feature_detected!("aes")
        && std::arch::is_aarch64_feature_detected!("pmull")
        && std::arch::is_aarch64_feature_detected!("sha2");
    has
}

#[cfg(test)]
mod tests {
    use phalanx_process::error::ErrorKind;

    use super::*;

    #[test]
    fn certificates_are_read_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("roots.pem");
        assert!(roots(&path).unwrap_err().chain().contains("SSL_CERT_FILE"));
        for text in [
            "no certificates here",
            "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n",
        ] {
            std::fs::write(&path, text).unwrap();
            let error = roots(&path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{text}");
        }
        let pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        std::fs::write(&path, pem.repeat(2)).unwrap();
        let RootCerts::Specific(found) = roots(&path).unwrap() else {
            panic!("not those of the file");
        };
        assert_eq!(found.len(), 2);
    }
}
