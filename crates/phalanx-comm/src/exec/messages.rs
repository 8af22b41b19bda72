//! Many messages between pairs of ranks at the same time.
//!
//! Messages to one peer keep their order, and so do those from it; apart from
//! that all of them progress at once, so that no order of sends and receives can
//! block another. Each is cut and numbered as a lone send or receive is, and
//! may meet one on the other side.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::elsewhere::{Elsewhere, LOOK};
use super::flow::Cut;
use super::signature::Signature;
use super::stall::Awaited;
use super::transfer::{Context, Frame, Receiver, Sender};
use super::{Deadline, Executor, Operation};
use crate::plan::{Collective, Method};
use crate::transport::Interest;
use crate::{DType, Error, Result};

/// One message and its memory.
pub(crate) struct Message<'a> {
    pub(crate) peer: usize,
    pub(crate) dtype: DType,
    pub(crate) data: Data<'a>,
}

/// Which way a message goes.
pub(crate) enum Data<'a> {
    Send(&'a [u8]),
    Recv(&'a mut [u8]),
}

impl Message<'_> {
    fn bytes(&self) -> usize {
        match &self.data {
            Data::Send(bytes) => bytes.len(),
            Data::Recv(place) => place.len(),
        }
    }
}

/// The frames of one direction of one stream with one peer, in order; each
/// belongs to a message.
struct Lane<S> {
    peer: usize,
    stream: usize,
    frames: VecDeque<(usize, Frame)>,
    side: S,
}

/// Adds the frames of message `index` to the lanes of its direction.
fn enqueue<S>(
    lanes: &mut Vec<Lane<S>>,
    index: usize,
    peer: usize,
    frames: impl Iterator<Item = Frame>,
    new: fn() -> S,
) {
    for frame in frames {
        let stream = usize::from(frame.stream);
        let at = lanes
            .iter()
            .position(|lane| (lane.peer, lane.stream) == (peer, stream))
            .unwrap_or_else(|| {
                lanes.push(Lane {
                    peer,
                    stream,
                    frames: VecDeque::new(),
                    side: new(),
                });
                lanes.len() - 1
            });
        lanes[at].frames.push_back((index, frame));
    }
}

