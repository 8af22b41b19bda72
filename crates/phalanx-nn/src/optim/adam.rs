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
use super::{check_beta, check_setting, lerp};
use crate::Result;
use crate::param::Params;

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

    /// Sets the decay rates of the running mean and the running square.
    #[must_use]
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Self {
        self.rule.beta1 = beta1;
        self.rule.beta2 = beta2;
        self
    }

    /// Sets the term added to the denominator.
    #[must_use]
    pub fn eps(mut self, eps: f64) -> Self {
        self.rule.eps = eps;
        self
    }

    /// Divides by the largest running square so far instead of the current one.
    #[must_use]
    pub fn amsgrad(mut self, amsgrad: bool) -> Self {
        self.rule.amsgrad = amsgrad;
        self
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
        Scalars {
            shrink: if self.decoupled {
                (1.0 - lr * self.weight_decay) as f32
            } else {
                1.0
            },
            decay: if self.decoupled {
                0.0
            } else {
                self.weight_decay as f32
            },
            weight: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            keep2: (1.0 - self.beta2) as f32,
            root2: correction2.sqrt() as f32,
            eps: self.eps as f32,
            neg_step: (-(lr / correction1)) as f32,
        }
    }

    fn update(s: Scalars, p: &mut [f32], g: &[f32], factor: f32, [m, v, largest]: [&mut [f32]; 3]) {
        update(s, p, g, factor, m, v, largest);
    }
}

/// Everything that is the same for all elements of a parameter in a step.
#[derive(Clone, Copy, Debug)]
pub struct Scalars {
    /// AdamW's factor on the weights; 1 otherwise.
    shrink: f32,
    /// Adam's weight decay; 0 otherwise.
    decay: f32,
    weight: f32,
    beta2: f32,
    keep2: f32,
    root2: f32,
    eps: f32,
    neg_step: f32,
}

simd! {
    /// The step of one parameter. `largest` is empty without AMSGrad.
    fn update(
        s: Scalars,
        p: &mut [f32],
        g: &[f32],
        factor: f32,
        m: &mut [f32],
        v: &mut [f32],
        largest: &mut [f32],
    ) {
        let elements = p.iter_mut().zip(g).zip(m).zip(v);
        if largest.is_empty() {
            for (((p, &g), m), v) in elements {
                let moved = s.moments(*p, g * factor, m, v);
                *p = s.apply(moved, *m, *v);
            }
        } else {
            for ((((p, &g), m), v), largest) in elements.zip(largest) {
                let moved = s.moments(*p, g * factor, m, v);
                // torch.maximum: a NaN stays.
                if *v > *largest || v.is_nan() {
                    *largest = *v;
                }
                *p = s.apply(moved, *m, *largest);
            }
        }
    }
}

impl Scalars {
    /// Updates both running averages; returns the weight after AdamW's decay.
    #[inline(always)]
    pub(super) fn moments(&self, p: f32, g: f32, m: &mut f32, v: &mut f32) -> f32 {
        // A zero decay must not touch the gradient: infinity * 0 is NaN.
        let g = if self.decay == 0.0 {
            g
        } else {
            p.mul_add(self.decay, g)
        };
        *m = lerp(*m, g, self.weight);
        *v = (self.keep2 * g).mul_add(g, self.beta2 * *v);
        p * self.shrink
    }

    #[inline(always)]
    pub(super) fn apply(&self, p: f32, m: f32, square: f32) -> f32 {
        let den = square.sqrt() / self.root2 + self.eps;
        p + self.neg_step * m / den
    }
}
