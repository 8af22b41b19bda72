//! Plans: what each rank sends, receives and computes, as data.
//!
//! A collective is described by a [`Spec`]; [`build`] turns it into one
//! [`RankPlan`] per rank, with no I/O and no clock. A plan is a list of
//! [`Round`]s. In a round all sends and receives run at the same time; when
//! all of them are complete, the round's local steps run in order; then the
//! next round begins. Rounds are numbered alike on all ranks, and a transfer
//! belongs to the same round on both sides. So no plan can deadlock: by
//! induction, all transfers of round *k* are posted on both sides once round
//! *k − 1* is complete everywhere it matters. That is what a plan *means*; the
//! executor runs ahead where no memory forbids it (`order.rs`).
//!
//! Because plans are data they can be *checked* before they are trusted:
//! `check` simulates all ranks symbolically and compares the result
//! with what the collective promises.
//!
//! Terms: a *bucket* (the caller's data) consists of *chunks* (one per rank); a
//! transfer moves as *segments* (one frame each).

mod all_gather_hosts;
mod all_reduce_chain;
mod all_reduce_direct;
mod all_reduce_one_round;
mod all_reduce_rails;
mod all_reduce_ring;
mod barrier;
mod broadcast_hosts;
mod broadcast_scatter;
mod broadcast_tree;
mod chunks;
mod grid;
mod hosts;
mod local;
mod local_stage;
pub(crate) mod order;
mod prefix_chain;
mod reduce_hosts;
mod reduce_owners;
mod reduce_root;
mod reduce_scatter_hosts;
mod uneven;

pub(crate) use all_reduce_direct::segment_bytes as direct_segment_bytes;
pub(crate) use broadcast_hosts::TREE_MAX_BYTES as BROADCAST_TREE_MAX_BYTES;
pub use chunks::Chunks;
pub use hosts::Hosts;
pub use local::PlanError;
pub(crate) use uneven::Uneven;

use crate::region::ALIGN_BYTES;

/// Which collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Collective {
    /// All ranks end with the reduction of all ranks' data.
    AllReduce,
    /// All ranks end with the root's data.
    Broadcast,
    /// The root ends with the reduction; the others' data is unchanged.
    Reduce,
    /// All ranks end with the data of all ranks, in rank order.
    AllGather,
    /// Rank `r` ends with part `r` of the reduction.
    ReduceScatter,
    /// The root ends with the data of all ranks, in rank order.
    Gather,
    /// Rank `r` ends with part `r` of the root's data.
    Scatter,
    /// Rank `r` ends with part `r` of the data of all ranks, in rank order.
    AllToAll,
    /// No rank leaves before all ranks have come.
    Barrier,
    /// One rank's data goes to one other rank. It has no plan: messages have an engine of their own.
    SendRecv,
    /// The barrier that ends a group in good order.
    Shutdown,
}

phalanx_fold::coded! {
    Collective: AllReduce "all_reduce", Broadcast "broadcast", Reduce "reduce", AllGather "all_gather",
    ReduceScatter "reduce_scatter", Gather "gather", Scatter "scatter", AllToAll "all_to_all",
    Barrier "barrier", SendRecv "send/recv", Shutdown "shutdown"
}

impl Collective {
    /// Whether one rank has a special role.
    pub const fn has_root(self) -> bool {
        matches!(
            self,
            Collective::Broadcast | Collective::Reduce | Collective::Gather | Collective::Scatter
        )
    }

    /// Whether elements are combined.
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter
        )
    }

    /// Whether data is moved unchanged from rank to rank.
    pub const fn moves(self) -> bool {
        matches!(
            self,
            Collective::Broadcast
                | Collective::AllGather
                | Collective::Gather
                | Collective::Scatter
                | Collective::AllToAll
        )
    }

    /// Whether data is replaced in place, so that `Output` initially holds the input
    /// and there is no `Input`.
    pub const fn in_place(self) -> bool {
        matches!(
            self,
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce
        )
    }
}

