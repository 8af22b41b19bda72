//! A store in a file that several processes share.
//!
//! The file is a log of changes ([`log`]); each member replays the changes that the
//! others have appended. There are two locks, which the system releases when a
//! process dies:
//!
//! * the data file, locked exclusively for every change and shared for every read;
//! * a file `NAME.lock` next to it, locked shared by every member until it ends. A
//!   member that opens the store and finds no other starts an empty store, so keys of a
//!   crashed job are never used; the last member to leave removes both files. Both
//!   happen while the data file is locked.
//!
//! *Guaranteed:* changes are atomic among processes that use the locks, and a
//! damaged or replaced file is an error. *Not guaranteed:* survival of a power
//! failure.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod lock;
mod log;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_wire::store_msg::{Failure, Request, check_key};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::table::{Limits, Table};
use crate::{Error, ErrorKind, Result, Store};

/// Timeout for a lock. An operation takes microseconds, so a longer wait means a
/// stopped process or a broken network file system.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// First pause between two reads for a missing key...
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// ...which grows up to this.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Bytes replayed at once.
const CHUNK_BYTES: usize = 1 << 20;

/// A log is rewritten when it is longer than this, and [`COMPACT_RATIO`] times as
/// long as its keys and values.
const COMPACT_ABOVE_BYTES: u64 = 8 << 20;
/// See [`COMPACT_ABOVE_BYTES`].
const COMPACT_RATIO: u64 = 4;

/// A store in a file that several processes share, on one host or on a
/// network file system with working locks.
///
/// Waits read the file every few milliseconds. There is no token: access to the
/// file (mode 0600 when the store creates it) is access to the store.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    /// Name of the store in messages.
    location: String,
    /// Locked shared as long as this member lives.
    members: File,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    /// Identifies this start of the file.
    id: u64,
    table: Table,
    /// Number of bytes of the log that are applied to `table`.
    at: u64,
}

/// Whether a path still refers to an open file.
#[derive(PartialEq, Eq)]
enum PathState {
    Same,
    Other,
    Gone,
}

