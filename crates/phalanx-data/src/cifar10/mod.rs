//! CIFAR-10 from the files that its authors publish: the Python version, the binary
//! version, or the archive of either.
//!
//! Images are kept as bytes, converted from planes to pixels once, and scaled when read.

mod archive;
mod binary;
mod find;
mod pickle;

use std::path::{Path, PathBuf};

use crate::stored::StoredImages;
use phalanx_base::{Error, Result};

/// Height and width of an image.
pub const SIDE: usize = 32;
/// Red, green, blue.
pub const CHANNELS: usize = 3;
/// Number of bytes of an image.
pub const PIXELS: usize = SIDE * SIDE * CHANNELS;
/// Number of classes.
pub const CLASSES: usize = 10;
/// Images in each of the published files.
const BATCH_IMAGES: usize = 10_000;
/// Maximum size of a batch file.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Names of the classes by label.
pub const CLASS_NAMES: [&str; CLASSES] = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
];
/// Mean of the training pixels of each channel, in 0..1.
pub const MEAN: [f32; CHANNELS] = [0.4914, 0.4822, 0.4465];
/// Their standard deviation.
pub const DEVIATION: [f32; CHANNELS] = [0.2470, 0.2435, 0.2616];

/// Training or test split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// 50,000 images.
    Train,
    /// 10,000 images.
    Test,
}

impl Split {
    /// Names of the files without extension.
    fn files(self) -> &'static [&'static str] {
        match self {
            Split::Train => &[
                "data_batch_1",
                "data_batch_2",
                "data_batch_3",
                "data_batch_4",
                "data_batch_5",
            ],
            Split::Test => &["test_batch"],
        }
    }
}

/// Scaling of pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// To 0..=1, as torchvision's `ToTensor`.
    Unit,
    /// [`Unit`](Scaling::Unit) minus [`MEAN`], divided by [`DEVIATION`].
    Normalised,
}

impl Scaling {
    /// The scaled value of every byte of every channel, in float32 with torchvision's
    /// rounding.
    pub fn table(self) -> [[f32; 256]; CHANNELS] {
        std::array::from_fn(|c| {
            std::array::from_fn(|x| {
                let unit = x as f32 / 255.0;
                match self {
                    Scaling::Unit => unit,
                    Scaling::Normalised => (unit - MEAN[c]) / DEVIATION[c],
                }
            })
        })
    }
}

/// Images and labels of one file. Images are a view of the file's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch<'a> {
    /// Images one after the other, each as red, green and blue planes.
    planes: &'a [u8],
    /// Bytes from one image to the next.
    stride: usize,
    labels: Vec<u8>,
}

impl Batch<'_> {
    /// The planes of each image.
    pub(crate) fn images(&self) -> impl Iterator<Item = &[u8]> {
        let starts = (0..self.labels.len()).map(|i| i * self.stride);
        starts.map(|at| &self.planes[at..at + PIXELS])
    }
}

/// Files of the data set that were found but not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder of the Python version (`data_batch_1`).
    Python(PathBuf),
    /// A folder of the binary version (`data_batch_1.bin`).
    Binary(PathBuf),
    /// `cifar-10-python.tar.gz` or `cifar-10-binary.tar.gz`.
    Archive(PathBuf),
}

/// Finds the data set in `folder`: the files themselves, their published
/// folder (`cifar-10-batches-py`, `cifar-10-batches-bin`) or an archive. Does not read them.
///
/// # Errors
///
/// `Usage`, listing the expected files and where to get them.
pub fn check(folder: &Path) -> Result<Source> {
    find::find(folder)
}

/// Unpacks the archive in `folder` into the published folder next to it, if there is nothing
/// but an archive, so that ranks need not decompress it each time. Files are written
/// atomically; an interrupted call can be repeated. Does nothing if `folder` is the path of
/// an archive.
///
/// # Errors
///
/// As [`load`]; `DiskFull` or `System` when a file cannot be written.
pub fn unpack(folder: &Path) -> Result<()> {
    match find::find(folder)? {
        Source::Archive(file) if folder.is_dir() => archive::unpack(&file),
        _ => Ok(()),
    }
}

/// Whether there is an archive to [`unpack`] in `folder`.
///
/// # Errors
///
/// `Usage` as [`check`].
pub fn is_packed(folder: &Path) -> Result<bool> {
    Ok(matches!(find::find(folder)?, Source::Archive(_)) && folder.is_dir())
}