/// How a collective is carried out. Each method has a file in this directory, whose
/// head comment gives steps, bytes and order of additions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Method {
    /// All-reduce: reduce-scatter by chunk owners, then all-gather.
    AllReduceDirect,
    /// All-reduce: every rank gets all data and folds it.
    AllReduceOneRound,
    /// All-reduce over neighbours only.
    AllReduceRing,
    /// Broadcast down a binomial tree.
    BroadcastTree,
    /// Broadcast: scatter of chunks, then all-gather.
    BroadcastScatter,
    /// Reduce: all ranks send to the root, which folds.
    ReduceRoot,
    /// Reduce: chunk owners fold, then send to the root.
    ReduceOwners,
    /// All-gather in one round.
    AllGather,
    /// Reduce-scatter in one round.
    ReduceScatter,
    /// Gather in one round.
    Gather,
    /// Scatter in one round.
    Scatter,
    /// All-to-all in one round.
    AllToAll,
    /// Dissemination barrier.
    Barrier,
    /// All-reduce over several hosts: on each host, across them, on each host.
    AllReduceRails,
    /// All-reduce over several hosts: the prefix of the fold goes from host to
    /// host.
    AllReduceChain,
    /// Broadcast to every host once, then inside it.
    BroadcastHosts,
    /// All-gather: every part to every host once, then inside it.
    AllGatherHosts,
    /// Reduce: the prefix of the fold passes every host once.
    ReduceHosts,
    /// Reduce-scatter: the prefix of the fold passes every host once.
    ReduceScatterHosts,
}

/// The order and rounding of a method's additions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fold {
    /// The left fold in ascending rank order, rounded once.
    Once,
    /// The same; f16 and bf16 are rounded on every host.
    PerHost,
    /// Another order.
    Other,
}

/// A method, its collective, its name, and how it folds.
type Row = (Method, Collective, &'static str, Fold);

use {Collective as C, Fold as F, Method as M};

impl Method {
    /// Every method, in wire order.
    const TABLE: [Row; 19] = [
        (M::AllReduceDirect, C::AllReduce, "direct", F::Once),
        (M::AllReduceOneRound, C::AllReduce, "one-round", F::Once),
        (M::AllReduceRing, C::AllReduce, "ring", F::Other),
        (M::BroadcastTree, C::Broadcast, "tree", F::Once),
        (
            M::BroadcastScatter,
            C::Broadcast,
            "scatter+all-gather",
            F::Once,
        ),
        (M::ReduceRoot, C::Reduce, "root folds", F::Once),
        (M::ReduceOwners, C::Reduce, "owners fold", F::Once),
        (M::AllGather, C::AllGather, "one round", F::Once),
        (M::ReduceScatter, C::ReduceScatter, "one round", F::Once),
        (M::Gather, C::Gather, "one round", F::Once),
        (M::Scatter, C::Scatter, "one round", F::Once),
        (M::AllToAll, C::AllToAll, "one round", F::Once),
        (M::Barrier, C::Barrier, "dissemination", F::Once),
        (M::AllReduceRails, C::AllReduce, "rails", F::Other),
        (M::AllReduceChain, C::AllReduce, "chain", F::PerHost),
        (M::BroadcastHosts, C::Broadcast, "hosts", F::Once),
        (M::AllGatherHosts, C::AllGather, "hosts", F::Once),
        (M::ReduceHosts, C::Reduce, "hosts", F::PerHost),
        (M::ReduceScatterHosts, C::ReduceScatter, "hosts", F::PerHost),
    ];

    const fn row(self) -> &'static Row {
        &Self::TABLE[self as usize]
    }

    /// Every method, in wire order.
    pub fn all() -> impl Iterator<Item = Method> {
        Self::TABLE.iter().map(|row| row.0)
    }

    /// The collective that this method carries out. (A dissemination barrier
    /// also serves [`Collective::Shutdown`].)
    pub const fn collective(self) -> Collective {
        self.row().1
    }

    /// Whether reductions are the left fold in ascending rank order. All but
    /// those that [round on every host](Method::rounds_per_host) then round once,
    /// at the end.
    pub const fn canonical(self) -> bool {
        !matches!(self.row().3, Fold::Other)
    }

    /// Whether the prefix of the fold is stored between hosts, so that f16 and bf16,
    /// which are folded in f32, are rounded on every host.
    pub const fn rounds_per_host(self) -> bool {
        matches!(self.row().3, Fold::PerHost)
    }

    /// The name used in messages and logs.
    pub const fn name(self) -> &'static str {
        self.row().2
    }

    /// Code in frame headers.
    pub(crate) const fn wire(self) -> u8 {
        self as u8 + 1
    }

    /// Inverse of [`Method::wire`].
    pub(crate) fn from_wire(code: u8) -> Option<Self> {
        let row = Self::TABLE.get(usize::from(code.checked_sub(1)?))?;
        Some(row.0)
    }
}

