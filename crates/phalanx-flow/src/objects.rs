//! Files and folders by the SHA-256 of their content.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use phalanx_base::error::{Error, ErrorKind, Result};
use phalanx_base::files::{create_folder, read_pieces};
use phalanx_base::lock;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::spec::Type;

/// Two changes of a file within this time may leave the same time of change.
const TICK: Duration = Duration::from_millis(20);

/// Reading this many bytes again takes longer than a [`TICK`].
const LARGE: u64 = 64 << 20;

/// A file or folder in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// `file` or `folder`.
    #[serde(rename = "type")]
    pub kind: Type,
    /// Of a file: SHA-256 of its bytes. Of a folder: that of its entries' names and SHA-256.
    pub sha256: String,
    /// Bytes of all files in it.
    pub bytes: u64,
}

/// The content of a path when it had this stamp.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    stamp: String,
    object: Object,
}

#[derive(Debug, Default)]
struct Memory {
    known: BTreeMap<PathBuf, Known>,
    /// Paths whose entry changed since [`Objects::changes`].
    changed: BTreeSet<PathBuf>,
}

/// The folder `objects` of a store, and `tmp` next to it.
#[derive(Debug)]
pub(crate) struct Objects {
    root: PathBuf,
    tmp: PathBuf,
    memory: Mutex<Memory>,
    /// Locked while an object is put at its place.
    placing: Mutex<()>,
    names: AtomicU64,
}

impl Objects {
    pub fn new(store: &Path) -> Objects {
        Objects {
            root: store.join("objects"),
            tmp: store.join("tmp"),
            memory: Mutex::default(),
            placing: Mutex::default(),
            names: AtomicU64::new(0),
        }
    }

    pub fn path(&self, object: &Object) -> PathBuf {
        let (group, _) = object.sha256.split_at(2.min(object.sha256.len()));
        self.root.join(group).join(&object.sha256)
    }

    /// A new path in `tmp`.
    fn tmp(&self, name: &str) -> Result<PathBuf> {
        create_folder(&self.tmp)?;
        loop {
            let number = self.names.fetch_add(1, Ordering::Relaxed);
            let path = self.tmp.join(format!("{name}-{number}"));
            if path.symlink_metadata().is_err() {
                return Ok(path);
            }
        }
    }

    /// Removes what a killed engine left. Only the engine that has the store's lock may call it.
    pub fn clear_tmp(&self) -> Result<()> {
        remove_all(&self.tmp).map_err(|error| cannot("remove", &self.tmp, error))
    }

    /// Remembers what was known of paths before.
    pub fn learn(&self, known: impl IntoIterator<Item = (PathBuf, Known)>) {
        lock(&self.memory).known.extend(known);
    }

    /// What is known of paths that were read, or removed (`None`), since the last call.
    pub fn changes(&self) -> Vec<(PathBuf, Option<Known>)> {
        let mut memory = lock(&self.memory);
        let changed = std::mem::take(&mut memory.changed);
        let entry = |path: PathBuf| {
            let known = memory.known.get(&path).cloned();
            (path, known)
        };
        changed.into_iter().map(entry).collect()
    }

    fn remember(&self, path: &Path, read: Option<(Stamp, &Object)>) {
        let mut memory = lock(&self.memory);
        memory.changed.insert(path.to_owned());
        match read {
            Some((stamp, object)) => {
                let (stamp, object) = (stamp.sum, object.clone());
                let known = Known { stamp, object };
                memory.known.insert(path.to_owned(), known)
            }
            None => memory.known.remove(path),
        };
    }

    /// The content of `path`. It is not read again while its [`Stamp`] stays the same.
    pub fn content(&self, path: &Path, kind: Type) -> io::Result<Object> {
        let asked = SystemTime::now();
        let stamp = Stamp::of(path)?;
        if let Some(known) = lock(&self.memory).known.get(path)
            && known.stamp == stamp.sum
            && known.object.kind == kind
        {
            return Ok(known.object.clone());
        }
        let object = digest(path, kind, false)?;
        if stamp.is_older_than(asked) {
            self.remember(path, Some((stamp, &object)));
        }
        Ok(object)
    }

