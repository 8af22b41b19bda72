//! Gradients with the same bits for every world size: one micro-batch per logical
//! shard, added in the fixed tree of [`ShardTree`].
//!
//! # Memory
//!
//! Each shard's gradient is computed in separate memory. Two siblings are added as soon
//! as both are finished, so a rank with `n` shards holds at most `log2 n + 1` gradients
//! and, if its range is not aligned, as many partial sums, which it sends.
//!
//! # Exchange
//!
//! When the last shard is done, every rank sends its partial sums of each chunk to the
//! chunk's owner, which finishes the tree, scales once, and sends the result to all. If
//! the number of ranks is a power of two that divides the number of shards, this moves
//! as much as an all-reduce; otherwise up to twice that on the way to the owners.
//!
//! # Buffers
//!
//! Every shard starts from the buffers at the beginning of the step; the step ends with
//! the mean of the shards' updated buffers.

use std::collections::VecDeque;
use std::time::Instant;

use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_nn::Params;

use super::tree::{Node, ShardTree};
use crate::average::Average;
use crate::error::{Error, Result};
use crate::parameters::ParamSpec;
use crate::trace::StepTimes;
use crate::vote::{self, Ballot, Commit, Veto};

/// Borders between chunks are multiples of 64 bytes.
const LINE_ELEMS: usize = 16;

pub(crate) struct Shards {
    group: ProcessGroup,
    tree: ShardTree,
    params: Vec<ParamSpec>,
    /// First element of each parameter's gradient.
    starts: Vec<usize>,
    grad_elems: usize,
    buffer_elems: usize,
    free: Vec<Vec<f32>>,
    /// Partial sums of this rank, ascending.
    nodes: Vec<(Node, Vec<f32>)>,
    step: Option<Step>,
    /// Mean gradients, then mean buffers, of the last step.
    result: Vec<f32>,
    /// Whether this rank votes against the next step.
    veto_next: bool,
    /// Names of parameters that each rank trains for itself.
    own: Vec<String>,
    untouched: Vec<bool>,
    committed: bool,
    failed: bool,
    skipped: u64,
    times: StepTimes,
}

/// The running step.
struct Step {
    weights: Vec<f32>,
    present: usize,
    /// The current shard and its gradient.
    current: Option<(usize, Vec<f32>)>,
    given: usize,
    ready: Vec<bool>,
    used: Vec<bool>,
    /// Buffers at the step's beginning, once a shard has changed them.
    base: Option<Vec<f32>>,
    kept_buffers: bool,
    ballot: Ballot,
}

impl Shards {
    pub(crate) fn new(
        group: ProcessGroup,
        tree: ShardTree,
        params: Vec<ParamSpec>,
        buffer_elems: usize,
        own: Vec<String>,
    ) -> Result<Shards> {
        if group.world_size() > tree.shards() {
            return Err(Error::usage(format!(
                "{} ranks cannot share {} shards; use at least as many shards as ranks",
                group.world_size(),
                tree.shards()
            )));
        }
        let mut at = 0;
        let starts = params
            .iter()
            .map(|p| {
                let start = at;
                at = (at + p.len).next_multiple_of(LINE_ELEMS);
                start
            })
            .collect();
        Ok(Shards {
            group,
            tree,
            starts,
            grad_elems: at,
            buffer_elems,
            free: Vec::new(),
            nodes: Vec::new(),
            step: None,
            result: vec![0.0; at + buffer_elems],
            veto_next: false,
            own,
            untouched: vec![false; params.len()],
            params,
            committed: false,
            failed: false,
            skipped: 0,
            times: StepTimes::default(),
        })
    }

