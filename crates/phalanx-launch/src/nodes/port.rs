//! The port that is left to the ranks' program.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};

use crate::error::{Error, ErrorKind, Result};

/// A port of this host for the program's own meeting, at which PyTorch's rank 0
/// listens on all addresses. Until then, seconds later, nobody else comes upon it: a
/// socket of ours is bound to it, and the kernel hands out no port that one is bound to.
///
/// It does not listen and allows others to bind (`SO_REUSEADDR`), so whoever allows the
/// same and means this port gets it, as PyTorch's store and nearly all servers do.
pub struct PortForRanks {
    number: u16,
    _held: OwnedFd,
}

impl PortForRanks {
    /// Takes the `given` one, or any that is free.
    ///
    /// # Errors
    /// `Usage` when somebody has the given one.
    pub fn new(given: Option<u16>) -> Result<PortForRanks> {
        match given {
            None => hold(0).map_err(|error| {
                Error::new(ErrorKind::System, "no free port for MASTER_PORT").caused_by(error)
            }),
            Some(port) => can_listen(port).and_then(|()| hold(port)).map_err(|error| {
                Error::usage(format!("no program can listen on --master-port {port}"))
                    .caused_by(error)
                    .note(
                        "fix",
                        "leave --master-port out (a free port is taken then), or choose another",
                    )
            }),
        }
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

/// All addresses, on a host without IPv6 those of IPv4.
fn everywhere(port: u16) -> [SocketAddr; 2] {
    [
        (Ipv6Addr::UNSPECIFIED, port).into(),
        (Ipv4Addr::UNSPECIFIED, port).into(),
    ]
}

/// One who has bound it too would be noticed by listening only.
fn can_listen(port: u16) -> std::io::Result<()> {
    TcpListener::bind(everywhere(port).as_slice()).map(drop)
}

fn hold(port: u16) -> std::io::Result<PortForRanks> {
    let [v6, v4] = everywhere(port);
    Ok(hold_at(&v6).or_else(|_| hold_at(&v4))?)
}

fn hold_at(address: &SocketAddr) -> std::result::Result<PortForRanks, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, address)?;
    let bound = SocketAddr::try_from(getsockname(&socket)?)?;
    Ok(PortForRanks {
        number: bound.port(),
        _held: socket,
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn who_means_the_port_gets_it_and_nobody_else() {
        let port = PortForRanks::new(None).unwrap();
        let number = port.number();
        // As one does that asks for a port of its own, the kernel refuses it.
        let other = socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        );
        let other = other.unwrap();
        let loopback = SocketAddr::from(([127, 0, 0, 1], number));
        assert_eq!(bind(&other, &loopback), Err(Errno::ADDRINUSE));
        // The standard library's sets what PyTorch's does.
        let rank_0 = TcpListener::bind(("0.0.0.0", number)).unwrap();
        let _client = TcpStream::connect(loopback).unwrap();
        let _server = rank_0.accept().unwrap();
        // While it listens nobody else can.
        assert!(PortForRanks::new(Some(number)).is_err());
        drop(rank_0);
        // Nor is it in the way of a rank 0 that starts again.
        TcpListener::bind(("::", number)).unwrap();
    }
}
