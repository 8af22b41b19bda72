//! Boxing: the conversion of a tensor from one layout to another, as steps that are chosen
//! by predicted time and then run.
//!
//! A route leads over layouts in which each mesh dimension has the SBP that it starts with, the one
//! that it ends with, or [`Sbp::Broadcast`]. [`Boxing::plan`] looks at all of them (27 at most)
//! and takes the one whose steps take least time by the cost model of `phalanx plan`. All ranks
//! know the same layouts and costs, so all take the same.
//!
//! No bit depends on the route: ranges are copied, and partial values are folded
//! dimension by dimension, the last one first, each in ascending rank order.

mod run;

use std::fmt;
use std::ops::Range;

use phalanx_comm::plan::{self, Collective, Hosts, Method};
use phalanx_comm::{DType, Selector};

pub(crate) use run::{copy, slice};

use crate::error::{Error, Result};
use crate::layout::{Block, Layout};
use crate::placement::{Placement, coordinates};
use crate::sbp::{self, Fold, Sbp};

/// Bytes of one element.
const ELEM_BYTES: usize = size_of::<f32>();

/// What one step does; dimensions are the mesh's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StepKind {
    /// Each rank keeps a range of what it has.
    Slice,
    /// Each rank fills the rest of the tensor with the fold's identity element: a split tensor becomes
    /// partial.
    Pad,
    /// The first rank of a dimension keeps its tensor, the others hold -0.0: a whole tensor
    /// becomes partial.
    Keep {
        /// The mesh dimension.
        dim: usize,
    },
    /// Whole tensors that are equal are their own minimum and maximum: nothing is done.
    Rename,
    /// The ranges of the ranks of one dimension are gathered on all of them.
    AllGather {
        /// The mesh dimension.
        dim: usize,
    },
    /// The partial tensors of one dimension are folded on all of its ranks.
    AllReduce {
        /// The mesh dimension.
        dim: usize,
        /// The fold.
        fold: Fold,
    },
    /// The partial tensors of one dimension are added, and each of its ranks gets a range of the sum.
    ReduceScatter {
        /// The mesh dimension.
        dim: usize,
    },
    /// Each rank gets the parts of its new range from the ranks that have them (all-to-all).
    Exchange {
        /// The mesh dimension whose ranks exchange, if it is one only.
        dim: Option<usize>,
    },
}

/// One step of a boxing.
#[derive(Clone, Debug)]
pub struct Step {
    /// What is done.
    pub kind: StepKind,
    /// The layout after it.
    pub to: Layout,
    /// Bytes that each rank sends to others, by rank.
    pub sent: Vec<usize>,
    /// Predicted time in seconds.
    pub seconds: f64,
}

/// The steps from one layout to another.
#[derive(Clone, Debug)]
pub struct Boxing {
    names: Vec<String>,
    from: Layout,
    to: Layout,
    steps: Vec<Step>,
}

impl Boxing {
    /// The steps with least predicted time.
    ///
    /// # Errors
    /// `Usage` when shapes or meshes differ.
    pub fn plan(placement: &Placement, from: &Layout, to: &Layout) -> Result<Self> {
        if from.shape() != to.shape() || from.mesh() != to.mesh() {
            return Err(Error::usage(format!(
                "a tensor {from} on a mesh of {:?} cannot become {to} on a mesh of {:?}",
                from.mesh(),
                to.mesh()
            )));
        }
        let blocks = |layout: &Layout| (0..layout.ranks()).map(|r| layout.block(r)).collect();
        let nodes = nodes(from, to).into_iter();
        let (mut folded, a) = (Vec::new(), from.sbp());
        let waits = |d: usize| {
            let waits = a[d] == to.sbp()[d] && folded.iter().all(|s| *s == a[d]);
            folded.extend(Some(a[d]).filter(|s| s.is_partial() && !waits));
            waits
        };
        let search = Search {
            placement,
            to,
            nodes: nodes.map(|l| (l.clone(), blocks(&l))).collect(),
            waits: (0..from.sbp().len()).map(waits).collect(),
        };
        let steps = search.shortest(from).ok_or_else(|| {
            Error::usage(format!("no sequence of collectives turns {from} into {to}"))
        })?;
        Ok(Boxing {
            names: placement.names().to_vec(),
            from: from.clone(),
            to: to.clone(),
            steps,
        })
    }

