//! What a run says.

use std::io::{IsTerminal, Write};

use phalanx_base::say;

/// Lines on standard error, as cargo's, and below them the state of a run on a terminal.
pub(super) struct Screen {
    pub is_terminal: bool,
    has_status: bool,
}

impl Screen {
    pub(super) fn new() -> Screen {
        Screen {
            is_terminal: std::io::stderr().is_terminal(),
            has_status: false,
        }
    }

    fn raw(&mut self, text: &str) {
        let _ = std::io::stderr().write_all(text.as_bytes());
    }

    pub(super) fn clear(&mut self) {
        if std::mem::take(&mut self.has_status) {
            self.raw("\r\x1b[K");
        }
    }

    pub(super) fn line(&mut self, verb: &str, text: &str) {
        self.clear();
        say::note(format!("{verb:>12} {text}"));
    }

    pub(super) fn status(&mut self, text: &str) {
        self.clear();
        let short: String = text.chars().take(76).collect();
        self.raw(&phalanx_base::text::one_line(&short));
        self.has_status = true;
    }
}
