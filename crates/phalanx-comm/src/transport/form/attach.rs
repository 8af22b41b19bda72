//! Shared memory among the ranks of one host, by trying it.
//!
//! | key | written by | value |
//! |---|---|---|
//! | `host/R` | the host, rank R | `at NAME` of the Unix socket, or `no REASON` |
//! | `seat/R` | every rank of the host | `ok`, `ok without arenas`, or `no REASON` |
//!
//! A pair uses shared memory only when both say `ok`. Arenas are used only when all
//! ranks have them.

use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use phalanx_store::{ErrorKind as StoreKind, auth};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason, Role};

use super::super::admit::{admit, lengthen_backlog};
use super::super::arenas::Arenas;
use super::super::layout::{Layout, MAX_LOCAL_RANKS, ring_capacity};
use super::super::segment::Segment;
use super::super::shm::{self, Watch};
use super::rendezvous::Rendezvous;
use crate::{Error, Result, limits};

/// Answers of a rank that shares the segment.
const OK: &str = "ok";
/// See [`OK`].
const OK_WITHOUT_ARENAS: &str = "ok without arenas";

/// Longest wait for a message that should come at once.
const PROMPT: Duration = Duration::from_secs(5);
/// Interval at which a member that waits for its host reads the store.
const SLICE: Duration = Duration::from_millis(100);
/// Rings are touched in advance when they are not larger than this, in total
/// per rank: first touch costs 0.5 ms per MiB, once, here or in the first
/// operation.
const POPULATE_BYTES: usize = 8 << 20;

/// Pause before another attempt at the host's socket.
const AGAIN: Duration = Duration::from_millis(20);

/// The result for this rank.
pub(crate) struct Attached {
    pub(crate) segment: Segment,
    /// The memory for buckets; all ranks have it, or none.
    pub(crate) arenas: Option<Arenas>,
    pub(crate) seat: usize,
    /// Peers reached through the segment: rank and seat.
    pub(crate) neighbours: Vec<(usize, usize)>,
    pub(crate) watches: Vec<Watch>,
}

/// The arguments of one attempt.
pub(crate) struct Attempt<'a> {
    pub(crate) meeting: &'a Rendezvous<'a>,
    pub(crate) me: Hello,
    pub(crate) token: &'a Token,
    /// The ranks with our hint, ascending, us included; the index is the seat.
    pub(crate) ranks: &'a [usize],
    pub(crate) ring_bytes: Option<usize>,
    pub(crate) arena_bytes: Option<usize>,
}

/// A rank without shared memory, and why.
pub(crate) type Reason = (usize, String);

/// What a host prepares before the members come.
struct Prepared {
    listener: UnixListener,
    memory: OwnedFd,
    segment: Segment,
    arenas: Option<(OwnedFd, Arenas)>,
    nonce: [u8; 32],
}

/// The outer error ends forming as a whole; the inner one is the reason why there is no
/// shared memory.
type Probe<T> = Result<std::result::Result<T, String>>;

/// Unwraps the inner result or returns its reason.
macro_rules! or_no {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(reason) => return Ok(Err(reason.to_string())),
        }
    };
}

