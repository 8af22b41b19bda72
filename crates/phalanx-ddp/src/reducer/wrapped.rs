//! Methods that only `DistributedDataParallel` needs.

use std::ops::Range;

use super::Reducer;

impl Reducer {
    /// The weight of micro-batch `index`, which is not applied any more,
    /// unless it is 0.
    pub(crate) fn weigh_at_loss(&mut self, index: usize) -> f32 {
        let weight = self.micro.weights.get_mut(index);
        weight.map_or(1.0, |w| {
            if *w == 0.0 {
                0.0
            } else {
                std::mem::replace(w, 1.0)
            }
        })
    }

    /// Votes against the running step because of number `index` of this rank's own gradients.
    pub(crate) fn own_not_finite(&mut self, index: usize) {
        self.begin();
        if !self.options.unchecked {
            self.ballot.own_not_finite(self.params.len(), index);
        }
    }

    /// This rank's part of the averaged gradient of `param`; empty for elements of
    /// another rank, and whenever [`grad`](Self::grad) would be.
    pub(crate) fn piece(&self, param: usize, elems: Range<usize>) -> &[f32] {
        if param >= self.params.len() || self.in_backward || !self.committed || !self.exchanged {
            return &[];
        }
        self.values(param, elems)
    }

    pub(crate) fn set_skipped_steps(&mut self, steps: u64) {
        self.skipped = steps;
    }
}
