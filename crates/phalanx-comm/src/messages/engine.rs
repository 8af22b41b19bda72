//! Moves messages, and matches them with receives.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::arrival::{Arriving, Incoming, Target};
use super::pending::Pending;
use super::{Direction, Mailbox};
use crate::exec::{Frame, FrameContext, Sender};
use crate::stall::{Awaited, Found, StallReports};
use crate::transport::{Interest, Mesh, Poison};
use crate::{Error, ErrorKind, Result};

/// Most bytes of messages that are kept without a receive. A message for which there is no room waits at its sender.
pub(super) const EARLY_MAX: usize = 1 << 30;

/// How often it is checked whether the ranks live while nothing moves.
const LOOK: Duration = Duration::from_millis(100);
/// Iterations with progress after which it is checked whether the group has failed.
const LOOPS_PER_CHECK: u32 = 64;
/// Frames of one peer that are received at a time.
const FRAMES: usize = 16;
/// What a message without a receive counts besides its bytes.
const EARLY_BYTES: usize = 256;

/// A message that came before its receive was issued.
struct Early {
    peer: usize,
    message: Arriving,
    bytes: Vec<u8>,
}

/// The sends to one rank.
struct Outbox {
    queue: VecDeque<Pending>,
    /// Bytes of the first one that were sent.
    offset: usize,
    sender: Option<Sender>,
}

/// See the module.
pub(super) struct Engine {
    mesh: Mesh,
    ids: (u32, u32),
    segment_bytes: usize,
    /// By rank.
    tx: Vec<Outbox>,
    rx: Vec<Incoming>,
    /// Receives without a message, in the order of issue.
    posted: VecDeque<Pending>,
    /// Messages without a receive, in the order of arrival.
    early: VecDeque<Early>,
    /// Bytes of those, and of messages that arrive without a receive.
    early_bytes: usize,
    want: Vec<Interest>,
    /// The entry of the message that a thread was noted to wait for.
    noted: Option<u64>,
    board: Option<StallReports>,
    bytes_sent: Arc<[AtomicU64]>,
}

impl Engine {
    pub(super) fn new(
        mesh: Mesh,
        ids: (u32, u32),
        segment_bytes: usize,
        board: Option<StallReports>,
        bytes_sent: Arc<[AtomicU64]>,
    ) -> Engine {
        let world = mesh.world();
        let outbox = || Outbox {
            queue: VecDeque::new(),
            offset: 0,
            sender: None,
        };
        Engine {
            mesh,
            ids,
            segment_bytes: segment_bytes.clamp(1, phalanx_wire::frame::MAX_FRAME_BYTES as usize),
            tx: (0..world).map(|_| outbox()).collect(),
            rx: (0..world).map(|_| Incoming::new()).collect(),
            posted: VecDeque::new(),
            early: VecDeque::new(),
            early_bytes: 0,
            want: vec![Interest::default(); world],
            noted: None,
            board,
            bytes_sent,
        }
    }

    /// Why a wait never ends, if this rank has found that.
    pub(super) fn found(&self) -> Option<&(Found, Poison)> {
        self.board.as_ref().and_then(StallReports::found)
    }

    /// Runs until `enough`, which gets the time since something moved.
    pub(super) fn run(
        &mut self,
        shared: &Mailbox,
        beside: bool,
        enough: impl Fn(Duration) -> bool,
    ) -> Result<()> {
        self.mesh.run_beside(beside);
        let (mut spins, mut loops) = (0_u32, 0_u32);
        let mut still_since: Option<Instant> = None;
        let mut looked = None;
        loop {
            self.take_inbox(shared)?;
            // A message that no thread waits for is read only when nothing else moves.
            let moved = self.progress(shared, false)? || self.progress(shared, true)?;
            let quiet = still_since.map_or(Duration::ZERO, |since| since.elapsed());
            if enough(quiet) {
                return Ok(());
            }
            if moved {
                (spins, still_since) = (0, None);
                loops = loops.wrapping_add(1);
                if loops.is_multiple_of(LOOPS_PER_CHECK) {
                    if let Some(poison) = shared.abort.poisoned() {
                        return Err(poison.to_error());
                    }
                    self.check_deadlines(shared, Instant::now())?;
                }
                continue;
            }
            let now = Instant::now();
            let since = *still_since.get_or_insert(now);
            let until = self.check_deadlines(shared, now)?.min(now + LOOK);
            if spins > 0 {
                self.note_wait(shared);
            }
            if now.duration_since(*looked.get_or_insert(now)) >= LOOK && shared.is_busy() {
                looked = Some(now);
                (shared.collectives.check)()?;
            }
            self.report_stall(shared, (since, now));
            for (peer, want) in self.want.iter_mut().enumerate() {
                *want = Interest {
                    send: !self.tx[peer].queue.is_empty(),
                    recv: !self.rx[peer].gone && !self.rx[peer].is_stuck(),
                    coming_bytes: self.rx[peer].frame_left,
                };
            }
            let want = std::mem::take(&mut self.want);
            let idle = self.mesh.idle(&want, spins, until);
            self.want = want;
            if let Err(error) = idle {
                self.forgive(error)?;
            }
            spins = spins.saturating_add(1);
        }
    }

