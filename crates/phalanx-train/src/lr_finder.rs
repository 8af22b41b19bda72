//! `--find-lr`: the learning rate rises from step to step, and the loss over it says which one to train with.
//!
//! Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), with the smoothing and the suggestion (`valley`) of
//! fastai's `lr_find`.

use phalanx_nn::optim::schedule::Schedule;

/// Steps, unless `--max-steps` says otherwise.
pub(crate) const STEPS: u64 = 100;
/// The fewest steps.
pub(crate) const LEAST_STEPS: u64 = 20;
const FIRST: f64 = 1e-7;
const LAST: f64 = 10.0;
/// Weight of the earlier losses in the running mean.
const SMOOTHING: f64 = 0.98;
/// The training ends when the mean is this many times its least value.
const DIVERGED: f64 = 4.0;
/// The fewest falling losses for a suggestion.
const FALLS: usize = 10;

/// The losses so far.
#[derive(Default)]
pub(crate) struct LrFinder {
    mean: f64,
    /// Learning rate and smoothed loss of each step.
    points: Vec<(f64, f64)>,
}

/// The learning rates of `steps` steps.
pub(crate) fn schedule(steps: u64) -> Schedule {
    let intervals = steps.saturating_sub(1).max(1) as f64;
    Schedule::exponential(FIRST, (LAST / FIRST).powf(1.0 / intervals))
}

impl LrFinder {
    /// Takes the loss of the next step. Gives whether the losses diverge.
    pub(crate) fn add(&mut self, lr: f64, loss: f64) -> bool {
        if !loss.is_finite() {
            return true;
        }
        self.mean = SMOOTHING * self.mean + (1.0 - SMOOTHING) * loss;
        let taken = self.points.len() as i32 + 1;
        let smoothed = self.mean / (1.0 - SMOOTHING.powi(taken));
        self.points.push((lr, smoothed));
        let (_, least) = self.least();
        least > 0.0 && smoothed > DIVERGED * least
    }

    /// Learning rate and smoothed loss where that is least.
    fn least(&self) -> (f64, f64) {
        let all = self.points.iter().copied();
        all.fold((0.0, f64::INFINITY), |a, b| if b.1 < a.1 { b } else { a })
    }

    /// Whether enough losses were taken before they diverged.
    pub(crate) fn is_enough(&self) -> bool {
        self.points.len() >= FALLS
    }

    /// The learning rate in the middle of the longest fall, and that of the least loss; none if the loss hardly falls.
    pub(crate) fn suggestion(&self) -> Option<(f64, f64)> {
        // Of the losses up to each one, how many fall one after the other to it, others left out.
        let mut falling: Vec<usize> = Vec::with_capacity(self.points.len());
        for (at, (_, loss)) in self.points.iter().enumerate() {
            let before = self.points[..at].iter().zip(&falling);
            let longest = before.filter(|((_, other), _)| other > loss);
            let longest = longest.map(|(_, count)| *count).max();
            falling.push(longest.unwrap_or(0) + 1);
        }
        let count = *falling.iter().max()?;
        let end = falling.iter().position(|all| *all == count)?;
        let (rate, _) = self.points[end - count / 2];
        (count >= FALLS).then(|| (rate, self.least().0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_the_fall_is_suggested_and_a_diverging_loss_ends_it() {
        let (mut finder, mut schedule) = (LrFinder::default(), schedule(101));
        let mut taken = 0;
        for _ in 0..101 {
            let lr = schedule.lr();
            schedule.advance();
            // Falls around 1e-3, and rises from 1e-1 on.
            let at = lr.log10();
            let loss = 2.0 - (2.0 * (at + 3.0)).tanh() + 10f64.powf(6.0 * (at - 0.5));
            taken += 1;
            if finder.add(lr, loss) {
                break;
            }
        }
        assert!((70..101).contains(&taken), "{taken}");
        let (suggested, least) = finder.suggestion().expect("it falls");
        // The mean follows the losses some steps later.
        assert!((1e-4..1e-1).contains(&suggested), "{suggested}");
        assert!(suggested < least && least < 10.0, "{least}");
    }

    #[test]
    fn rates_rise_to_the_last_and_nothing_is_suggested_of_a_loss_that_rises() {
        let mut schedule = schedule(50);
        let mut finder = LrFinder::default();
        assert_eq!(schedule.lr(), FIRST);
        for step in 0..49 {
            assert!(!finder.add(schedule.lr(), 1.0 + f64::from(step) * 1e-3));
            schedule.advance();
        }
        assert!((schedule.lr() / LAST - 1.0).abs() < 1e-12);
        assert_eq!(finder.suggestion(), None);
        assert_eq!(LrFinder::default().suggestion(), None);
        assert!(finder.add(1.0, f64::NAN));
    }
}
