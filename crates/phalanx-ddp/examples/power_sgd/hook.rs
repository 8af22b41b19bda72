//! PowerSGD as a [`GradientHook`]: sends the gradient of a matrix as the product of two thin matrices.
//!
//! In each step a rank adds to its gradient `M` what compression has dropped before (error feedback). The ranks average
//! `P = M·Q`, where `Q` is the same on all ranks, make `P` orthonormal and average `Q = Mᵀ·P`. `P·Qᵀ` is the gradient on all
//! ranks, and the next step starts from this `Q` (warm start).
//!
//! Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.
//! Differences from PyTorch's `powerSGD_hook.py`: errors and factors belong to parameters, so buckets may be rebuilt; a step
//! that the ranks skip by vote changes neither; a column of `Q` that has become zero is drawn again; a convolution's matrix is
//! the transpose of PyTorch's.

use std::collections::BTreeMap;

use phalanx_comm::{Bucket, Call, ProcessGroup, ReduceOp, Work};
use phalanx_ddp::{Commit, Error, GradBucket, GradTensor, GradientHook, HookState, Result};
use phalanx_nn::rng::torch::Generator;

/// Settings of [`PowerSgd`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy)]
pub struct PowerSgdOptions {
    /// Columns of the thin matrices, at least 1 (PyTorch: `matrix_approximation_rank`).
    pub rank: usize,
    /// Steps before the first compressed one (`start_powerSGD_iter`).
    pub start_step: u64,
    /// A tensor is compressed if that divides its elements by more than this number (`min_compression_rate`).
    pub min_compression_rate: f64,
    /// Add to each gradient what compression has dropped before (`use_error_feedback`).
    pub error_feedback: bool,
    /// Start from the `Q` of the step before (`warm_start`).
    pub warm_start: bool,
    /// Seed of new columns of `Q`.
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

/// Sends matrices as products of thin ones, and other tensors uncompressed.
pub struct PowerSgd {
    options: PowerSgdOptions,
    steps: u64,
    /// By the name of the parameter.
    factors: BTreeMap<String, Factor>,
    /// All-reduces that have started, by bucket and stage.
    running: BTreeMap<(usize, Stage), Work<Bucket<f32>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    P,
    Q,
}

/// One compressed parameter. Thin matrices are column by column.
#[derive(Default)]
struct Factor {
    param: usize,
    p: Vec<f32>,
    /// Of the last step that was applied, and of the running one.
    q: Vec<f32>,
    next_q: Vec<f32>,
    /// What compression has dropped, as part of the mean gradient.
    error: Vec<f32>,
    /// `M` of the running step, then what is dropped of it.
    next_error: Vec<f32>,
}

impl PowerSgd {
    pub fn new(options: PowerSgdOptions) -> PowerSgd {
        assert!(options.rank > 0, "rank 0 would drop all gradients");
        PowerSgd {
            options,
            steps: 0,
            factors: BTreeMap::new(),
            running: BTreeMap::new(),
        }
    }

    /// Columns of the thin matrices of `tensor`; `None` if it is sent uncompressed.
    fn rank_of(&self, tensor: &GradTensor<'_>) -> Option<usize> {
        let columns = tensor.columns.max(1);
        let rows = tensor.range.len() / columns;
        let rank = self.options.rank.min(rows).min(columns);
        let thin = ((rows + columns) * rank) as f64 * self.options.min_compression_rate;
        (self.steps >= self.options.start_step && thin < (rows * columns) as f64).then_some(rank)
    }

    /// Starts the all-reduce of `values`.
    fn send(
        &mut self,
        group: &ProcessGroup,
        bucket: &GradBucket<'_>,
        stage: Stage,
        values: &[f32],
    ) {
        let mut message = group.bucket(values.len());
        message.copy_from_slice(values);
        let label = Some(bucket.label.clone());
        let call = Call {
            label,
            ..Call::default()
        };
        let work = group.all_reduce_async(message, ReduceOp::Mean, call);
        self.running.insert((bucket.index, stage), work);
    }