    /// The layout before.
    pub fn from(&self) -> &Layout {
        &self.from
    }

    /// The layout after.
    pub fn to(&self) -> &Layout {
        &self.to
    }

    /// The steps, in order; none where the layouts are equal.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Bytes that `rank` of the mesh sends to others in all steps: the data, and eight bytes a rank where
    /// an exchange compares lengths.
    ///
    /// Where all ranks share memory, all-reduces, and gathers of equal lengths, send nothing; the count is
    /// what they would send over a network.
    pub fn bytes_sent(&self, rank: usize) -> usize {
        self.steps.iter().map(|s| s.sent[rank]).sum()
    }

    /// Predicted time in seconds.
    pub fn seconds(&self) -> f64 {
        self.steps.iter().map(|s| s.seconds).sum()
    }

    /// Whether nothing is sent.
    pub fn is_local(&self) -> bool {
        self.steps.iter().all(|s| s.kind.is_local())
    }
}

impl StepKind {
    fn is_local(self) -> bool {
        matches!(
            self,
            StepKind::Slice | StepKind::Pad | StepKind::Keep { .. } | StepKind::Rename
        )
    }
}

/// One line, then one for each step: what it does, over which dimension, the layout after
/// it, and the bytes that the rank which sends most sends.
impl fmt::Display for Boxing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (sbp::list(self.from.sbp()), sbp::list(self.to.sbp()));
        write!(f, "{:?} {from} to {to}", self.from.shape())?;
        if self.steps.is_empty() {
            return f.write_str(": nothing to do");
        }
        let most = (0..self.from.ranks()).map(|r| self.bytes_sent(r)).max();
        write!(f, ": {} B sent by a rank at most", most.unwrap_or(0))?;
        for step in &self.steps {
            let over = |dim: usize| format!(" over {}", self.names[dim]);
            let what = match step.kind {
                StepKind::Slice => "slice, local".to_owned(),
                StepKind::Pad => "pad, local".to_owned(),
                StepKind::Keep { dim } => format!("keep on the first rank{}, local", over(dim)),
                StepKind::Rename => "nothing, the ranks have the same".to_owned(),
                StepKind::AllGather { dim } => format!("all-gather{}", over(dim)),
                StepKind::AllReduce { dim, fold } => {
                    format!("all-reduce ({}){}", fold.op(), over(dim))
                }
                StepKind::ReduceScatter { dim } => format!("reduce-scatter (sum){}", over(dim)),
                StepKind::Exchange { dim: Some(dim) } => format!("all-to-all{}", over(dim)),
                StepKind::Exchange { dim: None } => "all-to-all over the mesh".to_owned(),
            };
            let to = sbp::list(step.to.sbp());
            write!(f, "\n  {what}: {to}")?;
            if !step.kind.is_local() {
                write!(
                    f,
                    ", {} B, {:.1} µs",
                    step.sent.iter().max().unwrap_or(&0),
                    step.seconds * 1e6
                )?;
            }
        }
        Ok(())
    }
}

/// The layouts that a route may lead over.
fn nodes(from: &Layout, to: &Layout) -> Vec<Layout> {
    let dims = from.mesh().len();
    let mut all: Vec<Layout> = vec![from.clone()];
    for code in 0..3usize.pow(dims as u32) {
        // 0: as at the start, 1: as at the end, 2: whole.
        let choice: Vec<usize> = (0..dims).map(|d| code / 3usize.pow(d as u32) % 3).collect();
        if let Some(layout) = mixed(from, to, &choice)
            && !all.contains(&layout)
        {
            all.push(layout);
        }
    }
    if !all.contains(to) {
        all.push(to.clone());
    }
    all
}

