//! The HTTP client of downloads and trackers.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::time::Duration;

use phalanx_base::error::Result;
pub use ureq;
use ureq::Agent;

#[cfg(feature = "tls")]
mod tls;

/// The variable with a file of root certificates to trust instead of the built-in ones, as for
/// OpenSSL and curl.
pub const ROOTS: &str = "SSL_CERT_FILE";

/// An HTTP client. `silence` is the timeout for connecting, for the answer and for each read and
/// write; `insecure` takes any certificate of a server. Statuses of errors are answers.
///
/// # Errors
///
/// `Usage` if the file of root certificates cannot be read.
pub fn agent(silence: Duration, insecure: bool) -> Result<Agent> {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(silence))
        .timeout_recv_response(Some(silence))
        .timeout_per_read(Some(silence))
        .timeout_per_write(Some(silence))
        .user_agent(concat!("phalanx/", env!("CARGO_PKG_VERSION")));
    #[cfg(feature = "tls")]
    let config = config.tls_config(tls::config(insecure)?);
    #[cfg(not(feature = "tls"))]
    let _ = insecure;
    Ok(config.build().into())
}

/// Whether https works in this program.
///
/// # Errors
///
/// Why it does not: it was built without TLS.
pub fn check_tls() -> std::result::Result<(), &'static str> {
    match cfg!(feature = "tls") {
        true => Ok(()),
        false => {
            Err("this build has no https; build it with `cargo build --release --all-features`")
        }
    }
}
