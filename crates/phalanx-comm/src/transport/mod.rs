//! Transports: how bytes get from one rank to another.
//!
//! A [`Mesh`] holds one link per peer, a full-duplex ordered byte stream that never
//! blocks, and can sleep until one of them may have progressed. The layers above give
//! the bytes their meaning.
//!
//! * *thread*: ranks are threads of this process; rings in private memory.
//! * *shm*: ranks are processes of one host; the same rings in a memfd, passed over an
//!   authenticated Unix socket.
//! * *tcp*: ranks are on any host; three sockets per pair, two for the bytes of collectives and of messages, and
//!   one for the reason why they ended.
//!
//! Architecture invariants: no call of a link blocks (except once for a quarter of a
//! second, to learn why a connection ended); nothing read from shared memory or from a
//! socket is used before it was checked; no name in any file system; every wait has a
//! deadline, and checks at least every 100 ms whether the group is poisoned and its
//! peers live.

mod admit;
mod arenas;
mod first_cause;
mod form;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod keys;
mod layout;
mod mesh;
mod poison;
mod ring;
mod segment;
mod shm;
mod tcp;
#[cfg(test)]
mod testing;

pub use form::{
    BindAddr, FormOptions, PortRange, Transport, form, host_addresses, is_own_address,
    local_address_towards, machine, what_loopback_means,
};
pub(crate) use form::{Lost, form_unless, listen, none_lost};
pub use layout::MAX_LOCAL_RANKS;
pub use mesh::{AbortHandle, Mesh, thread_mesh};
pub use poison::{MAX_CAUSE_BYTES, Poison};

pub(crate) use arenas::Arenas;
pub(crate) use keys::{GroupKeys, remove_generation};
pub(crate) use mesh::{Waker, thread_mesh_with};
pub(crate) use segment::Segment;

use crate::Result;

/// How two ranks communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// Memory of one process.
    Thread,
    /// Memory shared by processes of one host.
    Shm,
    /// A TCP connection.
    Tcp,
}

impl TransportKind {
    /// A set of kinds is the sum of their bits.
    pub(crate) const fn bit(self) -> u8 {
        match self {
            TransportKind::Thread => 1,
            TransportKind::Shm => 2,
            TransportKind::Tcp => 4,
        }
    }
}

phalanx_fold::named! { TransportKind: Thread "thread", Shm "shm", Tcp "tcp" }

/// The events of one peer that a caller of `Mesh::idle` waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Room to send.
    pub send: bool,
    /// Bytes to receive.
    pub recv: bool,
    /// The least number of bytes that are certain to come, 0 if unknown: the waiter need not be woken for
    /// each of them.
    pub coming_bytes: usize,
}

impl Interest {
    pub(crate) fn any(self) -> bool {
        self.send || self.recv
    }
}

/// One peer as a full-duplex ordered byte stream. All calls are non-blocking.
pub(crate) trait Link: Send {
    /// Takes as many of `bytes` as fit now and returns how many; 0 = full now.
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize>;
    /// Reads the available bytes, at most `into.len()`; 0 = nothing now.
    fn try_recv(&mut self, into: &mut [u8]) -> Result<usize>;

    /// [`Link::try_send`] of two runs of bytes, one behind the other.
    fn try_send_both(&mut self, first: &[u8], then: &[u8]) -> Result<usize> {
        let sent = if first.is_empty() {
            0
        } else {
            self.try_send(first)?
        };
        if sent < first.len() || then.is_empty() {
            return Ok(sent);
        }
        Ok(sent + self.try_send(then)?)
    }

    /// [`Link::try_recv`] into two places, of which the first is filled first.
    fn try_recv_both(&mut self, first: &mut [u8], then: &mut [u8]) -> Result<usize> {
        let got = self.try_recv(first)?;
        if got < first.len() || then.is_empty() {
            return Ok(got);
        }
        Ok(got + self.try_recv(then)?)
    }

    /// How this peer is reached.
    fn kind(&self) -> TransportKind;
}
