//! An exponential moving average of the weights.

use super::rule::{PIECE, saved, state_buffer};
use super::updates::Updates;
use super::{Optimizer, Run};
use crate::param::{GradView, Params};
use crate::{Result, ThreadPool, refuse};
use phalanx_kernels::aligned::AlignedBuf;
use phalanx_kernels::update::ema::average;

/// The state buffer with the averages.
const NAME: &str = "ema";

/// An optimizer with an exponential moving average of the weights, for evaluation: `decay * average + (1 - decay) * weight`
/// after each update (PyTorch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`). A parameter's average begins with its
/// weights after its first update.
///
/// The average is part of the [state](Optimizer::state), as the buffer `ema`, so that it is saved, restored and sharded with it.
/// An average moves only when its parameter is updated: without gradients in a step it stays, where PyTorch's moves towards
/// the unchanged weights; before the first update it is 0. Buffers of the model, such as the statistics of a batch normalisation,
/// are not averaged.
///
/// ```
/// use phalanx_nn::{Scope, Seed, layers::Linear, optim::{Adam, Ema}};
///
/// let mut scope = Scope::new(Seed(0));
/// Linear::new(scope.enter("head"), 4, 8);
/// let params = scope.build()?;
/// let optimizer = Ema::new(&params, Adam::adamw(&params, 1e-3), 0.999);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Ema<O> {
    inner: O,
    decay: f64,
    elems: usize,
    /// Updates of the averages.
    updates: Updates,
    /// None before the first step.
    averages: Option<AlignedBuf>,
}

impl<O: Optimizer> Ema<O> {
    /// Averages the weights that `inner` updates, with a decay rate from 0 to 1 (often 0.999). Both are for parameters laid out
    /// like `params`.
    pub fn new(params: &Params, inner: O, decay: f64) -> Self {
        Ema {
            inner,
            decay,
            elems: params.flat().len(),
            updates: Updates::new(params),
            averages: None,
        }
    }
}

impl<O: Optimizer> Optimizer for Ema<O> {
    fn check_layout(&self, params: &Params, grads: &dyn GradView) -> Result<()> {
        self.updates.check_layout(self.elems, params, grads)?;
        self.inner.check_layout(params, grads)
    }

    fn begin_step(&mut self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.decay) {
            refuse!(
                "the decay of averages is {}; it must be from 0 to 1",
                self.decay
            );
        }
        self.inner.begin_step()?;
        self.averages
            .get_or_insert_with(|| state_buffer(self.elems));
        Ok(())
    }

    fn step_run(&mut self, run: Run<'_>, factor: f32) -> Result<()> {
        let same = Run {
            values: &mut *run.values,
            ..run
        };
        self.inner.step_run(same, factor)?;
        let param = self.updates.param_of(&run)?;
        let (Some(param), Some(averages)) = (param, &mut self.averages) else {
            return Ok(());
        };
        let Run { at, values, .. } = run;
        let averages = &mut averages[at..at + values.len()];
        if self.updates.count(param, self.inner.steps()) == 1 {
            averages.copy_from_slice(values);
            return Ok(());
        }
        let weight = (1.0 - self.decay) as f32;
        let threads = self.inner.thread_pool();
        threads.split(averages, PIECE, |at, averages| {
            average(averages, &values[at..at + averages.len()], weight);
        });
        Ok(())
    }

    fn is_elementwise(&self) -> bool {
        self.inner.is_elementwise()
    }

    fn set_thread_pool(&mut self, threads: ThreadPool) {
        self.inner.set_thread_pool(threads);
    }

    fn thread_pool(&self) -> ThreadPool {
        self.inner.thread_pool()
    }

    fn lr(&self) -> f64 {
        self.inner.lr()
    }

    fn set_lr(&mut self, lr: f64) {
        self.inner.set_lr(lr);
    }

    fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        self.inner.set_momentum(momentum)
    }

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn steps(&self) -> u64 {
        self.inner.steps()
    }

    fn updates(&self) -> &[u64] {
        self.inner.updates()
    }

    fn state(&self) -> Vec<(&'static str, &[f32])> {
        let mut state = self.inner.state();
        let averages = self.averages.as_deref();
        state.extend(averages.map(|averages| (NAME, averages)));
        state
    }

    fn averages(&self) -> Option<&[f32]> {
        Some(self.averages.as_deref().unwrap_or_default())
    }

    fn restore(&mut self, steps: u64, updates: &[u64], state: &[(&str, &[f32])]) -> Result<()> {
        self.updates.check(steps, updates)?;
        let mut averages = None;
        let mut inner = state.to_vec();
        if steps > 0 {
            let buffer = averages.insert(state_buffer(self.elems));
            buffer.copy_from_slice(saved(state, NAME, self.elems)?);
            inner.retain(|(name, _)| *name != NAME);
        }
        self.inner.restore(steps, updates, &inner)?;
        self.averages = averages;
        self.updates.restore(updates);
        Ok(())
    }

    fn lay_out(&mut self, params: &Params) -> Result<()> {
        self.inner.lay_out(params)?;
        self.elems = params.flat().len();
        self.updates = Updates::new(params);
        self.averages = None;
        Ok(())
    }
}
