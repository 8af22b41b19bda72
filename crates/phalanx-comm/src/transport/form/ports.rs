//! The ports on which ranks may listen for other hosts.

use std::fmt;
use std::io::ErrorKind as IoKind;
use std::net::{IpAddr, TcpListener};
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// How long all ports may be in use: other ranks of this host free theirs when their groups have formed.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause after all ports were in use.
const PAUSE: Duration = Duration::from_millis(20);
/// Most ports that a message names.
const SHOWN: usize = 8;

/// Ports `FIRST-LAST`, both included, on which a host may be reached through a firewall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// The ports from `first` to `last`.
    ///
    /// # Errors
    ///
    /// `Usage` when `first` is 0 or above `last`.
    pub fn new(first: u16, last: u16) -> Result<PortRange> {
        if first == 0 || first > last {
            return Err(Error::usage(format!(
                "{first}-{last} is not a range of ports: write FIRST-LAST, from 1 to 65535, the smaller one first"
            )));
        }
        Ok(PortRange { first, last })
    }

    /// The lowest port.
    pub fn first(self) -> u16 {
        self.first
    }

    /// The highest port.
    pub fn last(self) -> u16 {
        self.last
    }

    /// How many ports it has.
    pub fn count(self) -> usize {
        usize::from(self.last - self.first) + 1
    }

    /// Whether `port` is one of them.
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for PortRange {
    type Err = Error;

    fn from_str(text: &str) -> Result<PortRange> {
        let ends = text.split_once('-').and_then(|(first, last)| {
            Some((first.trim().parse().ok()?, last.trim().parse().ok()?))
        });
        let (first, last) = ends.ok_or_else(|| {
            Error::usage(format!(
                "{text:?} is not a range of ports: write FIRST-LAST, as in 20000-20031"
            ))
        })?;
        PortRange::new(first, last)
    }
}

/// Listens on a port of `ports`. The search begins at the port of `rank`, so that ranks of one host
/// rarely try the same one; one that is in use is skipped.
pub(super) fn listen_within(ip: IpAddr, ports: PortRange, rank: usize) -> Result<TcpListener> {
    let until = Instant::now() + PATIENCE;
    let count = ports.count();
    loop {
        let mut taken = Vec::new();
        for step in 0..count {
            // Below 65536, as the last port is.
            let port = ports.first + ((rank + step) % count) as u16;
            match TcpListener::bind((ip, port)) {
                Ok(listener) => return Ok(listener),
                Err(e) if e.kind() == IoKind::AddrInUse => taken.push(port),
                Err(e) => {
                    return Err(Error::io(
                        format_args!(
                            "cannot listen on {ip}, port {port} (is it an address of this host?)"
                        ),
                        e,
                    ));
                }
            }
        }
        if Instant::now() >= until {
            return Err(too_narrow(ip, ports, taken));
        }
        std::thread::sleep(PAUSE);
    }
}

fn too_narrow(ip: IpAddr, ports: PortRange, mut taken: Vec<u16>) -> Error {
    taken.sort_unstable();
    let mut shown: Vec<String> = taken.iter().take(SHOWN).map(u16::to_string).collect();
    if taken.len() > SHOWN {
        shown.push(format!("{} more", taken.len() - SHOWN));
    }
    Error::usage(format!(
        "no port of --port-range {ports} is free on {ip} (in use: {}); a host needs one port for each of its ranks, \
         and that of rank 0 two more, for the store and MASTER_PORT: give a wider range",
        shown.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::ErrorKind;

    #[test]
    fn ranges_are_read_and_checked() {
        let range: PortRange = "20000-20031".parse().unwrap();
        assert_eq!(
            (range.first(), range.last(), range.count()),
            (20000, 20031, 32)
        );
        assert!(range.contains(20031) && !range.contains(20032));
        assert_eq!(range.to_string(), "20000-20031");
        assert_eq!("1-65535".parse::<PortRange>().unwrap().count(), 65535);
        for wrong in ["", "20000", "0-10", "20-10", "1-65536", "a-b", "1-2-3"] {
            let error = wrong.parse::<PortRange>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{wrong}");
        }
    }

    /// `count` neighbouring ports that are free now.
    fn free_ports(count: u16) -> PortRange {
        loop {
            let any = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let first = any.local_addr().unwrap().port();
            drop(any);
            let Some(last) = first.checked_add(count - 1) else {
                continue;
            };
            let all: Result<Vec<_>, _> = (first..=last)
                .map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)))
                .collect();
            if all.is_ok() {
                return PortRange::new(first, last).unwrap();
            }
        }
    }

    /// Threads that choose at once, all from the same start, get a port each; one more gets an error.
    #[test]
    fn ranks_that_choose_at_once_get_one_port_each() {
        const RANKS: u16 = 8;
        let ip = IpAddr::from(Ipv4Addr::LOCALHOST);
        let ports = free_ports(RANKS);
        let start = std::sync::Barrier::new(usize::from(RANKS));
        let listeners: Vec<TcpListener> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..RANKS)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        listen_within(ip, ports, 5).unwrap()
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let mut got: Vec<u16> = listeners
            .iter()
            .map(|listener| listener.local_addr().unwrap().port())
            .collect();
        got.sort_unstable();
        let all: Vec<u16> = (ports.first()..=ports.last()).collect();
        assert_eq!(got, all);
        let error = listen_within(ip, ports, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        let taken = format!("(in use: {}, ", ports.first());
        assert!(error.message().contains(&taken), "{error}");
        // A port that was freed is found.
        drop(listeners);
        assert!(listen_within(ip, ports, 3).is_ok());
    }
}
