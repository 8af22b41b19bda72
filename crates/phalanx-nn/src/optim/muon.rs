//! Muon (K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; `torch.optim.Muon`).
//!
//! The update of a matrix, all in float32:
//!
//! ```text
//! buf = lerp(buf, g, 1 - momentum)
//! x   = nesterov ? lerp(g, buf, momentum) : buf
//! x   = x / max(norm(x), eps)
//! x   = (a + b x x^T + c (x x^T)^2) x            as often as there are iterations
//! p   = p * (1 - lr * weight_decay) - lr * adjustment * x
//! ```
//!
//! The iteration makes all singular values of `x` about 1 (a Newton-Schulz iteration of the fifth order). PyTorch computes it
//! in bf16. Weights of convolutions are flattened to (first dimension, all others). Norms are sums of squares in f64.

use super::adam::{Adam, AdamRule};
use super::group::{Matrix, ParamSettings};
use super::rule::{PIECE, Rule, RuleOptimizer};
use super::sgd::SgdRule;
use super::{Optimizer, check_beta, check_setting};
use crate::param::Params;
use crate::{Error, Result, ThreadPool, refuse};
use phalanx_kernels::product::{Mat, product_threaded};
use phalanx_kernels::squares::sum_of_squares;
use phalanx_kernels::update::{adam, muon, sgd};
use phalanx_kernels::{Mode, elementwise};

/// `torch.optim.Muon` for matrices, and another optimizer for all other parameters.
///
/// ```
/// use phalanx_nn::{Scope, Seed, layers::Linear, optim::{Adam, ParamGroup, Muon}};
///
/// let mut scope = Scope::new(Seed(0));
/// Linear::new(scope.enter("hidden"), 4, 8);
/// Linear::new(scope.enter("head"), 8, 2);
/// let params = scope.build()?;
/// let others = Adam::adamw(&params, 3e-4).betas(0.9, 0.95);
/// let muon = Muon::new(&params, 0.02).others(others).groups(|p| match p.name {
///     "head.weight" => ParamGroup::new().elementwise(),
///     _ => ParamGroup::new(),
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Muon = RuleOptimizer<MuonRule>;

/// Coefficients of the iteration: of the first, third and fifth power.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];
/// The least norm that an update is divided by.
const EPS: f64 = 1e-7;

/// Settings of [`Muon`].
#[derive(Clone, Copy, Debug)]
pub struct MuonRule {
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
    iterations: u32,
    match_rms: bool,
    normalised: bool,
    others: Others,
    /// The learning rate of the others divided by Muon's.
    ratio: f64,
    others_have_groups: bool,
    /// Of the parameter that the rule is for.
    matrix: Option<Matrix>,
}

/// How [`Muon`] updates parameters other than matrices.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Others {
    /// As [`Sgd`](super::Sgd).
    Sgd(SgdRule),
    /// As [`Adam`], without AMSGrad.
    Adam(AdamRule),
}

impl From<SgdRule> for Others {
    fn from(rule: SgdRule) -> Self {
        Others::Sgd(rule)
    }
}

impl From<AdamRule> for Others {
    fn from(rule: AdamRule) -> Self {
        Others::Adam(rule)
    }
}

impl RuleOptimizer<MuonRule> {
    /// Muon with PyTorch's defaults (momentum 0.95, Nesterov, weight decay 0.1, 5 iterations) for the matrices of `params`: all
    /// of two dimensions or more whose [group](Self::groups) is not [elementwise](super::ParamGroup::elementwise). All others by
    /// AdamW with its defaults, and the same learning rate and weight decay.
    pub fn new(params: &Params, lr: f64) -> Self {
        let adamw = Adam::adamw(params, lr).weight_decay(0.1);
        let rule = MuonRule {
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            iterations: 5,
            match_rms: false,
            normalised: false,
            others: adamw.rule.into(),
            ratio: 1.0,
            others_have_groups: false,
            matrix: None,
        };
        Self::with_rule(params, lr, rule)
    }

