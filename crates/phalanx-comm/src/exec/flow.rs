//! The state of a running plan: which frames travel on which lane, and what may run now.
//!
//! A *lane* is one direction of the link to one peer. Transfers are split into frames;
//! the frames of a lane are sent and received in the order of the plan. Both sides
//! split alike, from the plan and the frame size alone.

use std::collections::VecDeque;

use crate::plan::order::{Order, Step, WINDOW};
use crate::plan::{Part, RankPlan};

use super::transfer::{Frame, Receiver, Sender};

/// How transfers are split into frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Framing {
    pub(super) segment_bytes: usize,
    pub(super) elem_bytes: usize,
}

impl Framing {
    /// The frames of a transfer of `total` bytes in round `step`. A transfer of zero
    /// bytes has one empty frame.
    pub(super) fn frames(
        &self,
        step: u32,
        total: usize,
    ) -> impl ExactSizeIterator<Item = Frame> + use<> {
        let frame_bytes = self.segment_bytes;
        (0..total.div_ceil(frame_bytes).max(1)).map(move |k| Frame {
            step,
            offset: (k * frame_bytes) as u64,
            // At most MAX_FRAME_BYTES: segment_bytes is clamped to it.
            length: frame_bytes.min(total - k * frame_bytes) as u32,
        })
    }
}

/// One frame of a lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneFrame {
    /// The operation it is a part of.
    pub(super) step: u32,
    pub(super) frame: Frame,
    /// The memory of the whole transfer.
    pub(super) part: Part,
}

/// The frames of one direction of the link to one peer.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    pub(super) peer: usize,
    pub(super) pieces: Vec<LaneFrame>,
}

/// A plan prepared to run; reused for every operation of its shape.
pub(super) struct Schedule {
    pub(super) order: Order,
    pub(super) tx: Vec<Lane>,
    pub(super) rx: Vec<Lane>,
    /// Frames of every operation; one for local steps, which end at once.
    pieces: Vec<u32>,
}

impl Schedule {
    pub(super) fn new(plan: &RankPlan, cut: Framing) -> Schedule {
        let order = Order::of(plan);
        let mut pieces = vec![1u32; order.steps.len()];
        let (mut tx, mut rx) = (Vec::new(), Vec::new());
        for (at, &(round, step)) in order.steps.iter().enumerate() {
            let (lanes, transfer) = match step {
                Step::Send(i) => (&mut tx, &plan.rounds[round as usize].sends[i]),
                Step::Recv(i) => (&mut rx, &plan.rounds[round as usize].recvs[i]),
                Step::Local(_) => continue,
            };
            let total = transfer.part.len * cut.elem_bytes;
            let frames = cut.frames(round, total);
            pieces[at] = frames.len() as u32;
            for frame in frames {
                let piece = LaneFrame {
                    step: at as u32,
                    frame,
                    part: transfer.part,
                };
                lane(lanes, transfer.peer).pieces.push(piece);
            }
        }
        Schedule {
            order,
            tx,
            rx,
            pieces,
        }
    }
}

/// The lane of a peer; lanes are in the order in which the plan first uses
/// them, which is rotated so that ranks do not all begin with the same peer.
fn lane(lanes: &mut Vec<Lane>, peer: usize) -> &mut Lane {
    let at = lanes.iter().position(|lane| lane.peer == peer);
    let at = at.unwrap_or_else(|| {
        lanes.push(Lane {
            peer,
            pieces: Vec::new(),
        });
        lanes.len() - 1
    });
    &mut lanes[at]
}

/// How far a schedule has come. One per executor; its memory is reused.
#[derive(Default)]
pub(super) struct Flow {
    /// Unfinished operations that each operation still waits for.
    waits: Vec<u32>,
    /// Unfinished frames of every operation.
    pieces: Vec<u32>,
    /// Unfinished operations of every round.
    in_round: Vec<u32>,
    /// The first unfinished round.
    pub(super) base: usize,
    /// Local steps that may run, in the order in which they became ready.
    ready: VecDeque<u32>,
    /// Local steps beyond the window that wait for nothing else.
    later: Vec<u32>,
    /// Next piece of every lane, and the state of its frame.
    pub(super) tx: Vec<(usize, Sender)>,
    pub(super) rx: Vec<(usize, Receiver)>,
}

impl Flow {
    pub(super) fn begin(&mut self, schedule: &Schedule) {
        let order = &schedule.order;
        self.waits.clone_from(&order.waits);
        self.pieces.clone_from(&schedule.pieces);
        self.in_round.clone_from(&order.in_round);
        self.base = 0;
        self.ready.clear();
        self.later.clear();
        if self.tx.len() < schedule.tx.len() {
            self.tx
                .resize_with(schedule.tx.len(), || (0, Sender::new()));
        }
        if self.rx.len() < schedule.rx.len() {
            self.rx
                .resize_with(schedule.rx.len(), || (0, Receiver::new()));
        }
        for (next, sender) in &mut self.tx {
            *next = 0;
            sender.reset();
        }
        for (next, receiver) in &mut self.rx {
            *next = 0;
            receiver.reset();
        }
        for (at, &(_, step)) in order.steps.iter().enumerate() {
            if matches!(step, Step::Local(_)) && self.waits[at] == 0 {
                self.later.push(at as u32);
            }
        }
        self.advance(order);
    }

    /// Whether everything is complete.
    pub(super) fn is_done(&self) -> bool {
        self.base == self.in_round.len()
    }

    /// Whether a piece's transfer may run now.
    pub(super) fn may_run(&self, piece: &LaneFrame) -> bool {
        self.waits[piece.step as usize] == 0 && self.in_window(piece.frame.step)
    }

    fn in_window(&self, round: u32) -> bool {
        (round as usize) < self.base + WINDOW
    }

    /// A local step that may run now; the caller runs it, then calls
    /// [`Flow::complete`].
    pub(super) fn next_local(&mut self) -> Option<u32> {
        self.ready.pop_front()
    }

    /// A frame of an operation, or a local step, is complete.
    pub(super) fn complete(&mut self, order: &Order, step: u32) {
        let at = step as usize;
        self.pieces[at] -= 1;
        if self.pieces[at] > 0 {
            return;
        }
        for &follower in order.followers(at) {
            let left = &mut self.waits[follower as usize];
            *left -= 1;
            if *left == 0 && matches!(order.steps[follower as usize].1, Step::Local(_)) {
                if self.in_window(order.steps[follower as usize].0) {
                    self.ready.push_back(follower);
                } else {
                    self.later.push(follower);
                }
            }
        }
        self.in_round[order.steps[at].0 as usize] -= 1;
        self.advance(order);
    }

    /// Skips finished rounds.
    fn advance(&mut self, order: &Order) {
        while self.in_round.get(self.base) == Some(&0) {
            self.base += 1;
        }
        if self.later.is_empty() {
            return;
        }
        let limit = self.base + WINDOW;
        let ready = &mut self.ready;
        self.later.retain(|&step| {
            let beyond = order.steps[step as usize].0 as usize >= limit;
            if !beyond {
                ready.push_back(step);
            }
            beyond
        });
    }
}
