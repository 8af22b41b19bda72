//! Averages gradients over ranks, bucket by bucket, while backward still runs.
//! `README.md` in this directory shows the path of a gradient.
//!
//! # States of a bucket
//!
//! | state | memory is | left by |
//! |---|---|---|
//! | `Filling` | written by backward through [`Reducer::slot`] | last `ready` of the bucket, and all earlier buckets launched |
//! | `InFlight`, `Scattering` | owned by the process group; no reference exists | [`Reducer::finish`] |
//! | `Reduced` | readable through [`Reducer::grad`] | first `slot` or `ready` of the next backward |
//!
//! Buckets are launched strictly in index order, even when a later one fills
//! first, so that all ranks issue the same sequence of collectives.
//!
//! Behind its gradients, the last bucket has the ranks' votes on the step (`votes.rs`),
//! one element per parameter that counts the ranks that used it, and a number of each rank's
//! that all get ([`Reducer::carry`]).
//!
//! # Micro-batches
//!
//! A step of several micro-batches is declared before its first gradient
//! ([`Reducer::plan_step`]). The first writes into the buckets; each later one is
//! computed in separate memory and then added, so its bits do not depend on earlier
//! ones. Buckets are launched in the last.
//!
//! After the first backward the buckets are rebuilt in the order in which rank 0's
//! gradients became ready (once; PyTorch's rule).
//!
//! Source: Li et al., "PyTorch Distributed", VLDB 2020, §3.2; PyTorch's
//! `torch/csrc/distributed/c10d/reducer.cpp`.

mod hooked;
mod memory;
mod micro;
mod scattered;
mod votes;
#[cfg(feature = "nn")]
mod wrapped;

use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_comm::{Algorithm, Bucket, Call, ProcessGroup, ReduceOp};

use self::hooked::Stage;
use self::memory::Memory;
use self::micro::Micro;
use self::votes::Vote;
use crate::bucket::{BucketCaps, BucketPlan};
use crate::error::{Error, Result};
use crate::hooks::GradientHook;
use crate::parameters::ParamSpec;
use crate::trace::{BucketTimes, StepTimes};
use crate::vote::{self, Ballot, Commit};

/// Settings of a [`Reducer`]. They must be the same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReducerOptions {
    /// Bucket caps.
    pub caps: BucketCaps,
    /// Rebuild the buckets after the first backward, in the order in which gradients
    /// became ready.
    pub rebuild: bool,
    /// How gradients are synchronized. [`Exchange::ReduceScatter`] keeps the first layout.
    pub exchange: Exchange,
    /// Let all-reduces add in an order other than that of the ranks if that is predicted to be
    /// faster ([`Algorithm::Fastest`]), unless an algorithm is set for the group.
    pub any_order: bool,
    /// Do not check gradients for infinities and NaNs: no rank votes against a step because of them.
    pub unchecked: bool,
}

/// How gradients are synchronized: all-reduce, reduce-scatter, or inside the optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Exchange {
    /// Every rank gets all averaged gradients.
    #[default]
    AllReduce,
    /// Every rank gets the averaged gradients of its part of each bucket, for
    /// [`ShardedOptimizer::for_wrapper`](crate::ShardedOptimizer::for_wrapper) or [`Reducer::visit_pieces`]: half the
    /// bytes; the other half is sent after the optimizer's step, as parameters ([`Reducer::gather_pieces`]).
    ReduceScatter,
    /// The same, but nothing is sent during backward: gradients are exchanged by the optimizer's step
    /// ([`ShardedOptimizer::step_scattered`](crate::ShardedOptimizer::step_scattered) or [`Reducer::visit_pieces`]),
    /// which updates each piece of parameters as soon as their gradient is folded, while it is still in the processor's
    /// cache. Meant for ranks of one host whose threads use all of its cores, so that communication cannot
    /// overlap with backward (`tools/runs/2026-11-22-overhead`). Between hosts, and if cores are idle, use
    /// another. Without explicit [caps](ReducerOptions::caps) there is one bucket.
    AtStep,
}

impl Exchange {
    /// Whether each rank gets only a part of the gradients.
    pub fn is_scattered(self) -> bool {
        self != Exchange::AllReduce
    }
}

