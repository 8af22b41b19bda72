//! The plan checker: runs all ranks' plans on symbols instead of numbers.
//!
//! Every element of every buffer holds a *value*: which rank's data, or which
//! fold of which ranks' data in which order, and *which element* of it. Runs
//! of elements with the same value are kept as one cell, so the cost depends
//! on the number of chunks, not of elements. The simulation goes round by
//! round through all ranks. It finds
//!
//! * a send without its receive in the same round, or the other way round, or
//!   of another length (so: no deadlock);
//! * everything that [`RankPlan::check_local`] forbids;
//! * a read of memory that was not written, or a fold that mixes elements;
//! * a result that is not what the collective promises, in canonical order
//!   with one rounding (for chains one a host), or for the ring in ring order
//!   and for rails by hosts, and equal everywhere;
//! * more or fewer bytes sent than the method's file states, and a ring rank that talks
//!   to a rank other than its neighbours.

use std::collections::HashMap;

use super::sent::stated_sent_elems;
use crate::plan::{
    Buf, Collective, Hosts, Local, Method, Part, PlanError, RankPlan, Spec, build_on,
};

type Result<T = ()> = std::result::Result<T, PlanError>;

/// Builds the plans of all ranks, which are on one host, and checks them
/// together.
///
/// # Errors
///
/// [`PlanError`] with the first thing that is wrong.
pub fn check(spec: &Spec) -> Result {
    check_on(spec, &Hosts::one(spec.world))
}

/// Builds the plans of all ranks and checks them together.
///
/// # Errors
///
/// [`PlanError`] with the first thing that is wrong.
pub fn check_on(spec: &Spec, hosts: &Hosts) -> Result {
    let plans: Vec<RankPlan> = (0..spec.world)
        .map(|rank| build_on(spec, hosts, rank))
        .collect();
    check_plans(spec, hosts, &plans)
}

/// Checks given plans, one per rank, against what `spec` promises.
///
/// # Errors
///
/// [`PlanError`] with the first thing that is wrong.
pub fn check_plans(spec: &Spec, hosts: &Hosts, plans: &[RankPlan]) -> Result {
    if plans.len() != spec.world || hosts.world() != spec.world {
        return Err(PlanError::new("not one plan per rank"));
    }
    for (rank, plan) in plans.iter().enumerate() {
        if (plan.rank, plan.world) != (rank, spec.world)
            || plan.input_elems != spec.input_elems(rank)
            || plan.output_elems != spec.output_elems(rank)
        {
            return Err(PlanError::new(format!(
                "the plan of rank {rank} is for another call"
            )));
        }
        plan.check_local()?;
        let (sent, stated) = (plan.sent_elems(), stated_sent_elems(spec, hosts, rank));
        if sent != stated {
            return Err(PlanError::new(format!(
                "rank {rank} sends {sent} elements, {stated} are stated"
            )));
        }
    }
    if spec.method == Method::AllReduceRing {
        check_neighbours(plans)?;
    }
    let mut simulation = Simulation::new(spec, plans);
    let rounds = plans.iter().map(|p| p.rounds.len()).max().unwrap_or(0);
    for round in 0..rounds {
        simulation
            .round(plans, round)
            .map_err(|e| PlanError::new(format!("round {round}: {e}")))?;
    }
    simulation.check_result(spec, hosts)
}

fn check_neighbours(plans: &[RankPlan]) -> Result {
    let world = plans.len();
    for plan in plans {
        for round in &plan.rounds {
            let next = round
                .sends
                .iter()
                .all(|t| t.peer == (plan.rank + 1) % world);
            let previous = round
                .recvs
                .iter()
                .all(|t| (t.peer + 1) % world == plan.rank);
            if !next || !previous {
                return Err(PlanError::new(format!(
                    "rank {} talks past its neighbours",
                    plan.rank
                )));
            }
        }
    }
    Ok(())
}

/// An interned [`Expr`].
type ExprId = u32;

/// The value of an element.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Expr {
    /// An element of this rank's initial data.
    Leaf(usize),
    /// A left fold; flattened when the first operand was itself a fold, but
    /// for rails, which fold folds.
    Fold {
        operands: Vec<ExprId>,
        /// Fold steps it took, hence roundings of 16-bit types.
        passes: usize,
        finished: bool,
    },
}

/// A run of elements: `expr` at consecutive initial elements from `elem` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    start: usize,
    len: usize,
    expr: ExprId,
    elem: usize,
}

