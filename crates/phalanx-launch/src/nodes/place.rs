//! Where launchers meet: the store of node 0, and the way to it.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};

use phalanx_store::{ErrorKind as StoreKind, TcpServer};
use phalanx_wire::Token;

use crate::args::Meeting;
use crate::error::{Error, ErrorKind, Result};

/// Where the store listens, and how it is reached.
pub struct Place {
    /// On node 0, the store itself.
    pub server: Option<TcpServer>,
    /// What this launcher dials.
    pub dial: String,
    /// What the ranks of this node dial.
    pub store: String,
    /// The host of node 0, as its ranks and those of other nodes know it.
    pub master_addr: String,
    /// The address by which other nodes reach this one.
    pub bind: Option<IpAddr>,
    /// Something a person should know.
    pub warning: Option<String>,
}

/// Hosts the store of a launch on one node.
pub fn host_locally(bind: Option<IpAddr>, token: &Token) -> Result<Place> {
    let ip = bind.unwrap_or(IpAddr::from([127, 0, 0, 1]));
    let server = listen(&[SocketAddr::new(ip, 0)], token)?;
    let (dial, warning) = reachable(server.local_addr());
    Ok(Place {
        dial: dial.to_string(),
        store: dial.to_string(),
        master_addr: dial.ip().to_string(),
        bind: None,
        warning,
        server: Some(server),
    })
}

/// Hosts the store on node 0, or finds out how to reach it.
pub fn meeting_place(meeting: &Meeting, bind: Option<IpAddr>, token: &Token) -> Result<Place> {
    let named = if meeting.host.contains(':') {
        format!("[{}]:{}", meeting.host, meeting.port)
    } else {
        format!("{}:{}", meeting.host, meeting.port)
    };
    if meeting.node_rank > 0 {
        // A name that does not resolve yet may do so later, when the first
        // node's pod or container is up: connecting tries again and again.
        let bind = bind.or_else(|| route_to(&named));
        return Ok(Place {
            server: None,
            store: named.clone(),
            dial: named,
            master_addr: meeting.host.clone(),
            bind,
            warning: None,
        });
    }
    let addresses: Vec<SocketAddr> = match bind {
        Some(ip) => vec![SocketAddr::new(ip, meeting.port)],
        None => named
            .to_socket_addrs()
            .map_err(|error| {
                Error::usage(format!(
                    "--master-addr {} is not a known host",
                    meeting.host
                ))
                .caused_by(error)
            })?
            .collect(),
    };
    let server = listen(&addresses, token).map_err(|error| match bind {
        Some(_) => error,
        None => error.note(
            "fix",
            "choose another --master-port, or, if the name belongs to another address of this host, add --bind ADDR",
        ),
    })?;
    let (dial, mut warning) = reachable(server.local_addr());
    let literal = meeting.host.parse::<IpAddr>().is_ok() || meeting.host == "localhost";
    if warning.is_none() && dial.ip().is_loopback() && !literal {
        warning = Some(format!(
            "{} is {} on this host, which other hosts cannot reach; if there are any, add --bind ADDR",
            meeting.host,
            dial.ip()
        ));
    }
    Ok(Place {
        store: match bind {
            Some(_) => dial.to_string(),
            None => named,
        },
        dial: dial.to_string(),
        master_addr: match bind {
            Some(_) => dial.ip().to_string(),
            None => meeting.host.clone(),
        },
        bind: Some(server.local_addr().ip()).filter(|ip| !ip.is_unspecified()),
        warning,
        server: Some(server),
    })
}

/// The address to dial for one we listen on, with a warning for "all".
fn reachable(addr: SocketAddr) -> (SocketAddr, Option<String>) {
    if !addr.ip().is_unspecified() {
        return (addr, None);
    }
    let loopback = match addr {
        SocketAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
        SocketAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
    };
    let warning =
        format!("the store listens on all addresses ({addr}); --bind one of them to be stricter");
    (SocketAddr::new(loopback, addr.port()), Some(warning))
}

/// Listens on the first address that works.
fn listen(addresses: &[SocketAddr], token: &Token) -> Result<TcpServer> {
    let mut last = None;
    for addr in addresses {
        match TcpServer::bind(*addr, token.clone()) {
            Ok(server) => return Ok(server),
            Err(error) => last = Some((addr, error)),
        }
    }
    let Some((addr, error)) = last else {
        return Err(Error::usage("the master address has no address"));
    };
    let kind = match error.kind() {
        StoreKind::Internal => ErrorKind::System,
        _ => ErrorKind::Usage,
    };
    Err(Error::new(kind, format!("cannot listen on {addr}")).caused_by(error))
}

/// Our own address on the way to `named`. Nothing is sent.
fn route_to(named: &str) -> Option<IpAddr> {
    let to = named.to_socket_addrs().ok()?.next()?;
    let any: SocketAddr = if to.is_ipv4() {
        (IpAddr::from([0, 0, 0, 0]), 0).into()
    } else {
        (IpAddr::from([0u16; 8]), 0).into()
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_address_on_the_way_to_loopback() {
        assert_eq!(route_to("127.0.0.1:9"), Some(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(route_to("no such host:9"), None);
    }
}
