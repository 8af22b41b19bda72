//! Shards in object stores and on HTTP servers.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path as FilePath;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use phalanx_base::{Error, ErrorKind, Result};
use phalanx_object::object_store::ObjectMeta;
use phalanx_object::{Objects, Patience, stamp};
use sha2::{Digest, Sha256};

use super::cache::Cache;
use super::index::{Index, NAME, Object, Shard};
use super::shard::{Format, scan};

/// A prefix of an object store, or a folder of an HTTP server.
pub(super) struct Remote {
    objects: Objects,
    /// Not an HTTP server.
    pub(super) lists: bool,
    /// The objects as they are now, by name.
    known: Mutex<HashMap<String, Object>>,
    pub(super) cache: Cache,
}

/// The name of a file in the cache, of what tells it from others; no name has an end of line.
pub(super) fn key(of: &[&str]) -> String {
    hex::encode(Sha256::digest(of.join("\n")))
}

impl Remote {
    /// # Errors
    ///
    /// `Usage` for a URL or variables that the store does not understand; those of the cache.
    pub(super) fn open(url: &str, cache: (Option<&FilePath>, Option<u64>)) -> Result<Remote> {
        let mut patience = Patience::default();
        if cfg!(test) {
            patience = Patience {
                silence: Duration::from_secs(1),
                total: Duration::from_secs(5),
                pause: Duration::from_millis(5),
            };
        }
        Ok(Remote {
            objects: Objects::open(url, patience)?,
            lists: !url.starts_with("http"),
            known: Mutex::default(),
            cache: Cache::open(cache.0, cache.1)?,
        })
    }

    /// The objects directly below the prefix, sorted by name. An HTTP server lists nothing: those of the index beside them.
    pub(super) fn list(&self) -> Result<Vec<Object>> {
        if !self.lists {
            let index = self.beside()?.map(|index| index.list.shards);
            let all = index.into_iter().flatten();
            return Ok(all.map(|shard| shard.object).collect());
        }
        let mut all: Vec<Object> = self.objects.top()?.iter().map(object).collect();
        all.retain(|object| !object.name.starts_with('.'));
        all.sort_by(|a, b| a.name.cmp(&b.name));
        let named = all.iter().cloned();
        self.known()
            .extend(named.map(|object| (object.name.clone(), object)));
        Ok(all)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Object>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The object `name` as it is now.
    fn now(&self, name: &str) -> Result<Object> {
        if let Some(object) = self.known().get(name) {
            return Ok(object.clone());
        }
        let found = self.objects.about(name)?;
        self.known().insert(name.to_owned(), object(&found));
        Ok(object(&found))
    }

    /// The index beside the shards. `None` where a listing does not have it.
    pub(super) fn beside(&self) -> Result<Option<Index>> {
        if self.lists && !self.known().contains_key(NAME) {
            return Ok(None);
        }
        let found = self.now(NAME).map_err(|e| match e.kind() {
            ErrorKind::Usage => e.note("perhaps", "an HTTP server lists no files: put the index of `phalanx index FOLDER` beside them"),
            _ => e,
        })?;
        // Where the server does not tell versions apart, it is fetched each time.
        let now = found
            .stamp
            .is_empty()
            .then(|| SystemTime::UNIX_EPOCH.elapsed());
        let file = self.cached(&found, &format!("{now:?}"), &|_| Ok(()))?;
        Index::open(&format!("{}/{NAME}", self.objects.url()), file).map(Some)
    }

    /// Opens a shard. That of an index whose version is not known to be this one is compared with its digest.
    pub(super) fn file(&self, object: &Object, of: Option<(Format, &Shard)>) -> Result<File> {
        let (there, url) = (self.now(&object.name)?, self.url(object));
        if there.bytes != object.bytes {
            return Err(changed(&url));
        }
        let of = of.filter(|_| there.stamp != object.stamp || there.stamp.is_empty());
        let digest = of.map_or("", |(_, shard)| &shard.digest);
        self.cached(&there, digest, &|file| match of {
            Some((format, shard))
                if scan(format, &url, file, object.bytes)?.digest != shard.digest =>
            {
                Err(changed(&url))
            }
            _ => Ok(()),
        })
    }

    fn cached(
        &self,
        object: &Object,
        salt: &str,
        check: &dyn Fn(&File) -> Result<()>,
    ) -> Result<File> {
        let url = self.url(object);
        let key = key(&[&url, &object.bytes.to_string(), &object.stamp, salt]);
        self.cache.shard(&key, (&url, object.bytes), &|file| {
            self.fetch(object, file)?;
            check(file)
        })
    }

    fn url(&self, object: &Object) -> String {
        format!("{}/{}", self.objects.url(), object.name)
    }

    fn fetch(&self, object: &Object, out: &File) -> Result<()> {
        let version = (object.bytes, &*object.stamp);
        let fetched = self.objects.fetch(&object.name, version, out);
        fetched.map_err(|e| match e.kind() {
            ErrorKind::Data => changed(&self.url(object)),
            _ => e,
        })
    }
}

fn object(about: &ObjectMeta) -> Object {
    Object {
        name: about.location.filename().unwrap_or_default().to_owned(),
        bytes: about.size,
        stamp: stamp(about),
    }
}

fn changed(url: &str) -> Error {
    let what = format!("{url} is not what it was when its index was made");
    Error::data(what).note("fix", "make the index again with `phalanx index`")
}
