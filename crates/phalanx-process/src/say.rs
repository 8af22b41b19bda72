//! Writes to standard output and standard error. A standard error that cannot be written
//! (closed, or on a full disk) is ignored, where `println!` and `eprintln!` would panic.
//!
//! Messages may contain text from outside (names of tensors, of members of archives, of
//! files), so control characters are made visible ([`visible`]). JSON goes through
//! [`print_json`], where they are escaped. The output of programs under `phalanx launch`
//! passes unchanged.

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::Write;

use phalanx_data::text::{visible, visible_json};

use crate::error::{Error, ErrorKind, Result};

/// Writes `text` and a newline to standard error, at once, if that can be written.
pub fn note(text: impl Display) {
    let line = format!("{text}\n");
    let _ = std::io::stderr().write_all(visible(&line).as_bytes());
}

/// Writes `block` to standard output at once.
///
/// # Errors
///
/// Fails when standard output cannot be written. A closed pipe is success.
pub fn print(block: &str) -> Result<()> {
    write(visible(block).as_bytes()).map(|_| ())
}

/// As [`print()`], for JSON; returns whether the output is still read (not a closed pipe).
pub fn print_json(block: &str) -> Result<bool> {
    write(visible_json(block).as_bytes())
}

fn write(block: &[u8]) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    match out.write_all(block).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => {
            Err(Error::new(ErrorKind::Failed, "standard output could not be written").caused_by(e))
        }
        Ok(()) => Ok(true),
    }
}

/// The command-line arguments, for a summary; bytes that are not UTF-8 are shown as `�`.
pub fn arguments() -> Vec<String> {
    let lossy = |word: &OsStr| word.to_string_lossy().into_owned();
    std::env::args_os()
        .skip(1)
        .map(|word| lossy(&word))
        .collect()
}
