//! The text of the final report: what happened, to which rank, and what it printed.

use std::fmt;
use std::time::Duration;

use phalanx_base::format::rank_list;
use serde::{Deserialize, Serialize};

use super::machine::ExitStatus;
use crate::error::{Error, ErrorKind};
use crate::stop::signal_name;

/// Label of the note that says what a rank was doing.
pub const WHILE: &str = "while";
/// Lines of a rank's stderr that the report repeats, at most.
const SAID_LINES: usize = 20;
/// Without a recognisable message, only the end is shown.
const LAST_LINES: usize = 10;

/// Why the job ended, as launchers publish it in the store.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct JobFailure {
    /// The exit code for every launcher.
    pub code: u8,
    /// Probably the consequence of something not yet reported.
    pub echo: bool,
    /// A rank reported a usage error, or printed all there is to say: only the message is shown.
    #[serde(default)]
    pub mistake: bool,
    /// The node that published it.
    pub node: usize,
    /// One line, lower case.
    pub message: String,
    /// Indented lines, as (label, text).
    pub notes: Vec<(String, String)>,
}

impl JobFailure {
    /// The verdict of `node` with one line of text.
    pub fn new(code: u8, node: usize, message: impl Into<String>) -> JobFailure {
        JobFailure {
            code,
            echo: false,
            mistake: false,
            node,
            message: message.into(),
            notes: Vec::new(),
        }
    }

    /// The verdict if the launcher of `node`, this process, is killed or ends without publishing one.
    pub fn of_killed(node: usize, host: &str) -> JobFailure {
        let message = format!(
            "the launcher of node {node} (pid {}, host {host}) ended unexpectedly, and its ranks with it",
            std::process::id(),
        );
        JobFailure::new(ErrorKind::PeerLost.exit_code(), node, message)
    }

    /// Whether it is a rank's timeout whose cause is unknown on its node.
    pub fn is_unexplained_timeout(&self) -> bool {
        self.echo && self.code == ErrorKind::Timeout.exit_code()
    }

    /// The error that this launcher prints and ends with.
    pub fn into_error(self, stopped: Option<String>) -> Error {
        let mut error = Error::new(ErrorKind::from_exit_code(self.code), self.message);
        // First what the rank was doing, then the consequences.
        let (first, rest): (Vec<_>, Vec<_>) = self
            .notes
            .into_iter()
            .partition(|(label, _)| label == WHILE);
        let so = stopped.map(|stopped| ("so".to_owned(), stopped));
        for (label, text) in first.into_iter().chain(so).chain(rest) {
            error = error.note(&label, text);
        }
        error
    }
}

/// How messages name a rank.
#[derive(Clone, Debug)]
pub struct RankName<'a> {
    /// Global rank.
    pub rank: usize,
    /// Process id.
    pub pid: i32,
    /// Host name.
    pub host: &'a str,
    /// Node number, when there are several.
    pub node: Option<usize>,
}

impl fmt::Display for RankName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = self.node.map_or(String::new(), |n| format!("node {n}, "));
        let RankName {
            rank, pid, host, ..
        } = self;
        write!(f, "rank {rank} ({node}pid {pid}, host {host})")
    }
}

/// `was killed by SIGKILL`, `exited with code 7`. Codes mean what ours do for `ours`, a
/// program that has reported one.
pub fn ended(end: ExitStatus, ours: bool) -> String {
    match end {
        ExitStatus::Signal(signal) => format!("was killed by {}", signal_name(signal)),
        ExitStatus::Code(130) if ours => "exited with code 130 (interrupted)".into(),
        ExitStatus::Code(code @ 129..=159) => format!(
            "exited with code {code} (128 + {})",
            signal_name(code - 128)
        ),
        ExitStatus::Code(126) => "exited with code 126 (the program cannot be run)".into(),
        ExitStatus::Code(127) => "exited with code 127 (no such program)".into(),
        ExitStatus::Code(3) if ours => "exited with code 3 (it lost a peer)".into(),
        ExitStatus::Code(4) if ours => "exited with code 4 (a deadline passed)".into(),
        ExitStatus::Code(code) => format!("exited with code {code}"),
    }
}