impl FileStore {
    /// Opens the store at `path`. Creates it if it does not exist, and joins it if
    /// it has members. Keys of members that have all ended are discarded.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when the file is not a store file (it is not changed)
    /// or is damaged while it has members;
    /// [`ErrorKind::NoAnswer`] when another process holds a lock for 10 s;
    /// [`ErrorKind::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<FileStore> {
        Self::open_with(path, Limits::default())
    }

    /// As [`open`](Self::open), with other limits. All members must use the same ones.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(path: impl AsRef<Path>, limits: Limits) -> Result<FileStore> {
        let path = path.as_ref().to_owned();
        let location = format!("the store file {}", path.display());
        let lock_path = lock_path(&path);
        let start = Instant::now();
        loop {
            if start.elapsed() >= LOCK_TIMEOUT {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{location} was replaced repeatedly for {LOCK_TIMEOUT:?}; does another program clean up its folder?"
                    ),
                ));
            }
            let members = open_file(&lock_path)?;
            let file = open_file(&path)?;
            lock::exclusive(&file, &location, LOCK_TIMEOUT)?;
            // The last member of the previous store may have removed the files after
            // this process opened them; then no other process uses the open ones.
            if path_state(&path, &file)? != PathState::Same
                || path_state(&lock_path, &members)? != PathState::Same
            {
                continue;
            }
            let alone = lock::try_exclusive(&members, &location)?;
            let id = if alone {
                let id = log::start(&file, &location)?;
                lock::release(&members, &location)?;
                id
            } else {
                log::read_header(&file, &location)?
            };
            lock::shared(&members, &location, LOCK_TIMEOUT)?;
            let mut inner = Inner {
                file,
                id,
                table: Table::new(limits),
                at: log::HEADER_BYTES,
            };
            inner.replay(&location)?;
            lock::release(&inner.file, &location)?;
            return Ok(FileStore {
                path,
                location,
                members,
                inner: Mutex::new(inner),
            });
        }
    }

    /// The path as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locks the file, updates the table and runs `act` on it.
    fn locked<T>(&self, change: bool, act: impl FnOnce(&mut Inner) -> Result<T>) -> Result<T> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        loop {
            let left = LOCK_TIMEOUT.saturating_sub(start.elapsed());
            if change {
                lock::exclusive(&inner.file, &self.location, left)?;
            } else {
                lock::shared(&inner.file, &self.location, left)?;
            }
            match path_state(&self.path, &inner.file)? {
                PathState::Same => break,
                PathState::Gone => {
                    lock::release(&inner.file, &self.location)?;
                    return Err(Error::new(
                        ErrorKind::Corrupt,
                        format!("{} was removed while in use", self.location),
                    ));
                }
                // Another member has rewritten the log, or another program has
                // put a file there; the header shows which.
                PathState::Other => {
                    let file = open_file(&self.path)?;
                    lock::release(&inner.file, &self.location)?;
                    inner.file = file;
                    inner.table.clear();
                    inner.at = 0;
                }
            }
        }
        let result = inner
            .refresh(&self.location)
            .and_then(|()| act(&mut inner))
            .and_then(|value| {
                if change {
                    inner.compact_if_long(&self.path, &self.location)?;
                }
                Ok(value)
            });
        lock::release(&inner.file, &self.location)?;
        result
    }

    /// Waits until all keys exist at once; then returns `take` of the table.
    fn wait_for<T>(
        &self,
        keys: &[&str],
        timeout: Duration,
        take: impl Fn(&Table) -> T,
    ) -> Result<T> {
        let found = self.poll(timeout, |table| {
            let missing = table.missing(keys.iter().copied());
            if missing.is_empty() {
                return Ok(take(table));
            }
            Err(missing.into_iter().map(str::to_owned).collect())
        })?;
        found.map_err(|missing| Error::missing(&self.location, keys.len(), timeout, missing))
    }

    /// Reads the table until `take` returns a value, up to `timeout`.
    fn poll<T, N>(
        &self,
        timeout: Duration,
        take: impl Fn(&Table) -> Result<T, N>,
    ) -> Result<Result<T, N>> {
        let start = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            // Before reading, so that a key that appears just in time is found.
            let left = timeout.saturating_sub(start.elapsed());
            let found = self.locked(false, |inner| Ok(take(&inner.table)))?;
            if found.is_ok() || left.is_zero() {
                return Ok(found);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 3 / 2).min(LONGEST_PAUSE);
        }
    }

    /// The error of a change that the table refused.
    fn failed(&self, key: &str) -> impl Fn(Failure) -> Error {
        move |failure| Error::failed(&self.location, key, failure)
    }

    /// Stores a value in the file, then in the table.
    fn put(&self, inner: &mut Inner, key: &str, value: &[u8]) -> Result<()> {
        inner
            .table
            .check_set(key, value)
            .map_err(self.failed(key))?;
        inner.append(&Request::Set { key, value }, &self.location)?;
        inner.table.set(key, value).map_err(self.failed(key))
    }
}

