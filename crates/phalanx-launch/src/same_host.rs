//! The store file of ranks that `srun`, `mpirun` or torchrun started on one host, which only
//! their user can open. No network is involved, so they need neither a port nor a token.
//!
//! The file is named after the process that started the ranks. Wrappers between that and a rank
//! (a shell, `numactl`) are told by their environment, which is the rank's. That of a process of another user, or of
//! one that hides it (a setuid program), cannot be read: it is taken for a wrapper too, unless it has the name of a
//! program that starts ranks.

use std::fs::DirBuilder;
use std::io::ErrorKind as IoKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use phalanx_process::proc_stat::stat;
use phalanx_store::FileStore;
use sha2::{Digest, Sha256};

use super::place::Env;
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

/// Programs that start ranks, by the first 15 characters of their names.
const STARTERS: [&str; 10] = [
    "slurmstepd",
    "orted",
    "prted",
    "prterun",
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "hydra_pmi_proxy",
    "hydra_bstrap_pr",
    "torchrun",
];

/// The store file of the ranks on this host, in a private folder that is made if need be.
/// `None`: the process that started this rank cannot be found.
///
/// # Errors
///
/// Usage, for a folder of another user, and where a process that hides its environment may or may not be the one that
/// started the ranks.
pub fn store_file(env: &Env) -> Result<Option<PathBuf>> {
    let (pid, started) = match find_starter(env, std::process::id(), look) {
        ParentProcess::Found(pid, started) => (pid, started),
        ParentProcess::Gone => return Ok(None),
        ParentProcess::Hidden { pid, name } => {
            return Err(Error::usage(format!(
                "cannot find the process that started this rank: process {pid} ({name}) above it does not let this user read its environment"
            ))
            .note(
                "fix",
                "phalanx token --out job.token, and add --token-file job.token --init-method tcp://127.0.0.1:29500 to all ranks",
            )
            .note("or", "start the ranks inside the wrapper, not each rank with its own"));
        }
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
    let file = folder.join(format!("ranks-{name}"));
    remove_abandoned(&folder, &file);
    Ok(Some(file))
}

/// Removes what killed ranks have left in `folder`, all but `own`: the last one that closes a store removes it.
fn remove_abandoned(folder: &Path, own: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path != own && path.extension().is_none() {
            drop(FileStore::open(path));
        }
    }
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
    match find_starter(env, std::process::id(), look) {
        ParentProcess::Found(pid, started) => Some((pid, started)),
        ParentProcess::Gone | ParentProcess::Hidden { .. } => None,
    }
}

/// The process that started the ranks.
#[derive(Debug, PartialEq)]
enum ParentProcess {
    /// Its number and start.
    Found(u32, u64),
    /// It has ended, or `/proc` cannot be read.
    Gone,
    /// It may be above this one.
    Hidden { pid: u32, name: String },
}

/// A process, as `/proc` shows it.
struct Process {
    parent: u32,
    started: u64,
    name: String,
    /// `None`: it cannot be read.
    environ: Option<Vec<u8>>,
}

fn look(pid: u32) -> Option<Process> {
    let stat = stat(pid)?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let environ = match std::fs::read(format!("/proc/{pid}/environ")) {
        Err(error) if error.kind() == IoKind::PermissionDenied => None,
        environ => Some(environ.unwrap_or_default()),
    };
    Some(Process {
        parent: stat.parent,
        started: stat.started,
        name: name.trim_end().to_owned(),
        environ,
    })
}

/// The first process above `rank` that is no wrapper.
fn find_starter(env: &Env, rank: u32, look: impl Fn(u32) -> Option<Process>) -> ParentProcess {
    let own: Vec<Vec<u8>> = OF_A_RANK
        .iter()
        .filter_map(|name| Some(format!("{name}={}", env.get(*name)?).into_bytes()))
        .collect();
    let Some(mut below) = look(rank) else {
        return ParentProcess::Gone;
    };
    let mut hidden = None;
    loop {
        let pid = below.parent;
        let Some(process) = look(pid) else {
            break;
        };
        let is_wrapper = match &process.environ {
            None => !STARTERS.contains(&process.name.as_str()),
            Some(environ) => {
                let has = |pair| environ.split(|byte| *byte == 0).any(|other| other == pair);
                !own.is_empty() && own.iter().all(|pair| has(pair.as_slice()))
            }
        };
        // Process 1 has started everything.
        if !is_wrapper && (pid > 1 || hidden.is_none()) {
            return ParentProcess::Found(pid, process.started);
        }
        if !is_wrapper {
            break;
        }
        if process.environ.is_none() && hidden.is_none() {
            hidden = Some((pid, process.name.clone()));
        }
        below = process;
    }
    match hidden {
        None => ParentProcess::Gone,
        Some((pid, name)) => ParentProcess::Hidden { pid, name },
    }
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

    /// mpirun (10) starts `sudo` (20), which starts a shell (30), which starts the rank (40).
    #[test]
    fn a_wrapper_that_hides_its_environment_is_passed() {
        let env: Env = [("OMPI_COMM_WORLD_RANK", "1"), ("PMIX_NAMESPACE", "a")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        let of_rank = b"HOME=/\0PMIX_NAMESPACE=a\0OMPI_COMM_WORLD_RANK=1\0";
        let of_job = b"PMIX_NAMESPACE=a\0";
        let find = |mpirun: (&str, Option<&[u8]>), sudo: Option<&[u8]>| {
            find_starter(&env, 40, |pid| {
                let (parent, name, environ): (u32, &str, Option<&[u8]>) = match pid {
                    1 => (0, "init", None),
                    10 => (1, mpirun.0, mpirun.1),
                    20 => (10, "sudo", sudo),
                    30 => (20, "sh", Some(of_rank)),
                    40 => (30, "my-net", Some(of_rank)),
                    _ => return None,
                };
                Some(Process {
                    parent,
                    started: u64::from(pid) + 1000,
                    name: name.to_owned(),
                    environ: environ.map(<[u8]>::to_vec),
                })
            })
        };
        let mpirun = ParentProcess::Found(10, 1010);
        assert_eq!(find(("mpirun", Some(of_job)), Some(of_rank)), mpirun);
        assert_eq!(find(("mpirun", Some(of_job)), None), mpirun);
        // Of another user, as slurmstepd is.
        assert_eq!(
            find(("slurmstepd", None), None),
            ParentProcess::Found(10, 1010)
        );
        // It may be any of them.
        let hidden = ParentProcess::Hidden {
            pid: 20,
            name: "sudo".to_owned(),
        };
        assert_eq!(find(("launch.sh", None), None), hidden);
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
