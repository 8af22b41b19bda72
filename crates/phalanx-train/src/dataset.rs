//! What a data set offers to the loader.

use crate::{Error, Result};

/// Labelled images that can be read in any order from several threads.
pub trait Dataset: Send + Sync {
    /// What a person calls it, e.g. `MNIST`.
    fn name(&self) -> &str;

    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Height, width and channels of every image.
    fn image_shape(&self) -> [usize; 3];

    /// Number of classes; labels are below it.
    fn classes(&self) -> usize;

    /// Writes the image of sample `index` (height, width, channels; as the
    /// model takes it) to `out` and returns its label.
    ///
    /// # Errors
    ///
    /// `index` is not below [`len`](Self::len), `out` has not exactly one
    /// image's elements, or the sample cannot be read.
    fn read(&self, index: usize, out: &mut [f32]) -> Result<u32>;

    /// As [`read`](Self::read), in epoch `epoch` (from 0) of a training: what
    /// the loader calls. Sets whose images change from epoch to epoch differ.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    fn read_in_epoch(&self, index: usize, _epoch: u64, out: &mut [f32]) -> Result<u32> {
        self.read(index, out)
    }
}

/// The checks that every [`Dataset::read`] starts with.
pub(crate) fn check_read(set: &dyn Dataset, index: usize, out: &[f32]) -> Result<()> {
    let elems: usize = set.image_shape().iter().product();
    if index >= set.len() {
        return Err(Error::usage(format!(
            "{} has {} samples; there is no sample {index}",
            set.name(),
            set.len()
        )));
    }
    if out.len() != elems {
        return Err(Error::usage(format!(
            "an image of {} has {elems} elements, the buffer {}",
            set.name(),
            out.len()
        )));
    }
    Ok(())
}