    /// Updates all parameters but matrices as `optimizer`, an [`Sgd`](super::Sgd) or [`Adam`] without groups, would, with its
    /// learning rate and settings. A schedule changes both learning rates by the same factor, and momentum of both.
    #[must_use]
    pub fn others<R: Rule + Into<Others>>(mut self, optimizer: RuleOptimizer<R>) -> Self {
        self.rule.ratio = match (optimizer.lr(), self.lr()) {
            (0.0, 0.0) => 1.0,
            // NaN or infinite, which the step says, if Muon's is 0.
            (others, own) => others / own,
        };
        self.rule.others_have_groups = optimizer.choose.0.is_some();
        self.rule.others = optimizer.rule.into();
        self
    }

    settings! {
        /// Sets the momentum of matrices.
        momentum(momentum: f64);
        /// Turns Nesterov's momentum of matrices on or off.
        nesterov(nesterov: bool);
        /// Sets the number of Newton-Schulz iterations (PyTorch's `ns_steps`).
        iterations(iterations: u32);
        /// Multiplies the learning rate of a matrix by `0.2 sqrt(max(outputs, inputs))`, so that its updates are as large as
        /// AdamW's (PyTorch's `adjust_lr_fn="match_rms_adamw"`), instead of by `sqrt(max(1, outputs / inputs))`.
        match_rms_adamw(match_rms: bool);
        /// Before each update, scales a matrix to a Euclidean norm of the square root of its number of outputs (K. Jordan's record
        /// on CIFAR-10). For weights whose scale has no effect, such as those in front of a batch normalisation.
        normalised(normalised: bool);
    }
}

impl Rule for MuonRule {
    type Scalars = Scalars;

    fn check(&self, lr: f64) -> Result<()> {
        check_setting("learning rate", lr)?;
        check_setting("weight decay", self.weight_decay)?;
        check_beta("momentum", self.momentum)?;
        if self.matrix.is_some_and(|m| m.is_shard) {
            refuse!(
                "Muon needs whole matrices, and this rank has a shard of one; use another optimizer, or do not divide the parameters"
            );
        }
        if self.others_have_groups {
            refuse!("the optimizer inside Muon has groups, which are not used; give them to Muon");
        }
        if !self.ratio.is_finite() {
            refuse!(
                "Muon's learning rate was 0 when the other optimizer was given; make it with the highest rate and lower it by set_lr or a schedule"
            );
        }
        match self.others {
            Others::Sgd(rule) => rule.check(lr * self.ratio),
            Others::Adam(rule) if rule.buffers().len() > 2 => {
                Err(Error::usage("AMSGrad does not work inside Muon"))
            }
            Others::Adam(rule) => rule.check(lr * self.ratio),
        }
    }

    fn weight_decay(&mut self) -> &mut f64 {
        &mut self.weight_decay
    }

    fn of(mut self, own: &ParamSettings) -> Self {
        self.weight_decay = own.group.weight_decay.unwrap_or(self.weight_decay);
        self.others = match self.others {
            Others::Sgd(rule) => rule.of(own).into(),
            Others::Adam(rule) => rule.of(own).into(),
        };
        self.matrix = own.matrix();
        self
    }

    fn is_elementwise(&self) -> bool {
        self.matrix.is_none()
    }

