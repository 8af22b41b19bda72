//! Copies of the parts of a sharded optimizer, and how other ranks take the parts over.
//!
//! The copy of part `r` is on the rank `shift` further: the next one, or where there are several hosts as many further as
//! the largest has ranks, so that a host does not have both as long as it has no more than half of the ranks. Groups keep the ranks of a host together.
//!
//! When ranks were lost or joined, the new group has another cut. Each rank sends what it has of the old pieces to the ranks
//! that have those elements now, buffer by buffer, and keeps its old pieces until all ranks have their new ones: the last
//! thing is a barrier, so if one rank has changed to the new cut, all have received it. A rank that fails before or in the
//! barrier has both. When the group is formed again, it changes to the new cut too if any rank has.

use std::ops::Range;

use phalanx_comm::ProcessGroup;
use phalanx_nn::Params;
use phalanx_nn::optim::Optimizer;

use super::ddp::DistributedDataParallel;
use super::zero::{
    ParamSlice, Partition, Recut, ShardedOptimizer, held, lay_out, len_of, parts_of, refused,
};
use crate::error::{Error, Result};

/// What all ranks must know of the cut that ends.
struct Ending {
    /// The number of each rank in the job.
    numbers: Vec<usize>,
    shift: usize,
    parts: Vec<Vec<ParamSlice>>,
    steps: u64,
    /// Of the optimizer's buffers.
    names: Vec<String>,
}

/// [`Ending`] as it travels; a piece is the number of its parameter, and its first and last elements.
type Sent = (
    Vec<usize>,
    usize,
    Vec<Vec<(usize, usize, usize)>>,
    u64,
    Vec<String>,
);

impl<O: Optimizer> ShardedOptimizer<O> {
    /// Gives a copy of each part to another rank, on another host if there is one. `params` are those that the optimizer was
    /// made for, with the values that they begin with. Call it before the first step and before state is
    /// [restored](Self::restore). Takes twice the state, and as much memory again as this rank's parameters of it.
    ///
    /// A step is [`prepare_step`](Self::prepare_step), [`step_prepared`](Self::step_prepared) and [`gather`](Self::gather)
    /// then. Does not communicate.
    ///
    /// # Errors
    ///
    /// `Usage` when the optimizer was not made [for a wrapper](Self::for_wrapper), or does not implement
    /// [`Optimizer::lay_out`].
    pub fn with_copies(mut self, params: &Params) -> Result<Self> {
        if !self.is_scattered() {
            return Err(Error::usage(
                "with_copies requires an optimizer made with ShardedOptimizer::for_wrapper",
            ));
        }
        let (group, parts) = (self.cut.group.clone(), std::mem::take(&mut self.cut.parts));
        let shift = shift(&group);
        self.cut = Partition::new(group, params, parts, shift)?;
        self.optimizer.lay_out(&self.cut.own).map_err(refused)?;
        for piece in &self.cut.held {
            let kept = &mut self.cut.own.flat_mut()[piece.own()];
            kept.copy_from_slice(&params.flat()[piece.whole()]);
        }
        self.has_copies = true;
        Ok(self)
    }

    /// Whether each part has a [copy](Self::with_copies), if there are several ranks.
    pub fn has_copies(&self) -> bool {
        self.has_copies
    }

    /// Those of `leaving`, numbers of ranks in the job, that may leave together: of each part one of both ranks stays.
    pub fn may_leave(&self, leaving: &[usize]) -> Vec<usize> {
        let (numbers, shift) = (self.cut.group.global_ranks(), self.cut.shift);
        let (world, mut leaves) = (numbers.len(), vec![false; numbers.len()]);
        for (rank, number) in numbers.iter().enumerate() {
            let other = leaves[(rank + shift) % world] || leaves[(rank + world - shift) % world];
            leaves[rank] = leaving.contains(number) && !other;
        }
        let ranks = numbers.iter().zip(leaves);
        ranks
            .filter_map(|(n, leaves)| leaves.then_some(*n))
            .collect()
    }

