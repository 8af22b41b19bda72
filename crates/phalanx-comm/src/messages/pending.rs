//! A send or receive that is not finished.

use std::sync::Arc;
use std::time::Duration;

use super::{Direction, Mailbox, Request, Ticket};
use crate::deadline::Deadline;
use crate::operation::{PeerOperation, Signature};
use crate::plan::Collective;
use crate::recorder::MessageFlight;
use crate::stall::Counts;
use crate::{Error, Result};

/// A request with its number and deadline.
pub(super) struct Pending {
    pub(super) request: Request,
    pub(super) signature: Signature,
    pub(super) ticket: Arc<Ticket>,
    pub(super) deadline: Deadline,
    pub(super) limit: Duration,
    /// Its entry in the flight recorder.
    pub(super) entry: u64,
}

impl Pending {
    pub(super) fn new(
        request: Request,
        ticket: Arc<Ticket>,
        limit: Duration,
        (rank, counts): (usize, &Counts),
    ) -> Pending {
        let (root, seq) = match request.way {
            Direction::Send { to, .. } => (rank, counts.sent(to)),
            Direction::Receive { from, .. } => {
                let seq = from.map_or(0, |from| counts.received(from));
                (from.unwrap_or(rank), seq)
            }
        };
        let operation = &request.operation;
        let signature = Signature {
            collective: Collective::SendRecv,
            method: None,
            dtype: operation.dtype,
            op: None,
            root,
            count: operation.count,
            lengths: 0,
            seq,
        };
        Pending {
            request,
            signature,
            ticket,
            deadline: Deadline::in_(limit),
            limit,
            entry: 0,
        }
    }

    /// It is in flight from now on.
    pub(super) fn begun(self, flight: &MessageFlight, counts: &Counts) -> Pending {
        if let Direction::Send { to, .. } = self.request.way {
            counts.add_sent(to);
        }
        self.deadline.at(0);
        let entry = flight.begin(&self.request.operation, &self.signature);
        Pending { entry, ..self }
    }

    /// The error with this request's name.
    pub(super) fn named(&self, error: Error, rank: usize) -> Error {
        let mut name = match self.request.way {
            Direction::Receive { from: None, .. } => "send/recv from any rank".to_owned(),
            _ => self.signature.to_string(),
        };
        if self.request.tag != 0 {
            name = format!("{name} with tag {}", self.request.tag);
        }
        if let Some(label) = &self.request.operation.label {
            name = format!("{name} of {label}");
        }
        error.with_rank(rank).with_operation(name)
    }

    pub(super) fn finish(self, shared: &Mailbox, result: Result<usize>) {
        shared.flight.end(self.entry, result.is_ok());
        let result = result.map_err(|error| self.named(error, shared.rank));
        super::lock(&shared.load).pending -= 1;
        self.ticket.finish(result);
    }

    /// Whether it receives a message of `peer` with `tag`.
    pub(super) fn takes(&self, peer: usize, tag: u32) -> bool {
        matches!(self.request.way, Direction::Receive { from, .. } if from.is_none_or(|from| from == peer))
            && self.request.tag == tag
    }

    /// Compares it with the message that it receives.
    pub(super) fn compare(&mut self, rank: usize, peer: usize, op: &PeerOperation) -> Result<()> {
        self.signature.root = peer;
        self.signature.seq = op.seq();
        self.signature.compare(rank, peer, op)
    }

    /// It has its message.
    pub(super) fn matched(&self, shared: &Mailbox) {
        let flight = &shared.flight;
        flight.matched(self.entry, &self.signature, shared.rank);
    }

    /// The ranks it waits for: what is awaited from each.
    pub(super) fn awaited(&self, world: usize, rank: usize) -> Vec<(usize, &'static str)> {
        match self.request.way {
            Direction::Send { to, .. } => vec![(to, "to take data")],
            Direction::Receive {
                from: Some(from), ..
            } => vec![(from, "to send data")],
            Direction::Receive { from: None, .. } => (0..world)
                .filter(|peer| *peer != rank)
                .map(|peer| (peer, "to send data"))
                .collect(),
        }
    }
}
