//! Where shards are: folders and object stores.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use phalanx_base::{Error, Result};

#[cfg(feature = "object-store")]
use super::remote::Remote;

/// A file of a place.
#[derive(Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Object {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Changes when the content does: the time of the last change, or the store's ETag.
    pub(super) stamp: String,
}

/// A folder, or a prefix of an object store.
pub(super) enum Place {
    Folder(PathBuf),
    #[cfg(feature = "object-store")]
    Remote(Remote),
}

impl Place {
    /// The place that a path or URL names.
    ///
    /// # Errors
    ///
    /// `Usage` for a URL that this build cannot read.
    pub(super) fn parse(place: &str) -> Result<Place> {
        let Some((scheme, rest)) = place.split_once("://") else {
            return Ok(Place::Folder(place.into()));
        };
        match scheme {
            "file" if rest.starts_with('/') => Ok(Place::Folder(rest.into())),
            #[cfg(feature = "object-store")]
            "s3" | "gs" | "http" | "https" => Ok(Place::Remote(Remote::open(place)?)),
            #[cfg(not(feature = "object-store"))]
            "s3" | "gs" | "http" | "https" => {
                let what = format!("{place}: this build reads folders only");
                let fix = "build it with `--features object-store`, or `--all-features`";
                Err(Error::usage(what).note("try", fix))
            }
            _ => {
                let what = format!("{place}: {scheme}:// is not known");
                let known = "a folder, file:///PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, https://HOST/PATH";
                Err(Error::usage(what).note("expected", known))
            }
        }
    }

    /// The files directly in it, sorted by name, without those whose names begin with a dot.
    ///
    /// # Errors
    ///
    /// `Usage` when there is no such folder; `System`.
    pub(super) fn list(&self) -> Result<Vec<Object>> {
        let mut all = match self {
            Place::Folder(folder) => list(folder)?,
            #[cfg(feature = "object-store")]
            Place::Remote(remote) => remote.list()?,
        };
        all.retain(|object| !object.name.starts_with('.'));
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Ends what is being fetched.
    pub(super) fn close(&self) {
        #[cfg(feature = "object-store")]
        if let Place::Remote(remote) = self {
            remote.close();
        }
    }

    /// Whether its files are fetched into a cache.
    pub(super) fn is_remote(&self) -> bool {
        !matches!(self, Place::Folder(_))
    }
}

fn list(folder: &Path) -> Result<Vec<Object>> {
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
            Error::usage(format!("no folder {}", folder.display())).with_source(e)
        }
        _ => Error::io("cannot read", folder, e),
    };
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // A link that leads nowhere, and a file that was just removed.
        let Ok(about) = fs::metadata(entry.path()) else {
            continue;
        };
        if let (true, Ok(name)) = (about.is_file(), entry.file_name().into_string()) {
            let changed = about.modified().ok();
            let changed = changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            all.push(Object {
                name,
                bytes: about.len(),
                stamp: changed.unwrap_or_default().as_nanos().to_string(),
            });
        }
    }
    Ok(all)
}
