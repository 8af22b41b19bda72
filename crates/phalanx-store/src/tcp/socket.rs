//! Socket options of server and clients.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use crate::{Error, ErrorKind, Result};

/// Length of the accept queue, as far as the system allows it
/// (`net.core.somaxconn`). All ranks of a large job connect within a millisecond,
/// and a connection that does not fit is retried by the kernel only after seconds.
const BACKLOG: i32 = 4096;

/// An idle connection is probed after this time...
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
/// ...this often...
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// ...and closed after this number of unanswered probes: a host that loses its power
/// does not close its connections.
const KEEPALIVE_PROBES: u32 = 3;

/// Listens on `addr`, one address of this host.
pub(super) fn listen(addr: SocketAddr) -> Result<TcpListener> {
    if addr.ip().is_unspecified() {
        let what = format!(
            "{addr} means all interfaces of this host: give the address that the other hosts know"
        );
        return Err(Error::new(ErrorKind::Usage, what));
    }
    let attempt = || -> std::io::Result<TcpListener> {
        let socket = socket2::Socket::new(
            socket2::Domain::for_address(addr),
            socket2::Type::STREAM,
            Some(socket2::Protocol::TCP),
        )?;
        // Otherwise a restarted job would wait a minute for connections of the
        // previous one. It does not allow two listeners at once.
        socket.set_reuse_address(true)?;
        socket.bind(&addr.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    };
    attempt().map_err(|e| match e.kind() {
        std::io::ErrorKind::AddrInUse => Error::new(
            ErrorKind::AddressInUse,
            format!(
                "address {addr} is already in use by another job or a leftover process; \
                 stop it (`ss -ltnp 'sport = :{port}'` shows it) or choose another port",
                port = addr.port()
            ),
        )
        .caused_by(e),
        std::io::ErrorKind::AddrNotAvailable => Error::new(
            ErrorKind::Usage,
            format!("{addr} is not an address of this host; start the store on the host with this address, or give one that `ip addr` lists here"),
        )
        .caused_by(e),
        std::io::ErrorKind::PermissionDenied => Error::new(
            ErrorKind::Usage,
            format!("not allowed to listen on {addr}; choose a port above 1023"),
        )
        .caused_by(e),
        _ => Error::io(format_args!("listening on {addr}"), e),
    })
}

/// Sends small messages at once, and lost ones again soon, and detects hosts that are gone.
pub(super) fn tune(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    // What was lost is sent again every 200 ms, not after twice the time before: heartbeats are here again soon after a
    // network that was down.
    let _ = sockopt::set_tcp_thin_linear_timeouts(stream, true);
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}
