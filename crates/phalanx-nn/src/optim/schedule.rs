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

use super::Optimizer;
use crate::{Error, Result};

/// A rate that changes from step to step. Its state is the number of steps
/// taken: to resume, call [`advance`](Schedule::advance) that many times.
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
    Sequential {
        parts: Vec<Schedule>,
        milestones: Vec<u64>,
    },
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
            return Err(Error::usage("a cosine schedule needs at least one step"));
        }
        Ok(Self::new(Kind::Cosine { period, floor }, lr, lr))
    }

    /// From `start` times `lr` to `end` times `lr` in `total` equal steps: a warm-up.
    ///
    /// # Errors
    /// `Usage` when there are no steps or `start` is not above 0.
    pub fn linear(lr: f64, start: f64, end: f64, total: u64) -> Result<Self> {
        if total == 0 || start.is_nan() || start <= 0.0 {
            return Err(Error::usage(format!(
                "a linear schedule needs steps and a first factor above 0, got {total} and {start}"
            )));
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
            return Err(Error::usage(format!(
                "one cycle of {} steps with {} of them rising leaves a phase without steps",
                cycle.total, cycle.rising
            )));
        }
        let (lr, _) = cycle.at(0);
        Ok(Self::new(Kind::OneCycle(cycle), lr, lr))
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
            return Err(Error::usage(format!(
                "{} schedules need a rising milestone between each two, got {milestones:?}",
                parts.len()
            )));
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

    /// Advances by one step. A cycle stays at its end.
    pub fn advance(&mut self) {
        self.steps += 1;
        let (t, lr) = (self.steps, self.lr);
        self.lr = match &mut self.kind {
            Kind::Constant => lr,
            Kind::Step { every, factor } if *every > 0 && t % *every == 0 => lr * *factor,
            Kind::Step { .. } => lr,
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
            Kind::Linear { .. } => lr,
            Kind::OneCycle(c) => c.at(t.min(c.total)).0,
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
