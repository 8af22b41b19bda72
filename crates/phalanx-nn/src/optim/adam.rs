//! Adam and AdamW, with and without AMSGrad.
//!
//! An element's step in float32; bias corrections are computed in double and
//! rounded once:
//!
//! ```text
//! AdamW:   p = round(p * (1 - lr * weight_decay));   Adam: g = fma(p, weight_decay, g)
//! m   = lerp(m, g, 1 - beta1)
//! v   = fma(round((1 - beta2) * g), g, round(beta2 * v))
//! den = round(round(sqrt(v) / sqrt(1 - beta2^t)) + eps)
//! p   = round(p + round(round(-lr / (1 - beta1^t) * m) / den))
//! ```
//!
//! `t` counts the steps that updated the parameter: a parameter without a gradient is
//! skipped and keeps its own count, as in PyTorch.

use super::rule::{Rule, RuleOptimizer};
use super::{check_beta, check_setting};
use crate::Result;
use crate::param::Params;
use phalanx_kernels::update::adam::{self, Scalars};

/// `torch.optim.Adam` and `torch.optim.AdamW`.
pub type Adam = RuleOptimizer<AdamRule>;

/// Settings of [`Adam`].
#[derive(Clone, Copy, Debug)]
pub struct AdamRule {
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
    decoupled: bool,
    amsgrad: bool,
}

impl RuleOptimizer<AdamRule> {
    /// Adam with PyTorch's defaults (betas 0.9 and 0.999, eps 1e-8, no decay)
    /// for parameters laid out like `params`.
    pub fn new(params: &Params, lr: f64) -> Self {
        let rule = AdamRule {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: false,
            amsgrad: false,
        };
        Self::with_rule(params, lr, rule)
    }

    /// AdamW with PyTorch's defaults: the decay of 0.01 shrinks the weights
    /// themselves instead of joining the gradient.
    pub fn adamw(params: &Params, lr: f64) -> Self {
        let mut adam = Self::new(params, lr).weight_decay(0.01);
        adam.rule.decoupled = true;
        adam
    }

    settings! {
        /// Sets the decay rates of the running mean and the running square.
        betas(beta1: f64, beta2: f64);
        /// Sets the term added to the denominator.
        eps(eps: f64);
        /// Divides by the largest running square so far instead of the current one.
        amsgrad(amsgrad: bool);
    }
}

impl Rule for AdamRule {
    type Scalars = Scalars;

    fn check(&self, lr: f64) -> Result<()> {
        check_setting("learning rate", lr)?;
        check_setting("eps", self.eps)?;
        check_setting("weight decay", self.weight_decay)?;
        check_beta("beta1", self.beta1)?;
        check_beta("beta2", self.beta2)
    }

    fn weight_decay(&mut self) -> &mut f64 {
        &mut self.weight_decay
    }

    fn name(&self) -> &'static str {
        if self.decoupled { "AdamW" } else { "Adam" }
    }

    fn set_momentum(&mut self, momentum: f64) {
        self.beta1 = momentum;
    }

    fn buffers(&self) -> &'static [&'static str] {
        if self.amsgrad {
            &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        } else {
            &["exp_avg", "exp_avg_sq"]
        }
    }

    fn scalars(&self, lr: f64, t: u64) -> Scalars {
        // Double throughout, as Python computes them.
        let t = t as f64;
        let correction1 = 1.0 - self.beta1.powf(t);
        let correction2 = 1.0 - self.beta2.powf(t);
        let (shrink, decay) = match self.decoupled {
            true => (1.0 - lr * self.weight_decay, 0.0),
            false => (1.0, self.weight_decay),
        };
        Scalars {
            shrink: shrink as f32,
            decay: decay as f32,
            weight: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            keep2: (1.0 - self.beta2) as f32,
            root2: correction2.sqrt() as f32,
            eps: self.eps as f32,
            neg_step: (-(lr / correction1)) as f32,
        }
    }

    fn update(s: Scalars, p: &mut [f32], g: &[f32], factor: f32, [m, v, largest]: [&mut [f32]; 3]) {
        adam::update(s, p, g, factor, m, v, largest);
    }
}
