//! Safe file access: atomic writes, no symbolic links of others, regular files only.

mod dir;
mod lock;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::process::geteuid;

pub use dir::Dir;
pub use lock::{ask_lock, lock_holder, try_lock};

use crate::{Error, Result, refuse};

/// Atomically writes `bytes` to `path`: a reader, also after a power failure, finds the old
/// file or the new one.
///
/// # Errors
///
/// As [`atomic_write_with`].
pub fn atomic_write(path: &Path, bytes: &[u8]) -> Result<()> {
    atomic_write_with(path, |out| out.write_all(bytes))
}

/// As [`atomic_write`], with content written by `fill`; see [`Dir::write`].
///
/// For paths given by the user: symbolic links of the user or of root are followed and stay
/// links. A device or a named pipe is opened and written directly, which *blocks* until the
/// pipe is read.
///
/// # Errors
///
/// `DiskFull` or `System`, naming the path; `Usage` when `path` does not name a file, or is a
/// link of another user.
pub fn atomic_write_with(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<()> {
    let path = &*target(path, "cannot write")?;
    let failed = |source| Error::io("cannot write", path, source);
    if fs::metadata(path).is_ok_and(|there| !there.is_file() && !there.is_dir()) {
        let mut file = File::options().write(true).open(path).map_err(failed)?;
        let mut out = BufWriter::new(&mut file);
        return fill(&mut out).and_then(|()| out.flush()).map_err(failed);
    }
    let Some(name) = path.file_name() else {
        refuse!("{} does not name a file", path.display());
    };
    let dir = Dir::try_open(&folder_of(path)).map_err(failed)?;
    dir.write(name, fill)
}

/// As [`atomic_write_with`]; an error of `fill` is returned as it is.
///
/// # Errors
///
/// As [`atomic_write_with`], and those of `fill`.
pub fn try_atomic_write(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let mut failed = None;
    let written = atomic_write_with(path, |out| {
        fill(out).map_err(|e| {
            failed = Some(e);
            std::io::Error::other("not written")
        })
    });
    written.map_err(|e| failed.unwrap_or(e))
}

/// Opens a path given by the user, following links as [`atomic_write_with`].
pub fn open_named(path: &Path, options: &mut OpenOptions) -> Result<File> {
    let path = &*target(path, "cannot open")?;
    let flags = OFlags::NOCTTY.bits().cast_signed();
    let opened = options.custom_flags(flags).open(path);
    opened.map_err(|e| Error::io("cannot open", path, e))
}

/// The target of symbolic links at `path`, which need not exist.
fn target(path: &Path, action: &str) -> Result<PathBuf> {
    let mut at = path.to_owned();
    // The system's limit.
    for _ in 0..40 {
        let Ok(about) = fs::symlink_metadata(&at) else {
            return Ok(at);
        };
        if !about.is_symlink() {
            return Ok(at);
        }
        if about.uid() != geteuid().as_raw() && about.uid() != 0 {
            refuse!(
                "{} is a symbolic link of another user (uid {}), which is not followed",
                at.display(),
                about.uid()
            );
        }
        let next = fs::read_link(&at).map_err(|e| Error::io(action, path, e))?;
        let next = folder_of(&at).join(next);
        // The text of a descriptor's link in `/proc` may not be a path.
        if fs::symlink_metadata(&next).is_err() && fs::metadata(&at).is_ok() {
            return Ok(at);
        }
        at = next;
    }
    Err(Error::io(action, path, Errno::LOOP.into()))
}

/// Opens the regular file at `path` for reading. Links are followed. Devices and named
/// pipes are refused without blocking, and pointers of Git LFS.
///
/// # Errors
///
/// Errors of the system, such as `NotFound`; `InvalidInput` for anything but a regular
/// file, and for a pointer.
pub fn open_regular(path: &Path) -> std::io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let kind = FileType::from_raw_mode(file.metadata()?.mode());
    let what = match kind {
        FileType::RegularFile if is_lfs_pointer(&file) => {
            "it is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"
                .to_owned()
        }
        FileType::RegularFile => return Ok(file),
        _ => format!("it is {}, expected a regular file", kind_of(kind)),
    };
    Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, what))
}

