//! The files below a folder.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use phalanx_base::{Error, Result, refuse};

/// Most folders within each other. Links may lead in a circle.
pub(crate) const MAX_DEPTH: usize = 32;

/// The sorted names in `folder`, and whether they are folders. Links are followed; names that begin with a dot are left out.
pub(crate) fn names(folder: &Path) -> Result<Vec<(OsString, bool)>> {
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
            Error::usage(format!("no folder {}", folder.display())).with_source(e)
        }
        _ => Error::io("cannot read", folder, e),
    };
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        // A link that leads nowhere is no folder.
        let is_folder = match entry.file_type().map_err(failed)? {
            kind if kind.is_symlink() => {
                fs::metadata(entry.path()).is_ok_and(|there| there.is_dir())
            }
            kind => kind.is_dir(),
        };
        all.push((name, is_folder));
    }
    all.sort();
    Ok(all)
}

/// Adds the `wanted` files below `folder`, a path below `root`, in the order of their names.
pub(crate) fn list(
    root: &Path,
    folder: &Path,
    depth: usize,
    wanted: &dyn Fn(&Path) -> bool,
    files: &mut Vec<PathBuf>,
) -> Result<()> {
    let Some(depth) = depth.checked_sub(1) else {
        refuse!(
            "{} lies too deep; a link in it may lead to itself",
            root.join(folder).display()
        );
    };
    for (name, is_folder) in names(&root.join(folder))? {
        let path = folder.join(name);
        if is_folder {
            list(root, &path, depth, wanted, files)?;
        } else if wanted(&path) {
            files.push(path);
        }
    }
    Ok(())
}
