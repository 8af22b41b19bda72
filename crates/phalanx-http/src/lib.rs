//! The HTTP client of downloads and trackers.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::path::Path;
use std::time::Duration;

use phalanx_base::error::Result;
pub use ureq;
use ureq::Agent;

#[cfg(feature = "tls")]
mod tls;

/// The variable with a file of root certificates to trust instead of the built-in ones, as for
/// OpenSSL and curl.
pub const ROOTS: &str = "SSL_CERT_FILE";

/// An HTTP client that trusts the certificates that [`ROOTS`] names, or the built-in ones. `silence` is the timeout for connecting, for the answer and for each read and
/// write; `insecure` takes any certificate of a server. Statuses of errors are answers.
///
/// # Errors
///
/// `Usage` if the file of root certificates cannot be read.
pub fn agent(silence: Duration, insecure: bool) -> Result<Agent> {
    let named = std::env::var_os(ROOTS).filter(|path| !path.is_empty());
    let roots = named.as_ref().map(|path| (ROOTS, Path::new(path)));
    agent_trusting(silence, insecure, roots)
}

/// The same with a file of root certificates, and the variable that names it.
///
/// # Errors
///
/// As [`agent`].
pub fn agent_trusting(
    silence: Duration,
    insecure: bool,
    roots: Option<(&str, &Path)>,
) -> Result<Agent> {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(silence))
        .timeout_recv_response(Some(silence))
        .timeout_per_read(Some(silence))
        .timeout_per_write(Some(silence))
        .user_agent(concat!("phalanx/", env!("CARGO_PKG_VERSION")));
    #[cfg(feature = "tls")]
    let config = config.tls_config(tls::config(insecure, roots)?);
    #[cfg(not(feature = "tls"))]
    let _ = (insecure, roots);
    Ok(config.build().into())
}

/// ` through the proxy HOST:PORT`, if `agent` reaches `uri` through one, for errors; else nothing.
pub fn through_proxy(agent: &Agent, uri: &str) -> String {
    let config = agent.config();
    let proxy = config.proxy().filter(|proxy| {
        let uri = uri.parse();
        uri.is_ok_and(|uri| !proxy.is_no_proxy(&uri))
    });
    proxy.map_or_else(String::new, |proxy| {
        format!(" through the proxy {}:{}", proxy.host(), proxy.port())
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use ureq::{Proxy, ProxyProtocol};

    #[test]
    fn a_proxy_is_named_without_its_password() {
        let proxy = Proxy::builder(ProxyProtocol::Http).host("10.0.0.1");
        let proxy = proxy.port(3128).username("me").password("secret");
        let proxy = proxy.no_proxy("localhost").build().expect("a proxy");
        let config = Agent::config_builder().proxy(Some(proxy)).build();
        let agent = config.into();
        let name = |uri| through_proxy(&agent, uri);
        assert_eq!(name("http://a:5000"), " through the proxy 10.0.0.1:3128");
        assert_eq!(name("http://localhost:5000/x"), "");
        let agent = Agent::config_builder().proxy(None).build().into();
        assert_eq!(through_proxy(&agent, "http://a"), "");
    }
}
