//! The dependencies between operations that remain when rounds may overlap.
//!
//! A plan is written in rounds because that is easy to check. But waiting for the end
//! of each round before the next begins would leave the network idle while a rank
//! folds. So the executor runs ahead: an operation (a send, a receive, a local step)
//! may begin as soon as
//!
//! * every *earlier* operation of this rank is complete that touches the same
//!   memory, unless both only read it,
//! * the transfers with the same peer in the same direction are begun in the
//!   order of the plan, because that is how the peer expects them, and
//! * its round is less than [`WINDOW`] rounds ahead of the first unfinished one.
//!
//! Then every operation reads the same data as in the order of the rounds, so results
//! are the same to the last bit. There is no deadlock: of all unfinished operations of
//! all ranks, one of the lowest round waits only for finished ones, and it is the first
//! of its direction on both sides.
//!
//! A transfer of zero elements is a *signal* (barriers consist of these): it waits for
//! all operations of earlier rounds.

use std::ops::Range;

use super::{Local, Part, RankPlan, Round};

/// Rounds that may be in progress at the same time.
pub(crate) const WINDOW: usize = 16;

/// One operation of a rank, numbered in program order: the rounds one after
/// the other, in each the sends, then the receives, then the local steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Index into the round's sends.
    Send(usize),
    /// Index into the round's receives.
    Recv(usize),
    /// Index into the round's local steps.
    Local(usize),
}

/// The operations of one rank and their dependencies.
#[derive(Clone, Debug, Default)]
pub(crate) struct Order {
    /// Round and place in it of every operation.
    pub(crate) steps: Vec<(u32, Step)>,
    /// How many earlier operations each has to wait for.
    pub(crate) waits: Vec<u32>,
    /// Operations of every round.
    pub(crate) in_round: Vec<u32>,
    /// The operations that wait for operation `i`: `followers[starts[i]..starts[i + 1]]`.
    followers: Vec<u32>,
    starts: Vec<u32>,
}

impl Order {
    pub(crate) fn of(plan: &RankPlan) -> Order {
        let mut order = Order::default();
        let mut firsts = Vec::with_capacity(plan.rounds.len());
        let mut edges: Vec<(u32, u32)> = Vec::new();
        for (index, round) in plan.rounds.iter().enumerate() {
            let first = order.steps.len();
            firsts.push(first);
            let reach = firsts[index.saturating_sub(WINDOW)];
            let steps = (0..round.sends.len())
                .map(Step::Send)
                .chain((0..round.recvs.len()).map(Step::Recv))
                .chain((0..round.local.len()).map(Step::Local));
            for step in steps {
                let at = order.steps.len();
                // Transfers of a round do not touch each other (`check_local`).
                let until = if matches!(step, Step::Local(_)) {
                    at
                } else {
                    first
                };
                let mut waits = 0;
                for earlier in reach..until {
                    let (round_of, other) = order.steps[earlier];
                    if conflict(&plan.rounds[round_of as usize], other, round, step) {
                        edges.push((earlier as u32, at as u32));
                        waits += 1;
                    }
                }
                order.steps.push((index as u32, step));
                order.waits.push(waits);
            }
            order.in_round.push((order.steps.len() - first) as u32);
        }
        edges.sort_unstable();
        order.starts = vec![0; order.steps.len() + 1];
        for (earlier, _) in &edges {
            order.starts[*earlier as usize + 1] += 1;
        }
        for i in 1..order.starts.len() {
            order.starts[i] += order.starts[i - 1];
        }
        order.followers = edges.into_iter().map(|(_, later)| later).collect();
        order
    }

    /// The operations that wait for `step`, among others.
    pub(crate) fn followers(&self, step: usize) -> &[u32] {
        &self.followers[self.range(step)]
    }

    /// An order without any dependencies.
    #[cfg(test)]
    pub(crate) fn forget(&mut self) {
        self.waits.fill(0);
        self.starts.fill(0);
    }

    fn range(&self, step: usize) -> Range<usize> {
        self.starts[step] as usize..self.starts[step + 1] as usize
    }
}

/// Whether `b` (of round `in_b`) has to wait for the earlier `a` (of round `in_a`).
fn conflict(in_a: &Round, a: Step, in_b: &Round, b: Step) -> bool {
    if is_signal(in_a, a) || is_signal(in_b, b) {
        return true;
    }
    let (mut writes_a, mut writes_b) = (None, None);
    each_part(in_a, a, |part, written| {
        if written {
            writes_a = Some(*part);
        }
    });
    each_part(in_b, b, |part, written| {
        if written {
            writes_b = Some(*part);
        }
    });
    let mut found = false;
    if let Some(written) = writes_a {
        each_part(in_b, b, |part, _| found |= part.overlaps(&written));
    }
    if let Some(written) = writes_b {
        each_part(in_a, a, |part, _| found |= part.overlaps(&written));
    }
    found
}

/// A transfer without data, whose arrival is the message.
fn is_signal(round: &Round, step: Step) -> bool {
    match step {
        Step::Send(i) => round.sends[i].part.len == 0,
        Step::Recv(i) => round.recvs[i].part.len == 0,
        Step::Local(_) => false,
    }
}

/// Calls `see` with every part that an operation touches and whether it is
/// written; at most one is.
fn each_part(round: &Round, step: Step, mut see: impl FnMut(&Part, bool)) {
    match step {
        Step::Send(i) => see(&round.sends[i].part, false),
        Step::Recv(i) => see(&round.recvs[i].part, true),
        Step::Local(i) => match &round.local[i] {
            Local::Fold { into, sources, .. } => {
                see(into, true);
                sources.iter().for_each(|source| see(source, false));
            }
            Local::Copy { from, into } => {
                see(into, true);
                see(from, false);
            }
        },
    }
}
