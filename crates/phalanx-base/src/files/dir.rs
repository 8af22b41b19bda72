//! An open folder.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{self as sys, AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::{create_folder, kind_of};
use crate::{Error, Result, refuse};

/// Size of the write buffer.
const WRITE_BUFFER_BYTES: usize = 1 << 20;

/// An open folder, through which files below it are read and written.
///
/// The path of the folder may contain symbolic links. Below it no link is followed and only
/// regular files are opened, so a link or pipe that another user puts there can neither
/// redirect a write nor block this process. The handle stays valid if the path later leads
/// elsewhere.
#[derive(Clone, Debug)]
pub struct Dir {
    fd: Arc<OwnedFd>,
    path: PathBuf,
    claim: Option<Arc<Claim>>,
}

/// The file that must have its name for a change.
#[derive(Debug)]
struct Claim {
    folder: Dir,
    file: File,
    name: &'static str,
}

impl Dir {
    /// Opens the folder at `path`.
    ///
    /// # Errors
    ///
    /// `System`, naming it.
    pub fn open(path: &Path) -> Result<Dir> {
        Dir::try_open(path).map_err(|source| Error::io("cannot open folder", path, source))
    }

    pub(super) fn try_open(path: &Path) -> std::io::Result<Dir> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = sys::open(path, flags, Mode::empty())?;
        Ok(Dir {
            fd: Arc::new(fd),
            path: path.to_owned(),
            claim: None,
        })
    }

    /// The same folder, in which nothing is written, renamed or removed any more, nor in the folders opened from it, once
    /// `name` does not refer to `file`: another process has replaced it.
    ///
    /// # Errors
    ///
    /// `System`, naming the file.
    pub fn claimed_by(&self, file: &File, name: &'static str) -> Result<Dir> {
        let file = file.try_clone();
        let file = file.map_err(|e| Error::io("cannot open", &self.at(name), e))?;
        let folder = self.clone();
        let claim = Some(Arc::new(Claim { folder, file, name }));
        Ok(Dir {
            claim,
            ..self.clone()
        })
    }

    fn check_claim(&self) -> std::io::Result<()> {
        match &self.claim {
            Some(claim) if !claim.folder.is_at(&claim.file, claim.name) => {
                let what = "another process writes in this folder now";
                Err(std::io::Error::other(what))
            }
            _ => Ok(()),
        }
    }

    /// As [`open`](Self::open), creating the folder and its parents if needed.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open) and [`create_folder`].
    pub fn create(path: &Path) -> Result<Dir> {
        create_folder(path)?;
        Dir::open(path)
    }

    /// Opens the folder `name` in this one, creating it if needed.
    ///
    /// # Errors
    ///
    /// `Usage` when it is a link or a file; `DiskFull` or `System`, naming it.
    pub fn create_sub(&self, name: &str) -> Result<Dir> {
        match sys::mkdirat(&*self.fd, name, FOLDER_MODE) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(Error::io("cannot create folder", &self.at(name), e.into())),
        }
        let missing = || Error::io("cannot open folder", &self.at(name), Errno::NOENT.into());
        self.sub(name)?.ok_or_else(missing)
    }

    /// Opens the folder `name` in this one, if it exists.
    ///
    /// # Errors
    ///
    /// `Usage` when it is a link or a file; `System`, naming it.
    pub fn sub(&self, name: &str) -> Result<Option<Dir>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = self.at(name);
        match sys::openat(&*self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Dir {
                fd: Arc::new(fd),
                path,
                claim: self.claim.clone(),
            })),
            Err(Errno::NOENT) => Ok(None),
            Err(Errno::NOTDIR | Errno::LOOP) => Err(self.refused(name.as_ref(), "a folder")),
            Err(e) => Err(Error::io("cannot open folder", &path, e.into())),
        }
    }

    /// The path with which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why other users can change this folder's content; `None` if only this user and root
    /// can.
    ///
    /// Root's group does not count, nor does a group with the number of the owner, which is
    /// that user's private group on most distributions. In a folder with the sticky bit
    /// (`/tmp`) users can only change their own files.
    ///
    /// # Errors
    ///
    /// `System`, naming it.
    pub fn shared_with(&self) -> Result<Option<String>> {
        let failed = |e: Errno| Error::io("cannot look at folder", &self.path, e.into());
        let stat = sys::fstat(&*self.fd).map_err(failed)?;
        let (owner, group, mode) = (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777);
        if owner != geteuid().as_raw() && owner != 0 {
            return Ok(Some(format!("belongs to another user (uid {owner})")));
        }
        let is_sticky = mode & 0o1000 != 0;
        let is_private_group = group == owner || group == 0;
        Ok(match mode {
            _ if is_sticky => None,
            _ if mode & 0o002 != 0 => Some(format!("can be written by all users (mode {mode:o})")),
            _ if mode & 0o020 != 0 && !is_private_group => {
                Some(format!("can be written by group {group} (mode {mode:o})"))
            }
            _ => None,
        })
    }

    /// Atomically writes the file `name`: a reader, also after a power failure, finds the
    /// old file or the new one.
    ///
    /// Writes a file without a name, syncs it, names it, and syncs the folder, so that a
    /// killed writer leaves nothing behind. On file systems without such files it writes
    /// and renames a temporary file. After an error the old file is unchanged. A link at
    /// `name` is replaced.
    ///
    /// # Errors
    ///
    /// `DiskFull` or `System`, naming the path.
    pub fn write(
        &self,
        name: impl AsRef<OsStr>,
        fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> Result<()> {
        let name = name.as_ref();
        self.try_write(name, fill)
            .map_err(|source| Error::io("cannot write", &self.at(name), source))?;
        // Otherwise the name may be lost.
        self.sync()
    }

    fn try_write(
        &self,
        name: &OsStr,
        fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let filled = |mut file: &File| {
            let mut out = BufWriter::with_capacity(WRITE_BUFFER_BYTES, &mut file);
            fill(&mut out)?;
            out.flush()?;
            drop(out);
            file.sync_all()
        };
        match self.nameless() {
            Ok(file) => {
                filled(&file)?;
                self.check_claim()?;
                self.give_name(&file, name)
            }
            Err(why) => {
                let (file, temporary) = self.temporary(name).map_err(|e| refusal(why, e))?;
                let replaced = filled(&file).and_then(|()| {
                    self.check_claim()?;
                    let replaced = sys::renameat(&*self.fd, &temporary, &*self.fd, name);
                    replaced.map_err(Into::into)
                });
                replaced.inspect_err(|_| {
                    let _ = sys::unlinkat(&*self.fd, &temporary, AtFlags::empty());
                })
            }
        }
    }

    /// Opens a file without a name; `OPNOTSUPP` where the file system cannot do that, or
    /// `/proc` is missing.
    fn nameless(&self) -> std::result::Result<File, Errno> {
        if !Path::new("/proc/self/fd").is_dir() {
            return Err(Errno::OPNOTSUPP);
        }
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = sys::openat(&*self.fd, ".", flags, Mode::from_raw_mode(0o666))?;
        Ok(File::from(file))
    }

    /// Creates a temporary file, whose name readers do not take for `name`.
    fn temporary(&self, name: &OsStr) -> std::result::Result<(File, String), Errno> {
        let temporary = temporary_name(name);
        // Left by a killed process with our process id.
        let _ = sys::unlinkat(&*self.fd, &temporary, AtFlags::empty());
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = sys::openat(&*self.fd, &temporary, flags, Mode::from_raw_mode(0o666))?;
        Ok((File::from(file), temporary))
    }

    /// Gives `file` the name `name`, replacing an existing file.
    fn give_name(&self, file: &File, name: &OsStr) -> std::io::Result<()> {
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        let link = |at: &OsStr| sys::linkat(CWD, &itself, &*self.fd, at, AtFlags::SYMLINK_FOLLOW);
        match link(name) {
            Ok(()) => return Ok(()),
            // `linkat` does not replace a file, `rename` does.
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        let temporary = temporary_name(name);
        // Left by a killed process with our process id.
        let _ = sys::unlinkat(&*self.fd, &temporary, AtFlags::empty());
        link(temporary.as_ref())?;
        let replaced = sys::renameat(&*self.fd, &temporary, &*self.fd, name);
        replaced.inspect_err(|_| {
            let _ = sys::unlinkat(&*self.fd, &temporary, AtFlags::empty());
        })?;
        Ok(())
    }

    /// Checks that files can be created here.
    ///
    /// # Errors
    ///
    /// `DiskFull` or `System`, naming the folder.
    pub fn check_writable(&self) -> Result<()> {
        let Err(why) = self.nameless() else {
            return Ok(());
        };
        let made = self.temporary(OsStr::new("check")).map(|(_, temporary)| {
            let _ = sys::unlinkat(&*self.fd, &temporary, AtFlags::empty());
        });
        made.map_err(|e| Error::io("cannot write into", &self.path, refusal(why, e)))
    }

    /// Creates an empty file `name` for writing, replacing an existing file.
    ///
    /// # Errors
    ///
    /// `DiskFull` or `System`, naming the path.
    pub fn create_file(&self, name: &str) -> Result<File> {
        self.remove(name)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::APPEND;
        self.open_file(name, flags, 0o666)
    }

    /// Opens the file `name` for reading and appending, creating it if needed.
    ///
    /// # Errors
    ///
    /// As [`open_private`](Self::open_private).
    pub fn append_file(&self, name: &str) -> Result<File> {
        let claimed = self.check_claim();
        claimed.map_err(|e| Error::io("cannot open", &self.at(name), e))?;
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::APPEND;
        self.open_file(name, flags, 0o666)
    }

    /// Opens the file `name` for reading and writing, creating it if needed, with access
    /// for this user only (mode 600), so that other users cannot lock it.
    ///
    /// # Errors
    ///
    /// `Usage` when it is a link, not a regular file, has a second hard link, or belongs to
    /// another user; `DiskFull` or `System`, naming the path.
    pub fn open_private(&self, name: &str) -> Result<File> {
        let file = self.open_file(name, OFlags::CREATE | OFlags::RDWR, 0o600)?;
        let failed = |e| Error::io("cannot open", &self.at(name), e);
        let about = file.metadata().map_err(failed)?;
        if about.uid() != geteuid().as_raw() {
            refuse!(
                "{} belongs to another user (uid {}); remove it if it is not needed",
                self.at(name).display(),
                about.uid()
            );
        }
        if about.mode() & 0o077 != 0 {
            // Created by an older version.
            let private = std::fs::Permissions::from_mode(0o600);
            file.set_permissions(private).map_err(failed)?;
        }
        Ok(file)
    }

    /// Reads the file `name`; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// `Usage` when it is a link or not a regular file; `Data` when it has more than
    /// `most_bytes`; `System`, naming the path.
    pub fn read(&self, name: &str, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        let file = self.open_read(name)?;
        file.map(|file| super::read_open(&self.at(name), file, most_bytes))
            .transpose()
    }

    /// Opens the file `name` for reading; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// `Usage` when it is a link or not a regular file; `System`, naming the path.
    pub fn open_read(&self, name: &str) -> Result<Option<File>> {
        let file = match self.try_open_file(name.as_ref(), OFlags::RDONLY, 0) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(self.not_opened(name.as_ref(), e)),
        };
        let about = file.metadata();
        let about = about.map_err(|e| Error::io("cannot open", &self.at(name), e))?;
        match about.is_file() {
            true => Ok(Some(file)),
            false => Err(self.refused(name.as_ref(), "a regular file")),
        }
    }

    fn open_file(&self, name: &str, flags: OFlags, mode: u32) -> Result<File> {
        let opened = self.try_open_file(name.as_ref(), flags, mode);
        let file = opened.map_err(|e| self.not_opened(name.as_ref(), e))?;
        let about = file.metadata();
        let about = about.map_err(|e| Error::io("cannot open", &self.at(name), e))?;
        if !about.is_file() {
            return Err(self.refused(name.as_ref(), "a regular file"));
        }
        // Writing would change a file of another folder.
        if about.nlink() > 1 {
            refuse!(
                "{} has another name too (a hard link); remove it or copy it",
                self.at(name).display()
            );
        }
        Ok(file)
    }

    /// Not blocking: opening a named pipe would wait for its other end.
    fn try_open_file(
        &self,
        name: &OsStr,
        flags: OFlags,
        mode: u32,
    ) -> std::result::Result<File, Errno> {
        let always = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = sys::openat(&*self.fd, name, flags | always, Mode::from_raw_mode(mode))?;
        Ok(File::from(file))
    }

    fn not_opened(&self, name: &OsStr, why: Errno) -> Error {
        match why {
            // A link, a pipe without a reader, a folder.
            Errno::LOOP | Errno::NXIO | Errno::ISDIR => self.refused(name, "a regular file"),
            why => Error::io("cannot open", &self.at(name), why.into()),
        }
    }

    /// An error that names what is at `name` instead of what was `expected`.
    fn refused(&self, name: &OsStr, expected: &str) -> Error {
        let stat = sys::statat(&*self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        let kind = stat.map(|stat| FileType::from_raw_mode(stat.st_mode));
        let path = self.at(name);
        let path = path.display();
        Error::usage(match kind {
            Ok(FileType::Symlink) => format!(
                "{path} is a symbolic link, which is not followed here; remove it, or move its target here"
            ),
            Ok(kind) => format!("{path} is {}, not {expected}", kind_of(kind)),
            Err(_) => format!("{path} is not {expected}"),
        })
    }

    /// Removes the file or link `name`, if it exists.
    ///
    /// # Errors
    ///
    /// `System`, naming the path.
    pub fn remove(&self, name: &str) -> Result<()> {
        let claimed = self.check_claim();
        claimed.map_err(|e| Error::io("cannot remove", &self.at(name), e))?;
        match sys::unlinkat(&*self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(Error::io("cannot remove", &self.at(name), e.into())),
        }
    }

    /// Renames `from` to `to`, replacing an existing file.
    ///
    /// # Errors
    ///
    /// `System`, naming the path.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.rename_into(from, self, to)
    }

    /// As [`rename`](Self::rename), to `to` in the folder `dir`.
    ///
    /// # Errors
    ///
    /// `System`, naming the path.
    pub fn rename_into(&self, from: &str, dir: &Dir, to: &str) -> Result<()> {
        let renamed = self.check_claim();
        renamed
            .and_then(|()| Ok(sys::renameat(&*self.fd, from, &*dir.fd, to)?))
            .map_err(|e| Error::io("cannot rename", &self.at(from), e))
    }

    /// Gives the file `from` the name `to` in the folder `dir` as well, replacing an existing file.
    ///
    /// # Errors
    ///
    /// `System`, naming the path; some file systems have no such links.
    pub fn link_into(&self, from: &str, dir: &Dir, to: &str) -> Result<()> {
        dir.remove(to)?;
        sys::linkat(&*self.fd, from, &*dir.fd, to, AtFlags::empty())
            .map_err(|e| Error::io("cannot link", &self.at(from), e.into()))
    }

    /// Whether `name` exists, also as a broken link.
    pub fn has(&self, name: &str) -> bool {
        sys::statat(&*self.fd, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Whether `name` refers to `file`.
    pub fn is_at(&self, file: &File, name: &str) -> bool {
        let there = sys::statat(&*self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        match (file.metadata(), there) {
            (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.st_dev, there.st_ino),
            _ => false,
        }
    }

    /// The names of its entries that are valid UTF-8.
    ///
    /// # Errors
    ///
    /// `System`, naming the folder.
    pub fn names(&self) -> Result<Vec<String>> {
        let failed = |e: Errno| Error::io("cannot list", &self.path, e.into());
        let mut names = Vec::new();
        for entry in sys::Dir::read_from(&*self.fd).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_bytes().to_vec();
            names.extend(String::from_utf8(name));
        }
        names.retain(|name| name != "." && name != "..");
        Ok(names)
    }

    /// Syncs the folder, so that created, removed and renamed files survive a crash of the
    /// machine.
    ///
    /// # Errors
    ///
    /// `System`, naming the folder.
    pub fn sync(&self) -> Result<()> {
        sys::fsync(&*self.fd).map_err(|e| Error::io("cannot sync folder", &self.path, e.into()))
    }

    fn at(&self, name: impl AsRef<OsStr>) -> PathBuf {
        self.path.join(name.as_ref())
    }
}

/// Mode of new folders, whatever the umask: other users could otherwise put links into
/// them.
pub(super) const FOLDER_MODE: Mode = Mode::from_raw_mode(0o755);

/// A unique temporary name, `.NAME.PID-COUNT.tmp`.
fn temporary_name(name: &OsStr) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = name.to_string_lossy();
    format!(".{name}.{}-{count}.tmp", std::process::id())
}

/// The reason why a folder accepts no file: the error for a file without a name, unless
/// that is only unsupported.
fn refusal(to_nameless: Errno, to_temporary: Errno) -> std::io::Error {
    match to_nameless {
        Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT => to_temporary.into(),
        why => why.into(),
    }
}
