//! A store in one file that several processes share.
//!
//! The file is a log of changes ([`log`]); each member replays what the others
//! have appended since it last looked. Two locks keep order, both of the kind
//! that the system releases when a process dies:
//!
//! * the data file, locked exclusively around every change and shared around
//!   every look;
//! * a sibling `NAME.lock`, locked shared by every member for its whole life.
//!   Whoever opens the store and finds no member alive starts afresh, so that
//!   the remains of a crashed job are never taken for keys of this one; the
//!   last member to leave removes both files. Both are decided while the data
//!   file is locked.
//!
//! *Guaranteed:* changes are atomic among processes that honour the locks, and
//! a file that is damaged or replaced is an error that says so. *Not
//! guaranteed:* survival of a power failure, as a rendezvous does not outlive
//! its job.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod lock;
mod log;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use phalanx_wire::store_msg::{Request, check_key};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::table::{Limits, Table};
use crate::{Error, ErrorKind, Result, Store};

/// Longest time that another process may hold a lock: one operation takes
/// microseconds, so this means a stopped process or a broken network disk.
const LOCK_WITHIN: Duration = Duration::from_secs(10);

/// First pause between looks for a missing key...
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// ...which grows to this.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Bytes replayed at once.
const CHUNK_BYTES: usize = 1 << 20;

/// A log longer than this, and several times longer than what it holds, is
/// written anew.
const COMPACT_ABOVE_BYTES: u64 = 8 << 20;
/// How many times longer.
const COMPACT_RATIO: u64 = 4;

/// A store in a file that several processes share, on one host or on a
/// network file system with working locks.
///
/// Waits look at the file every few milliseconds. Who may read and write the
/// file (mode 0600 when the store creates it) may read and write the store:
/// there is no token.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    /// As errors name it.
    place: String,
    /// Locked shared as long as this member lives.
    members: File,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    /// Tells this life of the file from the next.
    id: u64,
    table: Table,
    /// Bytes of the log that `table` reflects.
    at: u64,
}

/// Whether a path still leads to an open file.
#[derive(PartialEq, Eq)]
enum Leads {
    Same,
    Other,
    Gone,
}

impl FileStore {
    /// Opens the store at `path`, creating it if there is none, and joining it
    /// if other members are there. What is left of members that have all
    /// ended is discarded.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when the file is something else than a store (it
    /// is left alone) or is damaged while members are alive;
    /// [`ErrorKind::NoAnswer`] when another process holds a lock for 10 s;
    /// [`ErrorKind::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<FileStore> {
        Self::open_with(path, Limits::default())
    }

    /// As [`open`](Self::open), with other limits; all members must give the same.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(path: impl AsRef<Path>, limits: Limits) -> Result<FileStore> {
        let path = path.as_ref().to_owned();
        let place = format!("the store file {}", path.display());
        let lock_path = lock_path(&path);
        let start = Instant::now();
        loop {
            if start.elapsed() >= LOCK_WITHIN {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{place} was replaced again and again for {LOCK_WITHIN:?}: does something clean up that folder?"
                    ),
                ));
            }
            let members = open_file(&lock_path)?;
            let file = open_file(&path)?;
            lock::exclusive(&file, &place, LOCK_WITHIN)?;
            // The last member of another life may have removed the files
            // after we opened them: what we hold then is nobody else's.
            if leads_to(&path, &file)? != Leads::Same
                || leads_to(&lock_path, &members)? != Leads::Same
            {
                continue;
            }
            let alone = lock::try_exclusive(&members, &place)?;
            let id = if alone {
                let id = log::start(&file, &place)?;
                lock::release(&members, &place)?;
                id
            } else {
                log::read_header(&file, &place)?
            };
            lock::shared(&members, &place, LOCK_WITHIN)?;
            let mut inner = Inner {
                file,
                id,
                table: Table::new(limits),
                at: log::HEADER_BYTES,
            };
            inner.replay(&place)?;
            lock::release(&inner.file, &place)?;
            return Ok(FileStore {
                path,
                place,
                members,
                inner: Mutex::new(inner),
            });
        }
    }

    /// The path as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `act` on the up-to-date table with the file locked.
    fn locked<T>(&self, change: bool, act: impl FnOnce(&mut Inner) -> Result<T>) -> Result<T> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        loop {
            let left = LOCK_WITHIN.saturating_sub(start.elapsed());
            if change {
                lock::exclusive(&inner.file, &self.place, left)?;
            } else {
                lock::shared(&inner.file, &self.place, left)?;
            }
            match leads_to(&self.path, &inner.file)? {
                Leads::Same => break,
                Leads::Gone => {
                    lock::release(&inner.file, &self.place)?;
                    return Err(Error::new(
                        ErrorKind::Corrupt,
                        format!("{} was removed while it was in use", self.place),
                    ));
                }
                // Another member has written the log anew, or a stranger has
                // put a file there; the header tells which.
                Leads::Other => {
                    let file = open_file(&self.path)?;
                    lock::release(&inner.file, &self.place)?;
                    inner.file = file;
                    inner.table.clear();
                    inner.at = 0;
                }
            }
        }
        let result = inner
            .refresh(&self.place)
            .and_then(|()| act(&mut inner))
            .and_then(|value| {
                if change {
                    inner.compact_if_long(&self.path, &self.place)?;
                }
                Ok(value)
            });
        lock::release(&inner.file, &self.place)?;
        result
    }

    /// Looks again and again until all keys are there at once; then returns
    /// what `take` finds in the table.
    fn wait_for<T>(
        &self,
        keys: &[&str],
        timeout: Duration,
        take: impl Fn(&Table) -> T,
    ) -> Result<T> {
        let start = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            // Before the look: a key that came just in time is seen.
            let left = timeout.saturating_sub(start.elapsed());
            let found = self.locked(false, |inner| {
                let missing = inner.table.missing(keys.iter().copied());
                if missing.is_empty() {
                    return Ok(Ok(take(&inner.table)));
                }
                Ok(Err(missing.into_iter().map(str::to_owned).collect()))
            })?;
            match found {
                Ok(value) => return Ok(value),
                Err(missing) if left.is_zero() => {
                    return Err(Error::missing(&self.place, keys.len(), timeout, missing));
                }
                Err(_) => {}
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 3 / 2).min(LONGEST_PAUSE);
        }
    }

    fn checked(&self, key: &str, request: &Request<'_>) -> Result<()> {
        request.check().map_err(|e| Error::bad_request(key, e))
    }

    /// Stores one value: into the file first, then into the table.
    fn put(&self, inner: &mut Inner, key: &str, value: &[u8]) -> Result<()> {
        inner
            .table
            .check_set(key, value)
            .map_err(|failure| Error::failed(&self.place, key, failure))?;
        inner.append(&Request::Set { key, value }, &self.place)?;
        inner
            .table
            .set(key, value)
            .map_err(|failure| Error::failed(&self.place, key, failure))
    }
}

