//! The address by which the other hosts of a job reach this one.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};

use phalanx_comm::transport::{host_addresses, is_own_address, local_address_towards};

/// An address of a documentation network, to which the default route leads. Nothing is sent.
const SOMEWHERE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);

/// `bind`; else the address of the first of `names` or of the host name, if it is one of this host's and
/// not loopback; else the one on the default route; else the first one of a network; else loopback.
pub fn own(bind: Option<IpAddr>, names: &[String]) -> IpAddr {
    if let Some(ip) = bind.filter(|ip| !ip.is_unspecified()) {
        return ip;
    }
    let host_name = phalanx_base::host_name();
    let by_name = names.iter().chain([&host_name]).find_map(|name| {
        let found = (name.as_str(), 0).to_socket_addrs().ok()?;
        let mut found: Vec<IpAddr> = found
            .map(|address| address.ip())
            .filter(is_reachable)
            .collect();
        found.sort_by_key(IpAddr::is_ipv6);
        found.into_iter().next()
    });
    let on_the_default_route = || {
        local_address_towards(SOMEWHERE.into())
            .ok()
            .filter(is_reachable)
    };
    by_name
        .or_else(on_the_default_route)
        .or_else(|| host_addresses().into_iter().find(is_reachable))
        .unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// Whether it is an address of this host that others may reach.
fn is_reachable(ip: &IpAddr) -> bool {
    let is_local = match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local() || ip.is_unspecified(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified(),
    };
    !is_local && is_own_address(*ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bind_decides_and_names_of_loopback_or_of_other_hosts_do_not_count() {
        let ip: IpAddr = "127.0.0.5".parse().unwrap();
        assert_eq!(own(Some(ip), &[]), ip);
        let any: IpAddr = "0.0.0.0".parse().unwrap();
        let names = ["localhost", "192.0.2.7", "no such name"].map(str::to_owned);
        let found = own(Some(any), &names);
        assert_eq!(found, own(None, &[]));
        // A host without a network has loopback only.
        assert!(is_reachable(&found) || found.is_loopback());
        assert!(!is_reachable(&"192.0.2.7".parse().unwrap()));
    }
}