    fn name(&self) -> &'static str {
        "Muon"
    }

    fn set_momentum(&mut self, momentum: f64) {
        self.momentum = momentum;
        match &mut self.others {
            Others::Sgd(rule) => rule.set_momentum(momentum),
            Others::Adam(rule) => rule.set_momentum(momentum),
        }
    }

    fn buffers(&self) -> &'static [&'static str] {
        match self.others {
            Others::Sgd(_) => &["momentum_buffer"],
            // Momentum of matrices is an average too, and no parameter has both.
            Others::Adam(_) => &["exp_avg", "exp_avg_sq"],
        }
    }

    fn scalars(&self, lr: f64, t: u64) -> Scalars {
        let Some(matrix) = self.matrix else {
            return match self.others {
                Others::Sgd(rule) => Scalars::Sgd(rule.scalars(lr * self.ratio, t)),
                Others::Adam(rule) => Scalars::Adam(rule.scalars(lr * self.ratio, t)),
            };
        };
        let (outputs, inputs) = (matrix.outputs as f64, matrix.inputs as f64);
        let adjustment = if self.match_rms {
            0.2 * outputs.max(inputs).sqrt()
        } else {
            (outputs / inputs).max(1.0).sqrt()
        };
        Scalars::Matrix(MatrixUpdate {
            matrix,
            momentum: self.momentum as f32,
            nesterov: self.nesterov,
            iterations: self.iterations,
            shrink: 1.0 - lr * self.weight_decay,
            neg_lr: (-lr * adjustment) as f32,
            normalised: self.normalised,
        })
    }

    fn update(s: Scalars, p: &mut [f32], g: &[f32], factor: f32, state: [&mut [f32]; 3]) {
        match s {
            Scalars::Sgd(s) => SgdRule::update(s, p, g, factor, state),
            Scalars::Adam(s) => AdamRule::update(s, p, g, factor, state),
            Scalars::Matrix(_) => {}
        }
    }

    fn update_whole(
        s: Scalars,
        p: &mut [f32],
        g: &[f32],
        factor: f32,
        [momentum, ..]: [&mut [f32]; 3],
        (threads, work): (&ThreadPool, &mut Vec<f32>),
    ) -> bool {
        let Scalars::Matrix(whole) = s else {
            return false;
        };
        whole.update(p, g, factor, momentum, threads, work);
        true
    }
}

/// Everything that is the same for all elements of a parameter in a step.
#[derive(Clone, Copy, Debug)]
pub enum Scalars {
    /// Of a matrix.
    Matrix(MatrixUpdate),
    /// Of another parameter.
    Sgd(sgd::Scalars),
    /// Of another parameter.
    Adam(adam::Scalars),
}

/// The update of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct MatrixUpdate {
    matrix: Matrix,
    momentum: f32,
    nesterov: bool,
    iterations: u32,
    shrink: f64,
    neg_lr: f32,
    normalised: bool,
}

impl MatrixUpdate {
    fn update(
        &self,
        p: &mut [f32],
        g: &[f32],
        factor: f32,
        momentum: &mut [f32],
        threads: &ThreadPool,
        work: &mut Vec<f32>,
    ) {
        let Matrix {
            outputs, inputs, ..
        } = self.matrix;
        let (len, side) = (outputs * inputs, outputs.min(inputs));
        work.resize(work.len().max(2 * len + 2 * side * side), 0.0);
        let (mut x, rest) = work.split_at_mut(len);
        let (mut next, rest) = rest.split_at_mut(len);
        let (gram, rest) = rest.split_at_mut(side * side);
        let square = &mut rest[..side * side];
        threads.split_all([&mut *x, momentum], PIECE, |at, [x, momentum]| {
            let g = &g[at..at + x.len()];
            muon::averages(x, momentum, g, factor, (self.momentum, self.nesterov));
        });
        let norm = sum_of_squares(threads, x).sqrt();
        elementwise::scale(threads, x, (1.0 / norm.max(EPS)) as f32);
        let (rows, columns) = if self.matrix.outputs_last {
            (inputs, outputs)
        } else {
            (outputs, inputs)
        };
        let [a, b, c] = COEFFICIENTS;
        for _ in 0..self.iterations {
            let m = Mat::rows(x, rows, columns, columns);
            // Of the shorter side.
            let product = if rows == side { (m, m.t()) } else { (m.t(), m) };
            product_threaded(threads, gram, product.0, product.1, Mode::Write);
            let g = Mat::rows(gram, side, side, side);
            product_threaded(threads, square, g, g, Mode::Write);
            muon::combine(square, gram, (c, b));
            square.iter_mut().step_by(side + 1).for_each(|v| *v += a);
            let factor = Mat::rows(square, side, side, side);
            let product = if rows == side {
                (factor, m)
            } else {
                (m, factor)
            };
            product_threaded(threads, next, product.0, product.1, Mode::Write);
            std::mem::swap(&mut x, &mut next);
        }
        let mut shrink = self.shrink;
        if self.normalised {
            let norm = sum_of_squares(threads, p).sqrt();
            if norm > 0.0 {
                shrink *= (outputs as f64).sqrt() / norm;
            }
        }
        threads.split(p, PIECE, |at, p| {
            muon::step(p, &x[at..at + p.len()], shrink as f32, self.neg_lr);
        });
    }
}
