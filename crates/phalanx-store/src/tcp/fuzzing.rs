//! Fuzz target: one connection of the server.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use phalanx_wire::store_msg::{LENGTH_BYTES, Response, response_bytes};

use super::super::conn::{Conn, State};
use super::{Followers, PollFlags, ServerControl, ServerLoop, ServerOptions};
use crate::table::Limits;

/// Small limits, so that they are reached.
const LIMITS: Limits = Limits::new(16, 4096);

thread_local! {
    static SERVER: RefCell<Option<(TcpListener, ServerLoop)>> = const { RefCell::new(None) };
}

fn server() -> std::io::Result<(TcpListener, ServerLoop)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let options = ServerOptions {
        limits: LIMITS,
        max_buffered_bytes: 1 << 20,
        ..ServerOptions::default()
    };
    let (_, woken) = UnixStream::pair()?;
    let ours = (listener.try_clone()?, listener.local_addr()?);
    let token = crate::fuzzing::token();
    let shared = Arc::new(ServerControl::default());
    let serving = ServerLoop::new(ours, woken, token, options, shared, channel().1);
    Ok((listener, serving))
}

impl ServerLoop {
    /// Serves a member's connection.
    fn adopt(&mut self, stream: TcpStream) -> std::io::Result<u64> {
        let peer = stream.peer_addr()?;
        self.next_id += 1;
        let conn = Conn::new(stream, peer, State::Member);
        self.conns.insert(self.next_id, conn);
        Ok(self.next_id)
    }

    /// One iteration of the server's loop in which this connection is ready.
    fn round(&mut self, id: u64) {
        self.handle_ready(id, PollFlags::IN | PollFlags::OUT);
        self.finish_round();
        while !self.unfinished.is_empty() {
            self.finish_round();
        }
    }
}

/// A connected pair of the client's and the server's stream. The client resets at
/// the end, so that no port stays in use.
fn connect(listener: &TcpListener) -> std::io::Result<(TcpStream, TcpStream)> {
    let ours = TcpStream::connect(listener.local_addr()?)?;
    let (theirs, _) = listener.accept()?;
    rustix::net::sockopt::set_socket_linger(&ours, Some(Duration::ZERO))?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    Ok((ours, theirs))
}

/// The client sends `input` in pieces and leaves. The store stays within its
/// limits, all responses are valid, and nothing remains.
pub(crate) fn session(member: bool, piece: usize, input: &[u8]) {
    SERVER.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = server().ok();
        }
        let Some((listener, serving)) = slot else {
            return;
        };
        // Out of ports or descriptors: skip.
        let Ok((mut ours, theirs)) = connect(listener) else {
            return;
        };
        let id = match (member, theirs.peer_addr()) {
            (true, _) => serving.adopt(theirs).ok(),
            (false, Ok(peer)) => {
                serving.handshakes.adopt(theirs, peer);
                Some(0)
            }
            (false, Err(_)) => None,
        };
        let Some(id) = id else { return };
        let serve = |serving: &mut ServerLoop| match member {
            true => serving.round(id),
            // The listener is not polled.
            false if serving.handshakes.count() > 0 => serving.admit(&[true]),
            false => {}
        };
        let mut received = Vec::new();
        for piece in input.chunks(piece) {
            if ours.write_all(piece).is_err() {
                break;
            }
            serve(serving);
            let _ = ours.read_to_end(&mut received);
            assert!(serving.table.bytes <= LIMITS.max_total_bytes);
            assert!(serving.table.iter().count() <= LIMITS.max_keys);
        }
        if member {
            check_responses(&received);
        } else {
            assert!(
                received.len() <= 72,
                "{} bytes for an unauthenticated peer",
                received.len()
            );
        }
        drop(ours);
        serve(serving);
        let stayed = serving.conns.len() + serving.handshakes.count();
        assert_eq!(stayed, 0, "the connection stayed");
        let waits = serving.waiters.len() + serving.poppers.len();
        assert_eq!(waits, 0, "a wait stayed");
        assert!(serving.unfinished.is_empty());
        // Later sessions would wait for this one's followers.
        serving.followers = Followers::default();
    });
}

fn check_responses(mut received: &[u8]) {
    while let Some((length, rest)) = received.split_first_chunk::<LENGTH_BYTES>() {
        let bytes = response_bytes(*length).expect("a length within the limits");
        let Some(body) = rest.get(..bytes) else {
            return;
        };
        Response::decode(body).expect("a valid response");
        received = &rest[bytes..];
    }
}

#[cfg(test)]
mod tests {
    use phalanx_wire::store_msg::Request;
    use rustix::event::{PollFd, poll};

    use super::*;

    /// Sends a request, and waits until the server's side has received it.
    fn ask(serving: &ServerLoop, member: &mut (TcpStream, u64), request: &Request<'_>) {
        let mut message = Vec::new();
        request.encode(&mut message).unwrap();
        member.0.write_all(&message).unwrap();
        arrived(serving, member.1, PollFlags::IN);
    }

    fn arrived(serving: &ServerLoop, id: u64, what: PollFlags) {
        poll(&mut [PollFd::new(&serving.conns[&id].stream, what)], None).unwrap();
    }

    /// Its end has arrived, but was not read when there is an element for it.
    #[test]
    fn a_popper_that_has_closed_takes_no_element() {
        let (listener, mut serving) = server().unwrap();
        let [mut early, mut other, mut pusher, mut late] = [(); 4].map(|()| {
            let (ours, theirs) = connect(&listener).unwrap();
            (ours, serving.adopt(theirs).unwrap())
        });
        let (queue, timeout_ms) = ("q", u32::MAX);
        let pop = Request::QueuePop { queue, timeout_ms };
        for member in [&mut early, &mut other] {
            ask(&serving, member, &pop);
            serving.round(member.1);
        }
        drop(early.0);
        arrived(&serving, early.1, PollFlags::RDHUP);
        for value in [b"1", b"2"] {
            let push = Request::QueuePush { queue, value };
            ask(&serving, &mut pusher, &push);
            serving.round(pusher.1);
        }
        other.0.set_nonblocking(false).unwrap();
        let mut response = [0; 10];
        other.0.read_exact(&mut response).unwrap();
        assert_eq!(
            Response::decode(&response[4..]),
            Ok(Response::Value(b"1".to_vec()))
        );
        ask(&serving, &mut late, &pop);
        drop(late.0);
        arrived(&serving, late.1, PollFlags::RDHUP);
        serving.round(late.1);
        assert_eq!(serving.table.queue_len(queue), 1);
        // The next iterations close both.
        for id in [early.1, late.1] {
            serving.round(id);
            assert!(!serving.conns.contains_key(&id));
        }
        assert_eq!(serving.poppers.len(), 0);
    }
}
