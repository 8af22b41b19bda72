//! What the optimizers share: state buffers, update counts, and the step run by run.

use std::sync::Arc;

use super::group::{GroupChooser, ParamGroup, ParamSettings, Parameter};
use super::updates::Updates;
use super::{Optimizer, Run};
use crate::param::{GradView, Params};
use crate::{Result, ThreadPool, refuse};
use phalanx_kernels::aligned::AlignedBuf;

/// How an optimizer changes elements: its settings except the learning rate.
pub trait Rule: Copy {
    /// Everything that is the same for all elements of a parameter in a step.
    type Scalars: Copy + Send + Sync;

    /// Checks the settings.
    ///
    /// # Errors
    /// `Usage`, naming the invalid setting.
    fn check(&self, lr: f64) -> Result<()>;

    /// The weight decay of parameters without a group's.
    fn weight_decay(&mut self) -> &mut f64;

    /// The rule for one parameter, with its group's settings.
    #[must_use]
    fn of(mut self, own: &ParamSettings) -> Self {
        let decay = self.weight_decay();
        *decay = own.group.weight_decay.unwrap_or(*decay);
        self
    }

    /// Whether each element is updated by itself.
    fn is_elementwise(&self) -> bool {
        true
    }

    /// PyTorch's name of the optimizer.
    fn name(&self) -> &'static str;

    /// Sets the momentum, or its equivalent.
    fn set_momentum(&mut self, momentum: f64);

    /// PyTorch's names of the state buffers, three at most.
    fn buffers(&self) -> &'static [&'static str];

    /// The scalars of update number `t` of a parameter, from 1.
    fn scalars(&self, lr: f64, t: u64) -> Self::Scalars;

    /// Updates `p` and the state buffers, with gradients `g` multiplied by `factor`.
    fn update(s: Self::Scalars, p: &mut [f32], g: &[f32], factor: f32, state: [&mut [f32]; 3]);

    /// Updates `p`, a whole parameter, as [`update`](Self::update) does, if this parameter is updated as a whole; returns
    /// whether it is. `work` is memory that lasts from step to step.
    fn update_whole(
        _s: Self::Scalars,
        _p: &mut [f32],
        _g: &[f32],
        _factor: f32,
        _state: [&mut [f32]; 3],
        _work: (&ThreadPool, &mut Vec<f32>),
    ) -> bool {
        false
    }
}

/// An optimizer that updates parameters by a rule: [`Sgd`](super::Sgd), [`Adam`](super::Adam), [`Muon`](super::Muon),
/// [`Rmsprop`](super::Rmsprop), [`Lion`](super::Lion) or [`Lamb`](super::Lamb).
#[derive(Clone, Debug)]
pub struct RuleOptimizer<R> {
    pub(super) rule: R,
    pub(super) choose: GroupChooser,
    /// Of each parameter.
    own: Vec<ParamSettings>,
    elems: usize,
    lr: f64,
    steps: u64,
    updates: Updates,
    /// The rule's buffers; none before the first step.
    buffers: Vec<AlignedBuf>,
    threads: ThreadPool,
    /// Rule and learning rate of the step that was begun last.
    running: Option<(R, f64)>,
    /// Memory of updates of whole parameters.
    work: Vec<f32>,
}

/// Elements that one thread updates at a time.
pub(super) const PIECE: usize = 16 * 1024;

impl<R: Rule> RuleOptimizer<R> {
    pub(super) fn with_rule(params: &Params, lr: f64, rule: R) -> Self {
        let choose = GroupChooser::default();
        Self {
            rule,
            own: choose.all(params),
            choose,
            elems: params.flat().len(),
            lr,
            steps: 0,
            updates: Updates::new(params),
            buffers: Vec::new(),
            threads: ThreadPool::default(),
            running: None,
            work: Vec::new(),
        }
    }

    /// Sets the weight decay of parameters without a [group's](Self::groups). It shrinks the weights themselves in
    /// [`Adam::adamw`](super::Adam::adamw), [`Lion`](super::Lion) and of [`Muon`](super::Muon)'s matrices, joins the update before
    /// it is scaled in [`Lamb`](super::Lamb), and elsewhere the gradient (an L2 penalty's).
    #[must_use]
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        *self.rule.weight_decay() = weight_decay;
        self
    }

    /// Settings of their own for groups of parameters, chosen by name or shape (PyTorch's `param_groups`). Replaces an earlier
    /// choice; whether it comes before or after other settings makes no difference. The learning rate of a group follows
    /// [`set_lr`](Optimizer::set_lr), and with it a schedule.
    ///
    /// ```
    /// use phalanx_nn::{Scope, Seed, layers::Linear, optim::{Adam, ParamGroup}};
    ///
    /// let mut scope = Scope::new(Seed(0));
    /// Linear::new(scope.enter("head"), 4, 8);
    /// let params = scope.build()?;
    /// // Weight decay for matrices only.
    /// let adam = Adam::adamw(&params, 1e-3).weight_decay(0.1).groups(|p| match p.shape.len() {
    ///     0 | 1 => ParamGroup::new().weight_decay(0.0),
    ///     _ => ParamGroup::new(),
    /// });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn groups(
        mut self,
        choose: impl Fn(&Parameter<'_>) -> ParamGroup + Send + Sync + 'static,
    ) -> Self {
        self.choose = GroupChooser(Some(Arc::new(choose)));
        for own in &mut self.own {
            own.group = self.choose.of(own.parameter());
        }
        self
    }

    /// Updates `params` from `grads`, in place; see [`Optimizer::step`].
    ///
    /// # Errors
    ///
    /// Usage: the settings are invalid, or `params` or `grads` have another layout than
    /// the parameters the optimizer was made for. Nothing was changed then.
    pub fn step(&mut self, params: &mut Params, grads: &dyn GradView) -> Result<()> {
        Optimizer::step(self, params, grads)
    }

    /// Checks that a run fits the state and that a step was begun.
    fn check_run(&self, run: &Run<'_>) -> Result<(R, f64)> {
        let Some(running) = self.running else {
            refuse!("elements were given to an optimizer before its step; call begin_step first");
        };
        let (len, elems) = (run.values.len(), self.elems);
        let fits = run.at.checked_add(len).is_some_and(|end| end <= elems);
        if len != run.grads.len() || !fits {
            refuse!(
                "a run of {len} elements from {} with {} gradients does not fit an optimizer of {elems} elements",
                run.at,
                run.grads.len()
            );
        }
        Ok(running)
    }
}

