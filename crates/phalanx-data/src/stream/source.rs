//! The shards of a place, and its index.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, UNIX_EPOCH};

use phalanx_base::files::{open_regular, try_lock};
use phalanx_base::{Error, ErrorKind, Result, say};

use super::index::{self, Index, NAME, Object, Shard};
#[cfg(feature = "object-store")]
use super::remote::{Remote, key};
use super::shard::{self, Format, Scan};
use crate::listing::names;

/// What the URLs of object stores begin with.
const SCHEMES: [&str; 4] = ["s3", "gs", "http", "https"];
/// The folder of the cache that a test chooses, and its most bytes.
pub(super) type Caching = (Option<PathBuf>, Option<u64>);

/// The files of a folder, or of an object store.
pub(super) struct Source {
    /// As it was typed.
    pub(super) name: String,
    folder: PathBuf,
    #[cfg(feature = "object-store")]
    remote: Option<Remote>,
}

fn read_index(path: &Path) -> Result<Index> {
    let file = open_regular(path).map_err(|e| Error::not_opened("index", path, e))?;
    Index::open(&path.display().to_string(), file)
}

impl Source {
    /// # Errors
    ///
    /// `Usage` for a URL that this build does not read.
    pub(super) fn new(name: &str, cache: &Caching) -> Result<Source> {
        let scheme = name.split_once("://");
        let is_remote = scheme.is_some_and(|(scheme, _)| SCHEMES.contains(&scheme));
        let folder = match scheme {
            None => name,
            Some(("file", path)) if path.starts_with('/') => path,
            _ if is_remote && cfg!(feature = "object-store") => "",
            _ => {
                let what = format!("{name}: shards are read from a folder, or file:///PATH");
                let fix = "copy them to a disk of each host, or mount the object store; a build with the feature `object-store` \
                           reads s3://, gs://, http:// and https://";
                return Err(Error::usage(what).note("try", fix));
            }
        };
        let _ = cache;
        Ok(Source {
            name: name.to_owned(),
            folder: folder.into(),
            #[cfg(feature = "object-store")]
            remote: is_remote
                .then(|| Remote::open(name, (cache.0.as_deref(), cache.1)))
                .transpose()?,
        })
    }

    /// Opens shards of an index. Those of an object store that are missing in the cache are fetched at the same time.
    pub(super) fn files<'a>(&'a self, format: Format, shards: &[&'a Shard]) -> Result<Vec<File>> {
        #[cfg(feature = "object-store")]
        if let Some(remote) = &self.remote {
            return std::thread::scope(|scope| {
                let threads = shards.iter().map(|&shard| {
                    scope.spawn(move || remote.file(&shard.object, Some((format, shard))))
                });
                let threads: Vec<_> = threads.collect();
                let panicked = |_| Err(Error::internal("a thread that opens a shard panicked"));
                let files = threads.into_iter().map(|thread| thread.join());
                files.map(|file| file.unwrap_or_else(panicked)).collect()
            });
        }
        let _ = format;
        shards
            .iter()
            .map(|shard| self.file(&shard.object))
            .collect()
    }

    /// Opens a shard.
    fn file(&self, object: &Object) -> Result<File> {
        #[cfg(feature = "object-store")]
        if let Some(remote) = &self.remote {
            return remote.file(object, None);
        }
        let path = self.folder.join(&object.name);
        let file = open_regular(&path).map_err(|e| Error::not_opened("shard", &path, e))?;
        let about = file.metadata();
        let about = about.map_err(|e| Error::io("cannot read", &path, e))?;
        if about.len() == object.bytes {
            return Ok(file);
        }
        let (path, has, had) = (path.display(), about.len(), object.bytes);
        let what = format!("{path} has {has} bytes; it had {had} when its index was made");
        Err(Error::data(what).note("fix", "make the index again with `phalanx index`"))
    }

    pub(super) fn path(&self, object: &Object) -> String {
        format!("{}/{}", self.name, object.name)
    }

    /// What is to know of the cache.
    pub(super) fn describe(&self) -> String {
        #[cfg(feature = "object-store")]
        if let Some(remote) = &self.remote {
            return format!(", {}", remote.cache.describe());
        }
        String::new()
    }

    /// The shards now, sorted by name, and their format.
    fn shards(&self) -> Result<(Format, Vec<Object>)> {
        #[cfg(feature = "object-store")]
        if let Some(remote) = &self.remote {
            return index::shards_of(&self.name, remote.list()?);
        }
        let files = names(&self.folder)?.into_iter().filter_map(|(name, _)| {
            // A link that leads nowhere, and a file that was just removed.
            let about = fs::metadata(self.folder.join(&name)).ok()?;
            let changed = about.modified().ok()?.duration_since(UNIX_EPOCH).ok();
            Some(Object {
                name: name.into_string().ok().filter(|_| about.is_file())?,
                bytes: about.len(),
                stamp: changed.unwrap_or_default().as_nanos().to_string(),
            })
        });
        index::shards_of(&self.name, files.collect())
    }

