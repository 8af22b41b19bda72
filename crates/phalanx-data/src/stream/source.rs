//! The files of a place, and its index.

use std::fs::File;
use std::path::Path;

use phalanx_base::files::open_regular;
use phalanx_base::{Error, ErrorKind, Result, say};

use super::cache::{Cache, key};
use super::index::{self, Index, NAME};
use super::place::{Object, Place};
use super::shard::{self, Format, Scan};

/// The files of a place.
pub(super) struct Source {
    /// As it was typed.
    pub(super) name: String,
    pub(super) place: Place,
    /// Of an object store's files. A folder needs none, but may have its index there.
    cache: Option<Cache>,
}

fn read_index(path: &Path) -> Result<Index> {
    let file = open_regular(path).map_err(|e| Error::not_opened("index", path, e))?;
    Index::open(&path.display().to_string(), file)
}

impl Source {
    pub(super) fn new(name: &str, cache: (Option<&Path>, u64)) -> Result<Source> {
        let (name, place) = (name.to_owned(), Place::parse(name)?);
        let cache = Cache::open(cache.0, cache.1);
        let cache = match place.is_remote() {
            true => Some(cache?),
            false => cache.ok(),
        };
        Ok(Source { name, place, cache })
    }

    /// Where an object store's files are kept.
    pub(super) fn cache(&self) -> Option<&Cache> {
        self.cache.as_ref().filter(|_| self.place.is_remote())
    }

    /// Opens a file, fetched if it is not in the cache. `None` where another process fetches it and this one does not `wait`.
    pub(super) fn try_file(&self, object: &Object, wait: bool) -> Result<Option<File>> {
        match (&self.place, &self.cache) {
            (Place::Folder(folder), _) => {
                let path = folder.join(&object.name);
                let file = open_regular(&path).map_err(|e| Error::not_opened("shard", &path, e))?;
                let about = file.metadata();
                let about = about.map_err(|e| Error::io("cannot read", &path, e))?;
                if about.len() == object.bytes {
                    return Ok(Some(file));
                }
                let (path, has, had) = (path.display(), about.len(), object.bytes);
                let what = format!("{path} has {has} bytes; it had {had} when its index was made");
                let fix = "start again, which makes the index again";
                Err(Error::data(what).note("fix", fix))
            }
            #[cfg(feature = "object-store")]
            (Place::Remote(remote), Some(cache)) => {
                let (name, stamp, bytes) = (&object.name, &object.stamp, object.bytes);
                let key = key(&format!("{}\n{name}\n{stamp}\n{bytes}", self.name));
                let fetch = |out: &File| remote.get(object, out);
                cache.shard(&key, &self.path(object), bytes, wait, &fetch)
            }
            #[cfg(feature = "object-store")]
            (Place::Remote(_), None) => Err(Error::internal("an object store without a cache")),
        }
    }

    /// Opens a file, fetched if it is not in the cache.
    pub(super) fn file(&self, object: &Object) -> Result<File> {
        let file = self.try_file(object, true)?;
        file.ok_or_else(|| Error::internal("a file was not waited for"))
    }

    fn path(&self, object: &Object) -> String {
        format!("{}/{}", self.name, object.name)
    }

    fn scan(&self, format: Format, object: &Object) -> Result<Scan> {
        let file = self.file(object)?;
        shard::scan(format, &self.path(object), &file, object.bytes)
    }

    /// The shards now, and their format.
    fn shards(&self) -> Result<(Format, Vec<Object>)> {
        index::shards_of(&self.name, self.place.list()?)
    }

    /// Opens the index: the one in `given`, else the one beside the shards. That of a folder is made if it is missing or not
    /// that of its files any more.
    pub(super) fn index(&self, given: Option<&Path>) -> Result<Index> {
        let name = &self.name;
        match (&self.place, given) {
            (place, Some(path)) => {
                let index = read_index(path)?;
                if place.is_remote() || index.is_of(&self.shards()?.1) {
                    return Ok(index);
                }
                let what = format!("{} is not the index of {name} as it is now", path.display());
                Err(Error::usage(what).note("fix", "make it again with `phalanx index`"))
            }
            (Place::Folder(folder), None) => self.index_of(folder),
            #[cfg(feature = "object-store")]
            (Place::Remote(remote), None) => {
                let fix = format!("make it once with `phalanx index {name}`");
                let none = || Error::usage(format!("{name} has no {NAME}")).note("fix", fix);
                let object = remote.head(NAME)?.ok_or_else(none)?;
                Index::open(&self.path(&object), self.file(&object)?)
            }
        }
    }

    /// The index of a folder, made by one process of the host while the others wait.
    fn index_of(&self, folder: &Path) -> Result<Index> {
        let (format, shards) = self.shards()?;
        let real = folder.canonicalize();
        let real = real.map_err(|e| Error::io("cannot read", folder, e))?;
        let key = key(&real.to_string_lossy());
        let beside = folder.join(NAME);
        let elsewhere = self.cache.as_ref();
        let elsewhere = elsewhere.map(|cache| cache.dir.path().join(format!("{key}.index")));
        let there = |path: &Path| read_index(path).ok().filter(|index| index.is_of(&shards));
        let found = || there(&beside).or_else(|| there(elsewhere.as_ref()?));
        if let Some(index) = found() {
            return Ok(index);
        }
        let lock = format!("{key}.lock");
        let held = self.cache.as_ref().map(|cache| cache.hold(&lock, true));
        let _held = held.transpose()?;
        let make = || {
            say::note(format_args!(
                "indexing {} files in {}",
                shards.len(),
                self.name
            ));
            let scan = |object: &Object| self.scan(format, object);
            let write = |path: &Path| index::write(path, format, &shards, false, &scan);
            match (write(&beside), &elsewhere) {
                // Others may read the folder only.
                (Err(e), Some(path)) if e.kind() == ErrorKind::System => write(path)?,
                (written, _) => written?,
            }
            let changed = format!("the files in {} changed while they were indexed", self.name);
            found().ok_or_else(|| Error::usage(changed))
        };
        let index = found().map_or_else(make, Ok);
        if let Some(cache) = &self.cache {
            cache.dir.remove(&lock)?;
        }
        index
    }

    /// Makes the index, and writes it beside the shards or to `output`. Returns it and where it is.
    pub(super) fn make_index(&self, output: Option<&Path>, skip: bool) -> Result<(Index, String)> {
        let (format, shards) = self.shards()?;
        let write = |path: &Path| {
            let scan = |object: &Object| self.scan(format, object);
            index::write(path, format, &shards, skip, &scan)?;
            Ok((read_index(path)?, path.display().to_string()))
        };
        match (&self.place, output) {
            (_, Some(path)) => write(path),
            (Place::Folder(folder), None) => write(&folder.join(NAME)),
            #[cfg(feature = "object-store")]
            (Place::Remote(remote), None) => {
                let temporary = self.cache.as_ref().map(|cache| cache.dir.path());
                let temporary = temporary.unwrap_or_else(|| Path::new("."));
                let temporary = temporary.join(format!("{}.index", key(&self.name)));
                let made = write(&temporary);
                let sent = made.and_then(|(index, _)| {
                    remote.put(NAME, &temporary)?;
                    Ok((index, format!("{}/{NAME}", self.name)))
                });
                let _ = std::fs::remove_file(&temporary);
                sent
            }
        }
    }
}
