//! MNIST and Fashion-MNIST from their original files.
//!
//! The four IDX files lie in the given folder, or where torchvision puts them (`MNIST/raw`,
//! `FashionMNIST/raw`, `raw`), each plain or gzip-compressed. Images are kept as bytes and
//! normalized when read.

mod find;
mod idx;
mod known;

use std::path::Path;
use std::sync::Arc;

use crate::dataset::ImageDataset;
use crate::stored::StoredImages;
use crate::synthetic;
use phalanx_base::{Error, Result};

pub use crate::digits::normalised;

/// Number of training images.
const TRAIN_SAMPLES: usize = 60_000;
/// Number of classes of both data sets.
const CLASSES: usize = 10;
/// Names of Fashion-MNIST's classes by label. MNIST's are digits.
pub const FASHION_CLASS_NAMES: [&str; CLASSES] = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
];
/// Training or test split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// `train-*`: 60,000 images.
    Train,
    /// `t10k-*`: 10,000 images.
    Test,
}

/// Reads one split from `folder`.
///
/// # Errors
///
/// `Usage` when the folder or files are missing (the message lists the expected files and
/// where to get them); `Data` when a file is truncated, damaged or of another format, or
/// images and labels do not match; `System` when a file cannot be read.
pub fn load(folder: &Path, split: Split) -> Result<StoredImages> {
    let found = find::find(folder, split)?;
    let images = idx::read_images(&found.images, found.fashion)?;
    let labels = idx::read_labels(&found.labels, found.fashion)?;
    let count = images.pixels.len() / (images.height * images.width);
    if labels.len() != count {
        return Err(Error::data(format!(
            "{} has {count} images, but {} has {} labels",
            found.images.display(),
            found.labels.display(),
            labels.len()
        )));
    }
    if let Some(at) = labels.iter().position(|&l| usize::from(l) >= CLASSES) {
        return Err(Error::data(format!(
            "{}: label {at} is {}; the classes are 0 to 9",
            found.labels.display(),
            labels[at]
        )));
    }
    let (name, class_names): (_, &[_]) = match found.fashion {
        true => ("Fashion-MNIST", &FASHION_CLASS_NAMES),
        false => ("MNIST", &[]),
    };
    Ok(StoredImages {
        name,
        shape: [images.height, images.width, 1],
        classes: CLASSES,
        class_names,
        pixels: images.pixels,
        labels,
        tables: vec![normalised()],
    })
}

/// Height and width of the images in a file, and their pixels.
#[cfg(any(test, fuzzing))]
pub(crate) fn read_images_file(path: &Path) -> Result<([usize; 2], usize)> {
    let images = idx::read_images(path, false)?;
    Ok(([images.height, images.width], images.pixels.len()))
}

/// The labels in a file.
#[cfg(any(test, fuzzing))]
pub(crate) fn read_labels_file(path: &Path) -> Result<Vec<u8>> {
    idx::read_labels(path, false)
}

/// The training and test sets in the folder `data`; for `synthetic`, 60,000 and 10,000
/// digits generated from `seed`, for `synthetic:N`, N and a sixth as many.
///
/// # Errors
///
/// As [`load`]; `Usage` for a wrong N, `Data` when the images of the two splits differ in size.
pub fn open(data: &str, seed: u64) -> Result<(Arc<dyn ImageDataset>, Arc<dyn ImageDataset>)> {
    if let Some(n) = synthetic::samples(data, TRAIN_SAMPLES)? {
        let (train, test) = synthetic::train_and_test(n, seed);
        return Ok((Arc::new(train), Arc::new(test)));
    }
    let folder = Path::new(data);
    let (train, test) = (load(folder, Split::Train)?, load(folder, Split::Test)?);
    let ([h, w, _], [test_h, test_w, _]) = (train.image_shape(), test.image_shape());
    if (h, w) != (test_h, test_w) {
        return Err(Error::data(format!(
            "{data}: the training images have {h} x {w} pixels, the test images {test_h} x {test_w}"
        )));
    }
    Ok((Arc::new(train), Arc::new(test)))
}

/// Checks that both splits are in `folder`, without reading them.
///
/// # Errors
///
/// `Usage` when the folder or files are missing, as [`load`].
pub fn check(folder: &Path) -> Result<()> {
    find::find(folder, Split::Train)?;
    find::find(folder, Split::Test)?;
    Ok(())
}