    /// The SHA-256 of the program of this process.
    pub fn program(&self) -> io::Result<String> {
        let running = Path::new("/proc/self/exe");
        let path = fs::read_link(running)?;
        let inode = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino()));
        // Its file may have been replaced by a newer build.
        Ok(match inode(&path).ok() == inode(running).ok() {
            true => self.content(&path, Type::File)?.sha256,
            false => hex::encode(hash_of(&mut File::open(running)?)?.0.finalize()),
        })
    }

    fn whole(&self, object: &Object, found: io::Result<Object>) -> std::result::Result<(), String> {
        let path = self.path(object);
        match found {
            Ok(found) if found == *object => Ok(()),
            Ok(_) => Err(match Stamp::of(&path) {
                Ok(stamp) if object.kind == Type::Folder => format!(
                    "{} is damaged; the last change was to {}",
                    path.display(),
                    stamp.last.display()
                ),
                _ => format!("{} is damaged", path.display()),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(format!("{} is missing", path.display()))
            }
            Err(error) => Err(format!("{} cannot be read: {error}", path.display())),
        }
    }

    /// Why `object` cannot be used: missing or damaged. Reads all of it.
    pub fn check(&self, object: &Object) -> std::result::Result<(), String> {
        self.whole(object, digest(&self.path(object), object.kind, false))
    }

    /// As [`check`](Self::check), but reads only what has changed.
    pub fn check_changes(&self, object: &Object) -> std::result::Result<(), String> {
        let look = || self.whole(object, self.content(&self.path(object), object.kind));
        look().or_else(|_| {
            // It may be replaced right now.
            let _placing = lock(&self.placing);
            look()
        })
    }

    /// Moves the file or folder at `path`, on the same file system, into the store. It is on
    /// the disk when this returns. What is in it that cannot be stored, such as links, devices
    /// and files of other users, is an error of kind `Usage`.
    pub fn adopt(&self, path: &Path, kind: Type) -> Result<Object> {
        let object = digest(path, kind, true).map_err(|error| {
            let is_wrong = matches!(
                error.kind(),
                io::ErrorKind::InvalidInput
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::NotFound
            );
            let error = cannot("store", path, error);
            if is_wrong { error.into_usage() } else { error }
        })?;
        let _placing = lock(&self.placing);
        let to = self.path(&object);
        if to.symlink_metadata().is_ok() {
            let found = self.content(&to, kind);
            if self.whole(&object, found).is_ok() {
                remove_all(path).map_err(|error| cannot("remove", path, error))?;
                return Ok(object);
            }
            self.discard(&to)?;
        }
        let group = to.parent().unwrap_or(&self.root);
        create_folder(group)?;
        let moved = fs::rename(path, &to).and_then(|()| match kind {
            Type::Folder => set_mode(&to, 0o500, 0o555),
            _ => Ok(()),
        });
        moved.map_err(|error| cannot("store", path, error))?;
        for folder in [group, &self.root] {
            sync(folder).map_err(|error| cannot("save", folder, error))?;
        }
        if object.bytes > LARGE {
            std::thread::sleep(TICK);
            if let Ok(stamp) = Stamp::of(&to) {
                self.remember(&to, Some((stamp, &object)));
            }
        }
        Ok(object)
    }

    /// Copies the file or folder at `path` into the store, unless it is there.
    pub fn import(&self, path: &Path, kind: Type) -> Result<Object> {
        // Links to the file or folder itself are followed, for the user named it.
        let path =
            &fs::canonicalize(path).map_err(|error| cannot("read", path, error).into_usage())?;
        if fs::canonicalize(self.tmp.parent().unwrap_or(&self.tmp))
            .is_ok_and(|store| store.starts_with(path))
        {
            let message = format!("{} cannot be an input: the store is in it", path.display());
            return Err(Error::usage(message).note("try", "another folder, or --store DIR"));
        }
        let object = self
            .content(path, kind)
            .map_err(|error| cannot("read", path, error).into_usage())?;
        match self.check_changes(&object) {
            Ok(()) => Ok(object),
            Err(_) => self.copy_in(path, kind),
        }
    }

    fn copy_in(&self, path: &Path, kind: Type) -> Result<Object> {
        let copy = self.tmp("import")?;
        let copied = copy_all(path, &copy)
            .map_err(|error| cannot("copy", path, error))
            .and_then(|()| self.adopt(&copy, kind));
        if copied.is_err() {
            // Room for others; the next engine removes it if this fails.
            let _ = remove_all(&copy);
        }
        copied
    }

    /// Copies `object` again from `path`; or why this is not possible.
    pub fn restore(&self, object: &Object, path: &Path) -> Result<std::result::Result<(), String>> {
        let read =
            fs::canonicalize(path).and_then(|path| Ok((self.content(&path, object.kind)?, path)));
        let found = match read {
            Ok((found, path)) if found == *object => self.copy_in(&path, object.kind)?,
            Ok((found, _)) => found,
            Err(error) => return Ok(Err(format!("{} cannot be read: {error}", path.display()))),
        };
        Ok(match found == *object {
            true => Ok(()),
            false => Err(format!(
                "{} has changed since the run was started",
                path.display()
            )),
        })
    }

    /// Removes an object.
    pub fn discard(&self, path: &Path) -> Result<()> {
        let aside = self.tmp("removed")?;
        self.remember(path, None);
        // First aside, so that a killed process leaves no half of it.
        make_movable(path)
            .and_then(|()| fs::rename(path, &aside))
            .and_then(|()| remove_all(&aside))
            .map_err(|error| cannot("remove", path, error))
    }

    /// The paths of all objects, with their SHA-256.
    pub fn all(&self) -> Vec<(String, PathBuf)> {
        let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
        let groups = entries(&self.root);
        let objects = groups.flat_map(|group| entries(&group.path()));
        let named = |entry: fs::DirEntry| {
            (
                entry.file_name().to_string_lossy().into_owned(),
                entry.path(),
            )
        };
        objects.map(named).collect()
    }
}

