//! The job token: minted, read from a private file, handed to the ranks.
//!
//! It travels neither on a command line nor in a variable: it is in a sealed
//! memory file of the launcher, which `PHALANX_TOKEN_FILE` names.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use phalanx_train::files::as_typed;
use phalanx_wire::Token;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, memfd_create};

use super::cluster::Env;
use crate::error::{Error, ErrorKind, Result};

/// The documented fallback where no file can be shared.
pub(crate) const TOKEN_VARIABLE: &str = "PHALANX_TOKEN";

/// Far more than 64 digits and white space.
const MOST_BYTES: u64 = 1024;

/// `phalanx token --out FILE`.
pub(crate) fn write_token(path: &Path) -> Result<()> {
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
        Error::new(ErrorKind::System, format!("cannot write {shown}")).caused_by(error)
    })
}

/// A fresh token.
pub(crate) fn mint() -> Result<Token> {
    Token::generate()
        .map_err(|error| Error::new(ErrorKind::System, "cannot mint a job token").caused_by(error))
}

/// The token given by `--token-file` or `PHALANX_TOKEN`, if any.
pub(crate) fn given(path: Option<&Path>, env: &Env) -> Result<Option<Token>> {
    if let Some(path) = path {
        return read(path).map(Some);
    }
    let Some(text) = env.get(TOKEN_VARIABLE).filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    Token::from_hex(text)
        .map(Some)
        .map_err(|error| Error::usage(format!("{TOKEN_VARIABLE} holds no token")).caused_by(error))
}

fn read(path: &Path) -> Result<Token> {
    let shown = path.display();
    let unreadable = |error: std::io::Error| {
        let missing = error.kind() == std::io::ErrorKind::NotFound;
        let error = Error::usage(format!("cannot read the token file {shown}")).caused_by(error);
        if missing {
            error.note(
                "make",
                format!(
                    "phalanx token --out {}   (once; then copy it to every node)",
                    as_typed(path)
                ),
            )
        } else {
            error
        }
    };
    // A pipe would keep us waiting for its writer before we could say that it
    // is no file.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(unreadable)?;
    let about = file.metadata().map_err(unreadable)?;
    let mode = about.mode() & 0o7777;
    if !about.is_file() {
        return Err(Error::usage(format!("the token file {shown} is no file")));
    }
    if mode & 0o077 != 0 {
        return Err(Error::usage(format!(
            "others can read or write the token file {shown} (mode {mode:04o})"
        ))
        .note("fix", format!("chmod 600 {shown}")));
    }
    let me = rustix::process::geteuid().as_raw();
    if about.uid() != me && me != 0 {
        return Err(Error::usage(format!(
            "the token file {shown} belongs to user {}, and this is user {me}",
            about.uid()
        )));
    }
    let mut text = String::new();
    file.take(MOST_BYTES)
        .read_to_string(&mut text)
        .map_err(unreadable)?;
    Token::from_hex(&text).map_err(|error| {
        Error::usage(format!("{shown} holds no token"))
            .caused_by(error)
            .note(
                "fix",
                format!(
                    "remove it, then phalanx token --out {}   (once; copy it to every node)",
                    as_typed(path)
                ),
            )
    })
}

/// A sealed, private memory file with the token's text, close-on-exec.
pub(crate) fn memory_file(token: &Token) -> Result<OwnedFd> {
    let failed = |error: std::io::Error| {
        Error::new(
            ErrorKind::System,
            "cannot make a memory file for the job token",
        )
        .caused_by(error)
    };
    let fd = memfd_create(
        "phalanx-token",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )
    .map_err(|error| failed(error.into()))?;
    // Memory files are born 0777; readers check for 0600 as with any file.
    fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
    let mut file = File::from(fd);
    file.write_all(format!("{}\n", token.to_hex()).as_bytes())
        .map_err(failed)?;
    let fd = OwnedFd::from(file);
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&fd, seals).map_err(|error| failed(error.into()))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_written_token_reads_back_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.token");
        write_token(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let token = given(Some(&path), &Env::new()).unwrap().unwrap();
        assert_eq!(
            std::fs::read_to_string(&path).unwrap().trim(),
            token.to_hex()
        );
        let again = write_token(&path).unwrap_err();
        assert!(again.chain().contains("exists"), "{}", again.chain());
        assert_eq!(given(Some(&path), &Env::new()).unwrap().unwrap(), token);
    }

    #[test]
    fn loose_missing_and_broken_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        let refused = |want: &str| {
            let error = given(Some(&path), &Env::new()).unwrap_err();
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
    fn a_pipe_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo")
            .args(["-m", "600"])
            .arg(&path)
            .status();
        assert!(made.unwrap().success());
        let error = given(Some(&path), &Env::new()).unwrap_err();
        assert!(error.render().contains("is no file"), "{}", error.render());
    }

    #[test]
    fn the_variable_is_the_fallback() {
        let token = mint().unwrap();
        let env = Env::from([(TOKEN_VARIABLE.to_owned(), token.to_hex())]);
        assert_eq!(given(None, &env).unwrap(), Some(token));
        assert_eq!(given(None, &Env::new()).unwrap(), None);
        let env = Env::from([(TOKEN_VARIABLE.to_owned(), "x".to_owned())]);
        assert_eq!(given(None, &env).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn the_memory_file_reads_as_a_token_file_and_cannot_change() {
        let token = mint().unwrap();
        let fd = memory_file(&token).unwrap();
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        for _ in 0..2 {
            assert_eq!(
                given(Some(Path::new(&path)), &Env::new()).unwrap(),
                Some(token.clone())
            );
        }
        assert!(std::fs::write(&path, "x").is_err());
    }
}
