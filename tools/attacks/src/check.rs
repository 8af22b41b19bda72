//! What must hold after every attack.

use std::time::Duration;

use crate::job::Trace;
use crate::line::SOURCES;

/// How much larger than undisturbed the largest process may grow, in KiB:
/// places for 64 strangers with a thread and half a kilobyte each, and the
/// allocator's slack.
pub const STRANGERS_KIB: u64 = 48 << 10;
/// The same when a member of the store has gone mad: what the store buffers
/// for its members at most (128 MiB), and as much again for slack.
pub const MEMBERS_KIB: u64 = 256 << 10;

/// The words that a refusal is logged with.
const REFUSAL: &str = "refused a connection";

/// Compares a job under attack with the undisturbed one; returns what is wrong.
pub fn compare(calm: &Trace, attacked: &Trace, more_kib: u64) -> Vec<String> {
    let mut wrong = Vec::new();
    if calm.weights != attacked.weights {
        wrong.push(format!(
            "the weights differ: {} undisturbed, {} under attack",
            calm.weights, attacked.weights
        ));
    }
    if calm.results.len() != attacked.results.len() {
        wrong.push(format!(
            "{} results undisturbed, {} under attack",
            calm.results.len(),
            attacked.results.len()
        ));
    }
    let pairs = calm.results.iter().zip(&attacked.results);
    if let Some((a, b)) = pairs.clone().find(|(a, b)| a != b) {
        wrong.push(format!(
            "{} is {} undisturbed, {} is {} under attack",
            a.0,
            f64::from_bits(a.1),
            b.0,
            f64::from_bits(b.1)
        ));
    }
    if attacked.peak_kib > calm.peak_kib + more_kib {
        wrong.push(format!(
            "the largest process grew to {} MiB; undisturbed it has {} MiB, {} MiB more are allowed",
            attacked.peak_kib >> 10,
            calm.peak_kib >> 10,
            more_kib >> 10
        ));
    }
    if attacked.leaks > 0 {
        wrong.push(format!(
            "{} processes show the token in their arguments or environment",
            attacked.leaks
        ));
    }
    let (lines, most) = (refusals(&attacked.said), most_refusals(attacked.elapsed));
    if lines > most {
        wrong.push(format!(
            "{lines} lines about refused connections, at most {most} are due"
        ));
    }
    if attacked.said.contains("panicked") {
        wrong.push("a process of the job panicked".to_owned());
    }
    wrong
}

/// Lines that the log spends on strangers.
pub fn refusals(said: &str) -> usize {
    said.lines().filter(|line| line.contains(REFUSAL)).count()
}

/// One line a minute, source and listener: the store's, and while the group
/// forms the first rank's.
fn most_refusals(elapsed: Duration) -> usize {
    const LISTENERS: usize = 2;
    let minutes = 1 + elapsed.as_secs() as usize / 60;
    minutes * (usize::from(SOURCES) + 1) * LISTENERS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(loss: f64) -> Trace {
        Trace {
            results: vec![("loss at step 0".into(), loss.to_bits())],
            weights: "ab".into(),
            elapsed: Duration::from_secs(3),
            peak_kib: 1000,
            said: String::new(),
            leaks: 0,
        }
    }

    #[test]
    fn equal_jobs_pass_and_each_difference_is_named() {
        assert!(compare(&trace(0.1), &trace(0.1), 10).is_empty());
        let next = f64::from_bits(0.1_f64.to_bits() + 1);
        let wrong = compare(&trace(0.1), &trace(next), 10);
        assert!(wrong[0].contains("loss at step 0"), "{wrong:?}");
        let large = Trace {
            peak_kib: 1011,
            ..trace(0.1)
        };
        assert!(compare(&trace(0.1), &large, 10)[0].contains("grew"));
        let weights = Trace {
            weights: "cd".into(),
            ..trace(0.1)
        };
        assert!(compare(&trace(0.1), &weights, 10)[0].contains("weights"));
        let short = Trace {
            results: Vec::new(),
            ..trace(0.1)
        };
        assert!(compare(&trace(0.1), &short, 10)[0].contains("results"));
        let noisy = Trace {
            said: "WARN refused a connection: x\n".repeat(11),
            ..trace(0.1)
        };
        assert!(compare(&trace(0.1), &noisy, 10)[0].contains("11 lines"));
        let leaky = Trace {
            leaks: 1,
            ..trace(0.1)
        };
        assert!(compare(&trace(0.1), &leaky, 10)[0].contains("token"));
        let panicked = Trace {
            said: "thread 'x' panicked at".into(),
            ..trace(0.1)
        };
        assert!(compare(&trace(0.1), &panicked, 10)[0].contains("panicked"));
    }
}