/// What shows whether a file or folder was changed: inodes, modes, sizes and times of all in it.
struct Stamp {
    sum: String,
    /// When it was changed last, in seconds and nanoseconds since 1970, and what.
    time: (i64, i64),
    last: PathBuf,
}

impl Stamp {
    fn of(path: &Path) -> io::Result<Stamp> {
        let mut stamp = Stamp {
            sum: String::new(),
            time: (i64::MIN, 0),
            last: path.to_owned(),
        };
        let mut hash = Sha256::new();
        stamp.add(path, &mut hash)?;
        stamp.sum = hex::encode(hash.finalize());
        Ok(stamp)
    }

    fn add(&mut self, path: &Path, hash: &mut Sha256) -> io::Result<()> {
        let found = path.symlink_metadata()?;
        for number in [found.ino(), found.mode().into(), found.size()] {
            hash.update(number.to_le_bytes());
        }
        let time = (found.ctime(), found.ctime_nsec());
        for number in [found.mtime(), found.mtime_nsec(), time.0, time.1] {
            hash.update(number.to_le_bytes());
        }
        if time >= self.time {
            self.time = time;
            self.last = path.to_owned();
        }
        if found.is_dir() {
            for (name, path) in entries(path)? {
                hash.update((name.len() as u64).to_le_bytes());
                hash.update(name.as_bytes());
                self.add(&path, hash)?;
            }
        }
        Ok(())
    }

    /// Whether a change after `time` has another stamp.
    fn is_older_than(&self, time: SystemTime) -> bool {
        let (Ok(seconds), Ok(nanos)) = (u64::try_from(self.time.0), u32::try_from(self.time.1))
        else {
            return false;
        };
        let changed = SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos) + TICK);
        changed.is_some_and(|changed| changed <= time)
    }
}

/// An error about `path`; a full disk says what to do.
pub(crate) fn cannot(action: &str, path: &Path, error: io::Error) -> Error {
    let is_full = matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    );
    let said = Error::new(
        ErrorKind::System,
        format!("cannot {action} {}", path.display()),
    );
    let said = said.caused_by(error);
    match is_full {
        true => said.note("try", "free some space"),
        false => said,
    }
}

fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Sets the permissions `set`, and removes all that are not in `keep`.
fn set_mode(path: &Path, set: u32, keep: u32) -> io::Result<()> {
    let mode = path.symlink_metadata()?.mode() & 0o7777;
    let new = (mode | set) & keep;
    match new == mode {
        true => Ok(()),
        false => fs::set_permissions(path, Permissions::from_mode(new)),
    }
}

/// A folder can be moved, and its entries removed, where it is writable.
fn make_movable(path: &Path) -> io::Result<()> {
    match path.symlink_metadata()?.is_dir() {
        true => set_mode(path, 0o700, 0o777),
        false => Ok(()),
    }
}