/// `rank 0 was stopped within 0.2 s`; `None` when no rank was running.
pub fn stopped(ranks: &[usize], took: Duration) -> Option<String> {
    let were = match ranks {
        [] => return None,
        [_] => "was",
        _ => "were",
    };
    let took = took.as_secs_f64().max(0.1);
    Some(format!(
        "{} {were} stopped within {took:.1} s",
        rank_list(ranks)
    ))
}

/// The part of a rank's last stderr lines with the error: from the last line that begins
/// an error message (ours, Python's, a Rust panic's) on, or else the last lines.
pub fn said(lines: &[String]) -> Option<String> {
    let lines: Vec<&str> = lines.iter().map(|line| line.trim_end()).collect();
    let end = lines.iter().rposition(|line| !line.is_empty())? + 1;
    let lines = &lines[..end];
    let begins = |line: &&str| {
        line.starts_with("error: ")
            || line.starts_with("Traceback (most recent call last)")
            || (line.starts_with("thread '") && line.contains("panicked at"))
    };
    let from = lines
        .iter()
        .rposition(begins)
        .unwrap_or(end.saturating_sub(LAST_LINES));
    let part = &lines[from..];
    if part.len() <= SAID_LINES {
        return Some(part.join("\n"));
    }
    // The first line has the kind of error, the last ones the details.
    let skipped = part.len() - (SAID_LINES - 1);
    Some(format!(
        "{}\n... {skipped} lines ...\n{}",
        part[0],
        part[part.len() - (SAID_LINES - 2)..].join("\n")
    ))
}

/// Splits a rendered error into message and notes.
pub fn taken_apart(text: &str) -> (String, Vec<(String, String)>) {
    let (message, rest) = text.split_once('\n').unwrap_or((text, ""));
    let lines: Vec<&str> = rest
        .lines()
        .map(|line| line.strip_prefix("  ").unwrap_or(line))
        .collect();
    let notes = match lines.is_empty() {
        true => Vec::new(),
        false => vec![(String::new(), lines.join("\n"))],
    };
    (message.to_owned(), notes)
}

