//! How often each parameter was updated.

use super::Run;
use crate::param::{GradView, Params};
use crate::{Result, refuse};

/// Update counts of each parameter. A step does not update a parameter without a gradient.
#[derive(Clone, Debug)]
pub(super) struct Updates {
    /// Where each parameter begins in flat memory, ascending, and how long it is.
    places: Vec<(usize, usize)>,
    counts: Vec<u64>,
    /// The step of the optimizer that updated each one last.
    last: Vec<u64>,
}

impl Updates {
    pub(super) fn new(params: &Params) -> Self {
        let places: Vec<_> = places(params).collect();
        Self {
            counts: vec![0; places.len()],
            last: vec![0; places.len()],
            places,
        }
    }

    /// Checks parameters and gradients against state of `elems` elements.
    ///
    /// # Errors
    ///
    /// Usage: another layout, naming what differs.
    pub(super) fn check_layout(
        &self,
        elems: usize,
        params: &Params,
        grads: &dyn GradView,
    ) -> Result<()> {
        if params.flat().len() != elems {
            refuse!(
                "optimizer was made for {elems} parameter elements, not {}; make a new one for these parameters",
                params.flat().len()
            );
        }
        if !places(params).eq(self.places.iter().copied()) {
            refuse!("optimizer was made for other parameters; make a new one for these");
        }
        for (id, info) in params.ids().zip(params.infos()) {
            let got = grads.grad(id).len();
            if got != info.len && (got != 0 || !grads.untouched(id)) {
                refuse!(
                    "gradient of {} has {got} elements, the parameter {}",
                    info.name,
                    info.len
                );
            }
        }
        Ok(())
    }

    /// Of each parameter, in registration order.
    pub(super) fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Counts that the optimizer's step `step`, from 1, updates a parameter, once per step;
    /// returns the number of that update, from 1.
    pub(super) fn count(&mut self, param: usize, step: u64) -> u64 {
        if self.last[param] != step {
            self.last[param] = step;
            self.counts[param] += 1;
        }
        self.counts[param]
    }

    /// The parameter that a run is of, none if it has no elements.
    ///
    /// # Errors
    ///
    /// Usage: it is not inside one parameter.
    pub(super) fn param_of(&self, run: &Run<'_>) -> Result<Option<usize>> {
        if run.values.is_empty() {
            return Ok(None);
        }
        // The last to begin there: those without elements begin where their successor does.
        let param = self.places.partition_point(|(from, _)| *from <= run.at);
        let inside = |(from, len): (usize, usize)| run.at + run.values.len() <= from + len;
        match param.checked_sub(1) {
            Some(param) if inside(self.places[param]) => Ok(Some(param)),
            _ => refuse!(
                "a run of {} elements from {} does not lie in one parameter; give those of each parameter by themselves",
                run.values.len(),
                run.at
            ),
        }
    }

    /// Resets all counts.
    pub(super) fn clear(&mut self) {
        self.counts.fill(0);
        self.last.fill(0);
    }

    /// Checks saved counts, of an optimizer that has taken `steps` steps.
    ///
    /// # Errors
    ///
    /// Usage: another number of parameters, or more updates than steps.
    pub(super) fn check(&self, steps: u64, counts: &[u64]) -> Result<()> {
        if counts.len() != self.counts.len() {
            refuse!(
                "saved optimizer state counts the updates of {} parameters, expected {}",
                counts.len(),
                self.counts.len()
            );
        }
        match counts.iter().find(|count| **count > steps) {
            None => Ok(()),
            Some(count) => refuse!(
                "saved optimizer state has a parameter updated {count} times in {steps} steps"
            ),
        }
    }

    /// Restores saved counts that were checked.
    pub(super) fn restore(&mut self, counts: &[u64]) {
        self.clear();
        self.counts.copy_from_slice(counts);
    }
}

fn places(params: &Params) -> impl Iterator<Item = (usize, usize)> {
    params.infos().iter().map(|info| (info.offset, info.len))
}
