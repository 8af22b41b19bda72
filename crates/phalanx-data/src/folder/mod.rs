//! A folder of images, a subfolder for each class, as torchvision's `ImageFolder`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_base::files::{open_regular, read_open};
use phalanx_base::{Error, Result, refuse};
use phalanx_image::Rgb;
use sha2::{Digest, Sha256};

use crate::dataset::{ImageDataset, check_read};
use crate::listing::{MAX_DEPTH, list, names};
use crate::words::Words;

#[cfg(test)]
mod tests;
mod transforms;

pub use transforms::{IMAGENET_MEAN, IMAGENET_STD, Transforms};

/// Most bytes of an image file.
const MAX_BYTES: u64 = 1 << 28;
/// Separates the random numbers of [`ImageFolder::split`] from others.
const SPLIT: u64 = 0x7370_6c69_7421_0000;

/// Labelled images in a folder: those below its subfolder `cat` are of the class `cat`. Classes are numbered in the order of
/// their names, and images are numbered by class and path, both sorted by byte.
///
/// JPEG and PNG files are read, at any depth. Names that begin with a dot, other files, and files outside the subfolders are not
/// images. An image is decoded when it is read, on the loader's threads, and as torchvision's `pil_loader` has it: gray and
/// CMYK become RGB, transparency is dropped, and the orientation in EXIF is not applied. Of 16 bits a value, the upper 8 are
/// taken. PNG files give the same values as in Pillow; of the values of JPEG files, less than one in 1,000 differs by more than
/// 2 of 255.
///
/// ```no_run
/// use phalanx_data::folder::{ImageFolder, Transforms};
///
/// # fn main() -> phalanx_base::Result<()> {
/// let photos = ImageFolder::open("photos".as_ref())?;
/// let [train, test] = photos.split(0.1, 1);
/// let train = train.transform(Transforms::training(64), 1)?;
/// let test = test.transform(Transforms::evaluation(64), 1)?;
/// # let _ = (train, test);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ImageFolder {
    root: PathBuf,
    name: String,
    classes: Arc<[String]>,
    /// Paths below `root`, and labels.
    files: Vec<(PathBuf, u32)>,
    transforms: Transforms,
    size: [usize; 2],
    seed: u64,
}

/// An image that cannot be read, and why.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DamagedImage {
    /// Its number in the folder that it was found in.
    pub index: usize,
    /// Its path, and what is wrong.
    pub what: String,
}

impl ImageFolder {
    /// Lists the images of `folder`. Nothing is decoded; [`transform`](Self::transform) comes next.
    ///
    /// # Errors
    ///
    /// `Usage`, naming the folder, when it is missing, has no subfolders, or one of these has no image; naming the first file,
    /// when there are images of other formats, such as GIF and WebP; `System` when it cannot be read.
    pub fn open(folder: &Path) -> Result<ImageFolder> {
        let found = ImageFolder::open_all(folder)?;
        let other = |path: &PathBuf| !matches!(format_of(path), Some("jpg" | "jpeg" | "png"));
        let others = found.files.iter().map(|(path, _)| path);
        let others: Vec<_> = others.filter(|path| other(path)).collect();
        match others.first() {
            None => Ok(found),
            Some(first) => Err(Error::usage(format!(
                "{} of {} images are neither JPEG nor PNG; the first is {}",
                others.len(),
                found.len(),
                folder.join(first).display()
            ))
            .note(
                "try",
                "convert them, or leave them out: --skip-damaged, `Job::skip_damaged`",
            )),
        }
    }

    /// As [`open`](Self::open), and images of other formats are listed too, for [`damaged`](Self::damaged).
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_all(folder: &Path) -> Result<ImageFolder> {
        let mut classes = Vec::new();
        let mut files = Vec::new();
        for (class, is_folder) in names(folder)? {
            if !is_folder {
                continue;
            }
            let (label, mut paths) = (classes.len() as u32, Vec::new());
            let is_image = |path: &Path| format_of(path).is_some();
            list(folder, class.as_ref(), MAX_DEPTH, &is_image, &mut paths)?;
            if paths.is_empty() {
                let path = folder.join(&class);
                refuse!(
                    "{} has no images; each subfolder is a class",
                    path.display()
                );
            }
            files.extend(paths.into_iter().map(|path| (path, label)));
            classes.push(class.to_string_lossy().into_owned());
        }
        if classes.is_empty() {
            refuse!("{} has no subfolders; each is a class", folder.display());
        }
        let name = folder.file_name().unwrap_or(folder.as_os_str());
        Ok(ImageFolder {
            root: folder.to_owned(),
            name: name.to_string_lossy().into_owned(),
            classes: classes.into(),
            files,
            transforms: Transforms::default(),
            size: [0; 2],
            seed: 0,
        })
    }

    /// Whether a subfolder of `folder` has an image.
    pub fn has_classes(folder: &Path) -> bool {
        let subfolders = names(folder).unwrap_or_default().into_iter();
        let mut subfolders = subfolders.filter(|(_, is_folder)| *is_folder);
        subfolders.any(|(name, _)| has_image(&folder.join(name), MAX_DEPTH))
    }

    /// Transforms the images as they are read; random transforms are drawn by `seed`.
    ///
    /// # Errors
    ///
    /// `Usage` for a transform that is impossible, or if images would differ in size.
    pub fn transform(mut self, transforms: Transforms, seed: u64) -> Result<ImageFolder> {
        self.size = match (transforms.size(None), self.files.is_empty()) {
            (Err(_), false) => {
                let first = self.decode(0)?;
                transforms.size(Some([first.height, first.width]))?
            }
            (size, _) => size?,
        };
        (self.transforms, self.seed) = (transforms, seed);
        Ok(self)
    }