/// The layout with each mesh dimension as `choice` says, if the two say where its axes are cut.
fn mixed(from: &Layout, to: &Layout, choice: &[usize]) -> Option<Layout> {
    let sbp: Vec<Sbp> = choice
        .iter()
        .enumerate()
        .map(|(d, c)| match c {
            0 => from.sbp()[d],
            1 => to.sbp()[d],
            _ => Sbp::Broadcast,
        })
        .collect();
    let mut known = true;
    let layout = Layout::cut_by(from.mesh(), from.shape(), &sbp, |axis| {
        let split: Vec<usize> = (0..sbp.len())
            .filter(|d| sbp[*d] == Sbp::Split(axis))
            .collect();
        let of = |layout: &Layout, which: usize| {
            let own: Vec<usize> = layout.dims_of(axis).collect();
            let all_of_it = split.iter().all(|d| choice[*d] == which);
            match all_of_it {
                true if own == split => layout.shared_cuts(axis),
                true if own.starts_with(&split) => layout.outer_cuts(axis, split.len()),
                _ => None,
            }
        };
        let cuts = of(from, 0).or_else(|| of(to, 1));
        known &= cuts.is_some();
        cuts
    });
    layout.ok().filter(|_| known)
}

struct Search<'a> {
    placement: &'a Placement,
    to: &'a Layout,
    nodes: Vec<(Layout, Vec<Block>)>,
    /// Dimensions that stay partial, and are not folded before others: they have the same fold as all that are.
    waits: Vec<bool>,
}