    /// Starts a step whose global batch has `samples` samples; without any it has no gradients. `sizes` are the samples of
    /// this rank's shards. Gives their weights: a shard's weight does not depend on the rank that computes it.
    pub(crate) fn plan_step(
        &mut self,
        average: Average,
        sizes: &[usize],
        samples: usize,
    ) -> Result<Vec<f32>> {
        self.check_usable()?;
        if self.step.is_some() {
            return Err(Error::usage("the step before was not finished"));
        }
        if samples == 0 {
            self.committed = false;
            self.veto_next = false;
            return Ok(Vec::new());
        }
        let present = self.tree.present(samples);
        let weight = |&size: &usize| match average {
            Average::Samples => (size as f64 * present as f64 / samples as f64) as f32,
            Average::Ranks | Average::ActiveRanks if size == 0 => 0.0,
            Average::Ranks | Average::ActiveRanks => 1.0,
        };
        let weights: Vec<f32> = sizes.iter().map(weight).collect();
        let range = self.tree.range(self.group.world_size(), self.group.rank());
        let want: Vec<usize> = range.map(|s| self.tree.size(samples, s)).collect();
        let trimmed = |sizes: &[usize]| {
            let end = sizes.iter().rposition(|n| *n > 0).map_or(0, |i| i + 1);
            sizes[..end].to_vec()
        };
        if trimmed(sizes) != trimmed(&want) {
            return Err(Error::usage(format!(
                "rank {} gives micro-batches of {sizes:?} samples, but its part of {samples} samples in {} shards \
                 is {want:?}; cut each global batch as ShardTree says",
                self.group.rank(),
                self.tree.shards()
            )));
        }
        let mut ballot = Ballot::default();
        if std::mem::take(&mut self.veto_next) {
            ballot.veto(self.params.len());
        }
        self.step = Some(Step {
            weights: weights[..trimmed(&want).len()].to_vec(),
            present,
            current: None,
            given: 0,
            ready: vec![false; self.params.len()],
            used: vec![false; self.params.len()],
            base: None,
            kept_buffers: false,
            ballot,
        });
        self.times = StepTimes {
            backward_began: Some(Instant::now()),
            ..StepTimes::default()
        };
        self.committed = false;
        Ok(weights)
    }

    pub(crate) fn next_micro_batch(&mut self) -> Result<()> {
        self.check_usable()?;
        self.complete_shard()?;
        let first = self
            .tree
            .range(self.group.world_size(), self.group.rank())
            .start;
        let Some(step) = &mut self.step else {
            return Err(no_step());
        };
        if step.given == step.weights.len() {
            return Err(Error::usage(format!(
                "this rank's part of the step is {} shards and all of them have run",
                step.given
            )));
        }
        let elems = self.grad_elems + self.buffer_elems;
        let memory = self.free.pop().unwrap_or_else(|| vec![0.0; elems]);
        step.current = Some((first + step.given, memory));
        step.given += 1;
        step.ready.fill(false);
        step.kept_buffers = self.buffer_elems == 0;
        Ok(())
    }

    /// The weight of micro-batch `index`, which is not applied any more.
    pub(crate) fn weigh_at_loss(&mut self, index: usize) -> f32 {
        let weights = self.step.as_mut().map(|s| &mut s.weights);
        let weight = weights.and_then(|w| w.get_mut(index));
        weight.map_or(1.0, |w| std::mem::replace(w, 1.0))
    }

    pub(crate) fn slot(&mut self, param: usize) -> &mut [f32] {
        let (Some(&start), Some(spec)) = (self.starts.get(param), self.params.get(param)) else {
            return &mut [];
        };
        match self.step.as_mut().and_then(|s| s.current.as_mut()) {
            Some((_, memory)) => &mut memory[start..start + spec.len],
            None => {
                // `ready` will refuse it; until then it is written elsewhere.
                if self.free.is_empty() {
                    self.free
                        .push(vec![0.0; self.grad_elems + self.buffer_elems]);
                }
                &mut self.free[0][start..start + spec.len]
            }
        }
    }

    pub(crate) fn ready(&mut self, param: usize, used: bool) -> Result<()> {
        self.check_usable()?;
        let (Some(&start), Some(spec)) = (self.starts.get(param), self.params.get(param)) else {
            return Err(Error::usage(format!(
                "there is no parameter number {param}"
            )));
        };
        let Some(step) = &mut self.step else {
            return Err(no_step());
        };
        let Some((_, memory)) = &mut step.current else {
            return Err(no_step());
        };
        if std::mem::replace(&mut step.ready[param], true) {
            return Err(Error::usage(format!(
                "the gradient of {} was marked ready twice in one backward; a parameter used several times must be \
                 reported once, after its last use",
                spec.name
            )));
        }
        step.used[param] |= used;
        let gradient = &mut memory[start..start + spec.len];
        let weight = step.weights[step.given - 1];
        if weight != 1.0 {
            gradient.iter_mut().for_each(|g| *g *= weight);
        }
        if !phalanx_comm::all_finite(gradient) {
            step.ballot.not_finite(param);
        }
        Ok(())
    }

    pub(crate) fn veto(&mut self) {
        let params = self.params.len();
        match &mut self.step {
            Some(step) => step.ballot.veto(params),
            None => self.veto_next = true,
        }
    }

