//! When a checkpoint on the way is due, and what its lateness asks for.

/// Counts the steps between checkpoints.
#[derive(Debug)]
pub(super) struct Due {
    every: Option<u64>,
    /// The step after which one became due that was not begun yet.
    since: Option<u64>,
    /// That they are late was said.
    said: bool,
}

/// What to do about a checkpoint after a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum What {
    Nothing,
    Save,
    /// The one before is in the way: it must not yield to the training any longer.
    Hurry,
    /// It still is, a whole interval after that step.
    Warn {
        since: u64,
    },
}

impl Due {
    /// A checkpoint every `every` steps, or none.
    pub(super) fn new(every: Option<u64>) -> Due {
        Due {
            every,
            since: None,
            said: false,
        }
    }

    /// After step number `step`, when the one before `is_busy` being written or not.
    /// A run that has just begun `warns` of nothing.
    pub(super) fn after(&mut self, step: u64, is_busy: bool, warns: bool) -> What {
        let another = self.every.is_some_and(|n| step.is_multiple_of(n));
        let since = match self.since {
            Some(since) => since,
            None if another => step,
            None => return What::Nothing,
        };
        self.since = is_busy.then_some(since);
        match (is_busy, another) {
            (false, _) => What::Save,
            (true, true) if since == step => What::Hurry,
            (true, true) if warns && !std::mem::replace(&mut self.said, true) => {
                What::Warn { since }
            }
            (true, _) => What::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(due: &mut Due, steps: std::ops::RangeInclusive<u64>, is_busy: bool) -> Vec<What> {
        steps.map(|step| due.after(step, is_busy, true)).collect()
    }

    #[test]
    fn a_late_save_is_hurried_when_the_next_is_due_and_told_of_once() {
        use What::{Hurry, Nothing, Save, Warn};
        let mut due = Due::new(Some(2));
        assert_eq!(
            after(&mut due, 1..=4, false),
            [Nothing, Save, Nothing, Save]
        );
        let late = after(&mut due, 5..=10, true);
        let warning = Warn { since: 6 };
        assert_eq!(late, [Nothing, Hurry, Nothing, warning, Nothing, Nothing]);
        // As soon as can be, and from there in the old rhythm.
        assert_eq!(after(&mut due, 11..=13, false), [Save, Save, Nothing]);
        let again = after(&mut due, 14..=18, true);
        assert_eq!(again, [Hurry, Nothing, Nothing, Nothing, Nothing]);
        let mut trial = Due::new(Some(2));
        assert_eq!(trial.after(2, true, false), Hurry);
        assert_eq!(trial.after(4, true, false), Nothing);
        assert_eq!(trial.after(6, true, true), Warn { since: 2 });
        assert_eq!(
            after(&mut Due::new(None), 1..=3, false),
            [Nothing, Nothing, Nothing]
        );
    }
}