impl Default for ReducerOptions {
    fn default() -> Self {
        ReducerOptions {
            caps: BucketCaps::ONE_HOST,
            rebuild: true,
            exchange: Exchange::AllReduce,
            any_order: false,
            unchecked: false,
        }
    }
}

/// Gradient buckets of one model on one rank.
pub struct Reducer {
    group: ProcessGroup,
    params: Vec<ParamSpec>,
    options: ReducerOptions,
    plan: BucketPlan,
    labels: Vec<Arc<str>>,
    memory: Vec<Memory>,
    /// This rank's part of each scattered bucket.
    chunks: Vec<Option<Bucket<f32>>>,
    /// The parts of the buckets that another rank has, and which rank it is; of none unless they are
    /// [passed](Self::pass_copies).
    copies: (usize, Vec<Vec<f32>>),
    /// Whether late gradients were exchanged in this step.
    exchanged: bool,
    /// Factor of late means.
    late_scale: f32,
    /// The votes, if they cannot be in the last bucket because it is scattered.
    votes: Option<Memory>,
    /// Gradients still missing, per bucket.
    missing: Vec<usize>,
    ready: Vec<bool>,
    /// Parameters in the order in which they became ready in this backward.
    order: Vec<usize>,
    next_launch: usize,
    in_backward: bool,
    /// Layout to change to before the next backward.
    rebuilt_plan: Option<BucketPlan>,
    was_rebuilt: bool,
    /// Memory for a gradient that must not be written to a bucket (see `slot`).
    spill: Vec<f32>,
    /// Whether the group was aborted: no step follows.
    pub(crate) failed: bool,
    /// Averages buckets in place of the all-reduce.
    hook: Option<Box<dyn GradientHook>>,
    /// The running step, or the one that the next gradient begins.
    micro: Micro,
    /// Memory for micro-batches after the first; parameter after parameter.
    scratch: Vec<f32>,
    scratch_at: Vec<usize>,
    /// Parameters that some micro-batch of this step used on this rank.
    used: Vec<bool>,
    /// Parameters that no rank used in the last finished step.
    untouched: Vec<bool>,
    /// This rank's vote on the running step.
    ballot: Ballot,
    /// Whether it votes against the next one.
    veto_next: bool,
    /// What all ranks get of this one with its vote, and the sum of all.
    carried: f64,
    carried_by_all: Option<f64>,
    /// Names of parameters that each rank trains for itself. While there are any, the last bucket, which has the
    /// vote, waits for the end of backward, since any of them may still make the vote a no.
    pub(crate) own: Vec<String>,
    /// Whether the gradients of the last step may be read.
    committed: bool,
    skipped: u64,
    times: StepTimes,
    launched_at: Vec<Instant>,
}

impl Reducer {
    /// Allocates buckets for `params`, given in registration order. Does not
    /// communicate. All ranks must pass the same parameters and options
    /// ([`crate::Fingerprint`] compares them).
    pub fn new(group: ProcessGroup, params: Vec<ParamSpec>, options: ReducerOptions) -> Reducer {
        let order: Vec<usize> = (0..params.len()).rev().collect();
        let mut plan = plan(&params, &order, options.caps);
        if options.exchange.is_scattered() {
            plan = plan.into_model_order();
        }
        let starts = params.iter().scan(0, |end, spec| {
            *end += spec.len;
            Some(*end - spec.len)
        });
        let mut reducer = Reducer {
            group,
            ready: vec![false; params.len()],
            hook: None,
            micro: Micro::single(),
            scratch: Vec::new(),
            scratch_at: starts.collect(),
            used: vec![false; params.len()],
            untouched: vec![false; params.len()],
            order: Vec::with_capacity(params.len()),
            params,
            options,
            plan,
            labels: Vec::new(),
            memory: Vec::new(),
            chunks: Vec::new(),
            copies: (0, Vec::new()),
            exchanged: true,
            late_scale: 1.0,
            votes: None,
            missing: Vec::new(),
            next_launch: 0,
            in_backward: false,
            rebuilt_plan: None,
            was_rebuilt: false,
            spill: Vec::new(),
            failed: false,
            ballot: Ballot::default(),
            veto_next: false,
            carried: 0.0,
            carried_by_all: None,
            own: Vec::new(),
            committed: false,
            skipped: 0,
            times: StepTimes::default(),
            launched_at: Vec::new(),
        };
        reducer.allocate();
        reducer
    }

