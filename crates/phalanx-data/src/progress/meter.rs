//! Speed and remaining time, without clock and output: the caller passes the time.

use std::time::Duration;

use phalanx_base::text::{grouped, rounded};

/// Minimum window for measuring the speed.
const WINDOW: Duration = Duration::from_secs(2);

/// Progress of one epoch.
#[derive(Debug)]
pub(super) struct Meter {
    /// Unit of samples, for example `images`.
    unit: &'static str,
    epoch: u64,
    epochs: u64,
    steps: usize,
    /// Finished steps of the epoch, including those of an earlier run.
    done: usize,
    /// Steps taken by an earlier run.
    taken: usize,
    images: u64,
    loss: Option<f64>,
    /// A measure of the last evaluation.
    measure: String,
    /// Start of the current speed window.
    window: (Duration, u64),
    /// Samples per second in the last complete window.
    speed: Option<f64>,
}

impl Meter {
    pub(super) fn new(epoch: u64, epochs: u64, steps: usize) -> Self {
        Self {
            unit: "images",
            epoch,
            epochs,
            steps,
            done: 0,
            taken: 0,
            images: 0,
            loss: None,
            measure: String::new(),
            window: (Duration::ZERO, 0),
            speed: None,
        }
    }

    /// A meter whose samples are called `unit`.
    pub(super) fn with_unit(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }

    /// Shows `measure` next to the loss, if it is not empty.
    pub(super) fn set_measure(&mut self, measure: &str) {
        measure.clone_into(&mut self.measure);
    }

    /// Skips the first `taken` steps, which an earlier run has taken.
    pub(super) fn skip(&mut self, taken: usize) {
        (self.done, self.taken) = (taken, taken);
    }

    /// Counts a step that ended `now` after the start of the epoch.
    pub(super) fn step(&mut self, now: Duration, images: usize, loss: Option<f64>) {
        self.done += 1;
        self.images += images as u64;
        self.loss = loss.or(self.loss);
        let (since, before) = self.window;
        if now.saturating_sub(since) >= WINDOW {
            self.speed = speed(self.images - before, now - since);
            self.window = (now, self.images);
        }
    }

    /// `3,140 images/s  loss 0.0921  0:05 left`
    pub(super) fn text(&self, now: Duration) -> String {
        let speed = self.speed.or_else(|| speed(self.images, now));
        let left = self.left(now);
        let mut text = self.measured(speed, "loss");
        if !self.measure.is_empty() {
            text.push_str(&format!("  {}", self.measure));
        }
        if let Some(left) = left {
            text.push_str(&format!("  {} left", clock(left)));
        }
        text
    }

    /// `epoch 1/3   76 %  356/469  3,140 images/s  loss 0.0921  0:05 left`
    pub(super) fn line(&self, now: Duration) -> String {
        let percent = 100 * self.done / self.steps.max(1);
        format!(
            "epoch {}/{}  {percent:>3} %  {}/{}  {}",
            self.epoch,
            self.epochs,
            self.done,
            self.steps,
            self.text(now)
        )
    }

    /// `epoch 1/3 took 0:19  469 steps  3,140 images/s  last loss 0.0921`, with the
    /// speed of all these steps; `stopped after` where some were left.
    pub(super) fn last_line(&self, now: Duration) -> String {
        let (done, steps) = (self.done, self.steps);
        let (how, which) = match (done < steps, self.taken) {
            (false, 0) if steps == 1 => ("took", "1 step".to_owned()),
            (false, 0) => ("took", format!("{steps} steps")),
            (false, taken) => ("took", format!("{} of {steps} steps", steps - taken)),
            (true, 0) => ("stopped after", format!("{done} of {steps} steps")),
            (true, taken) => (
                "stopped after",
                format!("steps {} to {done} of {steps}", taken + 1),
            ),
        };
        format!(
            "epoch {}/{} {how} {}  {which}  {}",
            self.epoch,
            self.epochs,
            spent(now),
            self.measured(speed(self.images, now), "last loss")
        )
    }

    /// The loss is the last step's; `called` so.
    fn measured(&self, speed: Option<f64>, called: &str) -> String {
        let mut text = match speed {
            Some(speed) => format!("{} {}/s", grouped(speed.round() as u64), self.unit),
            None => format!("- {}/s", self.unit),
        };
        if let Some(loss) = self.loss {
            text.push_str(&format!("  {called} {}", rounded(loss)));
        }
        text
    }

