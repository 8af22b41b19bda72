//! Connecting to a rank that listens.

use std::net::TcpStream;
use std::time::Duration;

use phalanx_store::ErrorKind as StoreKind;
use phalanx_store::auth::{HANDSHAKE_TIMEOUT, initiate};
use phalanx_wire::Token;
use phalanx_wire::handshake::{Hello, RejectReason};

use super::super::admit::role_of;
use super::super::form::{Member, Rendezvous, WaitReport};
use crate::{Error, ErrorKind, Result, limits};

/// Longest single attempt to connect; a lost SYN is sent again by the kernel
/// after one second.
const ATTEMPT: Duration = Duration::from_secs(3);
/// First and longest pause between two attempts.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// See [`PAUSE_MIN`].
const PAUSE_MAX: Duration = Duration::from_millis(250);

/// Connects `stream` to `peer` and authenticates. Tries until the deadline: the peer's
/// backlog may be full, or strangers may keep it busy. A permanent error ends it at once.
/// `hint` is the end of the messages about waiting.
pub(crate) fn dial(
    meeting: &Rendezvous<'_>,
    me: Hello,
    token: &Token,
    (peer, member): (usize, &Member),
    stream: u16,
    check: &impl Fn() -> Result<()>,
    (report, hint): (&mut WaitReport<'_>, &str),
) -> Result<TcpStream> {
    let Some(address) = member.address else {
        return Err(Error::usage(format!(
            "rank {peer} does not listen: it wants shared memory only"
        ))
        .with_peer(peer));
    };
    let hello = Hello {
        role: role_of(me.role, stream),
        stream,
        ..me
    };
    let mut pause = PAUSE_MIN;
    loop {
        check()?;
        let left = meeting.left().max(Duration::from_millis(1));
        let connected = match TcpStream::connect_timeout(&address, left.min(ATTEMPT)) {
            Err(e) if limits::is_out_of_files(&e) => {
                return Err(Error::io(format_args!("connecting to rank {peer}"), e));
            }
            connected => connected,
        };
        let attempt = connected.map_err(|e| e.to_string()).and_then(|mut socket| {
            socket.set_nodelay(true).map_err(|e| e.to_string())?;
            match initiate(&mut socket, hello, token, left.min(HANDSHAKE_TIMEOUT)) {
                Ok(theirs) => Ok(Ok((socket, theirs))),
                Err(e) if is_final(&e) => Ok(Err(e)),
                Err(e) => Err(e.to_string()),
            }
        });
        let failure = match attempt {
            Ok(Ok((socket, theirs))) => {
                if theirs.rank as usize != peer || me.check_same_group(&theirs).is_err() {
                    return Err(Error::protocol(
                        peer,
                        format!("rank {} answered at {address} for rank {peer}", theirs.rank),
                    ));
                }
                return Ok(socket);
            }
            Ok(Err(e)) => {
                let message = format!("rank {peer} at {address}: {e}");
                return Err(Error::new(ErrorKind::Usage, message)
                    .with_peer(peer)
                    .with_source(e));
            }
            Err(failure) => failure,
        };
        if meeting.left().is_zero() {
            let error = meeting.late(&[peer], &[peer], &format!("answer at {address}"));
            return Err(
                Error::timeout(format!("{} (last: {failure}){hint}", error.message()))
                    .with_peer(peer),
            );
        }
        tracing::debug!(peer, %address, "connecting: {failure}");
        report.due(|| format!("rank {peer} to answer at {address} ({failure}){hint}"));
        std::thread::sleep(pause.min(meeting.left()));
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Whether trying again is pointless.
fn is_final(e: &phalanx_store::Error) -> bool {
    match e.kind() {
        StoreKind::TokenMismatch => true,
        StoreKind::Rejected(reason) => reason != RejectReason::Full,
        _ => false,
    }
}
