//! The files of a run's folder, for trackers that keep them.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use phalanx_base::files::Dir;

use crate::tensorboard::EVENT_FILE_PREFIX;
use crate::{ErrorKind, Result};

/// The names of the run's files in `dir`, without those that are temporary, in the folders `left_out`, or made of the others.
pub(crate) fn files_of(dir: &Dir, left_out: &[&str]) -> Result<Vec<String>> {
    let mut files = Vec::new();
    let is_left_out = |name: &str| {
        name.starts_with('.') || left_out.contains(&name) || name.starts_with(EVENT_FILE_PREFIX)
    };
    let names = dir.names()?;
    for name in names.iter().filter(|name| !is_left_out(name)) {
        match dir.sub(name) {
            Ok(Some(inner)) => {
                let inner = inner
                    .names()?
                    .into_iter()
                    .filter(|name| !name.starts_with('.'));
                files.extend(inner.map(|file| format!("{name}/{file}")));
            }
            // It may be read the next time.
            Err(e) if e.kind() != ErrorKind::Usage => return Err(e),
            _ => files.push(name.clone()),
        }
    }
    Ok(files)
}

/// The regular file `name` in `dir` or in a folder of it.
pub(crate) fn open_in(dir: &Dir, name: &str) -> Option<File> {
    match name.split_once('/') {
        Some((folder, name)) => dir.sub(folder).ok()??.open_read(name).ok()?,
        None => dir.open_read(name).ok()?,
    }
}

/// Size and time of a file, by which a tracker knows whether it has sent it.
pub(crate) type Version = (u64, i64);

/// Those of `file`.
pub(crate) fn version(file: &File) -> Result<Version> {
    let about = file.metadata()?;
    Ok((
        about.len(),
        about.mtime() * 1_000_000_000 + about.mtime_nsec(),
    ))
}