    /// Divides the state among the ranks of `wrapper`, those that are left of the ranks that had it and new ones, whose
    /// optimizers have none. Each part is sent by a rank that has it, to the ranks that have its elements from now on; no rank
    /// gets more than its part and copy. Then all parameters of the wrapper are gathered into `params`.
    ///
    /// *Blocks* until all ranks of the group call it.
    ///
    /// # Errors
    ///
    /// `StateLost`, on all ranks alike, when both ranks that had a part were lost; `Comm` when a peer is lost or late: call it
    /// again with a wrapper of the ranks that are left then. `params` are undefined after an error.
    pub fn recut(
        &mut self,
        params: &mut Params,
        wrapper: &mut DistributedDataParallel,
    ) -> Result<()> {
        let group = wrapper.group().clone();
        let ending = self.agree_on_ending(&group, params)?;
        let cut = Partition::new(
            group.clone(),
            params,
            parts_of(wrapper, params),
            shift(&group),
        )?;
        let moves = Moves::new(&ending, &cut)?;
        let mut next = Recut {
            updates: self.gather_updates_in(&group)?,
            steps: ending.steps,
            state: Vec::with_capacity(ending.names.len()),
            cut,
        };
        moves.run(&group, self.cut.own.flat(), next.cut.own.flat_mut())?;
        for name in ending.names {
            let state = self.optimizer.state();
            let own = state.iter().find(|(known, _)| **known == name);
            let mut values = vec![0.0; next.cut.own.flat().len()];
            moves.run(&group, own.map_or(&[], |(_, own)| own), &mut values)?;
            next.state.push((name, values));
        }
        let met = group.barrier();
        #[cfg(test)]
        let met = met.and_then(|()| tests::lose_barrier(&group));
        if let Err(error) = met {
            self.next = Some(Box::new(next));
            return Err(not_divided(error));
        }
        self.change(next)?;
        for piece in &self.cut.held {
            let kept = &self.cut.own.flat()[piece.own()];
            params.flat_mut()[piece.whole()].copy_from_slice(kept);
        }
        self.ungathered = false;
        wrapper.gather_pieces(params)
    }

    /// Changes to the cut that all ranks have received.
    fn change(&mut self, next: Recut) -> Result<()> {
        self.optimizer.lay_out(&next.cut.own).map_err(refused)?;
        self.cut = next.cut;
        let state = next.state.iter().map(|(name, v)| (&name[..], &v[..]));
        let state: Vec<(&str, &[f32])> = state.collect();
        self.restore(next.steps, &next.updates, &state)
    }

    /// The newest cut that any rank of `group` has changed to; this one changes to it too, if it has not.
    fn agree_on_ending(&mut self, group: &ProcessGroup, params: &Params) -> Result<Ending> {
        let generation = |group: &ProcessGroup| i64::from(group.generation()) + 1;
        // Not one that has just joined.
        let is_member = self.cut.group.global_ranks().contains(&group.global_rank());
        let own = if is_member {
            generation(&self.cut.group)
        } else {
            0
        };
        let mut all = vec![0i64; group.world_size()];
        group.all_gather(&[own], &mut all).map_err(not_divided)?;
        let newest = all.iter().copied().max().unwrap_or(0);
        let Some(root) = all.iter().position(|own| *own == newest && newest > 0) else {
            return Err(Error::state_lost(
                "the optimizer's state is lost: none of the ranks that had parts of it is left",
            ));
        };
        let next = self.next.take();
        match next.filter(|next| generation(&next.cut.group) == newest) {
            Some(next) => self.change(*next)?,
            // It has just joined: what it has of a checkpoint is old.
            None if own != newest => self.optimizer.lay_out(&self.cut.own).map_err(refused)?,
            None => {}
        }
        let ending = (group.rank() == root).then(|| self.sent());
        let sent: Sent = group
            .broadcast_object(ending.as_ref(), root)
            .map_err(not_divided)?;
        let (numbers, shift, parts, steps, names) = sent;
        let ids: Vec<_> = params.ids().collect();
        let piece = |(param, from, to): (usize, usize, usize)| {
            let info = params.infos().get(param).filter(|info| to <= info.len);
            let id = ids.get(param).filter(|_| info.is_some() && from <= to);
            id.map(|id| (*id, from..to))
        };
        let part = |pieces: Vec<_>| {
            let pieces: Option<Vec<_>> = pieces.into_iter().map(piece).collect();
            pieces.map(|pieces| lay_out(params, pieces))
        };
        let parts: Option<Vec<_>> = parts.into_iter().map(part).collect();
        let parts = parts.filter(|parts| parts.len() == numbers.len() && shift < parts.len());
        let Some(parts) = parts else {
            return Err(other_state());
        };
        Ok(Ending {
            numbers,
            shift,
            parts,
            steps,
            names,
        })
    }

