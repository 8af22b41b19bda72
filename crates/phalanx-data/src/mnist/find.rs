//! Where the files are.

use std::path::{Path, PathBuf};

use super::Split;
use phalanx_base::files::{as_typed, found, is_file};
use phalanx_base::{Error, Result, refuse};

/// The folders to search, in this order, and whether they are Fashion-MNIST's only.
const FOLDERS: [(&str, bool); 4] = [
    ("", false),
    ("raw", false),
    ("MNIST/raw", false),
    ("FashionMNIST/raw", true),
];

/// The files expected in `folder`, and where to get them.
fn expected(folder: &Path) -> String {
    let set = if is_fashion(folder) {
        ("fashion-mnist", "30.9 MB")
    } else {
        ("mnist", "11.6 MB")
    };
    format!(
        "  expected train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, \
         t10k-labels-idx1-ubyte, each plain or .gz\n  \
         get them:   phalanx download {} --to {}      ({})\n  \
         or try:     --data synthetic",
        set.0,
        as_typed(folder),
        set.1
    )
}

/// The two files of a split.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) images: PathBuf,
    pub(super) labels: PathBuf,
    pub(super) fashion: bool,
}

pub(super) fn find(folder: &Path, split: Split) -> Result<Found> {
    let shown = folder.display();
    if folder.as_os_str().is_empty() {
        refuse!(
            "the data folder's name is empty\n{}",
            expected(Path::new("data/mnist"))
        );
    }
    let Some(there) = found(folder)? else {
        refuse!("no data folder {shown}\n{}", expected(folder));
    };
    if !there.is_dir() {
        refuse!(
            "{shown} is a file, not a data folder\n{}",
            expected(&folder.with_file_name("data"))
        );
    }
    let (images, labels) = match split {
        Split::Train => ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        Split::Test => ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    };
    let mut half = None;
    for (inside, fashion_only) in FOLDERS {
        let place = folder.join(inside);
        match (plain_or_gz(&place, images)?, plain_or_gz(&place, labels)?) {
            (Some(images), Some(labels)) => {
                let fashion = fashion_only || is_fashion(folder);
                return Ok(Found {
                    images,
                    labels,
                    fashion,
                });
            }
            (Some(_), None) => half = half.or(Some((place, labels))),
            (None, Some(_)) => half = half.or(Some((place, images))),
            (None, None) => {}
        }
    }
    Err(match half {
        Some((place, missing)) => Error::usage(format!(
            "{} lacks {missing} (plain or .gz)\n{}",
            place.display(),
            expected(folder)
        )),
        None => Error::usage(format!("no MNIST files in {shown}\n{}", expected(folder))),
    })
}

fn plain_or_gz(folder: &Path, name: &str) -> Result<Option<PathBuf>> {
    for path in [folder.join(name), folder.join(format!("{name}.gz"))] {
        if is_file(&path)? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// The files of both data sets have the same names; only the folder's name differs.
fn is_fashion(folder: &Path) -> bool {
    folder
        .iter()
        .any(|part| part.to_string_lossy().to_lowercase().contains("fashion"))
}
