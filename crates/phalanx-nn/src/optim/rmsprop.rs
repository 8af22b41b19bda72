//! RMSprop (T. Tieleman and G. Hinton, "Neural networks for machine learning", lecture 6.5, 2012), plain or centered
//! (A. Graves, [arXiv:1308.0850](https://arxiv.org/abs/1308.0850)), as `torch.optim.RMSprop` computes it.
//!
//! An element's step in float32:
//!
//! ```text
//! g    = fma(p, weight_decay, g)
//! sq   = fma(round((1 - alpha) * g), g, round(alpha * sq))
//! mean = lerp(mean, g, 1 - alpha)                                           centered
//! den  = round(sqrt(centered ? fma(-mean, mean, sq) : sq) + eps)
//! p    = round(p + round(round(-lr * g) / den))                             no momentum
//! buf  = round(round(buf * momentum) + round(g / den)); p = fma(buf, -lr, p)   momentum
//! ```
//!
//! The bits are those of PyTorch's single-tensor CPU path except for its square root, as with [`Adam`](super::Adam).

use super::rule::{Rule, RuleOptimizer};
use super::{check_beta, check_setting};
use crate::Result;
use crate::param::Params;
use phalanx_kernels::update::rmsprop::{self, Scalars};

/// `torch.optim.RMSprop`.
pub type Rmsprop = RuleOptimizer<RmspropRule>;

/// Settings of [`Rmsprop`].
#[derive(Clone, Copy, Debug)]
pub struct RmspropRule {
    alpha: f64,
    eps: f64,
    weight_decay: f64,
    momentum: f64,
    centered: bool,
}

impl RuleOptimizer<RmspropRule> {
    /// RMSprop with PyTorch's defaults (alpha 0.99, eps 1e-8, no decay, no momentum, not centered) for parameters laid out
    /// like `params`.
    pub fn new(params: &Params, lr: f64) -> Self {
        let rule = RmspropRule {
            alpha: 0.99,
            eps: 1e-8,
            weight_decay: 0.0,
            momentum: 0.0,
            centered: false,
        };
        Self::with_rule(params, lr, rule)
    }

    settings! {
        /// Sets the decay rate of the running square.
        alpha(alpha: f64);
        /// Sets the term added to the denominator.
        eps(eps: f64);
        /// Sets the momentum (0 = none).
        momentum(momentum: f64);
        /// Divides by the running standard deviation instead of the root of the running square.
        centered(centered: bool);
    }
}

impl Rule for RmspropRule {
    type Scalars = Scalars;

    fn check(&self, lr: f64) -> Result<()> {
        check_setting("learning rate", lr)?;
        check_beta("alpha", self.alpha)?;
        check_setting("eps", self.eps)?;
        check_setting("weight decay", self.weight_decay)?;
        check_setting("momentum", self.momentum)
    }

    fn weight_decay(&mut self) -> &mut f64 {
        &mut self.weight_decay
    }

    fn name(&self) -> &'static str {
        "RMSprop"
    }

    fn set_momentum(&mut self, momentum: f64) {
        self.momentum = momentum;
    }

    fn buffers(&self) -> &'static [&'static str] {
        // The momentum last: a schedule may begin it when the others are there.
        match (self.centered, self.momentum > 0.0) {
            (false, false) => &["square_avg"],
            (false, true) => &["square_avg", "momentum_buffer"],
            (true, false) => &["square_avg", "grad_avg"],
            (true, true) => &["square_avg", "grad_avg", "momentum_buffer"],
        }
    }

    fn scalars(&self, lr: f64, _: u64) -> Scalars {
        Scalars {
            decay: self.weight_decay as f32,
            alpha: self.alpha as f32,
            weight: (1.0 - self.alpha) as f32,
            eps: self.eps as f32,
            momentum: self.momentum as f32,
            neg_lr: (-lr) as f32,
            centered: self.centered,
        }
    }

    fn update(s: Scalars, p: &mut [f32], g: &[f32], factor: f32, [square, b, c]: [&mut [f32]; 3]) {
        let (mean, buf) = if s.centered { (b, c) } else { (c, b) };
        rmsprop::update(s, p, g, factor, square, mean, buf);
    }
}