impl Inner {
    /// Applies the changes that other members have appended.
    fn refresh(&mut self, location: &str) -> Result<()> {
        if self.at == 0 {
            let id = log::read_header(&self.file, location)?;
            if id != self.id {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!("{location} was replaced by another job; give each job its own file"),
                ));
            }
            self.at = log::HEADER_BYTES;
        }
        self.replay(location)
    }

    fn replay(&mut self, location: &str) -> Result<()> {
        let meta = self.file.metadata();
        let end = meta.map_err(|e| Error::io(location, e))?.len();
        if end < self.at {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "{location} was truncated from {} to {end} bytes while in use",
                    self.at
                ),
            ));
        }
        let mut buffer = Vec::new();
        // Offset of the next read. The bytes from `self.at` to here are the
        // incomplete record in the buffer.
        let mut read_at = self.at;
        while read_at < end {
            let want = usize::try_from(end - read_at)
                .unwrap_or(CHUNK_BYTES)
                .min(CHUNK_BYTES);
            let have = buffer.len();
            buffer.resize(have + want, 0);
            self.file
                .read_exact_at(&mut buffer[have..], read_at)
                .map_err(|e| Error::io(format_args!("reading {location}"), e))?;
            read_at += want as u64;
            let mut used = 0;
            while let Some(record) = log::next(&buffer[used..], location, self.at)? {
                log::apply(&mut self.table, &record.request, location, self.at)?;
                used += record.bytes;
                self.at += record.bytes as u64;
            }
            buffer.drain(..used);
        }
        if !buffer.is_empty() {
            return Err(log::truncated(location, self.at));
        }
        Ok(())
    }

    /// Appends one record. A record that does not fit on the disk is removed again.
    fn append(&mut self, request: &Request<'_>, location: &str) -> Result<()> {
        let record = log::encode(request).map_err(|e| {
            Error::new(ErrorKind::Internal, format!("writing {location}: {e}")).caused_by(e)
        })?;
        if let Err(e) = self.file.write_all_at(&record, self.at) {
            // If this fails as well, the next read reports the incomplete record.
            let _ = self.file.set_len(self.at);
            return Err(Error::io(format_args!("writing {location}"), e));
        }
        self.at += record.len() as u64;
        Ok(())
    }

    /// Rewrites a long log: into a second file that is then renamed, so that a
    /// process killed here leaves the old log intact.
    fn compact_if_long(&mut self, path: &Path, location: &str) -> Result<()> {
        if self.at <= COMPACT_ABOVE_BYTES || self.at / COMPACT_RATIO <= self.table.bytes() {
            return Ok(());
        }
        let sibling = with_suffix(path, ".new");
        let fail = |e| Error::io(format_args!("rewriting {location}"), e);
        // Left by a killed process. The caller holds the lock, so no other process
        // writes it.
        let _ = std::fs::remove_file(&sibling);
        let file = own_file_options()
            .create_new(true)
            .open(&sibling)
            .map_err(|e| Error::io(format_args!("opening {}", sibling.display()), e))?;
        lock::exclusive(&file, location, LOCK_TIMEOUT)?;
        let mut bytes = log::header(self.id).to_vec();
        let mut at = 0;
        for (key, value) in self.table.iter() {
            let record = log::encode(&Request::Set { key, value }).map_err(|e| {
                Error::new(ErrorKind::Internal, format!("rewriting {location}: {e}")).caused_by(e)
            })?;
            bytes.extend_from_slice(&record);
            if bytes.len() >= CHUNK_BYTES {
                file.write_all_at(&bytes, at).map_err(fail)?;
                at += bytes.len() as u64;
                bytes.clear();
            }
        }
        file.write_all_at(&bytes, at).map_err(fail)?;
        at += bytes.len() as u64;
        std::fs::rename(&sibling, path).map_err(fail)?;
        let old = std::mem::replace(&mut self.file, file);
        self.at = at;
        lock::release(&old, location)
    }
}

