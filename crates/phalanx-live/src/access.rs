//! Who may read the page.
//!
//! * A request names this host: by an IP address, `localhost`, the typed host or the machine's
//!   name. Another name is one that somebody else has made to lead here (DNS rebinding).
//! * Pages of other sites are refused by their `Origin`.
//! * The request has the secret: in the link, then in a cookie. Other users of the host reach
//!   loopback too.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hyper::header::{COOKIE, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN};
use hyper::{Method, StatusCode, Uri};

/// The name of the secret in the link.
const KEY: &str = "key";

/// What a reader without the secret sees.
const NO_SECRET: &str = "403: this page needs the key in its link.

Open the whole link, with ?key=..., that was printed at the start, on standard error:

    live: http://HOST:PORT/?key=...

Behind a tunnel, replace HOST and PORT by those of the tunnel, and keep ?key=...
";

/// Why a request is refused.
pub(crate) type Refused = (StatusCode, &'static str);

/// The rules for one page.
#[derive(Debug)]
pub(crate) struct Access {
    /// Hex digits.
    secret: String,
    /// Names of this host, in lower case.
    names: Vec<String>,
    is_loopback: bool,
    port: u16,
}

/// A request that is allowed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Allowed {
    /// The cookie that takes the place of the secret in the link.
    pub cookie: Option<String>,
}

impl Access {
    /// Of a page on `ip` and `port`, which `host` was typed for, on the machine `machine`.
    pub fn new(secret: String, ip: IpAddr, port: u16, host: &str, machine: &str) -> Access {
        let names = [host, machine]
            .into_iter()
            .filter(|name| !name.is_empty() && name.parse::<IpAddr>().is_err());
        Access {
            secret,
            names: names.map(str::to_ascii_lowercase).collect(),
            is_loopback: ip.is_loopback(),
            port,
        }
    }

    /// Checks a request.
    pub fn check(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Allowed, Refused> {
        let host = only(headers, &HOST)?
            .ok_or((StatusCode::BAD_REQUEST, "The request has no Host header."))?;
        if !self.is_own(host) {
            return Err((
                StatusCode::MISDIRECTED_REQUEST,
                "This is not the host of the page. Use the link that was printed at the start.",
            ));
        }
        if let Some(origin) = only(headers, &ORIGIN)? {
            let own = origin.strip_prefix("http://");
            if own.is_none_or(|own| !own.eq_ignore_ascii_case(host)) {
                return Err((
                    StatusCode::FORBIDDEN,
                    "Pages of other sites may not read this.",
                ));
            }
        }
        if method != Method::GET && method != Method::HEAD {
            return Err((
                StatusCode::METHOD_NOT_ALLOWED,
                "The page is read-only: GET and HEAD only.",
            ));
        }
        let secret = &self.secret;
        // Cookies are shared by all ports of a host.
        let name = format!("phalanx-live-{}", self.port);
        let mut cookies = headers
            .get_all(COOKIE)
            .iter()
            .filter_map(|line| line.to_str().ok())
            .flat_map(|line| line.split(';'));
        let has_cookie = cookies.any(|pair| {
            let pair = pair.trim().split_once('=');
            pair.is_some_and(|(n, value)| n == name && is_equal(value, secret))
        });
        let mut query = uri.query().unwrap_or_default().split('&');
        let has_key = query.any(|pair| {
            let pair = pair.split_once('=');
            pair.is_some_and(|(n, value)| n == KEY && is_equal(value, secret))
        });
        match (has_cookie, has_key) {
            (true, _) => Ok(Allowed { cookie: None }),
            (false, true) => Ok(Allowed {
                cookie: Some(format!(
                    "{name}={secret}; Path=/; HttpOnly; SameSite=Strict"
                )),
            }),
            _ => Err((StatusCode::FORBIDDEN, NO_SECRET)),
        }
    }

    /// Whether a `Host` header names this machine.
    fn is_own(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => host,
        };
        let bare = name.strip_prefix('[').and_then(|n| n.strip_suffix(']'));
        let ip = match bare {
            Some(v6) => v6.parse::<Ipv6Addr>().map(IpAddr::V6).ok(),
            None => name.parse::<Ipv4Addr>().map(IpAddr::V4).ok(),
        };
        // No name has to be looked up for an address. By a tunnel, another machine's loopback
        // may lead here, under any port.
        if let Some(ip) = ip {
            return !self.is_loopback || ip.is_loopback();
        }
        let name = name.to_ascii_lowercase();
        let is_known = |own: &String| {
            let rest = name.strip_prefix(own.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        name == "localhost" || !self.is_loopback && self.names.iter().any(is_known)
    }
}

/// The only header of that name, if there is one.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Refused> {
    let mut all = headers.get_all(name).iter();
    let first = all.next().map(HeaderValue::to_str);
    match (first, all.next()) {
        (None, _) => Ok(None),
        (Some(Ok(text)), None) => Ok(Some(text)),
        _ => Err((StatusCode::BAD_REQUEST, "A header is broken or repeated.")),
    }
}

/// Compares in a time that does not depend on where they differ.
fn is_equal(a: &str, b: &str) -> bool {
    let differs = a
        .bytes()
        .zip(b.bytes())
        .fold(0, |all, (a, b)| all | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differs) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef0123456789abcdef";

    fn loopback() -> Access {
        Access::new(
            SECRET.into(),
            [127, 0, 0, 1].into(),
            8080,
            "127.0.0.1",
            "node1",
        )
    }

    fn open() -> Access {
        Access::new(SECRET.into(), [0, 0, 0, 0].into(), 8080, "0.0.0.0", "node1")
    }

    fn cookie() -> String {
        format!("phalanx-live-8080={SECRET}")
    }

    fn ask(access: &Access, uri: &str, headers: &[(&str, &str)]) -> Result<Option<String>, u16> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        let checked = access.check(&Method::GET, &uri.parse().unwrap(), &map);
        checked
            .map(|a| a.cookie)
            .map_err(|(status, _)| status.as_u16())
    }

