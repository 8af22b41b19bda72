//! Writes to standard output and standard error. A standard error that cannot be written
//! (closed, or on a full disk) is ignored, where `println!` and `eprintln!` would panic.
//!
//! Messages may contain text from outside (names of tensors, of members of archives, of
//! files), so control characters are made visible ([`visible`]). JSON goes through
//! [`print_json`], where they are escaped. The output of programs under `phalanx launch`
//! passes unchanged.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::text::{visible, visible_json};

use crate::error::{Error, ErrorKind, Result};

/// Writes `text` and a newline to standard error, at once, if that can be written.
pub fn note(text: impl Display) {
    let line = format!("{text}\n");
    let _ = std::io::stderr().write_all(visible(&line).as_bytes());
}

/// Columns of the terminal that standard error is; `None` where it is none.
pub fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stderr()).ok()?;
    // Narrower ones, and terminals that do not know, wrap on their own.
    (size.ws_col >= 40).then_some(size.ws_col.into())
}

/// `text` in lines of at most `columns`, as far as its words allow. What continues a line begins below its text, after
/// its label.
pub fn wrapped(text: &str, columns: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for line in text.lines() {
        let label = line.find("  ").map(|at| {
            let text = line[at..].trim_start();
            line.len() - text.len()
        });
        let indent = label.filter(|label| *label <= 12).unwrap_or(2);
        let mut rest = line.to_owned();
        while rest.chars().count() > columns {
            let spaces = rest.char_indices().enumerate();
            let spaces = spaces.filter(|(_, (at, c))| *c == ' ' && *at > indent);
            let mut spaces = spaces.peekable();
            let mut found = spaces.next();
            while let Some(next) = spaces.next_if(|(column, _)| *column <= columns) {
                found = Some(next);
            }
            let Some((_, (at, _))) = found else {
                break;
            };
            let next = format!("{:indent$}{}", "", rest[at..].trim_start());
            rest.truncate(at);
            lines.push(rest.trim_end().to_owned());
            rest = next;
        }
        lines.push(rest);
    }
    lines.join("\n")
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

/// The command-line arguments, for a summary; bytes that are not UTF-8 are shown as `�`, and secrets as `***`. Flags from a
/// configuration are among them.
pub fn arguments() -> Vec<String> {
    let lossy = |word: &OsStr| word.to_string_lossy().into_owned();
    let words = words();
    let words = words.iter().map(|word| lossy(word));
    let secrets = SECRETS.lock().unwrap_or_else(PoisonError::into_inner);
    secrets.hidden_in(words)
}

/// The words of the command line without the program's name, secrets and flags from a configuration among them.
pub fn words() -> Vec<OsString> {
    let typed = || std::env::args_os().skip(1).collect();
    configured().map_or_else(typed, <[_]>::to_vec)
}

/// Those, if a configuration was read.
pub fn configured() -> Option<&'static [OsString]> {
    ARGUMENTS.get().map(Vec::as_slice)
}

static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();

/// From now on [`arguments`] gives these, without the program's name.
pub fn set_arguments(words: Vec<OsString>) {
    // A process has one command line.
    let _ = ARGUMENTS.set(words);
}

static SECRETS: Mutex<Secrets> = Mutex::new(Secrets {
    flags: Vec::new(),
    values: Vec::new(),
});

/// From now on [`arguments`] does not show these secrets.
pub fn hide(secrets: Secrets) {
    *SECRETS.lock().unwrap_or_else(PoisonError::into_inner) = secrets;
}

/// Flags whose values are secret, with their dashes, and such values.
#[derive(Default)]
pub struct Secrets {
    /// `--token`, `-t`.
    pub flags: Vec<String>,
    /// The values, wherever they are: a flag may be spelled in other ways, or be none.
    pub values: Vec<String>,
}

impl Secrets {
    fn hidden_in(&self, words: impl Iterator<Item = String>) -> Vec<String> {
        let mut follows = false;
        let hide = |word: String| {
            let is_next = std::mem::take(&mut follows) && !word.starts_with("--");
            if is_next || !word.is_empty() && self.values.contains(&word) {
                return "***".to_owned();
            }
            // As torchrun's users type them.
            let dashed = word.replace('_', "-");
            for flag in &self.flags {
                let Some(rest) = dashed.strip_prefix(&**flag) else {
                    continue;
                };
                let is_short = !flag.starts_with("--");
                match rest {
                    "" => follows = true,
                    _ if rest.starts_with('=') => return format!("{}=***", &word[..flag.len()]),
                    _ if is_short => return format!("{}***", &word[..flag.len()]),
                    _ => {}
                }
            }
            let mut values = self.values.iter().filter(|value| !value.is_empty());
            match values.find_map(|value| word.strip_suffix(&**value)) {
                Some(flag) if flag.starts_with('-') => format!("{flag}***"),
                _ => word,
            }
        };
        words.map(hide).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_wrapped_between_words() {
        let line = "training 3 epochs of 47 steps, global batch 64 = 1 x 64, SGD lr 0.05 momentum";
        for columns in 40..100 {
            let lines = wrapped(line, columns);
            assert!(lines.lines().all(|line| line.chars().count() <= columns));
            assert!(lines.split_whitespace().eq(line.split_whitespace()));
            assert_eq!(lines == line, line.len() <= columns, "{columns}");
        }
        for (text, expected) in [
            ("", ""),
            ("aaaa bbbb cccc dddd", "aaaa bbbb\n  cccc\n  dddd"),
            ("data     änderungen ab", "data     änderungen\n         ab"),
            ("a-word-that-is-longer", "a-word-that-is-longer"),
            ("x a-word-that-is-longer y", "x a-word-that-is-longer\n  y"),
            ("first\nsecond one", "first\nsecond one"),
        ] {
            assert_eq!(wrapped(text, 10), expected);
        }
    }

    #[test]
    fn secrets_are_hidden_however_they_are_typed() {
        let owned = |words: &[&str]| -> Vec<String> {
            words.iter().map(|word| (*word).to_owned()).collect()
        };
        let secrets = Secrets {
            flags: owned(&["--api-key", "-k"]),
            values: owned(&["hunter2", ""]),
        };
        for (typed, shown) in [
            (
                &["--api-key", "abc", "--lr", "1"][..],
                &["--api-key", "***", "--lr", "1"][..],
            ),
            (&["--api-key=abc", "x"], &["--api-key=***", "x"]),
            (
                &["--api_key=a_b", "--api_key", "a_b"],
                &["--api_key=***", "--api_key", "***"],
            ),
            (
                &["-k", "abc", "-kabc", "-k=abc"],
                &["-k", "***", "-k***", "-k=***"],
            ),
            (&["hunter2", "--alias=hunter2"], &["***", "--alias=***"]),
            (&["--api-key", "--lr", "1"], &["--api-key", "--lr", "1"]),
            (
                &["--api-keys", "2", "--kind", "x"],
                &["--api-keys", "2", "--kind", "x"],
            ),
            (
                &["my-hunter2.txt", "", "--x="],
                &["my-hunter2.txt", "", "--x="],
            ),
        ] {
            assert_eq!(secrets.hidden_in(owned(typed).into_iter()), owned(shown));
        }
    }
}
