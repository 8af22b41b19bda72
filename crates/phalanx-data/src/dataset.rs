//! What a data set offers to the loader.

use crate::{Error, Result};

/// A data set: samples that can be read in any order, several at a time, from several threads.
///
/// Implemented for every [`ImageDataset`], and for a `Vec` of samples, whose batches are `Vec`s
/// of clones.
///
/// ```
/// use phalanx_data::{Dataset, Result};
///
/// /// Pairs of next characters.
/// struct Text(Vec<u8>);
///
/// impl Dataset for Text {
///     type Batch = (Vec<u32>, Vec<u32>);
///
///     fn len(&self) -> usize {
///         self.0.len() - 1
///     }
///
///     fn read_batch(&self, _epoch: u64, indices: &[u64], (now, next): &mut Self::Batch) -> Result<()> {
///         now.clear();
///         next.clear();
///         for &i in indices {
///             now.push(u32::from(self.0[i as usize]));
///             next.push(u32::from(self.0[i as usize + 1]));
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait Dataset: Send + Sync + 'static {
    /// Several samples together, as the model takes them. A batch is filled again and again.
    type Batch: Default + Send + 'static;

    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Replaces what `batch` holds by the samples with the numbers `indices`, in this order.
    /// `epoch` counts from 0: augmentation may differ from epoch to epoch, but must depend on
    /// nothing else than `epoch` and the sample's number.
    ///
    /// # Errors
    ///
    /// A sample that cannot be read.
    fn read_batch(&self, epoch: u64, indices: &[u64], batch: &mut Self::Batch) -> Result<()>;

    /// What it is, for a person: `MNIST`.
    fn describe(&self) -> String {
        "own data".to_owned()
    }

    /// A text that tells its content apart from other data. Ranks compare it when they start,
    /// and a resumed training with the one that was saved. Where data is, and how it is stored,
    /// does not belong there.
    fn content(&self) -> String {
        format!("{}, {} samples", self.describe(), self.len())
    }
}

impl<T: Clone + Send + Sync + 'static> Dataset for Vec<T> {
    type Batch = Vec<T>;

    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn read_batch(&self, _epoch: u64, indices: &[u64], batch: &mut Vec<T>) -> Result<()> {
        batch.clear();
        for &index in indices {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            let none = || Error::usage(format!("there is no sample {index}"));
            batch.push(self.get(index).ok_or_else(none)?.clone());
        }
        Ok(())
    }
}

/// Labelled images, one after the other.
#[derive(Clone, Debug, Default)]
pub struct ImageBatch {
    /// Sample, height, width, channels.
    pub images: Vec<f32>,
    /// One label an image.
    pub labels: Vec<u32>,
    /// Height, width and channels of each image.
    pub image_shape: [usize; 3],
}

impl ImageBatch {
    /// Number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Shape of [`images`](Self::images): number, height, width, channels.
    pub fn shape(&self) -> [usize; 4] {
        let [h, w, c] = self.image_shape;
        [self.len(), h, w, c]
    }
}

impl<T: ImageDataset + ?Sized + 'static> Dataset for T {
    type Batch = ImageBatch;

    fn len(&self) -> usize {
        ImageDataset::len(self)
    }

    fn read_batch(&self, epoch: u64, indices: &[u64], batch: &mut ImageBatch) -> Result<()> {
        batch.image_shape = self.image_shape();
        let elems = batch.image_shape.iter().product::<usize>();
        batch.labels.clear();
        // Every element is overwritten below: no need to clear first.
        batch.images.resize(indices.len() * elems, 0.0);
        let images = batch.images.chunks_exact_mut(elems.max(1));
        for (&index, image) in indices.iter().zip(images) {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            batch.labels.push(self.read_in_epoch(index, epoch, image)?);
        }
        Ok(())
    }

    fn describe(&self) -> String {
        self.name().to_owned()
    }

    fn content(&self) -> String {
        ImageDataset::content(self)
    }
}

/// Labelled images that can be read in any order from several threads.
pub trait ImageDataset: Send + Sync {
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

    /// As [`Dataset::content`].
    fn content(&self) -> String {
        format!("{}, {} samples", self.name(), self.len())
    }

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

/// The checks that every [`ImageDataset::read`] starts with.
pub(crate) fn check_read(set: &dyn ImageDataset, index: usize, out: &[f32]) -> Result<()> {
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