impl Drop for FileStore {
    /// The last member removes the files. If that fails, they remain, and the next
    /// job starts an empty store.
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = lock::release(&self.members, &self.location);
        if lock::exclusive(&inner.file, &self.location, Duration::from_secs(1)).is_err() {
            return;
        }
        let lock_path = lock_path(&self.path);
        let ours = matches!(path_state(&self.path, &inner.file), Ok(PathState::Same))
            && matches!(path_state(&lock_path, &self.members), Ok(PathState::Same));
        if ours && matches!(lock::try_exclusive(&self.members, &self.location), Ok(true)) {
            // In this order: a process that creates a new data file in between
            // must find another lock file than the one held here. Otherwise it
            // would take this process for a live member and read a header from its
            // empty file.
            let _ = std::fs::remove_file(&lock_path);
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn lock_path(path: &Path) -> PathBuf {
    with_suffix(path, ".lock")
}

/// Options for the store's own files: private, and never through a symbolic link,
/// which other users could place in a shared folder.
fn own_file_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    options
}

/// Opens or creates a file of the store. A file of another user is refused, since
/// that user could change it.
fn open_file(path: &Path) -> Result<File> {
    let fail = |e| Error::io(format_args!("opening {}", path.display()), e);
    let file = own_file_options()
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(|e| {
            if e.raw_os_error() == Some(Errno::LOOP.raw_os_error()) {
                let why = format!(
                    "{} is a symbolic link; name the file itself",
                    path.display()
                );
                return Error::new(ErrorKind::Usage, why).caused_by(e);
            }
            fail(e)
        })?;
    let about = file.metadata().map_err(fail)?;
    if !about.is_file() {
        let why = format!("{} is not a file", path.display());
        return Err(Error::new(ErrorKind::Usage, why));
    }
    let me = rustix::process::geteuid().as_raw();
    if about.uid() != me && me != 0 {
        let why = format!(
            "{} belongs to user {}, but this is user {me}; name your own file",
            path.display(),
            about.uid()
        );
        return Err(Error::new(ErrorKind::Usage, why));
    }
    Ok(file)
}

fn path_state(path: &Path, file: &File) -> Result<PathState> {
    let fail = |e| {
        Error::io(
            format_args!("reading the metadata of {}", path.display()),
            e,
        )
    };
    let there = match std::fs::metadata(path) {
        Ok(there) => there,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(PathState::Gone),
        Err(e) => return Err(fail(e)),
    };
    let here = file.metadata().map_err(fail)?;
    Ok(if there.ino() == here.ino() && there.dev() == here.dev() {
        PathState::Same
    } else {
        PathState::Other
    })
}

impl Store for FileStore {
    fn location(&self) -> &str {
        &self.location
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        Error::check(key, &Request::Set { key, value })?;
        self.locked(true, |inner| self.put(inner, key, value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        Error::check(key, &Request::TryGet { key })?;
        self.wait_for(&[key], timeout, |table| {
            table.get(key).unwrap_or_default().to_vec()
        })
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Error::check(key, &Request::TryGet { key })?;
        self.locked(false, |inner| Ok(inner.table.get(key).map(<[u8]>::to_vec)))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        for key in keys {
            check_key(key).map_err(|e| Error::bad_request(key, e))?;
        }
        if keys.is_empty() {
            return Ok(());
        }
        self.wait_for(keys, timeout, |_| ())
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        Error::check(key, &Request::Add { key, delta })?;
        self.locked(true, |inner| {
            let sum = inner.table.sum(key, delta).map_err(self.failed(key))?;
            self.put(inner, key, sum.to_string().as_bytes())?;
            Ok(sum)
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<u64> {
        Error::check(key, &Request::Append { key, value })?;
        self.locked(true, |inner| {
            let value = inner.table.appended(key, value).map_err(self.failed(key))?;
            self.put(inner, key, &value)?;
            Ok(value.len() as u64)
        })
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        let request = Request::CompareSet {
            key,
            expected,
            desired,
        };
        Error::check(key, &request)?;
        self.locked(true, |inner| {
            if inner.table.matches(key, expected) {
                self.put(inner, key, desired)?;
            }
            Ok(inner.table.get(key).unwrap_or_default().to_vec())
        })
    }

    fn delete(&self, key: &str) -> Result<bool> {
        let request = Request::Delete { key };
        Error::check(key, &request)?;
        self.locked(true, |inner| {
            if !inner.table.contains(key) {
                return Ok(false);
            }
            inner.append(&request, &self.location)?;
            Ok(inner.table.delete(key))
        })
    }

    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        let request = Request::DeletePrefix { prefix };
        Error::check(prefix, &request)?;
        self.locked(true, |inner| {
            inner.append(&request, &self.location)?;
            Ok(inner.table.delete_prefix(prefix))
        })
    }

    fn queue_push(&self, queue: &str, value: &[u8]) -> Result<()> {
        Error::check(queue, &Request::QueuePush { queue, value })?;
        self.locked(true, |inner| {
            let key = inner
                .table
                .next_element(queue)
                .map_err(self.failed(queue))?;
            self.put(inner, &key, value)
        })
    }

    fn queue_pop(&self, queue: &str, timeout: Duration) -> Result<Vec<u8>> {
        Error::check(queue, &Request::QueueLen { queue })?;
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            self.poll(left, |table| table.first_element(queue).ok_or(()))?
                .map_err(|()| Error::empty(&self.location, queue, timeout))?;
            // Another member may take it before this one has the exclusive lock.
            let popped = self.locked(true, |inner| {
                let first = inner.table.first_element(queue);
                if let Some((key, _)) = &first {
                    inner.append(&Request::Delete { key }, &self.location)?;
                    inner.table.delete(key);
                }
                Ok(first)
            })?;
            if let Some((_, value)) = popped {
                return Ok(value);
            }
        }
    }

    fn queue_len(&self, queue: &str) -> Result<u64> {
        Error::check(queue, &Request::QueueLen { queue })?;
        self.locked(false, |inner| Ok(inner.table.queue_len(queue)))
    }
}
