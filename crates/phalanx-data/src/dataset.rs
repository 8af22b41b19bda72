//! The traits of data sets.

use crate::order::ShardOrder;
use phalanx_base::{Error, Result, refuse};

/// A data set: samples that can be read in any order and from several threads.
///
/// Implemented for every [`ImageDataset`], and for a `Vec` of samples, whose batches are `Vec`s
/// of clones.
///
/// ```
/// use phalanx_base::Result;
/// use phalanx_data::Dataset;
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
///     fn read_batch(&self, _epoch: u64, indices: &[u64], (inputs, targets): &mut Self::Batch) -> Result<()> {
///         inputs.clear();
///         targets.clear();
///         for &i in indices {
///             inputs.push(u32::from(self.0[i as usize]));
///             targets.push(u32::from(self.0[i as usize + 1]));
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait Dataset: Send + Sync + 'static {
    /// A batch of samples, as the model takes them. Its memory is reused for later batches.
    type Batch: Default + Send + 'static;

    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `batch` with the samples `indices`, in this order, replacing its content.
    /// `epoch` counts from 0; augmentation may depend only on `epoch` and the sample's
    /// index.
    ///
    /// # Errors
    ///
    /// An error if a sample cannot be read.
    fn read_batch(&self, epoch: u64, indices: &[u64], batch: &mut Self::Batch) -> Result<()>;

    /// Name of the data set in output, for example `MNIST`.
    fn describe(&self) -> String {
        "own data".to_owned()
    }

    /// A text that identifies the content, for example a hash. Ranks compare it when they
    /// start, and a resumed training compares it with the checkpoint's. It must not contain
    /// the location or format of the data.
    fn content(&self) -> String {
        format!("{}, {} samples", self.describe(), self.len())
    }

    /// Names of the classes by label, for the report; empty where there are none.
    fn class_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// The order of shuffled samples, where they are read shard by shard; `None` where any order will do.
    fn order(&self) -> Option<ShardOrder> {
        None
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

/// A batch of labelled images.
#[derive(Clone, Debug, Default)]
pub struct ImageBatch {
    /// Pixels in the order sample, height, width, channels.
    pub images: Vec<f32>,
    /// One label for each image.
    pub labels: Vec<u32>,
    /// Height, width and channels of each image.
    pub image_shape: [usize; 3],
}

impl ImageBatch {
    /// Number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are no images.
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
        // Not cleared first: every element is overwritten below.
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

    fn class_names(&self) -> Vec<String> {
        ImageDataset::class_names(self)
    }

    fn order(&self) -> Option<ShardOrder> {
        ImageDataset::order(self)
    }
}

/// Labelled images that can be read in any order from several threads.
pub trait ImageDataset: Send + Sync {
    /// Name of the data set in output, for example `MNIST`.
    fn name(&self) -> &str;

    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Height, width and channels of every image.
    fn image_shape(&self) -> [usize; 3];

    /// Number of classes; labels are below it.
    fn classes(&self) -> usize;

    /// Names of the classes by label, which the report shows; empty where labels are all there is.
    fn class_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// As [`Dataset::content`].
    fn content(&self) -> String {
        format!("{}, {} samples", self.name(), self.len())
    }

    /// As [`Dataset::order`].
    fn order(&self) -> Option<ShardOrder> {
        None
    }

    /// Writes the image of sample `index` (height, width, channels, scaled for the model)
    /// to `out` and returns its label.
    ///
    /// # Errors
    ///
    /// If `index` is not below [`len`](Self::len), `out` does not have the length of one
    /// image, or the sample cannot be read.
    fn read(&self, index: usize, out: &mut [f32]) -> Result<u32>;

    /// As [`read`](Self::read), for epoch `epoch` (from 0). The loader calls this; data
    /// sets with augmentation override it.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    fn read_in_epoch(&self, index: usize, _epoch: u64, out: &mut [f32]) -> Result<u32> {
        self.read(index, out)
    }
}

/// Checks the arguments of [`ImageDataset::read`].
pub(crate) fn check_read(set: &dyn ImageDataset, index: usize, out: &[f32]) -> Result<()> {
    let elems: usize = set.image_shape().iter().product();
    if index >= set.len() {
        refuse!(
            "{} has {} samples, so there is no sample {index}",
            set.name(),
            set.len()
        );
    }
    if out.len() != elems {
        refuse!(
            "an image of {} has {elems} elements, but the buffer has {}",
            set.name(),
            out.len()
        );
    }
    Ok(())
}
