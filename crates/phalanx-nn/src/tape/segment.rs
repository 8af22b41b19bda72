//! Recomputation (activation checkpointing): the inner values of a part of the step are
//! freed when it has run, and recomputed when backward reaches it (T. Chen et al.,
//! "Training deep nets with sublinear memory cost", 2016).
//!
//! Values are recomputed from the recorded operations, not by running the model's code a
//! second time: masks keep their keys and batch norms their statistics, so the bits and
//! all state outside are the same as without recomputation.

use std::time::Instant;

use super::backward::BackwardContext;
use super::node::{Node, Operand, Visit};
use super::state::{SlotId, State};
use crate::error::{Error, Result};
use crate::param::Params;
use phalanx_kernels::par::ThreadPool;

/// Recorded operations between two points of the forward pass.
pub(super) struct Segment {
    /// Its first node.
    first: u32,
    /// One past its last node.
    end: u32,
    /// The enclosing segment.
    around: Option<u32>,
    /// Its values have been recomputed.
    done: bool,
}

/// The segments of a step, in the order in which they began. Vectors keep
/// their capacity.
#[derive(Default)]
pub(super) struct Segments {
    all: Vec<Segment>,
    /// The innermost that is still running.
    open: Option<u32>,
    /// For each node, the innermost segment it belongs to plus one.
    owner: Vec<u32>,
    /// The nodes to run again, during recomputation.
    wanted: Vec<bool>,
}

impl Segments {
    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.owner.clear();
        self.open = None;
    }

    /// First node of the innermost open segment.
    pub(super) fn open_from(&self) -> Option<u32> {
        self.open.map(|i| self.all[i as usize].first)
    }

    /// A node has been recorded.
    pub(super) fn note_node(&mut self) {
        self.owner.push(self.open.map_or(0, |i| i + 1));
    }

    /// First node of the innermost segment that a node belongs to.
    pub(super) fn first_of(&self, node: usize) -> Option<u32> {
        let i = self.owner[node].checked_sub(1)?;
        Some(self.all[i as usize].first)
    }
}

/// Context of an operation's computation, the first time and in recomputation.
pub(crate) struct Compute<'c> {
    pub(crate) threads: &'c ThreadPool,
    pub(crate) params: &'c Params,
    pub(crate) state: &'c mut State,
}

impl Compute<'_> {
    /// Elements of a weight.
    pub(crate) fn operand(&self, operand: Operand) -> &[f32] {
        match operand {
            Operand::Param(id) => self.params.get(id),
            Operand::Slot(id) => self.state.value(id),
        }
    }
}

impl State {
    /// Starts a segment; returns its index for [`close`](Self::close).
    pub(crate) fn open(&mut self) -> u32 {
        let first = self.nodes.len() as u32;
        let segments = &mut self.segments;
        segments.all.push(Segment {
            first,
            end: first,
            around: segments.open,
            done: false,
        });
        let index = segments.all.len() as u32 - 1;
        segments.open = Some(index);
        index
    }

    /// Ends a segment (and any inside it that an error left open): values that no handle
    /// refers to and that can be recomputed go back to the pool.
    pub(crate) fn close(&mut self, index: u32) {
        let segment = &mut self.segments.all[index as usize];
        segment.end = self.nodes.len() as u32;
        self.segments.open = segment.around;
        for node in &self.nodes[segment.first as usize..] {
            let Some(out) = node.output() else { continue };
            let slot = &mut self.slots[out.index()];
            if slot.handles == 0
                && slot.maker.is_some()
                && let Some(buf) = slot.buf.take()
            {
                slot.dropped = Some(index);
                self.pool.put(buf);
            }
        }
    }

    /// Whether this value comes from outside a segment that began with node `first`, or cannot be
    /// recomputed there.
    pub(super) fn is_external_to(&self, id: SlotId, first: u32) -> bool {
        self.slots[id.index()].maker.is_none_or(|m| m < first)
    }
}

/// Recomputes the values that `node`, the last of `nodes`, has saved and a segment has freed.
pub(super) fn restore(ctx: &mut BackwardContext<'_>, nodes: &[Node], node: &Node) -> Result<()> {
    loop {
        let mut missing = None;
        node.visit(&mut |v| {
            if let Visit::Saved(s) = v {
                let slot = &ctx.state.slots[s.index()];
                missing = missing.or(slot.dropped.filter(|_| slot.buf.is_none()));
            }
        });
        let Some(segment) = missing else {
            return Ok(());
        };
        recompute(ctx, nodes, segment)?;
    }
}

/// Runs a segment's operations again, those of the segment around it first; `nodes` are the
/// nodes that backward has not processed yet.
fn recompute(ctx: &mut BackwardContext<'_>, nodes: &[Node], index: u32) -> Result<()> {
    let segment = &mut ctx.state.segments.all[index as usize];
    if std::mem::replace(&mut segment.done, true) {
        return Err(Error::internal("a segment was asked for values twice"));
    }
    let (first, end) = (segment.first as usize, segment.end as usize);
    let end = end.min(nodes.len());
    if let Some(around) = segment.around
        && !ctx.state.segments.all[around as usize].done
    {
        recompute(ctx, nodes, around)?;
    }

    // Mark what is needed, backwards: saved values, and the values they are computed from.
    let mut wanted = std::mem::take(&mut ctx.state.segments.wanted);
    wanted.clear();
    wanted.resize(end - first, false);
    for (node, wanted) in nodes[first..end].iter().zip(&mut wanted).rev() {
        let Some(out) = node.output() else { continue };
        let slot = &ctx.state.slots[out.index()];
        let saved = slot.dropped == Some(index) && slot.saved > 0;
        *wanted = slot.buf.is_none() && (saved || slot.handles > 0);
        if *wanted {
            node.visit(&mut |v| {
                if let Visit::Input(s) = v {
                    ctx.state.hold(s);
                }
            });
        }
    }
    for (node, _) in nodes[first..end].iter().zip(&wanted).filter(|w| *w.1) {
        make(ctx, node, index)?;
    }
    ctx.state.segments.wanted = wanted;
    Ok(())
}

/// Runs one operation again, and frees the values that only it needed.
fn make(ctx: &mut BackwardContext<'_>, node: &Node, index: u32) -> Result<()> {
    let began = ctx.state.clock.as_ref().map(|_| Instant::now());
    let mut whole = true;
    node.visit(&mut |v| {
        if let Visit::Input(s) = v {
            whole &= ctx.state.slots[s.index()].buf.is_some();
        }
    });
    let out = node.output().filter(|_| whole);
    let out = out.ok_or_else(|| Error::internal("a recomputed operation lacks an operand"))?;
    let buf = node.recompute(&mut Compute {
        threads: ctx.threads,
        params: ctx.params,
        state: ctx.state,
    })?;
    ctx.state.slots[out.index()].buf = Some(buf);
    node.visit(&mut |v| {
        if let Visit::Input(s) = v {
            let state = &mut *ctx.state;
            state.let_go(s);
            // Values of a segment inside are recomputed later.
            let slot = &mut state.slots[s.index()];
            let later = slot
                .dropped
                .is_some_and(|d| d != index && !state.segments.all[d as usize].done);
            if later
                && slot.handles == 0
                && let Some(buf) = slot.buf.take()
            {
                state.pool.put(buf);
            }
        }
    });
    if let (Some(clock), Some(began)) = (&mut ctx.state.clock, began) {
        clock.backward(node.name(), node.param(), began);
    }
    Ok(())
}