    fn sent(&self) -> Sent {
        let piece = |p: &ParamSlice| (p.param.index(), p.elems.start, p.elems.end);
        let parts = self.cut.parts.iter();
        let state = self.optimizer.state().into_iter();
        (
            self.cut.group.global_ranks().to_vec(),
            self.cut.shift,
            parts.map(|p| p.iter().map(piece).collect()).collect(),
            self.optimizer.steps(),
            state.map(|(name, _)| name.to_owned()).collect(),
        )
    }
}

/// How much further the rank with the copy of a part is, the same for all ranks of `group`.
fn shift(group: &ProcessGroup) -> usize {
    let hosts = group.selector().hosts();
    match (group.world_size(), hosts.count()) {
        (1, _) => 0,
        (_, 0 | 1) => 1,
        _ => hosts.most_ranks(),
    }
}

/// The elements that this rank sends to each rank, of its old buffers, and receives from each, into its new ones.
struct Moves {
    sends: Vec<Vec<Range<usize>>>,
    receives: Vec<Vec<Range<usize>>>,
}

impl Moves {
    fn new(ending: &Ending, cut: &Partition) -> Result<Moves> {
        let (group, world) = (&cut.group, ending.parts.len());
        // The ranks that have a part, and where it begins in their buffers.
        let holders = |part: usize| {
            let copy = (part + ending.shift) % world;
            let all = [(part, 0), (copy, len_of(&ending.parts[copy]))];
            let all = all.into_iter().take(1 + usize::from(ending.shift > 0));
            let rank = |old: usize| {
                let mut now = group.global_ranks().iter();
                now.position(|number| *number == ending.numbers[old])
            };
            let now = all.filter_map(|(old, begin)| rank(old).map(|rank| (rank, begin)));
            now.collect::<Vec<_>>()
        };
        let holders: Vec<Vec<(usize, usize)>> = (0..world).map(holders).collect();
        let mut old: Vec<(&ParamSlice, usize)> = Vec::new();
        for (part, pieces) in ending.parts.iter().enumerate() {
            if holders[part].is_empty() && !pieces.is_empty() {
                return Err(lost(ending, part));
            }
            old.extend(pieces.iter().map(|piece| (piece, part)));
        }
        old.sort_unstable_by_key(|(piece, _)| piece.flat);
        let none = || vec![Vec::new(); group.world_size()];
        let (mut sends, mut receives) = (none(), none());
        for (to, sends) in sends.iter_mut().enumerate() {
            for new in held(&cut.parts, cut.shift, to) {
                let first = old.partition_point(|(old, _)| old.whole().end <= new.flat);
                let within = |(old, _): &&(&ParamSlice, usize)| old.flat < new.whole().end;
                for (old, part) in old[first..].iter().take_while(within) {
                    let from = old.flat.max(new.flat);
                    let len = old.whole().end.min(new.whole().end) - from;
                    let own = holders[*part].iter().find(|(rank, _)| *rank == to);
                    let Some((rank, begin)) = own.or(holders[*part].first()) else {
                        continue;
                    };
                    if *rank == group.rank() {
                        let at = begin + old.at + from - old.flat;
                        sends.push(at..at + len);
                    }
                    if to == group.rank() {
                        let at = new.at + from - new.flat;
                        receives[*rank].push(at..at + len);
                    }
                }
            }
        }
        Ok(Moves { sends, receives })
    }

