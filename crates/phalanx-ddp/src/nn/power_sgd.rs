//! PowerSGD: sends gradients as products of two thin matrices.
//!
//! Each step, every rank adds what compression dropped in earlier steps to
//! its gradient `M` (error feedback), projects it on the thin matrix `Q` that
//! all ranks share, and the ranks average `P = M·Q`; `P` is made orthonormal,
//! the ranks average `Q = Mᵀ·P`, and `P·Qᵀ` is the gradient on all ranks. The next step
//! starts from this `Q` (warm start).
//!
//! Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank
//! Gradient Compression for Distributed Optimization", 2019; PyTorch's
//! `powerSGD_hook.py`, from which it differs in these points:
//!
//! * errors and factors belong to parameters, not to buckets, so buckets may be rebuilt
//!   at any time;
//! * tensors that are not compressed have no error, since their mean has none;
//! * a step that is skipped by vote changes neither errors nor factors, so one infinity
//!   does not stay in the errors forever;
//! * a column of `Q` that has become zero (no gradient for a while) is drawn again;
//! * a convolution's matrix is the transpose of PyTorch's, as in memory.

use std::collections::BTreeMap;

use phalanx_comm::{ProcessGroup, ReduceOp};
use phalanx_nn::rng::torch::Generator;

use super::low_rank;
use crate::bucket::{GradBucket, GradTensor};
use crate::error::{Error, Result};
use crate::hooks::{GradientHook, HookState};
use crate::messages::Messages;
use crate::vote::Commit;

/// Settings of [`PowerSgd`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PowerSgdOptions {
    /// Columns of the thin matrices (PyTorch: `matrix_approximation_rank`).
    pub rank: usize,
    /// Steps with plain means before compression starts, while gradients change fast
    /// (`start_powerSGD_iter`).
    pub start_step: u64,
    /// A tensor is compressed only if that divides its elements by more than this
    /// number (`min_compression_rate`).
    pub min_compression_rate: f64,
    /// Add to each gradient what compression dropped before (`use_error_feedback`).
    pub error_feedback: bool,
    /// Start from the factor of the step before (`warm_start`).
    pub warm_start: bool,
    /// Seed of the first factors.
    pub seed: u64,
}

impl Default for PowerSgdOptions {
    fn default() -> PowerSgdOptions {
        PowerSgdOptions {
            rank: 1,
            start_step: 1000,
            min_compression_rate: 2.0,
            error_feedback: true,
            warm_start: true,
            seed: 0,
        }
    }
}

/// Sends gradients as products of two thin matrices ([`PowerSgdOptions`]); vectors, and
/// tensors that would gain too little, uncompressed.
///
/// Memory: three times the compressed gradients, in addition to the buckets. The first
/// message of each bucket is sent inside backward.
#[derive(Debug)]
pub struct PowerSgd {
    options: PowerSgdOptions,
    steps: u64,
    /// By parameter; `None` if it is not compressed or was not seen yet.
    factors: Vec<Option<Factor>>,
    first: Messages<f32>,
    second: Messages<f32>,
    /// Restored tensors that no factor has taken yet.
    saved: BTreeMap<String, Vec<f32>>,
}

/// Compression of one parameter.
#[derive(Debug)]
struct Factor {
    name: String,
    number: u64,
    columns: usize,
    rank: usize,
    p: Vec<f32>,
    /// `Q` of the last applied step, and of the running one.
    q: Vec<f32>,
    next_q: Vec<f32>,
    /// What compression has dropped so far, in units of the final mean.
    error: Vec<f32>,
    /// `M` of the running step, then what is dropped of it.
    next_error: Vec<f32>,
}

impl PowerSgd {
    /// A hook with `options`.
    ///
    /// # Errors
    ///
    /// `Usage` for rank 0 or a compression rate that is not a number of at least 0.
    pub fn new(options: PowerSgdOptions) -> Result<PowerSgd> {
        if options.rank == 0 {
            return Err(Error::usage(
                "PowerSGD with matrices of rank 0 would drop all gradients; choose at least 1",
            ));
        }
        let rate = options.min_compression_rate;
        if !(rate.is_finite() && rate >= 0.0) {
            return Err(Error::usage(format!(
                "PowerSGD's min_compression_rate is {rate}; it must be a number of at least 0"
            )));
        }
        Ok(PowerSgd {
            options,
            steps: 0,
            factors: Vec::new(),
            first: Messages::default(),
            second: Messages::default(),
            saved: BTreeMap::new(),
        })
    }

    /// The rank of the compression of `tensor`; `None` when it is not compressed.
    fn rank_of(&self, tensor: &GradTensor<'_>) -> Option<usize> {
        let columns = tensor.columns.max(1);
        let rows = tensor.range.len() / columns;
        let rank = self.options.rank.min(rows).min(columns);
        let thin = ((rows + columns) * rank) as f64;
        let worth = thin * self.options.min_compression_rate < (rows * columns) as f64;
        (worth && rows * columns == tensor.range.len()).then_some(rank)
    }

