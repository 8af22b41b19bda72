//! Runs the steps of a boxing on this rank's part.

use std::borrow::Cow;
use std::ops::Range;

use phalanx_comm::{ProcessGroup, ReduceOp};

use super::{Block, Boxing, Step, StepKind, common, exchanging, numel, partners};
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::placement::{Placement, coordinates};
use crate::sbp::Fold;

impl Boxing {
    /// Converts this rank's part, row-major, and returns its new part.
    ///
    /// *Blocks until* all ranks of the mesh that a collective needs have come, at most the
    /// group's deadline.
    ///
    /// # Errors
    /// `Usage` when `part` has another length than this rank's; `Comm` when a collective fails.
    pub fn run(&self, placement: &Placement, part: &[f32]) -> Result<Vec<f32>> {
        let mut to = vec![0.0; self.to.numel_of(placement.rank())];
        self.run_into(placement, part, &mut to)?;
        Ok(to)
    }

    /// The same into memory of its new part's length.
    pub(crate) fn run_into(
        &self,
        placement: &Placement,
        part: &[f32],
        to: &mut [f32],
    ) -> Result<()> {
        if !placement.is_member() {
            return Ok(());
        }
        let own = self.from.numel_of(placement.rank());
        if part.len() != own {
            return Err(Error::usage(format!(
                "this rank has {own} elements of {}, got {}",
                self.from,
                part.len()
            )));
        }
        let Some((last, first)) = self.steps.split_last() else {
            to.copy_from_slice(part);
            return Ok(());
        };
        let (mut at, mut held) = (&self.from, Cow::Borrowed(part));
        for step in first {
            let mut made = vec![0.0; step.to.numel_of(placement.rank())];
            run_step(placement, at, step, &held, &mut made)?;
            (at, held) = (&step.to, Cow::Owned(made));
        }
        run_step(placement, at, last, &held, to)
    }

    /// The mesh dimension, if all there is to do is an all-gather of equal parts.
    pub(crate) fn one_gather(&self, placement: &Placement) -> Option<usize> {
        let [step] = &self.steps[..] else {
            return None;
        };
        let StepKind::AllGather { dim } = step.kind else {
            return None;
        };
        let blocks = along(placement, &self.from, dim);
        let own = numel(&blocks[0]);
        blocks.iter().all(|b| numel(b) == own).then_some(dim)
    }

    /// Puts what such an all-gather gave, part by part, where it belongs.
    pub(crate) fn place_gathered(&self, placement: &Placement, all: &[f32], to: &mut [f32]) {
        let Some(dim) = self.one_gather(placement) else {
            return;
        };
        let blocks = along(placement, &self.from, dim);
        let whole = self.to.block(placement.rank());
        match is_in_order(&blocks, &whole) {
            true => to.copy_from_slice(all),
            false => unpack(all, &blocks, to, &whole),
        }
    }
}

/// Runs one step from `part` to `to`, this rank's parts before and after it.
fn run_step(
    placement: &Placement,
    from: &Layout,
    step: &Step,
    part: &[f32],
    to: &mut [f32],
) -> Result<()> {
    let rank = placement.rank();
    let (a, b) = (from.block(rank), step.to.block(rank));
    let done = match step.kind {
        StepKind::Rename => {
            to.copy_from_slice(part);
            Ok(())
        }
        StepKind::Slice => {
            copy(part, &a, to, &b, &b);
            Ok(())
        }
        StepKind::Pad => {
            let sbp = step.to.sbp().iter().zip(from.sbp());
            let fold = sbp
                .filter(|(to, from)| to != from)
                .find_map(|(to, _)| to.fold());
            to.fill(fold.map_or(0.0, Fold::identity));
            copy(part, &a, to, &b, &a);
            Ok(())
        }
        StepKind::Keep { dim } => {
            match placement.coordinates()[dim] {
                0 => to.copy_from_slice(part),
                _ => to.fill(Fold::Sum.identity()),
            }
            Ok(())
        }
        StepKind::AllReduce { dim, fold } => {
            to.copy_from_slice(part);
            placement.line(dim).all_reduce(to, fold.op())
        }
        StepKind::AllGather { dim } => {
            let blocks = along(placement, from, dim);
            let lengths: Vec<usize> = blocks.iter().map(|b| numel(b)).collect();
            let group = placement.line(dim);
            match is_in_order(&blocks, &b) {
                true => gather(group, part, &lengths, to),
                false => {
                    let mut all = vec![0.0; to.len()];
                    let done = gather(group, part, &lengths, &mut all);
                    unpack(&all, &blocks, to, &b);
                    done
                }
            }
        }
        StepKind::ReduceScatter { dim } => {
            let blocks = along(placement, &step.to, dim);
            let lengths: Vec<usize> = blocks.iter().map(|b| numel(b)).collect();
            let packed = match is_in_order(&blocks, &a) {
                true => Cow::Borrowed(part),
                false => Cow::Owned(pack(part, &a, &blocks)),
            };
            let group = placement.line(dim);
            match lengths.iter().all(|n| *n == lengths[0]) {
                true => group.reduce_scatter(&packed[..], to, ReduceOp::Sum),
                false => group.reduce_scatter_v(&packed, &lengths, to, ReduceOp::Sum),
            }
        }
        StepKind::Exchange { .. } => exchange(placement, from, &step.to, part, to),
    };
    done.map_err(|e| Error::comm_while(format!("a tensor {from} could not become {}", step.to), e))
}

