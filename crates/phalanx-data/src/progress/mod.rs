//! Progress display for a terminal or a log.
//!
//! On a terminal a bar, otherwise a line every ten seconds; both on stderr, since stdout is
//! for results. Ranks other than 0 are silent. Nothing here fails: a closed stderr does not
//! stop a training.

mod meter;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use meter::Meter;
use phalanx_base::text::visible;

/// Interval between two lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Interval between two updates of the text next to the bar.
const TEXT_EVERY: Duration = Duration::from_millis(200);

/// The progress display of a training.
#[derive(Debug)]
pub struct Progress {
    display: Display,
    unit: &'static str,
    measure: String,
    epoch: Option<Running>,
}

/// Kind of display.
enum Display {
    Silent,
    Bar,
    Lines {
        out: Box<dyn Write + Send>,
        every: Duration,
    },
}

impl std::fmt::Debug for Display {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Display::Silent => "Silent",
            Display::Bar => "Bar",
            Display::Lines { .. } => "Lines",
        })
    }
}

/// The current epoch.
#[derive(Debug)]
struct Running {
    meter: Meter,
    started: Instant,
    /// Time of the next line or text, since the start.
    due: Duration,
    bar: Option<ProgressBar>,
    /// Columns of the longest text next to the bar so far. Shorter ones are padded, so that the bar keeps its width.
    columns: usize,
}

impl Progress {
    /// A bar, lines or nothing, depending on the rank and its stderr.
    pub fn for_rank(rank: usize) -> Self {
        if rank != 0 {
            Self::silent()
        } else if std::io::stderr().is_terminal() {
            Self::with(Display::Bar)
        } else {
            Self::lines(Box::new(std::io::stderr()), LINE_EVERY)
        }
    }

    /// A display that shows nothing.
    pub fn silent() -> Self {
        Self::with(Display::Silent)
    }

    /// Writes a line to `out` at the interval `every` and at the end of each epoch.
    pub fn lines(out: Box<dyn Write + Send>, every: Duration) -> Self {
        Self::with(Display::Lines { out, every })
    }

    fn with(display: Display) -> Self {
        Self {
            display,
            unit: "images",
            measure: String::new(),
            epoch: None,
        }
    }

    /// Sets the unit of samples; the default is `images`.
    #[must_use]
    pub fn with_unit(mut self, unit: &'static str) -> Self {
        self.unit = unit;
        self
    }

    /// Starts epoch `epoch` (from 1) of `epochs`, with `steps` steps.
    pub fn begin(&mut self, epoch: u64, epochs: u64, steps: usize) {
        self.abandon();
        let (bar, due) = match &self.display {
            Display::Silent => return,
            Display::Bar => (
                Some(bar(&format!("epoch {epoch}/{epochs}"), steps)),
                Duration::ZERO,
            ),
            Display::Lines { every, .. } => (None, *every),
        };
        let mut meter = Meter::new(epoch, epochs, steps).with_unit(self.unit);
        meter.set_measure(&self.measure);
        self.epoch = Some(Running {
            meter,
            started: Instant::now(),
            due,
            bar,
            columns: 0,
        });
    }

    /// Shows `measure`, a name and a value, next to the loss from now on.
    pub fn set_measure(&mut self, measure: String) {
        if let Some(running) = &mut self.epoch {
            running.meter.set_measure(&measure);
        }
        self.measure = measure;
    }

    /// Leaves `time`, in which no step was taken, out of the speed.
    pub fn leave_out(&mut self, time: Duration) {
        if let Some(running) = &mut self.epoch {
            running.started += time;
        }
    }

    /// Skips the first `taken` steps of this epoch, which an earlier run has taken.
    pub fn skip(&mut self, taken: usize) {
        if let Some(running) = &mut self.epoch {
            running.meter.skip(taken);
            if let Some(bar) = &running.bar {
                bar.set_position(taken as u64);
            }
        }
    }

    /// Counts a step with `images` samples over all ranks and the loss to show.
    pub fn step(&mut self, images: usize, loss: Option<f64>) {
        let Some(running) = &mut self.epoch else {
            return;
        };
        let now = running.started.elapsed();
        running.meter.step(now, images, loss);
        if let Some(bar) = &running.bar {
            if now >= running.due {
                running.due = now + TEXT_EVERY;
                let text = running.meter.text(now);
                running.columns = running.columns.max(text.chars().count());
                bar.set_message(format!("{text:<0$}", running.columns));
            }
            bar.inc(1);
        } else if let Display::Lines { out, every } = &mut self.display
            && now >= running.due
        {
            running.due = now + *every;
            let _ = writeln!(out, "{}", running.meter.line(now));
        }
    }

    /// Ends the epoch and prints one line about it.
    pub fn end(&mut self) {
        let Some(running) = self.epoch.take() else {
            return;
        };
        if let Some(bar) = &running.bar {
            bar.finish_and_clear();
        }
        self.note(&running.meter.last_line(running.started.elapsed()));
    }

    /// Removes the display of an unfinished epoch, for example before an error is printed.
    pub fn abandon(&mut self) {
        if let Some(bar) = self.epoch.take().and_then(|running| running.bar) {
            bar.finish_and_clear();
        }
    }

    /// Prints a line to stderr, above the bar if there is one. Silent ranks
    /// print nothing.
    pub fn note(&mut self, line: &str) {
        let line = &*visible(line);
        match &mut self.display {
            Display::Silent => {}
            Display::Bar => self.suspend(|| {
                let _ = writeln!(std::io::stderr(), "{line}");
            }),
            Display::Lines { out, .. } => {
                let _ = writeln!(out, "{line}");
            }
        }
    }

    /// Hides the bar while `print` runs, for lines on stdout.
    pub fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
        match self.epoch.as_ref().and_then(|running| running.bar.as_ref()) {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.abandon();
    }
}

fn bar(prefix: &str, steps: usize) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
    bar.set_style(style(std::env::var_os("NO_COLOR").is_none(), steps));
    bar.set_prefix(prefix.to_owned());
    bar
}

/// The bar uses the columns that the text leaves: a fixed width would wrap at 80 columns.
fn template(colour: bool, steps: usize) -> String {
    let bar = match colour {
        true => "{wide_bar:.cyan/dim}",
        false => "{wide_bar}",
    };
    let digits = steps.to_string().len();
    format!("{{prefix}} {bar} {{percent:>3}} %  {{pos:>{digits}}}/{{len}}  {{msg}}")
}

fn style(colour: bool, steps: usize) -> ProgressStyle {
    ProgressStyle::with_template(&template(colour, steps))
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        // Without color the remaining part must differ in shape.
        .progress_chars(if colour { "━╸━" } else { "━╸ " })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bars_template_is_valid() {
        // A bad template would silently fall back to the default one.
        for colour in [true, false] {
            assert!(ProgressStyle::with_template(&template(colour, 469)).is_ok());
        }
        let bar = bar("epoch 1/3", 469);
        bar.inc(1);
        assert_eq!((bar.position(), bar.length()), (1, Some(469)));
        bar.finish_and_clear();
    }
}