    /// Moves one buffer.
    fn run(&self, group: &ProcessGroup, from: &[f32], to: &mut [f32]) -> Result<()> {
        let lengths = |runs: &[Vec<Range<usize>>]| -> Vec<usize> {
            let runs = runs.iter();
            runs.map(|runs| runs.iter().map(Range::len).sum()).collect()
        };
        let (sent, received) = (lengths(&self.sends), lengths(&self.receives));
        let mut out = Vec::with_capacity(sent.iter().sum());
        for run in self.sends.iter().flatten() {
            out.extend_from_slice(from.get(run.clone()).ok_or_else(other_state)?);
        }
        let mut into = vec![0.0f32; received.iter().sum()];
        group
            .all_to_all_v(&out, &sent, &mut into, &received)
            .map_err(not_divided)?;
        let mut rest = &into[..];
        for run in self.receives.iter().flatten() {
            let (values, after) = rest.split_at(run.len());
            to[run.clone()].copy_from_slice(values);
            rest = after;
        }
        Ok(())
    }
}

/// No rank is left that has `part`.
fn lost(ending: &Ending, part: usize) -> Error {
    let owner = ending.numbers[part];
    let copy = ending.numbers[(part + ending.shift) % ending.numbers.len()];
    Error::state_lost(match ending.shift {
        0 => format!("the optimizer's state is lost with rank {owner}, the only one that had it"),
        _ => format!(
            "a part of the optimizer's state is lost: rank {owner} had it and rank {copy} the copy, and both were lost"
        ),
    })
}

fn other_state() -> Error {
    Error::mismatch("the ranks have optimizer state of different steps or parameters")
}

