//! The file of `file://`: rank 0 hosts the store, and writes the address of the store and the token of the job into the
//! file. The other ranks wait for the file.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind as IoKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use phalanx_base::files::{folder_of, open_regular};
use phalanx_wire::Token;

use super::token::check_owner;
use crate::transport::machine;
use crate::{Error, Result};

/// The first word of the file.
const MAGIC: &str = "phalanx-store";
/// The file is not longer.
const MOST_BYTES: u64 = 4096;

/// Content of the file.
pub(super) struct Address {
    /// `host:port` of the store.
    pub(super) place: String,
    pub(super) token: Token,
    /// [`machine`] of rank 0.
    machine: String,
}

impl Address {
    /// Reads the file at `path`; `None` while it is missing or empty.
    pub(super) fn read(path: &Path) -> Result<Option<Address>> {
        let shown = path.display();
        let failed = |e| Error::io(format_args!("cannot read {shown}"), e);
        let file = match open_regular(path) {
            Ok(file) => file,
            Err(e) if e.kind() == IoKind::NotFound && folder_of(path).is_dir() => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        let owner = file.metadata().map_err(failed)?.uid();
        check_owner(path, owner, rustix::process::geteuid().as_raw())?;
        let mut bytes = Vec::new();
        file.take(MOST_BYTES)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let parsed = Self::parse(&String::from_utf8_lossy(&bytes));
        parsed.map(Some).ok_or_else(|| {
            Error::usage(format!(
                "{shown} is not the address file of a job and was not changed; name another file"
            ))
        })
    }

    pub(super) fn parse(text: &str) -> Option<Address> {
        let mut words = text.strip_suffix('\n')?.split(' ');
        let address = (words.next()? == MAGIC).then_some(Address {
            place: words.next()?.to_owned(),
            token: Token::from_hex(words.next()?).ok()?,
            machine: words.next()?.to_owned(),
        });
        address.filter(|_| words.next().is_none())
    }

    /// An address of loopback is rank 0's host's own.
    pub(super) fn check_reachable(&self, path: &Path) -> Result<()> {
        let is_loopback = self.place.starts_with("127.") || self.place.starts_with("[::1]");
        if is_loopback && self.machine != machine() {
            return Err(Error::usage(format!(
                "this rank is on another host than rank 0, which listens on loopback only ({} in {}): start each rank \
                 with --bind and an address of its host",
                self.place,
                path.display()
            )));
        }
        Ok(())
    }
}

/// The file of this rank 0. Dropping it removes the file.
pub(super) struct AddressFile {
    path: PathBuf,
    text: String,
}

impl AddressFile {
    /// Writes the file at `path`, with mode 0600. A file that is something else is not replaced.
    pub(super) fn write(path: &Path, place: &str, token: &Token) -> Result<AddressFile> {
        Address::read(path)?;
        let text = format!("{MAGIC} {place} {} {}\n", token.to_hex(), machine());
        let mut temporary: OsString = path.into();
        temporary.push(format!(".{}", std::process::id()));
        // Left by a killed process with the same id.
        let _ = std::fs::remove_file(&temporary);
        let written = || {
            let mut options = OpenOptions::new();
            let mut file: File = options
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&temporary)?;
            file.write_all(text.as_bytes())?;
            std::fs::rename(&temporary, path)
        };
        written().map_err(|e| {
            let _ = std::fs::remove_file(&temporary);
            Error::io(format_args!("cannot write {}", path.display()), e)
        })?;
        Ok(AddressFile {
            path: path.to_owned(),
            text,
        })
    }
}

impl Drop for AddressFile {
    fn drop(&mut self) {
        // Another job may have replaced it.
        if std::fs::read_to_string(&self.path).is_ok_and(|text| text == self.text) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_file_is_private_and_removed_and_other_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("meet");
        let token = Token::generate().unwrap();
        assert!(Address::read(&path).unwrap().is_none());
        std::fs::write(&path, "").unwrap();
        assert!(Address::read(&path).unwrap().is_none());
        let first = AddressFile::write(&path, "127.0.0.1:7", &token).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let read = Address::read(&path).unwrap().unwrap();
        assert_eq!((&*read.place, read.token), ("127.0.0.1:7", token.clone()));
        // Of a job that was killed, say.
        let second = AddressFile::write(&path, "127.0.0.1:8", &token).unwrap();
        drop(first);
        assert_eq!(Address::read(&path).unwrap().unwrap().place, "127.0.0.1:8");
        drop(second);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

        let hex = token.to_hex();
        for garbled in [
            "my thesis, chapter one".to_owned(),
            format!("{hex}\n"),
            format!("{MAGIC} 127.0.0.1:7 {hex} m"),
            format!("{MAGIC} 127.0.0.1:7 {hex} m x\n"),
            format!("{MAGIC} 127.0.0.1:7 {} m\n", &hex[1..]),
        ] {
            std::fs::write(&path, &garbled).unwrap();
            for error in [
                Address::read(&path).map(drop).unwrap_err(),
                AddressFile::write(&path, "127.0.0.1:7", &token)
                    .map(drop)
                    .unwrap_err(),
            ] {
                let text = error.to_string();
                assert!(
                    text.contains("meet") && text.contains("not changed"),
                    "{text}"
                );
                assert!(!text.contains(&hex), "{text}");
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), garbled);
        }
        for (path, why) in [
            (dir.path().join("no such folder/meet"), "No such file"),
            (dir.path().to_owned(), "a folder"),
        ] {
            let error = Address::read(&path).map(drop).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn loopback_of_another_host_is_refused() {
        let token = Token::generate().unwrap();
        let check = |place: &str, machine: &str| {
            let text = format!("{MAGIC} {place} {} {machine}\n", token.to_hex());
            Address::parse(&text)
                .unwrap()
                .check_reachable(Path::new("meet"))
        };
        check("127.0.0.1:7", &machine()).unwrap();
        check("10.0.0.1:7", "other").unwrap();
        for place in ["127.0.0.1:7", "[::1]:7"] {
            let error = check(place, "other").unwrap_err().to_string();
            assert!(error.contains("loopback only"), "{error}");
        }
    }
}
