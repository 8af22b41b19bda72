//! Images of one's own: a folder with a subfolder for each class, as `ImageFolder` reads it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx::data::ImageDataset;
use phalanx::data::folder::{IMAGENET_MEAN, IMAGENET_STD, ImageFolder, Transforms};
use phalanx::prelude::*;

use super::image::{Data, counts};
use super::net::Pixels;
use crate::error::check_count;

/// The share of the images that is held out for tests, where the folder does not say which.
const HELD_OUT: f64 = 0.1;
/// Names of a folder's part for training, and of that for tests.
const PARTS: [&[&str]; 2] = [&["train"], &["val", "valid", "validation", "test"]];

/// Flags of programs that also train on folders of images.
#[derive(Debug, Clone, clap::Args)]
pub struct PhotoArgs {
    /// Side in pixels to which the images of a folder of classes are resized and cropped [default: 64]
    #[arg(long, value_name = "N")]
    pub(super) image_size: Option<usize>,
    /// Leave out images of a folder that cannot be read, the same on all ranks, and list them; without this the first one ends the job
    #[arg(long)]
    skip_damaged: bool,
}

/// The parts of `folder` for training and for tests: its subfolders `train` and `val`, or the whole folder and none. Nothing where
/// it has no images in subfolders.
fn parts(folder: &Path) -> Option<(PathBuf, Option<PathBuf>)> {
    let [train, test] = PARTS.map(|names| {
        let mut paths = names.iter().map(|name| folder.join(name));
        paths.find(|path| path.is_dir())
    });
    let found = match (train, test) {
        (Some(train), Some(test)) => (train, Some(test)),
        _ => (folder.to_owned(), None),
    };
    ImageFolder::has_classes(&found.0).then_some(found)
}

/// The part of `folder` that is tested on.
///
/// # Errors
///
/// Those of listing the images.
pub fn tests_in(folder: &Path) -> Result<ImageFolder> {
    let part = parts(folder).and_then(|(_, test)| test);
    ImageFolder::open_all(&part.unwrap_or_else(|| folder.to_owned()))
}

/// What is done to an image that is not augmented.
pub fn plain(size: usize, pixels: Pixels) -> Transforms {
    let cut = Transforms::evaluation(size);
    match pixels {
        Pixels::Unit => cut.normalize([0.0; 3], [1.0; 3]),
        Pixels::Normalised => cut,
    }
}

impl PhotoArgs {
    fn image_size(&self) -> usize {
        self.image_size.unwrap_or(64)
    }

    /// Checks them, and lists the images of `folder` if it is one of classes. Returns whether it is.
    ///
    /// # Errors
    ///
    /// Usage, naming the flag or a file of another format.
    pub fn check(&self, folder: &str) -> Result<bool> {
        check_count("--image-size", self.image_size(), 4096)?;
        let Some((train, test)) = parts(folder.as_ref()) else {
            return Ok(false);
        };
        for part in [Some(train), test].into_iter().flatten() {
            match self.skip_damaged {
                true => ImageFolder::open_all(&part)?,
                false => ImageFolder::open(&part)?,
            };
        }
        Ok(true)
    }

    /// The flags that shape the training, a flag and its value a line.
    pub fn shaping(&self) -> String {
        format!("--image-size {}", self.image_size())
    }

    /// The images of `folder`, augmented for training as asked; nothing where it has no classes. *Blocks* until all ranks call it,
    /// with `--skip-damaged`.
    ///
    /// # Errors
    ///
    /// Usage or data, naming folder or file.
    pub fn load(
        &self,
        job: &Job<'_>,
        folder: &str,
        pixels: Pixels,
        is_augmented: bool,
    ) -> Result<Option<Data>> {
        let Some((train, test)) = parts(folder.as_ref()) else {
            return Ok(None);
        };
        let (seed, size) = (job.settings().seed, self.image_size());
        let open = |path: &Path| {
            let all = ImageFolder::open_all(path)?;
            match self.skip_damaged {
                true => job.skip_damaged(&all),
                false => Ok(all),
            }
        };
        let (train, test) = match test {
            Some(test) => (open(&train)?, open(&test)?),
            None => {
                let [train, test] = open(&train)?.split(HELD_OUT, seed);
                (train, test)
            }
        };
        let classes = train.class_names();
        if classes != test.class_names() {
            let what = format!("{folder} has other classes for training than for tests");
            return Err(Error::usage(what));
        }
        if test.is_empty() {
            let what = format!("{folder} has too few images to hold some out for tests");
            return Err(Error::usage(what));
        }
        let [mean, std] = match pixels {
            Pixels::Unit => [[0.0; 3], [1.0; 3]],
            Pixels::Normalised => [IMAGENET_MEAN, IMAGENET_STD],
        };
        let augmented = match is_augmented {
            true => Transforms::training(size).normalize(mean, std),
            false => plain(size, pixels),
        };
        let train = train.transform(augmented, seed)?;
        let test = test.transform(plain(size, pixels), seed)?;
        let how = ["", ", cropped at random, flipped"][usize::from(is_augmented)];
        let counts = counts(train.len(), test.len());
        Ok(Some(Data {
            name: folder.to_owned(),
            description: format!(
                "{} classes of images in {folder}, {counts}, {size} x {size} pixels{how}",
                classes.len()
            ),
            content: [&train, &test].map(ImageDataset::content).join(" + "),
            train: Arc::new(train),
            test: Arc::new(test),
            classes: Some(classes),
        }))
    }
}