    fn is_started(&self) -> bool {
        self.steps >= self.options.start_step
    }

    /// Elements of the first message of a bucket: uncompressed tensors, then `P`s.
    fn first_elems(&self, bucket: &GradBucket<'_>) -> usize {
        let each = |t: &GradTensor<'_>| match self.rank_of(t) {
            Some(rank) => t.range.len() / t.columns * rank,
            None => t.range.len(),
        };
        bucket.tensors.iter().map(each).sum()
    }

    /// Makes the factor of `tensor` if it has none yet.
    fn factor(&mut self, tensor: &GradTensor<'_>, rank: usize) -> Result<&mut Factor> {
        while self.factors.len() <= tensor.param {
            self.factors.push(None);
        }
        if self.factors[tensor.param].is_none() {
            let (len, columns) = (tensor.range.len(), tensor.columns);
            let mut saved = |what: &str, len: usize| {
                let key = format!("{what}.{}", tensor.name);
                match self.saved.remove(&key) {
                    Some(values) if values.len() == len => Ok(values),
                    None => Ok(Vec::new()),
                    Some(values) => Err(Error::usage(format!(
                        "saved PowerSGD state {key} has {} elements, expected {len}",
                        values.len()
                    ))),
                }
            };
            let mut error = saved("error", len)?;
            error.resize(len, 0.0);
            self.factors[tensor.param] = Some(Factor {
                name: tensor.name.to_owned(),
                number: tensor.param as u64,
                columns,
                rank,
                p: vec![0.0; len / columns * rank],
                q: saved("q", columns * rank)?,
                next_q: vec![0.0; columns * rank],
                error,
                next_error: vec![0.0; len],
            });
        }
        self.factors[tensor.param]
            .as_mut()
            .ok_or_else(|| Error::usage("a parameter has no factor"))
    }
}

impl Factor {
    /// Takes this rank's `gradient` and writes its part of `P` to `p`.
    fn start(
        &mut self,
        options: &PowerSgdOptions,
        step: u64,
        scale: f32,
        gradient: &[f32],
        p: &mut [f32],
    ) {
        self.next_error.copy_from_slice(gradient);
        if options.error_feedback {
            let pairs = self.next_error.iter_mut().zip(&self.error);
            if scale == 1.0 {
                pairs.for_each(|(m, e)| *m += e);
            } else {
                pairs.for_each(|(m, e)| *m += e / scale);
            }
        }
        let (seed, number, rank) = (options.seed, self.number, self.rank);
        // The same on all ranks, different for each parameter, step and column.
        let draw = |column: usize, values: &mut [f32]| {
            let key = (step.wrapping_mul(1 << 20) ^ number).wrapping_mul(1 << 10) + column as u64;
            let mix = key.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
            Generator::new(seed ^ mix).fill_normal_f32(values, 0.0, 1.0);
        };
        if options.warm_start && !self.q.is_empty() {
            self.next_q.copy_from_slice(&self.q);
        } else {
            for k in 0..rank {
                let run = k * self.columns..(k + 1) * self.columns;
                draw(k, &mut self.next_q[run]);
            }
        }
        low_rank::orthonormalize(&mut self.next_q, self.columns, draw);
        low_rank::multiply(&self.next_error, self.columns, &self.next_q, p);
    }

    /// Takes the mean `p` and writes this rank's part of `Q` to `q`.
    fn go_on(&mut self, p: &[f32], q: &mut [f32]) {
        self.p.copy_from_slice(p);
        let rows = self.p.len() / self.rank;
        low_rank::orthonormalize(&mut self.p, rows, |_, _| ());
        low_rank::multiply_transposed(&self.next_error, self.columns, &self.p, q);
    }

    /// Takes the mean `q` and writes the mean gradient to `gradient`.
    fn end(&mut self, q: &[f32], scale: f32, gradient: &mut [f32]) {
        self.next_q.copy_from_slice(q);
        low_rank::product(&self.p, &self.next_q, self.columns, gradient);
        let pairs = self.next_error.iter_mut().zip(gradient);
        pairs.for_each(|(e, g)| *e -= *g);
        if scale != 1.0 {
            self.next_error.iter_mut().for_each(|e| *e *= scale);
        }
    }
}

impl GradientHook for PowerSgd {
    fn name(&self) -> String {
        format!("powersgd {:?}", self.options)
    }

