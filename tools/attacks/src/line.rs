//! One connection to the victim, over TCP or a Unix socket, with patience.

use std::fmt;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use phalanx_wire::handshake::{Awaiting, PREFIX_BYTES, body_bytes};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use socket2::{Domain, SockAddr, Socket, Type};

/// Where somebody listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A Unix socket in the abstract name space.
    Unix(String),
}

impl Place {
    /// A new socket, and the address to connect it to.
    pub fn socket(&self) -> Option<(Socket, SockAddr)> {
        let (domain, address) = match self {
            Place::Tcp(addr) => (Domain::for_address(*addr), SockAddr::from(*addr)),
            Place::Unix(name) => (Domain::UNIX, SockAddr::unix(format!("\0{name}")).ok()?),
        };
        Some((Socket::new(domain, Type::STREAM, None).ok()?, address))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Tcp(addr) => write!(f, "tcp {addr}"),
            Place::Unix(name) => write!(f, "unix @{name}"),
        }
    }
}

/// What came back before the other side closed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Answer {
    /// Nobody took the connection (any more).
    Unreachable,
    /// The connection was closed without a byte.
    Closed,
    /// A challenge, which says nothing, and then the end.
    Challenged,
    /// The unproven notice of a wrong version, and then the end.
    Notice,
    /// A member was told this reason.
    Rejected(String),
    /// A store refused a request, or did something small for a member.
    Refused(String),
    /// No byte and no end within our patience; we left.
    Silent,
    /// We were let in.
    Welcomed,
    /// Something else: these were its first bytes.
    Odd(String),
}

impl Answer {
    /// A reason without its advice.
    pub fn rejected(why: &str) -> Answer {
        let why = why.split(':').next().unwrap_or_default();
        Answer::Rejected(why.to_owned())
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Answer::Unreachable => f.write_str("no connection"),
            Answer::Closed => f.write_str("closed"),
            Answer::Challenged => f.write_str("challenged, closed"),
            Answer::Notice => f.write_str("version notice"),
            Answer::Rejected(why) => write!(f, "rejected: {why}"),
            Answer::Refused(why) => write!(f, "refused: {why}"),
            Answer::Silent => f.write_str("no answer, left"),
            Answer::Welcomed => f.write_str("LET IN"),
            Answer::Odd(bytes) => write!(f, "ODD: {bytes}"),
        }
    }
}

/// Bytes of a challenge, prefix included.
pub const CHALLENGE_BYTES: usize = 72;

/// A connected socket. Every wait on it ends.
pub struct Line {
    socket: Socket,
    patience: Duration,
}

impl Line {
    /// Connects; `source` varies the address that a TCP connection comes from.
    pub fn open(place: &Place, source: u8, patience: Duration) -> Option<Line> {
        let (socket, address) = place.socket()?;
        if let Place::Tcp(addr) = place
            && addr.ip() == Ipv4Addr::LOCALHOST
        {
            // All of 127/8 is loopback: several strangers from one machine.
            let from = Ipv4Addr::new(127, 0, 0, 1 + source % SOURCES);
            let _ = socket.bind(&SocketAddr::from((from, 0)).into());
        }
        socket.connect_timeout(&address, patience).ok()?;
        if met_itself(&socket) {
            return None;
        }
        socket.set_read_timeout(Some(patience)).ok()?;
        socket.set_write_timeout(Some(patience)).ok()?;
        Some(Line { socket, patience })
    }

    /// Sends; the other side may close in the middle of it.
    pub fn say(&mut self, bytes: &[u8]) -> bool {
        (&self.socket).write_all(bytes).is_ok()
    }