/// Reads one split from `folder`, as [`check`] finds it.
///
/// # Errors
///
/// `Usage` as [`check`]; `Data`, naming file, offset and what was expected there, when a
/// file is truncated, damaged or of another format; `System` when it cannot be read.
pub fn load(folder: &Path, split: Split, scaling: Scaling) -> Result<StoredImages> {
    let files = split.files();
    let mut set = with_room(files.len() * BATCH_IMAGES, scaling);
    let take = |place: usize, path: &Path, batch: &Batch<'_>| {
        if batch.labels.len() != BATCH_IMAGES {
            return Err(Error::data(format!(
                "{} holds {} images, expected {BATCH_IMAGES}; it is not a CIFAR-10 file",
                path.display(),
                batch.labels.len()
            )));
        }
        put(&mut set, place * BATCH_IMAGES, batch);
        Ok(())
    };
    match find::find(folder)? {
        Source::Python(folder) => read_files(&folder, files, "", pickle::parse, take)?,
        Source::Binary(folder) => read_files(&folder, files, ".bin", binary::parse, take)?,
        Source::Archive(file) => archive::read(&file, files, take)?,
    }
    Ok(set)
}

type Parse = for<'a> fn(&Path, &'a [u8]) -> Result<Batch<'a>>;

/// Calls `take` with the batch of each of `files` and its index. All are read into the same
/// memory, since new memory costs more than reading.
fn read_files(
    folder: &Path,
    files: &[&str],
    ending: &str,
    parse: Parse,
    mut take: impl FnMut(usize, &Path, &Batch<'_>) -> Result<()>,
) -> Result<()> {
    let mut bytes = Vec::new();
    for (place, name) in files.iter().enumerate() {
        let path = folder.join(format!("{name}{ending}"));
        read_bounded(&path, &mut bytes)?;
        take(place, &path, &parse(&path, &bytes)?)?;
    }
    Ok(())
}

/// Reads a file of limited size into `bytes`.
fn read_bounded(path: &Path, bytes: &mut Vec<u8>) -> Result<()> {
    use std::io::Read;
    let failed = |source| Error::io("cannot read", path, source);
    let file = phalanx_base::files::open_regular(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    bytes.clear();
    // One byte more, so that the end is found without growing.
    bytes.reserve(len.min(MAX_FILE_BYTES) as usize + 1);
    file.take(MAX_FILE_BYTES + 1)
        .read_to_end(bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::data(format!(
            "{} has more than {MAX_FILE_BYTES} bytes; no file of CIFAR-10 is as large",
            path.display()
        )));
    }
    Ok(())
}

/// Parses the bytes of one file of the Python version.
#[cfg(any(test, fuzzing))]
pub(crate) fn parse_pickle(bytes: &[u8]) -> Result<Batch<'_>> {
    pickle::parse(Path::new("fuzzed"), bytes)
}

/// Parses the bytes of one file of the binary version.
#[cfg(any(test, fuzzing))]
pub(crate) fn parse_binary(bytes: &[u8]) -> Result<Batch<'_>> {
    binary::parse(Path::new("fuzzed"), bytes)
}

/// Reads one split of an archive; returns the labels of each batch with its index.
#[cfg(any(test, fuzzing))]
pub(crate) fn read_archive(path: &Path, split: Split) -> Result<Vec<(usize, Vec<u8>)>> {
    let mut found = Vec::new();
    archive::read(path, split.files(), |place, _, batch| {
        batch.consistent();
        found.push((place, batch.labels.clone()));
        Ok(())
    })?;
    Ok(found)
}

#[cfg(any(test, fuzzing))]
impl Batch<'_> {
    /// Number of images; panics when images and labels differ in number.
    pub(crate) fn consistent(&self) -> usize {
        assert_eq!(self.images().count(), self.labels.len());
        let whole = self.planes.len() + self.stride - PIXELS;
        assert_eq!(whole, self.labels.len() * self.stride);
        assert!(self.labels.iter().all(|l| usize::from(*l) < CLASSES));
        self.labels.len()
    }
}

/// Black images of class 0, in memory that is not touched yet.
fn with_room(images: usize, scaling: Scaling) -> StoredImages {
    StoredImages {
        name: "CIFAR-10",
        shape: [SIDE, SIDE, CHANNELS],
        classes: CLASSES,
        class_names: &CLASS_NAMES,
        pixels: vec![0; images * PIXELS],
        labels: vec![0; images],
        tables: scaling.table().to_vec(),
    }
}

/// Replaces the images of `set` from `first` on by those of `batch`, converted from planes to
/// pixels.
fn put(set: &mut StoredImages, first: usize, batch: &Batch<'_>) {
    set.labels[first..first + batch.labels.len()].copy_from_slice(&batch.labels);
    let images = set.pixels[first * PIXELS..].chunks_exact_mut(PIXELS);
    for (pixels, planes) in images.zip(batch.images()) {
        let (red, rest) = planes.split_at(SIDE * SIDE);
        let (green, blue) = rest.split_at(SIDE * SIDE);
        let channels = red.iter().zip(green).zip(blue);
        for (pixel, ((r, g), b)) in pixels.chunks_exact_mut(CHANNELS).zip(channels) {
            pixel.copy_from_slice(&[*r, *g, *b]);
        }
    }
}

#[cfg(test)]
mod tests;
