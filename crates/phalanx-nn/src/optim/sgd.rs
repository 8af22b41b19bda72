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
//! The first step is each parameter's own: one without a gradient is left alone, as in PyTorch.

use super::updates::Updates;
use super::{Optimizer, PIECE, Pass, Run, check_setting, only_known, run_fused, saved};
use crate::param::{GradView, Params};
use crate::{Error, Result, Workers};

/// The name PyTorch gives the momentum state.
const MOMENTUM_BUFFER: &str = "momentum_buffer";

/// `torch.optim.SGD`.
#[derive(Clone, Debug)]
pub struct Sgd {
    elems: usize,
    lr: f64,
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
    steps: u64,
    updates: Updates,
    /// Empty until the first step with momentum.
    buffer: Vec<f32>,
    workers: Workers,
    /// The step that was begun last.
    running: Option<Scalars>,
}

impl Sgd {
    /// Plain gradient descent for parameters laid out like `params`.
    pub fn new(params: &Params, lr: f64) -> Self {
        Self {
            elems: params.flat().len(),
            lr,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            steps: 0,
            updates: Updates::new(params),
            buffer: Vec::new(),
            workers: Workers::default(),
            running: None,
        }
    }

    /// Sets the momentum (0 = none).
    #[must_use]
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// Sets the dampening of the momentum.
    #[must_use]
    pub fn dampening(mut self, dampening: f64) -> Self {
        self.dampening = dampening;
        self
    }

    /// Sets the weight decay (an L2 penalty's gradient).
    #[must_use]
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// Switches Nesterov's momentum; it needs momentum and no dampening.
    #[must_use]
    pub fn nesterov(mut self, nesterov: bool) -> Self {
        self.nesterov = nesterov;
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

    /// What all elements of the step that begins have in common.
    fn begin(&mut self) -> Scalars {
        if self.momentum != 0.0 && self.buffer.is_empty() {
            self.buffer = vec![0.0; self.elems];
            // It begins now for all parameters.
            self.updates.clear();
        }
        self.steps += 1;
        Scalars {
            decay: self.weight_decay as f32,
            momentum: self.momentum as f32,
            keep: (1.0 - self.dampening) as f32,
            neg_lr: (-self.lr) as f32,
            nesterov: self.nesterov,
        }
    }

    /// Elements whose state begins at `at`; the gradient is as long.
    fn update(
        &mut self,
        at: usize,
        p: &mut [f32],
        g: &[f32],
        scalars: Scalars,
        mode: Mode,
        factor: f32,
    ) {
        // Plain descent has no buffer to hand out.
        let buffer = self.buffer.get_mut(at..at + p.len()).unwrap_or_default();
        self.workers.split_all([p, buffer], PIECE, |at, [p, buf]| {
            run_fused(Update {
                g: &g[at..at + p.len()],
                p,
                buf,
                scalars,
                factor,
                mode,
            });
        });
    }

    fn check(&self) -> Result<()> {
        check_setting("learning rate", self.lr)?;
        check_setting("momentum", self.momentum)?;
        check_setting("weight decay", self.weight_decay)?;
        if !self.dampening.is_finite() {
            return Err(Error::usage(format!("dampening is {}", self.dampening)));
        }
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(Error::usage(
                "nesterov needs a momentum above 0 and a dampening of 0",
            ));
        }
        Ok(())
    }

    /// Counts that the step updates `param`; gives what happens to its momentum.
    fn mode(&mut self, param: usize) -> Mode {
        let count = self.updates.count(param, self.steps);
        if self.momentum == 0.0 {
            Mode::Plain
        } else if count == 1 {
            Mode::First
        } else {
            Mode::Later
        }
    }
}

impl Optimizer for Sgd {
    fn check_layout(&self, params: &Params, grads: &dyn GradView) -> Result<()> {
        self.updates.check_layout(self.elems, params, grads)
    }

    fn begin_step(&mut self) -> Result<()> {
        self.check()?;
        self.running = Some(self.begin());
        Ok(())
    }

    fn step_run(&mut self, run: Run<'_>, factor: f32) -> Result<()> {
        let scalars = run.check(self.elems, self.running)?;
        let Some(param) = self.updates.param_of(&run)? else {
            return Ok(());
        };
        let mode = self.mode(param);
        self.update(run.at, run.values, run.grads, scalars, mode, factor);
        Ok(())
    }

    fn set_workers(&mut self, workers: Workers) {
        self.workers = workers;
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn updates(&self) -> &[u64] {
        self.updates.counts()
    }

    fn state(&self) -> Vec<(&'static str, &[f32])> {
        // Who has no elements has their state all the same: ranks that share an optimizer
        // gather the same buffers.
        let nothing = self.elems == 0 && self.momentum != 0.0 && self.steps > 0;
        if self.buffer.is_empty() && !nothing {
            return Vec::new();
        }
        vec![(MOMENTUM_BUFFER, &self.buffer)]
    }

    fn restore(&mut self, steps: u64, updates: &[u64], state: &[(&str, &[f32])]) -> Result<()> {
        self.updates.check(steps, updates)?;
        let expected: &[&str] = if self.momentum != 0.0 && steps > 0 {
            &[MOMENTUM_BUFFER]
        } else {
            &[]
        };
        only_known(state, expected)?;
        self.buffer = if expected.is_empty() {
            Vec::new()
        } else {
            saved(state, MOMENTUM_BUFFER, self.elems)?.to_vec()
        };
        self.steps = steps;
        self.updates.restore(updates);
        self.running = None;
        Ok(())
    }
}

/// Hyperparameters, rounded to float32 once.
#[derive(Clone, Copy, Debug)]
struct Scalars {
    decay: f32,
    momentum: f32,
    keep: f32,
    neg_lr: f32,
    nesterov: bool,
}

/// What happens to the momentum buffer in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Plain,
    First,
    Later,
}

/// The step of one parameter. `buf` is empty without momentum.
struct Update<'a> {
    p: &'a mut [f32],
    g: &'a [f32],
    buf: &'a mut [f32],
    scalars: Scalars,
    /// What gradients are multiplied by.
    factor: f32,
    mode: Mode,
}

impl Pass for Update<'_> {
    #[inline(always)]
    fn run(self) {
        let s = self.scalars;
        // A zero decay must not touch the gradient: infinity * 0 is NaN.
        let decayed = |p: f32, g: f32| {
            let g = g * self.factor;
            if s.decay == 0.0 {
                g
            } else {
                p.mul_add(s.decay, g)
            }
        };
        let ahead = |d: f32, b: f32| {
            if s.nesterov {
                b.mul_add(s.momentum, d)
            } else {
                b
            }
        };
        let elements = self.p.iter_mut().zip(self.g);
        match self.mode {
            Mode::Plain => {
                for (p, &g) in elements {
                    *p = decayed(*p, g).mul_add(s.neg_lr, *p);
                }
            }
            Mode::First => {
                for ((p, &g), b) in elements.zip(self.buf) {
                    let d = decayed(*p, g);
                    *b = d;
                    *p = ahead(d, d).mul_add(s.neg_lr, *p);
                }
            }
            Mode::Later => {
                for ((p, &g), b) in elements.zip(self.buf) {
                    let d = decayed(*p, g);
                    *b = d.mul_add(s.keep, *b * s.momentum);
                    *p = ahead(d, *b).mul_add(s.neg_lr, *p);
                }
            }
        }
    }
}
