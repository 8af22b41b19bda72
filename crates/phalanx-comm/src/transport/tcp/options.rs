//! Socket options of a connection between ranks.

use std::io::{Error, Result};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::net::sockopt;

/// Silence after which the kernel asks whether the peer is still there, and
/// the distance of its questions.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// Unanswered questions after which the connection is dead.
const KEEPALIVE_PROBES: u32 = 4;

/// Small frames at once, dead hosts soon, no blocking. Buffer sizes stay with
/// the kernel's autotuning, which measured as good or better.
///
/// A peer's *process* that dies is seen at once. Its *host*, if that loses
/// power, is found after about 25 s by the probes of the control connection,
/// which is always idle. A limit for unacknowledged data (`TCP_USER_TIMEOUT`)
/// would not find it sooner, and Linux applies it to closed windows too: a
/// rank that computes for longer than the limit while its peers send to it
/// would be cut off although its operation still has time.
pub(in super::super) fn prepare(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    stream.set_nonblocking(true)
}

/// Says how many bytes must have come before the kernel calls `stream` readable, as `SO_RCVLOWAT`; a window that
/// is full, or the end of the stream, always wakes.
pub(super) fn set_recv_low_water(stream: &TcpStream, bytes: usize) -> Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    // SAFETY: the descriptor is open, and the option's value is read from an integer of the length given.
    let failed = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const bytes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    match failed {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_computes_is_not_cut_off_and_a_dead_host_is() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        prepare(&stream).unwrap();
        // Zero: the kernel never gives up a window that stays closed.
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 0);
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let found_after = sockopt::tcp_keepidle(&stream).unwrap()
            + sockopt::tcp_keepintvl(&stream).unwrap() * sockopt::tcp_keepcnt(&stream).unwrap();
        assert!(found_after <= Duration::from_secs(30), "{found_after:?}");
    }
}