    #[test]
    fn only_names_of_this_host_are_answered() {
        for host in [
            "127.0.0.1:8080",
            "127.0.0.1",
            "localhost:8080",
            "LOCALHOST:9000",
            "[::1]:8080",
            "127.8.8.8:1",
        ] {
            let headers = [("host", host), ("cookie", &*cookie())];
            assert_eq!(ask(&loopback(), "/", &headers), Ok(None), "{host}");
            // Other users of the host reach it too.
            assert_eq!(ask(&loopback(), "/", &headers[..1]), Err(403), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example:8080",
            "127.0.0.1.evil.example",
            "node1:8080",
            "192.0.2.1:8080",
            "0x7f000001",
            "[::1",
            "",
            "a@127.0.0.1:8080",
        ] {
            let headers = [("host", host), ("cookie", &*cookie())];
            assert_eq!(ask(&loopback(), "/", &headers), Err(421), "{host}");
        }
        let key = format!("/?key={SECRET}");
        for host in [
            "node1:8080",
            "NODE1.cluster.example:8080",
            "192.0.2.1:8080",
            "[2001:db8::1]:1",
        ] {
            assert!(ask(&open(), &key, &[("host", host)]).is_ok(), "{host}");
        }
        for host in ["evil.example:8080", "node10:8080", "xnode1:8080"] {
            assert_eq!(ask(&open(), &key, &[("host", host)]), Err(421), "{host}");
        }
        assert_eq!(ask(&loopback(), "/", &[]), Err(400));
        let twice = [("host", "localhost"), ("host", "localhost")];
        assert_eq!(ask(&loopback(), "/", &twice), Err(400));
    }

    #[test]
    fn other_sites_are_refused() {
        let from = |origin: &str| {
            ask(
                &loopback(),
                "/events",
                &[
                    ("host", "localhost:8080"),
                    ("origin", origin),
                    ("cookie", &cookie()),
                ],
            )
        };
        assert_eq!(from("http://localhost:8080"), Ok(None));
        for origin in [
            "http://localhost:8081",
            "https://localhost:8080",
            "http://evil.example",
            "null",
            "",
        ] {
            assert_eq!(from(origin), Err(403), "{origin}");
        }
    }

    #[test]
    fn the_secret_is_asked_for() {
        let host = ("host", "192.0.2.1:8080");
        let with = |uri: &str, cookie: &str| ask(&open(), uri, &[host, ("cookie", cookie)]);
        let cookie = cookie();
        assert_eq!(
            with(&format!("/?a=b&key={SECRET}"), ""),
            Ok(Some(format!("{cookie}; Path=/; HttpOnly; SameSite=Strict")))
        );
        assert_eq!(with("/events", &format!("x=y; {cookie}")), Ok(None));
        for (uri, cookie) in [
            ("/".to_owned(), String::new()),
            ("/?key=".to_owned(), String::new()),
            (format!("/?key={SECRET}0"), String::new()),
            (format!("/?key={}", &SECRET[1..]), String::new()),
            (format!("/?yek={SECRET}"), String::new()),
            (format!("/{SECRET}"), String::new()),
            ("/".to_owned(), format!("phalanx-live-8081={SECRET}")),
            (
                "/".to_owned(),
                format!("phalanx-live-8080={}1", &SECRET[1..]),
            ),
        ] {
            assert_eq!(with(&uri, &cookie), Err(403), "{uri} {cookie}");
        }
    }

    #[test]
    fn the_page_is_read_only() {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, "localhost".parse().unwrap());
        headers.insert(COOKIE, cookie().parse().unwrap());
        let uri = "/".parse().unwrap();
        for method in [
            Method::POST,
            Method::PUT,
            Method::DELETE,
            Method::OPTIONS,
            Method::CONNECT,
        ] {
            let refused = loopback().check(&method, &uri, &headers).unwrap_err();
            assert_eq!(refused.0.as_u16(), 405, "{method}");
        }
        assert!(loopback().check(&Method::HEAD, &uri, &headers).is_ok());
    }
}