/// One collective, independent of the rank: what all ranks agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// How it is carried out.
    pub method: Method,
    /// Ranks in the group.
    pub world: usize,
    /// Elements: of the whole data where it is replaced in place, otherwise
    /// of one rank's part.
    pub count: usize,
    /// Bytes of one element; chunk boundaries are multiples of 64 bytes.
    pub elem_bytes: usize,
    /// The root, if there is one; otherwise 0.
    pub root: usize,
    /// Whether [`Method::AllReduceDirect`] cuts chunks into short segments.
    pub short_segments: bool,
}

impl Spec {
    /// Elements that the caller's input buffer must have on `rank`.
    pub fn input_elems(&self, rank: usize) -> usize {
        let all = self.count * self.world;
        match self.method.collective() {
            Collective::AllGather | Collective::Gather => self.count,
            Collective::ReduceScatter | Collective::AllToAll => all,
            Collective::Scatter if rank == self.root => all,
            _ => 0,
        }
    }

    /// Elements that the caller's output buffer must have on `rank`.
    pub fn output_elems(&self, rank: usize) -> usize {
        let all = self.count * self.world;
        match self.method.collective() {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => self.count,
            Collective::AllGather | Collective::AllToAll => all,
            Collective::ReduceScatter | Collective::Scatter => self.count,
            Collective::Gather if rank == self.root => all,
            _ => 0,
        }
    }

    /// How `count` elements are split into one chunk per rank.
    pub fn chunks(&self) -> Chunks {
        Chunks::new(self.count, self.world, self.line_elems())
    }

    /// Elements in 64 bytes.
    fn line_elems(&self) -> usize {
        line_elems(self.elem_bytes)
    }

    /// Elements of a segment: `even`, within these bounds in whole elements,
    /// then padded.
    fn segment_elems(&self, even: usize, bytes: std::ops::RangeInclusive<usize>) -> usize {
        let elems = |bytes: &usize| (bytes / self.elem_bytes.max(1)).max(1);
        self.padded(even.clamp(elems(bytes.start()), elems(bytes.end())))
    }

    /// [`padded_elems`] of this element type.
    fn padded(&self, elems: usize) -> usize {
        padded_elems(elems, self.elem_bytes)
    }
}

/// Elements in 64 bytes.
pub(crate) fn line_elems(elem_bytes: usize) -> usize {
    (ALIGN_BYTES / elem_bytes.max(1)).max(1)
}

/// `elems` rounded up to whole 64-byte lines, so that the next run of
/// scratch memory is aligned.
fn padded_elems(elems: usize, elem_bytes: usize) -> usize {
    elems.next_multiple_of(line_elems(elem_bytes))
}

/// The memory of a [`Part`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buf {
    /// The caller's input; only read.
    Input,
    /// The caller's output, which also holds the input of in-place collectives.
    Output,
    /// Working memory; undefined when the plan starts.
    Scratch,
}

/// A run of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Its memory.
    pub buf: Buf,
    /// Its first element.
    pub start: usize,
    /// Its elements.
    pub len: usize,
}

impl Part {
    fn new(buf: Buf, start: usize, len: usize) -> Self {
        Part { buf, start, len }
    }

    fn of(buf: Buf, range: std::ops::Range<usize>) -> Self {
        Part::new(buf, range.start, range.len())
    }

    fn end(&self) -> usize {
        self.start + self.len
    }

    fn overlaps(&self, other: &Part) -> bool {
        self.buf == other.buf
            && self.len > 0
            && other.len > 0
            && self.start < other.end()
            && other.start < self.end()
    }
}

/// One message, seen from one side. A message of zero elements is still one (empty)
/// frame: barriers consist of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The other rank.
    pub peer: usize,
    /// What is read, or where it is written.
    pub part: Part,
}

/// Work on this rank alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Local {
    /// `into` = left fold of the sources in this order, rounded once.
    Fold {
        /// Where the result goes; may equal a source, must not overlap one
        /// otherwise.
        into: Part,
        /// What is folded, first to last.
        sources: Vec<Part>,
        /// Whether this completes the reduction, so that a mean is scaled.
        finish: bool,
    },
    /// `into` = `from`.
    Copy {
        /// What is read.
        from: Part,
        /// Where it goes.
        into: Part,
    },
}