    fn allocate(&mut self) {
        self.memory.clear(); // the old layout's, before as much again is asked for
        let buckets = self.plan.buckets();
        self.labels = buckets
            .iter()
            .enumerate()
            .map(|(b, params)| self.label(b, buckets.len(), params))
            .collect();
        let world = self.group.world_size();
        let votes = world + self.params.len() + world * vote::CARRIED_LANES;
        let scattered = self.is_scattered();
        self.memory = (0..buckets.len())
            .map(|b| {
                let elems = match scattered {
                    true => self.plan.chunk_elems(b, world) * world,
                    false if b + 1 == buckets.len() => self.plan.bucket_elems(b) + votes,
                    false => self.plan.bucket_elems(b),
                };
                Memory::Reduced(self.group.bucket(elems))
            })
            .collect();
        self.chunks = (0..buckets.len()).map(|_| None).collect();
        self.votes = scattered.then(|| Memory::Reduced(self.group.bucket(votes)));
        self.missing = buckets.iter().map(Vec::len).collect();
    }

    /// The name of a bucket in error messages and traces.
    fn label(&self, bucket: usize, of: usize, params: &[usize]) -> Arc<str> {
        const SHOWN: usize = 4;
        let mut names: Vec<&str> = params
            .iter()
            .take(SHOWN)
            .map(|&p| self.params[p].name.as_str())
            .collect();
        let more = format!("{} more", params.len().saturating_sub(SHOWN));
        if params.len() > SHOWN {
            names.push(&more);
        }
        format!("bucket {bucket} of {of}: {}", names.join(", ")).into()
    }

    /// The current bucket layout.
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// The process group that reduces.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// When things happened in the step that [`finish`](Self::finish) ended last.
    pub fn times(&self) -> &StepTimes {
        &self.times
    }

    /// Memory in which to produce the gradient of `param`, inside its bucket. The first call
    /// after a [`finish`](Self::finish) begins a new step and makes all earlier gradients
    /// unreadable. It contains data of the previous step: overwrite it before adding to it.
    /// Empty when there is no such parameter.
    pub fn slot(&mut self, param: usize) -> &mut [f32] {
        self.begin();
        if param >= self.params.len() {
            return &mut [];
        }
        let (bucket, range) = self.plan.place(param);
        if self.micro.index > 0 {
            let at = self.scratch_at[param];
            return &mut self.scratch[at..at + range.len()];
        }
        // A gradient that arrives after its bucket was launched must not touch it.
        // `ready` will refuse it by name; until then it is written elsewhere.
        if let Memory::Filling(memory) = &mut self.memory[bucket] {
            return &mut memory[range];
        }
        if self.spill.len() < range.len() {
            self.spill.resize(range.len(), 0.0);
        }
        &mut self.spill[..range.len()]
    }

    /// Marks the gradient of `param` as final. Launches every bucket that is now full
    /// and whose predecessors are launched. Does not block.
    ///
    /// # Errors
    ///
    /// `Usage` when the parameter was already ready in this backward, when there is no
    /// such parameter, or when an earlier step failed.
    pub fn ready(&mut self, param: usize) -> Result<()> {
        self.report(param, true, false)
    }

    /// [`ready`](Self::ready) for a gradient whose producer has checked that all its squares are finite, so that
    /// its sum over any number of ranks is too: it is not checked again.
    ///
    /// # Errors
    ///
    /// As [`ready`](Self::ready).
    pub fn ready_finite(&mut self, param: usize) -> Result<()> {
        self.report(param, true, true)
    }

    fn report(&mut self, param: usize, used: bool, finite: bool) -> Result<()> {
        self.begin();
        self.check_usable()?;
        if param >= self.params.len() {
            return Err(Error::usage(format!(
                "there is no parameter number {param}: the reducer was made for {}, numbered from 0",
                self.params.len()
            )));
        }
        if std::mem::replace(&mut self.ready[param], true) {
            return Err(Error::usage(format!(
                "the gradient of {} was marked ready twice in one backward; a parameter used several times must be \
                 reported once, after its last use",
                self.params[param].name
            )));
        }
        // Before the last bucket is launched, which sends this to the other ranks. A micro-batch without samples
        // uses no parameter.
        let weight = self.micro.weights.get(self.micro.index);
        self.used[param] |= used && weight != Some(&0.0);
        self.take_gradient(param, finite)
    }

