//! Secrets of tasks: values from the environment or a file, which the processes of a task get as variables. They are written
//! nowhere: not in the store, and not in a log.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};

use phalanx_base::error::{Error, Result, refuse};
use phalanx_base::files::read_regular;

use crate::spec::{Task, Workflow};

/// Largest file with a secret, and longest line of a log that is searched at once.
const MOST_BYTES: u64 = 1 << 20;

/// Shorter lines of a secret of several lines, such as a bracket, are not hidden.
const LEAST_HIDDEN: usize = 4;

/// Values by variable.
#[derive(Clone, Default)]
pub(crate) struct Secrets(BTreeMap<String, String>);

/// The value of the variable `name`, else the content of the file that `NAME_FILE` names, without white space at its end.
fn read(name: &str) -> Result<String> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    if let Some(value) = set(name) {
        return Ok(value);
    }
    let Some(path) = set(&format!("{name}_FILE")) else {
        let error = Error::usage(format!("the secret {name} has no value"));
        return Err(error.note(
            "set",
            format!("{name}, or {name}_FILE to the path of a file"),
        ));
    };
    let bytes = read_regular(Path::new(&path), MOST_BYTES).map_err(Error::into_usage)?;
    let text = String::from_utf8(bytes).unwrap_or_default();
    match text.trim_end() {
        value if !value.is_empty() && !value.contains('\0') => Ok(value.to_owned()),
        _ => refuse!("{path} has no text for the secret {name}"),
    }
}

impl Secrets {
    /// Those of all tasks of `workflow`.
    ///
    /// # Errors
    ///
    /// Usage, naming the secret and the task or the file.
    pub fn of(workflow: &Workflow) -> Result<Secrets> {
        let mut values = BTreeMap::new();
        for task in &workflow.tasks {
            for name in &task.secrets {
                let value = read(name).map_err(|e| e.note("for", format!("task {:?}", task.name)));
                values.insert(name.clone(), value?);
            }
        }
        Ok(Secrets(values))
    }

    /// Gives the process of `task` its secrets, none of the other tasks, and its output: `log`, or, if it has secrets, a pipe from
    /// which a thread copies it to `log` without them. The receiver ends with the copy.
    pub fn give(
        &self,
        task: &Task,
        process: &mut Command,
        log: File,
    ) -> io::Result<Option<Receiver<()>>> {
        for (name, value) in &self.0 {
            process.env_remove(format!("{name}_FILE")).env_remove(name);
            if task.secrets.contains(name) {
                process.env(name, value);
            }
        }
        if task.secrets.is_empty() {
            process.stdout(log.try_clone()?).stderr(log);
            return Ok(None);
        }
        let (from, to) = io::pipe()?;
        process.stdout(to.try_clone()?).stderr(to);
        let ((copying, copied), secrets) = (channel(), self.clone());
        let copy = move || {
            secrets.hide(from, log);
            drop(copying);
        };
        let thread = std::thread::Builder::new().name("output".into());
        thread.spawn(copy).map(|_| Some(copied))
    }

    /// Copies `from` to `to` with `***` in place of each secret, and of each line of one. What cannot be written is left out.
    fn hide(&self, from: impl Read, mut to: impl Write) {
        let lines = self.0.values().flat_map(|value| value.lines());
        let lines = lines.filter(|line| line.len() >= LEAST_HIDDEN);
        let mut hidden: Vec<&str> = self.0.values().map(String::as_str).chain(lines).collect();
        hidden.sort_by_key(|value| std::cmp::Reverse(value.len()));
        let (mut from, mut line) = (BufReader::new(from), Vec::new());
        while { &mut from }
            .take(MOST_BYTES)
            .read_until(b'\n', &mut line)
            .is_ok_and(|count| count > 0)
        {
            let text = String::from_utf8_lossy(&line).into_owned();
            let replace = |text: String, value: &&str| text.replace(value, "***");
            let _ = to.write_all(hidden.iter().fold(text, replace).as_bytes());
            line.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_their_lines_are_hidden() {
        let values = ["abcab", "abc", "zz", "{\nkey of\n}"];
        let values = values.map(|value| (value.to_owned(), value.to_owned()));
        let secrets = Secrets(values.into());
        for (text, want) in [
            ("", ""),
            ("no secret\n{ }\n", "no secret\n{ }\n"),
            ("abcabc abca ab", "***c ***a ab"),
            ("xabcabx\nzzz\r", "x***x\n***z\r"),
            ("{\nkey of\n}\n", "{\n***\n}\n"),
        ] {
            let mut shown = Vec::new();
            secrets.hide(text.as_bytes(), &mut shown);
            assert_eq!(String::from_utf8(shown).unwrap(), want, "{text:?}");
        }
    }
}