    /// The loss of a peer from which nothing is expected is not reported here: it may have left in good order, and the
    /// collectives notice if it has died.
    fn forgive(&mut self, error: Error) -> Result<()> {
        let peer = error
            .peer()
            .filter(|_| error.kind() == ErrorKind::PeerLost)
            .filter(|&peer| !self.needs(peer));
        let Some(peer) = peer else { return Err(error) };
        self.rx[peer].gone = true;
        Ok(())
    }

    /// Whether a request depends on `peer`.
    fn needs(&self, peer: usize) -> bool {
        let is_last = (0..self.rx.len())
            .all(|other| other == peer || other == self.mesh.rank() || self.rx[other].gone);
        !self.tx[peer].queue.is_empty()
            || self.rx[peer].is_awaited()
            || self.posted.iter().any(|pending| match pending.request.way {
                Direction::Receive { from, .. } => from.map_or(is_last, |from| from == peer),
                Direction::Send { .. } => false,
            })
    }

    /// Takes the requests that were issued.
    fn take_inbox(&mut self, shared: &Mailbox) -> Result<()> {
        let issued = std::mem::take(&mut *super::lock(&shared.inbox));
        let mut issued = issued.into_iter();
        while let Some(pending) = issued.next() {
            let result = match pending.request.way {
                Direction::Send { to, .. } => {
                    let gone = self.rx[to].gone;
                    self.tx[to].queue.push_back(pending);
                    if gone { Err(left(to)) } else { Ok(()) }
                }
                Direction::Receive { .. } => self.post(shared, pending),
            };
            if result.is_err() {
                // They fail with the others.
                super::lock(&shared.inbox).extend(issued);
                return result;
            }
        }
        let is_closed = super::lock(&shared.load).closed;
        if is_closed && !self.posted.is_empty() {
            for pending in std::mem::take(&mut self.posted) {
                let error = Error::usage("the group was shut down before the message came");
                pending.finish(shared, Err(error));
            }
        }
        Ok(())
    }

    /// A receive was issued.
    fn post(&mut self, shared: &Mailbox, mut pending: Pending) -> Result<()> {
        let rank = shared.rank;
        let fits = |early: &Early| pending.takes(early.peer, early.message.tag);
        if let Some(early) = self.early.iter().position(fits)
            && let Some(early) = self.early.remove(early)
        {
            self.early_bytes -= early.bytes.len() + EARLY_BYTES;
            if let Err(error) = pending.compare(rank, early.peer, &early.message.operation) {
                self.posted.push_back(pending);
                return Err(error);
            }
            copy(&pending, &early.bytes);
            pending.matched(shared);
            pending.finish(shared, Ok(early.peer));
            return Ok(());
        }
        let arriving = self.rx.iter().enumerate().find_map(|(peer, incoming)| {
            let message = incoming.message.as_ref()?;
            let is_free = !matches!(message.target, Target::Receive(_));
            (is_free && pending.takes(peer, message.tag)).then_some(peer)
        });
        if let Some(peer) = arriving
            && let Incoming {
                message: Some(message),
                gone,
                ..
            } = &mut self.rx[peer]
        {
            let mut fits = pending.compare(rank, peer, &message.operation);
            if fits.is_ok() && *gone {
                fits = Err(left(peer));
            }
            if fits.is_err() {
                self.posted.push_back(pending);
                return fits;
            }
            if let Target::Early(bytes) = &message.target {
                self.early_bytes -= message.total + EARLY_BYTES;
                copy(&pending, bytes);
            }
            pending.matched(shared);
            message.target = Target::Receive(Box::new(pending));
            return Ok(());
        }
        let ranks = pending.awaited(self.rx.len(), rank);
        self.posted.push_back(pending);
        match ranks.iter().all(|(peer, _)| self.rx[*peer].gone) {
            true => Err(left(ranks.first().map_or(rank, |(peer, _)| *peer))),
            false => Ok(()),
        }
    }

