//! What the program says on its two outputs. A standard error that cannot be written
//! (closed, or a full disk behind it) never ends anything: whoever closed it does
//! not want to read. `println!` and `eprintln!` would panic there.
//!
//! What others wrote (names of tensors, members of archives, files) may be part of a message:
//! control characters of all messages are shown and not sent ([`visible`]). JSON goes through
//! [`print_json`], where they stay what they mean. The output of programs under `phalanx
//! launch` is theirs and passes as it is.

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

/// As [`print()`], of JSON; gives whether somebody still reads.
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

/// What was typed after the program's name, for a summary; what is no UTF-8 in it is shown as `�`.
pub fn arguments() -> Vec<String> {
    let lossy = |word: &OsStr| word.to_string_lossy().into_owned();
    std::env::args_os()
        .skip(1)
        .map(|word| lossy(&word))
        .collect()
}