    /// Declares that this rank's loss does not depend on `param`: its part of the gradient
    /// is zero. When all ranks do so, the mean is not zero but absent
    /// ([`is_untouched`](Self::is_untouched)). Otherwise as [`ready`](Self::ready).
    ///
    /// # Errors
    ///
    /// As [`ready`](Self::ready).
    pub fn unused(&mut self, param: usize) -> Result<()> {
        self.slot(param).fill(0.0);
        self.report(param, false, true)
    }

    /// Weighs a finished gradient, adds it to those of earlier micro-batches, and
    /// launches the buckets that it completes.
    fn take_gradient(&mut self, param: usize, finite: bool) -> Result<()> {
        self.weigh_and_add(param, finite);
        self.order.push(param);
        if !self.micro.is_last() {
            return Ok(());
        }
        self.missing[self.plan.place(param).0] -= 1;
        self.launch_full(false)
    }

    /// Launches the full buckets that are next in order; `ended`: backward has ended.
    fn launch_full(&mut self, ended: bool) -> Result<()> {
        while self.missing.get(self.next_launch) == Some(&0) {
            let is_last = self.next_launch + 1 == self.memory.len();
            if is_last && !self.own.is_empty() && !ended {
                break;
            }
            self.launch(self.next_launch);
            if self.has_hook_to_run() {
                self.run_stage(self.next_launch, Stage::Launch)
                    .map_err(|e| self.fail(e))?;
            }
            self.next_launch += 1;
        }
        Ok(())
    }

    /// Makes the reducer unusable and aborts the group for the other ranks.
    fn fail(&mut self, error: Error) -> Error {
        self.failed = true;
        self.group.abort(&error.to_string());
        error
    }

    fn check_usable(&self) -> Result<()> {
        if self.failed {
            return Err(Error::usage(
                "an earlier step failed, so gradients are undefined; form a new process group and a new reducer",
            ));
        }
        Ok(())
    }

    fn launch(&mut self, bucket: usize) {
        self.launched_at.push(Instant::now());
        let is_last = bucket + 1 == self.memory.len();
        // Launched last: all gradients are final and have been checked.
        let vote = Vote {
            ballot: self.ballot,
            rank: self.group.rank(),
            world: self.group.world_size(),
            used: &self.used,
            carried: self.carried,
        };
        if is_last
            && self.votes.is_none()
            && let Memory::Filling(memory) = &mut self.memory[bucket]
        {
            vote.cast(&mut memory[self.plan.bucket_elems(bucket)..]);
        }
        if is_last && let Some(Memory::Filling(votes)) = &mut self.votes {
            vote.cast(votes);
        }
        let alone = self.group.world_size() == 1;
        let late = self.is_late();
        let algorithm = match self.group.algorithm() {
            Algorithm::Auto if self.options.any_order => Algorithm::Fastest,
            given => given,
        };
        let call = Call {
            label: Some(self.labels[bucket].clone()),
            algorithm,
            ..Call::default()
        };
        let memory = std::mem::replace(&mut self.memory[bucket], Memory::Lost);
        self.memory[bucket] = match memory {
            memory if alone || late || self.hook.is_some() => memory.left_alone(),
            Memory::Filling(memory) if self.is_scattered() => {
                let chunk = self.chunk(bucket);
                let work = self
                    .group
                    .reduce_scatter_async(memory, chunk, ReduceOp::Mean, call);
                Memory::Scattering(work)
            }
            memory => memory.all_reduced(&self.group, call),
        };
        if is_last
            && !late
            && let Some(votes) = self.votes.take()
        {
            self.votes = Some(if alone {
                votes.left_alone()
            } else {
                let call = Call {
                    label: Some("votes on the step".into()),
                    ..Call::default()
                };
                votes.all_reduced(&self.group, call)
            });
        }
    }