fn not_divided(cause: phalanx_comm::Error) -> Error {
    Error::comm_while(
        "the optimizer's state could not be divided among the ranks",
        cause,
    )
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Barrier;

    use phalanx_comm::GroupOptions;
    use phalanx_member::{Log, ShrinkOptions, shrink};
    use phalanx_nn::layers::Linear;
    use phalanx_nn::optim::{Adam, ParamGroup, step_clipped};
    use phalanx_nn::{GradSink as _, Scope, Seed};

    use super::*;
    use crate::{BucketCaps, DdpOptions, ErrorKind, Exchange, take_state};

    thread_local! {
        static LOSES_BARRIER: Cell<bool> = const { Cell::new(false) };
    }

    /// As if a peer had been lost in a rank's barrier, which the other ranks have left.
    pub(super) fn lose_barrier(group: &ProcessGroup) -> phalanx_comm::Result<()> {
        match LOSES_BARRIER.replace(false) {
            false => Ok(()),
            true => {
                std::thread::sleep(std::time::Duration::from_millis(20));
                group.abort("it is a test");
                group.barrier()
            }
        }
    }

    const FROZEN: &str = "first.bias";
    /// Of the gradients' norm; some steps reach it and some do not.
    const LIMIT: f64 = 8.0;

    /// Tensors of which none is a multiple of a line.
    fn model() -> Params {
        let mut scope = Scope::new(Seed(3));
        Linear::new(scope.enter("first"), 5, 41);
        Linear::new(scope.enter("large"), 41, 37);
        Linear::new(scope.enter("idle"), 7, 3);
        Linear::new(scope.enter("last"), 37, 3);
        scope.build().expect("it builds")
    }

    fn wrap(
        group: &ProcessGroup,
        exchange: Exchange,
        params: &mut Params,
    ) -> DistributedDataParallel {
        let options = DdpOptions {
            // Several buckets.
            caps: Some(BucketCaps::uniform(2000)),
            keep_layout: true,
            frozen: vec![FROZEN.to_owned()],
            exchange,
            ..DdpOptions::default()
        };
        DistributedDataParallel::new(group.clone(), params, options).expect("wrapped")
    }

    /// The gradients of rank `number` in step `step`; in most nothing uses the layer `idle`.
    fn backward(step: usize, number: usize, params: &Params, ddp: &mut DistributedDataParallel) {
        for id in params.ids() {
            let info = &params.infos()[id.index()];
            if info.name.starts_with("idle") && step % 3 != 1 {
                ddp.unused(id).expect("unused");
                continue;
            }
            let seed = (step * 31 + number * 17 + id.index()) * 7919;
            let size = 1.0 + (step % 4) as f32;
            let slot = ddp.slot(id).iter_mut().enumerate();
            slot.for_each(|(i, g)| *g = size * (((seed + i * i) % 1009) as f32 / 1009.0 - 0.5));
            ddp.ready(id).expect("ready");
        }
        assert!(ddp.finish().expect("averaged").is_yes());
    }

    /// A training with copies of parts, and the same with whole gradients and a whole optimizer on each rank.
    struct Rank {
        group: ProcessGroup,
        exchange: Exchange,
        whole: (Params, DistributedDataParallel, Adam),
        parts: (Params, DistributedDataParallel, ShardedOptimizer<Adam>),
        steps: usize,
        norms: Vec<f64>,
    }

    /// With groups, which are chosen by the whole parameters' shapes.
    fn adam(params: &Params) -> Adam {
        Adam::adamw(params, 0.01).groups(|p| match p.shape.len() {
            1 => ParamGroup::new().weight_decay(0.0).lr_scale(3.0),
            _ => ParamGroup::new(),
        })
    }

    impl Rank {
        fn new(group: ProcessGroup, exchange: Exchange) -> Rank {
            let (mut whole, mut parts) = (model(), model());
            let ddp = wrap(&group, Exchange::AllReduce, &mut whole);
            let optimizer = adam(&whole);
            let whole = (whole, ddp, optimizer);
            let ddp = wrap(&group, exchange, &mut parts);
            let optimizer = ShardedOptimizer::for_wrapper(&ddp, &parts, adam);
            let optimizer = optimizer.and_then(|optimizer| optimizer.with_copies(&parts));
            let parts = (parts, ddp, optimizer.expect("cut"));
            Rank {
                group,
                exchange,
                whole,
                parts,
                steps: 0,
                norms: Vec::new(),
            }
        }

        /// A step of both; the parameters of the second are not gathered yet.
        fn prepare(&mut self) {
            let number = self.group.global_rank();
            let (params, ddp, optimizer) = &mut self.whole;
            backward(self.steps, number, params, ddp);
            self.norms
                .push(step_clipped(optimizer, params, ddp, LIMIT).expect("step"));
            let (params, ddp, optimizer) = &mut self.parts;
            backward(self.steps, number, params, ddp);
            optimizer.prepare_step(ddp, Some(LIMIT)).expect("prepared");
            optimizer.step_prepared(params, ddp).expect("step");
            self.steps += 1;
        }

        fn gather(&mut self) -> Result<()> {
            let (params, ddp, optimizer) = &mut self.parts;
            optimizer.gather(params, ddp)
        }

        fn train(&mut self, steps: usize) {
            for _ in 0..steps {
                self.prepare();
                self.gather().expect("gathered");
                self.check();
            }
        }

        /// When all have checked.
        fn end(mut self) {
            self.leave_group().shutdown().expect("an orderly end");
        }

        /// Without a further handle to it.
        fn leave_group(&mut self) -> ProcessGroup {
            let alone = ProcessGroup::threads(1, GroupOptions::default()).remove(0);
            std::mem::replace(&mut self.group, alone)
        }

        /// Continues in a new group of the remaining ranks.
        fn shrink(&mut self) -> Result<()> {
            let options = ShrinkOptions {
                min_world: Some(1),
                straggler_wait: std::time::Duration::from_secs(60),
                ..ShrinkOptions::default()
            };
            let group = shrink(self.leave_group(), &options).expect("formed again");
            self.recut(group)
        }

        fn recut(&mut self, group: ProcessGroup) -> Result<()> {
            self.group = group;
            let (params, ddp, _) = &mut self.whole;
            *ddp = wrap(&self.group, Exchange::AllReduce, params);
            let (params, ddp, optimizer) = &mut self.parts;
            // What a gathering may have left behind.
            for id in params.ids().collect::<Vec<_>>() {
                if params.infos()[id.index()].name != FROZEN {
                    params.get_mut(id).fill(f32::NAN);
                }
            }
            *ddp = wrap(&self.group, self.exchange, params);
            optimizer.recut(params, ddp)
        }

        /// That both have the same weights and state, and no rank more of it than it must.
        fn check(&self) {
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let (whole, _, optimizer) = &self.whole;
            let (params, _, parts) = &self.parts;
            assert_eq!(bits(params.flat()), bits(whole.flat()));
            assert_eq!(parts.steps(), optimizer.steps());
            let updates = parts.gather_updates().expect("gathered");
            assert_eq!(updates, optimizer.updates());
            let (want, world) = (optimizer.state(), self.group.world_size());
            if let Some(state) = parts.gather_state(Vec::new()).expect("gathered") {
                assert_eq!(state.len(), want.len());
                for ((name, state), (known, want)) in state.iter().zip(&want) {
                    assert_eq!((*name, bits(state)), (*known, bits(want)));
                }
            }
            let all: usize = want.iter().map(|(_, v)| size_of_val(*v)).sum();
            let copies = world.min(2);
            // A line more for each bucket and tensor.
            let most = all * copies / world + 64 * 16 * copies * want.len();
            assert!(
                parts.state_bytes() <= most,
                "{} of {all}",
                parts.state_bytes()
            );
        }
    }

    /// Runs `rank` on each of the `groups`.
    fn on_ranks<R: Send>(
        groups: Vec<ProcessGroup>,
        rank: impl Fn(ProcessGroup) -> R + Sync,
    ) -> Vec<R> {
        std::thread::scope(|scope| {
            let rank = &rank;
            let start = |group| scope.spawn(move || rank(group));
            let started: Vec<_> = groups.into_iter().map(start).collect();
            let ended = started.into_iter().map(|rank| rank.join());
            ended.map(|rank| rank.expect("no panic")).collect()
        })
    }

    fn groups(sizes: &[usize]) -> Vec<ProcessGroup> {
        let options = GroupOptions {
            ranks_per_host: sizes.to_vec(),
            ..GroupOptions::default()
        };
        ProcessGroup::threads(sizes.iter().sum(), options)
    }

    /// Trains on hosts with `sizes` ranks, and loses the ranks `lost`; `late`: before these gather what they have updated. The
    /// errors of those that are left.
    fn lose(sizes: &[usize], lost: &[usize], exchange: Exchange, late: bool) -> Vec<Result<()>> {
        let meet = Barrier::new(sizes.iter().sum());
        let all = on_ranks(groups(sizes), |group| {
            let (number, store) = (group.global_rank(), group.store());
            let mut rank = Rank::new(group, exchange);
            rank.train(4);
            if late {
                rank.prepare();
            }
            meet.wait();
            if lost.contains(&number) {
                drop(rank);
                Log::new(store).lose(number, "a test").expect("a store");
                return None;
            }
            if late {
                let gathered = rank.gather();
                // The others may have got all of it.
                assert!(gathered.is_err() || lost.is_empty());
            }
            let divided = rank.shrink();
            if divided.is_ok() {
                rank.check();
                rank.train(4);
                let clipped = rank.norms.iter().filter(|norm| **norm > LIMIT).count();
                assert!((1..rank.norms.len()).contains(&clipped), "{:?}", rank.norms);
                rank.end();
            }
            Some(divided)
        });
        all.into_iter().flatten().collect()
    }

    /// Each set of ranks that is neither empty nor all of `world`.
    fn sets(world: usize) -> impl Iterator<Item = Vec<usize>> {
        let set = move |bits: usize| (0..world).filter(|rank| bits >> rank & 1 == 1).collect();
        (1..(1 << world) - 1).map(set)
    }

    #[test]
    fn whichever_ranks_are_lost_the_others_have_all_parts_unless_they_were_neighbours() {
        for world in 2..=5 {
            for (i, lost) in sets(world).enumerate() {
                let exchange = [Exchange::ReduceScatter, Exchange::AtStep][i % 2];
                let both = lost.iter().find(|r| lost.contains(&((**r + 1) % world)));
                for late in [false, true] {
                    let what = format!("{lost:?} of {world}, {late}");
                    for outcome in lose(&[world], &lost, exchange, late) {
                        match (outcome, both) {
                            (Ok(()), None) => {}
                            (Err(error), Some(_)) => {
                                assert_eq!(error.kind(), ErrorKind::StateLost, "{what}: {error}");
                                let pair = |r: &usize| {
                                    let next = (r + 1) % world;
                                    let words = format!("rank {r} had it and rank {next} the copy");
                                    lost.contains(&next) && error.to_string().contains(&words)
                                };
                                assert!(lost.iter().any(pair), "{what}: {error}");
                            }
                            (outcome, _) => panic!("{what}: {outcome:?}"),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_lost_host_has_no_part_with_its_copy() {
        for (sizes, lost) in [
            (&[2, 2][..], &[0, 1][..]),
            (&[2, 2], &[2, 3]),
            (&[1, 2, 1], &[1, 2]),
            (&[3, 3], &[0, 1, 2]),
            (&[1, 1, 1], &[1]),
            // Where a host has most ranks, one of the others.
            (&[3, 1], &[3]),
        ] {
            for outcome in lose(sizes, lost, Exchange::ReduceScatter, true) {
                outcome.unwrap_or_else(|error| panic!("{lost:?} of {sizes:?}: {error}"));
            }
        }
    }

    /// The group that they join is made at once: no rank of it is lost.
    #[test]
    fn ranks_that_join_get_their_parts_and_no_more() {
        for (before, after) in [(1, 2), (1, 3), (2, 3), (3, 5)] {
            let old = ProcessGroup::threads(before, GroupOptions::default());
            let old = std::sync::Mutex::new(old.into_iter().map(Some).collect::<Vec<_>>());
            let new = ProcessGroup::threads(after, GroupOptions::default());
            on_ranks(new, |new| {
                let own = old
                    .lock()
                    .expect("no panic")
                    .get_mut(new.rank())
                    .map(Option::take);
                let alone = || ProcessGroup::threads(1, GroupOptions::default()).remove(0);
                let joins = own.is_none();
                let group = own.flatten().unwrap_or_else(alone);
                let mut rank = Rank::new(group, Exchange::ReduceScatter);
                if !joins {
                    rank.train(4);
                }
                let (params, _, optimizer) = &mut rank.whole;
                take_state(&new, 0, params, &mut [optimizer]).expect("taken over");
                rank.steps = 4;
                rank.recut(new).expect("divided");
                rank.check();
                rank.train(4);
                rank.end();
            });
        }
    }

    #[test]
    fn a_rank_that_fails_when_others_have_changed_changes_with_them() {
        for losers in [&[0][..], &[1], &[0, 2], &[1, 2, 3]] {
            for then_lost in [None, Some(3)] {
                let ranks = ProcessGroup::threads(5, GroupOptions::default());
                let meet = Barrier::new(5);
                let ended = on_ranks(ranks, |group| {
                    let (number, store) = (group.global_rank(), group.store());
                    let mut rank = Rank::new(group, Exchange::ReduceScatter);
                    rank.train(4);
                    meet.wait();
                    if number == 4 {
                        drop(rank);
                        Log::new(store).lose(number, "a test").expect("a store");
                        return;
                    }
                    LOSES_BARRIER.set(losers.contains(&number));
                    let divided = rank.shrink();
                    assert!(divided.is_err() || !losers.contains(&number));
                    let has_both = rank.parts.2.next.is_some();
                    assert!(has_both || !losers.contains(&number));
                    if then_lost == Some(number) {
                        drop(rank);
                        Log::new(store).lose(number, "a test").expect("a store");
                        return;
                    }
                    rank.shrink().expect("divided");
                    rank.check();
                    rank.train(4);
                    rank.end();
                });
                assert_eq!(ended.len(), 5);
            }
        }
    }

    #[test]
    fn of_each_part_one_rank_stays_when_others_leave() {
        for sizes in [&[5][..], &[2, 2], &[3, 1], &[1, 2, 3]] {
            let world: usize = sizes.iter().sum();
            on_ranks(groups(sizes), |group| {
                let optimizer = Rank::new(group, Exchange::ReduceScatter).parts.2;
                let shift = optimizer.cut.shift;
                for leaving in sets(world) {
                    let leaves = optimizer.may_leave(&leaving);
                    assert!(!leaves.is_empty() && leaves.iter().all(|r| leaving.contains(r)));
                    let copy_leaves = |r: &usize| leaves.contains(&((r + shift) % world));
                    assert!(!leaves.iter().any(copy_leaves), "{leaves:?} of {world}");
                }
            });
        }
    }
}