/// What is at `path`; `None` if nothing is. Links are followed.
///
/// # Errors
///
/// `System`, naming `path`, when this cannot be known: no permission, or a link that leads nowhere.
pub fn found(path: &Path) -> Result<Option<fs::Metadata>> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    match fs::metadata(path) {
        Ok(there) => Ok(Some(there)),
        Err(error) if error.kind() == NotFound && path.is_symlink() => {
            Err(Error::io("cannot follow the link", path, error))
        }
        Err(error) if matches!(error.kind(), NotFound | NotADirectory) => Ok(None),
        Err(error) => Err(Error::io("cannot read", path, error)),
    }
}

/// Whether a file is at `path`.
///
/// # Errors
///
/// As [`found`].
pub fn is_file(path: &Path) -> Result<bool> {
    Ok(found(path)?.is_some_and(|there| there.is_file()))
}

/// Whether `file` has what Git LFS leaves in the place of a file that it has not fetched.
fn is_lfs_pointer(file: &File) -> bool {
    const START: &[u8] = b"version https://git-lfs.github.com/spec/";
    let mut start = [0; START.len()];
    file.read_exact_at(&mut start, 0).is_ok() && start == START
}

/// Gives all that `from` has to `each`, piece by piece; returns how many bytes there were.
///
/// # Errors
///
/// Those of reading and of `each`.
pub fn read_pieces(
    mut from: impl Read,
    mut each: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> std::io::Result<u64> {
    let (mut buffer, mut bytes) = (vec![0; 256 << 10], 0);
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Ok(read) => {
                each(&buffer[..read])?;
                bytes += read as u64;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Reads the regular file at `path`, which may have up to `most_bytes`.
///
/// # Errors
///
/// `Data` when it has more; otherwise `System`, naming it.
pub fn read_regular(path: &Path, most_bytes: u64) -> Result<Vec<u8>> {
    let file = open_regular(path).map_err(|e| Error::io("cannot read", path, e))?;
    read_open(path, file, most_bytes)
}

/// Reads all of `file`, which was opened at `path`.
pub fn read_open(path: &Path, file: File, most_bytes: u64) -> Result<Vec<u8>> {
    let failed = |e| Error::io("cannot read", path, e);
    let about = file.metadata().map_err(failed)?;
    let kind = FileType::from_raw_mode(about.mode());
    if kind != FileType::RegularFile {
        refuse!(
            "{} is {}, expected a regular file",
            path.display(),
            kind_of(kind)
        );
    }
    // A sparse file may have any length.
    let room = about.len().min(most_bytes).min(64 << 20);
    let mut bytes = Vec::with_capacity(room as usize);
    // One byte more distinguishes too large from exactly the limit.
    let mut file = file.take(most_bytes.saturating_add(1));
    file.read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most_bytes {
        return Err(Error::data(format!(
            "{} has {} bytes; the limit is {most_bytes}",
            path.display(),
            about.len()
        )));
    }
    Ok(bytes)
}

fn kind_of(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a file",
        FileType::Symlink => "a symbolic link",
        FileType::Directory => "a folder",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "no regular file",
    }
}

/// Creates a folder and its parents, writable by this user only, unless it exists.
///
/// # Errors
///
/// `Usage` when it, or a parent, is a file; `DiskFull` or `System`, naming the
/// folder.
pub fn create_folder(path: &Path) -> Result<()> {
    let made = || {
        fs::create_dir_all(folder_of(path))?;
        match create_new_folder(path) {
            Err(_) if path.is_dir() => Ok(()),
            made => made,
        }
    };
    made().map_err(|source| {
        let nearest = path.ancestors().find(|at| at.exists());
        match nearest.filter(|at| !at.is_dir()) {
            Some(file) => Error::usage(format!("{} is a file, not a folder", file.display()))
                .with_source(source),
            None => Error::io("cannot create folder", path, source),
        }
    })
}

/// Creates the folder at `path`, writable by this user only.
///
/// # Errors
///
/// Errors of the system, such as `AlreadyExists` and `NotFound`.
pub fn create_new_folder(path: &Path) -> std::io::Result<()> {
    let mode = dir::FOLDER_MODE.as_raw_mode();
    DirBuilder::new().mode(mode).create(path)
}

/// The format of an image file that begins with `bytes`; empty where it is none.
pub fn image_kind(bytes: &[u8]) -> &'static str {
    const STARTS: [(usize, &[u8], &str); 8] = [
        (0, b"\x89PNG", "PNG"),
        (0, b"\xff\xd8\xff", "JPEG"),
        (0, b"GIF8", "GIF"),
        (8, b"WEBP", "WebP"),
        (0, b"BM", "BMP"),
        (0, b"II*\0", "TIFF"),
        (0, b"MM\0*", "TIFF"),
        (4, b"ftyp", "AVIF or HEIC"),
    ];
    let is_it = |at: usize, start: &[u8]| bytes.get(at..).is_some_and(|at| at.starts_with(start));
    let found = STARTS.iter().find(|(at, start, _)| is_it(*at, start));
    found.map_or("", |(_, _, kind)| kind)
}

/// `path` quoted for a shell, for commands in messages.
pub fn as_typed(path: &Path) -> String {
    let text = path.to_string_lossy();
    // It refuses only NUL, which a path cannot contain.
    shlex::try_quote(&text).map_or_else(|_| text.to_string(), Into::into)
}

/// The parent folder of `path`.
pub fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_stay_links_and_what_they_point_to_is_written() {
        let dir = tempfile::tempdir().expect("folder");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("far")).expect("folder");
        symlink("far/second", at("first")).expect("link");
        symlink("file", at("far/second")).expect("link");
        // Nothing is there yet, then the old file.
        for text in ["one", "two"] {
            atomic_write(&at("first"), text.as_bytes()).expect("written");
            assert_eq!(fs::read_to_string(at("far/file")).expect("text"), text);
        }
        for link in ["first", "far/second"] {
            assert!(at(link).is_symlink(), "{link}");
        }
        symlink("ring", at("ring")).expect("link");
        atomic_write(&at("ring"), b"x").expect_err("a circle of links");
        assert!(at("ring").is_symlink());
        let names = fs::read_dir(dir.path()).expect("folder").count();
        assert_eq!(names, 3, "nothing else is left");
    }

    #[test]
    fn what_is_in_the_way_is_named_and_no_file_that_nobody_typed() {
        let dir = tempfile::tempdir().expect("folder");
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "").expect("written");
        for inside in ["file", "file/x", "file/x/y"] {
            let error = create_folder(&at(inside)).expect_err("a file");
            assert_eq!(error.kind(), crate::ErrorKind::Usage, "{inside}");
            let said = format!("{} is a file, not a folder", at("file").display());
            assert_eq!(error.to_string(), said, "{inside}");
        }
        let error = create_folder(Path::new("/dev/null")).expect_err("a device");
        assert_eq!(error.kind(), crate::ErrorKind::Usage);
        let error = atomic_write(&at("none/x"), b"").expect_err("no folder");
        let said = format!(
            "cannot write {}: No such file or directory (os error 2)",
            at("none/x").display()
        );
        assert_eq!(error.to_string(), said);
    }

    #[test]
    fn suggested_commands_are_one_word_a_path() {
        for (path, typed) in [
            ("data/mnist", "data/mnist"),
            ("my data", "'my data'"),
            ("it's; rm", "\"it's; rm\""),
            ("", "''"),
        ] {
            assert_eq!(as_typed(Path::new(path)), typed);
            // A shell's word.
            let echo = format!("printf %s {}", as_typed(Path::new(path)));
            let out = std::process::Command::new("sh")
                .args(["-c", &echo])
                .output();
            assert_eq!(out.expect("sh").stdout, path.as_bytes(), "{typed}");
        }
    }

    #[test]
    fn what_is_no_regular_file_is_written_and_stays() {
        let dir = tempfile::tempdir().expect("folder");
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("mkfifo").success());
        let reader = {
            let pipe = pipe.clone();
            std::thread::spawn(move || fs::read_to_string(pipe))
        };
        atomic_write(&pipe, b"text").expect("written");
        let read = reader.join().expect("no panic").expect("read");
        assert_eq!(read, "text");
        atomic_write(Path::new("/dev/null"), b"text").expect("written");
        let full = atomic_write(Path::new("/dev/full"), b"text").expect_err("a full disk");
        assert_eq!(full.kind(), crate::ErrorKind::DiskFull);
        for there in [&pipe, Path::new("/dev/null"), Path::new("/dev/full")] {
            let kind = fs::symlink_metadata(there).expect("there").file_type();
            assert!(!kind.is_file(), "{}", there.display());
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("there").mode() & 0o7777
    }

    #[test]
    fn below_a_folder_no_link_is_followed_and_no_pipe_waited_for() {
        let dir = tempfile::tempdir().expect("folder");
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("home/inner")).expect("folder");
        fs::create_dir(at("real")).expect("folder");
        let precious = || fs::read_to_string(at("home/precious")).expect("text");
        let restore = || fs::write(at("home/precious"), "precious").expect("written");
        restore();
        // The folder itself may be a link.
        symlink("real", at("run")).expect("link");
        let run = Dir::open(&at("run")).expect("folder");
        let plant = |kind: &str| {
            let _ = fs::remove_file(at("real/x"));
            match kind {
                "link" => symlink("../home/precious", at("real/x")).expect("link"),
                "hard link" => fs::hard_link(at("home/precious"), at("real/x")).expect("link"),
                "folder" => symlink("../home/inner", at("real/x")).expect("link"),
                _ => {
                    let made = std::process::Command::new("mkfifo")
                        .arg(at("real/x"))
                        .status();
                    assert!(made.expect("mkfifo").success());
                }
            }
        };
        for kind in ["link", "hard link", "pipe", "folder"] {
            // What is there is replaced.
            plant(kind);
            run.write("x", |out| out.write_all(b"new"))
                .expect("written");
            assert_eq!(fs::read_to_string(at("real/x")).expect("text"), "new");
            plant(kind);
            let mut file = run.create_file("x").expect("made");
            file.write_all(b"new").expect("written");
            assert_eq!(fs::read_to_string(at("real/x")).expect("text"), "new");
            // What would be written in place is refused.
            plant(kind);
            for refused in [run.append_file("x"), run.open_private("x")] {
                let error = refused.expect_err(kind);
                assert_eq!(error.kind(), crate::ErrorKind::Usage, "{error}");
                let shown = at("run/x").display().to_string();
                assert!(error.to_string().starts_with(&shown), "{error}");
            }
            if kind != "hard link" {
                run.read("x", 100).expect_err(kind);
            }
            let error = run.create_sub("x").expect_err(kind);
            assert_eq!(error.kind(), crate::ErrorKind::Usage, "{error}");
            run.remove("x").expect("removed");
            assert_eq!(precious(), "precious", "{kind}");
        }
        assert_eq!(fs::read_dir(at("home/inner")).expect("folder").count(), 0);
        // It is the folder that was opened, wherever its path leads now.
        fs::remove_file(at("run")).expect("removed");
        symlink("home", at("run")).expect("link");
        run.write("precious", |out| out.write_all(b"new"))
            .expect("written");
        assert_eq!(precious(), "precious");
        assert_eq!(run.names().expect("names"), ["precious"]);
        let private = run.open_private("private").expect("made");
        drop(private);
        assert_eq!(mode(&at("real/private")), 0o600);
    }

    #[test]
    fn folders_that_others_may_write_into_are_known() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let dir = tempfile::tempdir().expect("folder");
        let path = dir.path().join("new");
        create_folder(&path).expect("made");
        assert_eq!(mode(&path) & 0o022, 0, "by no umask");
        let shared = || {
            let dir = Dir::open(&path).expect("open");
            dir.shared_with().expect("known")
        };
        let (me, set) = (geteuid().as_raw(), |mode| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("mode");
        });
        assert_eq!(shared(), None);
        set(0o1777);
        assert_eq!(shared(), None);
        set(0o777);
        assert_eq!(
            shared().expect("by all"),
            "can be written by all users (mode 777)"
        );
        set(0o775);
        let group = fs::metadata(&path).expect("there").gid();
        assert_eq!(shared().is_none(), group == me || group == 0);
        if me != 0 {
            eprintln!("SKIPPED in part: only root can give a folder away");
            return;
        }
        chown(&path, None, Some(4711)).expect("group");
        assert_eq!(
            shared().expect("by a group"),
            "can be written by group 4711 (mode 775)"
        );
        set(0o755);
        assert_eq!(shared(), None);
        chown(&path, Some(4711), Some(4711)).expect("owner");
        assert_eq!(
            shared().expect("another's"),
            "belongs to another user (uid 4711)"
        );
        // Neither is a link of theirs followed.
        let link = path.join("link");
        symlink("/dev/null", &link).expect("link");
        atomic_write(&link, b"x").expect("our own link");
        std::os::unix::fs::lchown(&link, Some(4711), None).expect("owner");
        let error = atomic_write(&link, b"x").expect_err("another's link");
        assert!(
            error
                .to_string()
                .contains("link of another user (uid 4711)"),
            "{error}"
        );
    }
}
