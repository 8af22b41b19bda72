//! Where a page listens.

use std::fmt;
use std::net::{Ipv6Addr, TcpListener, ToSocketAddrs};
use std::str::FromStr;

use crate::{Error, Result};

/// The host where none is given.
const LOOPBACK: &str = "127.0.0.1";

/// Where a page listens: `PORT`, `HOST:PORT` or `[IPV6]:PORT`. Without a host only this machine
/// can open it. Port 0 is a free one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
}

impl Default for Address {
    /// A free port of 127.0.0.1.
    fn default() -> Address {
        Address {
            host: LOOPBACK.to_owned(),
            port: 0,
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Address, String> {
        let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let (host, port) = match text.rsplit_once(':') {
            None if is_digits(text) => (LOOPBACK, text),
            _ if text.ends_with(']') => return Err("expected a port at the end: [::1]:8080".into()),
            None => return Err("expected PORT, HOST:PORT or [IPV6]:PORT".to_owned()),
            Some((host, port)) => (host, port),
        };
        let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
            Some(Some(inner)) if inner.parse::<Ipv6Addr>().is_ok() => inner,
            Some(_) => return Err("expected an IPv6 address in the brackets".to_owned()),
            None if host.contains(':') => {
                return Err("write an IPv6 address in brackets: [::1]:8080".to_owned());
            }
            None => host,
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || ":-._".contains(c);
        if host.is_empty() || !host.chars().all(is_name) {
            return Err("expected a host name or an IP address before the port".to_owned());
        }
        if !is_digits(port) {
            return Err("expected a port (0 to 65535) at the end".to_owned());
        }
        Ok(Address {
            host: host.to_owned(),
            port: port
                .parse()
                .map_err(|_| "a port is at most 65535".to_owned())?,
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl Address {
    /// Whether `word`, which follows the flag on a command line, is meant as its address: a port,
    /// or something that ends with one.
    pub fn is_meant(word: &str) -> bool {
        let port = word.rsplit_once(':').map_or(word, |(_, port)| port);
        !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit())
    }

    /// The host as it was typed.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Listens there.
    ///
    /// # Errors
    ///
    /// `Usage`: the host is unknown or not this machine's, the port is in use or not allowed.
    pub fn listen(&self) -> Result<TcpListener> {
        let failed = |e: std::io::Error| {
            Error::usage(format!("the live page cannot listen on {self}"))
                .caused_by(e)
                .note(
                    "try",
                    "another port, or no address: a free port of 127.0.0.1",
                )
        };
        let found = (&*self.host, self.port).to_socket_addrs().map_err(failed)?;
        let found: Vec<_> = found.collect();
        let listener = TcpListener::bind(&*found).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(listener)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_ports_or_end_with_one() {
        for (text, host, port) in [
            ("8080", "127.0.0.1", 8080),
            ("0", "127.0.0.1", 0),
            ("localhost:80", "localhost", 80),
            ("0.0.0.0:6006", "0.0.0.0", 6006),
            ("node-1.cluster_a:1", "node-1.cluster_a", 1),
            ("[::1]:65535", "::1", 65535),
            ("[::]:0", "::", 0),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!((address.host(), address.port), (host, port), "{text}");
            assert!(Address::is_meant(text), "{text}");
        }
        for wrong in [
            "",
            ":",
            ":80",
            "host",
            "host:",
            "host:http",
            "host:-1",
            "host:+1",
            "65536",
            "host:99999",
            "::1:80",
            "[::1]",
            "[::1]80",
            "[::1:80",
            "[host]:80",
            "a b:80",
            "http://a:80",
            "a/b:80",
            "a%:80",
            "[fe80::1%eth0]:80",
        ] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
        for program in ["train.py", "./a", "python3", "", "host:", "a:b"] {
            assert!(!Address::is_meant(program), "{program}");
        }
        let shown = |text: &str| text.parse::<Address>().unwrap().to_string();
        assert_eq!(shown("[::1]:8"), "[::1]:8");
        assert_eq!(shown("8"), "127.0.0.1:8");
    }

    #[test]
    fn a_port_in_use_is_a_usage_error_that_names_it() {
        let taken = Address::default().listen().unwrap();
        let port = taken.local_addr().unwrap().port().to_string();
        let error = port.parse::<Address>().unwrap().listen().unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.chain().contains(&port), "{}", error.chain());
    }
}
