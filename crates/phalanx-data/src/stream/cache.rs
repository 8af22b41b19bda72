//! Fetched files on this host's disk, shared by the processes of a user.
//!
//! | file | is |
//! |---|---|
//! | `KEY.shard` | a whole file of a store; its time of change is that of its last use |
//! | `KEY.index` | an index that was made here, removed after all others: it costs a read of all shards |
//! | `KEY.shard.PROCESS-TIME.part` | one that is being fetched, of its full length, locked by who writes it |
//! | `….lock` | locked by who fetches one of some files, or makes room; never removed |
//!
//! A file that is removed while somebody reads it stays readable until they close it.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use phalanx_base::env::{number, real_env};
use phalanx_base::files::{Dir, ask_lock};
use phalanx_base::{Error, ErrorKind, Result};

/// Holds 64 shards of 1 GiB, a usual size; a shuffle buffer needs some of them. Most disks have it to spare.
const LIMIT: u64 = 64 << 30;
/// How long a process waits for another one, before it does the work itself.
pub(super) const WAIT: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 600 });
/// Between two looks at what another process does.
const LOOK: Duration = Duration::from_millis(20);
/// For how long a file that is being written, and cannot be locked, may stay unchanged.
const IDLE: Duration = Duration::from_secs(3600);

pub(super) struct Cache {
    pub(super) dir: Dir,
    /// Most bytes of all its files.
    limit: u64,
}

/// A file of the cache. Files are removed in this order.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Kept {
    is_index: bool,
    /// When it was last used.
    used: Option<SystemTime>,
    bytes: u64,
    name: String,
    /// It is not complete.
    is_part: bool,
}

/// Whether a file with this name is an index, and whether it is not complete. `None` if it is not a file of a cache.
fn kind(name: &str) -> Option<(bool, bool)> {
    let (key, rest) = name.trim_start_matches('.').split_at_checked(64)?;
    let is_hex = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    let writer = |start, end| rest.strip_prefix(start)?.strip_suffix(end);
    let part = writer(".shard.", ".part").or_else(|| writer(".index.", ".tmp"));
    let is_number = |c: u8| c.is_ascii_digit() || c == b'-';
    let is_part = part.is_some_and(|writer: &str| writer.bytes().all(is_number));
    let is_ours = key.bytes().all(is_hex) && (is_part || matches!(rest, ".shard" | ".index"));
    is_ours.then_some((rest.starts_with(".index"), is_part))
}

