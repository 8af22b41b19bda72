//! Socket options of a connection between ranks.

use std::io::Result;
use std::net::TcpStream;
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