impl Cell {
    fn end(&self) -> usize {
        self.start + self.len
    }
    fn continues(&self, before: &Cell) -> bool {
        before.expr == self.expr
            && before.end() == self.start
            && before.elem + before.len == self.elem
    }
}

/// One buffer: cells sorted by place, gaps are undefined memory.
#[derive(Clone, Default)]
struct Memory {
    cells: Vec<Cell>,
}

impl Memory {
    /// The cells of a range, counted from its start.
    fn read(&self, part: &Part) -> Result<Vec<Cell>> {
        let mut out = Vec::new();
        let mut at = part.start;
        let first = self.cells.partition_point(|c| c.end() <= part.start);
        for cell in &self.cells[first..] {
            if cell.start >= part.end() {
                break;
            }
            if cell.start > at {
                break;
            }
            let end = cell.end().min(part.end());
            out.push(Cell {
                start: at - part.start,
                len: end - at,
                expr: cell.expr,
                elem: cell.elem + (at - cell.start),
            });
            at = end;
        }
        if at < part.end() {
            return Err(PlanError::new(format!(
                "element {at} of {:?} is read but was never written",
                part.buf
            )));
        }
        Ok(out)
    }

    /// Overwrites the range that begins at `start`.
    fn write(&mut self, start: usize, len: usize, values: &[Cell]) {
        if len == 0 {
            return;
        }
        let end = start + len;
        let first = self.cells.partition_point(|c| c.end() <= start);
        let last = self.cells.partition_point(|c| c.start < end);
        let mut new: Vec<Cell> = Vec::with_capacity(values.len() + 2);
        if let Some(cell) = self.cells[first..last].first().filter(|c| c.start < start) {
            new.push(Cell {
                len: start - cell.start,
                ..*cell
            });
        }
        new.extend(values.iter().map(|v| Cell {
            start: start + v.start,
            ..*v
        }));
        if let Some(cell) = self.cells[first..last].last().filter(|c| c.end() > end) {
            let cut = end - cell.start;
            new.push(Cell {
                start: end,
                len: cell.len - cut,
                elem: cell.elem + cut,
                ..*cell
            });
        }
        new.dedup_by(|later, before| {
            let joined = later.continues(before);
            if joined {
                before.len += later.len;
            }
            joined
        });
        self.cells.splice(first..last, new);
    }
}

struct Simulation {
    /// Per rank: input, output, scratch.
    memory: Vec<[Memory; 3]>,
    exprs: Vec<Expr>,
    ids: HashMap<Expr, ExprId>,
    /// Per rank: the ranks whose arrival it knows of (for barriers).
    known: Vec<Vec<bool>>,
    /// Whether folds of folds are kept as such.
    nested: bool,
}

impl Simulation {
    fn new(spec: &Spec, plans: &[RankPlan]) -> Self {
        let mut simulation = Simulation {
            memory: vec![<[Memory; 3]>::default(); spec.world],
            exprs: Vec::new(),
            ids: HashMap::new(),
            known: (0..spec.world)
                .map(|r| (0..spec.world).map(|q| q == r).collect())
                .collect(),
            nested: spec.method == Method::AllReduceRails,
        };
        for plan in plans {
            let (buf, len) = if spec.method.collective().in_place() {
                (Buf::Output, plan.output_elems)
            } else {
                (Buf::Input, plan.input_elems)
            };
            // Leaf ids are the ranks: interned first and in order.
            let expr = simulation.intern(Expr::Leaf(plan.rank));
            simulation.memory[plan.rank][buf as usize].write(
                0,
                len,
                &[Cell {
                    start: 0,
                    len,
                    expr,
                    elem: 0,
                }],
            );
        }
        simulation
    }

    fn intern(&mut self, expr: Expr) -> ExprId {
        if let Some(id) = self.ids.get(&expr) {
            return *id;
        }
        let id = self.exprs.len() as ExprId;
        self.exprs.push(expr.clone());
        self.ids.insert(expr, id);
        id
    }

    fn read(&self, rank: usize, part: &Part) -> Result<Vec<Cell>> {
        self.memory[rank][part.buf as usize]
            .read(part)
            .map_err(|e| PlanError::new(format!("rank {rank}: {e}")))
    }

    fn write(&mut self, rank: usize, part: &Part, values: &[Cell]) {
        self.memory[rank][part.buf as usize].write(part.start, part.len, values);
    }