    /// Divides the images into two: of each class, a share `held_out` (0 to 1, rounded; at least one image on each side where
    /// there are two) is drawn by `seed` for the second.
    pub fn split(self, held_out: f64, seed: u64) -> [ImageFolder; 2] {
        let mut drawn: BTreeSet<usize> = BTreeSet::new();
        for class in 0..self.classes.len() as u32 {
            let mut of: Vec<usize> = (0..self.files.len())
                .filter(|i| self.files[*i].1 == class)
                .collect();
            let mut words = Words::new(seed ^ SPLIT, u64::from(class));
            for last in (1..of.len()).rev() {
                of.swap(last, words.below(last as u32 + 1) as usize);
            }
            let most = of.len().saturating_sub(1);
            let share = (of.len() as f64 * held_out).round() as usize;
            drawn.extend(&of[..share.clamp(1.min(most), most)]);
        }
        [false, true].map(|second| self.only(|index| drawn.contains(&index) == second))
    }

    /// The images whose numbers are `wanted`.
    fn only(&self, wanted: impl Fn(usize) -> bool) -> ImageFolder {
        let files = self.files.iter().enumerate();
        let files = files
            .filter(|(index, _)| wanted(*index))
            .map(|(_, file)| file.clone());
        ImageFolder {
            files: files.collect(),
            ..self.clone()
        }
    }

    /// Without the images `damaged`.
    pub fn without(&self, damaged: &[DamagedImage]) -> ImageFolder {
        let damaged: BTreeSet<usize> = damaged.iter().map(|image| image.index).collect();
        self.only(|index| !damaged.contains(&index))
    }

    /// Decodes the images `part` of `parts` (every `parts`-th), and returns those that cannot be read.
    pub fn damaged(&self, part: usize, parts: usize) -> Vec<DamagedImage> {
        let indices = (part..self.files.len()).step_by(parts.max(1));
        let check = |index| {
            let why = self.decode(index).err()?;
            let what = why.to_string();
            Some(DamagedImage { index, what })
        };
        indices.filter_map(check).collect()
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Names of the classes, by label.
    pub fn class_names(&self) -> Vec<String> {
        self.classes.to_vec()
    }

    /// The path of image `index` below the folder.
    pub fn path(&self, index: usize) -> Option<&Path> {
        self.files.get(index).map(|(path, _)| path.as_path())
    }

    fn decode(&self, index: usize) -> Result<Rgb> {
        let path = self.root.join(&self.files[index].0);
        decode_file(&path)
    }
}

/// Decodes the image at `path`.
fn decode_file(path: &Path) -> Result<Rgb> {
    let file = open_regular(path).map_err(|e| Error::not_opened("image", path, e))?;
    let bytes = read_open(path, file, MAX_BYTES)?;
    phalanx_image::decode(&bytes).map_err(|what| Error::data(format!("{}: {what}", path.display())))
}

/// Reads the image at `path`, JPEG or PNG of any size, transformed. Returns values (height, width, 3) and the height and width.
///
/// # Errors
///
/// `Usage` when there is none; `Data` when it is damaged or of another format; `Usage` for impossible transforms.
pub fn read_image(path: &Path, transforms: &Transforms) -> Result<(Vec<f32>, [usize; 2])> {
    let image = decode_file(path)?;
    let size = transforms.size(Some([image.height, image.width]))?;
    let mut out = vec![0.0; size[0] * size[1] * 3];
    transforms.apply(image, 0, [0, 0], &mut out)?;
    Ok((out, size))
}

fn has_image(folder: &Path, depth: usize) -> bool {
    let mut names = names(folder).unwrap_or_default().into_iter();
    names.any(|(name, is_folder)| match is_folder {
        true => depth > 0 && has_image(&folder.join(name), depth - 1),
        false => format_of(Path::new(&name)).is_some(),
    })
}

/// The ending of an image's name, if it is one.
fn format_of(path: &Path) -> Option<&'static str> {
    const ENDINGS: [&str; 12] = [
        "jpg", "jpeg", "png", "gif", "webp", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "heic",
    ];
    let ending = path.extension()?.to_str()?.to_ascii_lowercase();
    ENDINGS.into_iter().find(|known| *known == ending)
}

impl std::fmt::Debug for ImageFolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (root, images) = (&self.root, self.files.len());
        write!(f, "{images} images in {}", root.display())
    }
}

impl ImageDataset for ImageFolder {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn image_shape(&self) -> [usize; 3] {
        [self.size[0], self.size[1], 3]
    }

    fn classes(&self) -> usize {
        self.classes.len()
    }

    fn class_names(&self) -> Vec<String> {
        self.class_names()
    }

    /// Of the paths, their order and the transforms; not of what is in the files.
    fn content(&self) -> String {
        let mut hash = Sha256::new();
        for (path, label) in &self.files {
            hash.update(path.as_os_str().as_encoded_bytes());
            hash.update([0]);
            hash.update(label.to_le_bytes());
        }
        hash.update(format!("{:?} {}", self.transforms, self.seed));
        let hash = hex::encode(hash.finalize());
        let (images, classes) = (self.files.len(), self.classes.len());
        format!("{images} images of {classes} classes, SHA-256 of the names {hash:.16}")
    }

    fn read(&self, index: usize, out: &mut [f32]) -> Result<u32> {
        self.read_in_epoch(index, 0, out)
    }

    fn read_in_epoch(&self, index: usize, epoch: u64, out: &mut [f32]) -> Result<u32> {
        check_read(self, index, out)?;
        let image = self.decode(index)?;
        let applied = self
            .transforms
            .apply(image, self.seed, [epoch, index as u64], out);
        let path = self.root.join(&self.files[index].0);
        applied.map_err(|e| Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        Ok(self.files[index].1)
    }
}
