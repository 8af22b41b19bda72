//! Accepting connections of members while strangers connect too. Used for TCP and for the
//! Unix socket of a host.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use phalanx_store::auth::{self, Channel};
use phalanx_store::{Authenticated, Handshakes, Listener};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason, Role};

use crate::{Error, Result};

/// Length of the accept queue: all ranks connect at the same time.
const BACKLOG: i32 = 4096;
/// How often the caller is asked whether to wait longer.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// A socket of a rank.
pub(super) trait Socket: Channel + AsFd + Sized {
    /// Makes an accepted connection nonblocking.
    fn prepare(&self) -> std::io::Result<()>;
    fn set_blocking(&self) -> std::io::Result<()>;
}

impl Socket for TcpStream {
    fn prepare(&self) -> std::io::Result<()> {
        self.set_nonblocking(true)?;
        self.set_nodelay(true)
    }

    fn set_blocking(&self) -> std::io::Result<()> {
        self.set_nonblocking(false)
    }
}

impl Socket for UnixStream {
    fn prepare(&self) -> std::io::Result<()> {
        self.set_nonblocking(true)?;
        super::shm::check_same_user(self)
    }

    fn set_blocking(&self) -> std::io::Result<()> {
        self.set_nonblocking(false)
    }
}

/// The expected members, by rank and stream, and whether each has been admitted.
struct Guests {
    me: Hello,
    list: Vec<(usize, u16, bool)>,
}

impl Guests {
    /// Runs after the peer's proof, hence never for a stranger.
    fn decide(&mut self, peer: &Hello) -> Result<Hello, RejectReason> {
        self.me.check_same_group(peer)?;
        if peer.role != role_of(self.me.role, peer.stream) {
            return Err(RejectReason::WrongRole);
        }
        let list = &mut self.list;
        let rank = peer.rank as usize;
        if !list.iter().any(|(r, ..)| *r == rank) {
            return Err(RejectReason::WrongRank);
        }
        match list
            .iter_mut()
            .find(|(r, s, _)| (*r, *s) == (rank, peer.stream))
        {
            None => Err(RejectReason::WrongStream),
            Some((.., true)) => Err(RejectReason::DuplicateRank),
            Some((.., taken)) => {
                *taken = true;
                Ok(Hello {
                    role: peer.role,
                    stream: peer.stream,
                    ..self.me
                })
            }
        }
    }

    /// The handshake failed after the decision.
    fn forget(&mut self, peer: &Hello) {
        for (rank, stream, taken) in &mut self.list {
            if (*rank, *stream) == (peer.rank as usize, peer.stream) {
                *taken = false;
            }
        }
    }

    /// Welcomes or rejects a peer that has proven the token.
    fn judge<L: Listener>(
        &mut self,
        one: Authenticated<L::Stream>,
        handshakes: &Handshakes<L>,
    ) -> Option<Admitted<L::Stream>>
    where
        L::Stream: Socket,
    {
        let (mut socket, from) = (one.stream, one.peer.ip());
        let peer = *one.proven.peer();
        let mine = match self.decide(&peer) {
            Ok(mine) => mine,
            Err(reason) => {
                // It does not matter here whether it arrives.
                let _ = auth::send(&mut socket, &one.proven.reject(reason));
                let why = format_args!("refused a member (rank {}): {reason}", peer.rank);
                handshakes.warn(from, &why);
                return None;
            }
        };
        let welcome = one.proven.welcome(mine);
        let welcomed = auth::send(&mut socket, &welcome).map_err(|e| e.to_string());
        match welcomed.and_then(|()| socket.set_blocking().map_err(|e| e.to_string())) {
            Ok(()) => Some(Admitted {
                rank: peer.rank as usize,
                stream: peer.stream,
                socket,
            }),
            Err(e) => {
                self.forget(&peer);
                handshakes.warn(from, &e);
                None
            }
        }
    }
}

/// The role a peer takes for `stream` when the acceptor's is `mine`.
pub(super) fn role_of(mine: Role, stream: u16) -> Role {
    match (mine, stream) {
        (Role::SharedMemory, _) => Role::SharedMemory,
        (_, super::tcp::CONTROL) => Role::Control,
        _ => Role::Peer,
    }
}

/// One admitted member.
pub(super) struct Admitted<S> {
    pub(super) rank: usize,
    pub(super) stream: u16,
    pub(super) socket: S,
}

/// Makes the queue of a listening socket longer than the standard library does. Best
/// effort: a short queue costs time, not members.
pub(super) fn lengthen_backlog(listener: &impl AsFd) {
    if let Err(e) = rustix::net::listen(listener, BACKLOG) {
        tracing::debug!("listen: {e}");
    }
}

/// Admits the `expected` members (rank, stream). `me` is this side's hello. From time
/// to time `check` is called with the missing members; it returns false to give up on
/// them, or an error to end all.
///
/// Returns the members that came by `deadline`.
pub(super) fn admit<L: Listener>(
    listener: &L,
    me: Hello,
    token: &Token,
    expected: &[(usize, u16)],
    deadline: Instant,
    check: impl FnMut(&[(usize, u16)]) -> Result<bool>,
) -> Result<Vec<Admitted<L::Stream>>>
where
    L::Stream: Socket,
{
    if expected.is_empty() {
        return Ok(Vec::new());
    }
    let location = format!("rank {}", me.rank);
    let mut handshakes = Handshakes::new(listener, token.clone(), location, L::Stream::prepare);
    run(&mut handshakes, me, expected, deadline, check)
}

fn run<L: Listener>(
    handshakes: &mut Handshakes<L>,
    me: Hello,
    expected: &[(usize, u16)],
    deadline: Instant,
    mut check: impl FnMut(&[(usize, u16)]) -> Result<bool>,
) -> Result<Vec<Admitted<L::Stream>>>
where
    L::Stream: Socket,
{
    let list = expected.iter().map(|&(rank, stream)| (rank, stream, false));
    let mut guests = Guests {
        me,
        list: list.collect(),
    };
    let mut members: Vec<Admitted<L::Stream>> = Vec::new();
    let mut next_check = Instant::now() + CHECK_EVERY;
    while members.len() < expected.len() && Instant::now() < deadline {
        if Instant::now() >= next_check {
            let missing: Vec<_> = expected
                .iter()
                .copied()
                .filter(|&(r, s)| !members.iter().any(|m| (m.rank, m.stream) == (r, s)))
                .collect();
            if !check(&missing)? {
                break;
            }
            next_check = Instant::now() + CHECK_EVERY;
        }
        let proven = handshakes.wait(next_check.min(deadline));
        let proven = proven.map_err(|e| Error::io("accepting a connection", e))?;
        members.extend(
            proven
                .into_iter()
                .filter_map(|one| guests.judge(one, handshakes)),
        );
    }
    Ok(members)
}

#[cfg(test)]
#[path = "admit_tests.rs"]
mod tests;
