//! Learning-rate schedules, as PyTorch's `lr_scheduler` computes them: in double,
//! recursively where it does, so that rates agree to the last bit.
//!
//! ```
//! use phalanx_nn::optim::schedule::Schedule;
//! let mut schedule = Schedule::step(0.1, 30, 0.1);
//! assert_eq!(schedule.lr(), 0.1);
//! schedule.advance(); // after each epoch (or step); then `schedule.apply(&mut optimizer)`
//! ```

use std::f64::consts::PI;
use std::fmt;
use std::sync::Arc;

use super::Optimizer;
use crate::{Result, refuse};

/// A rate that changes from step to step. Its state is the number of steps
/// taken, and the values observed: to resume, call [`advance`](Schedule::advance)
/// that many times, and [`observe`](Schedule::observe) with these values where it was called.
#[derive(Clone, Debug)]
pub struct Schedule {
    kind: Kind,
    base: f64,
    lr: f64,
    steps: u64,
}

#[derive(Clone, Debug)]
enum Kind {
    Constant,
    Step {
        every: u64,
        factor: f64,
    },
    MultiStep {
        milestones: Vec<u64>,
        factor: f64,
    },
    Exponential {
        factor: f64,
    },
    Cosine {
        period: u64,
        floor: f64,
    },
    Linear {
        start: f64,
        end: f64,
        total: u64,
    },
    OneCycle(OneCycle),
    WarmRestarts {
        /// Steps since the last restart, and from it to the next.
        at: u64,
        period: u64,
        factor: u64,
        floor: f64,
    },
    Polynomial {
        total: u64,
        power: f64,
    },
    By(Factor),
    Plateau {
        settings: Plateau,
        best: Option<f64>,
        /// Values in a row that were not better.
        bad: u64,
        /// Values left of the cooldown.
        cooling: u64,
    },
    Sequential {
        parts: Vec<Schedule>,
        milestones: Vec<u64>,
    },
}

/// A user's function of the steps.
#[derive(Clone)]
struct Factor(Arc<dyn Fn(u64) -> f64 + Send + Sync>);

impl fmt::Debug for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Factor")
    }
}

/// Settings of [`Schedule::reduce_on_plateau`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plateau {
    /// What the rate is multiplied by: from 0 to below 1.
    pub factor: f64,
    /// Values in a row that may be no better before the rate falls.
    pub patience: u64,
    /// How much better than the best one a value must be to count as better.
    pub threshold: f64,
    /// Whether the threshold is a share of the best value; otherwise it is a difference.
    pub relative: bool,
    /// Values after a fall in which none counts as no better.
    pub cooldown: u64,
    /// The least rate.
    pub min_lr: f64,
    /// A fall by no more than this is left out.
    pub eps: f64,
}

impl Default for Plateau {
    /// PyTorch's: a tenth of the rate after more than 10 losses that are not 0.01 % less.
    fn default() -> Self {
        Plateau {
            factor: 0.1,
            patience: 10,
            threshold: 1e-4,
            relative: true,
            cooldown: 0,
            min_lr: 0.0,
            eps: 1e-8,
        }
    }
}

impl Plateau {
    fn is_better(&self, value: f64, best: Option<f64>, greatest: bool) -> bool {
        let Some(best) = best else {
            return !value.is_nan();
        };
        match (greatest, self.relative) {
            (false, true) => value < best * (1.0 - self.threshold),
            (false, false) => value < best - self.threshold,
            (true, true) => value > best * (self.threshold + 1.0),
            (true, false) => value > best + self.threshold,
        }
    }
}

/// Settings of [`Schedule::one_cycle`]; PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OneCycle {
    /// The highest rate.
    pub max_lr: f64,
    /// Steps of the whole cycle.
    pub total: u64,
    /// Share of the steps in which the rate rises.
    pub rising: f64,
    /// The highest rate divided by the first.
    pub divisor: f64,
    /// The first rate divided by the last.
    pub final_divisor: f64,
    /// Along half a cosine; a straight line otherwise.
    pub cosine: bool,
    /// Falls to the first rate as fast as it rose, then to the last.
    pub three_phase: bool,
    /// Lowest and highest momentum (Adam's first beta), which falls while the rate rises. `None`: the optimizer
    /// keeps its own, as with PyTorch's `cycle_momentum=False`.
    pub momentum: Option<[f64; 2]>,
}

impl OneCycle {
    /// PyTorch's defaults for this highest rate and number of steps.
    pub fn new(max_lr: f64, total: u64) -> Self {
        OneCycle {
            max_lr,
            total,
            rising: 0.3,
            divisor: 25.0,
            final_divisor: 1e4,
            cosine: true,
            three_phase: false,
            momentum: Some([0.85, 0.95]),
        }
    }