impl<R: Rule> Optimizer for RuleOptimizer<R> {
    fn check_layout(&self, params: &Params, grads: &dyn GradView) -> Result<()> {
        self.updates.check_layout(self.elems, params, grads)
    }

    fn begin_step(&mut self) -> Result<()> {
        self.rule.check(self.lr)?;
        for own in &self.own {
            let checked = own.check();
            let rule = self.rule.of(own);
            checked
                .and_then(|()| rule.check(self.lr * own.group.lr_scale))
                .map_err(|e| own.named(e))?;
        }
        let count = self.rule.buffers().len();
        if self.buffers.is_empty() && count > 0 {
            // The state begins now for all parameters.
            self.updates.clear();
        }
        let elems = self.elems;
        self.buffers.resize_with(count, || state_buffer(elems));
        self.steps += 1;
        self.running = Some((self.rule, self.lr));
        Ok(())
    }

    fn step_run(&mut self, run: Run<'_>, factor: f32) -> Result<()> {
        let (rule, lr) = self.check_run(&run)?;
        let Some(param) = self.updates.param_of(&run)? else {
            return Ok(());
        };
        let own = &self.own[param];
        let rule = rule.of(own);
        if !rule.is_elementwise() && run.values.len() != own.len {
            refuse!(
                "{} needs {} as a whole, not {} of its {} elements",
                rule.name(),
                own.parameter().name,
                run.values.len(),
                own.len
            );
        }
        let lr = lr * own.group.lr_scale;
        let scalars = rule.scalars(lr, self.updates.count(param, self.steps));
        let (range, g) = (run.at..run.at + run.values.len(), run.grads);
        let mut state = self.buffers.iter_mut().map(|b| &mut b[range.clone()]);
        let mut next = || state.next().unwrap_or_default();
        let mut slices = [run.values, next(), next(), next()];
        let [p, a, b, c] = slices.each_mut().map(|s| &mut **s);
        let work = (&self.threads, &mut self.work);
        if R::update_whole(scalars, p, g, factor, [a, b, c], work) {
            return Ok(());
        }
        self.threads.split_all(slices, PIECE, |at, [p, a, b, c]| {
            let g = &g[at..at + p.len()];
            R::update(scalars, p, g, factor, [a, b, c]);
        });
        Ok(())
    }

    fn is_elementwise(&self) -> bool {
        self.own
            .iter()
            .all(|own| self.rule.of(own).is_elementwise())
    }

    fn set_thread_pool(&mut self, threads: ThreadPool) {
        self.threads = threads;
    }

    fn thread_pool(&self) -> ThreadPool {
        self.threads.clone()
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        self.rule.set_momentum(momentum);
        Ok(())
    }

    fn name(&self) -> &'static str {
        self.rule.name()
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn updates(&self) -> &[u64] {
        self.updates.counts()
    }

    fn state(&self) -> Vec<(&'static str, &[f32])> {
        let names = self.rule.buffers().iter().copied();
        names.zip(self.buffers.iter().map(|b| &**b)).collect()
    }

    fn restore(&mut self, steps: u64, updates: &[u64], state: &[(&str, &[f32])]) -> Result<()> {
        self.updates.check(steps, updates)?;
        let names = if steps == 0 { &[] } else { self.rule.buffers() };
        if let Some((name, _)) = state.iter().find(|(name, _)| !names.contains(name)) {
            refuse!(
                "saved optimizer state {name} does not belong to this optimizer with these settings"
            );
        }
        let buffer = |name: &&str| {
            let mut buffer = state_buffer(self.elems);
            buffer.copy_from_slice(saved(state, name, self.elems)?);
            Ok(buffer)
        };
        self.buffers = names.iter().map(buffer).collect::<Result<_>>()?;
        self.steps = steps;
        self.updates.restore(updates);
        self.running = None;
        Ok(())
    }

    fn lay_out(&mut self, params: &Params) -> Result<()> {
        *self = Self {
            own: self.choose.all(params),
            choose: self.choose.clone(),
            threads: self.threads.clone(),
            ..Self::with_rule(params, self.lr, self.rule)
        };
        Ok(())
    }
}

/// Zeros, in huge pages where the system has them. Each step reads and writes the whole state. With GPT-2's size the first
/// step is not slower for it.
pub(super) fn state_buffer(elems: usize) -> AlignedBuf {
    let buffer = AlignedBuf::zeroed(elems);
    buffer.join_pages(0, elems);
    buffer
}

/// Finds the saved buffer `name` of the right length among `state`.
pub(super) fn saved<'a>(
    state: &[(&str, &'a [f32])],
    name: &str,
    elems: usize,
) -> Result<&'a [f32]> {
    let Some((_, values)) = state.iter().find(|(n, _)| *n == name) else {
        refuse!("saved optimizer state lacks {name}");
    };
    if values.len() != elems {
        refuse!(
            "saved optimizer state {name} has {} elements, expected {elems}",
            values.len()
        );
    }
    Ok(values)
}
