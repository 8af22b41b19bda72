//! How long a training lasts, and the rounds of its loop.

use std::cell::Cell;
use std::rc::Rc;

use phalanx_checkpoint::state::Place;

use crate::args::Settings;

/// How long a training lasts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Of an epoch.
    steps: usize,
    epochs: usize,
    max_steps: Option<u64>,
    eval_every: Option<usize>,
}

impl Extent {
    /// Of a training whose epochs have this many `steps`.
    pub(super) fn new(settings: &Settings, steps: usize) -> Extent {
        let max_steps = settings.max_steps();
        let epochs = match (max_steps, settings.typed_epochs()) {
            (Some(max), None) => max.div_ceil(steps as u64) as usize,
            _ => settings.epochs(),
        };
        Extent {
            steps,
            epochs,
            max_steps,
            eval_every: settings.eval_every(),
        }
    }

    /// Epochs, of which the last one may be cut short.
    pub(super) fn epochs(&self) -> usize {
        self.epochs
    }

    /// Steps of all epochs.
    pub(super) fn all(&self) -> u64 {
        let all = (self.steps as u64).saturating_mul(self.epochs as u64);
        self.max_steps.map_or(all, |max| all.min(max))
    }

    /// Whether `--max-steps` had cut the epoch of `place`, which the training continues.
    pub(super) fn goes_past_cut(&self, place: Place) -> bool {
        place.step_in_epoch > 0 && !self.is_over(place)
    }

    /// Whether a part of an epoch ends at `place`.
    pub(super) fn is_end_of_part(&self, place: Place) -> bool {
        let taken = place.step_in_epoch as usize;
        self.eval_every
            .is_some_and(|every| taken.is_multiple_of(every))
    }

    /// Whether no step is left at `place`.
    pub(super) fn is_over(&self, place: Place) -> bool {
        place.epoch as usize >= self.epochs || self.is_cut(place.step)
    }

    /// Whether `--max-steps` ends the training after `step` steps.
    pub(super) fn is_cut(&self, step: u64) -> bool {
        self.max_steps.is_some_and(|max| step >= max)
    }

    /// The step of the epoch, from 0, before which the round ends that begins at `place`.
    pub(super) fn round_end(&self, place: Place) -> usize {
        let first = place.step_in_epoch as usize;
        let next = self.eval_every.map(|every| (first / every + 1) * every);
        let end = self.epoch_end(place);
        next.map_or(end, |next| end.min(next))
    }

    /// The step before which the epoch of `place` ends.
    pub(super) fn epoch_end(&self, place: Place) -> usize {
        let left = self.max_steps.map(|max| max.saturating_sub(place.step));
        let cut = left.map(|left| place.step_in_epoch.saturating_add(left) as usize);
        cut.map_or(self.steps, |cut| self.steps.min(cut))
    }
}

/// What the loop over [`Epochs`] must know of the training.
#[derive(Debug, Default)]
pub(super) struct LoopState {
    /// Epochs that have ended.
    pub(super) ended: Cell<usize>,
    /// Steps that were taken.
    pub(super) step: Cell<u64>,
    /// No step is left, or the training is stopped early.
    pub(super) is_over: Cell<bool>,
}

/// The epochs that a training has left, made by [`Trainer::epochs`](crate::Trainer::epochs): their numbers, from 1. With
/// `--eval-every` a number comes once for each part of its epoch.
#[derive(Debug)]
pub struct Epochs {
    extent: Extent,
    state: Rc<LoopState>,
    /// With which the next round begins, as far as this loop knows.
    next: Place,
}

impl Epochs {
    pub(super) fn new(extent: Extent, state: &Rc<LoopState>, place: Place) -> Epochs {
        state.step.set(place.step);
        Epochs {
            extent,
            state: Rc::clone(state),
            next: place,
        }
    }

    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.state.is_over.get() || self.extent.is_over(self.next)
    }
}

impl Iterator for Epochs {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let ended = self.state.ended.get() as u64;
        let (expected, taken) = (self.next.step, self.state.step.get());
        if taken < expected && self.next.step_in_epoch > 0 {
            // The program has left the loop over a part's batches, and with it the epoch.
            (self.next.epoch, self.next.step_in_epoch) = (self.next.epoch + 1, 0);
        }
        self.next.step = taken;
        if self.next.epoch < ended {
            // The program has left the loop over an epoch's batches.
            (self.next.epoch, self.next.step_in_epoch) = (ended, 0);
        }
        if self.is_empty() {
            return None;
        }
        let epoch = self.next.epoch as usize + 1;
        let end = self.extent.round_end(self.next);
        self.next.step += end as u64 - self.next.step_in_epoch;
        self.next.step_in_epoch = end as u64;
        if end == self.extent.steps {
            (self.next.epoch, self.next.step_in_epoch) = (epoch as u64, 0);
        }
        Some(epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(steps: usize, [epochs, max, every]: [usize; 3], place: Place) -> Vec<usize> {
        let some = |n: usize| (n > 0).then_some(n);
        let mut settings = Settings::untyped().expect("defaults");
        settings.epochs = some(epochs);
        settings.max_steps = some(max).map(|max| max as u64);
        settings.eval_every = some(every);
        let (extent, state) = (Extent::new(&settings, steps), Rc::default());
        let mut now = place;
        let epochs = Epochs::new(extent, &state, place);
        let mut all = Vec::new();
        for epoch in epochs {
            all.push(epoch);
            // All steps are taken.
            let end = extent.round_end(now) as u64;
            now.step += end - now.step_in_epoch;
            now.step_in_epoch = end % steps as u64;
            state.step.set(now.step);
        }
        all
    }

    #[test]
    fn rounds_end_with_epochs_and_evaluations_and_the_last_step() {
        let start = Place::default();
        assert_eq!(rounds(10, [2, 0, 0], start), [1, 2]);
        assert_eq!(rounds(10, [2, 0, 4], start), [1, 1, 1, 2, 2, 2]);
        assert_eq!(rounds(10, [2, 0, 40], start), [1, 2]);
        assert_eq!(rounds(10, [0, 25, 0], start), [1, 2, 3]);
        assert_eq!(rounds(10, [0, 20, 5], start), [1, 1, 2, 2]);
        assert_eq!(rounds(10, [1, 25, 0], start), [1]);
        assert_eq!(rounds(10, [5, 7, 3], start), [1, 1, 1]);
        let place = Place {
            epoch: 1,
            samples: 8,
            step_in_epoch: 4,
            step: 14,
        };
        assert_eq!(rounds(10, [2, 0, 4], place), [2, 2]);
        assert_eq!(rounds(10, [0, 14, 4], place), [0usize; 0]);
        assert_eq!(rounds(10, [0, 31, 0], place), [2, 3, 4]);
    }

    #[test]
    fn the_loop_goes_on_with_the_next_epoch_or_ends_where_the_trainer_says_so() {
        let mut settings = Settings::untyped().expect("defaults");
        (settings.epochs, settings.eval_every) = (Some(4), Some(2));
        let state = Rc::default();
        let mut epochs = Epochs::new(Extent::new(&settings, 6), &state, Place::default());
        assert_eq!(epochs.next(), Some(1));
        state.step.set(2);
        state.ended.set(1);
        assert_eq!(epochs.next(), Some(2));
        state.step.set(4);
        assert_eq!(epochs.next(), Some(2));
        // Of the part's two steps one was taken.
        state.step.set(5);
        assert_eq!(epochs.next(), Some(3));
        state.is_over.set(true);
        assert!(epochs.is_empty() && epochs.next().is_none());
    }
}