impl Search<'_> {
    /// Dijkstra's algorithm over the nodes; of equals the first one, on all ranks.
    fn shortest(&self, from: &Layout) -> Option<Vec<Step>> {
        let n = self.nodes.len();
        let place = |layout: &Layout| self.nodes.iter().position(|node| node.0 == *layout);
        let (start, end) = (place(from)?, place(self.to)?);
        let mut seconds = vec![f64::INFINITY; n];
        let mut way: Vec<Option<(usize, StepKind, f64)>> = vec![None; n];
        let mut done = vec![false; n];
        seconds[start] = 0.0;
        loop {
            let open = (0..n).filter(|i| !done[*i] && seconds[*i].is_finite());
            let next = open.min_by(|a, b| seconds[*a].total_cmp(&seconds[*b]))?;
            if next == end {
                break;
            }
            done[next] = true;
            for other in 0..n {
                if done[other] {
                    continue;
                }
                if let Some((kind, takes)) = self.step(&self.nodes[next], &self.nodes[other])
                    && seconds[next] + takes < seconds[other]
                {
                    seconds[other] = seconds[next] + takes;
                    way[other] = Some((next, kind, takes));
                }
            }
        }
        let mut steps = Vec::new();
        let mut at = end;
        while let Some((before, kind, seconds)) = way[at].take() {
            let ((x, a), (to, b)) = (&self.nodes[before], &self.nodes[at]);
            let sent = (0..x.ranks()).map(|rank| self.sent(kind, x, rank, (a, b)));
            steps.push(Step {
                kind,
                to: to.clone(),
                sent: sent.collect(),
                seconds,
            });
            at = before;
        }
        steps.reverse();
        Some(steps)
    }

    /// The one step from `x` to `y`, if there is one, and the seconds that it takes.
    fn step(
        &self,
        (x, a): &(Layout, Vec<Block>),
        (y, b): &(Layout, Vec<Block>),
    ) -> Option<(StepKind, f64)> {
        let dims = x.mesh().len();
        let changed: Vec<usize> = (0..dims).filter(|d| x.sbp()[*d] != y.sbp()[*d]).collect();
        let inside = |inner: &[Block], outer: &[Block]| {
            let mut pairs = inner.iter().zip(outer);
            pairs.all(|(i, o)| numel(i) == 0 || common(i, o) == **i)
        };
        let kind = match *changed {
            [dim] if x.sbp()[dim].is_partial() => {
                let Sbp::Partial(fold) = x.sbp()[dim] else {
                    return None;
                };
                // The last dimension first.
                let later = |d: usize| x.sbp()[d].is_partial() && !self.waits[d];
                if (dim + 1..dims).any(later) || y.sbp()[dim].is_partial() {
                    return None;
                }
                match y.sbp()[dim] {
                    Sbp::Broadcast if a == b => StepKind::AllReduce { dim, fold },
                    // Minima and maxima are folded whole: their gradients need to know who has them.
                    Sbp::Split(_) if fold == Fold::Sum && inside(b, a) && covers(x, dim, b, a) => {
                        StepKind::ReduceScatter { dim }
                    }
                    _ => return None,
                }
            }
            [dim] if y.sbp()[dim].is_partial() => match (x.sbp()[dim], y.sbp()[dim]) {
                (Sbp::Broadcast, Sbp::Partial(Fold::Sum)) if a == b => StepKind::Keep { dim },
                (Sbp::Broadcast, _) if a == b => StepKind::Rename,
                (Sbp::Split(_), _) if inside(a, b) && covers(x, dim, a, b) => StepKind::Pad,
                _ => return None,
            },
            _ if changed
                .iter()
                .any(|d| x.sbp()[*d].is_partial() || y.sbp()[*d].is_partial()) =>
            {
                return None;
            }
            _ if inside(b, a) => StepKind::Slice,
            [dim] if y.sbp()[dim] == Sbp::Broadcast && inside(a, b) && covers(x, dim, a, b) => {
                StepKind::AllGather { dim }
            }
            _ => StepKind::Exchange { dim: exchanging(x) },
        };
        Some((kind, self.seconds(kind, x, (a, b))))
    }

    /// Bytes that `rank` sends to others.
    fn sent(&self, kind: StepKind, x: &Layout, rank: usize, (a, b): (&[Block], &[Block])) -> usize {
        let own = numel(&a[rank]);
        let elems = match kind {
            kind if kind.is_local() => 0,
            StepKind::AllGather { dim } => (x.mesh()[dim] - 1) * own,
            StepKind::ReduceScatter { .. } => own - numel(&b[rank]),
            StepKind::AllReduce { dim, .. } => {
                let selector = self.placement.line(dim).selector();
                return all_reduce_bytes(selector, own, coordinates(x.mesh(), rank)[dim]);
            }
            _ => {
                let peers = partners(x, rank);
                let others = peers.iter().filter(|p| **p != rank);
                let data: usize = others.map(|p| numel(&common(&a[rank], &b[*p]))).sum();
                // The lengths are compared first, by all ranks of the group.
                let group = exchanging(x).map_or(x.ranks(), |d| x.mesh()[d]);
                return data * ELEM_BYTES + (group - 1) * size_of::<i64>();
            }
        };
        elems * ELEM_BYTES
    }

    fn seconds(&self, kind: StepKind, x: &Layout, (a, b): (&[Block], &[Block])) -> f64 {
        let most = |blocks: &[Block]| blocks.iter().map(|b| numel(b)).max().unwrap_or(0);
        let bytes = |elems: usize| elems * ELEM_BYTES;
        let (before, after) = (bytes(most(a)), bytes(most(b)));
        let copied = after as f64 / self.placement.group().selector().costs().core_bytes_per_s;
        let line = |dim: usize| self.placement.line(dim).selector();
        match kind {
            StepKind::Rename => 0.0,
            StepKind::AllGather { dim } => line(dim).predict(Method::AllGather, before) + copied,
            StepKind::ReduceScatter { dim } => {
                line(dim).predict(Method::ReduceScatter, after) + copied
            }
            StepKind::AllReduce { dim, .. } => {
                let selector = line(dim);
                let method = selector.choose(Collective::AllReduce, before, DType::F32);
                selector.predict(method, before)
            }
            StepKind::Exchange { .. } => {
                let selector = match exchanging(x) {
                    Some(dim) => line(dim),
                    None => self.placement.group().selector(),
                };
                let peers = (selector.hosts().world() - 1).max(1);
                let sent = (0..x.ranks()).map(|rank| self.sent(kind, x, rank, (a, b)));
                let each = sent.max().unwrap_or(0).div_ceil(peers);
                // Two rounds: the lengths, then the data.
                let lengths = selector.predict(Method::AllToAll, size_of::<i64>());
                lengths + selector.predict(Method::AllToAll, each) + copied
            }
            _ => copied,
        }
    }
}

