//! Socket options of a connection between ranks.

use std::io::{Error, Result};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::net::sockopt;

/// Unanswered probes before the kernel itself ends a connection: the maximum. `liveness` decides which
/// hosts are gone.
const KEEPALIVE_PROBES: u32 = 127;

/// Sends small frames at once, and does not block. Buffer sizes are left to the kernel's
/// autotuning, which measured as good or better.
///
/// Nothing here ends a connection whose peer is silent. A limit for unacknowledged data
/// (`TCP_USER_TIMEOUT`) would end those to ranks that compute: Linux applies it to closed windows
/// too.
pub(in super::super) fn prepare(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

/// Lets the kernel probe an idle connection after `idle` and then at each `interval`, in whole seconds.
pub(super) fn keep_alive(stream: &TcpStream, idle: Duration, interval: Duration) -> Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, interval)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    Ok(())
}

/// Probes that the kernel has sent since the peer's last answer.
pub(super) fn unanswered_probes(stream: &impl AsFd) -> Result<u32> {
    // SAFETY: plain integers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open for the duration of the call; `info` and `length` are live and
    // `length` is the size of `info`.
    let failed = unsafe {
        libc::getsockopt(
            stream.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    match failed {
        0 => Ok(u32::from(info.tcpi_probes)),
        _ => Err(Error::last_os_error()),
    }
}

/// Sets how many bytes must arrive before the kernel reports `stream` readable (`SO_RCVLOWAT`); a full window,
/// or the end of the stream, always wakes.
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