/// The message of an error file as PyTorch's `record` writes it: either
/// `{"message": {"message": TEXT, "extraInfo": {...}}}` or `{"message": TEXT}`.
pub fn error_file_message(json: &str) -> Option<String> {
    let value: serde_json::Value = serde_json::from_str(json).ok()?;
    let message = value.get("message")?;
    let text = message
        .as_str()
        .or_else(|| message.get("message")?.as_str())?;
    let text: String = text.chars().take(2000).collect();
    (!text.trim().is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn headlines() {
        let mut who = RankName {
            rank: 1,
            pid: 4711,
            host: "node-a",
            node: None,
        };
        assert_eq!(who.to_string(), "rank 1 (pid 4711, host node-a)");
        who.node = Some(2);
        assert_eq!(who.to_string(), "rank 1 (node 2, pid 4711, host node-a)");
        assert_eq!(ended(ExitStatus::Signal(9), false), "was killed by SIGKILL");
        assert_eq!(ended(ExitStatus::Code(7), true), "exited with code 7");
        assert_eq!(
            ended(ExitStatus::Code(139), false),
            "exited with code 139 (128 + SIGSEGV)"
        );
        assert_eq!(
            ended(ExitStatus::Code(130), true),
            "exited with code 130 (interrupted)"
        );
        assert_eq!(ended(ExitStatus::Code(3), false), "exited with code 3");
        assert_eq!(
            ended(ExitStatus::Code(3), true),
            "exited with code 3 (it lost a peer)"
        );
        assert_eq!(signal_name(11), "SIGSEGV");
        assert_eq!(signal_name(34), "signal 34");
        assert_eq!(signal_name(-1), "signal -1");
        assert_eq!(signal_name(0), "signal 0");
    }

    #[test]
    fn ranks_that_were_stopped_are_named() {
        assert_eq!(stopped(&[], Duration::ZERO), None);
        assert_eq!(
            stopped(&[0, 2], Duration::from_millis(212)).unwrap(),
            "ranks 0 and 2 were stopped within 0.2 s"
        );
        assert_eq!(
            stopped(&[0], Duration::from_millis(2)).unwrap(),
            "rank 0 was stopped within 0.1 s"
        );
    }

    #[test]
    fn the_message_is_found_among_the_last_lines() {
        assert_eq!(said(&[]), None);
        assert_eq!(said(&lines("\n\n")), None);
        assert_eq!(said(&lines("a\nb\n\n")).unwrap(), "a\nb");
        assert_eq!(
            said(&lines("noise\nerror: no data in d\n  expected x")).unwrap(),
            "error: no data in d\n  expected x"
        );
        let python = "x\nTraceback (most recent call last):\n  File \"a\"\nValueError: boom";
        assert!(said(&lines(python)).unwrap().starts_with("Traceback"));
        let panic = "x\nthread 'main' (12) panicked at src/main.rs:1:1:\nboom\nnote: run with";
        assert!(said(&lines(panic)).unwrap().starts_with("thread 'main'"));
        let many: Vec<String> = (0..40).map(|n| n.to_string()).collect();
        assert_eq!(said(&many).unwrap().lines().count(), LAST_LINES);
        let mut long = vec!["error: long".to_owned()];
        long.extend(many);
        let said = said(&long).unwrap();
        assert_eq!(said.lines().count(), SAID_LINES);
        assert!(
            said.starts_with("error: long\n... 22 lines ...\n22\n"),
            "{said}"
        );
        assert!(said.ends_with("\n39"));
    }

    #[test]
    fn error_files() {
        for (json, want) in [
            (r#"{"message": "boom", "timestamp": 1}"#, Some("boom")),
            (
                r#"{"message": {"message": "ValueError: boom", "extraInfo": {"py_callstack": "..", "timestamp": "1"}}}"#,
                Some("ValueError: boom"),
            ),
            (r#"{"message": {}}"#, None),
            (r#"{"message": "  "}"#, None),
            ("[1", None),
            ("", None),
        ] {
            assert_eq!(error_file_message(json).as_deref(), want, "{json}");
        }
    }

    #[test]
    fn a_rendered_error_is_rendered_again_as_it_was() {
        let error = Error::usage("no data in d")
            .note("expected", "x\ny")
            .note("try", "z");
        let text = error.render();
        let handed = text.strip_prefix("error: ").unwrap().trim_end();
        let (message, notes) = taken_apart(handed);
        let mut again = Error::usage(message);
        for (label, text) in notes {
            again = again.note(&label, text);
        }
        assert_eq!(again.render(), text);
    }

    #[test]
    fn a_verdict_becomes_the_same_error_everywhere() {
        let verdict = JobFailure {
            code: 3,
            echo: false,
            mistake: false,
            node: 1,
            message: "rank 1 was killed by SIGKILL".into(),
            notes: vec![("stderr".into(), "x\ny".into())],
        };
        let json = serde_json::to_string(&verdict).unwrap();
        assert!(!json.contains('\n'), "one line, for the guard's pipe");
        let back: JobFailure = serde_json::from_str(&json).unwrap();
        assert_eq!(back, verdict);
        let error = back.into_error(stopped(&[0], Duration::from_millis(200)));
        assert_eq!(error.exit_code(), 3);
        assert_eq!(
            error.render(),
            "error: rank 1 was killed by SIGKILL\n  so      rank 0 was stopped within 0.2 s\n  stderr  x\n          y\n"
        );
    }
}
