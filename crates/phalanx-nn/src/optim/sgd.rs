//! Stochastic gradient descent with momentum, dampening, weight decay and
//! Nesterov's momentum.
//!
//! An element's step, all in float32, each line one rounding per operation:
//!
//! ```text
//! d   = fma(p, weight_decay, g)
//! buf = d                                              first step
//! buf = fma(d, 1 - dampening, round(buf * momentum))   later
//! d   = nesterov ? fma(buf, momentum, d) : buf
//! p   = fma(d, -lr, p)
//! ```
//!
//! The first step is counted per parameter: a parameter without a gradient is skipped, as in PyTorch.

use super::check_setting;
use super::rule::{Rule, RuleOptimizer};
use crate::param::Params;
use crate::{Result, refuse};
use phalanx_kernels::update::sgd::{self, Mode, Scalars};

/// `torch.optim.SGD`.
pub type Sgd = RuleOptimizer<SgdRule>;

/// Settings of [`Sgd`].
#[derive(Clone, Copy, Debug)]
pub struct SgdRule {
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
}

impl RuleOptimizer<SgdRule> {
    /// Plain gradient descent for parameters laid out like `params`.
    pub fn new(params: &Params, lr: f64) -> Self {
        let rule = SgdRule {
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
        };
        Self::with_rule(params, lr, rule)
    }

    settings! {
        /// Sets the momentum (0 = none).
        momentum(momentum: f64);
        /// Sets the dampening of the momentum.
        dampening(dampening: f64);
        /// Turns Nesterov's momentum on or off; it needs momentum and no dampening.
        nesterov(nesterov: bool);
    }
}

impl Rule for SgdRule {
    type Scalars = Scalars;

    fn check(&self, lr: f64) -> Result<()> {
        check_setting("learning rate", lr)?;
        check_setting("momentum", self.momentum)?;
        check_setting("weight decay", self.weight_decay)?;
        if !self.dampening.is_finite() {
            refuse!("dampening is {}", self.dampening);
        }
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            refuse!("nesterov needs a momentum above 0 and a dampening of 0");
        }
        Ok(())
    }

    fn weight_decay(&mut self) -> &mut f64 {
        &mut self.weight_decay
    }

    fn name(&self) -> &'static str {
        "SGD"
    }

    fn set_momentum(&mut self, momentum: f64) {
        self.momentum = momentum;
    }

    fn buffers(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 {
            &[]
        } else {
            &["momentum_buffer"]
        }
    }

    fn scalars(&self, lr: f64, t: u64) -> Scalars {
        let mode = match t {
            _ if self.momentum == 0.0 => Mode::Plain,
            1 => Mode::First,
            _ => Mode::Later,
        };
        Scalars {
            decay: self.weight_decay as f32,
            momentum: self.momentum as f32,
            keep: (1.0 - self.dampening) as f32,
            neg_lr: (-lr) as f32,
            nesterov: self.nesterov,
            mode,
        }
    }

    fn update(s: Scalars, p: &mut [f32], g: &[f32], factor: f32, [buf, ..]: [&mut [f32]; 3]) {
        sgd::update(s, p, g, factor, buf);
    }
}
