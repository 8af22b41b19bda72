//! LAMB (Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020,
//! [arXiv:1904.00962](https://arxiv.org/abs/1904.00962)).
//!
//! A parameter's step in float32, with [`Adam`](super::Adam)'s averages and denominator:
//!
//! ```text
//! u = fma(p, weight_decay, round(round(m / (1 - beta1^t)) / den))
//! p = fma(u, -lr * norm(p) / norm(u), p)
//! ```
//!
//! Norms are of the whole parameter: roots of sums of squares in f64, in the order of [`grad_norm`](super::grad_norm).

use super::adam::{Adam, AdamRule};
use super::group::ParamSettings;
use super::rule::{PIECE, Rule, RuleOptimizer};
use crate::param::Params;
use crate::{Result, ThreadPool, refuse};
use phalanx_kernels::squares::sum_of_squares;
use phalanx_kernels::update::lamb::{self, Scalars};

/// LAMB, for large batches: AdamW's update, scaled to the norm of the parameter; as it is where one of both norms is 0.
pub type Lamb = RuleOptimizer<LambRule>;

/// Settings of [`Lamb`].
#[derive(Clone, Copy, Debug)]
pub struct LambRule {
    adam: AdamRule,
    /// Whether this optimizer has only a shard of the parameter that the rule is for.
    is_shard: bool,
}

impl RuleOptimizer<LambRule> {
    /// LAMB with the paper's settings (betas 0.9 and 0.999, eps 1e-6, weight decay 0.01) for parameters laid out like `params`.
    pub fn new(params: &Params, lr: f64) -> Self {
        let rule = LambRule {
            adam: Adam::adamw(params, lr).eps(1e-6).rule,
            is_shard: false,
        };
        Self::with_rule(params, lr, rule)
    }

    /// Sets the decay rates of the running mean and the running square.
    #[must_use]
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Self {
        self.rule.adam.beta1 = beta1;
        self.rule.adam.beta2 = beta2;
        self
    }

    /// Sets the term added to the denominator.
    #[must_use]
    pub fn eps(mut self, eps: f64) -> Self {
        self.rule.adam.eps = eps;
        self
    }
}

impl Rule for LambRule {
    type Scalars = Scalars;

    fn check(&self, lr: f64) -> Result<()> {
        if self.is_shard {
            refuse!(
                "LAMB needs whole parameters, and this rank has a shard of one; use another optimizer, or do not divide the parameters"
            );
        }
        self.adam.check(lr)
    }

    fn weight_decay(&mut self) -> &mut f64 {
        self.adam.weight_decay()
    }

    fn of(self, own: &ParamSettings) -> Self {
        LambRule {
            adam: self.adam.of(own),
            is_shard: own.is_shard,
        }
    }

    fn is_elementwise(&self) -> bool {
        false
    }

    fn name(&self) -> &'static str {
        "LAMB"
    }

    fn set_momentum(&mut self, momentum: f64) {
        self.adam.set_momentum(momentum);
    }

    fn buffers(&self) -> &'static [&'static str] {
        self.adam.buffers()
    }

    fn scalars(&self, lr: f64, t: u64) -> Scalars {
        Scalars {
            // Adam's step by this rate is the update.
            adam: self.adam.scalars(-1.0, t),
            decay: self.adam.weight_decay as f32,
            lr,
        }
    }

    /// Not called: all parameters are updated as a whole.
    fn update(_: Scalars, _: &mut [f32], _: &[f32], _: f32, _: [&mut [f32]; 3]) {}

    fn update_whole(
        s: Scalars,
        p: &mut [f32],
        g: &[f32],
        factor: f32,
        [m, v, _]: [&mut [f32]; 3],
        (threads, work): (&ThreadPool, &mut Vec<f32>),
    ) -> bool {
        work.resize(work.len().max(p.len()), 0.0);
        let u = &mut work[..p.len()];
        threads.split_all([&mut *u, m, v], PIECE, |at, [u, m, v]| {
            let range = at..at + u.len();
            lamb::updates(s, u, &p[range.clone()], &g[range], factor, m, v);
        });
        let u = &*u;
        let [of_p, of_u] = [&*p, u].map(|x| sum_of_squares(threads, x).sqrt());
        let ratio = if of_p == 0.0 || of_u == 0.0 {
            1.0
        } else {
            of_p / of_u
        };
        let neg_lr = (-s.lr * ratio) as f32;
        threads.split(p, PIECE, |at, p| {
            lamb::step(p, &u[at..at + p.len()], neg_lr)
        });
        true
    }
}