    /// Ends backward: waits until every gradient is averaged over all ranks. Returns, alike on all
    /// ranks, whether the step may be applied: not if a gradient of some rank, or the mean of all,
    /// has an infinity or a NaN, or if a rank [vetoed](Self::veto) it. The gradients are dropped
    /// then, and [`grad`](Self::grad) returns none.
    ///
    /// *Blocks* until all ranks have launched all their buckets, under the
    /// group's operation deadline.
    ///
    /// # Errors
    ///
    /// `Usage` naming the parameters that got no gradient (this returns at once and aborts the
    /// group, so that the other ranks do not wait for the missing buckets either); `Comm` naming
    /// bucket and peer when an all-reduce failed. After an error the gradients are undefined and
    /// the reducer refuses further steps.
    pub fn finish(&mut self) -> Result<Commit> {
        self.begin();
        self.check_usable()?;
        let ended = Instant::now();
        self.times.backward_ended = Some(ended);
        self.group.set_phase("averaging gradients");
        if self.micro.weights.is_empty() {
            self.fill_zeros();
        } else if !self.micro.is_last() {
            let (done, of) = (self.micro.index + 1, self.micro.weights.len());
            return Err(self.fail(Error::usage(format!(
                "the step was declared with {of} micro-batches, but on rank {} it ended after {done}",
                self.group.rank()
            ))));
        } else if self.order.len() < self.params.len() {
            return Err(self.fail(self.no_gradient_error()));
        }
        self.launch_full(true)?;
        self.carried = 0.0;
        for bucket in 0..self.memory.len() {
            self.collect(bucket)?;
        }
        self.collect_votes()?;
        if self.has_hook_to_run() {
            self.run_hook().map_err(|e| self.fail(e))?;
        }
        self.times.reduced = Some(Instant::now());
        if self.options.rebuild && !self.was_rebuilt && !self.is_scattered() {
            self.plan_rebuild()?;
        }
        self.in_backward = false;
        let (mut commit, large) = self.count_votes();
        let micro = std::mem::replace(&mut self.micro, Micro::single());
        self.exchanged = !self.is_late();
        self.late_scale = micro.scale;
        if commit.is_yes() && micro.scale != 1.0 && self.exchanged {
            self.multiply(micro.scale);
        }
        self.committed = commit.is_yes();
        if self.committed && !large.is_empty() {
            commit = self.check_means(&large)?;
        }
        if self.has_hook_to_run()
            && let Some(hook) = &mut self.hook
        {
            hook.decided(&commit, &self.untouched);
        }
        self.committed = commit.is_yes();
        self.skipped += u64::from(!self.committed);
        Ok(commit)
    }

    fn multiply(&mut self, scale: f32) {
        for (bucket, memory) in self.memory.iter_mut().enumerate() {
            let gradients = match (&mut self.chunks[bucket], memory) {
                (Some(chunk), _) => &mut chunk[..],
                (None, Memory::Reduced(memory)) => &mut memory[..self.plan.bucket_elems(bucket)],
                _ => continue,
            };
            gradients.iter_mut().for_each(|g| *g *= scale);
        }
    }

    /// This rank's part in a step for which it has no data.
    fn fill_zeros(&mut self) {
        for (bucket, memory) in self.memory.iter_mut().enumerate() {
            if let Memory::Filling(memory) = memory {
                memory[..self.plan.bucket_elems(bucket)].fill(0.0);
            }
        }
        self.order = (0..self.params.len()).rev().collect();
        self.missing.fill(0);
    }

    fn no_gradient_error(&self) -> Error {
        let names: Vec<&str> = (0..self.params.len())
            .filter(|&p| !self.ready[p])
            .map(|p| self.params[p].name.as_str())
            .collect();
        Error::usage(format!(
            "no gradient for {} of {} parameters on rank {}: {}; backward must report every parameter (zeros for \
             unused ones) before the step ends",
            names.len(),
            self.params.len(),
            self.group.rank(),
            names.join(", ")
        ))
    }