    /// Votes against the running step because of number `index` of this rank's own gradients.
    pub(crate) fn own_not_finite(&mut self, index: usize) {
        let params = self.params.len();
        if let Some(step) = &mut self.step {
            step.ballot.own_not_finite(params, index);
        }
    }

    /// Takes the buffers that the last shard has updated, and restores those of the
    /// beginning of the step.
    pub(crate) fn keep_buffers(&mut self, params: &mut Params, before: &[f32]) -> Result<()> {
        let Some(step) = &mut self.step else {
            return Err(no_step());
        };
        let Some((_, memory)) = &mut step.current else {
            return Err(no_step());
        };
        memory[self.grad_elems..].copy_from_slice(params.buffers_flat());
        let base = step.base.get_or_insert_with(|| before.to_vec());
        params.buffers_flat_mut().copy_from_slice(base);
        step.kept_buffers = true;
        Ok(())
    }

    /// Adds the finished shard to its sibling, if that is finished.
    fn complete_shard(&mut self) -> Result<()> {
        let Some(step) = &mut self.step else {
            return Ok(());
        };
        let Some((shard, mut memory)) = step.current.take() else {
            return Ok(());
        };
        let missing: Vec<&str> = (0..self.params.len())
            .filter(|p| !step.ready[*p])
            .map(|p| self.params[p].name.as_str())
            .collect();
        if !missing.is_empty() {
            let error = Error::usage(format!(
                "no gradient for {} of {} parameters on rank {}: {}",
                missing.len(),
                self.params.len(),
                self.group.rank(),
                missing.join(", ")
            ));
            return Err(self.fail(error));
        }
        if !step.kept_buffers {
            let error = Error::usage(
                "the model has buffers, and those of a shard were not taken; call \
                 GlobalStep::update_buffers after the backward of each micro-batch",
            );
            return Err(self.fail(error));
        }
        let mut node = Node::leaf(shard);
        while let Some(parent) = self.nodes.last().and_then(|(left, _)| left.joins(node)) {
            let Some((_, mut left)) = self.nodes.pop() else {
                break;
            };
            add(&mut left, &memory);
            self.free.push(std::mem::replace(&mut memory, left));
            node = parent;
        }
        self.nodes.push((node, memory));
        Ok(())
    }

    pub(crate) fn finish(&mut self) -> Result<Commit> {
        self.check_usable()?;
        self.times.backward_ended = Some(Instant::now());
        self.group.set_phase("averaging gradients");
        self.complete_shard()?;
        let Some(step) = self.step.take() else {
            return Err(no_step());
        };
        if step.given < step.weights.len() {
            let error = Error::usage(format!(
                "rank {} has {} shards of this step, but it ended after {}",
                self.group.rank(),
                step.weights.len(),
                step.given
            ));
            return Err(self.fail(error));
        }
        let commit = self.vote(&step).and_then(|commit| {
            self.exchange(step.present)?;
            Ok(if commit.is_yes() {
                self.check_result()
            } else {
                commit
            })
        });
        let commit = commit.inspect_err(|_| self.failed = true)?;
        self.committed = commit.is_yes();
        self.skipped += u64::from(!self.committed);
        self.times.reduced = Some(Instant::now());
        Ok(commit)
    }

    /// Votes and used parameters of all ranks, in one small all-reduce.
    fn vote(&mut self, step: &Step) -> Result<Commit> {
        let world = self.group.world_size();
        let mut lanes = vec![0.0f32; world + self.params.len()];
        let (votes, used) = lanes.split_at_mut(world);
        step.ballot.cast(votes, self.group.rank());
        for (lane, used) in used.iter_mut().zip(&step.used) {
            *lane = f32::from(u8::from(*used));
        }
        if world > 1 {
            self.group
                .all_reduce(&mut lanes, ReduceOp::Sum)
                .map_err(|e| Error::comm_while("the ranks could not vote on the step", e))?;
        }
        let (votes, used) = lanes.split_at_mut(world);
        for (untouched, lane) in self.untouched.iter_mut().zip(used) {
            *untouched = *lane == 0.0;
        }
        // `count` expects means.
        votes.iter_mut().for_each(|v| *v /= world as f32);
        Ok(vote::count(votes, world, |p| {
            vote::name_of(p, &self.params, &self.own)
        }))
    }

