//! The job token: created, read from a private file, passed to the ranks.
//!
//! It is never on a command line or in a variable: the launcher keeps it in a file
//! without a name, whose `/proc/PID/fd` path is in `PHALANX_TOKEN_FILE`.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use phalanx_base::env::TOKEN_VARIABLE;
use phalanx_base::files::as_typed;
use phalanx_wire::Token;
use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create};

use super::contract::TOKEN_FILE_VARIABLE;
use super::place::{Env, text};
use crate::error::{Error, Result};
use crate::system;

/// The command that creates a token file.
const MAKE: &str = "phalanx token --out";

/// Folder for files without a name where the system refuses memory files.
const IN_MEMORY: &str = "/dev/shm";

/// `phalanx token --out FILE`.
pub fn write_token(path: &Path) -> Result<()> {
    let token = mint()?;
    let shown = path.display();
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => {
                Error::usage(format!("{shown} exists; a token in use must not change")).note(
                    "fix",
                    format!("remove it first, or choose another name than {shown}"),
                )
            }
            _ => Error::usage(format!("cannot create {shown}")).caused_by(error),
        })?;
    let written = file
        .write_all(format!("{}\n", token.to_hex()).as_bytes())
        .and_then(|()| file.sync_all());
    written.map_err(|error| {
        // Half a token is worse than none.
        let _ = std::fs::remove_file(path);
        system(format!("cannot write {shown}"))(error)
    })
}

/// A fresh token.
pub fn mint() -> Result<Token> {
    Token::generate().map_err(system("cannot mint a job token"))
}

/// The token from `--token-file`, else from `PHALANX_TOKEN_FILE` or `PHALANX_TOKEN`. An outer
/// launcher sets `PHALANX_TOKEN_FILE` for its own job, so it counts only where the token
/// `is_shared` with other launchers.
pub fn find(path: Option<&Path>, env: &Env, is_shared: bool) -> Result<Option<Token>> {
    let variable = text(env, TOKEN_FILE_VARIABLE).filter(|_| is_shared);
    if let Some(path) = path.or(variable.map(Path::new)) {
        return read(path).map(Some);
    }
    let Some(text) = text(env, TOKEN_VARIABLE) else {
        return Ok(None);
    };
    Token::from_hex(text)
        .map(Some)
        .map_err(|error| Error::usage(format!("{TOKEN_VARIABLE} holds no token")).caused_by(error))
}

fn read(path: &Path) -> Result<Token> {
    phalanx_comm::read_token(path).map_err(|error| {
        let shown = as_typed(path);
        let make = match path.try_exists() {
            Ok(true) if error.message().contains("holds no token") => {
                format!("remove it, then {MAKE} {shown}")
            }
            Ok(false) => format!("{MAKE} {shown}"),
            _ => return Error::from(error).into_usage(),
        };
        Error::from(error).into_usage().note(
            "make",
            format!("{make}   (once; then copy it to every node)"),
        )
    })
}

/// A private file with the token's text that has no name in any folder, close-on-exec: a sealed
/// memory file, or, where the system refuses these (a container's seccomp filter), a deleted file.
pub fn memory_file(token: &Token) -> Result<OwnedFd> {
    memory_file_of(format!("{}\n", token.to_hex()), "the job token")
}

/// The same for another text with secrets, which errors call `what`.
pub fn memory_file_of(text: impl AsRef<[u8]>, what: &str) -> Result<OwnedFd> {
    let text = text.as_ref();
    sealed_file(text)
        .or_else(|_| deleted_file(text))
        .map_err(system(format!("cannot make a file for {what}")))
        .map_err(|error| error.note("fix", "set TMPDIR to a folder that can be written"))
}

fn sealed_file(text: &[u8]) -> std::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = write_private(memfd_create("phalanx", flags)?.into(), text)?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

fn deleted_file(text: &[u8]) -> std::io::Result<OwnedFd> {
    let file = tempfile::tempfile_in(IN_MEMORY).or_else(|_| tempfile::tempfile())?;
    Ok(write_private(file, text)?.into())
}

fn write_private(mut file: File, text: &[u8]) -> std::io::Result<File> {
    // Born 0777 or 0644; readers check for 0600 as with any file.
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    file.write_all(text)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn a_written_token_reads_back_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.token");
        write_token(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let token = find(Some(&path), &Env::new(), true).unwrap().unwrap();
        assert_eq!(
            std::fs::read_to_string(&path).unwrap().trim(),
            token.to_hex()
        );
        let again = write_token(&path).unwrap_err();
        assert!(again.chain().contains("exists"), "{}", again.chain());
        assert_eq!(
            find(Some(&path), &Env::new(), true).unwrap().unwrap(),
            token
        );
    }

    #[test]
    fn loose_missing_and_broken_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        let refused = |want: &str| {
            let error = find(Some(&path), &Env::new(), true).unwrap_err();
            assert!(error.render().contains(want), "{}", error.render());
            assert_eq!(error.exit_code(), 2);
        };
        refused("phalanx token --out");
        write_token(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        refused("chmod 600");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, "nonsense").unwrap();
        refused("holds no token");
    }

    #[test]
    fn the_variable_is_the_fallback() {
        let token = mint().unwrap();
        let env = Env::from([(TOKEN_VARIABLE.to_owned(), token.to_hex())]);
        assert_eq!(find(None, &env, true).unwrap(), Some(token));
        assert_eq!(find(None, &Env::new(), true).unwrap(), None);
        let mut env = Env::from([(TOKEN_VARIABLE.to_owned(), "x".to_owned())]);
        assert_eq!(find(None, &env, true).unwrap_err().exit_code(), 2);
        // A file is asked first, as ranks do.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        write_token(&path).unwrap();
        let name = path.to_str().unwrap().to_owned();
        env.insert(TOKEN_FILE_VARIABLE.to_owned(), name);
        let token = find(Some(&path), &Env::new(), true).unwrap();
        assert_eq!(find(None, &env, true).unwrap(), token);
        assert!(find(None, &env, false).is_err(), "the variable is broken");
    }

    #[test]
    fn files_without_a_name_read_as_token_files_and_a_sealed_one_cannot_change() {
        let token = mint().unwrap();
        let text = format!("{}\n", token.to_hex());
        let path = |fd: &OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
        let sealed = memory_file(&token).unwrap();
        let deleted = deleted_file(text.as_bytes()).unwrap();
        for fd in [&sealed, &deleted, &sealed, &deleted] {
            let path = path(fd);
            let read = find(Some(Path::new(&path)), &Env::new(), true).unwrap();
            assert_eq!(read, Some(token.clone()));
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        }
        assert!(std::fs::write(path(&sealed), "x").is_err());
    }
}