impl Inner {
    /// Catches up with what others have appended.
    fn refresh(&mut self, place: &str) -> Result<()> {
        if self.at == 0 {
            let id = log::read_header(&self.file, place)?;
            if id != self.id {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!(
                        "{place} was replaced by that of another job: give each job a file of its own"
                    ),
                ));
            }
            self.at = log::HEADER_BYTES;
        }
        self.replay(place)
    }

    fn replay(&mut self, place: &str) -> Result<()> {
        let meta = self.file.metadata();
        let end = meta.map_err(|e| Error::io(place, e))?.len();
        if end < self.at {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "{place} was truncated from {} to {end} bytes while it was in use",
                    self.at
                ),
            ));
        }
        let mut buffer = Vec::new();
        // Where the next read begins; what lies between `self.at` and here is
        // the incomplete record in the buffer.
        let mut read_at = self.at;
        while read_at < end {
            let want = usize::try_from(end - read_at)
                .unwrap_or(CHUNK_BYTES)
                .min(CHUNK_BYTES);
            let have = buffer.len();
            buffer.resize(have + want, 0);
            self.file
                .read_exact_at(&mut buffer[have..], read_at)
                .map_err(|e| Error::io(format_args!("reading {place}"), e))?;
            read_at += want as u64;
            let mut used = 0;
            while let Some(record) = log::next(&buffer[used..], place, self.at)? {
                log::apply(&mut self.table, &record.request, place, self.at)?;
                used += record.bytes;
                self.at += record.bytes as u64;
            }
            buffer.drain(..used);
        }
        if !buffer.is_empty() {
            return Err(log::truncated(place, self.at));
        }
        Ok(())
    }

    /// Appends one record, or nothing: a record that does not fit on the disk
    /// is cut off again.
    fn append(&mut self, request: &Request<'_>, place: &str) -> Result<()> {
        let record = log::encode(request).map_err(|e| {
            Error::new(ErrorKind::Internal, format!("writing {place}: {e}")).caused_by(e)
        })?;
        if let Err(e) = self.file.write_all_at(&record, self.at) {
            // Should this fail as well, the next look finds the half record
            // and says so.
            let _ = self.file.set_len(self.at);
            return Err(Error::io(format_args!("writing {place}"), e));
        }
        self.at += record.len() as u64;
        Ok(())
    }

    /// Writes a long log anew: into a sibling that then takes its name, so
    /// that a process killed here leaves the old log whole.
    fn compact_if_long(&mut self, path: &Path, place: &str) -> Result<()> {
        if self.at <= COMPACT_ABOVE_BYTES || self.at / COMPACT_RATIO <= self.table.bytes() {
            return Ok(());
        }
        let sibling = with_suffix(path, ".new");
        let fail = |e| Error::io(format_args!("rewriting {place}"), e);
        // A leftover of a killed process; nobody else writes here, as the
        // caller holds the lock.
        let _ = std::fs::remove_file(&sibling);
        let file = ours()
            .create_new(true)
            .open(&sibling)
            .map_err(|e| Error::io(format_args!("opening {}", sibling.display()), e))?;
        lock::exclusive(&file, place, LOCK_WITHIN)?;
        let mut bytes = log::header(self.id).to_vec();
        let mut at = 0;
        for (key, value) in self.table.iter() {
            let record = log::encode(&Request::Set { key, value }).map_err(|e| {
                Error::new(ErrorKind::Internal, format!("rewriting {place}: {e}")).caused_by(e)
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
        lock::release(&old, place)
    }
}

impl Drop for FileStore {
    /// The last member removes the files. Whatever fails here leaves them to
    /// the next job, which starts afresh.
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = lock::release(&self.members, &self.place);
        if lock::exclusive(&inner.file, &self.place, Duration::from_secs(1)).is_err() {
            return;
        }
        let lock_path = lock_path(&self.path);
        let ours = matches!(leads_to(&self.path, &inner.file), Ok(Leads::Same))
            && matches!(leads_to(&lock_path, &self.members), Ok(Leads::Same));
        if ours && matches!(lock::try_exclusive(&self.members, &self.place), Ok(true)) {
            // In this order: whoever creates a new data file in between must
            // find the lock that we still hold to be no longer the one at its
            // path. The other way round it would take us for a live member and
            // look for a header in its empty file.
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

/// How the store's own files are opened: for us alone, and never through a
/// link, which in a folder that others may write leads where they like.
fn ours() -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    options
}

/// Opens or creates a file of the store. One that belongs to another user is
/// refused: it would be that user's to change under us.
fn open_file(path: &Path) -> Result<File> {
    let fail = |e| Error::io(format_args!("opening {}", path.display()), e);
    let file = ours()
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(|e| {
            if e.raw_os_error() == Some(Errno::LOOP.raw_os_error()) {
                let why = format!(
                    "{} is a symbolic link: name the file itself",
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
            "{} belongs to user {}, and this is user {me}: name a file of your own",
            path.display(),
            about.uid()
        );
        return Err(Error::new(ErrorKind::Usage, why));
    }
    Ok(file)
}

fn leads_to(path: &Path, file: &File) -> Result<Leads> {
    let fail = |e| Error::io(format_args!("looking at {}", path.display()), e);
    let there = match std::fs::metadata(path) {
        Ok(there) => there,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Leads::Gone),
        Err(e) => return Err(fail(e)),
    };
    let here = file.metadata().map_err(fail)?;
    Ok(if there.ino() == here.ino() && there.dev() == here.dev() {
        Leads::Same
    } else {
        Leads::Other
    })
}

impl Store for FileStore {
    fn place(&self) -> &str {
        &self.place
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.checked(key, &Request::Set { key, value })?;
        self.locked(true, |inner| self.put(inner, key, value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.checked(key, &Request::TryGet { key })?;
        self.wait_for(&[key], timeout, |table| {
            table.get(key).unwrap_or_default().to_vec()
        })
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.checked(key, &Request::TryGet { key })?;
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
        self.checked(key, &Request::Add { key, delta })?;
        self.locked(true, |inner| {
            let sum = inner
                .table
                .sum(key, delta)
                .map_err(|failure| Error::failed(&self.place, key, failure))?;
            self.put(inner, key, sum.to_string().as_bytes())?;
            Ok(sum)
        })
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<Vec<u8>> {
        let request = Request::CompareSet {
            key,
            expected,
            desired,
        };
        self.checked(key, &request)?;
        self.locked(true, |inner| {
            if inner.table.matches(key, expected) {
                self.put(inner, key, desired)?;
            }
            Ok(inner.table.get(key).unwrap_or_default().to_vec())
        })
    }

    fn delete(&self, key: &str) -> Result<bool> {
        let request = Request::Delete { key };
        self.checked(key, &request)?;
        self.locked(true, |inner| {
            if !inner.table.contains(key) {
                return Ok(false);
            }
            inner.append(&request, &self.place)?;
            Ok(inner.table.delete(key))
        })
    }

    fn delete_prefix(&self, prefix: &str) -> Result<u64> {
        let request = Request::DeletePrefix { prefix };
        self.checked(prefix, &request)?;
        self.locked(true, |inner| {
            inner.append(&request, &self.place)?;
            Ok(inner.table.delete_prefix(prefix))
        })
    }
}
