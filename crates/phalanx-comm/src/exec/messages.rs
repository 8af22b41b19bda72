//! Many messages between pairs of ranks at the same time.
//!
//! Messages to one peer keep their order, and so do those from it. Otherwise all of
//! them progress at once, so no order of sends and receives can block. Each is split
//! and numbered like a single send or receive, and may match one on the other side.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Executor;
use super::elsewhere::{Elsewhere, LOOK};
use super::flow::Cut;
use super::transfer::{Context, Frame, Receiver, Sender};
use crate::context::RunContext;
use crate::operation::Signature;
use crate::shm::Shm;
use crate::stall::Awaited;
use crate::transport::{Interest, Mesh};
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
    pub(crate) fn bytes(&self) -> usize {
        match &self.data {
            Data::Send(bytes) => bytes.len(),
            Data::Recv(place) => place.len(),
        }
    }
}

/// The frames of one direction of the link to one peer, in order, each with the index
/// of its message.
struct Lane<S> {
    peer: usize,
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
    let at = lanes.iter().position(|lane| lane.peer == peer);
    let at = at.unwrap_or_else(|| {
        lanes.push(Lane {
            peer,
            frames: VecDeque::new(),
            side: new(),
        });
        lanes.len() - 1
    });
    lanes[at].frames.extend(frames.map(|frame| (index, frame)));
}

impl Executor {
    /// Writes to `want` the lanes that are not finished.
    fn want_lanes<S, R>(&mut self, tx: &[Lane<S>], rx: &[Lane<R>]) {
        self.want.fill(Interest::default());
        for lane in tx {
            self.want[lane.peer].send = true;
        }
        for lane in rx {
            self.want[lane.peer].recv = true;
        }
    }

    /// The error of a batch whose deadline has passed.
    fn late_messages<S, R>(
        &mut self,
        tx: &[Lane<S>],
        rx: &[Lane<R>],
        context: &mut RunContext<'_>,
    ) -> Error {
        self.want_lanes(tx, rx);
        context.flight.waiting(&self.want);
        // A peer may itself be waiting, so a peer is blamed only if it is the only one.
        let (late, only) = self.late(context, "");
        let late = Error::timeout(late);
        match only {
            Some(peer) => late.with_peer(peer),
            None => late,
        }
    }

    /// Carries out all messages; `signatures` has one for each.
    pub(crate) fn exchange(
        &mut self,
        mesh: &mut Mesh,
        shm: Option<&Shm>,
        mut context: RunContext<'_>,
        messages: &mut [Message<'_>],
        signatures: &[Signature],
    ) -> Result<()> {
        let deadline = context.deadline;
        let cut = Cut {
            segment_bytes: self.segment_bytes,
            // Messages are split by bytes; nothing here counts elements.
            elem_bytes: 1,
        };
        let (mut tx, mut rx) = (Vec::new(), Vec::new());
        for (index, message) in messages.iter().enumerate() {
            let frames = cut.frames(0, message.bytes());
            match message.data {
                Data::Send(_) => enqueue(&mut tx, index, message.peer, frames, Sender::new),
                Data::Recv(_) => enqueue(&mut rx, index, message.peer, frames, Receiver::new),
            }
        }
        let contexts: Vec<Context<'_>> = signatures.iter().map(|s| self.frames(s)).collect();
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
                let link = mesh.link(lane.peer);
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
                let link = mesh.link(lane.peer);
                let frames = &contexts[*index];
                let progress = lane.side.step(link, lane.peer, frame, place, frames)?;
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
                context.flight.progress();
                spins = 0;
                elsewhere.forget();
                still_since = None;
                turns += 1;
                if self.looks_up(turns)? && deadline.has_passed(Instant::now(), 0, context.flight) {
                    return Err(self.late_messages(&tx, &rx, &mut context));
                }
                continue;
            }
            self.want_lanes(&tx, &rx);
            if context.flight.notes_wait(spins) {
                context.flight.waiting(&self.want);
            }
            let now = Instant::now();
            if deadline.has_passed(now, 0, context.flight) {
                return Err(self.late_messages(&tx, &rx, &mut context));
            }
            // Named by the batch's first unfinished message.
            let next = |frames: &VecDeque<(usize, Frame)>| frames.front().map(|(index, _)| *index);
            let of_tx = tx.iter().filter_map(|lane| next(&lane.frames));
            let of_rx = rx.iter().filter_map(|lane| next(&lane.frames));
            let open = of_tx.chain(of_rx).next().unwrap_or(0);
            let me = (self.rank, &signatures[open]);
            if elsewhere.look(shm, &self.want, me)? {
                continue;
            }
            let since = *still_since.get_or_insert(now);
            let awaits = (0..self.world).filter_map(|peer| {
                let seq = |index: usize| signatures[index].seq;
                let gives = tx.iter().find(|lane| lane.peer == peer);
                let gives = gives.and_then(|lane| next(&lane.frames)).map(seq);
                let takes = rx.iter().find(|lane| lane.peer == peer);
                let takes = takes.and_then(|lane| next(&lane.frames)).map(seq);
                (gives.is_some() || takes.is_some()).then_some(Awaited {
                    peer,
                    data: takes.is_some(),
                    gives,
                    takes,
                })
            });
            self.compare_if_stalled(&mut context, &signatures[open], awaits, (since, now));
            mesh.idle(&self.want, spins, deadline.at(0).min(now + LOOK))?;
            spins = spins.saturating_add(1);
        }
    }
}
