//! The files in a job's folder, by which pages that show the job know it. Its launcher and its rank 0 write them.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use crate::files::read_regular;

/// The job, its ranks and their states, and messages of its launcher, in JSON.
pub const JOB_FILE: &str = "job.json";

/// Where rank 0 writes the path of its run's folder.
pub const RUN_POINTER: &str = "run-folder";

/// The longest path of a folder.
const PATH_BYTES: u64 = 16 << 10;

/// The file with the number of lines that rank `rank` has printed, and the last of them, in JSON.
pub fn output_file(rank: usize) -> String {
    format!("output-{rank}.json")
}

/// The folder of the run, once rank 0 of the job in `folder` has named it.
pub fn run_folder(folder: &Path) -> Option<PathBuf> {
    let path = read_regular(&folder.join(RUN_POINTER), PATH_BYTES).ok()?;
    let path = PathBuf::from(OsString::from_vec(path));
    path.is_absolute().then_some(path)
}