    /// Waits for the mean; `None` if nothing was sent.
    fn wait(&mut self, bucket: &mut GradBucket<'_>, stage: Stage) -> Result<Option<Bucket<f32>>> {
        let Some(work) = self.running.remove(&(bucket.index, stage)) else {
            return Ok(None);
        };
        let ended = work.wait_traced().map_err(|e| {
            let what = format!(
                "PowerSGD's {stage:?} could not be averaged ({})",
                bucket.label
            );
            Error::comm_while(what, e)
        })?;
        bucket.ran = Some(ended.1);
        Ok(Some(ended.0))
    }
}

impl GradientHook for PowerSgd {
    fn name(&self) -> String {
        format!("{:?}", self.options)
    }

    fn launch(&mut self, group: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        let mut values = Vec::new();
        for tensor in bucket.tensors {
            let gradient = &bucket.gradients[tensor.range.clone()];
            let Some(rank) = self.rank_of(tensor) else {
                values.extend_from_slice(gradient);
                continue;
            };
            let (options, columns) = (self.options, tensor.columns);
            let factor = self.factors.entry(tensor.name.to_owned()).or_default();
            factor.param = tensor.param;
            factor.error.resize(gradient.len(), 0.0);
            factor.q.resize(columns * rank, 0.0);

            factor.next_error = gradient.to_vec();
            if options.error_feedback {
                let pairs = factor.next_error.iter_mut().zip(&factor.error);
                pairs.for_each(|(m, e)| *m += e / bucket.scale);
            }
            factor.next_q = match options.warm_start {
                true => factor.q.clone(),
                false => vec![0.0; columns * rank],
            };
            for (k, column) in factor.next_q.chunks_exact_mut(columns).enumerate() {
                if column.iter().all(|v| *v == 0.0) {
                    // The same on all ranks, different for each parameter, step and column.
                    let key = (((self.steps << 20) ^ tensor.param as u64) << 10) + k as u64;
                    let mix = key.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
                    Generator::new(options.seed ^ mix).fill_normal_f32(column, 0.0, 1.0);
                }
            }
            orthonormalize(&mut factor.next_q, columns);
            // P = M·Q
            for q in factor.next_q.chunks_exact(columns) {
                let rows = factor.next_error.chunks_exact(columns);
                values.extend(rows.map(|row| dot(row, q) as f32));
            }
        }
        self.send(group, bucket, Stage::P, &values);
        Ok(())
    }

    fn advance(&mut self, group: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        let Some(mean) = self.wait(bucket, Stage::P)? else {
            return Ok(());
        };
        let (mut rest, mut values) = (&mean[..], Vec::new());
        for tensor in bucket.tensors {
            let (columns, gradient) = (tensor.columns, &mut bucket.gradients[tensor.range.clone()]);
            let Some(rank) = self.rank_of(tensor) else {
                gradient.copy_from_slice(take(&mut rest, gradient.len()));
                continue;
            };
            let Some(factor) = self.factors.get_mut(tensor.name) else {
                continue;
            };
            let rows = gradient.len() / columns;
            factor.p = take(&mut rest, rows * rank).to_vec();
            orthonormalize(&mut factor.p, rows);
            // Q = Mᵀ·P
            for p in factor.p.chunks_exact(rows) {
                let mut q = vec![0.0; columns];
                let rows = factor.next_error.chunks_exact(columns).zip(p);
                rows.for_each(|(row, p)| add_scaled(&mut q, *p, row));
                values.extend(q);
            }
        }
        if !values.is_empty() {
            self.send(group, bucket, Stage::Q, &values);
        }
        Ok(())
    }