/// Removes a file or folder, if it exists; folders in it may be read-only.
pub(crate) fn remove_all(path: &Path) -> io::Result<()> {
    fn make_writable(path: &Path) -> io::Result<()> {
        make_movable(path)?;
        if path.symlink_metadata()?.is_dir() {
            for (_, path) in entries(path)? {
                make_writable(&path)?;
            }
        }
        Ok(())
    }
    let remove = || match path.symlink_metadata()?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    };
    let removed = remove().or_else(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => make_writable(path).and_then(|()| remove()),
        _ => Err(error),
    });
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// The entries of a folder by name.
fn entries(folder: &Path) -> io::Result<Vec<(OsString, PathBuf)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        all.push((entry.file_name(), entry.path()));
    }
    all.sort();
    Ok(all)
}

/// The hash of what `file` has from here on, and its bytes.
fn hash_of(file: &mut File) -> io::Result<(Sha256, u64)> {
    let mut hash = Sha256::new();
    let bytes = read_pieces(file, |piece| {
        hash.update(piece);
        Ok(())
    })?;
    Ok((hash, bytes))
}

/// Reads the file or folder at `path`. With `keep` all in it becomes read-only and is written to
/// the disk; the folder itself stays writable, so that it can be moved.
pub(crate) fn digest(path: &Path, kind: Type, keep: bool) -> io::Result<Object> {
    let found = path.symlink_metadata()?;
    let is_right = match kind {
        Type::Folder => found.is_dir(),
        _ => found.is_file(),
    };
    if !is_right {
        let what = match found.is_symlink() {
            true => "a link, not",
            false => "not",
        };
        let message = format!("{} is {what} a {kind}", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    if found.is_file() {
        if keep {
            if found.nlink() > 1 {
                own_copy(path)?;
            }
            set_mode(path, 0o400, 0o555)?;
        }
        let mut file = File::open(path)?;
        let (hash, bytes) = hash_of(&mut file)?;
        if keep {
            file.sync_all()?;
        }
        return Ok(Object {
            kind,
            sha256: hex::encode(hash.finalize()),
            bytes,
        });
    }
    if keep {
        set_mode(path, 0o700, 0o777)?;
    }
    let mut hash = Sha256::new();
    let mut bytes = 0;
    hash.update(b"folder\n");
    for (name, path) in entries(path)? {
        let found = path.symlink_metadata()?;
        let kind = match found.is_dir() {
            true => Type::Folder,
            // A link or device is refused there.
            false => Type::File,
        };
        let object = digest(&path, kind, keep)?;
        if keep && found.is_dir() {
            set_mode(&path, 0o500, 0o555)?;
        }
        let is_program = found.is_file() && found.mode() & 0o100 != 0;
        hash.update([u8::from(found.is_dir()), u8::from(is_program)]);
        hash.update(&object.sha256);
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        bytes += object.bytes;
    }
    if keep {
        sync(path)?;
    }
    Ok(Object {
        kind,
        sha256: hex::encode(hash.finalize()),
        bytes,
    })
}

/// Replaces a file that has other names too, such as one in a package manager's cache.
fn own_copy(path: &Path) -> io::Result<()> {
    let names = (0..).map(|number| path.with_file_name(format!(".copy-{number}")));
    let free = |path: &PathBuf| path.symlink_metadata().is_err();
    let copy = { names }.find(free).unwrap_or_default();
    fs::copy(path, &copy)?;
    fs::rename(copy, path)
}

/// Copies a file or folder, with modes of files. Links and devices in it are refused.
pub(crate) fn copy_all(from: &Path, to: &Path) -> io::Result<()> {
    let found = from.symlink_metadata()?;
    if found.is_dir() {
        fs::create_dir(to)?;
        for (name, path) in entries(from)? {
            copy_all(&path, &to.join(name))?;
        }
        return Ok(());
    }
    if !found.is_file() {
        let message = format!("{} is a link or a device", from.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    fs::copy(from, to).map(|_| ())
}

/// Copies a file or folder of the store to `to`, where nothing is, for its user to change: it appears whole.
pub(crate) fn export_copy(from: &Path, to: &Path) -> io::Result<()> {
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = tempfile::Builder::new()
        .prefix(".phalanx-")
        .tempdir_in(folder.unwrap_or(Path::new(".")))?;
    let copy = folder.path().join("copy");
    copy_all(from, &copy)?;
    let mut all = vec![copy.clone()];
    while let Some(path) = all.pop() {
        let found = path.symlink_metadata()?;
        if found.is_dir() {
            all.extend(entries(&path)?.into_iter().map(|(_, path)| path));
        } else {
            fs::set_permissions(&path, Permissions::from_mode(found.mode() & 0o777 | 0o200))?;
        }
    }
    fs::rename(copy, to)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Calls `work` with an empty folder, as a user who may not do everything, as root may.
    pub(crate) fn as_another_user(work: impl FnOnce(&Path) + Send) {
        use rustix::process::{Uid, getuid};
        use rustix::thread::set_thread_res_uid;
        let user = || {
            let other = Uid::from_raw(65_534);
            if getuid().is_root() {
                // Of this thread alone.
                set_thread_res_uid(other, other, other).unwrap();
            }
            let dir = tempfile::tempdir().unwrap();
            work(dir.path());
            remove_all(dir.path()).unwrap();
        };
        let outcome = std::thread::scope(|scope| scope.spawn(user).join());
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }

    fn mode(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().mode() & 0o777
    }

    #[test]
    fn a_file_has_the_sum_that_sha256sum_prints_and_damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let objects = Objects::new(dir.path());
        let path = dir.path().join("a");
        fs::write(&path, "abc").unwrap();
        let object = objects.import(&path, Type::File).unwrap();
        assert_eq!(
            object.sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert!(path.exists(), "a copy");
        assert_eq!(objects.adopt(&path, Type::File).unwrap(), object);
        assert_eq!(objects.check(&object), Ok(()));
        let stored = objects.path(&object);
        fs::set_permissions(&stored, Permissions::from_mode(0o644)).unwrap();
        fs::write(&stored, "abd").unwrap();
        assert!(objects.check(&object).unwrap_err().ends_with("is damaged"));
        // The damaged one is replaced.
        fs::write(&path, "abc").unwrap();
        objects.adopt(&path, Type::File).unwrap();
        assert_eq!(objects.check(&object), Ok(()));
        fs::remove_file(&stored).unwrap();
        assert!(objects.check(&object).unwrap_err().ends_with("is missing"));
    }

    #[test]
    fn a_folder_is_its_names_contents_and_programs() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str, files: &[(&str, &str, u32)]| {
            let root = dir.path().join(name);
            fs::create_dir_all(root.join("sub")).unwrap();
            for (file, text, mode) in files {
                fs::write(root.join(file), text).unwrap();
                fs::set_permissions(root.join(file), Permissions::from_mode(*mode)).unwrap();
            }
            digest(&root, Type::Folder, false).unwrap().sha256
        };
        let sums = [
            make("a", &[("x", "1", 0o644), ("sub/y", "2", 0o644)]),
            make("b", &[("x", "1", 0o644), ("sub/y", "3", 0o644)]),
            make("c", &[("x", "1", 0o644), ("sub/z", "2", 0o644)]),
            make("d", &[("x", "1", 0o755), ("sub/y", "2", 0o644)]),
            make("e", &[("x", "1", 0o644), ("y", "2", 0o644)]),
        ];
        for (at, sum) in sums.iter().enumerate() {
            assert!(!sums[..at].contains(sum));
        }
        let again = make("f", &[("sub/y", "2", 0o600), ("x", "1", 0o644)]);
        assert_eq!(again, sums[0]);
    }

    #[test]
    fn folders_without_write_permission_are_stored_and_removed() {
        as_another_user(|dir| {
            let objects = Objects::new(&dir.join("store"));
            let make = |name: &str, modes: [u32; 3]| {
                let root = dir.join(name);
                fs::create_dir_all(root.join("sub")).unwrap();
                fs::write(root.join("sub/x"), "1").unwrap();
                for (path, mode) in ["sub/x", "sub", ""].iter().zip(modes) {
                    fs::set_permissions(root.join(path), Permissions::from_mode(mode)).unwrap();
                }
                root
            };
            let plain = make("plain", [0o644, 0o755, 0o755]);
            let expected = objects.content(&plain, Type::Folder).unwrap();
            let root = make("read-only", [0o444, 0o555, 0o555]);
            assert_eq!(objects.adopt(&root, Type::Folder).unwrap(), expected);
            let stored = objects.path(&expected);
            assert!(!root.exists());
            let modes = ["sub/x", "sub", ""].map(|path| mode(&stored.join(path)));
            assert_eq!(modes, [0o444, 0o555, 0o555]);
            // There already, and no permission at all.
            let root = make("closed", [0, 0o500, 0o500]);
            assert_eq!(objects.adopt(&root, Type::Folder).unwrap(), expected);
            assert!(!root.exists());
            assert_eq!(objects.check(&expected), Ok(()));
            // An input of that kind.
            let root = make("input", [0o444, 0o555, 0o555]);
            assert_eq!(objects.import(&root, Type::Folder).unwrap(), expected);
            objects.discard(&stored).unwrap();
            assert!(!stored.exists());
            assert_eq!(objects.import(&root, Type::Folder).unwrap(), expected);
            assert_eq!(mode(&root), 0o555);
            assert!(fs::read_dir(&objects.tmp).unwrap().next().is_none());
        });
    }

    #[test]
    fn a_file_with_another_name_elsewhere_stays_as_it_is_there() {
        as_another_user(|dir| {
            let objects = Objects::new(&dir.join("store"));
            let (cache, output) = (dir.join("cache"), dir.join("output"));
            fs::create_dir(&output).unwrap();
            fs::write(&cache, "1").unwrap();
            fs::set_permissions(&cache, Permissions::from_mode(0o644)).unwrap();
            fs::hard_link(&cache, output.join("x")).unwrap();
            let object = objects.adopt(&output, Type::Folder).unwrap();
            assert_eq!(mode(&cache), 0o644);
            fs::write(&cache, "2").unwrap();
            assert_eq!(objects.check(&object), Ok(()));
            assert_eq!(entries(&objects.path(&object)).unwrap().len(), 1);
        });
    }

    #[test]
    fn what_has_not_changed_is_not_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("x"), "1").unwrap();
        let objects = Objects::new(dir.path());
        let object = objects.content(&path, Type::Folder).unwrap();
        // Not what is there, so it was not read.
        let mut other = object.clone();
        other.bytes = 77;
        objects.remember(&path, Some((Stamp::of(&path).unwrap(), &other)));
        assert_eq!(objects.content(&path, Type::Folder).unwrap(), other);
        // What another engine has known is known to the next one.
        let next = Objects::new(dir.path());
        let known = objects.changes().into_iter();
        next.learn(known.filter_map(|(path, known)| Some((path, known?))));
        assert_eq!(next.content(&path, Type::Folder).unwrap(), other);
        assert!(objects.changes().is_empty());
        // The same size and time of change.
        let time = path.join("x").metadata().unwrap().modified().unwrap();
        std::thread::sleep(TICK);
        fs::write(path.join("x"), "2").unwrap();
        File::options()
            .write(true)
            .open(path.join("x"))
            .unwrap()
            .set_modified(time)
            .unwrap();
        let changed = objects.content(&path, Type::Folder).unwrap();
        assert!(changed.bytes == 1 && changed != object);
        fs::write(path.join("x"), "1").unwrap();
        assert_eq!(objects.content(&path, Type::Folder).unwrap(), object);
    }

    #[test]
    fn a_file_that_was_changed_just_now_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let stamp = Stamp::of(dir.path()).unwrap();
        let (seconds, nanos) = (stamp.time.0 as u64, stamp.time.1 as u32);
        let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
        assert!(!stamp.is_older_than(changed));
        assert!(!stamp.is_older_than(changed + TICK / 2));
        assert!(stamp.is_older_than(changed + TICK));
    }

    #[test]
    fn the_file_that_was_changed_in_a_folder_is_named() {
        as_another_user(|dir| {
            let objects = Objects::new(&dir.join("store"));
            let root = dir.join("d");
            fs::create_dir_all(root.join("sub")).unwrap();
            fs::write(root.join("sub/x"), "1").unwrap();
            fs::write(root.join("y"), "1").unwrap();
            let object = objects.import(&root, Type::Folder).unwrap();
            assert_eq!(objects.check_changes(&object), Ok(()));
            let file = objects.path(&object).join("sub/x");
            std::thread::sleep(TICK);
            fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
            fs::write(&file, "2").unwrap();
            let why = objects.check_changes(&object).unwrap_err();
            let want = format!("; the last change was to {}", file.display());
            assert!(why.ends_with(&want), "{why}");
            // It is copied again; not if the source has another content by now.
            objects.restore(&object, &root).unwrap().unwrap();
            assert_eq!(objects.check(&object), Ok(()));
            fs::write(root.join("y"), "2").unwrap();
            let why = objects.restore(&object, &root).unwrap().unwrap_err();
            assert!(why.contains("has changed since"), "{why}");
        });
    }

    #[test]
    fn links_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("d");
        fs::create_dir(&root).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", root.join("l")).unwrap();
        let objects = Objects::new(dir.path());
        let text = objects.adopt(&root, Type::Folder).unwrap_err().chain();
        assert!(text.contains("l is a link, not a file"), "{text}");
    }
}