impl Attempt<'_> {
    /// Tries, agrees with the others, and returns the memory and the reasons
    /// why some ranks are not in it.
    pub(crate) fn run(&self) -> Result<(Option<Attached>, Vec<Reason>)> {
        let rank = self.meeting.rank;
        let Some(seat) = self.ranks.iter().position(|&r| r == rank) else {
            return Err(Error::internal(format!(
                "rank {rank} is not on its own host"
            )));
        };
        let attached = if seat == 0 {
            self.host()?
        } else {
            self.join(seat)?
        };
        let mine = match &attached {
            Ok(attached) if attached.arenas.is_some() => OK.to_owned(),
            Ok(_) => OK_WITHOUT_ARENAS.to_owned(),
            Err(reason) => format!("no {reason}"),
        };
        self.meeting.publish("seat", mine.as_bytes())?;
        let others = self
            .meeting
            .collect("seat", self.ranks, "answer about shared memory")?;
        let mut reasons = Vec::new();
        for (&rank, answer) in self.ranks.iter().zip(&others) {
            if answer != OK.as_bytes() && answer != OK_WITHOUT_ARENAS.as_bytes() {
                let reason = String::from_utf8_lossy(answer);
                reasons.push((
                    rank,
                    reason.strip_prefix("no ").unwrap_or(&reason).to_owned(),
                ));
            }
        }
        let Ok(mut attached) = attached else {
            return Ok((None, reasons));
        };
        if others.iter().any(|answer| answer != OK.as_bytes()) {
            attached.arenas = None;
        }
        let is_in = |rank: usize| !reasons.iter().any(|(out, _)| *out == rank);
        attached.neighbours.retain(|(rank, _)| is_in(*rank));
        attached
            .watches
            .retain(|watch| is_in(watch.rank) && watch.rank != rank);
        Ok((Some(attached), reasons))
    }

    /// The lowest rank: creates the memory and passes it to the members that come.
    fn host(&self) -> Probe<Attached> {
        let Prepared {
            listener,
            memory,
            segment,
            arenas,
            nonce,
        } = match self.prepare() {
            Ok(prepared) => prepared,
            Err(reason) => {
                self.meeting
                    .publish("host", format!("no {reason}").as_bytes())?;
                return Ok(Err(reason));
            }
        };
        let expected: Vec<(usize, u16)> = self.ranks[1..].iter().map(|&rank| (rank, 0)).collect();
        let members = admit(
            &listener,
            self.me,
            self.token,
            &expected,
            self.meeting.deadline,
            |missing| {
                self.meeting.check()?;
                // A member that published "no" will not come.
                for &(rank, _) in missing {
                    if self.meeting.peek("seat", rank)?.is_none() {
                        return Ok(true);
                    }
                }
                Ok(false)
            },
        )?;
        drop(listener);
        let own = rustix::process::getpid();
        let process = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty());
        let process =
            or_no!(process.map_err(|e| format!("pidfd_open: {}", limits::explain(&e.into()))));
        let mut seated = vec![(0, own.as_raw_nonzero().get().unsigned_abs(), process)];
        let mut sockets = Vec::new();
        for mut member in members {
            let greeting = member
                .socket
                .set_read_timeout(Some(self.meeting.left().clamp(SLICE, PROMPT)))
                .map_err(|e| e.to_string())
                .and_then(|()| shm::receive_greeting(&mut member.socket));
            let seat = self.ranks.iter().position(|&rank| rank == member.rank);
            match (greeting, seat) {
                (Ok((pid, process)), Some(seat)) => {
                    seated.push((seat, pid, process));
                    sockets.push((member.rank, member.socket));
                }
                // The member sees its socket close, and publishes "no" with its own reason.
                (Err(e), _) => tracing::warn!("rank {} cannot share memory: {e}", member.rank),
                (Ok(_), None) => {}
            }
        }
        let list: Vec<_> = seated
            .iter()
            .map(|(seat, pid, process)| (*seat, *pid, process.as_fd()))
            .collect();
        let (buckets, arenas) = arenas.unzip();
        let buckets = buckets.as_ref().map(AsFd::as_fd);
        for (rank, socket) in &sockets {
            if let Err(e) = shm::hand_over(socket, &nonce, memory.as_fd(), buckets, &list) {
                tracing::warn!("rank {rank} cannot share memory: {e}");
            }
        }
        Ok(Ok(self.seated(segment, arenas, 0, seated)))
    }

    /// All steps of the host that can fail before the members come.
    fn prepare(&self) -> std::result::Result<Prepared, String> {
        let seats = self.ranks.len();
        let capacity = ring_capacity(seats, self.ring_bytes);
        let layout = Layout::new(seats, capacity).ok_or_else(|| {
            format!("{seats} ranks on one host, at most {MAX_LOCAL_RANKS} can share memory")
        })?;
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce).map_err(|e| format!("no random numbers: {e}"))?;
        let (memory, segment) = shm::create(layout, &nonce)?;
        let mut name = [0; 16];
        getrandom::fill(&mut name).map_err(|e| format!("no random numbers: {e}"))?;
        let name = format!("phalanx-{:032x}", u128::from_le_bytes(name));
        let listener = SocketAddr::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|e| format!("no Unix socket: {}", limits::explain(&e)))?;
        lengthen_backlog(&listener);
        self.meeting
            .publish("host", format!("at {name}").as_bytes())
            .map_err(|e| e.to_string())?;
        Ok(Prepared {
            listener,
            memory,
            segment,
            arenas: Arenas::create(seats, self.arena_bytes),
            nonce,
        })
    }

    /// Any other rank: fetches the memory from the host.
    fn join(&self, seat: usize) -> Probe<Attached> {
        let host = self.ranks[0];
        let place = self
            .meeting
            .collect("host", &[host], "offer shared memory")?;
        let place = String::from_utf8_lossy(&place[0]).into_owned();
        let Some(name) = place.strip_prefix("at ") else {
            let reason = place.strip_prefix("no ").unwrap_or("its answer is garbled");
            return Ok(Err(format!("rank {host} offers none: {reason}")));
        };
        let mut socket = or_no!(self.call(host, name));
        or_no!(shm::greet(&socket));
        // The host answers when the last rank has come.
        or_no!(socket.set_read_timeout(Some(SLICE)));
        let mut byte = [0];
        loop {
            use rustix::net::{RecvFlags, recv};
            match recv(&socket, &mut byte[..], RecvFlags::PEEK) {
                Ok((_, 0)) => return Ok(Err(format!("rank {host} closed the connection"))),
                Ok(_) => break,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                    self.meeting.check()?;
                    if self.meeting.left().is_zero() {
                        return Ok(Err(format!("rank {host} did not answer in time")));
                    }
                }
                Err(e) => return Ok(Err(format!("rank {host}: {e}"))),
            }
        }
        or_no!(socket.set_read_timeout(Some(PROMPT)));
        let roster = or_no!(shm::receive(&mut socket));
        let segment = or_no!(shm::open(&roster.memory, self.ranks.len(), &roster.nonce));
        if !roster.members.iter().any(|(theirs, ..)| *theirs == seat) {
            return Ok(Err(format!("rank {host} did not list us")));
        }
        if roster
            .members
            .iter()
            .any(|(theirs, ..)| *theirs >= self.ranks.len())
        {
            return Ok(Err(format!("rank {host} listed an impossible seat")));
        }
        let arenas = match &roster.arenas {
            None => None,
            Some(fd) => match Arenas::open(fd, self.ranks.len()) {
                Ok(arenas) => Some(arenas),
                Err(reason) => {
                    tracing::debug!("no registered buckets: {reason}");
                    None
                }
            },
        };
        Ok(Ok(self.seated(segment, arenas, seat, roster.members)))
    }

    /// Connects to the host's socket and authenticates; tries again if too many
    /// connections have cost us our place.
    fn call(&self, host: usize, name: &str) -> std::result::Result<UnixStream, String> {
        let until = Instant::now() + self.meeting.left().min(PROMPT);
        loop {
            let mut socket = shm::connect(name, until)
                .map_err(|e| format!("connecting to rank {host}: {}", limits::explain(&e)))?;
            shm::check_same_user(&socket).map_err(|e| e.to_string())?;
            let timeout = self.meeting.left().clamp(SLICE, PROMPT);
            match auth::initiate(&mut socket, self.me, self.token, timeout) {
                Ok(peer) if peer.rank as usize == host && peer.role == Role::SharedMemory => {
                    return Ok(socket);
                }
                Ok(peer) => return Err(format!("rank {} answered for rank {host}", peer.rank)),
                Err(e) if is_passing(&e) && Instant::now() + AGAIN < until => {
                    tracing::debug!(host, "fetching shared memory: {e}");
                }
                Err(e) => return Err(format!("rank {host}: {e}")),
            }
            std::thread::sleep(AGAIN);
        }
    }

    fn seated(
        &self,
        segment: Segment,
        arenas: Option<Arenas>,
        seat: usize,
        members: Vec<(usize, u32, OwnedFd)>,
    ) -> Attached {
        segment.sit(seat);
        let capacity = ring_capacity(self.ranks.len(), self.ring_bytes);
        if capacity * (self.ranks.len() - 1) <= POPULATE_BYTES {
            segment.populate(seat);
        }
        let watches: Vec<Watch> = members
            .into_iter()
            .map(|(seat, pid, process)| Watch {
                rank: self.ranks[seat],
                seat,
                pid,
                process,
            })
            .collect();
        let neighbours = watches
            .iter()
            .filter(|watch| watch.seat != seat)
            .map(|watch| (watch.rank, watch.seat))
            .collect();
        Attached {
            segment,
            arenas,
            seat,
            neighbours,
            watches,
        }
    }
}

