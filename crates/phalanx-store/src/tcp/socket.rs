//! Settings of sockets that the server and the clients share.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::{Error, ErrorKind, Result};

/// Connections that may wait to be accepted, where the system allows as many
/// (`net.core.somaxconn`): all ranks of a large job connect within the same
/// millisecond, and of those that find no place there the kernel tries again after
/// seconds.
const BACKLOG: i32 = 4096;

/// A silent connection is probed after this time...
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
/// ...this often...
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// ...and given up after so many probes without answer: a host that lost its
/// power sends no end of stream.
const KEEPALIVE_PROBES: u32 = 3;

/// Listens, or says which address is taken and what to do about it.
pub(super) fn listen(addr: SocketAddr) -> Result<TcpListener> {
    let attempt = || -> std::io::Result<TcpListener> {
        let socket = socket2::Socket::new(
            socket2::Domain::for_address(addr),
            socket2::Type::STREAM,
            Some(socket2::Protocol::TCP),
        )?;
        // Else a restarted job would wait a minute for the remains of the
        // last one. Two listeners at once stay impossible.
        socket.set_reuse_address(true)?;
        socket.bind(&addr.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    };
    attempt().map_err(|e| match e.kind() {
        std::io::ErrorKind::AddrInUse => Error::new(
            ErrorKind::AddressInUse,
            format!(
                "address {addr} is already in use: another job or a leftover process listens there; \
                 stop it (`ss -ltnp 'sport = :{port}'` shows it) or choose another port",
                port = addr.port()
            ),
        )
        .caused_by(e),
        std::io::ErrorKind::AddrNotAvailable => Error::new(
            ErrorKind::Usage,
            format!("{addr} is not an address of this host: start the store where the address is, or give one that `ip addr` lists here"),
        )
        .caused_by(e),
        std::io::ErrorKind::PermissionDenied => Error::new(
            ErrorKind::Usage,
            format!("not allowed to listen on {addr}: choose a port above 1023"),
        )
        .caused_by(e),
        _ => Error::io(format_args!("listening on {addr}"), e),
    })
}

/// Small messages at once, and dead hosts noticed.
pub(super) fn tune(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}