    fn write(&self, path: &Path, of: (Format, &[Object]), skips: bool) -> Result<()> {
        let (format, shards) = of;
        let scan = |object: &Object| -> Result<Scan> {
            let file = self.file(object)?;
            shard::scan(format, &self.path(object), &file, object.bytes)
        };
        index::write(path, format, shards, skips, &scan)
    }

    /// Opens the index: the one in `given`, else the one beside the shards, which is made if it is missing or not that of the
    /// files any more: by one process of the host, while the others wait.
    pub(super) fn index(&self, given: Option<&Path>) -> Result<Index> {
        #[cfg(feature = "object-store")]
        if let (Some(path), Some(false)) = (given, self.remote.as_ref().map(|remote| remote.lists))
        {
            return read_index(path);
        }
        let (format, shards) = self.shards()?;
        if let Some(path) = given {
            let index = read_index(path)?;
            let what = format!(
                "{} is not the index of {} as it is now",
                path.display(),
                self.name
            );
            let fix = "make it again with `phalanx index`";
            return match index.is_of(&shards) {
                true => Ok(index),
                false => Err(Error::usage(what).note("fix", fix)),
            };
        }
        #[cfg(feature = "object-store")]
        if let Some(remote) = &self.remote {
            return self.remote_index(remote, format, &shards);
        }
        let path = self.folder.join(NAME);
        let found = || read_index(&path).ok().filter(|index| index.is_of(&shards));
        if let Some(index) = found() {
            return Ok(index);
        }
        let folder = File::open(&self.folder);
        let folder = folder.map_err(|e| Error::io("cannot read", &self.folder, e))?;
        while !try_lock(&folder) {
            sleep(Duration::from_millis(20));
        }
        if let Some(index) = found() {
            return Ok(index);
        }
        let (count, name) = (shards.len(), &self.name);
        say::note(format_args!("indexing {count} files in {name}"));
        let written = self.write(&path, (format, &shards), false);
        written.map_err(|e| match e.kind() {
            ErrorKind::System => {
                let fix = format!(
                    "`phalanx index {name} --output FILE` where you can write, and Stream::index(FILE)"
                );
                e.note("try", fix)
            }
            _ => e,
        })?;
        let changed = format!("the files in {name} changed while they were indexed");
        found().ok_or_else(|| Error::usage(changed))
    }

    /// The index beside the shards, if it is theirs; else one that is made in the cache.
    #[cfg(feature = "object-store")]
    fn remote_index(&self, remote: &Remote, format: Format, shards: &[Object]) -> Result<Index> {
        match remote.beside() {
            Ok(Some(index)) if index.is_of(shards) => return Ok(index),
            Err(e) if e.kind() != ErrorKind::Data => return Err(e),
            _ => {}
        }
        let mut parts = vec![&*self.name];
        parts.extend(shards.iter().flat_map(|shard| [&*shard.name, &shard.stamp]));
        let name = format!("{}.index", key(&parts));
        let path = remote.cache.dir.path().join(&name);
        let file = remote.cache.file(&name, None, &|| {
            let (count, name) = (shards.len(), &self.name);
            say::note(format_args!(
                "indexing {count} files in {name}, which reads them all; `phalanx index {name} --output {NAME}`, copied beside them, \
                 saves other hosts that"
            ));
            self.write(&path, (format, shards), false)?;
            open_regular(&path).map_err(|e| Error::not_opened("index", &path, e))
        })?;
        Index::open(&path.display().to_string(), file)
    }

    /// Makes the index, and writes it beside the shards or to `output`. Returns it and where it is.
    pub(super) fn make_index(&self, output: Option<&Path>, skips: bool) -> Result<(Index, String)> {
        if output.is_none() && self.folder.as_os_str().is_empty() {
            let what = format!("nothing is written to {}", self.name);
            let fix = "add `--output FILE`, and copy FILE to phalanx.index beside the shards";
            return Err(Error::usage(what).note("fix", fix));
        }
        let (format, shards) = self.shards()?;
        let path = output.map_or_else(|| self.folder.join(NAME), Path::to_owned);
        self.write(&path, (format, &shards), skips)?;
        Ok((read_index(&path)?, path.display().to_string()))
    }
}
