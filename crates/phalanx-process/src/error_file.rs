//! The file in which a process leaves the error that it ends with, for the launcher that has started it.

use std::io::Read as _;
use std::path::Path;
use std::process::ExitCode;

use phalanx_base::files::open_regular;
use phalanx_base::{Error, Result, stop};

/// The process id of the child. It need not print its last error: the launcher does, from the
/// error file. [`LAUNCHER`], until the shim knows the process id.
pub const ERRORS_VARIABLE: &str = "PHALANX_ERRORS";
/// See [`ERRORS_VARIABLE`].
pub const LAUNCHER: &str = "launcher";
/// Where a child may leave a report of its failure.
pub const ERROR_FILE_VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";
/// Where a report of ours has the exit code.
const CODE: &str = "phalanx_exit_code";
/// The same for the signal that asked this process, and through it the job, to stop.
const SIGNAL: &str = "phalanx_signal";
/// Error files are short; no more than this is read of one.
const ERROR_FILE_BYTES: u64 = 1 << 20;

/// The exit code of a command that ended so. An error is [reported](report).
pub fn exit_code(outcome: Result<()>) -> ExitCode {
    let Err(error) = outcome else {
        return ExitCode::SUCCESS;
    };
    report(&error);
    ExitCode::from(error.exit_code())
}

/// Leaves an error to the launcher of this process, if it has one (which prints it once, with what else it knows), or
/// prints it here.
pub fn report(error: &Error) {
    let text = error.render();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    let text = Some(text).filter(|_| !error.is_printed());
    if !hand_over(text, error.exit_code()) {
        error.print();
    }
}

/// Writes the exit code into the error file, if our launcher has started this process or an ancestor of it.
/// If this process is the rank itself, it also writes `text`. Returns whether the launcher will print the
/// error; otherwise it must be printed here.
fn hand_over(text: Option<&str>, code: u8) -> bool {
    let Ok(pid) = std::env::var(ERRORS_VARIABLE) else {
        return false;
    };
    let Some(path) = std::env::var_os(ERROR_FILE_VARIABLE) else {
        return false;
    };
    // `LAUNCHER`: this is the rank before it has become its program.
    let is_rank = pid == LAUNCHER || pid == std::process::id().to_string();
    let mut report = serde_json::json!({ CODE: code });
    if let Some(text) = text.filter(|_| is_rank) {
        report["message"] = text.into();
    }
    if let Some(signal) = stop::cause() {
        report[SIGNAL] = signal.into();
    }
    std::fs::write(path, report.to_string()).is_ok() && is_rank
}

/// The exit code in an error file that [`report`] wrote.
pub fn reported_code(json: &str) -> Option<i32> {
    reported(json, CODE)
}

/// The signal in an error file that [`report`] wrote.
pub fn reported_signal(json: &str) -> Option<i32> {
    reported(json, SIGNAL)
}

fn reported(json: &str, name: &str) -> Option<i32> {
    let value: serde_json::Value = serde_json::from_str(json).ok()?;
    i32::try_from(value.get(name)?.as_i64()?).ok()
}

/// What a rank wrote into its error file, if anything. The rank may have put anything there, such as a pipe
/// without a writer.
pub fn error_file_text(path: &Path) -> Option<String> {
    let file = open_regular(path).ok()?;
    let mut text = String::new();
    file.take(ERROR_FILE_BYTES).read_to_string(&mut text).ok()?;
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_no_error_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        assert_eq!(error_file_text(&path), None);
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        assert_eq!(error_file_text(&path), None);
    }
}