    /// Rate and momentum after `steps` steps.
    fn at(&self, steps: u64) -> (f64, Option<f64>) {
        let first = self.max_lr / self.divisor;
        let last = first / self.final_divisor;
        let [low, high] = self.momentum.unwrap_or_default();
        let (total, most) = (self.total as f64, self.max_lr);
        let rise = (self.rising * total - 1.0, [first, most], [high, low]);
        let end = total - 1.0;
        let phases = if self.three_phase {
            let fall = 2.0 * self.rising * total - 2.0;
            [
                rise,
                (fall, [most, first], [low, high]),
                (end, [first, last], [high, high]),
            ]
        } else {
            // The second phase is the last; what follows it is never reached.
            let fall = (end, [most, last], [low, high]);
            [rise, fall, fall]
        };
        let (t, mut start) = (steps as f64, 0.0);
        for (i, (end, rates, momenta)) in phases.into_iter().enumerate() {
            if t <= end || i == 2 || (i == 1 && !self.three_phase) {
                let x = (t - start) / (end - start);
                let go = |[a, b]: [f64; 2]| {
                    if self.cosine {
                        b + (a - b) / 2.0 * ((PI * x).cos() + 1.0)
                    } else {
                        (b - a) * x + a
                    }
                };
                return (go(rates), self.momentum.map(|_| go(momenta)));
            }
            start = end;
        }
        (last, self.momentum.map(|_| high))
    }
}

impl Schedule {
    fn new(kind: Kind, base: f64, lr: f64) -> Self {
        Schedule {
            kind,
            base,
            lr,
            steps: 0,
        }
    }

    /// Always `lr`.
    pub fn constant(lr: f64) -> Self {
        Self::new(Kind::Constant, lr, lr)
    }

    /// Multiplies the rate by `factor` after each `every` steps (0: never).
    pub fn step(lr: f64, every: u64, factor: f64) -> Self {
        Self::new(Kind::Step { every, factor }, lr, lr)
    }

    /// Multiplies the rate by `factor` at each milestone; one that is listed twice counts twice.
    pub fn multi_step(lr: f64, milestones: &[u64], factor: f64) -> Self {
        let milestones = milestones.to_vec();
        let times = milestones.iter().filter(|&&m| m == 0).count();
        let first = lr * factor.powi(times as i32);
        Self::new(Kind::MultiStep { milestones, factor }, lr, first)
    }

    /// Multiplies the rate by `factor` at every step.
    pub fn exponential(lr: f64, factor: f64) -> Self {
        Self::new(Kind::Exponential { factor }, lr, lr)
    }

    /// Along a cosine from `lr` to `floor` in `period` steps, and back up after them.
    ///
    /// # Errors
    /// `Usage` when there are no steps.
    pub fn cosine(lr: f64, period: u64, floor: f64) -> Result<Self> {
        if period == 0 {
            refuse!("a cosine schedule needs at least one step");
        }
        Ok(Self::new(Kind::Cosine { period, floor }, lr, lr))
    }

    /// From `start` times `lr` to `end` times `lr` in `total` equal steps: a warm-up.
    ///
    /// # Errors
    /// `Usage` when there are no steps or `start` is not above 0.
    pub fn linear(lr: f64, start: f64, end: f64, total: u64) -> Result<Self> {
        if total == 0 || start.is_nan() || start <= 0.0 {
            refuse!(
                "a linear schedule needs steps and a first factor above 0, got {total} and {start}"
            );
        }
        Ok(Self::new(
            Kind::Linear { start, end, total },
            lr,
            lr * start,
        ))
    }

    /// One rise and fall of the rate, and one fall and rise of the momentum.
    ///
    /// # Errors
    /// `Usage` when a phase of the cycle has no step.
    pub fn one_cycle(cycle: OneCycle) -> Result<Self> {
        let rise = cycle.rising * cycle.total as f64 - 1.0;
        let end = cycle.total as f64 - 1.0;
        let phases = if cycle.three_phase {
            2.0 * rise < end
        } else {
            rise < end
        };
        if !(rise > 0.0 && phases) {
            refuse!(
                "one cycle of {} steps with {} of them rising leaves a phase without steps",
                cycle.total,
                cycle.rising
            );
        }
        let (lr, _) = cycle.at(0);
        Ok(Self::new(Kind::OneCycle(cycle), lr, lr))
    }

