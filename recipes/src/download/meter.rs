//! Progress of a download: a bar on a terminal, lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::say;

/// Time between two lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Shows the progress of one file on standard error; never fails.
pub(super) struct Meter {
    name: String,
    bytes: u64,
    bar: Option<ProgressBar>,
    next_line: Instant,
    is_silent: bool,
}

impl Meter {
    /// For the file `name` of `bytes` bytes.
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

    /// Shows that `bytes` bytes have arrived.
    pub(super) fn at(&mut self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
        } else if Instant::now() >= self.next_line {
            self.next_line = Instant::now() + LINE_EVERY;
            let percent = (100 * bytes).checked_div(self.bytes).unwrap_or(0).min(100);
            self.line(&format!("{percent} %, {bytes} of {} bytes", self.bytes));
        }
    }

    /// Prints a line without disturbing the bar.
    pub(super) fn note(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| self.line(text)),
            None => self.line(text),
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
