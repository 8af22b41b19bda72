//! The last lines of a rank's output.

use std::collections::VecDeque;
use std::sync::Mutex;

use serde::Serialize;
use serde_json::json;

use crate::lock;

/// Lines that are kept of each rank.
const MOST_LINES: usize = 200;

/// Longer lines are cut.
const LINE_BYTES: usize = 1000;

/// A line of a rank's output.
#[derive(Debug, Serialize)]
struct Line {
    /// It was written to standard error.
    err: bool,
    text: String,
}

/// The last 200 lines of one rank's standard output and standard error, in the order in which they
/// arrived.
#[derive(Debug, Default)]
pub struct Tail(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    kept: VecDeque<Line>,
    /// Lines so far, those included that were dropped.
    count: u64,
    /// The unfinished line of either stream.
    partial: [Vec<u8>; 2],
}

impl Tail {
    /// Adds what was read of standard error (`err`) or of standard output.
    pub fn push(&self, err: bool, bytes: &[u8]) {
        let mut lines = lock(&self.0);
        // No more than the last lines of a large piece are worth their copies.
        let mut ends = (0..bytes.len()).rev().filter(|at| bytes[*at] == b'\n');
        let from = match ends.nth(MOST_LINES) {
            Some(end) => {
                lines.partial[usize::from(err)].clear();
                end + 1
            }
            None => 0,
        };
        for piece in bytes[from..].split_inclusive(|b| *b == b'\n') {
            let partial = &mut lines.partial[usize::from(err)];
            let text = piece.strip_suffix(b"\n").unwrap_or(piece);
            // A progress bar draws its line again and again.
            let text = match text.iter().rposition(|b| *b == b'\r') {
                Some(at) if at + 1 < text.len() => {
                    partial.clear();
                    &text[at + 1..]
                }
                _ => text,
            };
            let room = LINE_BYTES.saturating_sub(partial.len());
            partial.extend_from_slice(&text[..text.len().min(room)]);
            if piece.ends_with(b"\n") {
                let text = plain(&String::from_utf8_lossy(partial));
                partial.clear();
                if lines.kept.len() == MOST_LINES {
                    lines.kept.pop_front();
                }
                lines.kept.push_back(Line { err, text });
                lines.count += 1;
            }
        }
    }

    /// The number of lines so far, and the text of the file with the last ones, unless that number is `known`.
    pub fn grown(&self, known: u64) -> Option<(u64, String)> {
        let lines = lock(&self.0);
        let text = || json!({"count": lines.count, "lines": lines.kept}).to_string();
        (lines.count != known).then(|| (lines.count, text()))
    }
}

/// Without the control sequences of terminals (colours).
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\x1b' => match chars.next() {
                // A control sequence ends with its letter, a command with a bell.
                Some('[') => drop(chars.find(|c| ('@'..='~').contains(c))),
                Some(']') => drop(chars.find(|c| *c == '\x07')),
                _ => {}
            },
            '\t' => out.push(c),
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(tail: &Tail) -> Vec<String> {
        let lines = lock(&tail.0);
        lines.kept.iter().map(|line| line.text.clone()).collect()
    }

    #[test]
    fn lines_arrive_whole_and_are_counted() {
        let tail = Tail::default();
        assert_eq!(tail.grown(0), None);
        tail.push(false, b"one\ntw");
        tail.push(true, b"error\n");
        let lines = r#"{"err":false,"text":"one"},{"err":true,"text":"error"}"#;
        let grown = Some((2, format!(r#"{{"count":2,"lines":[{lines}]}}"#)));
        assert_eq!((tail.grown(0), tail.grown(2)), (grown, None));
        tail.push(false, b"o\nthree");
        assert_eq!(tail.grown(2).map(|(count, _)| count), Some(3));
        assert_eq!(texts(&tail)[2], "two");
    }

    #[test]
    fn the_last_200_lines_are_kept_however_they_arrive() {
        let all: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
        let text = all.join("\n") + "\nrest";
        for size in [1, 7, 1024, text.len()] {
            let tail = Tail::default();
            for piece in text.as_bytes().chunks(size) {
                tail.push(false, piece);
            }
            assert_eq!(texts(&tail), all[800..], "{size}");
            tail.push(false, b" of it\n");
            assert_eq!(texts(&tail)[199], "rest of it", "{size}");
        }
        let tail = Tail::default();
        tail.push(false, &[b'x'; 10_000]);
        tail.push(false, b"\n");
        assert_eq!(texts(&tail)[0].len(), LINE_BYTES);
    }

    #[test]
    fn what_a_terminal_would_do_is_left_out() {
        let tail = Tail::default();
        tail.push(true, b"\x1b[1;31merror\x1b[0m:\ta\x07\x1b]0;title\x07b\r\n");
        tail.push(true, b" 10 %\r 20 %\r");
        tail.push(true, b"\r 30 %\n\xff\n\x1b[\n\x1b\n");
        assert_eq!(texts(&tail), ["error:\tab", " 30 %", "\u{fffd}", "", ""]);
    }
}
