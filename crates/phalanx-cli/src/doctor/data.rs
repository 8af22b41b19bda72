//! The data set's folder.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use phalanx_data::{cifar10, mnist};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::check::Check;
use crate::format;

/// More files than this are a typing error, such as `--data /`.
const MOST_FILES: usize = 100_000;
/// Files whose sizes travel to rank 0, which names the first that differs.
const LISTED: usize = 200;

/// What a host has in the folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Data {
    Found {
        /// The data set that a recipe would find there.
        known: Option<String>,
        files: usize,
        bytes: u64,
        /// Of the names and sizes of all files.
        fingerprint: String,
        /// The sizes of the first files by name.
        sizes: BTreeMap<String, u64>,
    },
    Missing(String),
}

/// Lists the folder; no file is read.
pub fn scan(folder: &Path) -> Data {
    let mut sizes = BTreeMap::new();
    if let Err(e) = list(folder, folder, &mut sizes) {
        return Data::Missing(format!("{}: {e}", folder.display()));
    }
    let mut hash = Sha256::new();
    for (name, size) in &sizes {
        hash.update(name.as_bytes());
        hash.update([0]);
        hash.update(size.to_le_bytes());
    }
    let known = match (mnist::check(folder), cifar10::check(folder)) {
        (Ok(()), _) => Some("MNIST"),
        (_, Ok(_)) => Some("CIFAR-10"),
        _ => None,
    };
    Data::Found {
        known: known.map(str::to_owned),
        files: sizes.len(),
        bytes: sizes.values().sum(),
        fingerprint: short(&hash.finalize()),
        sizes: sizes.into_iter().take(LISTED).collect(),
    }
}

/// The first 8 bytes of a hash.
pub fn short(hash: &[u8]) -> String {
    hash.iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn list(root: &Path, folder: &Path, sizes: &mut BTreeMap<String, u64>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        // Through links, as the loaders read.
        let about = std::fs::metadata(&path)?;
        if about.is_dir() {
            // A link to a folder may lead back.
            if !path.is_symlink() {
                list(root, &path, sizes)?;
            }
            continue;
        }
        std::fs::File::open(&path)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        let name = path.strip_prefix(root).unwrap_or(&path);
        sizes.insert(name.to_string_lossy().into_owned(), about.len());
        if sizes.len() > MOST_FILES {
            return Err(io::Error::other(format!("more than {MOST_FILES} files")));
        }
    }
    Ok(())
}

impl Data {
    /// Of one host.
    pub fn check(&self) -> Check {
        const NAME: &str = "data";
        match self {
            Data::Missing(why) => Check::problem(
                NAME,
                format!("cannot be read: {why}"),
                "copy the data set to this host, or mount it there (phalanx download)",
            ),
            Data::Found { files: 0, .. } => Check::problem(
                NAME,
                "an empty folder",
                "phalanx download mnist, or another folder",
            ),
            Data::Found {
                known,
                files,
                bytes,
                ..
            } => {
                let known = known
                    .as_deref()
                    .map_or("no data set of a built-in recipe".to_owned(), str::to_owned);
                let bytes = format::bytes(usize::try_from(*bytes).unwrap_or(usize::MAX));
                let files = format::plural(*files, "file");
                Check::ok(NAME, format!("{known}: {files}, {bytes}"))
            }
        }
    }

    /// The first difference between what the host `here` has and the `other` data of the host `there`, if there is one.
    pub fn difference(&self, here: &str, other: &Data, there: &str) -> Option<String> {
        let (
            Data::Found {
                fingerprint, sizes, ..
            },
            Data::Found {
                fingerprint: their_fingerprint,
                sizes: theirs,
                ..
            },
        ) = (self, other)
        else {
            return None;
        };
        if fingerprint == their_fingerprint {
            return None;
        }
        let names = sizes.keys().chain(theirs.keys());
        let mut differing: Vec<&String> = names
            .filter(|name| sizes.get(*name) != theirs.get(*name))
            .collect();
        differing.sort();
        let size = |size: Option<&u64>| size.map_or("none".to_owned(), |n| format!("{n} bytes"));
        Some(match differing.first() {
            Some(name) => format!(
                "{name}: {} on {here}, {} on {there}",
                size(sizes.get(*name)),
                size(theirs.get(*name))
            ),
            None => "other files".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::Status;

    #[test]
    fn folders_differ_by_names_and_sizes() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str, files: &[(&str, usize)]| {
            let folder = dir.path().join(name);
            std::fs::create_dir_all(folder.join("in")).unwrap();
            for (name, size) in files {
                std::fs::write(folder.join(name), vec![7; *size]).unwrap();
            }
            scan(&folder)
        };
        let a = folder("a", &[("x", 3), ("in/y", 4)]);
        let same = folder("same", &[("in/y", 4), ("x", 3)]);
        let longer = folder("longer", &[("x", 3), ("in/y", 5)]);
        let more = folder("more", &[("x", 3), ("in/y", 4), ("z", 0)]);
        assert_eq!(a, same);
        assert_eq!(a.difference("a", &same, "b"), None);
        let said = a.difference("a", &longer, "b").unwrap();
        assert_eq!(said, "in/y: 4 bytes on a, 5 bytes on b");
        let said = a.difference("a", &more, "b").unwrap();
        assert_eq!(said, "z: none on a, 0 bytes on b");
        let check = a.check();
        assert_eq!((check.status, check.fix), (Status::Ok, None));
        assert!(check.found.ends_with("2 files, 7 B"), "{}", check.found);

        assert_eq!(folder("empty", &[]).check().status, Status::Problem);
        let missing = scan(&dir.path().join("no"));
        assert_eq!(missing.check().status, Status::Problem);
        assert_eq!(
            a.difference("a", &missing, "b"),
            None,
            "said of that host already"
        );
    }
}