fn exchange(
    placement: &Placement,
    from: &Layout,
    to: &Layout,
    part: &[f32],
    own: &mut [f32],
) -> phalanx_comm::Result<()> {
    let rank = placement.rank();
    let (a, b) = (from.block(rank), to.block(rank));
    let (dim, partners) = (exchanging(from), partners(from, rank));
    let group = dim.map_or(placement.group(), |dim| placement.line(dim));
    // One block a rank of the group; empty for those that have nothing to give or to get.
    let nothing: Block = a.iter().map(|_| 0..0).collect();
    let mut gives = vec![nothing.clone(); group.world_size()];
    let mut gets = vec![nothing; group.world_size()];
    for peer in partners {
        let place = dim.map_or(peer, |dim| coordinates(from.mesh(), peer)[dim]);
        gives[place] = common(&a, &to.block(peer));
        gets[place] = common(&from.block(peer), &b);
    }
    let lengths = |blocks: &[Block]| blocks.iter().map(|b| numel(b)).collect::<Vec<_>>();
    let packed = pack(part, &a, &gives);
    let (sends, receives) = (lengths(&gives), lengths(&gets));
    let mut received = vec![0.0; receives.iter().sum()];
    group.all_to_all_v(&packed, &sends, &mut received, &receives)?;
    unpack(&received, &gets, own, &b);
    Ok(())
}

fn gather(
    group: &ProcessGroup,
    part: &[f32],
    lengths: &[usize],
    all: &mut [f32],
) -> phalanx_comm::Result<()> {
    match lengths.iter().all(|n| *n == lengths[0]) {
        true => group.all_gather(part, all),
        false => group.all_gather_v(part, lengths, all),
    }
}

/// The blocks of the ranks of this rank's line along `dim`.
fn along(placement: &Placement, layout: &Layout, dim: usize) -> Vec<Block> {
    let line = super::line_of(layout, placement.rank(), &[dim]);
    line.into_iter().map(|r| layout.block(r)).collect()
}

/// Whether the blocks, one behind the other, are the whole in its own order.
fn is_in_order(blocks: &[Block], whole: &[Range<usize>]) -> bool {
    // Only the outermost axis of more than one element may be cut.
    let first = whole.iter().position(|r| r.len() > 1).unwrap_or(0);
    blocks.iter().all(|b| {
        b[first.min(b.len())..]
            .iter()
            .skip(1)
            .eq(whole[first.min(whole.len())..].iter().skip(1))
    })
}

pub(crate) fn slice(part: &[f32], own: &[Range<usize>], wanted: &[Range<usize>]) -> Vec<f32> {
    let mut to = vec![0.0; numel(wanted)];
    copy(part, own, &mut to, wanted, wanted);
    to
}

fn pack(part: &[f32], own: &[Range<usize>], blocks: &[Block]) -> Vec<f32> {
    let mut packed = Vec::with_capacity(blocks.iter().map(|b| numel(b)).sum());
    for block in blocks {
        packed.extend_from_slice(&slice(part, own, block));
    }
    packed
}

fn unpack(packed: &[f32], blocks: &[Block], to: &mut [f32], whole: &[Range<usize>]) {
    let mut at = 0;
    for block in blocks {
        let len = numel(block);
        copy(&packed[at..at + len], block, to, whole, block);
        at += len;
    }
}

/// Copies the elements of `region` from memory that holds block `a` to memory that holds block `b`.
pub(crate) fn copy(
    from: &[f32],
    a: &[Range<usize>],
    to: &mut [f32],
    b: &[Range<usize>],
    region: &[Range<usize>],
) {
    if numel(region) == 0 {
        return;
    }
    // From this axis on all three are equal: one run of memory.
    let equal = |i: &usize| a[*i] == region[*i] && b[*i] == region[*i];
    let inner = (0..region.len()).rev().take_while(equal).count();
    let Some(axis) = (region.len() - inner).checked_sub(1) else {
        to.copy_from_slice(from);
        return;
    };
    let below: usize = region[axis + 1..]
        .iter()
        .map(ExactSizeIterator::len)
        .product();
    let run = region[axis].len() * below;
    let rows: usize = region[..axis].iter().map(ExactSizeIterator::len).product();
    let start = |block: &[Range<usize>], at: &[usize]| {
        let place = block.iter().zip(at);
        let outer = place.fold(0, |n, (r, at)| n * r.len() + at - r.start);
        outer * below
    };
    let mut at: Vec<usize> = region[..=axis].iter().map(|r| r.start).collect();
    for _ in 0..rows {
        let (f, t) = (start(&a[..=axis], &at), start(&b[..=axis], &at));
        to[t..t + run].copy_from_slice(&from[f..f + run]);
        for i in (0..axis).rev() {
            at[i] += 1;
            if at[i] < region[i].end {
                break;
            }
            at[i] = region[i].start;
        }
    }
}