    /// Moves what the links take and give, from `all` peers or only those of which something is awaited; true if a byte
    /// moved.
    fn progress(&mut self, shared: &Mailbox, all: bool) -> Result<bool> {
        let mut moved = false;
        for peer in 0..self.tx.len() {
            if !self.tx[peer].queue.is_empty() {
                moved |= self.send(shared, peer)?;
            }
        }
        for peer in 0..self.rx.len() {
            if peer == shared.rank || self.rx[peer].gone || !(all || self.awaits(peer)) {
                continue;
            }
            match self.receive(shared, peer) {
                Ok(came) => moved |= came,
                Err(error) => self.forgive(error)?,
            }
        }
        Ok(moved)
    }

    /// Whether a message of `peer` in particular is awaited, or has begun to come.
    fn awaits(&self, peer: usize) -> bool {
        let is_from = |pending: &Pending| matches!(pending.request.way, Direction::Receive { from: Some(from), .. } if from == peer);
        self.rx[peer].message.is_some() || self.posted.iter().any(is_from)
    }

    fn send(&mut self, shared: &Mailbox, peer: usize) -> Result<bool> {
        let mut moved = false;
        let outbox = &mut self.tx[peer];
        while let Some(pending) = outbox.queue.front() {
            let Direction::Send { from, .. } = pending.request.way else {
                return Err(Error::internal("a receive among the sends"));
            };
            let length = (pending.request.bytes - outbox.offset).min(self.segment_bytes);
            let frame = Frame {
                step: pending.request.tag,
                offset: outbox.offset as u64,
                length: length as u32,
            };
            let payload: &[u8] = if length == 0 {
                &[]
            } else {
                // SAFETY: within the memory of the request, which is readable and initialised until it is over; it is
                // not over, since it is in the queue.
                unsafe { std::slice::from_raw_parts(from.add(outbox.offset), length) }
            };
            let context = FrameContext {
                signature: &pending.signature,
                generation: self.ids.0,
                group: self.ids.1,
                rank: shared.rank,
            };
            let link = self.mesh.link(peer);
            let sender = outbox.sender.get_or_insert_with(Sender::new);
            let progress = sender.step(link, &frame, payload, &context)?;
            moved |= progress.moved;
            if !progress.done {
                break;
            }
            self.bytes_sent[peer].fetch_add(length as u64, Ordering::Relaxed);
            outbox.offset += length;
            if outbox.offset == pending.request.bytes
                && let Some(pending) = outbox.queue.pop_front()
            {
                outbox.offset = 0;
                pending.finish(shared, Ok(peer));
            }
        }
        Ok(moved)
    }