    /// Finishes the tree over all ranks; the mean is in `result` afterwards.
    fn exchange(&mut self, present: usize) -> Result<()> {
        let world = self.group.world_size();
        let scale = 1.0 / present.max(1) as f32;
        if world == 1 {
            let nodes: VecDeque<_> = self.nodes.drain(..).collect();
            let free = &mut self.free;
            let sum = self.tree.fold(nodes, |mut left, right| {
                add(&mut left, &right);
                free.push(right);
                left
            });
            if let Some(sum) = sum {
                self.result
                    .iter_mut()
                    .zip(&sum)
                    .for_each(|(r, s)| *r = s * scale);
                self.free.push(sum);
            }
            return Ok(());
        }
        let failed = |e| Error::comm_while("gradients of the shards could not be added", e);
        let me = self.group.rank();
        let elems = self.result.len();
        let lines = elems.div_ceil(LINE_ELEMS);
        let border = |r: usize| (r * lines / world * LINE_ELEMS).min(elems);
        let chunk = |r: usize| border(r)..border(r + 1);
        let nodes: Vec<Vec<Node>> = (0..world)
            .map(|r| self.tree.partial_nodes(world, r, present))
            .collect();
        let sends: Vec<usize> = (0..world)
            .map(|r| chunk(r).len() * self.nodes.len())
            .collect();
        let mine = chunk(me);
        let receives: Vec<usize> = nodes.iter().map(|n| n.len() * mine.len()).collect();
        let mut out = Vec::with_capacity(sends.iter().sum());
        for r in 0..world {
            for (_, memory) in &self.nodes {
                out.extend_from_slice(&memory[chunk(r)]);
            }
        }
        let mut parts = vec![0.0f32; receives.iter().sum()];
        self.group
            .all_to_all_v(&out, &sends, &mut parts, &receives)
            .map_err(failed)?;
        self.free
            .extend(self.nodes.drain(..).map(|(_, memory)| memory));
        let mut own = vec![0.0f32; mine.len()];
        if !mine.is_empty() {
            let all = nodes
                .into_iter()
                .flatten()
                .zip(parts.chunks_exact_mut(mine.len()));
            let sum = self.tree.fold(all.collect(), |left, right| {
                add(left, right);
                left
            });
            if let Some(sum) = sum {
                own.iter_mut().zip(sum).for_each(|(o, s)| *o = *s * scale);
            }
        }
        let lengths: Vec<usize> = (0..world).map(|r| chunk(r).len()).collect();
        self.group
            .all_gather_v(&own, &lengths, &mut self.result)
            .map_err(failed)
    }

    /// Sums of finite gradients need not be finite. All ranks have the same sums, so they decide alike without
    /// communication.
    fn check_result(&self) -> Commit {
        let is_finite = |(start, spec): (&usize, &ParamSpec)| {
            phalanx_comm::all_finite(&self.result[*start..*start + spec.len])
        };
        match self
            .starts
            .iter()
            .zip(&self.params)
            .position(|p| !is_finite(p))
        {
            None => Commit::Yes,
            Some(param) => Commit::No(
                (0..self.group.world_size())
                    .map(|rank| Veto {
                        rank,
                        parameter: Some(self.params[param].name.clone()),
                    })
                    .collect(),
            ),
        }
    }

    /// Puts the mean of the shards' buffers into the model.
    pub(crate) fn put_buffers(&self, params: &mut Params) {
        if self.committed {
            let buffers = &self.result[self.grad_elems..];
            params.buffers_flat_mut().copy_from_slice(buffers);
        }
    }

    pub(crate) fn grad(&self, param: usize) -> &[f32] {
        match (self.starts.get(param), self.params.get(param)) {
            (Some(&start), Some(spec)) if self.committed => &self.result[start..start + spec.len],
            _ => &[],
        }
    }

    pub(crate) fn is_untouched(&self, param: usize) -> bool {
        self.untouched.get(param).copied().unwrap_or_default()
    }

    pub(crate) fn skipped_steps(&self) -> u64 {
        self.skipped
    }

    pub(crate) fn set_skipped_steps(&mut self, steps: u64) {
        self.skipped = steps;
    }

    pub(crate) fn times(&self) -> &StepTimes {
        &self.times
    }

    fn check_usable(&self) -> Result<()> {
        if self.failed {
            return Err(Error::usage(
                "an earlier step failed, so gradients are undefined; form a new process group and a new \
                 DistributedDataParallel",
            ));
        }
        Ok(())
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failed = true;
        self.group.abort(&error.to_string());
        error
    }
}

fn add(left: &mut [f32], right: &[f32]) {
    left.iter_mut().zip(right).for_each(|(l, r)| *l += r);
}

fn no_step() -> Error {
    Error::usage(
        "with gradients folded over shards, a step starts with DistributedDataParallel::begin and each shard with \
         GlobalStep::micro_batch",
    )
}