    fn collect(&mut self, bucket: usize) -> Result<()> {
        let memory = std::mem::replace(&mut self.memory[bucket], Memory::Lost);
        let traced = match memory {
            Memory::Scattering(work) => work.wait_traced().map(|((memory, chunk), times)| {
                self.chunks[bucket] = Some(chunk);
                (Memory::Reduced(memory), Some(times))
            }),
            memory => memory.collected(),
        };
        let (memory, times) =
            traced.map_err(|e| not_averaged(&mut self.failed, &self.labels[bucket], e))?;
        self.memory[bucket] = memory;
        let Some(times) = times else {
            return Ok(()); // it was not in flight
        };
        self.times.buckets.push(BucketTimes {
            bucket,
            bytes: self.plan.bucket_bytes(bucket),
            label: self.labels[bucket].clone(),
            launched: self.launched_at[bucket],
            started: times.started,
            finished: times.finished,
        });
        Ok(())
    }

    /// Plans the layout in rank 0's observed order; the next `begin` applies it, since
    /// this step's gradients are still read from the old buckets.
    fn plan_rebuild(&mut self) -> Result<()> {
        self.was_rebuilt = true;
        if self.group.world_size() > 1 {
            let mut order: Vec<i64> = self.order.iter().map(|&p| p as i64).collect();
            self.group.broadcast(&mut order, 0).map_err(|e| {
                self.failed = true;
                Error::comm_while("rank 0's gradient order could not be broadcast", e)
            })?;
            for (mine, theirs) in self.order.iter_mut().zip(order) {
                *mine = usize::try_from(theirs).unwrap_or(usize::MAX);
            }
            let mut sorted = self.order.clone();
            sorted.sort_unstable();
            if sorted.into_iter().ne(0..self.params.len()) {
                self.failed = true;
                return Err(Error::mismatch(
                    "rank 0 sent a gradient order that does not name every parameter once; \
                     the ranks run different models",
                ));
            }
        }
        let plan = plan(&self.params, &self.order, self.options.caps);
        if plan != self.plan {
            self.rebuilt_plan = Some(plan);
        }
        Ok(())
    }

    /// Starts a new backward unless one runs.
    fn begin(&mut self) {
        if self.in_backward {
            return;
        }
        self.in_backward = true;
        if let Some(plan) = self.rebuilt_plan.take() {
            self.plan = plan;
            self.allocate();
        }
        for (missing, params) in self.missing.iter_mut().zip(self.plan.buckets()) {
            *missing = params.len();
        }
        self.ready.fill(false);
        self.used.fill(false);
        self.order.clear();
        self.next_launch = 0;
        self.ballot = Ballot::default();
        if std::mem::take(&mut self.veto_next) {
            self.ballot.veto(self.params.len());
        }
        self.launched_at.clear();
        self.times.buckets.clear();
        self.times.in_step = Duration::ZERO;
        self.times.backward_began = Some(Instant::now());
        self.group.set_phase("backward");
        for memory in &mut self.memory {
            memory.begin();
        }
        if let Some(votes) = &mut self.votes {
            votes.begin();
        }
    }

    /// The averaged gradient of `param`, folded in rank order. Empty unless the last backward was
    /// finished and the vote was yes, when there is no such parameter, and with
    /// [`Exchange::ReduceScatter`], where no rank has whole gradients.
    pub fn grad(&self, param: usize) -> &[f32] {
        if param >= self.params.len() || self.in_backward || !self.committed || self.is_scattered()
        {
            return &[];
        }
        let (bucket, range) = self.plan.place(param);
        match &self.memory[bucket] {
            Memory::Reduced(memory) => &memory[range],
            _ => &[],
        }
    }

    /// Whether no rank used `param` in the last finished step, so that it has no
    /// gradient and an optimizer must skip it.
    pub fn is_untouched(&self, param: usize) -> bool {
        self.untouched.get(param).copied().unwrap_or_default()
    }

    /// Number of steps skipped by vote so far, the same on all ranks.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped
    }

    /// Whether an earlier step failed, so that gradients are undefined.
    pub fn is_failed(&self) -> bool {
        self.failed
    }
}

fn not_averaged(failed: &mut bool, label: &str, cause: phalanx_comm::Error) -> Error {
    *failed = true;
    Error::comm_while(format!("gradients could not be averaged ({label})"), cause)
}

fn plan(params: &[ParamSpec], order: &[usize], caps: BucketCaps) -> BucketPlan {
    let lens: Vec<usize> = params.iter().map(|p| p.len).collect();
    BucketPlan::new(&lens, order, caps)
}