    fn average(&mut self, _: &ProcessGroup, bucket: &mut GradBucket<'_>) -> Result<()> {
        let Some(mean) = self.wait(bucket, Stage::Q)? else {
            return Ok(());
        };
        let mut rest = &mean[..];
        for tensor in bucket.tensors {
            let (true, Some(factor)) = (
                self.rank_of(tensor).is_some(),
                self.factors.get_mut(tensor.name),
            ) else {
                continue;
            };
            let (columns, gradient) = (tensor.columns, &mut bucket.gradients[tensor.range.clone()]);
            let rows = gradient.len() / columns;
            factor.next_q = take(&mut rest, factor.next_q.len()).to_vec();
            // P·Qᵀ
            gradient.fill(0.0);
            let thin = factor.p.chunks_exact(rows);
            for (p, q) in thin.zip(factor.next_q.chunks_exact(columns)) {
                let rows = gradient.chunks_exact_mut(columns).zip(p);
                rows.for_each(|(row, p)| add_scaled(row, *p, q));
            }
            let pairs = factor.next_error.iter_mut().zip(gradient);
            pairs.for_each(|(e, g)| *e = (*e - *g) * bucket.scale);
        }
        Ok(())
    }

    fn decided(&mut self, commit: &Commit, untouched: &[bool]) {
        let started = commit.is_yes() && self.steps >= self.options.start_step;
        // The optimizer does not update an untouched parameter: its error does not change.
        let factors = self.factors.values_mut();
        for factor in factors.filter(|f| started && !untouched[f.param]) {
            std::mem::swap(&mut factor.error, &mut factor.next_error);
            std::mem::swap(&mut factor.q, &mut factor.next_q);
        }
        self.steps += 1;
    }

    /// `error.NAME` and `q.NAME` of each compressed parameter. Only the mean of the ranks' errors matters, so any number of
    /// ranks can resume from it.
    fn gather_state(&self, group: &ProcessGroup) -> Result<HookState> {
        let mut tensors = Vec::new();
        for (name, factor) in &self.factors {
            let mut error = factor.error.clone();
            let averaged = group.all_reduce(&mut error, ReduceOp::Mean);
            averaged.map_err(|e| Error::comm_while("PowerSGD's errors were not gathered", e))?;
            tensors.push((format!("error.{name}"), error));
            tensors.push((format!("q.{name}"), factor.q.clone()));
        }
        Ok(HookState {
            steps: self.steps,
            tensors,
        })
    }

    fn restore_state(&mut self, state: &HookState) -> Result<()> {
        self.steps = state.steps;
        self.factors.clear();
        for (key, values) in &state.tensors {
            let (what, name) = key.split_once('.').unwrap_or_default();
            let factor = self.factors.entry(name.to_owned()).or_default();
            match what {
                "error" => factor.error.clone_from(values),
                "q" => factor.q.clone_from(values),
                _ => return Err(Error::usage(format!("{key} is no state of PowerSGD"))),
            }
        }
        Ok(())
    }
}

fn take<'a>(rest: &mut &'a [f32], len: usize) -> &'a [f32] {
    let (taken, left) = rest.split_at(len);
    *rest = left;
    taken
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    let products = a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y));
    products.sum()
}

fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(t, f)| *t += factor * f);
}

/// Makes the columns of length `n` orthonormal, each against those before (Gram and Schmidt, twice). A column that depends on
/// those before becomes zeros.
fn orthonormalize(columns: &mut [f32], n: usize) {
    for k in 0..columns.len() / n {
        let (before, rest) = columns.split_at_mut(k * n);
        let column = &mut rest[..n];
        let whole = dot(column, column).sqrt();
        for other in before.chunks_exact(n).chain(before.chunks_exact(n)) {
            let along = dot(other, column);
            add_scaled(column, -along as f32, other);
        }
        let left = dot(column, column).sqrt();
        // A NaN is kept, so that the vote finds it.
        let scale = if left <= 1e-6 * whole {
            0.0
        } else {
            1.0 / left
        };
        column.iter_mut().for_each(|c| *c *= scale as f32);
    }
}
