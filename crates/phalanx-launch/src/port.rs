//! The port that is left to the ranks' program.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use phalanx_comm::PortRange;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};

use crate::error::{Error, Result};
use crate::system;

/// A port of this host for the program's own meeting, at which PyTorch's rank 0
/// listens on all addresses. Until then, seconds later, no other program gets it: a
/// socket of ours is bound to it, and the kernel hands out no port that one is bound to.
///
/// It does not listen and allows others to bind (`SO_REUSEADDR`), so a program that allows the
/// same and means this port gets it, as PyTorch's store and nearly all servers do.
pub struct PortForRanks {
    number: u16,
    _held: OwnedFd,
}

impl PortForRanks {
    /// Takes the `given` one, or any that is free, in `range` the highest.
    ///
    /// # Errors
    /// `Usage` when somebody has the given one, or all of the range.
    pub fn new(given: Option<u16>, range: Option<PortRange>) -> Result<PortForRanks> {
        if let (None, Some(range)) = (given, range) {
            let mut ports = (range.first()..=range.last()).rev();
            let held = ports.find_map(|port| can_listen(port).and_then(|()| hold(port)).ok());
            return held.ok_or_else(|| {
                Error::usage(format!(
                    "no port of --port-range {range} is free for MASTER_PORT"
                ))
            });
        }
        match given {
            None => hold(0).map_err(system("no free port for MASTER_PORT")),
            Some(port) => can_listen(port).and_then(|()| hold(port)).map_err(|error| {
                Error::usage(format!("cannot listen on --master-port {port}"))
                    .caused_by(error)
                    .note(
                        "fix",
                        "leave --master-port out to use a free port, or choose another",
                    )
            }),
        }
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

/// Most ports that a message names.
const SHOWN: usize = 8;

/// Checks that a node with `local_ranks` ranks finds a free port of `range` for everything that other hosts connect to.
/// Node 0 needs two more, one of which is `store`, where its store listens already; another one needs one more where the
/// store `moves`.
///
/// # Errors
/// `Usage`, with the number of ports that are needed and those that are in use.
pub fn check_range(
    range: PortRange,
    node: usize,
    local_ranks: usize,
    store: Option<u16>,
    moves: bool,
) -> Result<()> {
    let is_first = node == 0;
    let needed = local_ranks + if is_first { 2 } else { usize::from(moves) };
    let (mut free, mut taken) = (0, Vec::new());
    for port in range.first()..=range.last() {
        if free == needed {
            return Ok(());
        }
        match store == Some(port) || can_listen(port).is_ok() {
            true => free += 1,
            false => taken.push(port.to_string()),
        }
    }
    if free == needed {
        return Ok(());
    }
    let why = match is_first {
        true => "1 for the store, 1 for MASTER_PORT and 1 for each of its ranks",
        false if moves => "1 for the store, should it move, and 1 for each of its ranks",
        false => "1 for each of its ranks",
    };
    let error = Error::usage(format!(
        "--port-range {range} is too narrow: node {node} needs {needed} free ports ({why}), and {free} of {} are free",
        range.count()
    ));
    let more = taken.len().saturating_sub(SHOWN);
    taken.truncate(SHOWN);
    if more > 0 {
        taken.push(format!("{more} more"));
    }
    Err(match taken.is_empty() {
        true => error,
        false => error.note("in use", taken.join(", ")),
    })
}

/// All addresses, on a host without IPv6 those of IPv4.
fn everywhere(port: u16) -> [SocketAddr; 2] {
    [
        (Ipv6Addr::UNSPECIFIED, port).into(),
        (Ipv4Addr::UNSPECIFIED, port).into(),
    ]
}

/// Another program that has bound it too would be noticed by listening only.
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
        let port = PortForRanks::new(None, None).unwrap();
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
        // While it listens no other program can.
        assert!(PortForRanks::new(Some(number), None).is_err());
        let range = PortRange::new(number, number).unwrap();
        assert!(PortForRanks::new(None, Some(range)).is_err());
        drop(rank_0);
        // Nor is it in the way of a rank 0 that starts again.
        TcpListener::bind(("::", number)).unwrap();
    }

    #[test]
    fn a_range_without_room_says_how_many_ports_are_needed() {
        let used = TcpListener::bind(("0.0.0.0", 0)).unwrap();
        let number = used.local_addr().unwrap().port();
        let range = PortRange::new(number, number).unwrap();
        // Where the store itself listens there.
        let error = check_range(range, 0, 4, Some(number), false)
            .unwrap_err()
            .render();
        assert!(error.contains("node 0 needs 6 free ports"), "{error}");
        assert!(error.contains("1 of 1 are free"), "{error}");
        let error = check_range(range, 1, 1, None, false).unwrap_err().render();
        assert!(error.contains("node 1 needs 1 free ports"), "{error}");
        let moves = check_range(range, 1, 1, None, true).unwrap_err().render();
        assert!(moves.contains("node 1 needs 2 free ports"), "{moves}");
        assert!(error.contains(&number.to_string()), "{error}");
        assert!(check_range(PortRange::new(1, 65535).unwrap(), 0, 8, None, true).is_ok());
    }
}
