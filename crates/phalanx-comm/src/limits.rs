//! The system's resource limits for a process, and how errors name them.

use std::io;

pub(crate) use phalanx_store::auth::is_out_of_files;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit for open files of this process to the hard limit, as forming a group does: in each group, a
/// rank has three connections to every rank of another host and a pidfd for every rank of its own host. For programs that
/// start ranks and keep pipes to them.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(e) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("the limit for open files stays: {e}");
    }
}

/// The error's text; for a limit that was hit, with the limit and the remedy.
pub(crate) fn explain(e: &io::Error) -> String {
    match Errno::from_io_error(e) {
        Some(Errno::MFILE) => format!("{e}: {}", open_files()),
        Some(Errno::NFILE) => format!("{e}: the limit of the whole system (sysctl fs.file-max)"),
        _ => e.to_string(),
    }
}

/// The remedy, to be appended to the text, if `e` comes from a limit for open files.
pub(crate) fn hint(e: &(dyn std::error::Error + 'static)) -> String {
    let chain = std::iter::successors(Some(e), |e| e.source());
    let is_full = chain
        .filter_map(|e| e.downcast_ref::<io::Error>())
        .any(is_out_of_files);
    match is_full {
        true => format!(": {}", open_files()),
        false => String::new(),
    }
}

/// The limit for open files, as errors name it.
pub(crate) fn open_files() -> String {
    let limit = getrlimit(Resource::Nofile).current;
    let limit = limit.map_or("any number of".to_owned(), |limit| limit.to_string());
    format!(
        "this process may have {limit} files and sockets open (ulimit -n), which is the hard limit; \
         raise that (ulimit -Hn, LimitNOFILE= of a service, docker --ulimit nofile=)"
    )
}

/// Fails if a file of `bytes` exceeds this process's file size limit. Creating it would not
/// fail but kill the process (SIGXFSZ).
pub(crate) fn check_file_size(bytes: usize) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < bytes as u64 => Err(io::Error::other(format!(
            "{bytes} bytes of shared memory are more than the limit for file sizes of {limit} bytes \
             (ulimit -f)"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_named_where_it_was_hit() {
        let text = |errno: Errno| explain(&errno.into());
        assert!(
            text(Errno::MFILE).contains("ulimit -n"),
            "{}",
            text(Errno::MFILE)
        );
        assert!(text(Errno::NFILE).contains("fs.file-max"));
        assert!(!text(Errno::NOENT).contains("limit"));
        let error = crate::Error::io("cannot listen", Errno::MFILE.into());
        assert!(error.to_string().contains("ulimit -n"), "{error}");
    }
}
