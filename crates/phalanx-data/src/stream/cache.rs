//! A folder of fetched shards, shared by the processes of a user on a host.
//!
//! | file | is |
//! |---|---|
//! | `KEY.shard` | a complete shard; its time of change is that of its last use |
//! | `KEY.part` | one that is being fetched, locked by who fetches it; without a lock, what a killed process has left |
//! | `KEY.index` | the index of a folder that cannot be written |
//! | `lock` | locked while room is made |
//!
//! A shard that is removed while somebody reads it stays readable until they close it.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use phalanx_base::files::{Dir, folder_of, try_lock};
use phalanx_base::{Error, Result};
use sha2::{Digest, Sha256};

/// Between two looks at what another process does.
const LOOK: Duration = Duration::from_millis(20);

pub(super) struct Cache {
    pub(super) dir: Dir,
    /// Most bytes of all shards.
    pub(super) limit: u64,
}

/// What files of something are called here.
pub(super) fn key(of: &str) -> String {
    hex::encode(&Sha256::digest(of)[..16])
}

/// The folder that is used where none is named.
fn default_folder() -> Result<PathBuf> {
    let named = |name| std::env::var_os(name).filter(|path| !path.is_empty());
    let cache = named("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| named("HOME").map(|home| Path::new(&home).join(".cache")));
    let cache = cache.map(|cache| cache.join("phalanx/streams"));
    cache.ok_or_else(|| {
        Error::usage("no folder for a cache: neither XDG_CACHE_HOME nor HOME is set")
    })
}

impl Cache {
    /// The cache in `folder`, which is created, readable by this user only.
    ///
    /// # Errors
    ///
    /// `Usage` when other users can change it, or no folder is known; `System`.
    pub(super) fn open(folder: Option<&Path>, limit: u64) -> Result<Cache> {
        let folder = folder.map_or_else(default_folder, |folder| Ok(folder.to_owned()))?;
        let made = fs::create_dir_all(folder_of(&folder));
        let made = made.and_then(|()| match DirBuilder::new().mode(0o700).create(&folder) {
            Err(_) if folder.is_dir() => Ok(()),
            made => made,
        });
        made.map_err(|e| Error::io("cannot create folder", &folder, e))?;
        let dir = Dir::open(&folder)?;
        if let Some(why) = dir.shared_with()? {
            let what = format!("the cache {} {why}", folder.display());
            return Err(Error::usage(what).note("try", "a folder of your own"));
        }
        Ok(Cache { dir, limit })
    }

    /// Opens and locks the file `name`, which is removed by who is done with it. `None` if another process has it locked and
    /// this one does not `wait`.
    pub(super) fn hold(&self, name: &str, wait: bool) -> Result<Option<File>> {
        loop {
            let file = self.dir.open_private(name)?;
            match try_lock(&file) {
                true if self.dir.is_at(&file, name) => return Ok(Some(file)),
                // It was removed before it was locked.
                true => continue,
                false if !wait => return Ok(None),
                false => sleep(LOOK),
            }
        }
    }

    /// Opens the shard called `key`, which is at `at` and has `bytes`. If it is not there, `fetch` writes it, while other processes that want it wait.
    /// `None` where another process fetches it and this one does not `wait`.
    ///
    /// # Errors
    ///
    /// `Usage` when it is larger than the cache; those of `fetch`; `DiskFull` or `System`.
    pub(super) fn shard(
        &self,
        key: &str,
        at: &str,
        bytes: u64,
        wait: bool,
        fetch: &dyn Fn(&File) -> Result<()>,
    ) -> Result<Option<File>> {
        let (name, part) = (format!("{key}.shard"), format!("{key}.part"));
        if let Some(file) = self.complete(&name, bytes)? {
            return Ok(Some(file));
        }
        if bytes > self.limit {
            let what = format!(
                "{at} has {bytes} bytes, but the cache may have {}",
                self.limit
            );
            return Err(Error::usage(what).note("try", "a larger cache"));
        }
        let Some(file) = self.hold(&part, wait)? else {
            return Ok(None);
        };
        let fetched = || match self.complete(&name, bytes)? {
            // By whom this one waited for.
            Some(complete) => {
                self.dir.remove(&part)?;
                Ok(complete)
            }
            None => {
                let failed = |e| Error::io("cannot write", &self.dir.path().join(&part), e);
                self.make_room(bytes, &file, &part)?;
                fetch(&file)?;
                // Otherwise it may be blank after a power failure.
                file.sync_data().map_err(failed)?;
                self.dir.rename(&part, &name)?;
                file.try_clone().map_err(failed)
            }
        };
        let fetched = fetched();
        if fetched.is_err() {
            let _ = self.dir.remove(&part);
        }
        fetched.map(Some)
    }

    fn complete(&self, name: &str, bytes: u64) -> Result<Option<File>> {
        let Some(file) = self.dir.open_read(name)? else {
            return Ok(None);
        };
        if !file.metadata().is_ok_and(|about| about.len() == bytes) {
            self.dir.remove(name)?;
            return Ok(None);
        }
        // Without it, shards are removed in another order.
        let _ = file.set_modified(SystemTime::now());
        Ok(Some(file))
    }

    /// Gives the locked file `part` its length, after removing the shards that were not used for longest, and what killed
    /// processes have left. *Blocks* while the shards that others fetch leave no room.
    fn make_room(&self, bytes: u64, file: &File, part: &str) -> Result<()> {
        loop {
            let lock = self.dir.open_private("lock")?;
            while !try_lock(&lock) {
                sleep(LOOK);
            }
            let (mut used, mut shards) = (bytes, Vec::new());
            for name in self.dir.names()? {
                if name == part || !name.ends_with(".part") && !name.ends_with(".shard") {
                    continue;
                }
                if name.ends_with(".part")
                    && let Some(_left) = self.hold(&name, false)?
                {
                    self.dir.remove(&name)?;
                } else if let Ok(about) = fs::metadata(self.dir.path().join(&name)) {
                    used = used.saturating_add(about.len());
                    if name.ends_with(".shard") {
                        shards.push((about.modified().ok(), about.len(), name));
                    }
                }
            }
            shards.sort();
            for (_, length, name) in shards {
                if used <= self.limit {
                    break;
                }
                self.dir.remove(&name)?;
                used -= length;
            }
            if used <= self.limit {
                let failed = |e| Error::io("cannot write", &self.dir.path().join(part), e);
                return file.set_len(bytes).map_err(failed);
            }
            drop(lock);
            sleep(LOOK);
        }
    }
}