    /// Sends with descriptors attached, over a Unix socket.
    pub fn say_with(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(fds))
            && sendmsg(
                &self.socket,
                &[IoSlice::new(bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            )
            .is_ok()
    }

    /// No more from us, but we still listen.
    pub fn end(&self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Goes with a reset rather than an end.
    pub fn reset(self) {
        let _ = self.socket.set_linger(Some(Duration::ZERO));
    }

    /// Exactly so many bytes, if they come.
    pub fn hear(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let mut heard = vec![0; bytes];
        (&self.socket).read_exact(&mut heard).ok()?;
        Some(heard)
    }

    /// One whole handshake message, if it comes.
    pub fn message(&mut self, awaiting: Awaiting) -> Option<Vec<u8>> {
        let mut message = self.hear(PREFIX_BYTES)?;
        let body = body_bytes(message.first_chunk()?, awaiting).ok()?;
        message.extend(self.hear(body)?);
        Some(message)
    }

    /// All that comes until the end, as an answer.
    pub fn judge(&mut self) -> Answer {
        let start = Instant::now();
        let mut heard = Vec::new();
        let mut chunk = [0; 512];
        let ended = loop {
            if heard.len() > 4096 || start.elapsed() > self.patience {
                break false;
            }
            match (&self.socket).read(&mut chunk) {
                Ok(0) => break true,
                Ok(n) => heard.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    break false;
                }
                // A reset: it had not read all that we said.
                Err(_) => break true,
            }
        };
        judge(&heard, ended)
    }
}

/// Whether the connection leads back to its own socket. The kernel may give a
/// connection as its source the very port that it asks for, once the victim's
/// listener there has gone: TCP's simultaneous open, with one side.
fn met_itself(socket: &Socket) -> bool {
    let address = |found: std::io::Result<SockAddr>| found.ok().and_then(|a| a.as_socket());
    let ours = address(socket.local_addr());
    ours.is_some() && ours == address(socket.peer_addr())
}

/// How many addresses of this machine attacks come from.
pub const SOURCES: u8 = 4;

/// What these bytes mean.
pub fn judge(heard: &[u8], ended: bool) -> Answer {
    let odd = || {
        let first = &heard[..heard.len().min(24)];
        let hex: String = first.iter().map(|b| format!("{b:02x}")).collect();
        Answer::Odd(format!("{} bytes, {hex}", heard.len()))
    };
    match (heard.len(), heard.get(..6)) {
        (0, _) if ended => Answer::Closed,
        (0, _) => Answer::Silent,
        (CHALLENGE_BYTES, Some(b"PHHS\x01\x02")) => Answer::Challenged,
        (42, Some(b"PHHS\x01\x05")) if heard[10..] == [0; 32] => Answer::Notice,
        (_, Some(b"PHHS\x01\x04")) => Answer::Welcomed,
        _ => odd(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_wire::Token;
    use phalanx_wire::handshake::{Acceptor, Hello, Initiator, Role, version_notice};

    #[test]
    fn a_connection_to_oneself_is_known() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        socket.bind(&loopback.into()).unwrap();
        let own = socket.local_addr().unwrap();
        socket.connect(&own).unwrap();
        assert!(met_itself(&socket));

        let listener = std::net::TcpListener::bind(loopback).unwrap();
        let there = Place::Tcp(listener.local_addr().unwrap());
        assert!(Line::open(&there, 0, Duration::from_secs(1)).is_some());
    }

    #[test]
    fn answers_of_the_real_protocol_are_known() {
        let token = Token::generate().unwrap();
        let hello = Hello::new(Role::Peer, token.job_id());
        let (initiator, first) = Initiator::start(hello, &token).unwrap();
        let (acceptor, challenge) = Acceptor::start(&first, &token).unwrap();
        assert_eq!(judge(&challenge, true), Answer::Challenged);
        let (_, proof) = initiator.answer(&challenge).unwrap();
        let welcome = acceptor.verify(&proof).unwrap().welcome(hello);
        assert_eq!(judge(&welcome, false), Answer::Welcomed);
        assert_eq!(judge(&version_notice(), true), Answer::Notice);
        assert_eq!(judge(b"", true), Answer::Closed);
        assert_eq!(judge(b"", false), Answer::Silent);
        assert!(matches!(judge(b"HTTP/1.1", true), Answer::Odd(_)));
        assert!(matches!(judge(&challenge[..60], true), Answer::Odd(_)));
    }
}
