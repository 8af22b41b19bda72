//! Optimizers: one pass over flat parameter memory per step.
//!
//! [`Sgd`] equals PyTorch's single-tensor CPU path bit for bit, fused
//! multiply-adds included. So does [`Adam`], except that PyTorch takes its float32
//! square root from MKL, which is one unit low for 0.6 % of inputs; ours is correctly
//! rounded. [`Rmsprop`] is as close; [`Lion`] follows its paper.
//!
//! [`Muon`] updates matrices as a whole, all else by one of these; [`Lamb`] scales the update of each parameter as a whole.
//! [`Ema`] averages the weights of any optimizer. [Groups](RuleOptimizer::groups) of parameters have learning
//! rates and weight decays of their own.
//!
//! State has the same memory layout as [`Params::flat`], so it can be hashed, saved and
//! sharded like the parameters themselves.
//!
//! Results depend neither on the instruction set nor on the number of threads: a fused
//! multiply-add is one rounding everywhere, and sums have fixed orders.

/// Methods that set fields of an optimizer's rule.
macro_rules! settings {
    ($($(#[$about:meta])* $name:ident($($field:ident: $type:ty),+);)*) => {$(
        $(#[$about])*
        #[must_use]
        pub fn $name(mut self, $($field: $type),+) -> Self {
            $(self.rule.$field = $field;)+
            self
        }
    )*};
}

mod adam;
mod clip;
mod ema;
mod group;
mod lamb;
mod lion;
mod muon;
mod rmsprop;
mod rule;
pub mod schedule;
mod sgd;
mod updates;

pub use adam::Adam;
pub use clip::{clip_factor, grad_norm, step_clipped};
pub use ema::Ema;
pub use group::{ParamGroup, Parameter};
pub use lamb::Lamb;
pub use lion::Lion;
pub use muon::Muon;
pub use rmsprop::Rmsprop;
pub use rule::RuleOptimizer;
pub use sgd::Sgd;

use crate::param::{GradView, Params};
use crate::{Result, ThreadPool, refuse};

/// The interface of optimizers for training loops and checkpoints.
pub trait Optimizer {
    /// Updates `params` from `grads`, in place.
    ///
    /// # Errors
    ///
    /// Usage: the settings are invalid, or `params` or `grads` have another layout than
    /// the parameters the optimizer was made for. Nothing was changed then.
    fn step(&mut self, params: &mut Params, grads: &dyn GradView) -> Result<()> {
        self.step_scaled(params, grads, 1.0)
    }

    /// As [`step`](Self::step) with every gradient multiplied by `factor` as it
    /// is read (rounded, as if it had been multiplied before), except
    /// [local](GradView::is_local) ones.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    fn step_scaled(
        &mut self,
        params: &mut Params,
        grads: &dyn GradView,
        factor: f32,
    ) -> Result<()> {
        self.check_layout(params, grads)?;
        self.begin_step()?;
        for id in params.ids() {
            if grads.untouched(id) {
                continue;
            }
            let factor = if grads.is_local(id) { 1.0 } else { factor };
            let run = Run {
                at: params.infos()[id.index()].offset,
                values: params.get_mut(id),
                grads: grads.grad(id),
            };
            self.step_run(run, factor)?;
        }
        Ok(())
    }

    /// Checks that `params` and `grads` have the layout of the state, so that a step over
    /// all of them cannot fail halfway.
    ///
    /// # Errors
    ///
    /// Usage: they have another layout, naming the difference.
    fn check_layout(&self, params: &Params, grads: &dyn GradView) -> Result<()>;

    /// Begins a step whose elements are passed in runs to [`step_run`](Self::step_run),
    /// until the next step begins. It uses the current settings.
    ///
    /// # Errors
    ///
    /// Usage: the settings are invalid. Nothing was changed then.
    fn begin_step(&mut self) -> Result<()>;

    /// Updates one run of elements, with gradients multiplied by `factor` as in
    /// [`step_scaled`](Self::step_scaled). Each element is in at most one run. If the optimizer
    /// [is elementwise](Self::is_elementwise), runs of any length in any order give the bits of one step over all of
    /// them; otherwise a run is a whole parameter. A parameter without a run counts as one without a gradient.
    ///
    /// # Errors
    ///
    /// Usage: no step was begun, or the run does not fit its parameter, the state or its
    /// gradient. Nothing was changed then.
    fn step_run(&mut self, run: Run<'_>, factor: f32) -> Result<()>;

    /// Whether each element's update depends on that element alone, so that [`step_run`](Self::step_run) takes runs of any
    /// length, and ranks can divide the state among themselves. An optimizer that needs whole parameters, such as LAMB, must
    /// say `false` here.
    fn is_elementwise(&self) -> bool {
        true
    }

    /// Lets the following steps run on a tape's threads
    /// ([`Tape::thread_pool`](crate::Tape::thread_pool)); until then they run on the caller's
    /// thread. The results are the same.
    fn set_thread_pool(&mut self, threads: ThreadPool);

    /// The threads that steps run on, of which the norm of gradients makes use. Without an implementation the caller's.
    fn thread_pool(&self) -> ThreadPool {
        ThreadPool::default()
    }

    /// The learning rate of the next step.
    fn lr(&self) -> f64;

    /// Sets the learning rate of the next step (schedules do).
    fn set_lr(&mut self, lr: f64);

    /// Sets the momentum of the next step, or Adam's first beta, for one-cycle schedules. Without
    /// an implementation it is an error, as in PyTorch.
    ///
    /// # Errors
    ///
    /// Usage: the optimizer has no momentum.
    fn set_momentum(&mut self, _momentum: f64) -> Result<()> {
        refuse!(
            "{} has no momentum that a one-cycle schedule could change; set OneCycle::momentum to None",
            self.name()
        )
    }

    /// Its name in logs: the type's name without path and generics.
    fn name(&self) -> &'static str {
        let name = std::any::type_name::<Self>().split('<').next();
        let name = name.and_then(|name| name.rsplit("::").next());
        name.unwrap_or_default()
    }

    /// Steps taken so far.
    fn steps(&self) -> u64;

    /// Steps that updated each parameter so far, in registration order: less than
    /// [`steps`](Self::steps) if a parameter had no gradient.
    fn updates(&self) -> &[u64];

    /// State buffers by PyTorch's names, in a fixed order, each laid out like
    /// [`Params::flat`]. A buffer that no step has written yet is absent.
    fn state(&self) -> Vec<(&'static str, &[f32])>;

    /// The averaged weights, laid out like [`Params::flat`], of an optimizer that averages them, as [`Ema`] does; empty before
    /// the first step. A parameter whose [`updates`](Self::updates) are 0 has no average: its weights have not changed.
    fn averages(&self) -> Option<&[f32]> {
        None
    }

    /// Restores saved state: the values of [`steps`](Self::steps),
    /// [`updates`](Self::updates) and [`state`](Self::state).
    ///
    /// # Errors
    ///
    /// Usage: a name that this optimizer with these settings does not have,
    /// a missing one, or another length. Nothing was changed then.
    fn restore(&mut self, steps: u64, updates: &[u64], state: &[(&str, &[f32])]) -> Result<()>;

    /// Changes to the layout of `params`: keeps the settings, and has neither state nor steps, as if it were new. Ranks that
    /// divide optimizer state anew call it.
    ///
    /// # Errors
    ///
    /// Usage: the optimizer does not implement it. Nothing was changed then.
    fn lay_out(&mut self, _params: &Params) -> Result<()> {
        refuse!(
            "{} does not implement Optimizer::lay_out, so its state cannot be divided anew among other ranks",
            self.name()
        )
    }
}

impl<O: Optimizer + ?Sized> Optimizer for Box<O> {
    fn check_layout(&self, params: &Params, grads: &dyn GradView) -> Result<()> {
        (**self).check_layout(params, grads)
    }

    fn begin_step(&mut self) -> Result<()> {
        (**self).begin_step()
    }

    fn step_run(&mut self, run: Run<'_>, factor: f32) -> Result<()> {
        (**self).step_run(run, factor)
    }

    fn is_elementwise(&self) -> bool {
        (**self).is_elementwise()
    }

    fn set_thread_pool(&mut self, threads: ThreadPool) {
        (**self).set_thread_pool(threads);
    }

    fn thread_pool(&self) -> ThreadPool {
        (**self).thread_pool()
    }

    fn lr(&self) -> f64 {
        (**self).lr()
    }

    fn set_lr(&mut self, lr: f64) {
        (**self).set_lr(lr);
    }

    fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        (**self).set_momentum(momentum)
    }

    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn steps(&self) -> u64 {
        (**self).steps()
    }

    fn state(&self) -> Vec<(&'static str, &[f32])> {
        (**self).state()
    }

    fn updates(&self) -> &[u64] {
        (**self).updates()
    }

    fn averages(&self) -> Option<&[f32]> {
        (**self).averages()
    }

    fn restore(&mut self, steps: u64, updates: &[u64], state: &[(&str, &[f32])]) -> Result<()> {
        (**self).restore(steps, updates, state)
    }

    fn lay_out(&mut self, params: &Params) -> Result<()> {
        (**self).lay_out(params)
    }
}

/// Neighbouring elements of one parameter, in any memory.
#[derive(Debug)]
pub struct Run<'a> {
    /// The index of the first element's state, in memory laid out like [`Params::flat`]
    /// of the parameters that the optimizer was made for.
    pub at: usize,
    /// The elements.
    pub values: &'a mut [f32],
    /// Their gradients.
    pub grads: &'a [f32],
}

/// The setting must be a finite number of at least zero.
fn check_setting(name: &str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    refuse!("{name} is {value}; it must be a number of at least 0")
}

/// The setting must be a decay rate of at least 0 and below 1.
fn check_beta(name: &str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    refuse!("{name} is {value}; it must be at least 0 and below 1")
}
