//! The store file of ranks that `srun`, `mpirun` or torchrun started on one host, which only
//! their user can open. No network is involved, so they need neither a port nor a token.
//!
//! The file is named after the process that started the ranks. Wrappers between that and a rank
//! (a shell, `numactl`) are told by their environment, which is the rank's.

use std::fs::DirBuilder;
use std::io::ErrorKind as IoKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::cluster::Env;
use crate::error::{Error, Result};

/// Variables that identify one rank of one job. The process that started the ranks has other
/// values, or none.
const OF_A_RANK: [&str; 7] = [
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_NAMESPACE",
    "SLURM_PROCID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
];

/// Variables that tell apart jobs which the same process started.
const OF_A_JOB: [&str; 4] = [
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
];

/// The store file of the ranks on this host, in a private folder that is made if need be.
/// `None`: the process that started this rank cannot be found.
///
/// # Errors
///
/// Usage, for a folder of another user.
pub fn store_file(env: &Env) -> Result<Option<PathBuf>> {
    let Some((pid, started)) = starter(env) else {
        return Ok(None);
    };
    let mut name = Sha256::new();
    name.update(format!("{pid} {started}"));
    for variable in OF_A_JOB {
        name.update([0]);
        name.update(env.get(variable).map_or("", String::as_str));
    }
    let name = hex::encode(&name.finalize()[..8]);
    let uid = rustix::process::geteuid().as_raw();
    let folder = std::env::temp_dir().join(format!("phalanx-{uid}"));
    private_folder(&folder, uid)?;
    Ok(Some(folder.join(format!("ranks-{name}"))))
}

/// Makes a folder that only this user may enter, or checks that it is one.
fn private_folder(path: &Path, uid: u32) -> Result<()> {
    let shown = path.display();
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != IoKind::AlreadyExists => {
            return Err(Error::usage(format!("cannot make the folder {shown}"))
                .caused_by(error)
                .note("fix", "set TMPDIR to a folder that can be written"));
        }
        _ => {}
    }
    let about = std::fs::symlink_metadata(path)
        .map_err(|error| Error::usage(format!("cannot use the folder {shown}")).caused_by(error))?;
    if about.is_dir() && about.uid() == uid && about.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{shown} is not a folder that only user {uid} may enter"
    ))
    .note("fix", "remove it, or set TMPDIR to another folder"))
}

/// Process id and start of the process that started this rank on this host.
pub(super) fn starter(env: &Env) -> Option<(u32, u64)> {
    let own: Vec<Vec<u8>> = OF_A_RANK
        .iter()
        .filter_map(|name| Some(format!("{name}={}", env.get(*name)?).into_bytes()))
        .collect();
    let mut pid = std::process::id();
    loop {
        let (parent, _) = stat(pid)?;
        let (_, started) = stat(parent)?;
        // That of another user cannot be read, and is none of ours.
        let environ = std::fs::read(format!("/proc/{parent}/environ")).unwrap_or_default();
        let is_wrapper = own
            .iter()
            .all(|pair| environ.split(|byte| *byte == 0).any(|other| other == pair));
        if !is_wrapper || own.is_empty() {
            return Some((parent, started));
        }
        pid = parent;
    }
}

/// A process's parent and its start, in clock ticks since the host's.
pub(crate) fn stat(pid: u32) -> Option<(u32, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may hold any.
    let (_, rest) = text.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let parent = fields.nth(1)?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some((parent, started))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_parent_of_this_process_is_found() {
        let parent = rustix::process::getppid().unwrap().as_raw_nonzero().get();
        let (pid, started) = starter(&Env::from([("RANK".into(), "no such rank".into())])).unwrap();
        assert_eq!(pid, parent.unsigned_abs());
        assert!(started > 0);
        assert_eq!(starter(&Env::new()), Some((pid, started)));
    }

    #[test]
    fn a_folder_that_others_may_enter_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let me = rustix::process::geteuid().as_raw();
        let folder = dir.path().join("f");
        for _ in 0..2 {
            private_folder(&folder, me).unwrap();
        }
        let refused = |path: &Path, uid| {
            let error = private_folder(path, uid).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(
                error.chain().contains("not a folder that only"),
                "{}",
                error.chain()
            );
        };
        refused(&folder, me + 1);
        std::os::unix::fs::symlink(&folder, dir.path().join("link")).unwrap();
        refused(&dir.path().join("link"), me);
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        refused(&folder, me);
    }
}