    /// Along a cosine from `lr` to `floor`, again and again: first in `first_period` steps, and each time in `factor` times as
    /// many (PyTorch's `CosineAnnealingWarmRestarts`).
    ///
    /// # Errors
    /// `Usage` when the first period or the factor is 0.
    pub fn warm_restarts(lr: f64, first_period: u64, factor: u64, floor: f64) -> Result<Self> {
        if first_period == 0 || factor == 0 {
            refuse!(
                "warm restarts need a first period and a factor of at least 1, got {first_period} and {factor}"
            );
        }
        let kind = Kind::WarmRestarts {
            at: 0,
            period: first_period,
            factor,
            floor,
        };
        Ok(Self::new(kind, lr, cosine(lr, floor, 0, first_period)))
    }

    /// From `lr` to 0 in `total` steps, as `(1 - steps / total)^power` (PyTorch's `PolynomialLR`).
    ///
    /// # Errors
    /// `Usage` when there are no steps.
    pub fn polynomial(lr: f64, total: u64, power: f64) -> Result<Self> {
        if total == 0 {
            refuse!("a polynomial schedule needs at least one step");
        }
        Ok(Self::new(Kind::Polynomial { total, power }, lr, lr))
    }

    /// `base` times `factor` of the number of steps taken, from 0 (PyTorch's `LambdaLR`).
    pub fn by(base: f64, factor: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Self {
        let first = base * factor(0);
        Self::new(Kind::By(Factor(Arc::new(factor))), base, first)
    }

    /// Falls when the [observed](Self::observe) values, such as losses of an evaluation, get no better (PyTorch's
    /// `ReduceLROnPlateau`).
    ///
    /// # Errors
    /// `Usage` when the factor is not from 0 to below 1.
    pub fn reduce_on_plateau(lr: f64, settings: Plateau) -> Result<Self> {
        if !(0.0..1.0).contains(&settings.factor) {
            refuse!(
                "a plateau's factor is {}; it must be at least 0 and below 1",
                settings.factor
            );
        }
        let kind = Kind::Plateau {
            settings,
            best: None,
            bad: 0,
            cooling: 0,
        };
        Ok(Self::new(kind, lr, lr))
    }

    /// A straight line from `1 / steps` of the first rate of `then` in step 0 to all of it in step `steps`, with which `then`
    /// begins (PyTorch's `LinearLR` in front of another schedule).
    ///
    /// # Errors
    /// `Usage` when there are no steps.
    pub fn warm_up(steps: u64, then: Schedule) -> Result<Self> {
        let rise = Self::linear(then.lr, 1.0 / steps as f64, 1.0, steps)?;
        Self::sequential(vec![rise, then], &[steps])
    }

    /// Warm-up, stable, decay (S. Hu et al., [arXiv:2404.06395](https://arxiv.org/abs/2404.06395)): a [warm-up](Self::warm_up)
    /// of `warm` steps, if any, then `lr`, and a straight line to 0 in the last `decay` of `total` steps.
    ///
    /// Step `total - decay` is the last with `lr`; step `total`, after the last, would have 0.
    ///
    /// # Errors
    /// `Usage` when warm-up and decay are longer than `total`.
    pub fn wsd(lr: f64, total: u64, warm: u64, decay: u64) -> Result<Self> {
        let Some(rest) = total.checked_sub(warm).filter(|rest| decay <= *rest) else {
            refuse!(
                "a warm-up of {warm} steps and a decay of {decay} are longer than {total} steps"
            );
        };
        let left = move |t| rest.saturating_sub(t) as f64 / decay.max(1) as f64;
        let then = Self::by(lr, move |t| left(t).min(1.0));
        if warm == 0 {
            Ok(then)
        } else {
            Self::warm_up(warm, then)
        }
    }

    /// One schedule after another: the next one begins at its milestone.
    ///
    /// # Errors
    /// `Usage` unless there is one milestone between each two schedules, in ascending order.
    pub fn sequential(parts: Vec<Schedule>, milestones: &[u64]) -> Result<Self> {
        let rising = milestones.windows(2).all(|w| w[0] < w[1]) && milestones.first() != Some(&0);
        let Some(first) = parts
            .first()
            .filter(|_| rising && milestones.len() + 1 == parts.len())
        else {
            refuse!(
                "{} schedules need a rising milestone between each two, got {milestones:?}",
                parts.len()
            );
        };
        let (base, lr, milestones) = (first.base, first.lr, milestones.to_vec());
        Ok(Self::new(Kind::Sequential { parts, milestones }, base, lr))
    }

    /// The rate now.
    pub fn lr(&self) -> f64 {
        self.lr
    }

    /// The momentum now, if the schedule changes it, as a one-cycle schedule does.
    pub fn momentum(&self) -> Option<f64> {
        match &self.kind {
            Kind::OneCycle(c) => c.at(self.steps).1,
            Kind::Sequential { parts, milestones } => {
                parts[milestones.partition_point(|&m| m <= self.steps)].momentum()
            }
            _ => None,
        }
    }

    /// Sets the rate, and the momentum where the schedule changes it, of the optimizer's next step.
    ///
    /// # Errors
    /// `Usage` when the schedule changes the momentum and the optimizer has none.
    pub fn apply(&self, optimizer: &mut dyn Optimizer) -> Result<()> {
        optimizer.set_lr(self.lr);
        match self.momentum() {
            Some(momentum) => optimizer.set_momentum(momentum),
            None => Ok(()),
        }
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Gives a [plateau](Self::reduce_on_plateau) schedule, if it is one or the current part is, the value of an evaluation, and
    /// whether the `greatest` is the best, as of an accuracy, or the least, as of a loss. It is not a step:
    /// [`advance`](Self::advance) is still called after each.
    pub fn observe(&mut self, value: f64, greatest: bool) {
        let lr = self.lr;
        match &mut self.kind {
            Kind::Plateau {
                settings,
                best,
                bad,
                cooling,
            } => {
                if settings.is_better(value, *best, greatest) {
                    (*best, *bad) = (Some(value), 0);
                } else {
                    *bad += 1;
                }
                if *cooling > 0 {
                    (*cooling, *bad) = (*cooling - 1, 0);
                }
                if *bad > settings.patience {
                    (*cooling, *bad) = (settings.cooldown, 0);
                    let lower = (lr * settings.factor).max(settings.min_lr);
                    if lr - lower > settings.eps {
                        self.lr = lower;
                    }
                }
            }
            Kind::Sequential { parts, milestones } => {
                let now = &mut parts[milestones.partition_point(|&m| m <= self.steps)];
                now.observe(value, greatest);
                self.lr = now.lr;
            }
            _ => {}
        }
    }

    /// Advances by one step. A cycle stays at its end.
    pub fn advance(&mut self) {
        self.steps += 1;
        let (t, lr) = (self.steps, self.lr);
        self.lr = match &mut self.kind {
            Kind::Step { every, factor } if *every > 0 && t % *every == 0 => lr * *factor,
            Kind::MultiStep { milestones, factor } => {
                match milestones.iter().filter(|&&m| m == t).count() {
                    0 => lr,
                    times => lr * factor.powi(times as i32),
                }
            }
            Kind::Exponential { factor } => lr * *factor,
            Kind::Cosine { period, floor } => {
                let (p, at) = (*period as f64, t as f64);
                // At the lowest rate the recursion would divide by zero.
                if t > *period && (t - 1 - *period) % (2 * *period) == 0 {
                    lr + (self.base - *floor) * (1.0 - (PI / p).cos()) / 2.0
                } else {
                    let before = 1.0 + (PI * (at - 1.0) / p).cos();
                    (1.0 + (PI * at / p).cos()) / before * (lr - *floor) + *floor
                }
            }
            Kind::Linear { start, end, total } if t <= *total => {
                let (n, rise) = (*total as f64, *end - *start);
                lr * (1.0 + rise / (n * *start + (t as f64 - 1.0) * rise))
            }
            Kind::OneCycle(c) => c.at(t.min(c.total)).0,
            Kind::WarmRestarts {
                at,
                period,
                factor,
                floor,
            } => {
                *at += 1;
                if *at == *period {
                    (*at, *period) = (0, period.saturating_mul(*factor));
                }
                cosine(self.base, *floor, *at, *period)
            }
            Kind::Polynomial { total, power } if t <= *total => {
                let left = |t: u64| 1.0 - t as f64 / *total as f64;
                lr * (left(t) / left(t - 1)).powf(*power)
            }
            Kind::Constant
            | Kind::Plateau { .. }
            | Kind::Step { .. }
            | Kind::Linear { .. }
            | Kind::Polynomial { .. } => lr,
            Kind::By(factor) => self.base * (factor.0)(t),
            Kind::Sequential { parts, milestones } => {
                let now = milestones.partition_point(|&m| m <= t);
                // A part that begins now stands at its first rate.
                if !milestones.contains(&t) {
                    parts[now].advance();
                }
                parts[now].lr
            }
        };
        if let Kind::OneCycle(c) = &self.kind {
            self.steps = self.steps.min(c.total);
        }
    }
}

/// Half a cosine from `high` to `low` in `period` steps.
fn cosine(high: f64, low: f64, at: u64, period: u64) -> f64 {
    low + (high - low) * (1.0 + (PI * at as f64 / period as f64).cos()) / 2.0
}
