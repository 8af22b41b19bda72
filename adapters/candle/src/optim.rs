//! Optimizers whose state can be saved. candle's own keep theirs private.

use candle_core::backprop::GradStore;
use candle_core::{Result, Var};
use candle_nn::{Optimizer, ParamsAdamW};

/// A buffer of an optimizer.
pub struct State<'a> {
    /// The variable that it belongs to.
    pub var: &'a Var,
    /// Its name, as in PyTorch: `exp_avg`.
    pub name: &'static str,
    /// Its value, of the variable's shape.
    pub value: &'a Var,
}

/// An optimizer whose state a checkpoint keeps.
pub trait Resumable: Optimizer {
    /// Its buffers.
    fn state(&self) -> Vec<State<'_>>;

    /// Number of steps taken, without those that had no gradient.
    fn steps(&self) -> usize;

    /// Sets the number of steps taken.
    fn set_steps(&mut self, steps: usize);
}

/// candle's [`candle_nn::AdamW`], bit for bit, with a state that can be saved; a step without any gradient does not count.
#[derive(Debug)]
pub struct AdamW {
    vars: Vec<Moments>,
    steps: usize,
    params: ParamsAdamW,
}

#[derive(Debug)]
struct Moments {
    var: Var,
    first: Var,
    second: Var,
}

impl Optimizer for AdamW {
    type Config = ParamsAdamW;

    fn new(vars: Vec<Var>, params: ParamsAdamW) -> Result<Self> {
        let vars = vars.into_iter().filter(|var| var.dtype().is_float());
        let vars = vars.map(|var| {
            Ok(Moments {
                first: zeros(&var)?,
                second: zeros(&var)?,
                var,
            })
        });
        Ok(AdamW {
            vars: vars.collect::<Result<_>>()?,
            steps: 0,
            params,
        })
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        // A step that was skipped does not count.
        if !self.vars.iter().any(|of| gradients.get(&of.var).is_some()) {
            return Ok(());
        }
        self.steps += 1;
        let ParamsAdamW {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay,
        } = self.params;
        let steps = i32::try_from(self.steps).unwrap_or(i32::MAX);
        let unbias = |beta: f64| 1.0 / (1.0 - beta.powi(steps));
        let (unbias1, unbias2) = (unbias(beta1), unbias(beta2));
        for Moments { var, first, second } in &self.vars {
            let Some(gradient) = gradients.get(var) else {
                continue;
            };
            let m = ((first.as_tensor() * beta1)? + (gradient * (1.0 - beta1))?)?;
            let v = ((second.as_tensor() * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
            let root = ((&v * unbias2)?.sqrt()? + eps)?;
            let update = (((&m * unbias1)? / root)? * lr)?;
            let decayed = (var.as_tensor() * (1.0 - lr * weight_decay))?;
            first.set(&m)?;
            second.set(&v)?;
            var.set(&(decayed - update)?)?;
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.params.lr = lr;
    }
}

impl Resumable for AdamW {
    fn state(&self) -> Vec<State<'_>> {
        let mut all = Vec::new();
        for Moments { var, first, second } in &self.vars {
            for (name, value) in [("exp_avg", first), ("exp_avg_sq", second)] {
                all.push(State { var, name, value });
            }
        }
        all
    }

    fn steps(&self) -> usize {
        self.steps
    }

    fn set_steps(&mut self, steps: usize) {
        self.steps = steps;
    }
}

/// Settings of [`Sgd`].
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsSgd {
    /// Learning rate.
    pub lr: f64,
    /// Momentum; 0 is without.
    pub momentum: f64,
    /// Factor by which the weights are added to their gradients.
    pub weight_decay: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
}

impl Default for ParamsSgd {
    fn default() -> Self {
        ParamsSgd {
            lr: 0.01,
            momentum: 0.9,
            weight_decay: 0.0,
            nesterov: false,
        }
    }
}

/// `torch.optim.SGD`: with momentum and weight decay, which candle's own does not have.
#[derive(Debug)]
pub struct Sgd {
    /// Variables and their momentum.
    vars: Vec<(Var, Var)>,
    steps: usize,
    params: ParamsSgd,
}

impl Optimizer for Sgd {
    type Config = ParamsSgd;

    fn new(vars: Vec<Var>, params: ParamsSgd) -> Result<Self> {
        let vars = vars.into_iter().filter(|var| var.dtype().is_float());
        let vars = vars.map(|var| Ok((var.clone(), zeros(&var)?)));
        Ok(Sgd {
            vars: vars.collect::<Result<_>>()?,
            steps: 0,
            params,
        })
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        if !self
            .vars
            .iter()
            .any(|(var, _)| gradients.get(var).is_some())
        {
            return Ok(());
        }
        self.steps += 1;
        let ParamsSgd {
            lr,
            momentum,
            weight_decay,
            nesterov,
        } = self.params;
        for (var, velocity) in &self.vars {
            let Some(gradient) = gradients.get(var) else {
                continue;
            };
            let mut update = match weight_decay {
                0.0 => gradient.clone(),
                decay => (gradient + (var.as_tensor() * decay)?)?,
            };
            if momentum != 0.0 {
                // Zeros before the first step, so that it is the gradient then.
                let next = ((velocity.as_tensor() * momentum)? + &update)?;
                velocity.set(&next)?;
                update = match nesterov {
                    true => (update + (next * momentum)?)?,
                    false => next,
                };
            }
            var.set(&(var.as_tensor() - (update * lr)?)?)?;
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.params.lr = lr;
    }
}

impl Resumable for Sgd {
    fn state(&self) -> Vec<State<'_>> {
        // Without momentum there is nothing to keep.
        let kept = self.vars.iter().filter(|_| self.params.momentum != 0.0);
        let name = "momentum_buffer";
        kept.map(|(var, value)| State { var, name, value })
            .collect()
    }

    fn steps(&self) -> usize {
        self.steps
    }

    fn set_steps(&mut self, steps: usize) {
        self.steps = steps;
    }
}

fn zeros(var: &Var) -> Result<Var> {
    Var::zeros(var.shape(), var.dtype(), var.device())
}
