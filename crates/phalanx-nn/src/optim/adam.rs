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
//! `t` counts the steps that updated the parameter: one without a gradient is left alone and
//! keeps its own count, as in PyTorch.

use super::updates::Updates;
use super::{Optimizer, PIECE, Pass, Run, check_setting, only_known, run_fused, saved};
use crate::param::{GradView, Params};
use crate::{Error, Result, Workers};

const EXP_AVG: &str = "exp_avg";
const EXP_AVG_SQ: &str = "exp_avg_sq";
const MAX_EXP_AVG_SQ: &str = "max_exp_avg_sq";

/// `torch.optim.Adam` and `torch.optim.AdamW`.
#[derive(Clone, Debug)]
pub struct Adam {
    elems: usize,
    settings: Settings,
    amsgrad: bool,
    steps: u64,
    updates: Updates,
    mean: Vec<f32>,
    square: Vec<f32>,
    /// Running maximum of `square`; empty without AMSGrad.
    largest: Vec<f32>,
    workers: Workers,
    /// The step that was begun last.
    running: Option<Settings>,
}

/// Hyperparameters of a step.
#[derive(Clone, Copy, Debug)]
struct Settings {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    decoupled: bool,
}

impl Settings {
    fn check(&self) -> Result<()> {
        check_setting("learning rate", self.lr)?;
        check_setting("eps", self.eps)?;
        check_setting("weight decay", self.weight_decay)?;
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::usage(format!(
                    "{name} is {beta}; it must be at least 0 and below 1"
                )));
            }
        }
        Ok(())
    }

    /// What all elements of a parameter have in common in its update number `t`.
    fn scalars(&self, t: u64) -> Scalars {
        // Double throughout, as Python computes them.
        let t = t as f64;
        let correction1 = 1.0 - self.beta1.powf(t);
        let correction2 = 1.0 - self.beta2.powf(t);
        let weight = (1.0 - self.beta1) as f32;
        Scalars {
            shrink: if self.decoupled {
                (1.0 - self.lr * self.weight_decay) as f32
            } else {
                1.0
            },
            decay: if self.decoupled {
                0.0
            } else {
                self.weight_decay as f32
            },
            weight,
            weight_minus_1: weight - 1.0,
            beta2: self.beta2 as f32,
            keep2: (1.0 - self.beta2) as f32,
            root2: correction2.sqrt() as f32,
            eps: self.eps as f32,
            neg_step: (-(self.lr / correction1)) as f32,
        }
    }
}

impl Adam {
    /// Adam with PyTorch's defaults (betas 0.9 and 0.999, eps 1e-8, no decay)
    /// for parameters laid out like `params`.
    pub fn new(params: &Params, lr: f64) -> Self {
        let elems = params.flat().len();
        Self {
            elems,
            settings: Settings {
                lr,
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.0,
                decoupled: false,
            },
            amsgrad: false,
            steps: 0,
            updates: Updates::new(params),
            mean: vec![0.0; elems],
            square: vec![0.0; elems],
            largest: Vec::new(),
            workers: Workers::default(),
            running: None,
        }
    }

    /// AdamW with PyTorch's defaults: the decay of 0.01 shrinks the weights
    /// themselves instead of joining the gradient.
    pub fn adamw(params: &Params, lr: f64) -> Self {
        let mut adam = Self::new(params, lr).weight_decay(0.01);
        adam.settings.decoupled = true;
        adam
    }

    /// Sets the decay rates of the running mean and the running square.
    #[must_use]
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Self {
        self.settings.beta1 = beta1;
        self.settings.beta2 = beta2;
        self
    }

    /// Sets the term added to the denominator.
    #[must_use]
    pub fn eps(mut self, eps: f64) -> Self {
        self.settings.eps = eps;
        self
    }

    /// Sets the weight decay.
    #[must_use]
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.settings.weight_decay = weight_decay;
        self
    }

    /// Divides by the largest running square so far instead of the current one.
    #[must_use]
    pub fn amsgrad(mut self, amsgrad: bool) -> Self {
        self.amsgrad = amsgrad;
        self.largest = vec![0.0; if amsgrad { self.elems } else { 0 }];
        self
    }

    /// Updates `params` from `grads`, in place; see [`Optimizer::step`].
    ///
    /// # Errors
    ///
    /// Usage: the settings are impossible, or `params` or `grads` have
    /// another layout than the parameters the optimizer was made for. Nothing
    /// was changed then.
    pub fn step(&mut self, params: &mut Params, grads: &dyn GradView) -> Result<()> {
        Optimizer::step(self, params, grads)
    }

    fn begin(&mut self) -> Settings {
        self.steps += 1;
        self.settings
    }

    /// Elements whose state begins at `at`; the gradient is as long.
    fn update(&mut self, at: usize, p: &mut [f32], g: &[f32], scalars: Scalars, factor: f32) {
        let range = at..at + p.len();
        let buffers = [
            p,
            &mut self.mean[range.clone()],
            &mut self.square[range.clone()],
            self.largest.get_mut(range).unwrap_or_default(),
        ];
        self.workers
            .split_all(buffers, PIECE, |at, [p, m, v, largest]| {
                run_fused(Update {
                    g: &g[at..at + p.len()],
                    p,
                    m,
                    v,
                    largest,
                    scalars,
                    factor,
                });
            });
    }

    fn names(&self) -> &'static [&'static str] {
        if self.amsgrad {
            &[EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ]
        } else {
            &[EXP_AVG, EXP_AVG_SQ]
        }
    }
}

