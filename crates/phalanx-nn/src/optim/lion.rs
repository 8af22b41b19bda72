//! Lion (X. Chen et al., "Symbolic discovery of optimization algorithms", 2023,
//! [arXiv:2302.06675](https://arxiv.org/abs/2302.06675)).
//!
//! An element's step in float32:
//!
//! ```text
//! c = fma(g, 1 - beta1, round(beta1 * m))
//! p = fma(sign(c), -lr, round(p * (1 - lr * weight_decay)))
//! m = fma(g, 1 - beta2, round(beta2 * m))
//! ```
//!
//! The sign of 0 is 0, and that of NaN is NaN.

use super::rule::{Rule, RuleOptimizer};
use super::{check_beta, check_setting};
use crate::Result;
use crate::param::Params;
use phalanx_kernels::update::lion::{self, Scalars};

/// Lion: every element moves by the learning rate, in the direction of an average's sign. It needs learning rates 3 to 10 times
/// smaller than AdamW's, and weight decays larger by the same factor.
pub type Lion = RuleOptimizer<LionRule>;

/// Settings of [`Lion`].
#[derive(Clone, Copy, Debug)]
pub struct LionRule {
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
}

impl RuleOptimizer<LionRule> {
    /// Lion with the paper's defaults (betas 0.9 and 0.99) and no decay for parameters laid out like `params`.
    pub fn new(params: &Params, lr: f64) -> Self {
        let rule = LionRule {
            beta1: 0.9,
            beta2: 0.99,
            weight_decay: 0.0,
        };
        Self::with_rule(params, lr, rule)
    }

    settings! {
        /// Sets the share of the running mean in the direction, and the decay rate of that mean.
        betas(beta1: f64, beta2: f64);
    }
}

impl Rule for LionRule {
    type Scalars = Scalars;

    fn check(&self, lr: f64) -> Result<()> {
        check_setting("learning rate", lr)?;
        check_beta("beta1", self.beta1)?;
        check_beta("beta2", self.beta2)?;
        check_setting("weight decay", self.weight_decay)
    }

    fn weight_decay(&mut self) -> &mut f64 {
        &mut self.weight_decay
    }

    fn name(&self) -> &'static str {
        "Lion"
    }

    fn set_momentum(&mut self, momentum: f64) {
        self.beta1 = momentum;
    }

    fn buffers(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }

    fn scalars(&self, lr: f64, _: u64) -> Scalars {
        Scalars {
            betas: [self.beta1, self.beta2].map(|beta| beta as f32),
            weights: [self.beta1, self.beta2].map(|beta| (1.0 - beta) as f32),
            shrink: (1.0 - lr * self.weight_decay) as f32,
            neg_lr: (-lr) as f32,
        }
    }

    fn update(s: Scalars, p: &mut [f32], g: &[f32], factor: f32, [mean, ..]: [&mut [f32]; 3]) {
        lion::update(s, p, g, factor, mean);
    }
}
