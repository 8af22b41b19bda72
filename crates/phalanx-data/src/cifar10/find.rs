//! Where the files are.

use std::path::{Path, PathBuf};

use super::{Source, Split};
use phalanx_base::files::{as_typed, found, is_file};
use phalanx_base::{Error, Result, refuse};

pub(super) const PYTHON: &str = "cifar-10-batches-py";
pub(super) const BINARY: &str = "cifar-10-batches-bin";
const ARCHIVES: [&str; 2] = ["cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"];

/// What is expected at `place`, and where to get it.
fn expected(place: &Path) -> String {
    let folder = match place.is_file() || place.as_os_str().is_empty() {
        true => "data/cifar10".into(),
        false => as_typed(place),
    };
    format!(
        "  expected cifar-10-batches-py/ (data_batch_1 to data_batch_5, test_batch), \
         cifar-10-batches-bin/ (the same with .bin), cifar-10-python.tar.gz or cifar-10-binary.tar.gz\n  \
         get them:   phalanx download cifar10 --to {folder}      (170.5 MB)\n  \
         or try:     --data synthetic"
    )
}

/// Published folder, extension of the files, and the source they make.
type Kind = (&'static str, &'static str, fn(PathBuf) -> Source);

/// Finds the data set in `place`.
///
/// # Errors
///
/// `Usage`, naming the missing files.
pub(super) fn find(place: &Path) -> Result<Source> {
    let shown = place.display();
    if place.as_os_str().is_empty() {
        refuse!("the data folder's name is empty\n{}", expected(place));
    }
    let there = found(place)?;
    if there.as_ref().is_some_and(|there| there.is_file()) {
        if is_archive(place) {
            return Ok(Source::Archive(place.to_owned()));
        }
        refuse!(
            "{shown} is a file, neither a data folder nor an archive of CIFAR-10\n{}",
            expected(place)
        );
    }
    if there.is_none_or(|there| !there.is_dir()) {
        refuse!("no data folder {shown}\n{}", expected(place));
    }
    let kinds: [Kind; 2] = [
        (PYTHON, "", Source::Python),
        (BINARY, ".bin", Source::Binary),
    ];
    let mut half = None;
    for (published, ending, source) in kinds {
        for folder in [place.to_owned(), place.join(published)] {
            let names = [Split::Train, Split::Test];
            let names = names.iter().flat_map(|split| split.files());
            let (mut any, mut lacking) = (false, None);
            for name in names.map(|name| format!("{name}{ending}")) {
                match is_file(&folder.join(&name))? {
                    true => any = true,
                    false => lacking = lacking.or(Some(name)),
                }
            }
            match lacking {
                None => return Ok(source(folder)),
                Some(first) if any => {
                    half.get_or_insert(format!("{} lacks {first}", folder.display()));
                }
                Some(_) => {}
            }
        }
    }
    for archive in ARCHIVES.map(|name| place.join(name)) {
        if is_file(&archive)? {
            return Ok(Source::Archive(archive));
        }
    }
    let what = half.unwrap_or_else(|| format!("no CIFAR-10 files in {shown}"));
    Err(Error::usage(format!("{what}\n{}", expected(place))))
}

/// By its name only: the content is checked when it is read.
fn is_archive(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
    name.is_some_and(|name| name.ends_with(".tar.gz") || name.ends_with(".tgz"))
}