/// Whether another attempt may find room.
fn is_passing(e: &phalanx_store::Error) -> bool {
    matches!(
        e.kind(),
        StoreKind::PeerLost | StoreKind::Timeout | StoreKind::Rejected(RejectReason::Full)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_store::MemStore;

    /// The host makes room by closing the connection that has waited longest; that member tries again.
    #[test]
    fn who_lost_its_place_before_the_door_calls_again() {
        let token = Token::generate().unwrap();
        let name = format!("phalanx-test-{:016x}", token.job_id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let timeout = Duration::from_secs(60);
        let store = MemStore::new();
        let meeting = Rendezvous {
            server: None,
            job: 0,
            store: &store,
            rank: 1,
            world: 2,
            generation: 0,
            group: 0,
            timeout,
            deadline: Instant::now() + timeout,
            lost: &crate::transport::none_lost,
            taken: Default::default(),
            misfit: Default::default(),
            waits: Default::default(),
        };
        let hello = |rank| {
            Hello::new(Role::SharedMemory, token.job_id())
                .rank(rank)
                .world(2)
        };
        let attempt = Attempt {
            meeting: &meeting,
            me: hello(1),
            token: &token,
            ranks: &[0, 1],
            ring_bytes: None,
            arena_bytes: None,
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2 {
                    drop(listener.accept().unwrap());
                }
                let (mut socket, _) = listener.accept().unwrap();
                auth::accept(&mut socket, &token, timeout, |_| Ok(hello(0))).unwrap();
            });
            attempt.call(0, &name).unwrap();
        });
    }
}