impl Optimizer for Adam {
    fn check_layout(&self, params: &Params, grads: &dyn GradView) -> Result<()> {
        self.updates.check_layout(self.elems, params, grads)
    }

    fn begin_step(&mut self) -> Result<()> {
        self.settings.check()?;
        self.running = Some(self.begin());
        Ok(())
    }

    fn step_run(&mut self, run: Run<'_>, factor: f32) -> Result<()> {
        let settings = run.check(self.elems, self.running)?;
        let Some(param) = self.updates.param_of(&run)? else {
            return Ok(());
        };
        let scalars = settings.scalars(self.updates.count(param, self.steps));
        self.update(run.at, run.values, run.grads, scalars, factor);
        Ok(())
    }

    fn set_workers(&mut self, workers: Workers) {
        self.workers = workers;
    }

    fn lr(&self) -> f64 {
        self.settings.lr
    }

    fn set_lr(&mut self, lr: f64) {
        self.settings.lr = lr;
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn updates(&self) -> &[u64] {
        self.updates.counts()
    }

    fn state(&self) -> Vec<(&'static str, &[f32])> {
        if self.steps == 0 {
            return Vec::new();
        }
        let buffers = [&self.mean[..], &self.square, &self.largest];
        self.names().iter().copied().zip(buffers).collect()
    }

    fn restore(&mut self, steps: u64, updates: &[u64], state: &[(&str, &[f32])]) -> Result<()> {
        self.updates.check(steps, updates)?;
        if steps == 0 {
            only_known(state, &[])?;
            for buffer in [&mut self.mean, &mut self.square, &mut self.largest] {
                buffer.fill(0.0);
            }
        } else {
            only_known(state, self.names())?;
            let mean = saved(state, EXP_AVG, self.elems)?;
            let square = saved(state, EXP_AVG_SQ, self.elems)?;
            if self.amsgrad {
                let largest = saved(state, MAX_EXP_AVG_SQ, self.elems)?;
                self.largest.copy_from_slice(largest);
            }
            self.mean.copy_from_slice(mean);
            self.square.copy_from_slice(square);
        }
        self.steps = steps;
        self.updates.restore(updates);
        self.running = None;
        Ok(())
    }
}

/// Everything that is the same for all elements of a parameter in a step.
#[derive(Clone, Copy, Debug)]
struct Scalars {
    /// AdamW's factor on the weights; 1 otherwise.
    shrink: f32,
    /// Adam's weight decay; 0 otherwise.
    decay: f32,
    weight: f32,
    weight_minus_1: f32,
    beta2: f32,
    keep2: f32,
    root2: f32,
    eps: f32,
    neg_step: f32,
}

/// The step of one parameter. `largest` is empty without AMSGrad.
struct Update<'a> {
    p: &'a mut [f32],
    g: &'a [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    largest: &'a mut [f32],
    scalars: Scalars,
    /// What gradients are multiplied by.
    factor: f32,
}

impl Pass for Update<'_> {
    #[inline(always)]
    fn run(self) {
        let s = self.scalars;
        let elements = self.p.iter_mut().zip(self.g).zip(self.m).zip(self.v);
        if self.largest.is_empty() {
            for (((p, &g), m), v) in elements {
                let moved = s.moments(*p, g * self.factor, m, v);
                *p = s.apply(moved, *m, *v);
            }
        } else {
            for ((((p, &g), m), v), largest) in elements.zip(self.largest) {
                let moved = s.moments(*p, g * self.factor, m, v);
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
    /// Updates both running averages; gives the weight after AdamW's decay.
    #[inline(always)]
    fn moments(&self, p: f32, g: f32, m: &mut f32, v: &mut f32) -> f32 {
        // A zero decay must not touch the gradient: infinity * 0 is NaN.
        let g = if self.decay == 0.0 {
            g
        } else {
            p.mul_add(self.decay, g)
        };
        // torch.lerp goes from the nearer end.
        *m = if self.weight < 0.5 {
            self.weight.mul_add(g - *m, *m)
        } else {
            (g - *m).mul_add(self.weight_minus_1, g)
        };
        *v = (self.keep2 * g).mul_add(g, self.beta2 * *v);
        p * self.shrink
    }

    #[inline(always)]
    fn apply(&self, p: f32, m: f32, square: f32) -> f32 {
        let den = square.sqrt() / self.root2 + self.eps;
        p + self.neg_step * m / den
    }
}
