//! Which host is this? A hint only: whether two ranks really share memory is
//! decided by trying.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use crate::{Error, Result};

/// What a rank says about where it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// Kernel and network name space: a loopback address is meaningful among
    /// ranks with the same one. Empty when unknown.
    pub(crate) machine: String,
    /// Ranks with the same hint try shared memory. Empty: never.
    pub(crate) hint: String,
}

impl Host {
    /// Reads it from the kernel. Abstract Unix sockets live in the network
    /// name space, and memory is only shared within one user.
    pub(crate) fn here() -> Host {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let space = std::fs::read_link("/proc/self/ns/net");
        let (Ok(boot), Ok(space)) = (boot, space) else {
            return Host {
                machine: String::new(),
                hint: String::new(),
            };
        };
        // "net:[4026531840]": the inode in brackets.
        let inode: String = space
            .to_string_lossy()
            .chars()
            .filter(char::is_ascii_digit)
            .collect();
        let machine = format!("{}/{inode}", boot.trim());
        let user = rustix::process::geteuid().as_raw();
        Host {
            hint: format!("{machine}/{user}"),
            machine,
        }
    }

    /// Ranks with the same one (unless empty) run on the same cores.
    pub(crate) fn kernel(&self) -> &str {
        self.machine.split('/').next().unwrap_or_default()
    }
}

/// Where a rank listens for its peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BindAddr {
    /// 127.0.0.1: all ranks are on one host.
    #[default]
    Loopback,
    /// This address of this host.
    Ip(IpAddr),
    /// The address from which this host would talk to the given one, usually
    /// that of the store.
    Auto(SocketAddr),
}

impl BindAddr {
    /// The address to listen on and to publish.
    pub(crate) fn resolve(self) -> Result<IpAddr> {
        match self {
            BindAddr::Loopback => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            BindAddr::Ip(ip) if ip.is_unspecified() => Err(Error::usage(format!(
                "cannot listen on {ip}: it would open the group to every network of this host; \
                 give the address of one interface"
            ))),
            BindAddr::Ip(ip) => Ok(ip),
            BindAddr::Auto(towards) => local_address_towards(towards),
        }
    }
}

/// The address of this host from which the kernel would send to `target`.
/// Nothing is sent.
///
/// # Errors
///
/// `Usage` when there is no route to `target`.
pub fn local_address_towards(target: SocketAddr) -> Result<IpAddr> {
    // Connecting a datagram socket only looks the route up. Port 0 is refused
    // by some kernels, and the port does not matter.
    let any: IpAddr = if target.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        std::net::Ipv6Addr::UNSPECIFIED.into()
    };
    let target = SocketAddr::new(
        target.ip(),
        if target.port() == 0 { 9 } else { target.port() },
    );
    UdpSocket::bind((any, 0))
        .and_then(|socket| {
            socket.connect(target)?;
            socket.local_addr()
        })
        .map(|address| address.ip())
        .map_err(|e| {
            Error::usage(format!(
                "this host has no route to {}: {e}; give the address to listen on",
                target.ip()
            ))
            .with_source(e)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_is_stable_and_names_the_user() {
        let host = Host::here();
        assert_eq!(host, Host::here());
        assert!(host.hint.starts_with(&host.machine));
        assert!(!host.machine.is_empty());
    }

    #[test]
    fn loopback_is_reached_from_loopback() {
        let target: SocketAddr = "127.0.0.1:80".parse().unwrap();
        let ip = BindAddr::Auto(target).resolve().unwrap();
        assert!(ip.is_loopback(), "{ip}");
    }

    #[test]
    fn all_interfaces_are_refused() {
        let e = BindAddr::Ip("0.0.0.0".parse().unwrap())
            .resolve()
            .unwrap_err();
        assert_eq!(e.kind(), crate::ErrorKind::Usage);
    }
}
