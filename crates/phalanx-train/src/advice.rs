//! What a run should change when something else than computing takes its time.

use std::time::Duration;

/// Shares of the step beyond which somebody should know.
const EXPOSED_LIMIT: f64 = 0.2;
const DATA_LIMIT: f64 = 0.2;
/// Below this many steps the first, slow ones decide.
const MIN_STEPS: usize = 20;
/// Shorter runs are trials.
const MIN_TOTAL: Duration = Duration::from_secs(3);

/// Where the time of a run's steps went.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spent {
    /// Steps.
    pub steps: usize,
    /// All of it.
    pub total: Duration,
    /// Communication that backward did not hide.
    pub exposed: Duration,
    /// Waiting for batches.
    pub data: Duration,
}

impl Spent {
    /// A sentence for each share that is too large: its numbers and the way out.
    /// `narrower`: gradients could travel in fewer bytes.
    pub fn advice(&self, workers: usize, narrower: bool) -> Vec<String> {
        if self.steps < MIN_STEPS || self.total < MIN_TOTAL {
            return Vec::new();
        }
        let each = |time: Duration| time.as_secs_f64() * 1e3 / self.steps as f64;
        let share = |time: Duration| time.as_secs_f64() / self.total.as_secs_f64();
        let numbers = |time: Duration| {
            format!(
                "{:.0} % of the step ({:.1} of {:.1} ms)",
                100.0 * share(time),
                each(time),
                each(self.total)
            )
        };
        let mut advice = Vec::new();
        if share(self.exposed) > EXPOSED_LIMIT {
            let narrower = match narrower {
                true => ", fewer bytes (--gradient-type bf16)",
                false => "",
            };
            advice.push(format!(
                "communication that backward does not hide takes {}; larger batches (--batch-size){narrower} or fewer \
                 ranks than cores help",
                numbers(self.exposed)
            ));
        }
        if share(self.data) > DATA_LIMIT {
            advice.push(format!(
                "waiting for data takes {}; more --workers (now {workers}) help while cores are free",
                numbers(self.data)
            ));
        }
        advice
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_dominates_is_named_with_its_numbers() {
        let ms = Duration::from_millis;
        let spent = |steps, exposed: u64, data: u64| Spent {
            steps,
            total: ms(10_000),
            exposed: ms(10 * exposed),
            data: ms(10 * data),
        };
        let trial = Spent {
            total: ms(2000),
            ..spent(100, 150, 150)
        };
        assert!(trial.advice(1, true).is_empty(), "a trial");
        assert!(spent(100, 199, 199).advice(1, true).is_empty());
        assert!(
            spent(10, 900, 900).advice(1, true).is_empty(),
            "too short to tell"
        );
        assert!(Spent::default().advice(1, true).is_empty());
        let one = spent(100, 410, 0).advice(1, true);
        assert_eq!(one.len(), 1);
        assert!(
            one[0].contains("41 % of the step (41.0 of 100.0 ms)"),
            "{one:?}"
        );
        assert!(one[0].contains("--gradient-type bf16"));
        assert!(!spent(100, 410, 0).advice(1, false)[0].contains("--gradient-type"));
        let one = spent(50, 0, 300).advice(2, true);
        assert_eq!(one.len(), 1);
        assert!(
            one[0].contains("30 % of the step (60.0 of 200.0 ms)"),
            "{one:?}"
        );
        assert!(one[0].contains("--workers (now 2)"));
        assert_eq!(spent(100, 300, 300).advice(1, true).len(), 2);
    }
}