    fn round(&mut self, plans: &[RankPlan], index: usize) -> Result {
        let world = plans.len();
        // All messages are read before any is written: within a round nothing
        // is received over memory being sent (`check_local`).
        let mut posted: Vec<Option<(Part, Vec<Cell>)>> = vec![None; world * world];
        let mut heard: Vec<(usize, usize)> = Vec::new();
        for plan in plans {
            for send in plan.rounds.get(index).iter().flat_map(|r| &r.sends) {
                let values = self.read(plan.rank, &send.part)?;
                posted[plan.rank * world + send.peer] = Some((send.part, values));
            }
        }
        for plan in plans {
            for recv in plan.rounds.get(index).iter().flat_map(|r| &r.recvs) {
                let Some((part, values)) = posted[recv.peer * world + plan.rank].take() else {
                    return Err(PlanError::new(format!(
                        "rank {} waits for a message that rank {} does not send",
                        plan.rank, recv.peer
                    )));
                };
                if part.len != recv.part.len {
                    return Err(PlanError::new(format!(
                        "rank {} sends {} elements to rank {}, which expects {}",
                        recv.peer, part.len, plan.rank, recv.part.len
                    )));
                }
                self.write(plan.rank, &recv.part, &values);
                heard.push((plan.rank, recv.peer));
            }
        }
        if let Some(lost) = posted.iter().position(Option::is_some) {
            return Err(PlanError::new(format!(
                "rank {} sends to rank {}, which does not expect it",
                lost / world,
                lost % world
            )));
        }
        if plans.iter().all(|p| p.output_elems == 0) {
            let before = self.known.clone();
            for (rank, from) in heard {
                for (mine, theirs) in self.known[rank].iter_mut().zip(&before[from]) {
                    *mine |= theirs;
                }
            }
        }
        for plan in plans {
            for step in plan.rounds.get(index).iter().flat_map(|r| &r.local) {
                self.step(plan.rank, step)?;
            }
        }
        Ok(())
    }

    fn step(&mut self, rank: usize, step: &Local) -> Result {
        match step {
            Local::Copy { from, into } => {
                let values = self.read(rank, from)?;
                self.write(rank, into, &values);
            }
            Local::Fold {
                into,
                sources,
                finish,
            } => {
                let sources: Vec<Vec<Cell>> = sources
                    .iter()
                    .map(|s| self.read(rank, s))
                    .collect::<Result<_>>()?;
                let mut values = Vec::new();
                let mut next = vec![0usize; sources.len()];
                let mut at = 0;
                while at < into.len {
                    // The longest run in which no source changes its value.
                    let mut end = into.len;
                    let mut operands = Vec::with_capacity(sources.len());
                    let mut elem = None;
                    for (cells, next) in sources.iter().zip(&mut next) {
                        if cells[*next].end() <= at {
                            *next += 1;
                        }
                        let cell = &cells[*next];
                        end = end.min(cell.end());
                        let here = cell.elem + (at - cell.start);
                        if *elem.get_or_insert(here) != here {
                            return Err(PlanError::new(format!(
                                "rank {rank} folds different elements together"
                            )));
                        }
                        operands.push(cell.expr);
                    }
                    let expr = self.fold(rank, operands, *finish)?;
                    values.push(Cell {
                        start: at,
                        len: end - at,
                        expr,
                        elem: elem.unwrap_or(0),
                    });
                    at = end;
                }
                self.write(rank, into, &values);
            }
        }
        Ok(())
    }

    fn fold(&mut self, rank: usize, operands: Vec<ExprId>, finish: bool) -> Result<ExprId> {
        let mut flat = Vec::with_capacity(operands.len());
        let mut passes = 1;
        for (i, id) in operands.into_iter().enumerate() {
            match &self.exprs[id as usize] {
                Expr::Fold { finished: true, .. } => {
                    return Err(PlanError::new(format!(
                        "rank {rank} folds a finished result once more"
                    )));
                }
                Expr::Fold {
                    operands: inner,
                    passes: before,
                    ..
                } if i == 0 && !self.nested => {
                    flat.extend_from_slice(inner);
                    passes += before;
                }
                Expr::Fold { .. } if !self.nested => {
                    return Err(PlanError::new(format!("rank {rank} makes no left fold")));
                }
                Expr::Fold { .. } | Expr::Leaf(_) => flat.push(id),
            }
        }
        Ok(self.intern(Expr::Fold {
            operands: flat,
            passes,
            finished: finish,
        }))
    }