/// Transfers that run at the same time, then local steps in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// At most one per peer.
    pub sends: Vec<Transfer>,
    /// At most one per peer.
    pub recvs: Vec<Transfer>,
    /// Run in order when all transfers are complete.
    pub local: Vec<Local>,
}

impl Round {
    /// Adds a send unless it is empty.
    fn send(&mut self, peer: usize, part: Part) {
        if part.len > 0 {
            self.sends.push(Transfer { peer, part });
        }
    }

    /// Adds a receive unless it is empty.
    fn recv(&mut self, peer: usize, part: Part) {
        if part.len > 0 {
            self.recvs.push(Transfer { peer, part });
        }
    }

    /// Adds the fold that completes a reduction, unless it is empty.
    fn fold_all(&mut self, into: Part, sources: Vec<Part>) {
        if into.len > 0 {
            self.local.push(Local::Fold {
                into,
                sources,
                finish: true,
            });
        }
    }

    /// Adds a copy unless it is empty.
    fn copy(&mut self, from: Part, into: Part) {
        if into.len > 0 {
            self.local.push(Local::Copy { from, into });
        }
    }
}

/// What one rank does in one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPlan {
    /// Ranks in the group.
    pub world: usize,
    /// The rank whose plan this is.
    pub rank: usize,
    /// Elements of the caller's input.
    pub input_elems: usize,
    /// Elements of the caller's output.
    pub output_elems: usize,
    /// Elements of working memory.
    pub scratch_elems: usize,
    /// The rounds, in order.
    pub rounds: Vec<Round>,
}

impl RankPlan {
    fn new(spec: &Spec, rank: usize) -> Self {
        RankPlan {
            world: spec.world,
            rank,
            input_elems: spec.input_elems(rank),
            output_elems: spec.output_elems(rank),
            scratch_elems: 0,
            rounds: Vec::new(),
        }
    }

    /// Elements that this rank sends to all its peers together.
    pub fn sent_elems(&self) -> usize {
        self.rounds
            .iter()
            .flat_map(|round| &round.sends)
            .map(|send| send.part.len)
            .sum()
    }
}

/// The plan of `rank` when all ranks are on one host.
pub fn build(spec: &Spec, rank: usize) -> RankPlan {
    build_on(spec, &Hosts::one(spec.world), rank)
}

/// The plan of `rank`; `hosts` has `spec.world` ranks. Pure: equal arguments
/// give equal plans on every rank.
pub fn build_on(spec: &Spec, hosts: &Hosts, rank: usize) -> RankPlan {
    // A rank alone has the result already. The methods below count on a second rank.
    if spec.world == 1 && spec.method.collective().in_place() {
        return RankPlan::new(spec, rank);
    }
    match spec.method {
        Method::AllReduceRails => all_reduce_rails::build(spec, hosts, rank),
        Method::AllReduceChain => all_reduce_chain::build(spec, hosts, rank),
        Method::AllReduceDirect => all_reduce_direct::build(spec, rank),
        Method::AllReduceOneRound => all_reduce_one_round::build(spec, rank),
        Method::AllReduceRing => all_reduce_ring::build(spec, rank),
        Method::BroadcastTree => broadcast_tree::build(spec, rank),
        Method::BroadcastScatter => broadcast_scatter::build(spec, rank),
        Method::BroadcastHosts => broadcast_hosts::build(spec, hosts, rank),
        Method::ReduceRoot => reduce_root::build(spec, rank),
        Method::ReduceOwners => reduce_owners::build(spec, rank),
        Method::ReduceHosts => reduce_hosts::build(spec, hosts, rank),
        Method::AllGatherHosts => all_gather_hosts::build(spec, hosts, rank),
        Method::ReduceScatterHosts => reduce_scatter_hosts::build(spec, hosts, rank),
        Method::AllGather
        | Method::ReduceScatter
        | Method::Gather
        | Method::Scatter
        | Method::AllToAll => uneven::build(spec, rank),
        Method::Barrier => barrier::build(spec, rank),
    }
}

/// The peers of `rank` in rotated order: step `k` sends to `rank + k` and
/// receives from `rank − k`, so that at any moment each receiver has about
/// one sender.
fn rotation(rank: usize, world: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..world).map(move |k| ((rank + k) % world, (rank + world - k) % world))
}

/// The place of `peer` among the `world − 1` scratch slots of `rank`.
fn slot(rank: usize, peer: usize) -> usize {
    if peer < rank { peer } else { peer - 1 }
}

#[cfg(test)]
mod tests;