    fn receive(&mut self, shared: &Mailbox, peer: usize) -> Result<bool> {
        let mut moved = false;
        for _ in 0..FRAMES {
            let incoming = &mut self.rx[peer];
            if let Some(header) = incoming.header_left() {
                let n = self.mesh.link(peer).try_recv(header)?;
                if n == 0 {
                    return Ok(moved);
                }
                moved = true;
                let Some(header) = incoming.fill_header(peer, n)? else {
                    continue;
                };
                // A message that has begun to come was counted.
                let seq = match incoming.message {
                    Some(_) => shared.counts.received(peer).wrapping_sub(1),
                    None => shared.counts.received(peer),
                };
                if incoming.accept(&header, peer, self.ids, seq)? {
                    shared.counts.add_received(peer);
                    self.meet(shared, peer)?;
                }
            }
            let incoming = &mut self.rx[peer];
            let Some(message) = &mut incoming.message else {
                return Err(Error::internal("a frame without a message"));
            };
            if matches!(message.target, Target::None) {
                // There may be room now.
                if !make_room(&mut self.early_bytes, message) {
                    return Ok(moved);
                }
            }
            while incoming.frame_left > 0 {
                let length = incoming.frame_left;
                let link = self.mesh.link(peer);
                let n = match &mut message.target {
                    Target::None => 0,
                    Target::Early(bytes) => {
                        bytes.resize(message.got + length, 0);
                        link.try_recv(&mut bytes[message.got..])?
                    }
                    Target::Receive(pending) => {
                        let Direction::Receive { into, .. } = pending.request.way else {
                            return Err(Error::internal("a message for a send"));
                        };
                        // SAFETY: within the memory of the request: its length is the message's, which is at least
                        // `got + frame_left`. It is writable and nothing else accesses it until it is over.
                        let place = unsafe {
                            std::slice::from_raw_parts_mut(into.add(message.got), length)
                        };
                        link.try_recv(place)?
                    }
                };
                if n == 0 {
                    return Ok(moved);
                }
                moved = true;
                message.got += n;
                incoming.frame_left -= n;
            }
            let is_whole = message.got == message.total;
            incoming.next_frame();
            if is_whole && let Some(mut message) = incoming.message.take() {
                match std::mem::replace(&mut message.target, Target::None) {
                    Target::Receive(pending) => pending.finish(shared, Ok(peer)),
                    Target::Early(bytes) => self.early.push_back(Early {
                        peer,
                        message,
                        bytes,
                    }),
                    Target::None => return Err(Error::internal("a message without a place")),
                }
            }
        }
        Ok(moved)
    }

    /// A message of `peer` begins to come: finds its receive.
    fn meet(&mut self, shared: &Mailbox, peer: usize) -> Result<()> {
        let Some(message) = &mut self.rx[peer].message else {
            return Ok(());
        };
        let tag = message.tag;
        let found = self.posted.iter_mut().find(|p| p.takes(peer, tag));
        if let Some(pending) = found {
            // Compared in its place, to fail with the others.
            pending.compare(shared.rank, peer, &message.operation)?;
        }
        let found = self.posted.iter().position(|p| p.takes(peer, tag));
        if let Some(pending) = found.and_then(|at| self.posted.remove(at)) {
            pending.matched(shared);
            message.target = Target::Receive(Box::new(pending));
        } else {
            make_room(&mut self.early_bytes, message);
        }
        Ok(())
    }

    /// All requests, in no order.
    fn pending(&self) -> impl Iterator<Item = &Pending> {
        let arriving =
            self.rx
                .iter()
                .filter_map(|incoming| match &incoming.message.as_ref()?.target {
                    Target::Receive(pending) => Some(&**pending),
                    _ => None,
                });
        let sends = self.tx.iter().flat_map(|outbox| &outbox.queue);
        sends.chain(arriving).chain(&self.posted)
    }

    /// The next deadline.
    fn check_deadlines(&self, shared: &Mailbox, now: Instant) -> Result<Instant> {
        let mut next = now + LOOK;
        let busy = || shared.flight.others_busy();
        let (world, rank) = (self.rx.len(), shared.rank);
        let passed = |pending: &&Pending| pending.deadline.has_passed(now, 0, busy);
        let late: Vec<&Pending> = self.pending().filter(passed).collect();
        if let Some(first) = late.first() {
            let mut missing: Vec<(usize, &str)> = late
                .iter()
                .flat_map(|late| late.awaited(world, rank))
                .collect();
            missing.sort_unstable();
            missing.dedup_by_key(|(peer, _)| *peer);
            let ranks: Vec<usize> = missing.iter().map(|(peer, _)| *peer).collect();
            let blame = shared.flight.blame(&ranks);
            let (text, only) = first.deadline.late(&missing, "", blame);
            let error = Error::timeout(text);
            return Err(match only {
                Some(peer) => error.with_peer(peer),
                None => error,
            });
        }
        for pending in self.pending() {
            next = next.min(pending.deadline.at(0));
        }
        Ok(next)
    }