    fn check_result(&self, spec: &Spec, hosts: &Hosts) -> Result {
        let collective = spec.method.collective();
        if matches!(collective, Collective::Barrier) {
            return match self.known.iter().flatten().all(|k| *k) {
                true => Ok(()),
                false => Err(PlanError::new("a rank leaves before all have come")),
            };
        }
        let mut ring_order: Option<Vec<Cell>> = None;
        for rank in 0..spec.world {
            let part = Part::new(Buf::Output, 0, spec.output_elems(rank));
            let got = self.read(rank, &part)?;
            let reduced = collective.reduces()
                && spec.world > 1
                && (collective != Collective::Reduce || rank == spec.root);
            for cell in &got {
                let right = if reduced {
                    let elem = match collective {
                        Collective::ReduceScatter => rank * spec.count + cell.start,
                        _ => cell.start,
                    };
                    cell.elem == elem && self.is_reduction(spec, hosts, cell)
                } else {
                    self.is_moved(spec, rank, cell)
                };
                if !right {
                    return Err(PlanError::new(format!(
                        "rank {rank} ends with the wrong value in elements {}..{}",
                        cell.start,
                        cell.end()
                    )));
                }
            }
            if collective == Collective::AllReduce {
                let mut got = got;
                got.dedup_by(|later, before| {
                    let joined = later.continues(before);
                    before.len += if joined { later.len } else { 0 };
                    joined
                });
                match &ring_order {
                    Some(first) if *first != got => {
                        return Err(PlanError::new(format!(
                            "rank {rank} ends with another order of additions than rank 0"
                        )));
                    }
                    Some(_) => {}
                    None => ring_order = Some(got),
                }
            }
        }
        Ok(())
    }

    /// Whether the cell holds the finished fold of all ranks in the method's
    /// order.
    fn is_reduction(&self, spec: &Spec, hosts: &Hosts, cell: &Cell) -> bool {
        if spec.method == Method::AllReduceRails && hosts.count() > 1 {
            return self.is_fold_of_hosts(hosts, cell.expr);
        }
        let Expr::Fold {
            operands,
            passes,
            finished: true,
        } = &self.exprs[cell.expr as usize]
        else {
            return false;
        };
        let first = if spec.method.rounds_per_host() {
            // A pass on every host but a first one with a single rank.
            if *passes != hosts.count() - usize::from(hosts.ranks(0).len() == 1) {
                return false;
            }
            0
        } else if spec.method.canonical() || spec.method == Method::AllReduceRails {
            if *passes != 1 {
                return false;
            }
            0
        } else {
            // The chunk's own rank comes first.
            let chunks = spec.chunks();
            let holds = |c: &usize| chunks.range(*c).contains(&cell.start);
            match (0..spec.world).find(holds) {
                Some(c) if chunks.range(c).end >= cell.end() => c,
                _ => return false,
            }
        };
        operands.len() == spec.world
            && operands
                .iter()
                .enumerate()
                .all(|(i, id)| *id as usize == (first + i) % spec.world)
    }

    /// Whether it is the finished fold over hosts of the folds over their
    /// ranks.
    fn is_fold_of_hosts(&self, hosts: &Hosts, expr: ExprId) -> bool {
        let fold = |expr: ExprId, done: bool| match &self.exprs[expr as usize] {
            Expr::Fold {
                operands, finished, ..
            } if *finished == done => Some(operands),
            _ => None,
        };
        let Some(partials) = fold(expr, true) else {
            return false;
        };
        partials.len() == hosts.count()
            && partials.iter().enumerate().all(|(host, partial)| {
                let ranks = hosts.ranks(host);
                if ranks.len() == 1 {
                    return *partial as usize == ranks.start;
                }
                fold(*partial, false).is_some_and(|operands| {
                    operands.len() == ranks.len()
                        && operands
                            .iter()
                            .zip(ranks)
                            .all(|(id, rank)| *id as usize == rank)
                })
            })
    }

    /// Whether the cell holds the unchanged data that belongs there.
    fn is_moved(&self, spec: &Spec, rank: usize, cell: &Cell) -> bool {
        // The rank whose data must be at `cell.start`, the first of its elements there,
        // and the end of that run.
        let n = spec.count;
        let block = cell.start.checked_div(n).unwrap_or(0);
        let inside = cell.start - block * n;
        let (from, elem) = match spec.method.collective() {
            Collective::AllReduce | Collective::Reduce => (rank, cell.start),
            Collective::Broadcast => (spec.root, cell.start),
            Collective::Scatter => (spec.root, rank * n + cell.start),
            Collective::AllGather | Collective::Gather => (block, inside),
            Collective::AllToAll => (block, rank * n + inside),
            Collective::ReduceScatter => (0, cell.start),
            Collective::Barrier | Collective::Shutdown | Collective::SendRecv => return false,
        };
        cell.expr as usize == from && cell.elem == elem && inside + cell.len <= n
    }
}

mod overlap;
