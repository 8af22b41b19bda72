//! Files and folders by the SHA-256 of their content.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use phalanx_data::files::create_folder;
use phalanx_process::error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::spec::Type;

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

/// The folder `objects` of a store, and `tmp` beside it.
#[derive(Debug)]
pub(crate) struct Objects {
    root: PathBuf,
    tmp: PathBuf,
}

impl Objects {
    pub fn new(store: &Path) -> Objects {
        Objects {
            root: store.join("objects"),
            tmp: store.join("tmp"),
        }
    }

    pub fn path(&self, object: &Object) -> PathBuf {
        let (group, _) = object.sha256.split_at(2.min(object.sha256.len()));
        self.root.join(group).join(&object.sha256)
    }

    /// Removes what a killed engine left.
    pub fn clear_tmp(&self) {
        let _ = fs::remove_dir_all(&self.tmp);
    }

    /// Why `object` cannot be used: missing or damaged. Reads all of it.
    pub fn check(&self, object: &Object) -> std::result::Result<(), String> {
        let path = self.path(object);
        match digest(&path, object.kind, false) {
            Ok(found) if found == *object => Ok(()),
            Ok(_) => Err(format!("{} is damaged", path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(format!("{} is missing", path.display()))
            }
            Err(error) => Err(format!("{} cannot be read: {error}", path.display())),
        }
    }

    /// Moves the file or folder at `path`, on the same file system, into the store. It is on
    /// the disk when this returns. Links and devices in it are an error of kind `Usage`.
    pub fn adopt(&self, path: &Path, kind: Type) -> Result<Object> {
        let object = digest(path, kind, true).map_err(|error| {
            // A link or a device in it.
            let is_wrong = error.kind() == io::ErrorKind::InvalidInput;
            let error = cannot("store", path, error);
            if is_wrong { error.into_usage() } else { error }
        })?;
        let to = self.path(&object);
        if to.symlink_metadata().is_ok() {
            if self.check(&object).is_ok() {
                return Ok(object);
            }
            self.discard(&to)?;
        }
        let group = to.parent().unwrap_or(&self.root);
        create_folder(group)?;
        fs::rename(path, &to).map_err(|error| cannot("store", path, error))?;
        for folder in [group, &self.root] {
            sync(folder).map_err(|error| cannot("save", folder, error))?;
        }
        Ok(object)
    }

    /// Copies the file or folder at `path` into the store, unless it is there.
    pub fn import(&self, path: &Path, kind: Type) -> Result<Object> {
        // Links to the file or folder itself are followed, for the user named it.
        let path =
            &fs::canonicalize(path).map_err(|error| cannot("read", path, error).into_usage())?;
        let object =
            digest(path, kind, false).map_err(|error| cannot("read", path, error).into_usage())?;
        if self.check(&object).is_ok() {
            return Ok(object);
        }
        create_folder(&self.tmp)?;
        let copy = self.tmp.join(format!("import-{}", object.sha256));
        copy_all(path, &copy).map_err(|error| cannot("copy", path, error))?;
        self.adopt(&copy, kind)
    }

    /// Removes an object.
    pub fn discard(&self, path: &Path) -> Result<()> {
        create_folder(&self.tmp)?;
        let name = path.file_name().unwrap_or_default();
        let aside = self.tmp.join(name).with_extension("removed");
        // First aside, so that a killed process leaves no half of it.
        fs::rename(path, &aside)
            .and_then(|()| match aside.symlink_metadata()?.is_dir() {
                true => fs::remove_dir_all(&aside),
                false => fs::remove_file(&aside),
            })
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
        true => said.note("try", "free some space, then continue with `--resume last`"),
        false => said,
    }
}

fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
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

/// Reads the file or folder at `path`; with `keep` it becomes read-only and is written to the disk.
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
    let mut hash = Sha256::new();
    let mut bytes = 0;
    if found.is_file() {
        let mut file = File::open(path)?;
        let mut buffer = vec![0; 256 << 10];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => {
                    hash.update(&buffer[..read]);
                    bytes += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if keep {
            let mode = found.permissions().mode();
            fs::set_permissions(path, Permissions::from_mode(mode & 0o555 | 0o400))?;
            file.sync_all()?;
        }
    } else {
        hash.update(b"folder\n");
        for (name, path) in entries(path)? {
            let found = path.symlink_metadata()?;
            let kind = match found.is_dir() {
                true => Type::Folder,
                // A link or device is refused there.
                false => Type::File,
            };
            let object = digest(&path, kind, keep)?;
            let is_program = found.is_file() && found.permissions().mode() & 0o100 != 0;
            hash.update([u8::from(found.is_dir()), u8::from(is_program)]);
            hash.update(&object.sha256);
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name.as_bytes());
            bytes += object.bytes;
        }
        if keep {
            sync(path)?;
        }
    }
    Ok(Object {
        kind,
        sha256: hex::encode(hash.finalize()),
        bytes,
    })
}

/// Copies a file or folder, with modes; links inside are refused by [`digest`] before.
pub(crate) fn copy_all(from: &Path, to: &Path) -> io::Result<()> {
    if !from.symlink_metadata()?.is_dir() {
        return fs::copy(from, to).map(|_| ());
    }
    fs::create_dir(to)?;
    for (name, path) in entries(from)? {
        copy_all(&path, &to.join(name))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
