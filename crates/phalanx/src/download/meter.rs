//! How far a download has come: a bar on a terminal, lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::say;

/// Between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Shows one file; on stderr, and nothing here can fail.
pub(super) struct Meter {
    name: String,
    bytes: u64,
    bar: Option<ProgressBar>,
    next_line: Instant,
    is_silent: bool,
}

impl Meter {
    /// Of the file `name`, which should have `bytes`.
    pub(super) fn new(name: &str, bytes: u64) -> Meter {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
            let style = "{prefix} {bar:24} {percent:>3} %  {bytes} of {total_bytes}  {bytes_per_sec}  {eta} left";
            bar.set_style(
                ProgressStyle::with_template(style)
                    .unwrap_or_else(|_| ProgressStyle::default_bar())
                    .progress_chars("━╸━"),
            );
            bar.set_prefix(name.to_owned());
            bar
        });
        Meter {
            name: name.to_owned(),
            bytes,
            bar,
            next_line: Instant::now() + LINE_EVERY,
            is_silent: false,
        }
    }

    /// Shows nothing.
    #[cfg(test)]
    pub(super) fn silent() -> Meter {
        Meter {
            name: String::new(),
            bytes: 0,
            bar: None,
            next_line: Instant::now(),
            is_silent: true,
        }
    }

    /// That many bytes are there.
    pub(super) fn at(&mut self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
        } else if Instant::now() >= self.next_line {
            self.next_line = Instant::now() + LINE_EVERY;
            let percent = (100 * bytes).checked_div(self.bytes).unwrap_or(0).min(100);
            self.line(&format!("{percent} %, {bytes} of {} bytes", self.bytes));
        }
    }

    /// Says something meanwhile.
    pub(super) fn note(&mut self, text: &str) {
        let text = text.to_owned();
        match &self.bar {
            Some(bar) => bar.suspend(|| self.line(&text)),
            None => self.line(&text),
        }
    }

    fn line(&self, text: &str) {
        if !self.is_silent {
            say::note(format_args!("{}: {text}", self.name));
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
