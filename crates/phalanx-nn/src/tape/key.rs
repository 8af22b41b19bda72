//! The key of a step's random numbers.

/// Epoch, step, seed and sample ids: the key of every random decision of a
/// step. Nothing else enters, so a sample's dropout mask is the same on every rank and
/// at every place in the batch.
///
/// Epoch, step and sample ids count modulo 2^32 here.
#[derive(Clone, Copy, Debug)]
pub struct StepKey<'a> {
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    pub(crate) seed: u64,
    pub(crate) samples: &'a [u64],
}

impl StepKey<'static> {
    /// Step `step` of epoch `epoch`, seed 0, samples numbered by their place in
    /// the batch.
    pub fn new(epoch: u64, step: u64) -> Self {
        StepKey {
            epoch,
            step,
            seed: 0,
            samples: &[],
        }
    }
}

impl<'a> StepKey<'a> {
    /// Sets the seed of the random numbers.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the ids (indices in the data set) of the samples of this batch, in
    /// batch order.
    #[must_use]
    pub fn samples(self, samples: &[u64]) -> StepKey<'_> {
        StepKey { samples, ..self }
    }
}