impl Executor {
    /// Carries out all messages, as one operation with one deadline.
    pub(crate) fn exchange(
        &mut self,
        name: &Arc<str>,
        messages: &mut [Message<'_>],
        timeout: Option<Duration>,
    ) -> Result<()> {
        let rank = self.mesh.rank();
        if let Some(error) = self.refusal() {
            let error = self.heard(error);
            return Err(error.with_rank(rank).with_operation(&**name));
        }
        let signatures: Vec<Signature> = messages.iter().map(|m| self.sign(m)).collect();
        let Some(first) = signatures.first() else {
            return Ok(());
        };
        // One entry for all in the flight recorder, under the batch's name.
        let batch = Operation {
            collective: first.collective,
            method: first.method,
            automatic: false,
            dtype: first.dtype,
            op: None,
            root: first.root,
            target: match messages[0].data {
                Data::Send(_) => messages[0].peer,
                Data::Recv(_) => rank,
            },
            count: signatures.iter().map(|signature| signature.count).sum(),
            lacking: 0,
            lengths: 0,
            plan: None,
            label: Some(Arc::clone(name)),
            timeout,
        };
        self.flight.begin(&batch, first);
        let limit = self.limit(timeout);
        self.flight.set_limit(limit);
        let result = self.carry_messages(messages, &signatures, &Deadline::in_(limit));
        self.flight.end(first, result.is_ok());
        self.operations += 1;
        result.map_err(|error| {
            let cause = format!("{} in {name}", error.message());
            self.fail(error, cause, |error| {
                error.with_rank(rank).with_operation(&**name)
            })
        })
    }

    /// The signature of a lone send or receive.
    fn sign(&mut self, message: &Message<'_>) -> Signature {
        let (root, counter) = match message.data {
            Data::Send(_) => (self.mesh.rank(), &mut self.sent_to[message.peer]),
            Data::Recv(_) => (message.peer, &mut self.received_from[message.peer]),
        };
        let seq = *counter;
        *counter += 1;
        Signature {
            collective: Collective::SendRecv,
            method: Method::PointToPoint,
            dtype: Some(message.dtype),
            op: None,
            root,
            count: message.bytes() / message.dtype.size_bytes(),
            lengths: 0,
            seq,
            in_memory: false,
        }
    }

    /// Writes to `want` the lanes that are not through.
    fn want_lanes<S, R>(&mut self, tx: &[Lane<S>], rx: &[Lane<R>]) {
        let world = self.mesh.world();
        self.want.fill(Interest::default());
        for lane in tx {
            self.want[lane.stream * world + lane.peer].send = true;
        }
        for lane in rx {
            self.want[lane.stream * world + lane.peer].recv = true;
        }
    }

    /// The error of a batch whose deadline has passed.
    fn late_messages<S, R>(
        &mut self,
        tx: &[Lane<S>],
        rx: &[Lane<R>],
        deadline: &Deadline,
        first: &Signature,
    ) -> Error {
        self.want_lanes(tx, rx);
        self.flight.waiting(&self.want, self.mesh.world());
        // A peer may itself be waiting, so only a lone one is blamed.
        let (late, only) = self.late(deadline, "", first);
        let late = Error::timeout(late);
        match only {
            Some(peer) => late.with_peer(peer),
            None => late,
        }
    }

    fn carry_messages(
        &mut self,
        messages: &mut [Message<'_>],
        signatures: &[Signature],
        deadline: &Deadline,
    ) -> Result<()> {
        let world = self.mesh.world();
        let cut = Cut {
            segment_bytes: self.limits.segment_bytes,
            // Messages are cut by bytes; nothing here counts elements.
            elem_bytes: 1,
        };
        let (mut tx, mut rx) = (Vec::new(), Vec::new());
        for (index, message) in messages.iter().enumerate() {
            let frames = cut.frames(0, message.bytes(), self.mesh.streams(message.peer));
            match message.data {
                Data::Send(_) => enqueue(&mut tx, index, message.peer, frames, Sender::new),
                Data::Recv(_) => enqueue(&mut rx, index, message.peer, frames, Receiver::new),
            }
        }
        let context = |signature| Context {
            signature,
            epoch: self.epoch,
            group: self.group,
            rank: self.mesh.rank(),
        };
        let contexts: Vec<Context<'_>> = signatures.iter().map(context).collect();
        let (mut spins, mut turns) = (0u32, 0u32);
        let mut elsewhere = Elsewhere::default();
        let mut still_since = None;
        loop {
            let mut moved = false;
            for lane in &mut tx {
                let Some((index, frame)) = lane.frames.front() else {
                    continue;
                };
                let Data::Send(bytes) = &messages[*index].data else {
                    return Err(Error::internal("a receive among the sends"));
                };
                let start = frame.offset as usize;
                let payload = &bytes[start..start + frame.length as usize];
                let link = self.mesh.link(lane.stream * world + lane.peer);
                let progress = lane.side.step(link, frame, payload, &contexts[*index])?;
                moved |= progress.moved;
                if progress.done {
                    self.bytes_sent[lane.peer]
                        .fetch_add(u64::from(frame.length), Ordering::Relaxed);
                    lane.frames.pop_front();
                }
            }
            for lane in &mut rx {
                let Some((index, frame)) = lane.frames.front() else {
                    continue;
                };
                let Data::Recv(bytes) = &mut messages[*index].data else {
                    return Err(Error::internal("a send among the receives"));
                };
                let start = frame.offset as usize;
                let place = &mut bytes[start..start + frame.length as usize];
                let link = self.mesh.link(lane.stream * world + lane.peer);
                let context = &contexts[*index];
                let progress = lane.side.step(link, lane.peer, frame, place, context)?;
                moved |= progress.moved;
                if progress.done {
                    lane.frames.pop_front();
                }
            }
            tx.retain(|lane| !lane.frames.is_empty());
            rx.retain(|lane| !lane.frames.is_empty());
            if tx.is_empty() && rx.is_empty() {
                return Ok(());
            }
            if moved {
                self.flight.progress();
                spins = 0;
                elsewhere.forget();
                still_since = None;
                turns += 1;
                if self.looks_up(turns)? && deadline.has_passed(Instant::now(), 0, &self.flight) {
                    return Err(self.late_messages(&tx, &rx, deadline, &signatures[0]));
                }
                continue;
            }
            self.want_lanes(&tx, &rx);
            if self.flight.notes_wait(spins) {
                self.flight.waiting(&self.want, world);
            }
            let now = Instant::now();
            if deadline.has_passed(now, 0, &self.flight) {
                return Err(self.late_messages(&tx, &rx, deadline, &signatures[0]));
            }
            // Named by the batch's first unfinished message.
            let next = |frames: &VecDeque<(usize, Frame)>| frames.front().map(|(index, _)| *index);
            let of_tx = tx.iter().filter_map(|lane| next(&lane.frames));
            let of_rx = rx.iter().filter_map(|lane| next(&lane.frames));
            let open = of_tx.chain(of_rx).next().unwrap_or(0);
            let me = (self.mesh.rank(), &signatures[open]);
            if elsewhere.look(self.host.as_ref(), &self.want, me)? {
                continue;
            }
            let since = *still_since.get_or_insert(now);
            // Of several streams to one peer, the message that is due first.
            let due = |peer, lanes: &mut dyn Iterator<Item = (usize, usize)>| {
                let of_peer = lanes.filter(|(other, _)| *other == peer);
                of_peer.map(|(_, index)| signatures[index].seq).min()
            };
            let awaits = (0..world).filter_map(|peer| {
                let lanes = tx
                    .iter()
                    .filter_map(|lane| Some((lane.peer, next(&lane.frames)?)));
                let gives = due(peer, &mut { lanes });
                let lanes = rx
                    .iter()
                    .filter_map(|lane| Some((lane.peer, next(&lane.frames)?)));
                let takes = due(peer, &mut { lanes });
                (gives.is_some() || takes.is_some()).then_some(Awaited {
                    peer,
                    data: takes.is_some(),
                    gives,
                    takes,
                })
            });
            self.compare_if_stalled(&signatures[open], awaits, (since, now));
            self.mesh
                .idle(&self.want, spins, deadline.at(0).min(now + LOOK))?;
            spins = spins.saturating_add(1);
        }
    }
}
