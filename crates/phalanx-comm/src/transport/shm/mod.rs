//! Shared memory between the processes of one host.
//!
//! The lowest rank of a host makes the segment: a memfd, sealed against
//! growing and shrinking (a peer that truncated it would kill us with SIGBUS),
//! with no name in any file system. So no other process can take its name, nothing
//! stale is left behind, and the size of a container's `/dev/shm` does not matter. It
//! is passed over an abstract Unix socket, whose name is random and useless without the
//! job's token:
//!
//! | step | from | message | descriptors |
//! |---|---|---|---|
//! | 1 | both | check of the other's user id, handshake | – |
//! | 2 | member | its pid (4 bytes) | its own pidfd |
//! | 3 | host | nonce (32 bytes), number of seats taken, whether there are arenas | the segment, the arenas if there are any |
//! | 4 | host | for each 128 such seats: seat and pid of each | one pidfd per seat |
//!
//! A pidfd becomes readable when its process ends, whatever that process's parent and
//! pid namespace, and is not affected by reuse of the pid. It replaces the
//! end-of-stream, which memory does not have.

mod memory;
mod passing;

pub(super) use memory::{create, open, sealed_memfd, sealed_size};
#[cfg(any(test, fuzzing))]
pub(super) use passing::send;
pub(super) use passing::{connect, greet, hand_over, receive, receive_greeting};

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// A peer's process, watched while we wait.
pub(super) struct Watch {
    pub(super) rank: usize,
    pub(super) seat: usize,
    /// The pid in that process's own namespace.
    pub(super) pid: u32,
    pub(super) process: OwnedFd,
}

/// Refuses a Unix socket whose other end belongs to another user. The
/// handshake would refuse it too; this costs no thread.
pub(super) fn check_same_user(socket: &UnixStream) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    // `libc` rather than `rustix`: the kernel returns pid 0 for a process of another
    // pid namespace, which rustix's type cannot hold.
    let mut peer = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open for the duration of the call; `peer` and
    // `length` are live and `length` is the size of `peer`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let mine = rustix::process::geteuid().as_raw();
    if peer.uid != mine {
        return Err(std::io::Error::other(format!(
            "the other end belongs to user {}, not {mine}",
            peer.uid
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