    /// Records which ranks a waiting thread waits for.
    fn note_wait(&mut self, shared: &Mailbox) {
        let (world, rank) = (self.rx.len(), shared.rank);
        let mut waiting = self
            .pending()
            .filter(|p| p.ticket.waiters.some())
            .peekable();
        let first = waiting.peek().map(|first| (first.entry, first.limit));
        let is_other = |noted: &u64| first.is_none_or(|(entry, _)| entry != *noted);
        if let Some(before) = self.noted.filter(is_other) {
            shared.flight.stop_waiting(before);
        }
        let ranks = waiting.flat_map(|p| p.awaited(world, rank));
        if let Some((entry, limit)) = first {
            let ranks = ranks.map(|(peer, _)| peer);
            shared.flight.waiting(entry, ranks, limit);
        } else {
            drop(ranks);
        }
        self.noted = first.map(|(entry, _)| entry);
    }

    /// Nothing has moved since the first of the `times`: reports it to the other ranks, if a thread waits.
    fn report_stall(&mut self, shared: &Mailbox, times: (Instant, Instant)) {
        let Some(mut board) = self.board.take() else {
            return;
        };
        let mut waiting = self
            .pending()
            .filter(|p| p.ticket.waiters.some())
            .peekable();
        let first = waiting.peek();
        if let Some(first) = first {
            let signature = first.signature;
            let awaits = waiting.filter_map(|pending| {
                let (peer, takes) = match pending.request.way {
                    Direction::Send { to, .. } => (to, None),
                    // Any of two is the other one.
                    Direction::Receive { from, .. } => {
                        let other = (self.rx.len() == 2).then(|| 1 - shared.rank);
                        let peer = from.or(other)?;
                        let arriving = self.rx[peer].message.as_ref();
                        let is_here = arriving.is_some_and(|message| {
                            matches!(&message.target, Target::Receive(p) if p.entry == pending.entry)
                        });
                        let seen = shared.counts.received(peer);
                        (peer, Some(seen - u64::from(is_here)))
                    }
                };
                Some(Awaited {
                    peer,
                    data: takes.is_some(),
                    takes,
                })
            });
            let is_blocked = || shared.users.is_one() && (shared.collectives.is_idle)();
            board.stalled(&signature, &shared.counts.begun(&is_blocked), awaits, times);
        } else {
            drop(waiting);
        }
        self.board = Some(board);
    }

    /// Ends all requests with an error.
    pub(super) fn fail(&mut self, shared: &Mailbox, error: &Error) {
        let mut all = std::mem::take(&mut *super::lock(&shared.inbox));
        for outbox in &mut self.tx {
            all.extend(outbox.queue.drain(..));
        }
        for incoming in &mut self.rx {
            // What still comes of it finds no place.
            incoming.gone = true;
            if let Some(message) = incoming.message.take()
                && let Target::Receive(pending) = message.target
            {
                all.push(*pending);
            }
        }
        all.extend(self.posted.drain(..));
        for pending in all {
            pending.finish(shared, Err(error.clone()));
        }
    }
}

impl Incoming {
    /// A message has begun to come for which there is a receive.
    fn is_awaited(&self) -> bool {
        let message = self.message.as_ref();
        message.is_some_and(|message| matches!(message.target, Target::Receive(_)))
    }

    /// A message has begun to come for which there is neither a receive nor room.
    fn is_stuck(&self) -> bool {
        let message = self.message.as_ref();
        message.is_some_and(|message| matches!(message.target, Target::None))
    }
}

/// Reserves memory for a message without a receive, if there is room.
fn make_room(early_bytes: &mut usize, message: &mut Arriving) -> bool {
    let mut bytes = Vec::new();
    let cost = message.total.saturating_add(EARLY_BYTES);
    let fits = cost <= EARLY_MAX - (*early_bytes).min(EARLY_MAX)
        && bytes.try_reserve_exact(message.total).is_ok();
    if fits {
        *early_bytes += cost;
        message.target = Target::Early(bytes);
    }
    fits
}

/// Copies what has come of a message to its receive.
fn copy(pending: &Pending, bytes: &[u8]) {
    if let Direction::Receive { into, .. } = pending.request.way
        && !bytes.is_empty()
    {
        // SAFETY: the request's memory has the message's length, of which these are the first bytes; it is writable, and
        // nothing else accesses it until the request is over.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
    }
}

fn left(peer: usize) -> Error {
    let how = format!("rank {peer} left the group while data was expected from it");
    Error::peer_lost(peer, how)
}