    fn launch(&mut self, group: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        if !self.is_started() {
            let wire = self
                .first
                .prepare(group, bucket.index, bucket.gradients.len());
            wire.copy_from_slice(bucket.gradients);
            self.first.launch(group, bucket, ReduceOp::Mean);
            return Ok(());
        }
        let mut at = 0;
        let elems = self.first_elems(bucket);
        // Taken out while factors are looked up.
        let mut messages = std::mem::take(&mut self.first);
        let wire = messages.prepare(group, bucket.index, elems);
        for tensor in bucket.tensors {
            let gradient = &bucket.gradients[tensor.range.clone()];
            if self.rank_of(tensor).is_none() {
                wire[at..at + gradient.len()].copy_from_slice(gradient);
                at += gradient.len();
            }
        }
        let (options, step, scale) = (self.options, self.steps, bucket.scale);
        for tensor in bucket.tensors {
            let gradient = &bucket.gradients[tensor.range.clone()];
            if let Some(rank) = self.rank_of(tensor) {
                let factor = self.factor(tensor, rank)?;
                let p = &mut wire[at..at + factor.p.len()];
                factor.start(&options, step, scale, gradient, p);
                at += p.len();
            }
        }
        messages.launch(group, bucket, ReduceOp::Mean);
        self.first = messages;
        Ok(())
    }

    fn advance(&mut self, group: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        let wire = self.first.wait(bucket, "PowerSGD's first factors")?;
        if self.steps < self.options.start_step {
            bucket.gradients.copy_from_slice(wire);
            return Ok(());
        }
        let compressed =
            |tensor: &GradTensor<'_>| self.factors.get(tensor.param).is_some_and(Option::is_some);
        let mut at = 0;
        for tensor in bucket.tensors.iter().filter(|t| !compressed(t)) {
            let gradient = &mut bucket.gradients[tensor.range.clone()];
            gradient.copy_from_slice(&wire[at..at + gradient.len()]);
            at += gradient.len();
        }
        let q_of = |tensor: &GradTensor<'_>| match self.factors.get(tensor.param) {
            Some(Some(factor)) => factor.next_q.len(),
            _ => 0,
        };
        let elems: usize = bucket.tensors.iter().map(q_of).sum();
        if elems == 0 {
            return Ok(());
        }
        let out = self.second.prepare(group, bucket.index, elems);
        let mut to = 0;
        for tensor in bucket.tensors {
            if let Some(Some(factor)) = self.factors.get_mut(tensor.param) {
                let p = &wire[at..at + factor.p.len()];
                let q = &mut out[to..to + factor.next_q.len()];
                factor.go_on(p, q);
                at += p.len();
                to += q.len();
            }
        }
        self.second.launch(group, bucket, ReduceOp::Mean);
        Ok(())
    }

    fn average(&mut self, _: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        if !self.is_started() {
            return Ok(());
        }
        let scale = bucket.scale;
        let wire = self.second.wait(bucket, "PowerSGD's second factors")?;
        let mut at = 0;
        for tensor in bucket.tensors {
            if let Some(Some(factor)) = self.factors.get_mut(tensor.param) {
                let q = &wire[at..at + factor.next_q.len()];
                factor.end(q, scale, &mut bucket.gradients[tensor.range.clone()]);
                at += q.len();
            }
        }
        Ok(())
    }

    fn decided(&mut self, commit: &Commit, untouched: &[bool]) {
        if self.is_started() && commit.is_yes() {
            // The gradient of an untouched parameter was not applied: its error does not change.
            let factors = self.factors.iter_mut().zip(untouched);
            let taken =
                factors.filter_map(|(factor, untouched)| factor.as_mut().filter(|_| !untouched));
            for factor in taken {
                std::mem::swap(&mut factor.error, &mut factor.next_error);
                // Empty until the first step was applied.
                factor.q.resize(factor.next_q.len(), 0.0);
                std::mem::swap(&mut factor.q, &mut factor.next_q);
            }
        }
        self.steps += 1;
    }

    /// `q.NAME` and `error.NAME` of each compressed parameter. The errors of the ranks
    /// are averaged, since only their mean matters, so that any number of ranks can
    /// resume.
    fn gather_state(&self, group: &ProcessGroup) -> Result<HookState> {
        let mut tensors: Vec<(String, Vec<f32>)> = self.saved.clone().into_iter().collect();
        for factor in self.factors.iter().flatten() {
            let mut error = factor.error.clone();
            if group.world_size() > 1 {
                group
                    .all_reduce(&mut error, ReduceOp::Mean)
                    .map_err(|e| Error::comm_while("PowerSGD's errors could not be gathered", e))?;
            }
            tensors.push((format!("error.{}", factor.name), error));
            if !factor.q.is_empty() {
                tensors.push((format!("q.{}", factor.name), factor.q.clone()));
            }
        }
        Ok(HookState {
            steps: self.steps,
            tensors,
        })
    }

    fn restore_state(&mut self, state: &HookState) -> Result<()> {
        if let Some((name, _)) = state
            .tensors
            .iter()
            .find(|(name, _)| !name.starts_with("q.") && !name.starts_with("error."))
        {
            return Err(Error::usage(format!(
                "saved state {name} does not belong to PowerSGD"
            )));
        }
        self.steps = state.steps;
        self.factors.clear();
        self.saved = state.tensors.iter().cloned().collect();
        Ok(())
    }
}
