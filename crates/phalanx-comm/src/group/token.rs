//! Reading the job token from a file.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind as IoKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use phalanx_wire::Token;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, StatVfsMountFlags, fstatfs, fstatvfs};
use rustix::io::Errno;

use super::launch::TOKEN;
use crate::wait::deadline_in;
use crate::{Error, Result, inherited};

/// `TMPFS_MAGIC` and `RAMFS_MAGIC`.
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58f6;
/// Hexadecimal digits of a token.
const TOKEN_TEXT_BYTES: usize = 64;
/// How long a pipe may take to give a token.
const TOKEN_WITHIN: Duration = Duration::from_secs(10);

/// Reads a job token, such as `phalanx token --out FILE` writes, from a file or a pipe of the
/// caller's that others cannot read.
///
/// *Blocks* for 10 s at most, while a pipe holds no token.
///
/// # Errors
///
/// `Usage`, for a file that others may read or write and one without a token; `Timeout` for
/// a pipe; `Io` for a file that cannot be read.
pub fn read_token(path: &Path) -> Result<Token> {
    Token::from_hex(&read_text(path)?)
        .map_err(|e| Error::usage(format!("{} holds no token: {e}", path.display())).with_source(e))
}

fn read_text(path: &Path) -> Result<String> {
    let shown = path.display();
    let failed = |e| Error::io(format_args!("cannot read the token file {shown}"), e);
    // Not blocking: opening a named pipe would wait for its writer.
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    let mut file = inherited::open(path, |path| options.open(path)).map_err(failed)?;
    let about = file.metadata().map_err(failed)?;
    let is_pipe = about.file_type().is_fifo();
    if !about.is_file() && !is_pipe {
        return Err(Error::usage(format!(
            "the token file {shown} is not a file"
        )));
    }
    // A file without a directory entry is private: memfds, pipes of a launcher (whose
    // mode is 600).
    if about.nlink() > 0 && about.mode() & 0o077 != 0 && !is_container_secret(&file, &about) {
        return Err(Error::usage(format!(
            "others can read or write the token file {shown} (mode {:04o}): chmod 600 it; in a container, mount it \
             as a Secret, which is read-only, in memory and root's, or give its text as {TOKEN}",
            about.mode() & 0o7777,
        )));
    }
    check_owner(path, about.uid(), rustix::process::geteuid().as_raw())?;
    // Exactly the bytes needed: a pipe whose writer stays open must not block us.
    let mut text = vec![0; TOKEN_TEXT_BYTES];
    let mut have = 0;
    let until = deadline_in(TOKEN_WITHIN);
    while have < text.len() {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).ok();
        let mut fds = [PollFd::new(&file, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) => {
                return Err(Error::timeout(format!(
                    "the token file {shown} is a pipe, and no token was written to it within {} s",
                    TOKEN_WITHIN.as_secs()
                )));
            }
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(e) => return Err(failed(e.into())),
        }
        match file.read(&mut text[have..]) {
            Ok(0) => break,
            Ok(n) => have += n,
            Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {}
            Err(e) => return Err(failed(e)),
        }
    }
    text.truncate(have);
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Whether it is a secret as Kubernetes and other container engines mount it: every process in
/// the container may read it, and no other process sees the mount. Its mode cannot be changed
/// there.
fn is_container_secret(file: &File, about: &Metadata) -> bool {
    let (Ok(system), Ok(mount)) = (fstatfs(file), fstatvfs(file)) else {
        return false;
    };
    let in_memory = [TMPFS, RAMFS].contains(&u64::try_from(system.f_type).unwrap_or(0));
    let is_read_only = mount.f_flag.contains(StatVfsMountFlags::RDONLY);
    // No other user can have made such a mount.
    about.uid() == 0 && about.mode() & 0o022 == 0 && in_memory && is_read_only
}

/// The owner of the file knows the token and may replace it.
pub(super) fn check_owner(path: &Path, owner: u32, me: u32) -> Result<()> {
    // Root may run the job of a user, whose file is then as good.
    if owner == me || owner == 0 || me == 0 {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{} belongs to user {owner}, this process runs as user {me}: use a file of \
         your own (chown {me}, chmod 600)",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use rustix::fs::FileType;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn token_file_must_be_private() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let token = Token::generate().unwrap();
        writeln!(file, "{}", token.to_hex()).unwrap();
        let read = read_token(file.path()).unwrap();
        assert_eq!(read.to_hex(), token.to_hex());
        let mode = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(file.path(), mode).unwrap();
        let error = read_token(file.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        let text = error.to_string();
        assert!(
            text.contains("chmod 600") && text.contains("mode 0644"),
            "{text}"
        );
    }

    #[test]
    fn token_file_must_be_ours_or_roots() {
        let path = Path::new("job.token");
        check_owner(path, 1000, 1000).unwrap();
        check_owner(path, 0, 1000).unwrap();
        check_owner(path, 1000, 0).unwrap();
        let error = check_owner(path, 1001, 1000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        let text = error.to_string();
        assert!(text.contains("job.token belongs to user 1001"), "{text}");
        assert!(text.contains("as user 1000"), "{text}");
    }

    #[test]
    fn a_pipe_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, mode, 0).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = read_token(&path).unwrap_err();
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn broken_token_is_refused_and_not_repeated() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"deadbeef").unwrap();
        let error = read_token(file.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(!error.to_string().contains("deadbeef"), "{error}");
    }

    #[test]
    fn token_comes_through_a_pipe_that_stays_open() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let token = Token::generate().unwrap();
        let mut writer = File::from(write);
        writer.write_all(token.to_hex().as_bytes()).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&read));
        let read = read_token(Path::new(&path)).unwrap();
        assert_eq!(read.to_hex(), token.to_hex());
        drop(writer);
    }
}