    fn left(&self, now: Duration) -> Option<Duration> {
        let left = self.steps.saturating_sub(self.done);
        let seconds = now.as_secs_f64() * left as f64 / (self.done - self.taken) as f64;
        // No step yet, or a very long first step.
        Duration::try_from_secs_f64(seconds).ok()
    }
}

fn speed(images: u64, time: Duration) -> Option<f64> {
    let speed = images as f64 / time.as_secs_f64();
    speed.is_finite().then_some(speed)
}

/// `0.05 s`, `5.2 s`, and from ten seconds on as [`clock`].
fn spent(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 0.995 => format!("{seconds:.2} s"),
        seconds if seconds < 9.95 => format!("{seconds:.1} s"),
        _ => clock(time),
    }
}

/// `0:05`, `12:34` or `1:02:03`.
fn clock(time: Duration) -> String {
    // Rounded up, so that the last second is not shown as 0:00.
    let seconds = time.as_secs() + u64::from(time.subsec_millis() > 0);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_line_says_all_that_screens_md_shows() {
        let mut meter = Meter::new(1, 3, 469);
        for step in 1..=356 {
            meter.step(at(step as f64 * 0.04), 128, Some(0.09214));
        }
        assert_eq!(
            meter.line(at(14.24)),
            "epoch 1/3   75 %  356/469  3,200 images/s  loss 0.0921  0:05 left"
        );
        assert_eq!(
            meter.last_line(at(14.24)),
            "epoch 1/3 stopped after 0:15  356 of 469 steps  3,200 images/s  last loss 0.0921"
        );
        for step in 357..=469 {
            meter.step(at(step as f64 * 0.04), 128, Some(0.09214));
        }
        assert_eq!(
            meter.last_line(at(18.76)),
            "epoch 1/3 took 0:19  469 steps  3,200 images/s  last loss 0.0921"
        );
        let mut one = Meter::new(1, 1, 1);
        one.step(at(1.0), 64, None);
        assert_eq!(
            one.last_line(at(1.0)),
            "epoch 1/1 took 1.0 s  1 step  64 images/s"
        );
    }

    #[test]
    fn what_an_earlier_run_took_counts_for_the_place_but_not_for_the_speed() {
        let mut meter = Meter::new(2, 3, 10);
        meter.skip(4);
        assert_eq!(meter.line(at(0.0)), "epoch 2/3   40 %  4/10  - images/s");
        meter.step(at(1.0), 8, None);
        meter.step(at(2.0), 8, None);
        assert_eq!(
            meter.line(at(2.0)),
            "epoch 2/3   60 %  6/10  8 images/s  0:04 left"
        );
        assert_eq!(
            meter.last_line(at(2.0)),
            "epoch 2/3 stopped after 2.0 s  steps 5 to 6 of 10  8 images/s"
        );
        (7..=10).for_each(|second| meter.step(at(second as f64 - 4.0), 8, None));
        assert_eq!(
            meter.last_line(at(6.0)),
            "epoch 2/3 took 6.0 s  6 of 10 steps  8 images/s"
        );
    }

    #[test]
    fn speed_is_that_of_the_last_seconds() {
        let mut meter = Meter::new(1, 1, 100);
        meter.step(at(10.0), 10, None);
        assert!(meter.text(at(10.0)).starts_with("1 images/s"));
        meter.step(at(12.0), 2000, None);
        assert!(meter.text(at(12.0)).starts_with("1,000 images/s"));
    }

    #[test]
    fn nothing_is_invented_before_the_first_step() {
        let meter = Meter::new(2, 3, 5);
        assert_eq!(meter.line(at(0.0)), "epoch 2/3    0 %  0/5  - images/s");
        let empty = Meter::new(1, 1, 0);
        assert!(empty.line(at(1.0)).contains("0/0"));
    }

    #[test]
    fn clocks() {
        assert_eq!(spent(at(0.04)), "0.04 s");
        assert_eq!(spent(at(0.996)), "1.0 s");
        assert_eq!(spent(at(9.96)), "0:10");
        assert_eq!(clock(at(0.0)), "0:00");
        assert_eq!(clock(at(4.2)), "0:05");
        assert_eq!(clock(at(754.0)), "12:34");
        assert_eq!(clock(at(3723.0)), "1:02:03");
    }
}