/// Bytes that rank `rank` of a group sends in an all-reduce of `elems` elements.
fn all_reduce_bytes(selector: &Selector, elems: usize, rank: usize) -> usize {
    let hosts: &Hosts = selector.hosts();
    if hosts.world() <= 1 || elems == 0 {
        return 0;
    }
    let method = selector.choose(Collective::AllReduce, elems * ELEM_BYTES, DType::F32);
    let spec = plan::Spec {
        method,
        world: hosts.world(),
        count: elems,
        elem_bytes: ELEM_BYTES,
        root: 0,
        short_segments: false,
    };
    let plan = plan::build_on(&spec, hosts, rank);
    let sends = plan.rounds.iter().flat_map(|round| &round.sends);
    sends.map(|send| send.part.len * ELEM_BYTES).sum()
}

pub(crate) fn numel(block: &[Range<usize>]) -> usize {
    block.iter().map(ExactSizeIterator::len).product()
}

/// What two blocks have in common; empty ranges where nothing.
pub(crate) fn common(a: &[Range<usize>], b: &[Range<usize>]) -> Block {
    let meet = |(a, b): (&Range<usize>, &Range<usize>)| {
        let (start, end) = (a.start.max(b.start), a.end.min(b.end));
        start..end.max(start)
    };
    a.iter().zip(b).map(meet).collect()
}

/// Whether the `inner` blocks of the ranks of each line along `dim` make up the `outer` one.
fn covers(layout: &Layout, dim: usize, inner: &[Block], outer: &[Block]) -> bool {
    let stride: usize = layout.mesh()[dim + 1..].iter().product();
    let starts = |rank: &usize| (rank / stride).is_multiple_of(layout.mesh()[dim]);
    (0..layout.ranks()).filter(starts).all(|rank| {
        let line = line_of(layout, rank, &[dim]);
        let parts: usize = line.iter().map(|r| numel(&inner[*r])).sum();
        line.iter().all(|r| outer[*r] == outer[rank]) && parts == numel(&outer[rank])
    })
}

/// The ranks with `rank`'s coordinates in all dimensions but `free`, in ascending order.
fn line_of(layout: &Layout, rank: usize, free: &[usize]) -> Vec<usize> {
    let (mut line, mut stride) = (vec![rank], 1);
    for (d, &size) in layout.mesh().iter().enumerate().rev() {
        if free.contains(&d) {
            let first = |r: &usize| r - r / stride % size * stride;
            let each = |i| line.iter().map(move |r| first(r) + i * stride);
            line = (0..size).flat_map(each).collect();
        }
        stride *= size;
    }
    line
}

/// The ranks whose blocks together are the tensor that `rank` has a part of: those of its lines along split
/// dimensions.
pub(crate) fn partners(x: &Layout, rank: usize) -> Vec<usize> {
    let split = split_dims(x);
    line_of(x, rank, &split)
}

fn split_dims(x: &Layout) -> Vec<usize> {
    (0..x.mesh().len())
        .filter(|d| matches!(x.sbp()[*d], Sbp::Split(_)))
        .collect()
}

/// The dimension in which an exchange takes place, if one is enough.
fn exchanging(x: &Layout) -> Option<usize> {
    match split_dims(x)[..] {
        [dim] => Some(dim),
        _ if x.mesh().len() == 1 => Some(0),
        _ => None,
    }
}