impl Cache {
    /// The cache in `folder`, else the one that the environment names. Only this user can read it.
    ///
    /// # Errors
    ///
    /// `Usage` when others can change it, or no folder is known; `System`.
    pub(super) fn open(folder: Option<&Path>, limit: Option<u64>) -> Result<Cache> {
        let env = real_env();
        let named = |name: &str| Some(Path::new(env.get(name).filter(|path| !path.is_empty())?));
        let folder = folder.or_else(|| named("PHALANX_CACHE")).map(PathBuf::from);
        let folder = folder
            .or_else(|| Some(named("XDG_CACHE_HOME")?.join("phalanx")))
            .or_else(|| Some(named("HOME")?.join(".cache/phalanx")));
        let own = "set PHALANX_CACHE to a folder of your own";
        let none = || Error::usage("no folder for the cache of shards").note("fix", own);
        let folder = folder.ok_or_else(none)?.join("shards");
        let made = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder);
        made.map_err(|e| Error::io("cannot create folder", &folder, e).note("fix", own))?;
        let dir = Dir::open(&folder)?;
        if let Some(why) = dir.shared_with()? {
            let what = format!("the cache of shards {} {why}", folder.display());
            return Err(Error::usage(what).note("fix", own));
        }
        let set = number(&env, "PHALANX_CACHE_BYTES")?.map(|bytes| bytes as u64);
        let limit = set.or(limit).unwrap_or(LIMIT);
        Ok(Cache { dir, limit })
    }

    /// `cache of 64 GiB in PATH, 1.5 GiB used`.
    pub(super) fn describe(&self) -> String {
        let kept = self.kept().unwrap_or_default();
        let used = kept.iter().map(|file| file.bytes).sum();
        let [limit, used] = [self.limit, used].map(super::size);
        format!(
            "cache of {limit} in {}, {used} used",
            self.dir.path().display()
        )
    }

    /// Its files, in the order in which they are removed.
    fn kept(&self) -> Result<Vec<Kept>> {
        let file = |name: String| {
            let (is_index, is_part) = kind(&name)?;
            let about = fs::symlink_metadata(self.dir.path().join(&name)).ok()?;
            about.is_file().then(|| Kept {
                is_index,
                used: about.modified().ok(),
                bytes: about.len(),
                name,
                is_part,
            })
        };
        let mut kept: Vec<Kept> = self.dir.names()?.into_iter().filter_map(file).collect();
        kept.sort();
        Ok(kept)
    }

    /// Locks the file `name`. `None` where files cannot be locked, and when another process has it for [`WAIT`].
    fn lock(&self, name: &str) -> Result<Option<File>> {
        let (file, since) = (self.dir.open_private(name)?, Instant::now());
        loop {
            match ask_lock(&file) {
                Some(true) => return Ok(Some(file)),
                Some(false) if since.elapsed() < WAIT => sleep(LOOK),
                _ => return Ok(None),
            }
        }
    }

    /// Opens the file `name`, of this length if it is known. If it is missing, one process makes it, while others that want it wait.
    pub(super) fn file(
        &self,
        name: &str,
        bytes: Option<u64>,
        make: &dyn Fn() -> Result<File>,
    ) -> Result<File> {
        let found = || -> Result<Option<File>> {
            let is_whole =
                |file: &File| bytes.is_none() || file.metadata().ok().map(|it| it.len()) == bytes;
            let file = self.dir.open_read(name)?.filter(is_whole);
            // Where it cannot be set, files are removed in another order.
            let _ = file
                .as_ref()
                .map(|file| file.set_modified(SystemTime::now()));
            Ok(file)
        };
        if let Some(file) = found()? {
            return Ok(file);
        }
        let (start, kind) = (&name[..2], &name[name.len() - 5..]);
        let _lock = self.lock(&format!("{kind}-{start}.lock"))?;
        found()?.map_or_else(make, Ok)
    }

    /// Opens the shard of `key`, which `fetch` writes if it is missing; it is at `url` and has `bytes`.
    ///
    /// # Errors
    ///
    /// `Usage` when it does not fit; those of `fetch`; `Timeout`, `DiskFull` or `System`.
    pub(super) fn shard(
        &self,
        key: &str,
        (url, bytes): (&str, u64),
        fetch: &dyn Fn(&File) -> Result<()>,
    ) -> Result<File> {
        let name = format!("{key}.shard");
        self.file(&name, Some(bytes), &|| {
            if bytes > self.limit {
                let what = format!("{url} has {bytes} bytes, the cache may have {}", self.limit);
                let fix = "raise PHALANX_CACHE_BYTES or Stream::cache_limit, or make smaller shards";
                return Err(Error::usage(what).note("fix", fix));
            }
            let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
            let part = format!("{name}.{}-{now}.part", std::process::id());
            let written = || {
                let file = self.reserve(&part, bytes)?;
                fetch(&file)?;
                // Otherwise it may be blank after a power failure.
                let synced = file.sync_data();
                synced.map_err(|e| Error::io("cannot write", &self.dir.path().join(&part), e))?;
                self.dir.rename(&part, &name)?;
                Ok(file)
            };
            written().map_err(|e: Error| {
                let _ = self.dir.remove(&part);
                let fix = "set PHALANX_CACHE to a folder on a larger disk, or PHALANX_CACHE_BYTES to less than is free";
                match e.kind() {
                    ErrorKind::DiskFull => e.note("fix", fix),
                    _ => e,
                }
            })
        })
    }

    /// Creates the file `part` of this length, locked, after removing what killed processes have left, and the files that were
    /// not used for longest until all have at most the limit. Waits while others that are being fetched leave no room.
    fn reserve(&self, part: &str, bytes: u64) -> Result<File> {
        let since = Instant::now();
        loop {
            let lock = self.lock("room.lock")?;
            let mut kept = self.kept()?;
            let left = |of: &mut Kept| {
                let idle = of.used.and_then(|used| used.elapsed().ok());
                let file = || self.dir.open_read(&of.name).ok().flatten();
                let is_free = || !of.is_index && file().is_some_and(|f| ask_lock(&f) == Some(true));
                of.is_part && (idle.is_some_and(|idle| idle > IDLE) || is_free())
            };
            for file in kept.extract_if(.., left) {
                self.dir.remove(&file.name)?;
            }
            let sum = |sum: u64, file: &Kept| sum.saturating_add(file.bytes);
            let mut used = kept.iter().fold(bytes, sum);
            for file in kept.iter().filter(|file| !file.is_part) {
                if used > self.limit {
                    self.dir.remove(&file.name)?;
                    used -= file.bytes;
                }
            }
            if used <= self.limit {
                let file = self.dir.open_private(part)?;
                ask_lock(&file);
                let failed = |e| Error::io("cannot write", &self.dir.path().join(part), e);
                return file.set_len(bytes).map_err(failed).map(|()| file);
            }
            drop(lock);
            if since.elapsed() > 3 * WAIT {
                let what = format!(
                    "{} is full of shards that are being fetched",
                    self.dir.path().display()
                );
                let fix = "raise PHALANX_CACHE_BYTES or Stream::cache_limit";
                return Err(Error::new(ErrorKind::Timeout, what).note("fix", fix));
            }
            sleep(LOOK);
        }
    }
}
