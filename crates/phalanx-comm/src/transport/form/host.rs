//! Identifies the host. This is only a hint: whether two ranks really share memory is
//! decided by trying.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A rank's description of where it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

    /// The kernel: ranks with the same one (unless empty) run on the same cores.
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
        }
    }
}

/// Equal for processes that share a kernel and a network name space, for which a loopback address is the same. Empty when
/// unknown.
pub fn machine() -> String {
    Host::here().machine
}

/// Names of networks of containers and virtual machines on this host, which other hosts do not reach.
const VIRTUAL: [&str; 5] = ["docker", "br-", "virbr", "podman", "cni"];

/// The addresses at which other hosts may reach this one, IPv4 first; empty if the system does not list them.
pub fn host_addresses() -> Vec<IpAddr> {
    let mut all = if_addrs::get_if_addrs().unwrap_or_default();
    all.retain(|one| !one.is_loopback() && !one.is_link_local());
    all.sort_by_key(|one| {
        let is_virtual = VIRTUAL.iter().any(|start| one.name.starts_with(start));
        (is_virtual, one.ip().is_ipv6())
    });
    all.iter().map(if_addrs::Interface::ip).collect()
}

/// Whether `ip` is an address of this host: of one of its interfaces, loopback, or all of them (unspecified). `bind`
/// would not show this: it accepts any address if `net.ipv4.ip_nonlocal_bind` is set.
pub fn is_own_address(ip: IpAddr) -> bool {
    let all = || if_addrs::get_if_addrs().unwrap_or_default();
    ip.is_loopback() || ip.is_unspecified() || all().iter().any(|one| one.ip() == ip)
}

/// The address of this host from which the kernel would send to `target`. Nothing is sent.
pub fn local_address_towards(target: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

/// A warning if `name`, the first host's, resolves on this host to the loopback address `ip`, so that it means
/// only this host. `None` also for 127.0.0.1 and localhost, which are used when all ranks are on one host.
pub fn what_loopback_means(name: &str, ip: IpAddr) -> Option<String> {
    let is_meant = name.parse::<IpAddr>().is_ok() || name == "localhost";
    (ip.is_loopback() && !is_meant).then(|| {
        format!(
            "{name} is {ip} on this host (see /etc/hosts), an address that each host has for itself"
        )
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
    fn addresses_of_this_host_are_its_own() {
        for ip in host_addresses() {
            assert!(
                !ip.is_loopback() && UdpSocket::bind((ip, 0)).is_ok(),
                "{ip}"
            );
            assert!(is_own_address(ip), "{ip}");
        }
        for (ip, is_own) in [
            ("127.0.1.1", true),
            ("::1", true),
            ("0.0.0.0", true),
            ("192.0.2.1", false),
        ] {
            assert_eq!(is_own_address(ip.parse().unwrap()), is_own, "{ip}");
        }
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let target = SocketAddr::from(([127, 0, 0, 1], 80));
        assert_eq!(local_address_towards(target).unwrap(), loopback);
    }

    #[test]
    fn names_that_mean_this_host_only_are_explained() {
        let debian = IpAddr::from([127, 0, 1, 1]);
        assert!(what_loopback_means("node-a", debian).is_some());
        assert!(what_loopback_means("127.0.1.1", debian).is_none());
        assert!(what_loopback_means("localhost", Ipv4Addr::LOCALHOST.into()).is_none());
        assert!(what_loopback_means("node-a", [10, 0, 0, 1].into()).is_none());
    }

    #[test]
    fn all_interfaces_are_refused() {
        let e = BindAddr::Ip("0.0.0.0".parse().unwrap())
            .resolve()
            .unwrap_err();
        assert_eq!(e.kind(), crate::ErrorKind::Usage);
    }
}
